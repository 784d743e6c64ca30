package outage

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// A node that was restarted empty has every live lock again after each was refreshed once, with a
// counter that has reached its token: the restart reset the connections, and none of the refreshes
// is lost to that.
func TestARestartedNodeIsRepairedByTheNextRefresh(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	// The restarted node is to vote afterwards, so that its tokens are tried.
	c := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patience, DisableQuarantine: true}, nodes...)
	var locks []*flightlock.Lock
	for i := range 100 {
		locks = append(locks, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute))
	}
	hasAll := func() bool {
		return !slices.ContainsFunc(locks, func(l *flightlock.Lock) bool {
			return servers[1].Do(t, "GET", "lock:"+l.Key()) != l.Owner()
		})
	}
	// A vote that a lock did not wait for, cut off by the restart, would be requested again while the
	// node is down, and the node be suspended: refreshes leave such a node out.
	redistest.Eventually(t, 10*time.Second, "all three nodes have voted", hasAll)
	if err := servers[1].Restart(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, l := range locks {
		wg.Go(func() {
			if err := l.Refresh(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	redistest.Eventually(t, 10*time.Second, "the node has all locks again", hasAll)
	servers[0].Stop() // now the restarted node is needed, and its tokens must be good
	for _, l := range locks {
		fence, key := l.Fence(), l.Key()
		lockkit.Release(t, l)
		next := lockkit.Lock(t, c, key, time.Minute)
		if next.Fence() <= fence {
			t.Errorf("%s: token %d after %d", key, next.Fence(), fence)
		}
		lockkit.Release(t, next)
	}
	servers[0].Cont()
}

// A node is stopped while locks come and go, and continues: what it then executes late, and what it missed,
// is gone long before its ttl ends.
func TestNoKeyOutlivesItsLockOnANodeThatWasStopped(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	var stop atomic.Bool
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for n := 0; !stop.Load(); n++ {
				l, err := c.SingleFlightLock(t.Context(), fmt.Sprintf("k%d-%d", i, n%50), time.Minute, nil)
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(time.Millisecond) // the load is bounded
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	servers[2].Stop()
	time.Sleep(time.Second)
	servers[2].Cont()
	servers[2].WaitUp(t)
	stop.Store(true)
	wg.Wait()
	redistest.Eventually(t, 30*time.Second, "no key is left", func() bool {
		return !slices.ContainsFunc(servers, func(s *redistest.Server) bool {
			return slices.ContainsFunc(s.Keys(t), func(key string) bool { return strings.HasPrefix(key, "lock:") })
		})
	})
}
