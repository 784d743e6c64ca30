package rediscache_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

// On a real server a hit is one GET and nothing else, and each of the other requests is one script,
// also when the server has lost the scripts.
func TestCommandsPerRequest(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	cache, o := realCache(t, s.Client(t, honouring), options{Stale: time.Minute})
	get := func() { want(t, "k", "k@0", cache) }
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
	invalidate := func() { testkit.Must(t, cache.Invalidate(t.Context(), "a", "b", "c")) }
	count("Invalidate of 3 after SCRIPT FLUSH", invalidate,
		map[string]int64{"evalsha": 3, "eval": 3, "time": 3, "set": 3})
	count("Invalidate of 3", invalidate, map[string]int64{"evalsha": 3, "time": 3, "set": 3})
	set := func() { testkit.Must(t, cache.Set(t.Context(), "k", "k@1")) }
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
	var wg sync.WaitGroup
	wg.Go(func() { want(t, "k", "k@0", cache) })
	redistest.Eventually(t, 40*time.Second, "the load", func() bool { return o.loads.Load() == 1 })
	testkit.Must(t, s.Kill())
	testkit.Must(t, s.Restart())
	o.version.Add(1)
	testkit.Must(t, cache.Invalidate(t.Context(), "k"))
	s.Do(t, "FLUSHALL")
	close(o.holds)
	wg.Wait()
	if keys := s.Keys(t); len(keys) != 0 {
		t.Errorf("%q", keys)
	}
	want(t, "k", "k@1", cache)
}

const tooMany = "ERR max number of clients reached"

// A server that refuses a connection and closes it says why, and so do the errors once a probe has been told:
// not only that a write has failed, or that the stream has ended, which is all that go-redis reports. So it
// is where a server lets in nobody else, and answers on the connection that the cache has: those that do not
// find it free are told why.
func TestTheReasonOfARefusalIsTheError(t *testing.T) {
	type how struct {
		writes int // that it takes from one that it refuses
		before bool
	}
	bubbles(t, []how{{0, false}, {1, false}, {2, false}, {3, false}, {2, true}},
		func(t *testing.T, w *world, how how) {
			w.origin.takes = 0
			var full atomic.Bool
			rdb := w.values.Client(t, func(o *redis.Options) {
				o.ContextTimeoutEnabled, o.MaxRetries, o.DialerRetries = true, -1, 1
				dial, refuse := o.Dialer, redistest.RefusingDialer(tooMany, how.writes)
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					if full.Load() {
						return refuse(ctx, network, addr)
					}
					return dial(ctx, network, addr)
				}
			})
			c := w.cacheOf(rdb, options{FailClosed: true})
			full.Store(!how.before)
			if how.before {
				w.want("k", "k@0", c)
				full.Store(true)
				w.values.SetDelay(10 * time.Millisecond)
			}
			for told := range 3 {
				var wg sync.WaitGroup
				var calls, failed atomic.Int64
				for name, use := range uses {
					for range 2 {
						if how.before && name != "Get" {
							continue
						}
						calls.Add(1)
						wg.Go(func() {
							if err := use(t.Context(), c); err != nil {
								failed.Add(1)
								wantText(t, err, map[bool]string{true: tooMany}[told > 0])
							}
						})
					}
				}
				wg.Wait()
				if ok := calls.Load() - failed.Load(); ok != map[bool]int64{true: 1}[how.before] {
					t.Errorf("%d of %d have succeeded", ok, calls.Load())
				}
				time.Sleep(time.Second) // the bubble's time
			}
		})
}

// go-redis gives the commands of a pipeline no error if the server refuses the login of its connection:
// only Exec reports it. An invalidation that was never sent must not count as done.
func TestARefusedLoginInvalidatesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.values.RequireAuth("right")
		c := w.cacheOf(w.values.Client(t, honouring, func(o *redis.Options) { o.Password = "wrong" }), options{})
		for _, keys := range [][]string{{"a"}, {"a", "b"}} {
			wantText(t, c.Invalidate(t.Context(), keys...), "WRONGPASS", `"a"`)
		}
		wantRepeating(t, 2, c)
		wantMany(t, c, []string{"a", "b"}, 0)
	})
}

// A hook of the client's that panics does not end the process where a goroutine of this package called it:
// the request has failed.
func TestAHookThatPanics(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, honours bool) {
		w.origin.takes = time.Millisecond
		var panics, last atomic.Value // names of commands
		panics.Store("evalsha")
		rdb := w.values.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = honours })
		rdb.AddHook(before(func(cmds []redis.Cmder) {
			if last.Store(cmds[0].Name()); cmds[0].Name() == panics.Load() {
				panic("a bug in a hook")
			}
		}))
		c := w.cacheOf(rdb, options{})
		w.want("k", "k@0", c)
		w.values.Stall(true) // so that its failure is not forgotten
		wantText(t, c.Invalidate(t.Context(), "k"), "a bug in a hook")
		wantRepeating(t, 1, c)
		panics.Store("get")
		if w.want("k2", "k2@0", c); last.Load() != "get" {
			t.Errorf("a lookup while the server is probed is a %s", last.Load())
		}
		time.Sleep(time.Second) // the invalidation is repeated, and fails again
		w.values.Stall(false)
		time.Sleep(5 * time.Second)
	})
}

// A server whose memory is full, and that evicts nothing, refuses writes and executes deletions. So values
// can be invalidated there: an entry that is missing has no stamp either.
func TestInvalidateOnAFullServer(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--maxmemory-policy", "noeviction")
	c, o := realCache(t, s.Client(t, honouring), options{})
	want(t, "a", "a@0", c)
	want(t, "b", "b@0", c)
	s.Do(t, "CONFIG", "SET", "maxmemory", "1")
	o.version.Add(1)
	testkit.Must(t, c.Invalidate(t.Context(), "a", "b"))
	want(t, "a", "a@1", c)
	want(t, "b", "b@1", c)
	s.Do(t, "CONFIG", "SET", "maxmemory", "0")
	want(t, "a", "a@1", c, c)
	if got := c.Stats(); got.Hits != 1 || got.Repeating != 0 {
		t.Errorf("%+v", got)
	}
}

// Where MGET is refused, as by an address that is that of a Cluster, many keys are looked up one by one in a
// pipeline, and where EVALSHA is, scripts are sent as texts. A minute later MGET is tried again: one odd
// answer is not for life.
func TestWhatAServerRefusesIsDoneWithout(t *testing.T) {
	for command, says := range map[string]string{
		"MGET":    "CROSSSLOT Keys in request don't hash to the same slot",
		"EVALSHA": "ERR unknown command 'EVALSHA', with args beginning with: 'f' ",
	} {
		bubble(t, func(t *testing.T, w *world) {
			var calls atomic.Int64
			var refuses atomic.Bool
			refuses.Store(true)
			w.values.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
				if cmd != command {
					return false
				}
				calls.Add(1)
				if refuses.Load() {
					c.WriteError(says)
				}
				return refuses.Load()
			})
			c := w.cacheWith(w.rdb, w.many, options{Fresh: time.Hour})
			keys := someKeys(100)
			for range 5 {
				wantMany(t, c, keys, 0)
			}
			w.change(c, keys...)
			wantMany(t, c, keys, 1)
			w.wantLoads(2)
			if s := c.Stats(); s.LookupErrors > 0 || s.StoreFailures > 0 {
				t.Errorf("%s: %+v", command, s)
			}
			if n := calls.Load(); n < 1 || command == "MGET" && n > 1 {
				t.Errorf("%d calls of %s, which is refused", n, command)
			}
			refuses.Store(false)
			time.Sleep(time.Minute)
			calls.Store(0)
			w.change(c, keys...)
			wantMany(t, c, keys, 2)
			if calls.Load() == 0 {
				t.Errorf("%s is done without for ever", command)
			}
		})
	}
}
