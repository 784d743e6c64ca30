package redistest

import (
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// errorOf sends a command to one node without following redirects.
func errorOf(t *testing.T, s *Server, args ...any) string {
	t.Helper()
	c := s.Client(t, plain)
	err := c.Do(t.Context(), args...).Err()
	if err == nil || errors.Is(err, redis.Nil) {
		return ""
	}
	return err.Error()
}

// A slot can be moved step by step, and each step gives its own answer.
func TestClusterAnswersMovedAskAndTryAgain(t *testing.T) {
	c := StartCluster(t, 3)
	from, to := c.Servers()[0], c.Servers()[1]
	client := c.Client(t)
	tag := c.KeyOn(t, from, "tag")
	key, other := "{"+tag+"}1", "{"+tag+"}2"
	slot := c.SlotOf(t, key)
	for _, k := range []string{key, other} {
		if err := client.Set(t.Context(), k, "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(s *Server, prefix string, args ...any) {
		t.Helper()
		if got := errorOf(t, s, args...); !strings.HasPrefix(got, prefix) || prefix == "" && got != "" {
			t.Errorf("%v: got %q, want %q", args, got, prefix)
		}
	}
	expect(from, "", "GET", key)
	expect(to, "MOVED", "GET", key)

	c.SetMigrating(t, slot, from, to)
	expect(from, "", "GET", key)
	expect(from, "ASK", "GET", "{"+tag+"}absent")

	c.MigrateKeys(t, from, to, key)
	expect(from, "ASK", "GET", key)
	expect(from, "TRYAGAIN", "MGET", key, other)
	if got, err := client.Get(t.Context(), key).Result(); got != "v" {
		t.Errorf("a client that follows ASK: %q, %v", got, err)
	}

	c.FinishMigration(t, slot, from, to)
	expect(from, "MOVED", "GET", other)
	expect(to, "", "MGET", key, other)
	if c.MasterOf(t, key) != to {
		t.Error("MasterOf does not know")
	}
	if got, err := client.Get(t.Context(), other).Result(); got != "v" {
		t.Errorf("a client that follows MOVED: %q, %v", got, err)
	}

	rest := c.Servers()[2]
	k := c.KeyOn(t, rest, "rest")
	if err := from.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := c.MasterOf(t, k); got != rest {
		t.Errorf("MasterOf with a dead first master: %s", got.Addr())
	}
	if err := client.Set(t.Context(), k, "v", 0).Err(); err != nil {
		t.Errorf("the slots of the others are not served: %v", err)
	}
}

// A cluster of one master is a cluster, with args of the caller's.
func TestClusterOfOne(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 1, "--maxmemory", "64mb")
	if got := c.MasterOf(t, "k"); got != c.Servers()[0] {
		t.Error(got.Addr())
	}
	if err := c.Client(t).Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Error(err)
	}
}
