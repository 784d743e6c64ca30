package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// arena is what the lockers know of each other: who has which key, and its last token.
type arena struct {
	t       *testing.T
	mu      sync.Mutex
	holders map[string]*flightlock.Lock
	fences  map[string]int64
	granted atomic.Int64
}

func newArena(t *testing.T) *arena {
	return &arena{t: t, holders: map[string]*flightlock.Lock{}, fences: map[string]int64{}}
}

// had records that somebody has l. Two holders are valid at once if the previous one is still valid
// after this one was seen to be.
func (a *arena) had(l *flightlock.Lock) {
	a.mu.Lock()
	defer a.mu.Unlock()
	valid := l.Err() == nil
	if before := a.holders[l.Key()]; valid && before != nil && before.Err() == nil {
		a.t.Errorf("%q has two holders: %s with token %d, %s with token %d",
			l.Key(), before.Owner(), before.Fence(), l.Owner(), l.Fence())
	}
	if last := a.fences[l.Key()]; valid && l.Fence() <= last {
		a.t.Errorf("%q: token %d after %d", l.Key(), l.Fence(), last)
	}
	a.fences[l.Key()] = max(a.fences[l.Key()], l.Fence())
	a.holders[l.Key()] = l
	a.granted.Add(1)
}

// leaves records that the holder is about to release l.
func (a *arena) leaves(l *flightlock.Lock) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.holders[l.Key()] == l {
		delete(a.holders, l.Key())
	}
}

// work locks keys of c in some way, uses each lock in some way, and releases it, until the given
// time.
func (a *arena) work(ctx context.Context, c *flightlock.Client, key string, ttl time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(1+rand.IntN(400))*time.Millisecond)
	defer cancel()
	hold := func(l *flightlock.Lock) {
		a.had(l)
		switch rand.IntN(6) {
		case 0:
			_ = l.Refresh(ctx)
		case 1:
			_ = l.AutoRefresh(flightlock.RefreshPolicy{})
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(rand.IntN(2)) * ttl): // longer than the ttl, or not at all
			}
		case 2:
			if inner, err := c.TryLock(l.Context(ctx), key, ttl); err == nil {
				defer func() { _ = inner.Release(ctx) }()
			}
		}
		a.leaves(l)
	}
	var l *flightlock.Lock
	var err error
	switch rand.IntN(8) {
	case 0:
		l, err = c.TryLock(ctx, key, ttl)
	case 1:
		l, err = c.Lock(ctx, key, ttl, flightlock.ExponentialBackoff(time.Millisecond, 10*time.Millisecond))
	case 2:
		_ = c.Do(ctx, key, ttl, nil, func(_ context.Context, l *flightlock.Lock) error { hold(l); return nil })
		return
	default:
		l, err = c.SingleFlightLock(ctx, key, ttl, nil)
	}
	if err == nil {
		hold(l)
		_ = l.Release(ctx)
	}
}

// Whatever command a node refuses, and for whatever reason, while locks come and go in every
// possible way: no key has two holders, tokens rise, and in the end nothing is left.
func TestExclusionWhileNodesRefuseCommands(t *testing.T) {
	t.Parallel()
	servers, _ := realNodes(t, 3)
	var cs []*flightlock.Client
	for range 3 {
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, s.Client(t, func(o *redis.Options) { o.PoolSize = 10 }))
		}
		cs = append(cs, newClient(t, flightlock.Options{MaxTTL: time.Second}, nodes...))
	}
	a := newArena(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for ctx.Err() == nil {
				a.work(ctx, cs[i%3], fmt.Sprint("k", i%2), time.Duration(20+rand.IntN(300))*time.Millisecond)
			}
		})
	}
	commands := []string{
		"evalsha", "script", "set", "get", "mget", "del", "pttl", "pexpire", "incrby", "exists", "zadd", "zrem",
		"zrange", "zscore", "getdel", "time", "ping", "publish", "subscribe", "info", "append", "object",
	}
	for refused := 0; ctx.Err() == nil; refused++ {
		s := servers[rand.IntN(len(servers))]
		name := commands[refused%len(commands)]
		refuse, accept := []any{"ACL", "SETUSER", "default", "-" + name}, []any{"ACL", "SETUSER", "default", "+" + name}
		switch rand.IntN(6) {
		case 0:
			refuse, accept = []any{"CONFIG", "SET", "maxmemory", "1"}, []any{"CONFIG", "SET", "maxmemory", "0"}
		case 1:
			refuse = []any{"CONFIG", "SET", "min-replicas-to-write", "1"}
			accept = []any{"CONFIG", "SET", "min-replicas-to-write", "0"}
		case 2:
			refuse, accept = []any{"CLIENT", "PAUSE", "20", "WRITE"}, []any{"CLIENT", "UNPAUSE"}
		case 3:
			refuse, accept = []any{"SCRIPT", "FLUSH"}, []any{"CLIENT", "KILL", "TYPE", "pubsub"}
		}
		s.Do(t, refuse...)
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rand.IntN(30)) * time.Millisecond): // the pace of the faults
		}
		s.Do(t, accept...)
	}
	wg.Wait()
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
	if a.granted.Load() == 0 {
		t.Error("no lock was granted")
	}
	t.Logf("%d locks", a.granted.Load())
}

// Close, at any moment and with any deadline, ends every call and every lock, and removes every key
// from the nodes that let it: here they all answer.
func TestCloseAtAnyMomentLeavesNothing(t *testing.T) {
	servers, nodes := realNodes(t, 3)
	for i := range 20 {
		c, err := flightlock.New(flightlock.Options{Nodes: nodes, NodeTimeout: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var held sync.Map
		var wg sync.WaitGroup
		for j := range 20 {
			wg.Go(func() {
				key := fmt.Sprint("k", j%5)
				l, err := []func() (*flightlock.Lock, error){
					func() (*flightlock.Lock, error) { return c.SingleFlightLock(t.Context(), key, time.Minute, nil) },
					func() (*flightlock.Lock, error) { return c.Lock(t.Context(), key, time.Minute, nil) },
					func() (*flightlock.Lock, error) { return c.TryLock(t.Context(), key, time.Minute) },
				}[j%3]()
				switch {
				case err == nil:
					held.Store(l, l.Context(t.Context()))
					_ = l.AutoRefresh(flightlock.RefreshPolicy{})
					_ = l.Refresh(ctx)
				case !errors.Is(err, flightlock.ErrClosed) && !errors.Is(err, flightlock.ErrNotAcquired):
					t.Error(err)
				}
			})
		}
		redistest.Eventually(t, 20*time.Second, "so many locks are held", func() bool { return c.Stats().Held >= int64(i%5) })
		if i%2 == 0 {
			cancel() // Close has no time at all
		}
		time.AfterFunc(time.Duration(rand.IntN(5))*time.Millisecond, cancel)
		if err := c.Close(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		cancel()
		wg.Wait()
		held.Range(func(l, ctx any) bool {
			if l.(*flightlock.Lock).Err() == nil || ctx.(context.Context).Err() == nil {
				t.Error("a lock is held, or its Context has not ended, after Close")
			}
			return true
		})
		if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		// A Close that ends at once does not wait for the last replies.
		redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
	}
}

// Of any number of concurrent releases of a lock, one returns nil. The others, and all later calls
// on the lock, leave its successor alone. The same is true of nested locks.
func TestOfManyReleasesOneCounts(t *testing.T) {
	_, nodes := realNodes(t, 3)
	c := newClient(t, flightlock.Options{NodeTimeout: 5 * time.Second}, nodes...)
	for i := range 36 {
		l := mustLock(t, c, "k", time.Minute)
		all := []*flightlock.Lock{l}
		for range i % 4 {
			inner, err := c.TryLock(l.Context(t.Context()), "k", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, inner)
		}
		next := make(chan *flightlock.Lock)
		go func() { next <- mustLock(t, c, "k", time.Minute) }()
		redistest.Eventually(t, 10*time.Second, "somebody waits", func() bool { return c.Stats().Waiters == 1 })
		release := func(locks []*flightlock.Lock) {
			var released atomic.Int64
			var wg sync.WaitGroup
			for range 8 {
				for _, l := range locks {
					wg.Go(func() {
						if err := l.Release(t.Context()); err == nil {
							released.Add(1)
						} else if !errors.Is(err, flightlock.ErrNotHeld) {
							t.Error(err)
						}
					})
					wg.Go(func() { _ = l.Refresh(t.Context()) })
				}
			}
			wg.Wait()
			if n := released.Load(); n != int64(len(locks)) {
				t.Errorf("%d releases of %d locks say that they did it", n, len(locks))
			}
		}
		last := i % len(all) // the last one released, outermost or not
		release(slices.Concat(all[:last], all[last+1:]))
		if err := all[last].Err(); err != nil || c.Stats().Waiters != 1 {
			t.Errorf("one of %d nested locks is held still: %v", len(all), err)
		}
		release(all[last : last+1])
		successor := <-next
		for _, l := range all {
			if l.Release(t.Context()) == nil || l.Refresh(t.Context()) == nil ||
				l.AutoRefresh(flightlock.RefreshPolicy{}) == nil || l.Err() == nil {
				t.Error("a lock that was released can still be used")
			}
		}
		if err := successor.Refresh(t.Context()); err != nil || successor.Fence() <= l.Fence() {
			t.Errorf("the successor: %v, token %d after %d", err, successor.Fence(), l.Fence())
		}
		mustRelease(t, successor)
	}
}

// Callers whose ctx ends at any moment, by the hundred, leave no key and no place in a queue, and
// do not affect other locks.
func TestCallersThatEndAtAnyMomentLeaveNothing(t *testing.T) {
	servers, nodes := realNodes(t, 3)
	a := newArena(t)
	patient := flightlock.Options{NodeTimeout: 5 * time.Second}
	cs := []*flightlock.Client{newClient(t, patient, nodes...), newClient(t, patient, nodes...)}
	for _, c := range cs { // the cost of a cold start does not count here
		mustRelease(t, mustLock(t, c, "warm", time.Second))
	}
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			for range 5 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond<<rand.IntN(7)/2)
				a.work(ctx, cs[i%2], fmt.Sprint("k", i%7), time.Minute)
				cancel()
			}
		})
	}
	wg.Wait()
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
	for _, c := range cs {
		redistest.Eventually(t, 10*time.Second, "nobody waits or holds", func() bool {
			s := c.Stats()
			return s.Waiters == 0 && s.Held == 0 && s.Debts == 0
		})
	}
	if a.granted.Load() == 0 {
		t.Error("no lock was granted")
	}
	t.Logf("%d locks", a.granted.Load())
}

// The clients passed to New may have any options: New sets what locking needs by itself, and two
// such Clients exclude each other.
func TestExclusionWithOddClients(t *testing.T) {
	t.Parallel()
	servers, _ := realNodes(t, 3)
	a := newArena(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i, change := range []func(*redis.Options){
		func(o *redis.Options) { o.Protocol = 2 },
		func(o *redis.Options) { o.Protocol, o.PoolFIFO = 3, true },
		func(o *redis.Options) { o.PoolSize = 1 },
		func(o *redis.Options) { o.MaxActiveConns = 2 },
		func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.MaxRetries = 1, 1, 10 },
		func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.ContextTimeoutEnabled = -1, -1, true },
		func(o *redis.Options) { o.ConnMaxLifetime, o.ConnMaxIdleTime = 10*time.Millisecond, time.Millisecond },
		func(o *redis.Options) { o.ReadBufferSize, o.WriteBufferSize = 16, 16 },
	} {
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, s.Client(t, change))
		}
		c := newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...)
		got := make(chan struct{}, 1)
		wg.Go(func() {
			l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("own", i), time.Minute, nil)
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			mustRelease(t, l)
			got <- struct{}{}
			for ctx.Err() == nil {
				a.work(ctx, c, "k", 200*time.Millisecond)
			}
		})
	}
	wg.Wait()
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
	t.Logf("%d locks", a.granted.Load())
}

// The program closes its redis clients before the Client, which has connections of its own,
// continues, and can be closed.
func TestRedisClientsThatAreClosedFirst(t *testing.T) {
	for _, n := range []int{1, 3} {
		servers, _ := realNodes(t, n)
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, redis.NewClient(&redis.Options{Addr: s.Addr()}))
		}
		c := newClient(t, patient, nodes...)
		l := mustLock(t, c, "k", time.Minute)
		for _, node := range nodes {
			_ = node.Close()
		}
		mustRelease(t, l)
		mustRelease(t, mustLock(t, c, "other", time.Minute))
	}
}

// A request that a stopped node executes after its Client is gone creates a key that lives for its
// ttl at most, and costs other clients no more than that.
func TestWhatIsExecutedAfterCloseEndsWithItsTTL(t *testing.T) {
	servers, nodes := realNodes(t, 1)
	other := newClient(t, flightlock.Options{}, nodes...)
	c, err := flightlock.New(flightlock.Options{Nodes: nodes})
	must(t, err)
	for _, c := range []*flightlock.Client{c, other} { // they know the scripts
		_ = mustLock(t, c, "k", time.Second).Release(t.Context())
	}
	_ = servers[0].Stop()
	commands := c.Stats().Commands
	go func() { _, _ = c.TryLock(t.Context(), "k", time.Second) }()
	redistest.Eventually(t, 10*time.Second, "it is written", func() bool { return c.Stats().Commands > commands })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = c.Close(ctx) // it cannot wait for a server that has stopped
	_ = servers[0].Cont()
	servers[0].WaitUp(t)
	resumed := time.Now()
	l := eventually(t, other, "k")
	if pttl := servers[0].Do(t, "PTTL", "lock:k").(int64); pttl > 1000 {
		t.Errorf("PTTL %d", pttl)
	}
	_ = l.Release(t.Context())
	t.Logf("the other had the key after %v", time.Since(resumed))
}

// A node on which another client's script does not end refuses everything. It is a node without a
// vote, and never a key that is held; locking continues without it, and once the script is killed
// it votes again.
func TestANodeWithABusyScriptHasNoVote(t *testing.T) {
	servers, nodes := realNodes(t, 3)
	c := newClient(t, flightlock.Options{NodeTimeout: 5 * time.Second}, nodes...)
	mustRelease(t, mustLock(t, c, "k", time.Minute))
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
			must(t, err)
			mustRelease(t, l)
		} else if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
			!strings.Contains(err.Error(), "BUSY") {
			t.Errorf("two of three nodes are busy: %v", err)
		}
	}
	for _, s := range servers[:2] {
		s.Do(t, "SCRIPT", "KILL")
	}
	wg.Wait()
	mustRelease(t, eventually(t, c, "k"))
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
}
