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
// A Timer belongs to one Ticket. The zero value is idle.
type Timer struct {
	who TimerHandler // not nil once it was set

	// guarded by the flight's mu
	at   clock.Instant // when it is due; 0: it is idle; below 0: it is over
	next *Timer        // of the same Ticket, which hardly ever has two
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
	f := t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.state != holding || r.at < 0 {
		return
	}
	t.relied = true
	if r.at == 0 {
		r.next, t.timers = t.timers, r
	}
	at := f.g.at(clock.Now().Add(wait))
	if wait >= longWait {
		at -= (at - 1) % clock.Instant(coalesceWindow) // the Group's clock began at 1
	}
	r.who, r.at = who, at
	f.armAtLocked(at)
	t.lease.Settle()
}

// StopTimer stops r, for good. It may be called at any time.
func (t *Ticket) StopTimer(r *Timer) {
	f := t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.state == holding && r.at > 0 {
		t.takeLocked(r)
	}
	r.at = -1
}

// takeLocked takes r, which is set, out of t's.
func (t *Ticket) takeLocked(r *Timer) {
	at := &t.timers
	for *at != r {
		at = &(*at).next
	}
	*at = r.next
	r.at, r.next = 0, nil
}

// dueTimersLocked sees to what is due for t, and says when to look again: when the next is due, or
// when t is over by either clock.
func (f *flight) dueTimersLocked(t *Ticket, now time.Time) time.Time {
	again := now.Add(clock.Left(now, t.until))
	for r := t.timers; r != nil; {
		next := r.next
		if wait := time.Duration(r.at - f.g.at(now)); wait <= 0 {
			t.takeLocked(r)
			f.deferLocked(r.who.Due)
		} else {
			again = clock.Earlier(again, now.Add(wait))
		}
		r = next
	}
	return again
}
