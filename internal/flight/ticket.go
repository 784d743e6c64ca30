package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/list"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Ticket is one caller's place in a flight: first in the queue, then holding the lease.
//
//	waiting -> holding -> released
//	   |          +-----> lost (Until passed, or the lease was lost)
//	   +-> left (ctx ended, strategy gave up, refused)
//
// Every transition happens under the flight's mu, so a Ticket that is over can do nothing
// to its successor: whatever it asks for, the flight looks first whether it is current.
//
// A Ticket is part of what its caller has, so while it holds the flight keeps that reachable. Detach
// ends this: another Ticket holds in its place, and whatever is asked of the first is asked of that one.
type Ticket struct {
	f   *flight // set before the Ticket is shared
	ttl time.Duration

	waiter *waiter // while its caller waits; nil after that

	// guarded by f.mu
	state     state
	kind      WaitKind // what its caller has waited for; does not change once the wait is over
	looks     bool     // it is of AcquireUnless: others may wait for the work that it does
	relied    bool     // it was to be refreshed, or somebody listens for its end
	linger    uint32   // how long its lease may be retained, in milliseconds; does not change
	fence     int64
	lease     Lease
	until     time.Time     // when this Ticket is over if nothing renews it
	extension time.Duration // how far renewals for the flight's own sake may move until
	end       *end          // nil for a Ticket whose end nobody observes, and that was not lost

	timers *Timer // first of those that are set; nil once it is over
}

// SetWatch has w observe t, which has not been passed to Acquire yet.
func (t *Ticket) SetWatch(w *Watch) { t.end = &end{watch: w} }

// watchLocked is what observes t, usually nil.
func (t *Ticket) watchLocked() *Watch {
	if t.end == nil {
		return nil
	}
	return t.end.watch
}

// Kind is what t's caller has waited for. Its wait is over.
func (t *Ticket) Kind() WaitKind { return t.kind }

// ListLinks are the links of t in the queue, while its caller waits.
func (t *Ticket) ListLinks() *list.Links[Ticket] { return &t.waiter.links }

// end is what there is to say about the end of a Ticket.
type end struct {
	why     error                     // lost, or Until has passed: why
	stopped error                     // why its refreshing has stopped, if it has
	failed  error                     // the outcome of the last refresh, if it failed
	onEnd   map[*func(error)]struct{} // what OnEnd was given
	holder  *Ticket                   // the Ticket that holds since Detach; nil: none was called
	watch   *Watch                    // set before the Ticket is shared
}

type state uint8

const (
	waiting state = iota
	holding
	released
	lost
	left
)

// lock locks the flight and returns the Ticket that holds for t: t itself, unless it was detached.
func (t *Ticket) lock() *Ticket {
	t.f.mu.Lock()
	if t.end != nil && t.end.holder != nil {
		return t.end.holder
	}
	return t
}

// Detach has a Ticket of its own memory hold in place of t, and returns it: from then on the flight does not
// reach t. If t was detached before, or is over, nothing changes.
func (t *Ticket) Detach() *Ticket {
	t = t.lock()
	f := t.f
	defer f.mu.Unlock()
	if t.state != holding || t.endOfLocked().holder != nil {
		return t
	}
	h := new(Ticket)
	*h = *t
	t.end.holder, f.cur = h, h
	t.timers = nil
	return h
}

// Fence is the fencing token.
func (t *Ticket) Fence() int64 { return t.fence } // does not change once held

// Owner is the whole stored value of the lease that t was given.
func (t *Ticket) Owner() string { return t.lease.Owner() }

// Until is when t is over if nothing renews it.
func (t *Ticket) Until() time.Time {
	t = t.lock()
	defer t.f.mu.Unlock()
	return t.until
}

// Err is nil while t holds, by the clock. It does not wait for a timer. Once it is not nil it
// stays so.
func (t *Ticket) Err() error {
	t = t.lock()
	defer t.f.mu.Unlock()
	now := clock.Now()
	if t.state == holding && clock.Passed(now, t.until) {
		t.pastLocked(now)
	}
	return t.errLocked(now)
}

// pastLocked makes Until, which has passed at now, have passed for good, and has the flight end t
// at once. If the wall clock alone says that it has passed, it may be set back, and a refresh that
// is in progress would then move Until: what Err has said would not be true any more. It does not
// end t by itself, because that calls those who listen, and Err may be called under their locks.
func (t *Ticket) pastLocked(now time.Time) {
	t.until = now.Add(clock.Left(now, t.until))
	t.f.armLocked(now)
}

func (t *Ticket) errLocked(now time.Time) error {
	switch {
	case t.state == lost:
		return t.end.why
	case t.state != holding:
		return t.f.g.cfg.Errors.Released()
	case clock.Passed(now, t.until):
		return t.expiredLocked()
	}
	return nil
}

// Unrefreshed says why no refresh follows: if t runs out, that is the reason. A refresh that the
// holder makes all the same takes it back.
func (t *Ticket) Unrefreshed(why error) {
	t = t.lock()
	defer t.f.mu.Unlock()
	if t.relied = true; t.state == holding {
		t.endOfLocked().stopped = why
	}
}

// expiredLocked is why t is over when its Until has passed: the same error each time, once somebody has
// asked.
//
// One that ends with the span for which its lease was granted, and not by its ttl, was to be refreshed: by
// its flight.
func (t *Ticket) expiredLocked() error {
	e := t.end
	if t.extension > 0 && t.f.spanOfLeaseLocked() > 0 {
		t.relied = true
	}
	if e == nil || !t.relied {
		return t.f.expired()
	}
	if e.why == nil {
		e.why = t.f.g.cfg.Errors.Expired(t.f.key, e.stopped, e.failed)
	}
	return e.why
}

// expired is why a Ticket is over of which no more is known than that its Until has passed.
func (f *flight) expired() error { return f.g.cfg.Errors.Expired(f.key, nil, nil) }

// OnEnd has fn called when t is released (with nil) or lost (with the reason). If that
// has happened already, fn is not registered and over is true. fn must not block.
func (t *Ticket) OnEnd(fn func(why error)) (cancel func(), why error, over bool) {
	t = t.lock()
	defer t.f.mu.Unlock()
	t.relied = t.relied || t.state == holding
	return t.onEndLocked(fn)
}

// AtEnd has fn called when t is released or lost, as OnEnd does, and is no sign that somebody relies on t. It
// reports false if that has happened already.
func (t *Ticket) AtEnd(fn func()) bool {
	t = t.lock()
	defer t.f.mu.Unlock()
	_, _, over := t.onEndLocked(func(error) { fn() })
	return !over
}

func (t *Ticket) onEndLocked(fn func(why error)) (cancel func(), why error, over bool) {
	if t.state == lost {
		return nil, t.end.why, true
	}
	if t.state != holding {
		return nil, nil, true
	}
	f, e := t.f, t.endOfLocked()
	if e.onEnd == nil {
		e.onEnd = map[*func(error)]struct{}{}
	}
	at := &fn
	e.onEnd[at] = struct{}{}
	return func() {
		f.mu.Lock()
		delete(e.onEnd, at)
		f.mu.Unlock()
	}, nil, false
}

// endOfLocked is t.end, made if there was none.
func (t *Ticket) endOfLocked() *end {
	if t.end == nil {
		t.end = &end{}
	}
	return t.end
}

// Release ends t: the lease goes to the next waiter, or back to the nodes. It returns nil
// when either happened, and is bounded by NodeTimeout.
//
// If t is of AcquireUnless, others that wait in it are notified, for its work may be what they wait
// for: those of this process at once, those of others when the lease goes back to the nodes.
func (t *Ticket) Release() error { return t.release(false, true) }

// ReleaseAsync is Release that does not wait for the nodes: the error is nil, or why t was over before. A
// loss that only the release finds is counted and reported when the nodes have answered.
func (t *Ticket) ReleaseAsync() error { return t.release(false, false) }

// ReleaseFailed is ReleaseAsync of a Ticket whose work has failed: if the lease goes back to the nodes,
// the other processes that wait in AcquireUnless are notified, and end with Errors.FailedElsewhere.
// To a waiter of this process the lease is handed as ever.
func (t *Ticket) ReleaseFailed() error { return t.release(true, false) }

func (t *Ticket) release(failed, waits bool) error {
	t = t.lock()
	f, now := t.f, clock.Now()
	if err := t.endedLocked(now); err != nil {
		f.unlock()
		return err
	}
	f.endLocked(t, released, nil)
	f.worked = f.worked || t.looks && !failed
	if !f.handOverOrReleaseLocked(now, t.lingers()) {
		watch := t.watchLocked()
		f.unlock()
		watch.ended(nil, false)
		return nil
	}
	var r releaseOutcome
	if waits {
		r = f.g.releases.Get().(releaseOutcome)
		f.deferred.done = r
	} else {
		f.deferred.done = (*unwaited)(t)
	}
	if failed {
		f.deferred.news = quorum.NewsFailed
	} else if f.rejoinsLocked(t) {
		f.deferred.rejoins = t.ttl
	}
	f.unlockInline(waits)
	if !waits {
		return nil
	}
	why := r.wait()
	f.g.releases.Put(r)
	t.releasedWith(why)
	if why == nil {
		return nil
	}
	return f.failed(why)
}

// releasedWith takes the outcome of t's release. A node that has not answered has a debt, which is no loss.
func (t *Ticket) releasedWith(why *quorum.Failure) {
	if why != nil && why.Reason == quorum.NotHeld {
		t.foundLost(why)
		return
	}
	t.f.mu.Lock()
	watch := t.watchLocked()
	t.f.mu.Unlock()
	watch.ended(nil, false)
}

// unwaited is a Ticket whose release nobody waits for: it takes the outcome itself. (Not by a func, which
// would need an allocation for each release of a hot path.)
type unwaited Ticket

// Released is that outcome.
func (t *unwaited) Released(why *quorum.Failure) { (*Ticket)(t).releasedWith(why) }

// ended passes on that the Ticket has ended.
func (w *Watch) ended(why error, ranOut bool) {
	if w != nil && w.Ended != nil {
		w.Ended(why, ranOut)
	}
}

// foundLost counts and reports a loss that nobody knew of before t's release: most locks are released before
// their first refresh. If Until has passed meanwhile, the key may have run out on its way.
func (t *Ticket) foundLost(why *quorum.Failure) {
	f := t.f
	f.mu.Lock()
	defer f.unlock()
	if clock.Passed(clock.Now(), t.until) {
		f.countLossLocked(t, f.expired())
		return
	}
	f.countLossLocked(t, f.g.cfg.Errors.Lost(f.key, why))
}

// endedLocked is the error for using t, which is over, or nil. If its Until has passed, the flight ends it.
func (t *Ticket) endedLocked(now time.Time) error {
	if t.state == holding && !clock.Passed(now, t.until) {
		return nil
	}
	t.f.overdueLocked(now)
	return t.f.g.cfg.Errors.Ended(t.f.key, t.errLocked(now))
}

// moveLocked sets when t is over, and how far renewals for the flight's own sake may move
// that.
func (t *Ticket) moveLocked(until, limit time.Time) { t.until, t.extension = until, limit.Sub(until) }

// limitLocked is how far they may.
func (t *Ticket) limitLocked() time.Time { return t.until.Add(t.extension) }

// Granted reports whether t's lease was granted by another's release, and has not been refreshed since.
func (t *Ticket) Granted() bool {
	t = t.lock()
	defer t.f.mu.Unlock()
	return t.state == holding && t.f.spanOfLeaseLocked() > 0
}

// TTL is the ttl with which t was requested, or a longer one: see Lengthen.
func (t *Ticket) TTL() time.Duration {
	ttl, _ := t.Lengthen(0)
	return ttl
}

// Lengthen has t's refreshes from now on be for ttl, if that is longer than t's own. It returns t's ttl, and
// Until, which does not change before a refresh.
func (t *Ticket) Lengthen(ttl time.Duration) (longest time.Duration, until time.Time) {
	t = t.lock()
	defer t.f.mu.Unlock()
	t.ttl = max(t.ttl, ttl)
	return t.ttl, t.until
}

// Refresh gives t its full ttl again and calls done once, with nil or the reason why not;
// the error says too whether t is over.
func (t *Ticket) Refresh(timeout time.Duration, done func(error)) {
	t = t.lock()
	f, now := t.f, clock.Now()
	if err := t.endedLocked(now); err != nil {
		f.unlock()
		done(err)
		return
	}
	t.relied = true
	last := &f.refreshRequests
	for *last != nil {
		last = &(*last).next
	}
	*last = &refreshRequest{timeout: timeout, done: done}
	f.refreshLocked()
	f.unlock()
}

// Key is the lock key.
func (t *Ticket) Key() string { return t.f.key }
