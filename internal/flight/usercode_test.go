package flight

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// blocking is a strategy that answers when a test says so.
type blocking struct {
	asked   chan int
	answers chan bool
}

func newBlocking() blocking { return blocking{make(chan int, 10), make(chan bool)} }

func (b blocking) Next(n int) (time.Duration, bool) {
	b.asked <- n
	return 10 * ms, <-b.answers
}

// A strategy runs on its caller's goroutine, with no mutex held: it may use the group.
func TestAStrategyMayUseTheGroup(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		waiters := make(chan int64, 2)
		p := custom(func(int) (time.Duration, bool) {
			waiters <- w.g.Counts().Waiters
			return 10 * ms, true
		})
		front := w.start(pace(p))
		w.attempt().held(time.Second)
		synctest.Wait()
		is(t, "waiting", <-waiters, 1)
		front.leaves()
	})
}

// While a strategy blocks, the next in the queue makes the attempts, and gets the lease.
func TestWhoIsThereGoesFirst(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)), w.start()
		w.attempt().taken(time.Hour)
		synctest.Wait()
		is(t, "asked", <-b.asked, 1)
		w.history()
		pass(maxPoll - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("watch owner-1", "acquire as owner-1")
		w.attempt().grantBlock(10)
		next.holds()
		front.waits()
		next.releases()
		b.answers <- true
		front.holds().Release()
	})
}

// One whose ctx ends while its strategy blocks makes no attempt any more, though one is due.
func TestOneThatIsLeavingMakesNoAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front := w.start(pace(b))
		w.attempt().taken(time.Hour)
		pass(maxPoll)
		front.cancel()
		b.answers <- true
		front.failed(maxPoll, context.Canceled)
		is(t, "attempts", w.asked(), 1)
	})
}

// ... also when its turn comes meanwhile.
func TestTheTurnOfOneThatIsAwayIsTaken(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		end := make(chan struct{})
		front := w.start(pace(custom(func(int) (time.Duration, bool) { <-end; return 10 * ms, true })))
		w.attempt().taken(time.Hour)
		synctest.Wait()
		next := w.start()
		pass(maxPoll)
		w.attempt().taken(time.Hour)
		w.news(quorum.OurTurn)
		is(t, "attempts", w.asked(), 3)
		w.attempt().grant()
		next.holds()
		close(end)
		front.waits()
		next.releases()
		front.holds().Release()
	})
}

// One whose strategy has returned behind a holder of its process gives up in its own time.
func TestOneThatComesBackBehindAHolderIsBoundedStill(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		p := custom(func(n int) (time.Duration, bool) {
			if n == 1 {
				time.Sleep(200 * ms)
			}
			return 100 * ms, n <= 4
		})
		front, next := w.start(pace(p)), w.start()
		w.attempt().held(0)
		pass(maxPoll)
		w.attempt().grantBlock(10)
		next.holds()
		pass(200*ms - maxPoll)
		front.waits()
		time.Sleep(time.Second)
		front.failed(400*ms, errBusy)
		next.releases()
	})
}

// With nobody else there, the lease is given to the caller whose strategy still blocks: it has it
// when the strategy returns.
func TestALeaseWaitsForTheOnlyOne(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)), w.start()
		w.attempt().held(0)
		pass(maxPoll)
		next.leaves() // its attempt goes on
		w.attempt().grant()
		synctest.Wait()
		is(t, "held", w.g.Counts().Held, 1)
		b.answers <- false // too late
		front.holds().Release()
	})
}

// An outcome that ends all waiting ends that of a caller whose strategy blocks, when it returns.
func TestARefusalWaitsForOneThatIsAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)), w.start()
		w.attempt().held(0)
		pass(maxPoll)
		w.attempt().final()
		next.failed(maxPoll, errFinal)
		front.waits()
		b.answers <- true
		front.failed(maxPoll, errFinal)
	})
}

// A strategy or a lookup that panics, or ends the goroutine, leaves nothing behind: the next caller
// makes the attempts, and a lease that came meanwhile is handed on.
func TestUserCodeThatDoesNotReturn(t *testing.T) {
	for name, how := range map[string]func(){"panic": func() { panic(name("no")) }, "Goexit": runtime.Goexit} {
		for _, looks := range []bool{false, true} {
			for _, granted := range []bool{false, true} {
				t.Run(name, func(t *testing.T) {
					inBubble(t, func(t *testing.T, w *world) {
						w.byHand()
						end, done := make(chan struct{}), make(chan any, 1)
						broken := func() { <-end; how() }
						go func() {
							defer func() { done <- recover() }()
							if looks {
								lookup := func(context.Context) bool { broken(); return false }
								_, _ = w.g.AcquireUnless(t.Context(), "k", &Ticket{}, time.Second, patient, lookup)
							} else {
								strategy := custom(func(int) (time.Duration, bool) { broken(); return 0, true })
								_ = w.g.Acquire(t.Context(), "k", &Ticket{}, time.Second, strategy, Queue)
							}
						}()
						synctest.Wait()
						w.attempt().taken(time.Hour)
						synctest.Wait()
						if looks {
							w.news(quorum.OurTurn)
						}
						next := w.start()
						if granted {
							pass(maxPoll)
							next.leaves()
							w.attempt().grant() // nobody else is there
							synctest.Wait()
							is(t, "held", w.g.Counts().Held, 1)
						}
						close(end)
						if v := <-done; (v != nil) != (name == "panic") {
							t.Errorf("%v", v)
						}
						synctest.Wait()
						if !granted {
							if w.attempt().decided {
								pass(maxPoll)
							}
							w.attempt().grant()
							next.holds().Release()
						}
					})
				})
			}
		}
	}
}

type name string

// A slow strategy of a caller behind others delays nobody, and is not called for every event that
// might come.
func TestASlowStrategyBehindOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.rich().start()
		asked := 0
		c := w.launch(pace(custom(func(int) (time.Duration, bool) {
			asked++
			time.Sleep(20 * ms)
			return 5 * ms, true
		})))
		time.Sleep(time.Second)
		synctest.Wait()
		if asked > 50 {
			t.Errorf("asked %d times in a second", asked)
		}
		next := w.start()
		first.releases()
		time.Sleep(50 * ms)
		if !c.returned() {
			next.holds().Release()
			time.Sleep(50 * ms)
			c.holds().Release()
			return
		}
		c.holds().Release()
		next.holds().Release()
	})
}

// The front waiter was woken for an attempt that is due, then for a lookup, and before it could do
// either its ctx ended: the next one makes the attempt.
func TestADriverThatIsToLookAndLeavesPassesOnWhatIsDue(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.looks()
		w.heldBy("x")
		next := w.start()
		w.news(quorum.Subscribed)
		w.heldBy("x")
		w.history()
		f := w.g.find("k")
		f.mu.Lock()
		front.cancel()
		f.attemptNowLocked()
		f.wakeLookersLocked()
		f.mu.Unlock()
		synctest.Wait()
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		next.holds().Release()
	})
}

// One that leaves from its look, or that is about to look, leaves the pace to the strategy of the
// next.
func TestTheNextStrategyPacesAfterALook(t *testing.T) {
	for _, found := range []bool{false, true} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			front := w.looks(pace(never(time.Hour)))
			w.attempt().split(time.Hour)
			synctest.Wait()
			w.news(quorum.Subscribed)
			w.attempt().split(time.Hour)
			next := w.start(pace(never(10 * ms)))
			synctest.Wait()
			w.history()
			if found {
				front.found.Store(true)
				w.news(quorum.OtherTurn)
			} else {
				front.leaves()
			}
			pass(10 * ms)
			w.wantHistory("acquire as owner-1")
			w.attempt().grant()
			next.holds().Release()
		})
	}
}
