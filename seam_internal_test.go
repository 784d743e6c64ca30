package flightlock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// lockOfK is where the nodes have a Fetcher's lock named "k".
const lockOfK = fetchNamespace + "lock:k"

// contender is a client that contends for the key.
type contender struct {
	l    seam.Lock
	err  error
	done chan struct{}
}

func contending(t *testing.T, c *Client) *contender {
	a := &contender{done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.l, _, a.err = insideOf(c).Contend(t.Context(), "k", 20*time.Second, func(context.Context) bool { return false })
	}()
	return a
}

// deployment is the nodes of a test, and the servers that have the key "k".
type deployment struct {
	nodes     func() []redis.UniversalClient
	servers   []*redistest.Server
	listening func(t *testing.T, s *redistest.Server) int // who hears of it there
}

func servers(t *testing.T, n int) deployment {
	d := deployment{listening: inboxes}
	for range n {
		d.servers = append(d.servers, redistest.StartServer(t))
	}
	d.nodes = func() (nodes []redis.UniversalClient) {
		for _, s := range d.servers {
			nodes = append(nodes, s.Client(t))
		}
		return nodes
	}
	return d
}

func cluster(t *testing.T) deployment {
	c := redistest.StartCluster(t, 3)
	return deployment{
		nodes:   func() []redis.UniversalClient { return []redis.UniversalClient{c.Client(t)} },
		servers: []*redistest.Server{c.MasterOf(t, lockOfK)},
		listening: func(t *testing.T, s *redistest.Server) int {
			return int(s.Do(t, "PUBSUB", "SHARDNUMSUB", lockOfK).([]any)[1].(int64))
		},
	}
}

// inboxes is the number of clients that are subscribed to their inboxes on s.
func inboxes(t *testing.T, s *redistest.Server) int {
	return len(s.Do(t, "PUBSUB", "CHANNELS", node.Inbox+"*").([]any))
}

func (d deployment) client(t *testing.T, opts Options) *Client {
	opts.NodeTimeout = 5 * time.Second
	c, err := New(opts, d.nodes()...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

// awaitWaiting waits until so many clients wait for the key and receive its notices.
func (d deployment) awaitWaiting(t *testing.T, n int) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, "all listen and are known to wait", func() bool {
		for _, s := range d.servers {
			if d.listening(t, s) != n || wanting(t, s) != int64(n) {
				return false
			}
		}
		return true
	})
}

func wanting(t *testing.T, s *redistest.Server) (n int64) {
	t.Helper()
	for _, k := range s.Keys(t) {
		if strings.HasSuffix(k, ":wants:"+lockOfK) {
			n += s.Do(t, "ZCARD", k).(int64)
		}
	}
	return n
}

// All processes that wait for another's work are notified that it has failed, at once and together.
func TestAFailureReachesAllProcesses(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) deployment{
		"nodes=1": func(t *testing.T) deployment { return servers(t, 1) },
		"nodes=3": func(t *testing.T) deployment { return servers(t, 3) },
		"cluster": cluster,
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t)
			c := d.client(t, Options{})
			first := contending(t, c)
			<-first.done
			if first.err != nil {
				t.Fatal(first.err)
			}
			var all []*contender
			for range 6 {
				all = append(all, contending(t, d.client(t, Options{})))
			}
			d.awaitWaiting(t, len(all))
			insideOf(c).ReleaseFailed(first.l)
			for i, a := range all {
				<-a.done
				if !errors.Is(a.err, errFailedElsewhere) {
					t.Errorf("client %d: %v", i, a.err)
				}
			}
			redistest.Eventually(t, 20*time.Second, "nobody is known to wait", func() bool {
				n := int64(0)
				for _, s := range d.servers {
					n += wanting(t, s)
				}
				return n == 0
			})
		})
	}
}

// With one node of three down, the others notify. A client without notices gets the lock in its
// turn.
func TestAFailureThatNotAllNodesTell(t *testing.T) {
	d := servers(t, 3)
	c := d.client(t, Options{})
	deaf := d.client(t, Options{DisableNotify: true})
	first := contending(t, c)
	<-first.done
	a, b := contending(t, d.client(t, Options{})), contending(t, deaf)
	redistest.Eventually(t, 20*time.Second, "all wait", func() bool {
		for _, s := range d.servers {
			if wanting(t, s) != 2 || inboxes(t, s) != 1 {
				return false
			}
		}
		return true
	})
	if err := d.servers[1].Kill(); err != nil {
		t.Fatal(err)
	}
	insideOf(c).ReleaseFailed(first.l)
	<-a.done
	if !errors.Is(a.err, errFailedElsewhere) {
		t.Errorf("got %v", a.err)
	}
	<-b.done
	if b.err != nil {
		t.Fatal(b.err)
	}
	if err := b.l.Release(context.Background()); err != nil {
		t.Error(err)
	}
}
