package flightlock

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
)

// Lock is a lock that the caller holds, until it is released or lost. A Lock that is over
// can do nothing to whoever holds the key next. Its methods are safe for concurrent use.
type Lock struct {
	c    *Client
	hold flight.Ticket                 // not of a nested Lock: see place
	auto atomic.Pointer[autoRefresh] // nil until AutoRefresh
	nest atomic.Pointer[nest]        // nil until the Lock needs one: see there
}

// Key is the key as the caller gave it.
func (l *Lock) Key() string { return l.place().Key() }

func (l *Lock) ttl() time.Duration { return l.place().TTL() }

// Owner is the whole value stored in Redis: label, "#", client UUID, "-", sequence. Locks
// that were handed over in this process share it.
func (l *Lock) Owner() string { return l.place().Owner() }

// Fence is the lock's fencing token: strictly larger for every later Lock on the same key,
// handoffs included. A resource that remembers the largest token it has seen, and refuses
// smaller ones, is safe from a holder that was paused and does not know that it has lost
// the lock. Tokens say nothing across keys. 0 on a nil *Lock.
func (l *Lock) Fence() int64 {
	if l == nil {
		return 0
	}
	return l.place().Fence()
}

// Until is when the lock is over unless it is refreshed, with a monotonic clock reading.
// It moves on refresh.
func (l *Lock) Until() time.Time { return l.place().Until() }

// Err is nil while the lock is held. It reads the clock and does not wait for a timer, so
// it is right even in a process that was just stopped for a while. Otherwise it is
// ErrNotHeld (released) or ErrLockLost, with the reason.
func (l *Lock) Err() error {
	err := l.place().Err()
	if err == nil && l.wasReleased() {
		return errReleased
	}
	return err
}

// Refresh gives the lock its full ttl again, or says why not; it never brings a lock back
// that was lost. With ErrNotHeld the lock is over; with ErrUnavailable, or ctx's error, it
// still is what it was, and Refresh may be tried again until Until. One call is bounded by
// NodeTimeout from when it was written, two where another refresh of the lock is under way; where a
// connection has to be dialled first, that may take 1.5 s more. It ends by Until in any case.
func (l *Lock) Refresh(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return l.c.gaveUpRefresh(l, err)
	}
	if l.wasReleased() {
		return l.c.ended(l.place().Key(), l.Err())
	}
	done := make(chan error, 1)
	l.place().Refresh(l.c.opts.NodeTimeout, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return l.c.gaveUpRefresh(l, ctx.Err())
	}
}

func (c *Client) gaveUpRefresh(l *Lock, ctxErr error) error {
	return &QuorumError{Op: "refresh", Key: l.Key(), Need: c.quorum.Need(), sentinel: ErrUnavailable, ctx: ctxErr}
}

// Release ends the lock. If others are nested in it, or it is nested, that is all until the
// last of them is released; then it is handed to the next waiter of this process, or deleted from
// the nodes. nil means that either happened, the latter on a majority. ErrNotHeld: it had
// expired, was taken, or was released before. ErrUnavailable: too few nodes answered; the
// Client goes on trying, and the ttl bounds what is left.
//
// It works with a ctx that has ended, and takes NodeTimeout at most.
func (l *Lock) Release(ctx context.Context) error {
	_ = ctx // for its values only, one day: a release must not depend on its caller's patience
	return l.release((*flight.Ticket).Release)
}

// releaseFailed is Release after the work for which l was made has failed. If the key is let go by that, the
// other processes in contend for it end with errFailedElsewhere, as far as they hear it (not with DisableNotify).
func (l *Lock) releaseFailed() error { return l.release((*flight.Ticket).ReleaseFailed) }

func (l *Lock) release(end func(*flight.Ticket) error) error {
	if l.nest.CompareAndSwap(nil, gone) {
		return end(&l.hold)
	}
	n := l.nest.Load()
	if n == gone {
		return end(&l.hold) // says what became of it
	}
	err := n.release(l, end)
	if a := l.auto.Load(); a != nil { // others may hold on
		a.stop()
	}
	return err
}
