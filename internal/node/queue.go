package node

import (
	"sync"

	"github.com/flightlock/flightlock/internal/list"
)

// queue is a FIFO of requests that were not written yet, the urgent ones before all others. Any of
// them may be taken out again while it waits.
type queue struct {
	mu      sync.Mutex // guards what follows, and links and q of the requests inside
	cond    sync.Cond  // signalled when a request arrives or the queue is closed
	waiting list.List[request, *request]
	urgent  *request // the last urgent one; nil if there is none
	n       int
	busy    bool // a batch is in progress: what comes now waits for it
	stalled bool // it had no answer in its time: what comes now, and is no release, is refused
	closed  bool
}

func (q *queue) init() { q.cond.L = &q.mu }

// push appends r. The error says why r was refused: the queue is full, stalled or closed.
func (q *queue) push(r *request) error {
	urgent := r.urgent() // takes the entry's mu, under which Release takes that of a queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed && r.op != opRelease {
		return ErrClosed
	}
	if q.n >= maxQueued && r.op.votes() {
		return ErrBusy
	}
	if q.stalled && r.op != opRelease {
		return ErrStalled
	}
	if q.closed && q.n == 0 { // the goroutine that serves the queue may have ended
		return ErrClosed
	}
	after := q.waiting.Back()
	if urgent {
		after, q.urgent = q.urgent, r
	}
	q.linkLocked(r, after)
	if !q.busy {
		q.cond.Signal()
	}
	return nil
}

// putBack makes r, which was taken, the first again.
func (q *queue) putBack(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.linkLocked(r, nil)
	if q.urgent == nil { // so that it stays the first
		q.urgent = r
	}
}

// linkLocked puts r behind after, or before all others if that is nil.
func (q *queue) linkLocked(r, after *request) {
	r.q.Store(q)
	q.waiting.InsertAfter(r, after)
	q.n++
}

// take waits for requests and moves up to limit of them into batch, in order. It
// returns none only when the queue is closed and empty. The queue is busy from then on,
// until rest.
func (q *queue) take(batch []*request, limit int) []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.busy || q.n == 0 && !q.closed {
		q.cond.Wait()
	}
	q.busy = true
	for len(batch) < limit && q.n > 0 {
		r := q.waiting.Front()
		q.unlinkLocked(r)
		batch = append(batch, r)
	}
	return batch
}

// claim makes the queue busy for a request that need not wait in it. It reports false if the queue is
// closed, or a batch is in progress or waits.
func (q *queue) claim() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy || q.n > 0 || q.closed {
		return false
	}
	q.busy = true
	return true
}

// stall makes the queue refuse new requests until rest, and takes out those that wait in it. Releases
// are excepted from both.
func (q *queue) stall() (refused []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stalled = true
	return q.refuseLocked()
}

// refreshes reports whether a refresh waits.
func (q *queue) refreshes() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for r := q.waiting.Front(); r != nil && q.urgent != nil; r = q.waiting.Next(r) {
		if r.op == opRefresh {
			return true
		}
		if r == q.urgent { // refreshes go before what is not urgent
			break
		}
	}
	return false
}

// isStalled reports whether the queue refuses requests because answers are overdue.
func (q *queue) isStalled() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stalled
}

// refuse takes out the requests that wait, except releases.
func (q *queue) refuse() (refused []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.refuseLocked()
}

func (q *queue) refuseLocked() (refused []*request) {
	for r := q.waiting.Front(); r != nil; {
		next := q.waiting.Next(r)
		if r.op != opRelease {
			q.unlinkLocked(r)
			refused = append(refused, r)
		}
		r = next
	}
	return refused
}

// rest ends what take or claim began.
func (q *queue) rest() {
	q.mu.Lock()
	q.busy, q.stalled = false, false
	more := q.n > 0 || q.closed
	q.mu.Unlock()
	if more {
		q.cond.Signal()
	}
}

// drop takes r out if it still waits here, and says whether it did: then r was never
// written and never will be.
func (q *queue) drop(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.q.Load() != q {
		return false
	}
	q.unlinkLocked(r)
	return true
}

// len is how many requests wait.
func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n
}

func (q *queue) unlinkLocked(r *request) {
	if q.urgent == r {
		q.urgent = q.waiting.Prev(r)
	}
	q.waiting.Remove(r)
	r.q.Store(nil)
	q.n--
}

// close lets take return at once from now on, with what is left and then with nothing.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.cond.Broadcast()
}
