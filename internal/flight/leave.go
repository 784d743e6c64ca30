package flight

import (
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// How a waiter leaves the queue without the lease, and what becomes of a flight that nobody waits in.

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

// leave ends t's wait because its caller's ctx has ended. It returns nil when t was
// refused already: then that is the outcome. In any case it leaves ready empty, for the waiter's next use.
func (f *flight) leave(t *Ticket, ctxErr error) error {
	f.mu.Lock()
	defer f.unlock()
	switch t.state {
	case waiting:
		seen := f.knownLocked() // nil if t was the first to ask, and nothing is known yet
		if seen == nil && t.kind != Remote {
			seen = f.busyLocked()
		}
		err := f.g.cfg.Errors.Failed(f.key, seen, ctxErr)
		next := f.nextHolderLocked()
		f.dropLocked(t)
		t.state = left
		if t.waiter.woken {
			<-t.waiter.ready
		}
		f.leftLocked(next)
		return err
	case left:
		<-t.waiter.ready
		return nil
	}
	// Granted in the instant in which ctx ended (and maybe lost since). The caller gets ctx's error,
	// so the lease must be passed on to the next.
	<-t.waiter.ready
	var last *quorum.Failure // nobody else had it, unless t has waited for them
	if t.kind != Remote {
		last = f.busyLocked()
	}
	err := f.g.cfg.Errors.Failed(f.key, last, ctxErr)
	if t.state == holding {
		f.endLocked(t, released, nil)
		f.handOverOrReleaseLocked(clock.Now(), t.lingers())
	}
	return err
}

// TurnAway ends the wait of all who wait for key, with err.
func (g *Group) TurnAway(key string, err error) {
	if f := g.known(key); f != nil {
		f.mu.Lock()
		defer f.unlock()
		f.turnAwayAllLocked(err, all)
	}
}

// turnAwayLocked ends t's wait with err.
func (f *flight) turnAwayLocked(t *Ticket, err error) {
	next := f.nextHolderLocked()
	f.refusedLocked(t, err)
	f.leftLocked(next)
}

func (f *flight) refusedLocked(t *Ticket, err error) {
	f.dropLocked(t)
	t.state, t.waiter.refusal = left, err
	t.answerLocked()
}

// turnAwayAllLocked ends the wait of all for whom who reports true, with err.
func (f *flight) turnAwayAllLocked(err error, who func(*Ticket) bool) {
	nextHolder, before := f.nextHolderLocked(), f.n
	for t := f.head(); t != nil; {
		next := f.queue.Next(t)
		if who(t) {
			f.refusedLocked(t, err)
		}
		t = next
	}
	if f.n < before {
		f.leftLocked(nextHolder)
	}
}

// leftLocked is called when waiters have left. next is the Ticket that the lease would have gone to
// before. If that was one of them, another's strategy paces the flight now, or it may have been about to act.
// An attempt for which nobody waits is canceled.
func (f *flight) leftLocked(next *Ticket) {
	switch {
	case f.n > 0:
		if f.nextHolderLocked() != next {
			f.paceLocked()
		}
	case f.phase == acquiring:
		f.retry = true // whoever comes meanwhile has another attempt, whatever this one says
		f.deferLocked(f.attempt.Cancel)
	case f.phase == idle:
		f.dieLocked()
	}
}

// dieLocked removes the flight, which is idle, unless it lingers. Nobody waits.
func (f *flight) dieLocked() {
	if f.staysSubscribedLocked() {
		return
	}
	f.phase = dead
	f.endContentionLocked()
	f.g.remove(f)
}
