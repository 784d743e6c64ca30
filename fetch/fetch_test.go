package fetch_test

import (
	"strings"

	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A fleet is some processes, each with a Fetcher of one cache over a Client of its own, in virtual time.
type fleet struct {
	t       *testing.T
	cache   *fetchkit.Cache
	nodes   []*redistest.MemNode
	clients []*flightlock.Client
	fs      []*fetch.Fetcher[string]
}

// inFleet runs test, and then checks that nothing is left: no run, no lock, and that Close returns.
func inFleet(t *testing.T, processes int, cache *fetchkit.Cache, opts fetch.Options, test func(t *testing.T, x *fleet)) {
	t.Helper()
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		x := &fleet{t: t, cache: cache, nodes: nodes}
		for range processes {
			c := lockkit.New(t, flightlock.Options{}, clients...)
			x.clients = append(x.clients, c)
			x.fs = append(x.fs, fetchkit.New(t, c, cache, opts))
		}
		test(t, x)
		x.wantQuiet()
	})
}

// down cuts all nodes off, or lets them be reached again.
func (x *fleet) down(on bool) {
	for _, n := range x.nodes {
		n.Down(on)
	}
}

// lockName is where the nodes have the lock of a Fetcher's key.
func lockName(key string) string { return "flightlock:fetch:lock:fetch:" + key }

// locks are the keys of the Fetchers' locks that the nodes have.
func (x *fleet) locks() (keys []string) {
	for _, n := range x.nodes {
		for _, key := range n.Mini.Keys() {
			if typ := n.Mini.Type(key); strings.HasPrefix(key, lockName("")) && typ == "string" {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// wantQuiet checks that nothing is left of all calls.
func (x *fleet) wantQuiet() {
	x.t.Helper()
	synctest.Wait()
	for i, f := range x.fs {
		if s := f.Stats(); s.Running != 0 {
			x.t.Errorf("process %d: %+v", i, s)
		}
	}
	for _, n := range x.nodes {
		n.Stall(false)
		n.Down(false)
	}
	time.Sleep(5 * time.Second) // for releases that are repeated
	for i, c := range x.clients {
		if n := c.Stats().Held; n != 0 {
			x.t.Errorf("process %d holds %d locks", i, n)
		}
	}
	if keys := x.locks(); len(keys) > 0 {
		x.t.Errorf("the nodes still have %.300q", keys)
	}
}
