package redistest

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// SilenceRedis keeps go-redis' log, which has a line per refused dial, out of a test's output. It is
// for TestMain.
func SilenceRedis() { redis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// Client is a client to f whose failed dials fail at once. It is closed when the test ends.
func (f *Fake) Client(tb testing.TB, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, &redis.Options{Addr: f.Addr(), DialerRetries: 1}, change)
}

// WithoutMaintenance has failed dials fail at once, and no maintenance notifications: for those,
// go-redis has two goroutines for each master that it knows and has not dialed.
func WithoutMaintenance(o *redis.ClusterOptions) {
	o.DialerRetries = 1
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// CountDials makes n count the dials of a client.
func CountDials(n *atomic.Int64) func(*redis.Options) {
	return Dials(func(dial Dialer) Dialer {
		return func(ctx context.Context, network, addr string) (net.Conn, error) {
			n.Add(1)
			return dial(ctx, network, addr)
		}
	})
}
