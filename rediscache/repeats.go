package rediscache

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/group"
)

// repeats are invalidations that have failed. They are repeated until they succeed, at growing
// intervals, by one goroutine that ends when there are none. An invalidation is safe to repeat: one
// too many costs a load.
type repeats struct {
	s      *server
	tasks  *group.Group
	closed <-chan struct{}

	mu      sync.Mutex        // guards what follows; nothing is sent under it
	keys    map[string]uint64 // the number of its last failure
	failed  uint64            // numbers failures
	running bool
	idle    []chan struct{} // closed when there are none
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
			r.mu.Lock()
			defer r.mu.Unlock()
			r.running = false
			return
		}
		r.mu.Lock()
		began := maps.Clone(r.keys)
		r.mu.Unlock()
		failed := map[string]error{}
		for some := range slices.Chunk(slices.Collect(maps.Keys(began)), maxPipeline) {
			select {
			case <-r.closed: // each request may take its whole time
				r.mu.Lock()
				defer r.mu.Unlock()
				r.running = false
				return
			default:
			}
			maps.Copy(failed, r.s.invalidate(context.Background(), some))
		}
		if len(failed) < len(began) {
			pause = repeatFirst
		}
		if r.done(began, failed) {
			return
		}
	}
}

// done removes the keys that did not fail, and reports whether there are none any more. began has what
// was to be repeated. A key whose invalidation has failed again meanwhile stays: its origin may have
// been changed after this request was executed.
func (r *repeats) done(began map[string]uint64, failed map[string]error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, number := range began {
		if failed[key] == nil && r.keys[key] == number {
			delete(r.keys, key)
		}
	}
	if len(r.keys) > 0 {
		return false
	}
	r.running = false
	for _, idle := range r.idle {
		close(idle)
	}
	r.idle = nil
	return true
}

func (r *repeats) count() (repeating int, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.keys), r.dropped
}

// drain waits until there are none, or ctx ends, and returns how many there are.
func (r *repeats) drain(ctx context.Context) int {
	r.mu.Lock()
	if len(r.keys) == 0 || !r.running {
		defer r.mu.Unlock()
		return len(r.keys)
	}
	idle := make(chan struct{})
	r.idle = append(r.idle, idle)
	r.mu.Unlock()
	select {
	case <-idle:
		return 0
	case <-ctx.Done():
		n, _ := r.count()
		return n
	}
}
