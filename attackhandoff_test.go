package flightlock_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
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
				bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					c := newClient(t, flightlock.Options{DriftFactor: drift}, clients...)
					mustRelease(t, mustLock(t, c, "k", time.Second))
					for _, n := range nodes {
						n.SetDelay(2 * time.Millisecond) // each way
					}
					valid := ttl - time.Duration(drift*float64(ttl)) - 2*time.Millisecond
					for _, left := range []time.Duration{900, 510, 490, 100, 5, 4, 1, 0, -1} {
						l := mustLock(t, c, "k", held)
						type given struct {
							l    *flightlock.Lock
							left time.Duration
						}
						got := make(chan given, 1)
						go func() {
							next := mustLock(t, c, "k", ttl)
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
						mustRelease(t, next.l)
					}
				})
			})
		}
	}
}
