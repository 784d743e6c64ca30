package rediscache_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// options are those of most Caches.
type options = rediscache.Options[string]

// origin has a version, which each load returns.
type origin struct {
	takes   time.Duration
	holds   chan struct{} // nil, or loads wait until it is closed
	version atomic.Int64
	loads   atomic.Int64
	err     atomic.Pointer[error]
}

func (o *origin) load(ctx context.Context, key string) (string, error) {
	o.loads.Add(1)
	v := fmt.Sprintf("%s@%d", key, o.version.Load())
	err := o.err.Load()
	select {
	case <-time.After(o.takes):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if o.holds != nil {
		<-o.holds
	}
	if err != nil {
		return "", *err
	}
	return v, nil
}

// world is a server for the values, one for the locks, and an origin, in a bubble.
type world struct {
	t      *testing.T
	origin origin
	locks  *flightlocktest.Nodes
	values *redistest.MemNode
	rdb    *redis.Client
}

// bubble runs a test in one.
func bubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, locks: flightlocktest.Start(1), values: redistest.StartMemNode(t, "10.1.0.1:6379")}
		w.origin.takes = time.Second
		w.rdb = w.values.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
		t.Cleanup(w.locks.Close)
		test(t, w)
	})
}

// cache is a Cache of a process of its own.
func (w *world) cache(opts options) *rediscache.Cache[string] {
	return w.cacheOf(w.rdb, opts)
}

func (w *world) cacheOf(rdb redis.UniversalClient, opts options) *rediscache.Cache[string] {
	w.t.Helper()
	return w.cacheWith(rdb, fetch.Each(w.origin.load), opts)
}

func (w *world) cacheWith(rdb redis.UniversalClient, load fetch.Loader[string], opts options,
) *rediscache.Cache[string] {
	w.t.Helper()
	c, err := w.locks.Client(flightlock.Options{NodeTimeout: 100 * time.Millisecond})
	if err != nil {
		w.t.Fatal(err)
	}
	if opts.Fresh == 0 {
		opts.Fresh = time.Minute
	}
	if opts.Jitter == 0 {
		opts.Jitter = -1
	}
	cache, err := rediscache.New(c, rdb, load, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := cache.Close(ctx); err != nil && !strings.Contains(err.Error(), "not invalidated") {
			w.t.Errorf("Close: %v", err)
		}
	})
	return cache
}

// want gets key from caches, and expects this value from each of them.
func (w *world) want(key, value string, caches ...*rediscache.Cache[string]) {
	w.t.Helper()
	for i, c := range caches {
		if v, err := c.Get(w.t.Context(), key); v != value || err != nil {
			w.t.Errorf("cache %d: %q, %v; want %q", i, v, err, value)
		}
	}
}

func (w *world) wantLoads(n int64) {
	w.t.Helper()
	if loads := w.origin.loads.Load(); loads != n {
		w.t.Errorf("%d loads, want %d", loads, n)
	}
}

// lockClient locks on the server of the locks, until the end of the test.
func lockClient(tb testing.TB) *flightlock.Client {
	tb.Helper()
	return lockkit.Open(tb, lockkit.Patient, "redis://"+lockServer.Get(tb).Addr())
}

// realCache is a Cache over real servers, named after the test unless it has a name, and counts its loads. They may
// take long to answer, for the machine may be busy; tests of late answers set LookupTimeout.
func realCache(t *testing.T, rdb redis.UniversalClient,
	opts options) (*rediscache.Cache[string], *origin) {
	t.Helper()
	if opts.LookupTimeout == 0 {
		opts.LookupTimeout = 10 * time.Second
	}
	o := &origin{takes: 10 * time.Millisecond}
	if opts.Fresh == 0 {
		opts.Fresh = time.Minute
	}
	if opts.Name == "" {
		opts.Name = t.Name()
	}
	cache, err := rediscache.New(lockClient(t), rdb, fetch.Each(o.load), opts)
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

// retrying is what go-redis does by default.
func retrying(o *redis.Options) { o.DialerRetries, o.MaxRetries = 5, 3 }

func someKeys(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint("k", i))
	}
	return keys
}

// before is a hook that is called before commands are sent.
type before func(cmds []redis.Cmder)

func (before) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f before) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		f([]redis.Cmder{cmd})
		return next(ctx, cmd)
	}
}

func (f before) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		f(cmds)
		return next(ctx, cmds)
	}
}
