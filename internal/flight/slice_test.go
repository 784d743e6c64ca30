package flight

import (
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

const slice = 20 * time.Millisecond

func sliced(c *Config) { c.Slice = slice }

// While nobody else wants the key, a lease is handed over without end, and the nodes are asked once
// per slice, in its second half, whether that is still so.
func TestHandoffIsFreeWhileNobodyWants(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		callers := make([]*caller, 60)
		for i := range callers {
			callers[i] = w.start()
		}
		var looks []time.Duration
		began := time.Now()
		w.refresh = func(r *fakeRefresh) {
			if r.look {
				looks = append(looks, time.Since(began))
			}
			r.confirm()
		}
		for _, c := range callers {
			c.holds()
			pass(2 * time.Millisecond)
			c.releases()
		}
		// Each slice begins with the release that finds the previous one to be over.
		is(t, "looks", fmt.Sprint(looks), "[10ms 30ms 50ms 70ms 90ms 110ms]")
		is(t, "releases", w.leases[0].releases, 1)
		is(t, "listening", len(w.watches), 0)
	}, sliced, func(c *Config) {
		c.Nodes.(*fakeNodes).validity = func(ttl time.Duration) time.Duration { return ttl }
	})
}

// So it is when there is only one waiter at a time, who leaves the queue empty.
func TestTwoLookOncePerSlice(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a := w.rich().start()
		for range 60 {
			b := w.start()
			pass(time.Millisecond)
			a.releases()
			b.holds()
			a = b
		}
		a.releases()
		w.wantHistory("acquire", "look", "look", "look", "release")
	}, sliced)
}

// looked makes a's release, late in the slice, hand over to b and find a rival.
func (w *world) looked() (a, b *caller) {
	a, b = w.rich().start(), w.start()
	pass(slice / 2)
	a.releases()
	b.holds()
	is(w.t, "look", w.renewal(1).look, true)
	return a, b
}

// The release that ends the slice makes the next turn that of the rival that the check has found,
// and the flight waits for its next turn.
func TestSliceEndsWithTheTurnOfTheRival(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		a, b := w.looked()
		c := w.start()
		w.byHand()
		w.wantHistory("acquire", "look", "watch owner-1")
		pass(slice/2 - 1)
		b.releases() // a moment before the end: it is handed over
		c.holds()
		d := w.start()
		pass(1)
		c.releases()
		d.waits()
		w.wantHistory("release to x")
		is(t, "handoffs", w.g.Counts(Counts{}).Handoffs, 2)
		w.news(quorum.Subscribed)
		w.wantHistory("acquire as owner-1")
		w.attempt().taken(time.Hour)
		w.news(quorum.OurTurn)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		d.holds()
		d.releases()
		w.wantHistory("release", "stop owner-1")
		_ = a
	}, sliced)
}

// A rival that was seen in one slice is not yielded to in another, after the lease was lost or
// released and won again.
func TestRivalOfAnEarlierLeaseIsForgotten(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		_, b := w.looked()
		c, d := w.start(), w.start()
		w.refresh = nil
		b.h.Refresh(time.Second, func(error) {})
		w.renewal(2).fail(quorum.Failure{Err: errTaken, Reason: quorum.NotHeld})
		c.holds() // by a new lease
		w.refresh = (*fakeRefresh).confirm
		w.rivals("")
		pass(slice)
		w.history()
		c.releases()
		d.holds()
		w.wantHistory("look")
		d.releases()
	}, sliced)
}

// When one Ticket lasts longer than the slice, there was no occasion for a check: the release makes
// one, while the key waits.
func TestReleaseOfALongHoldLooksFirst(t *testing.T) {
	for rival, want := range map[string]string{"": "look", "x": "look,watch owner-1,release to x"} {
		inBubble(t, func(t *testing.T, w *world) {
			w.refresh = nil
			w.rivals(rival)
			a, b := w.rich().start(), w.start()
			pass(time.Second)
			w.byHand()
			w.history()
			a.releases()
			b.waits()
			w.renewal(1).confirm()
			synctest.Wait()
			got := w.history()
			is(t, "history", fmt.Sprint(got), fmt.Sprint(splitList(want)))
			if rival == "" {
				b.holds()
				c := w.start()
				b.releases() // the slice is a new one
				c.holds()
				c.releases()
				return
			}
			b.waits()
			b.leaves()
		}, sliced)
	}
}

func splitList(s string) (list []string) {
	for i, from := 0, 0; i <= len(s); i++ {
		if i == len(s) || s[i] == ',' {
			list, from = append(list, s[from:i]), i+1
		}
	}
	return list
}

// The result of a check is old after a slice: then the release checks again, and not more often
// than that.
func TestOldLookIsMadeAgain(t *testing.T) {
	for _, seen := range []time.Duration{slice / 2, time.Second} {
		for _, fails := range []bool{false, true} {
			inBubble(t, func(t *testing.T, w *world) {
				if fails {
					w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
				}
				a, b, c, d := w.rich().start(), w.start(), w.start(), w.start()
				pass(seen)
				a.h.Refresh(time.Second, func(error) {})
				pass(2 * time.Second)
				w.byHand()
				w.history()
				a.releases()
				b.holds()
				w.wantHistory("look")
				b.releases()
				c.holds()
				w.wantHistory()
				w.refresh = (*fakeRefresh).confirm
				w.rivals("x")
				pass(time.Second)
				c.releases()
				d.waits()
				w.wantHistory("look", "watch owner-1", "release to x")
				d.leaves()
			}, sliced)
		}
	}
}

// A check that fails has no consequence: the lease is kept, and the next slice checks again.
func TestFailedLookDoesNotCostTheLease(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		_, b := w.looked()
		c, d, e := w.start(), w.start(), w.start()
		pass(slice / 2)
		b.releases()
		c.holds() // nobody is known to wait
		w.refresh = (*fakeRefresh).confirm
		pass(slice / 2)
		c.releases()
		d.holds()
		is(t, "look", w.renewal(2).look, true)
		pass(slice / 2)
		w.byHand()
		d.releases()
		e.waits()
		is(t, "releases", w.leases[0].releases, 1)
		e.leaves()
	}, sliced)
}

// Nor does it lose the rival that an earlier one has seen.
func TestFailedLookForgetsNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		_, b := w.looked()
		c := w.start()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		for range 2 {
			pass(slice / 2)
			b.h.Refresh(time.Second, func(error) {})
		}
		w.byHand()
		w.history()
		b.releases()
		w.wantHistory("release to x")
		c.leaves()
	}, sliced)
}

// Nor does a refresh that did not check.
func TestRefreshWithoutALookForgetsNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		a := w.rich().start()
		b := w.start()
		pass(slice / 2)
		a.h.Refresh(time.Second, func(error) {})
		b.leaves()
		a.h.Refresh(time.Second, func(error) {})
		w.wantHistory("acquire", "look", "watch owner-1", "refresh")
		c := w.start()
		pass(slice / 2)
		w.byHand()
		a.releases()
		w.wantHistory("release to x")
		c.leaves()
	}, sliced)
}

// A rival that an earlier check of the slice has seen may have left: the last check counts.
func TestLastLookCounts(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		_, b := w.looked()
		c := w.start()
		w.rivals("")
		b.h.Refresh(time.Second, func(error) {})
		pass(slice / 2)
		b.releases()
		c.holds()
		c.releases()
	}, sliced)
}

// Nor does the look that a waiter is kept waiting for, if the lease is good.
func TestFailedLookOfALongHoldHandsOver(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		w.rich()
		a, b := w.start(), w.start()
		pass(time.Second)
		a.releases()
		b.holds()
		b.releases()
	}, sliced)
}

// While the answer to a check is on its way, handoffs continue, past the end of the slice too; the
// first release after it yields.
func TestLookUnderWayStopsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = nil
		w.rivals("x")
		_, b := w.looked()
		callers := []*caller{b}
		for range 4 {
			callers = append(callers, w.start())
		}
		for i, c := range callers[:4] {
			c.holds()
			pass(slice / 2)
			if i == 3 {
				w.renewal(1).confirm()
				w.byHand()
			}
			c.releases()
		}
		callers[4].waits()
		is(t, "refreshes", w.renewals(), 1)
		callers[4].leaves()
	}, sliced)
}

// A holder's own refresh checks too, late in the slice, if anybody waits here.
func TestRefreshOfAHolderLooks(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a := w.start()
		for i, step := range []struct {
			after time.Duration
			look  bool
		}{{slice, false}, {0, true}} {
			pass(step.after)
			if i == 1 {
				b := w.start()
				defer b.releases()
			}
			a.h.Refresh(time.Second, func(error) {})
			is(t, "look", w.renewal(i+1).look, step.look)
		}
		a.releases()
	}, sliced)
}

// Without handoff there are no slices: each Ticket is a lease of its own, and nobody checks.
func TestNoHandoffNoLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rivals("x")
		a, b := w.start(), w.start()
		pass(time.Second)
		a.h.Refresh(time.Second, func(error) {})
		a.releases()
		b.holds()
		b.releases()
		w.wantHistory("acquire", "refresh", "release", "acquire", "release")
	}, func(c *Config) { c.Slice = -1 })
}

// Waiters that leave while the key goes to the rival end the flight, and its registration on the
// nodes.
func TestYieldToNobodyLeft(t *testing.T) {
	for _, step := range []string{"before", "during", "after"} {
		inBubble(t, func(t *testing.T, w *world) {
			w.rivals("x")
			_, b := w.looked()
			c := w.start()
			w.byHand()
			pass(slice / 2)
			switch w.history(); step {
			case "before":
				c.leaves()
				b.releases()
				w.wantHistory("release", "stop owner-1")
			case "during":
				w.release = func(l *fakeLease) { c.leaves(); l.released(nil) }
				b.releases()
				w.wantHistory("release to x", "stop owner-1", "leave owner-1")
			case "after":
				b.releases()
				c.leaves()
				w.wantHistory("release to x", "stop owner-1", "leave owner-1")
			}
		}, sliced)
	}
}

// After it has yielded, a flight waits: for an event, or for as long as a turn is kept.
func TestAfterAYieldTheFlightWaits(t *testing.T) {
	yielded := func(w *world, p Pace) *caller {
		w.rivals("x")
		_, b := w.looked()
		c := w.start(pace(p))
		w.byHand()
		w.news(quorum.Subscribed)
		pass(slice / 2)
		b.releases()
		w.history()
		return c
	}
	inBubble(t, func(t *testing.T, w *world) {
		c := yielded(w, never(time.Millisecond))
		pass(turn - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	}, sliced)
	inBubble(t, func(t *testing.T, w *world) {
		c := yielded(w, patient)
		w.news(quorum.OtherTurn) // the rival's turn, notified late
		w.wantHistory()
		pass(turn + minDelay - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	}, sliced, func(c *Config) { c.Turn = turn })
	inBubble(t, func(t *testing.T, w *world) { // by its own strategy it would have given up
		c := yielded(w, limited{10 * time.Millisecond, 5})
		pass(50*time.Millisecond - slice/2)
		w.attempt().taken(0)
		c.failed(50*time.Millisecond, errTaken)
	}, sliced)
	inBubble(t, func(t *testing.T, w *world) { // earlier notices are outdated
		w.byHand()
		b := w.listens()
		c := w.start()
		w.news(quorum.OurTurn)
		w.news(quorum.OurTurn)
		w.rivals("x")
		w.attempt().grantBlock(10)
		b.holds()
		w.news(quorum.OtherTurn)
		w.news(quorum.OurTurn)
		pass(time.Second)
		w.history()
		b.releases()
		w.wantHistory("look", "release to x")
		pass(turn - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	}, sliced)
	inBubble(t, func(t *testing.T, w *world) { // the rival is done before the release has returned
		w.rivals("x")
		_, b := w.looked()
		c := w.start()
		w.byHand()
		pass(slice / 2)
		w.release = func(l *fakeLease) { w.news(quorum.OurTurn); l.released(nil) }
		w.history()
		b.releases()
		w.wantHistory("release to x", "acquire as owner-1")
		w.attempt().grant()
		c.holds()
		w.release = func(l *fakeLease) { l.released(nil) }
		c.releases()
	}, sliced)
}

// A slice of any length ends in time, or never.
func TestSlicesOfAnyLength(t *testing.T) {
	for _, slice := range []time.Duration{1, math.MaxInt64 / 2, math.MaxInt64 - 1, math.MaxInt64} {
		g := NewGroup(Config{Slice: slice, Errors: fakeErrors{}})
		f := &flight{g: g, contention: &contention{rival: "r"}}
		now := time.Now()
		f.sliceLocked(now)
		later := now.Add(time.Hour)
		if got, want := f.decideLocked(later), handOff; slice > 1 && got != want {
			t.Errorf("after an hour of a slice of %v: %d", slice, got)
		} else if slice == 1 && got != yield {
			t.Errorf("after an hour of a slice of %v: %d", slice, got)
		}
		if f.sliceEnds <= 0 {
			t.Errorf("a slice of %v ends at %d", slice, f.sliceEnds)
		}
	}
}
