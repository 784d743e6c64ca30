package flightlock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// share is what one process got of a key.
type share struct {
	mu      sync.Mutex
	locks   int
	held    time.Duration
	longest time.Duration // wait of one goroutine
}

// hammer has one process use the key from that many goroutines until end.
func (s *share) hammer(t *testing.T, wg *sync.WaitGroup, goroutines int, end time.Time, lock func() (*flightlock.Lock, error)) {
	for range goroutines {
		wg.Go(func() {
			for time.Now().Before(end) {
				began := time.Now()
				l, err := lock()
				if err != nil {
					t.Error(err)
					return
				}
				got := time.Now()
				time.Sleep(100 * time.Microsecond)
				if err := l.Release(context.Background()); err != nil {
					t.Error(err)
				}
				s.mu.Lock()
				s.locks++
				s.held += time.Since(got)
				s.longest = max(s.longest, got.Sub(began))
				s.mu.Unlock()
			}
		})
	}
}

// Processes that hammer one key share its time evenly, whatever the number of nodes, and nobody
// waits for long; with or without notices.
func TestProcessesShareAKey(t *testing.T) {
	polling := func(_ int, o *flightlock.Options) { o.DisableNotify = true }
	for _, c := range []struct {
		name         string
		nodes, procs int
		options      func(proc int, o *flightlock.Options)
	}{
		{"notified", 1, 4, nil}, {"notified", 2, 3, nil}, {"notified", 3, 12, nil}, {"notified", 4, 3, nil},
		{"one polls", 3, 4, func(proc int, o *flightlock.Options) { o.DisableNotify = proc == 0 }},
		{"all poll", 2, 3, polling}, {"all poll", 3, 4, polling},
		{"short slices", 3, 3, func(_ int, o *flightlock.Options) { o.HandoffSlice = time.Microsecond }},
		{"no handoff", 3, 3, func(_ int, o *flightlock.Options) { o.HandoffSlice = -1 }},
	} {
		t.Run(fmt.Sprintf("%s/nodes=%d/procs=%d", c.name, c.nodes, c.procs), func(t *testing.T) {
			bubble(t, c.nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(200 * time.Microsecond)
				}
				end := time.Now().Add(time.Duration(c.procs) * 400 * time.Millisecond)
				shares := make([]share, c.procs)
				var wg sync.WaitGroup
				for p := range c.procs {
					var conns []redis.UniversalClient
					for _, n := range nodes {
						conns = append(conns, n.Client(t))
					}
					var o flightlock.Options
					if c.options != nil {
						c.options(p, &o)
					}
					client := newClient(t, o, conns...)
					shares[p].hammer(t, &wg, 10, end, func() (*flightlock.Lock, error) {
						return client.SingleFlightLock(context.Background(), "k", time.Second, nil)
					})
				}
				wg.Wait()
				wantEven(t, shares)
			})
		})
	}
}

func wantEven(t *testing.T, shares []share) {
	t.Helper()
	var sum time.Duration
	for i := range shares {
		sum += shares[i].held
	}
	for i := range shares {
		s := &shares[i]
		even := float64(s.held) / float64(sum) * float64(len(shares))
		t.Logf("process %d: %.2f of an even share, %d locks, longest wait %v", i, even, s.locks, s.longest)
		if even < 0.7 || even > 1.3 {
			t.Error("that is not even")
		}
		if s.longest > 1500*time.Millisecond {
			t.Error("that is too long")
		}
	}
}
