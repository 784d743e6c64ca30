package outage

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
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
	ctx context.Context, c *flightlock.Client, cache *shownCache, load func(context.Context, string) ([]byte, error),
	key string,
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

// shown: fenced
func shownStore(rdb *redis.Client) func(context.Context, string, []byte, *flightlock.Lock) error {
	var storeFenced = func(ctx context.Context, key string, v []byte, l *flightlock.Lock) error {
		if l == nil { // loaded without a lock, since Redis was down: there is no token
			return rdb.SetNX(ctx, key, v, 5*time.Second).Err()
		}
		return fenced.Set(ctx, rdb, key, v, l.Fence(), time.Hour)
	}
	return storeFenced
}

type entry struct {
	Value      []byte
	FreshUntil time.Time
}

// shown: soft
func lookUpEntry(
	ctx context.Context, rdb *redis.Client, key string,
) (entry, flightlock.Freshness, error) {
	var e entry
	stored, err := rdb.Get(ctx, key).Bytes()
	if errors.Is(err, redis.Nil) {
		return e, flightlock.Miss, nil
	}
	if err != nil {
		return e, flightlock.Miss, err
	}
	if err := json.Unmarshal(stored, &e); err != nil {
		return e, flightlock.Miss, err
	}
	if time.Now().After(e.FreshUntil) {
		return e, flightlock.Stale, nil
	}
	return e, flightlock.Fresh, nil
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
	get := func(ctx context.Context, key string) ([]byte, error) { return shownPlain(ctx, c, cache, o.load, key) }
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
	_ = held.Release(context.Background()) // the key is not notified; but the Client need not wait for its holder
}

// The fenced Store: while the lock's nodes are down, a value that was loaded without a lock is kept
// for a moment, even if a holder has stored one before; it overwrites nothing, and the next holder
// replaces it.
func TestFencedStoreInAnOutage(t *testing.T) {
	t.Parallel()
	locks, values := redistest.StartServer(t), redistest.StartServer(t)
	c := lockkit.Open(t, lockkit.Patient, "redis://"+locks.Addr())
	rdb := values.Client(t)
	o := &shownOrigin{takes: 10 * time.Millisecond}
	users, err := flightlock.NewFetcher(c, flightlock.Source[[]byte]{
		Lookup: func(ctx context.Context, key string) ([]byte, flightlock.Freshness, error) {
			v, err := rdb.Get(ctx, key).Bytes()
			if errors.Is(err, redis.Nil) {
				return nil, flightlock.Miss, nil
			}
			return v, flightlock.Fresh, err
		},
		Load:  o.load,
		Store: shownStore(rdb),
	}, flightlock.FetchOptions{TTL: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close(context.Background())
	lockkit.LockAndRelease(t, c)
	loads := func(what string, most int64) {
		t.Helper()
		if n := o.loads.Swap(0); n < 1 || n > most {
			t.Errorf("%s: %d loads, want %d at most", what, n, most)
		}
	}
	allGet(t, 20, "user:1", users.Fetch)
	loads("up", 1)

	allGet(t, 1, "user:2", users.Fetch)
	o.loads.Store(0)
	rdb.Del(t.Context(), "user:1", "user:2") // they expire; their tokens stay
	o.takes = 300 * time.Millisecond
	done := make(chan struct{})
	go func() { defer close(done); allGet(t, 20, "user:1", users.Fetch) }()
	redistest.Eventually(t, 10*time.Second, "it loads", func() bool { return o.loads.Load() == 1 })
	if err := locks.Kill(); err != nil {
		t.Fatal(err)
	}
	<-done
	loads("going down", 2)

	o.takes = 10 * time.Millisecond
	for range 10 {
		allGet(t, 20, "user:2", users.Fetch)
	}
	loads("down", 3) // one, except on a machine that stalls for as long as the value is kept
	if ttl := rdb.PTTL(t.Context(), "user:2").Val(); ttl <= 0 || ttl > 5*time.Second {
		t.Errorf("kept for %v", ttl)
	}

	if err := locks.Restart(); err != nil {
		t.Fatal(err)
	}
	rdb.Del(t.Context(), "user:2")
	redistest.Eventually(t, 20*time.Second, "a holder writes again", func() bool {
		rdb.Del(t.Context(), "user:2")
		allGet(t, 1, "user:2", users.Fetch)
		return rdb.PTTL(t.Context(), "user:2").Val() > time.Minute
	})
}

// A soft ttl: a stale value is served at once and refreshed; while the locks' server is down, it is
// served as well.
func TestSoftTTLInAnOutage(t *testing.T) {
	t.Parallel()
	locks, values := redistest.StartServer(t), redistest.StartServer(t)
	c := lockkit.Open(t, lockkit.Patient, "redis://"+locks.Addr())
	rdb := values.Client(t)
	set := func(key, v string, fresh time.Duration) {
		t.Helper()
		stored, err := json.Marshal(entry{[]byte(v), time.Now().Add(fresh)})
		if err != nil {
			t.Fatal(err)
		}
		if err := rdb.Set(t.Context(), key, stored, time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
	}
	users, err := flightlock.NewFetcher(c, flightlock.Source[entry]{
		Lookup: func(ctx context.Context, key string) (entry, flightlock.Freshness, error) {
			return lookUpEntry(ctx, rdb, key)
		},
		Load: func(ctx context.Context, key string) (entry, error) {
			return entry{[]byte("new"), time.Now().Add(time.Hour)}, nil
		},
		Store: func(ctx context.Context, key string, e entry, _ *flightlock.Lock) error {
			set(key, string(e.Value), time.Hour)
			return nil
		},
	}, flightlock.FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close(context.Background())
	get := func(key, want string) {
		t.Helper()
		if e, err := users.Fetch(t.Context(), key); err != nil || string(e.Value) != want {
			t.Errorf("%s is %q, %v, want %q", key, e.Value, err, want)
		}
	}
	get("missing", "new")
	set("fresh", "old", time.Hour)
	get("fresh", "old")
	set("stale", "old", -time.Second)
	get("stale", "old")
	redistest.Eventually(t, 10*time.Second, "it is refreshed", func() bool {
		e, fresh, err := lookUpEntry(t.Context(), rdb, "stale")
		return err == nil && fresh == flightlock.Fresh && string(e.Value) == "new"
	})
	get("stale", "new")
	if err := locks.Kill(); err != nil {
		t.Fatal(err)
	}
	set("stale", "old", -time.Second)
	get("stale", "old")
}
