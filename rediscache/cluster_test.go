package rediscache_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// clusterOf is a client of a Cluster of nodes; slots nil: it has to ask for them.
func clusterOf(t *testing.T, slots func(context.Context) ([]redis.ClusterSlot, error),
	nodes ...*redistest.MemNode,
) *redis.ClusterClient {
	t.Helper()
	o := &redis.ClusterOptions{
		ContextTimeoutEnabled: true, DialerRetries: 1, ClusterSlots: slots,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	byAddr := map[string]*redistest.MemNode{}
	for _, n := range nodes {
		o.Addrs, byAddr[n.Addr()] = append(o.Addrs, n.Addr()), n
	}
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return byAddr[addr].Dial(ctx, network, addr)
	}
	rdb := redis.NewClusterClient(o)
	t.Cleanup(func() {
		_ = rdb.Close()
		testkit.Stall(false, nodes...)
		time.Sleep(time.Minute) // the bubble's time: go-redis pauses after it has looked at the slots
	})
	return rdb
}

// ofMasters has as many slots for each of them.
func ofMasters(masters ...*redistest.MemNode) func(context.Context) ([]redis.ClusterSlot, error) {
	return func(context.Context) (slots []redis.ClusterSlot, err error) {
		for i, n := range masters {
			size := 16384 / len(masters)
			slots = append(slots, redis.ClusterSlot{
				Start: i * size, End: (i+1)*size - 1, Nodes: []redis.ClusterNode{{Addr: n.Addr()}},
			})
		}
		return slots, nil
	}
}

// twoMasters is a client of a Cluster, and its masters, which have half of the slots each.
func twoMasters(t *testing.T) (rdb *redis.ClusterClient, first, second *redistest.MemNode) {
	t.Helper()
	first, second = redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
	return clusterOf(t, ofMasters(first, second), first, second), first, second
}

// getAll expects this version of each key, from many and from each alone.
func (w *world) getAll(c *rediscache.Cache[string], keys []string, version int) {
	w.t.Helper()
	wantMany(w.t, c, keys, version)
	for _, key := range keys {
		w.want(key, fmt.Sprintf("%s@%d", key, version), c)
	}
}

// Each master has a clock of its own: that of one which is ahead, or behind, does not make entries of the
// others old, or keep them fresh.
func TestClocksOfMasters(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb, first, second := twoMasters(t)
		c := w.cacheOf(rdb, options{Stale: 3 * time.Hour})
		set := func() {
			first.Mini.SetTime(time.Now().Add(time.Hour))
			second.Mini.SetTime(time.Now().Add(-time.Hour))
		}
		set()
		keys := someKeys(8)
		w.getAll(c, keys, 0)
		if len(first.Mini.Keys()) == 0 || len(second.Mini.Keys()) == 0 {
			t.Fatal("all keys are on one master")
		}
		set()
		w.getAll(c, keys, 0)
		w.wantLoads(8)
		w.origin.version.Add(1)
		time.Sleep(time.Minute)
		set()
		w.getAll(c, keys, 0) // stale, and loaded behind
		time.Sleep(2 * w.origin.takes)
		w.getAll(c, keys, 1)
	})
}

// While one master of a Cluster hangs, the replies of the others count: their hits are hits, and what was
// invalidated there is done.
func TestOneMasterThatHangsDoesNotFailTheOthers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb, _, hangs := twoMasters(t)
		w.origin.takes = 10 * time.Millisecond
		c := w.cacheOf(rdb, options{})
		keys := someKeys(20)
		wantMany(t, c, keys, 0)
		lost := len(hangs.Mini.Keys())
		if lost == 0 || lost == len(keys) {
			t.Fatalf("%d keys are on the master that hangs", lost)
		}
		hang := func() {
			hangs.Cut() // its connections, so that there are new ones
			hangs.Stall(true)
		}
		testkit.Must(t, c.Invalidate(t.Context(), keys...)) // now the servers know the script
		hang()
		if err := c.Invalidate(t.Context(), keys...); err == nil {
			t.Error("all keys were invalidated")
		}
		wantRepeating(t, lost, c)
		hangs.Stall(false)
		time.Sleep(5 * time.Second) // the bubble's time: they have been repeated
		wantRepeating(t, 0, c)
		wantMany(t, c, keys, 0)
		before := c.Stats()
		hang()
		wantMany(t, c, keys, 0)
		if n := c.Stats().Hits - before.Hits; n != uint64(len(keys)-lost) {
			t.Errorf("%d hits, want %d", n, len(keys)-lost)
		}
		w.getAll(c, keys, 0) // until its circuit is open
		for _, key := range keys {
			w.within(w.origin.takes, func() { w.want(key, key+"@0", c) })
		}
		hangs.Stall(false)
	})
}

// When a replica has taken over from a master that has died, it is asked soon, and not when go-redis looks at
// the Cluster's slots again by itself, which is once a minute: until then each Get would load, and each
// invalidation fail.
func TestAMasterThatHasTakenOverIsAskedSoon(t *testing.T) {
	bubbles(t, []string{"Get", "Invalidate"}, func(t *testing.T, w *world, what string) {
		old, successor := redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(old)
		rdb := clusterOf(t, func(ctx context.Context) ([]redis.ClusterSlot, error) {
			return ofMasters(master.Load())(ctx)
		}, old, successor)
		c := w.cacheOf(rdb, options{})
		w.want("k", "k@0", c)
		old.Down(true)
		for range 5 {
			_ = uses[what](t.Context(), c)
			time.Sleep(time.Second) // the bubble's time
		}
		if s := c.Stats(); s.Down == 0 && s.Repeating == 0 {
			t.Fatal("the master has not died")
		}
		master.Store(successor)
		time.Sleep(3 * time.Second) // a probe is due every 250 ms, and a repetition every 2 s
		_ = uses[what](t.Context(), c)
		time.Sleep(3 * time.Second)
		if s := c.Stats(); s.Down != 0 || s.Repeating != 0 {
			t.Errorf("%d servers are left alone, %d invalidations are repeated", s.Down, s.Repeating)
		}
		if len(successor.Mini.Keys()) == 0 {
			t.Error("the new master has no entry")
		}
	})
}

// On a Cluster the entries are spread, and one GetMany and one Invalidate reach all of them.
func TestCluster(t *testing.T) {
	t.Parallel()
	rdb := cluster.Get(t).Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
	cache, o := realCache(t, rdb, options{})
	keys := someKeys(60)
	for version := range 3 {
		wantMany(t, cache, keys, version)
		redistest.Eventually(t, 40*time.Second, "the locks are released",
			func() bool { return cache.Stats().Running == 0 })
		wantMany(t, cache, keys, version)
		var wg sync.WaitGroup
		for _, key := range keys {
			wg.Go(func() { want(t, key, fmt.Sprintf("%s@%d", key, version), cache) })
		}
		wg.Wait()
		if n := o.loads.Load(); n != 60*int64(version+1) {
			t.Errorf("%d loads", n)
		}
		o.version.Add(1)
		testkit.Must(t, cache.Invalidate(t.Context(), keys...))
	}
	if s := cache.Stats(); s.Hits != 360 || s.StoreFailures+s.Outdated != 0 {
		t.Errorf("%+v", s)
	}
}

// A Cluster that has not answered since this process began costs no more than a server that hangs: nobody
// waits for its slots, if they are not known, which go-redis would ask for, for each key, nor for what its
// commands are.
func TestAClusterThatNeverAnswers(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, known bool) {
		one, other := redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
		one.Stall(true)
		other.Stall(true)
		slots, masters := ofMasters(one, other), int64(2)
		if !known {
			slots, masters = nil, 1
		}
		w.origin.takes = 0
		c := w.cacheOf(clusterOf(t, slots, one, other), options{LookupTimeout: 400 * time.Millisecond})
		keys := someKeys(100)
		w.within(time.Second, func() { // with go-redis' DialTimeout or ReadTimeout for each key it would be minutes
			for i := range 2 {
				w.want(fmt.Sprint("one", i), fmt.Sprintf("one%d@0", i), c)
				wantMany(t, c, keys, 0)
			}
		})
		if n := c.Stats().Down; n != masters {
			t.Errorf("%d servers are down, want %d", n, masters)
		}
	})
}
