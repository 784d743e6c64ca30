package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A holder releases at any moment of its ttl, even the last one, or too late. The next holder,
// whether its ttl is shorter or longer, gets a lock that has at least half of its ttl left, or
// three quarters of its validity if that is less, and a larger token.
func TestAHandedOverLockHasHalfItsTTL(t *testing.T) {
	const held = time.Second
	for _, drift := range []float64{0.01, 0.4} {
		for _, ttl := range []time.Duration{held, held / 3, 3 * held} {
			if drift > 0.1 && ttl != held {
				continue
			}
			t.Run(fmt.Sprintf("drift=%v/ttl=%v", drift, ttl), func(t *testing.T) {
				testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c := lockkit.New(t, flightlock.Options{DriftFactor: drift}, clients...)
					lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
					for _, n := range nodes {
						n.SetDelay(2 * time.Millisecond) // each way
					}
					valid := ttl - time.Duration(drift*float64(ttl)) - 2*time.Millisecond
					for _, left := range []time.Duration{900, 510, 490, 100, 5, 4, 1, 0, -1} {
						l := lockkit.Lock(t, c, "k", held)
						type given struct {
							l    *flightlock.Lock
							left time.Duration
						}
						got := make(chan given, 1)
						go func() {
							next := lockkit.Lock(t, c, "k", ttl)
							got <- given{next, time.Until(next.Until())}
						}()
						synctest.Wait()
						time.Sleep(time.Until(l.Until()) - left*time.Millisecond)
						if err := l.Release(t.Context()); err != nil && (!errors.Is(err, flightlock.ErrNotHeld) || left > 0) {
							t.Errorf("%v ms before the end: %v", int(left), err)
						}
						next := <-got
						if least := min(ttl/2, valid*3/4) - 5*time.Millisecond; next.left < least || next.left > valid {
							t.Errorf("handed over %d ms before the end, it has %v left, want %v to %v", int(left), next.left, least, valid)
						}
						if next.l.Fence() <= l.Fence() {
							t.Errorf("token %d after %d", next.l.Fence(), l.Fence())
						}
						lockkit.Release(t, next.l)
					}
				})
			})
		}
	}
}

// A waiter gets its lock by handoff, as with any other DriftFactor, even if the validity is only
// half of a ttl: such a lease has hardly half its ttl left when it is new.
func TestHandoffWithALargeDriftFactor(t *testing.T) {
	for _, ttl := range []time.Duration{10 * time.Millisecond, time.Second} {
		testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			c := lockkit.New(t, flightlock.Options{DriftFactor: math.Nextafter(0.5, 0), HandoffSlice: time.Hour}, clients...)
			const n = 20
			ended := make(chan error)
			for range n {
				go func() {
					l, err := c.SingleFlightLock(t.Context(), "k", ttl, nil)
					if err == nil {
						time.Sleep(ttl / 100)
						err = l.Release(t.Context())
					}
					ended <- err
				}()
			}
			for range n {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
			if s := c.Stats(); s.Handoffs < n/2 {
				t.Errorf("a ttl of %v: %d handoffs of %d locks, %d attempts, %d refreshes",
					ttl, s.Handoffs, n, s.Attempts, s.Refreshes)
			}
		})
	}
}

// A caller that waits for a holder in another process is notified, and polls as often as that requires, whatever its
// strategy.
func TestAWaiterIsNotifiedWhateverItsStrategy(t *testing.T) {
	t.Parallel()
	const held = 12 * time.Second // longer than the nodes know of a want that is not renewed
	for name, retry := range map[string]flightlock.RetryStrategy{
		"short pauses": flightlock.LimitedRetry(5*time.Millisecond, 1e6),
		"long pauses":  flightlock.LimitedRetry(20*time.Second, 10),
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(100 * time.Microsecond)
				}
				c := lockkit.New(t, flightlock.Options{}, clients...)
				first := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
				before := c.Stats().Commands
				got := make(chan time.Time)
				go func() {
					defer close(got)
					l, err := c.SingleFlightLock(context.Background(), "k", time.Minute, retry)
					if err != nil {
						t.Error(err)
						return
					}
					got <- time.Now()
					lockkit.Release(t, l)
				}()
				time.Sleep(held)
				if n := c.Stats().Commands - before; n > 200 {
					t.Errorf("%d commands in %v", n, held)
				}
				released := time.Now()
				lockkit.Release(t, first)
				if waited := (<-got).Sub(released); waited < 0 || waited > 10*time.Millisecond {
					t.Errorf("the next caller got the key %v after its release", waited)
				}
				<-got
			})
		})
	}
}
