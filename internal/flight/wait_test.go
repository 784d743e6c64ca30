package flight

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

const ms = time.Millisecond

// down answers every attempt with a failure, and notes when it began.
func (w *world) down(free time.Duration) *[]time.Duration {
	begin := time.Now()
	var at []time.Duration
	w.acquire = func(a *fakeAttempt) {
		at = append(at, time.Since(begin))
		a.held(free)
	}
	return &at
}

func sameTimes(t *testing.T, got, want []time.Duration) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("attempts at %v, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("attempts at %v, want %v", got, want)
		}
	}
}

// The front waiter's strategy paces real attempts: one, and as many retries as it allows.
func TestFrontWaitersStrategyPacesTheAttempts(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(0)
		c := w.start(pace(limited{10 * ms, 5}))
		time.Sleep(time.Second)
		c.failed(50*ms, errTaken)
		sameTimes(t, *at, []time.Duration{0, 10 * ms, 20 * ms, 30 * ms, 40 * ms, 50 * ms})
	})
}

// Without retries, one attempt.
func TestNoRetryMakesOneAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(time.Second)
		w.start(pace(limited{})).failed(0, errTaken)
		sameTimes(t, *at, []time.Duration{0})
	})
}

// ... and none on a key that is busy here.
func TestNoRetryOnABusyKeyFailsAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.start()
		w.start(pace(limited{})).failed(0, errBusy)
		w.start(pace(limited{time.Second, 0})).failed(0, errBusy)
		is(t, "attempts", w.asked(), 1)
		holder.releases()
	})
}

// When the key could be free before the strategy's next turn, the flight polls then; that
// poll is not one of the strategy's retries.
func TestPollAheadOfTimeEatsNoRetry(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(0)
		frees := []time.Duration{4 * ms, 3 * ms, 0, time.Second, 0, -1, 0, 0}
		begin := time.Now()
		w.acquire = func(a *fakeAttempt) {
			*at = append(*at, time.Since(begin))
			a.held(frees[len(*at)-1])
		}
		c := w.start(pace(limited{10 * ms, 3}))
		time.Sleep(time.Second)
		c.failed(30*ms, errTaken)
		sameTimes(t, *at, []time.Duration{0, 4 * ms, 7 * ms, 10 * ms, 20 * ms, 30 * ms})
	})
}

// A queued waiter gives up when its strategy would have given up against Redis, whoever
// holds, and whatever the front waiter does.
func TestQueuedWaiterGivesUpInItsOwnTime(t *testing.T) {
	for name, front := range map[string]Pace{
		"never": never(3 * ms), "slow": never(time.Hour), "limited": limited{7 * ms, 2},
		"long": limited{time.Second, 100},
	} {
		for _, held := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					if !held {
						w.down(0)
					}
					first := w.start(pace(front))
					second := w.start(pace(front))
					time.Sleep(ms)
					c := w.start(pace(limited{10 * ms, 5}))
					time.Sleep(time.Second)
					synctest.Wait()
					if held {
						c.failed(50*ms, errBusy)
						first.holds()
					} else {
						c.failed(50*ms, errTaken)
					}
					second.leaves()
					first.leaves()
					if held {
						first.releases()
					}
				})
			})
		}
	}
}

// A waiter that becomes the front waiter has what is left of its strategy: by release,
func TestPromotedWaiterHasWhatIsLeftOfItsStrategy(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.poor().start()
		c := w.start(pace(limited{10 * ms, 5}))
		time.Sleep(25 * ms)
		at := w.down(0)
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		holder.releases() // no token: back to the nodes
		time.Sleep(time.Second)
		c.failed(50*ms, errTaken)
		sameTimes(t, *at, []time.Duration{0, 5 * ms, 15 * ms, 25 * ms})
	})
}

// ... because the front waiter gives up,
func TestPromotedByGivingUpHasWhatIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(0)
		w.start(pace(limited{15 * ms, 1}))
		c := w.start(pace(limited{10 * ms, 5}))
		time.Sleep(time.Second)
		c.failed(50*ms, errTaken)
		sameTimes(t, *at, []time.Duration{0, 15 * ms, 20 * ms, 30 * ms, 40 * ms, 50 * ms})
	})
}

// ... because the front waiter leaves while an attempt is in progress.
func TestPromotedDuringAnAttemptHasWhatIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		c := w.start(pace(limited{10 * ms, 5}))
		time.Sleep(38 * ms)
		front.leaves()
		at := w.down(0)
		w.attempts[0].held(0)
		time.Sleep(time.Second)
		c.failed(50*ms, errTaken)
		sameTimes(t, *at, []time.Duration{2 * ms, 12 * ms})
	})
}

// A waiter that becomes the front waiter during a pause does not wait for the end of a pause of the
// one that left.
func TestPauseFollowsTheNewFrontWaiter(t *testing.T) {
	for name, p := range map[string]Pace{"never": never(10 * ms), "limited": limited{10 * ms, 100}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				at := w.down(0)
				front := w.start(pace(never(time.Hour)))
				next := w.start(pace(p))
				time.Sleep(5 * ms)
				front.leaves()
				time.Sleep(20 * ms)
				synctest.Wait()
				if len(*at) < 2 {
					t.Fatalf("attempts at %v", *at)
				}
				w.now((*fakeAttempt).grant)
				time.Sleep(10 * ms)
				next.holds().Release()
			})
		})
	}
}

// ... nor is the key polled at the pace of one that left.
func TestPauseBecomesAsLongAsTheNewFrontWaiters(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(0)
		front := w.start(pace(never(10 * ms)))
		next := w.start(pace(never(time.Minute)))
		time.Sleep(5 * ms)
		front.leaves()
		time.Sleep(time.Second)
		synctest.Wait()
		is(t, "attempts", len(*at), 1)
		next.leaves()
	})
}

// A long strategy has an end too.
func TestLongStrategyEnds(t *testing.T) {
	for _, p := range []limited{{ms, 20_000}, {time.Hour, 30}, {2 * ms, 7_777}} {
		inBubble(t, func(t *testing.T, w *world) {
			holder := w.start(ttl(1000 * time.Hour))
			c := w.start(pace(p))
			time.Sleep(p.interval*time.Duration(p.max) - 1)
			c.waits()
			time.Sleep(1)
			c.failed(p.interval*time.Duration(p.max), errBusy)
			holder.releases()
		})
	}
}

// Whoever leaves from behind in a pause changes nothing for the front waiter, also in the
// instant in which its next attempt is due.
func TestLeavingFromBehindIsNoFailure(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.down(0)
		front := w.start(pace(limited{10 * ms, 3}))
		behind := w.start()
		f := w.g.find("k")
		f.silence() // as late as an alarm may be
		time.Sleep(10 * ms)
		behind.leaves()
		is(t, "delays left", len(front.h.waiter.plan.delays), 2)
		front.leaves()
	})
}

// Strategies may return anything.
func TestOddStrategiesAreSafe(t *testing.T) {
	huge := time.Duration(math.MaxInt64)
	for name, p := range map[string]Pace{
		"zero":          custom(func(int) (time.Duration, bool) { return 0, true }),
		"negative":      custom(func(int) (time.Duration, bool) { return -time.Hour, true }),
		"most negative": custom(func(int) (time.Duration, bool) { return math.MinInt64, true }),
		"nanosecond":    custom(func(int) (time.Duration, bool) { return 1, true }),
		"huge":          custom(func(int) (time.Duration, bool) { return huge, true }),
		"huge, limited": custom(func(n int) (time.Duration, bool) { return huge, n < 3 }),
		"overflows": custom(func(n int) (time.Duration, bool) {
			return max(ms, time.Duration(min(n-1, 1))*huge), n < 4
		}),
		"grows": custom(func(n int) (time.Duration, bool) { return huge >> max(0, 60-n), n < 60 }),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				at := w.down(0)
				front, next := w.start(pace(p)), w.start(pace(p))
				time.Sleep(100 * ms)
				front.waits()
				next.waits()
				if n := len(*at); n > 101 {
					t.Errorf("%d attempts in 100ms", n)
				}
				front.leaves()
				w.acquire = (*fakeAttempt).grant
				third := w.start()
				next.leaves()
				third.leaves()
				if third.err == nil {
					third.releases()
				}
			})
		})
	}
}

// A waiter has one timer, and none if its strategy is endless; it is stopped when the wait
// is over.
func TestWaiterHasOneTimerAtMost(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.rich().start(pace(limited{ms, 1}))
		endless, limited := w.start(), w.start(pace(limited{time.Second, 3}))
		is(t, "holder's", holder.h.waiter == nil, true)
		is(t, "endless", endless.h.waiter.giveUpTimer == nil, true)
		is(t, "limited", limited.h.waiter.giveUpTimer != nil, true)
		giveUpTimer := limited.h.waiter.giveUpTimer
		holder.releases()
		endless.releases()
		limited.holds()
		is(t, "timer still runs", giveUpTimer.Stop(), false)
		limited.releases()
	})
}

// A strategy whose time comes while the attempt for it is under way waits for that.
func TestLastAttemptIsWaitedFor(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.poor().start()
		c := w.start(pace(limited{10 * ms, 2}))
		time.Sleep(15 * ms)
		w.byHand()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown}) }
		holder.releases()
		time.Sleep(100 * ms)
		c.waits()
		w.attempt().grant()
		c.holds().Release()
	})
}

// blocking is a strategy that answers when a test says so, after the first delays.
type blocking struct {
	asked   chan int
	answers chan bool
}

func newBlocking() blocking { return blocking{make(chan int, 10), make(chan bool)} }

func (b blocking) Next(n int) (time.Duration, bool) {
	if n == maxAsked+1 {
		b.asked <- n
		return 10 * ms, <-b.answers
	}
	return 10 * ms, true
}

// spent has the delays of c's strategy be over, which is asked further then.
func (c *caller) spent() *caller {
	c.h.spend()
	return c
}

func (t *Ticket) spend() {
	t.f.mu.Lock()
	t.waiter.plan.delays = nil
	t.f.mu.Unlock()
}

// A strategy runs on its caller's goroutine, with no mutex held: it may use the group.
func TestAStrategyMayUseTheGroup(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		var waiters []int64
		p := custom(func(n int) (time.Duration, bool) {
			if n%maxAsked == 1 {
				waiters = append(waiters, w.g.Counts(Counts{}).Waiters)
			}
			return 10 * ms, true
		})
		front := w.start(pace(p)).spent()
		w.attempt().held(time.Second)
		synctest.Wait()
		is(t, "waiting", fmt.Sprint(waiters), "[0 1]")
		front.leaves()
	})
}

// While a strategy blocks, the next in the queue makes the attempts, and gets the lease.
func TestWhoIsThereGoesFirst(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)).spent(), w.start()
		w.attempt().taken(time.Hour)
		synctest.Wait()
		is(t, "asked", <-b.asked, maxAsked+1)
		w.wantHistory("acquire", "watch owner-1")
		pass(maxPoll - 1)
		w.wantHistory()
		pass(1)
		w.wantHistory("acquire as owner-1")
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
		front := w.start(pace(b)).spent()
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
		b := newBlocking()
		front := w.start(pace(b)).spent()
		w.attempt().taken(time.Hour)
		synctest.Wait()
		next := w.start()
		pass(maxPoll)
		w.attempt().taken(time.Hour)
		w.news(quorum.OurTurn)
		is(t, "attempts", w.asked(), 3)
		w.attempt().grant()
		next.holds()
		b.answers <- true
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
			if n == maxAsked+1 {
				time.Sleep(200 * ms)
			}
			return 100 * ms, n <= maxAsked+4
		})
		front, next := w.start(pace(p)).spent(), w.start()
		w.attempt().taken(time.Hour)
		pass(maxPoll)
		w.attempt().grantBlock(10)
		next.holds()
		pass(200*ms - maxPoll)
		front.waits()
		time.Sleep(time.Second)
		front.failed(600*ms, errBusy)
		next.releases()
	})
}

// With nobody else there, the lease is given to the caller whose strategy still blocks: it has it
// when the strategy returns.
func TestALeaseWaitsForTheOnlyOne(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)).spent(), w.start()
		w.attempt().taken(time.Hour)
		pass(maxPoll)
		next.leaves() // its attempt goes on
		w.attempt().grant()
		synctest.Wait()
		is(t, "held", w.g.Counts(Counts{}).Held, 1)
		b.answers <- false // too late
		front.holds().Release()
	})
}

// An outcome that ends all waiting ends that of a caller whose strategy blocks, when it returns.
func TestARefusalWaitsForOneThatIsAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		b := newBlocking()
		front, next := w.start(pace(b)).spent(), w.start()
		w.attempt().taken(time.Hour)
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
						broken, c := func() { <-end; how() }, new(Ticket)
						go func() {
							defer func() { done <- recover() }()
							if looks {
								lookup := func(context.Context) bool { broken(); return false }
								_, _ = w.g.AcquireUnless(t.Context(), "k", c, time.Second, patient, lookup)
							} else {
								strategy := custom(func(n int) (time.Duration, bool) {
									if n > maxAsked {
										broken()
									}
									return ms, true
								})
								_ = w.g.Acquire(t.Context(), "k", c, time.Second, strategy)
							}
						}()
						synctest.Wait()
						c.spend()
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
							is(t, "held", w.g.Counts(Counts{}).Held, 1)
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

// A caller whose ctx ends while its strategy is asked is refused as soon as that has answered.
func TestAStrategyIsNotAskedFurtherWhenTheCallerLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		asked := 0
		c := w.launch(pace(custom(func(int) (time.Duration, bool) {
			asked++
			time.Sleep(20 * ms)
			return 5 * ms, true
		})))
		pass(50 * ms)
		c.cancel()
		pass(10 * ms)
		c.failed(60*ms, context.Canceled)
		is(t, "asked", asked, 3)
		is(t, "attempts", w.asked(), 0)
	})
}

// The front waiter was woken for an attempt that is due, then for a lookup, and before it could do
// either its ctx ended: the next one makes the attempt.
func TestADriverThatIsToLookAndLeavesPassesOnWhatIsDue(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.looks()
		w.heldElsewhere()
		next := w.start()
		w.news(quorum.Subscribed)
		w.heldElsewhere()
		w.history()
		f := w.g.find("k")
		f.mu.Lock()
		front.cancel()
		f.attemptNowLocked()
		f.wakeLookersLocked(all)
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

// counting is a Pace that records for which failures it was called.
type counting struct{ asked *[]int }

func (c counting) Next(attempt int) (time.Duration, bool) {
	*c.asked = append(*c.asked, attempt)
	return -1, true
}

// A strategy is called with numbers of failures that keep rising, however many there are: one that
// counts from below zero again would restart its backoff, and never give up.
func TestFailuresDoNotWrap(t *testing.T) {
	var asked []int
	p := &plan{pace: counting{&asked}, asked: math.MaxInt - maxAsked - 1}
	for range 3 {
		if p.askFurther(t.Context()); p.gaveUp(time.Now()) {
			t.Fatal("it has given up")
		}
	}
	for i := 1; i < len(asked); i++ {
		if asked[i] < asked[i-1] {
			t.Fatalf("asked about %d after %d", asked[i], asked[i-1])
		}
	}
}

// Any delay, of any length and below 0, is a time in the future, and the longest is never reached.
func TestDelaysOfAnyLength(t *testing.T) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, math.MaxInt64 - 1, math.MaxInt64} {
		inBubble(t, func(t *testing.T, w *world) {
			w.down(0)
			front, behind := w.start(pace(limited{d, math.MaxInt})), w.start(pace(limited{d, math.MaxInt}))
			time.Sleep(25 * time.Hour / 24 / 60 / 60) // some delays of a millisecond
			if d > 0 {
				time.Sleep(time.Second)
			}
			front.waits()
			behind.waits()
			front.leaves()
			behind.leaves()
		})
	}
}

// A strategy is asked further after 64 delays, and gives up when it says so, also if each attempt takes its
// time and so does the strategy: it makes as many attempts as it names retries, and one.
func TestAttemptsThatTakeTimeUpToTheLast(t *testing.T) {
	for _, retries := range []int{0, 1, 63, 64, 65, 100, 128} {
		inBubble(t, func(t *testing.T, w *world) {
			n := 0
			w.acquire = func(a *fakeAttempt) {
				n++
				time.AfterFunc(ms, func() { a.held(0) })
			}
			c := w.start(pace(custom(func(nth int) (time.Duration, bool) {
				time.Sleep(time.Microsecond)
				return 10 * ms, nth <= retries
			})))
			defer c.leaves()
			time.Sleep(3 * time.Second)
			synctest.Wait()
			if is(t, "attempts", n, retries+1); !c.returned() {
				t.Errorf("%d retries: it waits still", retries)
			}
		})
	}
}

// An attempt that is in progress when Within's time is over is the last one.
func TestAnAttemptInProgressAtTheEndIsTheLast(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		n := 0
		w.acquire = func(a *fakeAttempt) {
			if n++; n == 1 {
				a.held(60 * ms)
				return
			}
			time.AfterFunc(45*ms, func() { a.held(0) })
		}
		c := w.start(pace(upTo{limited{time.Hour, 1000}, 100 * ms}))
		defer c.leaves()
		time.Sleep(time.Second)
		c.failed(105*ms, errTaken)
		is(t, "attempts", n, 2)
	})
}

type upTo struct {
	limited
	d time.Duration
}

func (p upTo) Within() time.Duration { return p.d }

// What Begin says of its Ticket is known before others act on it.
func TestBeginBehindALeavingDriver(t *testing.T) {
	w := newWorld(t).byHand()
	first := w.launch()
	for w.asked() == 0 {
		time.Sleep(ms)
	}
	w.mu.Lock()
	a := w.attempts[0]
	w.mu.Unlock()
	time.AfterFunc(20*ms, first.cancel)
	time.AfterFunc(40*ms, func() { a.held(time.Hour) })
	var b Ticket
	begun := w.g.Begin(context.Background(), "k", &b, time.Second, limited{30 * ms, 1}, true)
	time.Sleep(100 * ms)
	ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
	defer cancel()
	_ = w.g.End(ctx, begun)
}

// TurnAway ends the wait of all who wait for the key, also of one that has entered and does not wait yet. The
// holder stays, and if nobody is left, the attempt that is under way is canceled.
func TestTurnAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.g.TurnAway("k", errElsewhere)
		w.byHand()
		front := w.start()
		w.attempt().grant()
		front.holds()
		behind := w.start()
		var h, first Ticket
		entered := w.g.Enter(t.Context(), "k", &h, time.Second, patient)
		w.g.TurnAway("elsewhere", errElsewhere)
		behind.waits()
		w.g.TurnAway("k", errElsewhere)
		behind.failed(0, errElsewhere)
		if err := w.g.End(t.Context(), entered); !errors.Is(err, errElsewhere) {
			t.Errorf("one that had entered: %v", err)
		}
		front.releases()

		entered = w.g.Enter(t.Context(), "k", &first, time.Second, patient)
		w.g.TurnAway("k", errElsewhere)
		if err := w.g.End(t.Context(), entered); !errors.Is(err, errElsewhere) {
			t.Errorf("the first: %v", err)
		}
		w.attempt().held(time.Hour)
		if synctest.Wait(); !w.attempts[1].cancelled {
			t.Error("its attempt was not canceled")
		}
	})
}
