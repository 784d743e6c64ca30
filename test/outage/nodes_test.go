package outage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A node on which another client's script does not end refuses everything. It is a node without a
// vote, and never a key that is held; locking continues without it, and once the script is killed
// it votes again.
func TestANodeWithABusyScriptHasNoVote(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
	var wg sync.WaitGroup
	for i, s := range servers[:2] {
		s.Do(t, "CONFIG", "SET", "lua-time-limit", 1)
		rdb := s.Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
		wg.Go(func() { rdb.Eval(t.Context(), "while true do end", nil) })
		redistest.Eventually(t, 10*time.Second, "the script runs", func() bool {
			return strings.HasPrefix(fmt.Sprint(s.Client(t).Get(t.Context(), "k").Err()), "BUSY")
		})
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		if i == 0 {
			testkit.Must(t, err)
			lockkit.Release(t, l)
		} else if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
			!strings.Contains(err.Error(), "BUSY") {
			t.Errorf("two of three nodes are busy: %v", err)
		}
	}
	for _, s := range servers[:2] {
		s.Do(t, "SCRIPT", "KILL")
	}
	wg.Wait()
	lockkit.Release(t, lockkit.EventuallyHeld(t, c, "k"))
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
}

// A server's error is ErrUnavailable and shows the error. What retrying cannot fix fails at once, whatever
// the strategy, and what refuses the user when it was asked again a second later; the rest is retried.
func TestServerErrors(t *testing.T) {
	t.Parallel()
	const retried, refused, final = "retried", "refused", "final"
	for _, tc := range []struct{ line, is string }{
		{"READONLY You can't write against a read only replica.", retried},
		{"LOADING Redis is loading the dataset in memory", retried},
		{"OOM command not allowed when used memory > 'maxmemory'.", retried},
		{"ERR Error running script (call to f_0): @user_script:1: -OOM command not allowed", retried},
		{"NOAUTH Authentication required.", refused},
		{"WRONGPASS invalid username-password pair or user is disabled.", refused},
		{"NOPERM this user has no permissions to run the command", refused},
		{"ERR Error running script (call to f_0): @user_script:1: WRONGTYPE Operation against a key", final},
	} {
		code, _, _ := strings.Cut(tc.line, " ")
		t.Run(code, func(t *testing.T) {
			fake := redistest.StartFake(t, redistest.ErrorFor("EVALSHA", tc.line))
			c := lockkit.New(t, lockkit.Patient, testkit.Dial(t, fake.Addr()))
			retry := flightlock.LimitedRetry(5*time.Millisecond, 5)
			if tc.is == refused {
				retry = flightlock.LimitedRetry(20*time.Millisecond, 1_000_000)
			}
			_, err := c.SingleFlightLock(t.Context(), "k", time.Minute, retry)
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
				!strings.Contains(err.Error(), code) {
				t.Errorf("got %v", err)
			}
			if n := c.Stats().Attempts; (n == 1) != (tc.is == final) {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Nodes that refuse connections, or accept and never answer: ErrUnavailable in time, with the
// node's address; ctx bounds the wait.
func TestUnreachableNodes(t *testing.T) {
	t.Parallel()
	hole := redistest.StartProxy(t, redistest.RefusedAddr(t))
	for name, addr := range map[string]string{"refused": redistest.RefusedAddr(t), "black hole": hole.Addr()} {
		t.Run(name, func(t *testing.T) {
			c := lockkit.New(t, flightlock.Options{}, testkit.Dial(t, addr))
			hole.BlackHole(true)
			t.Cleanup(func() { hole.BlackHole(false); hole.ResetAll() }) // Close waits for replies
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.NoRetry())
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(err.Error(), addr) {
				t.Errorf("got %v", err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			_, err = c.SingleFlightLock(ctx, "k", time.Second, nil)
			if !errors.Is(err, flightlock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// One of five nodes is stopped: nobody waits for it, and when it continues, what it executes late
// does not outlive the locks.
func TestAStoppedNodeCostsNothingAndKeepsNothing(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 5)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	for i := range 20 { // the first use of fence buckets, scripts, connections
		lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute))
	}
	servers[4].Stop()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for range 20 {
				l, err := c.TryLock(t.Context(), fmt.Sprint("k", i), time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	servers[4].Cont()
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
}

// A node that was stopped for a while is suspended; when it continues, it votes again, and what it missed or
// executed late does not outlive the locks.
func TestAStoppedNodeComesBack(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 5)
	c := lockkit.New(t, flightlock.Options{NodeTimeout: 250 * time.Millisecond}, nodes...)
	locked := func() *flightlock.Lock { return lockkit.EventuallyHeld(t, c, "k") }
	redistest.Eventually(t, 20*time.Second, "the node is known", func() bool {
		defer func(l *flightlock.Lock) { _ = l.Release(t.Context()) }(locked())
		return servers[4].Do(t, "EXISTS", "lock:k") == int64(1)
	})
	servers[4].Stop()
	redistest.Eventually(t, time.Minute, "the node is suspended", func() bool {
		_ = locked().Release(t.Context())
		return c.Stats().Suspended > 0
	})
	servers[4].Cont()
	redistest.Eventually(t, time.Minute, "five nodes vote", func() bool {
		defer func(l *flightlock.Lock) { _ = l.Release(t.Context()) }(locked())
		return servers[4].Do(t, "EXISTS", "lock:k") == int64(1)
	})
	redistest.Eventually(t, time.Minute, "nothing is left", func() bool {
		return c.Stats().Debts == 0 && servers[4].Do(t, "EXISTS", "lock:k") == int64(0)
	})
}

// The same in virtual time: a node that stalled for 5 s while locks come and go votes again within 2 s, and
// within 2 s no key of a lock that is over is left on any node, long before its ttl ends.
func TestANodeThatStalledIsBackWithinTwoSeconds(t *testing.T) {
	testkit.Bubble(t, 5, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		var over atomic.Bool
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for n := 0; !over.Load(); n++ {
					l := lockkit.Lock(t, c, fmt.Sprintf("k%d-%d", i, n%50), time.Minute)
					time.Sleep(20 * time.Millisecond)
					lockkit.Release(t, l)
				}
			})
		}
		nodes[4].Stall(true)
		time.Sleep(5 * time.Second)
		if n := c.Stats().Suspended; n != 1 {
			t.Errorf("%d nodes are suspended, want 1", n)
		}
		nodes[4].Stall(false)
		over.Store(true)
		wg.Wait()
		time.Sleep(2 * time.Second)
		for _, n := range nodes {
			for _, key := range n.Mini.Keys() {
				if strings.HasPrefix(key, "lock:") {
					t.Errorf("%s has %s 2 s after its lock", n.Addr(), key)
				}
			}
		}
		l := lockkit.Lock(t, c, "k", time.Minute)
		synctest.Wait()
		if !nodes[4].Mini.Exists("lock:k") {
			t.Error("the node does not vote 2 s after its stall")
		}
		lockkit.Release(t, l)
	})
}
