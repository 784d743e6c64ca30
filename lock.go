package flightlock

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
)

// Lock is a lock that the caller holds until it is released or lost. A Lock that is over cannot
// affect the next holder of its key. Its methods are safe for concurrent use.
type Lock struct {
	c       *Client
	own     flight.Ticket               // not used by a nested Lock: see ticket
	auto    atomic.Pointer[autoRefresh] // nil until AutoRefresh
	reentry atomic.Pointer[reentry]     // nil until needed: see there
}

// Key returns the key as the caller passed it.
func (l *Lock) Key() string { return l.ticket().Key() }

func (l *Lock) ttl() time.Duration { return l.ticket().TTL() }

// Owner returns the whole value stored in Redis: label, "#", client UUID, "-", sequence. Locks that
// were handed over in this process have the same owner.
func (l *Lock) Owner() string { return l.ticket().Owner() }

// Fence returns the lock's fencing token, which is strictly larger for every later Lock on the same
// key, handoffs included. A resource that remembers the largest token it has seen, and refuses
// smaller ones, is safe from a holder that was paused and does not know that it has lost the lock.
// Tokens say nothing across keys. Fence returns 0 on a nil *Lock.
func (l *Lock) Fence() int64 {
	if l == nil {
		return 0
	}
	return l.ticket().Fence()
}

// Until returns when the lock ends unless it is refreshed, with a monotonic clock reading. A
// refresh moves it.
func (l *Lock) Until() time.Time { return l.ticket().Until() }

// Err returns nil while the lock is held. It reads the clock and does not depend on a timer, so it
// is right even if the process was just stopped for a while. After a release it returns ErrNotHeld,
// after a loss ErrLockLost with the reason.
func (l *Lock) Err() error {
	err := l.ticket().Err()
	if err == nil && l.wasReleased() {
		return errReleased
	}
	return err
}

// Refresh restores the full ttl of the lock, or reports why it could not; it never restores a lost
// lock. After ErrNotHeld the lock is over. After ErrUnavailable, or ctx's error, the lock is
// unchanged, and Refresh may be called again until Until.
//
// A call takes at most NodeTimeout from when it was written to the nodes, twice that if another
// refresh of the lock is in progress, and up to 1.5s more if a connection has to be dialled. It
// returns by Until in any case.
func (l *Lock) Refresh(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return l.c.gaveUpRefresh(l, err)
	}
	if l.wasReleased() {
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

func (c *Client) gaveUpRefresh(l *Lock, ctxErr error) error {
	return &QuorumError{Op: "refresh", Key: l.Key(), Need: c.quorum.Need(), sentinel: ErrUnavailable, ctx: ctxErr}
}

// Release ends the lock. If the lock is nested, or other locks are nested in it, the key stays
// locked until the last of them is released. Then the lock is handed to the next waiter of this
// process, or its key is deleted from the nodes. Release returns nil if the lock was handed over,
// or a majority of the nodes deleted the key. It returns ErrNotHeld if the lock had expired, was
// taken, or was released before; and ErrUnavailable if too few nodes answered: the Client keeps
// trying, and the key expires with its ttl at the latest.
//
// Release works with a ctx that has ended, and takes at most NodeTimeout.
func (l *Lock) Release(ctx context.Context) error {
	_ = ctx // kept for its values: a release must not depend on the end of its caller's ctx
	return l.release((*flight.Ticket).Release)
}

// releaseFailed is Release after the work under the lock failed. If that frees the key, the waiters
// in contend of other processes that receive the notice end with errFailedElsewhere (none do with
// DisableNotify).
func (l *Lock) releaseFailed() error { return l.release((*flight.Ticket).ReleaseFailed) }

func (l *Lock) release(end func(*flight.Ticket) error) error {
	if l.reentry.CompareAndSwap(nil, notShared) {
		return end(&l.own)
	}
	n := l.reentry.Load()
	if n == notShared {
		return end(&l.own) // reports what became of it
	}
	err := n.release(end)
	if a := l.auto.Load(); a != nil { // other nested locks may be held on
		a.stop()
	}
	return err
}
