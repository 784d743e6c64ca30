package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Do runs fn under the lock on key: it calls SingleFlightLock, then AutoRefresh while fn runs, then
// Release. fn's ctx is the lock's Context: it ends when the lock is lost, with the reason as its
// cause. Calling Do with that ctx for the same key returns a nested lock and does not deadlock.
//
// The lock is kept while fn runs and ctx lasts. After ctx has ended, fn has at least one more ttl:
// the first refresh that is due after the end of ctx is the last one, and when that ttl has run
// out, the lock is lost. So ctx limits an fn that hangs. Under a ctx that never ends there is no
// limit: Stats().OldestDo and the metrics show the age of the oldest lock, and the log warns after
// an hour. DoWith has a MaxHold.
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

// DoWith is Do with a policy for the refreshes. Its MaxHold has no default: 0 means that only ctx
// limits the hold, as for Do. A bad policy is an ErrInvalid, before the lock is requested.
func (c *Client) DoWith(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, p RefreshPolicy,
	fn func(ctx context.Context, l *Lock) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is the function to run")
	}
	if p.MaxHold == 0 {
		p.MaxHold = -1
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

// doing is a lock held by Do, in addition to how it is refreshed. By default only Do's ctx limits
// how long it is held. Under a ctx that never ends, an fn that hangs holds the lock forever, so the
// locks held longest are made visible: in Stats, in the metrics, and in the log after an hour.
//
// Most calls of Do end before their first refresh is due, and have no cost for that: a lock is listed
// when its first refresh is due, so a younger lock is not visible.
//
//	unlisted --first refresh--> listed --Do ends--> ended
//	   +------------------------Do ends--------------->
type doing struct {
	ctx   context.Context // Do's
	since time.Duration   // on the Client's clock

	last   bool // the latest refresh was sent after ctx had ended: written by Due, read by refreshed
	warned bool // as last

	listed atomic.Int32 // unlisted, listed or ended; from unlisted to listed under the mu of the list
}

const (
	unlisted = iota
	listed
	ended
)

// doings are the locks held by Do whose first refresh was due. The zero value is ready for use.
type doings struct {
	mu  sync.Mutex // guards all
	all map[*doing]*Lock
}

func (ds *doings) add(d *doing, l *Lock) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if !d.listed.CompareAndSwap(unlisted, listed) {
		return
	}
	if ds.all == nil {
		ds.all = map[*doing]*Lock{}
	}
	ds.all[d] = l
}

// end is called at the end of Do. It takes no mutex for a lock that is not listed.
func (ds *doings) end(d *doing) {
	if d.listed.Swap(ended) != listed {
		return
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	delete(ds.all, d)
}

// oldest returns when the oldest lock was acquired; ok is false if there is none.
func (ds *doings) oldest() (since time.Duration, ok bool) {
	type held struct {
		since time.Duration
		l     *Lock
	}
	ds.mu.Lock()
	all := make([]held, 0, len(ds.all))
	for d, l := range ds.all {
		all = append(all, held{d.since, l})
	}
	ds.mu.Unlock()
	slices.SortFunc(all, func(a, b held) int { return cmp.Compare(a.since, b.since) })
	for _, h := range all {
		if h.l.Err() == nil { // otherwise fn continues without it
			return h.since, true
		}
	}
	return 0, false
}

// tooLong is how long Do holds a lock before a warning is logged.
const tooLong = time.Hour

// refreshing is called when a refresh of l is due.
func (d *doing) refreshing(l *Lock) {
	if d.listed.Load() == unlisted {
		l.c.doings.add(d, l)
	}
	if age := time.Since(l.c.began) - d.since; !d.warned && age >= tooLong && !l.insideDo() {
		d.warned = true
		l.c.longDo.of(l.Key())
	}
	d.last = d.ctx.Err() != nil
}

// insideDo reports whether l is nested in a lock held by Do, which logs its own warning.
func (l *Lock) insideDo() bool {
	n := l.reentry.Load()
	if n == nil || n == notShared || n.outermost == l {
		return false
	}
	a := n.outermost.auto.Load()
	return a != nil && a.do != nil
}

// stopped is the reason why a lock is not refreshed any more after the last refresh.
func (d *doing) stopped() error {
	err, cause := d.ctx.Err(), context.Cause(d.ctx)
	if matches(cause, err) {
		return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w", cause)
	}
	return fmt.Errorf("its ctx ended, and the function ran for another ttl: %w: %w", err, cause)
}
