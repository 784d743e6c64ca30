package node

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// A watchdog sees to it that nobody waits for a lane's server longer than it may take, and that
// nothing but the server counts for that.
//
// A request has its time from when it was written: as long as it waits in the lane's queue, which
// moves, or for a connection, which has deadlines of its own (see conn.Conn), nobody is late. When
// the oldest requests in progress have had no answer for NodeTimeout, the lane is stalled: its
// requests fail, and so do those that wait behind and those that come, at once; releases wait, and
// are owed. The first answer ends that. What was asked stays asked: the answers that come then are
// those of requests that nobody waits for any more, and what they have granted is released (see
// Entry).
//
// A server that has not answered anything for suspendAfter of NodeTimeout is suspended: once for each
// batch. If it answers a probe after that, or another lane, and that was asked later than this batch, it is the
// connection that is at fault: something in between may have dropped it without a word. It is given up after
// giveUpAfter of NodeTimeout, which leaves time for a packet that was lost; or at once, if the server was
// suspended, or a refresh had too few votes, and a probe was answered (overtaken). While a batch waits for a
// dial, and a refresh with it, the server is probed, too.
//
// If all processors are busy, this process may be late, and not the server: an answer waits in the
// socket because no goroutine has a processor to read it, or it was read by a goroutine that lost its
// processor on the way, maybe in the system call itself. So before the watchdog blames the server, it
// asks the kernel what has arrived on the connection since the batch was written. Its own timer may
// come late for the same reason: then the deadline is put off by as much, by conn.MinGrace at least, and by
// conn.MaxGrace times NodeTimeout in all. That also covers connections of which the kernel cannot be asked.
//
// Safety rests on none of this. A late answer is reported as no vote, and the entry is released by
// the round that sent it, behind what is in progress.
type watchdog struct {
	l *lane

	mu      sync.Mutex // guards what follows. With it only the lane's queue and connection are asked
	batch   []*request // in progress, and not complete; those that were reported as late have no sink any more
	since   time.Time  // when it was written, or before that, when it was begun
	written bool
	sent    bool          // a Write of the batch has returned
	mark    uint64        // Conn.Mark, just before it was written
	due     time.Time     // when there is something to do for the batch
	put     time.Duration // by how much its deadlines were put off so far
	blamed  bool          // the server was suspended for it
	timer   *time.Timer
	armed   bool
	at      time.Time // armed: for when
}

const (
	// suspendAfter times NodeTimeout without any answer has a server suspended.
	suspendAfter = 3

	// giveUpAfter times NodeTimeout without an answer has a connection given up, if the server answers others.
	giveUpAfter = 5
)

// begin has the batch watched from now on. It is about to be written.
func (w *watchdog) begin(batch []*request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batch = append(w.batch[:0], batch...)
	w.since, w.written, w.put, w.blamed = time.Now(), false, 0, false
	w.dueLocked(w.since.Add(w.l.s.n.timeout))
}

// flushed is called just before the first byte of the batch is written: what each attempt is valid for
// counts from here, and so does what its requests may take.
func (w *watchdog) flushed() {
	now := clock.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.batch) == 0 { // it is a caller's own
		return
	}
	w.since, w.written, w.sent, w.put, w.mark = time.Now(), true, false, 0, w.markLocked()
	timeout := w.l.s.n.timeout
	for _, r := range w.batch {
		if r.op == opAcquire {
			r.e.t.begin(now)
		}
		timeout = min(timeout, w.timeout(r))
	}
	w.dueLocked(w.since.Add(timeout))
}

// moved is called before the first Write on another connection of the lane's.
func (w *watchdog) moved() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mark = w.markLocked()
}

// markLocked is Conn.Mark of the lane's connection, 0 if there is none yet.
func (w *watchdog) markLocked() uint64 {
	if c := w.l.conn.Load(); c != nil {
		return c.Mark()
	}
	return 0
}

// timeout is how long the server has for its answer to r.
func (w *watchdog) timeout(r *request) time.Duration {
	if r.timeout > 0 {
		return min(w.l.s.n.timeout, r.timeout)
	}
	return w.l.s.n.timeout
}

// wrote is called when a Write of the batch has returned. This process may have taken long until then,
// so the time of the server counts from here.
func (w *watchdog) wrote() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.written && len(w.batch) > 0 {
		now := time.Now()
		w.due = w.due.Add(now.Sub(w.since)) // the timer looks
		w.since, w.sent = now, true
	}
}

// end says that the batch's requests are about to be completed, by which the remaining sinks are answered.
func (w *watchdog) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.batch)
	w.batch = w.batch[:0]
}

// dueLocked has fire called at t. The timer is not moved for what is due later than it: it looks.
func (w *watchdog) dueLocked(t time.Time) {
	w.due = t
	if w.armed && !t.Before(w.at) {
		return
	}
	w.armed, w.at = true, t
	if wait := time.Until(t); w.timer == nil {
		w.timer = clock.AfterFunc(wait, w.fire)
	} else {
		w.timer.Reset(wait)
	}
}

// fire does what is due.
func (w *watchdog) fire() {
	now := time.Now()
	w.mu.Lock()
	at := w.at
	w.armed = false
	switch {
	case len(w.batch) == 0:
	case now.Before(w.due):
		w.dueLocked(w.due)
	case w.putOffLocked(now, at):
	case !w.written:
		w.notWrittenAndUnlock(now)
		return
	default:
		w.lateAndUnlock(now)
		return
	}
	w.mu.Unlock()
}

// putOffLocked puts the deadline off if this process is late, and reports whether it did: by how late
// the timer came, or by conn.MinGrace if the batch waits for this process.
func (w *watchdog) putOffLocked(now, at time.Time) bool {
	more, ok := conn.Grace(now.Sub(at), w.put, w.l.s.n.timeout)
	if !ok && w.written && w.oursLocked() {
		more, ok = conn.MinGrace, true
	}
	if ok {
		w.put += more
		w.dueLocked(now.Add(more))
	}
	return ok
}

// oursLocked reports whether the batch waits for this process and not for the server: no Write of it has
// returned, or part of the answer has arrived since. The server may begin an answer and not continue with
// it, so this holds only until the deadline was put off by conn.MaxGrace times NodeTimeout. Bytes that wait
// in the socket hold for longer: only this process can read them.
func (w *watchdog) oursLocked() bool {
	c := w.l.conn.Load()
	if w.put <= conn.MaxGrace*w.l.s.n.timeout && (!w.sent || c != nil && c.ArrivedSince(w.mark)) {
		return true
	}
	return c != nil && c.Unread()
}

// notWrittenAndUnlock is called when the batch waits for a connection, or for scripts to be loaded. That
// has deadlines of its own, but for what the owner of the client has put into the way.
func (w *watchdog) notWrittenAndUnlock(now time.Time) {
	n := w.l.s.n
	n.late.Store(true)
	if limit := w.since.Add(conn.DialTimeout + 8*n.timeout + w.put); now.Before(limit) {
		refreshes := w.refreshesLocked()
		if refreshes { // their locks may end before the dial does
			limit = clock.Earlier(limit, now.Add(n.timeout/probeSpacing))
		}
		w.dueLocked(limit)
		w.mu.Unlock()
		if refreshes {
			w.l.s.probeNow()
		}
		return
	}
	w.stallAndUnlock(w.takeLateLocked(now))
}

// refreshesLocked reports whether a refresh is in the batch or behind it.
func (w *watchdog) refreshesLocked() bool {
	return slices.ContainsFunc(w.batch, func(r *request) bool { return r.op == opRefresh }) || w.l.queue.refreshes()
}

// lateAndUnlock is called when a request that was written has had no answer in its time.
func (w *watchdog) lateAndUnlock(now time.Time) {
	n := w.l.s.n
	told, since := w.takeLateLocked(now), w.since
	whole := since.Add(n.timeout + w.put)
	switch end := since.Add(suspendAfter*n.timeout + w.put); {
	case now.Before(whole): // of some, for whom it is less
		w.dueLocked(whole)
		w.mu.Unlock()
		failLate(told)
	case now.Before(end):
		w.dueLocked(end)
		w.stallAndUnlock(told)
	default:
		blamed := w.blamed
		if !blamed {
			w.blamed = w.l.s.silentFor(w.l.s.n.at(since))
		}
		w.dueLocked(now.Add(n.timeout)) // another lane may have had an answer not long ago, or have one soon
		suspends := w.blamed && !blamed
		if c := w.l.conn.Load(); c != nil && w.overtakenLocked(now) {
			c.GiveUp()
		}
		w.stallAndUnlock(told)
		if suspends {
			w.l.s.suspend(errMute)
		}
	}
}

// overtakenLocked reports whether the server has answered what it was asked long after the batch, which has waited for
// giveUpAfter of NodeTimeout.
func (w *watchdog) overtakenLocked(now time.Time) bool {
	s := w.l.s
	later := time.Duration(clock.Instant(s.asked.Load()) - s.n.at(w.since))
	return later >= s.n.timeout && !now.Before(w.since.Add(giveUpAfter*s.n.timeout+w.put))
}

// overtaken is called when the server has answered a probe that was sent at asked. If the batch was overdue by
// then, its connection, or the dial for it, is given up: what it waits for is lost, or comes when a packet is
// sent again, which may take as long as the server was out of reach.
func (w *watchdog) overtaken(asked time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.batch) == 0 || asked.Before(w.since.Add(w.l.s.n.timeout+w.put)) {
		return
	}
	if !w.written {
		if giveUp := w.l.dialing.Load(); giveUp != nil {
			(*giveUp)()
		}
	} else if c := w.l.conn.Load(); c != nil && !w.oursLocked() {
		c.GiveUp()
	}
}

// hasBlamed reports whether the server was suspended for the batch.
func (w *watchdog) hasBlamed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blamed
}

// late is a request that is to be reported as late.
type late struct {
	e       *Entry
	sink    Sink
	timeout time.Duration
}

func failLate(all []late) {
	for _, x := range all {
		x.e.answer(x.sink, failed(fmt.Errorf("%w %v", errLate, x.timeout)))
	}
}

// takeLateLocked takes those that are to be reported as late at now.
func (w *watchdog) takeLateLocked(now time.Time) (told []late) {
	took := now.Sub(w.since) - w.put
	for _, r := range w.batch {
		if timeout := w.timeout(r); r.sink != nil && took >= timeout && r.op != opRelease {
			told = append(told, late{r.e, r.sink, timeout})
			r.sink = nil
		}
	}
	return told
}

// stallAndUnlock fails those, and all that wait behind. The batch is still in progress when the
// queue is stalled, so the lane has not rested yet, which ends that.
func (w *watchdog) stallAndUnlock(told []late) {
	w.l.s.n.late.Store(true)
	refused := w.l.queue.stall()
	w.mu.Unlock()
	failLate(told)
	completeAll(refused, failed(ErrStalled))
}
