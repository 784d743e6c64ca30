package flightlock_test

import (
	"context"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// dropper is a Client whose holders forget to release, and another process that wants their keys.
type dropper struct {
	t     *testing.T
	c     *flightlock.Client
	rival *flightlock.Client
	log   *syncBuffer
}

func newDropper(t *testing.T) *dropper {
	node := redistest.StartMemNodes(t, 1)[0]
	log := new(syncBuffer)
	client := func(to *syncBuffer) *flightlock.Client {
		c := newClient(t, flightlock.Options{NodeTimeout: 5 * time.Second,
			Logger: slog.New(slog.NewTextHandler(to, nil))}, node.Client(t))
		t.Cleanup(func() { _ = c.Close(canceled()) }) // it waits for no holder
		return c
	}
	return &dropper{t, client(log), client(new(syncBuffer)), log}
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// refreshed is a lock that is refreshed until it is released.
func (d *dropper) refreshed(key string) *flightlock.Lock {
	d.t.Helper()
	l := mustLock(d.t, d.c, key, time.Minute)
	must(d.t, l.AutoRefresh(flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
	return l
}

// given waits until the rival has key, and the log says once why.
func (d *dropper) given(key string) {
	d.t.Helper()
	redistest.Eventually(d.t, time.Minute, "a rival has "+key, func() bool {
		runtime.GC()
		l, err := d.rival.TryLock(d.t.Context(), key, time.Minute)
		if err == nil {
			mustRelease(d.t, l)
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
		"a Context that nobody waits for": func(d *dropper) {
			l := d.refreshed("k")
			if ctx := l.Context(context.Background()); flightlock.FromContext(ctx) != l || ctx.Err() != nil {
				d.t.Errorf("%v", ctx)
			}
		},
		"a Context made before": func(d *dropper) {
			l := mustLock(d.t, d.c, "k", time.Minute)
			ctx := context.WithValue(l.Context(d.t.Context()), lockName{}, "k")
			must(d.t, flightlock.FromContext(ctx).AutoRefresh(flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
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
			mustRelease(d.t, l)
			<-next
		},
		"refreshed by hand": func(d *dropper) {
			l := d.refreshed("k")
			must(d.t, l.Refresh(d.t.Context()))
		},
		"nested, and outlived the one around it": func(d *dropper) {
			l := mustLock(d.t, d.c, "k", time.Minute)
			inner, err := d.c.SingleFlightLock(l.Context(context.Background()), "k", time.Minute, nil)
			must(d.t, err)
			must(d.t, inner.AutoRefresh(flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
			mustRelease(d.t, l)
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
			must(d.t, err)
			return inner.Err
		},
		"the Lock around a dropped one": func(d *dropper) func() error {
			l := d.refreshed("k")
			inner, err := d.c.TryLock(l.Context(context.Background()), "k", time.Minute)
			must(d.t, err)
			must(d.t, inner.AutoRefresh(flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
			mustRelease(d.t, inner)
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
		must(t, err)
		must(t, inner.AutoRefresh(flightlock.RefreshPolicy{Interval: 20 * time.Millisecond}))
	}()
	redistest.Eventually(t, time.Minute, "the drop is logged", func() bool { runtime.GC(); return d.warnings("k") == 1 })
	if err := l.Err(); err != nil {
		t.Error(err)
	}
	mustRelease(t, l)
	other, err := d.rival.TryLock(t.Context(), "k", time.Minute)
	must(t, err)
	mustRelease(t, other)
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
			for range sized(50, 20) {
				l := mustLock(t, d.c, key, time.Minute)
				must(t, l.AutoRefresh(flightlock.RefreshPolicy{Interval: time.Millisecond}))
				inner, err := d.c.TryLock(l.Context(t.Context()), key, time.Minute)
				must(t, err)
				must(t, inner.AutoRefresh(flightlock.RefreshPolicy{Interval: time.Millisecond}))
				mustRelease(t, inner)
				mustRelease(t, l)
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
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var log syncBuffer
		c := newClient(t, flightlock.Options{MaxTTL: ttl, Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
		l, err := c.Lock(t.Context(), "k", ttl, nil) // a leader
		must(t, err)
		must(t, l.AutoRefresh(flightlock.RefreshPolicy{}))
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
		mustRelease(t, l)
		if age := c.Stats().OldestDo; age != 0 {
			t.Errorf("after its release, the oldest lock is %v old", age)
		}
	})
}
