package rediscache_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
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
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		rdb, well, hangs := twoMasters(t)
		c := w.cacheOf(rdb, rediscache.Options[string]{})
		keys := someKeys(3000)
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
		if n := int64(len(well.Mini.Keys())); n != 3000-lost {
			t.Errorf("%d keys of the other master were invalidated, want %d", n, 3000-lost)
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
		for _, key := range keys { // until its circuit is open
			_, _ = c.Get(t.Context(), key)
		}
		for _, key := range keys { // then it adds no LookupTimeout
			began := time.Now()
			if _, err := c.Get(t.Context(), key); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > w.origin.takes {
				t.Errorf("a Get of %s took %v", key, took)
			}
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

// On a Cluster the entries are spread, and one Invalidate reaches all of them.
func TestCluster(t *testing.T) {
	t.Parallel()
	rdb := cluster.Get(t).Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
	cache, o := realCache(t, rdb, rediscache.Options[string]{})
	ctx := t.Context()
	var keys []string
	for i := range 60 {
		keys = append(keys, fmt.Sprint(i))
	}
	for version := range int64(3) {
		o.version.Store(version)
		if version > 0 {
			if err := cache.Invalidate(ctx, keys...); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			var wg sync.WaitGroup
			for _, key := range keys {
				wg.Go(func() {
					if v, err := cache.Get(ctx, key); err != nil || v != fmt.Sprintf("%s@%d", key, version) {
						t.Error(v, err)
					}
				})
			}
			wg.Wait()
		}
		if n := o.loads.Load(); n != 60*(version+1) {
			t.Errorf("%d loads", n)
		}
	}
}

// A master of a Cluster that does not answer is not used for a while, and the others are.
func TestAMasterThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3) // of its own: a master is stopped
	rdb := cluster.Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled, o.MaxRetries = true, -1 })
	cache, o := realCache(t, rdb, rediscache.Options[string]{
		Fetch: flightlock.FetchOptions{LookupTimeout: 400 * time.Millisecond},
	})
	stopped, running := cluster.Servers()[0], cluster.Servers()[1]
	bad, good := cluster.KeyOn(t, stopped, cache.Key("bad")), cluster.KeyOn(t, running, cache.Key("good"))
	get := func(key string) {
		t.Helper()
		if _, err := cache.Get(t.Context(), strings.TrimPrefix(key, cache.Key(""))); err != nil {
			t.Error(err)
		}
	}
	get(bad)
	get(good)
	loads := o.loads.Load()
	if err := stopped.Stop(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 40*time.Second, "its circuit is open", func() bool {
		get(bad)
		return cache.Stats().Down == 1
	})
	redistest.Eventually(t, 40*time.Second, "the other master is used", func() bool {
		before := cache.Stats().Hits
		get(good)
		return cache.Stats().Hits == before+1
	})
	if o.loads.Load() == loads {
		t.Error("nothing was loaded")
	}
	if err := stopped.Cont(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 40*time.Second, "it is back", func() bool { return cache.Stats().Down == 0 })
}

// A Cluster that has not answered since this process began, so that its slots are not known, costs no more than a
// server that hangs: nobody waits for the slots, which go-redis would ask for, for each key.
func TestAClusterThatNeverAnswers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one, other := redistest.StartMemNode(t, "10.1.0.2:6379"), redistest.StartMemNode(t, "10.1.0.3:6379")
		one.Stall(true)
		other.Stall(true)
		rdb := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{one.Addr(), other.Addr()}, ContextTimeoutEnabled: true,
			Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if addr == one.Addr() {
					return one.Dial(ctx, network, addr)
				}
				return other.Dial(ctx, network, addr)
			},
		})
		defer func() {
			_ = rdb.Close()
			one.Stall(false)
			other.Stall(false)
			time.Sleep(time.Minute) // the bubble's time: go-redis asks for the slots
		}()
		w.origin.takes = 0
		c := w.cacheOf(rdb, rediscache.Options[string]{
			Fetch: flightlock.FetchOptions{LookupTimeout: 400 * time.Millisecond},
		})
		keys := someKeys(100)
		began := time.Now()
		for i := range 2 {
			if _, err := c.Get(t.Context(), fmt.Sprint("one", i)); err != nil {
				t.Error(err)
			}
			if values, err := c.GetMany(t.Context(), keys); err != nil || len(values) != len(keys) {
				t.Error(len(values), err)
			}
		}
		// With go-redis' DialTimeout or ReadTimeout for each key it would be minutes.
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %v", took)
		}
		if n := c.Stats().Down; n != 1 {
			t.Errorf("%d servers are down", n)
		}
	})
}

// A ClusterClient asks a master for its commands before its first request, for longer than a lookup may take, and all
// of its requests wait for that. A Get does not.
func TestAMasterThatHangsAtTheFirstGetDoesNotHoldItUp(t *testing.T) {
	t.Parallel()
	c, err := flightlock.New(flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	over := make(chan struct{})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		ContextTimeoutEnabled: true, DialerRetries: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: "10.1.0.2:6379"}}}}, nil
		},
		Dialer: func(context.Context, string, string) (net.Conn, error) { return &hangingConn{over: over}, nil },
	})
	defer func() { _ = rdb.Close() }()
	load := func(context.Context, string) (string, error) { return "v", nil }
	users, err := rediscache.New(c, rdb, load, rediscache.Options[string]{
		Name: "user", Fresh: time.Minute, Fetch: flightlock.FetchOptions{LookupTimeout: 100 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close(context.Background())
	defer close(over) // first: what still waits for the master ends
	got := make(chan error, 1)
	go func() {
		_, err := users.Get(context.Background(), "42")
		got <- err
	}()
	select {
	case err := <-got:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the Get waits for the master")
	}
}

// hangingConn is a connection to a server that takes requests and never answers. Deadlines of more than a second
// never come, as if each second was an hour.
type hangingConn struct {
	net.Conn
	over <-chan struct{} // closed when it is to fail

	mu       sync.Mutex // guards deadline
	deadline time.Time
}

func (c *hangingConn) Read([]byte) (int, error) {
	c.mu.Lock()
	deadline := c.deadline
	c.mu.Unlock()
	var due <-chan time.Time
	if !deadline.IsZero() && time.Until(deadline) < time.Second {
		due = time.After(time.Until(deadline))
	}
	select {
	case <-due:
		return 0, os.ErrDeadlineExceeded
	case <-c.over:
		return 0, net.ErrClosed
	}
}

func (c *hangingConn) Write(b []byte) (int, error)      { return len(b), nil }
func (c *hangingConn) Close() error                     { return nil }
func (c *hangingConn) SetWriteDeadline(time.Time) error { return nil }
func (c *hangingConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *hangingConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *hangingConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

func (c *hangingConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return nil
}
