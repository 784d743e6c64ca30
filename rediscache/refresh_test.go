package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
)

// peek is what Peek says, in short.
func peek(t *testing.T, c *rediscache.Cache[string], key string) string {
	t.Helper()
	v, fresh, err := c.Peek(t.Context(), key)
	if err != nil && !errors.Is(err, rediscache.ErrNotFound) {
		t.Errorf("Peek %s: %v", key, err)
	}
	return fmt.Sprint(v, " ", fresh, " ", err != nil)
}

func wantPeek(t *testing.T, c *rediscache.Cache[string], key string, v string, fresh fetch.Freshness,
	absent bool) {
	t.Helper()
	if got, want := peek(t, c, key), fmt.Sprint(v, " ", fresh, " ", absent); got != want {
		t.Errorf("Peek %s: %s, want %s", key, got, want)
	}
}

// Peek says what there is, and leaves it as it is.
func TestPeek(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Stale: time.Hour, NotFoundFor: time.Hour, EarlyRefresh: 1e6})
		wantPeek(t, c, "k", "", fetch.Miss, false)
		w.want("k", "k@0", c)
		before, _ := w.values.Mini.Get("k")
		wantPeek(t, c, "k", "k@0", fetch.Fresh, false)
		time.Sleep(time.Minute)
		wantPeek(t, c, "k", "k@0", fetch.Stale, false)
		if after, _ := w.values.Mini.Get("k"); after != before {
			t.Errorf("%q became %q", before, after)
		}
		testkit.Must(t, c.Invalidate(t.Context(), "k"))
		wantPeek(t, c, "k", "", fetch.Miss, false)
		gone := rediscache.ErrNotFound
		w.origin.err.Store(&gone)
		_, err := c.Get(t.Context(), "k")
		wantIs(t, rediscache.ErrNotFound, err)
		wantPeek(t, c, "k", "", fetch.Fresh, true)
		time.Sleep(time.Minute)
		w.wantLoads(2)
		if s := c.Stats(); s.Hits+s.Stale != 0 || s.Misses != 2 {
			t.Errorf("%+v", s)
		}
		_, _, err = c.Peek(t.Context(), "")
		wantIs(t, flightlock.ErrInvalid, err)
		w.values.Down(true)
		if _, _, err = c.Peek(t.Context(), "k"); err == nil {
			t.Error("a Peek without a server")
		}
		w.values.Down(false)
		testkit.Must(t, c.Close(t.Context()))
		_, _, err = c.Peek(t.Context(), "k")
		wantIs(t, flightlock.ErrClosed, err)
	})
}

// A Refresh of many processes loads twice at most, and callers have the old value meanwhile, without a load
// of theirs.
func TestRefresh(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		caches := []*rediscache.Cache[string]{w.cache(options{}), w.cache(options{Local: time.Second}),
			w.cache(options{})}
		w.want("k", "k@0", caches...)
		w.origin.version.Add(1)
		var refreshed sync.WaitGroup
		for _, c := range caches {
			refreshed.Go(func() { testkit.Must(t, c.Refresh(t.Context(), "k", "new")) })
		}
		time.Sleep(500 * time.Millisecond)
		w.within(0, func() { w.want("k", "k@0", caches...) })
		refreshed.Wait()
		w.want("k", "k@1", caches...)
		w.want("new", "new@1", caches...)
		if n := w.origin.loads.Load(); n > 5 { // the first one, and two for each key
			t.Errorf("%d loads", n)
		}
	})
}

// A load that was under way when an entry was marked is stored, and the entry stays marked until a later load
// is.
func TestALoadThroughAMark(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c, other := w.cache(options{}), w.cache(options{})
		var before sync.WaitGroup
		before.Go(func() { w.want("k", "k@0", c) })
		time.Sleep(500 * time.Millisecond)
		w.origin.version.Add(1)
		before.Go(func() { testkit.Must(t, other.Refresh(t.Context(), "k")) })
		time.Sleep(time.Second)
		wantPeek(t, c, "k", "k@0", fetch.Fresh, false)
		before.Wait()
		w.want("k", "k@1", c, other)
		w.wantLoads(2)
	})
}

// After Expire the old value is served while a new one is loaded, and not for longer than Stale; a load from
// before is not stored.
func TestExpire(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c, other := w.cache(options{Stale: 10 * time.Second}), w.cache(options{Stale: 10 * time.Second})
		testkit.Must(t, c.Expire(t.Context(), "k")) // there is none
		w.want("k", "k@0", c)
		time.Sleep(time.Millisecond) // c has released the key: a refresh does not wait for its lock
		w.origin.version.Add(1)
		testkit.Must(t, c.Expire(t.Context(), "k"))
		wantPeek(t, other, "k", "k@0", fetch.Stale, false)
		w.within(0, func() { w.want("k", "k@0", other) })
		time.Sleep(500 * time.Millisecond)
		w.origin.version.Add(1)
		testkit.Must(t, c.Expire(t.Context(), "k")) // while that loads
		time.Sleep(time.Second)
		wantPeek(t, c, "k", "k@0", fetch.Stale, false)
		if n := other.Stats().Outdated; n != 1 {
			t.Errorf("%d values were outdated", n)
		}
		w.want("k", "k@0", c)
		time.Sleep(1500 * time.Millisecond)
		w.want("k", "k@2", c, other)

		fails := errors.New("no origin")
		w.origin.err.Store(&fails)
		testkit.Must(t, c.Expire(t.Context(), "k"))
		time.Sleep(9 * time.Second)
		w.want("k", "k@2", c)
		time.Sleep(2 * time.Second)
		_, err := c.Get(t.Context(), "k")
		wantIs(t, fails, err)
	})
	bubble(t, func(t *testing.T, w *world) { // without Stale
		c := w.cache(options{})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		testkit.Must(t, c.Expire(t.Context(), "k"))
		wantPeek(t, c, "k", "", fetch.Miss, false)
		for _, key := range w.values.Mini.Keys() { // a process whose clock is late would serve it
			if v, _ := w.values.Mini.Get(key); strings.Contains(v, "k@0") {
				t.Errorf("%q is left in %q", v, key)
			}
		}
		w.want("k", "k@1", c)
	})
}

// Copy copies what a codec has made, and nothing else: a Peek that misses has no value.
func TestAPeekThatMissesCopiesNothing(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Copy: func(v string) string { return v[:1] + v[1:] }})
		wantPeek(t, c, "k", "", fetch.Miss, false)
		w.want("k", "k@0", c)
		wantPeek(t, c, "k", "k@0", fetch.Fresh, false)
	})
}

// A load that began before an Expire of a key without a value is not stored.
func TestExpireOfAKeyThatIsBeingLoaded(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Stale: time.Minute})
		var before sync.WaitGroup
		before.Go(func() { w.want("k", "k@0", c) })
		time.Sleep(500 * time.Millisecond)
		w.origin.version.Add(1)
		testkit.Must(t, c.Expire(t.Context(), "k"))
		w.want("k", "k@1", c)
		before.Wait()
	})
}

// On a full server Expire deletes, and a Refresh says so.
func TestExpireOnAFullServer(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--maxmemory-policy", "noeviction")
	c, o := realCache(t, s.Client(t, honouring), options{Stale: time.Hour})
	want(t, "k", "k@0", c)
	o.version.Add(1)
	s.Do(t, "CONFIG", "SET", "maxmemory", "1")
	testkit.Must(t, c.Expire(t.Context(), "k"))
	wantPeek(t, c, "k", "", fetch.Miss, false)
	s.Do(t, "CONFIG", "SET", "maxmemory", "0")
	want(t, "k", "k@1", c)
}

// SetMany stores what can be, and invalidates the rest.
func TestSetMany(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		fails, panics := errors.New("no codec"), "panics"
		c := w.cache(options{MaxValue: 10, Codec: textCodec(func(v string) error {
			if v == panics {
				panic(v)
			}
			if v == "bad" {
				return fails
			}
			return nil
		})})
		w.want("k0", "k0@0", c)
		w.want("k1", "k1@0", c)
		w.origin.version.Add(1)
		testkit.Must(t, c.SetMany(t.Context(), map[string]string{"k0": "v0", "new": "v"}))
		wantPeek(t, c, "k0", "v0", fetch.Fresh, false)
		wantPeek(t, c, "new", "v", fetch.Fresh, false)
		err := c.SetMany(t.Context(), map[string]string{"k0": "bad", "k1": panics, "k2": "v2"})
		wantIs(t, fails, err)
		wantText(t, err, `"k0" and 1 more: it is invalidated`)
		wantPeek(t, c, "k0", "", fetch.Miss, false)
		wantPeek(t, c, "k1", "", fetch.Miss, false)
		wantPeek(t, c, "k2", "v2", fetch.Fresh, false)
		wantIs(t, flightlock.ErrInvalid, c.SetMany(t.Context(), map[string]string{"k2": "v3", "": "v"}),
			c.SetMany(t.Context(), map[string]string{"k2": "much too long"}))
		wantPeek(t, c, "k2", "", fetch.Miss, false)
		many := map[string]string{}
		for _, key := range someKeys(1200) {
			many[key] = key
		}
		testkit.Must(t, c.SetMany(t.Context(), many))
		got, err := c.GetMany(t.Context(), someKeys(1200))
		if testkit.Must(t, err); len(got) != 1200 || got["k77"] != "k77" {
			t.Errorf("%d values", len(got))
		}
		w.values.Down(true)
		if err := c.SetMany(t.Context(), map[string]string{"k0": "v0", "k1": "v1"}); err == nil {
			t.Error("values were set without a server")
		}
		wantRepeating(t, 2, c)
		w.values.Down(false)
		time.Sleep(5 * time.Second)
		wantRepeating(t, 0, c)
		w.want("k0", "k0@1", c)
		testkit.Must(t, c.SetMany(t.Context(), nil))
	})
}

// A load by LoadFrom gets the stale value and its age, which a Refresh does not change.
func TestLoadFrom(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		var last atomic.Pointer[fetch.Entry[string]]
		c := w.cacheWith(w.rdb,
			fetch.LoadFrom(func(_ context.Context, _ string, e fetch.Entry[string]) (string, error) {
				last.Store(&e)
				return e.Value + "+", nil
			}), options{Stale: time.Hour})
		wantOld := func(v string, fresh fetch.Freshness, age time.Duration) {
			t.Helper()
			old := last.Load()
			if old.Value != v || old.Fresh != fresh || old.Age != age {
				t.Errorf("%+v; want %q, %v old", old, v, age)
			}
		}
		w.want("k", "+", c)
		wantOld("", fetch.Miss, 0)
		time.Sleep(time.Second)
		testkit.Must(t, c.Refresh(t.Context(), "k"))
		wantOld("+", fetch.Stale, time.Second)
		time.Sleep(10 * time.Second)
		testkit.Must(t, c.Expire(t.Context(), "k"))
		time.Sleep(time.Second)
		w.want("k", "++", c)
		time.Sleep(time.Second)
		wantOld("++", fetch.Stale, 11*time.Second)
		testkit.Must(t, c.Invalidate(t.Context(), "k"))
		w.want("k", "+", c)
		wantOld("", fetch.Miss, 0)
	})
}

// A Cache without a load of its own cannot refresh.
func TestRefreshWithoutALoad(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, w *world) {
		c := w.cacheWith(w.rdb, nil, options{})
		wantIs(t, flightlock.ErrInvalid, c.Refresh(t.Context(), "k"),
			w.cache(options{}).Refresh(t.Context(), "k", ""))
	})
}
