package flightlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// Revoke ends the holder's Context before the key is anybody else's, whoever attached or acquired the lock,
// and says so when the key is free or another's.
func TestRevoke(t *testing.T) {
	for _, attached := range []bool{false, true} {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
			ctx := t.Context()
			l := lockkit.Lock(t, a, "k", time.Minute)
			if attached {
				m, err := a.Attach(ctx, detach(t, l))
				testkit.Must(t, err)
				l = m
			}
			inner := l.Context(ctx)
			testkit.Must(t, l.AutoRefresh(ctx, flightlock.RefreshPolicy{Interval: time.Second}))
			waits := make(chan error, 1)
			go func() {
				m, err := b.SingleFlightLock(ctx, "k", time.Second, nil)
				if err == nil && inner.Err() == nil {
					err = errors.New("it was given before the Context of the last holder had ended")
				}
				waits <- err
				if m != nil {
					_ = m.Release(ctx)
				}
			}()
			time.Sleep(3 * time.Second)
			if err := b.Revoke(ctx, "k", "somebody#else-1"); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("another owner: %v", err)
			}
			testkit.Must(t, l.Err())
			in, err := b.Inspect(ctx, "k")
			testkit.Must(t, err)
			testkit.Must(t, b.Revoke(ctx, "k", in.Owner))
			for name, err := range map[string]error{"cause": context.Cause(inner), "Err": l.Err()} {
				if !errors.Is(err, flightlock.ErrRevoked) || !errors.Is(err, flightlock.ErrLockLost) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if err := l.Release(ctx); !errors.Is(err, flightlock.ErrNotHeld) ||
				!errors.Is(err, flightlock.ErrRevoked) {
				t.Errorf("Release: %v", err)
			}
			testkit.Must(t, <-waits)
			if err := b.Revoke(ctx, "k", in.Owner); !errors.Is(err, flightlock.ErrNotHeld) ||
				!strings.HasSuffix(err.Error(), "nobody has it") {
				t.Errorf("again: %v", err)
			}
			time.Sleep(time.Second)
			wantKey(t, nodes, "k", "", 3)
		})
	}
}

// A holder that has the key on a minority of the nodes only, because others have lost it, is asked
// nevertheless.
func TestRevokeOfWhatAMinorityHas(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		ctx := t.Context()
		l := lockkit.Lock(t, a, "k", time.Minute)
		inner := l.Context(ctx)
		testkit.Must(t, l.AutoRefresh(ctx, flightlock.RefreshPolicy{}))
		time.Sleep(21 * time.Second) // it has refreshed
		for _, m := range nodes[:2] {
			m.Mini.Del("lock:k")
		}
		testkit.Must(t, b.Revoke(ctx, "k", l.Owner()))
		if !errors.Is(context.Cause(inner), flightlock.ErrRevoked) {
			t.Errorf("its Context: %v", context.Cause(inner))
		}
		wantKey(t, nodes, "k", "", 3)
	})
}

// A lease that is only retained is released; a holder that does not listen, or cannot be reached, keeps its
// lock.
func TestRevokeWithoutAHolderThatAnswers(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		lingers, deaf := lockkit.New(t, flightlock.Options{Linger: time.Minute}, clients...),
			lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...)
		b, ctx := lockkit.New(t, flightlock.Options{}, clients...), t.Context()
		lockkit.LockAndRelease(t, lingers)
		synctest.Wait()
		testkit.Must(t, lockkit.Lock(t, lingers, "kept", time.Minute).Release(ctx))
		in, err := b.Inspect(ctx, "kept")
		testkit.Must(t, err)
		testkit.Must(t, b.Revoke(ctx, "kept", in.Owner))
		synctest.Wait()
		wantKey(t, nodes, "kept", "", 3)

		l := lockkit.Lock(t, deaf, "k", time.Minute)
		inner := l.Context(ctx)
		began := time.Now()
		if err := b.Revoke(ctx, "k", l.Owner()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("a Client that does not listen: %v", err)
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		if err := b.Revoke(short, "k", l.Owner()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("with a ctx that ends: %v", err)
		}
		testkit.Must(t, inner.Err())
		testkit.Down(true, nodes[:2]...)
		if err := b.Revoke(ctx, "k", l.Owner()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("without a majority: %v", err)
		}
		if err := b.RevokeForce(ctx, "k", l.Owner()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("by force: %v", err)
		}
		testkit.Down(false, nodes[:2]...)
	})
}

// RevokeForce deletes the key of that owner only. Its holder loses the lock with the next refresh, and the
// next one's token is larger than all of the holder's.
func TestRevokeForce(t *testing.T) {
	for _, n := range []int{1, 3} {
		testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
			ctx := t.Context()
			l := lockkit.Lock(t, a, "k", time.Minute)
			testkit.Must(t, l.AutoRefresh(ctx, flightlock.RefreshPolicy{}))
			inner := l.Context(ctx)
			synctest.Wait()
			if err := b.RevokeForce(ctx, "k", l.Owner()+"1"); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("another owner: %v", err)
			}
			wantKey(t, nodes, "k", l.Owner(), n)
			testkit.Must(t, b.RevokeForce(ctx, "k", l.Owner()))
			testkit.Must(t, inner.Err()) // as documented
			synctest.Wait()
			m := lockkit.Lock(t, b, "k", time.Minute)
			if m.Fence() <= l.Fence() {
				t.Errorf("the next token is %d after %d", m.Fence(), l.Fence())
			}
			time.Sleep(21 * time.Second)
			if !errors.Is(context.Cause(inner), flightlock.ErrLockLost) {
				t.Errorf("the last holder does not know: %v", context.Cause(inner))
			}
			synctest.Wait()
			wantKey(t, nodes, "k", m.Owner(), n)
			if err := b.RevokeForce(ctx, "k", l.Owner()); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("again: %v", err)
			}
		})
	}
}

// A waiter is served at once after RevokeForce, as after a release.
func TestAWaiterIsServedAfterRevokeForce(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", time.Minute)
		go func() {
			time.Sleep(5 * time.Second)
			testkit.Must(t, b.RevokeForce(t.Context(), "k", l.Owner()))
		}()
		began := time.Now()
		m, err := b.SingleFlightLock(t.Context(), "k", time.Second, nil)
		testkit.Must(t, err)
		if took := time.Since(began); took > 5*time.Second+50*time.Millisecond {
			t.Errorf("served after %v", took)
		}
		testkit.Must(t, m.Release(t.Context()))
	})
}

// What is no owner, or no key, is refused.
func TestRevokeOfNothing(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		// a release may grant the key to its owner alone, before that shares it
		lease := rlock(t, c, "k", time.Minute)
		for _, revoke := range []func(*flightlock.Client, context.Context, string, string) error{
			(*flightlock.Client).Revoke, (*flightlock.Client).RevokeForce,
		} {
			lockkit.WantInvalid(t, revoke(c, t.Context(), "k", ""), "owner")
			lockkit.WantInvalid(t, revoke(c, t.Context(), "", "o"), "key")
			lockkit.WantInvalid(t, revoke(c, t.Context(), "k", node.Readers), "owner")
			lockkit.WantInvalid(t, revoke(c, t.Context(), "k", lease.Owner()), "read locks")
			lockkit.WantInvalid(t, revoke(new(flightlock.Client), t.Context(), "k", "o"))
		}
		lockkit.Release(t, lease)
		lockkit.Close(t, c)
		if err := c.Revoke(t.Context(), "k", "o"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
	})
}
