package fetch

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// gate is where the loads of a Fetcher wait for a slot, in the order in which they come: MaxLoads of them run at once,
// and of these MaxUnlockedLoads without a lock. One that waits here has no lock: otherwise the limits of this process
// would hold up the others, which may have free slots.
type gate struct {
	all      *semaphore.Weighted // nil: no limit
	unlocked *semaphore.Weighted
}

func newGate(maxLoads, maxUnlocked int) gate {
	g := gate{unlocked: semaphore.NewWeighted(int64(maxUnlocked))}
	if maxLoads > 0 {
		g.all = semaphore.NewWeighted(int64(maxLoads))
	}
	return g
}

// of are the semaphores of a load that is locked, or not.
func (g *gate) of(locked bool) (needs []*semaphore.Weighted) {
	if !locked {
		needs = append(needs, g.unlocked) // first: one that waits for it holds up none that has a lock
	}
	if g.all != nil {
		needs = append(needs, g.all)
	}
	return needs
}

// slot is what a load has of the gate. The zero slot is that of a load which does not count.
type slot []*semaphore.Weighted

func (s slot) leave() {
	for _, x := range s {
		x.Release(1)
	}
}

// try gives a slot if there is room.
func (g *gate) try(locked bool) (s slot, ok bool) {
	for _, x := range g.of(locked) {
		if !x.TryAcquire(1) {
			s.leave()
			return nil, false
		}
		s = append(s, x)
	}
	return s, true
}

// enter waits for a slot until ctx ends, and passes it to got: nil if ctx has ended.
func (g *gate) enter(ctx context.Context, locked bool, got func(s slot, ok bool)) {
	var s slot
	for _, x := range g.of(locked) {
		if x.Acquire(ctx, 1) != nil {
			s.leave()
			got(nil, false)
			return
		}
		s = append(s, x)
	}
	got(s, true)
}

// hurry says that a run is not to wait for a slot, because a load waits for it that may have the slot.
type hurry struct {
	mu     sync.Mutex // guards what follows
	is     bool
	notify chan struct{} // gets a value then; has room for one
}

// now hurries the run.
func (h *hurry) now() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.is = true; h.notify != nil {
		select {
		case h.notify <- struct{}{}:
		default:
		}
	}
}

// watch has notify get a value once the run is hurried, and reports whether it is already.
func (h *hurry) watch(notify chan struct{}) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notify = notify
	return h.is
}
