package redistest

import (
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// StartMini starts a miniredis on a free loopback port and ends it in the test's cleanup.
// Its TTLs stand still but for FastForward; after ClockTTL(true) they follow the clock.
func StartMini(tb testing.TB) *miniredis.Miniredis {
	tb.Helper()
	return miniredis.RunT(tb)
}

// MiniClient returns a go-redis client of a miniredis that listens, with default options,
// changed by the given functions in turn. It is closed in the test's cleanup.
func MiniClient(tb testing.TB, m *miniredis.Miniredis, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, &redis.Options{Addr: m.Addr()}, change)
}
