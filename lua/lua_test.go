package lua_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := errors.Join(closeServers(), goleak.Find()); err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}

const (
	key    = "lock:k"
	bucket = "flightlock:{}:fence:0"
	wants  = "flightlock:{}:wants:lock:k"
	offers = "flightlock:{}:offers:lock:k"
	minute = 60_000
)

// The keys of acquire and release: of an attempt that does not wait, where no offers are made, and all of
// them; and those of an undo.
var (
	alone   = []string{key, bucket, lua.Marker}
	waiting = []string{key, bucket, lua.Marker, wants}
	all     = []string{key, bucket, lua.Marker, wants, offers}
	undone  = []string{key, key, key, wants, offers}
)

// store is a server that the scripts run on, emptied before each test.
type store struct {
	t *testing.T
	*redis.Client
	real  bool
	stood bool // the scripts find a clock that stands still, at stoodAt
}

const stoodAt = 1_700_000_000 // seconds

// eachStore runs test on a real server and on miniredis.
func eachStore(t *testing.T, test func(t *testing.T, s *store)) {
	t.Helper()
	eachStoreOn(t, server, test)
}

// eachOwnStore is eachStore for a test that reconfigures its server, or that needs a process that has just
// begun.
func eachOwnStore(t *testing.T, test func(t *testing.T, s *store)) {
	t.Helper()
	eachStoreOn(t, func(t *testing.T) *redistest.Server { return redistest.StartServer(t) }, test)
}

func eachStoreOn(t *testing.T, server func(t *testing.T) *redistest.Server,
	test func(t *testing.T, s *store)) {
	t.Helper()
	t.Run("on=redis", func(t *testing.T) {
		t.Parallel()
		test(t, &store{t: t, Client: server(t).Client(t), real: true})
	})
	t.Run("on=miniredis", func(t *testing.T) {
		t.Parallel()
		mini := redistest.StartMini(t)
		mini.ClockTTL(true)
		test(t, &store{t: t, Client: redistest.MiniClient(t, mini)})
	})
}

// servers are those of tests that are over.
var servers struct {
	mu   sync.Mutex // guards free
	free []*redistest.Server
}

// server is one that no other test has at the time, without keys, scripts and users.
func server(t *testing.T) *redistest.Server {
	t.Helper()
	redistest.Require(t)
	servers.mu.Lock()
	var s *redistest.Server
	if n := len(servers.free); n > 0 {
		s, servers.free = servers.free[n-1], servers.free[:n-1]
	}
	servers.mu.Unlock()
	if s == nil {
		var err error
		if s, err = redistest.Launch(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		servers.mu.Lock()
		defer servers.mu.Unlock()
		servers.free = append(servers.free, s)
	})
	for _, command := range []string{
		"ACL SETUSER default reset on nopass ~* &* +@all", "ACL DELUSER app", "CLIENT KILL TYPE normal",
		"CLIENT KILL TYPE pubsub", "FLUSHALL", "SCRIPT FLUSH", "CONFIG RESETSTAT",
	} {
		var args []any
		for _, word := range strings.Fields(command) {
			args = append(args, word)
		}
		s.Do(t, args...)
	}
	return s
}

func closeServers() (err error) {
	for _, s := range servers.free {
		err = errors.Join(err, s.Close())
	}
	return err
}

// onServer is a store on a real server.
func onServer(t *testing.T) *store {
	t.Helper()
	return &store{t: t, Client: server(t).Client(t), real: true}
}

// declaredOnly goes before a script, which fails if it accesses a key that it does not declare, or calls a
// command whose keys are not known here. standing is what TIME replies, if that is no false.
const declaredOnly = `
local redis = (function(server, standing)
  local declared, first = {}, {OBJECT = 2}
  local last = {TIME = 0, INFO = 0, PUBLISH = 0, SPUBLISH = 0, DEL = -1, EXISTS = -1}
  for _, key in ipairs(KEYS) do declared[key] = true end
  local names = 'GET SET APPEND INCRBY PTTL PEXPIRE ZADD ZREM ZSCORE ZRANGE HSET HGET HDEL'
  for name in string.gmatch(names, '%%w+') do
    last[name] = 1
  end
  local function check(name, ...)
    local from, to = first[name] or 1, last[name] or first[name]
    if not to then error('the keys of ' .. name .. ' are not known') end
    for i = from, to < 0 and select('#', ...) or to do
      local key = select(i, ...)
      if not declared[key] then error(name .. ' accesses a key that is not declared: ' .. tostring(key)) end
    end
  end
  local own = {}
  for _, call in ipairs({'call', 'pcall'}) do
    own[call] = function(name, ...)
      check(name, ...)
      if name == 'TIME' and standing then return standing end
      return server[call](name, ...)
    end
  end
  return own
end)(redis, %s)
`

// run executes script, which may access only what it declares.
func (s *store) run(script lua.Script, keys []string, args ...any) (any, error) {
	clock := "false"
	if s.stood {
		clock = fmt.Sprintf("{'%d', '0'}", stoodAt)
	}
	return s.Eval(context.Background(), fmt.Sprintf(declaredOnly, clock)+script.Source, keys, args...).Result()
}

// in are the arguments of acquire and release, with those for a node's epoch in front.
func in(e lua.Epoch, strict bool, args ...any) []any {
	epoch := e.Args(strict)
	return append([]any{epoch[0], epoch[1], epoch[2]}, args...)
}

func anyEpoch(args ...any) []any { return in(lua.Epoch{}, false, args...) }

func (s *store) acquire(args ...any) any { return s.must(lua.Acquire, alone, anyEpoch(args...)...) }

// contend is an attempt of a contender with an offer; more is "waits" or nothing.
func (s *store) contend(owner, contender, offer string, more ...any) any {
	s.t.Helper()
	return s.must(lua.Acquire, all, anyEpoch(append([]any{owner, minute, 1, 0, contender, offer},
		more...)...)...)
}

func (s *store) refresh(args ...any) any { return s.must(lua.Refresh, []string{key, bucket}, args...) }

// done is a release of a lock that never had to wait.
func (s *store) done(owner string) any { return s.must(lua.Done, []string{key, wants}, owner) }

func (s *store) undo(args ...any) any { return s.must(lua.Undo, []string{key}, args...) }

func (s *store) must(script lua.Script, keys []string, args ...any) any {
	s.t.Helper()
	v, err := s.run(script, keys, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

func (s *store) set(k string, v any, ttl time.Duration) {
	s.t.Helper()
	if err := s.Set(context.Background(), k, v, ttl).Err(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *store) reset() {
	s.t.Helper()
	if err := s.FlushAll(context.Background()).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// offerOf is the contender's offer, "<none>" without one.
func (s *store) offerOf(contender string) string {
	s.t.Helper()
	v, err := s.HGet(context.Background(), offers, contender).Result()
	if errors.Is(err, redis.Nil) {
		return "<none>"
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

// value is the string at k, "<none>" without one.
func (s *store) value(k string) string {
	s.t.Helper()
	v, err := s.Get(context.Background(), k).Result()
	if errors.Is(err, redis.Nil) {
		return "<none>"
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

// wantTTL looks whether key's ttl in ms is want, less what a slow machine takes.
func (s *store) wantTTL(want int64) {
	s.t.Helper()
	got := s.PTTL(context.Background(), key).Val().Milliseconds()
	if got > want || got < want-20_000 {
		s.t.Errorf("ttl is %d ms, want about %d", got, want)
	}
}

func (s *store) wantCounter(want any) {
	s.t.Helper()
	if got := s.value(bucket); got != fmt.Sprint(want) {
		s.t.Errorf("counter is %s, want %v", got, want)
	}
}

func (s *store) want(got, want any) {
	s.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.t.Errorf("reply %v, want %v", got, want)
	}
}

// wantHeld expects {holder, pttl}.
func (s *store) wantHeld(got any, holder string, pttl int64) {
	s.t.Helper()
	v, ok := got.([]any)
	if !ok || len(v) != 2 || v[0] != holder {
		s.t.Fatalf("reply %v, want that %q holds it", got, holder)
	}
	if left := v[1].(int64); left > pttl || left < pttl-20_000 {
		s.t.Errorf("pttl %d, want about %d", left, pttl)
	}
}

// seed is what a missing bucket starts at: the clock in microseconds.
func (s *store) wantSeeded(got any, extra int64) {
	s.t.Helper()
	n, ok := got.(int64)
	if !ok {
		s.t.Fatalf("reply %v, want a counter", got)
	}
	age := time.Since(time.UnixMicro(n - extra))
	if age < -time.Second || age > 30*time.Second {
		s.t.Errorf("counter %d is %v away from the clock", n, age)
	}
	s.wantCounter(n)
}

// No script shortens a ttl: a late request may carry a smaller one (S6).
func TestNoScriptShortensATTL(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.set(key, "o", time.Hour)
		s.want(s.acquire("o", 10, 1), -100)
		s.wantTTL(60 * minute)
		s.want(s.acquire("o", 10, 0, 100), -100)
		s.wantTTL(60 * minute)
		s.want(s.refresh("o", 10, 100, 0), 100)
		s.wantTTL(60 * minute)
	})
}

// Owners are compared whole and byte for byte.
func TestOwnersAreComparedWhole(t *testing.T) {
	t.Parallel()
	pairs := [][2]string{
		{"worker-1", "worker-10"}, {"worker-10", "worker-1"}, {"a\x00b", "a\x00c"}, {"a\x00", "a"},
		{"\xff\xfe", "\xff"}, {"A", "a"}, {"1", "1.0"}, {"010", "10"}, {"a\r\nb", "a"}, {" a", "a"},
		{strings.Repeat("x", 5000), strings.Repeat("x", 4999)},
	}
	eachStore(t, func(t *testing.T, s *store) {
		for _, p := range pairs {
			s.reset()
			holder, other := p[0], p[1]
			s.set(bucket, 100, 0)
			s.want(s.acquire(holder, minute, 1), 101)
			s.wantHeld(s.acquire(other, minute, 1), holder, minute)
			s.wantHeld(s.refresh(other, 2*minute, 500, 5), holder, minute)
			s.wantHeld(s.undo(other), holder, minute)
			s.wantHeld(s.leave(other), holder, minute)
			s.wantHeld(s.done(other), holder, minute)
			s.want(s.value(key), holder)
			s.wantCounter(101)
			s.want(s.acquire(holder, minute, 1), -101)
			s.want(s.undo(holder), 1)
			s.want(s.value(key), "<none>")
			s.want(s.acquire(holder, minute, 1), 102)
			s.want(s.leave(holder), 1)
			s.want(s.value(key), "<none>")
			s.want(s.acquire(holder, minute, 1), 103)
			s.want(s.done(holder), 1)
			s.want(s.value(key), "<none>")
		}
	})
}

// Refreshing a key that is missing or another's writes nothing: neither ttl nor counter (S8).
func TestARefusedRefreshWritesNothing(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.want(s.refresh("o", minute, 500, 5), 0)
		s.want(s.value(key), "<none>")
		s.want(s.value(bucket), "<none>")

		s.set(bucket, 100, 0)
		s.want(s.refresh("o", minute, 500, 5), 0)
		s.wantCounter(100)

		s.set(key, "other", time.Minute)
		s.wantHeld(s.refresh("o", 60*minute, 500, 5), "other", minute)
		s.wantTTL(minute)
		s.wantCounter(100)
	})
}

// A refresh raises the counter to the lease's top and reserves more on top, in one step.
func TestRefreshRaisesAndReserves(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct{ counter, top, more, want int64 }{
			{100, 90, 0, 100}, {100, 100, 0, 100}, {100, 130, 0, 130}, {100, 90, 7, 107}, {100, 130, 7, 137},
			{100, 101, 0, 101}, {100, 100, 1, 101},
		} {
			s.set(bucket, c.counter, 0)
			s.set(key, "o", 20*time.Second)
			s.want(s.refresh("o", minute, c.top, c.more), c.want)
			s.wantCounter(c.want)
			s.wantTTL(minute)
		}
	})
}

// A repair takes no tokens and leaves the counter at the lease's top or above.
func TestRepairKeepsTheFenceAtTheFloor(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, c := range []struct{ counter, floor, want int64 }{{100, 90, 100}, {100, 100, 100}, {100, 150, 150}} {
			s.reset()
			s.set(bucket, c.counter, 0)
			s.want(s.acquire("o", minute, 0, c.floor), c.want)
			s.wantCounter(c.want)
			s.want(s.acquire("o", minute, 0, c.floor), -c.want)
			s.wantTTL(minute)
			s.set(key, "other", time.Minute)
			s.wantHeld(s.acquire("o", minute, 0, 10_000), "other", minute)
			s.wantCounter(c.want)
		}
	})
}

// A key that is not a string is an error that begins with its code, and is not changed.
func TestAKeyOfAnotherTypeIsAnError(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		if err := s.RPush(t.Context(), key, "x").Err(); err != nil {
			t.Fatal(err)
		}
		for name, run := range map[string]func() (any, error){
			"acquire": func() (any, error) { return s.run(lua.Acquire, alone, anyEpoch("o", minute, 1)...) },
			"repair":  func() (any, error) { return s.run(lua.Acquire, alone, anyEpoch("o", minute, 0, 5)...) },
			"refresh": func() (any, error) { return s.run(lua.Refresh, []string{key, bucket}, "o", minute, 5, 0) },
			"release": func() (any, error) { return s.run(lua.Release, all, anyEpoch("o", "PUBLISH", turn, "")...) },
			"done":    func() (any, error) { return s.run(lua.Done, []string{key, wants}, "o") },
			"undo":    func() (any, error) { return s.run(lua.Undo, []string{key}, "o") },
		} {
			if v, err := run(); err == nil || !strings.HasPrefix(err.Error(), "WRONGTYPE ") {
				t.Errorf("%s: %v, %v", name, v, err)
			}
		}
		s.want(s.value(bucket), "<none>")
		s.want(s.LLen(t.Context(), key).Val(), 1)
	})
}

// The SHA under which a script is called is the one that the server computes for it.
func TestScriptsHaveTheServersSHA(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for i, script := range lua.All {
			if sha := s.ScriptLoad(t.Context(), script.Source).Val(); sha != script.SHA {
				t.Errorf("script %d: %s, want %s", i, script.SHA, sha)
			}
		}
	})
}
