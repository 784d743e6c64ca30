package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
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
	"github.com/redis/go-redis/v9"
)

// dropper is a Client whose holders forget to release, and another process that wants their keys.
type dropper struct {
	t     *testing.T
	c     *flightlock.Client
	rival *flightlock.Client
	log   *testkit.LogBuffer
}

func newDropper(t *testing.T) *dropper {
	node := redistest.StartMemNodes(t, 1)[0]
	log := new(testkit.LogBuffer)
	client := func(to *testkit.LogBuffer) *flightlock.Client {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 5 * time.Second,
			Logger: slog.New(slog.NewTextHandler(to, nil))}, node.Client(t))
		t.Cleanup(func() { _ = c.Close(canceled()) }) // it waits for no holder
		return c
	}
	return &dropper{t, client(log), client(new(testkit.LogBuffer)), log}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// often is the policy of all locks.
var often = flightlock.RefreshPolicy{Interval: 2 * time.Millisecond}

// refreshed is a lock that is refreshed until it is released.
func (d *dropper) refreshed(key string) *flightlock.Lock {
	d.t.Helper()
	l := lockkit.Lock(d.t, d.c, key, time.Minute)
	testkit.Must(d.t, l.AutoRefresh(d.t.Context(), often))
	return l
}

// nested is a lock in l that is refreshed, too.
func (d *dropper) nested(l *flightlock.Lock) *flightlock.Lock {
	d.t.Helper()
	inner, err := d.c.TryLock(l.Context(context.Background()), l.Key(), time.Minute)
	testkit.Must(d.t, err)
	testkit.Must(d.t, inner.AutoRefresh(d.t.Context(), often))
	return inner
}

// given waits until the rival has key, and the log says once why.
func (d *dropper) given(key string) {
	d.t.Helper()
	redistest.Eventually(d.t, time.Minute, "a rival has "+key, func() bool {
		runtime.GC()
		l, err := d.rival.TryLock(d.t.Context(), key, time.Minute)
		if err == nil {
			lockkit.Release(d.t, l)
		}
		return err == nil
	})
	testkit.WantOneLine(d.t, d.log, "level=WARN", "dropped without Release", "key="+key)
	if n := d.c.Stats().Lost; n != 0 {
		d.t.Errorf("%d locks were lost", n)
	}
}

// kept collects garbage again and again while key is refreshed many times: it stays locked.
func (d *dropper) kept(key string) {
	d.t.Helper()
	before := d.c.Stats().Refreshes
	redistest.Eventually(d.t, time.Minute, "it was refreshed", func() bool {
		runtime.GC()
		if _, err := d.rival.TryLock(d.t.Context(), key, time.Minute); err == nil {
			d.t.Fatal("a rival gets it")
		}
		return d.c.Stats().Refreshes > before+20
	})
	if d.log.Count("level=WARN") > 0 {
		d.t.Errorf("it is logged: %s", d.log.String())
	}
}

// A lock with AutoRefresh that nobody can reach any more is released, and the log names it: its holder
// returned early, or panicked, and nobody can release it.
func TestADroppedLockIsReleased(t *testing.T) {
	for name, drop := range map[string]func(d *dropper){
		"early return": func(d *dropper) { d.refreshed("k") },
		"recovered panic": func(d *dropper) {
			defer func() { _ = recover() }()
			l := d.refreshed("k")
			panic(l.Key())
		},
		"refreshed with a Context of its own": func(d *dropper) {
			l := lockkit.Lock(d.t, d.c, "k", time.Minute)
			testkit.Must(d.t, l.AutoRefresh(l.Context(d.t.Context()), often))
		},
		"a Context that nobody waits for": func(d *dropper) {
			l := d.refreshed("k")
			if ctx := l.Context(context.Background()); flightlock.FromContext(ctx) != l || ctx.Err() != nil {
				d.t.Errorf("%v", ctx)
			}
		},
		"a Context made before": func(d *dropper) {
			l := lockkit.Lock(d.t, d.c, "k", time.Minute)
			ctx := context.WithValue(l.Context(d.t.Context()), lockName{}, "k")
			testkit.Must(d.t, flightlock.FromContext(ctx).AutoRefresh(d.t.Context(), often))
		},
		"the parent of its Context has ended": func(d *dropper) {
			parent, cancel := context.WithCancel(d.t.Context())
			defer cancel()
			ctx := d.refreshed("k").Context(parent)
			child, end := context.WithTimeout(ctx, time.Hour)
			defer end()
			select {
			case <-child.Done():
				d.t.Error("it has ended")
			default:
			}
		},
		"handed over": func(d *dropper) {
			l := d.refreshed("k")
			next := make(chan struct{})
			go func() { d.refreshed("k"); close(next) }()
			redistest.Eventually(d.t, time.Minute, "another waits", func() bool { return d.c.Stats().Waiters == 1 })
			lockkit.Release(d.t, l)
			<-next
		},
		"refreshed by hand": func(d *dropper) {
			l := d.refreshed("k")
			testkit.Must(d.t, l.Refresh(d.t.Context()))
		},
		"nested, and outlived the one around it": func(d *dropper) {
			l := lockkit.Lock(d.t, d.c, "k", time.Minute)
			d.nested(l)
			lockkit.Release(d.t, l)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDropper(t)
			drop(d)
			d.given("k")
		})
	}
}

type lockName struct{}

// A lock is in use as long as its holder can reach it, or one of its contexts: also where only a
// goroutine that waits for the end of one is left.
func TestALockInUseIsNotDropped(t *testing.T) {
	for name, hold := range map[string]func(d *dropper) (use func() error){
		"the Lock": func(d *dropper) func() error { return d.refreshed("k").Err },
		"a Context": func(d *dropper) func() error {
			return d.refreshed("k").Context(context.Background()).Err
		},
		"a child of a Context": func(d *dropper) func() error {
			ctx, cancel := context.WithTimeout(d.refreshed("k").Context(context.Background()), time.Hour)
			d.t.Cleanup(cancel)
			return ctx.Err
		},
		"a Context of another parent": func(d *dropper) func() error {
			l := d.refreshed("k")
			_ = l.Context(context.Background())
			return l.Context(context.WithValue(context.Background(), lockName{}, "k")).Err
		},
		"who waits for the end of a Context": func(d *dropper) func() error {
			done := d.refreshed("k").Context(context.Background()).Done()
			return func() error {
				select {
				case <-done:
					return context.Canceled
				default:
					return nil
				}
			}
		},
		"what is called at the end of a Context": func(d *dropper) func() error {
			ended := make(chan struct{})
			context.AfterFunc(d.refreshed("k").Context(context.Background()), func() { close(ended) })
			return func() error {
				select {
				case <-ended:
					return context.Canceled
				default:
					return nil
				}
			}
		},
		"a nested Lock": func(d *dropper) func() error {
			inner, err := d.c.TryLock(d.refreshed("k").Context(context.Background()), "k", time.Minute)
			testkit.Must(d.t, err)
			return inner.Err
		},
		"the Lock around a dropped one": func(d *dropper) func() error {
			l := d.refreshed("k")
			lockkit.Release(d.t, d.nested(l))
			return l.Err
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDropper(t)
			use := hold(d)
			d.kept("k")
			testkit.Must(t, use())
			runtime.KeepAlive(use)
		})
	}
}

// A nested lock that was dropped without Release counts as released; the one around it holds the key on.
func TestADroppedNestedLock(t *testing.T) {
	d := newDropper(t)
	l := d.refreshed("k")
	d.nested(l)
	redistest.Eventually(t, time.Minute, "the drop is logged", func() bool {
		runtime.GC()
		return d.log.Count("level=WARN", "dropped without Release", "key=k") == 1
	})
	testkit.Must(t, l.Err())
	lockkit.Release(t, l)
	other, err := d.rival.TryLock(t.Context(), "k", time.Minute)
	testkit.Must(t, err)
	lockkit.Release(t, other)
}

// A Release in whose course the collector finds that nobody else has the lock is the Release of its holder:
// it succeeds, and nothing was dropped.
func TestReleaseWhileTheCollectorRuns(t *testing.T) {
	d := newDropper(t)
	stop := make(chan struct{})
	var collector, holders sync.WaitGroup
	collector.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	for _, key := range []string{"a", "b", "c", "d"} {
		holders.Go(func() {
			for range testkit.Sized(50, 20) {
				l := d.refreshed(key)
				lockkit.Release(t, d.nested(l))
				lockkit.Release(t, l)
			}
		})
	}
	holders.Wait()
	close(stop)
	collector.Wait()
	if d.log.Count("level=WARN") > 0 {
		t.Errorf("it is logged: %s", d.log.String())
	}
}

// A policy without a limit keeps a lock until it is released. The age of the oldest lock is that of those
// which AutoRefresh keeps, too. Of those that are kept for hours, each hour the log names two and counts the
// others, in three lines: a process may lead for a thousand tenants.
func TestAutoRefreshForHours(t *testing.T) {
	const ttl = 5 * time.Minute // hours without thousands of refreshes
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{MaxTTL: ttl, Logger: slog.New(slog.NewTextHandler(&log, nil))},
			clients...)
		var leads []*flightlock.Lock
		for i := range 5 {
			leads = append(leads, lockkit.Lock(t, c, fmt.Sprint("tenant", i), ttl))
			testkit.Must(t, leads[i].AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		}
		time.Sleep(59 * time.Minute)
		if log.Count("level=WARN") > 0 {
			t.Errorf("before an hour has passed: %s", log.String())
		}
		time.Sleep(4*time.Hour + 11*time.Minute)
		if age := c.Stats().OldestDo; age != 5*time.Hour+10*time.Minute {
			t.Errorf("the oldest lock is %v old", age)
		}
		for words, want := range map[string]int{"a lock has been held for hours": 10, "age=1h": 2,
			"age=5h": 2, "more locks have been held for hours": 5, "count=3": 5, "level=WARN": 15} {
			if n := log.Count(words); n != want {
				t.Errorf("%d lines with %q after five hours, want %d: %s", n, words, want, &log)
			}
		}
		for _, l := range leads {
			testkit.Must(t, l.Err())
			lockkit.Release(t, l)
		}
		if age := c.Stats().OldestDo; age != 0 {
			t.Errorf("after its release, the oldest lock is %v old", age)
		}
	})
}

// Locks on distant nodes: a round trip is hardly shorter than NodeTimeout, so two do not fit into
// it.
const (
	farTimeout = 200 * time.Millisecond
	farTrip    = 180 * time.Millisecond
)

// farLock holds a lock, with a caller waiting behind it, on nodes whose counters differ: its
// refreshes reserve tokens, and a second round would have to make them safe.
func farLock(
	t *testing.T, n int, ttl time.Duration, f func(t *testing.T, nodes []*redistest.MemNode, l *flightlock.Lock),
) {
	t.Helper()
	testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: farTimeout}, clients...)
		l := lockkit.Lock(t, c, "k", ttl)
		synctest.Wait()
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan struct{})
		go func() {
			defer close(left)
			if behind, err := c.SingleFlightLock(ctx, "k", ttl, nil); err == nil {
				_ = behind.Release(t.Context())
			}
		}()
		synctest.Wait()
		differ(t, nodes)
		testkit.Delay(farTrip/2, nodes...)
		f(t, nodes, l)
		testkit.Delay(0, nodes...)
		testkit.Stall(false, nodes...)
		leave()
		<-left
		_ = l.Release(t.Context())
		time.Sleep(10 * time.Second) // what is owed to a node
	})
}

// differ makes the nodes' counters of fencing tokens differ, as other keys of a bucket do. They
// only rise.
func differ(t *testing.T, nodes []*redistest.MemNode) {
	t.Helper()
	for i, m := range nodes {
		for _, k := range m.Mini.Keys() {
			if !strings.Contains(k, "fence") {
				continue
			}
			if _, err := m.Mini.Incr(k, 1000*(i+1)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// What a majority confirmed in time counts, from before the request, although the nodes did not
// agree on the tokens that the refresh was to reserve. A second round to settle that would arrive
// after the old deadline.
func TestARefreshThatIsConfirmedCountsWhateverBecomesOfItsTokens(t *testing.T) {
	const ttl = 2 * time.Second
	for n := 2; n <= 3; n++ {
		t.Run(fmt.Sprint("nodes=", n), func(t *testing.T) {
			farLock(t, n, ttl, func(t *testing.T, _ []*redistest.MemNode, l *flightlock.Lock) {
				time.Sleep(time.Until(l.Until()) - 280*time.Millisecond)
				want := time.Now().Add(ttl - ttl/100 - 2*time.Millisecond)
				testkit.Must(t, l.Refresh(t.Context()))
				if got := l.Until(); !got.Equal(want) {
					t.Errorf("until %v, want %v", got, want)
				}
				time.Sleep(time.Second)
				if err := l.Err(); err != nil {
					t.Errorf("a second later: %v", err)
				}
			})
		})
	}
}

// A Refresh ends within NodeTimeout, and within two where another refresh of the lock is in
// progress, whatever the nodes do.
func TestRefreshIsBounded(t *testing.T) {
	for name, tc := range map[string]struct {
		breaks func(nodes []*redistest.MemNode)
		works  bool
	}{
		"counters differ":              {func([]*redistest.MemNode) {}, true},
		"counters differ, one silent":  {func(m []*redistest.MemNode) { m[0].Stall(true) }, true},
		"counters differ, one refuses": {func(m []*redistest.MemNode) { m[0].Down(true) }, true},
		"two silent, then suspended": {func(m []*redistest.MemNode) {
			m[0].Stall(true)
			m[1].Stall(true)
		}, false},
		"one silent, one refuses": {func(m []*redistest.MemNode) { m[0].Stall(true); m[1].Down(true) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			farLock(t, 3, time.Minute, func(t *testing.T, m []*redistest.MemNode, l *flightlock.Lock) {
				tc.breaks(m)
				refreshes := func(calls int) {
					t.Helper()
					var ended sync.WaitGroup
					for range calls {
						ended.Go(func() {
							began := time.Now()
							err := l.Refresh(t.Context())
							if took := time.Since(began); took > time.Duration(calls)*(farTimeout+10*time.Millisecond) {
								t.Errorf("%d calls: took %v: %v", calls, took, err)
							}
							if (err == nil) != tc.works || l.Err() != nil {
								t.Errorf("%d calls: %v; the lock: %v", calls, err, l.Err())
							}
						})
						time.Sleep(10 * time.Millisecond)
					}
					ended.Wait()
				}
				refreshes(1)
				time.Sleep(5 * time.Second)
				differ(t, m)
				refreshes(2)
				testkit.Down(false, m...)
			})
		})
	}
}

// AutoRefresh keeps a lock far beyond its ttl, at one refresh per third of it.
func TestAutoRefreshKeepsTheLock(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", 300*time.Millisecond)
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("a second AutoRefresh: %v", err)
		}
		time.Sleep(10*time.Second + 50*time.Millisecond)
		testkit.Must(t, l.Err())
		if n := c.Stats().Refreshes; n < 98 || n > 100 {
			t.Errorf("%d refreshes in 10s at 100ms", n)
		}
		lockkit.Release(t, l)
		before := c.Stats().Refreshes
		time.Sleep(time.Second)
		if n := c.Stats().Refreshes; n != before {
			t.Errorf("%d refreshes after Release", n-before)
		}
		if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}); err == nil {
			t.Error("AutoRefresh of a released lock")
		}
	})
}

// When the nodes do not answer, retries are bounded by the strategy and by the deadline, and the
// Context ends before the entry can have expired anywhere.
func TestRefreshFailuresAreBounded(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 20 * time.Millisecond}, clients...)
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		policy := flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(50*time.Millisecond, 2)}
		testkit.Must(t, l.AutoRefresh(t.Context(), policy))
		time.Sleep(400 * time.Millisecond) // one refresh has succeeded
		until := l.Until()
		before := c.Stats().Refreshes
		testkit.Stall(true, nodes[:2]...)
		<-ctx.Done()
		if now := time.Now(); now.Before(until) || now.After(until.Add(2*time.Millisecond)) {
			t.Errorf("lost at %v, valid until %v", now, until)
		}
		if n := c.Stats().Refreshes - before; n != 3 {
			t.Errorf("%d attempts, want 1 and 2 retries", n)
		}
		testkit.Stall(false, nodes...)
	})
}

// A refresh that fails for lack of answers leaves the lock as it was; once the nodes are back it
// succeeds. A refresh never restores a lock that was lost, and says so, also with one of its Contexts, which
// has ended with it: the nodes are not to blame.
func TestRefreshNeverResurrects(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		synctest.Wait()
		nodes[0].Stall(true)
		nodes[1].Stall(true)
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) || l.Err() != nil {
			t.Errorf("Refresh without nodes: %v; the lock: %v", err, l.Err())
		}
		nodes[0].Stall(false)
		nodes[1].Stall(false)
		synctest.Wait() // until the answers have arrived
		if err := l.Refresh(t.Context()); err != nil {
			t.Errorf("Refresh with nodes again: %v", err)
		}
		if left := time.Until(l.Until()); left < 900*time.Millisecond {
			t.Errorf("%v left after a refresh", left)
		}
		ctx := l.Context(t.Context())
		testkit.Lose("lock:k", nodes[:2]...)
		for _, ctx := range []context.Context{ctx, ctx, t.Context()} {
			err := l.Refresh(ctx)
			if !errors.Is(err, flightlock.ErrNotHeld) || errors.Is(err, flightlock.ErrUnavailable) {
				t.Errorf("Refresh of a lock that two of three nodes lost: %v", err)
			}
		}
	})
}

// Bad policies are refused at the call.
func TestAutoRefreshRefusesBadPolicies(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		defer lockkit.Release(t, l)
		for name, p := range map[string]flightlock.RefreshPolicy{
			"validity": {Interval: 995 * time.Millisecond}, "RefreshPolicy.Interval": {Interval: time.Millisecond - 1},
			"RefreshPolicy.MaxHold is -1ns": {MaxHold: -1}, "interval": {Retry: flightlock.LimitedRetry(-1, 1)},
		} {
			lockkit.WantInvalid(t, l.AutoRefresh(t.Context(), p), name)
		}
		var none context.Context
		lockkit.WantInvalid(t, l.AutoRefresh(none, flightlock.RefreshPolicy{}), "ctx")
		if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}); err != nil {
			t.Errorf("a good policy after bad ones: %v", err)
		}
	})
}

// A Release in the instant in which AutoRefresh begins stops it too, also if the lock is nested in one that
// is held on: nothing is refreshed any more, and AutoRefresh returns that the lock is over if it came second.
func TestReleaseStopsAnAutoRefreshThatBegins(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		outer := lockkit.Lock(t, c, "outer", time.Minute)
		around := outer.Context(t.Context())
		for i := range 200 {
			l, err := c.SingleFlightLock(around, []string{"k", "outer"}[i%2], 300*time.Millisecond, nil)
			testkit.Must(t, err)
			began := make(chan error)
			go func() {
				began <- l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: 100 * time.Millisecond})
			}()
			if i%4 < 2 {
				runtime.Gosched()
			}
			lockkit.Release(t, l)
			if err := <-began; err != nil && !errors.Is(err, flightlock.ErrNotHeld) {
				t.Error(err)
			}
		}
		before := c.Stats().Refreshes
		time.Sleep(20 * time.Second)
		if n := c.Stats().Refreshes; n != before {
			t.Errorf("%d refreshes of locks that were released", n-before)
		}
		lockkit.Release(t, outer)
	})
}

// A refresh that has to wait for a connection that nobody accepts ends when the dial does.
func TestRefreshEndsWithADial(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
		var hangs atomic.Bool
		var conns []net.Conn
		rdb := nodes[0].Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if hangs.Load() {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				conn, err := dial(ctx, network, addr)
				conns = append(conns, conn)
				return conn, err
			}
		})
		c := lockkit.New(t, flightlock.Options{}, rdb)
		l := lockkit.Lock(t, c, "k", time.Minute)
		hangs.Store(true)
		for _, conn := range conns {
			_ = conn.Close()
		}
		for range 3 {
			began := time.Now()
			err := l.Refresh(t.Context())
			if took := time.Since(began); err == nil || took > 2*time.Second {
				t.Errorf("%v after %v", err, took)
			}
		}
		hangs.Store(false)
		time.Sleep(10 * time.Second)
		testkit.Must(t, l.Release(t.Context()))
	})
}
