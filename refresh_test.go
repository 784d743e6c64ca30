package flightlock_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// AutoRefresh keeps a lock far beyond its ttl, at one refresh per third of it.
func TestAutoRefreshKeepsTheLock(t *testing.T) {
	bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", 300*time.Millisecond)
		if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
			t.Fatal(err)
		}
		if err := l.AutoRefresh(flightlock.RefreshPolicy{}); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("a second AutoRefresh: %v", err)
		}
		time.Sleep(10*time.Second + 50*time.Millisecond)
		if err := l.Err(); err != nil {
			t.Fatal(err)
		}
		if n := c.Stats().Refreshes; n < 98 || n > 100 {
			t.Errorf("%d refreshes in 10s at 100ms", n)
		}
		mustRelease(t, l)
		before := c.Stats().Refreshes
		time.Sleep(time.Second)
		if n := c.Stats().Refreshes; n != before {
			t.Errorf("%d refreshes after Release", n-before)
		}
		if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err == nil {
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
			bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				c := newClient(t, flightlock.Options{}, clients...)
				l := mustLock(t, c, "k", 600*time.Millisecond)
				start := time.Now()
				ctx := l.Context(t.Context())
				if err := l.AutoRefresh(tc.policy); err != nil {
					t.Fatal(err)
				}
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

// When the nodes do not answer, retries are bounded by the strategy and by the deadline, and the
// Context ends before the entry can have expired anywhere.
func TestRefreshFailuresAreBounded(t *testing.T) {
	bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{NodeTimeout: 20 * time.Millisecond}, clients...)
		l := mustLock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		policy := flightlock.RefreshPolicy{Retry: flightlock.LimitedRetry(50*time.Millisecond, 2)}
		if err := l.AutoRefresh(policy); err != nil {
			t.Fatal(err)
		}
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
	bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
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

// A node that lost the key is repaired by the next refresh, with the fence.
func TestRefreshRepairsANode(t *testing.T) {
	bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
		synctest.Wait()
		nodes[2].Mini.FlushAll()
		if err := l.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
		if v, _ := nodes[2].Mini.Get("lock:k"); v != l.Owner() {
			t.Errorf("the node holds %q", v)
		}
		mustRelease(t, l)
		time.Sleep(10 * time.Millisecond)
		if nodes[2].Mini.Exists("lock:k") {
			t.Error("the repaired key outlived the lock")
		}
	})
}

// Bad policies are refused at the call.
func TestAutoRefreshRefusesBadPolicies(t *testing.T) {
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
		defer mustRelease(t, l)
		for name, p := range map[string]flightlock.RefreshPolicy{
			"Interval": {Interval: time.Second}, "validity": {Interval: 995 * time.Millisecond}, "Timeout": {Timeout: -1},
			"MaxRefreshes": {MaxRefreshes: -1}, "RefreshPolicy.MaxHold is -1ns": {MaxHold: -1},
			"RefreshPolicy.Interval is 999.999µs": {Interval: time.Millisecond - 1},
			"RefreshPolicy.Timeout is 1ns":        {Timeout: 1}, "interval": {Retry: flightlock.LimitedRetry(-1, 1)},
		} {
			wantInvalid(t, l.AutoRefresh(p), name)
		}
		if err := l.AutoRefresh(flightlock.RefreshPolicy{}); err != nil {
			t.Errorf("a good policy after bad ones: %v", err)
		}
	})
}

// A Release in the instant in which AutoRefresh begins stops it too: nothing is refreshed any more,
// and AutoRefresh returns that the lock is over if it came second.
func TestReleaseStopsAnAutoRefreshThatBegins(t *testing.T) {
	bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		for range 100 {
			l := mustLock(t, c, "k", 300*time.Millisecond)
			began := make(chan error)
			go func() { began <- l.AutoRefresh(flightlock.RefreshPolicy{}) }()
			mustRelease(t, l)
			if err := <-began; err != nil && !errors.Is(err, flightlock.ErrNotHeld) {
				t.Error(err)
			}
		}
		before := c.Stats().Refreshes
		time.Sleep(time.Second)
		if n := c.Stats().Refreshes; n != before {
			t.Errorf("%d refreshes of locks that were released", n-before)
		}
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
			flightlock.RefreshPolicy{Timeout: math.MaxInt64, MaxRefreshes: math.MaxInt, MaxHold: math.MaxInt64}},
		"long strategy": {0, time.Second, flightlock.RefreshPolicy{
			Retry: flightlock.LimitedRetry(math.MaxInt64, math.MaxInt), MaxRefreshes: math.MaxInt32}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				for _, n := range nodes {
					n.SetDelay(300 * time.Microsecond)
				}
				c := newClient(t, flightlock.Options{DriftFactor: tc.drift}, clients...)
				mustRelease(t, mustLock(t, c, "warm", time.Second))
				time.Sleep(time.Second) // all nodes are dialed, and have the scripts
				l := mustLock(t, c, "k", tc.ttl)
				if err := l.AutoRefresh(tc.policy); err != nil {
					t.Fatal(err)
				}
				time.Sleep(30 * tc.ttl)
				if err := l.Err(); err != nil {
					t.Error(err)
				}
				if n := c.Stats().Refreshes; n > 310 {
					t.Errorf("%d refreshes", n)
				}
				mustRelease(t, l) // Close would wait for it, and it is refreshed all the time
			})
		})
	}
}

// Refresh of a lock that is over says so, also with one of its Contexts, which has ended with it: the nodes
// are not to blame.
func TestRefreshOfALostLockWithItsContext(t *testing.T) {
	bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{}, clients...)
		l := mustLock(t, c, "k", time.Second)
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
