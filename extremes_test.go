package flightlock_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Another client's key may live longer than a time.Duration can hold. That is neither "unknown" nor
// "in a moment": a waiter does not poll for it again and again.
func TestAKeyThatLivesForEver(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	c := newClient(t, flightlock.Options{NodeTimeout: 5 * time.Second, DisableNotify: true}, s.Client(t))
	for i, ms := range []int64{9223372036855, 18446744073710, 18446744073710 * 2, math.MaxInt64 / 2} {
		key := string(rune('a' + i))
		s.Do(t, "SET", "lock:"+key, "somebody's", "PX", ms)
		before := c.Stats().Commands
		_, err := c.Lock(t.Context(), key, time.Minute, flightlock.LimitedRetry(200*time.Millisecond, 1))
		var q *flightlock.QuorumError
		if !errors.Is(err, flightlock.ErrNotAcquired) || !errors.As(err, &q) ||
			q.Nodes[0].HolderTTL < math.MaxInt64-time.Minute {
			t.Errorf("a holder for %d ms: %v", ms, err)
		}
		if n := c.Stats().Commands - before; n > 10 { // a poll each 50ms
			t.Errorf("a holder for %d ms: %d commands in 200ms", ms, n)
		}
	}
}

// A waiter gets its lock by handoff, as with any other DriftFactor, even if the validity is only
// half of a ttl: such a lease has hardly half its ttl left when it is new.
func TestHandoffWithALargeDriftFactor(t *testing.T) {
	for _, ttl := range []time.Duration{10 * time.Millisecond, time.Second} {
		bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			c := newClient(t, flightlock.Options{DriftFactor: math.Nextafter(0.5, 0), HandoffSlice: time.Hour}, clients...)
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
