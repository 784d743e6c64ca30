package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Do runs fn under the lock on key: SingleFlightLock, then AutoRefresh while fn runs, then
// Release. fn's ctx is the lock's Context: it ends when the lock is lost, with the cause, and
// Do with it for the same key does not wait for itself.
//
// The lock is kept for as long as fn runs and ctx lasts. After ctx has ended fn has one more
// ttl, at least; the first refresh that is due after the end of ctx is the last, and the lock
// is lost when that has run out. So an fn that hangs is bounded by its caller's ctx. Under a
// ctx without end it is bounded by nobody: Stats().OldestDo and the metrics show the age of the
// oldest lock, and the log warns after an hour. DoWith has a MaxHold.
//
// fn's error comes back as it is, unless the lock was lost meanwhile: then the error matches
// ErrLockLost and says why. It is the loss alone when fn has succeeded, or has returned the
// error or the cause of its ctx, and else fn's error joined with it. That the nodes could
// not be told of the release is no error: fn has run under the lock, the Client goes on
// trying, and the ttl bounds what is left. A panic or runtime.Goexit in fn releases the
// lock and goes on. Do never waits longer than NodeTimeout for the release.
//
// Errors without fn having run: those of SingleFlightLock.
func (c *Client) Do(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, fn func(ctx context.Context, l *Lock) error) error {
	return c.DoWith(ctx, key, ttl, retry, RefreshPolicy{}, fn)
}

// DoWith is Do with a policy for the refreshes. Its MaxHold has no default: 0 means no limit
// but that of ctx, as for Do. A bad policy is an ErrInvalid before the lock is asked for.
func (c *Client) DoWith(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, p RefreshPolicy, fn func(ctx context.Context, l *Lock) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is what Do does")
	}
	if p.MaxHold == 0 {
		p.MaxHold = -1
	}
	if c.checkTTL(ttl) == nil { // else SingleFlightLock says it
		if _, err := p.validated(c, ttl.Truncate(time.Millisecond)); err != nil {
			return err
		}
	}
	l, err := c.SingleFlightLock(ctx, key, ttl, retry)
	if err != nil {
		return err
	}
	x := &struct {
		autoRefresh
		doing
	}{}
	x.doing.ctx, x.doing.since, x.do = ctx, time.Since(c.began), &x.doing
	inner := l.Context(ctx)
	// Deferred, without recover: a panic keeps its value and its stack.
	defer func() {
		c.doings.end(&x.doing)
		if lost := l.finish(ctx); lost != nil {
			err = lostDuring(ctx, inner, err, lost)
		}
	}()
	if err := l.autoRefresh(p, &x.autoRefresh); err != nil {
		return err
	}
	return fn(inner, l)
}

// lostDuring is what Do says of a lock that was lost while fn ran, which has returned err. inner
// is the ctx that fn had.
func lostDuring(ctx, inner context.Context, err, lost error) error {
	switch {
	case err == nil, errors.Is(lost, err):
		return lost
	case errors.Is(err, ErrLockLost) && errors.Is(err, context.Cause(inner)): // that of this lock
		return err
	case !identical(err, inner.Err()) && !identical(err, context.Cause(inner)):
		return errors.Join(err, lost)
	case ctx.Err() != nil: // it ended, and the lock was lost for another reason
		return fmt.Errorf("%w; ctx has ended: %w", lost, err)
	}
	return lost
}

// finish releases l and returns why it was lost before, if it was. fn may have released it
// itself.
func (l *Lock) finish(ctx context.Context) error {
	before := l.Err()
	err := l.Release(ctx)
	switch {
	case errors.Is(before, errReleased):
		return nil
	case before != nil:
		return l.c.lostIn(l, before)
	case errors.Is(err, ErrNotHeld): // it was, but nobody knew
		return l.c.lostIn(l, err)
	}
	return nil
}

// lostIn is the error of work during which its lock was lost.
func (c *Client) lostIn(l *Lock, why error) error {
	if errors.Is(why, ErrLockLost) {
		return fmt.Errorf("lock %q: %w", l.Key(), why)
	}
	return fmt.Errorf("lock %q: %w: %w", l.Key(), ErrLockLost, why)
}

// Wrap turns fn into a function that runs under the lock on key(arg), as by Do: declared
// once, called everywhere. ctx carries the lock: FromContext(ctx).Fence() in fn is the
// token. It returns fn's result, also along with an error, and the zero R with the error of
// Do when fn has not run. Bad arguments surface as ErrInvalid at the call.
//
// It is safe for concurrent use. fn may call the wrapped function again, with its own ctx:
// the lock is reentrant.
func Wrap[A, R any](c *Client, ttl time.Duration, retry RetryStrategy, key func(arg A) string,
	fn func(ctx context.Context, arg A) (R, error)) func(ctx context.Context, arg A) (R, error) {
	return func(ctx context.Context, arg A) (r R, err error) {
		if c == nil || key == nil || fn == nil {
			return r, invalid("Wrap's c, key or fn", "nil", "all are needed")
		}
		err = c.Do(ctx, key(arg), ttl, retry, func(ctx context.Context, _ *Lock) (err error) {
			r, err = fn(ctx, arg)
			return err
		})
		return r, err
	}
}
