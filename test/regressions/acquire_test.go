package regressions

import (
	"context"
	"errors"
	"fmt"
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
		case strings.HasPrefix(verb, "EVAL") &&
			slices.Contains([]string{lua.Release.SHA, lua.Done.SHA, lua.Undo.SHA}, cmd[1]):
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
				for range 50 {
					start := time.Now()
					l := lockkit.Lock(t, c, "k", 10*time.Second)
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
					for range 40 {
						wg.Go(func() {
							start := time.Now()
							_, err := c.SingleFlightLock(t.Context(), "k", time.Second, retry)
							if !errors.Is(err, flightlock.ErrNotAcquired) {
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
				_, err := c.SingleFlightLock(t.Context(), "k", time.Second, retry)
				if !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Error(err)
				}
				if n := c.Stats().Attempts - before; n != 6 {
					t.Errorf("%d attempts", n)
				}
			})
		})
	}
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

// A ctx that has ended before the call sends nothing, with any method.
func TestAnEndedContextSendsNothing(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, single := c.SingleFlightLock(ctx, "k", time.Second, nil)
		_, try := c.TryLock(ctx, "k", time.Second)
		for name, err := range map[string]error{"SingleFlightLock": single, "TryLock": try} {
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
