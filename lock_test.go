package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"slices"
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

// A refresh that has failed, and the reason why refreshing has stopped, are not the reason of a loss after
// one that succeeded.
func TestALossSaysNothingOfRefreshesBeforeTheLastThatWorked(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{MaxRefreshes: 1}))
		time.Sleep(time.Second)
		nodes[0].Stall(true)
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("Refresh: %v", err)
		}
		nodes[0].Stall(false)
		synctest.Wait() // until the answer is there
		testkit.Must(t, l.Refresh(t.Context()))
		<-ctx.Done()
		q, why := (*flightlock.QuorumError)(nil), context.Cause(ctx)
		if errors.As(why, &q) || strings.Contains(why.Error(), "MaxRefreshes") {
			t.Errorf("cause %v", why)
		}
	})
}

// A lock that is lost says why it was not refreshed, in the cause of its Context, in Err and in the error of
// Release: what its policy has said, and, if refreshes failed, what each node answered to the last of them.
// The log says that, too.
func TestALossSaysWhyRefreshingStopped(t *testing.T) {
	type policy = flightlock.RefreshPolicy
	for name, tc := range map[string]struct {
		policy  *policy // nil: it is refreshed by hand
		stalled bool
		why     string
	}{
		"by hand":       {nil, true, "the last refresh failed"},
		"AutoRefresh":   {&policy{}, true, "the last refresh failed"},
		"MaxHold":       {&policy{MaxHold: 5 * time.Second}, false, "RefreshPolicy.MaxHold, 5s"},
		"short MaxHold": {&policy{MaxHold: time.Millisecond}, false, "RefreshPolicy.MaxHold, 1ms"},
		"MaxRefreshes":  {&policy{MaxRefreshes: 2}, false, "RefreshPolicy.MaxRefreshes"},
		"the strategy": {&policy{Retry: flightlock.LimitedRetry(time.Second, 2)}, true,
			"Retry gave up after 3"},
		"the strategy is too slow": {&policy{Retry: flightlock.LimitedRetry(time.Hour, 2)}, true,
			"RefreshPolicy.Retry"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log testkit.LogBuffer
				c := lockkit.New(t, flightlock.Options{DisableQuarantine: true,
					Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
				l := lockkit.Lock(t, c, "k", time.Minute)
				ctx := l.Context(t.Context())
				if tc.policy != nil {
					testkit.Must(t, l.AutoRefresh(t.Context(), *tc.policy))
				}
				synctest.Wait()
				testkit.Stall(tc.stalled, nodes[:2]...)
				if tc.policy == nil {
					_ = l.Refresh(t.Context())
				}
				<-ctx.Done()
				for what, err := range map[string]error{"the cause": context.Cause(ctx), "Err": l.Err(),
					"Release": l.Release(t.Context())} {
					var q *flightlock.QuorumError
					if !errors.Is(err, flightlock.ErrLockLost) || !strings.Contains(err.Error(), tc.why) ||
						errors.As(err, &q) != tc.stalled || tc.stalled && (q.Op != "refresh" || len(q.Nodes) != 3) {
						t.Errorf("%s: %v", what, err)
					}
				}
				synctest.Wait() // for the log
				if log.Count("lock lost", tc.why) != 1 || tc.stalled != (log.Count("lock lost", "10.0.0.1:6379: ") == 1) {
					t.Errorf("the log: %s", &log)
				}
				testkit.Stall(false, nodes...)
			})
		})
	}
}

// ending is a Client whose lock "k" ends in some way.
type ending struct {
	*testing.T
	c     *flightlock.Client
	nodes []*redistest.MemNode
	seen  *recorder
}

func (e ending) lock() *flightlock.Lock {
	l := lockkit.Lock(e.T, e.c, "k", time.Second)
	synctest.Wait() // all nodes have it
	return l
}

// gone has the nodes lose the lock, to somebody else if there is one.
func (e ending) gone(to string) {
	for _, n := range e.nodes {
		n.Mini.Del("lock:k")
		if to != "" {
			testkit.Must(e.T, n.Mini.Set("lock:k", to))
		}
	}
}

// However a lock ends, whoever finds that out, it ends once: Stats count it, Observers are called for it, and
// the log has a loss. A lock that was meant to run out is not lost: nobody has refreshed it, or called its
// Context.
func TestHowALockEnds(t *testing.T) {
	late := func(rely func(ctx context.Context, l *flightlock.Lock)) func(e ending) error {
		return func(e ending) error {
			rely(e.Context(), e.lock())
			time.Sleep(5 * time.Second)
			return nil
		}
	}
	for name, x := range map[string]struct {
		end           func(e ending) error
		want          error // of end
		outcome       string
		lost, expired uint64
	}{
		"released": {func(e ending) error { return e.lock().Release(e.Context()) }, nil, "released", 0, 0},
		"released, and nodes do not answer": {func(e ending) error {
			l := e.lock()
			e.nodes[1].Down(true)
			e.nodes[2].Down(true)
			return l.Release(e.Context())
		}, flightlock.ErrUnavailable, "released", 0, 0},
		"dropped": {func(e ending) error {
			func() { testkit.Must(e.T, e.lock().AutoRefresh(e.Context(), flightlock.RefreshPolicy{})) }()
			for e.seen.count("held") == 0 {
				runtime.GC()
				time.Sleep(time.Second)
			}
			return nil
		}, nil, "released", 0, 0},
		"run out": {func(e ending) error {
			l := e.lock()
			time.Sleep(2 * time.Second)
			return l.Release(e.Context())
		}, flightlock.ErrNotHeld, "ran_out", 0, 1},
		"run out, as its release finds": {func(e ending) error {
			l := e.lock()
			time.Sleep(time.Until(l.Until()))
			return l.Release(e.Context())
		}, flightlock.ErrNotHeld, "ran_out", 0, 1},
		"its Context was asked for": {late(func(ctx context.Context, l *flightlock.Lock) { l.Context(ctx) }),
			nil, "expired", 1, 0},
		"it was refreshed": {late(func(ctx context.Context, l *flightlock.Lock) { _ = l.Refresh(ctx) }),
			nil, "expired", 1, 0},
		"it was to be refreshed": {late(func(ctx context.Context, l *flightlock.Lock) {
			p := flightlock.RefreshPolicy{Interval: 900 * time.Millisecond, MaxHold: 10 * time.Millisecond}
			_ = l.AutoRefresh(ctx, p)
		}), nil, "expired", 1, 0},
		"taken, as a refresh finds": {func(e ending) error {
			l := e.lock()
			e.gone("somebody else")
			return errors.Join(l.Refresh(e.Context()), l.Release(e.Context()))
		}, flightlock.ErrNotHeld, "taken", 1, 0},
		"taken, as its release finds": {func(e ending) error {
			l := e.lock()
			e.gone("somebody else")
			return l.Release(e.Context())
		}, flightlock.ErrNotHeld, "taken", 1, 0},
		"deleted, as Do finds": {func(e ending) error {
			return e.c.Do(e.Context(), "k", time.Second, nil, func(context.Context, *flightlock.Lock) error {
				synctest.Wait()
				e.gone("")
				return nil
			})
		}, flightlock.ErrLockLost, "taken", 1, 0},
		"closed": {func(e ending) error {
			e.lock()
			return e.c.Close(canceled())
		}, nil, "closed", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log testkit.LogBuffer
				c, seen := observed(t, clients, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)),
					DisableQuarantine: true, Class: strings.ToUpper})
				err := x.end(ending{t, c, nodes, seen})
				if !errors.Is(err, x.want) {
					t.Errorf("got %v, want %v", err, x.want)
				}
				synctest.Wait()
				for _, n := range nodes { // what another has taken is left alone, and the error says who it is
					v, _ := n.Mini.Get("lock:k")
					if taken := strings.HasPrefix(name, "taken"); taken != (v == "somebody else") ||
						taken && !strings.Contains(err.Error(), v) {
						t.Errorf("the key is %q, the error %v", v, err)
					}
				}
				if s := c.Stats(); s.Lost != x.lost || s.Expired != x.expired || s.Held != 0 {
					t.Errorf("%+v, want %d lost and %d expired", s, x.lost, x.expired)
				}
				if n := log.Count(`msg="flightlock: lock lost" key=k`); n != int(x.lost) {
					t.Errorf("%d lines, want %d: %s", n, x.lost, &log)
				}
				if seen.count("held") != 1 || seen.count("held "+x.outcome+": kK") != 1 ||
					seen.count("lost") != int(x.lost) || seen.count("lost "+x.outcome+": kK") != int(x.lost) {
					t.Errorf("observed %q, want %s", seen.all(), x.outcome)
				}
			})
		})
	}
}

// All errors about one loss are that loss: Do says it once, in one line, whichever of them its function
// returns, and all match the cause of the ctx. An error of the function's own is never hidden. Each text
// begins with the name of the package, and has it once, however many reasons it is made of.
func TestErrorsOfOneLossMatchItsCause(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		mine, errs := errors.New("mine"), map[string]error{}
		prefix := func(key string) string { return "flightlock: lock \"" + key + "\": " }
		for key, fn := range map[string]func(ctx context.Context, l *flightlock.Lock) error{
			"nil":     func(context.Context, *flightlock.Lock) error { return nil },
			"release": func(ctx context.Context, l *flightlock.Lock) error { return l.Release(ctx) },
			"refresh": func(_ context.Context, l *flightlock.Lock) error { return l.Refresh(context.Background()) },
			"nested": func(ctx context.Context, l *flightlock.Lock) error {
				return c.Do(ctx, l.Key(), time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
			},
			"ctx's error":      func(ctx context.Context, _ *flightlock.Lock) error { return ctx.Err() },
			"ctx's cause":      func(ctx context.Context, _ *flightlock.Lock) error { return context.Cause(ctx) },
			"the lock's error": func(_ context.Context, l *flightlock.Lock) error { return l.Err() },
			"joined": func(ctx context.Context, _ *flightlock.Lock) error {
				return errors.Join(mine, context.Cause(ctx))
			},
			"around the cause": func(ctx context.Context, _ *flightlock.Lock) error {
				return fmt.Errorf("%w: %w", mine, context.Cause(ctx))
			},
			"around ctx's": func(ctx context.Context, _ *flightlock.Lock) error {
				return fmt.Errorf("%w: %w", mine, ctx.Err())
			},
			"its own":       func(context.Context, *flightlock.Lock) error { return mine },
			"nested before": nil,
		} {
			var cause, returned error
			err := c.Do(t.Context(), key, time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
				lose := func(ctx context.Context) {
					testkit.Lose("lock:"+key, nodes...)
					<-ctx.Done()
					cause = context.Cause(ctx)
				}
				if fn == nil {
					return c.Do(ctx, key, time.Second, nil, func(ctx context.Context, _ *flightlock.Lock) error {
						lose(ctx)
						return nil
					})
				}
				lose(ctx)
				returned = fn(ctx, l)
				return returned
			})
			alone := !errors.Is(returned, mine)
			if strings.Count(err.Error(), `lock "`) != 1 || !errors.Is(err, cause) || errors.Is(err, mine) == alone ||
				!errors.Is(err, flightlock.ErrLockLost) || !strings.HasPrefix(cause.Error(), prefix(key)+"lock lost: ") {
				t.Errorf("%s: %q, of cause %q: %v", key, err, cause, errors.Is(err, cause))
			}
			if !alone || key == "nested" { // several errors
				continue
			}
			errs[key] = err
			if strings.Contains(err.Error(), "\n") || errors.Is(err, context.Canceled) ||
				strings.Count(err.Error(), "lock lost") != 1 {
				t.Errorf("%s is a list: %v", key, err)
			}
		}
		l := lockkit.Lock(t, c, "plain", time.Second)
		testkit.Must(t, l.Release(t.Context()))
		errs["Release"], errs["Refresh"] = l.Release(t.Context()), l.Refresh(t.Context())
		for _, down := range []bool{false, true} {
			l := lockkit.Lock(t, c, "plain", time.Second)
			ctx := l.Context(t.Context())
			testkit.Down(down, nodes...)
			if down {
				errs["Refresh without nodes"] = l.Refresh(t.Context())
				short, cancel := context.WithTimeout(t.Context(), time.Second)
				errs["Ready"] = c.Ready(short)
				cancel()
			}
			<-ctx.Done()
			for name, err := range map[string]error{
				"Err": l.Err(), "Refresh": l.Refresh(t.Context()), "Release": l.Release(t.Context()),
				"AutoRefresh": l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}),
				"Context":     context.Cause(l.Context(t.Context())),
			} {
				errs[fmt.Sprintf("%s of one that is lost, down: %v", name, down)] = err
				if strings.Count(err.Error(), `lock "`) != 1 || !errors.Is(err, context.Cause(ctx)) {
					t.Errorf("%s: %q", name, err)
				}
			}
		}
		for name, err := range errs {
			if !strings.HasPrefix(err.Error(), "flightlock: ") || strings.Count(err.Error(), "flightlock: ") != 1 {
				t.Errorf("%s: %q", name, err)
			}
		}
		testkit.Down(false, nodes...)
	})
}

// ReleaseAsync returns before the nodes answer, and the lock is over then. The next caller asks behind the
// release: it has the lock although nothing has been confirmed, and so has another process soon.
func TestReleaseAsync(t *testing.T) {
	for _, n := range []int{1, 3} {
		testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			c, other := lockkit.New(t, flightlock.Options{}, clients...),
				lockkit.New(t, flightlock.Options{}, clients...)
			lockkit.Release(t, lockkit.Lock(t, other, "k", time.Second)) // has its connections
			l := lockkit.Lock(t, c, "k", 10*time.Second)
			ctx := l.Context(t.Context())
			testkit.Delay(10*time.Millisecond, nodes...)
			for range 3 {
				began := time.Now()
				l.ReleaseAsync()
				if took := time.Since(began); took != 0 {
					t.Errorf("took %v", took)
				}
				if err := l.Err(); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Err after it: %v", err)
				}
				if ctx.Err() == nil || context.Cause(ctx) != context.Canceled { //nolint:errorlint // it alone
					t.Errorf("its Context has ended by %v", context.Cause(ctx))
				}
				before := l.Fence()
				var err error
				if l, err = c.TryLock(t.Context(), "k", 10*time.Second); err != nil {
					t.Fatal(err)
				}
				if l.Fence() <= before {
					t.Errorf("token %d after %d", l.Fence(), before)
				}
			}
			l.ReleaseAsync()
			lockkit.Release(t, lockkit.Lock(t, other, "k", time.Second))
			if s := c.Stats(); s.Held != 0 || s.Debts != 0 || s.Lost != 0 || s.Expired != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// To a caller of the process that waits, ReleaseAsync hands the lock over, and a lease that lingers is kept:
// nothing is sent, as by Release. Where there are no notices another process gets the lock by its polls.
func TestReleaseAsyncPassesTheLockOnAsReleaseDoes(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Linger: 100 * time.Millisecond}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		time.Sleep(time.Second) // it receives recalls, and does not retain this one any more, if it did
		l := lockkit.Lock(t, c, "k", 10*time.Second)
		synctest.Wait()
		next := make(chan *flightlock.Lock)
		go func() { next <- lockkit.Lock(t, c, "k", 10*time.Second) }()
		synctest.Wait()
		sent := c.Stats().Commands
		l.ReleaseAsync()
		(<-next).ReleaseAsync()
		if s := c.Stats(); s.Handoffs != 1 || s.Retained != 1 || s.Commands != sent {
			t.Errorf("%+v, with %d commands before", s, sent)
		}

		silent := lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...)
		l = lockkit.Lock(t, silent, "other", 10*time.Second)
		go func() { next <- lockkit.Lock(t, c, "other", 10*time.Second) }()
		time.Sleep(50 * time.Millisecond)
		l.ReleaseAsync()
		began := time.Now()
		lockkit.Release(t, <-next)
		if took := time.Since(began); took > time.Second {
			t.Errorf("another process had it after %v", took)
		}
	})
}

// Nested locks: the last ReleaseAsync or Release frees the key. What is called after it does nothing.
func TestReleaseAsyncOfNestedLocks(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		for _, outerFirst := range []bool{false, true} {
			outer := lockkit.Lock(t, c, "k", 10*time.Second)
			inner, err := c.TryLock(outer.Context(t.Context()), "k", 10*time.Second)
			testkit.Must(t, err)
			locks := []*flightlock.Lock{inner, outer}
			if outerFirst {
				locks = []*flightlock.Lock{outer, inner}
			}
			locks[0].ReleaseAsync()
			locks[0].ReleaseAsync()
			if err := locks[0].Err(); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("the first: %v", err)
			}
			if synctest.Wait(); locks[1].Err() != nil || !nodes[0].Mini.Exists("lock:k") {
				t.Errorf("the second: %v", locks[1].Err())
			}
			locks[1].ReleaseAsync()
			if synctest.Wait(); nodes[0].Mini.Exists("lock:k") {
				t.Error("the key is left")
			}
			for _, l := range locks {
				if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Release after it: %v", err)
				}
			}
		}
	})
}

// Of several releases one counts, whichever they are, and also while the lock is being refreshed: no refresh
// follows.
func TestOneOfManyReleasesCountsAlsoIfAsync(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		for range 50 {
			l := lockkit.Lock(t, c, "k", 30*time.Millisecond)
			testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: 10 * time.Millisecond}))
			time.Sleep(10 * time.Millisecond) // a refresh may be under way
			var all sync.WaitGroup
			var succeeded atomic.Int32
			for i := range 8 {
				all.Go(func() {
					if i%2 == 0 {
						l.ReleaseAsync()
					} else if l.Release(t.Context()) == nil {
						succeeded.Add(1)
					}
				})
			}
			if all.Wait(); succeeded.Load() > 1 {
				t.Errorf("%d releases succeeded", succeeded.Load())
			}
			synctest.Wait()
			refreshes := c.Stats().Refreshes
			time.Sleep(50 * time.Millisecond)
			if s := c.Stats(); s.Refreshes != refreshes || s.Lost != 0 || s.Debts != 0 ||
				nodes[0].Mini.Exists("lock:k") {
				t.Fatalf("%+v, and %d refreshes before", s, refreshes)
			}
		}
	})
}

// Close waits for the releases that nobody waits for, and a loss that they find is logged and counted before
// it returns; so is it to Observers. A lock that was over before is none of these.
func TestCloseWaitsForReleasesThatNobodyWaitsFor(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		var seen recorder
		c, err := flightlock.New(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)),
			DisableQuarantine: true,
			Observers:         []*flightlock.Observer{seen.observer()}}, clients...)
		testkit.Must(t, err)
		held, deleted := lockkit.Lock(t, c, "held", time.Minute), lockkit.Lock(t, c, "deleted", time.Minute)
		expired := lockkit.Lock(t, c, "expired", 20*time.Millisecond)
		time.Sleep(30 * time.Millisecond)
		for _, n := range nodes {
			n.Mini.Del("lock:deleted")
			n.SetDelay(10 * time.Millisecond)
		}
		for _, l := range []*flightlock.Lock{held, deleted, expired} {
			l.ReleaseAsync()
		}
		if err := deleted.Err(); !errors.Is(err, flightlock.ErrNotHeld) || errors.Is(err, flightlock.ErrLockLost) {
			t.Errorf("Err while nobody knows: %v", err)
		}
		lockkit.Close(t, c)
		for _, n := range nodes {
			if keys := n.Mini.Keys(); slices.Contains(keys, "lock:held") {
				t.Errorf("left: %v", keys)
			}
		}
		if s := c.Stats(); s.Lost != 1 || s.Expired != 1 || s.Held != 0 || seen.count("lost taken") != 1 ||
			seen.count("held taken") != 1 || seen.count("held released") != 1 {
			t.Errorf("%+v, %q", s, seen.all())
		}
		if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "key=deleted") {
			t.Errorf("the log: %s", text)
		}
	})
}

// What nodes do not confirm is a debt, and no loss: it is paid when they are back. Nobody waits for it.
func TestReleaseAsyncWhileNodesAreDown(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
		l := lockkit.Lock(t, c, "k", time.Minute)
		synctest.Wait()
		nodes[0].Down(true)
		nodes[1].Stall(true)
		began := time.Now()
		if l.ReleaseAsync(); time.Since(began) != 0 {
			t.Errorf("took %v", time.Since(began))
		}
		time.Sleep(time.Second)
		if s := c.Stats(); s.Debts != 2 || s.Lost != 0 || s.Suspended != 2 {
			t.Errorf("%+v", s)
		}
		if text := log.String(); strings.Count(text, "node suspended") != 2 || strings.Contains(text, "lost") {
			t.Errorf("the log: %s", text)
		}
		nodes[0].Down(false)
		nodes[1].Stall(false)
		time.Sleep(time.Second)
		for _, n := range nodes {
			if s := c.Stats(); s.Debts != 0 || n.Mini.Exists("lock:k") {
				t.Errorf("%+v, or the key is left", s)
			}
		}
	})
}

// On real servers: two clients and ten goroutines pass a few keys around without waiting for any release, and
// nobody meets another.
func TestReleaseAsyncExcludes(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		servers, clients := lockkit.StartNodes(t, n)
		cs := []*flightlock.Client{lockkit.New(t, lockkit.Patient, clients...),
			lockkit.New(t, lockkit.Patient, clients...)}
		for i := range 200 { // alone: each asks behind the release before it
			l, err := cs[0].TryLock(t.Context(), "alone", time.Minute)
			if err != nil {
				t.Fatalf("lock %d: %v", i, err)
			}
			l.ReleaseAsync()
		}
		var held [3]atomic.Int32
		var all sync.WaitGroup
		for i := range 10 {
			all.Go(func() {
				for j := range 50 {
					at := (i + j) % len(held)
					l, err := cs[i%2].SingleFlightLock(t.Context(), fmt.Sprint("k", at), time.Minute, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if held[at].Add(1) != 1 {
						t.Error("two hold one key")
					}
					held[at].Add(-1)
					l.ReleaseAsync()
				}
			})
		}
		all.Wait()
		for _, c := range cs {
			lockkit.Close(t, c)
		}
		for _, s := range servers {
			if keys := s.Keys(t); slices.ContainsFunc(keys,
				func(k string) bool { return strings.HasPrefix(k, "lock:") }) {
				t.Errorf("left: %v", keys)
			}
		}
	}
}

type outage struct {
	nodes []*redistest.MemNode
	hangs *atomic.Bool // the dials do
}

// cut ends all connections.
func (o outage) cut() {
	for _, n := range o.nodes {
		n.Cut()
	}
}

// A release of nodes that do not answer blocks its caller for NodeTimeout, and a moment by which deadlines
// are put off, whatever is the matter with them, and with how many others at once.
func TestReleaseInEveryOutage(t *testing.T) {
	const nodeTimeout = 50 * time.Millisecond
	for name, begin := range map[string]func(o outage){
		"down":   func(o outage) { testkit.Down(true, o.nodes...) },
		"silent": func(o outage) { testkit.Stall(true, o.nodes...) },
		"slow":   func(o outage) { testkit.Delay(nodeTimeout*8/10, o.nodes...) },
		"reset, and dials hang": func(o outage) {
			o.hangs.Store(true)
			o.cut()
		},
		"reset later, and dials hang": func(o outage) {
			testkit.Stall(true, o.nodes...)
			time.AfterFunc(nodeTimeout/2, func() {
				o.hangs.Store(true)
				o.cut()
			})
		},
		"reset, and nobody answers": func(o outage) {
			testkit.Stall(true, o.nodes...)
			o.cut()
		},
	} {
		for _, locks := range []int{1, 300} {
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%s, %d locks, %d nodes", name, locks, n), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						o := outage{nodes: redistest.StartMemNodes(t, n), hangs: new(atomic.Bool)}
						var clients []redis.UniversalClient
						for _, node := range o.nodes {
							clients = append(clients, node.Client(t, hanging(o.hangs)))
						}
						c := lockkit.New(t, flightlock.Options{NodeTimeout: nodeTimeout}, clients...)
						var held []*flightlock.Lock
						for i := range locks {
							held = append(held, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute))
						}
						time.Sleep(time.Second)
						begin(o)
						synctest.Wait()
						var all sync.WaitGroup
						began := time.Now()
						for _, l := range held {
							all.Go(func() {
								err := l.Release(t.Context())
								if err != nil && !errors.Is(err, flightlock.ErrUnavailable) {
									t.Error(err)
								}
							})
						}
						all.Wait()
						if took := time.Since(began); took > 2*nodeTimeout {
							t.Errorf("took %v", took)
						}
						o.hangs.Store(false)
						testkit.Stall(false, o.nodes...)
						testkit.Down(false, o.nodes...)
						testkit.Delay(0, o.nodes...)
						time.Sleep(10 * time.Second)
						if s := c.Stats(); s.Debts != 0 {
							t.Errorf("%d debts", s.Debts)
						}
						for _, n := range o.nodes {
							for i := range locks {
								if n.Mini.Exists(fmt.Sprint("lock:k", i)) {
									t.Fatalf("the key %d is left", i)
								}
							}
						}
					})
				})
			}
		}
	}
}

// Close waits no longer than NodeTimeout for a link that is not there to repeat a release that was lost with
// its connection, whether it was lost before or meanwhile, and whatever Close's ctx says.
func TestCloseWhileAReleaseIsLost(t *testing.T) {
	const nodeTimeout = 50 * time.Millisecond
	for name, before := range map[string]bool{"lost before": true, "lost meanwhile": false} {
		for ctxName, ended := range map[string]bool{"": false, ", ctx has ended": true} {
			t.Run(name+ctxName, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := redistest.StartMemNodes(t, 1)[0]
					var hangs atomic.Bool
					c := lockkit.New(t, flightlock.Options{NodeTimeout: nodeTimeout}, n.Client(t, hanging(&hangs)))
					l := lockkit.Lock(t, c, "k", time.Minute)
					time.Sleep(time.Second)
					n.Stall(true)
					released := make(chan error, 1)
					go func() { released <- l.Release(t.Context()) }()
					synctest.Wait()
					hangs.Store(true)
					var lost sync.WaitGroup
					cut := func() {
						n.Cut()
						n.Stall(false)
					}
					if before {
						cut()
						synctest.Wait()
					} else {
						lost.Go(func() {
							time.Sleep(nodeTimeout / 4)
							cut()
						})
					}
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if ended {
						cancel()
					}
					began := time.Now()
					if err := c.Close(ctx); err != nil {
						t.Error(err)
					}
					if took := time.Since(began); took > nodeTimeout*5/4 {
						t.Errorf("Close took %v", took)
					}
					if err := <-released; !errors.Is(err, flightlock.ErrUnavailable) {
						t.Errorf("Release: %v", err)
					}
					lost.Wait()
				})
			})
		}
	}
}

// hanging is a client whose dials hang while that is set.
func hanging(hangs *atomic.Bool) func(*redis.Options) {
	return func(ro *redis.Options) {
		dial := ro.Dialer
		ro.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if hangs.Load() {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return dial(ctx, network, addr)
		}
	}
}
