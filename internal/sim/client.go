package sim

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A client is one process: a flightlock.Client over connections of its own, and workers that lock.
// While it is paused, as by a garbage collector or a hypervisor, its workers do nothing, nothing
// that it writes leaves it, nothing arrives, and the library's timers do not go off. Those of
// contexts, of sockets and of channels do, on time: no goroutine of a bubble can be kept from
// running while others continue. They end an exchange, or send something, which then waits.
type client struct {
	w       *world
	id      int
	slot    int // its place among those that live
	lib     *flightlock.Client
	fetcher *fetch.Fetcher[int] // nil: its workers fetch nothing
	redis   []*redis.Client
	workers []*worker
	timers  timers
	conns   []*conn // in the order in which they were made

	paused bool
	late   int      // timers that are to go off because it continues
	unsent []func() // written during the pause
	held   []func() // arrived during the pause

	crashed bool // it is no more; only its goroutines have to end
	closing bool // Close was called, also for the goroutines of one that has crashed
	ended   bool // Close has returned
}

// isMute reports whether c, or who was in its place, may not PUBLISH.
func (c *client) isMute() bool { return c.slot < len(c.w.plan.mute) && c.w.plan.mute[c.slot] }

// isDeaf reports whether c, or who was in its place, may not SUBSCRIBE at s.
func (c *client) isDeaf(s *server) bool {
	return c.slot < len(c.w.plan.deaf) && c.w.plan.deaf[c.slot][s.id]
}

func (c *client) String() string { return fmt.Sprintf("c%d", c.id) }

func (w *world) addClient(slot int) *client {
	c := &client{w: w, id: len(w.clients), slot: slot}
	o := w.plan.optionsOf(slot)
	opts := flightlock.Options{
		NodeTimeout: o.nodeTimeout, MaxTTL: w.plan.maxTTL, DriftFactor: w.plan.drift, HandoffSlice: o.slice,
		DisableNotify: !o.notify, DisableQuarantine: !w.plan.quarantine && w.plan.nodes >= 3,
		Label: c.String(), Linger: o.linger,
	}
	var nodes []redis.UniversalClient
	for _, s := range w.servers {
		r := redis.NewClient(&redis.Options{
			Addr: s.addr, Dialer: c.dial(s), Protocol: 2, DisableIdentity: true,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
			MaxRetries:               -1, DialerRetries: 1, ConnMaxIdleTime: -1, DialTimeout: w.plan.dialTimeout(),
			PoolSize:       1000, // one that runs dry takes timers from a pool that all bubbles share
			ReadBufferSize: 1024, WriteBufferSize: 1024,
		})
		c.redis = append(c.redis, r)
		nodes = append(nodes, r)
	}
	uuid.SetRand(rand.NewChaCha8([32]byte{byte(w.plan.seed), byte(w.plan.seed >> 8), byte(w.plan.seed >> 16),
		byte(w.plan.seed >> 24), byte(c.id)}))
	w.mu.Lock()
	w.named[c.String()] = c
	w.mu.Unlock()
	c.as(func() {
		lib, err := flightlock.New(opts, nodes...)
		if err != nil {
			panic(err) // the options are ours
		}
		c.lib = lib
		if w.plan.fetches {
			c.fetcher = c.newFetcher()
		}
		for i := range w.plan.workers {
			c.workers = append(c.workers, newWorker(c, i))
		}
	})
	w.clients = append(w.clients, c)
	return c
}

// pause stops the process, or lets it continue.
func (c *client) pause(on bool) {
	if c.paused == on || c.crashed {
		return
	}
	c.w.logf("FAULT  %v paused=%v", c, on)
	c.paused = on
	if on {
		c.timers.stop()
		return
	}
	unsent, held := c.unsent, c.held
	c.unsent, c.held = nil, nil
	for _, do := range unsent {
		do()
	}
	c.w.deliverHeld(held)
	wait := time.Microsecond
	if c.w.plan.seed%2 == 0 { // what arrived during the pause comes first
		wait += c.w.plan.latency/8 + time.Duration(len(held))*time.Microsecond
	}
	c.goOn(wait)
}

// goOn has the timers that were due go off after that time.
func (c *client) goOn(wait time.Duration) {
	for i, f := range c.timers.goOn() {
		c.late++
		c.w.after(wait+time.Duration(i)*time.Microsecond, func() {
			c.late--
			go c.timers.fire(f)
		})
	}
}

// punctual reports whether no timer of the library is late.
func (c *client) punctual() bool { return !c.paused && c.late == 0 }

// unlessPaused does something that the process does.
func (c *client) unlessPaused(do func()) {
	switch {
	case c.crashed:
	case c.paused:
		c.held = append(c.held, func() { c.unlessPaused(do) })
	default:
		do()
	}
}

// crash ends the process. What it has written still arrives. Its goroutines have to
// end, which nobody outside can see.
func (c *client) crash() {
	if c.crashed || c.closing {
		return
	}
	c.w.logf("FAULT  %v crashes", c)
	c.paused, c.unsent, c.held = false, nil, nil
	c.goOn(0)
	for _, k := range c.inOrder() {
		k.reset(true)
	}
	c.crashed = true
	c.w.checker.forgetHolds(c)
	for _, k := range c.workers {
		k.die()
	}
	c.end(expired())
	c.replace()
}

// close ends the process as a shutdown does.
func (c *client) close() {
	if c.crashed || c.closing {
		return
	}
	c.w.logf("CLOSE  %v", c)
	ctx, cancel := context.WithCancel(context.Background())
	c.w.after(c.w.plan.maxTTL/8, cancel)
	c.end(ctx)
	c.replace()
}

// inOrder are its connections, in the order of their names.
func (c *client) inOrder() []*conn {
	all := slices.Clone(c.conns)
	slices.SortStableFunc(all, func(a, b *conn) int {
		return cmp.Or(cmp.Compare(a.server.id, b.server.id), cmp.Compare(a.born, b.born),
			strings.Compare(a.last, b.last))
	})
	return all
}

// replace has another process begin where c was.
func (c *client) replace() {
	next := c.w.addClient(c.slot)
	c.w.slots[c.slot] = next
	next.start()
}

// end closes the client.
func (c *client) end(ctx context.Context) {
	c.closing = true
	go c.as(func() {
		if c.fetcher != nil {
			_ = c.fetcher.Close(ctx)
		}
		err := c.lib.Close(ctx)
		for _, r := range c.redis {
			_ = r.Close()
		}
		c.w.report(action{client: c.id, server: -1, text: "closed", do: func() {
			c.w.logf("%v is closed: %v", c, err)
			c.ended = true
		}})
	})
}

// start has all workers begin.
func (c *client) start() {
	for _, k := range c.workers {
		k.later(k.next)
	}
}

// expired is a ctx that has ended.
func expired() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
