package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// manyOptions have a LoadMany of the world's origin that counts its calls; keys with an x do not exist.
func (w *world) manyOptions(calls *atomic.Int64, opts rediscache.Options[string]) rediscache.Options[string] {
	opts.LoadMany = func(ctx context.Context, keys []string) (map[string]string, error) {
		calls.Add(1)
		values := map[string]string{}
		for _, key := range keys {
			if key[0] != 'x' {
				values[key] = fmt.Sprintf("%s@%d", key, w.origin.version.Load())
			}
		}
		select {
		case <-time.After(w.origin.takes):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return values, nil
	}
	return opts
}

func wantMany(t *testing.T, c *rediscache.Cache[string], keys []string, version int) {
	t.Helper()
	values, err := c.GetMany(t.Context(), keys)
	if err != nil || len(values) != len(keys) {
		t.Errorf("%d values of %d, %v", len(values), len(keys), err)
	}
	for key, v := range values {
		if v != fmt.Sprintf("%s@%d", key, version) {
			t.Errorf("%s: %q", key, v)
		}
	}
}

// Many keys are one load for all processes, one MGET afterwards, and invalidated like any other.
func TestGetMany(t *testing.T) {
	for _, local := range []time.Duration{0, time.Second} {
		bubble(t, func(t *testing.T, w *world) {
			var calls atomic.Int64
			a := w.cache(w.manyOptions(&calls, rediscache.Options[string]{Name: "user", Local: local}))
			b := w.cache(w.manyOptions(&calls, rediscache.Options[string]{Name: "user", Local: local}))
			keys := someKeys(100)
			var wg sync.WaitGroup
			for _, c := range []*rediscache.Cache[string]{a, b} {
				wg.Go(func() { wantMany(t, c, keys, 0) })
			}
			wg.Wait()
			if n := calls.Load(); n > 2 { // each process may have won some of the locks
				t.Errorf("%d loads", n)
			}
			calls.Store(0)
			wantMany(t, a, keys, 0) // the load took longer than a value stays in the tier
			before := w.values.Mini.CommandCount()
			wantMany(t, a, keys, 0)
			if n := w.values.Mini.CommandCount() - before; local == 0 && n != 1 || local > 0 && n != 0 {
				t.Errorf("%d commands", n)
			}
			w.origin.version.Add(1)
			if err := a.Invalidate(t.Context(), keys...); err != nil {
				t.Fatal(err)
			}
			wantMany(t, a, keys, 1)
			time.Sleep(local)
			wantMany(t, b, keys, 1)
			if n := calls.Load(); n != 1 || w.origin.loads.Load() != 0 {
				t.Errorf("%d loads, %d of single keys", n, w.origin.loads.Load())
			}
		})
	}
}

// What is not found is that key's error, and is cached.
func TestGetManyNotFound(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var calls atomic.Int64
		c := w.cache(w.manyOptions(&calls, rediscache.Options[string]{NotFoundFor: time.Minute}))
		for range 2 {
			values, err := c.GetMany(t.Context(), []string{"k1", "x1", "k1", "x2", ""})
			var many *flightlock.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 3 || len(values) != 1 || values["k1"] != "k1@0" {
				t.Fatalf("%v, %v", values, err)
			}
			if !errors.Is(many.Errors["x1"], rediscache.ErrNotFound) || !errors.Is(many.Errors[""], flightlock.ErrInvalid) {
				t.Error(err)
			}
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
	})
}

// Without a load of single keys, a Get of one is a LoadMany of one.
func TestGetWithLoadManyOnly(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c, err := w.locks.Client(flightlock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var calls atomic.Int64
		opts := w.manyOptions(&calls, rediscache.Options[string]{Fresh: time.Minute})
		cache, err := rediscache.New(c, w.rdb, nil, opts)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := cache.Get(t.Context(), "k"); v != "k@0" || err != nil {
			t.Error(v, err)
		}
		if _, err := cache.Get(t.Context(), "x"); !errors.Is(err, rediscache.ErrNotFound) {
			t.Error(err)
		}
		if err := cache.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A LoadMany may return a KeyErrors without an error of the key: for one key as for many, that is no error.
func TestKeyErrorsOfOneKey(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		errMine := errors.New("mine")
		client, err := w.locks.Client(flightlock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		cache, err := rediscache.New(client, w.rdb, nil, rediscache.Options[string]{
			Fresh: time.Minute,
			LoadMany: func(_ context.Context, keys []string) (map[string]string, error) {
				values, failed := map[string]string{}, flightlock.KeyErrors{}
				for _, key := range keys {
					if key == "bad" {
						failed[key] = errMine
					} else {
						values[key] = "v"
					}
				}
				return values, failed
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		if v, err := cache.Get(t.Context(), "a"); v != "v" || err != nil {
			t.Errorf("Get: %q, %v", v, err)
		}
		for _, keys := range [][]string{{"b"}, {"c", "d"}} {
			if values, err := cache.GetMany(t.Context(), keys); len(values) != len(keys) || err != nil {
				t.Errorf("GetMany of %d: %v, %v", len(keys), values, err)
			}
		}
		if _, err := cache.Get(t.Context(), "bad"); err != errMine { //nolint:errorlint // it is that key's, as it is
			t.Errorf("%T %v", err, err)
		}
		if err := cache.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A value at which Codec or FreshFor panics is not stored, and the others of its batch are.
func TestAPanicAtOneOfManyValues(t *testing.T) {
	for _, freshFor := range []bool{false, true} {
		bubble(t, func(t *testing.T, w *world) {
			var calls atomic.Int64
			opts := w.manyOptions(&calls, rediscache.Options[string]{Codec: rediscache.Text()})
			fails := func(v string) {
				if v == "k7@0" {
					panic("k7 is bad")
				}
			}
			if freshFor {
				opts.FreshFor = func(v string) time.Duration {
					fails(v)
					return time.Minute
				}
			} else {
				opts.Codec.Encode = func(v string) ([]byte, error) {
					fails(v)
					return []byte(v), nil
				}
			}
			c := w.cache(opts)
			keys := someKeys(100)
			wantMany(t, c, keys, 0)
			hits := c.Stats().Hits
			wantMany(t, c, keys, 0)
			if got := c.Stats(); got.Hits-hits != 99 || got.StoreFailures < 1 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// If the server of the values does not answer, many keys are one load without a lock, at once.
func TestGetManyInAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var calls atomic.Int64
		c := w.cache(w.manyOptions(&calls, rediscache.Options[string]{}))
		w.values.Stall(true)
		for i := range 5 {
			began := time.Now()
			wantMany(t, c, someKeys(20), 0)
			if took := time.Since(began); i > 1 && took > w.origin.takes {
				t.Errorf("call %d took %v", i, took)
			}
		}
		if n := calls.Load(); n > 6 {
			t.Errorf("%d loads", n)
		}
		w.values.Stall(false)
		time.Sleep(time.Second)
		wantMany(t, c, someKeys(20), 0)
		wantMany(t, c, someKeys(20), 0)
		if got := c.Stats(); got.Hits < 20 {
			t.Errorf("%+v", got)
		}
	})
}

// On a Cluster the keys of one GetMany are on all masters.
func TestGetManyOnACluster(t *testing.T) {
	t.Parallel()
	rdb := cluster.Get(t).Client(t, func(o *redis.ClusterOptions) { o.ContextTimeoutEnabled = true })
	var w world
	var calls atomic.Int64
	cache, single := realCache(t, rdb, w.manyOptions(&calls, rediscache.Options[string]{}))
	keys := someKeys(100)
	wantManyTwice := func(version int) {
		t.Helper()
		wantMany(t, cache, keys, version)
		redistest.Eventually(t, 40*time.Second, "the locks are released", func() bool { return cache.Stats().Running == 0 })
		wantMany(t, cache, keys, version)
	}
	wantManyTwice(0)
	w.origin.version.Add(1)
	single.version.Add(1)
	if err := cache.Invalidate(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}
	wantManyTwice(1)
	if n := calls.Load(); n != 2 {
		t.Errorf("%d loads", n)
	}
	if got := cache.Stats(); got.Hits != 200 || got.StoreFailures+got.Outdated != 0 {
		t.Errorf("%+v", got)
	}
}

// A Codec that panics for one key costs the others nothing.
func TestACodecThatPanicsForOneOfManyKeys(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Decode = func(b []byte) (string, error) {
			if string(b) == "bad" {
				panic("cannot decode")
			}
			return string(b), nil
		}
		codec.Encode = func(v string) ([]byte, error) {
			if v == "k1@1" {
				panic("cannot encode")
			}
			return []byte(v), nil
		}
		var calls atomic.Int64
		c := w.cache(w.manyOptions(&calls, rediscache.Options[string]{Codec: codec}))
		keys := someKeys(3)
		for _, key := range keys {
			v := key + "@0"
			if key == "k1" {
				v = "bad"
			}
			if err := c.Set(t.Context(), key, v); err != nil {
				t.Fatal(err)
			}
		}
		wantMany(t, c, keys, 0)
		if got := c.Stats(); got.Loads != 1 || got.Hits != 2 || got.Undecodable == 0 || got.LookupErrors > 0 {
			t.Errorf("%+v", got)
		}
		w.origin.version.Add(1)
		if err := c.Invalidate(t.Context(), keys...); err != nil {
			t.Fatal(err)
		}
		wantMany(t, c, keys, 1)
		synctest.Wait() // for the store
		if got := c.Stats(); calls.Load() != 1 || got.Loads != 2 || got.StoreFailures != 1 {
			t.Errorf("%d loads of many, %+v", calls.Load(), got)
		}
		before := calls.Load()
		wantMany(t, c, []string{"k0", "k2"}, 1)
		if n := calls.Load() - before; n != 0 {
			t.Errorf("%d loads of what was stored", n)
		}
	})
}

// A LoadMany may sort the keys it is given.
func TestLoadManySortsItsKeys(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{
			LoadMany: func(_ context.Context, keys []string) (map[string]string, error) {
				slices.Sort(keys) // WHERE id IN (...), in a fixed order
				values := map[string]string{}
				for _, key := range keys {
					values[key] = "value of " + key
				}
				return values, nil
			},
		})
		for range 2 {
			values, err := c.GetMany(t.Context(), []string{"c", "a", "b"})
			if err != nil {
				t.Fatal(err)
			}
			for key, v := range values {
				if v != "value of "+key {
					t.Errorf("GetMany: %q is %q", key, v)
				}
			}
		}
		if v, err := c.Get(t.Context(), "a"); v != "value of a" {
			t.Errorf("Get: %q, %v", v, err)
		}
	})
}

// Duplicates count once, in the local tier, too.
func TestGetManyDuplicatesInTheTier(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		copies := 0
		c := w.cache(rediscache.Options[string]{
			Local: time.Second,
			Copy:  func(v string) string { copies++; return v },
		})
		w.want("a", "a@0", c)
		copies = 0
		if _, err := c.GetMany(t.Context(), []string{"a", "a", "a"}); err != nil {
			t.Fatal(err)
		}
		if n := c.Stats().LocalHits; n != 1 {
			t.Errorf("LocalHits is %d, want 1", n)
		}
		if copies != 1 {
			t.Errorf("%d copies, want 1", copies)
		}
	})
}

// A key has a value or an error, and not both, also if its duplicate is over in the tier meanwhile.
func TestGetManyDuplicatesThatAreOver(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		takes := time.Duration(0)
		c := w.cache(rediscache.Options[string]{
			Local: time.Second,
			Copy:  func(v string) string { time.Sleep(takes); return v },
		})
		w.want("a", "a@0", c)
		takes = 2 * time.Second
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		values, err := c.GetMany(ctx, []string{"a", "a"})
		var many *flightlock.ManyError
		if v, there := values["a"]; there && errors.As(err, &many) {
			t.Errorf("both %q and %v", v, many.Errors["a"])
		}
	})
}

// Of what LoadMany has loaded, an entry that was changed meanwhile keeps the change, and one that cannot be written is
// a failure; both are counted, and the others are stored.
func TestSomeOfManyValuesAreNotStored(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var calls atomic.Int64
		failed := make(chan string, 10)
		opts := w.manyOptions(&calls, rediscache.Options[string]{})
		opts.Fetch.OnError = func(key, op string, _ error) { failed <- op + " " + key }
		c, other := w.cache(opts), w.cache(rediscache.Options[string]{})
		keys, done := []string{"k0", "k1", "k2"}, make(chan struct{})
		go func() {
			defer close(done)
			wantMany(t, c, keys, 0)
		}()
		time.Sleep(w.origin.takes / 2) // the bubble's time
		w.origin.version.Add(1)
		if err := other.Invalidate(t.Context(), "k0"); err != nil {
			t.Fatal(err)
		}
		w.values.Mini.Del("k1")
		if _, err := w.values.Mini.Lpush("k1", "no entry"); err != nil {
			t.Fatal(err)
		}
		<-done
		synctest.Wait()
		if got := c.Stats(); got.Outdated != 1 || got.StoreFailures != 1 {
			t.Errorf("%d outdated, %d not stored", got.Outdated, got.StoreFailures)
		}
		if len(failed) != 1 || <-failed != "store k1" {
			t.Error("OnError was not called once, for the Store of k1")
		}
		w.values.Mini.Del("k1")
		w.want("k0", "k0@1", c, other)
		w.want("k1", "k1@1", c, other)
		w.want("k2", "k2@0", c, other)
	})
}
