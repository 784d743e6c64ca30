package flightlock_test

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A log that hangs delays nothing: the Context of the lost lock that it was about to log ends in
// time, the other locks of that node are refreshed, and a suspended node comes back.
func TestALogThatHangsHoldsNothingUp(t *testing.T) {
	for _, n := range []int{1, 3} {
		testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			end := make(chan struct{})
			log := testkit.SlowLog(func() { <-end })
			c := lockkit.New(t, flightlock.Options{Logger: log, DisableQuarantine: true}, clients...)
			defer close(end)
			l := lockkit.Lock(t, c, "runs out", time.Second)
			until, ctx := l.Until(), l.Context(t.Context())
			time.Sleep(1500 * time.Millisecond)
			if ctx.Err() == nil || !errors.Is(l.Err(), flightlock.ErrLockLost) {
				t.Errorf("%v after Until its Context is %v, Err %v", time.Since(until), ctx.Err(), l.Err())
			}

			time.Sleep(10 * time.Second) // so that the next loss is logged
			var kept []*flightlock.Lock
			for i := range 20 {
				l := lockkit.Lock(t, c, fmt.Sprint("kept", i), time.Second)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
				kept = append(kept, l)
			}
			taken := lockkit.Lock(t, c, "taken", time.Minute)
			ctx = taken.Context(t.Context())
			testkit.Lose("lock:taken", nodes...)
			go taken.Refresh(t.Context())
			time.Sleep(5 * time.Second)
			if ctx.Err() == nil {
				t.Error("a refresh found that the lock was gone, and its Context has not ended")
			}
			for _, l := range kept {
				testkit.Must(t, l.Err())
				lockkit.Release(t, l)
			}

			testkit.Down(true, nodes...)
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second,
				flightlock.LimitedRetry(10*time.Millisecond, 10))
			if !errors.Is(err, flightlock.ErrUnavailable) {
				t.Error(err)
			}
			testkit.Down(false, nodes...)
			time.Sleep(10 * time.Second)
			if s := c.Stats(); s.Suspended != 0 {
				t.Errorf("%d nodes are suspended still", s.Suspended)
			}
			lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		})
	}
}

// A node that goes and comes back again and again has two lines in the log at first, and then one every few
// seconds, which says in which state it is and how often that has changed. Other nodes have lines of their
// own.
func TestANodeThatFlapsIsLoggedEveryFewSeconds(t *testing.T) {
	testkit.Bubble(t, 2, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)),
			DisableQuarantine: true}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		flaps := func(node *redistest.MemNode) {
			testkit.Down(true, node)
			_, _ = c.TryLock(t.Context(), "k", time.Second)
			time.Sleep(time.Second / 2)
			testkit.Down(false, node)
			time.Sleep(time.Second / 2)
		}
		changes := func() int { return log.Count("node suspended") + log.Count("node is back") }
		flaps(nodes[0])
		synctest.Wait()
		if log.Count("node suspended") != 1 || log.Count("node is back") != 1 || log.Count("changes=") != 0 {
			t.Errorf("the first time:\n%s", &log)
		}
		for range 59 {
			flaps(nodes[0])
		}
		synctest.Wait()
		if n := log.Count("changes="); n < 10 || n > 13 || changes() != n+2 {
			t.Errorf("%d lines have a number, of %d:\n%s", n, changes(), &log)
		}
		flaps(nodes[1])
		synctest.Wait()
		if log.Count("node suspended", clients[1].(*redis.Client).Options().Addr) != 1 {
			t.Errorf("the other node:\n%s", &log)
		}
		time.Sleep(time.Minute)
		before := changes()
		flaps(nodes[0])
		synctest.Wait()
		if n := changes() - before; n != 2 {
			t.Errorf("%d lines after a minute without a change:\n%s", n, &log)
		}
	})
}

// A lost lock is logged with its key and reason; of many that are lost at once the others are
// logged as a number, and so are those that Close ends: their holders did not release them in time.
func TestLostLocksAreLogged(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)),
			DisableQuarantine: true}, clients...)
		lines := 0
		want := func(more int, words ...string) {
			t.Helper()
			synctest.Wait() // for the goroutine that writes
			lines += more
			if log.Count("level=WARN") != lines || log.Count(words...) != 1 {
				t.Errorf("want %d lines, one of them with %q:\n%s", lines, words, &log)
			}
			time.Sleep(10 * time.Second) // the next loss has a line of its own
		}
		for i := range 100 {
			lockkit.Lock(t, c, fmt.Sprint("k", i), time.Second).Context(t.Context())
		}
		time.Sleep(6 * time.Second)
		want(3, "count=98")
		lockkit.Lock(t, c, "slow", time.Second).Context(t.Context())
		time.Sleep(5 * time.Second)
		want(1, `msg="flightlock: lock lost" key=slow`, "validity")
		l := lockkit.Lock(t, c, "taken", 10*time.Second)
		for _, n := range nodes {
			n.Mini.Set("lock:taken", "somebody else")
		}
		_ = l.Refresh(t.Context())
		want(1, "key=taken", "somebody else")
		lockkit.Lock(t, c, "open", 10*time.Second)
		_ = c.Close(canceled())
		want(1, `msg="flightlock: lock lost" key=open err="flightlock: the Client is closed"`)
	})
}
