package flightlock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"
)

// Do runs fn under the lock on key: it calls SingleFlightLock, then AutoRefresh while fn runs, then
// Release. fn's ctx is the lock's Context: it ends when the lock is lost, with the reason as its
// cause. Calling Do with that ctx for the same key returns a nested lock and does not deadlock.
//
// The lock is kept while fn runs and ctx lasts. After ctx has ended, fn has at least one more ttl:
// the first refresh that is due after the end of ctx is the last one, and when that ttl has run
// out, the lock is lost. So ctx limits an fn that hangs. Under a ctx that never ends there is no
// limit: Stats().OldestDo and the metrics show the age of the oldest lock, and the log warns each
// hour. DoWith has a MaxHold.
//
// Do returns fn's error unchanged, unless the lock was lost meanwhile: then the error matches
// ErrLockLost and gives the reason. It is that error alone if fn succeeded or returned the error or
// the cause of its ctx, and otherwise is joined with fn's error. A release that nodes did not
// confirm is no error: fn has run under the lock, the Client keeps trying, and the key expires with
// its ttl at the latest. A panic or runtime.Goexit in fn releases the lock and continues. Do waits
// for the release no longer than Release does.
//
// If fn has not run, the errors are those of SingleFlightLock; a nil fn is an ErrInvalid.
func (c *Client) Do(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy,
	fn func(ctx context.Context, l *Lock) error) error {
	return c.DoWith(ctx, key, ttl, retry, RefreshPolicy{}, fn)
}

// DoWith is Do with a policy for the refreshes. A bad policy is an ErrInvalid, before the lock is
// requested.
func (c *Client) DoWith(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, p RefreshPolicy,
	fn func(ctx context.Context, l *Lock) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is the function to run")
	}
	if c.checkTTL(ttl) == nil { // otherwise SingleFlightLock reports it
		if _, err := p.validated(c, ttl.Truncate(time.Millisecond)); err != nil {
			return err
		}
	}
	l, err := c.SingleFlightLock(ctx, key, ttl, retry)
	if err != nil {
		return err
	}
	if held := l.ttl(); held < ttl.Truncate(time.Millisecond) { // it is nested: p is for the ttl that was asked for
		p.Interval = min(p.Interval, c.refreshInterval(held))
	}
	x := &struct {
		autoRefresh
		doing
	}{}
	x.doing.ctx, x.do = ctx, &x.doing
	inner := l.Context(ctx)
	// Deferred, without recover: a panic keeps its value and its stack.
	defer func() {
		if lost := l.finish(ctx); lost != nil {
			err = lostDuring(ctx, inner, err, lost)
		}
	}()
	if err := l.autoRefresh(p, &x.autoRefresh); err != nil {
		return err
	}
	return fn(inner, l)
}

// lostDuring is the error of Do for a lock that was lost while fn ran and returned err. inner is
// fn's ctx.
func lostDuring(ctx, inner context.Context, err, lost error) error {
	switch {
	case err == nil, matches(lost, err):
		return lost
	case errors.Is(err, ErrLockLost) && matches(err, context.Cause(inner)): // that of this lock
		return err
	case !identical(err, inner.Err()) && !identical(err, context.Cause(inner)):
		return errors.Join(err, lost)
	case ctx.Err() != nil: // it ended, and the lock was lost for another reason
		return fmt.Errorf("%w; ctx has ended: %w", lost, err)
	}
	return lost
}

// identical reports whether two errors are the same one. Not all of them are comparable.
func identical(a, b error) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// finish releases l and returns why it was lost before, if it was. fn may have released it
// itself.
func (l *Lock) finish(ctx context.Context) error {
	before := l.Err()
	return l.lossBy(before, l.Release(ctx))
}

// lossBy is why l was lost, by its Err just before its release, and the error of that.
func (l *Lock) lossBy(before, err error) error {
	switch {
	case errors.Is(before, errReleased), before == nil && errors.Is(err, errReleased): // before, or just then
		return nil
	case before != nil:
		return lockError(l.Key(), ErrLockLost, before)
	case errors.Is(err, ErrNotHeld): // it was, but nobody knew
		return lockError(l.Key(), ErrLockLost, err)
	}
	return nil
}

// Wrap turns fn into a function that runs under the lock on key(arg), as by Do. Declare the result
// once and call it everywhere. Its ctx carries the lock: in fn, FromContext(ctx).Fence() is the
// token. It returns fn's result, also together with an error, and the zero R with the error of Do
// if fn has not run. Bad arguments are an ErrInvalid of the call.
//
// The result is safe for concurrent use. fn may call it again with its own ctx: the lock is
// reentrant.
func Wrap[A, R any](c *Client, ttl time.Duration, retry RetryStrategy, key func(arg A) string,
	fn func(ctx context.Context, arg A) (R, error)) func(ctx context.Context, arg A) (R, error) {
	return func(ctx context.Context, arg A) (r R, err error) {
		if c == nil || key == nil || fn == nil {
			return r, invalid("Wrap's c, key or fn", "nil", "all are required")
		}
		err = c.Do(ctx, key(arg), ttl, retry, func(ctx context.Context, _ *Lock) (err error) {
			r, err = fn(ctx, arg)
			return err
		})
		return r, err
	}
}

// doing is what limits how Do's lock is refreshed: by default only Do's ctx.
type doing struct {
	ctx  context.Context // Do's
	last bool            // the latest refresh was sent after ctx had ended: written by Due, read by renewed
}

// stopped is the reason why a lock is not refreshed any more after the last refresh.
func (d *doing) stopped() error {
	err, cause := d.ctx.Err(), context.Cause(d.ctx)
	if matches(cause, err) {
		return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w", cause)
	}
	return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w: %w", err, cause)
}
