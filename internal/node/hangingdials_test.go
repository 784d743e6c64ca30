package node

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
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

// What waits behind a request that got no connection fails with it, and does not wait for another dial, also where
// NodeTimeout is so long that the server is not suspended yet.
func TestOneDialThatHangsIsEnoughForAllThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t, func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		}), conn.DialTimeout, false)
		first := newAttempt(t, n, "key").acquire()
		synctest.Wait() // it is dialled for
		var behind []*ear
		for range 3 * maxBatch {
			behind = append(behind, newAttempt(t, n, "key").acquire())
		}
		first.want(t, Failed)
		synctest.Wait()
		if n.Suspended() {
			t.Error("the server is suspended")
		}
		for i, e := range behind {
			if e.n.Load() != 1 {
				t.Fatalf("%d of %d have failed", i, len(behind))
			}
		}
	})
}
