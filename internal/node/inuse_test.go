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

// A lane's connection is the one that it uses, even if another dial of it ends while it is in use.
func TestALaneKnowsTheConnectionThatIsInUseWhenAnotherDialEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var second secondDial
		n := newAlone(t, m.Client(t, second.takes(time.Second)), 100*time.Millisecond) // its SYN is lost
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		l := a.lane()
		_ = (<-second.dialled).Close()
		newAttempt(t, n, "k").acquire().want(t, Failed) // and go-redis drops the connection
		synctest.Wait()
		n.servers[0].fast.Store(true)
		newAttempt(t, n, "k").acquireHere().want(t, Held)
		used := l.conn.Load()
		time.Sleep(850 * time.Millisecond) // the slow dial ends soon
		m.SetDelay(40 * time.Millisecond)
		for range 4 {
			newAttempt(t, n, "k").acquire().want(t, Held)
		}
		m.SetDelay(0)
		if got := l.conn.Load(); second.dials.Load() != 3 || got != used || !l.connected() {
			t.Errorf("%d dials; it knows the connection that it uses: %v, which was greeted: %v",
				second.dials.Load(), got == used, l.connected())
		}
	})
}

// The bytes that wait on a connection which a lane does not use, such as a refusal of too many clients, are no answer:
// what the server does not answer is late.
func TestAnIdleConnectionsBytesAreNoAnswer(t *testing.T) {
	full, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	told := make(chan struct{})
	go func() { // ends with the connection
		if c, err := full.Accept(); err == nil {
			_, _ = c.Write([]byte("-ERR max number of clients reached\r\n"))
			_ = c.Close()
		}
		close(told)
	}()
	slow, idle := make(chan struct{}), make(chan struct{})
	f := redistest.StartFake(t, func(cmd []string) string {
		switch {
		case len(cmd) > 3 && cmd[3] == "slow":
			close(slow)
			<-idle
		case len(cmd) > 3 && cmd[3] == "mute":
			return ""
		}
		return ":1\r\n"
	})
	var dials atomic.Int64
	dialled := make(chan net.Conn, 10)
	n := newAlone(t, f.Client(t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if dials.Add(1) == 2 {
				<-slow
				addr = full.Addr().String()
			}
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			dialled <- c
			return c, err
		}
	}), 100*time.Millisecond)
	a := newAttempt(t, n, "k")
	<-a.acquire().heard
	l := a.lane()
	in := func(key string) *attempt {
		a := newAttempt(t, n, key)
		a.Entry.t.lane = newTarget("k", "").lane
		return a
	}
	_ = (<-dialled).Close() // go-redis will see that
	untilItRests(t, l)
	n.servers[0].fast.Store(true)
	<-in("k").acquireHere().heard
	waits := in("slow").acquire()
	<-slow
	<-told
	redistest.Eventually(t, patience, "the other connection is idle", func() bool {
		return l.client.PoolStats().IdleConns == 1
	})
	close(idle)
	<-waits.heard
	untilItRests(t, l)
	began := time.Now()
	in("mute").acquire().want(t, Failed)
	if took := time.Since(began); took > conn.TransportTimeout*3/4 {
		t.Errorf("%d dials; it failed after %v", dials.Load(), took)
	}
}
