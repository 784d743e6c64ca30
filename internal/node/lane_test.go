package node

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

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
		var dials atomic.Int64
		n := newAlone(t, m.Client(t, redistest.CountDials(&dials)), timeout)
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
		if got := dials.Load(); got > 5 {
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
	t.Parallel()
	m := redistest.StartMini(t)
	c := redistest.MiniClient(t, m)
	for range 2000 {
		n, err := New(c, patience, true)
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
	t.Parallel()
	m := redistest.StartMini(t)
	n := newAlone(t, redistest.MiniClient(t, m), patience)
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
	t.Parallel()
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

// A lane's connection is the one that it uses, even if another dial of it ends later.
func TestALaneKnowsTheConnectionThatItUses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var second secondDial
		fifo := func(o *redis.Options) { o.PoolFIFO = true }
		n := newAlone(t, m.Client(t, fifo, second.takes(600*time.Millisecond)), 100*time.Millisecond)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		l := a.lane()
		first := l.conn.Load()
		if !l.connected() {
			t.Fatal("not connected")
		}
		_ = (<-second.dialled).Close()
		newAttempt(t, n, "k").acquire().want(t, Failed) // and go-redis drops the connection
		synctest.Wait()
		n.servers[0].fast.Store(true)
		newAttempt(t, n, "k").acquireHere().want(t, Held)
		time.Sleep(time.Second)
		newAttempt(t, n, "k").acquire().want(t, Held)
		if got := l.conn.Load(); second.dials.Load() != 3 || got == first || !l.connected() {
			t.Errorf("%d dials; it knows another connection than the first: %v, which was greeted: %v",
				second.dials.Load(), got != first, l.connected())
		}
	})
}

// Lanes that find the scripts missing at the same time wait for the one that loads them, and no
// mutex is held meanwhile: virtual time would stand still.
func TestLanesWaitForTheScriptsWithoutAMutex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.SetDelay(5 * time.Millisecond)
		n := newNode(t, m.Client(t))
		var ears []*ear
		for i := range 20 {
			ears = append(ears, newAttempt(t, n, fmt.Sprint("k", i)).acquire())
		}
		for _, e := range ears {
			e.want(t, Granted)
		}
	})
}

// A server that closes all idle connections, as by CLIENT KILL, delays nobody, however short they
// were idle: the next requests use others, the node is not suspended, and nothing is indeterminate.
func TestAKillOfIdleConnectionsIsNoFailure(t *testing.T) {
	t.Parallel()
	conns := make(chan *net.TCPConn, 100)
	c := redistest.MiniClient(t, redistest.StartMini(t), func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				conns <- c.(*net.TCPConn)
			}
			return c, err
		}
	})
	n := newNode(t, c)
	for range 5 {
		var locks []*attempt
		var asked []*ear // by all lanes at once
		for _, key := range slices.Concat(sameLane(2), onOtherLanes(2)) {
			a := newAttempt(t, n, key)
			locks, asked = append(locks, a), append(asked, a.acquire())
		}
		for i, e := range asked {
			e.want(t, Granted)
			asked[i] = locks[i].release()
		}
		for _, e := range asked {
			e.want(t, Deleted)
		}
		if len(conns) == 0 {
			t.Fatal("no connection to kill")
		}
		for len(conns) > 0 {
			_ = (<-conns).CloseRead() // as if the server had closed it
		}
	}
	wantDebts(t, n, 0)
}
