package flightlock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// After Ready the connections are dialled and the scripts known: what comes then dials and loads nothing.
func TestReadyDoesAllThatIsDoneOnce(t *testing.T) {
	for _, n := range []int{1, 3} {
		servers, nodes := realNodes(t, n)
		c := newClient(t, flightlock.Options{}, nodes...)
		must(t, c.Ready(t.Context()))
		type once struct{ hello, load int64 }
		count := func() (all []once) {
			for _, s := range servers {
				calls := s.CommandCalls(t)
				all = append(all, once{calls["hello"], calls["script|load"]})
			}
			return all
		}
		before := count()
		for i := range 100 {
			mustRelease(t, mustLock(t, c, string(rune('a'+i)), time.Minute))
		}
		did := 0
		for i, got := range count() {
			if got.load != before[i].load || got.hello > before[i].hello+1 { // and CommandCalls itself
				did++
				t.Logf("%d nodes: node %d: %+v after Ready, %+v after 100 locks", n, i, before[i], got)
			}
		}
		if did > (n-1)/2 { // Ready waits for a majority
			t.Errorf("%d of %d nodes had to do something once more", did, n)
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
	c := newClient(t, flightlock.Options{}, node)
	must(t, c.Ready(t.Context()))
	for _, s := range cluster.Servers() {
		if s.CommandCalls(t)["script|load"] == 0 {
			t.Errorf("%s has not loaded scripts", s.Addr())
		}
	}
}

// Ready waits until a majority is there, not for the others, and says what is wrong when its ctx ends.
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
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, flightlock.ErrUnavailable) || !errors.As(err, &q) || len(q.Nodes) != 3 {
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
