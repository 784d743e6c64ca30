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

// A halting connection reads the first byte of an answer as it comes, and the rest after a pause.
type halting struct {
	net.Conn
	pause *atomic.Int64 // 0: none
	begun bool
}

func (h *halting) Read(p []byte) (int, error) {
	pause := time.Duration(h.pause.Load())
	if pause == 0 || len(p) == 0 {
		return h.Conn.Read(p)
	}
	if h.begun = !h.begun; h.begun {
		return h.Conn.Read(p[:1])
	}
	time.Sleep(pause) // the bubble's time
	return h.Conn.Read(p)
}

// A server is not blamed for an answer of which a part has arrived in time: mostly the rest has as well, and waits for
// this process.
func TestAnAnswerThatHasBegunIsNotLate(t *testing.T) {
	const timeout = 50 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var pause atomic.Int64
		n := startNode(t, m.Client(t, func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := m.Dial(ctx, network, addr)
				return &halting{Conn: c, pause: &pause}, err
			}
		}), timeout, false)
		held := newAttempt(t, n, "k")
		held.acquire().want(t, Granted)
		pause.Store(int64(2 * timeout))
		held.refresh().want(t, Renewed)
		pause.Store(0)
		if n.Suspended() {
			t.Error("the server is suspended")
		}
	})
}
