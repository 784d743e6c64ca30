package flightlock

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/flightlock/flightlock/internal/flight"
)

// Lock is a lock that is held until it is released or lost. Once over, it cannot affect the next holder of
// its key. It is safe for concurrent use.
type Lock struct {
	c    *Client
	own  flight.Ticket               // not used by a nested Lock: see ticket
	auto atomic.Pointer[autoRefresh] // nil until AutoRefresh

	// See reentrant.go.
	around  *Lock         // the outermost of the locks in which it is nested; nil if it is the one itself
	handles atomic.Int32  // of the outermost: it, and those nested in it, that were not released
	state   atomic.Uint32 // stateHeld and so on

	mu       sync.Mutex                   // guards contexts; taken before the flight's
	contexts map[<-chan struct{}]*derived // by the Done channel of their parents; none once it was released
}

// Key returns the key as the caller passed it.
func (l *Lock) Key() string { return l.ticket().Key() }

// Owner returns the whole value stored in Redis: label, "#", client UUID, "-", sequence. Locks handed over in
// this process have the same owner.
func (l *Lock) Owner() string { return l.ticket().Owner() }

// Fence returns the lock's fencing token, which is strictly larger for every later Lock on the same key,
// handoffs included. A resource that remembers the largest token it has seen, and refuses smaller ones, is
// safe from a holder that was paused and does not know that it lost the lock. Tokens of different keys are
// not comparable. A nil *Lock has token 0.
func (l *Lock) Fence() int64 {
	if l == nil {
		return 0
	}
	return l.ticket().Fence()
}

// Until returns when the lock ends unless it is refreshed, with a monotonic clock reading. A loss or release
// does not change it: see Err. A lock that came by the release of another process is valid for up to 450ms at
// first, and is extended to its full ttl in the background if it is held for longer.
func (l *Lock) Until() time.Time { return l.ticket().Until() }

// Err returns nil while the lock is held. It reads the clock, so it is right even if the process was just
// stopped for a while. After a release it returns ErrNotHeld, after a loss ErrLockLost with the key and the
// reason, and ErrClosed if Client.Close ended the lock.
func (l *Lock) Err() error {
	err := l.ticket().Err()
	if state := l.state.Load(); state == stateLeft || state == stateReleased && err == nil {
		return errReleased
	}
	return err
}

// Refresh restores the full ttl of the lock. After ErrNotHeld the lock is over. After ErrUnavailable, or
// ctx's error, it is unchanged, and Refresh may be called again.
//
// A call returns by Until at the latest. It takes at most NodeTimeout from when it was written to the nodes,
// twice that while another refresh of the lock is in progress, and up to 1.5s more if a connection has to be
// dialled.
func (l *Lock) Refresh(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return l.c.gaveUpRefresh(l, err)
	}
	if l.state.Load() != stateHeld {
		return lockEnded(l.ticket().Key(), l.Err())
	}
	done := make(chan error, 1)
	l.ticket().Refresh(l.c.opts.NodeTimeout, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return l.c.gaveUpRefresh(l, ctx.Err())
	}
}

// gaveUpRefresh is the error of Refresh if its ctx has ended. That ctx may be one of the lock's own Contexts,
// which end with the lock: so if the lock is over, the error says that.
func (c *Client) gaveUpRefresh(l *Lock, ctxErr error) error {
	if err := l.Err(); err != nil {
		return lockEnded(l.Key(), err)
	}
	return &QuorumError{Op: "refresh", Key: l.Key(), Need: c.quorum.Need(), sentinel: ErrUnavailable,
		ctx: ctxErr}
}

// Release ends the lock: it is handed to the next waiter of this process, or its key is deleted from the
// nodes. Of nested locks, the last Release does that. It works with a ctx that has ended. Errors: ErrNotHeld
// if the lock had expired, was taken, or was released before; ErrUnavailable if no majority of the nodes
// confirmed it: the Client keeps trying, and the key expires with its ttl at the latest.
//
// It waits at most NodeTimeout from when it was written to the nodes; before that for answers to what was
// written earlier, or if there are none, or a connection has to be dialled, at most NodeTimeout more. See
// also ReleaseAsync.
func (l *Lock) Release(ctx context.Context) error {
	_ = ctx // not used: a release must not depend on the end of its caller's ctx
	return l.release((*flight.Ticket).Release)
}

// ReleaseAsync releases the lock as Release does, and returns before the nodes have answered: for deferred
// releases on hot paths. It never blocks on I/O. The lock is over at once (Err is ErrNotHeld), and the next
// caller has it or asks for it behind the release. Client.Close waits for releases that are on their way.
//
// If the lock had been lost before, and nobody knew, that is only logged and counted (Options.Logger,
// Stats.Lost, EventLoss). For a lock that is over, ReleaseAsync does nothing.
func (l *Lock) ReleaseAsync() { _ = l.release((*flight.Ticket).ReleaseAsync) }

// releaseFailed is ReleaseAsync after the work under the lock failed. If that frees the key, the waiters
// in contend of other processes that receive the notice end with errFailedElsewhere (none do with
// DisableNotify).
func (l *Lock) releaseFailed() error { return l.release((*flight.Ticket).ReleaseFailed) }

// release calls end for the Ticket with the last of its handles.
func (l *Lock) release(end func(*flight.Ticket) error) error {
	defer runtime.KeepAlive(l) // until it is released, it was not dropped
	l.mu.Lock()
	first, contexts := l.state.CompareAndSwap(stateHeld, stateReleased), l.contexts
	l.contexts = nil
	l.mu.Unlock()
	t, a := l.ticket(), l.auto.Load() // an AutoRefresh that begins later finds the state
	if a != nil {
		a.fate.CompareAndSwap(inUse, given) // a nested lock must not be released once more when it is garbage
	}
	switch {
	case !first:
		return lockEnded(t.Key(), cmp.Or(l.Err(), errReleased))
	case l.outermost().handles.Add(-1) == 0:
		return end(t) // which ends the contexts
	}
	for _, d := range contexts {
		d.forget()
		d.cancel(nil)
	}
	if a != nil { // other nested locks may be held on
		a.stop()
	}
	if err := t.Err(); err != nil && !errors.Is(err, errReleased) { // others may have released it by now
		return lockEnded(t.Key(), err)
	}
	l.state.Store(stateLeft)
	return nil
}

// derived ends the contexts of a Lock whose parents end together: those with the same Done channel,
// usually one ctx and its children made by WithValue. The first parent's serves them all, so a lock has one
// entry for each parent that can end, until that ends, and one for all that cannot: one for each call of
// Context would stay until the lock ends, as a caller could not unregister it.
//
//	registered -> ended    by the end of the lock or of the parent, whichever comes first
//
// The Ticket and the parent refer to it, and it does not refer to the Lock, which would otherwise be in
// use until either ends (see autoRefresh). The contexts do. But nobody can know who waits for a Done
// channel that was requested from one of them, and relies on the lock: so it refers to the Lock then.
type derived struct {
	ctx     context.Context // ended with the first parent, and with the lock
	cancel  context.CancelCauseFunc
	forget  func()               // takes it off the Ticket, which calls cancel
	awaited atomic.Pointer[Lock] // the Lock, once a Done channel was requested
}

// Context returns a ctx derived from parent that also ends when the lock ends: with cause ErrLockLost, the
// key and the reason as soon as the lock is lost, before its key in Redis can have expired; with cause
// ErrClosed when Client.Close ends the lock; with context.Canceled when it is released. (After the machine
// slept, that may be up to a second late; Err is right at once.) Its deadline is parent's, since refreshes
// move that of the lock. Context may be called any number of times.
//
// The ctx carries the lock: with it, or a ctx derived from it, SingleFlightLock, TryLock and Do of the same
// Client and key return a nested Lock, at once and without Redis. A nested Lock has the same owner, token and
// ttl, and the key is free when all of them are released, in any order. Goroutines that share such a ctx do
// not exclude each other.
func (l *Lock) Context(parent context.Context) context.Context {
	if !l.c.carried.Load() { // mostly it is set, and its cache line shared
		l.c.carried.Store(true)
	}
	if parent.Err() != nil {
		// There is nothing to end. And those that were canceled before anybody called their Done have one channel
		// in common, which package context keeps closed: they would be taken for parents that end together.
		return context.WithValue(parent, carriedKey{}, &carried{l, carriedBy(parent)})
	}
	done := parent.Done()
	l.mu.Lock()
	d := l.contexts[done]
	l.mu.Unlock()
	if d == nil {
		d = l.derive(parent, done)
	}
	return &lockCtx{Context: d.ctx, derived: d, parent: parent, carried: carried{l, carriedBy(parent)}}
}

// derive makes the ctx for parents that have that Done channel, unless another call just did.
func (l *Lock) derive(parent context.Context, done <-chan struct{}) *derived {
	ctx, cancel := context.WithCancelCause(parent)
	d := &derived{ctx: ctx, cancel: cancel}
	if other, why, over := l.register(d, done); over {
		cancel(why)
		return d
	} else if other != nil {
		cancel(nil)
		return other
	}
	self := weak.Make(l)            // the parent would keep l in use: see derived
	context.AfterFunc(ctx, func() { // parent may end long before the lock does
		d.forget()
		if l := self.Value(); l != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.contexts[done] == d {
				delete(l.contexts, done)
			}
		}
	})
	return d
}

// register makes d end with l. If another one is registered for that Done channel, that one is
// returned; if l is over, why is the reason.
func (l *Lock) register(d *derived, done <-chan struct{}) (other *derived, why error, over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state.Load() != stateHeld {
		if err := l.Err(); !errors.Is(err, errReleased) {
			why = err // it was lost before
		}
		return nil, why, true
	}
	if other := l.contexts[done]; other != nil {
		return other, nil, false
	}
	if d.forget, why, over = l.ticket().OnEnd(d.cancel); over {
		return nil, why, true
	}
	if l.contexts == nil {
		l.contexts = map[<-chan struct{}]*derived{}
	}
	l.contexts[done] = d
	return nil, nil, false
}

// lockCtx is a ctx of a Lock. It ends when its derived does, and has the values of its own parent.
type lockCtx struct {
	context.Context // derived's
	derived         *derived
	parent          context.Context
	carried         carried
}

// Done returns derived's. Somebody may wait for it who has nothing else of the lock.
func (c *lockCtx) Done() <-chan struct{} {
	if c.derived.awaited.Load() == nil {
		c.derived.awaited.Store(c.carried.l)
	}
	return c.Context.Done()
}

// Deadline returns parent's.
func (c *lockCtx) Deadline() (time.Time, bool) { return c.parent.Deadline() }

// Value returns parent's value, or the lock. The exception is the value by which package context
// finds the ctx that ends, in order to end children and to read the cause: it must be that of the
// ctx that ends, and nothing else can be. For all other keys only parent is searched: the two may
// have ancestors in common, each of them a lockCtx, and searching both would double with each.
func (c *lockCtx) Value(key any) any {
	switch {
	case key == (carriedKey{}):
		return &c.carried
	case key == endKey || endKey == nil:
		if v := c.Context.Value(key); v == any(c.Context) {
			return v
		}
	}
	return c.parent.Value(key)
}

// endKey is the key of that value, nil if unknown. Package context does not export it, but asks for it.
var endKey = func() any {
	var asked keyOfCause
	_ = context.Cause(&asked)
	return asked.key
}()

// keyOfCause is a ctx that notes what Cause asks it for.
type keyOfCause struct{ key any }

func (*keyOfCause) Deadline() (time.Time, bool) { return time.Time{}, false }
func (*keyOfCause) Done() <-chan struct{}       { return nil }
func (*keyOfCause) Err() error                  { return context.Canceled }
func (k *keyOfCause) Value(key any) any         { k.key = key; return nil }
