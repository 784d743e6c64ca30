package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
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

// refreshed is a lock that is refreshed until it is released.
func (d *dropper) refreshed(key string) *flightlock.Lock {
	d.t.Helper()
	l := lockkit.Lock(d.t, d.c, key, time.Minute)
	testkit.Must(d.t, l.AutoRefresh(d.t.Context(), flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
	return l
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
	redistest.Eventually(d.t, time.Minute, "it is logged", func() bool { return d.warnings(key) > 0 })
	if n := d.warnings(key); n != 1 {
		d.t.Errorf("%d warnings: %s", n, d.log)
	}
	if n := d.c.Stats().Lost; n != 0 {
		d.t.Errorf("%d locks were lost", n)
	}
}

func (d *dropper) warnings(key string) (n int) {
	for line := range strings.Lines(d.log.String()) {
		if strings.Contains(line, "level=WARN") && strings.Contains(line, "dropped without Release") &&
			strings.Contains(line, "key="+key) {
			n++
		}
	}
	return n
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
	if text := d.log.String(); text != "" {
		d.t.Errorf("it is logged: %s", text)
	}
}

// A lock with AutoRefresh that nobody can reach any more is released, and the log names it: its holder returned
// early, or panicked, and nobody can release it.
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
			testkit.Must(d.t, l.AutoRefresh(l.Context(d.t.Context()), flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
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
			p := flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}
			testkit.Must(d.t, flightlock.FromContext(ctx).AutoRefresh(d.t.Context(), p))
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
			inner, err := d.c.SingleFlightLock(l.Context(context.Background()), "k", time.Minute, nil)
			testkit.Must(d.t, err)
			testkit.Must(d.t, inner.AutoRefresh(d.t.Context(), flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
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
			inner, err := d.c.TryLock(l.Context(context.Background()), "k", time.Minute)
			testkit.Must(d.t, err)
			testkit.Must(d.t, inner.AutoRefresh(d.t.Context(), flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
			lockkit.Release(d.t, inner)
			return l.Err
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDropper(t)
			use := hold(d)
			d.kept("k")
			if err := use(); err != nil {
				t.Error(err)
			}
			runtime.KeepAlive(use)
		})
	}
}

// A nested lock that was dropped without Release counts as released; the one around it holds the key on.
func TestADroppedNestedLock(t *testing.T) {
	d := newDropper(t)
	l := d.refreshed("k")
	func() {
		inner, err := d.c.TryLock(l.Context(t.Context()), "k", time.Minute)
		testkit.Must(t, err)
		testkit.Must(t, inner.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
	}()
	redistest.Eventually(t, time.Minute, "the drop is logged", func() bool { runtime.GC(); return d.warnings("k") == 1 })
	if err := l.Err(); err != nil {
		t.Error(err)
	}
	lockkit.Release(t, l)
	other, err := d.rival.TryLock(t.Context(), "k", time.Minute)
	testkit.Must(t, err)
	lockkit.Release(t, other)
}

// A Release in whose course the collector finds that nobody else has the lock is the Release of its holder: it
// succeeds, and nothing was dropped.
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
				l := lockkit.Lock(t, d.c, key, time.Minute)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Millisecond}))
				inner, err := d.c.TryLock(l.Context(t.Context()), key, time.Minute)
				testkit.Must(t, err)
				testkit.Must(t, inner.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Millisecond}))
				lockkit.Release(t, inner)
				lockkit.Release(t, l)
			}
		})
	}
	holders.Wait()
	close(stop)
	collector.Wait()
	if text := d.log.String(); text != "" {
		t.Errorf("it is logged: %s", text)
	}
}

// A policy without a limit keeps a lock until it is released. The age of the oldest lock is that of those which
// AutoRefresh keeps too, and the log names one that is kept for hours, each hour.
func TestAutoRefreshForHours(t *testing.T) {
	const ttl = 5 * time.Minute // hours without thousands of refreshes
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{MaxTTL: ttl, Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
		l := lockkit.Lock(t, c, "k", ttl) // a leader
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		time.Sleep(59 * time.Minute)
		if text := log.String(); text != "" {
			t.Errorf("before an hour has passed: %s", text)
		}
		time.Sleep(4*time.Hour + 11*time.Minute)
		if err := l.Err(); err != nil {
			t.Errorf("after five hours: %v", err)
		}
		if age := c.Stats().OldestDo; age != 5*time.Hour+10*time.Minute {
			t.Errorf("the oldest lock is %v old", age)
		}
		if text := log.String(); strings.Count(text, "level=WARN") != 5 || strings.Count(text, "key=k") != 5 ||
			!strings.Contains(text, "age=1h") || !strings.Contains(text, "age=5h") {
			t.Errorf("after five hours: %s", text)
		}
		lockkit.Release(t, l)
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
		for _, m := range nodes {
			m.SetDelay(farTrip / 2)
		}
		f(t, nodes, l)
		for _, m := range nodes {
			m.SetDelay(0)
			m.Stall(false)
		}
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
				if err := l.Refresh(t.Context()); err != nil {
					t.Error(err)
				}
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
		"two silent, then suspended":   {func(m []*redistest.MemNode) { m[0].Stall(true); m[1].Stall(true) }, false},
		"one silent, one refuses":      {func(m []*redistest.MemNode) { m[0].Stall(true); m[1].Down(true) }, false},
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
				for _, node := range m {
					node.Down(false)
				}
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

// MaxRefreshes and MaxHold end the refreshing; the lock then runs out, and its Context
// says so.
func TestAutoRefreshIsBounded(t *testing.T) {
	for name, tc := range map[string]struct {
		policy      flightlock.RefreshPolicy
		least, most time.Duration
	}{
		"MaxRefreshes": {flightlock.RefreshPolicy{MaxRefreshes: 3}, 1200 * time.Millisecond, 1300 * time.Millisecond},
		"MaxHold":      {flightlock.RefreshPolicy{MaxHold: 2 * time.Second}, 2 * time.Second, 2600 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
				l := lockkit.Lock(t, c, "k", 600*time.Millisecond)
				start := time.Now()
				ctx := l.Context(t.Context())
				testkit.Must(t, l.AutoRefresh(t.Context(), tc.policy))
				<-ctx.Done()
				if held := time.Since(start); held < tc.least-20*time.Millisecond || held > tc.most {
					t.Errorf("held for %v", held)
				}
				if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
					t.Errorf("cause %v", context.Cause(ctx))
				}
			})
		})
	}
}

// When its ctx ends, the refresh that is due next is the last one: the lock is held for one more ttl, and then lost,
// which the reason says.
func TestAutoRefreshEndsOneTTLAfterItsContext(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		for name, around := range map[string]func(*flightlock.Lock, context.Context) context.Context{
			"its caller's": func(_ *flightlock.Lock, ctx context.Context) context.Context { return ctx },
			"the lock's":   func(l *flightlock.Lock, ctx context.Context) context.Context { return l.Context(ctx) },
		} {
			l := lockkit.Lock(t, c, "k", 3*time.Second)
			ctx, cancel := context.WithCancelCause(t.Context())
			held := l.Context(t.Context())
			testkit.Must(t, l.AutoRefresh(around(l, ctx), flightlock.RefreshPolicy{}))
			time.Sleep(time.Minute)
			why := errors.New("enough")
			cancel(why)
			ended := time.Now()
			<-held.Done()
			if took := time.Since(ended); took < 2900*time.Millisecond || took > 4*time.Second {
				t.Errorf("%s: held for %v after the end of ctx", name, took)
			}
			if err := context.Cause(held); !errors.Is(err, flightlock.ErrLockLost) || !errors.Is(err, why) {
				t.Errorf("%s: %v", name, err)
			}
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
		for _, n := range nodes[:2] {
			n.Stall(true)
		}
		<-ctx.Done()
		if now := time.Now(); now.Before(until) || now.After(until.Add(2*time.Millisecond)) {
			t.Errorf("lost at %v, valid until %v", now, until)
		}
		if n := c.Stats().Refreshes - before; n != 3 {
			t.Errorf("%d attempts, want 1 and 2 retries", n)
		}
		for _, n := range nodes {
			n.Stall(false)
		}
	})
}

// A refresh that fails for lack of answers leaves the lock as it was; once the nodes are back it
// succeeds. A refresh never restores a lock that was lost.
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
		nodes[0].Mini.Del("lock:k")
		nodes[1].Mini.Del("lock:k")
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Refresh of a lock that two of three nodes lost: %v", err)
		}
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("and again: %v", err)
		}
	})
}

// Bad policies are refused at the call.
func TestAutoRefreshRefusesBadPolicies(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		defer lockkit.Release(t, l)
		for name, p := range map[string]flightlock.RefreshPolicy{
			"Interval": {Interval: time.Second}, "validity": {Interval: 995 * time.Millisecond},
			"MaxRefreshes": {MaxRefreshes: -1}, "RefreshPolicy.MaxHold is -1ns": {MaxHold: -1},
			"RefreshPolicy.Interval is 999.999µs": {Interval: time.Millisecond - 1},
			"interval":                            {Retry: flightlock.LimitedRetry(-1, 1)},
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

// A Release in the instant in which AutoRefresh begins stops it too, also if the lock is nested in one that is held
// on: nothing is refreshed any more, and AutoRefresh returns that the lock is over if it came second.
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

// The shortest Interval leaves a refresh the time that it needs, and the longest times do not end
// it at once.
func TestAutoRefreshAtTheLimitsOfItsPolicy(t *testing.T) {
	for name, tc := range map[string]struct {
		drift  float64
		ttl    time.Duration
		policy flightlock.RefreshPolicy
	}{
		"short":              {0, 10 * time.Millisecond, flightlock.RefreshPolicy{Interval: time.Millisecond}},
		"short and drifting": {math.Nextafter(0.5, 0), 10 * time.Millisecond, flightlock.RefreshPolicy{}},
		"long": {math.SmallestNonzeroFloat64, time.Second,
			flightlock.RefreshPolicy{MaxRefreshes: math.MaxInt, MaxHold: math.MaxInt64}},
		"long strategy": {0, time.Second, flightlock.RefreshPolicy{
			Retry: flightlock.LimitedRetry(math.MaxInt64, math.MaxInt), MaxRefreshes: math.MaxInt32}},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(300 * time.Microsecond)
				}
				c := lockkit.New(t, flightlock.Options{DriftFactor: tc.drift}, clients...)
				lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
				time.Sleep(time.Second) // all nodes are dialed, and have the scripts
				l := lockkit.Lock(t, c, "k", tc.ttl)
				testkit.Must(t, l.AutoRefresh(t.Context(), tc.policy))
				time.Sleep(30 * tc.ttl)
				if err := l.Err(); err != nil {
					t.Error(err)
				}
				if n := c.Stats().Refreshes; n > 310 {
					t.Errorf("%d refreshes", n)
				}
				lockkit.Release(t, l) // Close would wait for it, and it is refreshed all the time
			})
		})
	}
}

// Refresh of a lock that is over says so, also with one of its Contexts, which has ended with it: the nodes
// are not to blame.
func TestRefreshOfALostLockWithItsContext(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		synctest.Wait()
		for _, n := range nodes {
			n.Mini.Del("lock:k")
		}
		for _, when := range []string{"finds the loss", "comes after it"} {
			err := l.Refresh(ctx)
			if !errors.Is(err, flightlock.ErrNotHeld) || errors.Is(err, flightlock.ErrUnavailable) {
				t.Errorf("one that %s: %v", when, err)
			}
		}
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
