package flightlock_test

import (
	"context"
	"errors"
	"runtime"
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

// free reports whether another client gets k at once.
func free(t *testing.T, clients []redis.UniversalClient) bool {
	t.Helper()
	synctest.Wait()
	other := lockkit.New(t, flightlock.Options{}, clients...)
	l, err := other.TryLock(t.Context(), "k", time.Second)
	if err == nil {
		lockkit.Release(t, l)
	}
	return err == nil
}

// Do runs fn under the lock, for longer than the ttl if need be, and returns its error unchanged.
func TestDo(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		mine := errors.New("mine")
		for _, want := range []error{nil, mine} {
			err := c.Do(t.Context(), "k", time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
				time.Sleep(10 * time.Second)
				if l.Err() != nil || ctx.Err() != nil || flightlock.FromContext(ctx) != l || free(t, clients) {
					t.Errorf("fn runs without the lock: %v, %v", l.Err(), ctx.Err())
				}
				return want
			})
			if err != want {
				t.Errorf("got %v, want %v itself", err, want)
			}
			if !free(t, clients) {
				t.Error("not released")
			}
		}
	})
}

// A panic in fn releases the lock and propagates with its value; so does runtime.Goexit.
func TestDoWithAPanicOrGoexit(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		value := &struct{ int }{7}
		if got := testkit.Recovered(func() {
			_ = c.Do(t.Context(), "k", time.Second, nil,
				func(context.Context, *flightlock.Lock) error { panic(value) })
		}); got != value {
			t.Errorf("recovered %v", got)
		}
		if !free(t, clients) {
			t.Error("a panic keeps the lock")
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = c.Do(t.Context(), "k", time.Second, nil, func(context.Context, *flightlock.Lock) error {
				runtime.Goexit()
				return nil
			})
		}()
		<-gone
		if !free(t, clients) {
			t.Error("Goexit keeps the lock")
		}
	})
}

// A release that fails hides no error of fn, is no error if fn succeeded, and takes NodeTimeout and a moment
// at most.
func TestDoWhoseReleaseFails(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...)
		mine := errors.New("mine")
		for _, want := range []error{nil, mine} {
			var stalled time.Time
			err := c.Do(t.Context(), "k", 10*time.Second, nil, func(context.Context, *flightlock.Lock) error {
				nodes[0].Stall(true)
				stalled = time.Now()
				return want
			})
			if took := time.Since(stalled); took > 60*time.Millisecond {
				t.Errorf("the release took %v", took)
			}
			if err != want {
				t.Errorf("got %v, want %v", err, want)
			}
			nodes[0].Stall(false)
			time.Sleep(20 * time.Second)
		}
	})
}

// fn may release the lock itself, and the ctx of Do may end: neither is an error of Do's own.
func TestDoWithOddFunctions(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		if err := c.Do(t.Context(), "k", time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
			lockkit.Release(t, l)
			if ctx.Err() == nil {
				t.Error("fn's ctx has not ended after the release")
			}
			return nil
		}); err != nil {
			t.Errorf("fn that releases: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		if err := c.Do(ctx, "k", time.Second, nil, func(inner context.Context, l *flightlock.Lock) error {
			cancel()
			<-inner.Done()
			return l.Err()
		}); err != nil {
			t.Errorf("ctx that ends in fn: %v", err)
		}
		if !free(t, clients) {
			t.Error("not released")
		}
		ran := false
		err := c.Do(ctx, "k", time.Second, nil, func(context.Context, *flightlock.Lock) error {
			ran = true
			return nil
		})
		if !errors.Is(err, context.Canceled) || ran {
			t.Errorf("ended ctx: %v, fn ran: %v", err, ran)
		}
		if err := c.Do(t.Context(), "k", time.Second, nil, nil); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("nil fn: %v", err)
		}
	})
}

// The age of the oldest lock that Do holds excludes locks that were lost, or that fn released.
func TestTheOldestLockOfDo(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		const unit = 5 * time.Second // longer than it takes to find a loss
		age := func(want time.Duration) {
			t.Helper()
			if got := c.Stats().OldestDo; got != want {
				t.Errorf("the oldest lock is %v old, want %v", got, want)
			}
		}
		done := make(chan struct{})
		hold := func(key string, fn func(*flightlock.Lock)) {
			go func() {
				_ = c.Do(t.Context(), key, 3*time.Second, nil, func(_ context.Context, l *flightlock.Lock) error {
					fn(l)
					return nil
				})
				done <- struct{}{}
			}()
			time.Sleep(unit)
		}
		hold("lost", func(*flightlock.Lock) { time.Sleep(60 * unit) })
		age(unit)
		hold("released", func(l *flightlock.Lock) {
			time.Sleep(10 * unit)
			lockkit.Release(t, l)
			time.Sleep(60 * unit)
		})
		hold("held", func(*flightlock.Lock) { time.Sleep(20 * unit) })
		age(3 * unit)
		nodes[0].Mini.Del("lock:lost")
		time.Sleep(unit)
		age(3 * unit)
		time.Sleep(10 * unit)
		age(12 * unit)
		for range 3 {
			<-done
		}
		age(0)
	})
}

// After ctx has ended, fn has at least one more ttl, as a holder that uses AutoRefresh has, whose ctx may be
// one of the lock; then the lock is lost, and every error says why.
func TestDoWhoseFunctionIgnoresItsEndedCtx(t *testing.T) {
	const ttl = 3 * time.Second
	shutdown := errors.New("shutting down")
	canceled := func(ctx context.Context) context.Context {
		ctx, cancel := context.WithCancelCause(ctx)
		time.AfterFunc(time.Minute, func() { cancel(shutdown) })
		return ctx
	}
	type lock = flightlock.Lock
	for name, tc := range map[string]struct {
		end  func(context.Context) context.Context
		auto func(l *lock, ctx context.Context) context.Context // nil: Do
		want []error
	}{
		"Do, canceled": {canceled, nil, []error{context.Canceled, shutdown}},
		"Do, deadline": {func(ctx context.Context) context.Context {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			time.AfterFunc(time.Hour, cancel)
			return ctx
		}, nil, []error{context.DeadlineExceeded}},
		"AutoRefresh": {canceled, func(_ *lock, ctx context.Context) context.Context { return ctx },
			[]error{shutdown}},
		"AutoRefresh with a ctx of the lock": {canceled, (*lock).Context, []error{shutdown}},
	} {
		testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			c := lockkit.New(t, flightlock.Options{}, clients...)
			ctx := tc.end(t.Context())
			var held time.Duration
			hold := func(_ context.Context, l *lock) error {
				<-ctx.Done()
				ended, lost := time.Now(), l.Context(t.Context())
				<-lost.Done()
				held = time.Since(ended)
				return nil
			}
			var err error
			if tc.auto == nil {
				err = c.Do(ctx, "k", ttl, nil, hold)
			} else {
				l := lockkit.Lock(t, c, "k", ttl)
				testkit.Must(t, l.AutoRefresh(tc.auto(l, ctx), flightlock.RefreshPolicy{}))
				_ = hold(ctx, l)
				err = l.Err()
			}
			if held < ttl*98/100 || held > ttl*3/2 {
				t.Errorf("%s: lost %v after ctx had ended, with a ttl of %v", name, held, ttl)
			}
			for _, want := range append(tc.want, flightlock.ErrLockLost) {
				if !errors.Is(err, want) || !strings.Contains(err.Error(), "ctx") || strings.Contains(err.Error(), "\n") {
					t.Errorf("%s: %v, want %v", name, err, want)
				}
			}
			if !free(t, clients) {
				t.Errorf("%s: not free", name)
			}
		})
	}
}

// A refresh that fails after ctx has ended is tried again, and the one that succeeds is the last.
func TestDoWhoseLastRefreshHasToBeRepeated(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		ctx, cancel := context.WithCancel(t.Context())
		err := c.Do(ctx, "k", 3*time.Second, nil, func(inner context.Context, l *flightlock.Lock) error {
			cancel()
			nodes[0].Stall(true)
			time.Sleep(1500 * time.Millisecond)
			nodes[0].Stall(false)
			time.Sleep(2500 * time.Millisecond)
			if l.Err() != nil {
				t.Errorf("lost before its time: %v", l.Err())
			}
			time.Sleep(1500 * time.Millisecond)
			return nil
		})
		if !errors.Is(err, flightlock.ErrLockLost) || !errors.Is(err, context.Canceled) {
			t.Errorf("Do: %v", err)
		}
	})
}

// Do refreshes by Options.Refresh, and an explicit MaxHold counts. A policy that does not suit the ttl is
// refused before the lock is asked for.
func TestDoRefreshesByTheOptions(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		for name, tc := range map[string]struct {
			policy      flightlock.RefreshPolicy
			least, most time.Duration
		}{
			"MaxHold":      {flightlock.RefreshPolicy{MaxHold: time.Minute}, 59 * time.Second, 64 * time.Second},
			"MaxRefreshes": {flightlock.RefreshPolicy{MaxRefreshes: 5}, 7 * time.Second, 9 * time.Second},
		} {
			c := lockkit.New(t, flightlock.Options{Refresh: tc.policy}, clients...)
			began := time.Now()
			err := c.Do(t.Context(), "k", 3*time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
				<-ctx.Done()
				if held := time.Since(began); held < tc.least || held > tc.most {
					t.Errorf("%s: held for %v", name, held)
				}
				return context.Cause(ctx)
			})
			if !errors.Is(err, flightlock.ErrLockLost) || !strings.Contains(err.Error(), "RefreshPolicy."+name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		c := lockkit.New(t, flightlock.Options{Refresh: flightlock.RefreshPolicy{Interval: time.Second}},
			clients...)
		err := c.Do(t.Context(), "k", time.Second, nil, func(context.Context, *flightlock.Lock) error {
			t.Error("fn runs")
			return nil
		})
		lockkit.WantInvalid(t, err, "Options.Refresh.Interval")
		lockkit.WantInvalid(t, c.Do(t.Context(), "k", 2*time.Second, nil, nil), "fn")
		if n := c.Stats().Attempts; n != 0 {
			t.Errorf("%d attempts with a bad policy", n)
		}
		l := lockkit.Lock(t, c, "k", time.Second)
		defer lockkit.Release(t, l)
		lockkit.WantInvalid(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}), "Options.Refresh.Interval")
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: time.Millisecond}))
	})
}

// A policy that suits the ttl of its call is good, whatever the ttl of the lock that the call nests in.
func TestDoInALockOfAShorterTTL(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		policy := flightlock.RefreshPolicy{Interval: 10 * time.Second}
		c := lockkit.New(t, flightlock.Options{Refresh: policy}, clients...)
		ran := false
		inner := func(ctx context.Context, _ *flightlock.Lock) error {
			ran = true
			time.Sleep(5 * time.Second)
			return ctx.Err()
		}
		l := lockkit.Lock(t, c, "k", time.Second)
		if err := c.Do(l.Context(t.Context()), "k", 30*time.Second, nil, inner); err != nil || !ran {
			t.Errorf("%v, ran: %v", err, ran)
		}
		_ = l.Release(t.Context())
	})
}

// A policy's Interval is kept, also if the ttl is not a whole number of milliseconds.
func TestDoKeepsTheIntervalOfATTLWithAFraction(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Refresh: flightlock.RefreshPolicy{Interval: 2 * time.Second}},
			clients...)
		for _, ttl := range []time.Duration{3 * time.Second, 3*time.Second + time.Microsecond} {
			before := c.Stats().Refreshes
			testkit.Must(t, c.Do(t.Context(), "k", ttl, nil, func(context.Context, *flightlock.Lock) error {
				time.Sleep(11 * time.Second) // the bubble's time, as below
				return nil
			}))
			if got := c.Stats().Refreshes - before; got != 5 {
				t.Errorf("ttl %v: %d refreshes in 11s, want one every 2s", ttl, got)
			}
		}
	})
}
