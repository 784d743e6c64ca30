package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// probesOnly is a connection through a proxy that answers PING, and, while it is cut off from the server, hangs up
// at everything else.
type probesOnly struct {
	net.Conn
	cutOff *atomic.Bool
}

func (c probesOnly) Write(p []byte) (int, error) {
	if c.cutOff.Load() && bytes.Contains(bytes.ToUpper(p), []byte("EVALSHA")) {
		_ = c.Close()
		return 0, errors.New("hung up")
	}
	return c.Conn.Write(p)
}

// A server that answers probes and nothing else is back again and again. What is owed to it, which may be tens of
// thousands of releases, is not tried each time, and is sent at once when it answers.
func TestDebtsRestWhileTheServerAnswersProbesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var cutOff atomic.Bool
		n := newImpatientNode(t, m.Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := dial(ctx, network, addr)
				return probesOnly{c, &cutOff}, err
			}
		}))
		var tries atomic.Int64
		route := n.route
		n.route = func(r *request) { tries.Add(1); route(r) }
		const debts = 300
		all := make([]*attempt, debts)
		for i := range all {
			all[i] = newAttempt(t, n, fmt.Sprint("key-", i))
			all[i].acquire().want(t, Granted)
		}
		cutOff.Store(true)
		for _, a := range all {
			a.release()
		}
		time.Sleep(2 * time.Second) // the bubble's time, as below
		tries.Store(0)
		const seconds = 20
		time.Sleep(seconds * time.Second)
		if got, limit := tries.Load(), int64(debts*seconds/2); got > limit {
			t.Errorf("%d tries of %d debts in %d s, want %d at most", got, debts, seconds, limit)
		}
		if got := n.Debts(); got != debts {
			t.Errorf("%d debts", got)
		}
		cutOff.Store(false)
		time.Sleep(time.Second)
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts a second after the node was back", got)
		}
	})
}
