package node

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

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
