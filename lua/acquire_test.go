package lua_test

import (
	"context"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// A free key is granted with a block of tokens, and counters continue from grant to grant.
func TestAcquireGrantsABlock(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
		{name: "grant of a block", run: func(s *store) any {
			return s.acquire("o", minute, 50)
		}, sign: 1, extra: 50},
		{name: "replay", held: true, run: func(s *store) any { return s.acquire("o", minute, 50) }, sign: -1},
		{name: "repair", run: func(s *store) any { return s.acquire("o", minute, 0, 5) }, sign: 1},
		{name: "repair with a higher floor", sign: 1, want: far,
			run: func(s *store) any { return s.acquire("o", minute, 0, far) }},
		{name: "replayed repair", held: true, run: func(s *store) any {
			return s.acquire("o", minute, 0, 5)
		}, sign: -1},
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
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		for _, start := range []int64{999_999_999_999_999, 1_000_000_000_000_001, 1_799_999_999_999_999,
			1<<53 - 100} {
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
	t.Parallel()
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

// A holder without a ttl is reported with a pttl below 0: unknown.
func TestAHolderWithoutATTLIsUnknown(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *store) {
		s.set(key, "other", 0)
		for _, got := range []any{
			s.acquire("o", minute, 1), s.refresh("o", minute, 5, 0), s.undo("o"), s.leave("o"), s.done("o"),
		} {
			s.want(got, "[other -1]")
		}
	})
}

// An acquire that cannot count writes nothing: a vote without tokens would block the key
// for its ttl, with nobody to hold it.
func TestABucketThatIsNoCounterLeavesNoKey(t *testing.T) {
	t.Parallel()
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
				if v, err := s.run(lua.Acquire, alone, anyEpoch("o", minute, 1)...); err == nil {
					t.Errorf("granted: %v", v)
				}
				s.want(s.value(key), "<none>")
			})
		})
	}
}

// Out of memory refuses an acquire before it writes anything, and releases still work.
func TestOutOfMemoryWritesNothing(t *testing.T) {
	t.Parallel()
	s := &store{t: t, Client: redistest.StartServer(t).Client(t), real: true}
	s.set(bucket, 100, 0)
	s.want(s.acquire("o", minute, 1), 101)
	if err := s.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	other := []string{"lock:other", bucket, lua.Marker}
	v, err := s.run(lua.Acquire, other, anyEpoch("o", minute, 1)...)
	if err == nil || !strings.HasPrefix(err.Error(), "OOM ") {
		t.Errorf("acquire: %v, %v", v, err)
	}
	s.want(s.value("lock:other"), "<none>")
	s.wantCounter(101)
	s.want(s.undo("o"), 1)
	s.want(s.value(key), "<none>")
}

// Whatever command of its own acquire may not run, with a bucket that is missing: it fails, and as
// soon as the command is allowed again the bucket begins at the node's clock, not where a failed
// vote has left it.
func TestARefusedCommandLeavesNoCounterBelowTheClock(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := server(t)
	admin := s.Client(t)
	for _, command := range []string{"set", "get", "incrby", "time", "pttl", "del", "pexpire"} {
		admin.FlushAll(ctx)
		admin.ACLSetUser(ctx, "app", "reset", "on", "nopass", "~*", "&*", "+@all", "-"+command)
		app := s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "x" })
		acquire := func(owner string) (any, error) {
			return app.Eval(ctx, lua.Acquire.Source, alone, anyEpoch(owner, minute, 1)...).Result()
		}
		_, _ = acquire("first")
		admin.ACLSetUser(ctx, "app", "+@all")
		admin.Del(ctx, key) // its ttl would end it, or its release
		began := time.Now().Add(-time.Second)
		got, err := acquire("second")
		if err != nil {
			t.Fatal(err)
		}
		if c, _ := got.(int64); c < began.UnixMicro() {
			t.Errorf("once without %s, the next token is %v, far below the clock", strings.ToUpper(command), got)
		}
	}
}
