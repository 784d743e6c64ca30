package node

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A dialer that ignores its context, and hangs for as long as the server is away, costs a limited number of goroutines,
// however long that is.
func TestProbesWithADialerThatHangsDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var away atomic.Bool
		var hanging atomic.Int64
		back := make(chan struct{})
		n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if away.Load() {
					hanging.Add(1)
					<-back
					hanging.Add(-1)
				}
				return dial(ctx, network, addr)
			}
		}))
		a := newAttempt(t, n, "key")
		a.acquire().want(t, Granted)
		away.Store(true)
		m.Cut()
		a.release()
		time.Sleep(10 * time.Minute) // the bubble's time: hundreds of probes
		if got := hanging.Load(); got > maxSingleDials+maxSubscriptionDials+2*lanesPerServer {
			t.Errorf("%d dials hang", got)
		}
		away.Store(false)
		close(back)
		time.Sleep(10 * time.Second)
		newAttempt(t, n, "other").acquire().want(t, Granted)
	})
}
