package pubsub

import (
	"context"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	goleak.VerifyTestMain(m)
}

// patience is for what must happen; a loaded machine may need some of it.
const patience = 20 * time.Second

// newSubs makes the subscriptions of a node. Both end with the test, before their client.
func newSubs(t *testing.T, c redis.UniversalClient) *Subscriptions {
	t.Helper()
	n, err := node.New(c, 50*time.Millisecond, false)
	if err != nil {
		t.Fatal(err)
	}
	subs := New(n, func(string) {})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := subs.Close(ctx); err != nil {
			t.Error(err)
		}
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return subs
}

func clusterSubs(t *testing.T, c *redistest.Cluster) *Subscriptions {
	t.Helper()
	return newSubs(t, c.Client(t))
}

// at points a client at addr instead, a proxy for example.
func at(addr string) func(*redis.Options) {
	return func(o *redis.Options) { o.Addr = addr }
}

// quick makes failed dials fail at once.
func quick(o *redis.Options) { o.DialerRetries = 1 }
