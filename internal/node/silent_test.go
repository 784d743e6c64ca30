package node

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A droppable is a connection that something in between can drop without a word: what is written vanishes.
type droppable struct {
	net.Conn
	dropped *atomic.Bool
}

func (d droppable) Write(p []byte) (int, error) {
	if d.dropped.Load() {
		return len(p), nil
	}
	return d.Conn.Write(p)
}

// A connection that was dropped without a word, by what is between this process and a server that answers others, is
// given up long before it times out: until then its keys could not be refreshed. The server answers a probe, for
// which it is suspended first, or the other lane.
func TestAConnectionThatWasDroppedSilentlyIsGivenUp(t *testing.T) {
	const timeout = 50 * time.Millisecond
	for _, others := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := redistest.StartMemNode(t, "10.0.0.1:6379")
			current := new(atomic.Bool)
			through := func(o *redis.Options) {
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := m.Dial(ctx, network, addr)
					return droppable{c, current}, err
				}
			}
			n := startNode(t, m.Client(t, through), timeout, false)
			var told changes
			n.Changed = told.add
			held := newAttempt(t, n, "k")
			held.acquire().want(t, Granted)
			synctest.Wait()
			dropped := current
			current = new(atomic.Bool) // of connections that are dialled from now on
			dropped.Store(true)
			held.refresh().want(t, Failed)
			for i := range 60 { // for six times NodeTimeout
				if a := newAttempt(t, n, fmt.Sprint("k", i)); others && a.lane() != held.lane() {
					a.acquire().want(t, Granted)
				}
				time.Sleep(timeout / 10) // the bubble's time
			}
			held.refresh().want(t, Renewed)
			told.mu.Lock()
			defer told.mu.Unlock()
			if got := len(told.all); others != (got == 0) || n.Suspended() {
				t.Errorf("others ask it: %v; %d changes were reported; suspended: %v", others, got, n.Suspended())
			}
		})
	}
}

// Connections of a server that answers late, and in order, are not given up, whichever of them is answered first.
func TestConnectionsOfALateServerAreKept(t *testing.T) {
	const timeout = 50 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), timeout, false)
		for i := range 20 { // all lanes have a connection
			newAttempt(t, n, fmt.Sprint("warm", i)).acquire().want(t, Granted)
		}
		s := n.servers[0]
		var before []*conn.Conn
		for i := range s.lanes {
			before = append(before, s.lanes[i].conn.Load())
		}
		m.SetDelay(4 * timeout) // a round trip takes two
		for i := range 200 {
			newAttempt(t, n, fmt.Sprint("k", i)).acquire()
			time.Sleep(timeout / 3) // the bubble's time
		}
		for i := range s.lanes {
			if s.lanes[i].conn.Load() != before[i] {
				t.Errorf("lane %d has another connection", i)
			}
		}
		m.SetDelay(0)
	})
}
