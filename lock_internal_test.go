package flightlock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

type lockCtxKey struct{}

// notComparable is a ctx that cannot be the key of a map.
type notComparable struct {
	context.Context
	_ []int
}

// Under a long lock, Context may be called any number of times: that leaves nothing behind,
// whatever the parent is.
func TestContextsOfALongLockLeaveNothingBehind(t *testing.T) {
	rdb := redistest.StartServer(t).Client(t)
	c, err := New(Options{NodeTimeout: 5 * time.Second}, rdb)
	testkit.Must(t, err)
	defer c.Close(context.Background())
	const calls = 5000
	endless := context.WithValue(context.Background(), lockCtxKey{}, "request")
	ends, cancel := context.WithCancel(endless)
	defer cancel()
	for name, parent := range map[string]func() (context.Context, context.CancelFunc){
		"Background": func() (context.Context, context.CancelFunc) {
			return context.Background(), func() {}
		},
		"the same without an end": func() (context.Context, context.CancelFunc) { return endless, func() {} },
		"the same with an end":    func() (context.Context, context.CancelFunc) { return ends, func() {} },
		"each another, which ends": func() (context.Context, context.CancelFunc) {
			return context.WithCancel(ends)
		},
		"each another, without end": func() (context.Context, context.CancelFunc) {
			return context.WithValue(endless, lockCtxKey{}, 1), func() {}
		},
		"each another, detached": func() (context.Context, context.CancelFunc) {
			return context.WithoutCancel(ends), func() {}
		},
		"cannot be compared, and ends": func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ends)
			return notComparable{Context: ctx}, cancel
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
			testkit.Must(t, err)
			defer l.Release(context.Background())
			once := func() {
				ctx, done := parent()
				inner := l.Context(ctx)
				if inner.Err() != nil || FromContext(inner) != l || inner.Value(lockCtxKey{}) != ctx.Value(lockCtxKey{}) {
					t.Fatal("not a ctx of this lock and that parent")
				}
				done()
			}
			few := func(n int) { // at a time: those that end are removed in the background
				for i := range n {
					if once(); i%100 == 0 {
						redistest.Eventually(t, 5*time.Second, "what ended is gone", func() bool { return l.open() < 10 })
					}
				}
			}
			few(1000)
			before := redistest.Heap()
			few(calls)
			if each := (redistest.Heap() - before) / calls; each > 100 { // hundreds without that
				t.Errorf("%d bytes are left of each call", each)
			}
		})
	}
}

// open is how many contexts of l have not ended.
func (l *Lock) open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.contexts)
}

// countingCtx counts how often it is searched for a value.
type countingCtx struct {
	context.Context
	calls *atomic.Int64
}

func (c countingCtx) Value(key any) any {
	c.calls.Add(1)
	return c.Context.Value(key)
}

// A search for a value in a ctx of a lock takes no longer than in its parent, also where Context was called
// again and again with what it had returned.
func TestValueOfNestedContexts(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *Client) {
		l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
		testkit.Must(t, err)
		var calls atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ctx = countingCtx{ctx, &calls}
		for depth := range 12 {
			for child := range 2 {
				next := l.Context(context.WithValue(ctx, lockCtxKey{}, depth*10+child))
				if child == 1 {
					ctx = next
				}
			}
		}
		calls.Store(0)
		_ = ctx.Value("none")
		if n := calls.Load(); n > 12 {
			t.Errorf("%d look-ups in the outermost ctx for one value", n)
		}
		testkit.Must(t, l.Release(t.Context()))
	})
}

// A read lease that is over before the goroutine that has acquired it goes on does not hide the next one.
func TestALateReadLeaseDoesNotHideTheNext(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c, err := New(Options{}, clients...)
		testkit.Must(t, err)
		defer c.Close(context.Background())
		late := c.newLock()
		testkit.Must(t, c.reads.flights.Acquire(t.Context(), "k", &late.own, 50*time.Millisecond, orDefault(nil)))
		time.Sleep(100 * time.Millisecond)
		l, err := c.RLock(t.Context(), "k", 10*time.Second, nil)
		testkit.Must(t, err)
		if c.reads.store("k", late).Err() == nil {
			t.Error("the lease that is over is none that is over")
		}
		again, err := c.RLock(t.Context(), "k", 10*time.Second, NoRetry())
		testkit.Must(t, err)
		testkit.Must(t, again.Release(t.Context()))
		testkit.Must(t, l.Release(t.Context()))
	})
}

// inBubble runs f in virtual time, with a Client of n nodes.
func inBubble(t *testing.T, n int, f func(t *testing.T, c *Client)) {
	synctest.Test(t, func(t *testing.T) {
		_, clients := redistest.NewBubble(t, n)
		c, err := New(Options{}, clients...)
		testkit.Must(t, err)
		defer c.Close(context.Background())
		f(t, c)
	})
}

// fn, or a goroutine that it has started, may release the lock just between the two steps of finish. Then
// it was not lost.
func TestALockThatOthersReleaseIsNotLost(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *Client) {
		err := c.Do(t.Context(), "k", time.Second, nil, func(ctx context.Context, l *Lock) error {
			before := l.Err()
			testkit.Must(t, l.Release(ctx))
			if lost := l.lossBy(before, l.Release(ctx)); lost != nil {
				t.Error(lost)
			}
			return nil
		})
		testkit.Must(t, err)
	})
}

// uncomparable is an error whose type can be compared, and whose value cannot: errors.Is panics.
type uncomparable struct{ what any }

func (uncomparable) Error() string { return "uncomparable" }

// fn may return any error, also the cause of its ctx, where that cannot be compared.
func TestDoWhoseErrorCannotBeCompared(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *Client) {
		ctx, cancel := context.WithCancelCause(t.Context())
		why := uncomparable{[]int{1}}
		err := c.Do(ctx, "k", time.Second, nil, func(inner context.Context, l *Lock) error {
			cancel(why)
			time.Sleep(5 * time.Second)
			return context.Cause(inner)
		})
		var got uncomparable
		if !errors.Is(err, ErrLockLost) || !errors.As(err, &got) {
			t.Error(err)
		}
	})
}

// If ctx has ended, and the lock was lost for another reason, the error of Do matches both.
func TestDoWhoseLockIsLostAfterItsContextHasEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	inner, end := context.WithCancelCause(ctx)
	defer end(nil)
	cancel()
	err := lostDuring(ctx, inner, inner.Err(), lockError("k", ErrLockLost, errExpired))
	if !errors.Is(err, ErrLockLost) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// An attempt to attach of which nothing was sent when its ctx ended is remembered as any other whose outcome
// is not known: it may be sent just then.
func TestAnAttachThatWasNotSentIsRemembered(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, err := New(Options{}, clients...)
		testkit.Must(t, err)
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		testkit.Must(t, err)
		d, err := l.Detach()
		testkit.Must(t, err)
		testkit.Down(true, nodes...)
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := c.Attach(ctx, d); !errors.Is(err, ErrUnavailable) &&
			!errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without a node: %v", err)
		}
		if owners := c.unsettled.owners(d.of()); len(owners) != 2 {
			t.Errorf("the next attempt accepts %q", owners)
		}
		testkit.Down(false, nodes...)
		testkit.Must(t, c.Close(t.Context()))
	})
}
