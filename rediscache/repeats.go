package rediscache

import (
	"context"
	"slices"
	"sync"
	"time"
)

// repeats are invalidations that have failed. They are repeated until they succeed, at growing intervals, by
// one goroutine that ends when there are none. An invalidation is safe to repeat: one too many costs a load.
type repeats struct {
	s      *server
	forget func(key string)

	mu      sync.Mutex      // guards what follows; nothing is sent under it
	keys    map[string]bool // whether it has failed since the repeat that is under way began
	dropped uint64
	idle    chan struct{} // closed when there are none, or they are not repeated any more; nil: there were none
}

const (
	maxRepeats  = 10_000
	repeatFirst = 100 * time.Millisecond
	repeatLast  = 2 * time.Second
)

// add has an invalidation repeated. It reports false if that is not done: there are too many, or the Cache is
// closed.
func (r *repeats) add(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.keys[key]; !there && len(r.keys) >= maxRepeats {
		r.dropped++
		return false
	}
	r.keys[key] = true
	if r.idle == nil {
		idle := make(chan struct{})
		if !r.s.tasks.Go(func() { defer close(idle); r.run() }) {
			return false
		}
		r.idle = idle
	}
	return r.s.ended.Err() == nil
}

func (r *repeats) run() {
	for pause := repeatFirst; ; pause = min(2*pause, repeatLast) {
		select {
		case <-time.After(pause):
		case <-r.s.ended.Done():
			return
		}
		var keys []string
		r.mu.Lock()
		for key := range r.keys {
			keys, r.keys[key] = append(keys, key), false
		}
		r.mu.Unlock()
		for some := range slices.Chunk(keys, maxPipeline) {
			if r.s.ended.Err() != nil { // each request may take its whole time
				return
			}
			failed := r.s.invalidate(context.Background(), some)
			if len(failed) < len(some) {
				pause = repeatFirst
			}
			if r.done(some, failed) {
				return
			}
		}
	}
}

// done removes those of some keys that did not fail, and reports whether there are none any more. A key whose
// invalidation has failed again meanwhile stays: its origin may have been changed after this request was
// executed.
func (r *repeats) done(some []string, failed map[string]error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range some {
		if failed[key] == nil && !r.keys[key] {
			r.forget(key)
			delete(r.keys, key)
		}
	}
	if len(r.keys) > 0 {
		return false
	}
	r.idle = nil
	return true
}

func (r *repeats) count() (repeating int, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.keys), r.dropped
}

// drain waits until there are none, or they are not repeated any more, or ctx ends.
func (r *repeats) drain(ctx context.Context) {
	r.mu.Lock()
	idle := r.idle
	r.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
