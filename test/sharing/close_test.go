package sharing

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// Close, at any moment and with any deadline, ends every call and every lock, and removes every key
// from the nodes that let it: here they all answer.
func TestCloseAtAnyMomentLeavesNothing(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	for i := range 20 {
		c, err := flightlock.New(flightlock.Options{NodeTimeout: lockkit.Patience}, nodes...)
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
					func() (*flightlock.Lock, error) { return c.TryLock(t.Context(), key, time.Minute) },
				}[j/5%2]()
				switch {
				case err == nil:
					held.Store(l, l.Context(t.Context()))
					_ = l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{})
					_ = l.Refresh(ctx)
				case !errors.Is(err, flightlock.ErrClosed) && !errors.Is(err, flightlock.ErrNotAcquired):
					t.Error(err)
				}
			})
		}
		redistest.Eventually(t, 20*time.Second, "so many locks are held",
			func() bool { return c.Stats().Held >= int64(i%5) })
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

// Callers whose ctx ends at any moment, by the hundred, leave no key and no place in a queue, and
// do not affect other locks.
func TestCallersThatEndAtAnyMomentLeaveNothing(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	a := newArena(t)
	patient := lockkit.Patient
	cs := []*flightlock.Client{lockkit.New(t, patient, nodes...), lockkit.New(t, patient, nodes...)}
	for _, c := range cs { // the cost of a cold start does not count here
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
	}
	// On a slow machine all of these moments may come before the first lock.
	for unit := time.Millisecond / 2; a.granted.Load() == 0 && unit < time.Second; unit *= 4 {
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				for range 5 {
					ctx, cancel := context.WithTimeout(t.Context(), unit<<rand.IntN(7))
					a.work(ctx, cs[i%2], fmt.Sprint("k", i%7), time.Minute)
					cancel()
				}
			})
		}
		wg.Wait()
	}
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

// A request that a stopped node executes after its Client is gone creates a key that lives for its
// ttl at most, and costs other clients no more than that.
func TestWhatIsExecutedAfterCloseEndsWithItsTTL(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	other := lockkit.New(t, flightlock.Options{}, nodes...)
	c, err := flightlock.New(flightlock.Options{}, nodes...)
	testkit.Must(t, err)
	for _, c := range []*flightlock.Client{c, other} { // they know the scripts
		_ = lockkit.Lock(t, c, "k", time.Second).Release(t.Context())
	}
	_ = servers[0].Stop()
	commands := c.Stats().Commands
	go func() { _, _ = c.TryLock(t.Context(), "k", time.Second) }()
	redistest.Eventually(t, 10*time.Second, "it is written",
		func() bool { return c.Stats().Commands > commands })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = c.Close(ctx) // it cannot wait for a server that has stopped
	_ = servers[0].Cont()
	servers[0].WaitUp(t)
	resumed := time.Now()
	l := lockkit.EventuallyHeld(t, other, "k")
	if pttl := servers[0].Do(t, "PTTL", "lock:k").(int64); pttl > 1000 {
		t.Errorf("PTTL %d", pttl)
	}
	_ = l.Release(t.Context())
	t.Logf("the other had the key after %v", time.Since(resumed))
}
