package flightlock

import (
	"context"
	"reflect"
	"time"
)

// derived is a ctx of a Lock for parents that end together: those with the same Done channel,
// usually one ctx and its children made by WithValue. The first parent's ctx serves them all, so
// Context may be called in a loop under a long lock: it leaves with the lock one entry for each
// parent that can end, until that parent ends, and one for all that cannot.
//
// A ctx per call would have to be registered with the lock until one of the two ends, and a caller
// could not unregister it.
//
//	registered -> ended    by the end of the lock or of the parent, whichever comes first
type derived struct {
	parent context.Context // the first
	ctx    context.Context // ended with parent, and with the lock
	cancel context.CancelCauseFunc
	forget func() // takes it off the Ticket, which calls cancel at its end
}

// Context returns a ctx derived from parent that also ends when the lock ends: with cause
// ErrLockLost and the reason as soon as the lock is lost, before its key in Redis can have expired;
// or with context.Canceled when the lock is released. (After the machine slept, it may end up to a
// second after the machine woke; Err is right at once.) The lock's deadline is not that of the ctx,
// because refreshes move it.
//
// The ctx carries the lock: SingleFlightLock, TryLock and Do of the same Client for the same key,
// called with it or a ctx derived from it, return a nested Lock at once and without Redis. A nested
// Lock has the same owner, token and ttl; the key is free when all of them are released, in any
// order. Goroutines that share such a ctx do not exclude each other. Client.Lock does not nest; it
// contends with its own process, and thus with its own caller.
//
// Context may be called any number of times: a ctx ends with parent, and leaves nothing behind.
func (l *Lock) Context(parent context.Context) context.Context {
	n, done := l.ensureReentry(), parent.Done()
	n.mu.Lock()
	d := n.contexts[done]
	n.mu.Unlock()
	if d == nil {
		d = l.derive(n, parent, done)
	}
	if identical(d.parent, parent) {
		return d.ctx
	}
	return &lockCtx{Context: d.ctx, parent: parent, carried: carried{l, carriedBy(parent)}}
}

// derive makes the ctx for parents that have that Done channel, unless another call just did.
func (l *Lock) derive(n *reentry, parent context.Context, done <-chan struct{}) *derived {
	ctx, cancel := context.WithCancelCause(carrying(parent, l))
	d := &derived{parent: parent, ctx: ctx, cancel: cancel}
	if other, why, over := n.register(l, d, done); over {
		cancel(why)
		return d
	} else if other != nil {
		cancel(nil)
		return other
	}
	context.AfterFunc(ctx, func() { n.unregister(d, done) }) // parent may end long before the lock does
	return d
}

// register makes d end with l. If another one is registered for that Done channel, that one is
// returned; if l is over, why is the reason.
func (n *reentry) register(l *Lock, d *derived, done <-chan struct{}) (other *derived, why error, over bool) {
	if n == notShared { // shared by all released Locks; its Ticket may still be held for an instant
		d.forget, why, over = l.own.OnEnd(d.cancel)
		return nil, why, over
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.released {
		return nil, nil, true
	}
	if other := n.contexts[done]; other != nil {
		return other, nil, false
	}
	forget, why, over := n.outermost.own.OnEnd(d.cancel)
	if over {
		return nil, why, true
	}
	if n.contexts == nil {
		n.contexts = map[<-chan struct{}]*derived{}
	}
	d.forget = forget
	n.contexts[done] = d
	return nil, nil, false
}

func (n *reentry) unregister(d *derived, done <-chan struct{}) {
	d.forget()
	if n == notShared {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.contexts[done] == d {
		delete(n.contexts, done)
	}
}

// lockCtx is a ctx of a Lock that ends when another one does, but has the values of its own parent.
type lockCtx struct {
	context.Context // of the parent that came first
	parent          context.Context
	carried         carried
}

// Deadline returns parent's.
func (c *lockCtx) Deadline() (time.Time, bool) { return c.parent.Deadline() }

// Value returns parent's value, or the lock. The exception is the value by which package context
// finds the ctx that ends, in order to end children and to read the cause: it must be that of the
// ctx that ends, and nothing else can be.
func (c *lockCtx) Value(key any) any {
	if key == (carriedKey{}) {
		return &c.carried
	}
	if v := c.Context.Value(key); v == any(c.Context) {
		return v
	}
	return c.parent.Value(key)
}

// identical reports whether two contexts, or errors, are the same one. Not all of them are
// comparable.
func identical(a, b any) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}
