package flightlock

import (
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

// RefreshPolicy configures how AutoRefresh keeps a lock. The zero value is a good default.
type RefreshPolicy struct {
	// Interval is the time between refreshes. Default ttl/3, or half the validity where that is
	// less (only with a large DriftFactor). It must be at least 1ms, and below the ttl's validity
	// (ttl - ttl*DriftFactor - 2ms), or every refresh would come too late. An interval of a second
	// or more may end up to 5ms early, so that locks are refreshed together.
	Interval time.Duration
	// Timeout limits one refresh, counted from when it was sent to a node; at least 1ms. Default
	// min(NodeTimeout, Interval/2). A value above NodeTimeout or the ttl is reduced to that.
	Timeout time.Duration
	// Retry decides about retries after consecutive failures. Whatever it returns, no refresh is
	// sent after the validity deadline. A delay that would leave the nodes less than two to three
	// times NodeTimeout until then is cut to that, or to half of the time that is left, so that nodes
	// that are back are asked once more; but math.MaxInt64 means never. nil means
	// ExponentialBackoff(5ms, 250ms).
	Retry RetryStrategy
	// MaxRefreshes limits the number of refreshes; 0, or more than math.MaxInt32, means no limit. It
	// must not be negative.
	MaxRefreshes int
	// MaxHold is how long after AutoRefresh started the last refresh may be sent, so that a holder
	// that hangs does not keep the lock forever; 0 means no limit. It must not be negative.
	MaxHold time.Duration
}

// Refreshes that come more often do nothing else, and no node answers sooner. The shortest ttl is
// valid for 3ms with any DriftFactor, so its default Interval is 1.5ms.
const (
	minInterval = time.Millisecond
	minTimeout  = time.Millisecond
)

// validated is p for a lock of that ttl, with its defaults.
func (p RefreshPolicy) validated(c *Client, ttl time.Duration) (RefreshPolicy, error) {
	valid := c.quorum.Validity(ttl)
	setDefault(&p.Interval, c.refreshInterval(ttl))
	setDefault(&p.Timeout, max(min(c.opts.NodeTimeout, p.Interval/2), minTimeout))
	p.Retry = orDefault(p.Retry)
	switch {
	case p.Interval < minInterval || p.Interval >= valid:
		return p, invalid("RefreshPolicy.Interval", p.Interval,
			fmt.Sprintf("it must be from %v to below the validity of a ttl of %v, %v", minInterval, ttl, valid))
	case p.Timeout < minTimeout:
		return p, invalid("RefreshPolicy.Timeout", p.Timeout, fmt.Sprintf("it must be %v or more", minTimeout))
	case p.MaxRefreshes < 0:
		return p, invalid("RefreshPolicy.MaxRefreshes", p.MaxRefreshes, "it must not be below 0")
	case p.MaxHold < 0:
		return p, invalid("RefreshPolicy.MaxHold", p.MaxHold, "it must not be below 0; 0 means no limit")
	}
	return p, checkStrategy(p.Retry)
}

// refreshInterval is the default of RefreshPolicy.Interval.
func (c *Client) refreshInterval(ttl time.Duration) time.Duration {
	return min(ttl/3, c.quorum.Validity(ttl)/2)
}

// autoRefresh keeps one lock alive.
//
// It has neither a timer nor a goroutine of its own: the lock's flight calls Due when a refresh is
// due, and Due starts the refresh. The outcome of the refresh, or the retry strategy, sets the
// timer again. Refreshing stops, and the lock runs out, when the policy says so, the ctx of Do has
// ended, or the deadline leaves no time. Then the reason is recorded, before the lock can have run
// out, so that the loss reports it. The timer of a lock that is over does not fire; Release of a
// nested lock stops it. The flight checks the deadline before it calls Due, so that after a pause
// of the process nothing is sent for a lock that is over.
//
// A holder may forget to release: it returns early, or a panic is recovered. Refreshing would then
// keep the key forever. So for a Lock that is the user's, neither this nor the flight refers to the
// Lock, only to the Ticket, which AutoRefresh has detached from it. When nothing else refers to the
// Lock, the garbage collector has fate set to dropped, and the next Due releases. The Lock remains referred to
// by its contexts (see derived), and by the locks nested in it.
//
// The steps follow each other: AutoRefresh, Due, refreshed, Due and so on. Each starts the next
// under the flight's mutex, so the fields need no other.
type autoRefresh struct {
	timer    flight.Timer
	c        *Client
	t        *flight.Ticket
	around   *Lock // the outermost of the locks around this one; nil if it is not nested
	interval time.Duration
	timeout  time.Duration
	retry    RetryStrategy
	maxHold  time.Duration // 0: no limit
	left     int32         // of MaxRefreshes; below 0: no limit
	failures int32         // consecutive
	hours    int32         // for which the lock was kept when that was last logged
	fate     atomic.Uint32 // of the Lock: inUse, and then, for good, given or dropped
	do       *doing        // nil if not for Do
}

// The fates of a Lock with AutoRefresh.
const (
	inUse   = iota
	given   // Release was called
	dropped // nobody can call it any more
)

// AutoRefresh refreshes the lock as p says until it is released or lost, or p ends it. It starts
// refreshing and returns at once. A nested lock is refreshed only where the locks around it are
// not. Calling AutoRefresh twice on one lock is an ErrInvalid, as is a bad policy; a lock that is
// over is ErrNotHeld.
//
// With the zero policy there is no limit: Stats().OldestDo and the metrics show the age of the oldest
// lock that is refreshed, and the log names each hour the locks that were kept for an hour or more.
//
// A Lock that was dropped without Release, because its holder returned early or a panic was recovered,
// is released, with a warning, after the garbage collector has found that nothing refers to it: no
// variable that is still used, no ctx made by Context, no lock nested in it. A ctx made by Context
// whose Done channel was requested, as a child of the ctx does, counts until its parent ends, since
// somebody may wait for that channel. A holder that never releases and uses neither the Lock nor a
// ctx of it must keep it by other means: runtime.KeepAlive, or a deferred Release.
func (l *Lock) AutoRefresh(p RefreshPolicy) error {
	a := &autoRefresh{t: l.ticket().Detach()}
	if err := l.autoRefresh(p, a); err != nil {
		return err
	}
	runtime.AddCleanup(l, func(a *autoRefresh) { a.fate.CompareAndSwap(inUse, dropped) }, a)
	return nil
}

// autoRefresh is AutoRefresh with a, which is new and may be part of a doing. Its caller releases l, whatever
// happens.
func (l *Lock) autoRefresh(p RefreshPolicy, a *autoRefresh) error {
	p, err := p.validated(l.c, l.ttl())
	if err != nil {
		return err
	}
	if err := l.Err(); err != nil {
		return lockEnded(l.ticket().Key(), err)
	}
	a.c, a.around = l.c, l.around()
	a.interval, a.timeout, a.retry, a.maxHold, a.left = p.Interval, p.Timeout, p.Retry, p.MaxHold, -1
	if a.t == nil {
		a.t = l.ticket()
	}
	if p.MaxRefreshes > 0 && p.MaxRefreshes <= math.MaxInt32 { // that many take three weeks, one per minInterval
		a.left = int32(p.MaxRefreshes)
	}
	if !l.auto.CompareAndSwap(nil, a) {
		return fmt.Errorf("flightlock: %w: AutoRefresh was called before on this lock %q", ErrInvalid, l.Key())
	}
	// A lock that was handed over may have less than its ttl left.
	a.again(min(p.Interval, clock.Left(clock.Now(), l.Until())/2))
	if err := l.Err(); err != nil { // Release may have been called before it could find a
		a.stop()
		return lockEnded(l.ticket().Key(), err)
	}
	return nil
}

// again sets the timer, unless the lock has ended, or MaxHold will have passed by then.
func (a *autoRefresh) again(wait time.Duration) {
	if a.maxHold > 0 && clock.Add(a.held(), wait) > a.maxHold {
		a.unrefreshed(fmt.Errorf("RefreshPolicy.MaxHold, %v, is over", a.maxHold))
		return
	}
	a.t.SetTimer(&a.timer, a, wait)
}

// held is how long a has kept the lock.
func (a *autoRefresh) held() time.Duration { return a.t.TimerAge(&a.timer) }

// unrefreshed records why the lock is not refreshed any more.
func (a *autoRefresh) unrefreshed(why error) { a.t.Unrefreshed(why) }

func (a *autoRefresh) stop() { a.t.StopTimer(&a.timer) }

// Due starts a refresh, unless it comes so late that MaxHold is over, or the Lock was dropped.
func (a *autoRefresh) Due() {
	if a.do != nil {
		a.do.last = a.do.ctx.Err() != nil
	}
	if a.fate.Load() == dropped {
		a.release()
		return
	}
	if wait := a.leaveToOthers(); wait > 0 || a.maxHold > 0 && a.held() > a.maxHold {
		a.again(max(wait, 0))
		return
	}
	if age := a.held(); age/time.Hour > time.Duration(a.hours) {
		a.hours = int32(age / time.Hour)
		a.c.longHeld.of(a.t.Key(), "age", age.Truncate(time.Second))
	}
	a.t.Refresh(a.timeout, a.refreshed)
}

// release releases a Lock that was dropped, in place of its holder.
func (a *autoRefresh) release() {
	a.c.dropped.of(a.t.Key(), "age", a.held().Truncate(time.Second))
	a.stop()
	if a.around != nil && !a.around.dropHandle() {
		return // others hold it on
	}
	a.c.tasks.Go(func() { _ = a.t.Release() }) // after Close it is over
}

// leaveToOthers is how long a nested lock can leave its refresh to the locks around it, whose refreshes
// renew it too. It gives them more time than its Interval, at random, so that not all are due at
// the same time.
func (a *autoRefresh) leaveToOthers() time.Duration {
	if a.around == nil {
		return 0
	}
	interval, valid := a.interval, a.c.quorum.Validity(a.t.TTL())
	age := valid - clock.Left(clock.Now(), a.t.Until()) // of the last refresh
	return interval + min(interval, valid-interval)*(20+jitter.N(30))/100 - age
}

// refreshed sets the timer again after a refresh, by its outcome.
func (a *autoRefresh) refreshed(err error) {
	switch {
	case errors.Is(err, ErrNotHeld):
	case err == nil:
		a.renewed()
	default:
		a.failed()
	}
}

var errMaxRefreshes = errors.New("RefreshPolicy.MaxRefreshes is used up")

func (a *autoRefresh) renewed() {
	a.left = max(a.left-1, -1)
	a.failures = 0
	switch {
	case a.do != nil && a.do.last:
		a.unrefreshed(a.do.stopped())
	case a.left == 0:
		a.unrefreshed(errMaxRefreshes)
	default:
		a.again(a.interval)
	}
}

func (a *autoRefresh) failed() {
	a.failures++
	if flight.TraitsOf(a.retry)&flight.Quick == 0 {
		// This goroutine belongs to a node or a timer. After Close the lock is over.
		failure := int(a.failures)
		a.c.tasks.Go(func() { a.askStrategy(failure) })
		return
	}
	a.retryAfter(a.retry.Next(int(a.failures)))
}

// askStrategy calls a strategy that is user code, on a goroutine that ends with it. No refresh is
// due meanwhile. A strategy that does not return, or panics, gives up.
func (a *autoRefresh) askStrategy(failure int) {
	returned := false
	defer func() {
		if v := recover(); v == nil && !returned {
			a.unrefreshed(errors.New("RefreshPolicy.Retry called runtime.Goexit"))
		} else if v != nil {
			a.c.log(slog.LevelWarn, "flightlock: a lock is not refreshed any more: RefreshPolicy.Retry panicked", "key",
				a.t.Key(), "panic", fmt.Sprint(v))
			a.unrefreshed(fmt.Errorf("RefreshPolicy.Retry panicked: %v", v))
		}
	}()
	delay, again := a.retry.Next(failure)
	returned = true
	a.retryAfter(delay, again)
}

// retryAfter sets the timer again after delay, or sooner if the lock would be over, or nearly, by then; unless
// refreshing ends here.
func (a *autoRefresh) retryAfter(delay time.Duration, again bool) {
	left := clock.Left(clock.Now(), a.t.Until())
	switch {
	case !again:
		a.unrefreshed(fmt.Errorf("RefreshPolicy.Retry gave up after %d failures", a.failures))
	case delay < math.MaxInt64 && left >= 2*time.Millisecond:
		a.again(min(max(delay, time.Millisecond), a.lastRetry(left)))
	default:
		a.unrefreshed(fmt.Errorf("after failure %d, the next retry by RefreshPolicy.Retry, in %v, would have been too late",
			a.failures, delay))
	}
}

// lastRetry is the longest delay of a retry of a lock that has that much left: it leaves the nodes twice NodeTimeout,
// and a random time more, because locks that were won together end together; or half of what is left. So nodes that
// are back that long before the lock ends are asked again, whatever the strategy says.
func (a *autoRefresh) lastRetry(left time.Duration) time.Duration {
	nodeTimeout := a.c.opts.NodeTimeout
	return max(left-2*nodeTimeout-jitter.N(nodeTimeout), left/2)
}
