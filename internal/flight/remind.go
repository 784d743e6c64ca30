package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// Reminder is a call that is due while a Hold is held: of whoever refreshes it. It comes from the
// flight's own alarm, so a Hold that is refreshed needs no timer of its own, and it cannot come
// when the Hold is over: nobody has to stop it then.
//
//	idle <--> set --Forget--> over
//
// A Reminder belongs to one Hold. The zero value is idle.
type Reminder struct {
	who Reminded // not nil once it was set

	// guarded by the flight's mu
	at         instant   // when it is due; 0: it is idle; below 0: it is over
	next, prev *Reminder // of the same Hold
}

// Reminded is called when a Reminder is due. It is not called while the flight is locked, and
// must not block.
type Reminded interface{ Due() }

// A wait of longWait or more ends on a beat of the tact, the last one before its end: what comes due
// in a shard between two beats takes one timer and one goroutine together, and goes to the nodes
// in larger batches.
const (
	longWait = time.Second
	tact     = 5 * time.Millisecond
)

// Remind has who.Due called after wait, once, unless h is over by then or r is forgotten.
// Setting r again moves it. A long wait may end a tact earlier. A Hold of which somebody is
// reminded will be held for long.
func (h *Hold) Remind(r *Reminder, who Reminded, wait time.Duration) {
	f := h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if h.state != holding || r.at < 0 {
		return
	}
	h.relied = true
	if r.at == 0 {
		if r.next = h.reminders; r.next != nil {
			r.next.prev = r
		}
		h.reminders = r
	}
	at := f.g.at(clock.Now().Add(wait))
	if wait >= longWait {
		at -= (at - 1) % instant(tact) // the Group's clock began at 1
	}
	r.who, r.at = who, at
	f.armAtLocked(at)
	h.lease.Settle()
}

// Forget takes r back, for good. It may be called at any time.
func (h *Hold) Forget(r *Reminder) {
	f := h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if h.state == holding && r.at > 0 {
		h.takeLocked(r)
	}
	r.at = -1
}

// takeLocked takes r, which is set, out of h's.
func (h *Hold) takeLocked(r *Reminder) {
	if r.prev == nil {
		h.reminders = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	}
	r.at, r.next, r.prev = 0, nil, nil
}

// remindLocked sees to what is due for h, and says when to look again: when the next is due, or
// when h is over by either clock.
func (f *flight) remindLocked(h *Hold, now time.Time) time.Time {
	again := now.Add(clock.Left(now, h.until))
	for r := h.reminders; r != nil; {
		next := r.next
		if wait := time.Duration(r.at - f.g.at(now)); wait <= 0 {
			h.takeLocked(r)
			f.laterLocked(r.who.Due)
		} else {
			again = earlier(again, now.Add(wait))
		}
		r = next
	}
	return again
}
