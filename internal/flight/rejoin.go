package flight

import (
	"errors"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// How a flight waits for the key again before its next caller comes.
//
// Where processes with a few callers each pass a key around, a caller that has released it often wants it
// again at once, long before its turn comes. Its next attempt would do no more than to register an offer. The
// release can do that as well (Nodes.Rejoin): that saves the attempt, its place in the queue is certain
// before the next holder releases the key, and so no node finds the key free while others do not, which
// splits votes.
//
// The flight does not die then, but expects its next caller. If the key is granted before that one has come,
// the lease is kept for it for a moment, and is then released. That is what a mistake costs others, so a
// flight rejoins only if its callers have come back soon before (returns), and not for long after a mistake.
// Nothing else is new: an offer that a release has brought is as any other, made by a poll that was sent with
// the release.

// returns is how often in a row the key's callers have come back before the key would have been granted
// again, up to rejoinAfter. It is negative after a mistake.
type returns int8

const (
	// rejoinAfter is how many callers in a row must have come back soon.
	rejoinAfter returns = 2

	// rejoinMissed is what a mistake is worth.
	rejoinMissed returns = -8

	// maxKept is how long a lease that was granted before the caller came is kept for it.
	maxKept = time.Millisecond

	// maxExpected is how long a caller is expected, unless a poll would have had to bring the offer again before
	// that. Then it is withdrawn. It is longer than most waits for the key: an alarm that comes before the key
	// is granted wakes a process that has nothing to do, also if the caller came back at once.
	maxExpected = grantSpan * 10 / pollsPerSpan
)

// after is r when a caller comes at such a time after the release, that had waited for so long before.
func (r returns) after(since, waited clock.Instant) returns {
	if since <= min(max(waited, clock.Instant(maxKept)), clock.Instant(maxExpected)) {
		return min(r+1, rejoinAfter)
	}
	return min(r, 0)
}

// rejoinsLocked reports whether the release of the lease, which t has held, is to have the flight wait for
// the key again.
func (f *flight) rejoinsLocked(t *Ticket) bool {
	c := f.contention
	return c != nil && f.n == 0 && c.returns == rejoinAfter && c.subscribed && c.othersWait && !f.worked &&
		t.ttl >= leastSpan && f.g.cfg.Slice >= 0 && !f.g.closed.Load()
}

// rejoin releases l, and has the flight wait for the key again, for that ttl. It reports false, and has done
// nothing, if the nodes grant nothing.
func (f *flight) rejoin(l Lease, ttl time.Duration, inline bool, done quorum.Releaser) bool {
	c := f.contention // in the phase releasing nobody changes this
	o := &offered{f: f, ttl: ttl, releases: done}
	if o.lease = f.g.cfg.Nodes.Offer(f.key, ttl, loneBlock, c.contender, o); o.lease == nil {
		return false
	}
	f.mu.Lock()
	now := clock.InstantNow(f.g.epoch)
	f.waitsAgainLocked(now)
	c.offer, c.registered = o, true
	var span time.Duration
	span, c.poll = f.spanLocked(now, ttl)
	f.lingersUntil = clock.Add(now, clock.Instant(min(maxExpected, c.poll)))
	f.mu.Unlock()

	f.g.cfg.Nodes.Rejoin(l, o.lease, span, inline, o)

	f.mu.Lock()
	defer f.unlock()
	switch {
	case c.pendingGrant != nil && f.n > 0:
		f.phase = idle
		f.takeKeptLocked()
	case c.pendingGrant == nil && f.retry: // there was an event, or the nodes do not know of the offer
		f.attemptOrDieLocked()
	case f.n == 0 && f.g.closed.Load():
		f.nobodyCameLocked()
	case f.n > 0 && f.head().mayGiveUpSoon():
		f.attemptOrDieLocked()
	case f.n > 0:
		f.phase = idle
		f.awaitOfferLocked()
		f.wakeDriverLocked()
	default:
		f.lingerLocked(f.lingersUntil)
	}
	return true
}

// Released takes the outcome of the release that has brought o.
func (o *offered) Released(failure *quorum.Failure) {
	if failure != nil || !o.lease.Rejoined() {
		o.f.notRejoined(o, failure == nil)
	}
	o.releases.Released(failure)
}

// notRejoined is called when the nodes do not know of o: nobody else waits, or, unless alone is true, the
// release has failed.
func (f *flight) notRejoined(o *offered, alone bool) {
	f.mu.Lock()
	defer f.unlock()
	c := f.contention
	if c == nil || c.offer != o {
		return
	}
	if alone && f.n > 0 {
		c.othersWait = false
	}
	switch f.phase {
	case releasing:
		f.retry = true
	case lingering, idle:
		f.attemptOrDieLocked()
	}
}

// attemptOrDieLocked has the callers that have come contend; without any, the flight dies.
func (f *flight) attemptOrDieLocked() {
	f.phase = idle
	if f.n == 0 {
		f.dieLocked()
		return
	}
	f.attemptNowLocked()
}

// rejoinEndedLocked takes the outcome of o, for which nobody waits yet.
func (f *flight) rejoinEndedLocked(o *offered, g quorum.Grant, failure *quorum.Failure) {
	c := f.contention
	switch {
	case failure == nil:
		c.pendingGrant, o.grant = o, g
		f.lingersUntil = clock.Add(clock.InstantNow(f.g.epoch), clock.Instant(maxKept))
		if f.phase == lingering {
			f.armAtLocked(f.lingersUntil)
		}
	case f.phase == lingering:
		f.attemptOrDieLocked()
	default:
		f.retry = true
	}
}

// mayGiveUpSoon reports whether t, which waits, may give up at the first failure of an attempt.
func (t *Ticket) mayGiveUpSoon() bool { return !t.waiter.isEndless() || t.failsFast() }

// takeKeptLocked takes the lease that was granted before the caller came, who waits by now.
func (f *flight) takeKeptLocked() {
	o := f.contention.pendingGrant
	f.contention.pendingGrant = nil
	f.takeLocked(o, o.grant)
}

// awaitOfferLocked has the flight wait for its offer to be granted, as after a poll that has found another
// holder when the release was sent.
func (f *flight) awaitOfferLocked() {
	b := f.ensureBackoffLocked()
	b.last = passedOn
	f.attempted = f.contention.since
	b.failedAt = f.g.epoch.Add(time.Duration(f.attempted))
	f.nextAttempt = clock.Now().Add(maxPoll)
}

// passedOn is what callers have met that wait after such a release.
var passedOn = &quorum.Failure{Op: "acquire", Reason: quorum.Taken, Owned: true,
	Err: errors.New("this process has released it to others that waited for it")}
