package scale

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// The tests of this file have the size of a user: thousands of keys at once, processors that are
// busy, a cold start. FLIGHTLOCK_LONG=1 runs them in full; otherwise with a share of the keys, and
// not each combination.

// sized is n in full, and otherwise a half, or a quarter where the race detector makes each of them
// take longer.
func sized(n int) int {
	switch {
	case redistest.Long():
		return n
	case redistest.Raced:
		return n / 4
	}
	return n / 2
}

// oneIn is how many of n may fail where processors are busy.
func oneIn(each, n int) int { return (n + each - 1) / each }

// clientOn makes a Client with options, by Open or by New over clients with go-redis' default options.
func clientOn(t *testing.T, opts flightlock.Options, open bool, addrs ...string) *flightlock.Client {
	t.Helper()
	if open {
		var urls []string
		for _, addr := range addrs {
			urls = append(urls, "redis://"+addr)
		}
		return lockkit.Open(t, opts, urls...)
	}
	var nodes []redis.UniversalClient
	for _, addr := range addrs {
		nodes = append(nodes, testkit.Dial(t, addr))
	}
	return lockkit.New(t, opts, nodes...)
}

func madeBy(open bool) string {
	if open {
		return "Open"
	}
	return "New"
}

// lockOthers has as many goroutines lock a key of their own each, all at once, and release them.
func lockOthers(t *testing.T, c *flightlock.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var failed atomic.Int64
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if l, err := c.SingleFlightLock(ctx, fmt.Sprint("other", i), 30*time.Second, nil); err == nil {
				_ = l.Release(ctx)
			} else if failed.Add(1) == 1 {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := failed.Load(); n > 1 {
		t.Errorf("%d others were not locked: %+v", n, c.Stats())
	}
}

// tryLocks has as many goroutines try to lock a key of their own each, all at once, and release
// them. It returns how many TryLocks failed, when the last of all returned, and the first error.
func tryLocks(t *testing.T, c *flightlock.Client, prefix string,
	n int) (failed int, last time.Duration, first error) {
	t.Helper()
	var failures atomic.Int64
	var mu sync.Mutex // guards first and last
	var wg sync.WaitGroup
	began := time.Now()
	for i := range n {
		wg.Go(func() {
			l, err := c.TryLock(t.Context(), fmt.Sprint(prefix, i), 30*time.Second)
			took := time.Since(began)
			if err == nil {
				_ = l.Release(t.Context()) // or it is owed
			} else {
				failures.Add(1)
			}
			mu.Lock()
			defer mu.Unlock()
			if first == nil {
				first = err
			}
			last = max(last, took)
		})
	}
	wg.Wait()
	return int(failures.Load()), last, first
}

// Thousands of free keys that are tried at once, on nodes that answer, are all locked: the time
// that a request waits in this process to be sent is not counted against the node. With busy
// processors, one in a thousand may fail.
func TestTryLocksOfFreeKeysSucceedByTheThousand(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, nodeTimeout*9/10, func(t *testing.T, _ []*redistest.MemNode, c *flightlock.Client) {
				const keys = 1000
				failed, took, err := tryLocks(t, c, "k", keys)
				if failed > 0 || took < 2*nodeTimeout { // so that they wait
					t.Errorf("%d of %d failed, the first by %v; the last was back after %v", failed, keys, err, took)
				}
			})
		})
	}
	for _, n := range []int{1, 3} {
		for _, open := range []bool{false, true} {
			for _, warm := range []bool{false, true} {
				for _, busy := range []int{0, 4} {
					if !redistest.Long() && (!warm || open != (n == 3) || busy > 0) {
						continue
					}
					t.Run(fmt.Sprintf("nodes=%d/%s/warm=%v/busy=%d", n, madeBy(open), warm, busy), func(t *testing.T) {
						servers, addrs := sharedServers(t, n)
						c := clientOn(t, options(), open, addrs...)
						if warm {
							warmUp(t, c)
						}
						keys, may := sized(10_000), 0
						if busy > 0 {
							t.Cleanup(spin(busy))
							may = oneIn(1000, keys)
						}
						failed, took, err := tryLocks(t, c, "k", keys)
						t.Logf("%d of %d failed; the last was back after %v: %+v", failed, keys, took, c.Stats())
						if failed > may {
							t.Errorf("%d of %d failed, the first by %v", failed, keys, err)
						}
						redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
						if st := c.Stats(); st.Suspended > 0 || st.Quarantined > 0 {
							t.Errorf("%+v", st)
						}
					})
				}
			}
		}
	}
}

// A cold cache: thousands of keys are missed at once, in one process or each of several. All are
// loaded under a lock.
func TestAColdCacheIsLoadedUnderLocks(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, nodeTimeout*9/10, func(t *testing.T, _ []*redistest.MemNode, c *flightlock.Client) {
				const keys = 1000
				r := fetchOn(t, c, fetch.Options{}).run(t.Context(),
					workload{Prefix: "k", Keys: keys, Load: 20 * time.Millisecond})
				if r.Failed > 0 || r.Unlocked > 0 || r.Loads != keys {
					t.Error(r)
				}
			})
		})
	}
	for _, n := range []int{1, 3} {
		for _, procs := range []int{1, 4} {
			for _, keys := range []int{5000, 20_000} {
				for _, open := range []bool{false, true} {
					if !redistest.Long() && (procs > 1 || keys > 5000 || open == (n == 1)) {
						continue
					}
					t.Run(fmt.Sprintf("nodes=%d/procs=%d/keys=%d/%s", n, procs, keys, madeBy(open)), func(t *testing.T) {
						servers, addrs := sharedServers(t, n)
						cfg := serviceConfig{Nodes: addrs, Open: open, Cold: redistest.Long()}
						if procs > 1 {
							cfg.Cache = redistest.StartServer(t).Addr()
						}
						w := workload{Prefix: t.Name(), Keys: sized(keys), Load: 20 * time.Millisecond}
						r := runServices(t, procs, cfg, w)
						t.Log(r)
						if r.Failed > 0 || r.Unlocked > 0 || r.Lookups > 0 {
							t.Error(r)
						}
						if r.Loads != uint64(w.Keys) {
							t.Errorf("%d loads of %d keys", r.Loads, w.Keys)
						}
						redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
					})
				}
			}
		}
	}
}

// runServices has so many services, each in a process of its own if there are several, do the same
// at once.
func runServices(t *testing.T, procs int, cfg serviceConfig, w workload) outcome {
	t.Helper()
	if procs == 1 {
		return mustService(t, cfg).run(t.Context(), w)
	}
	r, _ := runAll(t, startServiceProcesses(t, procs, cfg), w)
	return r
}

// A process whose processors are busy, with a thousand misses per second: at most one load in a thousand is
// without a lock, and no caller has an error.
func TestABusyProcessLoadsUnderLocks(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, open := range []bool{false, true} {
			if !redistest.Long() && (open || n == 3) {
				continue
			}
			t.Run(fmt.Sprintf("nodes=%d/%s", n, madeBy(open)), func(t *testing.T) {
				servers, addrs := sharedServers(t, n)
				s := mustService(t, serviceConfig{Nodes: addrs, Open: open, Busy: 4})
				seconds := time.Second
				if redistest.Long() {
					seconds *= 10
				}
				load := 20 * time.Millisecond
				r := s.run(t.Context(), workload{Prefix: t.Name(), Keys: 1_000_000, Rate: 1000, For: seconds, Load: load})
				t.Log(r)
				if r.Failed > 0 || r.Unlocked > uint64(oneIn(1000, int(r.Loads))) {
					t.Error(r)
				}
				redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
			})
		}
	}
}

// Locks that are held and refreshed outlast a burst of acquires of other keys.
func TestHeldLocksOutlastABurst(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, nodeTimeout*9/10, func(t *testing.T, _ []*redistest.MemNode, c *flightlock.Client) {
				const ttl = time.Second
				held := holdMany(t, c, 30, ttl)
				for began := time.Now(); time.Since(began) < testkit.Full(3*ttl, ttl*3/2); {
					lockOthers(t, c, 200)
				}
				wantHeld(t, held)
			})
		})
	}
	for _, n := range []int{1, 3} {
		for _, busy := range []int{0, 4} {
			for _, open := range []bool{false, true} {
				if !redistest.Long() && (open || busy > 0 || n == 3) {
					continue
				}
				t.Run(fmt.Sprintf("nodes=%d/busy=%d/%s", n, busy, madeBy(open)), func(t *testing.T) {
					_, addrs := sharedServers(t, n)
					c := clientOn(t, options(), open, addrs...)
					ttl := 30 * time.Second
					switch {
					case redistest.Long() && busy == 0:
						ttl = time.Second
					case redistest.Long():
						ttl = 3 * time.Second
					}
					held := holdMany(t, c, 100, ttl)
					if busy > 0 {
						t.Cleanup(spin(busy))
					}
					lockOthers(t, c, sized(20_000))
					if redistest.Long() {
						time.Sleep(ttl) // by then the last refresh that the burst may have delayed was due
					}
					wantHeld(t, held)
				})
			}
		}
	}
}

// holdMany takes so many keys, whose locks refresh themselves.
func holdMany(t *testing.T, c *flightlock.Client, keys int, ttl time.Duration) (held []*flightlock.Lock) {
	t.Helper()
	for i := range keys {
		l := lockkit.Lock(t, c, fmt.Sprint("held", i), ttl)
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		held = append(held, l)
	}
	return held
}

// wantHeld checks that none is lost, and releases them.
func wantHeld(t *testing.T, held []*flightlock.Lock) {
	t.Helper()
	lost := 0
	var err error
	for _, l := range held {
		if lerr := l.Err(); lerr != nil {
			lost, err = lost+1, lerr
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d are lost: %v", lost, len(held), err)
	}
	for _, l := range held {
		_ = l.Release(t.Context())
	}
}

// lockAll has c take that many keys, from a few goroutines.
func lockAll(t *testing.T, c *flightlock.Client, keys int) []*flightlock.Lock {
	t.Helper()
	locks := make([]*flightlock.Lock, keys)
	fromMany(16, func(g int) {
		for i := g; i < keys; i += 16 {
			l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("k", i), time.Minute, nil)
			if err != nil {
				t.Error(err)
				return
			}
			locks[i] = l
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return locks
}

func fromMany(n int, f func(g int)) {
	var wg sync.WaitGroup
	for g := range n {
		wg.Go(func() { f(g) })
	}
	wg.Wait()
}

// subscriptions is how many channels are subscribed to.
func subscriptions(t *testing.T, s *redistest.Server) int {
	t.Helper()
	return len(s.Do(t, "PUBSUB", "CHANNELS").([]any))
}

// eventuallyUnsubscribed waits until nothing is left of the waiters: a subscription lingers.
func eventuallyUnsubscribed(t *testing.T, s *redistest.Server) {
	t.Helper()
	redistest.Eventually(t, 40*time.Second, "no channel is subscribed to and nobody is known to wait",
		func() bool {
			return subscriptions(t, s) == 0 && !anyWants(t, s)
		})
}

func anyWants(t *testing.T, s *redistest.Server) bool {
	t.Helper()
	for _, key := range s.Keys(t) {
		if strings.Contains(key, ":wants:") {
			return true
		}
	}
	return false
}

// One client waits for thousands of keys at once, by notices: it gets each of them, and
// nothing of that is left.
func TestThousandsOfKeysAreWaitedFor(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	holder, c := lockkit.New(t, lockkit.Patient, s.Client(t)), lockkit.New(t, lockkit.Patient, s.Client(t))
	keys := sized(10_000)
	held := lockAll(t, holder, keys)
	var wg sync.WaitGroup
	for i, before := range held {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			l, err := c.SingleFlightLock(ctx, fmt.Sprint("k", i), 20*time.Second, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if l.Fence() <= before.Fence() {
				t.Errorf("fence %d after %d", l.Fence(), before.Fence())
			}
			until := l.Until() // soon: it was granted for 450 ms from its last poll
			if err := l.Release(ctx); err != nil && (!errors.Is(err, flightlock.ErrNotHeld) ||
				time.Now().Before(until)) {
				t.Error(err)
			}
		})
	}
	redistest.Eventually(t, time.Minute, "all wait and are subscribed", func() bool {
		return c.Stats().Waiters == int64(keys) && subscriptions(t, s) == 1 // its inbox
	})
	fromMany(16, func(g int) {
		for i := g; i < keys; i += 16 {
			if err := held[i].Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	if st := c.Stats(); st.Waiters != 0 || st.Held != 0 || st.Acquired != uint64(keys) {
		t.Errorf("%+v", st)
	}
	eventuallyUnsubscribed(t, s)
	if left := s.Do(t, "EXISTS", "lock:k0", fmt.Sprint("lock:k", keys-1)); left != int64(0) {
		t.Errorf("%v of two keys are left", left)
	}
}
