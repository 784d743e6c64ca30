package rediscache_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// When the server of the values stops, callers wait until the first lookups and a probe have timed out.
// A second later they wait for two loads at most: one that began before they came may be too old for them,
// the next one is not. The same holds if the nodes of the locks stop as well.
func TestHotKeysInAnOutage(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, all bool) {
		w.origin.takes = 20 * time.Millisecond
		caches := make([]*rediscache.Cache[string], 4)
		for i := range caches {
			caches[i] = w.cache(options{Fresh: 3 * time.Second})
		}
		const stops = 4 * time.Second
		rnd := rand.New(rand.NewPCG(1, 2))
		var wg sync.WaitGroup
		for at := time.Duration(0); at < 9*time.Second; at += 2 * time.Millisecond {
			if at == stops {
				w.values.Stall(true)
				if all {
					w.locks.Delay(5 * time.Second)
				}
			}
			// a lookup, a probe, an attempt to lock, and loads; then loads alone
			most := 500*time.Millisecond + 250*time.Millisecond + 100*time.Millisecond + 2*w.origin.takes
			if at >= stops+time.Second {
				most = 2 * w.origin.takes
			}
			c, key := caches[rnd.IntN(len(caches))], fmt.Sprint("k", rnd.IntN(50))
			wg.Go(func() { w.within(most, func() { w.want(key, key+"@0", c) }) })
			time.Sleep(2 * time.Millisecond)
		}
		wg.Wait()
		w.values.Stall(false)
		w.locks.Delay(0)
	})
}

// Lookups that fail do not make others fail that a server answers in time: they have all of their time unless
// a probe has failed.
func TestAFailureMakesNoOthers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{Fresh: time.Hour})
		w.want("k", "k@0", c)
		w.values.SetDelay(100 * time.Millisecond)
		time.AfterFunc(500*time.Millisecond, func() { w.values.Mini.SetError("LOADING it has just started") })
		time.AfterFunc(550*time.Millisecond, func() { w.values.Mini.SetError("") })
		var wg sync.WaitGroup
		for range 400 {
			wg.Go(func() { w.want("k", "k@0", c) })
			time.Sleep(10 * time.Millisecond)
		}
		wg.Wait()
		if n := c.Stats().LookupErrors; n == 0 || n > 20 {
			t.Errorf("%d lookups failed", n)
		}
	})
}

// A server that refuses every login, or every command, is left alone like one that does not answer: a client
// that is not let in dials again for each lookup. It is used again when it lets the client in.
func TestAServerThatRefusesEverythingIsLeftAlone(t *testing.T) {
	bubbles(t, []string{
		"", // WRONGPASS, as the server has it
		"NOAUTH Authentication required.",
		"ERR AUTH <password> called without any password configured for the default user.",
		"ERR DB index is out of range",
		"ERR max number of clients reached",
		"BUSY Redis is busy running a script.",
	}, func(t *testing.T, w *world, reply string) {
		w.values.RequireAuth("old")
		var dials atomic.Int64
		rdb := w.values.Client(t, honouring, func(o *redis.Options) {
			o.Password = "old"
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				return dial(ctx, network, addr)
			}
		})
		w.origin.takes = time.Millisecond
		c := w.cacheOf(rdb, options{Fresh: time.Hour})
		w.want("k", "k@0", c)
		if w.values.Mini.SetError(reply); reply == "" {
			w.values.RequireAuth("new")
		}
		w.values.Cut()
		before := dials.Load()
		for range 500 {
			w.want("k", "k@0", c)
			time.Sleep(10 * time.Millisecond)
		}
		if n, s := dials.Load()-before, c.Stats(); n > 30 || s.Down != 1 {
			t.Errorf("%d dials in 5 s; servers that are down: %d", n, s.Down)
		}
		w.values.RequireAuth("old")
		w.values.Mini.SetError("")
		time.Sleep(time.Second)
		failed := c.Stats().LookupErrors
		w.want("k", "k@0", c)
		if s := c.Stats(); s.Down != 0 || s.LookupErrors != failed {
			t.Errorf("servers that are down: %d; %d lookups have failed since", s.Down, s.LookupErrors-failed)
		}
	})
}

// A server that refuses logins and answers on the connections that it let in before is used: while its
// password is changed, for instance. Only the lookups that find no such connection fail.
func TestConnectionsFromBeforeARefusedLoginAreUsed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.values.RequireAuth("old")
		rdb := w.values.Client(t, honouring, func(o *redis.Options) { o.Password = "old" })
		w.origin.takes = time.Millisecond
		c := w.cacheOf(rdb, options{Fresh: time.Hour})
		w.want("k", "k@0", c)
		w.values.SetDelay(2 * time.Millisecond)
		var wg sync.WaitGroup
		for range 4 { // that many connections
			wg.Go(func() { w.want("k", "k@0", c) })
		}
		wg.Wait()
		w.values.RequireAuth("new")
		before := c.Stats()
		for i := range 6 {
			wg.Go(func() {
				for range 500 {
					w.want("k", "k@0", c)
					time.Sleep(time.Duration(15+i) * time.Millisecond) // the bubble's time
				}
			})
		}
		wg.Wait()
		if s := c.Stats(); s.Hits-before.Hits < 2000 {
			t.Errorf("%d of 3000 are hits: %+v", s.Hits-before.Hits, s)
		}
	})
}

// LookupTimeout limits a hit where the client's own timeout for a reply is shorter, too: go-redis repeats
// what has timed out, and dials again.
func TestAShortReadTimeoutIsNoLimit(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, down bool) {
		w.origin.takes = 0
		rdb := w.values.Client(t, honouring, retrying,
			func(o *redis.Options) { o.ReadTimeout = 300 * time.Millisecond })
		c := w.cacheOf(rdb, options{})
		w.want("k", "k@0", c)
		w.values.Stall(!down)
		w.values.Down(down)
		most := 760 * time.Millisecond // a lookup, a probe, and the least by which its deadline is put off
		if down {
			most = time.Second // two lookups: the probe fails at once, and says nothing of the second one
		}
		for range 3 {
			w.within(most, func() { w.want("k", "k@0", c) })
		}
		w.values.Stall(false)
		w.values.Down(false)
		time.Sleep(10 * time.Second) // go-redis may still be dialing
	})
}

// The error of a Get says why a server is left alone, and that of a write that it has not answered.
func TestErrorsOfAServerThatRefusesConnections(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		rdb := w.values.Client(t, honouring, retrying)
		c := w.cacheOf(rdb, options{FailClosed: true})
		w.values.Down(true)
		_ = uses["Get"](t.Context(), c)
		wantText(t, uses["Get"](t.Context(), c), `"k"`, "dial tcp 10.1.0.1:6379: connection refused",
			"probed every 250ms")
		wantText(t, c.Set(t.Context(), "k", "v"), `set "k": it is invalidated`, "connection refused",
			"probed every 250ms")
		wantText(t, c.Invalidate(t.Context(), "k"), `invalidate "k": it is invalidated`, "connection refused")
		wantText(t, c.Invalidate(t.Context(), "a", "b", "c"), `invalidate "a" and 2 more: it is invalidated`)
		w.values.Down(false)
		time.Sleep(10 * time.Second) // go-redis may still be dialing
	})
}

// The end of a caller's own time is its error, and no failure of the cache, also where the request fails a
// moment before the ctx has ended: the deadline of its socket is the caller's, and says no more than that it
// has timed out.
func TestTheEndOfACallersTime(t *testing.T) {
	bubbles(t, slices.Collect(maps.Keys(uses)), func(t *testing.T, w *world, what string) {
		var failed atomic.Int64
		c := w.cache(options{OnError: func(string, string, error) { failed.Add(1) }})
		testkit.Must(t, uses[what](t.Context(), c))
		loads := w.origin.loads.Load()
		w.values.Stall(true)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			for _, ctx := range []context.Context{redistest.LateCtx{Context: ctx}, ctx} {
				wantIs(t, context.DeadlineExceeded, uses[what](ctx, c))
			}
			cancel()
		}
		synctest.Wait()
		got := c.Stats()
		if got.LookupErrors != 0 || failed.Load() != 0 || got.Down != 0 || w.origin.loads.Load() != loads {
			t.Errorf("%+v; %d reported, %d loads", got, failed.Load(), w.origin.loads.Load()-loads)
		}
		w.values.Stall(false)
		time.Sleep(5 * time.Second) // the bubble's time: what has failed is repeated
	})
}

// A server that does not answer is not used after two lookups: callers wait for their load only.
// When it is back it is used again.
func TestAServerThatDoesNotAnswer(t *testing.T) {
	type how struct{ down, honours bool }
	bubbles(t, []how{{}, {honours: true}, {down: true}, {true, true}}, func(t *testing.T, w *world, how how) {
		fail := w.values.Stall
		if how.down {
			fail = w.values.Down
		}
		w.origin.takes = 50 * time.Millisecond
		rdb := w.values.Client(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.ReadTimeout = how.honours, 3*time.Second
		})
		c := w.cacheOf(rdb, options{})
		w.want("k", "k@0", c)
		fail(true)
		for i := range 20 {
			most := time.Second + w.origin.takes + 100*time.Millisecond // LookupTimeout
			if i >= 2 {
				most = w.origin.takes
			}
			w.within(most, func() { w.want(fmt.Sprint("k", i), fmt.Sprintf("k%d@0", i), c) })
		}
		if got := c.Stats(); got.Down != 1 || got.UnlockedLoads < 18 {
			t.Errorf("%+v", got)
		}
		w.within(0, func() { wantText(t, c.Invalidate(t.Context(), "k", "other"), "probed") })
		w.origin.version.Add(1)
		fail(false)
		time.Sleep(5 * time.Second)
		w.want("k", "k@1", c, c)
		if got := c.Stats(); got.Down != 0 || got.Repeating != 0 || got.Hits == 0 {
			t.Errorf("%+v", got)
		}
	})
}
