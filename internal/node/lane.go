package node

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

const (
	// lanesPerServer is how many batches may be under way to one server at once. With
	// two, the server works on one batch while the answers of the other are handed
	// out. All requests for one key use the same lane, so they keep their order.
	lanesPerServer = 2

	// lanesAlone is that for the only node of a quorum: no other node competes for the
	// processors.
	lanesAlone = 4

	// maxBatch bounds a batch: the first caller in it waits for the last one's answer, and
	// the server does nothing else meanwhile. A request keeps it busy for some 2 us.
	maxBatch = 128

	// minTogether is the smallest batch that goes as one script. Below, the script that
	// holds all others costs more than it saves.
	minTogether = 4

	// maxQueued bounds what waits for a server. A queue that moves has at most one request for each
	// caller, who waits as well; one that does not is stalled, and refuses. Refreshes and releases, of which
	// there are no more than locks, are not refused for that.
	maxQueued = 1 << 17
)

// queue is a FIFO of requests that were not written yet, the urgent ones before all others. Any of them may be
// taken out again while it waits.
type queue struct {
	mu         sync.Mutex // guards what follows, and next, prev, q of the requests inside
	cond       sync.Cond  // signalled when a request arrives or the queue is closed
	head, tail *request
	urgent     *request // the last urgent one; nil if there is none
	n          int
	busy       bool // a batch is under way: what comes now waits for it
	stalled    bool // it had no answer in its time: what comes now, and is no release, is refused
	closed     bool
}

func (q *queue) init() { q.cond.L = &q.mu }

// push appends r. It says no, with the reason, when the queue is full or closed.
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
	after := q.tail
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
	r.prev, r.next = after, q.head
	if after == nil {
		q.head = r
	} else {
		r.next, after.next = after.next, r
	}
	if r.next == nil {
		q.tail = r
	} else {
		r.next.prev = r
	}
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
	for len(batch) < limit && q.head != nil {
		batch = append(batch, q.head)
		q.unlinkLocked(q.head)
	}
	return batch
}

// claim makes the queue busy for a request that need not wait in it, and says whether
// that could be: nothing is under way and nothing waits.
func (q *queue) claim() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy || q.n > 0 || q.closed {
		return false
	}
	q.busy = true
	return true
}

// stall has the queue refuse, until rest, what comes, and gives what waits in it, but for releases.
func (q *queue) stall() (refused []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stalled = true
	return q.refuseLocked()
}

// refuse gives what waits, but for releases.
func (q *queue) refuse() (refused []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.refuseLocked()
}

func (q *queue) refuseLocked() (refused []*request) {
	for r := q.head; r != nil; {
		next := r.next
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

func (q *queue) unlinkLocked(r *request) {
	if q.urgent == r {
		q.urgent = r.prev
	}
	if r.prev == nil {
		q.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		q.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
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

// A lane is the way to one server for a share of the keys: requests collect in its
// queue while a batch is under way, then go together as the next batch.
//
// One batch at a time is what keeps the order: a request is written only after every
// earlier one of the lane was answered, or lost with its connection. So a release needs
// no more than its place in the queue to come after the acquire it undoes; only a lost
// connection leaves a doubt, and that is a debt (see Entry).
//
// The alternatives that were measured and dropped: a goroutine per node and request on a
// pool of connections is 3 to 7 times slower with a thousand callers and keeps no order;
// a pipelining layer that replays batches on new connections puts an undo before its
// acquire.
//
// What a lane's server is given for its answers is counted from when they were asked for: see watchdog. A
// connection of the lane's own shows when that is.
//
// A caller that may block, and finds the lane idle, is a batch of one: it writes and reads
// by itself, which saves two switches between goroutines (see exchangeNow).
type lane struct {
	queue
	s        *Server
	watchdog watchdog

	client *redis.Client             // with one connection, which nobody else uses, and which waits long for answers
	quick  *redis.Client             // the same, and waits no longer than a caller may
	conn   atomic.Pointer[conn.Conn] // that connection; nil before the first

	// For whoever made the queue busy.
	calls       calls
	epoch       *Epoch        // in which the batch under way asks for votes
	by          *scripts      // of that epoch
	strict      bool          // they make the strict check
	verified    *verification // the last one when it was written
	asked       time.Time     // when it was about to be written
	written     time.Time     // when it was
	lasted      time.Duration // from then to its answer, by the clock that says more
	cmds        []*redis.Cmd  // of the batch under way, from calls
	all         []redis.Cmder // cmds, and what goes before some of them
	together    together      // instead, if the batch is one command
	answers     []response    // of the batch under way
	first       scriptName    // of the first command of the batch under way
	names       [opBatch + 1]scriptName
	missed      bool // the script that exchangeNow has just sent was not known
	long, brief allowance
}

// flushed is called just before the first byte of the batch under way is written.
func (l *lane) flushed() {
	l.written = time.Now()
	l.begin(l.written)
	l.watchdog.flushed()
}

// run serves the lane until it is closed and empty.
func (l *lane) run() {
	defer l.s.n.wg.Done()
	batch := make([]*request, 0, maxBatch)
	defer l.long.end() // closed and empty: nobody makes the lane busy any more
	defer l.brief.end()
	answering := true
	for {
		batch = l.take(batch[:0], maxBatch)
		if len(batch) == 0 {
			return
		}
		if state := l.s.suspended.Load(); state != nil {
			batch = settleBut(state.allows, batch, failed(state.err))
		}
		switch {
		case len(batch) == 0: // nothing is left to be sent
		case !answering && l.s.n.closing.Load(): // one batch was trial enough
			settleAll(batch, failed(ErrClosed))
		default:
			if answering = l.exchange(l.bounded(), batch); !answering && l.s.silent.Load() != 0 { // what has waited is not to wait for another try
				settleAll(l.refuse(), failed(ErrStalled))
			}
		}
		clear(batch)
		l.rest()
	}
}

// bounded is the context of the next exchange. It lasts for ExchangeTime at most; once the node closes,
// it ends ExchangeTime after Close began, so that Close does not wait for one exchange after the other.
func (l *lane) bounded() context.Context {
	n, now := l.s.n, time.Now()
	least, more := n.ExchangeTime()/4*3, n.ExchangeTime()/4
	if n.closing.Load() {
		least, more = 0, max(0, time.Duration(n.closeBy.Load()-int64(n.at(now))))
	}
	return l.long.context(now, least, more)
}

// allowance gives a lane's exchanges the context that bounds them. A context lasts for a
// while and serves many exchanges, because making one costs as much as a small exchange.
type allowance struct {
	ctx    context.Context
	cancel context.CancelFunc
	until  time.Time // when another one is due
}

// context has at least that time left from now on, and at most so much more.
func (p *allowance) context(now time.Time, least, more time.Duration) context.Context {
	if p.ctx == nil || !now.Before(p.until) {
		p.end()
		p.ctx, p.cancel = context.WithTimeout(context.Background(), least+more)
		p.until = now.Add(more)
	}
	return p.ctx
}

func (p *allowance) end() {
	if p.cancel != nil {
		p.cancel()
	}
}

// unwritten sorts out of a batch that is not empty what need not be written any more, and
// returns the rest.
func unwritten(batch []*request) []*request {
	keep := batch[:0]
	now := batch[0].e.n.now()
	for _, r := range batch {
		if rep, moot := r.moot(now); moot {
			r.settle(rep, notSent)
		} else {
			keep = append(keep, r)
		}
	}
	return keep
}
