package node

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// The requests that wait for a server are bounded: further acquires are refused at once, releases
// never.
func TestTheQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where no time passes while the queue is filled
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, m.Client(t), patience, false)
		keys := sameLane(3)
		warm := newAttempt(t, n, keys[0]) // the scripts are loaded
		warm.acquire().want(t, Granted)
		warm.release().want(t, Deleted)
		commands := n.Commands()
		m.Stall(true)
		defer m.Stall(false)
		held := newAttempt(t, n, keys[0])
		blocker := held.acquire()
		synctest.Wait()
		if got := n.Commands() - commands; got != 1 {
			t.Fatalf("the first one is not written: %d commands", got)
		}
		waiting := make([]*attempt, maxQueued)
		for i := range waiting {
			waiting[i] = newAttempt(t, n, keys[1])
			waiting[i].acquire()
		}
		refused := newAttempt(t, n, keys[2])
		if rep := refused.acquire().wantNow(t, Failed); !errors.Is(rep.Err, ErrBusy) {
			t.Error(rep.Err)
		}
		refused.release().wantNow(t, Missing)
		released := held.release()
		for _, a := range waiting {
			a.release().wantNow(t, Missing)
		}
		m.Stall(false)
		blocker.want(t, Granted)
		released.want(t, Deleted)
		if got := n.Commands() - commands; got != 2 {
			t.Errorf("%d commands", got)
		}
	})
}

// A queue that is full of acquires accepts refreshes of held locks: there are no more of these than
// held locks.
func TestAFullQueueTakesRefreshes(t *testing.T) {
	q := &queue{n: maxQueued}
	q.init()
	e := &Entry{}
	if err := q.push(&request{e: e, op: opAcquire}); !errors.Is(err, ErrBusy) {
		t.Errorf("an acquire: %v", err)
	}
	if err := q.push(&request{e: e, op: opRefresh}); err != nil {
		t.Errorf("a refresh: %v", err)
	}
}

// A refresh is sent before acquires of other keys, and not before that of its own entry, which a
// slow node may not have received yet.
func TestARefreshStaysBehindItsAcquire(t *testing.T) {
	q := &queue{}
	q.init()
	var other, own Entry
	push := func(e *Entry, o op) *request {
		r := &request{e: e, op: o}
		if o == opAcquire {
			e.create = r
		}
		if err := q.push(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	a, b := push(&other, opAcquire), push(&own, opAcquire)
	late := push(&own, opRefresh)
	first := push(&Entry{}, opRefresh)
	if got := q.take(nil, maxBatch); !slices.Equal(got, []*request{first, a, b, late}) {
		t.Error("out of order")
	}
	if q.rest(); push(&own, opRefresh) == nil || q.urgent == nil {
		t.Error("the acquire was written: the refresh waits")
	}
}

// Of three nodes two decide, and one is further away: each contender polls as the two fast ones let it, whatever
// still waits for the slow one. Only the newest of its polls is of any use there, so what waits must not grow with
// time, but only with the number of those who wait.
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

		most := 0
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
			waiting := 0
			for i := range n.server.lanes {
				waiting += n.server.lanes[i].len()
			}
			most = max(most, waiting)
		}
		if limit := 3 * contenders; most > limit {
			t.Errorf("%d requests of %d contenders wait for the node after %d polls each, want %d at most",
				most, contenders, polls, limit)
		}
		m.SetDelay(0)
		for n.Debts() > 0 {
			time.Sleep(time.Second)
		}
	})
}
