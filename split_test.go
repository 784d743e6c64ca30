package flightlock_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
)

// If several clients TryLock a free key at the same moment, as the processes of a service do for a
// job once per tick, one of them gets the lock, even if the votes are split at first.
func TestOfTryLocksAtOnceOneSucceeds(t *testing.T) {
	const clients = 4
	rounds := sized(400, 100)
	servers, _ := realNodes(t, 3)
	var all []*flightlock.Client
	for range clients {
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, s.Client(t))
		}
		c := newClient(t, patient, nodes...)
		if err := c.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	var nobody []int
	for round := range rounds {
		var wins atomic.Int64
		var tried, done sync.WaitGroup
		start := make(chan struct{})
		tried.Add(clients)
		for _, c := range all {
			done.Go(func() {
				<-start
				l, err := c.TryLock(t.Context(), fmt.Sprint("tick", round), 10*time.Second)
				tried.Done()
				if err == nil {
					wins.Add(1)
					tried.Wait() // hold it until all have tried
					mustRelease(t, l)
				} else if !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Error(err)
				}
			})
		}
		close(start)
		done.Wait()
		switch n := wins.Load(); {
		case n == 0:
			nobody = append(nobody, round)
		case n > 1:
			t.Errorf("round %d: %d have the lock", round, n)
		}
	}
	if len(nobody) != 0 {
		t.Errorf("in %d of %d rounds nobody got the lock", len(nobody), rounds)
	}
}
