package node

import (
	"context"
	"errors"
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

// A NodeTimeout of many seconds is honored: no other bound gives the answer up earlier.
func TestALongNodeTimeoutIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), 10*time.Second, false)
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		m.SetDelay(3 * time.Second) // a round trip takes two
		newAttempt(t, n, "k").acquire().want(t, Granted)
		m.SetDelay(0)
	})
}

// The bytes that wait on a connection which a lane does not use, such as a refusal of too many clients, are no answer:
// what the server does not answer is late.
func TestAnIdleConnectionsBytesAreNoAnswer(t *testing.T) {
	t.Parallel()
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
	if rep := in("mute").acquire().want(t, Failed); !errors.Is(rep.Err, errLate) { // and not that of the connection
		t.Errorf("%d dials; it failed with %v", dials.Load(), rep.Err)
	}
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
			through := redistest.Through(func(c net.Conn) net.Conn {
				dropped := current // then what is written vanishes
				return (&redistest.Conn{Conn: c, OnWrite: func(c net.Conn, p []byte) (int, error) {
					if dropped.Load() {
						return len(p), nil
					}
					return c.Write(p)
				}}).Open()
			})
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
