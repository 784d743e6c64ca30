package node

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// Nothing is sent to a suspended server before its probe is answered. What is owed to it must not be tried all the time
// meanwhile, for there may be tens of thousands of debts, and is sent at once when it is back.
func TestDebtsRestWhileTheServerIsSuspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newImpatientNode(t, m.Client(t))
		var tries atomic.Int64
		route := n.route
		n.route = func(r *request) { tries.Add(1); route(r) }
		const debts = 100
		all := make([]*attempt, debts)
		for i := range all {
			all[i] = newAttempt(t, n, fmt.Sprint("key-", i))
			all[i].acquire().want(t, Granted)
		}
		m.Down(true)
		for _, a := range all {
			a.release()
		}
		time.Sleep(2 * time.Second)
		if !n.Suspended() {
			t.Fatal("the node is not suspended")
		}
		tries.Store(0)
		const seconds = 20
		time.Sleep(seconds * time.Second)
		if got, limit := tries.Load(), int64(debts*seconds/4); got > limit {
			t.Errorf("%d tries of %d debts in %d s, want %d at most", got, debts, seconds, limit)
		}
		if got := n.Debts(); got != debts {
			t.Errorf("%d debts", got)
		}
		m.Down(false)
		time.Sleep(time.Second)
		if got := n.Debts(); got != 0 {
			t.Errorf("%d debts a second after the node was back", got)
		}
		for i := range all {
			if key := fmt.Sprint("key-", i); m.Mini.Exists(key) {
				t.Errorf("%s is still there", key)
			}
		}
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
		a.releaseAgain().complete(failed(suspendedFor(errMute).err), notSent)
		time.Sleep(time.Second)
		if m.Mini.Exists("key") || n.Debts() != 0 {
			t.Errorf("%d debts, or the key is still there", n.Debts())
		}
	})
}
