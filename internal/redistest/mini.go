package redistest

import (
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
)

// StartMini starts a miniredis on a free loopback port and ends it in the test's cleanup.
// Its TTLs stand still but for FastForward; after ClockTTL(true) they follow the clock.
func StartMini(tb testing.TB) *miniredis.Miniredis {
	tb.Helper()
	m := miniredis.RunT(tb)
	p := &pushes{server: m.Server()}
	m.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
		return AnswerInfo(c, cmd, args...) || p.answer(c, cmd, args...)
	})
	return m
}

// AnswerInfo is a hook of a miniredis, called before each command, by which it reports a process and that it
// is a master, as boot.lua wants to know: it has no such sections of INFO. It reports whether it has replied.
func AnswerInfo(c *server.Peer, cmd string, args ...string) bool {
	if cmd != "INFO" || len(args) != 1 || args[0] != "server" && args[0] != "replication" {
		return false
	}
	c.WriteBulk("redis_version:7.0.15\r\nrun_id:miniredis\r\nrole:master\r\n")
	return true
}

// MiniClient returns a go-redis client of a miniredis that listens, with default options,
// changed by the given functions in turn. It is closed in the test's cleanup.
func MiniClient(tb testing.TB, m *miniredis.Miniredis, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, &redis.Options{Addr: m.Addr()}, change)
}
