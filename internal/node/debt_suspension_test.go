package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// debtsRest has n owe many releases to m, which is away, and checks that they are not tried all the time, but
// sent at once when it is back.
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

// Nothing is sent to a suspended server before its probe is answered. What is owed to it must not be tried
// all the time meanwhile, for there may be tens of thousands of debts, and is sent at once when it is back.
func TestDebtsRestWhileTheServerIsSuspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t, asOnASocket(m))) // or an idle connection that is gone would cost a try
		debtsRest(t, n, m, func(on bool) {
			if !on && !n.Suspended() {
				t.Error("the node was not suspended")
			}
			m.Down(on)
		}, 1./4)
	})
}

// A server that answers probes and nothing else is back again and again.
func TestDebtsRestWhileTheServerAnswersProbesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var cutOff atomic.Bool
		// A proxy answers PING, and, while it is cut off from the server, hangs up at everything else.
		n := newImpatientNode(t, m.Client(t, redistest.Writes(func(c net.Conn, p []byte) (int, error) {
			if cutOff.Load() && bytes.Contains(bytes.ToUpper(p), []byte("EVALSHA")) {
				_ = c.Close()
				return 0, errors.New("hung up")
			}
			return c.Write(p)
		})))
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
		a.Acquire(&a.buf, e, 7*time.Second, 1, false)
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
		a.releaseAgain().complete(failed(fmt.Errorf("%w: silent", link.ErrSuspended)), notSent)
		time.Sleep(time.Second)
		if m.Mini.Exists("key") || n.Debts() != 0 {
			t.Errorf("%d debts, or the key is still there", n.Debts())
		}
	})
}

// Releases are sent to a server that refuses logins, on connections that were let in before. When those are
// gone too, the debts, of which there may be tens of thousands, are not tried all the time, and do not dial.
func TestDebtsDoNotDialAServerThatRefusesLogins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.RequireAuth("old")
		var lockedOut atomic.Bool
		var dials atomic.Int64
		n := newImpatientNode(t, m.Client(t, asOnASocket(m), redistest.CountDials(&dials), func(o *redis.Options) {
			o.CredentialsProvider = func() (string, string) {
				if lockedOut.Load() {
					return "", "wrong"
				}
				return "", "old"
			}
		}))
		const debts = 300
		all := make([]*attempt, debts)
		for i := range all {
			all[i] = newAttempt(t, n, fmt.Sprint("key-", i))
			all[i].acquire().want(t, Granted)
		}
		lockedOut.Store(true)
		m.Cut()
		for _, a := range all {
			a.release()
		}
		time.Sleep(2 * time.Second) // the bubble's time, as below
		if n.LoginRefused("") == nil {
			t.Fatal("the node is not suspended")
		}
		dials.Store(0)
		const seconds = 10
		time.Sleep(seconds * time.Second)
		if got, limit := dials.Load(), int64(seconds*time.Second/redialEvery)+5; got > limit {
			t.Errorf("%d dials in %d s, want %d at most", got, seconds, limit)
		}
		if got := n.Debts(); got != debts {
			t.Errorf("%d debts", got)
		}
		lockedOut.Store(false)
		time.Sleep(time.Second)
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts a second after the node was back", got)
		}
	})
}

// A node that is stopped for seconds, while attempts continue, accumulates neither debts nor requests once
// its answers are late: what was not written leaves nothing.
func TestAStoppedNodePilesUpNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), 2*time.Second)
		newAttempt(t, n, "warm").acquire().want(t, Granted)
		tries := func(lasts time.Duration) {
			for begin := time.Now(); time.Since(begin) < lasts; time.Sleep(5 * time.Millisecond) {
				for range 10 {
					a := newAttempt(t, n, "k")
					a.acquire()
					a.release()
				}
			}
		}
		m.Stall(true)
		tries(n.timeout + 100*time.Millisecond)
		before, debts := n.Commands(), n.Debts()
		tries(3 * time.Second)
		if more, owed := n.Commands()-before, n.Debts()-debts; more > 0 || owed > 0 {
			t.Errorf("%d requests were written, and %d debts made, after the answers were late", more, owed)
		}
		m.Stall(false)
		redistest.Eventually(t, patience, "everything is gone",
			func() bool { return n.Debts() == 0 && !m.Mini.Exists("k") })
	})
}

// Of three nodes two decide, and one is further away: each contender polls as the two fast ones let it,
// whatever still waits for the slow one. Only the newest of its polls is of any use there, so what waits must
// not grow with time, but only with the number of those who wait.
func TestPollsOfASlowNodeDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		const contenders, polls = 1000, 30
		keys := make([]string, contenders)
		for i := range keys {
			keys[i] = fmt.Sprint("key-", i)
			if err := m.Mini.Set(keys[i], "somebody"); err != nil {
				t.Fatal(err)
			}
		}
		warm := newAttempt(t, n, "warm")
		warm.acquire().want(t, Granted)
		warm.release().want(t, Deleted)
		m.SetDelay(200 * time.Millisecond) // 640 requests per second, of 5,000 polls
		for range polls {
			all := make([]*attempt, contenders)
			for i, key := range keys {
				a := &attempt{t: t}
				target := &Target{}
				target.Init(key, fmt.Sprint("owner-", owners.Add(1)), "contender-"+key)
				a.Init(n, target, 0)
				a.acquire()
				all[i] = a
			}
			time.Sleep(5 * time.Millisecond) // the two others have answered: held
			for _, a := range all {
				a.Release(&a.buf, nil, false, nil)
			}
			time.Sleep(195 * time.Millisecond)
		}
		asked := n.Commands()
		time.Sleep(time.Minute)
		if more := n.Commands() - asked; more > contenders {
			t.Errorf("%d requests of %d contenders were still to be written after %d polls each", more, contenders,
				polls)
		}
	})
}

// When a node is back, what it is owed is paid at once, and once.
func TestHurryPaysAllDebts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newLab()
		for range 3 {
			a := b.attempt(t)
			a.acquire()
			b.next(t, opAcquire).complete(Reply{Kind: Granted, Counter: 1}, answered)
			a.release()
			b.next(t, opRelease).complete(failed(errReset), notSent)
		}
		b.n.debts.hurry()
		for range 3 {
			b.next(t, opRelease).complete(Reply{Kind: Deleted}, answered)
		}
		time.Sleep(2 * debtSecond)
		synctest.Wait()
		if b.pop() != nil || b.n.Debts() != 0 {
			t.Error("a debt was paid twice, or is still owed")
		}
	})
}
