package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// How a flight passes a lease on, renews it and releases it.

// handOverOrReleaseLocked decides what becomes of a lease that nobody holds: it goes to the
// next holder, now or when it has been renewed; or it is retained, for linger at most; or it goes back to
// the nodes. In the last case it reports true; deferred.done may be set then, to get the outcome of the
// release.
func (f *flight) handOverOrReleaseLocked(now time.Time, linger time.Duration) (released bool) {
	t := f.nextHolderLocked()
	if t == nil {
		if f.retainLocked(now, linger) {
			return false
		}
		f.releaseLocked()
		return true
	}
	switch left := clock.Left(now, f.until); {
	case left <= 0, f.g.cfg.Slice < 0 && f.served > 0:
		f.releaseLocked()
		return true
	case f.shortLocked(t, left), f.tokens.left() == 0:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		return f.shareLocked(t, now, left)
	}
	return false
}

// shareLocked hands a good lease, which has that much left, to t, or ends the slice.
func (f *flight) shareLocked(t *Ticket, now time.Time, left time.Duration) (released bool) {
	switch f.decideLocked(now) {
	case yield:
		f.yieldLocked()
		return true
	case check:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		f.giveLocked(t, now, left)
	}
	return false
}

// shortLocked says that the lease, which has that much left, must be renewed before t may have it.
// What an attempt for t's ttl has just won is not: asking again would take as long.
func (f *flight) shortLocked(t *Ticket, left time.Duration) bool {
	fresh := f.served == 0 && t.ttl <= f.attemptTTL && f.spanOfLeaseLocked() == 0
	return !fresh && left < f.enoughLocked(t.ttl)
}

// enoughLocked is how much a lease must have left to be given to a caller with that ttl: half of it, or,
// where clocks may run so far apart that it hardly has so much when it is new, three quarters of its
// validity; of a lease that was granted for a span, half of that.
func (f *flight) enoughLocked(ttl time.Duration) time.Duration {
	if span := f.spanOfLeaseLocked(); span > 0 {
		return min(span, ttl) / 2
	}
	return min(ttl/2, f.g.cfg.Nodes.Validity(ttl)/4*3)
}

// giveLocked makes t, which waits, the current Ticket of the lease, which has that much
// left.
func (f *flight) giveLocked(t *Ticket, now time.Time, left time.Duration) {
	f.dropLocked(t)
	t.state, t.lease, t.fence = holding, f.lease, f.tokenLocked()
	valid := f.g.cfg.Nodes.Validity(t.ttl)
	left = min(valid, left) // by both clocks: the lease may be older than a sleep of the machine, and now is not
	t.until, t.extension = now.Add(left), valid-left
	f.cur = t
	if t.linger > 0 {
		f.attemptTTL = t.ttl
	}
	if f.served = min(f.served+1, maxBlock); f.served > 1 {
		t.kind = Handed
	}
	watch := t.watchLocked()
	if watch != nil && f.served > 1 {
		watch.Previous = f.watch
	}
	f.watch = watch
	f.armLocked(t.until)
	if c := f.contention; c != nil && c.completes != 0 {
		f.armAtLocked(c.completes)
	}
	t.answerLocked()
	if f.served > 1 || f.n > 0 {
		f.topUpLocked(now)
	}
}

// endLocked ends the current Ticket: it was released or lost.
func (f *flight) endLocked(t *Ticket, as state, why error) {
	t.state, t.timers = as, nil
	f.cur = nil
	if t.looks && as == released {
		f.wakeLookersLocked(all) // its work may be what others of this process wait for
	}
	if as == lost {
		t.endOfLocked().why = why
		f.countLossLocked(t, why)
	}
	if t.end != nil {
		for fn := range t.end.onEnd {
			f.deferLocked(func() { (*fn)(why) })
		}
		t.end.onEnd = nil
	}
	// also if a refresh for them is in progress: it may take longer
	for a := f.refreshRequests; a != nil; a = a.next {
		err := f.g.cfg.Errors.Ended(f.key, t.errLocked(time.Time{}))
		f.deferLocked(func() { a.done(err) })
	}
	f.refreshRequests = nil
}

// countLossLocked counts and reports a loss. The end of a Ticket that was never refreshed, and for
// whose end nobody waits, is no loss: it was meant to end by its ttl.
func (f *flight) countLossLocked(t *Ticket, why error) {
	counts, w := &f.shard().counts, t.watchLocked()
	ranOut := !t.relied && why == f.expired() //nolint:errorlint // it, and nothing that says more
	if w != nil {
		f.deferLocked(func() { w.ended(why, ranOut) })
	}
	if ranOut {
		counts.expired.Add(1)
		return
	}
	counts.lost.Add(1)
	if observe := f.g.cfg.Observer.Lost; observe != nil {
		f.deferLocked(func() { observe(f.key, w, why) })
	}
}

// releaseLocked releases the lease. The waiters contend again after that, with those who come
// meanwhile.
func (f *flight) releaseLocked() { f.releaseToLocked("") }

// releaseToLocked is releaseLocked, but if there is a rival, it has the next turn, and those who
// wait here wait for the one after that.
func (f *flight) releaseToLocked(rival string) {
	d := f.deferredLocked()
	d.release, d.rival = f.lease, rival
	if rival == "" && f.mark == recalled {
		d.rival = quorum.Others
	}
	if f.worked {
		d.news = quorum.NewsLook
	}
	f.lease, f.refreshing = nil, false
	f.unretainLocked()
	f.phase, f.retry = releasing, false
	if f.contention != nil && rival == "" {
		f.contention.registered = false // the release takes it back
	}
}

// sendRelease sends the release that releaseToLocked has decided on. After that, attempts may be
// made.
func (f *flight) sendRelease(d *deferred, inline bool) {
	rival, done := d.rival, d.done
	if done == nil {
		done = ignored{}
	}
	if d.rejoins > 0 && f.rejoin(d.release, d.rejoins, inline, done) {
		return
	}
	d.release.Release(inline, rival, d.news, done)
	f.mu.Lock()
	defer f.unlock()
	f.phase = idle
	if f.n > 0 && f.contention != nil && !f.contention.waits { // else it has yielded
		f.waitsAgainLocked(clock.InstantNow(f.g.epoch))
	}
	switch {
	case f.n == 0:
		f.dieLocked()
	case rival != "" && rival != quorum.Others && !f.retry:
		f.attempted = clock.InstantNow(f.g.epoch)
		f.ensureBackoffLocked().freeAt = clock.Now().Add(f.g.cfg.Turn)
		f.scheduleRetryLocked(passedOn)
	default:
		f.attemptNowLocked()
	}
}

// Tokens.

// tokenLocked takes the next token. There is one.
func (f *flight) tokenLocked() int64 {
	t := f.tokens.next
	f.tokens.next++
	f.used++
	return t
}

const (
	spareTokens = 16 // beyond what the queue needs
	// for a lone caller: no counter grows so fast that it outruns microseconds, see moreLocked
	loneBlock = 4
	// of a lease that may be retained: with fewer left it gets more ahead of its next caller
	loneSpare = 2
	maxBlock  = 1 << 20 // one second of handoffs, at the highest rate there is
	ahead     = time.Second
)

// blockLocked is how many tokens an attempt asks for: a few when nobody else waits, for those who
// come while the lock is held; else what the lease before this one has used, or what the queue can
// use if that is more.
func (f *flight) blockLocked() int64 {
	switch {
	case f.g.cfg.Slice < 0:
		return 1
	case f.n <= 1:
		return loneBlock
	}
	return int64(min(max(f.n, f.served, loneBlock), maxBlock))
}

// moreLocked is how many tokens a refresh reserves: what the measured rate of handoffs uses up in
// the time ahead. None while half as many are left of the block before, for these are skipped when the next
// one comes. And not many more than microseconds have passed since that block: a counter that is lost starts
// again at the node's clock in microseconds, and must come out above all tokens there were. What a lease has
// reserved is lost with it, which may be soon.
func (f *flight) moreLocked(now time.Time) int64 {
	more := int64(f.n) + spareTokens
	if since := time.Duration(f.g.at(now) - f.blockAt); since > 0 {
		rate := int64(float64(f.used) * float64(ahead) / float64(since))
		more = max(more, min(rate, more+2*since.Microseconds()))
	}
	if more = min(more, maxBlock); f.tokens.left() > more/2 {
		return 0
	}
	return more
}

// Refresh.

// renewAfterLocked is when a lease got now, for ttl, has lost so much that a handoff renews it:
// a twentieth, but no less than what keeps renewals rare against handoffs.
func (f *flight) renewAfterLocked(now time.Time, ttl time.Duration) clock.Instant {
	v := f.g.cfg.Nodes.Validity(ttl)
	return f.g.at(now.Add(max(v/20, min(v/4, 5*time.Millisecond))))
}

// topUpLocked has the lease renewed in the background when a handoff finds that it has
// lost some of its ttl, or that the tokens run out.
func (f *flight) topUpLocked(now time.Time) {
	if f.refreshing || f.g.cfg.Slice < 0 {
		return
	}
	left, used := f.tokens.left(), int64(f.used)
	low := left < used && left < max(int64(f.n), used/8) || f.mark == marked && left < loneSpare
	if low || f.g.at(now) > f.renewAfter || f.mayCheckLocked(now) {
		f.renewLocked(now)
	}
}

// refreshLocked serves the holder's own requests.
func (f *flight) refreshLocked() {
	if !f.refreshing && f.refreshRequests != nil {
		f.renewLocked(clock.Now())
	}
}

// renewLocked begins a refresh: for the holder's own requests, all in one, or if there are none for
// the flight's own sake. Its ttl is the holder's, or if there is none, the next holder's.
func (f *flight) renewLocked(now time.Time) {
	t := f.cur
	if t == nil {
		t = f.nextHolderLocked()
	}
	timeout, more := f.g.cfg.NodeTimeout, int64(0)
	for a := f.refreshRequests; a != nil; a = a.next {
		a.sent = true
		timeout = min(timeout, a.timeout)
	}
	if f.refreshRequests == nil || f.n > 0 {
		more = f.moreLocked(now)
	}
	f.refreshing = true
	f.renewAfter = f.renewAfterLocked(now, t.ttl) // even if it fails: the next handoff is not to try again
	f.shard().counts.refreshes.Add(1)
	checks := f.checksLocked(now)
	f.checked = f.checked || checks
	checks = checks || f.checksReuseLocked() || f.g.cfg.Rival != nil
	l, ttl := f.lease, t.ttl
	f.deferLocked(func() {
		l.Refresh(ttl, more, timeout, checks,
			func(g quorum.Grant, why *quorum.Failure) { f.refreshed(l, checks, g, why) })
	})
}

// refreshed takes the outcome of a refresh. It belongs to the lease: its holder now
// gets the new deadline, or the loss. A Ticket whose Until came before the answer is over.
//
// If tokens were only reserved, and somebody waits, another refresh follows at once. That it has to
// is no reason to keep back what this one has confirmed.
func (f *flight) refreshed(l Lease, checked bool, g quorum.Grant, why *quorum.Failure) {
	if observe := f.g.cfg.Observer.Refreshed; observe != nil {
		observe(f.key, why)
	}
	f.mu.Lock()
	defer f.unlock()
	if t := f.cur; t != nil && f.lease == l { // before t may end: its error is to name this outcome
		t.noteRefreshLocked(why)
	}
	f.overdueLocked(clock.Now())
	if f.lease == l {
		f.refreshing = false
		switch {
		case why == nil:
			f.renewedLocked(g)
		case why.Reason == quorum.NotHeld:
			f.loseLocked(why)
		case f.cur != nil: // else its waiters contend again, and find out
			f.turnAwayFastLocked(why)
		}
		switch tell := f.g.cfg.Rival; {
		case !checked || f.lease != l:
		case tell == nil:
			f.waitersSeenLocked(g.Rival, why != nil)
		case why == nil:
			f.deferLocked(func() { tell(f.key, g.Rival) })
		}
	}
	if f.lease != l { // and the requests that it was for have their answer: see endLocked
		return
	}
	for a := f.refreshRequests; a != nil && a.sent; a = a.next {
		f.refreshRequests = a.next
		f.answerRequestLocked(a, g, why)
	}
	switch {
	case f.phase == lingering: // it was made for the last holder; nobody waits for it here
		if f.contention != nil { // but elsewhere
			f.releaseLocked()
		}
		return
	case f.cur != nil:
		f.refreshLocked()
	case f.tokens.left() > 0:
		f.giveOrReleaseLocked(clock.Now())
	case !g.Reserved || f.n == 0: // could not be renewed: contend again
		f.releaseLocked()
	}
	if g.Reserved && f.n > 0 && f.lease == l && !f.refreshing {
		f.renewLocked(clock.Now())
	}
}

// giveOrReleaseLocked follows a renewal that a waiter was kept waiting for. It does not
// renew again: if the refresh took so long that there is not enough left, the next would too.
func (f *flight) giveOrReleaseLocked(now time.Time) {
	left := clock.Left(now, f.until)
	switch t := f.nextHolderLocked(); {
	case t == nil, left < f.enoughLocked(t.ttl):
		f.releaseLocked()
	case f.decideLocked(now) == yield:
		f.yieldLocked()
	default:
		f.giveLocked(t, now, left)
	}
}

// noteRefreshLocked keeps the outcome of the last refresh of t's lease, if it failed: should t run
// out, that is why.
func (t *Ticket) noteRefreshLocked(why *quorum.Failure) {
	if why != nil {
		t.endOfLocked().failed = t.f.failed(why)
	} else if t.end != nil {
		t.end.failed = nil
	}
}

func (f *flight) renewedLocked(g quorum.Grant) {
	f.completedLocked()
	if g.Until.After(f.until) {
		f.until = g.Until
	}
	if b := blockOf(g); b.left() > 0 {
		f.tokens, f.used, f.blockAt = b, 0, f.g.at(clock.Now())
	}
	if t := f.cur; t != nil {
		// The flight's own renewal: within what the handoff promised.
		limit := t.limitLocked()
		t.moveLocked(clock.Later(t.until, clock.Earlier(f.until, limit)), limit)
	}
}

// answerRequestLocked answers a holder's request for a refresh.
func (f *flight) answerRequestLocked(a *refreshRequest, g quorum.Grant, why *quorum.Failure) {
	err := f.answerOfLocked(f.cur, g, why)
	f.deferLocked(func() { a.done(err) })
}

// answerOfLocked is what a refresh means for t, which is current.
func (f *flight) answerOfLocked(t *Ticket, g quorum.Grant, why *quorum.Failure) error {
	if why != nil {
		return f.failed(why)
	}
	t.moveLocked(clock.Later(t.until, g.Until), clock.Later(t.limitLocked(), g.Until))
	if t.end != nil {
		t.end.stopped = nil
	}
	return nil
}

// loseLocked ends the lease that the nodes say is no longer ours, and its Ticket.
func (f *flight) loseLocked(why *quorum.Failure) {
	if f.cur != nil {
		f.endLocked(f.cur, lost, f.g.cfg.Errors.Lost(f.key, why))
	}
	f.releaseLocked() // on some nodes it may still be there
}
