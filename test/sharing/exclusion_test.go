package sharing

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
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
			_ = l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{})
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
		l, err = c.SingleFlightLock(ctx, key, ttl, flightlock.ExponentialBackoff(time.Millisecond,
			10*time.Millisecond))
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
	servers, _ := lockkit.StartNodes(t, 3)
	var cs []*flightlock.Client
	for range 3 {
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, s.Client(t, func(o *redis.Options) { o.PoolSize = 10 }))
		}
		cs = append(cs, lockkit.New(t, flightlock.Options{MaxTTL: time.Second}, nodes...))
	}
	a := newArena(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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
		"evalsha", "script", "set", "get", "del", "pttl", "pexpire", "incrby", "exists", "zadd", "zrem",
		"zrange", "zscore", "getdel", "time", "ping", "publish", "subscribe", "info", "append", "object",
	}
	began := time.Now()
	for refused := 0; ctx.Err() == nil && (time.Since(began) < 2*time.Second ||
		a.granted.Load() == 0); refused++ {
		s := servers[rand.IntN(len(servers))]
		name := commands[refused%len(commands)]
		refuse, accept := []any{"ACL", "SETUSER", "default", "-" + name},
			[]any{"ACL", "SETUSER", "default", "+" + name}
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
	cancel()
	wg.Wait()
	redistest.EventuallyNoLocks(t, 20*time.Second, servers...)
	if a.granted.Load() == 0 {
		t.Error("no lock was granted")
	}
	t.Logf("%d locks", a.granted.Load())
}

// Of any number of concurrent releases of a lock, one returns nil. The others, and all later calls
// on the lock, leave its successor alone. The same is true of nested locks.
func TestOfManyReleasesOneCounts(t *testing.T) {
	t.Parallel()
	_, nodes := lockkit.StartNodes(t, 3)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	for i := range 36 {
		l := lockkit.Lock(t, c, "k", time.Minute)
		all := []*flightlock.Lock{l}
		for range i % 4 {
			inner, err := c.TryLock(l.Context(t.Context()), "k", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, inner)
		}
		next := make(chan *flightlock.Lock)
		go func() { next <- lockkit.Lock(t, c, "k", time.Minute) }()
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
				l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}) == nil || l.Err() == nil {
				t.Error("a lock that was released can still be used")
			}
		}
		if err := successor.Refresh(t.Context()); err != nil || successor.Fence() <= l.Fence() {
			t.Errorf("the successor: %v, token %d after %d", err, successor.Fence(), l.Fence())
		}
		lockkit.Release(t, successor)
	}
}

// The clients passed to New may have any options: New sets what locking needs by itself, and two
// such Clients exclude each other.
func TestExclusionWithOddClients(t *testing.T) {
	t.Parallel()
	servers, _ := lockkit.StartNodes(t, 3)
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
		c := lockkit.New(t, lockkit.Patient, nodes...)
		got := make(chan struct{}, 1)
		wg.Go(func() {
			l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("own", i), time.Minute, nil)
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			lockkit.Release(t, l)
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

// Exclusion and rising fences hold while clients contend over connections that are slow,
// reset, and cut in the middle of replies; in the end no key is left.
func TestExclusionUnderFire(t *testing.T) {
	t.Parallel()
	var proxies []*redistest.Proxy
	var cs []*flightlock.Client
	servers, _ := lockkit.StartNodes(t, 3)
	for _, s := range servers {
		proxies = append(proxies, redistest.StartProxy(t, s.Addr()))
	}
	for range 3 {
		var nodes []redis.UniversalClient
		for _, p := range proxies {
			nodes = append(nodes, testkit.Dial(t, p.Addr()))
		}
		cs = append(cs, lockkit.New(t, flightlock.Options{}, nodes...))
	}
	for _, c := range cs { // a new deployment needs all nodes at once, and might wait for that all the time
		lockkit.UseOnAll(t, c, "k", servers...)
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
