package rediscache_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// An entry that expires while it is refreshed keeps its stamp until then: one load, and it is
// stored.
func TestAnEntryThatExpiresDuringItsRefresh(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 3 * time.Second
		c := w.cache(options{Fresh: time.Minute, Stale: 2 * time.Second})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		time.Sleep(time.Minute + time.Second)
		w.want("k", "k@0", c)
		time.Sleep(2 * time.Second)
		w.want("k", "k@1", c, c) // the old one has expired: the first Get waits for the load that is under way
		w.wantLoads(2)
	})
}

// Jitter shortens how long entries are fresh by at most that fraction, and not equally. A value that was
// loaded here is not in the local tier for longer than in Redis, however much that is.
func TestJitter(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(options{Local: time.Second, Fresh: time.Second, Jitter: 0.9})
		ttls := map[time.Duration]bool{}
		for i := range 20 {
			key := fmt.Sprint(i)
			w.want(key, fmt.Sprintf("%s@%d", key, i), c)
			ttl := w.values.Mini.TTL(key)
			if ttl < 100*time.Millisecond || ttl > time.Second {
				t.Errorf("ttl %v", ttl)
			}
			ttls[ttl] = true
			next := fmt.Sprintf("%s@%d", key, w.origin.version.Add(1))
			time.Sleep(ttl + time.Millisecond) // the bubble's time
			w.want(key, next, c)
		}
		if len(ttls) < 5 {
			t.Errorf("%d different ttls", len(ttls))
		}
	})
}

// The local tier serves no value for longer than it may be served at all.
func TestLocalAndFreshFor(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(options{Local: time.Second, FreshFor: func(v string) time.Duration {
			switch v[0] {
			case 'n': // never
				return 0
			case 's': // shorter than Local
				return 600 * time.Millisecond
			}
			return 1500 * time.Millisecond
		}})
		for i, get := range []func(key, value string){
			func(key, value string) { w.want(key, value, c) },
			func(key, value string) {
				if values, err := c.GetMany(t.Context(), []string{key}); values[key] != value || err != nil {
					t.Errorf("%v, %v; want %s", values, err, value)
				}
			},
		} {
			now, next := fmt.Sprint("@", 2*i), fmt.Sprint("@", 2*i+1)
			get("never", "never"+now)
			get("short", "short"+now)
			get("long", "long"+now)
			get("long", "long"+now)
			if n := c.Stats().LocalHits; n != uint64(2*i+1) { // one of long each time, and one of short below
				t.Errorf("%d hits of the tier", n)
			}
			synctest.Wait() // until the load is over: what is not stored goes to those that come until then
			w.origin.version.Add(1)
			get("never", "never"+next)
			time.Sleep(600 * time.Millisecond) // until what is short is over
			get("short", "short"+next)
			time.Sleep(500 * time.Millisecond) // past Local
			get("short", "short"+next)
			time.Sleep(400 * time.Millisecond) // until what is long is over on the server
			get("long", "long"+next)
			time.Sleep(2 * time.Second) // until all of it is over
			w.origin.version.Add(1)
		}
	})
}

// "not found" is kept for NotFoundFor, until the entry is invalidated or set. Without that nothing remembers
// it, and each Get loads. A stale value that was there before is not served any more, and other errors are
// not kept in Redis.
func TestNotFound(t *testing.T) {
	bubbles(t, []time.Duration{0, 10 * time.Second}, func(t *testing.T, w *world, kept time.Duration) {
		c := w.cache(options{NotFoundFor: kept, Stale: time.Hour})
		w.want("k", "k@0", c)
		time.Sleep(time.Minute)
		none := fmt.Errorf("no such row: %w", rediscache.ErrNotFound)
		w.origin.err.Store(&none)
		w.want("k", "k@0", c) // stale, and loaded behind
		time.Sleep(2 * w.origin.takes)
		loads := w.origin.loads.Load()
		for range 3 {
			_, err := c.Get(t.Context(), "k")
			wantIs(t, rediscache.ErrNotFound, err)
		}
		want := map[bool]int64{false: 3}[kept > 0]
		w.wantLoads(loads + want)
		if s := c.Stats(); int64(s.NotFound) != 3-want || s.LoadFailures != 0 {
			t.Errorf("%+v", s)
		}
		w.origin.err.Store(nil) // a row was inserted
		testkit.Must(t, c.Invalidate(t.Context(), "k"))
		w.want("k", "k@0", c)
	})
}

// GetWith brings its own load, for its own key only. It reaches a run with BareContext, too, without the
// values of the caller's ctx.
func TestGetWith(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, bare bool) {
		type tenant struct{}
		c := w.cache(options{Stale: time.Hour, BareContext: bare})
		n, whose := 0, map[bool]any{false: "acme", true: nil}[bare]
		own := func(ctx context.Context, key string) (string, error) {
			if n++; ctx.Value(tenant{}) != whose {
				t.Errorf("the load is for %v", ctx.Value(tenant{}))
			}
			v, err := c.Get(ctx, "other")
			return fmt.Sprint("own ", key, n, " with ", v), err
		}
		want := func(value string) {
			t.Helper()
			v, err := c.GetWith(context.WithValue(t.Context(), tenant{}, "acme"), "k", own)
			if v != value || err != nil {
				t.Error(v, err)
			}
		}
		want("own k1 with other@0")
		want("own k1 with other@0")
		time.Sleep(time.Minute)
		want("own k1 with other@0") // stale
		time.Sleep(w.origin.takes)
		w.want("k", "own k2 with other@0", c)
		_, err := c.GetWith(t.Context(), "k", nil)
		wantIs(t, flightlock.ErrInvalid, err)
	})
}

// With Copy each caller has a value of its own, whether it was loaded, found, or in the local tier, where
// duplicates count once.
func TestCopy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		copies := 0
		copied := func(v string) string { copies++; return fmt.Sprint(v, " copy ", copies) }
		w.origin.takes = 0
		c := w.cache(options{Local: time.Second, Copy: copied})
		w.want("a", "a@0 copy 1", c)
		w.want("a", "a@0 copy 2", c)
		w.want("a", "a@0 copy 3", w.cache(options{Copy: copied}))
		values, err := c.GetMany(t.Context(), []string{"a", "a", "", "a"})
		wantIs(t, flightlock.ErrInvalid, err) // of the key that is none
		if s := c.Stats(); len(values) != 1 || values["a"] != "a@0 copy 4" || s.LocalHits != 2 {
			t.Errorf("%v; %+v", values, s)
		}
	})
}

// With EarlyRefresh a key that is read often is refreshed before it expires, once for all processes, and
// nobody waits for it. That a value was set does not end that: how long a load takes is still known.
func TestEarlyRefresh(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		opts := options{EarlyRefresh: 1}
		a, b := w.cache(opts), w.cache(opts)
		w.want("k", "k@0", a, b)
		w.wantLoads(1)
		testkit.Must(t, a.Set(t.Context(), "k", "k@0"))
		for began := time.Now(); time.Since(began) < 10*time.Minute; {
			asked := time.Now()
			w.want("k", "k@0", a, b)
			if took := time.Since(asked); took > 0 {
				t.Fatalf("after %v somebody waited %v", time.Since(began), took)
			}
			time.Sleep(testkit.Sized(10*time.Millisecond, 50*time.Millisecond)) // the bubble's time
		}
		if n := w.origin.loads.Load(); n < 10 || n > 13 {
			t.Errorf("%d loads in 10 minutes", n)
		}
	})
}

// A process that has missed a key, and gets its lock when another one has just loaded it, does not load
// it again as an early refresh, however long the load takes in comparison with Fresh.
func TestEarlyRefreshIsNotForAMiss(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 300 * time.Millisecond
		a := w.cache(options{Fresh: time.Second, EarlyRefresh: 1})
		b := w.cache(options{Fresh: time.Second, EarlyRefresh: 1, MaxLoads: 1})
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
		w.origin.takes = 0
		opts := options{Local: 500 * time.Millisecond}
		a, b := w.cache(opts), w.cache(opts)
		w.want("k", "k@0", a, b)
		w.change(a, "k")
		w.want("k", "k@1", a)
		w.want("k", "k@0", b)
		time.Sleep(500 * time.Millisecond)
		w.want("k", "k@1", a, b)
		testkit.Must(t, a.Set(t.Context(), "k", "k@2"))
		w.want("k", "k@2", a)
		before := w.values.Mini.CommandCount()
		for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
			w.want("k", "k@2", a)
		}
		if n := w.values.Mini.CommandCount() - before; n > 25 {
			t.Errorf("%d commands in 10s", n)
		}
		testkit.Must(t, a.Close(t.Context()))
		_, err := a.Get(t.Context(), "k")
		wantIs(t, flightlock.ErrClosed, err)
	})
}

// A stale value is served until a new one was loaded. One that is not stored because of FreshFor takes its
// place, too: else the old one would be served for as long as Stale says, and each Get would load once more.
func TestAValueThatIsNotStoredEndsTheStaleOne(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Stale: time.Hour, FreshFor: func(v string) time.Duration {
			if strings.HasSuffix(v, "@0") {
				return time.Second
			}
			return 0
		}})
		w.want("k", "k@0", c)
		w.origin.version.Add(1) // from now on it may not be cached
		time.Sleep(2 * time.Second)
		w.want("k", "k@0", c) // stale, and loaded behind
		time.Sleep(2 * time.Second)
		w.wantLoads(2)
		w.want("k", "k@1", c, c)
		w.wantLoads(4)
	})
}

// The Client's Close closes the Caches that are made over it, and waits for their loads; after that there is
// no New. A Cache may be closed at the same time, and again.
func TestCloseOfTheClient(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		client, opts := w.client(), options{Fresh: time.Minute}
		c := newCache(t, client, w.rdb, fetch.Each(w.origin.load), opts)
		var wg sync.WaitGroup
		wg.Go(func() { w.want("k", "k@0", c) })
		synctest.Wait()
		for _, end := range []func(context.Context) error{client.Close, c.Close, c.Close} {
			wg.Go(func() { wantIs(t, nil, end(t.Context())) })
		}
		wg.Wait()
		if !w.values.Mini.Exists("k") {
			t.Error("the load was not stored")
		}
		_, get := c.Get(t.Context(), "k")
		_, made := rediscache.New(client, w.rdb, fetch.Each(w.origin.load), opts)
		wantIs(t, flightlock.ErrClosed, get, made, c.Invalidate(t.Context(), "k"))
	})
}

// However many callers come at once, the lookup of each has all of its time: they wait for their turn first.
func TestABurstOfCallers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb := w.values.Client(t, honouring, func(o *redis.Options) { o.PoolSize = 4 })
		c := w.cacheOf(rdb, options{})
		w.want("k", "k@0", c)
		w.values.SetDelay(time.Millisecond)
		callers := testkit.Sized(20_000, 5000)
		var wg sync.WaitGroup
		began := time.Now()
		for range callers {
			wg.Go(func() { w.want("k", "k@0", c) })
		}
		wg.Wait()
		if took := time.Since(began); took < 2*time.Second {
			t.Errorf("it took %v only", took) // less than a lookup may take
		}
		if s := c.Stats(); s.Hits != uint64(callers) || s.LookupErrors > 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A lookup before a load is compared with the time of its own reply: what another process has stored while
// the lookup was on its way is fresh to it, however long that has taken.
func TestALookupThatTookLong(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		slow := w.values.Client(t, honouring)
		opts := options{Fresh: 100 * time.Millisecond}
		a, b := w.cache(opts), w.cacheOf(slow, opts)
		var once atomic.Bool
		slow.AddHook(before(func(cmds []redis.Cmder) {
			if cmds[0].Name() == "evalsha" && once.CompareAndSwap(false, true) {
				time.Sleep(400 * time.Millisecond)
				testkit.Must(t, a.Set(t.Context(), "k", "new"))
			}
		}))
		w.want("k", "new", b)
		w.wantLoads(0)
	})
}

// A process that only has hits, and so has never been told the server's time, or is not told it again, does
// not take old values for fresh ones for as long as its clock is behind, or its wall clock was set back.
func TestClocksOfAProcessThatOnlyHasHits(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, behind bool) {
		defer testkit.Clocks.Reset()
		a := w.cache(options{Stale: 2 * time.Hour})
		b, hour := a, time.Duration(0) // a has loaded the value, and heard the time
		if behind {
			b, hour = w.cache(options{Stale: 2 * time.Hour}), time.Hour
		}
		w.values.Mini.SetTime(time.Now().Add(hour))
		w.want("k", "k@0", a, b)
		w.origin.version.Add(1)
		time.Sleep(2 * time.Minute) // past Fresh
		w.values.Mini.SetTime(time.Now().Add(hour))
		testkit.Clocks.Wall.Add(int64(hour - time.Hour))
		w.want("k", "k@0", b) // and it is refreshed
		time.Sleep(2 * w.origin.takes)
		w.want("k", "k@1", b)
	})
}
