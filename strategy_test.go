package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

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

// A strategy that blocks delays only its caller, in front of the queue and behind others: the other
// waiters get the lock. Its caller has its result when the strategy has returned: the lock, or
// ctx's error.
func TestAStrategyThatBlocks(t *testing.T) {
	for _, wrap := range map[string]func(flightlock.RetryStrategy) flightlock.RetryStrategy{
		"plain":    func(s flightlock.RetryStrategy) flightlock.RetryStrategy { return s },
		"limited":  func(s flightlock.RetryStrategy) flightlock.RetryStrategy { return flightlock.Limit(s, 10) },
		"failfast": flightlock.FailFast,
	} {
		for _, front := range []bool{true, false} {
			t.Run(fmt.Sprintf("front=%v", front), func(t *testing.T) {
				bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
					other, c := newClient(t, flightlock.Options{}, clients...), newClient(t, flightlock.Options{}, clients...)
					b := blocks{make(chan struct{}), new(atomic.Int32)}
					l := mustLock(t, other, "k", time.Minute)
					locked := make(chan struct{}, 3)
					lock := func(s flightlock.RetryStrategy) {
						l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, s)
						if err != nil {
							t.Error(err)
							return
						}
						mustRelease(t, l)
						locked <- struct{}{}
					}
					waiting := int64(3)
					if !front { // its strategy is called before it queues
						waiting = 2
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
					if n := c.Stats().Waiters; n != waiting {
						t.Errorf("%d wait, want %d", n, waiting)
					}
					mustRelease(t, l)
					<-locked
					<-locked
					if len(canceled) > 0 {
						t.Error("its caller's goroutine has left it")
					}
					close(b.end)
					<-locked
					if err := <-canceled; !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, flightlock.ErrNotAcquired) {
						t.Errorf("got %v", err)
					}
				})
			})
		}
	}
}

// It blocks nobody either when it is that of a refresh.
func TestARefreshStrategyThatMisbehaves(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"block", "panic", "Goexit"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log lines
				c := newClient(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
				end := make(chan struct{})
				defer close(end)
				l, other := mustLock(t, c, "k", 3*time.Second), mustLock(t, c, "other", time.Minute)
				if err := l.AutoRefresh(flightlock.RefreshPolicy{Retry: strategy(func(int) (time.Duration, bool) {
					switch how {
					case "block":
						<-end
					case "panic":
						panic("no way")
					case "Goexit":
						runtime.Goexit()
					}
					return 0, true
				})}); err != nil {
					t.Fatal(err)
				}
				if err := other.AutoRefresh(flightlock.RefreshPolicy{Interval: time.Second}); err != nil {
					t.Fatal(err)
				}
				for _, n := range nodes[:2] {
					n.Down(true)
				}
				<-l.Context(t.Context()).Done() // nobody refreshes it any more
				for _, n := range nodes[:2] {
					n.Down(false)
				}
				time.Sleep(2 * time.Minute)
				mustRelease(t, other)
				if how == "panic" {
					wantOneLine(t, &log, "level=WARN", "panic=\"no way\"", `key=k`)
				}
			})
		})
	}
}

type strategy func(attempt int) (time.Duration, bool)

func (s strategy) Next(attempt int) (time.Duration, bool) { return s(attempt) }

// A custom strategy paces its caller's attempts as one of this package does: alone, in front of the
// queue, and behind others.
func TestAStrategyOfTheCallersOwn(t *testing.T) {
	for _, limit := range []int{0, 3} {
		mine := strategy(func(attempt int) (time.Duration, bool) { return 100 * time.Millisecond, attempt <= limit })
		for _, s := range []flightlock.RetryStrategy{flightlock.LimitedRetry(100*time.Millisecond, limit), mine} {
			for _, call := range []string{"Lock", "SingleFlightLock", "behind"} {
				for _, quiet := range []bool{false, true} {
					bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
						other := newClient(t, flightlock.Options{}, clients...)
						c := newClient(t, flightlock.Options{DisableNotify: quiet}, clients...)
						l := mustLock(t, other, "k", time.Minute)
						lock, done := c.SingleFlightLock, make(chan struct{})
						ctx, cancel := context.WithCancel(t.Context())
						switch call {
						case "Lock":
							lock = c.Lock
						case "behind":
							go func() {
								defer close(done)
								_, _ = c.SingleFlightLock(ctx, "k", time.Second, nil)
							}()
							synctest.Wait()
						}
						began, before := time.Now(), c.Stats().Attempts
						_, err := lock(t.Context(), "k", time.Minute, s)
						took, least := time.Since(began), time.Duration(limit)*100*time.Millisecond
						if !errors.Is(err, flightlock.ErrNotAcquired) || took < least || took > least+100*time.Millisecond {
							t.Errorf("%s %T %d: %v after %v", call, s, limit, err, took)
						}
						attempts := uint64(min(limit+1, 2))
						if quiet {
							attempts = uint64(limit + 1)
						}
						if n := c.Stats().Attempts - before; call != "behind" && n < attempts {
							t.Errorf("%s %T %d: %d attempts", call, s, limit, n)
						}
						cancel()
						if call == "behind" {
							<-done
						}
						mustRelease(t, l)
					})
				}
			}
		}
	}
}

// One that ends its goroutine is the reason of the loss, as one that panics is.
func TestALossNamesARefreshStrategyThatDoesNotReturn(t *testing.T) {
	for how, end := range map[string]func(){"panicked": func() { panic("no way") }, "Goexit": runtime.Goexit} {
		bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			c := newClient(t, flightlock.Options{}, clients...)
			l := mustLock(t, c, "k", 3*time.Second)
			if err := l.AutoRefresh(flightlock.RefreshPolicy{Retry: strategy(func(int) (time.Duration, bool) {
				end()
				return 0, true
			})}); err != nil {
				t.Fatal(err)
			}
			ctx := l.Context(t.Context())
			nodes[0].Down(true)
			<-ctx.Done()
			nodes[0].Down(false)
			why := context.Cause(ctx).Error()
			if !strings.Contains(why, "RefreshPolicy.Retry") || !strings.Contains(why, how) {
				t.Errorf("%s: %v", how, why)
			}
		})
	}
}
