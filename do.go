package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Do runs fn under the lock on key: SingleFlightLock, then AutoRefresh with the default
// policy while fn runs, then Release. fn's ctx is the lock's Context: it ends when the lock
// is lost, with the cause, and Do with it for the same key does not wait for itself.
//
// fn's error comes back as it is; if the lock was lost meanwhile, joined with an error that
// matches ErrLockLost, which comes back alone when fn has succeeded. That the nodes could
// not be told of the release is no error: fn has run under the lock, the Client goes on
// trying, and the ttl bounds what is left. A panic or runtime.Goexit in fn releases the
// lock and goes on. Do never waits longer than NodeTimeout for the release.
//
// Errors without fn having run: those of SingleFlightLock.
func (c *Client) Do(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, fn func(ctx context.Context, l *Lock) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is what Do does")
	}
	l, err := c.SingleFlightLock(ctx, key, ttl, retry)
	if err != nil {
		return err
	}
	// Deferred, without recover: a panic keeps its value and its stack.
	defer func() {
		if lost := l.finish(ctx); lost != nil && err != nil {
			err = errors.Join(err, lost)
		} else if lost != nil {
			err = lost
		}
	}()
	if err := l.AutoRefresh(RefreshPolicy{}); err != nil {
		return err
	}
	return fn(l.Context(ctx), l)
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
