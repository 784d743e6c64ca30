package regressions

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
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
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Bugs of other lock libraries that flightlock does not have. The comment on each test names the
// library and the bug.

// network is the path from one process to the nodes of a bubble.
type network struct{ cut atomic.Bool }

// over returns clients of the nodes whose requests get lost, silently, while the network is cut.
// Other processes reach the nodes all the same.
func (w *network) over(t *testing.T, nodes []*redistest.MemNode) (clients []redis.UniversalClient) {
	for _, n := range nodes {
		clients = append(clients, n.Client(t, redistest.Writes(func(c net.Conn, p []byte) (int, error) {
			if w.cut.Load() {
				return len(p), nil
			}
			return c.Write(p)
		})))
	}
	return clients
}

// lockKeys are the lock keys that the nodes of a bubble hold.
func lockKeys(nodes []*redistest.MemNode) (keys []string) {
	for _, n := range nodes {
		for _, key := range n.Mini.Keys() {
			if strings.HasPrefix(key, "lock:") {
				keys = append(keys, n.Addr()+" "+key)
			}
		}
	}
	return keys
}

// rueidislock moved its deadline before the nodes had confirmed the extension: in a
// partition, the holder's context outlived the key by 996ms.
func TestAPartitionedHolderStopsBeforeAnotherBegins(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var w network
		a, b := lockkit.New(t, flightlock.Options{}, w.over(t, nodes)...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 2*time.Second)
		if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
			t.Fatal(err)
		}
		ctx := l.Context(t.Context())
		time.Sleep(10*time.Second + 100*time.Millisecond)
		until := l.Until()
		w.cut.Store(true)
		var stopped time.Time
		var wg sync.WaitGroup
		wg.Go(func() {
			for ctx.Err() == nil {
				if l.Err() == nil && l.Until().After(until) {
					t.Errorf("without an answer, the deadline moved by %v", l.Until().Sub(until))
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		wg.Go(func() { <-ctx.Done(); stopped = time.Now() })
		next, err := b.SingleFlightLock(t.Context(), "k", 2*time.Second, flightlock.LimitedRetry(time.Millisecond, 5000))
		begun := time.Now()
		if err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if !stopped.Before(begun) {
			t.Errorf("two holders for %v", stopped.Sub(begun))
		}
		if begun.After(until.Add(100 * time.Millisecond)) {
			t.Errorf("the key was kept for %v after the deadline", begun.Sub(until))
		}
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		if next.Fence() <= l.Fence() {
			t.Errorf("fence %d after %d", next.Fence(), l.Fence())
		}
		lockkit.Release(t, next)
	})
}

// rueidislock's waiters hang for good after an outage of a second: they only listen.
func TestWaitersOutliveAnOutage(t *testing.T) {
	for name, outage := range map[string]func(n *redistest.MemNode, on bool){
		"down": (*redistest.MemNode).Down, "stalled": (*redistest.MemNode).Stall,
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
				lockkit.Lock(t, a, "k", 2*time.Second) // and its holder dies
				start := time.Now()
				var wg sync.WaitGroup
				for range 20 {
					wg.Go(func() { lockkit.Release(t, lockkit.Lock(t, b, "k", 10*time.Second)) })
					wg.Go(func() {
						l, err := b.Lock(t.Context(), "k", 10*time.Second, nil)
						if err != nil {
							t.Error(err)
							return
						}
						lockkit.Release(t, l)
					})
				}
				time.Sleep(500 * time.Millisecond)
				for _, n := range nodes {
					outage(n, true)
				}
				time.Sleep(time.Second)
				for _, n := range nodes {
					outage(n, false)
				}
				wg.Wait()
				if took := time.Since(start); took > 10*time.Second {
					t.Errorf("the waiters took %v", took)
				}
			})
		})
	}
}

// rueidislock: a waiter that is woken and cancels in that instant loses the wake-up for the next.
// gotomicro: up to 5 goroutines of one process contend at once after Forget.
func TestACancelInTheInstantOfHandoffLosesNothing(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		both := map[bool]int{}
		for i := range 500 {
			first := lockkit.Lock(t, c, "k", time.Minute)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			var holders atomic.Int64
			hold := func(l *flightlock.Lock) {
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders", n)
				}
				holders.Add(-1)
				lockkit.Release(t, l)
			}
			var got bool
			wg.Go(func() {
				l, err := c.SingleFlightLock(ctx, "k", time.Minute, nil)
				if got = err == nil; got {
					hold(l)
				} else if !errors.Is(err, context.Canceled) || !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Errorf("the one that gave up got %v", err)
				}
			})
			synctest.Wait()
			for range 2 {
				wg.Go(func() { hold(lockkit.Lock(t, c, "k", time.Minute)) })
			}
			synctest.Wait()
			began := time.Now()
			switch i % 6 { // the waiter finds one when it wakes, or both, in either order
			case 0:
				lockkit.Release(t, first)
				synctest.Wait()
				cancel()
			case 1:
				cancel()
				synctest.Wait()
				lockkit.Release(t, first)
			case 2:
				lockkit.Release(t, first)
				cancel()
			case 3:
				cancel()
				lockkit.Release(t, first)
			default:
				wg.Go(cancel)
				wg.Go(func() { lockkit.Release(t, first) })
			}
			wg.Wait()
			if took := time.Since(began); took != 0 {
				t.Fatalf("the others waited for %v", took)
			}
			both[got]++
		}
		t.Logf("got the lock, or gave up: %v", both)
		if both[true] == 0 || both[false] == 0 {
			t.Error("one of the two did not happen")
		}
		synctest.Wait()
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
		if s := c.Stats(); s.Held != 0 || s.Waiters != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// rueidislock sends the client's wall clock (PXAT): a client whose clock is slow acquires locks
// that expire at once. Here no server ever sees a client's clock.
func TestNoServerSeesTheClientsClock(t *testing.T) {
	t.Parallel()
	loaded := map[string]bool{}
	var mu sync.Mutex
	fake := redistest.StartFake(t, func(cmd []string) string {
		mu.Lock()
		defer mu.Unlock()
		switch verb := strings.ToUpper(cmd[0]); {
		case verb == "PING":
			return "+PONG\r\n"
		case verb == "EVALSHA" && !loaded[cmd[1]]:
			loaded[cmd[1]] = true
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
		case strings.HasPrefix(verb, "EVAL") && (cmd[1] == lua.Release.SHA || cmd[1] == lua.Undo.SHA):
			return ":1\r\n" // deleted
		case strings.HasPrefix(verb, "EVAL"):
			return ":500\r\n"
		}
		return "+OK\r\n"
	})
	c := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patient.NodeTimeout, DisableQuarantine: true},
		testkit.Dial(t, fake.Addr()))
	for range 3 {
		l := lockkit.Lock(t, c, "k", 1500*time.Millisecond)
		if err := l.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		lockkit.Release(t, l)
	}
	now := time.Now()
	var scripts, ttls int
	for _, cmd := range fake.Commands() {
		for _, arg := range cmd {
			for _, absolute := range []string{"PXAT", "EXAT", "EXPIREAT"} {
				if strings.Contains(strings.ToUpper(arg), absolute) {
					t.Errorf("%q has an absolute expiry", cmd)
				}
			}
			if strings.Contains(arg, "redis.call") {
				scripts++
			}
			if arg == "1500" {
				ttls++
			}
			v, err := strconv.ParseFloat(arg, 64)
			if err != nil {
				continue
			}
			for unit, n := range map[string]int64{
				"s": now.Unix(), "ms": now.UnixMilli(), "us": now.UnixMicro(), "ns": now.UnixNano(),
			} {
				if ratio := v / float64(n); ratio > 0.5 && ratio < 2 {
					t.Errorf("%q: %s looks like a time in %s", cmd, arg, unit)
				}
			}
		}
	}
	if scripts < 3 || ttls < 6 {
		t.Errorf("%d scripts and %d ttls were seen: this test checks the wrong thing", scripts, ttls)
	}
}

// redsync waits for every node, by default: one black-holed node costs 5s in each acquire,
// extend and release.
func TestABlackHoledNodeCostsNoTime(t *testing.T) {
	for _, n := range []int{3, 4, 5} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := lockkit.New(t, flightlock.Options{}, clients...)
				lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
				synctest.Wait()
				nodes[n-1].Stall(true)
				for i := range 50 {
					start := time.Now()
					lock := c.SingleFlightLock
					if i%2 == 1 {
						lock = c.Lock
					}
					l, err := lock(t.Context(), "k", 10*time.Second, nil)
					if err != nil {
						t.Fatal(err)
					}
					acquired := time.Since(start)
					if err := l.Refresh(t.Context()); err != nil {
						t.Error(err)
					}
					refreshed := time.Since(start)
					lockkit.Release(t, l)
					if all := time.Since(start); all != 0 {
						t.Fatalf("acquire, then refresh, then release took until %v, %v, %v", acquired, refreshed, all)
					}
				}
				nodes[n-1].Stall(false)
				time.Sleep(5 * time.Second)
				if keys := lockKeys(nodes); len(keys) != 0 {
					t.Errorf("left: %v", keys)
				}
			})
		})
	}
}

// redsync cleans up with the caller's ctx, and gotomicro not at all: when ctx ends during the
// attempt, the key is an orphan for the rest of its ttl. redsync's error hides ctx's.
func TestAContextThatEndsDuringTheAttemptLeavesNoOrphan(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		for i, n := range nodes {
			n.SetDelay(time.Duration(i+1) * 5 * time.Millisecond)
		}
		var early, got int
		for patience := time.Millisecond; patience < 45*time.Millisecond; patience += time.Millisecond {
			for name, lock := range map[string]func(context.Context) (*flightlock.Lock, error){
				"SingleFlightLock": func(ctx context.Context) (*flightlock.Lock, error) {
					return c.SingleFlightLock(ctx, "k", time.Minute, nil)
				},
				"Lock":    func(ctx context.Context) (*flightlock.Lock, error) { return c.Lock(ctx, "k", time.Minute, nil) },
				"TryLock": func(ctx context.Context) (*flightlock.Lock, error) { return c.TryLock(ctx, "k", time.Minute) },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				start := time.Now()
				l, err := lock(ctx)
				took := time.Since(start)
				cancel()
				switch {
				case err == nil:
					got++
					lockkit.Release(t, l)
				case !errors.Is(err, context.DeadlineExceeded) ||
					// neither: granted in the instant in which ctx ended
					errors.Is(err, flightlock.ErrNotAcquired) && errors.Is(err, flightlock.ErrUnavailable):
					t.Errorf("%s, %v: %v", name, patience, err)
				default:
					early++
				}
				if took > patience {
					t.Errorf("%s, %v: took %v", name, patience, took)
				}
				time.Sleep(100 * time.Millisecond)
				if keys := lockKeys(nodes); len(keys) != 0 {
					t.Fatalf("%s, %v: left %v", name, patience, keys)
				}
			}
		}
		if early == 0 || got == 0 {
			t.Errorf("%d ended early, %d got the lock: no ctx ended in the middle", early, got)
		}
	})
}

// redsync extends by SET NX where the key is missing: a lock that expired, was taken by another and
// released again "extends" successfully.
func TestRefreshDoesNotResurrectALockThatAnotherHadMeanwhile(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 30*time.Second)
		synctest.Wait()
		for _, n := range nodes { // the servers' clocks jumped: there the key is over
			n.Mini.FastForward(time.Minute)
		}
		lockkit.Release(t, lockkit.Lock(t, b, "k", time.Second))
		synctest.Wait()
		ctx := l.Context(t.Context())
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("got %v", err)
		}
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		time.Sleep(time.Second)
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("brought back: %v", keys)
		}
	})
}

// redsync's acquire is not idempotent: go-redis repeats a SET NX whose reply is lost, and the node
// that holds our key counts as taken, for the whole ttl.
func TestALostReplyDoesNotBlockItsOwner(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	// dial leaves go-redis' retries on.
	c := lockkit.New(t, flightlock.Options{NodeTimeout: 500 * time.Millisecond}, testkit.Dial(t, proxy.Addr()))
	lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
	for i, fault := range []struct{ begin, end func() }{
		{func() { proxy.CutReplies(0) }, func() {}},
		{func() { proxy.CutReplies(2) }, func() {}},
		{func() { proxy.DropReplies(true) }, func() { proxy.DropReplies(false); proxy.ResetAll() }},
	} {
		key := fmt.Sprint("k", i)
		lockkit.Release(t, lockkit.Lock(t, c, key, time.Second)) // so that its fence counter exists
		before := s.CommandCalls(t)["set"]
		fault.begin()
		l, err := c.SingleFlightLock(t.Context(), key, time.Minute, flightlock.NoRetry())
		fault.end()
		if err == nil { // the reply arrived after all
			t.Errorf("fault %d struck nobody", i)
			lockkit.Release(t, l)
			continue
		}
		if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("fault %d: %v", i, err)
		}
		if n := s.CommandCalls(t)["set"] - before; n != 1 {
			t.Errorf("fault %d: one attempt asked %d times", i, n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // far below the ttl
		l, err = c.SingleFlightLock(ctx, key, time.Minute,
			flightlock.ExponentialBackoff(time.Millisecond, 10*time.Millisecond))
		cancel()
		if err != nil {
			t.Fatalf("fault %d, the next attempt: %v", i, err)
		}
		lockkit.Release(t, l)
		redistest.Eventually(t, 20*time.Second, "no key is left", func() bool {
			return !slices.Contains(s.Keys(t), "lock:"+key)
		})
	}
}

// The same while the caller continues by itself: what its lost attempt acquired does not block it.
func TestALostReplyIsRetriedAtOnce(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	c := lockkit.New(t, flightlock.Options{NodeTimeout: time.Second}, testkit.Dial(t, proxy.Addr()))
	lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
	for i := range 20 {
		proxy.CutReplies(i % 4)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		l, err := c.SingleFlightLock(ctx, "k", time.Minute,
			flightlock.ExponentialBackoff(time.Millisecond, 5*time.Millisecond))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		proxy.CutReplies(-1)
		lockkit.Release(t, l)
	}
	redistest.Eventually(t, 20*time.Second, "no key is left", func() bool {
		return !slices.Contains(s.Keys(t), "lock:k")
	})
}

// redislock compares owners by prefix: worker-1 obtains worker-10's lock.
func TestOwnersAreComparedWhole(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l, err := c.Lock(t.Context(), "k", time.Minute, nil) // owner ...-1
		if err != nil {
			t.Fatal(err)
		}
		for range 40 { // owners ...-2, ..., ...-10, ..., ...-1a
			_, err := c.Lock(t.Context(), "k", time.Minute, flightlock.NoRetry())
			if !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Fatalf("got %v", err)
			}
		}
		lockkit.Release(t, l)
		for _, other := range []func(owner string) string{
			func(owner string) string { return owner + "0" },
			func(owner string) string { return owner[:len(owner)-1] },
			func(owner string) string { return "x" + owner },
			func(string) string { return "" },
		} {
			for name, use := range map[string]func(*flightlock.Lock) error{
				"Refresh": func(l *flightlock.Lock) error { return l.Refresh(t.Context()) },
				"Release": func(l *flightlock.Lock) error { return l.Release(t.Context()) },
			} {
				l := lockkit.Lock(t, c, "k", time.Minute)
				value := other(l.Owner())
				if err := nodes[0].Mini.Set("lock:k", value); err != nil {
					t.Fatal(err)
				}
				if err := use(l); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("%s of %q's lock by %q: %v", name, value, l.Owner(), err)
				}
				synctest.Wait()
				if got, err := nodes[0].Mini.Get("lock:k"); got != value || err != nil {
					t.Errorf("%s made %q of %q, %v", name, got, value, err)
				}
				nodes[0].Mini.Del("lock:k")
			}
		}
		// Nor does an attempt acquire the key of an owner that its own is a prefix of, or the other way
		// round.
		l = lockkit.Lock(t, c, "k", time.Minute)
		id, count, _ := cutLast(l.Owner(), "-")
		n, err := strconv.ParseUint(count, 36, 64)
		if err != nil {
			t.Fatal(err)
		}
		lockkit.Release(t, l)
		synctest.Wait()
		for _, other := range []func(owner string) string{
			func(owner string) string { return owner + "0" },
			func(owner string) string { return owner[:len(owner)-1] },
			func(string) string { return "" },
		} {
			n++
			value := other(id + "-" + strconv.FormatUint(n, 36))
			if err := nodes[0].Mini.Set("lock:k", value); err != nil {
				t.Fatal(err)
			}
			if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Errorf("%q is held, and TryLock says %v", value, err)
			}
			synctest.Wait()
			if got, err := nodes[0].Mini.Get("lock:k"); got != value || err != nil {
				t.Errorf("TryLock made %q of %q, %v", got, value, err)
			}
		}
	})
}

// cutLast is strings.Cut at the last sep.
func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// redislock and gotomicro keep a strategy's count in the strategy: shared, it is exhausted
// for good.
func TestOneStrategyServesAllCalls(t *testing.T) {
	for name, retry := range map[string]flightlock.RetryStrategy{
		"LimitedRetry": flightlock.LimitedRetry(10*time.Millisecond, 5),
		"Limit":        flightlock.Limit(flightlock.LimitedRetry(10*time.Millisecond, 100), 5),
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				if err := nodes[0].Mini.Set("lock:k", "somebody else"); err != nil {
					t.Fatal(err)
				}
				c := lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...) // each delay is an attempt
				for range 3 {
					var wg sync.WaitGroup
					for i := range 40 {
						wg.Go(func() {
							lock := c.SingleFlightLock
							if i%2 == 1 {
								lock = c.Lock
							}
							start := time.Now()
							if _, err := lock(t.Context(), "k", time.Second, retry); !errors.Is(err, flightlock.ErrNotAcquired) {
								t.Error(err)
							}
							if took := time.Since(start); took != 50*time.Millisecond {
								t.Errorf("gave up after %v", took)
							}
						})
					}
					wg.Wait()
				}
				before := c.Stats().Attempts
				if _, err := c.Lock(t.Context(), "k", time.Second, retry); !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Error(err)
				}
				if n := c.Stats().Attempts - before; n != 6 {
					t.Errorf("%d attempts", n)
				}
			})
		})
	}
}

// gotomicro's Forget, after its flight has ended, removes the next flight: up to 5 goroutines of
// one process contend at once. Here it is one, however callers arrive and leave.
func TestOneContenderPerProcess(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		if err := nodes[0].Mini.Set("lock:k", "somebody else"); err != nil {
			t.Fatal(err)
		}
		c := lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...)
		every := flightlock.LimitedRetry(10*time.Millisecond, 1000)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				for range 20 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(20+i)*time.Millisecond)
					if _, err := c.SingleFlightLock(ctx, "k", time.Second, every); !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
					cancel()
				}
			})
		}
		start := time.Now()
		wg.Wait()
		// A new front waiter may make an attempt at once, so that is 2,000 attempts at the very most. One
		// contender at a time makes one in 10ms, and when the front changes.
		polls := int(time.Since(start) / (10 * time.Millisecond))
		if n := int(c.Stats().Attempts); n < polls/2 || n > 3*polls {
			t.Errorf("%d attempts, and there was time for %d polls", n, polls)
		}
	})
}

// x/sync singleflight fails everyone when the leader's ctx ends.
func TestTheFirstCallersContextIsItsOwn(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		for _, n := range nodes {
			n.SetDelay(10 * time.Millisecond)
		}
		before := c.Stats().Attempts
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := c.SingleFlightLock(ctx, "k", time.Minute, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the first got %v", err)
			}
		})
		synctest.Wait()
		for range 10 {
			wg.Go(func() { lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute)) })
		}
		wg.Wait()
		if n := c.Stats().Attempts - before; n != 1 {
			t.Errorf("%d attempts: the one under way was lost", n)
		}
	})
}

// gotomicro gives fractions of a second to EX: "1.5" is a server error.
func TestFractionsOfATTL(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	for ttl, ms := range map[time.Duration]int64{
		1500 * time.Millisecond:              1500,
		1500*time.Millisecond + 700_000:      1500, // never longer in Redis than asked for
		59_999_999_999:                       59_999,
		10*time.Millisecond + 999_999:        10,
		time.Second + time.Nanosecond:        1000,
		333*time.Millisecond + 333_333:       333,
		30 * time.Second:                     30_000,
		time.Minute - 1*time.Microsecond - 1: 59_999,
	} {
		var l *flightlock.Lock
		var asked time.Time
		redistest.Eventually(t, 20*time.Second, fmt.Sprintf("a lock for %v comes in time", ttl), func() (ok bool) {
			var err error
			asked = time.Now()
			if l, err = c.TryLock(t.Context(), "k", ttl); err != nil && ms > 10_000 {
				t.Fatalf("%v: %v", ttl, err)
			}
			return err == nil
		})
		most := time.Duration(ms) * time.Millisecond
		if left := l.Until().Sub(asked); left > most-2*time.Millisecond+time.Since(asked) {
			t.Errorf("%v: believed for %v", ttl, left)
		}
		if pttl := servers[0].Do(t, "PTTL", "lock:k").(int64); pttl > ms || ms > 10_000 && pttl < ms-10_000 {
			t.Errorf("%v: PTTL %d, want %d", ttl, pttl, ms)
		}
		if err := l.Refresh(t.Context()); err != nil && ms > 10_000 {
			t.Errorf("%v: Refresh: %v", ttl, err)
		}
		if pttl := servers[0].Do(t, "PTTL", "lock:k").(int64); pttl > ms {
			t.Errorf("%v: PTTL %d after a refresh, want %d", ttl, pttl, ms)
		}
		if err := l.Release(t.Context()); err != nil && ms > 10_000 {
			t.Errorf("%v: Release: %v", ttl, err)
		}
	}
}

// gotomicro's AutoRefresh goes on past the ttl without bound.
func TestAutoRefreshEndsWithTheLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, c, "k", time.Second)
		retry := flightlock.ExponentialBackoff(time.Millisecond, 2*time.Millisecond)
		if err := l.AutoRefresh(flightlock.RefreshPolicy{Retry: retry}); err != nil {
			t.Fatal(err)
		}
		ctx := l.Context(t.Context())
		for _, n := range nodes {
			n.Down(true)
		}
		<-ctx.Done()
		tried := c.Stats().Refreshes
		if tried < 10 {
			t.Errorf("%d refreshes were tried", tried)
		}
		if now := time.Now(); now.After(l.Until().Add(2 * time.Millisecond)) {
			t.Errorf("lost %v after the deadline", now.Sub(l.Until()))
		}
		for _, n := range nodes {
			n.Down(false)
		}
		time.Sleep(time.Minute)
		if n := c.Stats().Refreshes - tried; n > 0 {
			t.Errorf("%d refreshes of a lock that was over", n)
		}
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// redlock-hyperf computes the quorum as a float: of 3 nodes it needs 3. A majority is
// enough, and less is not.
func TestAMajorityIsEnough(t *testing.T) {
	for n := 1; n <= 6; n++ {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := lockkit.New(t, flightlock.Options{}, clients...)
				lockkit.Release(t, lockkit.Lock(t, c, "first",
					time.Minute)) // all nodes of three and more must have been reached once
				q := n/2 + 1
				for _, node := range nodes[q:] {
					node.Down(true)
				}
				l, err := c.TryLock(t.Context(), "k", time.Minute)
				if err != nil {
					t.Fatalf("with %d of %d nodes: %v", q, n, err)
				}
				if err := l.Refresh(t.Context()); err != nil {
					t.Error(err)
				}
				lockkit.Release(t, l)
				nodes[0].Down(true)
				var qe *flightlock.QuorumError
				_, err = c.TryLock(t.Context(), "k", time.Minute)
				if !errors.Is(err, flightlock.ErrUnavailable) || !errors.As(err, &qe) || qe.Need != q {
					t.Errorf("with %d of %d nodes: %v", q-1, n, err)
				}
				for _, node := range nodes {
					node.Down(false)
				}
				time.Sleep(5 * time.Second)
				if keys := lockKeys(nodes); len(keys) != 0 {
					t.Errorf("left: %v", keys)
				}
			})
		})
	}
}

// node-redlock's contenders on an even number of nodes can tie for ever.
func TestAnEvenNumberOfNodesDoesNotTieForEver(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
				for _, node := range nodes {
					node.SetDelay(time.Millisecond)
				}
				// Half of the nodes are close to one process and distant from the other.
				var cs []*flightlock.Client
				for p := range 2 {
					var clients []redis.UniversalClient
					for i, node := range nodes {
						var far time.Duration
						if i%2 != p {
							far = 3 * time.Millisecond
						}
						clients = append(clients, node.Client(t, redistest.Late(far)))
					}
					// Without notices: a Write that sleeps under go-redis's own mutex would stop
					// virtual time.
					cs = append(cs, lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...))
				}
				start := time.Now()
				var wg sync.WaitGroup
				for _, c := range cs {
					wg.Go(func() {
						for range 20 {
							lockkit.Release(t, lockkit.Lock(t, c, "k", 10*time.Second))
						}
					})
				}
				wg.Wait()
				if took := time.Since(start); took > 20*time.Second {
					t.Errorf("40 locks took %v", took)
				}
				attempts := cs[0].Stats().Attempts + cs[1].Stats().Attempts
				t.Logf("%d attempts in %v", attempts, time.Since(start))
				if attempts == 40 {
					t.Error("nothing ever tied")
				}
			})
		})
	}
}

// node-redlock's release stalls for seconds after an abort, and its error masks the reason of the
// abort.
func TestReleaseNeverStalls(t *testing.T) {
	testkit.Bubble(t, 4, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 40 * time.Millisecond}, clients...)
		ctx, abort := context.WithCancelCause(t.Context())
		l, err := c.SingleFlightLock(ctx, "k", 30*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		reason := errors.New("the caller's reason")
		work := l.Context(ctx)
		synctest.Wait()
		nodes[0].Stall(true)
		nodes[1].Stall(true)
		abort(reason)
		start := time.Now()
		if err := l.Release(ctx); !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, context.Canceled) {
			t.Errorf("with 2 of 4 nodes: %v", err)
		}
		if took := time.Since(start); took > 40*time.Millisecond {
			t.Errorf("took %v", took)
		}
		if context.Cause(work) != reason {
			t.Errorf("cause %v", context.Cause(work))
		}
		nodes[0].Stall(false)
		nodes[1].Stall(false)
		time.Sleep(3 * time.Second) // a tenth of the ttl
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// Redisson's renewal outlives the holder: its locks are immortal. Here a holder that hangs is kept
// alive by nobody, not even by those that wait and refresh, and its Context ends.
func TestNoLockIsImmortal(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		hung := lockkit.Lock(t, a, "k", time.Second)
		until := hung.Until()
		ctx := hung.Context(t.Context())
		var wg sync.WaitGroup
		var mu sync.Mutex
		var fences []int64
		work := func(c *flightlock.Client) {
			l := lockkit.Lock(t, c, "k", time.Second)
			if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
				t.Error(err)
			}
			if ctx.Err() == nil {
				t.Error("two holders")
			}
			mu.Lock()
			fences = append(fences, l.Fence())
			mu.Unlock()
			time.Sleep(1500 * time.Millisecond) // longer than the ttl
			lockkit.Release(t, l)
		}
		for i := range 6 {
			wg.Go(func() { work([]*flightlock.Client{a, a, b}[i%3]) })
		}
		<-ctx.Done()
		if now := time.Now(); now.After(until.Add(2*time.Millisecond)) || hung.Until().After(until) {
			t.Errorf("the holder that hangs lost the lock at %v, and had until %v, at last %v", now, until, hung.Until())
		}
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		wg.Wait()
		if took := time.Since(until); took > 6*1500*time.Millisecond+3*time.Second {
			t.Errorf("the others took %v", took)
		}
		if !slices.IsSorted(fences) || len(slices.Compact(fences)) != 6 || fences[0] <= hung.Fence() {
			t.Errorf("fences %v after %d", fences, hung.Fence())
		}
		if err := hung.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Release of the one that hung: %v", err)
		}
		// Nothing renews what was released.
		time.Sleep(3 * time.Second)
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// The same where the lease is longer than the Lock: a Lock of 1s that was handed over, in a
// lease of 30s that is renewed for the handoff, ends after 1s.
func TestAHungHolderIsNotKeptByALongerLease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		locks := make([]chan *flightlock.Lock, 4)
		for i, ttl := range []time.Duration{30 * time.Second, 30 * time.Second, time.Second, 30 * time.Second} {
			locks[i] = make(chan *flightlock.Lock, 1)
			go func() { locks[i] <- lockkit.Lock(t, c, "k", ttl) }()
			synctest.Wait()
		}
		lockkit.Release(t, <-locks[0]) // this handoff brings tokens for the following ones
		second := <-locks[1]
		time.Sleep(10 * time.Second)
		before := c.Stats().Refreshes
		lockkit.Release(t, second)
		hung := <-locks[2]
		given := time.Now()
		synctest.Wait()
		if c.Stats().Refreshes == before {
			t.Error("the handoff did not renew the lease: this test shows nothing")
		}
		next := <-locks[3]
		if kept := time.Since(given); kept > time.Second || kept < 900*time.Millisecond {
			t.Errorf("the holder that hangs was kept for %v", kept)
		}
		if !errors.Is(hung.Err(), flightlock.ErrLockLost) || next.Err() != nil || next.Fence() <= hung.Fence() {
			t.Errorf("hung: %v, fence %d; next: %v, fence %d", hung.Err(), hung.Fence(), next.Err(), next.Fence())
		}
		lockkit.Release(t, next)
	})
}

// Redisson only logs that a lock was lost. Here its Context ends with the next refresh that
// finds out, and every method says so.
func TestALossIsSignalled(t *testing.T) {
	for name, lose := range map[string]func(*redistest.MemNode){
		"deleted": func(n *redistest.MemNode) { n.Mini.Del("lock:k") },
		"flushed": func(n *redistest.MemNode) { n.Mini.FlushAll() },
		"taken":   func(n *redistest.MemNode) { _ = n.Mini.Set("lock:k", "somebody else") },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := lockkit.New(t, flightlock.Options{}, clients...)
				l := lockkit.Lock(t, c, "k", 30*time.Second)
				if err := l.AutoRefresh(flightlock.RefreshPolicy{Interval: time.Second}); err != nil {
					t.Fatal(err)
				}
				ctx := l.Context(t.Context())
				time.Sleep(500 * time.Millisecond)
				lose(nodes[0])
				lose(nodes[2])
				start := time.Now()
				<-ctx.Done()
				if took := time.Since(start); took > 500*time.Millisecond {
					t.Errorf("signalled after %v", took)
				}
				for what, err := range map[string]error{"cause": context.Cause(ctx), "Err": l.Err()} {
					if !errors.Is(err, flightlock.ErrLockLost) {
						t.Errorf("%s: %v", what, err)
					}
				}
				if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Release: %v", err)
				}
				if n := c.Stats().Lost; n != 1 {
					t.Errorf("%d lost", n)
				}
			})
		})
	}
}

// Redisson leaked 25 million fence counters. Here 50,000 keys of 4 slots (22,000 with the race detector)
// leave 16 counters per slot, and no other key.
func TestFenceCountersAreBounded(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	// Nobody may time out here, however busy the machine is.
	c := lockkit.New(t, flightlock.Options{NodeTimeout: 10 * time.Second}, nodes...)
	tags := []string{"{a}", "{b}", "{c}", "{d}"}
	lockSome := func(from, to int) {
		t.Helper()
		var next atomic.Int64
		next.Store(int64(from))
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
					l, err := c.TryLock(t.Context(), fmt.Sprint(tags[i%len(tags)], i), time.Minute)
					if err != nil {
						t.Error(err)
						return
					}
					if err := l.Release(t.Context()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	memory := func() int64 {
		for line := range strings.Lines(servers[0].Do(t, "INFO", "memory").(string)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory_dataset:"); ok {
				n, _ := strconv.ParseInt(v, 10, 64)
				return n
			}
		}
		t.Fatal("no used_memory_dataset")
		return 0
	}
	lockSome(0, 2000)
	before := memory()
	lockSome(2000, testkit.Sized(50_000, 22_000))
	perSlot := map[string]int{}
	for _, key := range servers[0].Keys(t) {
		slot, _, ok := strings.Cut(key, "}")
		if !strings.HasPrefix(key, "flightlock:") || !ok {
			t.Errorf("left: %q", key)
			continue
		}
		if slot != "flightlock:{boot" && slot != "flightlock:{sets" { // the node's marker, and its clients' announcements
			perSlot[slot]++
		}
	}
	for slot, n := range perSlot {
		if n > 16 {
			t.Errorf("%d counters of slot %s", n, slot)
		}
	}
	if len(perSlot) != len(tags) {
		t.Errorf("counters of %d slots: %v", len(perSlot), perSlot)
	}
	if grown := memory() - before; grown > 1<<20 { // 48,000 counters are over 4 MiB, 20,000 over 1.7
		t.Errorf("the dataset grew by %d bytes", grown)
	}
}

// A second Release, and Refresh, AutoRefresh and Context after Release: the lock is over, nothing
// is sent, and nobody else is affected.
func TestAfterRelease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", time.Minute)
		lockkit.Release(t, l)
		synctest.Wait()
		next := lockkit.Lock(t, b, "k", time.Minute)
		synctest.Wait()
		before := a.Stats().Commands
		for name, err := range map[string]error{
			"Release": l.Release(t.Context()), "Refresh": l.Refresh(t.Context()),
			"AutoRefresh": l.AutoRefresh(flightlock.RefreshPolicy{}), "Err": l.Err(),
		} {
			if !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("%s: %v", name, err)
			}
		}
		time.Sleep(time.Second)
		if n := a.Stats().Commands - before; n != 0 {
			t.Errorf("%d commands for a lock that was released", n)
		}
		if keys := lockKeys(nodes); len(keys) != 3 || next.Err() != nil {
			t.Errorf("the next holder has %v, %v", keys, next.Err())
		}
		lockkit.Release(t, next)
	})
}

// A ctx that has ended before the call sends nothing, with any method.
func TestAnEndedContextSendsNothing(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, single := c.SingleFlightLock(ctx, "k", time.Second, nil)
		_, alone := c.Lock(ctx, "k", time.Second, nil)
		_, try := c.TryLock(ctx, "k", time.Second)
		for name, err := range map[string]error{"SingleFlightLock": single, "Lock": alone, "TryLock": try} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if s := c.Stats(); s.Commands != 0 || s.Attempts != 0 || s.Waiters != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// What retrying cannot fix is final only where it puts the majority out of reach: a list at the
// key, on one node of three, costs that node's vote.
func TestAListOnOneNodeOfThree(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		if _, err := nodes[0].Mini.Push("lock:k", "x"); err != nil {
			t.Fatal(err)
		}
		l := lockkit.Lock(t, c, "k", time.Minute)
		if err := l.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		lockkit.Release(t, l)
		synctest.Wait()
		for _, n := range nodes[1:] { // held, for now: a reason to wait
			if err := n.Mini.Set("lock:k", "somebody else"); err != nil {
				t.Fatal(err)
			}
			n.Mini.SetTTL("lock:k", time.Second)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
		synctest.Wait()
		if _, err := nodes[1].Mini.Push("lock:k", "x"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
		if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
			!strings.Contains(err.Error(), "WRONGTYPE") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
		time.Sleep(2 * time.Second)
		for _, n := range nodes[:2] {
			if list, err := n.Mini.List("lock:k"); len(list) != 1 || err != nil {
				t.Errorf("the list is %v, %v", list, err)
			}
		}
		if nodes[2].Mini.Exists("lock:k") {
			t.Error("the failed attempt left its vote")
		}
	})
}

// Callers of a hot key whose ctx end at random instants, of attempts and handoffs alike,
// get the lock or ctx's error; nobody waits for what another gave up, and no key is left.
func TestCallersThatComeAndGo(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		cs := []*flightlock.Client{
			lockkit.New(t, flightlock.Options{}, clients...),
			lockkit.New(t, flightlock.Options{}, clients...),
		}
		for i, n := range nodes {
			n.SetDelay(time.Duration(i+1) * 100 * time.Microsecond)
		}
		var wg sync.WaitGroup
		var holders, got, gaveUp atomic.Int64
		for i := range 60 {
			wg.Go(func() {
				for range 30 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(20_000))*time.Microsecond)
					l, err := cs[i%2].SingleFlightLock(ctx, "k", 10*time.Second,
						flightlock.ExponentialBackoff(time.Millisecond, 2*time.Millisecond))
					switch {
					case err == nil:
						if n := holders.Add(1); n != 1 {
							t.Errorf("%d holders", n)
						}
						time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
						holders.Add(-1)
						got.Add(1)
						lockkit.Release(t, l)
					case errors.Is(err, context.DeadlineExceeded):
						gaveUp.Add(1)
					default:
						t.Error(err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		t.Logf("%d got the lock, %d gave up", got.Load(), gaveUp.Load())
		if got.Load() == 0 || gaveUp.Load() == 0 {
			t.Error("one of the two did not happen")
		}
		time.Sleep(time.Second) // a tenth of the ttl
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
		for _, c := range cs {
			if s := c.Stats(); s.Held != 0 || s.Waiters != 0 || s.Debts != 0 {
				t.Errorf("%+v", s)
			}
		}
	})
}
