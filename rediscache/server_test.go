package rediscache_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// On a real server a hit is one GET and nothing else, and each of the other requests is one script,
// also when the server has lost the scripts.
func TestCommandsPerRequest(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), options{Stale: time.Minute})
	ctx := t.Context()
	get := func() {
		t.Helper()
		if v, err := cache.Get(ctx, "k"); err != nil || !strings.HasPrefix(v, "k@") {
			t.Fatal(v, err)
		}
	}
	get()
	count := func(what string, do func(), want map[string]int64) {
		t.Helper()
		before := s.CommandCalls(t)
		do()
		after := s.CommandCalls(t)
		for _, command := range []string{"get", "eval", "evalsha", "set", "getrange", "time", "pttl", "pexpire"} {
			if n := after[command] - before[command]; n != want[command] {
				t.Errorf("%s: %d times %s, want %d", what, n, command, want[command])
			}
		}
	}
	count("100 hits", func() {
		for range 100 {
			get()
		}
	}, map[string]int64{"get": 100})
	s.Do(t, "SCRIPT", "FLUSH")
	keys := []string{"a", "b", "c"}
	invalidate := func() {
		if err := cache.Invalidate(ctx, keys...); err != nil {
			t.Error(err)
		}
	}
	count("Invalidate of 3 after SCRIPT FLUSH", invalidate, map[string]int64{"evalsha": 3, "eval": 3, "time": 3, "set": 3})
	count("Invalidate of 3", invalidate, map[string]int64{"evalsha": 3, "time": 3, "set": 3})
	set := func() {
		if err := cache.Set(ctx, "k", "k@1"); err != nil {
			t.Error(err)
		}
	}
	set()
	count("Set", set, map[string]int64{"evalsha": 2, "time": 2, "get": 1, "pttl": 1, "getrange": 1, "set": 1})
	if n := o.loads.Load(); n != 1 {
		t.Errorf("%d loads", n)
	}
}

// A server that is restarted empty has no stamps: a load that was in progress is not stored.
func TestAServerThatIsRestartedEmpty(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), options{})
	o.holds = make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if v, err := cache.Get(t.Context(), "k"); v != "k@0" || err != nil {
			t.Error(v, err)
		}
	}()
	redistest.Eventually(t, 40*time.Second, "the load", func() bool { return o.loads.Load() == 1 })
	testkit.Must(t, s.Kill())
	testkit.Must(t, s.Restart())
	o.version.Add(1)
	testkit.Must(t, cache.Invalidate(t.Context(), "k"))
	s.Do(t, "FLUSHALL")
	close(o.holds)
	<-done
	if keys := s.Keys(t); len(keys) != 0 {
		t.Errorf("%q", keys)
	}
	if v, err := cache.Get(t.Context(), "k"); v != "k@1" || err != nil {
		t.Error(v, err)
	}
}

const tooMany = "ERR max number of clients reached"

// A server that refuses a connection and closes it says why, and that is the error, from the first one on: not that a
// write has failed, or that the stream has ended, which is all that go-redis reports.
func TestTheReasonOfARefusalIsTheError(t *testing.T) {
	for writes := range 4 {
		t.Run(fmt.Sprint(writes, " writes"), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				rdb := w.values.Client(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.MaxRetries, o.DialerRetries = true, -1, 1
					o.Dialer = redistest.RefusingDialer(tooMany, writes)
				})
				c := w.cacheOf(rdb, options{FailClosed: true})
				for range 2 {
					var wg sync.WaitGroup
					for _, use := range uses {
						for range 2 {
							wg.Go(func() { wantText(t, use(t.Context(), c), tooMany) })
						}
					}
					wg.Wait()
				}
			})
		})
	}
}

// So it is where a server lets in nobody else, and answers on the connections that the cache has: those that find none
// free are told why.
func TestTheReasonOfARefusalIsTheErrorBesideConnectionsOfBefore(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		var full atomic.Bool
		rdb := w.values.Client(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.MaxRetries, o.DialerRetries = true, -1, 1
			dial, refuse := o.Dialer, redistest.RefusingDialer(tooMany, 2)
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if full.Load() {
					return refuse(ctx, network, addr)
				}
				return dial(ctx, network, addr)
			}
		})
		c := w.cacheOf(rdb, options{FailClosed: true})
		w.want("k", "k@0", c)
		full.Store(true)
		w.values.SetDelay(10 * time.Millisecond)
		var wg sync.WaitGroup
		var failed atomic.Int64
		for range 3 {
			wg.Go(func() {
				if _, err := c.Get(t.Context(), "k"); err != nil {
					failed.Add(1)
					wantText(t, err, tooMany)
				}
			})
		}
		wg.Wait()
		if n := failed.Load(); n != 2 {
			t.Errorf("%d of 3 have failed, with one connection", n)
		}
	})
}

// go-redis gives the commands of a pipeline no error if the server refuses the login of its connection:
// only Exec reports it. An invalidation that was never sent must not count as done.
func TestARefusedLoginInvalidatesNothing(t *testing.T) {
	load := func(context.Context, string) (string, error) { return "v", nil }
	refused := valueServer.Get(t).Client(t, honouring, func(o *redis.Options) {
		o.Username, o.Password = "nobody", "wrong"
	})
	cache, err := rediscache.New(lockClient(t), refused, fetch.Each(load), options{
		Name: t.Name(), Fresh: time.Minute, LookupTimeout: 10 * time.Second,
	})
	testkit.Must(t, err)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	defer cache.Close(ended) // what failed is repeated, and fails again
	for _, keys := range [][]string{{"a"}, {"a", "b"}} {
		wantText(t, cache.Invalidate(t.Context(), keys...), "WRONGPASS", t.Name()+`:a"`)
	}
	if n := cache.Stats().Repeating; n != 2 {
		t.Errorf("%d invalidations are repeated, not 2", n)
	}
	many, err := cache.GetMany(t.Context(), []string{"a", "b"})
	if err != nil || len(many) != 2 {
		t.Errorf("GetMany: %v %v", many, err)
	}
}

// A hook of the client's that panics does not end the process where a goroutine of this package called it: the
// request has failed.
func TestAHookThatPanics(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = time.Millisecond
		panics := func(name string) redis.Hook {
			return before(func(cmds []redis.Cmder) {
				if cmds[0].Name() == name {
					panic("a bug in a hook")
				}
			})
		}
		for _, honours := range []bool{false, true} {
			rdb := w.values.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = honours })
			rdb.AddHook(panics("evalsha"))
			c := w.cacheOf(rdb, options{})
			w.want("k", "k@0", c)
			if err := c.Invalidate(t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "a bug in a hook") {
				t.Errorf("Invalidate: %v", err)
			}
			if n := c.Stats().Repeating; n != 1 {
				t.Errorf("%d invalidations are repeated", n)
			}
			time.Sleep(time.Second) // it is repeated, and fails again
		}
		rdb := w.values.Client(t)
		rdb.AddHook(panics("get"))
		w.want("k", "k@0", w.cacheOf(rdb, options{}))
	})
}

// A server whose memory is full, and that evicts nothing, refuses writes and executes deletions. So values can be
// invalidated there: an entry that is missing has no stamp either.
func TestInvalidateOnAFullServer(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--maxmemory-policy", "noeviction")
	cache, o := realCache(t, s.Client(t, honouring), options{})
	ctx := t.Context()
	want := func(key, value string) {
		t.Helper()
		if v, err := cache.Get(ctx, key); v != value || err != nil {
			t.Errorf("%q, %v; want %q", v, err, value)
		}
	}
	keys := []string{"a", "b"}
	for _, key := range keys {
		want(key, key+"@0")
	}
	s.Do(t, "CONFIG", "SET", "maxmemory", "1")
	o.version.Add(1)
	if err := cache.Invalidate(ctx, keys...); err != nil {
		t.Error(err)
	}
	for _, key := range keys {
		want(key, key+"@1")
	}
	s.Do(t, "CONFIG", "SET", "maxmemory", "0")
	for range 2 {
		want("a", "a@1")
	}
	if got := cache.Stats(); got.Hits != 1 || got.Repeating != 0 {
		t.Errorf("%+v", got)
	}
}
