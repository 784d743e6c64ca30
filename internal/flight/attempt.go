package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Remote attempts: how the driver makes one, and what follows from its outcome.

// startAttemptLocked decides that t, the driver, makes an attempt now, with the head's ttl. Its caller
// does that by runAttempt.
func (f *flight) startAttemptLocked(t *Ticket) {
	f.phase, f.retry = acquiring, false
	if f.backoff != nil {
		f.backoff.freeAt = time.Time{}
	}
	f.attemptTTL = f.head().ttl // who gets the lease, unless it runs code of the user's then
	f.shard().counts.attempts.Add(1)
	f.attempted = clock.InstantNow(f.g.epoch)
	t.waiter.plan.tried = true
	if f.mark != recalled {
		f.mark = f.marksLocked(f.head())
	}
	contender := ""
	switch c := f.contention; {
	case c != nil:
		contender, c.registered = c.contender, true
	case f.mark == marked:
		contender = quorum.Marked
	}
	if t.lease != nil { // see Bring
		f.attempt, t.lease = t.lease, nil
		return
	}
	f.attempt = f.g.cfg.Nodes.Prepare(f.key, f.attemptTTL, f.blockLocked(), contender)
}

// runAttempt makes the attempt that startAttemptLocked has decided on. If that was canceled since, it fails,
// and its outcome is delivered all the same. It may block for NodeTimeout if inline is true.
func (f *flight) runAttempt(t *Ticket, inline bool) {
	l := f.attempt // until it is over, which is later
	if least := f.makeOffer(l); least > 0 {
		// The key may be granted to t while it blocks: enough of the lease must be left after that.
		inline = inline && min(t.ttl, least) >= 4*f.g.cfg.NodeTimeout
	}
	l.Acquire(inline, (*acquirer)(f))
}

// acquirer is a flight that gets the outcome of its attempt.
type acquirer flight

// Acquired is that outcome.
func (a *acquirer) Acquired(g quorum.Grant, failure *quorum.Failure) {
	f := (*flight)(a)
	if observe := f.g.cfg.Observer.Attempted; observe != nil {
		took := time.Duration(clock.InstantNow(f.g.epoch) - f.attempted)
		observe(f.key, took, failure) // written before the attempt was begun
	}
	f.attemptDone(g, failure)
}

// attemptDone takes the outcome of the attempt in progress.
func (f *flight) attemptDone(g quorum.Grant, failure *quorum.Failure) {
	f.mu.Lock()
	defer f.unlock()
	l, o := f.attempt, f.pendingGrantLocked()
	f.phase, f.attempt = idle, nil
	switch {
	case o != nil:
		f.attemptGaveWayLocked(o, l, failure)
	case failure == nil:
		f.withdrawLocked()
		f.wonLocked(l, g)
	case f.n == 0:
		f.dieLocked()
	case f.retry && !failure.Away:
		b := f.ensureBackoffLocked()
		b.last, b.owner = failure, l.Owner()
		f.tryLocked()
	case failure.Final:
		f.turnAwayAllLocked(f.failed(failure), all)
	default:
		f.ensureBackoffLocked().owner = l.Owner()
		f.scheduleRetryLocked(failure)
		f.turnAwayFastLocked(failure)
	}
}

// wonLocked takes a lease that was granted.
func (f *flight) wonLocked(l Lease, g quorum.Grant) {
	now := clock.Now()
	f.phase, f.lease, f.backoff = leased, l, nil
	f.until, f.renewAfter = g.Until, f.g.at(g.Until) // a handoff sets renewAfter, from its own ttl
	f.tokens = blockOf(g)
	f.served, f.worked, f.used, f.blockAt = 0, false, 0, f.g.at(now)
	f.sliceLocked(now)
	if c := f.contention; c != nil {
		f.waitsLocked(false)
		c.rival = ""
		if c.won == 0 {
			c.won = f.g.at(now)
		}
	}
	if f.n > 0 {
		f.renewAfter = f.renewAfterLocked(now, f.head().ttl)
	}
	f.shortLeaseLocked(now, g.Span)
	f.handOverOrReleaseLocked(now, 0)
}

// scheduleRetryLocked has the flight wait after a failed attempt, or after a release that gave a rival the
// turn, for as long as the driver's strategy says.
func (f *flight) scheduleRetryLocked(why *quorum.Failure) {
	now := clock.Now()
	b := f.ensureBackoffLocked()
	if why.Away && !f.lastLocked().Away {
		b.awaySince = now
	}
	b.last, b.failedAt = why, now
	if why.Free > 0 {
		if free := now.Add(max(why.Free, minDelay)); b.freeAt.IsZero() || free.Before(b.freeAt) {
			b.freeAt = free // else an event has reported a turn meanwhile, which ends before
		}
	}
	f.nextAttempt = now.Add(maxPoll)
	f.paceLocked()
}

// attemptNowLocked has the driver make an attempt at once.
func (f *flight) attemptNowLocked() {
	f.nextAttempt = time.Time{}
	f.wakeDriverLocked()
}

// tryLocked is attemptNowLocked, except that callers that may no longer need the key look first.
func (f *flight) tryLocked() {
	f.wakeLookersLocked(all)
	f.attemptNowLocked()
}

// wakeLookersLocked has those callers of AcquireUnless for whom who reports true ask whether they still need
// the key.
func (f *flight) wakeLookersLocked(who func(*Ticket) bool) {
	t := f.head()
	for left := f.lookers; left > 0; t = f.queue.Next(t) {
		if t.waiter.needless == nil {
			continue
		}
		if left--; who(t) {
			t.waiter.mustLook = true
			t.wakeLocked()
		}
	}
}

func all(*Ticket) bool { return true }

// turnAwayFastLocked ends the wait of all callers that fail fast, if an attempt or a refresh has failed
// because too few nodes can be reached.
func (f *flight) turnAwayFastLocked(why *quorum.Failure) {
	if why.Away {
		acquire := *why
		acquire.Op = "acquire"
		f.turnAwayAllLocked(f.failed(&acquire), (*Ticket).failsFast)
	}
}

// recheck finds out at once whether too few nodes can be reached, if somebody waits who gives up
// then: by an attempt, or by a refresh where the key is held.
func (f *flight) recheck() {
	f.mu.Lock()
	defer f.unlock()
	t := f.head()
	for t != nil && !t.failsFast() {
		t = f.queue.Next(t)
	}
	switch {
	case t == nil:
	case f.phase == acquiring: // it may have begun too early to notice: if so, another follows
		f.retry = true
	case f.phase == idle:
		f.attemptNowLocked()
	case f.cur != nil && !f.refreshing:
		f.renewLocked(clock.Now())
	}
}

// nextAttemptLocked is when the next attempt is due, after one that failed: as the strategy of t, the driver,
// says, but no later than when the key could be free. When the key is known to be
// another's and the flight is notified of its release, the strategy's delays send nothing. With
// an even number of nodes that is hardly ever known, because half of them decide.
//
// While too few nodes have a vote, a strategy that never gives up has attempts less and less often: tens of
// thousands of keys may be waited for, and would keep a processor busy. When an outage ends, the first
// attempt comes within a quarter of the time that it has lasted, and within maxAwayPause.
func (f *flight) nextAttemptLocked(t *Ticket) time.Time {
	next, last := t.waiter.plan.nextTry, f.lastLocked()
	if c := f.contention; c != nil && last.Reason == quorum.Taken {
		split := min(c.poll, safetyPoll) // the longest pause while votes are split
		switch {
		case !c.subscribed:
			next = clock.Earlier(next, f.backoff.failedAt.Add(maxPoll))
		case c.offer != nil && last.Owned:
			next = f.backoff.failedAt.Add(spread(c.poll))
		case c.offer != nil && last.Queued && last.Got == 0:
			next = f.backoff.failedAt.Add(split/2 + jitter.N(split/2))
		case c.offer != nil && last.Queued:
			next = clock.Later(next, f.backoff.failedAt.Add(splitPause+jitter.N(splitPause)))
			next = clock.Earlier(next, f.backoff.failedAt.Add(split))
		case last.Owned:
			waited := time.Duration(f.g.at(f.backoff.failedAt) - c.since)
			next = f.backoff.failedAt.Add(spread(f.g.safetyPollAfter(waited)))
		}
	}
	if last.Away && t.waiter.isEndless() {
		pause := min(f.backoff.failedAt.Sub(f.backoff.awaySince)/4, maxAwayPause)
		next = clock.Later(next, f.backoff.failedAt.Add(pause/2+jitter.N(pause/2+1)))
	}
	if !f.backoff.freeAt.IsZero() {
		next = clock.Earlier(next, f.backoff.freeAt)
	}
	return next
}

// maxAwayPause is how long a flight waits at most between attempts while too few nodes have a vote.
const maxAwayPause = time.Second
