package flight

import (
	"math"
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
		"never": never(3 * ms), "slow": never(time.Hour), "limited": limited{7 * ms, 2}, "long": limited{time.Second, 100},
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
		is(t, "failures", front.h.waiter.failures, 1)
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
		"overflows":     custom(func(n int) (time.Duration, bool) { return max(ms, time.Duration(min(n-1, 1))*huge), n < 4 }),
		"grows":         custom(func(n int) (time.Duration, bool) { return huge >> max(0, 60-n), n < 60 }),
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
