package quorum

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// An arena is where clients contend for one key, and the referee: one holder at a time, and
// tokens that rise in the order in which they were taken.
type arena struct {
	mu     sync.Mutex // guards what follows
	holder *hold
	token  int64 // the last one taken
	grants int
	errs   []string
}

// A hold is what its holder relies on: that it may act until the deadline.
type hold struct {
	who   string
	until time.Time
	block Grant // tokens not taken yet
}

func (a *arena) errorfLocked(format string, args ...any) {
	if len(a.errs) < 10 {
		a.errs = append(a.errs, fmt.Sprintf(format, args...))
	}
}

// enter makes h the holder, if its time is not up already.
func (a *arena) enter(h *hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if clock.Passed(now, h.until) {
		return
	}
	if o := a.holder; o != nil && !clock.Passed(now, o.until) {
		a.errorfLocked("%s has it for %v more, and %s got it", o.who, o.until.Sub(now), h.who)
	}
	a.holder = h
	a.grants++
}

// act takes a token, as every use of the protected resource does.
func (a *arena) act(h *hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if clock.Passed(time.Now(), h.until) || h.block.First > h.block.Last {
		return
	}
	if a.holder != h {
		a.errorfLocked("%s acts, and is not the holder", h.who)
	}
	if h.block.First <= a.token {
		a.errorfLocked("%s has token %d after %d", h.who, h.block.First, a.token)
	}
	a.token = h.block.First
	h.block.First++
}

// refreshed updates h after a refresh.
func (a *arena) refreshed(h *hold, g Grant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g.Until.After(h.until) {
		h.until = g.Until
	}
	if g.Last >= g.First {
		h.block = g
	}
}

// leave ends the hold.
func (a *arena) leave(h *hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h.until = time.Now()
	if a.holder == h {
		a.holder = nil
	}
}

// contend tries for the key again and again until the given time, most of the time as a
// contender that takes turns with the others.
func (a *arena) contend(c *client, name string, rng *rand.Rand, end time.Time) {
	upTo := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
	contender := ""
	for i := 0; time.Now().Before(end); i++ {
		ttl := []time.Duration{ms(100), ms(250), time.Hour}[rng.IntN(3)]
		l := new(Lease)
		c.q.Prepare(l, key, ttl, 1+rng.Int64N(3), contender)
		try := c.newCall("acquire", l)
		l.Acquire(false, try)
		if rng.IntN(4) == 0 {
			time.Sleep(upTo(ms(20)))
			try.l.Cancel()
		}
		g, f := try.wait()
		if f != nil {
			switch rng.IntN(6) {
			case 0:
				if contender != "" {
					c.q.Leave(key, contender)
				}
				contender = ""
			case 1, 2:
				if contender == "" {
					contender = l.Owner()
				}
			}
			time.Sleep(upTo(ms(40)))
			continue
		}
		h := &hold{who: fmt.Sprintf("%s (its %dth attempt)", name, i), until: g.Until, block: g}
		a.enter(h)
		rival := a.use(c, try.l, h, ttl, rng)
		a.leave(h)
		rel := c.yield(try.l, rival)
		if rival != "" && contender == "" {
			contender = l.Owner()
		}
		if rng.IntN(2) == 0 {
			rel.wait()
		}
		time.Sleep(upTo(ms(5)))
	}
}

// use acts while the lease is held, refreshes it now and then, and may overstay. It returns who
// waits longest, if it has asked.
func (a *arena) use(c *client, l *Lease, h *hold, ttl time.Duration, rng *rand.Rand) (rival string) {
	for range rng.IntN(6) {
		a.act(h)
		switch rng.IntN(4) {
		case 0:
			time.Sleep(time.Duration(rng.Int64N(int64(min(ttl, ms(150))))))
		case 1: // leave while it is under way
			c.beginRefresh(l, ttl, rng.Int64N(4))
			return rival
		default:
			call := c.newCall("refresh", l)
			l.Refresh(ttl, rng.Int64N(4), c.q.NodeTimeout, rng.IntN(2) == 0, call.done)
			g, f := call.wait()
			if f == nil {
				a.refreshed(h, g)
				rival = g.Rival
			} else if f.Reason == NotHeld {
				return rival
			}
		}
		a.act(h)
	}
	return rival
}

func (a *arena) granted() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.grants
}

func (a *arena) report(t *testing.T, atLeast int) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.errs {
		t.Error(e)
	}
	if a.grants < atLeast {
		t.Errorf("only %d grants: the test tests nothing", a.grants)
	}
}

var seeds = flag.Int("stress.seeds", 4, "how many runs TestStressInVirtualTime makes")

// In virtual time, with nodes that are slow, stop, vanish and cut connections at random, but lose
// no data: leases of different clients never overlap, tokens rise in the order in which they are
// taken, and in the end no key is left.
func TestStressInVirtualTime(t *testing.T) {
	t.Parallel()
	for seed := range uint64(*seeds) {
		n := 2 + int(seed)%4
		t.Run(fmt.Sprintf("seed=%d/nodes=%d", seed, n), func(t *testing.T) {
			inBubble(t, n, func(t *testing.T, r *rig) { stress(t, r, seed) })
		})
	}
}

func stress(t *testing.T, r *rig, seed uint64) {
	var a arena
	var clients []*client
	for i := range 3 {
		clients = append(clients, r.client(fmt.Sprintf("c%d", i)))
	}
	// one run in some hundreds has no grant in a round
	for round := uint64(0); round < 5 && a.granted() == 0; round++ {
		end := time.Now().Add(5 * time.Second)
		var wg sync.WaitGroup
		for i, c := range clients {
			rng := rand.New(rand.NewPCG(seed, 1000*round+uint64(i)))
			wg.Go(func() { a.contend(c, fmt.Sprintf("c%d", i), rng, end) })
		}
		for i, m := range r.mem {
			wg.Go(func() { haunt(m, rand.New(rand.NewPCG(seed, 1000*round+uint64(100+i))), end) })
		}
		wg.Wait()
	}
	synctest.Wait()
	r.wantNoKey(key)
	a.report(t, 1)
}

// haunt makes a node fail at random until the given time.
func haunt(m *redistest.MemNode, rng *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		m.SetDelay(time.Duration(rng.Int64N(int64(ms(8)))))
		pause := time.Duration(rng.Int64N(int64(ms(60))))
		switch rng.IntN(8) {
		case 0:
			m.Stall(true)
			time.Sleep(pause)
			m.Stall(false)
		case 1:
			m.Down(true)
			time.Sleep(pause)
			m.Down(false)
		case 2:
			m.Cut()
		}
		time.Sleep(pause)
	}
	m.SetDelay(0)
}

// The same in real time, over sockets: real servers and miniredis behind proxies that
// delay, swallow, cut and hold what passes.
func TestStressInRealTime(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			var proxies []*redistest.Proxy
			var direct []*redis.Client
			for i := range n {
				proxy, conn := haunted(t, i%2 == 0)
				proxies, direct = append(proxies, proxy), append(direct, conn)
			}
			var a arena
			const enough = 3
			for round := range 15 { // on a busy machine there are fewer grants, and clients have to be more patient
				var clients []*client
				for i := range 4 {
					var conns []redis.UniversalClient
					for _, p := range proxies {
						conn := redis.NewClient(&redis.Options{Addr: p.Addr()})
						t.Cleanup(func() { _ = conn.Close() })
						conns = append(conns, conn)
					}
					name := fmt.Sprintf("c%d-%d", i, round)
					clients = append(clients, newPatientClient(t, name, conns, nodeTimeout<<min(round, 5)))
				}
				end := time.Now().Add(4 * time.Second)
				var wg sync.WaitGroup
				for i, c := range clients {
					rng := rand.New(rand.NewPCG(seed+uint64(round), uint64(i)))
					wg.Go(func() { a.contend(c, fmt.Sprintf("c%d", i), rng, end) })
				}
				for i, p := range proxies {
					wg.Go(func() { hauntProxy(p, rand.New(rand.NewPCG(seed+uint64(round), uint64(100+i))), end) })
				}
				wg.Wait()
				if a.granted() >= enough {
					break
				}
			}
			redistest.Eventually(t, patience, "no key is left", func() bool {
				for _, conn := range direct {
					if conn.Exists(t.Context(), key).Val() != 0 {
						return false
					}
				}
				return true
			})
			a.report(t, enough)
		})
	}
}

// haunted starts a node behind a proxy, and gives a client that goes past the proxy.
func haunted(t *testing.T, real bool) (*redistest.Proxy, *redis.Client) {
	if real {
		s := redistest.StartServer(t)
		return redistest.StartProxy(t, s.Addr()), s.Client(t)
	}
	m := redistest.StartMini(t)
	m.ClockTTL(true)
	return redistest.StartProxy(t, m.Addr()), redistest.MiniClient(t, m)
}

func hauntProxy(p *redistest.Proxy, rng *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		p.SetDelay(time.Duration(rng.Int64N(int64(ms(5)))))
		pause := time.Duration(rng.Int64N(int64(ms(80))))
		switch rng.IntN(10) {
		case 0:
			p.HoldRequests()
			time.Sleep(pause)
			p.ReleaseRequests()
		case 1:
			p.BlackHole(true)
			time.Sleep(pause)
			p.BlackHole(false)
			p.ResetAll()
		case 2:
			p.CutReplies(rng.IntN(200))
		case 3:
			p.ResetAll()
		}
		time.Sleep(pause)
	}
	p.CutReplies(-1)
	p.SetDelay(0)
}
