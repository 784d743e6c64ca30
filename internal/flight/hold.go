package flight

import (
	"context"
	"math"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// Pace is a retry strategy: how long to wait after the attempt-th failure, and whether
// to try again.
type Pace interface {
	Next(attempt int) (delay time.Duration, ok bool)
}

// Traits are what a Pace says of itself, if it has a method of that name.
type Traits uint8

// The traits.
const (
	Endless  Traits = 1 << iota // it never gives up
	FailFast                    // but its caller does when too few nodes can be reached
	Quick                       // it neither blocks nor panics, and may be called with a flight's mu held; see unknown for others
)

// TraitsOf gives those of p.
func TraitsOf(p Pace) Traits {
	if p, says := p.(interface{ Traits() Traits }); says {
		return p.Traits()
	}
	return 0
}

// Hold is one caller's place in a flight: first in the queue, then holding the lease.
//
//	waiting -> holding -> released
//	   |          +-----> lost (Until passed, or the lease was lost)
//	   +-> left (ctx ended, strategy gave up, refused)
//
// Every transition happens under the flight's mu, so a Hold that is over can do nothing
// to its successor: whatever it asks for, the flight looks first whether it is current.
type Hold struct {
	f   *flight // set before the Hold is shared
	ttl time.Duration

	*wait // while its caller waits; nil after that

	// guarded by f.mu
	state  state
	way    Way  // does not change once the wait is over
	looks  bool // it is of AcquireUnless
	relied bool // it was to be refreshed, or somebody listens for its end
	fence  int64
	lease  Lease
	until  time.Time     // when this Hold is over if nothing renews it
	room   time.Duration // how far renewals for the flight's own sake may move until
	end    *end          // nil for a Hold whose end nobody wants to hear of, and that was not lost

	reminders *Reminder // first of those that are set; nil once it is over
}

// wait is what a Hold needs as long as its caller waits. There are as many at work as there are
// callers that wait, however many locks are held, so a Group keeps them for the next: each
// goes back when its caller has the answer, whom it is handed to by the value in ready. From
// then on the Hold is not in the queue any more, so nobody else has a way to it; what may
// come later, giveUp by the timer, looks at the Hold's state first.
type wait struct {
	pace     Pace
	*unknown        // nil for a pace that is Quick
	traits   Traits // of pace; FailFast for every caller of AcquireUnless

	// guarded by f.mu
	next, prev *Hold       // in the queue
	ends       bool        // its pace ends when patience fires; else look again then
	failures   int         // how many failures its pace has been asked about
	due        time.Time   // when, by its pace, its next attempt is; zero before the first failure
	patience   *time.Timer // for giveUp; nil if its pace has no end, or paces the flight

	// news gets a value when a caller of AcquireUnless is to look; nil for others.
	news chan struct{}

	// ready gets one value when the wait is over. refusal is written before that, and
	// may be read after it. A front waiter may get one before, with sent set: it is to make the
	// attempt itself. If its wait ends before it has come to that, there is no second one.
	ready   chan struct{}
	sent    bool // written under f.mu, while it waits
	refusal error
}

// end is what there is to say about the end of a Hold.
type end struct {
	why     error // lost: why
	stopped error // why whoever refreshed it has stopped, if it has
	failed  error // the outcome of the last refresh, if it failed
	hear    map[*func(error)]struct{}
}

type state uint8

const (
	waiting state = iota
	holding
	released
	lost
	left
)

// Mode is how a caller queues.
type Mode uint8

// The modes.
const (
	Queue Mode = iota // behind whoever is there
	Try               // only if nobody is there
	Alone             // in a flight of its own
)

// Way is what a caller waited for.
type Way uint8

// The ways.
const (
	Remote Way = iota // nobody was there before it
	Queued            // others of this process, and then remote
	Handed            // others of this process; the last of them handed the lease over
)

// Acquire makes h hold key, or says why not. h is new; ttl and pace are its own.
//
// It waits here and not in a function of its own: each frame of a goroutine that waits is read at
// every cycle of the garbage collector, and again when it goes on.
func (g *Group) Acquire(ctx context.Context, key string, h *Hold, ttl time.Duration, pace Pace, mode Mode) error {
	began := g.begins()
	if err := ctx.Err(); err != nil {
		return g.tell(began, h, g.cfg.GaveUp(key, err, nil))
	}
	h.ttl, h.wait = ttl, g.waiting(pace)
	f, err := g.join(key, h, mode, g.mayBlock(ctx))
	if err != nil {
		h.refusal = err
		return g.tell(began, h, g.answered(h))
	}
	if h.unknown != nil {
		return g.tell(began, h, g.waitAsking(ctx, f, h))
	}
	for over := false; !over; over = !h.sent || f.goes(h, g.mayBlock(ctx)) {
		select { // an outcome that is there already counts, even if ctx has ended too
		case <-h.ready:
			continue
		default:
		}
		select {
		case <-h.ready:
		case <-ctx.Done():
			return g.tell(began, h, f.quit(h, ctx.Err()))
		}
	}
	return g.tell(began, h, g.answered(h))
}

// begins is when a caller came, if anybody wants to know.
func (g *Group) begins() (now time.Time) {
	if g.cfg.Acquired != nil {
		now = time.Now()
	}
	return now
}

// tell tells of h's answer whoever wants to know, and gives it back.
func (g *Group) tell(began time.Time, h *Hold, err error) error {
	if g.cfg.Acquired != nil {
		g.cfg.Acquired(time.Since(began), h.way, err)
	}
	return err
}

// waiting gives a wait by that pace.
func (g *Group) waiting(pace Pace) *wait {
	w := g.waits.Get().(*wait)
	w.pace, w.traits = pace, TraitsOf(pace)
	if w.traits&Quick == 0 {
		w.unknown = &unknown{questions: make(chan question, 1)}
	}
	return w
}

// answered gives the outcome of h's wait, which is over.
func (g *Group) answered(h *Hold) error {
	w, refusal := h.wait, h.refusal
	h.wait = nil
	*w = wait{ready: w.ready}
	g.waits.Put(w)
	return refusal
}

// quit has h leave, and gives the outcome of its wait. A lease that it is given in this
// instant goes on to the next.
func (f *flight) quit(h *Hold, why error) error {
	err := f.leave(h, why)
	refusal := f.g.answered(h)
	if err == nil { // it was refused before
		return refusal
	}
	return err
}

// mayBlock reports whether a caller with that ctx may block for NodeTimeout: not if its
// time is up before. A ctx that is cancelled meanwhile is noticed after that.
func (g *Group) mayBlock(ctx context.Context) bool {
	deadline, ends := ctx.Deadline()
	return !ends || time.Until(deadline) >= g.cfg.NodeTimeout
}

func (g *Group) join(key string, h *Hold, mode Mode, inline bool) (*flight, error) {
	for {
		var f *flight
		if mode == Alone {
			f = g.single(key)
		} else {
			f = g.find(key)
		}
		if f == nil {
			return nil, g.cfg.Closed
		}
		if joined, err := f.join(h, mode, inline); joined || err != nil {
			return f, err
		}
	}
}

// Fence is the fencing token.
func (h *Hold) Fence() int64 { return h.fence } // does not change once held

// Owner is the whole stored value of the lease that h was given.
func (h *Hold) Owner() string { return h.lease.Owner() }

// Until is when h is over if nothing renews it.
func (h *Hold) Until() time.Time {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.until
}

// Err is nil while h holds, by the clock. It does not wait for a timer. Once it is not nil it
// stays so.
func (h *Hold) Err() error {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	now := clock.Now()
	if h.state == holding && clock.Passed(now, h.until) {
		h.pastLocked(now)
	}
	return h.errLocked(now)
}

// pastLocked makes Until, which has passed at now, have passed for good, and has the flight end h
// at once. If the wall clock alone says that it has passed, it may be set back, and a
// refresh that is under way would then move Until: what Err has said would not be true any more.
// It does not end h by itself, because that calls those who listen, and Err may be called under
// their locks.
func (h *Hold) pastLocked(now time.Time) {
	h.until = now.Add(clock.Left(now, h.until))
	h.f.armLocked(now)
}

func (h *Hold) errLocked(now time.Time) error {
	switch {
	case h.state == lost:
		return h.end.why
	case h.state != holding:
		return h.f.g.cfg.NotHeld
	case clock.Passed(now, h.until):
		return h.expiredLocked()
	}
	return nil
}

// Unrefreshed says why no refresh follows: if h runs out, that is the reason. A refresh that the holder
// makes all the same takes it back.
func (h *Hold) Unrefreshed(why error) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.relied = true; h.state == holding {
		h.endOfLocked().stopped = why
	}
}

// expiredLocked is why h is over when its Until has passed.
func (h *Hold) expiredLocked() error {
	cfg := &h.f.g.cfg
	if e := h.end; e != nil && h.relied && cfg.ExpiredBy != nil && (e.stopped != nil || e.failed != nil) {
		return cfg.ExpiredBy(e.stopped, e.failed)
	}
	return cfg.Expired
}

// OnEnd has fn called when h is released (with nil) or lost (with the reason). If that
// has happened already, fn is not registered and over is true. fn must not block.
func (h *Hold) OnEnd(fn func(why error)) (cancel func(), why error, over bool) {
	f := h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if h.state == lost {
		return nil, h.end.why, true
	}
	if h.state != holding {
		return nil, nil, true
	}
	h.relied = true
	e := h.endOfLocked()
	if e.hear == nil {
		e.hear = map[*func(error)]struct{}{}
	}
	at := &fn
	e.hear[at] = struct{}{}
	return func() {
		f.mu.Lock()
		delete(e.hear, at)
		f.mu.Unlock()
	}, nil, false
}

// endOfLocked is h.end, made if there was none.
func (h *Hold) endOfLocked() *end {
	if h.end == nil {
		h.end = &end{}
	}
	return h.end
}

// Release ends h: the lease goes to the next waiter, or back to the nodes. It returns nil
// when either happened, and is bounded by NodeTimeout.
func (h *Hold) Release() error { return h.release(false) }

// ReleaseFailed is Release of a Hold whose work has failed: if the lease goes back to the nodes, the other
// processes that wait in AcquireUnless are told so, and end with Config.Failed. To a waiter of this process
// the lease is handed as ever.
func (h *Hold) ReleaseFailed() error { return h.release(true) }

func (h *Hold) release(failed bool) error {
	f := h.f
	f.mu.Lock()
	now := clock.Now()
	if h.state != holding || clock.Passed(now, h.until) {
		f.overdueLocked(now)
		err := f.g.cfg.Ended(f.key, h.errLocked(now))
		f.unlock()
		return err
	}
	f.endLocked(h, released, nil)
	if !f.passLocked(now) {
		f.unlockInline(true)
		return nil
	}
	gone := f.g.endings.Get().(*ending)
	f.todo.gone, f.todo.failed = gone.tell, failed
	f.unlockInline(true)
	err := <-gone.heard
	f.g.endings.Put(gone)
	return err
}

// moveLocked sets when h is over, and how far renewals for the flight's own sake may move
// that.
func (h *Hold) moveLocked(until, limit time.Time) { h.until, h.room = until, limit.Sub(until) }

// limitLocked is how far they may.
func (h *Hold) limitLocked() time.Time { return h.until.Add(h.room) }

// TTL is what h was asked for with.
func (h *Hold) TTL() time.Duration { return h.ttl }

// Refresh gives h its full ttl again and calls done once, with nil or the reason why not;
// the error says too whether h is over.
func (h *Hold) Refresh(timeout time.Duration, done func(error)) {
	f := h.f
	f.mu.Lock()
	now := clock.Now()
	if h.state != holding || clock.Passed(now, h.until) {
		f.overdueLocked(now)
		err := f.g.cfg.Ended(f.key, h.errLocked(now))
		f.unlock()
		done(err)
		return
	}
	h.relied = true
	last := &f.asks
	for *last != nil {
		last = &(*last).next
	}
	*last = &ask{h: h, timeout: timeout, done: done}
	f.refreshLocked()
	f.unlock()
}

// failed sets due, by h's strategy, after an attempt of its own that failed just now, and
// says whether h goes on. An attempt made ahead of its turn does not count.
func (h *Hold) failed(now time.Time) bool {
	switch {
	case h.unknown != nil && h.last:
		return false
	case now.Before(h.due):
		return true
	case h.unknown != nil:
		h.metLocked(now, true)
		return true
	}
	h.failures = more(h.failures, 1)
	d, ok := h.pace.Next(h.failures)
	h.due = now.Add(max(d, minDelay))
	return ok
}

// takeOver makes h, which is the front waiter now, the one whose pace counts. It has what
// the time that it has waited here leaves of it.
func (h *Hold) takeOver(now time.Time) {
	if h.patience != nil {
		h.patience.Stop()
		h.patience = nil
		if h.unknown != nil {
			h.frontLocked(now)
			return
		}
		h.advance(now)
	}
}

// advance counts the failures that h would have met by now, had it asked Redis itself
// since it came.
func (h *Hold) advance(now time.Time) {
	for !h.due.After(now) {
		n := more(h.failures, 1)
		d, ok := h.pace.Next(n)
		if !ok {
			return
		}
		h.failures = n
		h.due = h.due.Add(max(d, minDelay))
	}
}

// outlook is how long, from now on, h's pace would go on against Redis if each attempt
// failed; if ends is false, it would go on longer than was looked.
func (h *Hold) outlook(now time.Time) (wait time.Duration, ends bool) {
	wait = h.due.Sub(now)
	for step := 1; step <= maxSteps && wait < maxWait; step++ {
		d, ok := h.pace.Next(more(h.failures, step))
		if !ok {
			return wait, true
		}
		wait += min(max(d, minDelay), maxWait)
	}
	return min(wait, maxWait), false
}

// more is n and k more of them. An int of 32 bits has room for 24 days of failures.
func more(n, k int) int { return min(n, math.MaxInt-k) + k }

func (h *Hold) isEndless() bool { return h.traits&Endless != 0 }

// failsFast reports whether h, which waits, gives up when too few nodes can be reached.
func (h *Hold) failsFast() bool { return h.traits&FailFast != 0 }

const (
	minDelay = time.Millisecond // keeps a strategy that returns nothing from spinning

	// How far outlook looks.
	maxSteps = 1000
	maxWait  = 24 * time.Hour
)

// Key is the lock key.
func (h *Hold) Key() string { return h.f.key }
