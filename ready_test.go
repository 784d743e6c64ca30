package flightlock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// After Ready the connections are dialed and the scripts loaded: later calls dial and load nothing.
func TestReadyDoesAllThatIsDoneOnce(t *testing.T) {
	for _, n := range []int{1, 3} {
		servers, nodes := realNodes(t, n)
		c := newClient(t, patient, nodes...)
		must(t, c.Ready(t.Context()))
		type once struct{ hello, load int64 }
		count := func() (all []once) {
			for _, s := range servers {
				calls := s.CommandCalls(t)
				all = append(all, once{calls["hello"], calls["script|load"]})
			}
			return all
		}
		// busy is the number of nodes that dialed or loaded something for locks.
		busy := func(locks int) (nodes int) {
			before := count()
			for i := range locks {
				mustRelease(t, mustLock(t, c, string(rune('a'+i)), time.Minute))
			}
			for i, got := range count() {
				if got.load != before[i].load || got.hello > before[i].hello+1 { // and CommandCalls itself
					nodes++
					t.Logf("%d nodes: node %d: %+v before %d locks, %+v after", n, i, before[i], locks, got)
				}
			}
			return nodes
		}
		if b := busy(100); b > (n-1)/2 {
			t.Errorf("%d of %d nodes had something left to do: Ready waits for a majority", b, n)
		}
		redistest.Eventually(t, 10*time.Second, "the node that Ready did not wait for is as far as the others", func() bool {
			return busy(1) == 0 && !slices.ContainsFunc(count(), func(o once) bool { return o.load == 0 })
		})
		if b := busy(100); b > 0 {
			t.Errorf("%d of %d nodes did something once more", b, n)
		}
		if s := c.Stats(); s.Held != 0 || s.Waiters != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// A Cluster's masters are all ready.
func TestReadyOnACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	node := cluster.Client(t)
	c := newClient(t, patient, node)
	must(t, c.Ready(t.Context()))
	for _, s := range cluster.Servers() {
		if s.CommandCalls(t)["script|load"] == 0 {
			t.Errorf("%s has not loaded scripts", s.Addr())
		}
	}
}

// Ready waits until a majority is ready, not for the others, and returns what is wrong when its ctx
// ends.
func TestReadyWithoutNodes(t *testing.T) {
	dead := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t)})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	_, nodes := realNodes(t, 1)
	c := newClient(t, flightlock.Options{DisableQuarantine: true}, nodes[0], dead(), dead())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := c.Ready(ctx)
	var q *flightlock.QuorumError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, flightlock.ErrUnavailable) ||
		!errors.As(err, &q) || len(q.Nodes) != 3 || !strings.Contains(err.Error(), "not ready") {
		t.Error(err)
	}
	_, two := realNodes(t, 2)
	must(t, newClient(t, flightlock.Options{DisableQuarantine: true}, two[0], dead(), two[1]).Ready(t.Context()))

	closed, err := flightlock.New(flightlock.Options{Nodes: nodes})
	must(t, err)
	must(t, closed.Close(t.Context()))
	if err := closed.Ready(t.Context()); !errors.Is(err, flightlock.ErrClosed) {
		t.Error(err)
	}
}

// A release of Ready's own lock that is not confirmed in time is not what Ready waits for.
func TestReadyWhoseReleaseIsLate(t *testing.T) {
	bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{NodeTimeout: 20 * time.Millisecond}, clients...)
		nodes[0].SetDelay(5 * time.Millisecond)
		stalled := make(chan bool)
		go func() {
			defer close(stalled)
			for range 1000 {
				if slices.ContainsFunc(nodes[0].Mini.Keys(), func(k string) bool { return strings.Contains(k, "-ready-") }) {
					time.Sleep(5*time.Millisecond + 100*time.Microsecond) // the reply has arrived
					nodes[0].Stall(true)
					time.Sleep(30 * time.Millisecond)
					nodes[0].Stall(false)
					stalled <- true
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
		if err := c.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		if !<-stalled {
			t.Error("the release was not late")
		}
	})
}
