package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

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

// With the nodes down, FailFast returns ErrUnavailable at once, whatever the call; a strategy that
// does not fail fast retries until its ctx ends.
func TestFailFastWithTheNodesAway(t *testing.T) {
	for name, fast := range strategiesThatFailFast() {
		t.Run(name, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				for _, n := range nodes[:2] {
					n.Down(true)
				}
				c := newClient(t, flightlock.Options{}, clients...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for call, lock := range map[string]func() error{
					"SingleFlightLock": func() error { _, err := c.SingleFlightLock(ctx, "k", time.Second, fast); return err },
					"Lock":             func() error { _, err := c.Lock(ctx, "k", time.Second, fast); return err },
					"TryLock":          func() error { _, err := c.TryLock(ctx, "k", time.Second); return err },
					"Do": func() error {
						return c.Do(ctx, "k", time.Second, fast, func(context.Context, *flightlock.Lock) error { return nil })
					},
				} {
					began := time.Now()
					if err := lock(); !errors.Is(err, flightlock.ErrUnavailable) || ctx.Err() != nil {
						t.Errorf("%s: %v", call, err)
					}
					if took := time.Since(began); took > time.Second {
						t.Errorf("%s took %v", call, took)
					}
				}
				short, stop := context.WithTimeout(t.Context(), 5*time.Second)
				defer stop()
				if _, err := c.SingleFlightLock(short, "k", time.Second, nil); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("who does not fail fast: %v", err)
				}
			})
		})
	}
}

// As long as the lock is held, FailFast waits as the wrapped strategy says; once the nodes are back
// it locks.
func TestFailFastWaitsForAHolder(t *testing.T) {
	for name, fast := range strategiesThatFailFast() {
		t.Run(name, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c, other := newClient(t, flightlock.Options{}, clients...), newClient(t, flightlock.Options{}, clients...)
				mustRelease(t, mustLock(t, c, "j", time.Minute))
				l := mustLock(t, other, "k", time.Minute)
				nodes[2].Down(true) // a minority is no reason
				var wg sync.WaitGroup
				for range 2 {
					wg.Go(func() {
						l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, fast)
						if err != nil {
							t.Error(err)
							return
						}
						mustRelease(t, l)
					})
				}
				time.Sleep(time.Second)
				mustRelease(t, l)
				wg.Wait()
			})
		})
	}
}

// FailFast reports what is wrong with the wrapped strategy.
func TestFailFastOfABadStrategy(t *testing.T) {
	c := newClient(t, flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
	for _, s := range []flightlock.RetryStrategy{
		flightlock.FailFast(flightlock.LimitedRetry(0, 1)),
		flightlock.Limit(flightlock.FailFast(flightlock.LimitedRetry(0, 1)), 1),
	} {
		if _, err := c.SingleFlightLock(t.Context(), "k", time.Second, s); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
}

// Thousands of callers wait for keys that another process holds, in queues of all kinds, when the
// nodes go down: as soon as a majority is suspended, all that fail fast return, and not only at
// their next poll.
func TestAllWhoWaitHearOfAnOutage(t *testing.T) {
	t.Parallel()
	for _, stalled := range []bool{false, true} {
		t.Run(fmt.Sprintf("stalled=%v", stalled), func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				keys := sized(200, 50)
				c := newClient(t, flightlock.Options{MaxTTL: time.Hour}, clients...)
				other := newClient(t, flightlock.Options{MaxTTL: time.Hour}, clients...)
				ctx, cancel := context.WithCancel(t.Context())
				var fast, slow sync.WaitGroup
				for i := range keys {
					key := fmt.Sprint("k", i)
					mustLock(t, other, key, time.Hour)
					slow.Go(func() { // at the front of the queue, with a patient strategy
						if _, err := c.SingleFlightLock(ctx, key, time.Hour, nil); !errors.Is(err, context.Canceled) {
							t.Errorf("who does not fail fast: %v", err)
						}
					})
				}
				time.Sleep(time.Second)
				for i := range keys {
					fast.Go(func() {
						_, err := c.SingleFlightLock(ctx, fmt.Sprint("k", i), time.Hour, flightlock.FailFast(nil))
						if !errors.Is(err, flightlock.ErrUnavailable) || ctx.Err() != nil {
							t.Errorf("who fails fast: %v", err)
						}
					})
				}
				time.Sleep(time.Second)
				for _, n := range nodes[:2] {
					if stalled {
						n.Stall(true)
					} else {
						n.Down(true)
					}
				}
				for c.Stats().Suspended < 2 {
					time.Sleep(time.Millisecond)
				}
				away := time.Now()
				fast.Wait()
				if took := time.Since(away); took > 100*time.Millisecond {
					t.Errorf("the last one returned after %v", took)
				}
				cancel()
				slow.Wait()
				for _, n := range nodes[:2] {
					n.Stall(false)
					n.Down(false)
				}
				synctest.Wait()
				expired, end := context.WithCancel(context.Background())
				end()
				_ = other.Close(expired)
			})
		})
	}
}
