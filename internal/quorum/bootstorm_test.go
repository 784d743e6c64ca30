package quorum

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// While most nodes are in quarantine because they have lost all their data, and one has not, each of many clients reads
// them once per second or so: another client that establishes the nodes has done so long before.
func TestNodesInQuarantineAreReadNowAndThen(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		var dials [3]atomic.Int64
		var conns []redis.UniversalClient
		for i, m := range r.mem {
			conns = append(conns, m.Client(t, func(o *redis.Options) {
				dial := o.Dialer
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					dials[i].Add(1)
					return dial(ctx, network, addr)
				}
			}))
		}
		c := newClient(t, "c", conns)
		c.guard(time.Minute)
		c.tryAndRelease(key, ttl)
		r.mostForget(c)
		if c.q.Quarantined(0) || !c.q.Quarantined(1) || !c.q.Quarantined(2) {
			t.Fatal("the wrong nodes are in quarantine")
		}
		for i := range dials {
			dials[i].Store(0)
		}
		const seconds = 10
		time.Sleep(seconds * time.Second) // the bubble's time
		for i := range dials {
			if n := dials[i].Load(); n > 2*seconds {
				t.Errorf("node %d: %d dials in %d s", i, n, seconds)
			}
		}
	})
}

// mostForget has all nodes but the first lose their data, and c notice it.
func (r *rig) mostForget(c *client) {
	for _, m := range r.mem[1:] {
		m.Mini.FlushAll()
	}
	for range 2 {
		c.tryAndRelease(key, ttl)
	}
	time.Sleep(5 * time.Second) // the bubble's time
}
