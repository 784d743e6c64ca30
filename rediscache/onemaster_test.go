package rediscache_test

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// twoMasters is a client of a Cluster, and its masters, which have half of the slots each.
func twoMasters(t *testing.T) (rdb *redis.ClusterClient, first, second *redistest.MemNode) {
	t.Helper()
	first, second = redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
	rdb = redis.NewClusterClient(&redis.ClusterOptions{
		ContextTimeoutEnabled: true, DialerRetries: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{
				{Start: 0, End: 8191, Nodes: []redis.ClusterNode{{Addr: first.Addr()}}},
				{Start: 8192, End: 16383, Nodes: []redis.ClusterNode{{Addr: second.Addr()}}},
			}, nil
		},
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == first.Addr() {
				return first.Dial(ctx, network, addr)
			}
			return second.Dial(ctx, network, addr)
		},
	})
	t.Cleanup(func() {
		_ = rdb.Close()
		time.Sleep(5 * time.Second) // the bubble's time: go-redis pauses after it has looked at the slots
	})
	return rdb, first, second
}

// Of many keys, those on a master that hangs are left out once that is known, and the others are invalidated.
func TestManyKeysWhileOneMasterHangs(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb, well, hangs := twoMasters(t)
		c := w.cacheOf(rdb, rediscache.Options[string]{})
		keys := someKeys(10_000)
		if err := c.Invalidate(t.Context(), keys...); err != nil { // which leaves a tombstone each
			t.Fatal(err)
		}
		lost := int64(len(hangs.Mini.Keys()))
		well.Mini.FlushAll()
		hangs.Stall(true)
		began := time.Now()
		err := c.Invalidate(t.Context(), keys...)
		// two batches time out, and begin and confirm that it hangs
		if took := time.Since(began); err == nil || took > 2*time.Second {
			t.Errorf("it took %v: %v", took, err)
		}
		if n := c.Stats().Repeating; n != lost {
			t.Errorf("%d invalidations are repeated, want %d", n, lost)
		}
		if n := int64(len(well.Mini.Keys())); n != 10_000-lost {
			t.Errorf("%d keys of the other master were invalidated, want %d", n, 10_000-lost)
		}
		hangs.Stall(false)
		time.Sleep(5 * time.Second) // the bubble's time
		if n := c.Stats().Repeating; n != 0 {
			t.Errorf("%d invalidations are repeated", n)
		}
	})
}

// While one master of a Cluster hangs, the replies of the others count: their hits are hits, and what was invalidated
// there is done.
func TestOneMasterThatHangsDoesNotFailTheOthers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb, _, hangs := twoMasters(t)
		w.origin.takes = 10 * time.Millisecond
		c := w.cacheOf(rdb, rediscache.Options[string]{})
		var keys []string
		for i := range 20 {
			keys = append(keys, fmt.Sprint("k", i))
		}
		if _, err := c.GetMany(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		lost := int64(len(hangs.Mini.Keys()))
		if lost == 0 || lost == int64(len(keys)) {
			t.Fatalf("%d keys are on the master that hangs", lost)
		}
		hang := func() {
			hangs.Cut() // its connections, so that there are new ones
			hangs.Stall(true)
		}
		if err := c.Invalidate(t.Context(), keys...); err != nil { // now the servers know the script
			t.Fatal(err)
		}
		hang()
		if err := c.Invalidate(t.Context(), keys...); err == nil {
			t.Error("all keys were invalidated")
		}
		if n := c.Stats().Repeating; n != lost {
			t.Errorf("%d invalidations are repeated, want %d", n, lost)
		}
		hangs.Stall(false)
		time.Sleep(5 * time.Second) // the bubble's time: they have been repeated
		if n := c.Stats().Repeating; n != 0 {
			t.Errorf("%d invalidations are repeated", n)
		}
		if _, err := c.GetMany(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		before := c.Stats()
		hang()
		if _, err := c.GetMany(t.Context(), keys); err != nil {
			t.Error(err)
		}
		if n := c.Stats().Hits - before.Hits; n != uint64(len(keys))-uint64(lost) {
			t.Errorf("%d hits, want %d", n, len(keys)-int(lost))
		}
		hangs.Stall(false)
	})
}

// When a replica has taken over from a master that has died, it is asked soon, and not when go-redis looks at the
// Cluster's slots again by itself, which is once a minute: until then each Get would load, and each invalidation fail.
func TestAMasterThatHasTakenOverIsAskedSoon(t *testing.T) {
	for _, what := range []string{"Get", "Invalidate"} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				old, successor := redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
				nodes := map[string]*redistest.MemNode{old.Addr(): old, successor.Addr(): successor}
				var master atomic.Pointer[redistest.MemNode]
				master.Store(old)
				rdb := redis.NewClusterClient(&redis.ClusterOptions{
					ContextTimeoutEnabled: true, DialerRetries: 1,
					MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
					ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
						masters := []redis.ClusterNode{{Addr: master.Load().Addr()}}
						return []redis.ClusterSlot{{End: 16383, Nodes: masters}}, nil
					},
					Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
						return nodes[addr].Dial(ctx, network, addr)
					},
				})
				defer func() {
					_ = rdb.Close()
					time.Sleep(5 * time.Second) // go-redis dials the old one once a second, until it notices
				}()
				c := w.cacheOf(rdb, rediscache.Options[string]{})
				if _, err := c.Get(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				old.Down(true)
				use := func() { _, _ = c.Get(t.Context(), "k") }
				if what == "Invalidate" {
					use = func() { _ = c.Invalidate(t.Context(), "k") }
				}
				for range 5 {
					use()
					time.Sleep(time.Second) // the bubble's time
				}
				if s := c.Stats(); s.Down == 0 && s.Repeating == 0 {
					t.Fatal("the master has not died")
				}
				master.Store(successor)
				time.Sleep(3 * time.Second) // a probe is due every 250 ms, and a repetition every 2 s
				use()
				time.Sleep(3 * time.Second)
				if s := c.Stats(); s.Down != 0 || s.Repeating != 0 {
					t.Errorf("%d servers are left alone, %d invalidations are repeated", s.Down, s.Repeating)
				}
				if n := len(successor.Mini.Keys()); n != 1 {
					t.Errorf("the new master has %d entries, want 1", n)
				}
			})
		})
	}
}
