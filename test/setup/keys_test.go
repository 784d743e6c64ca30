package setup

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Another client's key may live longer than a time.Duration can hold. That is neither "unknown" nor
// "in a moment": a waiter does not poll for it again and again.
func TestAKeyThatLivesForEver(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	c := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patience, DisableNotify: true}, s.Client(t))
	for i, ms := range []int64{9223372036855, 18446744073710, 18446744073710 * 2, math.MaxInt64 / 2} {
		key := string(rune('a' + i))
		s.Do(t, "SET", "lock:"+key, "somebody's", "PX", ms)
		before := c.Stats().Commands
		_, err := c.SingleFlightLock(t.Context(), key, time.Minute,
			flightlock.LimitedRetry(200*time.Millisecond, 1))
		var q *flightlock.QuorumError
		if !errors.Is(err, flightlock.ErrNotAcquired) || !errors.As(err, &q) ||
			q.Nodes[0].HolderTTL < math.MaxInt64-time.Minute {
			t.Errorf("a holder for %d ms: %v", ms, err)
		}
		if n := c.Stats().Commands - before; n > 10 { // a poll each 50ms
			t.Errorf("a holder for %d ms: %d commands in 200ms", ms, n)
		}
	}
}

// A lock key that already holds a list is an error at once, and the list is left alone.
func TestAKeyThatHoldsAList(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	servers[0].Do(t, "RPUSH", "lock:k", "x")
	c := lockkit.New(t, flightlock.Options{}, nodes...)
	_, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGTYPE") {
		t.Errorf("got %v", err)
	}
	if got := servers[0].Do(t, "LLEN", "lock:k"); got != int64(1) {
		t.Errorf("the list has %v entries", got)
	}
}

// Keys of any bytes, up to 4 KiB, lock and unlock, on a Cluster too: fence bucket and lock
// key share a slot.
func TestKeysOfAnyBytes(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	for name, node := range map[string]redis.UniversalClient{
		"standalone": redistest.StartServer(t).Client(t), "cluster": cluster.Client(t),
	} {
		for _, prefix := range []string{"", "{", "}{", "a{b}c:", "none"} {
			opts := flightlock.Options{KeyPrefix: prefix, NodeTimeout: lockkit.Patience}
			if prefix == "none" {
				opts.KeyPrefix, opts.NoPrefix = "", true
			}
			c := lockkit.New(t, opts, node)
			keys := []string{"k", "{", "}", "{}", "{}x", "a{b}c", "{{b}}", "\x00", "\xff\xfe{\x01}", "\r\n",
				strings.Repeat("k", 4096)}
			for range 30 {
				b := make([]byte, 1+rand.IntN(40))
				for i := range b {
					b[i] = byte(rand.Int())
				}
				keys = append(keys, string(b))
			}
			for _, key := range keys {
				l, err := c.TryLock(t.Context(), key, time.Minute)
				if err != nil {
					t.Errorf("%s, prefix %q, key %q: %v", name, prefix, key, err)
					continue
				}
				if err := l.Refresh(t.Context()); err != nil {
					t.Errorf("%s, prefix %q, key %q: %v", name, prefix, key, err)
				}
				lockkit.Release(t, l)
			}
		}
	}
}
