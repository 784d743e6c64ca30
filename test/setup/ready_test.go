package setup

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// After Ready the connections are dialed and the scripts loaded: later calls dial and load nothing.
func TestReadyDoesAllThatIsDoneOnce(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		servers, nodes := lockkit.StartNodes(t, n)
		c := lockkit.New(t, lockkit.Patient, nodes...)
		testkit.Must(t, c.Ready(t.Context()))
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
				lockkit.Release(t, lockkit.Lock(t, c, string(rune('a'+i)), time.Minute))
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
		redistest.Eventually(t, 10*time.Second, "the node that Ready did not wait for is as far as the others",
			func() bool {
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
	c := lockkit.New(t, lockkit.Patient, node)
	testkit.Must(t, c.Ready(t.Context()))
	for _, s := range cluster.Servers() {
		if s.CommandCalls(t)["script|load"] == 0 {
			t.Errorf("%s has not loaded scripts", s.Addr())
		}
	}
}

// Ready waits until a majority is ready, not for the others, and returns what is wrong when its ctx
// ends.
func TestReadyWithoutNodes(t *testing.T) {
	t.Parallel()
	dead := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t)})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	_, nodes := lockkit.StartNodes(t, 1)
	c := lockkit.New(t, flightlock.Options{DisableQuarantine: true}, nodes[0], dead(), dead())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := c.Ready(ctx)
	var q *flightlock.QuorumError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, flightlock.ErrUnavailable) ||
		!errors.As(err, &q) || len(q.Nodes) != 3 || !strings.Contains(err.Error(), "not ready") {
		t.Error(err)
	}
	_, two := lockkit.StartNodes(t, 2)
	testkit.Must(t, lockkit.New(t, flightlock.Options{DisableQuarantine: true}, two[0], dead(),
		two[1]).Ready(t.Context()))

	closed, err := flightlock.New(flightlock.Options{}, nodes...)
	testkit.Must(t, err)
	testkit.Must(t, closed.Close(t.Context()))
	if err := closed.Ready(t.Context()); !errors.Is(err, flightlock.ErrClosed) {
		t.Error(err)
	}
}

// A new process of a server is sent little before the first lock, by a client with all that a real one has:
// three nodes, waiters and a quarantine.
func TestBytesBeforeTheFirstLock(t *testing.T) {
	t.Parallel()
	const limit = 12 << 10
	for _, count := range []int{1, 3} {
		var nodes []redis.UniversalClient
		var sent []*atomic.Int64
		for range count {
			n := &atomic.Int64{}
			sent = append(sent, n)
			nodes = append(nodes, redis.NewClient(&redis.Options{
				Addr: redistest.StartServer(t).Addr(),
				Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
					return countingConn{c, n}, err
				},
			}))
		}
		opts := lockkit.Patient
		opts.Label = "a-pod-of-this-service-7c9d:12345"
		c, err := flightlock.New(opts, nodes...)
		testkit.Must(t, err)
		l := lockkit.Lock(t, c, "k", time.Minute)
		for i := range sent {
			if n := sent[i].Load(); n > limit {
				t.Errorf("%d nodes: node %d was sent %d bytes before the first lock, want %d at most", count, i, n, limit)
			} else {
				t.Logf("%d nodes: %d bytes", count, n)
			}
		}
		lockkit.Release(t, l)
		lockkit.Close(t, c)
		for _, n := range nodes {
			_ = n.Close()
		}
	}
}

// countingConn counts the bytes that are written.
type countingConn struct {
	net.Conn
	written *atomic.Int64
}

func (c countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}
