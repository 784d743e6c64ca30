package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// documented is what docs/caches.md says in a line that matches.
func documented(t *testing.T, line string) []string {
	t.Helper()
	text, err := os.ReadFile("../docs/caches.md")
	testkit.Must(t, err)
	m := regexp.MustCompile("(?m)^" + line).FindStringSubmatch(string(text))
	if m == nil {
		t.Fatalf("the docs have no line as %s", line)
	}
	return strings.Fields(m[1])
}

// grant makes a user, whose password is PASSWORD.
func grant(t *testing.T, s *redistest.Server, user string, words []string) {
	t.Helper()
	args := []any{"ACL", "SETUSER", user, "reset"}
	for _, word := range words {
		args = append(args, word)
	}
	s.Do(t, args...)
}

// wantSmallest checks that use succeeds with the rule of the docs, and not without any of its commands.
func wantSmallest(t *testing.T, s *redistest.Server, user string, use func(rdb *redis.Client) error) {
	t.Helper()
	rule := documented(t, "ACL SETUSER "+user+" (.*)$")
	try := func(words []string) error {
		s.Do(t, "FLUSHALL")
		s.Do(t, "SCRIPT", "FLUSH")
		grant(t, s, user, words)
		return use(s.Client(t, func(o *redis.Options) {
			o.Username, o.Password, o.ContextTimeoutEnabled, o.MaxRetries = user, "PASSWORD", true, -1
		}))
	}
	testkit.Must(t, try(rule))
	for _, word := range rule {
		if strings.HasPrefix(word, "+") || strings.HasPrefix(word, "~") {
			without := slices.DeleteFunc(slices.Clone(rule), func(w string) bool { return w == word })
			if try(without) == nil {
				t.Errorf("nothing is refused without %s", word)
			}
		}
	}
}

// onCluster is a client of a user who has the documented rights there, of which none may be missing.
func onCluster(t *testing.T, c *redistest.Cluster, user string) *redis.ClusterClient {
	t.Helper()
	t.Cleanup(func() {
		for _, s := range c.Servers() {
			if refused := s.Refused(t); len(refused) > 0 {
				t.Errorf("refused: %v", refused)
			}
		}
	})
	for _, s := range c.Servers() {
		addition := documented(t, "On a Cluster, both need in addition: `(.*)`")
		grant(t, s, user, append(documented(t, "ACL SETUSER "+user+" (.*)$"), addition...))
	}
	return c.Client(t, func(o *redis.ClusterOptions) {
		o.Username, o.Password, o.ContextTimeoutEnabled = user, "PASSWORD", true
	})
}

// The documented rule for the values of a Cache suffices for everything, and each right is needed; and so
// does it on a Cluster, with what a Cluster needs in addition.
func TestTheDocumentedACLOfValues(t *testing.T) {
	t.Parallel()
	values, c := redistest.StartServer(t), lockClient(t)
	wantSmallest(t, values, "values", func(rdb *redis.Client) error { return useCache(t, c, values, rdb) })
	testkit.Must(t, useCache(t, c, nil, onCluster(t, cluster.Get(t), "values")))
}

// ... and with what a Local above 1s needs in addition, nothing of that is refused. Without any of it
// something is, and the Cache works as if Local were 1s.
func TestTheDocumentedACLOfHearing(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	rule := documented(t, "ACL SETUSER hearing (.*)$")
	try := func(without string) (refused bool) {
		s.Do(t, "FLUSHALL")
		s.Do(t, "ACL", "LOG", "RESET")
		words := slices.Concat(documented(t, "ACL SETUSER values (.*)$"), rule)
		words = slices.DeleteFunc(words, func(w string) bool { return w == without })
		grant(t, s, "values", append([]string{"resetchannels"}, words...))
		rdb := s.Client(t, honouring, func(o *redis.Options) { o.Username, o.Password = "values", "PASSWORD" })
		load := func(context.Context, string) (string, error) { return "v", nil }
		var log testkit.LogBuffer
		o := lockkit.Patient
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c := lockkit.Open(t, o, "redis://"+lockServer.Get(t).Addr())
		cache := newCache(t, c, rdb, fetch.Each(load), options{
			Name: "user", Fresh: time.Hour, Local: time.Hour, LookupTimeout: 10 * time.Second,
		})
		for cache.Stats().LocalHits == 0 || !refused && without != "" {
			want(t, "k", "v", cache)
			time.Sleep(10 * time.Millisecond)
			refused = len(s.Refused(t)) > 0
		}
		if without == "+client|tracking" || without == rule[0] { // its key
			wantDeaf(t, &log)
		}
		for before := cache.Stats().LocalHits; without == "" && cache.Stats().LocalHits == before; {
			want(t, "k", "v", cache)
			time.Sleep(1200 * time.Millisecond)
			before = cache.Stats().LocalHits
			want(t, "k", "v", cache)
		}
		testkit.Must(t, cache.Close(t.Context()))
		return len(s.Refused(t)) > 0
	}
	if try("") {
		t.Errorf("refused: %v", s.Refused(t))
	}
	for _, word := range rule {
		if !try(word) {
			t.Errorf("nothing is refused without %s", word)
		}
	}
}

// useCache does everything that a Cache does, and returns what is refused.
func useCache(t *testing.T, c *flightlock.Client, s *redistest.Server, rdb redis.UniversalClient) error {
	t.Helper()
	var mu sync.Mutex
	var all error
	refused := func(doing string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			all = errors.Join(all, fmt.Errorf("%s: %w", doing, err))
		}
	}
	load := func(context.Context, string) (string, error) { return "v", nil }
	users := newCache(t, c, rdb, fetch.Each(load), options{
		Name: "user", Fresh: time.Millisecond, Stale: time.Minute, StaleWait: 10 * time.Second,
		LookupTimeout: 10 * time.Second,
		Tags:          func(string, string) []string { return []string{"t"} },
		LoadTimeout:   10 * time.Minute, // longer than an entry, which gets more time before it is loaded anew
		ErrorHold:     -1,
		OnError:       func(_, op string, err error) { refused(op, err) },
	})
	ctx := t.Context()
	for range 2 { // the second one finds a stale value
		_, err := users.Get(ctx, "42")
		refused("Get", err)
		time.Sleep(2 * time.Millisecond) // until it is stale
	}
	_, err := users.GetMany(ctx, []string{"42", "43"})
	refused("GetMany", err)
	refused("Set", users.Set(ctx, "42", "w"))
	refused("Refresh", users.Refresh(ctx, "42"))
	refused("InvalidateTag", users.InvalidateTag(ctx, "t"))
	refused("Clear", users.Clear(ctx, nil))
	refused("Expire", users.Expire(ctx, "42"))
	refused("Invalidate", users.Invalidate(ctx, "42", "43"))
	if s != nil { // also if the server is full
		s.Do(t, "CONFIG", "SET", "maxmemory", "1")
		refused("Invalidate on a full server", users.Invalidate(ctx, "42"))
		s.Do(t, "CONFIG", "SET", "maxmemory", "0")
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	_ = users.Close(gone)
	mu.Lock()
	defer mu.Unlock()
	return all
}

// ... and so does that for package fenced; on a Cluster also while the value's slot moves.
func TestTheDocumentedACLOfFencedValues(t *testing.T) {
	t.Parallel()
	wantSmallest(t, redistest.StartServer(t), "fenced",
		func(rdb *redis.Client) error { return useFenced(t, rdb) })
	values := redistest.StartCluster(t, 3)
	rdb := onCluster(t, values, "fenced")
	testkit.Must(t, useFenced(t, rdb))
	testkit.Must(t, fenced.Set(t.Context(), rdb, "user:42", "v", 4, time.Minute))
	from, to := values.MasterOf(t, "user:42"), values.Servers()[0]
	if to == from {
		to = values.Servers()[1]
	}
	values.SetMigrating(t, values.SlotOf(t, "user:42"), from, to)
	values.MigrateKeys(t, from, to, "user:42", fenced.FenceKey("user:42"))
	testkit.Must(t, fenced.Set(t.Context(), rdb, "user:42", "v", 5, time.Minute)) // while the slot moves
}

// useFenced does everything that package fenced does, and returns what is refused.
func useFenced(t *testing.T, rdb redis.UniversalClient) error {
	t.Helper()
	ctx := t.Context()
	err := errors.Join(fenced.Set(ctx, rdb, "user:42", "v", 1, time.Minute), rdb.Get(ctx, "user:42").Err())
	_, e := fenced.Get(ctx, rdb, "user:42", 2)
	return errors.Join(err, e, fenced.Del(ctx, rdb, "user:42", 3))
}
