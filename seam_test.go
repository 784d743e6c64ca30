package flightlock_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// lockOfK is where the nodes have a Fetcher's lock named "k".
const lockOfK = "flightlock:fetch:lock:k"

// contender is a client that contends for it.
type contender struct {
	c    seam.Client
	l    seam.Lock
	err  error
	done chan struct{}
}

func contending(t *testing.T, c *flightlock.Client) *contender {
	a := &contender{c: seam.Of(c), done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.l, _, a.err = a.c.Contend(t.Context(), "k", 20*time.Second, func(context.Context) bool { return false })
	}()
	return a
}

// wantNotified waits until a is told that the work has failed which it waits for.
func (a *contender) wantNotified(t *testing.T) {
	t.Helper()
	if <-a.done; a.err == nil || a.c.Why(a.err) != seam.FailedElsewhere {
		t.Errorf("got %v", a.err)
	}
}

// All processes that wait for another's work are notified that it has failed, at once and together, on a
// Cluster too: there the notices come by the channel of the key.
func TestAFailureReachesAllProcesses(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	master := cluster.MasterOf(t, lockOfK)
	client := func() *flightlock.Client { return lockkit.New(t, lockkit.Patient, cluster.Client(t)) }
	waiting := func() int64 { // who are known to wait
		keys := master.Keys(t)
		i := slices.IndexFunc(keys, func(key string) bool { return strings.HasSuffix(key, ":wants:"+lockOfK) })
		if i < 0 {
			return 0
		}
		return master.Do(t, "ZCARD", keys[i]).(int64)
	}
	first := contending(t, client())
	<-first.done
	testkit.Must(t, first.err)
	var all []*contender
	for range 6 {
		all = append(all, contending(t, client()))
	}
	redistest.Eventually(t, 20*time.Second, "all listen and are known to wait", func() bool {
		return waiting() == 6 && master.Do(t, "PUBSUB", "SHARDNUMSUB", lockOfK).([]any)[1].(int64) == 6
	})
	first.c.ReleaseFailed(first.l)
	for _, a := range all {
		a.wantNotified(t)
	}
	redistest.Eventually(t, 20*time.Second, "nobody is known to wait", func() bool { return waiting() == 0 })
}

// With one node of three down, the others notify. A client without notices gets the lock in its turn.
func TestAFailureThatNotAllNodesTell(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		client := func(deaf bool) *flightlock.Client {
			return lockkit.New(t, flightlock.Options{DisableNotify: deaf}, clients...)
		}
		first := contending(t, client(false))
		<-first.done
		testkit.Must(t, first.err)
		a, deaf := contending(t, client(false)), contending(t, client(true))
		synctest.Wait()
		nodes[1].Down(true)
		first.c.ReleaseFailed(first.l)
		a.wantNotified(t)
		<-deaf.done
		testkit.Must(t, deaf.err)
		testkit.Must(t, deaf.l.(*flightlock.Lock).Release(t.Context()))
	})
}
