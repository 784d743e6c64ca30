package regressions

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// rueidislock moved its deadline before the nodes had confirmed the extension: in a
// partition, the holder's context outlived the key by 996ms.
func TestAPartitionedHolderStopsBeforeAnotherBegins(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var w network
		a, b := lockkit.New(t, flightlock.Options{}, w.over(t, nodes)...),
			lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 2*time.Second)
		if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}); err != nil {
			t.Fatal(err)
		}
		ctx := l.Context(t.Context())
		time.Sleep(10*time.Second + 100*time.Millisecond)
		until := l.Until()
		w.cut.Store(true)
		var stopped time.Time
		var wg sync.WaitGroup
		wg.Go(func() {
			for ctx.Err() == nil {
				if l.Err() == nil && l.Until().After(until) {
					t.Errorf("without an answer, the deadline moved by %v", l.Until().Sub(until))
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		wg.Go(func() { <-ctx.Done(); stopped = time.Now() })
		next, err := b.SingleFlightLock(t.Context(), "k", 2*time.Second,
			flightlock.LimitedRetry(time.Millisecond, 5000))
		begun := time.Now()
		if err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if !stopped.Before(begun) {
			t.Errorf("two holders for %v", stopped.Sub(begun))
		}
		if begun.After(until.Add(100 * time.Millisecond)) {
			t.Errorf("the key was kept for %v after the deadline", begun.Sub(until))
		}
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		if next.Fence() <= l.Fence() {
			t.Errorf("fence %d after %d", next.Fence(), l.Fence())
		}
		lockkit.Release(t, next)
	})
}

// redsync extends by SET NX where the key is missing: a lock that expired, was taken by another and
// released again "extends" successfully.
func TestRefreshDoesNotResurrectALockThatAnotherHadMeanwhile(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 30*time.Second)
		synctest.Wait()
		for _, n := range nodes { // the servers' clocks jumped: there the key is over
			n.Mini.FastForward(time.Minute)
		}
		lockkit.Release(t, lockkit.Lock(t, b, "k", time.Second))
		synctest.Wait()
		ctx := l.Context(t.Context())
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("got %v", err)
		}
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		time.Sleep(time.Second)
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("brought back: %v", keys)
		}
	})
}

// gotomicro's AutoRefresh goes on past the ttl without bound.
func TestAutoRefreshEndsWithTheLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, c, "k", time.Second)
		retry := flightlock.ExponentialBackoff(time.Millisecond, 2*time.Millisecond)
		if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Retry: retry}); err != nil {
			t.Fatal(err)
		}
		ctx := l.Context(t.Context())
		testkit.Down(true, nodes...)
		<-ctx.Done()
		tried := c.Stats().Refreshes
		if tried < 10 {
			t.Errorf("%d refreshes were tried", tried)
		}
		if now := time.Now(); now.After(l.Until().Add(2 * time.Millisecond)) {
			t.Errorf("lost %v after the deadline", now.Sub(l.Until()))
		}
		testkit.Down(false, nodes...)
		time.Sleep(time.Minute)
		if n := c.Stats().Refreshes - tried; n > 0 {
			t.Errorf("%d refreshes of a lock that was over", n)
		}
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// Redisson's renewal outlives the holder: its locks are immortal. Here a holder that hangs is kept
// alive by nobody, not even by those that wait and refresh, and its Context ends.
func TestNoLockIsImmortal(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		hung := lockkit.Lock(t, a, "k", time.Second)
		until := hung.Until()
		ctx := hung.Context(t.Context())
		var wg sync.WaitGroup
		var mu sync.Mutex
		var fences []int64
		work := func(c *flightlock.Client) {
			l := lockkit.Lock(t, c, "k", time.Second)
			if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}); err != nil {
				t.Error(err)
			}
			if ctx.Err() == nil {
				t.Error("two holders")
			}
			mu.Lock()
			fences = append(fences, l.Fence())
			mu.Unlock()
			time.Sleep(1500 * time.Millisecond) // longer than the ttl
			lockkit.Release(t, l)
		}
		for i := range 6 {
			wg.Go(func() { work([]*flightlock.Client{a, a, b}[i%3]) })
		}
		<-ctx.Done()
		if now := time.Now(); now.After(until.Add(2*time.Millisecond)) || hung.Until().After(until) {
			t.Errorf("the holder that hangs lost the lock at %v, and had until %v, at last %v", now, until,
				hung.Until())
		}
		if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
			t.Errorf("cause %v", context.Cause(ctx))
		}
		wg.Wait()
		if took := time.Since(until); took > 6*1500*time.Millisecond+3*time.Second {
			t.Errorf("the others took %v", took)
		}
		if !slices.IsSorted(fences) || len(slices.Compact(fences)) != 6 || fences[0] <= hung.Fence() {
			t.Errorf("fences %v after %d", fences, hung.Fence())
		}
		if err := hung.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Release of the one that hung: %v", err)
		}
		// Nothing renews what was released.
		time.Sleep(3 * time.Second)
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// The same where the lease is longer than the Lock: a Lock of 1s that was handed over, in a
// lease of 30s that is renewed for the handoff, ends after 1s.
func TestAHungHolderIsNotKeptByALongerLease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		locks := make([]chan *flightlock.Lock, 4)
		for i, ttl := range []time.Duration{30 * time.Second, 30 * time.Second, time.Second, 30 * time.Second} {
			locks[i] = make(chan *flightlock.Lock, 1)
			go func() { locks[i] <- lockkit.Lock(t, c, "k", ttl) }()
			synctest.Wait()
		}
		lockkit.Release(t, <-locks[0]) // this handoff brings tokens for the following ones
		second := <-locks[1]
		time.Sleep(10 * time.Second)
		before := c.Stats().Refreshes
		lockkit.Release(t, second)
		hung := <-locks[2]
		given := time.Now()
		synctest.Wait()
		if c.Stats().Refreshes == before {
			t.Error("the handoff did not renew the lease: this test shows nothing")
		}
		next := <-locks[3]
		if kept := time.Since(given); kept > time.Second || kept < 900*time.Millisecond {
			t.Errorf("the holder that hangs was kept for %v", kept)
		}
		if !errors.Is(hung.Err(), flightlock.ErrLockLost) || next.Err() != nil || next.Fence() <= hung.Fence() {
			t.Errorf("hung: %v, fence %d; next: %v, fence %d", hung.Err(), hung.Fence(), next.Err(), next.Fence())
		}
		lockkit.Release(t, next)
	})
}

// Redisson only logs that a lock was lost. Here its Context ends with the next refresh that
// finds out, and every method says so.
func TestALossIsSignalled(t *testing.T) {
	for name, lose := range map[string]func(*redistest.MemNode){
		"deleted": func(n *redistest.MemNode) { n.Mini.Del("lock:k") },
		"flushed": func(n *redistest.MemNode) { n.Mini.FlushAll() },
		"taken":   func(n *redistest.MemNode) { _ = n.Mini.Set("lock:k", "somebody else") },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				c := lockkit.New(t, flightlock.Options{}, clients...)
				l := lockkit.Lock(t, c, "k", 30*time.Second)
				if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Second}); err != nil {
					t.Fatal(err)
				}
				ctx := l.Context(t.Context())
				time.Sleep(500 * time.Millisecond)
				lose(nodes[0])
				lose(nodes[2])
				start := time.Now()
				<-ctx.Done()
				if took := time.Since(start); took > 500*time.Millisecond {
					t.Errorf("signalled after %v", took)
				}
				for what, err := range map[string]error{"cause": context.Cause(ctx), "Err": l.Err()} {
					if !errors.Is(err, flightlock.ErrLockLost) {
						t.Errorf("%s: %v", what, err)
					}
				}
				if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("Release: %v", err)
				}
				if n := c.Stats().Lost; n != 1 {
					t.Errorf("%d lost", n)
				}
			})
		})
	}
}
