package flight

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// offering has the world's nodes take offers.
func offering(c *Config) {
	n := c.Nodes.(*fakeNodes)
	w := n.w
	n.offer = func(key string, ttl time.Duration, tokens int64, contender string, by quorum.Acquirer) Lease {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.prepared++
		w.note("offer as %s", contender)
		o := &fakeAttempt{
			w: w, owner: fmt.Sprint("offer-", w.prepared), contender: contender, key: key, ttl: ttl, tokens: tokens,
			by:    by,
			began: clock.Now(), isOffer: true,
		}
		w.offers = append(w.offers, o)
		return o
	}
	n.carry = func(_, _ Lease, span time.Duration, waits bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.note("carry for %v %v", span, waits)
	}
}

// offer is the latest offer.
func (w *world) offer() *fakeAttempt {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.offers) == 0 {
		w.t.Fatal("there is no offer")
	}
	return w.offers[len(w.offers)-1]
}

// grantFor has releases elsewhere grant the offer for span: what is left of it is valid.
func (a *fakeAttempt) grantFor(span, left time.Duration) {
	if !a.decide() {
		return
	}
	w := a.w
	w.mu.Lock()
	l := &fakeLease{w: w, key: a.key, owner: a.owner, contender: a.contender, until: clock.Now().Add(left)}
	w.leases = append(w.leases, l)
	a.lease = l
	g := quorum.Grant{Until: l.until, First: w.counter + 1, Last: w.counter + a.tokens, Span: span}
	w.counter += a.tokens
	w.mu.Unlock()
	a.by.Acquired(g, nil)
}

// elsewhere is how a held key fails an attempt.
func (a *fakeAttempt) elsewhere() {
	a.fail(quorum.Failure{Err: errTaken, Free: time.Hour, Reason: quorum.Taken, Owned: true, Queued: true})
}

// waitsWithOffer makes a caller whose flight waits, with nothing under way but its offer.
func (w *world) waitsWithOffer(change ...func(*wish)) *caller {
	w.t.Helper()
	c := w.meetsRivals(change...)
	synctest.Wait()
	w.wantHistory("acquire", "watch owner-1", "offer as owner-1", "carry for 450ms true", "acquire as owner-1")
	return c
}

// meetsRivals makes a caller whose second attempt has brought an offer.
func (w *world) meetsRivals(change ...func(*wish)) *caller {
	w.t.Helper()
	c := w.byHand().start(change...)
	w.attempt().elsewhere()
	w.news(quorum.Subscribed)
	w.attempt().elsewhere()
	return c
}

// A grant ends the wait without another attempt, and the caller's release passes the key on.
func TestAGrantEndsTheWait(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
		c.holds()
		is(t, "grants", w.g.Counts(Counts{}).Grants, 1)
		c.releases()
		w.wantHistory("release")
		is(t, "attempts", w.asked(), 2)
	}, offering)
}

// While an offer is made, the flight polls often enough for a grant to be valid when it comes, and each poll
// brings the offer. One that has left a free key to others takes it the next time.
func TestAnOfferIsBroughtByEachPoll(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		pass(200 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		w.attempt().fail(quorum.Failure{Err: errTaken, Free: 2 * time.Millisecond, Reason: quorum.Taken,
			Declined: true})
		pass(2 * time.Millisecond)
		w.wantHistory("carry for 450ms false", "acquire as owner-1")
		w.attempt().elsewhere()
		pass(5 * time.Second)
		w.history()
		w.attempt().elsewhere()
		pass(300 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1") // it has waited for long
		pass(30 * time.Second)                                      // from now on it polls once per second
		w.attempt().elsewhere()
		pass(400 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		w.attempt().elsewhere()
		pass(time.Second - time.Microsecond)
		w.wantHistory()
		pass(time.Microsecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		c.leaves()
		w.attempt().elsewhere()
		pass(time.Millisecond)
		w.wantHistory("stop owner-1", "withdraw")
	}, offering)
}

// For hours, thousands of keys may be waited for in each of tens of processes: after a minute polls come less
// often, but before what they have registered expires, and not all at once. Only where one other has the key:
// what a majority does not agree on ends by attempts.
func TestLongWaitsPollLess(t *testing.T) {
	for name, change := range map[string]func(*Config){"with an offer": offering, "without": func(*Config) {}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				c := w.meetsRivals()
				synctest.Wait()
				within := func(what string, got, least, most time.Duration) {
					t.Helper()
					if got < least || got > most+time.Millisecond {
						t.Errorf("%s: the next attempt came after %v, want %v to %v", what, got, least, most)
					}
				}
				pass(58 * time.Second)
				w.pollsAfter() // how soon they come is found when one is made
				within("after a minute", w.pollsAfter(), time.Second, time.Second)
				pass(60 * time.Second)
				w.pollsAfter()
				within("after two minutes", w.pollsAfter(), 3*time.Second/2, 2100*time.Millisecond)
				pass(time.Hour)
				w.pollsAfter()
				seen := map[time.Duration]bool{}
				for range 20 {
					took := w.pollsAfter()
					within("after an hour", took, 15*time.Second/4, 5*time.Second)
					seen[took] = true
				}
				if len(seen) < 3 {
					t.Errorf("all after the same time: %v", seen)
				}
				within("of a key that may be free", w.nextAfter(func(a *fakeAttempt) {
					a.fail(quorum.Failure{
						Err: errTaken, Free: 3 * time.Second, Reason: quorum.Taken, Owned: true, Queued: true,
					})
				}), 3*time.Second, 3*time.Second)
				if name == "with an offer" {
					within("split votes", w.nextAfter(func(a *fakeAttempt) {
						a.fail(quorum.Failure{Err: errTaken, Free: time.Hour, Reason: quorum.Taken, Queued: true})
					}), time.Second/2, time.Second)
				}
				w.attempt().elsewhere()
				asked := w.asked()
				w.news(quorum.OurTurn)
				synctest.Wait()
				is(t, "attempts after news", w.asked()-asked, 1)
				w.attempt().grant()
				c.holds()
				c.releases()
			}, change)
		})
	}
}

// pollsAfter is how long after an attempt that has met another holder the next one comes.
func (w *world) pollsAfter() time.Duration {
	w.t.Helper()
	return w.nextAfter((*fakeAttempt).elsewhere)
}

// nextAfter is how long after the end of an attempt the next one comes.
func (w *world) nextAfter(end func(*fakeAttempt)) time.Duration {
	w.t.Helper()
	began, asked := time.Now(), w.asked()
	end(w.attempt())
	for w.asked() == asked {
		pass(time.Millisecond)
	}
	return time.Since(began)
}

// A process that leads for hundreds of keys, which it had to wait for, waits for none of them: it polls
// another key as often as if there were only that one.
func TestKeysThatAreHeldSlowNoPolls(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for i := range 300 {
			c := w.meetsRivals(key(fmt.Sprint("tenant ", i)))
			synctest.Wait()
			if i%2 == 0 {
				w.offer().grantFor(10*time.Second, 9*time.Second)
			} else {
				w.news(quorum.OurTurn)
				w.attempt().grant()
			}
			defer c.releases()
			c.holds()
		}
		c := w.meetsRivals(key("hot"))
		synctest.Wait()
		is(t, "the next poll", w.pollsAfter(), grantSpan*10/pollsPerSpan)
		is(t, "waited for", w.g.contending.Load(), 1)
		c.leaves()
	}, offering)
}

// A flight whose queue is never empty does not die, and may have rivals for hours. How long it has waited, on
// which depends how often it polls, begins anew whenever it has to wait again: where nothing is handed over,
// and when a lease was lost.
func TestAWaitBeginsWhenTheLeaseHasEnded(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		hours  func(*testing.T, *world, *caller) *caller
	}{
		"nothing is handed over": {func(c *Config) {
			c.Slice = -1
		}, func(t *testing.T, w *world, c *caller) *caller {
			for range 600 {
				next := w.start()
				pass(time.Second)
				c.releases()
				c = next
				w.attempt().grant()
				c.holds()
			}
			next := w.start()
			c.releases()
			return next
		}},
		"lost": {func(*Config) {}, func(t *testing.T, w *world, c *caller) *caller {
			next := w.start(ttl(time.Second))
			pass(validity(20 * time.Minute))
			is(t, "is over", c.h.Err() != nil, true)
			return next
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				c := w.meetsRivals(ttl(20 * time.Minute))
				w.news(quorum.OurTurn)
				w.attempt().grant()
				c.holds()
				next := test.hours(t, w, c)
				w.pollsAfter() // the first attempts after that bring an offer
				if after := w.pollsAfter(); after > 2*grantSpan*10/pollsPerSpan {
					t.Errorf("the next poll comes after %v", after)
				}
				next.leaves()
			}, offering, test.change)
		})
	}
}

// If votes are split, those that have some try again soon. Who has none leaves them to it for a while.
func TestSplitVotesAreLeftToThoseThatHaveSome(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		split := quorum.Failure{Err: errTaken, Free: time.Hour, Reason: quorum.Taken, Queued: true}
		voted := split
		voted.Got = 1
		c := w.waitsWithOffer(pace(never(time.Millisecond)))
		pass(200 * time.Millisecond)
		w.attempt().fail(voted)
		pass(9 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		pass(11 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		w.attempt().fail(split)
		pass(89 * time.Millisecond)
		w.wantHistory()
		pass(91 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
	}, offering)
}

// A grant that comes during an attempt cancels that, and counts when it has ended; if both have won, the
// attempt's lease is returned.
func TestAGrantDuringAnAttempt(t *testing.T) {
	for name, won := range map[string]bool{"canceled": false, "won": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				c := w.waitsWithOffer()
				pass(200 * time.Millisecond)
				a := w.attempt()
				w.cancel = func(a *fakeAttempt) {
					if won {
						a.grant()
					} else {
						a.elsewhere()
					}
				}
				w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
				c.holds()
				is(t, "canceled", a.cancelled, true)
				want := []string{"carry for 450ms true", "acquire as owner-1"}
				if won {
					want = append(want, "release")
				}
				w.wantHistory(want...)
				c.releases()
				w.wantHistory("release")
			}, offering)
		})
	}
}

// While an offer is open an attempt does not block its caller for longer than the grant would be valid for,
// even if the attempt itself brings none, because its ttl is too short: the caller would get a lock that is
// over.
func TestAnAttemptDoesNotBlockWhileAnOfferIsOpen(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		long := w.waitsWithOffer()
		short := w.start(ttl(50 * time.Millisecond))
		long.leaves()
		pass(time.Second)
		a := w.attempt()
		is(t, "contender", a.contender, "owner-1")
		is(t, "inline", a.inline, false)
		a.elsewhere()
		short.leaves()
	}, offering)
}

// A grant may be for the ttl of an attempt before, which was shorter.
func TestAnAttemptDoesNotBlockForLongerThanAnOfferBeforeIsFor(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		short := w.byHand().start(ttl(150 * time.Millisecond))
		w.attempt().elsewhere()
		w.news(quorum.Subscribed)
		w.attempt().elsewhere()
		long := w.start()
		short.leaves()
		pass(time.Second)
		a := w.attempt()
		is(t, "ttl", a.ttl, 10*time.Second)
		is(t, "inline", a.inline, false)
		a.elsewhere()
		long.leaves()
	}, offering)
}

// The caller that makes the attempt while the head asks its strategy further gets what is granted meanwhile,
// for its own ttl.
func TestAnAttemptDoesNotBlockACallerForLongerThanItsTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		thinks := newBlocking()
		head := w.waitsWithOffer(pace(thinks)).spent()
		short := w.start(ttl(100 * time.Millisecond))
		pass(200 * time.Millisecond)
		w.attempt().elsewhere()
		synctest.Wait()
		before := w.asked()
		pass(time.Second)
		is(t, "attempts", w.asked(), before+1)
		a := w.attempt()
		is(t, "ttl", a.ttl, 10*time.Second)
		is(t, "inline", a.inline, false)
		a.elsewhere()
		thinks.answers <- false
		short.leaves()
		head.leaves()
	}, offering)
}

// A grant that comes when nobody waits any more is returned: at the instant in which the last one leaves, and
// later.
func TestAGrantThatNobodyNeedsIsReturned(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		o := w.offer()
		pass(200 * time.Millisecond)
		w.cancel = nil // it takes a while
		c.leaves()
		w.history()
		o.grantFor(500*time.Millisecond, 400*time.Millisecond)
		w.attempt().elsewhere()
		w.wantHistory("release", "stop owner-1")
		is(t, "flights", len(w.g.all()), 0)
	}, offering)
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		o := w.offer()
		c.leaves()
		w.wantHistory("stop owner-1", "withdraw")
		o.decided = false // it was won at that moment
		o.grantFor(500*time.Millisecond, 400*time.Millisecond)
		w.wantHistory("release")
	}, offering)
}

// An offer whose votes were split is followed by an attempt, which brings another one.
func TestAnOfferThatFailsIsMadeAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		w.offer().elsewhere()
		synctest.Wait()
		w.wantHistory("offer as owner-1", "carry for 450ms true", "acquire as owner-1")
		w.offer().elsewhere() // during the attempt
		w.attempt().elsewhere()
		w.wantHistory("offer as owner-1", "carry for 450ms true", "acquire as owner-1")
		w.attempt().grant() // the attempt needs no offer
		c.holds()
		w.wantHistory("forget")
		c.releases()
		w.wantHistory("release", "stop owner-1")
	}, offering)
}

// A lease that was granted for a span is refreshed in time, until that is confirmed; its caller keeps the
// lock for its ttl then. If no refresh succeeds, the lock is lost when the span is over.
func TestAGrantIsCompleted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		w.refresh = nil
		began := time.Now()
		w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
		c.holds()
		pass(99 * time.Millisecond)
		is(t, "refreshes", w.renewals(), 0)
		pass(time.Millisecond)
		w.renewal(1).fail(quorum.Failure{Err: errDown, Reason: quorum.Unreachable})
		pass(50 * time.Millisecond)
		w.renewal(2).confirm()
		synctest.Wait()
		is(t, "until", c.holds().Until().Sub(began) > 5*time.Second, true)
		pass(time.Second)
		is(t, "refreshes", w.renewals(), 2)
		is(t, "err", c.holds().Err(), nil)
		c.releases()
	}, offering)
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown, Reason: quorum.Unreachable}) }
		w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
		c.holds()
		pass(399 * time.Millisecond)
		is(t, "err", c.holds().Err(), nil)
		is(t, "refreshes", w.renewals() > 3, true)
		pass(time.Millisecond)
		is(t, "lost", c.h.Err() != nil, true)
	}, offering)
}

// A lock that was granted for a span, and ends with it because no refresh succeeded, is lost, although its
// holder did not ask for a refresh: it has not ended by its ttl. One whose ttl was made full has, as has one
// whose ttl is shorter than the span.
func TestAGrantThatIsNotCompletedIsLost(t *testing.T) {
	for name, tc := range map[string]struct {
		ttl           time.Duration
		fails         bool
		lost, expired uint64
	}{
		"not completed":                {ttl: 10 * time.Second, fails: true, lost: 1},
		"completed":                    {ttl: 10 * time.Second, expired: 1},
		"not longer than what is left": {ttl: 300 * time.Millisecond, fails: true, expired: 1},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				c := w.waitsWithOffer(ttl(10*time.Second), alone)
				h := c
				if tc.ttl < 10*time.Second {
					h = w.start(ttl(tc.ttl), alone)
				}
				w.refresh = func(r *fakeRefresh) { r.confirm() }
				if tc.fails {
					w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown, Reason: quorum.Unreachable}) }
				}
				w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
				if c.holds(); h != c {
					c.releases()
					h.holds()
				}
				pass(11 * time.Second)
				is(t, "err", h.h.Err(), errExpired)
				is(t, "lost", w.g.Counts(Counts{}).Lost, tc.lost)
				is(t, "expired", w.g.Counts(Counts{}).Expired, tc.expired)
			}, offering)
		})
	}
}

// A lease of which less than half of the span is left is refreshed before a caller gets it.
func TestAnOldGrantIsRefreshedFirst(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.waitsWithOffer()
		w.refresh = nil
		w.offer().grantFor(500*time.Millisecond, 200*time.Millisecond)
		c.waits()
		w.renewal(1).confirm()
		c.holds()
		is(t, "until", time.Until(c.holds().Until()) > 5*time.Second, true)
		c.releases()
	}, offering)
}

// Callers of the same process get a lease that was granted, one after the other, before it is refreshed.
func TestAGrantIsHandedOver(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a := w.waitsWithOffer()
		b := w.start()
		w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond)
		a.holds()
		a.releases()
		b.holds()
		b.releases()
	}, offering)
}
