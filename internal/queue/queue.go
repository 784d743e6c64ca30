// Package queue passes items to code of the user's that nothing may wait for.
package queue

import "sync"

// Queue passes items to user code that nothing may wait for: a Logger, OnError. Items are handled
// in order, on one goroutine, which lives while the queue is not empty. Items that find the queue
// full are dropped and counted. The zero value is ready for use.
type Queue[T any] struct {
	mu      sync.Mutex // guards what follows
	items   []T
	working bool // the goroutine lives
	dropped int  // items that found the queue full
}

const maxQueued = 128

// Put queues an item for handle, on a goroutine started by start unless it refuses. missed is
// called with the number of dropped items. A panic or Goexit of handle costs only that item.
func (q *Queue[T]) Put(item T, start func(func()) bool, handle func(T), missed func(n int)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) >= maxQueued {
		q.dropped++
		return
	}
	q.items = append(q.items, item)
	if !q.working { // after Close nobody works
		q.working = start(func() { q.work(start, handle, missed) })
	}
}

// work handles items until the queue is empty.
func (q *Queue[T]) work(start func(func()) bool, handle func(T), missed func(n int)) {
	finished := false
	defer func() {
		if !finished { // Goexit: another goroutine continues
			q.mu.Lock()
			defer q.mu.Unlock()
			q.working = start(func() { q.work(start, handle, missed) })
		}
	}()
	for {
		item, dropped, ok := q.take()
		if !ok {
			finished = true
			return
		}
		survive(func() { handle(item) })
		if dropped > 0 {
			survive(func() { missed(dropped) })
		}
	}
}

// take returns the oldest item and, with the last one, the number of items that were dropped after
// it. If there is no item, the goroutine ends.
func (q *Queue[T]) take() (item T, dropped int, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		q.working = false
		return item, 0, false
	}
	item, q.items = q.items[0], q.items[1:]
	if len(q.items) == 0 {
		q.items = nil
		dropped, q.dropped = q.dropped, 0
	}
	return item, dropped, true
}

// survive runs fn, and recovers a panic.
func survive(fn func()) {
	defer func() { _ = recover() }()
	fn()
}
