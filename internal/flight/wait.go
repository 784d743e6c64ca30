package flight

import (
	"context"
	"time"

	"github.com/flightlock/flightlock/internal/list"
)

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
	traits   Traits                     // of its strategy; FailFast besides for every caller of AcquireUnless
	needless func(context.Context) bool // of AcquireUnless; else nil

	// guarded by the flight's mu
	plan        plan               // also used by its caller, before it joins and while inUserCode is set
	repeats     int8               // how often it has repeated its last attempt; below 0: it is not to
	lost        bool               // one of these repeats was because the connection had ended
	giveUpTimer *time.Timer        // wakes it at the end of plan; nil: it was never behind others
	links       list.Links[Ticket] // in the queue
	inUserCode  bool               // its caller runs code of the user's
	mustLook    bool               // its caller is to ask needless

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
	stay    step = iota // until it is woken, is answered, or its ctx ends
	attempt             // make the attempt that was decided on
	ask                 // its strategy, for further delays
	look                // whether it needs the key still
	over                // its wait has ended
	again               // join another flight: that one has died
)

// Acquire makes t hold key, or says why not. t is new; ttl and pace are its own.
func (g *Group) Acquire(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace) error {
	_, err := g.acquire(ctx, g.enter(ctx, key, t, ttl, pace, nil, 0))
	return err
}

// Enter is the first half of Acquire: when it returns, the caller is in the queue. End is the rest, and must
// be called.
func (g *Group) Enter(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace) *Begun {
	b := g.enter(ctx, key, t, ttl, pace, nil, 0)
	return &b
}

// Begun is a caller that has arrived, and does not wait yet.
type Begun struct {
	f    *flight
	t    *Ticket
	next step  // what it has to do first
	err  error // why there is nothing to wait for
}

// Begin is the first half of Acquire, for a caller that wants many keys at once: it makes t's attempt, if it
// is to make one, and does not wait for the outcome. End is the rest, and must be called: t may hold the key
// before, and callers queue behind it. With once, an attempt that decides nothing is not repeated. A
// goroutine for each key would cost half as much as its attempt.
func (g *Group) Begin(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace,
	once bool) *Begun {
	repeats := int8(0)
	if once {
		repeats = -1
	}
	b := g.enter(ctx, key, t, ttl, pace, nil, repeats)
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
// key, when Look is called, and when an attempt after the first is due.
//
// The event that the work has failed elsewhere ends the wait with Errors.FailedElsewhere. The wait also
// ends when too few nodes can be reached (see FailFast): such a caller can do without the lock. While
// needless runs, other waiters may be given the key first.
func (g *Group) AcquireUnless(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace,
	needless func(context.Context) bool) (stopped bool, err error) {
	t.looks = true
	return g.acquire(ctx, g.enter(ctx, key, t, ttl, pace, needless, 0))
}

// enter is a caller's arrival.
func (g *Group) enter(ctx context.Context, key string, t *Ticket, ttl time.Duration, pace Pace,
	needless func(context.Context) bool, repeats int8) Begun {
	b := Begun{t: t}
	t.ttl, t.waiter = ttl, g.newWaiter(ctx, pace, needless)
	t.waiter.repeats, t.waiter.lost = repeats, false
	if err := ctx.Err(); err != nil {
		b.err = g.cfg.Errors.Failed(key, nil, err)
	} else {
		b.f, b.next, b.err = g.join(key, t)
	}
	if b.err != nil {
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
//	make an attempt -> wait for its outcome -> wait for the time that the strategy has named, for an
//	event or for the alarm -> make an attempt -> ...
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
			f.userCode(t, func() { t.waiter.plan.askFurther(ctx) })
			next = f.leaveUserCode(t, ctx.Err() != nil)
			continue
		case look:
			if f.lookWhether(ctx, t) {
				_ = f.quit(t, context.Canceled) // a lease that came in this instant continues
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

// report counts t's answer, and returns it. A lease that t was given in the instant in which its ctx ended is
// no lock that its caller was given: it is not counted.
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
func (g *Group) newWaiter(ctx context.Context, pace Pace, needless func(context.Context) bool) *waiter {
	w := g.waiters.Get().(*waiter)
	w.traits, w.needless = TraitsOf(pace), needless
	if needless != nil {
		w.traits |= FailFast
	}
	w.plan.begin(ctx, pace, w.isEndless())
	return w
}

// answered gives the outcome of t's wait, which has ended, and puts its waiter back into the pool: t.waiter
// is nil from then on.
func (g *Group) answered(t *Ticket) error {
	w, refusal := t.waiter, t.waiter.refusal
	if w.giveUpTimer != nil {
		w.giveUpTimer.Stop()
	}
	t.waiter = nil
	*w = waiter{ready: w.ready, plan: plan{delays: w.plan.delays[:0]}}
	g.waiters.Put(w)
	return refusal
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

// join puts t into the queue of key's flight, and gives what its caller has to do first.
func (g *Group) join(key string, t *Ticket) (*flight, step, error) {
	for {
		f := g.find(key)
		if f == nil {
			return nil, over, g.cfg.Errors.Closed()
		}
		switch next, err := f.join(t); {
		case err != nil:
			return nil, over, err
		case next != again:
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
		return f.behindLocked(t)
	}
	next := f.dueLocked(t)
	switch next {
	case attempt:
		f.startAttemptLocked(t)
	case ask:
		f.enterUserCodeLocked(t, ask)
	}
	return next
}

// enterUserCodeLocked is called when t's caller is about to run code of the user's. What is due meanwhile
// is for the next driver.
func (f *flight) enterUserCodeLocked(t *Ticket, todo step) step {
	t.waiter.mustLook, t.waiter.inUserCode = false, true
	f.paceLocked()
	return todo
}

// leaveUserCode is called when that code has returned. If its ctx has ended, it is about to leave.
func (f *flight) leaveUserCode(t *Ticket, ended bool) step {
	f.mu.Lock()
	defer f.unlock()
	other := f.driverLocked()
	t.waiter.inUserCode = false
	if t.state != waiting || ended {
		return stay
	}
	if other != nil && f.driverLocked() == t {
		other.wakeLocked() // its strategy bounds its wait again
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

func (w *waiter) isEndless() bool { return w.traits&Endless != 0 }

// failsFast reports whether t, which waits, gives up when too few nodes can be reached.
func (t *Ticket) failsFast() bool { return t.waiter.traits&FailFast != 0 }

// maxCancelDelay is how late a caller may notice that its ctx was canceled.
const maxCancelDelay = 50 * time.Millisecond
