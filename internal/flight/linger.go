package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// How a flight that nobody holds or waits in keeps what it has for a moment, for its next caller:
//
//   - its lease, for the time of Linger: see retention;
//   - an offer that its last release has made, and what that was granted: see rejoin.go;
//   - its subscription, if others wait for the key: its next caller will meet them, and be registered by its
//     first attempt. Until then the flight wants nothing.

// subscribedFor is how long a flight stays subscribed.
const subscribedFor = clock.Instant(time.Second)

// lingerLocked has the flight, which nobody holds or waits in, keep what it has until then.
func (f *flight) lingerLocked(until clock.Instant) {
	f.phase, f.lingersUntil = lingering, until
	f.armAtLocked(until)
}

// lapseLocked ends lingering if it is time, and else has the alarm come again.
func (f *flight) lapseLocked(now time.Time) {
	if f.g.at(now) >= f.lingersUntil || f.lease != nil &&
		clock.Left(now, f.until) < f.enoughLocked(f.attemptTTL) {
		f.nobodyCameLocked()
		return
	}
	f.armAtLocked(f.lingersUntil)
}

// nobodyCameLocked ends lingering: nobody has come for what the flight has.
func (f *flight) nobodyCameLocked() {
	c := f.contention
	switch {
	case f.lease != nil:
		f.releaseLocked()
	case c.pendingGrant != nil:
		o := c.pendingGrant
		c.pendingGrant, c.returns = nil, rejoinMissed
		f.returnAndDieLocked(o.lease)
	default:
		if c.offer != nil {
			c.returns = rejoinMissed
		} else {
			c.othersWait = false // as far as is known by now
		}
		f.dieLocked()
	}
}

// staysSubscribedLocked has the flight, which would die, stay subscribed if others wait for the key, and
// reports whether it does.
func (f *flight) staysSubscribedLocked() bool {
	c := f.contention
	if c == nil || !c.othersWait || !c.subscribed || f.g.closed.Load() {
		return false
	}
	f.waitNoMoreLocked()
	c.leaving = true
	f.deferLocked(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		c.leaving = false
	})
	f.backoff = nil
	f.lingerLocked(clock.InstantNow(f.g.epoch) + subscribedFor)
	return true
}

// cameBackLocked is called when t comes to the flight, which lingers. It reports false if t is to make an
// attempt, as the first caller of a flight does: there is no more than the subscription; or t's strategy may
// give up at the first failure, so there has to be one; or there was an event.
func (f *flight) cameBackLocked(t *Ticket) bool {
	c := f.contention
	switch {
	case f.lease != nil || c.pendingGrant != nil:
	case c.offer == nil:
		f.phase = idle
		f.amongRivalsAgainLocked(t.waiter.isEndless() && !c.leaving)
		return false
	case f.retry || t.mayGiveUpSoon():
		f.phase = idle
		return false
	}
	t.f = f
	f.pushLocked(t)
	switch {
	case f.lease != nil:
		f.reuseLocked(t)
	case c.pendingGrant != nil:
		f.phase = idle
		f.takeKeptLocked()
	default:
		f.phase = idle
		f.awaitOfferLocked()
	}
	return true
}

// amongRivalsAgainLocked has the flight wait among its rivals again, without an attempt that has shown that
// there are some; but not for a caller that may give up at once, which wants no turn, nor before its last
// want is taken back.
func (f *flight) amongRivalsAgainLocked(endless bool) {
	c, now := f.contention, clock.InstantNow(f.g.epoch)
	c.returns = c.returns.after(now-(f.lingersUntil-subscribedFor), c.waited())
	f.backoff = nil
	if endless {
		c.othersWait = false // it will be notified if they do
		f.waitsAgainLocked(now)
		return
	}
	f.endContentionLocked()
}
