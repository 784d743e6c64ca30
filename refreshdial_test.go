package flightlock_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A refresh that has to wait for a connection that nobody accepts ends when the dial does.
func TestRefreshEndsWithADial(t *testing.T) {
	bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
		var hangs atomic.Bool
		var conns []net.Conn
		rdb := nodes[0].Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if hangs.Load() {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				conn, err := dial(ctx, network, addr)
				conns = append(conns, conn)
				return conn, err
			}
		})
		c := newClient(t, flightlock.Options{}, rdb)
		l := mustLock(t, c, "k", time.Minute)
		hangs.Store(true)
		for _, conn := range conns {
			_ = conn.Close()
		}
		for range 3 {
			began := time.Now()
			err := l.Refresh(t.Context())
			if took := time.Since(began); err == nil || took > 2*time.Second {
				t.Errorf("%v after %v", err, took)
			}
		}
		hangs.Store(false)
		time.Sleep(10 * time.Second)
		must(t, l.Release(t.Context()))
	})
}
