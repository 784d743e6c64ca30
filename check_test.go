package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
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

// The end of ctx, or Close, ends Check, which returns what is known by then.
func TestCheckEnds(t *testing.T) {
	// A call of go-redis that nobody answers ends by its deadline: after 2s, with this NodeTimeout.
	c := lockkit.New(t, flightlock.Options{}, lockkit.DialOnce(t, redistest.BlackHole(t)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := c.Check(ctx); !errors.Is(err, context.Canceled) || len(r.Findings) == 0 {
		t.Errorf("got %v, %v", r, err)
	}
	got := make(chan error)
	go func() {
		_, err := c.Check(context.Background())
		got <- err
	}()
	lockkit.Close(t, c)
	if err := <-got; !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("closed meanwhile: %v", err)
	}
	if _, err := c.Check(t.Context()); !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("closed before: %v", err)
	}
}

// A check asks one thing after the other, and takes as long as that does with nodes that are far away.
func TestCheckOfFarNodes(t *testing.T) {
	for _, trip := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond} {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			testkit.Delay(trip/2, nodes...)
			c := lockkit.New(t, flightlock.Options{NodeTimeout: 2 * trip}, clients...)
			r, err := c.Check(t.Context())
			testkit.Must(t, err)
			for _, f := range r.Findings {
				if f.Status == flightlock.StatusFail {
					t.Errorf("at round trips of %v: %v", trip, f)
				}
			}
		})
	}
}

// A node that is farther away than NodeTimeout never has a vote. The errors of locks, and Check, name what
// was measured and NodeTimeout; and Check fails, since with such nodes nobody gets a lock.
func TestNodesFartherAwayThanNodeTimeout(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...)
		fails := func(want string) {
			t.Helper()
			if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %s", err, want)
			}
		}
		nodes[0].SetDelay(40 * time.Millisecond) // each way
		fails("no answer to the login within 50ms, which is NodeTimeout; to connect took ")
		nodes[0].SetDelay(20 * time.Millisecond)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		r, err := c.Check(t.Context())
		testkit.Must(t, err)
		lockkit.WantFinding(t, r, nodes[0].Addr(), "reachable", flightlock.StatusWarn, "answers in 40ms")

		nodes[0].SetDelay(40 * time.Millisecond)
		fails("no answer within 50ms")
		time.Sleep(time.Second)
		fails("no answer within 50ms, which is NodeTimeout: the last answer took 80ms")
		r, err = c.Check(t.Context())
		testkit.Must(t, err)
		lockkit.WantFinding(t, r, nodes[0].Addr(), "reachable", flightlock.StatusFail,
			"answers in 80ms, and NodeTimeout is 50ms: it has no vote")
		if r.Status != flightlock.StatusFail {
			t.Errorf("%v", r)
		}
	})
}

// Clocks that are apart, and clocks that run at different rates, are found.
func TestCheckOfClocks(t *testing.T) {
	t.Parallel()
	began := time.Now()
	clock := func(now func() time.Time) *redis.Client {
		f := redistest.StartFake(t, func(cmd []string) string {
			if strings.EqualFold(cmd[0], "TIME") {
				at := now()
				sec, usec := fmt.Sprint(at.Unix()), fmt.Sprint(at.Nanosecond()/1000)
				return fmt.Sprintf("*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(sec), sec, len(usec), usec)
			}
			return "-ERR unknown command\r\n"
		})
		return lockkit.DialOnce(t, f.Addr())
	}
	right, late := clock(time.Now), clock(func() time.Time { return time.Now().Add(-time.Hour) })
	fast := clock(func() time.Time { return began.Add(3 * time.Since(began)) })
	other := clock(time.Now)
	r := lockkit.CheckReached(t, lockkit.New(t, lockkit.Patient, right, late, fast, other))
	lockkit.WantFinding(t, r, right.Options().Addr, "clock offset", flightlock.StatusOK)
	lockkit.WantFinding(t, r, late.Options().Addr, "clock offset", flightlock.StatusWarn, "chronyc")
	lockkit.WantFinding(t, r, fast.Options().Addr, "clock drift", flightlock.StatusFail, "chronyc",
		"DriftFactor")
	lockkit.WantFinding(t, r, right.Options().Addr, "version", flightlock.StatusUnknown, "unknown command")
	lockkit.WantFinding(t, r, right.Options().Addr, "role", flightlock.StatusUnknown)
}

// Old servers are found by what HELLO or INFO says.
func TestCheckOfVersions(t *testing.T) {
	for name, tc := range map[string]struct {
		info string
		want flightlock.Status
	}{
		"redis 5.0": {"run_id:f00d\r\nredis_version:5.0.14", flightlock.StatusFail},
		// like that version, it says, and has no run_id
		"kvrocks":    {"redis_version:4.0.0", flightlock.StatusUnknown},
		"redis 6.0":  {"redis_version:6.0.16", flightlock.StatusOK},
		"redis 6.2":  {"redis_version:6.2.0", flightlock.StatusOK},
		"redis 10.0": {"redis_version:10.0.1", flightlock.StatusOK},
		"valkey 7.2": {"redis_version:7.2.4\r\nvalkey_version:7.2.5", flightlock.StatusOK},
		"valkey 7.1": {"run_id:f00d\r\nredis_version:7.2.4\r\nvalkey_version:7.1.0", flightlock.StatusFail},
	} {
		t.Run(name, func(t *testing.T) {
			f := redistest.StartFake(t, func(cmd []string) string {
				if strings.EqualFold(cmd[0], "INFO") {
					return fmt.Sprintf("$%d\r\n%s\r\n", len(tc.info), tc.info)
				}
				return "-ERR unknown command\r\n"
			})
			r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, lockkit.DialOnce(t, f.Addr())))
			lockkit.WantFinding(t, r, f.Addr(), "version", tc.want)
		})
	}
}

// A service that is moved from 3 nodes to 5 has clients of both kinds for a while. Each finds out
// by the announcements of the others, soon after their first lock.
func TestCheckFindsOtherSetsOfNodes(t *testing.T) {
	t.Parallel()
	lockOnce := func(
		t *testing.T, opts flightlock.Options, clients ...redis.UniversalClient,
	) *flightlock.Client {
		c := lockkit.New(t, opts, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		return c
	}
	sets := map[string]struct {
		ours, theirs []int
		want         flightlock.Status
	}{
		"3 to 5":             {[]int{0, 1, 2}, []int{0, 1, 2, 3, 4}, flightlock.StatusFail},
		"5 to 3":             {[]int{0, 1, 2, 3, 4}, []int{0, 1, 2}, flightlock.StatusFail},
		"1 to 3":             {[]int{0}, []int{0, 1, 2}, flightlock.StatusFail},
		"one replaced":       {[]int{0, 1, 2}, []int{0, 1, 3}, flightlock.StatusFail},
		"one added":          {[]int{0, 1, 2}, []int{0, 1, 2, 3}, flightlock.StatusWarn},
		"one removed":        {[]int{0, 1, 2, 3}, []int{0, 1, 2}, flightlock.StatusWarn},
		"in another order":   {[]int{0, 1, 2}, []int{2, 0, 1}, flightlock.StatusOK},
		"nothing in common":  {[]int{0, 1, 2}, []int{3, 4}, flightlock.StatusOK}, // other locks, or nobody can know
		"one of four is new": {[]int{0, 1, 2, 3}, []int{0, 1, 2, 4}, flightlock.StatusWarn},
	}
	ofEach := []string{"3 to 5", "one added", "in another order", "nothing in common"} // one of each kind
	for _, name := range testkit.Sized(slices.Collect(maps.Keys(sets)), ofEach) {
		tc := sets[name]
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 5, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				pick := func(of []int) (some []redis.UniversalClient) {
					for _, i := range of {
						some = append(some, clients[i])
					}
					return some
				}
				var log testkit.LogBuffer
				ours := lockOnce(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))},
					pick(tc.ours)...)
				theirs := lockOnce(t, flightlock.Options{}, pick(tc.theirs)...)
				time.Sleep(4 * time.Minute) // both have announced themselves, and again
				lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", tc.want)
				warnings := 0
				if tc.want == flightlock.StatusFail {
					warnings = 1
				}
				if n := strings.Count(log.String(), "another set of nodes"); n != warnings {
					t.Errorf("logged %d times, want %d:\n%s", n, warnings, log.String())
				}
				lockkit.Close(t, theirs)
				time.Sleep(6 * time.Minute)
				lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusOK)
			})
		})
	}
	t.Run("another prefix", func(t *testing.T) {
		testkit.Bubble(t, 5, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			ours := lockOnce(t, flightlock.Options{}, clients[:3]...)
			lockOnce(t, flightlock.Options{KeyPrefix: "other:"}, clients...)
			time.Sleep(time.Minute)
			lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusOK)
		})
	})
	// A client's announcement is bounded, and is JSON: neither may lose which keys it locks.
	for name, tc := range map[string]struct{ prefix, addr string }{
		"long":            {strings.Repeat("\x01", 4095), strings.Repeat("x", 1000)},
		"a binary prefix": {"\xff\x00\n:", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var nodes []redis.UniversalClient
				for i, n := range redistest.StartMemNodes(t, 5) {
					nodes = append(nodes, n.Client(t, func(o *redis.Options) {
						o.Addr = fmt.Sprintf("%s192.168.0.%d:1", tc.addr, i+1)
					}))
				}
				ours := lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix}, nodes[:3]...)
				lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix}, nodes...)
				lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix + "x"}, nodes[:2]...)
				time.Sleep(time.Minute)
				lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusFail, "counts 5 nodes")
				if found := lockkit.Check(t, ours).String(); strings.Contains(found, "counts 2 nodes") {
					t.Errorf("a set for other keys is among the others:\n%s", found)
				}
			})
		})
	}
	t.Run("other names", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var ours, theirs []redis.UniversalClient
			for i, n := range redistest.StartMemNodes(t, 3) {
				ours = append(ours, n.Client(t))
				theirs = append(theirs, n.Client(t, func(o *redis.Options) {
					o.Addr = fmt.Sprintf("192.168.0.%d:1", i+1)
				}))
			}
			c := lockOnce(t, flightlock.Options{}, ours...)
			lockOnce(t, flightlock.Options{}, theirs...)
			time.Sleep(time.Minute)
			lockkit.WantFinding(t, lockkit.Check(t, c), "", "node sets", flightlock.StatusOK)
		})
	})
	t.Run("a node that does not answer", func(t *testing.T) {
		testkit.Bubble(t, 4, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			ours := lockOnce(t, flightlock.Options{}, clients[:3]...)
			lockOnce(t, flightlock.Options{}, clients...)
			time.Sleep(time.Minute)
			nodes[0].Down(true)
			lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusUnknown)
		})
	})
}

// Sentinel-managed masters of different sets have equal names in New, and so they have in Open where all of
// them are called "mymaster". The sets differ all the same; and a set is no other one after a failover, even
// to a replica that knows nothing.
func TestCheckFindsOtherSetsOfSentinelManagedMasters(t *testing.T) {
	testkit.Bubble(t, 5, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
		masters := make([]atomic.Pointer[redistest.MemNode], len(nodes))
		for i, n := range nodes {
			masters[i].Store(n)
		}
		var log testkit.LogBuffer
		logger := slog.New(slog.NewTextHandler(&log, nil))
		locks := func(of ...int) *flightlock.Client {
			var clients []redis.UniversalClient
			for _, i := range of {
				clients = append(clients, redistest.SentinelClient(t, masters[i].Load))
			}
			c := lockkit.New(t, flightlock.Options{Logger: logger}, clients...)
			lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
			return c
		}
		wantWarnings := func(want int) {
			t.Helper()
			if n := strings.Count(log.String(), "another set of nodes"); n != want {
				t.Errorf("logged %d times, want %d:\n%s", n, want, log.String())
			}
		}
		ours := locks(0, 1, 2)
		locks(2, 1, 0)
		time.Sleep(4 * time.Minute) // in the bubble's time: several announcements
		lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusOK)
		masters[2].Store(nodes[4])
		nodes[2].Down(true)
		for range 8 {
			time.Sleep(time.Minute) // until the next announcement
			// a connection to the old master may have to fail first
			for _, f := range lockkit.Check(t, ours).Findings {
				if f.Check == "node sets" && f.Status == flightlock.StatusFail {
					t.Error(f)
				}
			}
		}
		wantWarnings(0)
		locks(0, 1, 3)
		time.Sleep(4 * time.Minute) // several announcements
		lockkit.WantFinding(t, lockkit.Check(t, ours), "", "node sets", flightlock.StatusFail, "10.0.0.4:6379")
		wantWarnings(3) // by each of them
	})
}

// A client that locks nothing announces nothing, and an announcement is one short-lived key.
func TestWordIsLeftOnlyByThoseWhoLock(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		nodes[0].Mini.FlushAll()
		c := lockkit.New(t, flightlock.Options{}, clients...)
		time.Sleep(time.Hour)
		if keys := nodes[0].Mini.Keys(); len(keys) != 0 {
			t.Errorf("keys %v", keys)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		time.Sleep(time.Hour)
		if !nodes[0].Mini.Exists("flightlock:{sets}") {
			t.Error("no announcement")
		}
		lockkit.Close(t, c)
		time.Sleep(6 * time.Minute)
		if nodes[0].Mini.Exists("flightlock:{sets}") {
			t.Error("an announcement outlives its client")
		}
	})
}
