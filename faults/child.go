//go:build linux

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/flightlock/flightlock/internal/clocktest"
	"github.com/redis/go-redis/v9"
)

// This file is a client process: it locks, works and reports what it saw, a line of JSON for each
// event on stdout. Its stdin brings one line, the setup, and is closed when the process is to end.
// So a process cannot outlive its parent.

// childEnv makes the program, or its test binary, such a process.
const childEnv = "FLIGHTLOCK_FAULTS_CHILD"

// setup is the configuration of a process.
type setup struct {
	Proc     int
	Nodes    []string // urls
	Register string   // address of the server with the protected values; it has no faults
	Kind     string   // of the nodes, one of redistest.Kinds; "": redis-server itself
	TTL      time.Duration
	Linger   time.Duration // Options.Linger
	Answer   time.Duration // Options.NodeTimeout; 0: nodeTimeout
	Forget   bool          // DisableQuarantine, for the test that the harness sees what goes wrong then
	Sleeps   bool          // its machine may sleep
	Paused   bool          // the work of the paused-holder test, instead of that of the scenarios
}

// longKeys is how many locks are held for most of their ttl, and not refreshed.
const longKeys = 4

func longKey(i int) string { return "long" + strconv.Itoa(i) }

// hotKey is wanted by all processes all the time.
const hotKey = "hot"

// ownKeys are used by one process each again and again, which retains their leases, and now and
// then by the others.
const ownKeys = 3

func ownKey(i int) string { return "own" + strconv.Itoa(i%ownKeys) }

// loneKey is wanted by one process alone: nobody recalls its lease.
func loneKey(proc int) string { return "lone" + strconv.Itoa(proc) }

// keptKey is held for longer than its ttl, by AutoRefresh.
const keptKey = "kept"

func childMain(in io.Reader, out io.Writer) int {
	c := child{out: json.NewEncoder(out)}
	if err := c.run(in); err != nil {
		c.emit(event{Fatal: err.Error()})
		return 1
	}
	return 0
}

// child is a client process.
type child struct {
	setup
	clock    machineClock
	clocks   *clocktest.Clocks // that the library reads; nil: those of the machine
	client   *flightlock.Client
	register *redis.Client

	writes atomic.Int64 // numbers them

	mu  sync.Mutex // guards out
	out *json.Encoder
}

func (c *child) run(in io.Reader) (err error) {
	lines := bufio.NewReader(in)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, &c.setup); err != nil {
		return err
	}
	if c.clock, err = newMachineClock(); err != nil {
		return err
	}
	if c.Sleeps {
		if c.clocks, err = sharedClocks(clocksFile); err != nil {
			return err
		}
		c.clocks.Install()
	}
	c.register = redis.NewClient(&redis.Options{Addr: c.Register, PoolSize: 20})
	defer c.register.Close()
	c.client, err = flightlock.Open(flightlock.Options{
		MaxTTL: c.TTL, NodeTimeout: cmp.Or(c.Answer, nodeTimeout), DisableQuarantine: c.Forget, Linger: c.Linger,
	}, c.Nodes...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		cancel()
	}()
	c.emit(event{Ready: true})
	if c.Paused {
		c.workPaused(ctx)
	} else {
		c.work(ctx)
	}
	grace, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	return c.client.Close(grace)
}

// nodeTimeout is above the default, for the machine runs servers, clients and proxies at once.
const nodeTimeout = 100 * time.Millisecond

func (c *child) emit(e event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.Encode(e)
}

// work keeps all kinds of locks busy until ctx ends.
func (c *child) work(ctx context.Context) {
	short := func() time.Duration { return rand.N(3 * time.Millisecond) }
	var wg sync.WaitGroup
	loop := func(l locking) {
		wg.Go(func() {
			for ctx.Err() == nil {
				c.once(ctx, l)
				pause(ctx, time.Millisecond+rand.N(4*time.Millisecond))
			}
		})
	}
	hot := locking{key: hotKey, lock: c.client.SingleFlightLock, ttl: c.TTL, wait: c.TTL / 2, hold: short}
	loop(hot)
	loop(hot)
	for i := range longKeys {
		loop(locking{key: longKey(i), lock: c.client.SingleFlightLock, ttl: c.TTL, wait: 8 * c.TTL,
			hold: func() time.Duration {
				return c.TTL * time.Duration(70+rand.IntN(20)) / 100
			}})
	}
	loop(locking{key: keptKey, lock: c.client.SingleFlightLock, ttl: c.TTL / 2, wait: 8 * c.TTL, refresh: true,
		hold: func() time.Duration {
			return rand.N(2 * c.TTL)
		}})
	own := locking{lock: c.client.SingleFlightLock, ttl: c.TTL, wait: 8 * c.TTL,
		hold: func() time.Duration { return 0 }}
	rare := func(l locking, most time.Duration) {
		wg.Go(func() {
			for ctx.Err() == nil {
				c.once(ctx, l)
				pause(ctx, most/5+rand.N(most/5*4))
			}
		})
	}
	for i := range ownKeys {
		own.key = ownKey(c.Proc + i)
		if own.owner = new(string); i == 0 {
			loop(own)
		} else {
			rare(own, c.TTL*5/4)
		}
	}
	own.key, own.owner = loneKey(c.Proc), new(string)
	rare(own, c.TTL/5) // below Linger
	wg.Wait()
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// locking is a way to use a lock.
type locking struct {
	key     string
	lock    func(context.Context, string, time.Duration, flightlock.RetryStrategy) (*flightlock.Lock, error)
	ttl     time.Duration
	wait    time.Duration // at most, for the lock
	hold    func() time.Duration
	refresh bool
	// of the last lock of a key that only one goroutine of this process uses; nil: of another one
	owner *string
}

// once tries to get the lock, holds it, changes the register under it, and releases it.
func (c *child) once(ctx context.Context, l locking) {
	h := hold{Proc: c.Proc, Key: l.key}
	wait, cancel := context.WithTimeout(ctx, l.wait)
	defer cancel()
	h.Asked = c.clock.now()
	lock, err := l.lock(wait, l.key, l.ttl, nil)
	h.Given = c.clock.now()
	if err != nil {
		if ctx.Err() == nil {
			h.Err = inWords(err)
			c.emit(event{Hold: &h})
		}
		return
	}
	h.Fence = lock.Fence()
	if l.owner != nil {
		h.Reused = lock.Owner() == *l.owner
		*l.owner = lock.Owner()
	}
	look := func() bool {
		now := c.clock.now() // before the check: at least until then it was valid
		if lock.Err() != nil {
			return false
		}
		h.Valid = now
		return true
	}
	if l.refresh {
		_ = lock.AutoRefresh(ctx, flightlock.RefreshPolicy{})
	}
	c.holdFor(ctx, l.hold(), lock, look)
	if !look() {
		h.Lost = inWords(lock.Err())
		h.Expired = expired(lock.Err())
	}
	h.Until = max(c.deadline(lock.Until()), h.Valid) // what Err returned counts, also if Until differs
	h.Released = lock.Release(ctx) == nil
	h.Done = c.clock.now()
	c.emit(event{Hold: &h})
}

// deadline is a deadline in the machine's time. The monotonic clock of a machine that slept means
// nothing to the others; its wall clock is common to all, unless nothing shows the sleep.
func (c *child) deadline(until time.Time) int64 {
	if c.clocks == nil {
		return c.clock.of(until)
	}
	return c.clock.ofWall(until) - c.clocks.Wall.Load()
}

// holdFor spends d under the lock, checks it every millisecond, and increments the register: it is
// read at the beginning, written at the end.
func (c *child) holdFor(ctx context.Context, d time.Duration, lock *flightlock.Lock, look func() bool) {
	value, stale := c.get(lock)
	for end := time.Now().Add(d); look() && ctx.Err() == nil && time.Now().Before(end); {
		pause(ctx, min(time.Millisecond, time.Until(end)))
	}
	if !stale {
		c.set(lock, value+1) // whether the lock is still valid or not: that is what the token is for
	}
}

func (c *child) get(lock *flightlock.Lock) (value int, stale bool) {
	a := access{Proc: c.Proc, Key: lock.Key(), Fence: lock.Fence(), Call: c.clock.now()}
	v, err := fenced.Get(context.Background(), c.register, "value:"+a.Key, a.Fence)
	a.Return = c.clock.now()
	switch {
	case err == nil:
		a.Value, err = strconv.Atoi(v)
	case errors.Is(err, redis.Nil):
		err = nil
	}
	a.Stale = errors.Is(err, fenced.ErrStale)
	a.Unknown = err != nil && !a.Stale
	c.emit(event{Access: &a})
	return a.Value, err != nil
}

func (c *child) set(lock *flightlock.Lock, value int) {
	a := access{Proc: c.Proc, Key: lock.Key(), Set: true, Fence: lock.Fence(), Value: value, Call: c.clock.now()}
	a.Write = c.writes.Add(1)
	c.emit(event{Begun: &a})
	err := fenced.Set(context.Background(), c.register, "value:"+a.Key, value, a.Fence, 0)
	a.Return = c.clock.now()
	a.Stale = errors.Is(err, fenced.ErrStale)
	a.Unknown = err != nil && !a.Stale
	c.emit(event{Access: &a})
}
