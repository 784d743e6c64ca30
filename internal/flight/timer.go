package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// Timer is a call that is due while a Ticket is held, of the caller that refreshes it. It comes from the
// flight's own alarm, so a Ticket that is refreshed needs no timer of its own, and it cannot come
// when the Ticket is over: nobody has to stop it then.
//
//	idle <--> set --StopTimer--> over
//
// A Timer belongs to one Ticket, which has it from when it is first set until it, or the Ticket, is over.
// The zero value is idle.
type Timer struct {
	who TimerHandler // not nil once it was set

	// guarded by the flight's mu
	since clock.Instant // when it was first set; 0: it was not
	at    clock.Instant // when it is due; 0: it is idle; below 0: it is over
	next  *Timer        // of the same Ticket, which hardly ever has two
}

// TimerHandler is called when a Timer is due. It is not called while the flight is locked, and
// must not block.
type TimerHandler interface{ Due() }

// A wait of longWait or more ends at a multiple of coalesceWindow, the last one before its end:
// what comes due in a shard within one window takes one timer and one goroutine together, and goes
// to the nodes in larger batches.
const (
	longWait       = time.Second
	coalesceWindow = 5 * time.Millisecond
)

// SetTimer has who.Due called after wait, once, unless t is over by then or r was stopped.
// Setting r again moves it. A long wait may end up to a coalesceWindow early. A Ticket that has a
// timer will be held for long.
func (t *Ticket) SetTimer(r *Timer, who TimerHandler, wait time.Duration) {
	t = t.lock()
	f := t.f
	defer f.mu.Unlock()
	if t.state != holding || r.at < 0 {
		return
	}
	t.relied = true
	now := clock.Now()
	if r.since == 0 {
		r.since = f.g.at(now)
		r.next, t.timers = t.timers, r
	}
	at := f.g.at(now.Add(wait))
	if wait >= longWait {
		at -= (at - 1) % clock.Instant(coalesceWindow) // the Group's clock began at 1
	}
	r.who, r.at = who, at
	f.armAtLocked(at)
	t.lease.Settle()
}

// StopTimer stops r, for good. It may be called at any time.
func (t *Ticket) StopTimer(r *Timer) {
	t = t.lock()
	defer t.f.mu.Unlock()
	for at := &t.timers; *at != nil; at = &(*at).next {
		if *at == r {
			*at, r.next = r.next, nil
			break
		}
	}
	r.at = -1
}

// TimerAge is how long ago r was first set, 0 if it was not.
func (t *Ticket) TimerAge(r *Timer) time.Duration {
	t = t.lock()
	defer t.f.mu.Unlock()
	return t.ageLocked(r, clock.Now())
}

func (t *Ticket) ageLocked(r *Timer, now time.Time) time.Duration {
	if r.since == 0 {
		return 0
	}
	return time.Duration(t.f.g.at(now) - r.since)
}

// oldestTimerLocked is the age of the oldest of t's timers.
func (t *Ticket) oldestTimerLocked(now time.Time) (age time.Duration) {
	for r := t.timers; r != nil; r = r.next {
		age = max(age, t.ageLocked(r, now))
	}
	return age
}

// dueTimersLocked sees to what is due for t, and says when to look again: when the next is due, or
// when t is over by either clock.
func (f *flight) dueTimersLocked(t *Ticket, now time.Time) time.Time {
	again := now.Add(clock.Left(now, t.until))
	for r := t.timers; r != nil; r = r.next {
		switch wait := time.Duration(r.at - f.g.at(now)); {
		case r.at == 0:
		case wait <= 0:
			r.at = 0
			f.deferLocked(r.who.Due)
		default:
			again = clock.Earlier(again, now.Add(wait))
		}
	}
	return again
}
