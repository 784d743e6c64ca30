package quorum

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A refresh whose lease runs out in the very moment in which it begins ends, once, and without a race.
func TestARefreshThatBeginsAtTheEndOfItsLease(t *testing.T) {
	conn := redis.NewClient(&redis.Options{Addr: redistest.RefusedAddr(t), DialerRetries: 1})
	t.Cleanup(func() { _ = conn.Close() })
	c := newClient(t, "x", []redis.UniversalClient{conn})
	for range 500 {
		l := &Lease{}
		c.q.Prepare(l, key, ttl, 1, "")
		ended := make(chan bool, 2)
		r := l.newRound("refresh", node.Renewed, 0, func(r *round) { ended <- r.won })
		r.endAt(time.Now())
		if <-ended {
			t.Fatal("it was won")
		}
	}
}
