package flight

import (
	"errors"

	"github.com/flightlock/flightlock/internal/clock"
)

// How a lease leaves a flight without a release, and how one comes that nobody has to contend for.

// Bring has t's first attempt be made for l, which attaches a detached lock. t is new, and nobody else is in
// the flight: it is of a Group that is for such Tickets only, so that it overtakes nobody who waits.
func (t *Ticket) Bring(l Lease) { t.lease = l }

// errNoLease is why a Ticket cannot be abandoned whose lease is lost already.
var errNoLease = errors.New("it was lost")

// Abandon ends t as Release does, and leaves the lease on the nodes, for somebody else to attach. Those who
// wait here contend for the key with all others. top is the highest token that the lease has reserved; 0:
// unknown.
func (t *Ticket) Abandon() (top int64, err error) {
	t = t.lock()
	f := t.f
	if err := t.endedLocked(clock.Now()); err != nil {
		f.unlock()
		return 0, err
	}
	watch := t.watchLocked()
	f.endLocked(t, released, nil)
	c := f.contention
	wants := c != nil && c.registered
	top, ok := f.lease.Abandon()
	f.releaseLocked() // sends nothing for a lease that was abandoned
	if ok && c != nil {
		c.registered = wants // no release takes it back
	}
	f.unlock()
	watch.ended(nil, false)
	if !ok {
		return 0, f.g.cfg.Errors.Ended(f.key, errNoLease)
	}
	return top, nil
}

// Revoke ends the lease of key that has this owner, as if it were lost: its holder's Err is Errors.Revoked.
// Nothing happens if it has another, or none.
func (g *Group) Revoke(key, owner string) {
	f := g.known(key)
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.unlock()
	if f.lease == nil || f.lease.Owner() != owner {
		return
	}
	if f.cur != nil {
		f.endLocked(f.cur, lost, f.g.cfg.Errors.Revoked(key))
	}
	f.releaseLocked()
}

// Waiters is how many callers wait for key.
func (g *Group) Waiters(key string) int {
	f := g.known(key)
	if f == nil {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return int(f.n)
}
