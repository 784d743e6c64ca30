package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// How a flight is granted the key by a release elsewhere, without an attempt of its own.

// offered is the offer of a flight that waits among its rivals: a lease that the release of one of them may
// grant to it. The flight makes it with the first attempt after the nodes have confirmed its subscription;
// each attempt brings it to the nodes again. While it is made, the flight polls more often, since what a
// release grants is valid from the last poll only, and for a short time.
//
// Or a release of the flight's own brings it, before the next caller comes: see rejoin.go.
//
//	made --q nodes have granted it--> the flight's lease
//	  | \--votes were split----------> over; the next attempt makes another
//	  \--an attempt won, or nobody waits any more--> withdrawn: its outcome means nothing
//
// An attempt may be in progress when the offer is granted. Then the attempt is canceled, and the lease
// is taken when that has ended: so there is never a lease and an attempt at a time.
type offered struct {
	f     *flight
	ttl   time.Duration
	lease Lease
	grant quorum.Grant // if it was granted while an attempt was in progress, or nobody waited. Guarded by f.mu

	releases quorum.Releaser // gets the outcome of the release that has brought the offer; nil: none has
}

const (
	// grantSpan is for how long a release grants the key. A contender whose process is stopped costs the others
	// that much, once.
	grantSpan = 450 * time.Millisecond

	// leastSpan is the shortest ttl for which an offer is made: for a shorter one, the polls would cost more
	// than the grant is worth.
	leastSpan = 100 * time.Millisecond

	// splitPause is how long a flight waits at least after an attempt that had a vote and has met several
	// holders: votes are split, which ends by the attempts of those that had some. One without a vote leaves
	// them to it, and only polls: if all came back that soon, the attempts of 64 processes would keep each other
	// waiting. (Or the key is passed on just now, which ends by a message.)
	splitPause = 10 * time.Millisecond

	// pollsPerSpan is how many polls there are in the time of a span, in tenths: 2.5, so that a grant, which is
	// valid from the last poll on, has more than half of its span left.
	pollsPerSpan = 25

	// pollsPerWait is how many polls there are at least in the time that a flight has waited, until they come
	// once per safetyPoll. A grant is then often refreshed before it is given, which takes a round trip.
	pollsPerWait = 25
)

// spanLocked is how long a release is to grant the key, and how often the flight polls for that.
func (f *flight) spanLocked(now clock.Instant, ttl time.Duration) (span, poll time.Duration) {
	waited := time.Duration(now - f.contention.since)
	span = min(grantSpan, ttl)
	return span, max(span*10/pollsPerSpan, min(waited/pollsPerWait, f.g.safetyPollAfter(waited)),
		f.g.pollShares())
}

// makeOffer has the attempt l, which is about to be made, bring an offer if the flight waits among rivals:
// not for callers of AcquireUnless alone, who hope that they need no lock, and not for a ttl so short that it
// had to poll all the time. It returns for how long a grant that comes during the attempt is good at least,
// even one of an offer that an earlier attempt has made, with another ttl; 0: there is no offer.
func (f *flight) makeOffer(l Lease) (least time.Duration) {
	f.mu.Lock()
	c, ttl := f.contention, f.attemptTTL
	if c == nil || !c.subscribed || f.phase != acquiring || c.pendingGrant != nil ||
		f.n == f.lookers || ttl < leastSpan {
		defer f.mu.Unlock()
		if c == nil || c.offer == nil {
			return 0
		}
		return min(c.offer.ttl, grantSpan)
	}
	o, tokens := c.offer, f.blockLocked()
	waits := f.waitsItsTurnLocked()
	var span time.Duration
	span, c.poll = f.spanLocked(clock.InstantNow(f.g.epoch), ttl)
	f.mu.Unlock()
	if o == nil {
		o = &offered{f: f, ttl: ttl}
		if o.lease = f.g.cfg.Nodes.Offer(f.key, ttl, tokens, c.contender, o); o.lease == nil {
			return 0
		}
		f.mu.Lock()
		c.offer = o // the flight does not die while an attempt is in progress
		f.mu.Unlock()
	}
	f.g.cfg.Nodes.Carry(l, o.lease, span, waits)
	return min(o.ttl, grantSpan)
}

// waitsItsTurnLocked reports whether the attempt that is about to be made leaves a free key to those who wait
// longer: not if the last one has, because some of those may be gone, nor if it may be its caller's only one.
func (f *flight) waitsItsTurnLocked() bool {
	if f.backoff == nil {
		return f.head().waiter.isEndless()
	}
	return !f.lastLocked().Declined
}

// Acquired takes the outcome of an offer.
func (o *offered) Acquired(g quorum.Grant, failure *quorum.Failure) {
	f := o.f
	f.mu.Lock()
	defer f.unlock()
	c := f.contention
	if c == nil || c.offer != o { // withdrawn
		if failure == nil {
			f.returnLocked(o.lease)
		}
		return
	}
	c.offer = nil
	switch {
	case failure == nil && f.phase == idle: // somebody waits, else the flight would be dead
		f.takeLocked(o, g)
	case failure == nil && f.phase == acquiring:
		c.pendingGrant, o.grant = o, g
		f.deferLocked(f.attempt.Cancel)
	case f.phase == releasing || f.phase == lingering:
		f.rejoinEndedLocked(o, g, failure)
	case failure == nil:
		f.returnLocked(o.lease)
	case f.phase == idle:
		f.attemptNowLocked()
	default:
		f.retry = true
	}
}

// takeLocked takes the lease that was granted to o.
func (f *flight) takeLocked(o *offered, g quorum.Grant) {
	f.shard().counts.grants.Add(1)
	f.contention.othersWait = true
	f.attemptTTL = o.ttl
	f.wonLocked(o.lease, g)
}

// pendingGrantLocked is the offer that was granted during the attempt that is in progress; nil: none
// was.
func (f *flight) pendingGrantLocked() *offered {
	if f.contention == nil {
		return nil
	}
	return f.contention.pendingGrant
}

// attemptGaveWayLocked is called when the attempt has ended during which o was granted.
func (f *flight) attemptGaveWayLocked(o *offered, attempt Lease, failure *quorum.Failure) {
	f.contention.pendingGrant = nil
	if failure == nil {
		f.returnLocked(attempt)
	}
	if f.n > 0 {
		f.takeLocked(o, o.grant)
		return
	}
	f.returnAndDieLocked(o.lease)
}

// returnAndDieLocked releases l, which nobody has come for. The flight dies when that was sent: a new one
// would find the key held by this process.
func (f *flight) returnAndDieLocked(l Lease) {
	f.lease, f.worked = l, false
	f.releaseLocked()
}

// returnLocked releases a lease that the flight does not need.
func (f *flight) returnLocked(l Lease) {
	f.deferLocked(func() { l.Release(false, "", quorum.NoNews, ignored{}) })
}

// withdrawLocked ends the offer, if there is one: an attempt has won.
func (f *flight) withdrawLocked() {
	if c := f.contention; c != nil && c.offer != nil {
		o := c.offer
		c.offer = nil
		f.deferLocked(o.lease.Forget)
	}
}

// Completing a lease.

// shortLeaseLocked is called when a lease was granted for span, 0 for the full ttl. It is refreshed in time,
// if it is not released before that.
func (f *flight) shortLeaseLocked(now time.Time, span time.Duration) {
	c := f.contention
	if c == nil {
		return
	}
	c.span, c.completes = span, 0
	if span > 0 {
		c.completes = f.g.at(now.Add(clock.Left(now, f.until) / 4))
		f.renewAfter = c.completes
	}
}

// completeLocked refreshes a lease that was granted for a span, when it is time; again and again, if the
// nodes do not answer.
func (f *flight) completeLocked(now time.Time) {
	c := f.contention
	if c == nil || c.completes == 0 {
		return
	}
	if f.g.at(now) >= c.completes {
		if !f.refreshing {
			f.renewLocked(now)
		}
		c.completes = f.g.at(now.Add(f.g.cfg.NodeTimeout))
	}
	f.armAtLocked(c.completes)
}

// completedLocked is called when a refresh has made the ttl full.
func (f *flight) completedLocked() {
	if c := f.contention; c != nil {
		c.span, c.completes = 0, 0
	}
}

// spanOfLeaseLocked is how long the nodes keep the key of a lease that another's release has granted; 0: as
// long as they were asked to.
func (f *flight) spanOfLeaseLocked() time.Duration {
	if f.contention == nil {
		return 0
	}
	return f.contention.span
}
