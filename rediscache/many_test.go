package rediscache_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
)

// many is a load of many keys of the world's origin, which sorts its keys, as for WHERE id IN (...).
func (w *world) many(ctx context.Context, keys []string) (map[string]string, error) {
	w.origin.loads.Add(1)
	slices.Sort(keys)
	values := map[string]string{}
	for _, key := range keys {
		values[key] = fmt.Sprintf("%s@%d", key, w.origin.version.Load())
	}
	select {
	case <-time.After(w.origin.takes):
		return values, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
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
	bubbles(t, []time.Duration{0, time.Second}, func(t *testing.T, w *world, local time.Duration) {
		opts := options{Name: "user", Local: local}
		a, b := w.cacheWith(w.rdb, w.many, opts), w.cacheWith(w.rdb, w.many, opts)
		keys := someKeys(100)
		slices.Reverse(keys)
		var wg sync.WaitGroup
		for _, c := range []*rediscache.Cache[string]{a, b} {
			wg.Go(func() { wantMany(t, c, keys, 0) })
		}
		wg.Wait()
		if n := w.origin.loads.Swap(0); n > 2 { // each process may have won some of the locks
			t.Errorf("%d loads", n)
		}
		wantMany(t, a, keys, 0) // the load took longer than a value stays in the tier
		before := w.values.Mini.CommandCount()
		wantMany(t, a, keys, 0)
		if n := w.values.Mini.CommandCount() - before; local == 0 && n != 1 || local > 0 && n != 0 {
			t.Errorf("%d commands", n)
		}
		time.Sleep(time.Millisecond) // the locks of the loads before are given back
		w.change(a, keys...)
		wantMany(t, a, keys, 1)
		time.Sleep(local)
		wantMany(t, b, keys, 1)
		w.wantLoads(1)
	})
}

// A value at which Codec or FreshFor panics costs the others of its batch nothing.
func TestAPanicAtOneOfManyValues(t *testing.T) {
	fails := func(v string) error {
		if v == "k7@0" {
			panic(v)
		}
		return nil
	}
	for what, opts := range map[string]options{
		"Encode": {Codec: rediscache.Codec[string]{Encode: textCodec(fails).Encode,
			Decode: rediscache.Text().Decode}},
		"Decode": {Codec: rediscache.Codec[string]{Encode: rediscache.Text().Encode,
			Decode: textCodec(fails).Decode}},
		"FreshFor": {FreshFor: func(v string) time.Duration { _ = fails(v); return time.Minute }},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				c := w.cacheWith(w.rdb, w.many, opts)
				keys := someKeys(100)
				wantMany(t, c, keys, 0)
				synctest.Wait() // until all of it is stored, or not
				before := c.Stats()
				wantMany(t, c, keys, 0)
				s := c.Stats()
				if s.Hits-before.Hits != 99 || s.LookupErrors > 0 || s.StoreFailures+s.Undecodable < 1 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// Of what was loaded together, an entry that was changed meanwhile keeps the change, and one that cannot be
// written is a failure; both are counted, and the others are stored.
func TestSomeOfManyValuesAreNotStored(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		failed := make(chan string, 10)
		c := w.cacheWith(w.rdb, w.many, options{OnError: func(key, op string, _ error) {
			failed <- op + " " + key
		}})
		other := w.cache(options{})
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, c, someKeys(3), 0) })
		time.Sleep(w.origin.takes / 2) // the bubble's time
		w.change(other, "k0")
		w.values.Mini.Del("k1")
		_, err := w.values.Mini.Lpush("k1", "no entry")
		testkit.Must(t, err)
		wg.Wait()
		synctest.Wait()
		if got := c.Stats(); got.Outdated != 1 || got.StoreFailures != 1 {
			t.Errorf("%d outdated, %d not stored", got.Outdated, got.StoreFailures)
		}
		if len(failed) != 1 || <-failed != "store k1" {
			t.Error("OnError was not called once, for the store of k1")
		}
		w.values.Mini.Del("k1")
		w.want("k0", "k0@1", c, other)
		w.want("k1", "k1@1", c, other)
		w.want("k2", "k2@0", c, other)
	})
}
