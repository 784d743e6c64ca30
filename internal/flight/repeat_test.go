package flight

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// Attempts that leave open whether somebody holds the key.

var (
	split    = quorum.Failure{Split: true}
	foremost = quorum.Failure{Split: true, Foremost: true}
	kept     = quorum.Failure{Retained: true}
)

// A strategy does not give up because votes were split: the attempt is repeated after half a round trip to
// a whole one, also in a flight of its own, and after the retries that the strategy wanted.
func TestSplitVotesAreNoReasonToGiveUp(t *testing.T) {
	for name, change := range map[string][]func(*wish){
		"one attempt": {pace(limited{})}, "unqueued": {pace(limited{}), mode(Unqueued)},
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
			b := w.g.Begin(t.Context(), "k", new(Ticket), time.Second, limited{})
			w.attempt().undecided(f)
			is(t, "taken", errors.Is(w.g.End(t.Context(), b), errTaken), true)
			is(t, "attempts", w.asked(), 1)
		})
	}
}
