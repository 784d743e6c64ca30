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
// three quarters of its validity if that is less, and a larger token. It is handed over if that is so when it
// is released: also with a DriftFactor with which a new lease has hardly half its ttl left.
func TestAHandedOverLockHasHalfItsTTL(t *testing.T) {
	const held = time.Second
	for _, drift := range []float64{0.01, 0.4, math.Nextafter(0.5, 0)} {
		for _, ttl := range []time.Duration{held, held / 3, 3 * held} {
			if drift > 0.1 && ttl != held {
				continue
			}
			t.Run(fmt.Sprintf("drift=%v/ttl=%v", drift, ttl), func(t *testing.T) {
				testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c := lockkit.New(t, flightlock.Options{DriftFactor: drift}, clients...)
					lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
					testkit.Delay(2*time.Millisecond, nodes...) // each way
					validity := func(ttl time.Duration) time.Duration {
						return ttl - time.Duration(drift*float64(ttl)) - 2*time.Millisecond
					}
					valid, enough := validity(ttl), min(ttl/2, validity(ttl)*3/4)
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
						before, full := c.Stats(), min(left*time.Millisecond, time.Until(l.Until())) >= enough
						if err := l.Release(t.Context()); err != nil && (!errors.Is(err, flightlock.ErrNotHeld) || left > 0) {
							t.Errorf("%v ms before the end: %v", int(left), err)
						}
						next := <-got
						if s := c.Stats(); full && (s.Handoffs != before.Handoffs+1 || s.Attempts != before.Attempts) {
							t.Errorf("%d ms before the end it was not handed over: %+v", int(left), s)
						}
						if least := enough - 5*time.Millisecond; next.left < least || next.left > valid {
							t.Errorf("handed over %d ms before the end, it has %v left, want %v to %v", int(left), next.left,
								least, valid)
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

// A caller that waits for a holder in another process is notified, and polls as often as that requires,
// whatever its strategy.
func TestAWaiterIsNotifiedWhateverItsStrategy(t *testing.T) {
	t.Parallel()
	const held = 12 * time.Second // longer than the nodes know of a want that is not renewed
	for name, retry := range map[string]flightlock.RetryStrategy{
		"short pauses": flightlock.LimitedRetry(5*time.Millisecond, 1e6),
		"long pauses":  flightlock.LimitedRetry(20*time.Second, 10),
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				testkit.Delay(100*time.Microsecond, nodes...)
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
				if n := c.Stats().Commands - before; n > 3*75 { // a poll every 180 ms, and what it began with
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
