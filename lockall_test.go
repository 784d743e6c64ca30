package flightlock_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Processes that lock crossed sets of keys never wait in a circle, none waits for long beyond the others, and
// no key has two holders.
func TestCrossedSetsDoNotDeadlock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		testkit.Delay(200*time.Microsecond, nodes...)
		var mu sync.Mutex
		held := map[string]bool{}
		take := func(keys []string, on bool) {
			mu.Lock()
			defer mu.Unlock()
			for _, key := range keys {
				if on && held[key] {
					t.Errorf("%q has two holders", key)
				}
				held[key] = on
			}
		}
		var waits []time.Duration
		var wg sync.WaitGroup
		for range 4 {
			c := lockkit.New(t, flightlock.Options{}, clients...)
			wg.Go(func() {
				for range testkit.Full(2_500, testkit.Sized(150, 50)) {
					keys := strings.Split("abcdefghijklmnopqrst", "")
					rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
					keys = keys[:2+rand.IntN(4)]
					began := time.Now()
					s, err := c.LockAll(t.Context(), keys, 10*time.Second, nil)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					waits = append(waits, time.Since(began))
					mu.Unlock()
					take(keys, true)
					time.Sleep(time.Millisecond)
					take(keys, false)
					if err := s.Release(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		slices.Sort(waits)
		median, longest := waits[len(waits)/2], waits[len(waits)-1]
		t.Logf("%d sets: median %v, longest %v", len(waits), median, longest)
		if longest > time.Second { // a lost wake-up would cost more
			t.Errorf("the longest wait is %v, the median %v", longest, median)
		}
	})
}

// Free keys take one round trip, however many; a busy key is waited for while the others are kept; and what
// could not be had leaves nothing.
func TestLockAllIsAllOrNone(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		testkit.Delay(5*time.Millisecond, nodes...)
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		ctx, keys := t.Context(), []string{"k9", "k1", "k5", "k3", "k1", "k2", "k4", "k6", "k7", "k8"}
		testkit.Must(t, a.Ready(ctx))
		testkit.Must(t, b.Ready(ctx))
		began := time.Now()
		s, err := a.LockAll(ctx, keys, time.Second, nil)
		testkit.Must(t, err)
		// one round of 10ms, and one that makes counters equal
		if took := time.Since(began); took > 35*time.Millisecond {
			t.Errorf("free keys took %v", took)
		}
		if l := s.Lock("k5"); l.Key() != "k5" || l.Fence() == 0 || s.Lock("k0") != nil || s.Err() != nil {
			t.Errorf("%v, %v, %v", l, s.Lock("k0"), s.Err())
		}
		inner := s.Context(ctx)
		nested, err := a.LockAll(inner, keys[:3], time.Second, flightlock.NoRetry())
		testkit.Must(t, err)
		if nested.Lock("k1").Fence() != s.Lock("k1").Fence() {
			t.Error("it is not nested")
		}
		testkit.Must(t, nested.Release(ctx))
		testkit.Must(t, s.Release(ctx))
		if inner.Err() == nil || !errors.Is(s.Err(), flightlock.ErrNotHeld) {
			t.Errorf("released: %v, %v", inner.Err(), s.Err())
		}

		busy := lockkit.Lock(t, b, "k5", time.Second)
		testkit.Must(t, busy.AutoRefresh(ctx, flightlock.RefreshPolicy{}))
		for name, retry := range map[string]flightlock.RetryStrategy{
			"NoRetry": flightlock.NoRetry(), "Within": flightlock.Within(nil, 3*time.Second),
			"LimitedRetry": flightlock.LimitedRetry(time.Second, 3),
			"FailFast":     flightlock.FailFast(flightlock.Within(nil, 1)),
		} {
			began := time.Now()
			_, err := a.LockAll(ctx, keys, time.Second, retry)
			if took := time.Since(began); !errors.Is(err, flightlock.ErrNotAcquired) || took > 4*time.Second {
				t.Errorf("%s: %v after %v", name, err, took)
			}
			time.Sleep(100 * time.Millisecond)
			for _, key := range keys {
				if key != "k5" {
					lockkit.Release(t, lockkit.Lock(t, b, key, time.Second))
				}
			}
		}
		go func() {
			time.Sleep(10 * time.Second) // ten times the ttl
			for i := range 5 {
				if _, err := b.TryLock(ctx, fmt.Sprint("k", i), time.Second); i > 0 && err == nil {
					t.Errorf("k%d is not kept", i)
				}
			}
			busy.Release(ctx)
		}()
		s, err = a.LockAll(ctx, keys, time.Second, nil)
		testkit.Must(t, err)
		for _, key := range keys { // k5 was granted by a release: for a shorter time at first
			if left := time.Until(s.Lock(key).Until()); left < 600*time.Millisecond && key != "k5" {
				t.Errorf("%s is valid for %v", key, left)
			}
		}
		testkit.Must(t, s.AutoRefresh(ctx, flightlock.RefreshPolicy{}))
		time.Sleep(5 * time.Second)
		testkit.Must(t, s.Err())
		testkit.Must(t, s.Release(ctx))
	})
}

// DoAll reports the loss of one of the locks, and its ctx ends with it. What cannot be is refused.
func TestDoAllReportsALoss(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, ctx := lockkit.New(t, flightlock.Options{}, clients...), t.Context()
		mine := errors.New("mine")
		keys := []string{"a", "b", "c"}
		err := c.DoAll(ctx, keys, time.Second, nil, func(context.Context, *flightlock.LockSet) error {
			return mine
		})
		if err != mine {
			t.Errorf("got %v", err)
		}
		err = c.DoAll(ctx, keys, time.Second, nil, func(ctx context.Context, s *flightlock.LockSet) error {
			time.Sleep(5 * time.Second) // it is refreshed
			testkit.Must(t, s.Err())
			testkit.Lose("lock:b", nodes...)
			<-ctx.Done()
			if !errors.Is(s.Err(), flightlock.ErrLockLost) || s.Lock("a").Err() != nil {
				t.Errorf("lost: %v, %v", s.Err(), s.Lock("a").Err())
			}
			return ctx.Err()
		})
		if !errors.Is(err, flightlock.ErrLockLost) || !strings.Contains(err.Error(), `"b"`) {
			t.Errorf("got %v", err)
		}
		none := func(context.Context, *flightlock.LockSet) error { return nil }
		lockkit.WantInvalid(t, c.DoAll(ctx, nil, time.Second, nil, none), "keys", "empty")
		lockkit.WantInvalid(t, c.DoAll(ctx, []string{"a", ""}, time.Second, nil, none), "key", "empty")
		lockkit.WantInvalid(t, c.DoAll(ctx, keys, 1, nil, none), "ttl")
		lockkit.WantInvalid(t, c.DoAll(ctx, keys, time.Second, nil, nil), "fn")
		lockkit.WantInvalid(t, new(flightlock.Client).DoAll(ctx, keys, time.Second, nil, none))
		lockkit.Close(t, c)
		if err := c.DoAll(ctx, keys, time.Second, nil, none); !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// A panic of the user's code is the caller's, and leaves nothing locked: in LingerFor, which runs on our
// goroutines, and in the strategy, while LockAll holds keys.
func TestAPanicInLockAllLeavesNothing(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		other := lockkit.New(t, flightlock.Options{}, clients...)
		c := lockkit.New(t, flightlock.Options{LingerFor: func(key string) time.Duration {
			if key == "b" {
				panic("on purpose")
			}
			return 0
		}}, clients...)
		lockkit.Lock(t, other, "d", time.Minute)
		for name, f := range map[string]func(){
			"LingerFor": func() { c.LockAll(t.Context(), []string{"a", "b", "c"}, time.Second, nil) },
			"the strategy": func() {
				c.LockAll(t.Context(), []string{"a", "c", "d"}, time.Second, &panics{after: 0})
			},
			"its second answer": func() {
				c.LockAll(t.Context(), []string{"a", "c", "d"}, time.Second, &panics{after: 2})
			},
		} {
			if v := testkit.Recovered(f); v != "on purpose" {
				t.Errorf("%s: recovered %v", name, v)
			}
			time.Sleep(time.Millisecond) // nothing expires
			for _, key := range []string{"a", "b", "c"} {
				l, err := other.TryLock(t.Context(), key, time.Second)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				lockkit.Release(t, l)
			}
		}
	})
}

// Nor does runtime.Goexit, as by FailNow in a test, which ends the caller's goroutine.
func TestAGoexitInLockAllLeavesNothing(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		other := lockkit.New(t, flightlock.Options{}, clients...)
		c := lockkit.New(t, flightlock.Options{LingerFor: func(key string) time.Duration {
			if key == "b" {
				runtime.Goexit()
			}
			return 0
		}}, clients...)
		returned, ended := false, make(chan struct{})
		go func() {
			defer close(ended)
			c.LockAll(t.Context(), []string{"a", "b", "c"}, time.Second, nil)
			returned = true
		}()
		<-ended
		if returned {
			t.Error("LockAll has returned")
		}
		time.Sleep(time.Millisecond) // nothing expires
		for _, key := range []string{"a", "b", "c"} {
			lockkit.Release(t, lockkit.Lock(t, other, key, time.Second))
		}
	})
}

// panics is a strategy that has two delays, and panics when it has been asked so often.
type panics struct{ after int }

func (p *panics) Next(n int) (time.Duration, bool) {
	if p.after--; p.after < 0 {
		panic("on purpose")
	}
	return time.Minute, n < 2
}

// A lock that LockAll finds in its ctx is kept for as long as it is valid, whatever ttl the other keys have:
// while LockAll waits, and in DoAll.
func TestLockAllKeepsAShorterLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Refresh: flightlock.RefreshPolicy{Interval: 5 * time.Second}},
			clients...)
		other := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Lock(t, other, "b", 10*time.Second)
		short := lockkit.Lock(t, c, "a", time.Second)
		err := c.DoAll(short.Context(t.Context()), []string{"a", "b"}, 30*time.Second, nil,
			func(ctx context.Context, _ *flightlock.LockSet) error {
				time.Sleep(10 * time.Second)
				return cmp.Or(ctx.Err(), short.Err())
			})
		testkit.Must(t, err)
		testkit.Must(t, short.Release(t.Context()))
		sent := c.Stats().Commands
		err = c.DoAll(t.Context(), []string{"a", "b"}, time.Second, nil,
			func(context.Context, *flightlock.LockSet) error { return nil })
		lockkit.WantInvalid(t, err, "5s", "1s")
		if now := c.Stats().Commands; now != sent {
			t.Errorf("%d commands were sent for a policy that cannot be", now-sent)
		}
	})
}

// Who holds a key, and wants an earlier one besides, could wait for a LockAll that waits for it: that is
// refused. In order, and with all keys that are held already, there is nothing to wait for in a circle.
func TestLockAllOfAHeldKeyIsInOrder(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		none := func(context.Context, *flightlock.LockSet) error { return nil }
		within := func(ctx context.Context, keys ...string) error {
			return c.DoAll(ctx, keys, time.Second, flightlock.Within(nil, time.Minute), none)
		}
		testkit.Must(t, c.Do(t.Context(), "b", time.Second, nil,
			func(ctx context.Context, l *flightlock.Lock) error {
				circle := make(chan error)
				go func() { circle <- within(t.Context(), "a", "b") }() // has a, and waits for b
				time.Sleep(time.Second)
				lockkit.WantInvalid(t, within(ctx, "a", "b"), `"a"`, `"b"`, "in order")
				lockkit.WantInvalid(t, within(ctx, "c", "b", "a"), `"a"`, `"b"`)
				testkit.Must(t, within(ctx, "b", "c"))
				testkit.Must(t, within(ctx, "b"))
				testkit.Must(t, l.Release(ctx))
				testkit.Must(t, <-circle)
				return within(context.WithoutCancel(ctx), "a", "b") // it carries a lock that is over
			}))
		testkit.Must(t, c.DoAll(t.Context(), []string{"a", "b", "c"}, time.Second, nil,
			func(ctx context.Context, _ *flightlock.LockSet) error { return within(ctx, "c", "a") }))
	})
}

// Its first attempts are those of TryLock, and are repeated as these are where that decides nothing: another
// process that only retains the lease of a key gives it up for one that does not wait.
func TestLockAllOfARetainedKey(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		testkit.Delay(100*time.Microsecond, nodes...)
		retains := lockkit.New(t, flightlock.Options{Linger: time.Minute}, clients...)
		lockkit.Release(t, lockkit.Lock(t, retains, "warm", time.Second))
		time.Sleep(time.Second) // it receives recalls
		lockkit.Release(t, lockkit.Lock(t, retains, "b", time.Minute))
		if s := retains.Stats(); s.Retained == 0 {
			t.Fatalf("it retains nothing: %+v", s)
		}
		c := lockkit.New(t, flightlock.Options{}, clients...)
		s, err := c.LockAll(t.Context(), []string{"a", "b"}, time.Minute, flightlock.NoRetry())
		testkit.Must(t, err)
		testkit.Must(t, s.Release(t.Context()))
	})
}
