package fetch

import (
	"cmp"
	"context"
	"math"

	"golang.org/x/sync/semaphore"
)

// gate is where the loads of a Fetcher wait for a slot, in the order in which they come: MaxLoads of them run at once,
// and of these MaxUnlockedLoads without a lock. One that waits here has no lock: otherwise the limits of this process
// would hold up the others, which may have free slots.
type gate struct{ all, unlocked *semaphore.Weighted }

func newGate(maxLoads, maxUnlocked int) gate {
	return gate{semaphore.NewWeighted(int64(cmp.Or(maxLoads, math.MaxInt))), semaphore.NewWeighted(int64(maxUnlocked))}
}

// of are the semaphores of a load that is locked, or not.
func (g *gate) of(locked bool) []*semaphore.Weighted {
	if !locked {
		return []*semaphore.Weighted{g.unlocked, g.all} // one that waits for the first holds up none that has a lock
	}
	return []*semaphore.Weighted{g.all}
}

// slot is what a load has of the gate. The zero slot is that of a load which does not count.
type slot []*semaphore.Weighted

func (s slot) leave() {
	for _, x := range s {
		x.Release(1)
	}
}

// try gives a slot if there is room.
func (g *gate) try(locked bool) (slot, bool) {
	return g.acquire(locked, func(x *semaphore.Weighted) bool { return x.TryAcquire(1) })
}

// enter waits for a slot. It is zero if ctx has ended before.
func (g *gate) enter(ctx context.Context, locked bool) slot {
	s, _ := g.acquire(locked, func(x *semaphore.Weighted) bool { return x.Acquire(ctx, 1) == nil })
	return s
}

func (g *gate) acquire(locked bool, acquire func(x *semaphore.Weighted) bool) (slot, bool) {
	needs := g.of(locked)
	for i, x := range needs {
		if !acquire(x) {
			slot(needs[:i]).leave()
			return nil, false
		}
	}
	return needs, true
}
