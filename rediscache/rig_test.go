package rediscache_test

import (
	"cmp"
	"context"
	"errors"
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
	"github.com/flightlock/flightlock/internal/testkit"
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
		w.rdb = w.values.Client(t, honouring)
		t.Cleanup(w.locks.Close)
		test(t, w)
	})
}

// bubbles runs a test in one for each case.
func bubbles[X any](t *testing.T, cases []X, test func(t *testing.T, w *world, x X)) {
	t.Helper()
	for _, x := range cases {
		t.Run(fmt.Sprint(x), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) { test(t, w, x) })
		})
	}
}

// cache is a Cache of a process of its own.
func (w *world) cache(opts options) *rediscache.Cache[string] { return w.cacheOf(w.rdb, opts) }

func (w *world) cacheOf(rdb redis.UniversalClient, opts options) *rediscache.Cache[string] {
	return w.cacheWith(rdb, fetch.Each(w.origin.load), opts)
}

func (w *world) cacheWith(rdb redis.UniversalClient, load fetch.Loader[string], opts options,
) *rediscache.Cache[string] {
	opts.Fresh, opts.Jitter = cmp.Or(opts.Fresh, time.Minute), cmp.Or(opts.Jitter, -1)
	return newCache(w.t, w.client(), rdb, load, opts)
}

// client locks on the server of the locks.
func (w *world) client() *flightlock.Client {
	c, err := w.locks.Client(flightlock.Options{NodeTimeout: 100 * time.Millisecond})
	testkit.Must(w.t, err)
	return c
}

// newCache is a Cache until the end of the test.
func newCache[V any](t *testing.T, c *flightlock.Client, rdb redis.UniversalClient, load fetch.Loader[V],
	opts rediscache.Options[V]) *rediscache.Cache[V] {
	t.Helper()
	cache, err := rediscache.New(c, rdb, load, opts)
	testkit.Must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := cache.Close(ctx); err != nil && !strings.Contains(err.Error(), "not invalidated") {
			t.Errorf("Close: %v", err)
		}
	})
	return cache
}

// want gets key from caches, and expects this value from each of them.
func want(t *testing.T, key, value string, caches ...*rediscache.Cache[string]) {
	t.Helper()
	for i, c := range caches {
		if v, err := c.Get(t.Context(), key); v != value || err != nil {
			t.Errorf("cache %d: %q, %v; want %q", i, v, err, value)
		}
	}
}

func (w *world) want(key, value string, caches ...*rediscache.Cache[string]) {
	w.t.Helper()
	want(w.t, key, value, caches...)
}

// within checks that f takes no longer, in the bubble's time.
func (w *world) within(most time.Duration, f func()) {
	w.t.Helper()
	began := time.Now()
	f()
	if took := time.Since(began); took > most {
		w.t.Errorf("it took %v, more than %v", took, most)
	}
}

// change makes another version of what the origin has, and has it invalidated.
func (w *world) change(c *rediscache.Cache[string], keys ...string) {
	w.t.Helper()
	w.origin.version.Add(1)
	testkit.Must(w.t, c.Invalidate(w.t.Context(), keys...))
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

// realCache is a Cache over real servers, named after the test, and counts its loads. They may take long to
// answer, for the machine may be busy.
func realCache(t *testing.T, rdb redis.UniversalClient, opts options) (*rediscache.Cache[string], *origin) {
	t.Helper()
	o := &origin{takes: 10 * time.Millisecond}
	opts.Name, opts.Fresh, opts.LookupTimeout = t.Name(), time.Minute, 10*time.Second
	return newCache(t, lockClient(t), rdb, fetch.Each(o.load), opts), o
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

// uses are what callers do, with two keys where they can.
var uses = map[string]func(ctx context.Context, c *rediscache.Cache[string]) error{
	"Get": func(ctx context.Context, c *rediscache.Cache[string]) error {
		_, err := c.Get(ctx, "k")
		return err
	},
	"GetMany": func(ctx context.Context, c *rediscache.Cache[string]) error {
		_, err := c.GetMany(ctx, []string{"k", "k2"})
		return err
	},
	"Set": func(ctx context.Context, c *rediscache.Cache[string]) error { return c.Set(ctx, "k", "v") },
	"Invalidate": func(ctx context.Context, c *rediscache.Cache[string]) error {
		return c.Invalidate(ctx, "k", "k2")
	},
}

// wantText checks that there is an error with these texts.
func wantText(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v, without %q", err, text)
		}
	}
}

// wantIs checks that all errors match target.
func wantIs(t *testing.T, target error, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if !errors.Is(err, target) {
			t.Errorf("error %v, want %v", err, target)
		}
	}
}

// textCodec is Text, with whose Encode and Decode bad is called before.
func textCodec(bad func(v string) error) rediscache.Codec[string] {
	return rediscache.Codec[string]{
		Encode: func(v string) ([]byte, error) { return []byte(v), bad(v) },
		Decode: func(b []byte) (string, error) { return string(b), bad(string(b)) },
	}
}

// wantRepeating checks how many invalidations are being repeated.
func wantRepeating(t *testing.T, n int, c *rediscache.Cache[string]) {
	t.Helper()
	if repeating := c.Stats().Repeating; repeating != int64(n) {
		t.Errorf("%d invalidations are repeated, not %d", repeating, n)
	}
}
