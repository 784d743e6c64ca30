package outage

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// What docs/caches.md shows is run here with Redis up, down, and going down in between. Its code is
// that of the functions marked "shown" below: see TestCachesShowsWhatIsTested in internal/doctest.

// shownCache is a cache that does not live where the locks do.
type shownCache struct{ values sync.Map }

func (r *shownCache) Get(_ context.Context, key string) ([]byte, bool) {
	v, ok := r.values.Load(key)
	if !ok {
		return nil, false
	}
	return v.([]byte), true
}

func (r *shownCache) Set(_ context.Context, key string, v []byte) { r.values.Store(key, v) }

// shown: plain
func shownPlain(
	ctx context.Context, c *flightlock.Client, cache *shownCache,
	load func(context.Context, string) ([]byte, error), key string,
) ([]byte, error) {
	v, ok := cache.Get(ctx, key)
	if ok {
		return v, nil
	}
	retry := flightlock.FailFast(nil) // nil alone would wait for Redis to come back
	lock, err := c.SingleFlightLock(ctx, key, 5*time.Second, retry)
	switch {
	case err == nil:
		defer lock.Release(ctx)
	case errors.Is(err, flightlock.ErrUnavailable) && ctx.Err() == nil:
		return load(ctx, key) // Redis is down: load without the lock, or return the error
	default: // ctx ended while others held the lock, c is closed, or an argument is invalid
		return nil, err
	}
	if v, ok = cache.Get(ctx, key); ok { // another caller loaded it while we waited
		return v, nil
	}
	v, err = load(ctx, key)
	if err == nil {
		cache.Set(ctx, key, v)
	}
	return v, err
}

// shownOrigin is the source of the values. A load whose ctx has ended fails, as a query would.
type shownOrigin struct {
	loads atomic.Int64
	takes time.Duration
}

func (o *shownOrigin) load(ctx context.Context, key string) ([]byte, error) {
	o.loads.Add(1)
	select {
	case <-time.After(o.takes):
		return []byte("value of " + key), ctx.Err()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// allGet has n callers get key at once, and fails the test if one of them does not get its value.
func allGet(t *testing.T, n int, key string, get func(context.Context, string) ([]byte, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if v, err := get(ctx, key); err != nil || string(v) != "value of "+key {
				t.Errorf("%s: %q, %v", key, v, err)
			}
		})
	}
	wg.Wait()
}

// The plain form: one load while Redis is up; all callers get their value when it is down, from
// before or during the call.
func TestPlainFormInAnOutage(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	c := lockkit.Open(t, lockkit.Patient, "redis://"+s.Addr())
	other := lockkit.Open(t, lockkit.Patient, "redis://"+s.Addr())
	cache, o := &shownCache{}, &shownOrigin{takes: 10 * time.Millisecond}
	get := func(ctx context.Context, key string) ([]byte, error) {
		return shownPlain(ctx, c, cache, o.load, key)
	}
	lockkit.LockAndRelease(t, c)

	allGet(t, 20, "up", get)
	if n := o.loads.Load(); n != 1 {
		t.Errorf("%d loads with Redis up", n)
	}

	held := lockkit.Lock(t, other, "middle", 30*time.Second)
	done := make(chan struct{})
	go func() { defer close(done); allGet(t, 20, "middle", get) }()
	redistest.Eventually(t, 10*time.Second, "all wait", func() bool { return c.Stats().Waiters == 20 })
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	<-done

	allGet(t, 20, "down", get)
	// the key is not notified; but the Client need not wait for its holder
	_ = held.Release(context.Background())
}
