package flightlock

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/flightlock/flightlock/internal/flight"
)

// nest is what a Lock needs once others may be nested in it, or it is nested itself.
//
// A ctx made by Lock.Context carries its Lock. Whoever locks the same key of the same
// Client with it gets a nested Lock: a handle of its own on the Hold of the outermost
// Lock. The outermost Lock counts the handles, and whoever releases the last one releases
// the Hold.
//
//	Lock:  held -> released       its own Release; its Contexts end, the others go on
//	Hold:  held -> released       the last Release
//	            -> lost           ends all Locks at once
//
// Two steps decide everything, and both are a compare-and-swap, so that the path of a
// Lock that never nests takes no mutex for it:
//
//   - Release of a Lock without a nest puts gone in its place. Whoever wants to nest finds
//     either nil (and puts a nest there first, which Release then sees) or gone.
//   - handles goes from n to n+1 for a nested Lock unless it is 0, and from 1 to 0 exactly
//     once. So nobody gets a handle on a Hold that is being released.
//
// A nested flight.Ticket would have to be known to the queue, and every step of the flight to
// look for it; here the local tier does not know that nesting exists.
type nest struct {
	outermost *Lock        // whose Hold it is; the Lock itself if it is not nested
	handles   atomic.Int64 // of the outermost: Locks of this Hold that were not released

	mu       sync.Mutex                   // guards what follows; taken before the flight's
	released bool                         // this Lock, by its own Release
	contexts map[<-chan struct{}]*derived // by the Done channel of their parents
}

// gone stands in a Lock that was released before it had a nest.
var gone = &nest{released: true}

// errReleased is why of a Lock that was released while others of its Hold were not.
var errReleased = fmt.Errorf("flightlock: %w: it was released", ErrNotHeld)

// place is the Hold that l is a handle on.
func (l *Lock) place() *flight.Ticket {
	if n := l.nest.Load(); n != nil && n != gone {
		return &n.outermost.hold
	}
	return &l.hold
}

// nesting gives l a nest if it has none. It is gone if l was released before.
func (l *Lock) nesting() *nest {
	if n := l.nest.Load(); n != nil {
		return n
	}
	n := &nest{outermost: l}
	n.handles.Store(1) // before others can see it
	if l.nest.CompareAndSwap(nil, n) {
		return n
	}
	return l.nest.Load()
}

// wasReleased says whether l's own Release has been called.
func (l *Lock) wasReleased() bool {
	n := l.nest.Load()
	if n == nil || n == gone {
		return n == gone
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.released
}

// release ends l, which has a nest, and the Hold with the last of its handles, by end.
func (n *nest) release(l *Lock, end func(*flight.Ticket) error) error {
	n.mu.Lock()
	again, contexts := n.released, n.contexts
	n.released, n.contexts = true, nil
	n.mu.Unlock()
	hold := &n.outermost.hold
	err := hold.Err() // before the handle goes: from then on others may release the Hold
	switch {
	case again && err == nil:
		return lockEnded(hold.Key(), errReleased)
	case again:
		return lockEnded(hold.Key(), err)
	case n.outermost.nest.Load().handles.Add(-1) == 0:
		return end(hold)
	}
	for _, d := range contexts {
		d.forget()
		d.cancel(nil)
	}
	if err != nil {
		return lockEnded(hold.Key(), err)
	}
	return nil
}

// addHandle counts one more Lock, unless the last was released.
func (n *nest) addHandle() bool {
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

// another gives one more Lock on l's Hold, or nil if l is over.
func (l *Lock) another() *Lock {
	if l.Err() != nil {
		return nil
	}
	n := l.nesting()
	if n == gone { // in this instant
		return nil
	}
	outermost := n.outermost
	if !outermost.nest.Load().addHandle() {
		return nil
	}
	inner := &Lock{c: l.c}
	inner.nest.Store(&nest{outermost: outermost})
	return inner
}

// carried is a Lock in a ctx, and what else the ctx carried before.
type carried struct {
	l    *Lock
	next *carried
}

type carriedKey struct{} // of the ctx value; empty, so that looking it up allocates nothing

func carriedBy(ctx context.Context) *carried {
	h, _ := ctx.Value(carriedKey{}).(*carried)
	return h
}

// carrying is ctx with l in it.
func carrying(ctx context.Context, l *Lock) context.Context {
	if !l.c.carried.Load() {
		l.c.carried.Store(true)
	}
	return context.WithValue(ctx, carriedKey{}, &carried{l, carriedBy(ctx)})
}

// reenter gives a Lock nested in one that ctx carries, or nil if there is none to nest in
// or ctx has ended.
func (c *Client) reenter(ctx context.Context, key string) *Lock {
	if !c.carried.Load() { // spares most callers a walk through their ctx
		return nil
	}
	h := carriedBy(ctx)
	if h == nil || ctx.Err() != nil {
		return nil
	}
	for ; h != nil; h = h.next {
		if h.l.c == c && h.l.place().Key() == key {
			if l := h.l.another(); l != nil {
				return l
			}
		}
	}
	return nil
}

// FromContext returns the Lock whose Context method made ctx: the innermost if there are several,
// nil if there is none. With it, functions called from Do or Wrap get the fencing token:
// FromContext(ctx).Fence() is 0 without a lock. The Lock may be over: see Lock.Err.
func FromContext(ctx context.Context) *Lock {
	if h := carriedBy(ctx); h != nil {
		return h.l
	}
	return nil
}
