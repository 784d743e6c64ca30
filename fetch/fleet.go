package fetch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/semaphore"
)

// maxFleetLoads is how many permits a semaphore may have.
const maxFleetLoads = 1000

// newFleet makes the semaphore of FleetLoads; nil if that is 0. The number is in its name: otherwise a
// deployment that changes it would have no permits as long as processes with the old number run.
func newFleet(c *flightlock.Client, o Options) (*semaphore.Semaphore, error) {
	if o.FleetLoads == 0 {
		return nil, nil
	}
	return semaphore.New(c, fmt.Sprintf("fetch:%s:%d", o.Name, o.FleetLoads), o.FleetLoads)
}

// permit adds one of the fleet's permits to the slot of runs that have all else that a load needs, and
// reports false if they are not to be loaded here. They wait with their locks: one process for each key, and
// what limits it limits the others, too. Without a majority of the nodes there are no permits, as there are
// no locks: those with locks go on without them, and those without are loaded.
func (b *batch[V]) permit(s *slot) bool {
	f := b.f
	if f.fleet == nil || b.why != nil && !f.opts.FailClosed && f.c.Away() {
		return true
	}
	wanted := slices.ContainsFunc(b.runs, func(r *run[V]) bool { return !r.Data.refreshes })
	got, ok, err := b.waitForPermit(wanted)
	if ok && !wanted && errors.Is(err, flightlock.ErrNotAcquired) { // a refresh without callers does not wait
		if b.dropUnwanted(); b.alive() {
			got, ok, err = b.waitForPermit(true)
		}
	}
	switch {
	case !ok: // they have ended, or can be locked after all
	case err == nil, ofCtx(err): // or a load waits for them
		*s = append(*s, got...)
		return true
	case f.opts.FailClosed, !errors.Is(err, flightlock.ErrUnavailable):
		b.fail(err)
	case b.why != nil:
		return true
	default:
		b.why = err
	}
	s.leave()
	b.release()
	f.fork(b.part(b.why, b.runs...))
	b.runs = nil
	return false
}

// waitForPermit is queue for a permit; TryAcquire gets one if it is free. err is ctx's if they are to do
// without.
func (b *batch[V]) waitForPermit(wait bool) (s slot, ok bool, err error) {
	f := b.f
	s, ok = b.queue(waitsForPermit, func(waiting context.Context) slot {
		var l *flightlock.Lock
		if wait {
			l, err = f.fleet.Acquire(waiting, f.opts.TTL, flightlock.FailFast(nil))
		} else {
			l, err = f.fleet.TryAcquire(waiting, f.opts.TTL)
		}
		if err != nil {
			return nil
		}
		// LoadTimeout bounds it
		_ = l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{MaxHold: math.MaxInt64})
		return slot{l.ReleaseAsync}
	})
	return s, ok, err
}
