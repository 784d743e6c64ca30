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
	"github.com/redis/go-redis/v9"
)

// A lock that is lost because its refreshes failed says what each node answered to the last of them: in the cause of its
// Context, in Err, in what Release says, and in the log.
func TestALossNamesTheNodesThatDidNotRefresh(t *testing.T) {
	for _, how := range []string{"AutoRefresh", "Refresh"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var log syncBuffer
				c := newClient(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
				l := mustLock(t, c, "k", time.Second)
				ctx := l.Context(t.Context())
				synctest.Wait()
				nodes[0].Stall(true)
				nodes[1].Stall(true)
				if how == "AutoRefresh" {
					if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
						t.Fatal(err)
					}
				} else if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("Refresh: %v", err)
				}
				<-ctx.Done()
				synctest.Wait() // for the log
				for what, err := range map[string]error{"the cause": context.Cause(ctx), "Err": l.Err(), "Release": l.Release(t.Context())} {
					var q *flightlock.QuorumError
					if !errors.Is(err, flightlock.ErrLockLost) || !errors.As(err, &q) || q.Op != "refresh" || len(q.Nodes) != 3 {
						t.Errorf("%s names no nodes: %v", what, err)
					}
				}
				if !strings.Contains(log.String(), "10.0.0.1:6379: no") {
					t.Errorf("the log does not say what the nodes answered: %s", log.String())
				}
				nodes[0].Stall(false)
				nodes[1].Stall(false)
			})
		})
	}
}

// A refresh that fails and then succeeds is no reason for what comes later.
func TestALossSaysNothingOfRefreshesBeforeTheLastThatWorked(t *testing.T) {
	bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		synctest.Wait()
		nodes[0].Stall(true)
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("Refresh: %v", err)
		}
		nodes[0].Stall(false)
		if err := l.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
		if q := (*flightlock.QuorumError)(nil); errors.As(context.Cause(ctx), &q) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
	})
}

// A lock that AutoRefresh stops to keep says why it did, in the cause of its Context and in Err.
func TestALossSaysWhyRefreshingStopped(t *testing.T) {
	for name, tc := range map[string]struct {
		policy  flightlock.RefreshPolicy
		stalled bool
		why     string
	}{
		"MaxHold":                            {flightlock.RefreshPolicy{MaxHold: 5 * time.Second}, false, "RefreshPolicy.MaxHold, 5s"},
		"short MaxHold":                      {flightlock.RefreshPolicy{MaxHold: time.Millisecond}, false, "RefreshPolicy.MaxHold, 1ms"},
		"MaxHold's default, with a long ttl": {flightlock.RefreshPolicy{Interval: 59 * time.Second}, false, "RefreshPolicy.MaxHold, 1h"},
		"MaxRefreshes":                       {flightlock.RefreshPolicy{MaxRefreshes: 2}, false, "RefreshPolicy.MaxRefreshes"},
		"the strategy":                       {flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(time.Second, 2)}, true, "RefreshPolicy.Retry gave up after 3"},
		"the strategy is too slow":           {flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(time.Hour, 2)}, true, "RefreshPolicy.Retry"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := newClient(t, flightlock.Options{DisableQuarantine: true}, clients...)
				l := mustLock(t, c, "k", time.Minute)
				ctx := l.Context(t.Context())
				if err := l.AutoRefresh(tc.policy); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				nodes[0].Stall(tc.stalled)
				<-ctx.Done()
				var q *flightlock.QuorumError
				for what, err := range map[string]error{"the cause": context.Cause(ctx), "Err": l.Err()} {
					if !errors.Is(err, flightlock.ErrLockLost) || !strings.Contains(err.Error(), tc.why) || errors.As(err, &q) != tc.stalled {
						t.Errorf("%s: %v", what, err)
					}
				}
				nodes[0].Stall(false)
			})
		})
	}
}

// Why refreshing stopped is no reason any more when the holder has refreshed the lock by itself.
func TestALossAfterAHolderRefreshedByItself(t *testing.T) {
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		if err := l.AutoRefresh(flightlock.RefreshPolicy{MaxRefreshes: 1}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if err := l.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
		if why := context.Cause(ctx).Error(); strings.Contains(why, "MaxRefreshes") {
			t.Errorf("cause %v", why)
		}
	})
}
