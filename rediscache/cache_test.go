package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// origin has a version, which each load returns.
type origin struct {
	takes   time.Duration
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
func (w *world) cache(opts rediscache.Options[string]) *rediscache.Cache[string] {
	return w.cacheOf(w.rdb, opts)
}

func (w *world) cacheOf(rdb redis.UniversalClient, opts rediscache.Options[string]) *rediscache.Cache[string] {
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
	cache, err := rediscache.New(c, rdb, w.origin.load, opts)
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

// A miss is one load for all callers of all processes; its value is found by all until it expires.
func TestGetLoadsOnce(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		caches := []*rediscache.Cache[string]{w.cache(rediscache.Options[string]{}), w.cache(rediscache.Options[string]{}),
			w.cache(rediscache.Options[string]{})}
		for round := range int64(3) {
			var wg sync.WaitGroup
			for _, c := range caches {
				for range 50 {
					wg.Go(func() { w.want("k", "k@0", c) })
				}
			}
			wg.Wait()
			w.wantLoads(round + 1)
			w.want("k", "k@0", caches...)
			w.wantLoads(round + 1)
			time.Sleep(time.Minute)
		}
	})
}

// After Invalidate or Set nobody sees the earlier value, and no load that is in progress brings it
// back, in any process.
func TestInvalidateAndSet(t *testing.T) {
	for _, set := range []bool{false, true} {
		for _, during := range []bool{false, true} {
			t.Run(fmt.Sprintf("set=%v/during=%v", set, during), func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					a, b := w.cache(rediscache.Options[string]{}), w.cache(rediscache.Options[string]{})
					done := make(chan struct{})
					go func() {
						defer close(done)
						w.want("k", "k@0", a)
					}()
					if during {
						time.Sleep(w.origin.takes / 2)
					} else {
						<-done
					}
					w.origin.version.Add(1)
					var err error
					if set {
						err = b.Set(t.Context(), "k", "k@1")
					} else {
						err = b.Invalidate(t.Context(), "k")
					}
					if err != nil {
						t.Fatal(err)
					}
					began := time.Now()
					w.want("k", "k@1", b)
					if took := time.Since(began); set && took > 0 {
						t.Errorf("it took %v", took)
					}
					w.want("k", "k@1", a, b)
					<-done
					w.want("k", "k@1", a, b)
					if got := a.Stats(); during && got.Outdated != 1 || !during && got.Outdated != 0 || got.StoreFailures != 0 {
						t.Errorf("%+v", got)
					}
				})
			})
		}
	}
}

// Set that meets another change leaves no value: which one is later is unknown.
func TestSetThatMeetsAnotherChange(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.SetDelay(10 * time.Millisecond)
		done := make(chan error)
		go func() { done <- c.Set(t.Context(), "k", "k@0") }()
		time.Sleep(25 * time.Millisecond) // between its two requests
		if err := c.Set(t.Context(), "k", "k@1"); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		w.origin.version.Store(1)
		w.want("k", "k@1", c)
		w.wantLoads(1)
	})
}

// A stale value is served at once and refreshed in the background; after Stale it is a miss.
func TestStaleValues(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Fresh: time.Minute, Stale: time.Hour})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		time.Sleep(time.Minute)
		began := time.Now()
		w.want("k", "k@0", c)
		if took := time.Since(began); took > 0 {
			t.Errorf("it took %v", took)
		}
		time.Sleep(2 * w.origin.takes)
		w.want("k", "k@1", c)
		w.wantLoads(2)
		w.origin.version.Add(1)
		time.Sleep(time.Minute + time.Hour)
		w.want("k", "k@2", c)
	})
}

// An entry that expires while it is refreshed keeps its stamp until then: one load, and it is
// stored.
func TestAnEntryThatExpiresDuringItsRefresh(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 3 * time.Second
		c := w.cache(rediscache.Options[string]{Fresh: time.Minute, Stale: 2 * time.Second})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		time.Sleep(time.Minute + time.Second)
		w.want("k", "k@0", c)
		time.Sleep(2 * time.Second)
		w.want("k", "k@1", c) // the old one has expired: this Get waits for the load that is under way
		w.wantLoads(2)
		w.want("k", "k@1", c)
		w.wantLoads(2)
	})
}

// StaleWait waits for the new value.
func TestStaleWait(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Fresh: time.Minute, Stale: time.Hour, StaleWait: 2 * time.Second})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		time.Sleep(time.Minute)
		w.want("k", "k@1", c)
		w.origin.takes = time.Minute / 2
		time.Sleep(time.Minute)
		w.want("k", "k@1", c)
		w.wantLoads(3)
	})
}

// Jitter shortens how long entries are fresh by at most that fraction, and not equally.
func TestJitter(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Fresh: 100 * time.Second, Jitter: 0.2})
		ttls := map[time.Duration]bool{}
		for i := range 20 {
			key := fmt.Sprint(i)
			if err := c.Set(t.Context(), key, "v"); err != nil {
				t.Fatal(err)
			}
			ttl := w.values.Mini.TTL(c.Key(key))
			if ttl < 80*time.Second || ttl > 100*time.Second {
				t.Errorf("ttl %v", ttl)
			}
			ttls[ttl] = true
		}
		if len(ttls) < 5 {
			t.Errorf("%d different ttls", len(ttls))
		}
	})
}

// FreshFor decides how long a value is fresh. One that is not fresh at all is not stored, and Set
// of one removes the old value.
func TestFreshFor(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{FreshFor: func(v string) time.Duration {
			if strings.HasPrefix(v, "never") {
				return 0
			}
			return 5 * time.Second
		}})
		w.want("k", "k@0", c)
		time.Sleep(5 * time.Second)
		w.want("k", "k@0", c)
		w.wantLoads(2)
		w.want("never", "never@0", c)
		w.want("never", "never@0", c)
		w.wantLoads(4)
		if err := c.Set(t.Context(), "k", "never"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@0", c)
		w.wantLoads(5)
		if got := c.Stats(); got.StoreFailures != 0 {
			t.Errorf("%+v", got)
		}
	})
}

// The local tier serves no value for longer than it may be served at all.
func TestLocalAndFreshFor(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(rediscache.Options[string]{Local: time.Second, FreshFor: func(v string) time.Duration {
			switch v[0] {
			case 'n': // never
				return 0
			case 's': // shorter than Local
				return 300 * time.Millisecond
			}
			return 1500 * time.Millisecond
		}})
		for _, get := range []func(key, value string){
			func(key, value string) { w.want(key, value, c) },
			func(key, value string) {
				if values, err := c.GetMany(t.Context(), []string{key}); values[key] != value || err != nil {
					t.Errorf("%v, %v; want %s", values, err, value)
				}
			},
		} {
			now := fmt.Sprintf("@%d", w.origin.version.Load())
			get("never", "never"+now)
			get("short", "short"+now)
			get("long", "long"+now)
			time.Sleep(1100 * time.Millisecond) // past Local, and what is short is over
			get("long", "long"+now)             // from the server, where it is for another 400 ms
			next := fmt.Sprintf("@%d", w.origin.version.Add(1))
			get("never", "never"+next)
			get("short", "short"+next)
			time.Sleep(400 * time.Millisecond) // until what is long is over on the server
			get("long", "long"+next)
			time.Sleep(2 * time.Second) // until all of it is over
		}
		get := c.Stats().LocalHits
		w.want("long", "long@2", c)
		w.want("long", "long@2", c)
		if n := c.Stats().LocalHits - get; n != 1 {
			t.Errorf("%d hits of the tier", n)
		}
		w.want("never", "never@2", c)
		w.want("short", "short@2", c)
		w.origin.version.Add(1)
		w.want("never", "never@3", c)
		time.Sleep(300 * time.Millisecond) // until it is over
		w.want("short", "short@3", c)
	})
}

// "not found" is kept for NotFoundFor, until the entry is invalidated or set; other errors are not
// kept in Redis.
func TestNotFound(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a := w.cache(rediscache.Options[string]{NotFoundFor: 10 * time.Second, Stale: time.Hour})
		b := w.cache(rediscache.Options[string]{NotFoundFor: 10 * time.Second, Stale: time.Hour})
		wantNone := func() {
			t.Helper()
			for _, c := range []*rediscache.Cache[string]{a, b} {
				if v, err := c.Get(t.Context(), "k"); v != "" || !errors.Is(err, rediscache.ErrNotFound) {
					t.Errorf("%q, %v", v, err)
				}
			}
		}
		none := fmt.Errorf("no such row: %w", rediscache.ErrNotFound)
		w.origin.err.Store(&none)
		wantNone()
		wantNone()
		w.wantLoads(1)
		time.Sleep(10 * time.Second)
		wantNone()
		w.wantLoads(2)
		w.origin.err.Store(nil)
		if err := a.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@0", a, b)
		w.wantLoads(3)
		if n := a.Stats().NotFound + b.Stats().NotFound; n != 6 {
			t.Errorf("%d", n)
		}
	})
}

// Without NotFoundFor each process holds "not found" for ErrorHold, but not beyond an invalidation.
func TestNotFoundThatIsNotRemembered(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a, b := w.cache(rediscache.Options[string]{}), w.cache(rediscache.Options[string]{})
		w.origin.err.Store(&rediscache.ErrNotFound)
		for range 3 {
			for _, c := range []*rediscache.Cache[string]{a, b} {
				if _, err := c.Get(t.Context(), "k"); !errors.Is(err, rediscache.ErrNotFound) {
					t.Error(err)
				}
			}
		}
		if n := w.origin.loads.Load(); n > 4 { // two each: the load takes as long as the error is held
			t.Errorf("%d loads", n)
		}
		w.origin.err.Store(nil)
		if err := a.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@0", b)
	})
}

// What cannot be decoded is a miss, and the loaded value replaces it. A key that is not a string is
// an error.
func TestWhatCannotBeDecoded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Decode = func(b []byte) (string, error) {
			if strings.HasPrefix(string(b), "bad") {
				return "", errors.New("bad")
			}
			return string(b), nil
		}
		c := w.cache(rediscache.Options[string]{Codec: codec})
		for i, foreign := range []string{"", "something else", "fl1:", "fl1:x" + strings.Repeat("s", 32),
			"fl1:v" + strings.Repeat("s", 32) + "short"} {
			key := fmt.Sprint("foreign", i)
			w.values.Mini.Set(c.Key(key), foreign)
			w.want(key, key+"@0", c)
			w.want(key, key+"@0", c)
			w.wantLoads(int64(i) + 1)
		}
		if err := c.Set(t.Context(), "k", "bad"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@0", c)
		w.want("k", "k@0", c)
		w.wantLoads(6)
		if n := c.Stats().Undecodable; n < 6 {
			t.Errorf("%d undecodable", n)
		}
		w.values.Mini.RPush(c.Key("list"), "x")
		w.want("list", "list@0", c)
		if got := c.Stats(); got.LookupErrors == 0 || got.Down != 0 {
			t.Errorf("%+v", got)
		}
		if kind, _ := w.values.Mini.List(c.Key("list")); len(kind) != 1 {
			t.Error("somebody else's list was overwritten")
		}
	})
}

// A value that is too long, or cannot be encoded, is served and not stored. Set of one removes the old
// value.
func TestWhatCannotBeStored(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Encode = func(v string) ([]byte, error) {
			if v == "bad" {
				return nil, errors.New("bad value")
			}
			return []byte(v), nil
		}
		c := w.cache(rediscache.Options[string]{MaxValue: 10, Codec: codec, Fetch: flightlock.FetchOptions{ErrorHold: -1}})
		w.want("a long key", "a long key@0", c)
		w.want("a long key", "a long key@0", c)
		w.wantLoads(2)
		if got := c.Stats(); got.TooLong != 2 {
			t.Errorf("%+v", got)
		}
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		if err := c.Set(t.Context(), "k", "a value of 30 bytes, more or less"); !errors.Is(err, flightlock.ErrInvalid) ||
			!strings.Contains(err.Error(), "MaxValue is 10") {
			t.Error(err)
		}
		w.want("k", "k@1", c)
		w.origin.version.Add(1)
		if err := c.Set(t.Context(), "k", "bad"); err == nil || !strings.Contains(err.Error(), "bad value") {
			t.Error(err)
		}
		w.want("k", "k@2", c)
	})
}

// Versions have entries of their own.
func TestVersions(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a := w.cache(rediscache.Options[string]{Name: "user", Version: "v1"})
		b := w.cache(rediscache.Options[string]{Name: "user", Version: "v2"})
		if a.Key("42") != "user:v1:42" || b.Key("42") != "user:v2:42" {
			t.Error(a.Key("42"), b.Key("42"))
		}
		w.want("42", "42@0", a, b)
		w.want("42", "42@0", a, b)
		w.wantLoads(2)
	})
}

// GetWith brings its own load, for its own key only.
func TestGetWith(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Stale: time.Hour})
		n := 0
		own := func(ctx context.Context, key string) (string, error) {
			n++
			if v, err := c.Get(ctx, "other"); v != "other@0" || err != nil {
				t.Error(v, err)
			}
			return fmt.Sprint("own ", key, n), nil
		}
		for _, want := range []string{"own k1", "own k1"} {
			if v, err := c.GetWith(t.Context(), "k", own); v != want || err != nil {
				t.Error(v, err)
			}
		}
		time.Sleep(time.Minute)
		if v, err := c.GetWith(t.Context(), "k", own); v != "own k1" || err != nil { // stale
			t.Error(v, err)
		}
		time.Sleep(w.origin.takes)
		w.want("k", "own k2", c)
		if _, err := c.GetWith(t.Context(), "k", nil); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
	})
}

// The ctx of loads has the values that Fetch.Values passes on, with GetWith, too.
func TestValues(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		type tenant struct{}
		values := func(caller context.Context) context.Context {
			return context.WithValue(context.Background(), tenant{}, caller.Value(tenant{}))
		}
		c := w.cache(rediscache.Options[string]{Fetch: flightlock.FetchOptions{Values: values}})
		ctx := context.WithValue(t.Context(), tenant{}, "acme")
		v, err := c.GetWith(ctx, "k", func(ctx context.Context, key string) (string, error) {
			return fmt.Sprint(ctx.Value(tenant{})), nil
		})
		if v != "acme" || err != nil {
			t.Error(v, err)
		}
	})
}

// With Copy each caller has a value of its own.
func TestCopy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c, err := w.locks.Client(flightlock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		load := func(context.Context, string) ([]int, error) { time.Sleep(time.Second); return []int{1, 2, 3}, nil }
		for _, copies := range []bool{false, true} {
			opts := rediscache.Options[[]int]{Name: fmt.Sprint(copies), Fresh: time.Minute, Local: time.Second}
			if copies {
				opts.Copy = func(v []int) []int { return append([]int(nil), v...) }
			}
			cache, err := rediscache.New(c, w.rdb, load, opts)
			if err != nil {
				t.Fatal(err)
			}
			var a, b []int
			var wg sync.WaitGroup
			wg.Go(func() { a, _ = cache.Get(t.Context(), "k") })
			wg.Go(func() { b, _ = cache.Get(t.Context(), "k") })
			wg.Wait()
			if shared := &a[0] == &b[0]; shared == copies {
				t.Errorf("copies %v: shared %v", copies, shared)
			}
			if err := cache.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// The clock of the server counts: a process, or another server, whose clock is wrong changes
// nothing.
func TestClocksThatAreWrong(t *testing.T) {
	for _, wrong := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		bubble(t, func(t *testing.T, w *world) {
			w.values.Mini.SetTime(time.Now().Add(wrong))
			c := w.cache(rediscache.Options[string]{Stale: time.Minute})
			w.want("k", "k@0", c)
			w.origin.version.Add(1)
			for range 10 {
				w.want("k", "k@0", c)
			}
			w.wantLoads(1)
		})
	}
}

// So does one that only has hits, and so has never been told the server's time: it does not take old values for fresh
// ones for as long as its clock is behind.
func TestASlowClockOfAProcessThatOnlyHasHits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		const behind = time.Hour
		opts := rediscache.Options[string]{Fresh: time.Minute, Stale: 2 * behind}
		a, b := w.cache(opts), w.cache(opts)
		w.values.Mini.SetTime(time.Now().Add(behind))
		w.want("k", "k@0", a)
		w.want("k", "k@0", b)
		w.origin.version.Add(1)
		time.Sleep(2 * time.Minute) // past Fresh
		w.values.Mini.SetTime(time.Now().Add(behind))
		w.want("k", "k@0", b) // and it is refreshed
		time.Sleep(2 * w.origin.takes)
		w.want("k", "k@1", b)
	})
}

// With EarlyRefresh a key that is read often is refreshed before it expires, once for all
// processes, and nobody waits for it.
func TestEarlyRefresh(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		opts := rediscache.Options[string]{EarlyRefresh: 1}
		a, b := w.cache(opts), w.cache(opts)
		w.want("k", "k@0", a, b)
		w.wantLoads(1)
		w.nobodyWaits(10*time.Minute, a, b)
		if n := w.origin.loads.Load(); n < 10 || n > 13 {
			t.Errorf("%d loads in 10 minutes", n)
		}
	})
}

// nobodyWaits says that k@0 is there at once for so long, whenever it is read.
func (w *world) nobodyWaits(d time.Duration, caches ...*rediscache.Cache[string]) {
	w.t.Helper()
	began := time.Now()
	for time.Since(began) < d {
		asked := time.Now()
		w.want("k", "k@0", caches...)
		if took := time.Since(asked); took > 0 {
			w.t.Fatalf("after %v somebody waited %v", time.Since(began), took)
		}
		if time.Sleep(10 * time.Millisecond); redistest.Raced {
			time.Sleep(40 * time.Millisecond)
		}
	}
}

// That a value was set does not end its early refreshes: how long a load takes is still known.
func TestEarlyRefreshAfterSet(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{EarlyRefresh: 1})
		w.want("k", "k@0", c)
		if err := c.Set(t.Context(), "k", "k@0"); err != nil {
			t.Fatal(err)
		}
		w.nobodyWaits(3*time.Minute, c)
	})
}

// A process that has missed a key, and gets its lock when another one has just loaded it, does not load
// it again as an early refresh, however long the load takes in comparison with Fresh.
func TestEarlyRefreshIsNotForAMiss(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 300 * time.Millisecond
		opts := rediscache.Options[string]{Fresh: time.Second, EarlyRefresh: 1}
		a := w.cache(opts)
		opts.Fetch.MaxLoads = 1
		b := w.cache(opts)
		var wg sync.WaitGroup
		wg.Go(func() { w.want("k", "k@0", a) })
		wg.Go(func() { w.want("other", "other@0", b) })
		time.Sleep(time.Millisecond)
		wg.Go(func() { w.want("k", "k@0", b) }) // waits until the load of the other key is over
		wg.Wait()
		w.wantLoads(2)
	})
}

// The local tier serves a value for its ttl, also if the server is down, and drops it at once when
// its own process changes it.
func TestLocal(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		opts := rediscache.Options[string]{Local: 500 * time.Millisecond}
		a, b := w.cache(opts), w.cache(opts)
		w.want("k", "k@0", a, b)
		w.want("k", "k@0", a, b)
		if got := b.Stats(); got.LocalHits == 0 {
			t.Errorf("%+v", got)
		}
		w.origin.version.Add(1)
		w.origin.takes = 0
		if err := a.Invalidate(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@1", a)
		w.want("k", "k@0", b)
		time.Sleep(500 * time.Millisecond)
		w.want("k", "k@1", a, b)
		if err := a.Set(t.Context(), "k", "k@2"); err != nil {
			t.Fatal(err)
		}
		w.want("k", "k@2", a)

		before := w.values.Mini.CommandCount()
		for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
			w.want("k", "k@2", a)
		}
		if n := w.values.Mini.CommandCount() - before; n > 25 {
			t.Errorf("%d commands in 10s", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Close(ctx); err != nil {
			t.Error(err)
		}
		if _, err := a.Get(t.Context(), "k"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
	})
}

// A server that does not answer is not used after two lookups: callers wait for their load only.
// When it is back it is used again.
func TestAServerThatDoesNotAnswer(t *testing.T) {
	for name, fail := range map[string]func(n *redistest.MemNode, on bool){
		"down": (*redistest.MemNode).Down, "stalled": (*redistest.MemNode).Stall,
	} {
		for _, honours := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/honours=%v", name, honours), func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					w.origin.takes = 50 * time.Millisecond
					rdb := w.values.Client(t, func(o *redis.Options) {
						o.ContextTimeoutEnabled, o.ReadTimeout = honours,
							3*time.Second
					})
					c := w.cacheOf(rdb, rediscache.Options[string]{})
					w.want("k", "k@0", c)
					fail(w.values, true)
					for i := range 20 {
						began := time.Now()
						w.want(fmt.Sprint("k", i), fmt.Sprintf("k%d@0", i), c)
						most := time.Second + w.origin.takes + 100*time.Millisecond // LookupTimeout
						if i >= 2 {
							most = w.origin.takes
						}
						if took := time.Since(began); took > most {
							t.Errorf("Get %d took %v", i, took)
						}
					}
					if got := c.Stats(); got.Down != 1 || got.UnlockedLoads < 18 {
						t.Errorf("%+v", got)
					}
					began := time.Now()
					if err := c.Invalidate(t.Context(), "k", "other"); err == nil || time.Since(began) > 1100*time.Millisecond {
						t.Errorf("%v after %v", err, time.Since(began))
					}
					w.origin.version.Add(1)
					fail(w.values, false)
					time.Sleep(5 * time.Second)
					w.want("k", "k@1", c)
					w.want("k", "k@1", c)
					if got := c.Stats(); got.Down != 0 || got.Repeating != 0 || got.Hits == 0 {
						t.Errorf("%+v", got)
					}
				})
			})
		}
	}
}

// A failed Set is followed by an invalidation in the background.
func TestASetThatFails(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.want("k", "k@0", c)
		w.values.Down(true)
		w.origin.version.Add(1)
		if err := c.Set(t.Context(), "k", "k@1"); err == nil {
			t.Error("no error")
		}
		if n := c.Stats().Repeating; n != 1 {
			t.Errorf("%d", n)
		}
		w.values.Down(false)
		time.Sleep(5 * time.Second)
		w.want("k", "k@1", c)
		if n := c.Stats().Repeating; n != 0 {
			t.Errorf("%d", n)
		}
	})
}

// A Set whose Codec panics leaves the old value for moments only: the origin has changed.
func TestASetThatPanics(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Encode = func(v string) ([]byte, error) {
			if v == "bad" {
				panic("a bad value")
			}
			return []byte(v), nil
		}
		c := w.cache(rediscache.Options[string]{Codec: codec})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic is not the caller's")
				}
			}()
			_ = c.Set(t.Context(), "k", "bad")
		}()
		time.Sleep(time.Second) // until it is repeated
		w.want("k", "k@1", c)
	})
}

// Invalidate works with a ctx that has ended: the origin is changed already.
func TestInvalidateWithACtxThatHasEnded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, "k"); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		time.Sleep(time.Second)
		w.want("k", "k@1", c)
	})
}

// Close waits for invalidations that are being repeated, and reports those that are left.
func TestCloseWaitsForInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a, b := w.cache(rediscache.Options[string]{}), w.cache(rediscache.Options[string]{})
		w.want("k", "k@0", a)
		w.values.Down(true)
		for _, c := range []*rediscache.Cache[string]{a, b} {
			if err := c.Invalidate(t.Context(), "k"); err == nil {
				t.Error("no error")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := a.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 key is not invalidated") {
			t.Error(err)
		}
		done := make(chan error)
		go func() { done <- b.Close(t.Context()) }()
		time.Sleep(time.Second)
		w.values.Down(false)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := a.Invalidate(t.Context(), "k"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
		time.Sleep(2 * time.Second) // go-redis dials once per second until it is answered
	})
}

// Close does not wait for a server that does not answer, nor does it leave anything behind, however many
// invalidations are being repeated.
func TestCloseEndsTheRepeatsOfManyInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.Stall(true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, someKeys(5000)...); err == nil {
			t.Error("no error")
		}
		time.Sleep(time.Second) // the repeats have begun
		err := c.Close(ctx)
		if err == nil || strings.Contains(err.Error(), "\n") ||
			!strings.Contains(err.Error(), "5000 keys are not invalidated") {
			t.Error(err)
		}
		w.values.Stall(false)
	})
}

// Each Close waits for as long as its own ctx lasts at most, and ends when another one ends the repeats.
func TestTwoClosesThatWaitForInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.Down(true)
		if err := c.Invalidate(t.Context(), "k"); err == nil {
			t.Error("no error")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		done := make(chan error)
		go func() { done <- c.Close(context.Background()) }()
		for _, err := range []error{c.Close(ctx), <-done} {
			if err == nil || !strings.Contains(err.Error(), "1 key is not invalidated") {
				t.Error(err)
			}
		}
		w.values.Down(false)
		time.Sleep(2 * time.Second) // go-redis dials once per second until it is answered
	})
}

// A Close after one that has left something does not wait for what nobody repeats any more.
func TestCloseAfterACloseThatHasLeftInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.Down(true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, "k"); err == nil {
			t.Error("no error")
		}
		for _, ctx := range []context.Context{ctx, context.Background()} {
			if err := c.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 key is not invalidated") {
				t.Error(err)
			}
		}
		w.values.Down(false)
		time.Sleep(2 * time.Second) // go-redis dials once per second until it is answered
	})
}

// An invalidation that fails while an earlier one of the key is being repeated is repeated, too: the server may have
// executed that one before the origin was changed again.
func TestAnInvalidationThatFailsDuringItsRepeat(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, "k"); err == nil {
			t.Error("no error")
		}
		w.values.SetDelay(100 * time.Millisecond)
		for !w.values.Mini.Exists("k") {
			time.Sleep(10 * time.Millisecond) // the bubble's time
		}
		if err := c.Invalidate(ctx, "k"); err == nil { // the tombstone is there, and its reply is not
			t.Error("no error")
		}
		w.values.Mini.Del("k")
		time.Sleep(101 * time.Millisecond) // the bubble's time
		if n := c.Stats().Repeating; n != 1 {
			t.Errorf("%d are being repeated", n)
		}
		time.Sleep(5 * time.Second) // the bubble's time
		if !w.values.Mini.Exists("k") || c.Stats().Repeating != 0 {
			t.Error("it was not repeated")
		}
	})
}

// An Invalidate that fails while the Cache is closed is not repeated, and does not say that it is.
func TestAnInvalidateThatMeetsCloseSaysWhatFollows(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.Stall(true)
		done := make(chan error)
		go func() { done <- c.Invalidate(t.Context(), "k") }()
		time.Sleep(100 * time.Millisecond)
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-done; strings.Contains(err.Error(), "repeated in the background") {
			t.Errorf("%v; repeating %d", err, c.Stats().Repeating)
		}
		w.values.Stall(false)
	})
}

// So it is where too many are being repeated.
func TestAnInvalidateThatIsDroppedSaysSo(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		w.values.Stall(true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = c.Invalidate(ctx, someKeys(10_000)...)
		if err := c.Invalidate(ctx, "k0"); !strings.Contains(err.Error(), "repeated in the background") {
			t.Errorf("%v, though it is being repeated already", err)
		}
		err := c.Invalidate(ctx, "another")
		if c.Stats().Dropped != 1 || strings.Contains(err.Error(), "repeated in the background") {
			t.Errorf("%v; %+v", err, c.Stats())
		}
		if err := c.Close(ctx); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		w.values.Stall(false)
	})
}

// Timeouts may be as long as a duration can be: values are stored and found all the same, and Close does not fail.
func TestTimeoutsForEver(t *testing.T) {
	for _, loads := range []time.Duration{0, math.MaxInt64} {
		bubble(t, func(t *testing.T, w *world) {
			c := w.cache(rediscache.Options[string]{Fetch: flightlock.FetchOptions{
				LookupTimeout: math.MaxInt64, LoadTimeout: loads, WaitTimeout: math.MaxInt64,
			}})
			w.want("k", "k@0", c)
			w.want("k", "k@0", c)
			w.wantLoads(1)
			if err := c.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Bad arguments are an ErrInvalid that names them, before anything is sent.
func TestInvalidArguments(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c, err := w.locks.Client(flightlock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		before := w.values.Mini.CommandCount()
		text := rediscache.Text()
		for want, change := range map[string]func(*rediscache.Options[string]){
			"Options.Fresh is 0s":              func(o *rediscache.Options[string]) { o.Fresh = 0 },
			"Options.Fresh is -1s":             func(o *rediscache.Options[string]) { o.Fresh = -time.Second },
			"Options.Stale is -1s":             func(o *rediscache.Options[string]) { o.Stale = -time.Second },
			"Options.NotFoundFor is -1s":       func(o *rediscache.Options[string]) { o.NotFoundFor = -time.Second },
			"Options.Jitter is 1":              func(o *rediscache.Options[string]) { o.Jitter = 1 },
			"Options.MaxValue is -1":           func(o *rediscache.Options[string]) { o.MaxValue = -1 },
			"Options.Local is 2s":              func(o *rediscache.Options[string]) { o.Local = 2 * time.Second },
			"Options.LocalKeys is -1":          func(o *rediscache.Options[string]) { o.LocalKeys = -1 },
			"Options.EarlyRefresh is -1":       func(o *rediscache.Options[string]) { o.EarlyRefresh = -1 },
			"Options.Codec is incomplete":      func(o *rediscache.Options[string]) { o.Codec.Encode = text.Encode },
			"Options.Name and Version is 3000": func(o *rediscache.Options[string]) { o.Name = strings.Repeat("x", 3000) },
			"FetchOptions.TTL is 1ms":          func(o *rediscache.Options[string]) { o.Fetch.TTL = time.Millisecond },
			"Options.StaleWait is -1s":         func(o *rediscache.Options[string]) { o.StaleWait = -time.Second },
		} {
			opts := rediscache.Options[string]{Fresh: time.Minute}
			change(&opts)
			if _, err := rediscache.New(c, w.rdb, w.origin.load, opts); !errors.Is(err, flightlock.ErrInvalid) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		}
		opts := rediscache.Options[string]{Fresh: time.Minute}
		ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "10.1.0.1:6379"},
			HeartbeatFrequency: time.Hour})
		defer ring.Close()
		for want, rdb := range map[string]redis.UniversalClient{
			"rdb is nil": nil, "rdb is a *redis.Ring": ring,
			"rdb.ReadOnly is true": redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"10.1.0.1:6379"},
				ReadOnly: true}),
		} {
			if _, err := rediscache.New(c, rdb, w.origin.load, opts); !errors.Is(err, flightlock.ErrInvalid) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
			if cluster, ok := rdb.(*redis.ClusterClient); ok {
				cluster.Close()
			}
		}
		if _, err := rediscache.New(nil, w.rdb, w.origin.load, opts); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
		without, err := rediscache.New(c, w.rdb, nil, opts)
		if err != nil {
			t.Fatal(err)
		}
		defer without.Close(context.Background())
		if _, err := without.Get(t.Context(), "k"); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
		for _, key := range []string{"", strings.Repeat("x", 5000)} {
			_, err := without.GetWith(t.Context(), key, w.origin.load)
			for _, err := range []error{err, without.Set(t.Context(), key, "v"), without.Invalidate(t.Context(), "good", key)} {
				if !errors.Is(err, flightlock.ErrInvalid) {
					t.Error(err)
				}
			}
		}
		if n := w.values.Mini.CommandCount(); n != before {
			t.Errorf("%d commands", n-before)
		}
	})
}

// FetchStats.Joined are some of FetchStats.Misses.
func TestJoinedAreMisses(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{})
		var wg sync.WaitGroup
		get := func() {
			if _, err := c.Get(t.Context(), "a"); err != nil {
				t.Error(err)
			}
		}
		wg.Go(get)
		time.Sleep(w.origin.takes / 2)
		if err := c.Invalidate(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			wg.Go(get)
		}
		wg.Wait()
		if s := c.Stats(); s.Misses != 11 || s.Joined > s.Misses {
			t.Errorf("%d misses, and %d of these joined", s.Misses, s.Joined)
		}
	})
}

// A value that was loaded here is not in the local tier for longer than in Redis, however much Jitter shortens that.
func TestALocalValueDoesNotOutliveItsEntry(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(rediscache.Options[string]{
			Local: time.Second, NotFoundFor: time.Second, Fresh: time.Second, Jitter: 0.99,
		})
		bad := 0
		for i := range 20 {
			key := string(rune('a' + i))
			v := w.origin.version.Load()
			_, _ = c.Get(t.Context(), key)
			time.Sleep(time.Millisecond)
			w.origin.version.Add(1)
			ttl := w.values.Mini.TTL(c.Key(key))
			time.Sleep(ttl + time.Millisecond)
			if got, _ := c.Get(t.Context(), key); got == fmt.Sprintf("%s@%d", key, v) {
				bad++
			}
			time.Sleep(2 * time.Second)
		}
		if bad > 0 {
			t.Errorf("%d of 20 served after their entry expired", bad)
		}
	})
}
