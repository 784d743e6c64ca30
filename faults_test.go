package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// dial is a client to addr that is closed when the test ends.
func dial(tb testing.TB, addr string) redis.UniversalClient {
	tb.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr})
	tb.Cleanup(func() { c.Close() })
	return c
}

// A server's error is ErrUnavailable and shows the error. What retrying cannot fix fails at once,
// whatever the strategy; the rest is retried.
func TestServerErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		line  string
		final bool
	}{
		{"READONLY You can't write against a read only replica.", false},
		{"LOADING Redis is loading the dataset in memory", false},
		{"OOM command not allowed when used memory > 'maxmemory'.", false},
		{"ERR Error running script (call to f_0): @user_script:1: -OOM command not allowed", false},
		{"NOAUTH Authentication required.", true},
		{"WRONGPASS invalid username-password pair or user is disabled.", true},
		{"NOPERM this user has no permissions to run the 'evalsha' command", true},
		{"ERR Error running script (call to f_0): @user_script:1: WRONGTYPE Operation against a key", true},
	} {
		code, _, _ := strings.Cut(tc.line, " ")
		t.Run(code, func(t *testing.T) {
			fake := redistest.StartFake(t, redistest.ErrorFor("EVALSHA", tc.line))
			c := newClient(t, patient, dial(t, fake.Addr()))
			_, err := c.SingleFlightLock(t.Context(), "k", time.Minute, flightlock.LimitedRetry(5*time.Millisecond, 5))
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
				!strings.Contains(err.Error(), code) {
				t.Errorf("got %v", err)
			}
			if n := c.Stats().Attempts; (n == 1) != tc.final {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// A lock key that already holds a list is an error at once, and the list is left alone.
func TestAKeyThatHoldsAList(t *testing.T) {
	servers, nodes := realNodes(t, 1)
	servers[0].Do(t, "RPUSH", "lock:k", "x")
	c := newClient(t, flightlock.Options{}, nodes...)
	_, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGTYPE") {
		t.Errorf("got %v", err)
	}
	if got := servers[0].Do(t, "LLEN", "lock:k"); got != int64(1) {
		t.Errorf("the list has %v entries", got)
	}
}

// Nodes that refuse connections, or accept and never answer: ErrUnavailable in time, with the
// node's address; ctx bounds the wait.
func TestUnreachableNodes(t *testing.T) {
	hole := redistest.StartProxy(t, redistest.RefusedAddr(t))
	for name, addr := range map[string]string{"refused": redistest.RefusedAddr(t), "black hole": hole.Addr()} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, flightlock.Options{}, dial(t, addr))
			hole.BlackHole(true)
			t.Cleanup(func() { hole.BlackHole(false); hole.ResetAll() }) // Close waits for replies
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.NoRetry())
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(err.Error(), addr) {
				t.Errorf("got %v", err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			_, err = c.Lock(ctx, "k", time.Second, nil)
			if !errors.Is(err, flightlock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// The same server behind two addresses has one vote, and the error names both Nodes.
func TestTheSameServerTwice(t *testing.T) {
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	for _, n := range []int{2, 3} {
		nodes := []redis.UniversalClient{s.Client(t), dial(t, proxy.Addr())}
		if n == 3 {
			nodes = append(nodes, redistest.StartServer(t).Client(t))
		}
		c := newClient(t, flightlock.Options{}, nodes...)
		var err error
		redistest.Eventually(t, 20*time.Second, "the twins are found", func() bool {
			var l *flightlock.Lock
			if l, err = c.TryLock(t.Context(), fmt.Sprint("k", rand.Int()), time.Second); err == nil {
				_ = l.Release(t.Context())
			}
			return errors.Is(err, flightlock.ErrInvalid)
		})
		if !strings.Contains(err.Error(), "Nodes[0]") || !strings.Contains(err.Error(), "Nodes[1]") {
			t.Errorf("%v does not name both", err)
		}
	}
}

// A server that is named in two of its databases would vote twice, since a write in one database is
// not seen in the other. So all nodes must use one database number, and the error names both.
// Nothing is sent for that: it needs no rights, and a node that is down may be the other's
// duplicate.
func TestTheSameServerInTwoDatabases(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	s := redistest.StartServer(t, "--unixsocket", socket)
	here, local := s.Addr(), fmt.Sprintf("localhost:%d", s.Port())
	down := redistest.RefusedAddr(t)
	for name, tc := range map[string]struct{ url, names string }{
		"another address": {"redis://" + local + "/1", local},
		"a parameter":     {"redis://" + local + "?db=15", local},
		"a unix socket":   {"unix://" + socket + "?db=1", socket},
		"TLS":             {"rediss://" + local + "/7", local},
		"a server down":   {"redis://" + down + "/1", down},
		"Sentinels":       {"redis://" + down + "/4?master_name=main", "main"},
		"a Cluster":       {"redis://" + local + "?addr=" + down, local},
	} {
		t.Run(name, func(t *testing.T) {
			first := "redis://" + here
			if name == "a Cluster" { // which has no other database than 0
				first += "/3"
			}
			for _, urls := range [][]string{{first, tc.url}, {tc.url, first}} {
				c, err := flightlock.Open(urls, flightlock.Options{NodeTimeout: time.Second})
				if err == nil {
					l, err := c.TryLock(t.Context(), "k", time.Second)
					t.Errorf("a lock on %q: %v, %v", urls, l, err)
					closeClient(t, c)
					continue
				}
				wantInvalid(t, err, "urls[1]", "urls[0]", "database", here, tc.names)
			}
		})
	}
	var nodes []redis.UniversalClient // any number will do
	for range 2 {
		nodes = append(nodes, redistest.StartServer(t).Client(t, func(o *redis.Options) { o.DB = 1 }))
	}
	lockAndRelease(t, newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...))
}

// Keys of any bytes, up to 4 KiB, lock and unlock, on a Cluster too: fence bucket and lock
// key share a slot.
func TestKeysOfAnyBytes(t *testing.T) {
	cluster := redistest.StartCluster(t, 3)
	for name, node := range map[string]redis.UniversalClient{
		"standalone": redistest.StartServer(t).Client(t), "cluster": cluster.Client(t),
	} {
		for _, prefix := range []string{"", "{", "}{", "a{b}c:", flightlock.NoPrefix} {
			c := newClient(t, flightlock.Options{KeyPrefix: prefix, NodeTimeout: patient.NodeTimeout}, node)
			keys := []string{"k", "{", "}", "{}", "{}x", "a{b}c", "{{b}}", "\x00", "\xff\xfe{\x01}", "\r\n",
				strings.Repeat("k", 4096)}
			for range 30 {
				b := make([]byte, 1+rand.IntN(40))
				for i := range b {
					b[i] = byte(rand.Int())
				}
				keys = append(keys, string(b))
			}
			for _, key := range keys {
				l, err := c.TryLock(t.Context(), key, time.Minute)
				if err != nil {
					t.Errorf("%s, prefix %q, key %q: %v", name, prefix, key, err)
					continue
				}
				if err := l.Refresh(t.Context()); err != nil {
					t.Errorf("%s, prefix %q, key %q: %v", name, prefix, key, err)
				}
				mustRelease(t, l)
			}
		}
	}
}

// A whole Cluster is one of three nodes.
func TestAClusterAmongTheNodes(t *testing.T) {
	_, nodes := realNodes(t, 2)
	nodes = append(nodes, redistest.StartCluster(t, 3).Client(t))
	a, b := newClient(t, patient, nodes...), newClient(t, patient, nodes...)
	for i := range 50 {
		key := fmt.Sprint("k", i)
		l := mustLock(t, a, key, time.Minute)
		if _, err := b.TryLock(t.Context(), key, time.Minute); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("got %v", err)
		}
		mustRelease(t, l)
	}
}

// One of five nodes is stopped: nobody waits for it, and when it continues, what it executes late
// does not outlive the locks.
func TestAStoppedNodeCostsNothingAndKeepsNothing(t *testing.T) {
	servers, nodes := realNodes(t, 5)
	c := newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...)
	for i := range 20 { // the first use of fence buckets, scripts, connections
		mustRelease(t, mustLock(t, c, fmt.Sprint("k", i), time.Minute))
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

// A node that was stopped for a while is suspended and logged; when it continues, it votes again
// within 2s, and what it missed or executed late does not outlive the locks.
func TestAStoppedNodeComesBack(t *testing.T) {
	wantIn(t, 2*time.Second, stopAndGoOn)
}

// stopAndGoOn returns how long a stopped node takes to vote after it continues.
func stopAndGoOn(t *testing.T) (took time.Duration) {
	servers, nodes := realNodes(t, 5)
	c := newClient(t, flightlock.Options{NodeTimeout: 250 * time.Millisecond}, nodes...)
	mustRelease(t, mustLock(t, c, "k", time.Minute))
	servers[4].Stop()
	redistest.Eventually(t, 20*time.Second, "the node is suspended", func() bool {
		mustRelease(t, mustLock(t, c, "k", time.Minute))
		return c.Stats().Suspended == 1
	})
	servers[4].Cont()
	goesOn := time.Now()
	redistest.Eventually(t, 20*time.Second, "five nodes vote", func() bool {
		l := mustLock(t, c, "k", time.Minute)
		defer mustRelease(t, l)
		return servers[4].Do(t, "EXISTS", "lock:k") == int64(1)
	})
	took = time.Since(goesOn)
	redistest.Eventually(t, 20*time.Second, "nothing is left", func() bool {
		return c.Stats().Debts == 0 && servers[4].Do(t, "EXISTS", "lock:k") == int64(0)
	})
	return took
}

// Exclusion and rising fences hold while clients contend over connections that are slow,
// reset, and cut in the middle of replies; in the end no key is left.
func TestExclusionUnderFire(t *testing.T) {
	t.Parallel()
	var proxies []*redistest.Proxy
	var cs []*flightlock.Client
	servers, _ := realNodes(t, 3)
	for _, s := range servers {
		proxies = append(proxies, redistest.StartProxy(t, s.Addr()))
	}
	for range 3 {
		var nodes []redis.UniversalClient
		for _, p := range proxies {
			nodes = append(nodes, dial(t, p.Addr()))
		}
		cs = append(cs, newClient(t, flightlock.Options{}, nodes...))
	}
	for _, c := range cs { // a new deployment needs all nodes at once, and might wait for that all the time
		useOnAll(t, c, "k", servers...)
	}
	var holder, fence, granted atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for ctx.Err() == nil {
				l, err := cs[i%3].SingleFlightLock(ctx, "k", time.Second,
					flightlock.ExponentialBackoff(time.Millisecond, 10*time.Millisecond))
				if err != nil {
					continue
				}
				if last := fence.Swap(l.Fence()); l.Err() == nil && last >= l.Fence() {
					t.Errorf("fence %d after %d", l.Fence(), last)
				}
				if !holder.CompareAndSwap(0, l.Fence()) && l.Err() == nil {
					t.Errorf("two holders: %d and %d", holder.Load(), l.Fence())
				}
				granted.Add(1)
				holder.CompareAndSwap(l.Fence(), 0)
				_ = l.Release(ctx)
			}
		})
	}
	wg.Go(func() {
		defer cancel()
		began := time.Now()
		lasts := func(d time.Duration) bool { return time.Since(began) < d }
		pace := 40 * time.Millisecond
		for lasts(3*time.Second) || lasts(30*time.Second) && granted.Load() == 0 {
			if !lasts(3 * time.Second) { // a busy machine takes longer to connect than its connections last
				pace = time.Second
			}
			p := proxies[rand.IntN(len(proxies))]
			switch rand.IntN(3) {
			case 0:
				p.ResetAll()
			case 1:
				p.CutReplies(rand.IntN(200))
			case 2:
				p.SetDelay(time.Duration(rand.IntN(5)) * time.Millisecond)
			}
			time.Sleep(rand.N(pace)) // the pace of the faults
		}
	})
	wg.Wait()
	if granted.Load() == 0 {
		t.Error("no lock was granted")
	}
	t.Logf("%d locks", granted.Load())
	for _, p := range proxies {
		p.SetDelay(0)
		p.CutReplies(-1)
	}
	redistest.EventuallyNoLocks(t, 10*time.Second, servers...)
}
