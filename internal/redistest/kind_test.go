package redistest

import (
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// A kind refuses in its own words what it refuses, also of a script, and has all else executed.
func TestKindsRefuse(t *testing.T) {
	t.Parallel()
	s := StartServer(t)
	for name, tries := range map[string][]struct{ cmd, says string }{
		"redis":         {{"eval|return~redis.call('GET',ARGV[1])|1|a|b", ""}},
		"declared-keys": {{"eval|return~redis.call('GET',ARGV[1])|1|a|b", "undeclared key, key: b"}, {"get|b", ""}},
		"literal-keys": {
			{"eval|return~redis.call('GET',ARGV[1])|1|a|b", "using the KEYS array"},
			{"script|load|return~redis.call(ARGV[1],KEYS[1])", "must be a single literal string"},
			{"eval|return~redis.call('GET',KEYS[1])|2|a|b", "keys must be in same slot"},
			{"eval|return~redis.call('GET',KEYS[1])|2|a|{a}b", ""},
		},
		"no-script": {{"script|load|return~1", "unknown command 'script'"}, {"eval|return~1|0", ""}},
		"restricted": {
			{"eval|return~redis.call('OBJECT','ENCODING',KEYS[1])|1|a", "Unknown Redis command"},
			{"config|get|maxmemory", "unknown command"},
		},
		"kvrocks":   {{"info|server", "redis_version:4.0.0"}, {"eval|return~redis.call('TIME')|0", ""}},
		"envoy":     {{"subscribe|a", "unknown command"}, {"get|a", ""}},
		"twemproxy": {{"get|a", "EOF"}}, // to the HELLO of go-redis,
	} {
		kind, err := KindNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		c := newClient(t, &redis.Options{Addr: StartKind(t, kind, s.Addr()).Addr(), Protocol: 2, MaxRetries: -1},
			nil)
		for _, try := range tries {
			var cmd []any
			for _, word := range strings.Split(try.cmd, "|") {
				cmd = append(cmd, strings.ReplaceAll(word, "~", " "))
			}
			answer, err := c.Do(t.Context(), cmd...).Result()
			said, _ := answer.(string)
			fails := err != nil && !errors.Is(err, redis.Nil)
			if fails {
				said = err.Error()
			}
			if try.says == "" && fails || !strings.Contains(said, try.says) {
				t.Errorf("%s: %s: %q, want %q", name, try.cmd, said, try.says)
			}
		}
	}
	if _, err := KindNamed("no such"); err == nil || !strings.Contains(err.Error(), "redis-6.0") {
		t.Error(err)
	}
}

// slotOf are the slots of the Redis Cluster specification.
func TestSlotOf(t *testing.T) {
	for key, want := range map[string]uint16{"123456789": 12739, "{user1000}.following": 3443, "": 0} {
		if got := slotOf(key); got != want {
			t.Errorf("%q: %d, want %d", key, got, want)
		}
	}
	if slotOf("{user1000}.following") != slotOf("user1000") || slotOf("{}a") == slotOf("") {
		t.Error("a hash tag")
	}
}
