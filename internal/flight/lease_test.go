package flight

import (
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A released lease goes straight to the next waiter; the quorum is not involved.
func TestHandoffAsksNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rich()
		var queue []*caller
		for range 10 {
			queue = append(queue, w.start())
		}
		owner := queue[0].holds().Owner()
		for _, c := range queue {
			is(t, "owner", c.holds().Owner(), owner)
			is(t, "log", len(w.log), 1)
			c.releases()
		}
		is(t, "attempts", w.asked(), 1)
	})
}

// Every Ticket has a token larger than all before it: across handoffs, renewals, tokens that
// ran out, loss, and new leases.
func TestFencesOnlyRise(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		last := int64(0)
		check := func(c *caller) *caller {
			t.Helper()
			if f := c.holds().Fence(); f <= last {
				t.Fatalf("fence %d after %d", f, last)
			} else {
				last = f
			}
			return c
		}
		c := check(w.start())
		for i := range 500 {
			switch i % 7 {
			case 3: // the queue runs empty, the lease goes back
				c.releases()
				c = check(w.start())
				continue
			case 5:
				w.refresh(&fakeRefresh{l: w.leases[len(w.leases)-1], decided: true}) // nothing
				c.h.Refresh(time.Second, func(error) {})
			case 6:
				next := w.start()
				time.Sleep(10 * time.Second) // c hangs
				c = check(next)
				continue
			}
			next := w.start()
			time.Sleep(time.Duration(i%4) * 2 * time.Second)
			c.releases()
			c = check(next)
		}
		c.releases()
	})
}

// A Ticket that was handed over lasts for its own ttl, if the lease does.
func TestUntilIsTheEarlierOfLeaseAndOwnTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.rich().start(ttl(10 * time.Second))
		lease := first.holds().Until()
		is(t, "until", lease, time.Now().Add(validity(10*time.Second)))
		w.refresh = nil // no renewal
		short, long := w.start(ttl(time.Second)), w.start(ttl(12*time.Second))
		time.Sleep(100 * time.Millisecond)
		first.releases()
		is(t, "short", short.holds().Until(), time.Now().Add(validity(time.Second)))
		short.releases()
		is(t, "long", long.holds().Until(), lease)
		long.releases()
	})
}

// S11: with less than half the waiter's ttl left, the lease is renewed before it is handed
// over, and not handed over before it is renewed.
func TestHalfSpentLeaseIsRenewedBeforeHandoff(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, next := w.start(), w.start()
		w.refresh = nil
		time.Sleep(6 * time.Second)
		before := first.holds().Fence()
		first.releases()
		next.waits()
		is(t, "held", w.g.Counts(Counts{}).Held, 0)
		w.renewal(w.renewals()).confirm()
		if next.holds().Fence() <= before {
			t.Error("fence")
		}
		is(t, "until", next.h.Until(), time.Now().Add(validity(10*time.Second)))
		is(t, "attempts", w.asked(), 1)
		next.releases()
	})
}

// ... measured by the waiter's ttl, not the releaser's.
func TestHalfIsMeasuredByTheWaitersTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.start(ttl(time.Second))
		next := w.start(ttl(3 * time.Second))
		w.refresh = nil
		first.releases()
		next.waits()
		r := w.renewal(w.renewals())
		is(t, "ttl", r.ttl, 3*time.Second)
		r.confirm()
		next.holds().Release()
	})
}

// ... and if it cannot be renewed it is released, and acquired again.
func TestLeaseThatCannotBeRenewedIsGivenBack(t *testing.T) {
	for name, o := range map[string]quorum.Failure{
		"down": {Err: errDown},
		"lost": {Err: errTaken, Reason: quorum.NotHeld},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				first, next := w.start(), w.start()
				w.refresh = func(r *fakeRefresh) { r.fail(o) }
				time.Sleep(6 * time.Second)
				fence := first.holds().Fence()
				first.releases()
				if next.holds().Fence() <= fence {
					t.Error("fence")
				}
				is(t, "attempts", w.asked(), 2)
				is(t, "given back", w.leases[0].releases, 1)
				next.releases()
			})
		})
	}
}

// ... as it is when the renewal brought no tokens, and none are left.
func TestLeaseWithoutTokensIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = func(r *fakeRefresh) { r.confirmBlock(0) }
		first := w.poor().start() // has the only token
		first.holds()
		next := w.start()
		first.releases()
		next.holds()
		is(t, "attempts", w.asked(), 2)
		next.releases()
	})
}

// Tokens that are only reserved take another refresh, which follows at once: a waiter for whom
// there is no token gets the lease then, and if the second refresh fails, it counts as one without
// tokens.
func TestReservedTokensTakeAnotherRefresh(t *testing.T) {
	for name, fails := range map[string]bool{"confirmed": false, "down": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.refresh = nil
				first := w.poor().start() // has the only token
				first.holds()
				next := w.start()
				first.releases()
				w.renewal(1).reserve()
				next.waits()
				is(t, "attempts", w.asked(), 1)
				if fails {
					w.renewal(2).fail(quorum.Failure{Err: errDown})
				} else {
					w.renewal(2).confirm()
				}
				is(t, "refreshes", w.renewals(), 2)
				next.holds()
				is(t, "contends anew", w.asked() == 2, fails)
				next.releases()
			})
		})
	}
}

// A waiter for whom there is a token does not wait for more of them, and gets what the refresh has
// confirmed.
func TestAWaiterWithATokenIsNotKeptWaitingForMore(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rich()
		w.refresh = nil
		first := w.start()
		next, third := w.start(), w.start()
		time.Sleep(6 * time.Second) // the lease is too short to be handed over
		began := time.Now()
		first.holds()
		first.releases()
		time.Sleep(time.Second)
		w.renewal(1).reserve()
		is(t, "until", next.holds().Until(), began.Add(validity(10*time.Second)))
		w.renewal(2).fail(quorum.Failure{Err: errDown})
		is(t, "until", next.holds().Until(), began.Add(validity(10*time.Second)))
		next.releases()
		third.releases()
		is(t, "attempts", w.asked(), 1)
	})
}

// A holder gets what its refresh has confirmed before the tokens arrive. What it requests meanwhile
// is served by the refresh that gets them.
func TestAHolderIsNotKeptWaitingForTokens(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = nil
		c, behind := w.start(), w.start()
		c.holds()
		time.Sleep(8 * time.Second)
		began := time.Now()
		answered := 0
		done := func(err error) {
			is(t, "err", err, nil)
			answered++
		}
		c.h.Refresh(20*time.Millisecond, done)
		c.h.Refresh(30*time.Millisecond, done)
		time.Sleep(time.Second)
		w.renewal(1).reserve()
		is(t, "answered", answered, 1)
		is(t, "until", c.holds().Until(), began.Add(validity(10*time.Second)))
		is(t, "timeout", w.renewal(2).timeout, 30*time.Millisecond)
		w.renewal(2).confirm()
		is(t, "answered", answered, 2)
		is(t, "refreshes", w.renewals(), 2)
		c.releases()
		behind.releases() // has one of the tokens
		is(t, "attempts", w.asked(), 1)
	})
}

// Tokens that nobody waits for may wait for the next refresh.
func TestReservedTokensThatNobodyNeeds(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = nil
		c, behind := w.start(), w.start()
		c.holds()
		c.h.Refresh(time.Second, func(error) {})
		behind.leaves()
		w.renewal(1).reserve()
		is(t, "refreshes", w.renewals(), 1)
		c.releases()
	})
}

// A loss that the refresh for tokens finds is a loss.
func TestALossFoundWithTheTokens(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = nil
		c, behind := w.start(), w.start()
		c.holds()
		c.h.Refresh(time.Second, func(err error) { is(t, "err", err, nil) })
		w.renewal(1).reserve()
		w.renewal(2).fail(quorum.Failure{Err: errTaken, Reason: quorum.NotHeld})
		is(t, "lost", errors.Is(c.h.Err(), errLost), true)
		behind.holds() // contended anew
		behind.releases()
		is(t, "attempts", w.asked(), 2)
	})
}

// A lease whose waiters have all left when its renewal ends is released.
func TestRenewedLeaseThatNobodyWantsIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, next := w.start(), w.start()
		w.refresh = nil
		time.Sleep(6 * time.Second)
		first.releases()
		next.leaves()
		w.renewal(w.renewals()).confirm()
	})
}

// ... also if it was renewed for tokens, and these are only reserved.
func TestALeaseWithReservedTokensThatNobodyWantsIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, next := w.poor().start(), w.start() // first has the only token
		first.holds()
		w.refresh = nil
		first.releases()
		next.leaves()
		w.renewal(w.renewals()).reserve()
		w.wantHistory("acquire", "refresh", "release")
	})
}

// A refresh reserves no more tokens than microseconds have passed, besides those for the queue, however fast
// the lease is handed on: a counter that is lost starts again at the node's clock.
func TestARefreshReservesNoMoreTokensThanMicroseconds(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = func(a *fakeAttempt) { a.grantBlock(100) }
		w.refresh = nil
		c := w.start()
		for range 80 { // in no time
			next := w.start()
			c.releases()
			c = next
		}
		is(t, "refreshes", w.renewals(), 0)
		time.Sleep(10 * time.Microsecond)
		behind := w.start()
		for w.renewals() == 0 {
			next := w.start()
			c.releases()
			c, behind = behind, next
		}
		if most := int64(2 + spareTokens + 2*10); w.renewal(1).more > most {
			t.Errorf("%d tokens, more than %d", w.renewal(1).more, most)
		}
		w.renewal(1).confirm()
		c.releases()
		behind.releases()
	})
}

// What an attempt has won is given to the caller that it was made for, however much of the ttl it
// took: another attempt would take as long.
func TestSlowGrantIsNotAskedForAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(ttl(20 * time.Millisecond))
		time.Sleep(12 * time.Millisecond)
		w.attempt().grant()
		c.holds()
		is(t, "attempts", w.asked(), 1)
		is(t, "refreshes", w.renewals(), 0)
		c.releases()
	})
}

// ... but a caller that needs more than it was made for has it renewed.
func TestGrantForAShorterTTLIsRenewed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		short, long := w.start(ttl(time.Second)), w.start(ttl(10*time.Second))
		short.leaves()
		w.attempt().grant()
		is(t, "until", long.holds().Until(), time.Now().Add(validity(10*time.Second)))
		is(t, "refreshes", w.renewals(), 1)
		long.releases()
	})
}

// A grant whose validity is over is nobody's.
func TestExpiredGrantIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		c := w.start(ttl(20 * time.Millisecond))
		time.Sleep(18 * time.Millisecond)
		w.acquire = (*fakeAttempt).grant
		w.attempts[0].grant()
		c.holds()
		is(t, "attempts", w.asked(), 2)
		c.releases()
	})
}

// A lease in use is renewed in the background as its ttl elapses, and the holder's Until does not
// move by that.
func TestLeaseInUseIsToppedUp(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, second, third := w.rich().start(), w.start(), w.start()
		n := w.renewals()
		time.Sleep(2 * time.Second)
		first.releases()
		is(t, "refreshes", w.renewals(), n+1)
		until := second.holds().Until()
		is(t, "until", until, time.Now().Add(validity(10*time.Second)))
		second.releases()
		is(t, "until", third.holds().Until(), until)
		is(t, "refreshes", w.renewals(), n+1)
		third.releases()
	})
}

// When that fails, it is not tried again at every handoff.
func TestFailedTopUpIsNotRepeatedAtEveryHandoff(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.rich().start()
		time.Sleep(2 * time.Second)
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		before := w.renewals()
		for range 5 {
			next := w.start()
			c.releases()
			c = next
		}
		if n := w.renewals() - before; n > 1 {
			t.Errorf("%d refreshes in 5 handoffs", n)
		}
		c.holds().Release()
	})
}

// A Ticket that is over can do nothing to its successor.
func TestReleasedHoldCannotTouchItsSuccessor(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		old, next, last := w.rich().start(), w.start(), w.start()
		old.releases()
		until, n := next.holds().Until(), w.renewals()
		for range 2 {
			if err := old.h.Release(); !errors.Is(err, errEnded) || !errors.Is(err, errNotHeld) {
				t.Error("release:", err)
			}
			old.h.Refresh(time.Second, func(err error) {
				if !errors.Is(err, errEnded) || !errors.Is(err, errNotHeld) {
					t.Error("refresh:", err)
				}
			})
		}
		is(t, "err", old.h.Err(), errNotHeld)
		if _, why, over := old.h.OnEnd(func(error) { t.Error("OnEnd") }); !over || why != nil {
			t.Error("OnEnd:", why, over)
		}
		is(t, "until", next.holds().Until(), until)
		is(t, "refreshes", w.renewals(), n)
		last.waits()
		next.releases()
		last.holds().Release()
	})
}

// A refresh whose holder released meanwhile is the lease's: the successor gets the deadline.
func TestSuccessorGetsTheDeadlineOfARefreshUnderWay(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, next := w.rich().start(), w.start()
		w.refresh = nil
		var got error
		time.Sleep(4 * time.Second)
		first.h.Refresh(time.Second, func(err error) { got = err })
		r := w.renewal(1)
		time.Sleep(100 * time.Millisecond)
		first.releases()
		is(t, "until", next.holds().Until(), w.leases[0].until)
		r.confirm()
		is(t, "until", next.holds().Until(), r.began.Add(validity(10*time.Second)))
		if !errors.Is(got, errNotHeld) {
			t.Error("its holder got", got)
		}
		next.releases()
	})
}

// ... or the loss.
func TestSuccessorGetsTheLossOfARefreshUnderWay(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rich()
		var all []*caller
		for range 5 {
			all = append(all, w.start())
		}
		all[0].releases()
		w.refresh = nil
		all[1].h.Refresh(time.Second, func(error) {})
		r := w.renewal(w.renewals())
		all[1].releases()
		successor := all[2].holds()
		var why error
		successor.OnEnd(func(err error) { why = err })
		w.byHand()
		r.fail(quorum.Failure{Err: errTaken, Reason: quorum.NotHeld})
		synctest.Wait()
		is(t, "lost", errors.Is(successor.Err(), errLost), true)
		is(t, "why", errors.Is(why, errTaken), true)
		is(t, "asked anew", w.asked(), 2)
		is(t, "lost", w.g.Counts(Counts{}).Lost, 1)
		err := successor.Release()
		is(t, "release", errors.Is(err, errLost) && errors.Is(err, errEnded), true)
		for _, c := range all[3:] {
			c.leaves()
		}
	})
}

// The outcome of a refresh of a lease that was released means nothing to the next lease.
func TestOutcomeForAnOldLeaseIsIgnored(t *testing.T) {
	for name, end := range map[string]func(*fakeRefresh){
		"confirmed": (*fakeRefresh).confirm,
		"lost":      func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errTaken, Reason: quorum.NotHeld}) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.refresh = nil
				old, next := w.start(), w.start()
				old.holds().Refresh(time.Second, func(error) {})
				stale := w.renewal(1)
				old.releases() // the next lease is the same flight's
				asked, done := 0, 0
				for range 2 {
					next.holds().Refresh(time.Second, func(error) { done++ })
					asked++
				}
				until := next.h.Until()
				end(stale)
				next.holds().Refresh(time.Second, func(error) { done++ })
				asked++
				is(t, "until", next.holds().Until(), until)
				is(t, "refreshes", w.renewals(), 2) // still one under way for this lease
				is(t, "answered", done, 0)
				w.renewal(2).confirm()
				w.renewal(3).confirm()
				is(t, "answered", done, asked)
				next.releases()
			}, func(c *Config) { c.Slice = -1 })
		})
	}
}

// Concurrent refreshes share one; while one is in progress, they share the next.
func TestRefreshesAreShared(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refresh = nil
		h := w.start().holds()
		done := 0
		for _, timeout := range []time.Duration{40, 30, 20, 60} {
			h.Refresh(timeout*time.Millisecond, func(err error) {
				done++
				is(t, "err", err, nil)
			})
		}
		w.renewal(1).confirm()
		is(t, "answered", done, 1)
		is(t, "timeout", w.renewal(2).timeout, 20*time.Millisecond)
		time.Sleep(time.Second)
		w.renewal(2).confirm()
		is(t, "answered", done, 4)
		h.Release()
	})
}

// A failed refresh that is no loss leaves the Ticket as it was.
func TestFailedRefreshChangesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		until := c.holds().Until()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		time.Sleep(time.Second)
		var got error
		c.h.Refresh(time.Second, func(err error) { got = err })
		is(t, "err", got, errDown)
		is(t, "until", c.holds().Until(), until)
		c.releases()
	})
}

// A refresh gives the full ttl again, and the timer follows.
func TestRefreshMovesUntil(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		for range 5 {
			time.Sleep(8 * time.Second)
			c.holds().Refresh(time.Second, func(error) {})
			is(t, "until", c.h.Until(), time.Now().Add(validity(10*time.Second)))
		}
		time.Sleep(validity(10*time.Second) - 1)
		c.holds()
		time.Sleep(1)
		synctest.Wait()
		is(t, "err", c.h.Err(), errExpired)
		is(t, "ends", c.ends, 1)
	})
}

// The passing of time alone ends a Ticket.
func TestExpiryIsSeenWithoutATimer(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		c.holds()
		f := w.g.find("k")
		f.silence() // as late as an alarm may be
		time.Sleep(10 * time.Second)
		is(t, "err", c.h.Err(), errExpired)
		c.h.Refresh(time.Second, func(err error) { is(t, "refresh", errors.Is(err, errExpired), true) })
		is(t, "refreshes", w.renewals(), 0)
		is(t, "ends", c.ends, 1)
	})
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		c.holds()
		f := w.g.find("k")
		f.silence()
		time.Sleep(10 * time.Second)
		is(t, "release", errors.Is(c.h.Release(), errExpired), true)
		is(t, "lost", w.g.Counts(Counts{}).Lost, 1)
	})
}

// A flight that has died has no timer.
func TestDeadFlightHasNoAlarm(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		c.holds().Release()
		is(t, "it has an alarm", c.h.f.hasAlarm(), false)
	})
}

// A Ticket whose Until has passed does not come back by the answer to a refresh, even if
// the lease lives on because it was renewed for the queue.
func TestLateRefreshDoesNotBringAHoldBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start(ttl(10 * time.Second))
		c.holds()
		f := w.g.find("k")
		f.mu.Lock()
		f.until = f.until.Add(time.Minute) // renewed for the queue
		f.mu.Unlock()
		f.silence() // as late as an alarm may be
		w.refresh = nil
		time.Sleep(5 * time.Second)
		var got error
		c.h.Refresh(time.Second, func(err error) { got = err })
		time.Sleep(5 * time.Second)
		is(t, "err", c.h.Err(), errExpired)
		w.renewal(1).confirm()
		is(t, "err", c.h.Err(), errExpired)
		is(t, "refresh", errors.Is(got, errExpired), true)
	})
}

// S12: a holder that hangs loses the lock at its Until, however many wait and renew, and the next
// waiter gets it under a new fence.
func TestHangingHolderLosesTheLock(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		var queue []*caller
		for range 10 {
			queue = append(queue, w.start(ttl(time.Second)))
		}
		fence := int64(0)
		for _, c := range queue {
			h := c.holds()
			if h.Fence() <= fence {
				t.Error("fence")
			}
			fence = h.Fence()
			left := time.Until(h.Until())
			if left > validity(time.Second) {
				t.Error("too long:", left)
			}
			time.Sleep(left)
			synctest.Wait()
			is(t, "err", h.Err(), errExpired)
			is(t, "ends", c.ends, 1)
		}
		is(t, "lost", w.g.Counts(Counts{}).Lost, 10)
	})
}

// A lone holder that hangs keeps no flight alive.
func TestLoneHangingHoldersFlightDisappears(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start(ttl(time.Second))
		c.holds()
		time.Sleep(time.Second)
		synctest.Wait()
		is(t, "a flight", w.g.any(), false)
		err := c.h.Release()
		is(t, "release", errors.Is(err, errExpired), true)
	})
}

// Release says whether the nodes confirmed it; the second one, that it was the second.
func TestReleaseReportsItsOutcome(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.release = func(l *fakeLease) { l.released(errDown) }
		c := w.start()
		is(t, "release", c.holds().Release(), errDown)
		is(t, "again", errors.Is(c.h.Release(), errNotHeld), true)
		is(t, "ends", c.ends, 1)
	})
}

// OnEnd's function is called once, or never if it was canceled.
func TestOnEndIsCalledOnceUnlessCancelled(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		h := c.holds()
		var calls [3]int
		var cancels [3]func()
		for i := range calls {
			cancels[i], _, _ = h.OnEnd(func(why error) {
				calls[i]++
				is(t, "why", why, nil)
			})
		}
		cancels[1]()
		c.releases()
		for _, cancel := range cancels {
			cancel()
		}
		_ = h.Release()
		is(t, "calls", calls, [3]int{1, 0, 1})
	})
}

// The memory of a handoff: the caller's Ticket, and nothing of the flight's own.
func TestHandoffAllocates(t *testing.T) {
	if redistest.Raced {
		t.Skip("the race detector allocates")
	}
	w := newWorld(t)
	const rounds, callers = 2000, 8
	done := make(chan error, callers)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range callers {
		go func() {
			for range rounds {
				h := new(Ticket)
				if err := w.g.Acquire(t.Context(), "k", h, 10*time.Second, patient); err != nil {
					done <- err
					return
				}
				runtime.Gosched() // lets the others queue up
				if err := h.Release(); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range callers {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	c := w.g.Counts(Counts{})
	if c.Handoffs < c.Acquired*9/10 {
		t.Skipf("only %d handoffs in %d locks", c.Handoffs, c.Acquired)
	}
	if n := float64(after.Mallocs-before.Mallocs) / float64(c.Acquired); n > 3 {
		t.Errorf("%.2f allocations per lock, of which %d of %d were handed over", n, c.Handoffs, c.Acquired)
	}
}

func BenchmarkHandoff(b *testing.B) {
	w := newWorld(nil)
	b.ReportAllocs()
	b.SetParallelism(500)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			h := new(Ticket)
			if err := w.g.Acquire(b.Context(), "k", h, 10*time.Second, patient); err != nil {
				b.Error(err)
				return
			}
			_ = h.Release()
		}
	})
}

// The lock of a caller that was alone is handed to later callers without a request: its lease has
// tokens for a few.
func TestALoneCallersLeaseHasTokensForAFewMore(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for range 2 {
			lone := w.start()
			before := w.renewals()
			first, second := w.start(), w.start()
			lone.releases()
			first.holds()
			is(t, "renewals before the first handoff", w.renewals(), before)
			first.releases()
			second.holds().Release()
		}
	})
}

// A request for a refresh is answered when its Ticket is over, even if the refresh in progress may take
// longer, because the lease is valid for longer than the Ticket.
func TestARefreshIsAnsweredWhenItsTicketIsOver(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		front := w.start()
		next := w.start(ttl(time.Second))
		front.releases()
		next.holds()
		w.refresh = nil
		answers := make(chan error, 10)
		next.h.Refresh(50*ms, func(err error) { answers <- err })
		pass(validity(time.Second))
		select {
		case err := <-answers:
			if !errors.Is(err, errEnded) || !errors.Is(err, errExpired) {
				t.Errorf("answered with %v", err)
			}
		default:
			t.Error("the request has no answer at the end of its Ticket")
		}
		w.renewal(1).fail(quorum.Failure{Err: errDown})
		synctest.Wait()
		is(t, "further answers", len(answers), 0)
	})
}

// A renewal that the flight makes while a Ticket is held, for waiters, does not move its Until
// beyond its own ttl: the lease is longer, and a holder that hangs loses it all the same.
func TestARenewalForWaitersKeepsNoHolder(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, hung, next := w.rich().start(), w.start(ttl(time.Second)), w.start()
		n := w.renewals()
		time.Sleep(2 * time.Second)
		first.releases()
		is(t, "refreshes", w.renewals(), n+1)
		until := time.Now().Add(validity(time.Second))
		is(t, "until", hung.holds().Until(), until)
		time.Sleep(validity(time.Second) + time.Millisecond)
		next.holds()
		if hung.h.Err() == nil {
			t.Error("the one that hangs holds still")
		}
		next.releases()
	})
}
