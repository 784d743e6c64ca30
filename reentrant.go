package flightlock

import (
	"cmp"
	"context"
	"fmt"

	"github.com/flightlock/flightlock/internal/flight"
)

// A ctx made by Lock.Context carries its Lock. Locking the same key of the same Client with that
// ctx returns a nested Lock: another handle on the Ticket of the outermost Lock. The outermost Lock
// counts the handles, and the release of the last one releases the Ticket.
//
//	Lock:    held -> released -> left  its own Release; its Contexts end, the others continue
//	Ticket:  held -> released          the last Release
//	              -> lost              ends all Locks at once
//
// handles goes from n to n+1 for a nested Lock unless it is 0 (addHandle), and from n to n-1 once for
// each Lock, by its first Release. So it is 0 exactly once, and no caller gets a handle on a Ticket
// that is being released.
//
// The alternative, a nested flight.Ticket, was rejected: the queue would have to know it, and every
// step of the flight to check for it. Here the local tier does not know that nesting exists.
const (
	stateHeld     = iota
	stateReleased // by its own Release
	// ... which has left the Ticket to others: what becomes of that does not concern the Lock any more
	stateLeft
)

// errReleased is the error of a Lock that was released: by its own Release, or with its Ticket.
var errReleased = fmt.Errorf("flightlock: %w: it was released", ErrNotHeld)

// outermost is the Lock whose Ticket l is a handle on.
func (l *Lock) outermost() *Lock { return cmp.Or(l.around, l) }

// ticket is the Ticket that l is a handle on.
func (l *Lock) ticket() *flight.Ticket { return &l.outermost().own }

// addHandle counts one more Lock, unless the last one was released.
func (l *Lock) addHandle() bool {
	for n := l.handles.Load(); n > 0; n = l.handles.Load() {
		if l.handles.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// nested returns one more Lock on l's Ticket, or nil if l is over.
func (l *Lock) nested() *Lock {
	if outermost := l.outermost(); l.Err() == nil && outermost.addHandle() {
		return &Lock{c: l.c, around: outermost}
	}
	return nil
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

// reenter returns a Lock nested in one that ctx carries, or nil if there is none or ctx has ended.
func (c *Client) reenter(ctx context.Context, key string) *Lock {
	if !c.carried.Load() || ctx.Err() != nil { // the first spares most callers a walk through their ctx
		return nil
	}
	for l := c.carriedLock(ctx, key); l != nil; l = c.carriedLock(ctx, key) { // it may just be released
		if nested := l.nested(); nested != nil {
			return nested
		}
	}
	return nil
}

// carriedLock is the innermost Lock of key that ctx carries and that is not over, or nil.
func (c *Client) carriedLock(ctx context.Context, key string) *Lock {
	for held := carriedBy(ctx); held != nil; held = held.next {
		if held.l.c == c && held.l.ticket().Key() == key && held.l.Err() == nil {
			return held.l
		}
	}
	return nil
}

// FromContext returns the Lock whose Context method made ctx: the innermost if there are several, nil if
// there is none. Functions called from Do get the fencing token by FromContext(ctx).Fence(), which is 0
// without a lock. The Lock may be over: see Lock.Err.
func FromContext(ctx context.Context) *Lock {
	if held := carriedBy(ctx); held != nil {
		return held.l
	}
	return nil
}
