package rediscache_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// documentedRights are the words of an ACL rule in docs/caches.md, with "pw" as the password.
func documentedRights(t *testing.T, user string) []string {
	t.Helper()
	text, err := os.ReadFile("../docs/caches.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?m)^ACL SETUSER " + user + " (.*)$").FindStringSubmatch(string(text))
	if m == nil {
		t.Fatalf("no rule for %s in the docs", user)
	}
	return strings.Fields(strings.Replace(m[1], "PASSWORD", "pw", 1))
}

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
	rule := documentedRights(t, user)
	try := func(words []string) error {
		s.Do(t, "FLUSHALL")
		s.Do(t, "SCRIPT", "FLUSH")
		grant(t, s, user, words)
		return use(s.Client(t, func(o *redis.Options) {
			o.Username, o.Password, o.ContextTimeoutEnabled, o.MaxRetries = user, "pw", true, -1
		}))
	}
	if err := try(rule); err != nil {
		t.Fatal(err)
	}
	for _, word := range rule {
		if strings.HasPrefix(word, "+") || strings.HasPrefix(word, "~") {
			without := slices.DeleteFunc(slices.Clone(rule), func(w string) bool { return w == word })
			if try(without) == nil {
				t.Errorf("nothing is refused without %s", word)
			}
		}
	}
}

// The documented rule for the values of a Cache suffices for everything, and each right is needed.
func TestTheDocumentedACLOfValues(t *testing.T) {
	t.Parallel()
	values, c := redistest.StartServer(t), lockClient(t)
	wantSmallest(t, values, "values", func(rdb *redis.Client) error { return useCache(t, c, values, rdb) })
}

// useCache does everything that a Cache does, and returns what is refused.
func useCache(t *testing.T, c *flightlock.Client, s *redistest.Server, rdb redis.UniversalClient) (err error) {
	t.Helper()
	var mu sync.Mutex
	refused := func(doing string, e error) {
		mu.Lock()
		defer mu.Unlock()
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", doing, e))
		}
	}
	load := func(context.Context, string) (string, error) { return "v", nil }
	users, e := rediscache.New(c, rdb, fetch.Each(load), options{
		Name: "user", Fresh: time.Millisecond, Stale: time.Minute, StaleWait: 10 * time.Second,
		LookupTimeout: 10 * time.Second,
		LoadTimeout:   10 * time.Minute, // longer than an entry, which gets more time before it is loaded anew
		ErrorHold:     -1,
		OnError:       func(_, op string, e error) { refused(op, e) },
	})
	if e != nil {
		t.Fatal(e)
	}
	ctx := t.Context()
	for range 2 { // the second one finds a stale value
		_, e = users.Get(ctx, "42")
		refused("Get", e)
		time.Sleep(2 * time.Millisecond) // until it is stale
	}
	_, e = users.GetMany(ctx, []string{"42", "43"})
	refused("GetMany", e)
	refused("Set", users.Set(ctx, "42", "w"))
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
	return err
}

// ... and on a Cluster, with what a Cluster needs in addition.
func TestTheDocumentedACLOfValuesOnACluster(t *testing.T) {
	t.Parallel()
	values, c := cluster.Get(t), lockClient(t)
	for _, s := range values.Servers() {
		grant(t, s, "values", append(documentedRights(t, "values"), "+cluster|slots", "+asking", "+command"))
	}
	rdb := values.Client(t, func(o *redis.ClusterOptions) {
		o.Username, o.Password, o.ContextTimeoutEnabled = "values", "pw", true
	})
	if err := useCache(t, c, nil, rdb); err != nil {
		t.Error(err)
	}
	for _, s := range values.Servers() {
		if refused := s.Refused(t); len(refused) > 0 {
			t.Errorf("refused: %v", refused)
		}
	}
}

// ... and so does that for package fenced.
func TestTheDocumentedACLOfFencedValues(t *testing.T) {
	t.Parallel()
	wantSmallest(t, redistest.StartServer(t), "fenced", func(rdb *redis.Client) error { return useFenced(t, rdb) })
}

// useFenced does everything that package fenced does, and returns what is refused.
func useFenced(t *testing.T, rdb redis.UniversalClient) error {
	t.Helper()
	ctx := t.Context()
	err := errors.Join(fenced.Set(ctx, rdb, "user:42", "v", 1, time.Minute), rdb.Get(ctx, "user:42").Err())
	_, e := fenced.Get(ctx, rdb, "user:42", 2)
	return errors.Join(err, e, fenced.Del(ctx, rdb, "user:42", 3))
}

// ... and on a Cluster, also while the value's slot moves: with what the docs say that both need in addition.
func TestTheDocumentedACLOfFencedValuesOnACluster(t *testing.T) {
	t.Parallel()
	values := redistest.StartCluster(t, 3)
	text, err := os.ReadFile("../docs/caches.md")
	if err != nil {
		t.Fatal(err)
	}
	addition := regexp.MustCompile("(?m)^On a Cluster, both need in addition: `(.*)`").FindStringSubmatch(string(text))
	if addition == nil {
		t.Fatal("the docs do not say what fenced values need on a Cluster")
	}
	for _, s := range values.Servers() {
		grant(t, s, "fenced", append(documentedRights(t, "fenced"), strings.Fields(addition[1])...))
	}
	rdb := values.Client(t, func(o *redis.ClusterOptions) { o.Username, o.Password = "fenced", "pw" })
	if err := useFenced(t, rdb); err != nil {
		t.Error(err)
	}
	from := values.MasterOf(t, "user:42")
	to := values.Servers()[0]
	if to == from {
		to = values.Servers()[1]
	}
	slot := values.SlotOf(t, "user:42")
	if err := fenced.Set(t.Context(), rdb, "user:42", "v", 4, time.Minute); err != nil {
		t.Fatal(err)
	}
	values.SetMigrating(t, slot, from, to)
	values.MigrateKeys(t, from, to, "user:42", fenced.FenceKey("user:42"))
	if err := fenced.Set(t.Context(), rdb, "user:42", "v", 5, time.Minute); err != nil {
		t.Errorf("while the slot moves: %v", err)
	}
	for _, s := range values.Servers() {
		if refused := s.Refused(t); len(refused) > 0 {
			t.Errorf("refused: %v", refused)
		}
	}
}
