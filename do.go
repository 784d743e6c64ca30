package flightlock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"
)

// Do runs fn under the lock on key: SingleFlightLock, AutoRefresh with ctx and Options.Refresh while fn runs,
// Release. fn's ctx is the lock's Context. The lock is kept while fn runs and ctx lasts, and for one more
// ttl. Without a limit in ctx or Options.Refresh, an fn that hangs keeps it.
//
// Do returns fn's error unchanged. If the lock was lost meanwhile, the error matches ErrLockLost and gives
// the reason, and is joined with fn's error, unless that is only the error or cause of its ctx. A release
// that nodes did not confirm is no error. A panic or runtime.Goexit in fn releases the lock and continues. If
// fn has not run, the errors are those of SingleFlightLock, and ErrInvalid for a nil fn or an Options.Refresh
// that does not suit the ttl.
func (c *Client) Do(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy,
	fn func(ctx context.Context, l *Lock) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is the function to run")
	}
	if c.checkTTL(ttl) == nil { // otherwise SingleFlightLock reports it
		if _, err := c.refreshPolicy(RefreshPolicy{}, ttl.Truncate(time.Millisecond)); err != nil {
			return err
		}
	}
	l, err := c.SingleFlightLock(ctx, key, ttl, retry)
	if err != nil {
		return err
	}
	inner := l.Context(ctx)
	// Deferred, without recover: a panic keeps its value and its stack.
	defer func() {
		before := l.Err() // fn may have released it itself
		if lost := l.lossBy(before, l.Release(ctx)); lost != nil {
			err = lostDuring(ctx, inner, err, lost)
		}
	}()
	if _, err := l.autoRefresh(ctx, l.policyOfDo(ttl), l.ticket()); err != nil {
		return err
	}
	return fn(inner, l)
}

// policyOfDo is how Do and DoAll refresh l, that they have asked for with ttl: by Options.Refresh, which
// suits that ttl, but perhaps not a shorter one in which l is nested.
func (l *Lock) policyOfDo(ttl time.Duration) (p RefreshPolicy) {
	if held := l.ticket().TTL(); held < ttl.Truncate(time.Millisecond) {
		p = l.c.opts.Refresh
		p.Interval = min(p.Interval, l.c.refreshInterval(held))
	}
	return p
}

// lostDuring is the error of Do for a lock that was lost while fn ran and returned err. inner is fn's ctx.
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

// lossBy is why l was lost, by its Err just before its release, and the error of that.
func (l *Lock) lossBy(before, err error) error {
	if before == nil && errors.Is(err, ErrNotHeld) { // it was lost, but nobody knew
		before = err
	}
	if before == nil || errors.Is(before, errReleased) { // fn has released it, before or just then
		return nil
	}
	return lockError(l.Key(), ErrLockLost, before)
}
