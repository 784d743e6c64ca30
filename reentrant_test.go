package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// A ctx made by Lock.Context gives nested Locks: same token and owner, no waiting, no command; the
// key is free when the last is released, in any order.
func TestNestedLocks(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}, {0, 2, 1}, {2, 0, 1}} {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			c, other := lockkit.New(t, flightlock.Options{}, clients...),
				lockkit.New(t, flightlock.Options{}, clients...)
			locks := []*flightlock.Lock{lockkit.Lock(t, c, "k", 10*time.Second)}
			synctest.Wait()
			before := c.Stats()
			ctx := t.Context()
			for i, retry := range []flightlock.RetryStrategy{nil, flightlock.NoRetry()} {
				ctx = locks[i].Context(ctx)
				l, err := c.SingleFlightLock(ctx, "k", 10*time.Second, retry)
				testkit.Must(t, err)
				locks = append(locks, l)
			}
			for _, l := range locks {
				if l.Fence() != locks[0].Fence() || l.Owner() != locks[0].Owner() || l.Key() != "k" ||
					!l.Until().Equal(locks[0].Until()) || l.Err() != nil {
					t.Errorf("%d %q %q %v %v", l.Fence(), l.Owner(), l.Key(), l.Until(), l.Err())
				}
			}
			if after := c.Stats(); after != before {
				t.Errorf("nesting has cost something: %+v, then %+v", before, after)
			}
			for i, n := range order {
				l, rest := locks[n], order[i+1:]
				ended := l.Context(context.Background())
				lockkit.Release(t, l)
				if ended.Err() == nil || context.Cause(ended) != context.Canceled {
					t.Errorf("its Context has not ended after Release: %v", context.Cause(ended))
				}
				if ctx := l.Context(context.Background()); context.Cause(ctx) != context.Canceled {
					t.Errorf("a Context made after Release has not ended: %v", context.Cause(ctx))
				}
				for name, err := range map[string]error{
					"Err": l.Err(), "Release": l.Release(t.Context()), "Refresh": l.Refresh(t.Context()),
					"AutoRefresh": l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}),
				} {
					if !errors.Is(err, flightlock.ErrNotHeld) {
						t.Errorf("%s of a released lock: %v", name, err)
					}
				}
				for _, m := range rest {
					if err := locks[m].Err(); err != nil {
						t.Errorf("lock %d is over after the release of %d: %v", m, n, err)
					}
				}
				if _, err := other.TryLock(t.Context(), "k", time.Second); (err == nil) != (len(rest) == 0) {
					t.Errorf("with %d locks left another client gets %v", len(rest), err)
				}
			}
		})
	}
}

// Another client, another key, no such ctx, or one that has ended: no nesting.
func TestWhatDoesNotNest(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c, other := lockkit.New(t, flightlock.Options{}, clients...),
			lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, c, "k", 10*time.Second)
		ctx := l.Context(t.Context())
		for name, try := range map[string]func() (*flightlock.Lock, error){
			"another client": func() (*flightlock.Lock, error) { return other.TryLock(ctx, "k", time.Second) },
			"no ctx of it":   func() (*flightlock.Lock, error) { return c.TryLock(t.Context(), "k", time.Second) },
		} {
			if l, err := try(); !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Errorf("%s: %v, %v", name, l, err)
			}
		}
		k2, err := c.TryLock(ctx, "k2", time.Second)
		if err != nil || k2.Fence() == 0 || k2.Owner() == l.Owner() {
			t.Errorf("another key: %v", err)
		}
		if again, err := c.TryLock(k2.Context(ctx), "k", time.Second); err != nil || again.Fence() != l.Fence() {
			t.Errorf("through the ctx of another lock: %v", err)
		} else {
			lockkit.Release(t, again)
		}
		lockkit.Release(t, k2)
		if _, err := c.TryLock(ctx, "", time.Second); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("a bad key: %v", err)
		}
		if _, err := c.TryLock(ctx, "k", time.Millisecond); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("a bad ttl: %v", err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := c.SingleFlightLock(ended, "k", time.Second, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("a ctx that has ended: %v", err)
		}
		lockkit.Release(t, l)
	})
}

// A ctx whose lock is over does not nest: released, or lost.
func TestAContextWhoseLockIsOverDoesNotNest(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := context.WithoutCancel(l.Context(t.Context()))
		lockkit.Release(t, l)
		next, err := c.TryLock(ctx, "k", time.Second)
		if err != nil || next.Fence() <= l.Fence() {
			t.Fatalf("after release: %v", err)
		}
		ctx = context.WithoutCancel(next.Context(ctx))
		inner, err := c.TryLock(ctx, "k", time.Second)
		if err != nil || inner.Fence() != next.Fence() {
			t.Fatalf("the second lock does not nest: %v", err)
		}
		time.Sleep(2 * time.Second) // both are lost
		for _, l := range []*flightlock.Lock{next, inner} {
			if !errors.Is(l.Err(), flightlock.ErrLockLost) {
				t.Errorf("got %v", l.Err())
			}
		}
		last, err := c.TryLock(ctx, "k", time.Second)
		if err != nil || last.Fence() <= next.Fence() {
			t.Fatalf("after loss: %v", err)
		}
		for _, l := range []*flightlock.Lock{inner, next} {
			if err := l.Release(ctx); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("Release of a lost lock: %v", err)
			}
		}
		if err := last.Err(); err != nil {
			t.Errorf("the releases of the old ones have ended it: %v", err)
		}
		lockkit.Release(t, last)
	})
}

// A loss, and Close, end all nested Locks at once, with the cause; also those that the outermost one has
// left.
func TestALossEndsAllNestedLocks(t *testing.T) {
	type ends = func(c *flightlock.Client, l *flightlock.Lock, nodes []*redistest.MemNode) error
	for cause, end := range map[error]ends{
		flightlock.ErrLockLost: func(_ *flightlock.Client, l *flightlock.Lock, nodes []*redistest.MemNode) error {
			testkit.Lose("lock:k", nodes...)
			return l.Refresh(context.Background())
		},
		flightlock.ErrClosed: func(c *flightlock.Client, l *flightlock.Lock, _ []*redistest.MemNode) error {
			_ = c.Close(canceled())
			return l.Release(context.Background())
		},
	} {
		inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
			l := lockkit.Lock(t, c, "k", time.Second)
			outer := l.Context(t.Context())
			var inner [2]*flightlock.Lock
			for i := range inner {
				var err error
				inner[i], err = c.TryLock(outer, "k", time.Second)
				testkit.Must(t, err)
			}
			ctx := inner[0].Context(context.Background())
			lockkit.Release(t, l)
			synctest.Wait()
			if err := end(c, inner[1], nodes); !errors.Is(err, flightlock.ErrNotHeld) || !errors.Is(err, cause) {
				t.Errorf("got %v, want %v", err, cause)
			}
			if !errors.Is(context.Cause(ctx), cause) || !errors.Is(inner[0].Err(), cause) {
				t.Errorf("%v, %v, want %v", context.Cause(ctx), inner[0].Err(), cause)
			}
			if nodes[0].Mini.Exists("lock:k") {
				t.Error("the key is still there")
			}
		})
	}
}

// AutoRefresh of a nested Lock keeps the lease alive alone, when the outer one is released; while
// both are held, it costs no second refresh.
func TestNestedAutoRefresh(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", 3*time.Second)
		ctx := l.Context(t.Context())
		var locks []*flightlock.Lock
		for range 3 {
			inner, err := c.TryLock(ctx, "k", 3*time.Second)
			testkit.Must(t, err)
			locks = append(locks, inner)
		}
		for _, l := range append(locks, l) {
			testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		}
		time.Sleep(30 * time.Second)
		if n := c.Stats().Refreshes; n < 28 || n > 40 {
			t.Errorf("%d refreshes in 30s, with one each second", n)
		}
		lockkit.Release(t, l)
		lockkit.Release(t, locks[0])
		time.Sleep(30 * time.Second)
		if err := locks[1].Err(); err != nil {
			t.Errorf("not kept alive: %v", err)
		}
		lockkit.Release(t, locks[2])
		lockkit.Release(t, locks[1])
		n := c.Stats().Refreshes
		time.Sleep(10 * time.Second)
		if now := c.Stats().Refreshes; now != n {
			t.Errorf("%d refreshes after all were released", now-n)
		}
	})
}

// A caller that nests while the last holder releases either shares its hold, or has a lock of its
// own: there are never two holds, and never none with a Lock that considers itself valid.
func TestNestingRacesWithRelease(t *testing.T) {
	c := lockkit.New(t, flightlock.Options{NodeTimeout: 5 * time.Second},
		redistest.MiniClient(t, redistest.StartMini(t)))
	var inside atomic.Int64 // the token that holds
	var users atomic.Int64
	for range 300 {
		l := lockkit.Lock(t, c, "k", 10*time.Second)
		inside.Store(l.Fence())
		ctx := context.WithoutCancel(l.Context(t.Context()))
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 3 {
					inner, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
					if err != nil {
						t.Error(err)
						return
					}
					users.Add(1)
					if inner.Fence() < inside.Load() {
						t.Errorf("token %d after %d", inner.Fence(), inside.Load())
					}
					inside.Store(inner.Fence())
					if err := inner.Err(); err != nil {
						t.Errorf("not held: %v", err)
					}
					if rand.IntN(2) == 0 {
						inner.Context(ctx)
					}
					if err := inner.Release(ctx); err != nil {
						t.Errorf("Release: %v", err)
					}
				}
			})
		}
		wg.Go(func() { lockkit.Release(t, l) })
		wg.Wait()
	}
	if s := c.Stats(); s.Held != 0 || s.Waiters != 0 || users.Load() != 3600 {
		t.Errorf("%+v, %d users", s, users.Load())
	}
}

// Contexts of one lock whose parents end together are ended as one, and each has the values and the
// deadline of its own parent. What is derived from them ends with them, and knows the cause.
func TestContextsOfParentsThatEndTogether(t *testing.T) {
	type keyA struct{}
	type keyX struct{}
	for _, how := range []string{"lost", "released", "deadline", "canceled"} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
				l := lockkit.Lock(t, c, "k", time.Minute)
				stop := errors.New("stop")
				base, end := t.Context(), func() {}
				wantErr, wantCause := context.Canceled, context.Canceled
				switch how {
				case "lost":
					wantCause = flightlock.ErrLockLost
					end = func() {
						nodes[0].Mini.Del("lock:k")
						_ = l.Refresh(t.Context())
					}
				case "released":
					end = func() { lockkit.Release(t, l) }
				case "deadline":
					ctx, cancel := context.WithTimeout(base, 10*time.Second)
					defer cancel()
					base = ctx
					end = func() { time.Sleep(11 * time.Second) }
					wantErr, wantCause = context.DeadlineExceeded, context.DeadlineExceeded
				case "canceled":
					ctx, cancel := context.WithCancelCause(base)
					base = ctx
					end = func() { cancel(stop) }
					wantCause = stop
				}
				deadline, bounded := base.Deadline()
				var all []context.Context
				for i := range 3 {
					parent := context.WithValue(base, keyA{}, i)
					inner := l.Context(parent)
					child, cancel := context.WithCancel(context.WithValue(inner, keyX{}, i))
					defer cancel()
					for _, ctx := range []context.Context{inner, child} {
						d, ok := ctx.Deadline()
						if ctx.Value(keyA{}) != i || flightlock.FromContext(ctx) != l || ctx.Err() != nil ||
							ok != bounded || d != deadline {
							t.Errorf("%d: value %v, %v, deadline %v", i, ctx.Value(keyA{}), ctx.Err(), d)
						}
						if nested, err := c.SingleFlightLock(ctx, "k", time.Second, nil); err != nil {
							t.Error(err)
						} else {
							lockkit.Release(t, nested)
						}
					}
					all = append(all, inner, child)
				}
				end()
				for i, ctx := range all {
					<-ctx.Done()
					if ctx.Err() != wantErr || !errors.Is(context.Cause(ctx), wantCause) {
						t.Errorf("%d: %v, cause %v", i, ctx.Err(), context.Cause(ctx))
					}
				}
				if l.Err() == nil {
					lockkit.Release(t, l)
				} else if over := l.Context(base); over.Err() == nil {
					t.Error("a ctx of a lock that is over has not ended")
				}
			})
		})
	}
}

// Package context gives all contexts that were canceled before anybody called their Done one channel. A ctx
// of a lock has the error and the cause of its own parent all the same.
func TestContextsOfParentsThatHaveEndedApart(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		for i := range 1000 {
			why := fmt.Errorf("request %d was given up", i)
			canceled, cancel := context.WithCancelCause(t.Context())
			cancel(why)
			expired, stop := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
			defer stop()
			a, b := l.Context(canceled), l.Context(expired)
			if a.Err() != context.Canceled || context.Cause(a) != why || flightlock.FromContext(a) != l {
				t.Fatalf("of the one that was canceled: %v, cause %v", a.Err(), context.Cause(a))
			}
			if b.Err() != context.DeadlineExceeded || context.Cause(b) != context.DeadlineExceeded ||
				flightlock.FromContext(b) != l {
				t.Fatalf("of the one that expired: %v, cause %v", b.Err(), context.Cause(b))
			}
		}
		lockkit.Release(t, l)
	})
}

// A nested Lock that was released stays released, whatever becomes of the others.
func TestAReleasedNestedLockIsNotLostWithTheOthers(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		err := c.Do(ctx, "k", time.Second, nil, func(_ context.Context, inner *flightlock.Lock) error {
			lockkit.Release(t, inner)
			time.Sleep(2 * time.Second)
			if l.Err() == nil {
				t.Error("the outer lock lives")
			}
			for what, err := range map[string]error{
				"Err": inner.Err(), "Refresh": inner.Refresh(t.Context()), "Release": inner.Release(t.Context()),
			} {
				if !errors.Is(err, flightlock.ErrNotHeld) || errors.Is(err, flightlock.ErrLockLost) {
					t.Errorf("%s: %v", what, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
	})
}

// A Context of a Lock that was lost, and released after that, ends with the loss, as Err says.
func TestAContextMadeAfterALossAndARelease(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		for _, before := range []bool{false, true} {
			l := lockkit.Lock(t, c, "k", time.Second)
			if before {
				_ = l.Context(t.Context())
			}
			time.Sleep(2 * time.Second)
			_ = l.Release(t.Context())
			if cause := context.Cause(l.Context(t.Context())); !errors.Is(l.Err(), cause) {
				t.Errorf("a Context before: %v: %v, but Err is %v", before, cause, l.Err())
			}
		}
	})
}
