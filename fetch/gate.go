package fetch

import (
	"cmp"
	"math"

	"golang.org/x/sync/semaphore"
)

// gate is where the loads of a Fetcher wait for a slot, in the order in which they come: MaxLoads of them run
// at once, and of these MaxUnlockedLoads without a lock. One that waits here has no lock: otherwise the
// limits of this process would hold up the others, which may have free slots.
type gate struct{ all, unlocked *semaphore.Weighted }

func newGate(maxLoads, maxUnlocked int) gate {
	return gate{semaphore.NewWeighted(int64(cmp.Or(maxLoads, math.MaxInt))),
		semaphore.NewWeighted(int64(maxUnlocked))}
}

// slot is what gives back what a load has of the gate. The zero slot is that of a load which does not count.
type slot []func()

// leave gives it back. It may be called again.
func (s *slot) leave() {
	for _, giveBack := range *s {
		giveBack()
	}
	*s = nil
}

// enter gets a slot for a load that is locked, or not. acquire gets one of a semaphore, or reports that it
// has not.
func (g *gate) enter(locked bool, acquire func(x *semaphore.Weighted) bool) (slot, bool) {
	needs := []*semaphore.Weighted{g.all}
	if !locked {
		// one that waits for the first holds up none that has a lock
		needs = []*semaphore.Weighted{g.unlocked, g.all}
	}
	var s slot
	for _, x := range needs {
		if !acquire(x) {
			s.leave()
			return nil, false
		}
		s = append(s, func() { x.Release(1) })
	}
	return s, true
}

// try is enter if there is room.
func (g *gate) try(locked bool) (slot, bool) {
	return g.enter(locked, func(x *semaphore.Weighted) bool { return x.TryAcquire(1) })
}
