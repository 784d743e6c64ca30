package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// panicsAt is a strategy that panics when it is called for that failure, or a later one.
type panicsAt int

func (p panicsAt) Next(attempt int) (time.Duration, bool) {
	if attempt >= int(p) {
		panic(p)
	}
	return 5 * time.Millisecond, true
}

// A strategy's panic is returned to its caller, no matter which goroutine's attempt failed, and
// affects that caller alone: those before and after it in the queue get the lock.
func TestAPanicOfAStrategyIsItsCallers(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, at := range []panicsAt{1, 5} {
			t.Run(fmt.Sprintf("nodes=%d/failure=%d", n, at), func(t *testing.T) {
				testkit.Bubble(t, n, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
					other, c := lockkit.New(t, flightlock.Options{}, clients...),
						lockkit.New(t, flightlock.Options{}, clients...)
					for _, behind := range []bool{false, true} {
						l := lockkit.Lock(t, other, "k", 10*time.Second)
						released := make(chan struct{}, 2)
						wait := func() {
							lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
							released <- struct{}{}
						}
						if behind {
							go wait()
							synctest.Wait()
						}
						if v := testkit.Recovered(func() {
							_, _ = c.SingleFlightLock(t.Context(), "k", time.Second, at)
						}); v != at {
							t.Errorf("behind %v: the call panicked with %v, want %v", behind, v, at)
						}
						if !behind {
							go wait()
						}
						go wait()
						time.Sleep(time.Second)
						lockkit.Release(t, l)
						<-released
						<-released
						if s := c.Stats(); s.Waiters != 0 || s.Held != 0 {
							t.Errorf("behind %v: %+v", behind, s)
						}
					}
					if v := testkit.Recovered(func() { // one that arrives when the nodes are down
						_, _ = c.TryLock(t.Context(), "k", time.Second)
					}); v != nil {
						t.Error(v)
					}
				})
			})
		}
	}
}

// strategiesThatFailFast are all ways to specify it.
func strategiesThatFailFast() map[string]flightlock.RetryStrategy {
	return map[string]flightlock.RetryStrategy{
		"default":    flightlock.FailFast(nil),
		"backoff":    flightlock.FailFast(flightlock.ExponentialBackoff(time.Second, time.Minute)),
		"limited":    flightlock.FailFast(flightlock.LimitedRetry(10*time.Second, 10)),
		"of a limit": flightlock.FailFast(flightlock.Limit(nil, 1000)),
		"in a limit": flightlock.Limit(flightlock.FailFast(nil), 1000),
		"twice":      flightlock.FailFast(flightlock.FailFast(nil)),
	}
}

// While others hold the lock, and a majority of the nodes can be reached, FailFast waits as the wrapped
// strategy says. When that is not so any more, all that wait get ErrUnavailable, and not only at their next
// poll, also behind callers that do not fail fast, which wait until their ctx ends; and from then on every
// call gets it at once.
func TestFailFastWithTheNodesAway(t *testing.T) {
	t.Parallel()
	for name, fast := range strategiesThatFailFast() {
		for _, stalled := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/stalled=%v", name, stalled), func(t *testing.T) {
				testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c, other := lockkit.New(t, flightlock.Options{}, clients...),
						lockkit.New(t, flightlock.Options{}, clients...)
					ctx, cancel := context.WithCancel(t.Context())
					var impatient, patient sync.WaitGroup
					lock := func(group *sync.WaitGroup, key string, s flightlock.RetryStrategy, want error) {
						group.Go(func() {
							l, err := c.SingleFlightLock(ctx, key, time.Minute, s)
							if !errors.Is(err, want) || want != context.Canceled && ctx.Err() != nil { //nolint:errorlint // it
								t.Errorf("%s: %v, want %v", key, err, want)
							}
							if err == nil {
								lockkit.Release(t, l)
							}
						})
						synctest.Wait()
					}
					nodes[2].Down(true) // a minority is no reason
					l := lockkit.Lock(t, other, "k", time.Minute)
					for range 2 {
						lock(&impatient, "k", fast, nil)
					}
					time.Sleep(time.Second)
					lockkit.Release(t, l)
					impatient.Wait()
					nodes[2].Down(false)
					time.Sleep(5 * time.Second)
					for i := range 5 {
						key := fmt.Sprint("k", i)
						lockkit.Lock(t, other, key, time.Minute)
						lock(&patient, key, nil, context.Canceled)
						lock(&impatient, key, fast, flightlock.ErrUnavailable)
					}
					time.Sleep(time.Second)
					testkit.Down(!stalled, nodes[:2]...)
					testkit.Stall(stalled, nodes[:2]...)
					for c.Stats().Suspended < 2 {
						time.Sleep(time.Millisecond)
					}
					away := time.Now()
					impatient.Wait()
					if took := time.Since(away); took > 100*time.Millisecond {
						t.Errorf("the last one returned after %v", took)
					}
					for call, lock := range map[string]func() error{
						"SingleFlightLock": func() error {
							_, err := c.SingleFlightLock(ctx, "k", time.Second, fast)
							return err
						},
						"TryLock": func() error { _, err := c.TryLock(ctx, "k", time.Second); return err },
						"Do": func() error {
							return c.Do(ctx, "k", time.Second, fast, func(context.Context, *flightlock.Lock) error { return nil })
						},
					} {
						began := time.Now()
						if err := lock(); !errors.Is(err, flightlock.ErrUnavailable) {
							t.Errorf("%s: %v", call, err)
						}
						if took := time.Since(began); took > time.Second {
							t.Errorf("%s took %v", call, took)
						}
					}
					cancel()
					patient.Wait()
					testkit.Stall(false, nodes[:2]...)
					testkit.Down(false, nodes[:2]...)
					synctest.Wait()
					_ = other.Close(canceled())
				})
			})
		}
	}
}

// blocks is a strategy that does not return before it is ended.
type blocks struct {
	end   chan struct{}
	asked *atomic.Int32
}

func (b blocks) Next(int) (time.Duration, bool) {
	b.asked.Add(1)
	<-b.end
	return 0, false
}

// A strategy that blocks when its caller arrives delays only that one, before the queue and behind others:
// the other waiters get the lock. Its caller has its result when the strategy has returned: the lock, or
// ctx's error.
func TestAStrategyThatBlocks(t *testing.T) {
	for _, wrap := range map[string]func(flightlock.RetryStrategy) flightlock.RetryStrategy{
		"plain":    func(s flightlock.RetryStrategy) flightlock.RetryStrategy { return s },
		"limited":  func(s flightlock.RetryStrategy) flightlock.RetryStrategy { return flightlock.Limit(s, 10) },
		"failfast": flightlock.FailFast,
	} {
		for _, front := range []bool{true, false} {
			t.Run(fmt.Sprintf("front=%v", front), func(t *testing.T) {
				testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
					other, c := lockkit.New(t, flightlock.Options{}, clients...),
						lockkit.New(t, flightlock.Options{}, clients...)
					b := blocks{make(chan struct{}), new(atomic.Int32)}
					l := lockkit.Lock(t, other, "k", time.Minute)
					locked := make(chan struct{}, 3)
					lock := func(s flightlock.RetryStrategy) {
						l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, s)
						if err != nil {
							t.Error(err)
							return
						}
						lockkit.Release(t, l)
						locked <- struct{}{}
					}
					if !front {
						go lock(nil)
						synctest.Wait()
					}
					go lock(wrap(b))
					synctest.Wait()
					if front {
						go lock(nil)
					}
					go lock(flightlock.LimitedRetry(time.Second, 1000))
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					defer cancel()
					canceled := make(chan error, 1)
					go func() {
						_, err := c.SingleFlightLock(ctx, "k", time.Minute, wrap(b))
						canceled <- err
					}()
					<-ctx.Done()
					synctest.Wait()
					if n := b.asked.Load(); n != 2 {
						t.Errorf("it was called %d times, want 2", n)
					}
					if n := c.Stats().Waiters; n != 2 { // it is called before its caller queues
						t.Errorf("%d wait, want 2", n)
					}
					lockkit.Release(t, l)
					<-locked
					<-locked
					if len(canceled) > 0 {
						t.Error("its caller's goroutine has left it")
					}
					close(b.end)
					<-locked
					if err := <-canceled; !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
				})
			})
		}
	}
}

// It blocks nobody either when it is that of a refresh. One that does not return is the reason of the loss.
func TestARefreshStrategyThatMisbehaves(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"block", "panic", "Goexit"} {
		t.Run(how, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log testkit.LogBuffer
				c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
				end := make(chan struct{})
				defer close(end)
				l, other := lockkit.Lock(t, c, "k", 3*time.Second), lockkit.Lock(t, c, "other", time.Minute)
				misbehaves := strategy(func(int) (time.Duration, bool) {
					switch how {
					case "block":
						<-end
					case "panic":
						panic("no way")
					case "Goexit":
						runtime.Goexit()
					}
					return 0, true
				})
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Retry: misbehaves}))
				testkit.Must(t, other.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Second}))
				testkit.Down(true, nodes[:2]...)
				lost := l.Context(t.Context())
				<-lost.Done() // nobody refreshes it any more
				why := context.Cause(lost).Error()
				if how != "block" && (!strings.Contains(why, "RefreshPolicy.Retry") || !strings.Contains(why, how)) {
					t.Errorf("lost because of %s", why)
				}
				testkit.Down(false, nodes[:2]...)
				time.Sleep(2 * time.Minute)
				lockkit.Release(t, other)
				if how == "panic" {
					testkit.WantOneLine(t, &log, "level=WARN", "panic=\"no way\"", `key=k`)
				}
			})
		})
	}
}

type strategy func(attempt int) (time.Duration, bool)

func (s strategy) Next(attempt int) (time.Duration, bool) { return s(attempt) }

// strategiesWithin are ways to give up a second after the call began.
func strategiesWithin(d time.Duration) map[string]flightlock.RetryStrategy {
	return map[string]flightlock.RetryStrategy{
		"default":      flightlock.Within(nil, d),
		"long delays":  flightlock.Within(flightlock.LimitedRetry(time.Hour, 9), d),
		"short delays": flightlock.Within(flightlock.LimitedRetry(50*time.Millisecond, math.MaxInt), d),
		"of a limit":   flightlock.Within(flightlock.Limit(nil, 1e6), d),
		"in a limit":   flightlock.Limit(flightlock.Within(nil, d), 1e6),
		"of FailFast":  flightlock.Within(flightlock.FailFast(nil), d),
		"in FailFast":  flightlock.FailFast(flightlock.Within(nil, d)),
		"in a longer":  flightlock.Within(flightlock.Within(nil, d), time.Hour),
		"of a longer":  flightlock.Within(flightlock.FailFast(flightlock.Within(nil, time.Hour)), d),
		"deep": flightlock.Limit(flightlock.FailFast(flightlock.Limit(flightlock.Within(nil, d), 1e6)),
			1e6),
		"of a stranger": flightlock.Within(strategy(func(int) (time.Duration, bool) {
			return time.Minute, true
		}), d),
	}
}

// Within bounds the wait for another process, in the queue behind a holder of this one, and behind other
// waiters. It makes a last attempt then.
func TestWithinGivesUpInTime(t *testing.T) {
	const d = 3 * time.Second
	all := strategiesWithin(d)
	names := slices.Collect(maps.Keys(all))
	for _, name := range testkit.Sized(names, []string{"default", "short delays", "deep", "of a stranger"}) {
		for _, quiet := range []bool{false, true} {
			s := all[name]
			testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				opts := flightlock.Options{DisableNotify: quiet}
				here, there := lockkit.New(t, opts, clients...), lockkit.New(t, opts, clients...)
				l := lockkit.Lock(t, here, "k", time.Minute)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
				var wg sync.WaitGroup
				wait := func(where string, c *flightlock.Client) {
					wg.Go(func() {
						began := time.Now()
						_, err := c.SingleFlightLock(t.Context(), "k", time.Minute, s)
						if took := time.Since(began); took < d || took > d+100*time.Millisecond {
							t.Errorf("%s, %s, quiet=%v: it gave up after %v", name, where, quiet, took)
						}
						if !errors.Is(err, flightlock.ErrNotAcquired) {
							t.Errorf("%s, %s: %v", name, where, err)
						}
					})
				}
				for range 3 {
					wait("behind the holder", here)
					wait("in another process", there)
					time.Sleep(time.Second / 2)
				}
				wg.Wait()
				wg.Go(func() {
					if l, err := there.SingleFlightLock(t.Context(), "k", time.Minute, s); err != nil {
						t.Errorf("%s: a lock that is released in time: %v", name, err)
					} else {
						lockkit.Release(t, l)
					}
				})
				time.Sleep(d / 2)
				lockkit.Release(t, l)
				wg.Wait()
			})
		}
	}
}

// Within counts from the beginning of each call, also where nodes are down, and bounds no work.
func TestWithinBoundsOnlyTheWait(t *testing.T) {
	const d = 3 * time.Second
	s := flightlock.Within(nil, d)
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		for range 2 {
			testkit.Must(t, c.Do(t.Context(), "k", time.Second, s,
				func(ctx context.Context, _ *flightlock.Lock) error {
					time.Sleep(time.Minute)
					return ctx.Err()
				}))
		}
		nodes[0].Down(true)
		began := time.Now()
		_, err := c.SingleFlightLock(t.Context(), "k", time.Second, s)
		took := time.Since(began)
		if took < d || took > d+200*time.Millisecond || !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("with the node down: %v after %v", err, took)
		}
	})
}

// In a policy, Within counts from the first of consecutive failures: those before a refresh that succeeded
// are over.
func TestWithinOfARefreshPolicy(t *testing.T) {
	const d = 3 * time.Second
	for name, s := range strategiesWithin(d) {
		inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
			l := lockkit.Lock(t, c, "k", time.Minute)
			lost := l.Context(t.Context())
			testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Second, Retry: s}))
			time.Sleep(5500 * time.Millisecond)
			nodes[0].Down(true)
			time.Sleep(2500 * time.Millisecond)
			nodes[0].Down(false)
			time.Sleep(10 * time.Second)
			if l.Err() != nil || time.Until(l.Until()) < 50*time.Second {
				t.Errorf("%s: after a short outage: %v, valid for %v", name, l.Err(), time.Until(l.Until()))
			}
			nodes[0].Down(true)
			time.Sleep(10 * time.Second)
			nodes[0].Down(false)
			<-lost.Done()
			if err := context.Cause(lost); !strings.Contains(err.Error(), "RefreshPolicy.Retry gave up after") {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}
