package node

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// shifting is a Cluster of one master that changes: the test determines what its members reply
// about the slots, and the masters are servers of their own.
type shifting struct {
	client *redis.ClusterClient

	mu     sync.Mutex // guards what follows
	master string
	asked  int // how often its slots were requested
}

func newShifting(t *testing.T, s *redistest.Server) *shifting {
	c := &shifting{master: s.Addr()}
	c.client = redis.NewClusterClient(&redis.ClusterOptions{
		DialerRetries:            1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.asked++
			return []redis.ClusterSlot{{Start: 0, End: slots - 1, Nodes: []redis.ClusterNode{{Addr: c.master}}}}, nil
		},
	})
	t.Cleanup(func() { _ = c.client.Close() })
	return c
}

func (c *shifting) shift(s *redistest.Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.master = s.Addr()
}

func (c *shifting) timesAsked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked
}

func serversOf(n *Node) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.servers)
}

// A master that has died and is no longer part of the Cluster is dropped: it is not suspended any
// more, and costs neither commands nor goroutines, however many there have been.
func TestAMasterThatIsGoneIsLetGo(t *testing.T) {
	t.Parallel()
	running := goroutines(t)
	s := redistest.StartServer(t)
	c := newShifting(t, s)
	n := newNode(t, c.client)
	var told atomic.Int64 // how often that it is suspended, less how often that it is back
	n.Changed = func(_ string, err error) {
		if err != nil {
			told.Add(1)
		} else {
			told.Add(-1)
		}
	}
	eventuallyGranted(t, n, "k")
	before := running()
	for range 3 {
		_ = s.Kill()
		for range 3 {
			a := newAttempt(t, n, "k")
			<-a.acquire().heard
			a.release()
		}
		next := redistest.StartServer(t)
		c.shift(next)
		s = next
		eventuallyGranted(t, n, "k")
		eventuallySuspended(t, n, false)
		redistest.Eventually(t, patience, "there is one server", func() bool { return serversOf(n) == 1 })
	}
	redistest.Eventually(t, patience, "the recovery is reported", func() bool { return told.Load() == 0 })
	wantDebts(t, n, 0)
	redistest.Eventually(t, patience, "the goroutines are as many as before",
		func() bool { return running() <= before })
	// A probe without an end would run every redialEvery.
	redistest.Eventually(t, patience, "the slots are not asked for without a need", func() bool {
		asked := c.timesAsked()
		time.Sleep(2 * redialEvery)
		return c.timesAsked() == asked
	})
}

// A master that comes back to the Cluster is one like any other: it gets requests, and it votes.
func TestAMasterThatComesBack(t *testing.T) {
	t.Parallel()
	first, second := redistest.StartServer(t), redistest.StartServer(t)
	c := newShifting(t, first)
	n := newNode(t, c.client)
	eventuallyGranted(t, n, "k")
	held := newAttempt(t, n, "held")
	held.acquire().want(t, Granted)
	_ = first.Kill()
	c.shift(second)
	eventuallyGranted(t, n, "k")
	redistest.Eventually(t, patience, "there is one server",
		func() bool { return serversOf(n) == 1 && !n.Suspended() })

	_ = first.Restart()
	_ = second.Kill()
	c.shift(first)
	eventuallyGranted(t, n, "k")
	redistest.Eventually(t, patience, "there is one server",
		func() bool { return serversOf(n) == 1 && !n.Suspended() })
	if first.CommandCalls(t)["script|load"] == 0 {
		t.Error("its scripts were taken for granted")
	}
	held.release().want(t, Missing)
	wantDebts(t, n, 0)
}

// A master that has lost its slots, and is not asked any more, is dropped when another one was met.
func TestAMasterWithoutSlotsIsLetGo(t *testing.T) {
	t.Parallel()
	first, second := redistest.StartServer(t), redistest.StartServer(t)
	c := newShifting(t, first)
	n := newNode(t, c.client)
	eventuallyGranted(t, n, "k")
	c.shift(second)
	n.router.unlearn(n.servers[0]) // as it answers with MOVED
	if _, err := Masters(t.Context(), c.client); err != nil {
		t.Fatal(err)
	}
	eventuallyGranted(t, n, "k")
	redistest.Eventually(t, patience, "it is gone", func() bool { return serversOf(n) == 1 })
	if got := second.CommandCalls(t)["script|load"]; got == 0 {
		t.Error("the new master was not asked")
	}
}
