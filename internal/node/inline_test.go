package node

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// newAlone makes the only node of a quorum.
func newAlone(t *testing.T, c redis.UniversalClient, timeout time.Duration) *Node {
	t.Helper()
	return startNode(t, c, timeout, true)
}

// acquireHere sends the request on this goroutine, if that is possible.
func (a *attempt) acquireHere() *ear {
	e := newEar()
	a.Acquire(&a.buf, e, longTTL, 1, 0, true)
	return e
}

func (a *attempt) releaseHere() *ear {
	e := newEar()
	a.Release(&a.buf, e, true, &TurnPass{})
	return e
}

// dialer counts connections.
type dialer struct {
	dial  func(context.Context, string, string) (net.Conn, error)
	dials atomic.Int64
}

func (d *dialer) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.dials.Add(1)
	return d.dial(ctx, network, addr)
}

// A caller that needs a new connection, and gets none, is not delayed for long; its lane continues.
func TestACallerDoesNotWaitForADialBeyondItsTime(t *testing.T) {
	const timeout = time.Second
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		gate := make(chan struct{})
		c := m.Client(t, func(o *redis.Options) {
			o.Dialer = func(context.Context, string, string) (net.Conn, error) {
				<-gate
				return nil, net.ErrClosed
			}
		})
		n := newAlone(t, c, timeout)
		n.servers[0].fast.Store(true)
		w := &conn.Conn{} // as if there had been a connection
		for i := range n.servers[0].lanes {
			n.servers[0].lanes[i].conn.Store(w)
		}
		start := time.Now()
		asked := newAttempt(t, n, "k").acquireHere()
		if took := time.Since(start); took > timeout*5/4 {
			t.Errorf("the caller was kept for %v", took)
		}
		select {
		case rep := <-asked.heard:
			t.Errorf("answered by %v: it is not known yet whether there will be a connection", rep)
		default:
		}
		close(gate)
		asked.want(t, Failed)
	})
}

// Callers do not send their own requests to a server that answers, but later than a caller may
// wait: each would abandon a connection and leave an indeterminate request, just when the server is
// busy.
func TestASlowServerKeepsItsConnections(t *testing.T) {
	const timeout = 50 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		d := &dialer{dial: m.Dial}
		n := newAlone(t, m.Client(t, func(o *redis.Options) { o.Dialer = d.Dial }), timeout)
		for i := range 20 { // all lanes have a connection
			newAttempt(t, n, fmt.Sprint("warm", i)).acquireHere().want(t, Granted)
		}
		synctest.Wait()                 // until the lanes are idle again
		m.SetDelay(timeout)             // a round trip takes two
		first := newAttempt(t, n, "k0") // its lane loses its connection, and is not greeted in time on another
		lane := first.Entry.t.lane % lanesAlone
		first.acquireHere().want(t, Failed)
		for i := range 200 {
			a := newAttempt(t, n, fmt.Sprint("k", i))
			if a.Entry.t.lane%lanesAlone == lane {
				continue
			}
			e := a.acquireHere()
			<-e.heard
			<-a.releaseHere().heard
		}
		m.SetDelay(0)
		first.release()
		if got := d.dials.Load(); got > 5 {
			t.Errorf("%d connections for a server that loses none", got)
		}
		time.Sleep(3 * debtSecond) // because the first is indeterminate
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts", got)
		}
	})
}

// A request that arrives at the moment in which a server's lanes end is served or refused.
func TestPushAgainstClose(t *testing.T) {
	m := redistest.StartMini(t)
	c := redistest.MiniClient(t, m)
	for range 2000 {
		n, err := New(c, time.Second, true)
		if err != nil {
			t.Fatal(err)
		}
		a := newAttempt(t, n, "k")
		var e *ear
		var wg sync.WaitGroup
		wg.Go(func() { e = a.acquire() })
		wg.Go(func() { n.servers[0].close() })
		wg.Wait()
		select {
		case <-e.heard:
		case <-time.After(patience):
			t.Fatal("a request was left in a lane that nobody serves")
		}
		n.wg.Wait()
	}
}

// A hook of the caller's that panics ends its goroutine, not the lane.
func TestAPanicOfACallerLeavesTheLane(t *testing.T) {
	m := redistest.StartMini(t)
	n := newAlone(t, redistest.MiniClient(t, m), time.Second)
	for i := range 20 { // all lanes have a connection
		newAttempt(t, n, fmt.Sprint("warm", i)).acquireHere().want(t, Granted)
	}
	for i := range n.servers[0].lanes {
		n.servers[0].lanes[i].quick.AddHook(&panicky{})
	}
	var asked *ear
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		a := newAttempt(t, n, "k")
		asked = newEar()
		a.Acquire(&a.buf, asked, longTTL, 1, 0, true)
	}()
	asked.want(t, Failed) // a waiter for it is not left alone
	newAttempt(t, n, "k").acquire().want(t, Granted)
}

type panicky struct{ countingHook }

func (*panicky) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic("a hook") }
}

// Callers that make their own exchanges, lanes that make others, scripts that are lost and
// connections that are cut: each request has one outcome, each key one owner at a time, and nothing
// is left.
func TestCallersAndLanesTogether(t *testing.T) {
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newAlone(t, s.Client(t, at(p.Addr())), 200*time.Millisecond)
	var granted atomic.Int64
	stop := make(chan struct{})
	var callers sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); callers.Wait() })
	defer end()
	var holders [8]atomic.Int64
	for g := range 16 {
		callers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				k := (g + i) % len(holders)
				a := newAttempt(t, n, fmt.Sprint("k", k))
				e := newEar()
				a.Acquire(&a.buf, e, longTTL, 1, 0, i%3 != 0)
				rep := <-e.heard
				switch rep.Kind {
				case Granted:
					granted.Add(1)
					if holders[k].Add(1) != 1 {
						t.Error("two holders")
					}
					holders[k].Add(-1)
				case Failed: // a suspended server refuses in no time
					time.Sleep(time.Millisecond)
				}
				e2 := newEar()
				a.Release(&a.buf, e2, i%5 != 0, &TurnPass{})
				<-e2.heard
				if e.n.Load() != 1 || e2.n.Load() != 1 {
					t.Error("a request was answered twice")
				}
			}
		})
	}
	for i := range 20 { // faults, each of which occurs under load
		before := granted.Load()
		redistest.Eventually(t, patience, "something was granted", func() bool { return granted.Load() > before })
		if i%2 == 0 {
			p.ResetAll()
		} else {
			s.Do(t, "SCRIPT", "FLUSH")
		}
	}
	end()
	// A debt that is being paid just now is none, but its key still exists.
	redistest.Eventually(t, patience, "nothing is left behind", func() bool {
		return n.Debts() == 0 && len(lockKeys(t, s)) == 0
	})
	for i := range n.servers[0].lanes {
		l := &n.servers[0].lanes[i]
		redistest.Eventually(t, patience, fmt.Sprintf("lane %d is idle", i), func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.n == 0 && !l.busy
		})
	}
}

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
