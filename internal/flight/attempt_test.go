package flight

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// Outcomes of attempts that leave open whether somebody holds the key.
var (
	split    = quorum.Failure{Split: true}
	foremost = quorum.Failure{Split: true, Foremost: true}
	kept     = quorum.Failure{Retained: true}
)

// A strategy does not give up because votes were split: the attempt is repeated after half a round trip to
// a whole one, also after the retries that the strategy wanted.
func TestSplitVotesAreNoReasonToGiveUp(t *testing.T) {
	for name, change := range map[string][]func(*wish){
		"one attempt":       {pace(limited{})},
		"the last of three": {pace(limited{ms, 2})},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				inBubble(t, func(t *testing.T, w *world) {
					w.byHand()
					c, n := w.start(change...), 1
					for ; n < 3 && name == "the last of three"; n++ {
						w.attempt().undecided(split)
						pass(ms)
					}
					for range maxRepeats {
						w.attempt().undecided(split)
						pass(trip/2 - 1)
						is(t, "attempts", w.asked(), n)
						c.waits()
						pass(trip/2 + 1)
						n++
						is(t, "attempts", w.asked(), n)
					}
					w.attempt().grant()
					c.holds()
					c.releases()
				})
			}
		})
	}
}

// A strategy does not give up because the connection has ended on which the attempt was: the next one is made
// at once, one more in all, whatever becomes of that.
func TestALostConnectionIsNoReasonToGiveUp(t *testing.T) {
	lost := quorum.Failure{Lost: true, Err: errDown, Reason: quorum.Unreachable}
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(pace(limited{}))
		w.attempt().fail(lost)
		synctest.Wait()
		is(t, "attempts", w.asked(), 2)
		w.attempt().grant()
		c.holds()
		c.releases()
		c = w.start(pace(limited{}))
		w.attempt().fail(lost)
		synctest.Wait()
		w.attempt().fail(lost)
		c.failed(0, errDown)
		is(t, "attempts", w.asked(), 4)
	})
}

// The attempt that follows a lost connection counts for itself: split votes before it do not prevent it, and
// as many may be split after it as ever.
func TestALostConnectionBetweenSplitVotes(t *testing.T) {
	lost := quorum.Failure{Lost: true, Err: errDown, Reason: quorum.Unreachable}
	for before := range maxRepeats + 1 {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			c := w.start(pace(limited{}))
			for i := range maxRepeats + 1 {
				if i == before {
					w.attempt().fail(lost)
					synctest.Wait()
					is(t, "attempts", w.asked(), i+2)
				}
				w.attempt().undecided(foremost)
				synctest.Wait()
			}
			c.failed(0, errTaken)
			is(t, "attempts", w.asked(), maxRepeats+2)
		})
	}
}

// The foremost of those that split the votes makes its next attempt at once.
func TestTheForemostTriesAgainAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(pace(limited{}))
		for i := range maxRepeats {
			w.attempt().undecided(foremost)
			synctest.Wait()
			is(t, "attempts", w.asked(), i+2)
		}
		w.attempt().undecided(foremost)
		c.failed(0, errTaken)
	})
}

// An attempt is repeated until it is known who holds the key, or that nobody can be reached.
func TestRepeatedUntilTheVotesAreNotSplit(t *testing.T) {
	for name, x := range map[string]struct {
		fails func(*fakeAttempt)
		want  error
	}{
		"held": {func(a *fakeAttempt) { a.taken(0) }, errTaken}, "away": {(*fakeAttempt).unavailable, errDown},
		"final": {(*fakeAttempt).final, errFinal},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.byHand()
				c := w.start(pace(limited{}))
				w.attempt().undecided(split)
				pass(trip)
				x.fails(w.attempt())
				c.failed(trip, x.want)
				is(t, "attempts", w.asked(), 2)
			})
		})
	}
}

// A lease that may only be retained was recalled: two more attempts follow.
func TestARecalledLeaseIsTriedTwiceMore(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(pace(limited{}))
		for i, pause := range []time.Duration{trip/4 + recallPause, trip/2 + 4*recallPause} {
			w.attempt().undecided(kept)
			pass(pause - 1)
			is(t, "attempts", w.asked(), i+1)
			pass(1)
			is(t, "attempts", w.asked(), i+2)
		}
		w.attempt().undecided(kept)
		c.failed(trip*3/4+5*recallPause, errTaken)
	})
}

// While the attempt is to be repeated, the flight has a caller as ever: others that make one attempt are
// refused, those that wait are served next, and one of them continues if it leaves.
func TestWhileAnAttemptIsToBeRepeated(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			c := w.start(pace(limited{}))
			w.attempt().undecided(split)
			w.start(pace(limited{})).failed(0, errBusy)
			next := w.start()
			is(t, "attempts", w.asked(), 1)
			if leaves {
				c.leaves()
				c.failed(0, context.Canceled, errTaken)
			}
			pass(2 * maxPoll)
			is(t, "attempts", w.asked(), 2)
			w.attempt().grant()
			if !leaves {
				c.holds()
				c.releases()
			}
			next.holds()
			next.releases()
		})
	}
}

// A caller that has begun many attempts repeats none: it would wait for one after the other.
func TestOneOfManyAttemptsIsNotRepeated(t *testing.T) {
	for _, f := range []quorum.Failure{split, foremost, kept} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			b := w.g.Begin(t.Context(), "k", new(Ticket), time.Second, limited{}, true)
			w.attempt().undecided(f)
			is(t, "taken", errors.Is(w.g.End(t.Context(), b), errTaken), true)
			is(t, "attempts", w.asked(), 1)
		})
	}
}

// hasty is patient, and gives up when too few nodes can be reached.
type hasty struct{}

func (hasty) Next(int) (time.Duration, bool) { return time.Hour, true }
func (hasty) Traits() Traits                 { return Endless | FailFast | Quick }

func (a *fakeAttempt) away() { a.fail(quorum.Failure{Err: errDown, Away: true}) }

// When too few nodes can be reached, all callers that fail fast get that error, wherever they are
// in the queue, and nobody else.
func TestAwayEndsAllWhoFailFast(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front, a, looks, middle, b := w.start(), w.start(pace(hasty{})), w.looks(), w.start(),
			w.start(pace(hasty{}))
		time.Sleep(ms)
		w.attempt().away()
		for _, c := range []*caller{a, &looks.caller, b} {
			c.failed(ms, errDown)
		}
		front.waits()
		middle.waits()
		front.leaves()
		middle.leaves()
	})
}

// One attempt without an answer is not a reason to fail for anybody.
func TestOneAnswerMissingEndsNobodysWait(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		all := []*caller{w.start(pace(hasty{})), &w.looks().caller, w.start()}
		w.attempt().unavailable()
		for _, c := range all {
			c.waits()
		}
		for _, c := range all {
			c.leaves()
		}
	})
}

// A caller that joins while a flight waits for nodes that were down finds out at once whether they
// still are.
func TestWhoComesFindsOutWhetherTheyAreAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = (*fakeAttempt).away
		front := w.start()
		w.start(pace(hasty{})).failed(0, errDown)
		w.looks().failed(0, errDown)
		is(t, "attempts", w.asked(), 3)
		w.now((*fakeAttempt).grant)
		c := w.start(pace(hasty{}))
		front.holds()
		front.releases()
		c.holds().Release()
	})
}

// A caller that waits behind a holder of this process gets the error when its refresh finds the
// nodes down. It is that of an acquire, for the caller has refreshed nothing.
func TestARefreshThatFindsTheNodesAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.rich().start()
		a, b, looks := w.start(), w.start(pace(hasty{})), w.looks()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Op: "refresh", Err: errDown, Away: true}) }
		holder.h.Refresh(time.Second, func(error) {})
		b.failed(0, errDown)
		is(t, "the error", b.err.Error(), "acquire: "+errDown.Error())
		looks.failed(0, errDown)
		a.waits()
		holder.holds()
		holder.releases()
		a.holds().Release()
	})
}

// Recheck makes flights find out for callers that want to know, whatever they are doing.
func TestRecheck(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		patient := w.start()
		w.attempt().taken(time.Hour)
		w.g.Recheck() // nobody wants to know
		is(t, "attempts", w.asked(), 1)

		a := w.start(pace(hasty{})) // the flight pauses
		w.g.Recheck()
		synctest.Wait()
		is(t, "attempts", w.asked(), 2)
		w.g.Recheck() // while an attempt is under way that may have begun before
		w.attempt().unavailable()
		synctest.Wait()
		is(t, "attempts", w.asked(), 3)
		w.g.Recheck() // the attempt finds out itself: none follows
		w.attempt().away()
		a.failed(0, errDown)
		is(t, "attempts", w.asked(), 3)
		patient.waits()
		patient.leaves()

		holder := w.rich().start()
		b := w.start(pace(hasty{}))
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown, Away: true}) }
		w.g.Recheck()
		b.failed(0, errDown)
		holder.releases()
	})
}

// While too few nodes have a vote, attempts become rarer, unless the strategy gives up some day; after a
// short outage the next one comes as soon as before.
func TestAttemptsWhileNodesAreAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = (*fakeAttempt).away
		c := w.start(pace(never(10 * ms)))
		time.Sleep(40 * ms) // the bubble's time, as all that follow
		if n := w.asked(); n < 4 {
			t.Errorf("%d attempts in the first 40 ms", n)
		}
		time.Sleep(time.Minute)
		if n := w.asked(); n > 200 {
			t.Errorf("%d attempts in a minute", n)
		}
		w.now((*fakeAttempt).grant)
		time.Sleep(maxAwayPause)
		c.holds()
		c.releases()

		w.now((*fakeAttempt).away)
		before := w.asked()
		c = w.start(pace(limited{10 * ms, 100}))
		time.Sleep(time.Second)
		c.failed(time.Second, errDown)
		is(t, "attempts of a strategy that ends", w.asked()-before, 101)
	})
}
