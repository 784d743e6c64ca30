package flight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// The lease goes to the waiters in order of arrival.
func TestWaitersAreServedInOrderOfArrival(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var queue []*caller
		for range 20 {
			queue = append(queue, w.start())
		}
		for i, c := range queue {
			c.holds()
			for _, behind := range queue[i+1:] {
				if behind.returned() {
					t.Fatal("somebody overtook")
				}
			}
			c.releases()
		}
	})
}

// However many want a key, one attempt at a time is under way for it.
func TestThousandCallersMakeOneAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		var all []*caller
		for range 1000 {
			all = append(all, w.launch(pace(never(10*time.Millisecond))))
		}
		for range 5 {
			synctest.Wait()
			w.attempt().held(0)
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		is(t, "attempts", w.asked(), 6)
		is(t, "attempts at once", w.most, 1)
		is(t, "waiters", w.g.Counts(Counts{}).Waiters, 1000)
		w.attempt().grant()
		w.acquire = (*fakeAttempt).grant
		for served := 0; served < len(all); served++ {
			synctest.Wait()
			i := slices.IndexFunc(all, func(c *caller) bool { return c.returned() && c.ends == 0 })
			if i < 0 {
				t.Fatalf("nobody holds, %d were served", served)
			}
			all[i].releases()
		}
		is(t, "attempts", w.asked(), 6)
		is(t, "acquired", w.g.Counts(Counts{}).Acquired, 1000)
		is(t, "handoffs", w.g.Counts(Counts{}).Handoffs, 999)
	})
}

// Distinct keys do not wait for one another.
func TestDistinctKeysAreApart(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var all []*caller
		for i := range 100 {
			c := w.start(key(fmt.Sprint(i)))
			c.holds()
			all = append(all, c)
		}
		is(t, "held", w.g.Counts(Counts{}).Held, 100)
		for _, c := range all {
			c.releases()
		}
	})
}

// A caller that wants many keys makes all attempts before it waits for one of them. It gets its errors from
// End.
func TestManyAttemptsAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		begin := func(ctx context.Context, key string, h *Ticket) *Begun {
			return w.g.Begin(ctx, key, h, time.Second, limited{}, true)
		}
		w.byHand()
		tickets, all := make([]Ticket, 10), make([]*Begun, 10)
		for i := range tickets {
			all[i] = begin(context.Background(), fmt.Sprint(i), &tickets[i])
			is(t, "attempts", w.asked(), i+1)
			if i%2 == 0 {
				w.attempt().grant()
			} else {
				w.attempt().held(0)
			}
		}
		busy := begin(context.Background(), "0", new(Ticket))
		is(t, "busy", errors.Is(w.g.End(context.Background(), busy), errBusy), true)
		for i, b := range all {
			err := w.g.End(context.Background(), b)
			is(t, "won", err == nil, i%2 == 0)
			if err == nil {
				is(t, "released", tickets[i].Release(), nil)
			} else {
				is(t, "taken", errors.Is(err, errTaken), true)
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		late := begin(ctx, "late", new(Ticket))
		cancel()
		is(t, "canceled", errors.Is(w.g.End(ctx, late), context.Canceled), true)
		w.attempt().fail(*failure(errTaken))
		is(t, "attempts", w.asked(), 11)
		is(t, "ended before", errors.Is(w.g.End(ctx, begin(ctx, "k", new(Ticket))), context.Canceled), true)
		is(t, "attempts", w.asked(), 11)
	})
}

// A caller whose ctx has ended before sends nothing, and gets ctx's error.
func TestEndedContextMakesNoAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		err := w.g.Acquire(ctx, "k", new(Ticket), time.Second, patient)
		is(t, "canceled", errors.Is(err, context.Canceled), true)
		is(t, "attempts", w.asked(), 0)
	})
}

// The error of a caller whose ctx ended matches both ctx's error and the outcome so far.
func TestContextErrorComesWithTheLastOutcome(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		w.attempt().peek = errDown
		second := w.start()
		second.leaves()
		second.failed(0, context.Canceled, errDown) // how the attempt stands
		w.attempt().held(0)
		third := w.start()
		third.leaves()
		third.failed(0, context.Canceled, errTaken) // how it ended
		front.leaves()
		front.failed(0, context.Canceled, errTaken)

		w.acquire = (*fakeAttempt).grant
		holder := w.start()
		fourth := w.start()
		fourth.leaves()
		fourth.failed(0, context.Canceled, errBusy)
		holder.releases()
	})
}

// The attempt is the flight's: its first caller may leave, the others get its result.
func TestFirstCallersCancellationIsNotTheOthersFailure(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		first, second := w.start(), w.start()
		first.leaves()
		first.failed(0, context.Canceled)
		second.waits()
		is(t, "cancelled", w.attempt().cancelled, false)
		w.attempt().grant()
		second.holds()
		is(t, "attempts", w.asked(), 1)
		second.releases()
	})
}

// When the last waiter has left, the attempt is canceled and nothing remains.
func TestAttemptIsCancelledWithItsLastWaiter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		var all []*caller
		for range 1000 {
			all = append(all, w.launch())
		}
		synctest.Wait()
		for _, c := range all {
			c.cancel()
		}
		synctest.Wait()
		for _, c := range all {
			c.failed(0, context.Canceled)
		}
		is(t, "cancelled", w.attempt().cancelled, true)
		is(t, "attempts", w.asked(), 1)
	})
}

// ... also if they leave before the attempt can be canceled.
func TestAttemptIsCancelledThoughItHasJustBegun(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.down(0)
		c := w.start(pace(never(10 * ms)))
		w.now(func(a *fakeAttempt) { // in the timer's goroutine
			c.cancel()
			synctest.Wait()
		})
		time.Sleep(20 * ms)
		c.failed(10*ms, context.Canceled, errTaken)
		is(t, "cancelled", w.attempt().cancelled, true)
	})
}

// An attempt that wins although it was canceled releases its lease.
func TestGrantAfterCancelIsReleased(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.cancel = (*fakeAttempt).grant
		c := w.start()
		c.leaves()
		c.failed(0, context.Canceled)
		is(t, "leases", len(w.leases), 1)
	})
}

// The same, when somebody came between: the lease is theirs.
func TestGrantAfterCancelGoesToWhoCame(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.cancel = nil
		w.start().leaves()
		next := w.start()
		w.attempt().grant()
		next.holds()
		is(t, "attempts", w.asked(), 1)
		next.releases()
	})
}

// Callers that arrive while the attempt is being canceled get an attempt of their own: the failure
// of the canceled one means nothing to them, whatever it says.
func TestNewcomerDuringCancellationGetsItsOwnAttempt(t *testing.T) {
	for name, end := range map[string]func(*fakeAttempt){
		"held": func(a *fakeAttempt) { a.held(0) }, "final": (*fakeAttempt).final,
	} {
		for _, p := range []Pace{patient, limited{time.Second, 1}, limited{}} {
			t.Run(fmt.Sprintf("%s/%v", name, p), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.byHand()
					w.cancel = nil // it takes its time
					w.start().leaves()
					next := w.start(pace(p))
					next.waits()
					end(w.attempts[0])
					synctest.Wait()
					is(t, "attempts", w.asked(), 2)
					w.attempt().grant()
					next.holds().Release()
				})
			})
		}
	}
}

// A caller that makes one attempt is not refused for an attempt that nobody wants any more.
func TestTryDuringCancellationGetsItsOwnAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		w.cancel = nil
		w.start().leaves()
		try := w.start(pace(limited{}))
		w.attempts[0].held(0)
		synctest.Wait()
		w.attempt().grant()
		try.holds().Release()
	})
}

// A front waiter that leaves passes the lease that it would get on to the next.
func TestCancelledFrontWaiterPassesTheLeaseOn(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder, front, next := w.start(), w.start(), w.start()
		front.leaves()
		holder.releases()
		next.holds().Release()
		is(t, "attempts", w.asked(), 1)
	})
}

// A waiter whose ctx ends in the instant of the grant, in either order, either has the
// lock or has passed it on.
func TestContextEndsInTheInstantOfGrant(t *testing.T) {
	for i := range 200 {
		inBubble(t, func(t *testing.T, w *world) {
			holder, front, next := w.start(), w.start(), w.start()
			if i%2 == 0 {
				front.cancel()
				holder.releases()
			} else {
				w.g.find("k").mu.Lock() // both happen while front cannot look
				front.cancel()
				w.g.find("k").mu.Unlock()
				holder.releases()
			}
			if synctest.Wait(); front.err == nil {
				front.holds().Release()
			}
			next.holds().Release()
			is(t, "attempts", w.asked(), 1)
		})
	}
}

// granted is what leave meets when the ctx ended but the grant was first.
func TestLeaveAfterGrantPassesOn(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var h Ticket
		f, err := w.enter("k", &h, time.Second) // granted from inside
		if err != nil || h.state != holding {
			t.Fatal("not granted", err)
		}
		next := w.start(ttl(time.Second))
		err = f.leave(&h, context.Canceled)
		is(t, "canceled", errors.Is(err, context.Canceled), true)
		is(t, "state", h.state, released)
		if fence := next.holds().Fence(); fence <= h.fence {
			t.Errorf("fence %d after %d", fence, h.fence)
		}
		is(t, "acquired", w.g.Counts(Counts{}).Acquired, 1) // h's caller was given no lock
		is(t, "handoffs", w.g.Counts(Counts{}).Handoffs, 1)
		next.releases()
	})
}

// ... or the refusal, which then is the outcome.
func TestLeaveAfterRefusalReportsTheRefusal(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		var h Ticket
		f, err := w.enter("k", &h, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		w.attempt().final()
		if err := f.leave(&h, context.Canceled); err != nil {
			t.Error(err)
		}
		is(t, "refusal", h.waiter.refusal, errFinal)
		is(t, "channel is empty", len(h.waiter.ready), 0)
	})
}

// ... or a lease that came and was lost meanwhile: then there is nothing to pass on.
func TestLeaveAfterLossReleasesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var h Ticket
		f, err := w.enter("k", &h, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		next := w.start()
		err = f.leave(&h, context.Canceled)
		is(t, "canceled", errors.Is(err, context.Canceled), true)
		next.holds().Release()
	})
}

// An outcome that no retry can fix fails all callers at once.
func TestFinalOutcomeFailsEveryone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		var all []*caller
		for range 50 {
			all = append(all, w.start())
		}
		w.attempt().final()
		for _, c := range all {
			c.failed(0, errFinal)
		}
		is(t, "attempts", w.asked(), 1)
	})
}

// Any other failure is the front waiter's to retry; the others wait on.
func TestOtherOutcomesAreRetried(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		p := pace(never(10 * time.Millisecond))
		front, next := w.start(p), w.start(p)
		for i, end := range []func(){
			func() { w.attempt().held(0) }, func() { w.attempt().unavailable() }, func() { w.attempt().held(-1) },
		} {
			end()
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			is(t, "attempts", w.asked(), i+2)
		}
		w.attempt().grant()
		front.holds()
		next.waits()
		front.releases()
		next.holds().Release()
	})
}

// A queue of MaxWaiters takes nobody more; the holder is not part of it.
func TestQueueIsLimited(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.start()
		a, b := w.start(), w.start()
		w.start().failed(0, errCrowded)
		w.start(pace(limited{})).failed(0, errBusy)
		b.leaves()
		c := w.start()
		holder.releases()
		a.holds().Release()
		c.holds().Release()
	}, func(c *Config) { c.MaxWaiters = 2 })
}

// A caller that makes one attempt never queues: when anybody is there it fails at once, and sends nothing.
func TestTryNeverOvertakes(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		try := func() *caller { return w.start(pace(limited{})) }
		w.byHand()
		front := w.start()
		try().failed(0, errBusy) // an attempt is under way
		w.attempt().held(0)
		try().failed(0, errBusy) // the flight pauses
		is(t, "attempts", w.asked(), 1)
		front.leaves()

		w.acquire = (*fakeAttempt).grant
		holder := try()
		holder.holds()
		try().failed(0, errBusy)
		waiter := w.start()
		try().failed(0, errBusy)
		is(t, "attempts", w.asked(), 2)
		holder.releases()
		waiter.holds().Release()

		w.acquire = func(a *fakeAttempt) { a.held(time.Second) }
		try().failed(0, errTaken)
		is(t, "attempts", w.asked(), 3)
	})
}

// With handoff off each release goes to the nodes, and so does each acquire.
func TestHandoffCanBeOff(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		all := []*caller{w.start(), w.start(), w.start()}
		for _, c := range all {
			c.holds()
			c.releases()
		}
		is(t, "attempts", w.asked(), 3)
		is(t, "handoffs", w.g.Counts(Counts{}).Handoffs, 0)
		is(t, "log", fmt.Sprint(w.log), "[acquire release acquire release acquire release]")
		for _, a := range w.attempts {
			is(t, "tokens", a.tokens, 1)
		}
	}, func(c *Config) { c.Slice = -1 })
}

// Between two leases of a key nothing may be acquired before the first was released: it would meet
// this process's own entry. Here a caller arrives in between.
func TestReleaseIsSentBeforeTheNextAcquire(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.start()
		var next *caller
		holder.h.OnEnd(func(error) { next = w.start(pace(limited{})) }) // before the release is sent
		holder.releases()
		is(t, "log", fmt.Sprint(w.log), "[acquire release acquire]")
		next.holds().Release()
	})
}

// ... or comes and goes, or leaves from the front of others that came.
func TestNothingBeginsWhileTheReleaseIsNotSent(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.start()
		var last *caller
		holder.h.OnEnd(func(error) {
			w.start().leaves()
			front := w.start()
			last = w.start(pace(limited{10 * ms, 100}))
			front.leaves()
			time.Sleep(100 * ms)
			synctest.Wait()
		})
		holder.releases()
		is(t, "log", fmt.Sprint(w.log), "[acquire release acquire]")
		last.holds().Release()
	})
}

// Counters only grow, also when flights die; gauges show the present.
func TestCountsAddUp(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var before Counts
		for range 3 {
			holder := w.start(ttl(time.Second))
			next, last := w.start(ttl(time.Second)), w.start(ttl(time.Second))
			c := w.g.Counts(Counts{})
			is(t, "held", c.Held, 1)
			is(t, "waiters", c.Waiters, 2)
			last.leaves()
			holder.releases()
			next.holds()
			time.Sleep(2 * time.Second) // lost
			synctest.Wait()
			c = w.g.Counts(Counts{})
			is(t, "acquired", c.Acquired, before.Acquired+2)
			is(t, "handoffs", c.Handoffs, before.Handoffs+1)
			is(t, "attempts", c.Attempts, before.Attempts+1)
			is(t, "lost", c.Lost, before.Lost+1)
			is(t, "held", c.Held+c.Waiters, 0)
			before = c
		}
	})
}

// The flight that many join is found without its shard's mutex, until it has died; then it is not
// remembered either.
func TestTheHotFlightIsForgottenWhenItDies(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.start()
		f := first.h.f
		is(t, "nobody queues", f.shard().lastHit.Load() == nil, true)
		second := w.start()
		is(t, "one queues", f.shard().lastHit.Load() == f, true)
		first.releases()
		second.releases()
		is(t, "dead", f.phase, dead)
		is(t, "remembered", f.shard().lastHit.Load() == nil, true)
		third := w.start()
		is(t, "a new one", third.h.f != f, true)
		third.releases()
	})
}
