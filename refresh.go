package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/jitter"
)

// RefreshPolicy configures how a lock is kept: see [Options.Refresh] and [Lock.AutoRefresh]. The zero value
// is a good default. One refresh may take NodeTimeout, or half the Interval if that is less.
type RefreshPolicy struct {
	// Interval is the time between refreshes. Default ttl/3, or half the validity (ttl - ttl*DriftFactor - 2ms)
	// if that is less; at least 1ms, and below the validity. One of a second or more may end up to 5ms early, so
	// that locks are refreshed together.
	Interval time.Duration
	// Retry decides about retries after consecutive failures. Default ExponentialBackoff(5ms, 250ms). No refresh
	// is sent after the validity deadline. A longer delay is cut short for a last refresh before it, unless the
	// delay is math.MaxInt64.
	Retry RetryStrategy
	// MaxRefreshes limits the number of refreshes. 0 means no limit. It must not be negative.
	MaxRefreshes int
	// MaxHold is how long after AutoRefresh started the last refresh may be sent, so that a holder that hangs
	// does not keep the lock forever. 0 means no limit. It must not be negative.
	MaxHold time.Duration
}

// minInterval is also the shortest time in which a node answers. The shortest ttl is valid for 3ms with any
// DriftFactor, so its default Interval is 1.5ms.
const minInterval = time.Millisecond

// check reports fields that are out of range for locks of any ttl up to maxTTL. name is that of the policy.
func (p RefreshPolicy) check(name string, maxTTL time.Duration) error {
	if p.Interval != 0 && (p.Interval < minInterval || p.Interval >= maxTTL) {
		return invalid(name+".Interval", p.Interval,
			fmt.Sprintf("it must be from %v to below Options.MaxTTL, %v", minInterval, maxTTL))
	}
	return cmp.Or(notBelow0(name+".MaxRefreshes", p.MaxRefreshes), notBelow0(name+".MaxHold", p.MaxHold),
		checkStrategy(p.Retry))
}

// refreshPolicy is p, or Options.Refresh in place of a zero p, for a lock of that ttl, with its defaults.
func (c *Client) refreshPolicy(p RefreshPolicy, ttl time.Duration) (RefreshPolicy, error) {
	name := "RefreshPolicy"
	if p == (RefreshPolicy{}) {
		p, name = c.opts.Refresh, "Options.Refresh"
	}
	if err := p.check(name, c.opts.MaxTTL); err != nil {
		return p, err
	}
	valid := c.quorum.Validity(ttl)
	p.Interval = cmp.Or(p.Interval, c.refreshInterval(ttl))
	if p.Interval >= valid {
		return p, invalid(name+".Interval", p.Interval,
			fmt.Sprintf("it must be from %v to below the validity of a ttl of %v, %v", minInterval, ttl, valid))
	}
	p.Retry = orDefault(p.Retry)
	return p, nil
}

// refreshInterval is the default of RefreshPolicy.Interval.
func (c *Client) refreshInterval(ttl time.Duration) time.Duration {
	return min(ttl/3, c.quorum.Validity(ttl)/2)
}

// autoRefresh keeps one lock alive, with neither a timer nor a goroutine of its own. The steps follow each
// other: the lock's flight calls Due when a refresh is due, Due starts it, and refreshed, or the retry
// strategy, sets the timer again. Each step is under the flight's mutex, so the fields need no other.
// Refreshing stops, and the lock runs out, when the policy says so, ctx has ended, or the deadline leaves no
// time. Then the reason is recorded, before the lock can have run out, so that the loss reports it. The timer
// of a lock that is over does not fire, also after a pause of the process; Release of a nested lock stops it.
//
// A holder may forget to release: it returns early, or a panic is recovered. Refreshing would then
// keep the key forever. So for a Lock that is the user's, neither this nor the flight refers to the
// Lock, only to the Ticket, which AutoRefresh has detached from it. When nothing else refers to the
// Lock, the garbage collector has fate set to dropped, and the next Due releases. The Lock remains referred
// to by its contexts (see derived), and by the locks nested in it.
type autoRefresh struct {
	RefreshPolicy // without zeros that mean a default
	timer         flight.Timer
	c             *Client
	t             *flight.Ticket
	around        *Lock         // the outermost of the locks around this one; nil if it is not nested
	refreshes     int32         // that succeeded
	failures      int32         // consecutive
	failing       time.Duration // held at the first of them
	hours         int32         // for which the lock was kept when that was last logged
	fate          atomic.Uint32 // of the Lock: inUse, and then, for good, given or dropped
	ctx           context.Context
	last          bool // the latest refresh was sent after ctx had ended: written by Due, read by refreshed
}

// The fates of a Lock with AutoRefresh.
const (
	inUse   = iota
	given   // Release was called
	dropped // nobody can call it any more
)

// AutoRefresh starts to refresh the lock as p says, until it is released or lost, or p or ctx ends it: after
// ctx has ended the lock is held for one more ttl. The zero policy means Options.Refresh. Errors: ErrNotHeld
// for a lock that is over; ErrInvalid for a bad policy, a nil ctx, or a second call. A nested lock is
// refreshed only where the locks around it are not.
//
// Without a limit in p or ctx, a holder that hangs keeps the lock: Stats.OldestDo has the age of the oldest
// lock, and each hour the log names those kept for an hour or more.
//
// A Lock that was dropped without Release is released, with a warning, after the garbage collector has found
// that nothing refers to it. These refer to it: variables still used, nested locks, and contexts made by
// Context. Once the Done channel of such a ctx was requested, as a child of it does, it counts until its
// parent ends, also as the ctx of AutoRefresh.
func (l *Lock) AutoRefresh(ctx context.Context, p RefreshPolicy) error {
	if ctx == nil {
		return invalid("ctx", "nil", "context.Background() sets no limit")
	}
	if of, ok := ctx.(*lockCtx); ok {
		ctx = of.derived.ctx // it ends at the same time, and does not refer to the Lock
	}
	a, err := l.autoRefresh(ctx, p, l.ticket().Detach())
	if err != nil {
		return err
	}
	runtime.AddCleanup(l, func(a *autoRefresh) { a.fate.CompareAndSwap(inUse, dropped) }, a)
	return nil
}

// autoRefresh is AutoRefresh for a caller that releases l, whatever happens. t is l's.
func (l *Lock) autoRefresh(ctx context.Context, p RefreshPolicy, t *flight.Ticket) (*autoRefresh, error) {
	p, err := l.c.refreshPolicy(p, t.TTL())
	if err != nil {
		return nil, err
	}
	if err := l.Err(); err != nil {
		return nil, lockEnded(t.Key(), err)
	}
	a := &autoRefresh{RefreshPolicy: p, c: l.c, t: t, around: l.around, ctx: ctx}
	if !l.auto.CompareAndSwap(nil, a) {
		return nil, fmt.Errorf("flightlock: %w: AutoRefresh was called before on this lock %q", ErrInvalid, l.Key())
	}
	// A lock that was handed over may have less than its ttl left.
	a.again(min(p.Interval, clock.Left(clock.Now(), l.Until())/2))
	if err := l.Err(); err != nil { // Release may have been called before it could find a
		a.stop()
		return nil, lockEnded(t.Key(), err)
	}
	return a, nil
}

// again sets the timer, unless the lock has ended, or MaxHold will have passed by then.
func (a *autoRefresh) again(wait time.Duration) {
	if a.MaxHold > 0 && clock.Add(a.held(), wait) > a.MaxHold {
		a.t.Unrefreshed(fmt.Errorf("RefreshPolicy.MaxHold, %v, is over", a.MaxHold))
		return
	}
	a.t.SetTimer(&a.timer, a, wait)
}

// held is how long a has kept the lock.
func (a *autoRefresh) held() time.Duration { return a.t.TimerAge(&a.timer) }

func (a *autoRefresh) stop() { a.t.StopTimer(&a.timer) }

// Due starts a refresh, unless it comes so late that MaxHold is over, or the Lock was dropped.
func (a *autoRefresh) Due() {
	a.last = a.ctx.Err() != nil
	if a.fate.Load() == dropped {
		a.release()
		return
	}
	if wait := a.leaveToOthers(); wait > 0 || a.MaxHold > 0 && a.held() > a.MaxHold {
		a.again(max(wait, 0))
		return
	}
	if age := a.held(); int32(age/time.Hour) > a.hours {
		a.hours = int32(age / time.Hour)
		a.c.many("flightlock: a lock has been held for hours, and is refreshed until it is released",
			"flightlock: more locks have been held for hours", a.t.Key(), "age", age.Truncate(time.Second))
	}
	a.c.listen() // a holder that others may revoke; one that is quicker than this is not worth a subscription
	a.t.Refresh(max(min(a.c.opts.NodeTimeout, a.Interval/2), minInterval), a.refreshed)
}

// release releases a Lock that was dropped, in place of its holder.
func (a *autoRefresh) release() {
	a.c.many("flightlock: a lock was dropped without Release, and is released now: nothing refers to it any "+
		"more",
		"flightlock: more locks were dropped without Release", a.t.Key(), "age", a.held().Truncate(time.Second))
	a.stop()
	if a.around != nil && a.around.handles.Add(-1) > 0 {
		return // others hold it on
	}
	_ = a.t.ReleaseAsync() // after Close it is over
}

// leaveToOthers is how long a nested lock can leave its refresh to the locks around it, whose refreshes renew
// it too. It gives them more time than its Interval, at random, so that not all are due at the same time.
func (a *autoRefresh) leaveToOthers() time.Duration {
	if a.around == nil {
		return 0
	}
	interval, valid := a.Interval, a.c.quorum.Validity(a.t.TTL())
	age := valid - clock.Left(clock.Now(), a.t.Until()) // of the last refresh
	return interval + min(interval, valid-interval)*(20+jitter.N(30))/100 - age
}

// refreshed sets the timer again after a refresh, by its outcome.
func (a *autoRefresh) refreshed(err error) {
	if errors.Is(err, ErrNotHeld) {
		return
	}
	if err != nil {
		a.failed()
		return
	}
	a.refreshes++
	a.failures = 0
	switch {
	case a.last:
		a.t.Unrefreshed(a.ctxEnded())
	case int(a.refreshes) == a.MaxRefreshes: // which is 0 if there is no limit
		a.t.Unrefreshed(errors.New("RefreshPolicy.MaxRefreshes is used up"))
	default:
		a.again(a.Interval)
	}
}

// ctxEnded is the reason why a lock is not refreshed any more after the last refresh.
func (a *autoRefresh) ctxEnded() error {
	err, cause := a.ctx.Err(), context.Cause(a.ctx)
	if !matches(cause, err) {
		cause = fmt.Errorf("%w: %w", err, cause)
	}
	return fmt.Errorf("its ctx ended, and it was held for another ttl: %w", cause)
}

func (a *autoRefresh) failed() {
	if a.failures++; a.failures == 1 {
		a.failing = a.held()
	}
	if flight.TraitsOf(a.Retry)&flight.Quick == 0 {
		// This goroutine belongs to a node or a timer. After Close the lock is over.
		failure := int(a.failures)
		a.c.tasks.Go(func() { a.askStrategy(failure) })
		return
	}
	a.retryAfter(a.Retry.Next(int(a.failures)))
}

// askStrategy calls a strategy that is user code, on a goroutine that ends with it. No refresh is
// due meanwhile. A strategy that does not return, or panics, gives up.
func (a *autoRefresh) askStrategy(failure int) {
	returned := false
	defer func() {
		if v := recover(); v != nil {
			a.c.log(slog.LevelWarn, "flightlock: a lock is not refreshed any more: RefreshPolicy.Retry panicked",
				"key", a.t.Key(), "panic", fmt.Sprint(v))
			a.t.Unrefreshed(fmt.Errorf("RefreshPolicy.Retry panicked: %v", v))
		} else if !returned {
			a.t.Unrefreshed(errors.New("RefreshPolicy.Retry called runtime.Goexit"))
		}
	}()
	delay, again := a.Retry.Next(failure)
	returned = true
	a.retryAfter(delay, again)
}

// retryAfter sets the timer again after delay, or sooner if the lock would be over, or nearly, by then;
// unless refreshing ends here.
func (a *autoRefresh) retryAfter(delay time.Duration, again bool) {
	left := clock.Left(clock.Now(), a.t.Until())
	if most := flight.WithinOf(a.Retry); most > 0 && delay < math.MaxInt64 {
		rest := most - (a.held() - a.failing)
		delay, again = min(delay, rest), again && rest > 0
	}
	switch {
	case !again:
		a.t.Unrefreshed(fmt.Errorf("RefreshPolicy.Retry gave up after %d failures", a.failures))
	case delay < math.MaxInt64 && left >= 2*time.Millisecond:
		a.again(min(max(delay, time.Millisecond), a.lastRetry(left)))
	default:
		a.t.Unrefreshed(fmt.Errorf("after failure %d, the next retry by RefreshPolicy.Retry, in %v, would have "+
			"been too late",
			a.failures, delay))
	}
}

// lastRetry is the longest delay of a retry of a lock that has that much left: it leaves the nodes twice
// NodeTimeout, and a random time more, because locks that were won together end together; or half of what is
// left. So nodes that are back that long before the lock ends are asked again, whatever the strategy says.
func (a *autoRefresh) lastRetry(left time.Duration) time.Duration {
	nodeTimeout := a.c.opts.NodeTimeout
	return max(left-2*nodeTimeout-jitter.N(nodeTimeout), left/2)
}
