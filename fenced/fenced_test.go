package fenced_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

var (
	server  = redistest.SharedServer()
	cluster = redistest.SharedCluster(3)
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := errors.Join(server.Close(), cluster.Close(), goleak.Find()); err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}

// stores are empty, and no other test has them: the tests that use them run one after the other.
func stores(t *testing.T) map[string]redis.UniversalClient {
	all := map[string]redis.UniversalClient{"mini": redistest.MiniClient(t, redistest.StartMini(t))}
	if !testing.Short() {
		all["server"] = server.Get(t).Client(t)
		all["cluster"] = cluster.Get(t).Client(t)
		for _, s := range append(cluster.Get(t).Servers(), server.Get(t)) {
			s.Do(t, "FLUSHALL")
		}
	}
	return all
}

func wantValue(t *testing.T, rdb redis.UniversalClient, key, want string) {
	t.Helper()
	got, err := rdb.Get(t.Context(), key).Result()
	if got != want || err != nil && !(want == "" && errors.Is(err, redis.Nil)) {
		t.Errorf("%q holds %q, %v; want %q", key, got, err, want)
	}
}

// A smaller token than one that has written, or deleted, writes and deletes nothing; an
// equal one does.
func TestOlderTokensAreRefused(t *testing.T) {
	for name, rdb := range stores(t) {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			for _, key := range []string{
				"k", "user:{42}:name", "{42}", "42", "a b", "\x00\xff", "{", "{}", strings.Repeat("k", 1000),
			} {
				steps := []struct {
					del   bool
					fence int64
					value string // that is there afterwards
					stale bool
				}{
					{false, 0, "0", false},
					{false, 1753964000000009, "1", false},
					{false, 0, "1", true},
					{false, 999, "1", true},
					{false, 1753964000000009, "4", false},
					{false, 1753964000000010, "5", false},
					{false, 1753964000000009, "5", true},
					{true, 1753964000000009, "5", true},
					{true, 1753964000000011, "", false},
					{false, 1753964000000010, "", true},
					{true, 1753964000000011, "", false},
					{false, math.MaxInt64 - 1, "11", false},
					{false, math.MaxInt64, "12", false},
					{false, math.MaxInt64 - 1, "12", true}, // they are one and the same as float64
				}
				if name == "cluster" && key == "{}" {
					continue // has a } and no hash tag
				}
				for i, s := range steps {
					var err error
					if s.del {
						err = fenced.Del(ctx, rdb, key, s.fence)
					} else {
						err = fenced.Set(ctx, rdb, key, i, s.fence, time.Minute)
					}
					if s.stale != errors.Is(err, fenced.ErrStale) || !s.stale && err != nil {
						t.Errorf("key %q, step %d: %v", key, i, err)
					}
					wantValue(t, rdb, key, s.value)
				}
			}
		})
	}
}

// An earlier holder's write that comes between a later one's read and its write is refused:
// the later one would overwrite it.
func TestNobodyWritesBetweenReadAndWrite(t *testing.T) {
	for name, rdb := range stores(t) {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			if _, err := fenced.Get(ctx, rdb, "k", 1); !errors.Is(err, redis.Nil) {
				t.Errorf("no value: %v", err)
			}
			if err := fenced.Set(ctx, rdb, "k", "a", 1, time.Minute); err != nil {
				t.Error(err)
			}
			if got, err := fenced.Get(ctx, rdb, "k", 2); got != "a" || err != nil {
				t.Errorf("got %q, %v", got, err)
			}
			if err := fenced.Set(ctx, rdb, "k", "ab", 1, time.Minute); !errors.Is(err, fenced.ErrStale) {
				t.Errorf("the earlier holder: %v", err)
			}
			if _, err := fenced.Get(ctx, rdb, "k", 1); !errors.Is(err, fenced.ErrStale) {
				t.Errorf("the earlier holder's read: %v", err)
			}
			if err := fenced.Set(ctx, rdb, "k", "ac", 2, time.Minute); err != nil {
				t.Error(err)
			}
			wantValue(t, rdb, "k", "ac")
		})
	}
}

// The value has the ttl that it was given, and the token outlives it; no write gives the
// token a shorter life than it has.
func TestLifetimes(t *testing.T) {
	for name, rdb := range stores(t) {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			check := func(key string, value, token time.Duration) {
				t.Helper()
				for k, want := range map[string]time.Duration{key: value, fenced.FenceKey(key): token} {
					if got := rdb.PTTL(ctx, k).Val(); got > want || got < want-time.Minute {
						t.Errorf("%q lives for %v, want %v", k, got, want)
					}
				}
			}
			set := func(key string, fence int64, ttl time.Duration) {
				t.Helper()
				if err := fenced.Set(ctx, rdb, key, "v", fence, ttl); err != nil {
					t.Error(err)
				}
			}
			set("a", 1, time.Hour)
			check("a", time.Hour, time.Hour+fenced.Keep)
			set("a", 2, 10*time.Minute)
			check("a", 10*time.Minute, time.Hour+fenced.Keep)
			if err := fenced.Del(ctx, rdb, "a", 3); err != nil {
				t.Error(err)
			}
			check("a", -2, time.Hour+fenced.Keep)
			if err := fenced.Del(ctx, rdb, "new", 3); err != nil {
				t.Error(err)
			}
			check("new", -2, fenced.Keep)
			set("b", 1, 0)
			check("b", -1, -1)
			set("b", 2, time.Hour)
			check("b", time.Hour, -1)
			get := func(key string, fence int64) {
				t.Helper()
				if _, err := fenced.Get(ctx, rdb, key, fence); err != nil && !errors.Is(err, redis.Nil) {
					t.Error(err)
				}
			}
			get("a", 4)
			check("a", -2, time.Hour+fenced.Keep)
			get("nothing", 1)
			check("nothing", -2, fenced.Keep)
			rdb.Set(ctx, "plain", "v", 5*time.Minute)
			get("plain", 1)
			check("plain", 5*time.Minute, 5*time.Minute+fenced.Keep)
			rdb.Set(ctx, "plain", "v", 0)
			get("plain", 2)
			check("plain", -1, -1)
		})
	}
}

func TestBadInput(t *testing.T) {
	rdb := redistest.MiniClient(t, redistest.StartMini(t))
	for name, err := range map[string]error{
		"empty key":            fenced.Set(t.Context(), rdb, "", "v", 1, 0),
		"read of an empty key": func() error { _, err := fenced.Get(t.Context(), rdb, "", 1); return err }(),
		"negative token":       fenced.Del(t.Context(), rdb, "k", -1),
		"negative ttl":         fenced.Set(t.Context(), rdb, "k", "v", 1, -time.Second),
		"tiny ttl":             fenced.Set(t.Context(), rdb, "k", "v", 1, time.Microsecond),
	} {
		if err == nil || errors.Is(err, fenced.ErrStale) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Writers with many tokens at once: the largest stays.
func TestTheLargestTokenWins(t *testing.T) {
	rdb := redistest.MiniClient(t, redistest.StartMini(t))
	var wg sync.WaitGroup
	for _, fence := range rand.Perm(200) {
		wg.Go(func() {
			err := fenced.Set(context.Background(), rdb, "k", fence, int64(fence), 0)
			if err != nil && !errors.Is(err, fenced.ErrStale) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	wantValue(t, rdb, "k", fmt.Sprint(199))
}

// A pipeline has no reply yet, so nothing can be said of a token: a stale write would look as if it was
// accepted, and a value that is there as if it was not.
func TestAPipelineIsRefused(t *testing.T) {
	rdb, ctx := redistest.MiniClient(t, redistest.StartMini(t)), t.Context()
	if err := fenced.Set(ctx, rdb, "k", "new", 9, time.Minute); err != nil {
		t.Fatal(err)
	}
	for _, p := range []redis.Pipeliner{rdb.Pipeline(), rdb.TxPipeline()} {
		if err := fenced.Set(ctx, p, "k", "old", 5, time.Minute); err == nil {
			t.Error("Set accepts a stale token")
		}
		if err := fenced.Del(ctx, p, "k", 5); err == nil {
			t.Error("Del accepts a stale token")
		}
		if v, err := fenced.Get(ctx, p, "k", 9); err == nil || errors.Is(err, redis.Nil) {
			t.Errorf("Get returns %q, %v", v, err)
		}
		if n := p.Len(); n != 0 {
			t.Errorf("%d commands are queued", n)
		}
	}
	err := rdb.Watch(ctx, func(tx *redis.Tx) error { // it replies at once
		return fenced.Set(ctx, tx, "k", "old", 5, time.Minute)
	})
	if !errors.Is(err, fenced.ErrStale) {
		t.Errorf("in a Watch: %v", err)
	}
	wantValue(t, rdb, "k", "new")
}

// However far a write gets that the server refuses in the middle, it leaves no value that an older
// token may overwrite afterwards.
func TestARefusedWriteLeavesNoValueWithoutItsToken(t *testing.T) {
	s := redistest.StartServer(t)
	admin := s.Client(t)
	app := s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "x" })
	ctx := t.Context()
	for name, rights := range map[string][]string{
		"the token may not be written": {"~k", "%R~{k}:fence", "+@all"},
		"nor read":                     {"~k", "+@all"},
		"the value may not be written": {"%R~k", "~{k}:fence", "+@all"},
		"no PTTL":                      {"~*", "+@all", "-pttl"},
		"no SET":                       {"~*", "+@all", "-set"},
	} {
		admin.FlushAll(ctx)
		admin.ACLSetUser(ctx, "app", "reset", "on", "nopass", "~*", "+@all")
		if err := fenced.Set(ctx, app, "k", "five", 5, time.Minute); err != nil {
			t.Fatal(err)
		}
		admin.ACLSetUser(ctx, "app", append([]string{"resetkeys", "-@all"}, rights...)...)
		if err := fenced.Set(ctx, app, "k", "seven", 7, time.Minute); err == nil {
			t.Errorf("%s: the write succeeds", name)
		}
		admin.ACLSetUser(ctx, "app", "~*", "+@all")
		seven := admin.Get(ctx, "k").Val() == "seven"
		err := fenced.Set(ctx, app, "k", "six", 6, time.Minute)
		if seven && !errors.Is(err, fenced.ErrStale) {
			t.Errorf("%s: the value of token 7 was overwritten with token 6: %v", name, err)
		}
	}
}
