package flightlock

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/flightlock/flightlock/internal/flight"
)

// reentry is the part of a Lock that is needed once others are nested in it, or it is nested
// itself.
//
// A ctx made by Lock.Context carries its Lock. Locking the same key of the same Client with that
// ctx returns a nested Lock: another handle on the Ticket of the outermost Lock. The outermost Lock
// counts the handles, and the release of the last one releases the Ticket.
//
//	Lock:    held -> released       its own Release; its Contexts end, the others continue
//	Ticket:  held -> released       the last Release
//	              -> lost           ends all Locks at once
//
// Two steps decide everything, and both are atomic operations, so that a Lock that is never nested
// takes no mutex for it:
//
//   - Release of a Lock without a reentry stores notShared in it. A caller that wants to nest finds
//     either nil (and stores a reentry first, which Release then finds) or notShared.
//   - handles goes from n to n+1 for a nested Lock unless it is 0 (addHandle), and from n to n-1 once
//     for each Lock, because only the first Release of a Lock finds released unset under its mu. So it
//     is 0 exactly once, and no caller gets a handle on a Ticket that is being released.
//
// The alternative, a nested flight.Ticket, was rejected: the queue would have to know it, and every
// step of the flight to check for it. Here the local tier does not know that nesting exists.
type reentry struct {
	around  *Lock        // the outermost Lock, which has the Ticket; nil if this is the one
	handles atomic.Int64 // of the outermost: Locks of this Ticket that were not released

	mu       sync.Mutex                   // guards what follows; taken before the flight's
	released bool                         // this Lock, by its own Release
	left     bool                         // ... while the Ticket was held, and others held it on
	contexts map[<-chan struct{}]*derived // by the Done channel of their parents
}

// notShared is the reentry of a Lock that was released before it had one.
var notShared = &reentry{released: true}

// errReleased is the error of a Lock that was released: by its own Release, or with its Ticket.
var errReleased = fmt.Errorf("flightlock: %w: it was released", ErrNotHeld)

// around is the outermost of the locks in which l is nested, nil if there is none.
func (l *Lock) around() *Lock {
	if n := l.reentry.Load(); n != nil {
		return n.around
	}
	return nil
}

// outermost is the Lock whose Ticket l is a handle on.
func (l *Lock) outermost() *Lock {
	if o := l.around(); o != nil {
		return o
	}
	return l
}

// ticket is the Ticket that l is a handle on.
func (l *Lock) ticket() *flight.Ticket { return &l.outermost().own }

// ensureReentry makes a reentry for l if it has none. It returns notShared if l was released
// before.
func (l *Lock) ensureReentry() *reentry {
	if n := l.reentry.Load(); n != nil {
		return n
	}
	n := &reentry{}
	n.handles.Store(1) // before others can see it
	if l.reentry.CompareAndSwap(nil, n) {
		return n
	}
	return l.reentry.Load()
}

// wasReleased reports whether l's own Release was called, and whether it left the Ticket to others: what
// becomes of that does not concern l any more.
func (l *Lock) wasReleased() (released, left bool) {
	n := l.reentry.Load()
	if n == nil || n == notShared {
		return n == notShared, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.released, n.left
}

// releaseHandle ends l, which has a reentry, and calls end for the Ticket with the last of its handles.
func (l *Lock) releaseHandle(end func(*flight.Ticket) error) error {
	n := l.reentry.Load()
	n.mu.Lock()
	again, left, contexts := n.released, n.left, n.contexts
	n.released, n.contexts = true, nil
	n.mu.Unlock()
	t := l.ticket()
	err := t.Err() // before the handle is given up: from then on others may release the Ticket
	switch {
	case again && (left || err == nil):
		return lockEnded(t.Key(), errReleased)
	case again:
		return lockEnded(t.Key(), err)
	case l.outermost().dropHandle():
		return end(t)
	}
	for _, d := range contexts {
		d.forget()
		d.cancel(nil)
	}
	if err != nil {
		return lockEnded(t.Key(), err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.left = true
	return nil
}

// dropHandle counts one Lock less on l's Ticket, and reports whether it was the last.
func (l *Lock) dropHandle() (last bool) { return l.reentry.Load().handles.Add(-1) == 0 }

// addHandle counts one more Lock, unless the last one was released.
func (n *reentry) addHandle() bool {
	for {
		k := n.handles.Load()
		if k == 0 {
			return false
		}
		if n.handles.CompareAndSwap(k, k+1) {
			return true
		}
	}
}

// nested returns one more Lock on l's Ticket, or nil if l is over.
func (l *Lock) nested() *Lock {
	if l.Err() != nil {
		return nil
	}
	n := l.ensureReentry()
	if n == notShared { // l was released just now
		return nil
	}
	outermost := l.outermost()
	if !outermost.reentry.Load().addHandle() {
		return nil
	}
	inner := &Lock{c: l.c}
	inner.reentry.Store(&reentry{around: outermost})
	return inner
}

// carried is a Lock in a ctx, and the one that the ctx carried before.
type carried struct {
	l    *Lock
	next *carried
}

type carriedKey struct{} // of the ctx value; empty, so that looking it up allocates nothing

func carriedBy(ctx context.Context) *carried {
	c, _ := ctx.Value(carriedKey{}).(*carried)
	return c
}

// carrying is ctx with l in it.
func carrying(ctx context.Context, l *Lock) context.Context {
	l.c.carries()
	return context.WithValue(ctx, carriedKey{}, &carried{l, carriedBy(ctx)})
}

// carries notes that a ctx carries a Lock of c.
func (c *Client) carries() {
	if !c.carried.Load() {
		c.carried.Store(true)
	}
}

// reenter returns a Lock nested in one that ctx carries, or nil if there is none or ctx has ended.
func (c *Client) reenter(ctx context.Context, key string) *Lock {
	if !c.carried.Load() { // spares most callers a walk through their ctx
		return nil
	}
	held := carriedBy(ctx)
	if held == nil || ctx.Err() != nil {
		return nil
	}
	for ; held != nil; held = held.next {
		if held.l.c == c && held.l.ticket().Key() == key {
			if l := held.l.nested(); l != nil {
				return l
			}
		}
	}
	return nil
}

// FromContext returns the Lock whose Context method made ctx: the innermost if there are several,
// nil if there is none. With it, functions called from Do get the fencing token:
// FromContext(ctx).Fence() is 0 without a lock. The Lock may be over: see Lock.Err.
func FromContext(ctx context.Context) *Lock {
	if held := carriedBy(ctx); held != nil {
		return held.l
	}
	return nil
}
