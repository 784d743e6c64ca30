package flight

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// closes begins a Close whose ctx ends after d; forced reports how it ended.
func (w *world) closes(d time.Duration) (forced chan bool, cancel func()) {
	ctx, cancel := context.WithTimeout(w.t.Context(), d)
	forced = make(chan bool, 1)
	go func() {
		forced <- w.g.Close(ctx)
		w.mu.Lock()
		w.note("closed")
		w.mu.Unlock()
	}()
	synctest.Wait()
	return forced, cancel
}

func (w *world) closed(forced chan bool, want bool) {
	w.t.Helper()
	synctest.Wait()
	select {
	case got := <-forced:
		is(w.t, "forced", got, want)
	default:
		w.t.Fatal("Close has not returned")
	}
}

// Close fails all waiters, and lets the holder finish.
func TestCloseFailsWaitersAndLetsHoldersFinish(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder, a, b := w.start(), w.start(), w.start(pace(limited{time.Second, 9}))
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		a.failed(0, errClosed)
		b.failed(0, errClosed)
		w.start().failed(0, errClosed)
		w.start(key("other")).failed(0, errClosed)
		is(t, "closed", len(forced), 0)
		holder.holds().Refresh(time.Second, func(err error) { is(t, "refresh", err, nil) })
		holder.releases()
		w.closed(forced, false)
	})
}

// When ctx ends, holders are ended with cause Closed, and their leases released. Who closes the nodes next
// waits for the answers.
func TestCloseEndsHoldersWhenItsContextEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.release = nil
		holder, another := w.start(), w.start(key("another"))
		why := make(chan error, 1)
		holder.holds().OnEnd(func(err error) { why <- err })
		forced, cancel := w.closes(time.Second)
		defer cancel()
		time.Sleep(time.Second)
		synctest.Wait()
		is(t, "why", <-why, errClosed)
		is(t, "another", another.h.Err(), errClosed)
		w.closed(forced, true)
		for _, l := range w.leases {
			l.released(nil)
		}
		err := holder.h.Release()
		is(t, "release", errors.Is(err, errClosed), true)
		is(t, "ends", holder.ends, 1)
	})
}

// A holder that hangs does not keep Close beyond its Until.
func TestCloseWaitsForExpiry(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.start(ttl(time.Second)).holds()
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		time.Sleep(time.Second)
		w.closed(forced, false)
	})
}

// Close during an attempt cancels it, and waits until its outcome is known; if it wins all the
// same, the lease is released.
func TestCloseDuringAttempt(t *testing.T) {
	for name, end := range map[string]func(*fakeAttempt){
		"held": func(a *fakeAttempt) { a.held(0) }, "grant": (*fakeAttempt).grant,
	} {
		for _, wait := range []time.Duration{time.Hour, 0} {
			t.Run(fmt.Sprint(name, wait), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.byHand()
					w.cancel = nil
					c := w.start()
					forced, cancel := w.closes(wait)
					defer cancel()
					c.failed(0, errClosed)
					is(t, "cancelled", w.attempt().cancelled, true)
					is(t, "closed", len(forced), 0)
					end(w.attempt())
					w.closed(forced, false)
				})
			})
		}
	}
}

// Close during a renewal that nobody waits for any more releases the lease, and waits for that even
// if its ctx has ended.
func TestCloseDuringRenewal(t *testing.T) {
	for _, wait := range []time.Duration{time.Hour, 0} {
		t.Run(fmt.Sprint(wait), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.refresh = nil
				holder, next := w.poor().start(), w.start()
				holder.releases() // no token
				forced, cancel := w.closes(wait)
				defer cancel()
				next.failed(0, errClosed)
				is(t, "closed", len(forced), 0)
				w.renewal(1).confirm()
				w.closed(forced, false)
				is(t, "order", slices.Index(w.log, "release") < slices.Index(w.log, "closed"), true)
			})
		})
	}
}

// Close during a pause ends it.
func TestCloseDuringPause(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.down(0)
		a, b := w.start(), w.start(pace(limited{time.Second, 9}))
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		a.failed(0, errClosed)
		b.failed(0, errClosed)
		w.closed(forced, false)
	})
}

// Close returns only when every release has been sent: the nodes are closed next.
func TestCloseWaitsForReleasesToBeSent(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.start()
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		holder.h.OnEnd(func(error) { synctest.Wait() }) // all others get as far as they can
		holder.releases()
		w.closed(forced, false)
		is(t, "order", slices.Index(w.log, "release") < slices.Index(w.log, "closed"), true)
	})
}

// One that comes while Close waits for a canceled attempt is refused, and Close goes on waiting.
func TestOneThatComesDuringCloseDoesNotEndAnAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand().cancel = nil
		a := w.start()
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		a.failed(0, errClosed)
		w.start().failed(0, errClosed)
		synctest.Wait()
		is(t, "closed before the attempt has ended", len(forced), 0)
		w.attempt().held(0)
		w.closed(forced, false)
	})
}

// ... or for a release.
func TestOneThatComesDuringCloseDoesNotEndARelease(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sent := make(chan struct{})
		w.release = func(l *fakeLease) { <-sent; l.released(nil) }
		a := w.start()
		go func() { _ = a.h.Release() }()
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		w.start().failed(0, errClosed)
		synctest.Wait()
		is(t, "closed before the release was sent", len(forced), 0)
		close(sent)
		w.closed(forced, false)
	})
}

// A flight that was found before Close and is joined after it accepts nobody.
func TestJoinAfterClose(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		f := w.g.find("k")
		forced, cancel := w.closes(time.Hour)
		defer cancel()
		is(t, "closed", len(forced), 0)
		h := &Ticket{ttl: time.Second, waiter: w.g.newWaiter(context.Background(), patient, nil)}
		_, err := f.join(h)
		is(t, "err", err, errClosed)
		is(t, "waiting", f.n, 0)
		w.closed(forced, false)
		is(t, "attempts", w.asked(), 0)
	})
}

// A caller that joins while the group closes gets the lock or Closed, and nothing hangs.
func TestJoinRacingClose(t *testing.T) {
	for range 50 {
		w := newWorld(t)
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() {
				for {
					var h Ticket
					err := w.g.Acquire(t.Context(), fmt.Sprint(i%4), &h, 10*time.Second, patient)
					switch {
					case err == nil:
						if err := h.Release(); err != nil && !errors.Is(err, errClosed) {
							t.Error(err)
						}
					case errors.Is(err, errClosed):
						return
					case !errors.Is(err, errBusy):
						t.Error(err)
						return
					}
				}
			})
		}
		all.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			if rand.N(2) == 0 {
				cancel()
			}
			defer cancel()
			w.g.Close(ctx)
		})
		all.Wait()
		w.emptyNow()
	}
}

// With real goroutines: whichever ctx ends around the grant, exactly one holds at a time, every
// caller returns, and nothing is lost.
func TestStressCancelAroundTheGrant(t *testing.T) {
	w := newWorld(t)
	w.acquire = func(a *fakeAttempt) { go a.grant() }
	w.refresh = func(r *fakeRefresh) { go r.confirm() }
	w.release = func(l *fakeLease) { go l.released(nil) }
	w.cancel = func(a *fakeAttempt) { go a.fail(quorum.Failure{Err: errTaken}) }
	var (
		all     sync.WaitGroup
		mu      sync.Mutex // guards what follows
		holding int
		fence   int64
		served  int
	)
	for i := range 16 {
		all.Go(func() {
			for range 500 {
				ctx, cancel := context.WithCancel(t.Context())
				if i%4 != 0 {
					go func() {
						for range rand.N(20) {
							mu.Lock() // something to do, of about the time of a handoff
							mu.Unlock()
						}
						cancel()
					}()
				}
				var h Ticket
				if err := w.g.Acquire(ctx, "k", &h, 10*time.Second, patient); err == nil {
					mu.Lock()
					if holding++; holding != 1 {
						t.Error("two hold")
					}
					if h.Fence() <= fence {
						t.Error("fence")
					}
					fence = h.Fence()
					served++
					holding--
					mu.Unlock()
					if err := h.Release(); err != nil {
						t.Error(err)
					}
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if served < 4*500 {
		t.Errorf("%d were served", served)
	}
	w.emptySoon()
}

// Close returns when no flight is subscribed any more and every want has been removed: the nodes
// are closed next.
func TestCloseWaitsForTheLastToLeave(t *testing.T) {
	for _, what := range []string{"watch", "stop", "leave"} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.byHand()
				goOn := make(chan struct{})
				block := func(here string) {
					if here == what {
						<-goOn
					}
				}
				watch, leave := w.nodes.watch, w.nodes.leave
				w.nodes.watch = func(key, contender string, hear func(quorum.Event)) func() {
					stop := watch(key, contender, hear)
					block("watch")
					return func() { block("stop"); stop() }
				}
				w.nodes.leave = func(key, contender string) { block("leave"); leave(key, contender) }
				c := w.start()
				go w.attempt().taken(0)
				pass(maxPoll)
				if what != "watch" {
					w.attempt().taken(time.Hour)
				}
				c.leaves()
				closed := make(chan struct{})
				go func() {
					w.g.Close(context.Background())
					close(closed)
				}()
				synctest.Wait()
				select {
				case <-closed:
					t.Error("Close has returned")
				default:
				}
				close(goOn)
				<-closed
				w.mu.Lock()
				w.desertedLocked()
				w.mu.Unlock()
			})
		})
	}
}

// Close refuses callers that wait for another process, and their wants are removed.
func TestCloseOfAContender(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		a := w.listens()
		b := w.start()
		w.g.Close(context.Background())
		a.failed(0, errClosed)
		b.failed(0, errClosed)
		w.wantHistory("stop owner-1", "leave owner-1")
	})
}
