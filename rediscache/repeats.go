package rediscache

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/group"
)

// repeats are invalidations that have failed. They are repeated until they succeed, at growing intervals, by one
// goroutine that ends when there are none. An invalidation is safe to repeat: one too many costs a load.
type repeats struct {
	b      *breaker
	tasks  *group.Group
	forget func(key string)
	closed <-chan struct{}

	mu      sync.Mutex        // guards what follows; nothing is sent under it
	keys    map[string]uint64 // the number of its last failure
	failed  uint64            // numbers failures
	running bool
	idle    []chan struct{} // closed when there are none, or they are not repeated any more
	dropped uint64
}

const (
	maxRepeats  = 10_000
	repeatFirst = 100 * time.Millisecond
	repeatLast  = 2 * time.Second
)

// add has an invalidation repeated. It reports false if that is not done: there are too many, or the Cache is closed.
func (r *repeats) add(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.keys[key]; !there && len(r.keys) >= maxRepeats {
		r.dropped++
		return false
	}
	r.failed++
	r.keys[key] = r.failed
	select {
	case <-r.closed:
		return false
	default:
	}
	if !r.running {
		r.running = r.tasks.Go(r.run)
	}
	return r.running
}

func (r *repeats) run() {
	for pause := repeatFirst; ; pause = min(2*pause, repeatLast) {
		select {
		case <-time.After(pause):
		case <-r.closed:
			r.end()
			return
		}
		r.mu.Lock()
		began := maps.Clone(r.keys)
		r.mu.Unlock()
		for some := range slices.Chunk(slices.Collect(maps.Keys(began)), maxPipeline) {
			select {
			case <-r.closed: // each request may take its whole time
				r.end()
				return
			default:
			}
			failed := r.b.invalidate(context.Background(), some)
			if len(failed) < len(some) {
				pause = repeatFirst
			}
			if r.done(some, began, failed) {
				return
			}
		}
	}
}

// done removes those of some keys that did not fail, and reports whether there are none any more. began has the numbers
// of the failures that were repeated. A key whose invalidation has failed again meanwhile stays: its origin may have
// been changed after this request was executed.
func (r *repeats) done(some []string, began map[string]uint64, failed map[string]error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range some {
		if failed[key] == nil && r.keys[key] == began[key] {
			r.forget(key)
			delete(r.keys, key)
		}
	}
	if len(r.keys) > 0 {
		return false
	}
	r.endLocked()
	return true
}

// end ends the repeating, with what is left.
func (r *repeats) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endLocked()
}

func (r *repeats) endLocked() {
	r.running = false
	for _, idle := range r.idle {
		close(idle)
	}
	r.idle = nil
}

func (r *repeats) count() (repeating int, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.keys), r.dropped
}

// drain waits until there are none, or they are not repeated any more, or ctx ends.
func (r *repeats) drain(ctx context.Context) {
	r.mu.Lock()
	if len(r.keys) == 0 || !r.running {
		r.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	r.idle = append(r.idle, idle)
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
