package flightlock_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A lock that is lost because its refreshes failed says what each node answered to the last of
// them: in the cause of its Context, in Err, in the error of Release, and in the log.
func TestALossNamesTheNodesThatDidNotRefresh(t *testing.T) {
	for _, how := range []string{"AutoRefresh", "Refresh"} {
		t.Run(how, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log testkit.LogBuffer
				c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
				l := lockkit.Lock(t, c, "k", time.Second)
				ctx := l.Context(t.Context())
				synctest.Wait()
				nodes[0].Stall(true)
				nodes[1].Stall(true)
				if how == "AutoRefresh" {
					testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
				} else if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("Refresh: %v", err)
				}
				<-ctx.Done()
				synctest.Wait() // for the log
				for what, err := range map[string]error{"the cause": context.Cause(ctx), "Err": l.Err(),
					"Release": l.Release(t.Context())} {
					var q *flightlock.QuorumError
					if !errors.Is(err, flightlock.ErrLockLost) || !errors.As(err, &q) || q.Op != "refresh" || len(q.Nodes) != 3 {
						t.Errorf("%s names no nodes: %v", what, err)
					}
				}
				if !strings.Contains(log.String(), "10.0.0.1:6379: circuit open") &&
					!strings.Contains(log.String(), "10.0.0.1:6379: no answer") {
					t.Errorf("the log does not say what the nodes answered: %s", log.String())
				}
				nodes[0].Stall(false)
				nodes[1].Stall(false)
			})
		})
	}
}

// A refresh that fails and is followed by one that succeeds is not the reason of a later loss.
func TestALossSaysNothingOfRefreshesBeforeTheLastThatWorked(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		synctest.Wait()
		nodes[0].Stall(true)
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("Refresh: %v", err)
		}
		nodes[0].Stall(false)
		synctest.Wait() // until the answer is there
		testkit.Must(t, l.Refresh(t.Context()))
		<-ctx.Done()
		if q := (*flightlock.QuorumError)(nil); errors.As(context.Cause(ctx), &q) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
	})
}

// A lock that AutoRefresh stops refreshing says why it did, in the cause of its Context and in Err.
func TestALossSaysWhyRefreshingStopped(t *testing.T) {
	for name, tc := range map[string]struct {
		policy  flightlock.RefreshPolicy
		stalled bool
		why     string
	}{
		"MaxHold": {flightlock.RefreshPolicy{MaxHold: 5 * time.Second}, false,
			"RefreshPolicy.MaxHold, 5s"},
		"short MaxHold": {flightlock.RefreshPolicy{MaxHold: time.Millisecond}, false,
			"RefreshPolicy.MaxHold, 1ms"},
		"MaxRefreshes": {flightlock.RefreshPolicy{MaxRefreshes: 2}, false,
			"RefreshPolicy.MaxRefreshes"},
		"the strategy": {flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(time.Second, 2)},
			true, "RefreshPolicy.Retry gave up after 3"},
		"the strategy is too slow": {flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(time.Hour, 2)}, true,
			"RefreshPolicy.Retry"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := lockkit.New(t, flightlock.Options{DisableQuarantine: true}, clients...)
				l := lockkit.Lock(t, c, "k", time.Minute)
				ctx := l.Context(t.Context())
				testkit.Must(t, l.AutoRefresh(t.Context(), tc.policy))
				synctest.Wait()
				nodes[0].Stall(tc.stalled)
				<-ctx.Done()
				var q *flightlock.QuorumError
				for what, err := range map[string]error{"the cause": context.Cause(ctx), "Err": l.Err()} {
					if !errors.Is(err, flightlock.ErrLockLost) || !strings.Contains(err.Error(), tc.why) ||
						errors.As(err, &q) != tc.stalled {
						t.Errorf("%s: %v", what, err)
					}
				}
				nodes[0].Stall(false)
			})
		})
	}
}

// The reason why refreshing stopped is dropped when the holder has refreshed the lock by itself.
func TestALossAfterAHolderRefreshedByItself(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{MaxRefreshes: 1}))
		time.Sleep(time.Second)
		testkit.Must(t, l.Refresh(t.Context()))
		<-ctx.Done()
		if why := context.Cause(ctx).Error(); strings.Contains(why, "MaxRefreshes") {
			t.Errorf("cause %v", why)
		}
	})
}

// A lock that was meant to expire has expired: nobody refreshed it or called its Context. That is
// not a loss: the log says nothing, Stats and Observers have it apart from the losses. Release
// returns that it is over.
func TestALockThatRunsOutAsItsTTLSaysIsNotLost(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		var seen recorder
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Observers: []*flightlock.Observer{seen.observer()}}, clients...)
		counts := func(lost, expired uint64) {
			t.Helper()
			synctest.Wait()
			if s := c.Stats(); s.Lost != lost || s.Expired != expired || s.Held != 0 {
				t.Errorf("%+v, want %d lost and %d expired", s, lost, expired)
			}
			if n := strings.Count(log.String(), `msg="flightlock: lock lost"`); n != int(lost) {
				t.Errorf("%d lines, want %d: %s", n, lost, log.String())
			}
			if seen.count("lost ") != int(lost) || seen.count("lost expired") != int(lost) ||
				seen.count("held ran_out") != int(expired) {
				t.Errorf("observed: %q", seen.all())
			}
		}
		cron := lockkit.Lock(t, c, "cron", time.Second)
		time.Sleep(2 * time.Second)
		counts(0, 1)
		if err := cron.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Release: %v", err)
		}
		late := lockkit.Lock(t, c, "late", time.Second) // nobody checks it before Release does
		time.Sleep(time.Until(late.Until()))
		if err := late.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Release: %v", err)
		}
		counts(0, 2)

		relied := map[string]func(l *flightlock.Lock){
			"its Context was asked for": func(l *flightlock.Lock) { l.Context(t.Context()) },
			"it was refreshed":          func(l *flightlock.Lock) { _ = l.Refresh(t.Context()) },
			"it was to be refreshed": func(l *flightlock.Lock) {
				p := flightlock.RefreshPolicy{Interval: 900 * time.Millisecond, MaxHold: 10 * time.Millisecond}
				_ = l.AutoRefresh(t.Context(), p)
			},
		}
		lost := uint64(0)
		for what, rely := range relied {
			l := lockkit.Lock(t, c, what, time.Second)
			rely(l)
			time.Sleep(5 * time.Second)
			lost++
			counts(lost, 2)
		}
	})
}

// The text of an error begins with the name of the package, and has it once, however many reasons it is made of.
func TestErrorsNameThePackageOnce(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		ctx := t.Context()
		errs := map[string]error{}
		l := lockkit.Lock(t, c, "twice", time.Second)
		testkit.Must(t, l.Release(ctx))
		errs["second Release"], errs["Refresh after Release"] = l.Release(ctx), l.Refresh(ctx)

		l = lockkit.Lock(t, c, "gone", time.Second)
		gone := l.Context(ctx)
		for _, n := range nodes {
			n.Mini.Del("lock:gone")
		}
		errs["Refresh of a key that is gone"], errs["Release of one that is lost"] = l.Refresh(ctx), l.Release(ctx)
		errs["cause"], errs["Err"] = context.Cause(gone), l.Err()

		l = lockkit.Lock(t, c, "over", time.Second)
		<-l.Context(ctx).Done()
		errs["Release too late"] = l.Release(ctx)
		errs["AutoRefresh too late"] = l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{})

		errs["Do"] = c.Do(ctx, "done", time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
			for _, n := range nodes {
				n.Mini.Del("lock:done")
			}
			<-ctx.Done()
			return nil
		})
		l = lockkit.Lock(t, c, "unanswered", time.Second)
		for _, n := range nodes {
			n.Down(true)
		}
		errs["Refresh without nodes"] = l.Refresh(ctx)
		<-l.Context(ctx).Done()
		errs["Release after that"] = l.Release(ctx)
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		errs["Ready"] = c.Ready(short)
		for _, n := range nodes {
			n.Down(false)
		}
		for what, err := range errs {
			switch {
			case err == nil:
				t.Errorf("%s: no error", what)
			case strings.LastIndex(err.Error(), "flightlock: ") != 0:
				t.Errorf("%s: %s", what, err)
			}
		}
	})
}

// All errors about one loss are that loss: Do says it once, whichever of them its function returns, and all match the
// cause of the ctx.
func TestErrorsOfOneLossMatchItsCause(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		prefix := func(key string) string { return "flightlock: lock \"" + key + "\": " }
		for key, fn := range map[string]func(ctx context.Context, l *flightlock.Lock) error{
			"nil":     func(context.Context, *flightlock.Lock) error { return nil },
			"release": func(ctx context.Context, l *flightlock.Lock) error { return l.Release(ctx) },
			"refresh": func(_ context.Context, l *flightlock.Lock) error { return l.Refresh(context.Background()) },
			"nested": func(ctx context.Context, l *flightlock.Lock) error {
				return c.Do(ctx, l.Key(), time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
			},
			"joined": func(ctx context.Context, _ *flightlock.Lock) error {
				return errors.Join(errors.New("job"), context.Cause(ctx))
			},
			"nested before": nil,
		} {
			var cause error
			err := c.Do(t.Context(), key, time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
				lose := func(ctx context.Context) {
					nodes[0].Mini.Del("lock:" + key)
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
				return fn(ctx, l)
			})
			if strings.Count(err.Error(), `lock "`) != 1 || !errors.Is(err, cause) ||
				!strings.HasPrefix(cause.Error(), prefix(key)+"lock lost: ") {
				t.Errorf("%s: %q, of cause %q: %v", key, err, cause, errors.Is(err, cause))
			}
		}
		l := lockkit.Lock(t, c, "plain", time.Second)
		ctx := l.Context(t.Context())
		<-ctx.Done()
		for name, err := range map[string]error{
			"Err": l.Err(), "Refresh": l.Refresh(t.Context()), "Release": l.Release(t.Context()),
			"AutoRefresh": l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}),
			"Context":     context.Cause(l.Context(t.Context())),
		} {
			if !strings.HasPrefix(err.Error(), prefix("plain")) || strings.Count(err.Error(), `lock "`) != 1 ||
				!errors.Is(err, context.Cause(ctx)) {
				t.Errorf("%s: %q", name, err)
			}
		}
	})
}
