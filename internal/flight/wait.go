package flight

import (
	"context"
	"math"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/list"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Pace is a retry strategy: how long to wait after the attempt-th failure, and whether
// to try again. Its code may be anybody's, so it runs on its caller's goroutine, with no mutex
// held.
type Pace interface {
	Next(attempt int) (delay time.Duration, ok bool)
}

// Traits are what a Pace says of itself, if it has a method of that name.
type Traits uint8

// The traits.
const (
	Endless  Traits = 1 << iota // it never gives up
	FailFast                    // its caller gives up when too few nodes can be reached
	Quick                       // Next returns at once and does not panic
)

// TraitsOf gives those of p.
func TraitsOf(p Pace) Traits {
	if p, says := p.(interface{ Traits() Traits }); says {
		return p.Traits()
	}
	return 0
}

// WithinOf gives how long after its call began p gives up at the latest, if it has a method Within; 0: p alone decides.
func WithinOf(p Pace) time.Duration {
	if p, says := p.(interface{ Within() time.Duration }); says {
		return p.Within()
	}
	return 0
}

// WaitKind is what a caller waited for.
type WaitKind uint8

// The kinds of waiting.
const (
	Remote WaitKind = iota // nobody was there before it
	Queued                 // others of this process, and then remote
	Handed                 // others of this process; the last of them handed the lease over
)

// waiter is what a Ticket needs as long as its caller waits. There are as many in use as there
// are callers that wait, however many locks are held, so a Group keeps them for the next: each
// goes back when its caller has the answer. From then on the Ticket is not in the queue any more,
// so nobody else has a way to it; what may come later, the giveUpTimer, looks at the Ticket's
// state first.
type waiter struct {
	pace     Pace
	traits   Traits                     // of pace; FailFast besides for every caller of AcquireUnless
	needless func(context.Context) bool // of AcquireUnless; else nil

	// Only the caller's goroutine uses these.
	until       time.Time   // when its strategy gives up, whatever Next says; zero: Next alone decides
	failures    int         // how many failures its strategy has been asked about
	nextTry     time.Time   // when, by its strategy, its next attempt is; zero before the first failure
	simulated   bool        // it waits behind others: it meets a failure at each nextTry, though nothing is sent
	givesUp     bool        // its strategy gives up at giveUpAt; else it is asked further then
	giveUpAt    time.Time   // if simulated
	giveUpTimer *time.Timer // wakes it then; nil if it is not simulated
	pacesSince  time.Time   // when its strategy began to pace the flight; zero: it does not
	last        bool        // its strategy has given up: the attempt in progress or its repetitions are the last
	repeats     uint8       // how often it has repeated an attempt since: see repeatLocked
	tokens      int64       // for the attempt that it is about to make
	contender   string      // in whose name it makes it; "": none

	// guarded by the flight's mu
	links       list.Links[Ticket] // in the queue
	inUserCode  bool               // its caller runs code of the user's
	mustLook    bool               // its caller is to ask needless
	looksForAll bool               // ... because of a poll, when no other is to

	// ready gets one value when the wait is over; refusal is written before that, and may be
	// read after it. If woken is set, the value says something else: the caller is to look at
	// the flight, where it also finds out if its wait has ended since. So there is never more
	// than one value in it, and sending never blocks. woken is set under mu, before the value
	// is sent, and cleared under mu by the caller that has received it.
	ready   chan struct{}
	woken   bool
	refusal error
}

// step is what a caller that waits has to do next.
type step uint8

const (
	stay       step = iota // until it is woken, is answered, or its ctx ends
	attempt                // make the attempt that was decided on
	ask                    // its strategy, whether to continue, and when
	look                   // whether it needs the key still
	askFurther             // ask its strategy ahead: when will it have given up?
	over                   // its wait has ended

	// It is not in the queue yet:
	askFirst // ask its strategy ahead, and join then
	again    // join another flight: that one has died
)

// Acquire makes t hold key, or says why not. t is new; ttl and pace are its own.
func (g *Group) Acquire(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace) error {
	_, err := g.acquire(ctx, g.enter(ctx, key, t, ttl, pace, nil))
	return err
}

// Begun is a caller that has arrived, and does not wait yet.
type Begun struct {
	f    *flight
	t    *Ticket
	next step  // what it has to do first
	err  error // why there is nothing to wait for
}

// Begin is the first half of Acquire, for a caller that wants many keys at once: it makes t's attempt, if it is to make
// one, and does not wait for the outcome. End is the rest, and must be called: t may hold the key before, and callers
// queue behind it.
// A goroutine for each key would cost half as much as its attempt.
func (g *Group) Begin(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace) *Begun {
	b := g.enter(ctx, key, t, ttl, pace, nil)
	if b.err == nil {
		t.waiter.repeats = maxRepeats
	}
	if b.err == nil && b.next == attempt {
		b.f.runAttempt(t, false)
		b.next = stay
	}
	return &b
}

// End makes the Ticket of b hold its key, or says why not.
func (g *Group) End(ctx context.Context, b *Begun) error {
	_, err := g.acquire(ctx, *b)
	return err
}

// AcquireUnless is Acquire for a caller that may find that it needs the key no more, because
// another process has done the work meanwhile. Then needless reports true, which ends the wait, with
// stopped and without the key. It is called on the caller's goroutine: when there is an event about the
// key, when Look is called, and when an attempt after the first is due. In the last case, while the flight
// is subscribed, one of its callers is chosen to ask for all: see pollIsDueLocked.
//
// The event that the work has failed elsewhere ends the wait with Errors.FailedElsewhere. The wait also
// ends when too few nodes can be reached (see FailFast): such a caller can do without the lock. While
// needless runs, other waiters may be given the key first.
func (g *Group) AcquireUnless(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace,
	needless func(context.Context) bool) (stopped bool, err error) {
	t.looks = true
	return g.acquire(ctx, g.enter(ctx, key, t, ttl, pace, needless))
}

// enter is a caller's arrival.
func (g *Group) enter(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace,
	needless func(context.Context) bool) Begun {
	b := Begun{t: t}
	if err := ctx.Err(); err != nil {
		b.err = g.cfg.Errors.Failed(key, nil, err)
		return b
	}
	t.ttl, t.waiter = ttl, g.newWaiter(pace, needless)
	if b.f, b.next, b.err = g.join(ctx, key, t); b.err != nil {
		t.waiter.refusal = b.err
		b.err = g.answered(t)
	}
	return b
}

// acquire is a caller's wait, from its arrival to its answer.
//
// Of all who wait for a key, the driver makes the attempts: the first in the queue whose caller
// does not run code of the user's just now. It does so on its own goroutine, here:
//
//	make an attempt -> wait for its outcome -> ask the strategy -> wait for the time that it
//	names, for an event or for the alarm -> make an attempt -> ...
//
// and everybody else waits, to be handed the lease or to become the driver. An attempt's outcome,
// an event, the alarm and a release each change the flight's state under mu and wake the driver if
// there is something to do; what that is, the driver finds out by stepLocked, under mu. No wake-up
// is lost, because a driver that leaves, or that goes to run code of the user's, wakes the next one
// if anything is due, in the same critical section (otherwise the alarm does when it is), and one
// that comes back looks for itself. An attempt whose caller leaves continues for the next driver.
//
// A lease that is handed over comes as the last value in ready. The caller that gets it need not
// take mu.
//
// It waits here and not in a function of its own: each frame of a goroutine that waits is read at
// every cycle of the garbage collector, and again when it continues.
func (g *Group) acquire(ctx context.Context, b Begun) (stopped bool, err error) {
	f, t, next := b.f, b.t, b.next
	if b.err != nil {
		return false, g.report(t, b.err)
	}
	for {
		switch next {
		case attempt:
			f.runAttempt(t, g.mayBlock(ctx))
		case ask:
			next = f.askStrategy(ctx, t)
			continue
		case askFurther:
			next = f.askAhead(ctx, t)
			continue
		case look:
			if f.lookWhether(ctx, t) {
				f.foundNeedless(t)
				return true, nil
			}
			next = f.leaveUserCode(t, ctx.Err() != nil)
			continue
		case over:
			return false, g.report(t, g.answered(t))
		}
		select { // an answer that is there already counts, even if ctx has ended too
		case <-t.waiter.ready:
		default:
			select {
			case <-t.waiter.ready:
			case <-ctx.Done():
				return false, g.report(t, f.quit(t, ctx.Err()))
			}
		}
		if !t.waiter.woken {
			return false, g.report(t, g.answered(t))
		}
		next = f.wokenUp(t, ctx.Err() != nil)
	}
}

// report counts t's answer, and returns it. A lease that t was given in the instant in which its ctx ended is no lock
// that its caller was given: it is not counted.
func (g *Group) report(t *Ticket, err error) error {
	if err == nil {
		counts := &t.f.shard().counts
		if t.kind == Handed {
			counts.handoffs.Add(1)
		} else {
			counts.granted.Add(1)
		}
	}
	return err
}

// newWaiter gives a waiter with that pace.
func (g *Group) newWaiter(pace Pace, needless func(context.Context) bool) *waiter {
	w := g.waiters.Get().(*waiter)
	w.pace, w.traits, w.needless = pace, TraitsOf(pace), needless
	if d := WithinOf(pace); d > 0 {
		w.until = clock.Now().Add(d)
	}
	if needless != nil {
		w.traits |= FailFast
	}
	return w
}

// answered gives the outcome of t's wait, which has ended, and puts its waiter back into the pool: t.waiter is
// nil from then on.
func (g *Group) answered(t *Ticket) error {
	w, refusal := t.waiter, t.waiter.refusal
	if w.giveUpTimer != nil {
		w.giveUpTimer.Stop()
	}
	t.waiter = nil
	*w = waiter{ready: w.ready}
	g.waiters.Put(w)
	return refusal
}

// quit has t leave, and gives the outcome of its wait. A lease that it is given in this instant is
// passed on to the next.
func (f *flight) quit(t *Ticket, why error) error {
	err := f.leave(t, why)
	refusal := f.g.answered(t)
	if err == nil { // it was refused before
		return refusal
	}
	return err
}

// mayBlock reports whether a caller with that ctx may block for NodeTimeout: not if its
// time is up before, nor if it may be canceled and would notice that late.
func (g *Group) mayBlock(ctx context.Context) bool {
	if g.cfg.NodeTimeout > maxCancelDelay && ctx.Done() != nil {
		return false
	}
	deadline, ends := ctx.Deadline()
	return !ends || time.Until(deadline) >= g.cfg.NodeTimeout
}

// join puts t into the queue of key's flight, and gives what its caller has to do first. A
// caller that comes to others asks its strategy ahead before it queues, where nobody waits for
// the answer.
func (g *Group) join(ctx context.Context, key string, t *Ticket) (*flight, step, error) {
	for {
		f := g.find(key)
		if f == nil {
			return nil, over, g.cfg.Errors.Closed()
		}
		switch next, err := f.join(t); {
		case err != nil:
			return nil, over, err
		case next == askFirst:
			t.waiter.plan(clock.Now())
			if err := ctx.Err(); err != nil {
				return nil, over, g.cfg.Errors.Failed(key, waitedFor, err)
			}
		case next != again:
			if w := t.waiter; w.simulated {
				w.setGiveUpTimer(f, t)
			}
			return f, next, nil
		}
	}
}

// stepLocked returns what t's caller has to do, whose wait has not ended: look, if it was notified;
// what is due, if it is the driver and nothing is in progress; else wait, for as long as its strategy
// would.
func (f *flight) stepLocked(t *Ticket) step {
	switch {
	case t.waiter.mustLook:
		return f.enterUserCodeLocked(t, look)
	case f.phase != idle || f.driverLocked() != t:
		return f.giveUpIfDueLocked(t)
	case t == f.head():
		return f.paceLocked(t)
	}
	return f.standInLocked(t)
}

// paceLocked is what the driver has to do if it is the head, whose strategy paces the flight.
func (f *flight) paceLocked(t *Ticket) step {
	now, w := clock.Now(), t.waiter
	switch {
	case f.judged() && !now.Before(f.nextAttempt):
		f.startAttemptLocked(t)
		return attempt
	case !f.judged() || !w.isEndless() && !now.Before(f.backoff.strategyNext):
		w.startPacing(now)
		return f.enterUserCodeLocked(t, ask)
	}
	return stay
}

// standInLocked is what the driver has to do if it is not the head, which runs code of the user's: the
// attempts that are due, but no strategy paces them.
func (f *flight) standInLocked(t *Ticket) step {
	f.contendLocked()
	if !clock.Now().Before(f.nextAttempt) {
		f.startAttemptLocked(t)
		return attempt
	}
	f.armLocked(f.nextAttempt)
	return f.giveUpIfDueLocked(t)
}

// giveUpIfDueLocked ends t's wait if its strategy would have given up by now; if it was not asked so far
// ahead, it is asked further. A strategy that paces the flight counts real attempts, and is asked after
// each: until the lease comes while its caller runs code of the user's, so that another gets it.
func (f *flight) giveUpIfDueLocked(t *Ticket) step {
	switch w := t.waiter; {
	case !w.pacesSince.IsZero():
		if w.isEndless() || f.cur == nil {
			return stay
		}
		w.pacesSince, w.simulated = time.Time{}, true
	case !w.simulated || clock.Now().Before(w.giveUpAt):
		return stay
	case w.givesUp:
		f.turnAwayLocked(t, f.failed(f.outcomeLocked()))
		return stay
	}
	return f.enterUserCodeLocked(t, askFurther)
}

// enterUserCodeLocked is called when t's caller is about to run code of the user's. What is due meanwhile
// is for the next driver.
func (f *flight) enterUserCodeLocked(t *Ticket, todo step) step {
	w := t.waiter
	w.mustLook = false
	if w.inUserCode = todo == look || w.traits&Quick == 0; w.inUserCode && f.phase == idle && f.n > 1 {
		if clock.Now().Before(f.nextAttempt) {
			f.armLocked(f.nextAttempt)
		} else {
			f.wakeDriverLocked()
		}
	}
	return todo
}

// leaveUserCode is called when that code has returned. If its ctx has ended, it is about to leave.
func (f *flight) leaveUserCode(t *Ticket, ended bool) step {
	f.mu.Lock()
	defer f.unlock()
	t.waiter.inUserCode = false
	if t.state != waiting || ended {
		return stay
	}
	return f.stepLocked(t)
}

// wokenUp is called when t's caller was woken, to look at the flight. If its ctx has ended, it is about
// to leave.
func (f *flight) wokenUp(t *Ticket, ended bool) step {
	f.mu.Lock()
	defer f.unlock()
	t.waiter.woken = false
	switch {
	case t.state != waiting:
		return over
	case ended:
		return stay
	}
	return f.stepLocked(t)
}

// wakeLocked has t's caller look at the flight.
func (t *Ticket) wakeLocked() {
	if !t.waiter.woken {
		t.waiter.woken = true
		t.waiter.ready <- struct{}{}
	}
}

// answerLocked notifies t's caller that its wait has ended. One that was woken is about to see.
func (t *Ticket) answerLocked() {
	if !t.waiter.woken {
		t.waiter.ready <- struct{}{}
	}
}

// wake is wakeLocked, for the giveUpTimer.
func (f *flight) wake(t *Ticket) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.state == waiting {
		t.wakeLocked()
	}
}

// driverLocked is who makes the attempts: the first in the queue whose caller does not run code
// of the user's, and is not about to. nil: nobody can for now.
func (f *flight) driverLocked() *Ticket {
	t := f.head()
	for t != nil && (t.waiter.inUserCode || t.waiter.mustLook) {
		t = f.queue.Next(t)
	}
	return t
}

// wakeDriverLocked has the driver look at the flight.
func (f *flight) wakeDriverLocked() {
	if t := f.driverLocked(); t != nil {
		t.wakeLocked()
	}
}

// nextHolderLocked is the Ticket that gets the lease next: the first in the queue whose caller does not run
// code of the user's, or the head if all of them do. nil: nobody waits.
func (f *flight) nextHolderLocked() *Ticket {
	t := f.head()
	for t != nil && t.waiter.inUserCode {
		t = f.queue.Next(t)
	}
	if t == nil {
		return f.head()
	}
	return t
}

// Code of the user's.

// userCode runs do, which may panic, or end the goroutine: then t leaves the queue, and a lease
// that came meanwhile is passed on to the next.
func (f *flight) userCode(t *Ticket, do func()) {
	returned := false
	defer func() {
		if !returned {
			_ = f.quit(t, context.Canceled)
		}
	}()
	do()
	returned = true
}

// lookWhether reports whether t's caller needs the key no more.
func (f *flight) lookWhether(ctx context.Context, t *Ticket) (needless bool) {
	f.userCode(t, func() { needless = t.waiter.needless(ctx) })
	return needless
}

// askStrategy asks t's strategy about a failure: that of the last attempt, or, if an attempt is not due
// yet, one that t would have had by now. Where it gives up, t is refused; the next caller then asks its
// own strategy about the same failure, which was the whole queue's. But one that gives up without an
// attempt makes a last one first: the key may have been held by a client that does not notify.
func (f *flight) askStrategy(ctx context.Context, t *Ticket) step {
	w, now, goesOn := t.waiter, clock.Now(), false
	f.userCode(t, func() { goesOn = w.goOn(now) })

	f.mu.Lock()
	defer f.unlock()
	w.inUserCode = false
	if t.state != waiting || ctx.Err() != nil { // it is about to leave
		return stay
	}
	switch {
	case goesOn:
		if t == f.head() && f.backoff != nil {
			f.backoff.unjudged, f.backoff.strategyNext = false, w.nextTry
			f.contendLocked()
			if f.phase == idle && now.Before(f.nextAttempt) {
				f.restLocked()
			}
		}
	case f.phase != idle: // others have begun an attempt meanwhile: t gives up if that one fails
		w.last = true
	case f.judged():
		w.last = true
		f.nextAttempt = now
	default:
		return f.repeatLocked(t, now)
	}
	return f.stepLocked(t)
}

// repeatLocked is what t has to do, whose strategy gives up after an attempt that has failed. If that left
// open whether somebody holds the key, the attempt is repeated; else t is refused.
//
// If the votes were split, and all gave up, nobody would have the key. Of those that split them one makes
// the next attempt at once, the foremost by the answers of the nodes, and usually wins, because the others
// have undone theirs by then. They, and those that had no vote, come half a round trip later at least: then
// the foremost has its votes. And not much more than a round trip later, in case it has not: it may release
// the key that soon. Before that they look at the answers that have come meanwhile: an attempt fails as
// soon as others have half of the nodes, and the next answer may be that one of them has a majority.
func (f *flight) repeatLocked(t *Ticket, now time.Time) step {
	w, b, repeats := t.waiter, f.backoff, false
	switch {
	case t != f.head() || b == nil || b.last == nil:
	case w.last && w.nextTry.After(b.failedAt): // it pauses since that failure
		repeats = true
	default:
		var pause time.Duration
		if pause, repeats = w.pause(b.last); repeats {
			w.nextTry = b.failedAt.Add(pause)
			w.repeats++
		}
	}
	switch w.last = true; {
	case repeats && now.Before(w.nextTry) && now.Before(f.nextAttempt):
		b.strategyNext = w.nextTry
		f.armLocked(w.nextTry)
		return stay
	case repeats:
		if b.last = b.last.Now(); b.last.Undecided() {
			f.startAttemptLocked(t)
			return attempt
		}
	}
	f.turnAwayLocked(t, f.failed(f.outcomeLocked()))
	return stay
}

// askAhead asks the strategy of t, which is behind others, further ahead than it has been asked.
func (f *flight) askAhead(ctx context.Context, t *Ticket) step {
	w, now := t.waiter, clock.Now()
	f.userCode(t, func() {
		w.countPastFailures(now)
		w.planGiveUp(now)
	})
	w.setGiveUpTimer(f, t)
	return f.leaveUserCode(t, ctx.Err() != nil)
}

// Strategies. All of this is on the caller's goroutine.

// goOn asks w's strategy about a failure that has occurred now, and reports whether w continues. A
// failure that is asked about ahead of its time does not count.
func (w *waiter) goOn(now time.Time) bool {
	if w.last || !w.until.IsZero() && !now.Before(w.until) {
		return false
	}
	if w.simulated {
		w.countPastFailures(w.pacesSince)
	}
	if now.Before(w.nextTry) {
		w.askInTime()
		return true
	}
	n := more(w.failures, 1)
	d, ok := w.pace.Next(n)
	if ok {
		w.failures, w.nextTry = n, now.Add(max(d, minDelay))
		w.askInTime()
	}
	return ok
}

// askInTime has w's strategy asked again when it gives up, if not before.
func (w *waiter) askInTime() {
	if !w.until.IsZero() {
		w.nextTry = clock.Earlier(w.nextTry, w.until)
	}
}

// plan finds out how long w, which queues behind others, would continue if it contended in Redis.
func (w *waiter) plan(now time.Time) {
	w.simulated, w.nextTry = true, now // as if it asked Redis now, and found the key taken
	w.planGiveUp(now)
}

// comesFirst is called when w comes to a flight in which nobody waits or holds. If it came to others, and has planned
// for that, they have left since.
func (w *waiter) comesFirst() { w.simulated, w.nextTry = false, time.Time{} }

// setGiveUpTimer has t, whose waiter w is, woken when w.giveUpAt has come.
func (w *waiter) setGiveUpTimer(f *flight, t *Ticket) {
	wait := max(1, w.giveUpAt.Sub(clock.Now())) // one that is due already would run here, in a synctest bubble
	if w.giveUpTimer == nil {
		w.giveUpTimer = clock.AfterFunc(wait, func() { f.wake(t) })
	} else {
		w.giveUpTimer.Reset(wait)
	}
}

// pause is how long w waits before it repeats an attempt that has failed as last says, if it does: see
// repeatLocked. A lease that was recalled is released after half a round trip if its process needs no time
// for that.
func (w *waiter) pause(last *quorum.Failure) (pause time.Duration, repeats bool) {
	switch n := w.repeats; {
	case last.Retained && n < maxRecalls:
		return last.Took/4<<n + recallPause<<(2*n), true
	case !last.Split || n >= maxRepeats:
		return 0, false
	case !last.Foremost:
		pause = last.Took/2 + jitter.N(last.Took/2+1)
	}
	return pause, true
}

// startPacing has w's strategy pace the flight from now on.
func (w *waiter) startPacing(now time.Time) {
	if w.pacesSince.IsZero() {
		w.pacesSince = now
		if w.giveUpTimer != nil {
			w.giveUpTimer.Stop()
		}
	}
}

// countPastFailures counts the failures that w would have had by now if it had contended in Redis since
// it arrived. It would have had fewer if its strategy is slow.
func (w *waiter) countPastFailures(now time.Time) {
	for began := clock.Now(); !w.nextTry.After(now); {
		n := more(w.failures, 1)
		d, ok := w.pace.Next(n)
		if !ok {
			return
		}
		w.failures = n
		w.nextTry = w.nextTry.Add(max(d, minDelay))
		if w.isSlow(began) {
			w.nextTry = clock.Later(w.nextTry, clock.Now().Add(minDelay))
			return
		}
	}
}

// planGiveUp sets when w's strategy gives up if each attempt against Redis fails, or when to look
// further. A slow strategy is not asked far ahead.
func (w *waiter) planGiveUp(now time.Time) {
	wait, most := w.nextTry.Sub(now), maxWait
	if !w.until.IsZero() {
		most = min(most, w.until.Sub(now))
	}
	w.givesUp = false
	for nth := 1; nth <= maxSteps && wait < most; nth++ {
		if w.isSlow(now) {
			break
		}
		d, ok, panicked := w.peek(nth)
		if panicked {
			break
		}
		if !ok {
			w.givesUp = true
			break
		}
		wait += min(max(d, minDelay), maxWait)
	}
	if wait >= most && most < maxWait {
		w.givesUp = true
	}
	w.giveUpAt = now.Add(min(wait, most))
}

// isSlow reports whether the strategy has taken its time, since began.
func (w *waiter) isSlow(began time.Time) bool {
	return w.traits&Quick == 0 && clock.Since(began) > slowStrategy
}

// peek asks w's strategy about the nth failure from now on. If it panics about one that has not
// come to pass yet, it is asked again when it has.
func (w *waiter) peek(nth int) (d time.Duration, ok, panicked bool) {
	if nth > 1 && w.traits&Quick == 0 {
		panicked = true
		defer func() {
			if panicked {
				_ = recover()
			}
		}()
	}
	d, ok = w.pace.Next(more(w.failures, nth))
	return d, ok, false
}

// more is n and k more of them. An int of 32 bits has room for 24 days of failures.
func more(n, k int) int { return min(n, math.MaxInt-k) + k }

func (w *waiter) isEndless() bool { return w.traits&Endless != 0 }

// failsFast reports whether t, which waits, gives up when too few nodes can be reached.
func (t *Ticket) failsFast() bool { return t.waiter.traits&FailFast != 0 }

const (
	maxCancelDelay = 50 * time.Millisecond // how late a caller may notice that its ctx was canceled
	minDelay       = time.Millisecond      // keeps a strategy that returns nothing from spinning

	// How far planGiveUp looks.
	maxSteps     = 1000
	maxWait      = 24 * time.Hour
	slowStrategy = time.Millisecond

	maxRepeats  = 8                      // of an attempt that leaves open whether somebody holds the key
	maxRecalls  = 2                      // of these, because the lease may only be retained
	recallPause = 125 * time.Microsecond // before the first of the latter, besides a quarter of a round trip
)
