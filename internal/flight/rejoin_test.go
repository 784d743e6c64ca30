package flight

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// rejoining has the world's nodes take offers, also from releases.
func rejoining(c *Config) {
	offering(c)
	n := c.Nodes.(*fakeNodes)
	n.rejoin = func(span time.Duration) {
		n.w.mu.Lock()
		defer n.w.mu.Unlock()
		n.w.note("rejoin for %v", span)
	}
}

// alone has nobody else wait, so that nodes know nothing of an offer that a release brings.
func (w *world) alone() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes.alone = true
}

// first has a caller be granted the key by another's release, and release it.
func (w *world) first() {
	w.t.Helper()
	c := w.waitsWithOffer()
	w.grantIt()
	c.holds()
	c.releases()
}

// served makes a caller that is granted the key by another's release, as the one before it.
func (w *world) served(change ...func(*wish)) *caller {
	w.t.Helper()
	c := w.byHand().start(change...)
	w.news(quorum.Subscribed)
	w.attempt().elsewhere()
	w.attempt().elsewhere()
	w.grantIt()
	c.holds()
	return c
}

// grantIt has a release elsewhere grant the latest offer.
func (w *world) grantIt() { w.offer().grantFor(500*time.Millisecond, 400*time.Millisecond) }

// expects makes a flight that has rejoined, and expects its next caller: two have come back soon before.
func (w *world) expects(t *testing.T) {
	t.Helper()
	w.first()
	for range 2 {
		w.history()
		w.served().releases()
	}
	h := w.history()
	if n := len(h); n < 2 || h[n-2] != "rejoin for 450ms" || h[n-1] != "release" {
		t.Fatalf("no release has brought an offer: %q", h)
	}
}

// cameBack makes a caller that has come back, and holds the key by the offer of the release before.
func (w *world) cameBack(t *testing.T) *caller {
	t.Helper()
	w.expects(t)
	c := w.start(endless)
	w.grantIt()
	c.holds()
	w.history()
	return c
}

// wantNoRejoin says that no release since the last look has brought an offer.
func (w *world) wantNoRejoin() {
	w.t.Helper()
	for _, h := range w.history() {
		if h == "rejoin for 450ms" {
			w.t.Error(h)
		}
	}
}

// endless makes a caller of a strategy that never gives up.
func endless(w *wish) { w.pace = never(time.Millisecond) }

// A caller that comes back before its turn waits for the offer that the release has brought, and asks
// nothing; and so does the next.
func TestACallerThatComesBackAsksNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		for range 3 {
			pass(time.Millisecond)
			c := w.start(endless)
			pass(20 * time.Millisecond)
			w.wantHistory()
			w.grantIt()
			c.holds()
			c.releases()
			w.wantHistory("offer as owner-1", "rejoin for 450ms", "release")
		}
		is(t, "grants", w.g.Counts(Counts{}).Grants, 6)
		pass(time.Second)
	}, rejoining)
}

// The offer is brought again by polls, as any other.
func TestACallerThatComesBackPolls(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		c := w.start(endless)
		pass(179 * time.Millisecond)
		w.wantHistory()
		pass(2 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		c.leaves()
		w.attempt().elsewhere()
		w.wantHistory("withdraw")
	}, rejoining)
}

// Callers that do not come back soon, or not yet often enough, have releases bring nothing.
func TestWhoDoesNotComeBackSoonIsNotExpected(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.first()
		for i := range 6 {
			w.served().releases()
			if i%2 == 0 {
				pass(5 * time.Millisecond)
			}
		}
		w.wantNoRejoin()
	}, rejoining)
}

// The key that is granted before the caller has come is kept for it for a moment.
func TestAGrantBeforeTheCallerComes(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		w.grantIt()
		pass(time.Millisecond / 2)
		w.wantHistory()
		is(t, "held", w.g.Counts(Counts{}).Held, 0)
		c := w.start()
		c.holds()
		c.releases()
		w.wantHistory("offer as owner-1", "rejoin for 450ms", "release")

		w.grantIt() // and nobody comes
		pass(time.Millisecond + time.Microsecond)
		w.wantHistory("release")
		is(t, "is subscribed, and no more", w.staysSubscribed(), true)

		// That was a mistake, so the next ones are not expected.
		for range 9 {
			w.served().releases()
		}
		w.wantNoRejoin()
	}, rejoining)
}

// A caller that does not come is not waited for.
func TestACallerThatDoesNotCome(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		pass(maxExpected + time.Microsecond)
		w.wantHistory("withdraw")
		is(t, "is subscribed, and no more", w.staysSubscribed(), true)
	}, rejoining)
}

// However long a flight has waited, it does not expect its next caller for longer than until its next poll.
func TestACallerIsNotExpectedForLong(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		c := w.start(endless)
		for range 10 {
			pass(200 * time.Millisecond)
			w.attempt().elsewhere()
		}
		w.grantIt()
		c.holds()
		c.releases()
		w.history()
		pass(180*time.Millisecond + time.Microsecond)
		w.wantHistory("withdraw")
	}, rejoining)
}

// Where nobody else waits, the nodes know of no offer, and the next caller contends at once.
func TestNobodyElseWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.cameBack(t)
		w.alone()
		c.releases()
		w.wantHistory("offer as owner-1", "rejoin for 450ms", "release", "withdraw")
		is(t, "is subscribed, and no more", w.staysSubscribed(), true)
		w.now((*fakeAttempt).grant)
		c = w.start()
		c.holds()
		c.releases()
	}, rejoining)
}

// One that comes while the release is on its way contends when the nodes have said that they know of no
// offer, or when the release fails.
func TestACallerComesBeforeTheReleaseIsConfirmed(t *testing.T) {
	for _, failure := range []error{nil, errDown} {
		inBubble(t, func(t *testing.T, w *world) {
			first := w.cameBack(t)
			w.alone()
			var sent *fakeLease
			w.release = func(l *fakeLease) { sent = l }
			go first.h.Release()
			synctest.Wait()
			next := w.start(endless)
			w.wantHistory("offer as owner-1", "rejoin for 450ms", "release")
			sent.released(failure)
			w.wantHistory("carry for 450ms true", "acquire as owner-1")
			w.release = func(l *fakeLease) { l.released(nil) }
			w.attempt().grant()
			next.holds()
			w.wantHistory("forget")
			next.releases()
			if failure == nil { // nobody else waits, as far as is known
				w.wantNoRejoin()
			}
		}, rejoining)
	}
}

// A caller that may give up at the first failure makes an attempt, which brings the offer again.
func TestAnImpatientCallerComesBack(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		c := w.start(pace(limited{}))
		w.wantHistory("carry for 450ms false", "acquire as owner-1")
		w.attempt().elsewhere()
		c.failed(0, errTaken)
		w.wantHistory("withdraw")
	}, rejoining)
}

// A turn that comes for nobody is passed on.
func TestATurnForNobody(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		w.news(quorum.OurTurn)
		w.wantHistory("withdraw")
	}, rejoining)
}

// An offer that has failed is withdrawn.
func TestAnOfferForNobodyFails(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		w.offer().fail(quorum.Failure{Err: errTaken})
		w.wantHistory("leave owner-1")
	}, rejoining)
}

// Close ends flights that expect callers, and returns what was granted to them.
func TestCloseExpectsNobody(t *testing.T) {
	for _, granted := range []bool{false, true} {
		inBubble(t, func(t *testing.T, w *world) {
			w.expects(t)
			want := []string{"stop owner-1", "withdraw"}
			if granted {
				w.grantIt()
				want = []string{"release", "stop owner-1"}
			}
			if w.g.Close(context.Background()) {
				t.Error("a holder was ended")
			}
			w.wantHistory(want...)
		}, rejoining)
	}
}

// A turn that comes while the release is being sent is not lost, whether the next caller has come or not.
func TestATurnWhileTheReleaseIsSent(t *testing.T) {
	for _, waits := range []bool{false, true} {
		inBubble(t, func(t *testing.T, w *world) {
			first := w.cameBack(t)
			var next *caller
			w.release = func(l *fakeLease) {
				w.release = func(l *fakeLease) { l.released(nil) }
				if waits {
					next = w.start(endless)
				}
				w.news(quorum.OurTurn)
				l.released(nil)
			}
			first.releases()
			pass(time.Millisecond)
			if waits {
				w.wantHistory("offer as owner-1", "rejoin for 450ms", "release", "carry for 450ms true",
					"acquire as owner-1")
				w.attempt().grant()
				next.holds()
				next.releases()
				pass(time.Second)
			} else {
				w.wantHistory("offer as owner-1", "rejoin for 450ms", "release", "withdraw")
			}
		}, rejoining)
	}
}

// What was published before a subscription was renewed was missed: the next caller asks the nodes.
func TestASubscriptionRenewedWhileNobodyWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		w.news(quorum.Unsubscribed)
		w.news(quorum.Subscribed)
		c := w.start(endless)
		pass(5 * time.Millisecond)
		w.wantHistory("carry for 450ms true", "acquire as owner-1")
		w.attempt().grant()
		c.holds()
		c.releases()
		pass(time.Second)
	}, rejoining)
}

// Close does not wait for callers that are expected.
func TestCloseWhileTheReleaseIsSent(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		first := w.start(endless)
		pass(100 * time.Millisecond) // expected for as long
		w.grantIt()
		first.holds()
		closed := make(chan time.Duration, 1)
		w.release = func(l *fakeLease) {
			w.release = func(l *fakeLease) { l.released(nil) }
			go func() {
				began := time.Now()
				w.g.Close(context.Background())
				closed <- time.Since(began)
			}()
			synctest.Wait()
			l.released(nil)
		}
		first.releases()
		if took := <-closed; took > time.Millisecond {
			t.Errorf("Close has taken %v", took)
		}
	}, rejoining)
}

// With a short ttl, a caller is not expected for longer than until the next poll would be due.
func TestACallerIsNotExpectedForLongerThanAShortPoll(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		short := func(c *wish) { c.ttl = 100 * time.Millisecond }
		first := w.byHand().start(short)
		w.attempt().elsewhere()
		w.news(quorum.Subscribed)
		w.attempt().elsewhere()
		w.grantIt()
		first.holds()
		first.releases()
		for range 2 {
			w.served(short).releases()
		}
		c := w.start(endless, short)
		for range 4 { // polls are due every 40 ms
			pass(41 * time.Millisecond)
			w.attempt().elsewhere()
		}
		w.grantIt()
		c.holds()
		w.history()
		c.releases()
		w.wantHistory("offer as owner-1", "rejoin for 100ms", "release")
		pass(45 * time.Millisecond)
		w.wantHistory("withdraw")
	}, rejoining)
}

// Leases that are lost, or whose work has failed, are released as ever.
func TestOnlyAReleaseRejoins(t *testing.T) {
	for name, end := range map[string]func(*caller){
		"failed": func(c *caller) { _ = c.h.ReleaseFailed() },
		"over":   func(*caller) { pass(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.expects(t)
				c := w.start(endless)
				w.grantIt()
				c.holds()
				w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errors.New("down")}) }
				w.history()
				end(c)
				w.wantNoRejoin()
			}, rejoining)
		})
	}
}

// What a release brings is for the ttl of who has released the key, and not of the first caller that the
// flight ever had: it need not die for as long as callers come back.
func TestARejoiningFlightFollowsTheTTL(t *testing.T) {
	for _, c := range []struct {
		before, now time.Duration
		want        string
	}{
		// else 450ms: longer than any of them has asked for
		{10 * time.Second, 200 * time.Millisecond, "rejoin for 200ms"},
		{100 * time.Millisecond, 10 * time.Second, "rejoin for 450ms"}, // else 100ms: polls every 40 ms
	} {
		t.Run(c.now.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				first := w.meetsRivals(ttl(c.before))
				w.grantIt()
				first.holds()
				first.releases()
				for range 2 {
					w.served(ttl(c.before)).releases()
				}
				for i := range 5 {
					next := w.start(endless, ttl(c.now))
					w.grantIt()
					next.holds()
					w.history()
					next.releases()
					if h := w.history(); !slices.Contains(h, c.want) {
						t.Errorf("caller %d with a ttl of %v, after some with %v: %q, want %q", i, c.now, c.before, h, c.want)
					}
				}
				pass(time.Second)
			}, rejoining)
		})
	}
}

// A caller whose ctx ends while it waits for the offer that the release has brought learns that others have
// the key.
func TestACallerThatIsExpectedLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.expects(t)
		c := w.start(endless)
		pass(100 * time.Millisecond)
		c.leaves()
		c.failed(100*time.Millisecond, context.Canceled, passedOn.Err)
	}, rejoining)
}

// A caller that may give up at the first failure, and comes while the release is being sent, makes an
// attempt, as one that comes right after that does: its strategy has met no failure so far. (Here the key is
// free: nobody else waits.)
func TestAnImpatientCallerComesWhileTheReleaseIsSent(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.cameBack(t)
		w.alone()
		w.now((*fakeAttempt).grant)
		var next *caller
		var sent *fakeLease
		w.release = func(l *fakeLease) { // returns before there is an answer, as with several nodes
			w.release = func(l *fakeLease) { l.released(nil) }
			sent, next = l, w.launch(pace(limited{}))
			time.Sleep(time.Microsecond) // until it is in the queue
		}
		go func() { _ = first.h.Release() }()
		pass(2 * time.Microsecond)
		synctest.Wait()
		sent.released(nil)
		next.holds()
		next.releases()
	}, rejoining)
}

// A caller whose strategy gives up at the first failure is given the lease that was kept.
func TestAGrantBeforeAnImpatientCallerComes(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.cameBack(t)
		first.releases()
		w.grantIt()
		next := w.start(pace(limited{}))
		next.holds()
		next.releases()
		pass(time.Second)
	}, rejoining)
}

// A caller that comes when the kept lease is being returned, because nobody has come for it, makes no attempt
// before that was sent: it would find the key held by its own process. So where the flight's caller has left
// while the key was granted.
func TestNothingBeginsBeforeTheKeptLeaseIsReturned(t *testing.T) {
	for name, returned := range map[string]func(w *world){
		"nobody came": func(w *world) {
			w.expects(w.t)
			w.grantIt()
		},
		"it has left": func(w *world) {
			c := w.waitsWithOffer()
			pass(180 * ms) // until the next poll
			w.cancel = nil
			w.grantIt()
			c.leaves()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				returned(w)
				o, launched := w.offer(), make(chan *caller, 1)
				w.mu.Lock()
				o.beforeRelease = func() {
					launched <- w.launch()
					time.Sleep(time.Microsecond) // until it has done what it can
				}
				w.mu.Unlock()
				w.history()
				if a := w.attempt(); name == "it has left" {
					w.cancel = func(a *fakeAttempt) { a.fail(quorum.Failure{Err: errTaken}) }
					a.elsewhere()
				}
				pass(2 * ms)
				h := w.history()
				if len(h) == 0 || h[0] != "release" {
					t.Errorf("%q, want the release first", h)
				}
				w.attempt().grant()
				next := <-launched
				next.holds()
				next.releases()
				pass(time.Second)
			}, rejoining)
		})
	}
}
