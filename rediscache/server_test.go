package rediscache_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// lockClient locks on the server at addr, until the end of the test.
func lockClient(tb testing.TB, addr string, opts flightlock.Options) *flightlock.Client {
	tb.Helper()
	c, err := flightlock.Open([]string{"redis://" + addr}, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// realCache is a Cache over real servers, and counts its loads. They may take long to answer, for the machine may be
// busy; tests of late answers set LookupTimeout.
func realCache(t *testing.T, rdb redis.UniversalClient, locks string,
	opts rediscache.Options[string]) (*rediscache.Cache[string], *origin) {
	t.Helper()
	c := lockClient(t, locks, flightlock.Options{NodeTimeout: 10 * time.Second})
	if opts.Fetch.LookupTimeout == 0 {
		opts.Fetch.LookupTimeout = 10 * time.Second
	}
	o := &origin{takes: 10 * time.Millisecond}
	if opts.Fresh == 0 {
		opts.Fresh = time.Minute
	}
	cache, err := rediscache.New(c, rdb, o.load, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := cache.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return cache, o
}

func honouring(o *redis.Options) { o.ContextTimeoutEnabled = true }

// On a real server a hit is one GET and nothing else, and each of the other requests is one script,
// also when the server has lost the scripts.
func TestCommandsPerRequest(t *testing.T) {
	t.Parallel()
	s, locks := redistest.StartServer(t), redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), locks.Addr(), rediscache.Options[string]{Stale: time.Minute})
	ctx := t.Context()
	get := func() {
		t.Helper()
		if v, err := cache.Get(ctx, "k"); err != nil || !strings.HasPrefix(v, "k@") {
			t.Fatal(v, err)
		}
	}
	get()
	count := func(what string, do func(), want map[string]int64) {
		t.Helper()
		before := s.CommandCalls(t)
		do()
		after := s.CommandCalls(t)
		for _, command := range []string{"get", "eval", "evalsha", "set", "getrange", "time", "pttl", "pexpire"} {
			if n := after[command] - before[command]; n != want[command] {
				t.Errorf("%s: %d times %s, want %d", what, n, command, want[command])
			}
		}
	}
	count("100 hits", func() {
		for range 100 {
			get()
		}
	}, map[string]int64{"get": 100})
	s.Do(t, "SCRIPT", "FLUSH")
	keys := []string{"a", "b", "c"}
	invalidate := func() {
		if err := cache.Invalidate(ctx, keys...); err != nil {
			t.Error(err)
		}
	}
	count("Invalidate of 3 after SCRIPT FLUSH", invalidate, map[string]int64{"evalsha": 3, "eval": 3, "time": 3, "set": 3})
	count("Invalidate of 3", invalidate, map[string]int64{"evalsha": 3, "time": 3, "set": 3})
	set := func() {
		if err := cache.Set(ctx, "k", "k@1"); err != nil {
			t.Error(err)
		}
	}
	set()
	count("Set", set, map[string]int64{"evalsha": 2, "time": 2, "get": 1, "pttl": 1, "getrange": 1, "set": 1})
	if n := o.loads.Load(); n != 1 {
		t.Errorf("%d loads", n)
	}
}

// On a Cluster the entries are spread, and one Invalidate reaches all of them.
func TestCluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	locks := redistest.StartServer(t)
	rdb := cluster.Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
	cache, o := realCache(t, rdb, locks.Addr(), rediscache.Options[string]{Name: "user"})
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
	cluster := redistest.StartCluster(t, 3)
	locks := redistest.StartServer(t)
	rdb := cluster.Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled, o.MaxRetries = true, -1 })
	cache, o := realCache(t, rdb, locks.Addr(),
		rediscache.Options[string]{Fetch: flightlock.FetchOptions{LookupTimeout: 400 * time.Millisecond}})
	ctx := t.Context()
	stopped, running := cluster.Servers()[0], cluster.Servers()[1]
	bad, good := cluster.KeyOn(t, stopped, "bad"), cluster.KeyOn(t, running, "good")
	get := func(key string) time.Duration {
		t.Helper()
		began := time.Now()
		if _, err := cache.Get(ctx, key); err != nil {
			t.Error(err)
		}
		return time.Since(began)
	}
	get(bad)
	get(good)
	loads := o.loads.Load()
	if err := stopped.Stop(); err != nil {
		t.Fatal(err)
	}
	get(bad)
	redistest.Eventually(t, 10*time.Second, "its circuit is open", func() bool {
		get(bad)
		return cache.Stats().Down == 1
	})
	redistest.Eventually(t, 10*time.Second, "it adds no LookupTimeout any more", func() bool {
		return get(bad) < 300*time.Millisecond
	})
	redistest.Eventually(t, 10*time.Second, "the other master is used", func() bool {
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
	redistest.Eventually(t, 20*time.Second, "it is back", func() bool { return cache.Stats().Down == 0 })
}

// A Cluster that has not answered since this process began, so that its slots are not known, costs no more than a
// server that hangs: nobody waits for the slots, which go-redis would ask for, for each key.
func TestAClusterThatNeverAnswers(t *testing.T) {
	t.Parallel()
	locks := redistest.StartServer(t)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{redistest.BlackHole(t), redistest.BlackHole(t)}, ContextTimeoutEnabled: true,
	})
	defer func() { _ = rdb.Close() }()
	cache, o := realCache(t, rdb, locks.Addr(),
		rediscache.Options[string]{Fetch: flightlock.FetchOptions{LookupTimeout: 400 * time.Millisecond}})
	o.takes = 0
	var keys []string
	for i := range 100 {
		keys = append(keys, fmt.Sprint("k", i))
	}
	began := time.Now()
	for i := range 2 {
		if _, err := cache.Get(t.Context(), fmt.Sprint("one", i)); err != nil {
			t.Error(err)
		}
		if values, err := cache.GetMany(t.Context(), keys); err != nil || len(values) != len(keys) {
			t.Error(len(values), err)
		}
	}
	// Under a second; with go-redis' DialTimeout or ReadTimeout for each key it would be minutes.
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("it took %v", took)
	}
	if n := cache.Stats().Down; n != 1 {
		t.Errorf("%d servers are down", n)
	}
}

// A server that is restarted empty has no stamps: a load that was in progress is not stored.
func TestAServerThatIsRestartedEmpty(t *testing.T) {
	t.Parallel()
	s, locks := redistest.StartServer(t), redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), locks.Addr(), rediscache.Options[string]{})
	o.takes = time.Second
	done := make(chan struct{})
	go func() {
		defer close(done)
		if v, err := cache.Get(t.Context(), "k"); v != "k@0" || err != nil {
			t.Error(v, err)
		}
	}()
	redistest.Eventually(t, 10*time.Second, "the load", func() bool { return o.loads.Load() == 1 })
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	o.version.Add(1)
	if err := cache.Invalidate(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	s.Do(t, "FLUSHALL")
	<-done
	if keys := s.Keys(t); len(keys) != 0 {
		t.Errorf("%q", keys)
	}
	if v, err := cache.Get(t.Context(), "k"); v != "k@1" || err != nil {
		t.Error(v, err)
	}
}
