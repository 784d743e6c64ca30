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

// debtsRest has n owe many releases to m, which is away, and checks that they are not tried all the time, but sent at
// once when it is back.
func debtsRest(t *testing.T, n *Node, m *redistest.MemNode, away func(bool), triesPerSecond float64) {
	t.Helper()
	var tries atomic.Int64
	route := n.route
	n.route = func(r *request) { tries.Add(1); route(r) }
	const debts, seconds = 300, 20
	all := make([]*attempt, debts)
	for i := range all {
		all[i] = newAttempt(t, n, fmt.Sprint("key-", i))
		all[i].acquire().want(t, Granted)
	}
	away(true)
	for _, a := range all {
		a.release()
	}
	time.Sleep(2 * time.Second) // the bubble's time, as below
	tries.Store(0)
	time.Sleep(seconds * time.Second)
	if got, limit := tries.Load(), int64(debts*seconds*triesPerSecond); got > limit {
		t.Errorf("%d tries of %d debts in %d s, want %d at most", got, debts, seconds, limit)
	}
	if got := n.Debts(); got != debts {
		t.Errorf("%d debts", got)
	}
	away(false)
	time.Sleep(time.Second)
	if got := n.Debts(); got != 0 {
		t.Errorf("%d debts a second after the node was back", got)
	}
	for i := range all {
		if key := fmt.Sprint("key-", i); m.Mini.Exists(key) {
			t.Errorf("%s is still there", key)
		}
	}
}

// Nothing is sent to a suspended server before its probe is answered. What is owed to it must not be tried all the time
// meanwhile, for there may be tens of thousands of debts, and is sent at once when it is back.
func TestDebtsRestWhileTheServerIsSuspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t))
		debtsRest(t, n, m, func(on bool) {
			if !on && !n.Suspended() {
				t.Error("the node was not suspended")
			}
			m.Down(on)
		}, 1./4)
	})
}

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

// A server that answers probes and nothing else is back again and again.
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
		debtsRest(t, n, m, cutOff.Store, 1./2)
	})
}

// They end with the ttl all the same.
func TestDebtsToASuspendedServerEndWithTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t))
		a := newAttempt(t, n, "key")
		e := newEar()
		a.Acquire(&a.buf, e, 7*time.Second, 1, 0, false)
		e.want(t, Granted)
		m.Down(true)
		a.release()
		time.Sleep(6 * time.Second)
		if got := n.Debts(); got != 1 {
			t.Errorf("%d debts before the ttl is over", got)
		}
		time.Sleep(1500 * time.Millisecond)
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts after the ttl", got)
		}
	})
}

// A release that has met the suspended server, and becomes a debt when that is back and has sent its
// debts, is sent too.
func TestADebtThatMissedTheReturnIsSentAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t))
		a := newAttempt(t, n, "key")
		a.acquire().want(t, Granted)
		a.mu.Lock()
		a.released, a.releasePending = true, true
		a.mu.Unlock()
		a.releaseAgain().complete(failed(suspendedFor(errMute)), notSent)
		time.Sleep(time.Second)
		if m.Mini.Exists("key") || n.Debts() != 0 {
			t.Errorf("%d debts, or the key is still there", n.Debts())
		}
	})
}
