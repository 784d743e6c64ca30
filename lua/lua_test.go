package lua_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	key    = "lock:k"
	bucket = "flightlock:{}:fence:0"
	minute = 60_000
)

// store is a server that the scripts run on, emptied before each test.
type store struct {
	t *testing.T
	*redis.Client
	real    bool
	batched bool // the lock scripts run as operations of a batch
}

// eachStore runs test on a real server and on miniredis, with the scripts by themselves and
// in a batch.
func eachStore(t *testing.T, test func(t *testing.T, s *store)) {
	t.Helper()
	for _, batched := range []bool{false, true} {
		form := map[bool]string{false: "", true: "/batched"}[batched]
		t.Run("on=redis"+form, func(t *testing.T) {
			test(t, &store{t, redistest.StartServer(t).Client(t), true, batched})
		})
		t.Run("on=miniredis"+form, func(t *testing.T) {
			mini := redistest.StartMini(t)
			mini.ClockTTL(true)
			test(t, &store{t, redistest.MiniClient(t, mini), false, batched})
		})
	}
}

func (s *store) run(script lua.Script, keys []string, args ...any) (any, error) {
	if _, isOperation := letters[script]; s.batched && isOperation {
		return s.amongOthers(operation{script, keys, args})
	}
	return s.Eval(context.Background(), script.Source, keys, args...).Result()
}

func (s *store) acquire(args ...any) any { return s.must(lua.Acquire, []string{key, bucket}, args...) }
func (s *store) refresh(args ...any) any { return s.must(lua.Refresh, []string{key, bucket}, args...) }
func (s *store) undo(args ...any) any    { return s.must(lua.Undo, []string{key}, args...) }

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

// A free key is granted with a block of tokens, and counters continue from grant to grant.
func TestAcquireGrantsABlock(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		for _, c := range []struct{ block, want int64 }{{1, 101}, {7, 108}, {1000, 1108}, {1, 1109}} {
			s.want(s.acquire("o", minute, c.block), c.want)
			s.wantCounter(c.want)
			s.wantTTL(minute)
			s.want(s.value(key), "o")
			s.want(s.undo("o"), 1)
		}
	})
}

// A missing bucket is seeded from the node's clock in microseconds in every branch, and
// only then are tokens added or the larger of two taken (S10).
func TestAMissingBucketStartsAtTheClock(t *testing.T) {
	far := int64(8_000_000_000_000_000) // beyond the clock, below 2^53
	for _, c := range []struct {
		name  string
		held  bool // the owner has the key already
		run   func(s *store) any
		sign  int64
		extra int64
		want  int64 // instead of the clock
	}{
		{name: "grant", run: func(s *store) any { return s.acquire("o", minute, 1) }, sign: 1, extra: 1},
		{name: "grant of a block", run: func(s *store) any { return s.acquire("o", minute, 50) }, sign: 1, extra: 50},
		{name: "replay", held: true, run: func(s *store) any { return s.acquire("o", minute, 50) }, sign: -1},
		{name: "repair", run: func(s *store) any { return s.acquire("o", minute, 0, 5) }, sign: 1},
		{name: "repair with a higher floor", sign: 1, want: far,
			run: func(s *store) any { return s.acquire("o", minute, 0, far) }},
		{name: "replayed repair", held: true, run: func(s *store) any { return s.acquire("o", minute, 0, 5) }, sign: -1},
		{name: "replayed repair with a higher floor", held: true, sign: -1, want: far,
			run: func(s *store) any { return s.acquire("o", minute, 0, far) }},
		{name: "refresh", held: true, run: func(s *store) any { return s.refresh("o", minute, 5, 0) }, sign: 1},
		{name: "refresh with more", held: true, sign: 1, extra: 9,
			run: func(s *store) any { return s.refresh("o", minute, 5, 9) }},
		{name: "refresh with a higher top", held: true, sign: 1, want: far + 9,
			run: func(s *store) any { return s.refresh("o", minute, far, 9) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachStore(t, func(t *testing.T, s *store) {
				if c.held {
					s.set(key, "o", time.Minute)
				}
				got := c.run(s).(int64) * c.sign
				if c.want == 0 {
					s.wantSeeded(got, c.extra)
					return
				}
				s.want(got, c.want)
				s.wantCounter(c.want)
			})
		})
	}
}

// Counters stay exact, stored as plain digits and not as 1e+15, up to 2^53.
func TestLargeCountersStayExact(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		for _, start := range []int64{999_999_999_999_999, 1_000_000_000_000_001, 1_799_999_999_999_999, 1<<53 - 100} {
			s.reset()
			s.set(bucket, start, 0)
			s.want(s.acquire("o", minute, 3), start+3)
			s.wantCounter(start + 3)
			s.want(s.acquire("o", minute, 3), -(start + 3))
			s.want(s.refresh("o", minute, start+10, 2), start+12)
			s.wantCounter(start + 12)
			s.want(s.undo("o"), 1)
			s.want(s.acquire("p", minute, 0, start+20), start+20)
			s.wantCounter(start + 20)
			s.want(s.acquire("p", minute, 0, start+30), -(start + 30))
			s.wantCounter(start + 30)
		}
	})
}

// A key that holds this very owner counts as granted: full ttl again, and no new tokens (S1).
func TestAcquireAgainRestoresTheTTLAndTakesNoTokens(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.set(bucket, 100, 0)
		s.want(s.acquire("o", minute, 10), 110)
		if err := s.PExpire(t.Context(), key, 30*time.Second).Err(); err != nil {
			t.Fatal(err)
		}
		s.want(s.acquire("o", minute, 10), -110)
		s.wantTTL(minute)
		s.wantCounter(110)
	})
}

// No script shortens a ttl: a late request may carry a smaller one (S6).
func TestNoScriptShortensATTL(t *testing.T) {
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
			s.want(s.value(key), holder)
			s.wantCounter(101)
			s.want(s.acquire(holder, minute, 1), -101)
			s.want(s.undo(holder), 1)
			s.want(s.value(key), "<none>")
			s.want(s.acquire(holder, minute, 1), 102)
			s.want(s.leave(holder), 1)
			s.want(s.value(key), "<none>")
		}
	})
}

// A holder without a ttl is reported with a pttl below 0: unknown.
func TestAHolderWithoutATTLIsUnknown(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		s.set(key, "other", 0)
		for _, got := range []any{s.acquire("o", minute, 1), s.refresh("o", minute, 5, 0), s.undo("o"), s.leave("o")} {
			s.want(got, "[other -1]")
		}
	})
}

// Refreshing a key that is missing or another's writes nothing: neither ttl nor counter (S8).
func TestARefusedRefreshWritesNothing(t *testing.T) {
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

// Release and undo delete our key, and report for other cases which one it was.
func TestReleaseTellsWhatItFound(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		for _, end := range []func() any{
			func() any { return s.leave("o") },
			func() any { return s.undo("o") },
		} {
			s.reset()
			s.want(end(), 0)
			s.set(key, "other", time.Minute)
			s.wantHeld(end(), "other", minute)
			s.want(s.value(key), "other")
			s.set(key, "o", time.Minute)
			s.want(end(), 1)
			s.want(end(), 0)
		}
	})
}

// A key that is not a string is an error that begins with its code, and is not changed.
func TestAKeyOfAnotherTypeIsAnError(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		if err := s.RPush(t.Context(), key, "x").Err(); err != nil {
			t.Fatal(err)
		}
		for name, run := range map[string]func() (any, error){
			"acquire": func() (any, error) { return s.run(lua.Acquire, []string{key, bucket}, "o", minute, 1) },
			"repair":  func() (any, error) { return s.run(lua.Acquire, []string{key, bucket}, "o", minute, 0, 5) },
			"refresh": func() (any, error) { return s.run(lua.Refresh, []string{key, bucket}, "o", minute, 5, 0) },
			"release": func() (any, error) { return s.run(lua.Release, []string{key, wants}, "o", "PUBLISH", turn) },
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

// An acquire that cannot count writes nothing: a vote without tokens would block the key
// for its ttl, with nobody to hold it.
func TestABucketThatIsNoCounterLeavesNoKey(t *testing.T) {
	for name, spoil := range map[string]func(s *store){
		"list":     func(s *store) { s.RPush(context.Background(), bucket, "x") },
		"text":     func(s *store) { s.set(bucket, "many", 0) },
		"overflow": func(s *store) { s.set(bucket, strconv.FormatInt(math.MaxInt64, 10), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			eachStore(t, func(t *testing.T, s *store) {
				if name == "overflow" && !s.real {
					t.Skip("miniredis lets counters wrap")
				}
				spoil(s)
				if v, err := s.run(lua.Acquire, []string{key, bucket}, "o", minute, 1); err == nil {
					t.Errorf("granted: %v", v)
				}
				s.want(s.value(key), "<none>")
			})
		})
	}
}

// Out of memory refuses an acquire before it writes anything, and releases still work.
func TestOutOfMemoryWritesNothing(t *testing.T) {
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	s.set(bucket, 100, 0)
	s.want(s.acquire("o", minute, 1), 101)
	if err := s.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	other := []string{"lock:other", bucket}
	if v, err := s.run(lua.Acquire, other, "o", minute, 1); err == nil || !strings.HasPrefix(err.Error(), "OOM ") {
		t.Errorf("acquire: %v, %v", v, err)
	}
	s.want(s.value("lock:other"), "<none>")
	s.wantCounter(101)

	// In a batch that holds for each operation, until the first write: from then on the server lets
	// the batch write anything.
	third := []string{"lock:third", bucket}
	answers := s.batch(
		operation{lua.Acquire, other, []any{"o", minute, 1}},
		operation{lua.Undo, []string{key}, []any{"o"}},
		operation{lua.Acquire, third, []any{"o", minute, 1}},
	)
	if err, is := answers[0].(error); !is || !strings.HasPrefix(err.Error(), "OOM ") {
		t.Errorf("acquire in a batch: %v", answers[0])
	}
	s.want(s.value("lock:other"), "<none>")
	s.want(answers[1], 1)
	s.want(s.value(key), "<none>")
	if _, is := answers[2].(error); !is {
		s.want(answers[2], 102)
		s.want(s.value("lock:third"), "o")
		s.wantCounter(102)
	}
}

// The SHA under which a script is called is the one that the server computes for it.
func TestScriptsHaveTheServersSHA(t *testing.T) {
	eachStore(t, func(t *testing.T, s *store) {
		for i, script := range lua.All {
			if sha := s.ScriptLoad(t.Context(), script.Source).Val(); sha != script.SHA {
				t.Errorf("script %d: %s, want %s", i, script.SHA, sha)
			}
		}
	})
}
