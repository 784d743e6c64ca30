package flight

import (
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// How a flight gets a lease, passes it on, renews it and gives it back.

// askLocked begins a remote attempt, with h's ttl.
func (f *flight) askLocked(h *Hold) {
	f.asking, f.given, f.attempt = true, false, nil
	f.wish = h.ttl
	f.counts.Attempts++
	if h.patience != nil {
		h.takeOver(time.Now())
	}
	ttl, tokens := h.ttl, f.blockLocked()
	f.laterLocked(func(inline bool) {
		a := f.g.cfg.Prepare(f.key, ttl, tokens, f.asked)
		f.mu.Lock()
		f.attempt = a // known before it may block, so that others can ask about it and cancel it
		given := f.given
		f.mu.Unlock()
		if given {
			a.Cancel()
		}
		a.Start(inline)
	})
}

// asked takes the outcome of the attempt under way.
func (f *flight) asked(l Lease, g Grant, o *Outcome) {
	f.mu.Lock()
	defer f.unlock()
	f.asking, f.attempt = false, nil
	switch {
	case o == nil:
		f.wonLocked(l, g)
	case f.given && f.n > 0: // cancelled, and then somebody came
		f.askLocked(f.head)
	case f.n == 0:
		f.dieLocked()
	case o.Final:
		for f.n > 0 {
			f.turnAwayLocked(f.head, o.Err)
		}
	default:
		f.last = o.Err
		f.pauseLocked(o.Free)
	}
}

func (f *flight) wonLocked(l Lease, g Grant) {
	now := time.Now()
	f.lease, f.last = l, nil
	f.until, f.stale = g.Until, g.Until // a handoff sets stale, from its own ttl
	f.tokens = [2]block{g.block()}
	f.holds, f.used, f.reserved = 0, 0, now
	if f.n > 0 {
		f.stale = f.staleAt(now, f.head.ttl)
	}
	f.passLocked(now, nil)
}

// pauseLocked waits after a failed attempt.
func (f *flight) pauseLocked(free time.Duration) {
	f.free = time.Time{}
	if free > 0 {
		f.free = time.Now().Add(max(free, minDelay))
	}
	f.paceLocked()
}

// paceLocked sets the pause's end: as the front waiter's strategy says, but no later than
// when the key could be free. Whoever's strategy gives up at the last failure is turned
// away, and the next in the queue paces the flight: the failure was the whole queue's.
func (f *flight) paceLocked() {
	for now := time.Now(); f.n > 0; {
		h := f.head
		h.takeOver(now)
		if d, ok := h.failed(now); ok {
			f.paused = now.Add(d)
			if !f.free.IsZero() {
				f.paused = earlier(f.paused, f.free)
			}
			f.armLocked(f.paused)
			return
		}
		f.turnAwayLocked(h, f.last)
	}
}

// passLocked decides what becomes of a lease that nobody holds: it goes to the front
// waiter, now or when it has been renewed, or back to the nodes. In the last case it
// reports true, and gone, if there is one, gets the outcome of the release.
func (f *flight) passLocked(now time.Time, gone chan<- error) (released bool) {
	h := f.head
	switch {
	case h == nil, clock.Passed(now, f.until), f.g.cfg.Slice < 0 && f.holds > 0:
		f.letGoLocked(gone)
		return true
	case f.shortLocked(h, now), f.leftLocked() == 0:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		f.giveLocked(h, now)
	}
	return false
}

// shortLocked says that the lease must be renewed before h may have it. What an attempt
// for h's ttl has just won is not: asking again would take as long.
func (f *flight) shortLocked(h *Hold, now time.Time) bool {
	fresh := f.holds == 0 && h.ttl <= f.wish
	return !fresh && clock.Left(now, f.until) < h.ttl/2
}

// giveLocked makes h, the front waiter, the current Hold.
func (f *flight) giveLocked(h *Hold, now time.Time) {
	f.dropLocked(h)
	h.state, h.lease, h.fence = holding, f.lease, f.tokenLocked()
	valid := f.g.cfg.Validity(h.ttl)
	h.limit = now.Add(valid)
	// By both clocks: the lease may be older than a sleep of the machine, and now is not.
	h.until = now.Add(min(valid, clock.Left(now, f.until)))
	f.cur = h
	if f.holds++; f.holds > 1 {
		h.way = Handed
		f.counts.Handoffs++
	}
	f.counts.Acquired++
	f.armLocked(h.until)
	h.ready <- struct{}{}
	if f.holds > 1 || f.n > 0 {
		f.topUpLocked(now)
	}
}

// endLocked ends the current Hold.
func (f *flight) endLocked(h *Hold, as state, why error) {
	h.state, h.why = as, why
	f.cur = nil
	if as == lost {
		f.counts.Lost++
		if tell := f.g.cfg.Lost; tell != nil {
			f.laterLocked(func(bool) { tell(f.key, why) })
		}
	}
	for fn := range h.onEnd {
		f.laterLocked(func(bool) { (*fn)(why) })
	}
	h.onEnd = nil
	for _, a := range f.asks {
		err := f.g.cfg.Ended(f.key, h.errLocked(time.Time{}))
		f.laterLocked(func(bool) { a.done(err) })
	}
	f.asks = nil
}

// letGoLocked gives the lease back to the nodes. Whoever waits contends anew after that,
// whoever comes meanwhile included.
func (f *flight) letGoLocked(gone chan<- error) {
	l := f.lease
	f.lease, f.refreshing = nil, false
	f.holdsBefore = f.holds
	f.parting = true
	f.laterLocked(func(inline bool) {
		l.Release(inline, func(err error) {
			if gone != nil {
				gone <- err
			}
		})
		f.parted()
	})
}

// parted goes on when the release has been sent.
func (f *flight) parted() {
	f.mu.Lock()
	defer f.unlock()
	f.parting = false
	if f.n > 0 {
		f.askLocked(f.head)
	} else {
		f.dieLocked()
	}
}

// Tokens.

// tokenLocked takes the next token. There is one.
func (f *flight) tokenLocked() int64 {
	if f.tokens[0].left() == 0 {
		f.tokens[0], f.tokens[1] = f.tokens[1], block{}
	}
	t := f.tokens[0].next
	f.tokens[0].next++
	f.used++
	return t
}

func (f *flight) leftLocked() int64 { return f.tokens[0].left() + f.tokens[1].left() }

const (
	spareTokens = 16      // beyond what the queue needs
	maxBlock    = 1 << 20 // one second of handoffs, at the highest rate there is
	ahead       = time.Second
)

// blockLocked is how many tokens an attempt asks for: one when nobody else waits, else
// what the lease before this one has used, and what the queue can use.
func (f *flight) blockLocked() int64 {
	if f.n <= 1 || f.g.cfg.Slice < 0 {
		return 1
	}
	return min(max(int64(f.n), f.holdsBefore), maxBlock)
}

// moreLocked is how many tokens a refresh reserves: what the measured rate of handoffs
// uses up in the time ahead, unless most of that is there already.
func (f *flight) moreLocked(now time.Time) int64 {
	more := int64(f.n) + spareTokens
	if since := now.Sub(f.reserved); since > 0 {
		more = max(more, int64(float64(f.used)*float64(ahead)/float64(since)))
	}
	if more = min(more, maxBlock); f.leftLocked() > more/2 {
		return 0
	}
	return more
}

// Refresh.

// staleAt is when a lease got now, for ttl, has lost so much that a handoff renews it:
// a twentieth, but no less than what keeps renewals rare against handoffs.
func (f *flight) staleAt(now time.Time, ttl time.Duration) time.Time {
	v := f.g.cfg.Validity(ttl)
	return now.Add(max(v/20, min(v/4, 5*time.Millisecond)))
}

// topUpLocked has the lease renewed in the background when a handoff finds that it has
// lost some of its ttl, or that the tokens run out.
func (f *flight) topUpLocked(now time.Time) {
	if f.refreshing || f.g.cfg.Slice < 0 {
		return
	}
	left := f.leftLocked()
	low := left < f.used && left < max(int64(f.n), f.used/8)
	if low || now.After(f.stale) {
		f.renewLocked(now)
	}
}

// renewLocked renews the lease for the flight's own sake: for the one that was just
// handed the lease, or else for the front waiter.
func (f *flight) renewLocked(now time.Time) {
	h := f.cur
	if h == nil {
		h = f.head
	}
	f.startRefreshLocked(now, h.ttl, f.moreLocked(now), f.g.cfg.NodeTimeout)
}

// refreshLocked serves the holder's own wishes, all in one refresh.
func (f *flight) refreshLocked() {
	if f.refreshing || len(f.asks) == 0 {
		return
	}
	f.served, f.asks = f.asks, nil
	timeout := f.g.cfg.NodeTimeout
	for _, a := range f.served {
		timeout = min(timeout, a.timeout)
	}
	now, more := time.Now(), int64(0)
	if f.n > 0 {
		more = f.moreLocked(now)
	}
	f.startRefreshLocked(now, f.served[0].h.ttl, more, timeout)
}

func (f *flight) startRefreshLocked(now time.Time, ttl time.Duration, more int64, timeout time.Duration) {
	f.refreshing = true
	f.stale = f.staleAt(now, ttl) // even if it fails: the next handoff is not to try again
	f.counts.Refreshes++
	l, served := f.lease, f.served
	f.served = nil
	f.laterLocked(func(bool) {
		l.Refresh(ttl, more, timeout, func(g Grant, o *Outcome) { f.refreshed(l, served, g, o) })
	})
}

// refreshed takes the outcome of a refresh. It belongs to the lease: whoever holds it now
// gets the new deadline, or the loss. A Hold whose Until came before the answer is over.
func (f *flight) refreshed(l Lease, served []ask, g Grant, o *Outcome) {
	f.mu.Lock()
	defer f.unlock()
	f.overdueLocked(time.Now())
	if f.lease == l {
		f.refreshing = false
		if o == nil {
			f.renewedLocked(g)
		} else if o.Lost {
			f.loseLocked(o.Err)
		}
	}
	for _, a := range served {
		f.answerLocked(a, g, o)
	}
	switch {
	case f.lease != l:
	case f.cur != nil:
		f.refreshLocked()
	case o != nil, f.leftLocked() == 0: // could not be renewed: contend anew
		f.letGoLocked(nil)
	default:
		f.grantOrLetGoLocked(time.Now())
	}
}

// grantOrLetGoLocked follows a renewal that a waiter was kept waiting for. It does not
// renew again: if the refresh took so long that half the ttl is gone, the next would too.
func (f *flight) grantOrLetGoLocked(now time.Time) {
	if h := f.head; h != nil && clock.Left(now, f.until) >= h.ttl/2 {
		f.giveLocked(h, now)
	} else {
		f.letGoLocked(nil)
	}
}

func (f *flight) renewedLocked(g Grant) {
	if g.Until.After(f.until) {
		f.until = g.Until
	}
	if b := g.block(); b.left() > 0 {
		if f.tokens[0].left() == 0 { // what is in store comes first
			f.tokens[0] = f.tokens[1]
		}
		f.tokens[1] = b
		f.used, f.reserved = 0, time.Now()
	}
	if h := f.cur; h != nil {
		// The flight's own renewal: within what the handoff promised.
		h.until = later(h.until, earlier(f.until, h.limit))
	}
}

// answerLocked tells a holder how the refresh that it asked for went.
func (f *flight) answerLocked(a ask, g Grant, o *Outcome) {
	var err error
	switch {
	case a.h.state != holding:
		err = f.g.cfg.Ended(f.key, a.h.errLocked(time.Time{}))
	case o != nil:
		err = o.Err
	default:
		a.h.until = later(a.h.until, g.Until)
		a.h.limit = later(a.h.limit, g.Until)
	}
	f.laterLocked(func(bool) { a.done(err) })
}

// loseLocked ends the lease that the nodes say is no longer ours, and its Hold.
func (f *flight) loseLocked(err error) {
	if f.cur != nil {
		f.endLocked(f.cur, lost, f.g.cfg.LostWith(err))
	}
	f.letGoLocked(nil) // on some nodes it may still be there
}

// Closing.

// shut refuses whoever waits.
func (f *flight) shut() {
	f.mu.Lock()
	defer f.unlock()
	for f.n > 0 {
		f.turnAwayLocked(f.head, f.g.cfg.Closed)
	}
}

// evict ends the current Hold and gives the lease back; given waits for that.
func (f *flight) evict(given *sync.WaitGroup) bool {
	f.mu.Lock()
	defer f.unlock()
	h := f.cur
	if h == nil {
		return false
	}
	f.endLocked(h, lost, f.g.cfg.Closed)
	gone := make(chan error, 1)
	f.letGoLocked(gone)
	given.Go(func() { <-gone })
	return true
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
