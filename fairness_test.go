package flightlock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
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

// Processes that hammer one key share its time evenly, whatever the number of nodes and of
// their goroutines, and nobody waits for long.
func TestProcessesShareAKey(t *testing.T) {
	for _, c := range []struct {
		nodes, procs int
		goroutines   func(proc int) int
		options      func(proc int, o *flightlock.Options)
	}{
		{nodes: 1, procs: 4}, {nodes: 2, procs: 2}, {nodes: 2, procs: 4}, {nodes: 3, procs: 2}, {nodes: 3, procs: 4},
		{nodes: 4, procs: 3}, {nodes: 5, procs: 4}, {nodes: 3, procs: 12},
		{nodes: 3, procs: 4, goroutines: func(proc int) int { return []int{1, 2, 10, 30}[proc] }},
		{nodes: 1, procs: 4, options: func(proc int, o *flightlock.Options) { o.DisableNotify = proc == 0 }},
		{nodes: 3, procs: 4, options: func(proc int, o *flightlock.Options) { o.DisableNotify = true }},
		{nodes: 2, procs: 3, options: func(proc int, o *flightlock.Options) { o.DisableNotify = true }},
		{nodes: 3, procs: 4, options: func(proc int, o *flightlock.Options) { o.HandoffSlice = time.Microsecond }},
		{nodes: 3, procs: 4, options: func(proc int, o *flightlock.Options) { o.HandoffSlice = -1 }},
	} {
		name := fmt.Sprintf("nodes=%d/procs=%d/custom=%v,%v", c.nodes, c.procs, c.goroutines != nil, c.options != nil)
		t.Run(name, func(t *testing.T) {
			bubble(t, c.nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(200 * time.Microsecond)
				}
				began := time.Now()
				end := began.Add(4 * time.Second)
				shares := make([]share, c.procs)
				var wg sync.WaitGroup
				for p := range c.procs {
					var conns []redis.UniversalClient
					for _, n := range nodes {
						conns = append(conns, n.Client(t))
					}
					o := flightlock.Options{}
					if c.options != nil {
						c.options(p, &o)
					}
					goroutines := 10
					if c.goroutines != nil {
						goroutines = c.goroutines(p)
					}
					client := newClient(t, o, conns...)
					shares[p].hammer(t, &wg, goroutines, end, func() (*flightlock.Lock, error) {
						return client.SingleFlightLock(context.Background(), "k", time.Second, nil)
					})
				}
				wg.Wait()
				synctest.Wait()
				var sum time.Duration
				for i := range shares {
					sum += shares[i].held
				}
				for i := range shares {
					s := &shares[i]
					t.Logf("process %d: %5.1f%% of the time held, %d locks, longest wait %v; busy %.0f%%", i,
						100*float64(s.held)/float64(sum), s.locks, s.longest, 100*float64(sum)/float64(4*time.Second))
				}
			})
		})
	}
}
