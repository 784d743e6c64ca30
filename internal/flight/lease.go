package flight

import (
	"errors"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// How a flight gets a lease, passes it on, renews it and gives it back.

// askLocked begins a remote attempt, with h's ttl.
func (f *flight) askLocked(h *Hold) {
	f.asking, f.given, f.again, f.looking, f.attempt = true, false, false, false, nil
	if f.pause != nil {
		f.free = time.Time{}
	}
	f.wish = h.ttl
	f.shard().counts.attempts.Add(1)
	if h.patience != nil {
		h.takeOver(clock.Now())
	}
	f.todoLocked().tokens = f.blockLocked()
	if f.contest != nil {
		f.todo.asker, f.contest.wanting = f.contest.contender, true
	}
}

// begin makes the attempt that askLocked has decided on.
func (f *flight) begin(ttl time.Duration, tokens int64, contender string, inline bool) {
	a := f.g.cfg.Prepare(f.key, ttl, tokens, contender, f.asked)
	f.mu.Lock()
	f.attempt = a // known before it may block, so that others can ask about it and cancel it
	given := f.given
	f.mu.Unlock()
	if given {
		a.Cancel()
	}
	a.Start(inline)
}

// asked takes the outcome of the attempt under way.
func (f *flight) asked(l Lease, g Grant, o *Outcome) {
	f.mu.Lock()
	defer f.unlock()
	owner := ""
	if f.attempt != nil {
		owner = f.attempt.Owner()
	}
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
	case f.again:
		f.pauseOfLocked().last = o.Err
		f.tryLocked()
	default:
		f.pauseOfLocked().last = o.Err
		for f.n > 0 && (!o.Taken && f.head.news != nil || o.Away && failsFast(f.head.pace)) {
			f.turnAwayLocked(f.head, o.Err)
		}
		f.pauseLocked(o)
		if o.Taken && f.n > 0 { // somebody waits for it
			f.contendLocked(owner)
			f.restLocked()
		}
	}
}

func (f *flight) wonLocked(l Lease, g Grant) {
	now := clock.Now()
	f.lease, f.pause = l, nil
	f.until, f.stale = g.Until, f.g.at(g.Until) // a handoff sets stale, from its own ttl
	f.tokens = [2]block{g.block()}
	f.holds, f.used, f.reserved = 0, 0, f.g.at(now)
	f.sliceLocked(now)
	if f.contest != nil {
		f.contest.rival = ""
	}
	if f.n > 0 {
		f.stale = f.staleAt(now, f.head.ttl)
	}
	f.passLocked(now)
}

// pauseLocked waits after a failed attempt.
func (f *flight) pauseLocked(o *Outcome) {
	now := clock.Now()
	p := f.pauseOfLocked()
	p.tried, p.taken, p.owned = now, o.Taken, o.Owned
	if o.Free > 0 {
		if free := now.Add(max(o.Free, minDelay)); p.free.IsZero() || free.Before(p.free) {
			p.free = free // else somebody's turn was told meanwhile, which ends before
		}
	}
	f.paceLocked(now)
}

// paceLocked has the pause paced by the front waiter's strategy. Whoever's strategy gives up
// at the last failure is turned away, and the next in the queue paces the flight: the
// failure was the whole queue's.
func (f *flight) paceLocked(now time.Time) {
	for f.n > 0 {
		h := f.head
		h.takeOver(now)
		if h.failed(now) {
			f.restLocked()
			return
		}
		f.turnAwayLocked(h, f.outcomeLocked())
	}
}

// passLocked decides what becomes of a lease that nobody holds: it goes to the front
// waiter, now or when it has been renewed, or back to the nodes. In the last case it
// reports true; todo.gone may be set then, to hear the outcome of the release.
func (f *flight) passLocked(now time.Time) (released bool) {
	h := f.head
	if h == nil {
		f.letGoLocked()
		return true
	}
	switch left := clock.Left(now, f.until); {
	case left <= 0, f.g.cfg.Slice < 0 && f.holds > 0:
		f.letGoLocked()
		return true
	case f.shortLocked(h, left), f.leftLocked() == 0:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		return f.shareLocked(h, now, left)
	}
	return false
}

// shareLocked hands a good lease, which has that much left, to h, or ends the slice.
func (f *flight) shareLocked(h *Hold, now time.Time, left time.Duration) (released bool) {
	switch f.turnLocked(now) {
	case yield:
		f.yieldLocked()
		return true
	case look:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		f.giveLocked(h, now, left)
	}
	return false
}

// shortLocked says that the lease, which has that much left, must be renewed before h may have it. What an attempt
// for h's ttl has just won is not: asking again would take as long.
func (f *flight) shortLocked(h *Hold, left time.Duration) bool {
	fresh := f.holds == 0 && h.ttl <= f.wish
	return !fresh && left < f.enough(h)
}

// enough is how much a lease must have left to be handed to h: half of h's ttl, or, where clocks
// may run so far apart that it hardly has so much when it is new, three quarters of its validity.
func (f *flight) enough(h *Hold) time.Duration {
	return min(h.ttl/2, f.g.cfg.Validity(h.ttl)/4*3)
}

// giveLocked makes h, the front waiter, the current Hold of the lease, which has that much
// left.
func (f *flight) giveLocked(h *Hold, now time.Time, left time.Duration) {
	f.dropLocked(h)
	h.state, h.lease, h.fence = holding, f.lease, f.tokenLocked()
	valid := f.g.cfg.Validity(h.ttl)
	left = min(valid, left) // by both clocks: the lease may be older than a sleep of the machine, and now is not
	h.until, h.room = now.Add(left), valid-left
	f.cur = h
	counts := &f.shard().counts
	if f.holds = min(f.holds+1, maxBlock); f.holds > 1 {
		h.way = Handed
		counts.handoffs.Add(1)
	} else {
		counts.granted.Add(1)
	}
	f.armLocked(h.until)
	h.wakeLocked()
	if f.holds > 1 || f.n > 0 {
		f.topUpLocked(now)
	}
}

// endLocked ends the current Hold.
func (f *flight) endLocked(h *Hold, as state, why error) {
	h.state, h.reminders = as, nil
	f.cur = nil
	if as == lost {
		h.endOfLocked().why = why
		f.countLossLocked(h, why)
	}
	if h.end != nil {
		for fn := range h.end.hear {
			f.laterLocked(func() { (*fn)(why) })
		}
		h.end.hear = nil
	}
	for a := f.asks; a != nil; a = a.next {
		err := f.g.cfg.Ended(f.key, h.errLocked(time.Time{}))
		f.laterLocked(func() { a.done(err) })
	}
	f.asks = nil
}

// countLossLocked tells of a loss whoever wants to know. A Hold that nobody has refreshed, or listened
// for, was meant to end by its ttl: that it does is no loss.
func (f *flight) countLossLocked(h *Hold, why error) {
	counts := &f.shard().counts
	if !h.relied && errors.Is(why, f.g.cfg.Expired) {
		counts.expired.Add(1)
		return
	}
	counts.lost.Add(1)
	if tell := f.g.cfg.Lost; tell != nil {
		f.laterLocked(func() { tell(f.key, why) })
	}
}

// letGoLocked gives the lease back to the nodes. Whoever waits contends anew after that,
// whoever comes meanwhile included.
func (f *flight) letGoLocked() { f.partLocked("") }

// partLocked is letGoLocked, but if there is a rival, it has the next turn, and whoever
// waits here waits for the one after that.
func (f *flight) partLocked(rival string) {
	t := f.todoLocked()
	t.leave, t.rival = f.lease, rival
	f.lease, f.refreshing = nil, false
	f.holdsBefore = f.holds
	f.parting, f.again = true, false
	if f.contest != nil && rival == "" {
		f.contest.wanting = false // the release takes it back
	}
}

// giveBack makes the release that partLocked has decided on, and goes on when it has been
// sent.
func (f *flight) giveBack(l Lease, rival string, gone func(error), inline bool) {
	if gone == nil {
		gone = func(error) {}
	}
	l.Release(inline, rival, gone)
	f.mu.Lock()
	defer f.unlock()
	f.parting = false
	switch {
	case f.n == 0:
		f.dieLocked()
	case rival != "" && !f.again:
		f.pauseLocked(&Outcome{Free: f.g.cfg.Turn, Taken: true, Owned: true})
	default:
		f.askLocked(f.head)
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
	return int64(min(max(f.n, f.holdsBefore), maxBlock))
}

// moreLocked is how many tokens a refresh reserves: what the measured rate of handoffs
// uses up in the time ahead, unless most of that is there already. And not many more than
// microseconds have passed: a counter that is lost begins anew at the node's clock in
// microseconds, and must come out above all tokens there were. What a lease has reserved is
// lost with it, which may be soon.
func (f *flight) moreLocked(now time.Time) int64 {
	more := int64(f.n) + spareTokens
	if since := time.Duration(f.g.at(now) - f.reserved); since > 0 {
		rate := int64(float64(f.used) * float64(ahead) / float64(since))
		more = max(more, min(rate, more+2*since.Microseconds()))
	}
	if more = min(more, maxBlock); f.leftLocked() > more/2 {
		return 0
	}
	return more
}

// Refresh.

// staleAt is when a lease got now, for ttl, has lost so much that a handoff renews it:
// a twentieth, but no less than what keeps renewals rare against handoffs.
func (f *flight) staleAt(now time.Time, ttl time.Duration) instant {
	v := f.g.cfg.Validity(ttl)
	return f.g.at(now.Add(max(v/20, min(v/4, 5*time.Millisecond))))
}

// topUpLocked has the lease renewed in the background when a handoff finds that it has
// lost some of its ttl, or that the tokens run out.
func (f *flight) topUpLocked(now time.Time) {
	if f.refreshing || f.g.cfg.Slice < 0 {
		return
	}
	left, used := f.leftLocked(), int64(f.used)
	low := left < used && left < max(int64(f.n), used/8)
	if low || f.g.at(now) > f.stale || f.mayLookLocked(now) {
		f.renewLocked(now)
	}
}

// refreshLocked serves the holder's own wishes.
func (f *flight) refreshLocked() {
	if !f.refreshing && f.asks != nil {
		f.renewLocked(clock.Now())
	}
}

// renewLocked begins a refresh: for the holder's own wishes, all in one, or if there are none for
// the flight's own sake, which is that of the one that was just handed the lease, or else of the
// front waiter.
func (f *flight) renewLocked(now time.Time) {
	h := f.cur
	if h == nil {
		h = f.head
	}
	served, timeout, more := f.asks, f.g.cfg.NodeTimeout, int64(0)
	f.asks = nil
	for a := served; a != nil; a = a.next {
		timeout = min(timeout, a.timeout)
	}
	if served == nil || f.n > 0 {
		more = f.moreLocked(now)
	}
	f.refreshing = true
	f.stale = f.staleAt(now, h.ttl) // even if it fails: the next handoff is not to try again
	f.shard().counts.refreshes.Add(1)
	looks := f.looksLocked(now)
	f.looked = f.looked || looks
	l, ttl := f.lease, h.ttl
	f.laterLocked(func() {
		l.Refresh(ttl, more, timeout, looks, func(g Grant, o *Outcome) { f.refreshed(l, served, looks, g, o) })
	})
}

// refreshed takes the outcome of a refresh. It belongs to the lease: whoever holds it now
// gets the new deadline, or the loss. A Hold whose Until came before the answer is over.
//
// If tokens were only reserved, and somebody waits, another refresh follows at once. That it has to is no
// reason to keep back what this one has confirmed.
func (f *flight) refreshed(l Lease, served *ask, looked bool, g Grant, o *Outcome) {
	f.mu.Lock()
	defer f.unlock()
	if h := f.cur; h != nil && f.lease == l { // before it may be over: this is why
		h.notedLocked(o)
	}
	f.overdueLocked(clock.Now())
	if f.lease == l {
		f.refreshing = false
		if o == nil {
			f.renewedLocked(g)
		} else if o.Lost {
			f.loseLocked(o.Err)
		}
		if looked && f.lease == l {
			f.sawLocked(g.Rival, o != nil)
		}
	}
	for a := served; a != nil; a = a.next {
		f.answerLocked(a, g, o)
	}
	if f.lease != l {
		return
	}
	switch {
	case f.cur != nil:
		f.refreshLocked()
	case f.leftLocked() > 0:
		f.grantOrLetGoLocked(clock.Now())
	case !g.Reserved || f.n == 0: // could not be renewed: contend anew
		f.letGoLocked()
	}
	if g.Reserved && f.n > 0 && f.lease == l && !f.refreshing {
		f.renewLocked(clock.Now())
	}
}

// grantOrLetGoLocked follows a renewal that a waiter was kept waiting for. It does not
// renew again: if the refresh took so long that there is not enough left, the next would too.
func (f *flight) grantOrLetGoLocked(now time.Time) {
	left := clock.Left(now, f.until)
	switch h := f.head; {
	case h == nil, left < f.enough(h):
		f.letGoLocked()
	case f.turnLocked(now) == yield:
		f.yieldLocked()
	default:
		f.giveLocked(h, now, left)
	}
}

// notedLocked keeps the outcome of the last refresh of h's lease, if it failed: should h run out, that
// is why.
func (h *Hold) notedLocked(o *Outcome) {
	if o != nil {
		h.endOfLocked().failed = o.Err
	} else if h.end != nil {
		h.end.failed = nil
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
		f.used, f.reserved = 0, f.g.at(clock.Now())
	}
	if h := f.cur; h != nil {
		// The flight's own renewal: within what the handoff promised.
		limit := h.limitLocked()
		h.moveLocked(later(h.until, earlier(f.until, limit)), limit)
	}
}

// answerLocked tells a holder how the refresh that it asked for went.
func (f *flight) answerLocked(a *ask, g Grant, o *Outcome) {
	err := f.answerOfLocked(a.h, g, o)
	f.laterLocked(func() { a.done(err) })
}

// answerOfLocked is what a refresh means for h, which asked for it.
func (f *flight) answerOfLocked(h *Hold, g Grant, o *Outcome) error {
	switch {
	case h.state != holding:
		return f.g.cfg.Ended(f.key, h.errLocked(time.Time{}))
	case o != nil:
		return o.Err
	}
	h.moveLocked(later(h.until, g.Until), later(h.limitLocked(), g.Until))
	if h.end != nil {
		h.end.stopped = nil
	}
	return nil
}

// loseLocked ends the lease that the nodes say is no longer ours, and its Hold.
func (f *flight) loseLocked(err error) {
	if f.cur != nil {
		f.endLocked(f.cur, lost, f.g.cfg.LostWith(err))
	}
	f.letGoLocked() // on some nodes it may still be there
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
	gone := make(chan struct{})
	f.letGoLocked()
	f.todo.gone = func(error) { close(gone) }
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
