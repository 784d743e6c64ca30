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

// Processes that are far from the nodes share a key, too: a grant lasts until it is of use.
func TestProcessesFarFromTheNodesShareAKey(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 3} {
		for _, trip := range []time.Duration{50 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
			t.Run(fmt.Sprintf("nodes=%d/trip=%v", nodes, trip), func(t *testing.T) {
				bubble(t, nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
					shareFromAfar(t, nodes, trip)
				})
			})
		}
	}
}

func shareFromAfar(t *testing.T, nodes []*redistest.MemNode, trip time.Duration) {
	t.Helper()
	const procs = 3
	for _, n := range nodes {
		n.SetDelay(trip / 2)
	}
	end := time.Now().Add(200 * trip)
	shares := make([]share, procs)
	clients := make([]*flightlock.Client, procs)
	var wg sync.WaitGroup
	for p := range procs {
		var conns []redis.UniversalClient
		for _, n := range nodes {
			conns = append(conns, n.Client(t))
		}
		c := newClient(t, flightlock.Options{NodeTimeout: 5 * trip}, conns...)
		clients[p] = c
		shares[p].hammer(t, &wg, 1, end, func() (*flightlock.Lock, error) {
			return c.SingleFlightLock(context.Background(), "k", 30*time.Second, nil)
		})
	}
	wg.Wait()
	sum, grants := 0, 0
	for p := range shares {
		sum += shares[p].locks
		grants += int(clients[p].Stats().Grants)
	}
	t.Logf("%d locks in 200 round trips, %d grants", sum, grants)
	if sum < 70 {
		t.Error("a hand-over takes more than three round trips")
	}
	if grants > sum {
		t.Error("grants were of no use to anybody")
	}
	for p := range shares {
		s := &shares[p]
		t.Logf("process %d: %d locks, longest wait %v", p, s.locks, s.longest)
		if even := float64(s.locks*procs) / float64(sum); even < 0.7 || even > 1.3 {
			t.Errorf("%.2f of an even share", even)
		}
	}
}
