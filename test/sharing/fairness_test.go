package sharing

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// share is what one process got of a key.
type share struct {
	mu      sync.Mutex
	locks   int
	held    time.Duration
	longest time.Duration // wait of one goroutine
}

// hammer has one process use the key from that many goroutines until end.
func (s *share) hammer(
	t *testing.T, wg *sync.WaitGroup, goroutines int, end time.Time, lock func() (*flightlock.Lock, error),
) {
	for range goroutines {
		wg.Go(func() {
			for time.Now().Before(end) {
				began := time.Now()
				l, err := lock()
				if err != nil {
					t.Error(err)
					return
				}
				got := time.Now()
				time.Sleep(100 * time.Microsecond)
				if err := l.Release(context.Background()); err != nil {
					t.Error(err)
				}
				s.mu.Lock()
				s.locks++
				s.held += time.Since(got)
				s.longest = max(s.longest, got.Sub(began))
				s.mu.Unlock()
			}
		})
	}
}

// Processes that hammer one key share its time evenly, whatever the number of nodes, and nobody
// waits for long; with or without notices.
func TestProcessesShareAKey(t *testing.T) {
	t.Parallel()
	const each = 200 * time.Millisecond
	polling := func(_ int, o *flightlock.Options) { o.DisableNotify = true }
	for _, c := range []struct {
		name         string
		nodes, procs int
		each         time.Duration // of use, per process
		options      func(proc int, o *flightlock.Options)
	}{
		{"notified", 1, 4, each, nil}, {"notified", 2, 3, each, nil},
		{"notified", 3, 12, each, nil}, {"notified", 4, 3, each, nil},
		{"one polls", 3, 4, each, func(proc int, o *flightlock.Options) { o.DisableNotify = proc == 0 }},
		{"all poll", 2, 3, each, polling}, {"all poll", 3, 4, each, polling},
		// Here each lock is one of Redis.
		{"short slices", 3, 3, testkit.Full(each, each/2), func(_ int, o *flightlock.Options) {
			o.HandoffSlice = time.Microsecond
		}},
		{"no handoff", 3, 3, each, func(_ int, o *flightlock.Options) { o.HandoffSlice = -1 }},
	} {
		if c.nodes*c.procs > testkit.Sized(36, 9) {
			continue
		}
		t.Run(fmt.Sprintf("%s/nodes=%d/procs=%d", c.name, c.nodes, c.procs), func(t *testing.T) {
			testkit.Bubble(t, c.nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(200 * time.Microsecond)
				}
				end := time.Now().Add(time.Duration(c.procs) * c.each)
				shares := make([]share, c.procs)
				var wg sync.WaitGroup
				for p := range c.procs {
					var conns []redis.UniversalClient
					for _, n := range nodes {
						conns = append(conns, n.Client(t))
					}
					var o flightlock.Options
					if c.options != nil {
						c.options(p, &o)
					}
					client := lockkit.New(t, o, conns...)
					shares[p].hammer(t, &wg, 10, end, func() (*flightlock.Lock, error) {
						return client.SingleFlightLock(context.Background(), "k", time.Second, nil)
					})
				}
				wg.Wait()
				wantEven(t, shares)
			})
		})
	}
}

func wantEven(t *testing.T, shares []share) {
	t.Helper()
	var sum time.Duration
	for i := range shares {
		sum += shares[i].held
	}
	for i := range shares {
		s := &shares[i]
		even := float64(s.held) / float64(sum) * float64(len(shares))
		t.Logf("process %d: %.2f of an even share, %d locks, longest wait %v", i, even, s.locks, s.longest)
		if even < 0.7 || even > 1.3 {
			t.Error("that is not even")
		}
		if s.longest > 1500*time.Millisecond {
			t.Error("that is too long")
		}
	}
}

// On nodes that stop, vanish and cut connections, callers of several processes that queue, try,
// contend alone and give up exclude each other, their fences rise, and once the nodes are healthy
// again everybody gets the lock within a second or so. In the end nothing is left.
func TestTurnsOnBadNodes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testkit.Sized(6, 2)) {
		n := 1 + int(seed)%5
		t.Run(fmt.Sprintf("seed=%d/nodes=%d", seed, n), func(t *testing.T) {
			testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
				badNodes(t,
					nodes, seed)
			})
		})
	}
}

// crowd is callers of one key, with a referee.
type crowd struct {
	t *testing.T

	mu    sync.Mutex // guards what follows
	until time.Time  // the holder considers itself valid until then
	fence int64      // the last one
	locks int
}

func (c *crowd) enter(l *flightlock.Lock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.Err() != nil {
		return
	}
	if time.Now().Before(c.until) {
		c.t.Error("two hold the lock at once")
	}
	if l.Fence() <= c.fence {
		c.t.Errorf("fence %d after %d", l.Fence(), c.fence)
	}
	c.until, c.fence = l.Until(), l.Fence()
	c.locks++
}

func (c *crowd) leave(l *flightlock.Lock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.Fence() == c.fence {
		c.until = time.Time{}
	}
}

// use gets the lock, holds it for a moment and releases it.
func (c *crowd) use(ctx context.Context, client *flightlock.Client, rng *rand.Rand) {
	var l *flightlock.Lock
	var err error
	switch ttl := time.Duration(100+rng.IntN(300)) * time.Millisecond; rng.IntN(10) {
	case 0:
		l, err = client.TryLock(ctx, "k", ttl)
	case 1:
		l, err = client.SingleFlightLock(ctx, "k", ttl, flightlock.LimitedRetry(20*time.Millisecond, 10))
	default:
		l, err = client.SingleFlightLock(ctx, "k", ttl, nil)
	}
	if err != nil {
		return
	}
	c.enter(l)
	time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
	c.leave(l)
	_ = l.Release(ctx)
}

// haunt makes a node fail at random until the given time.
func haunt(n *redistest.MemNode, rng *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		n.SetDelay(time.Duration(rng.IntN(3000)) * time.Microsecond)
		pause := time.Duration(rng.IntN(150)) * time.Millisecond
		switch rng.IntN(8) {
		case 0:
			n.Stall(true)
			time.Sleep(pause)
			n.Stall(false)
		case 1:
			n.Down(true)
			time.Sleep(pause)
			n.Down(false)
		case 2:
			n.Cut()
		}
		time.Sleep(pause)
	}
	n.SetDelay(200 * time.Microsecond)
}

func badNodes(t *testing.T, nodes []*redistest.MemNode, seed uint64) {
	const procs, goroutines = 4, 8
	crowd := &crowd{t: t}
	end := time.Now().Add(2 * time.Second)
	var wg, last sync.WaitGroup
	var clients []*flightlock.Client
	for p := range procs {
		var conns []redis.UniversalClient
		for _, n := range nodes {
			conns = append(conns, n.Client(t))
		}
		client := lockkit.New(t, flightlock.Options{DisableNotify: p == 3}, conns...)
		clients = append(clients, client)
		for i := range goroutines {
			rng := rand.New(rand.NewPCG(seed, uint64(p*goroutines+i)))
			wg.Go(func() {
				for time.Now().Before(end) {
					ctx, cancel := context.WithCancel(context.Background())
					if rng.IntN(3) == 0 {
						ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(60))*time.Millisecond)
					}
					crowd.use(ctx, client, rng)
					cancel()
					time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
				}
			})
			last.Go(func() { // waits through it all
				time.Sleep(time.Until(end) - 100*time.Millisecond)
				l, err := client.SingleFlightLock(context.Background(), "k", 300*time.Millisecond, nil)
				if err != nil {
					t.Error(err)
					return
				}
				crowd.enter(l)
				crowd.leave(l)
				_ = l.Release(context.Background())
			})
		}
	}
	for i, n := range nodes {
		wg.Go(func() { haunt(n, rand.New(rand.NewPCG(seed, uint64(1000+i))), end) })
	}
	wg.Wait()
	last.Wait()
	if late := time.Since(end); late > 4*time.Second { // a probe, a debt, a ttl, and a turn for each who is gone
		t.Errorf("the last one got the lock %v after the nodes were well", late)
	}
	t.Log(crowd.locks, "locks, the last", time.Since(end), "after the nodes were well")
	for _, c := range clients {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(11 * time.Second) // registrations that could not be removed
	for _, n := range nodes {
		for _, k := range n.Mini.Keys() {
			if !strings.Contains(k, ":fence:") && k != lua.Marker && k != lua.Past {
				t.Errorf("%s still has %q", n.Addr(), k)
			}
		}
	}
}

// Processes that are far from the nodes share a key, too: a grant lasts until it is of use.
func TestProcessesFarFromTheNodesShareAKey(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 3} {
		for _, trip := range []time.Duration{50 * time.Millisecond, 200 * time.Millisecond,
			400 * time.Millisecond} {
			t.Run(fmt.Sprintf("nodes=%d/trip=%v", nodes, trip), func(t *testing.T) {
				testkit.Bubble(t, nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
					shareFromAfar(t, nodes, trip)
				})
			})
		}
	}
}

func shareFromAfar(t *testing.T, nodes []*redistest.MemNode, trip time.Duration) {
	t.Helper()
	const procs = 3
	for _, n := range nodes {
		n.SetDelay(trip / 2)
	}
	end := time.Now().Add(200 * trip)
	shares := make([]share, procs)
	clients := make([]*flightlock.Client, procs)
	var wg sync.WaitGroup
	for p := range procs {
		var conns []redis.UniversalClient
		for _, n := range nodes {
			conns = append(conns, n.Client(t))
		}
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 5 * trip}, conns...)
		clients[p] = c
		shares[p].hammer(t, &wg, 1, end, func() (*flightlock.Lock, error) {
			return c.SingleFlightLock(context.Background(), "k", 30*time.Second, nil)
		})
	}
	wg.Wait()
	sum, grants := 0, 0
	for p := range shares {
		sum += shares[p].locks
		grants += int(clients[p].Stats().Grants)
	}
	t.Logf("%d locks in 200 round trips, %d grants", sum, grants)
	if sum < 70 {
		t.Error("a hand-over takes more than three round trips")
	}
	if grants > sum {
		t.Error("grants were of no use to anybody")
	}
	for p := range shares {
		s := &shares[p]
		t.Logf("process %d: %d locks, longest wait %v", p, s.locks, s.longest)
		if even := float64(s.locks*procs) / float64(sum); even < 0.7 || even > 1.3 {
			t.Errorf("%.2f of an even share", even)
		}
	}
}
