package flight

import (
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// flight is everything in this process that wants one key: the queue, the current Hold,
// the lease, and the remote attempt under way. It exists from the first caller's arrival
// until nobody wants the key and nothing is held.
//
//	asking    no lease; an attempt is under way, for the front waiter
//	pausing   no lease; the last attempt failed, the timer will begin the next one
//	held      a lease, and cur holds it
//	renewing  a lease, nobody holds it; the front waiter gets it when the refresh under
//	          way has made it long enough, or has brought tokens
//	parting   the lease is being given back; then asking or dead
//	dead      nothing of all this; the next caller makes a new flight
//
// Callers queue in order of arrival, and the lease goes to the front of the queue, by
// handoff (Dice, Marathe and Shavit, "Lock Cohorting", PPoPP 2012) or by grant. It is
// decided under mu who is current, in giveLocked and endLocked only. These rules keep it
// safe:
//
//   - A Hold is current from giveLocked to endLocked; each gets a token larger than all
//     before it, from a block that the quorum has made safe.
//   - Until of a Hold is never later than the lease's deadline, and a renewal that the
//     flight makes for its own sake does not move it past the Hold's own ttl. So a holder
//     that hangs loses the lock, however many wait and renew.
//   - A waiter leaves the queue under mu, either given the lease or not. One whose ctx
//     ends in the instant in which it is given the lease finds out under mu, and passes
//     the lease on as a release would. No wake-up and no lease is lost.
//   - The attempt belongs to the flight, not to a caller. It is cancelled when the last
//     waiter has left.
//   - No attempt begins, and the flight does not die, before the release of the lease was
//     sent: the next attempt would meet this process's own entry.
//
// A goroutine per flight that waits for events would be simpler to read, and costs two
// context switches per lock; a channel as the queue is not FIFO under cancellation. Here
// whoever brings an event does the work: caller, reply or timer. What must happen without
// mu is put into todo and done by unlock.
type flight struct {
	g      *Group
	key    string
	number uint64 // of its shard's flights, in order of age

	mu   sync.Mutex // guards what follows, but home
	todo *todo      // for unlock; nil: there is nothing to do

	dead       bool
	asking     bool // an attempt is under way
	given      bool // it is cancelled: its failure means nothing
	parting    bool // a release has not been sent yet
	refreshing bool
	looked     bool  // a look for rivals has begun in this slice
	looking    bool  // the next attempt waits for the front waiter to look
	again      bool  // news has come since the attempt began: try again if it fails
	home       uint8 // the place of its shard

	n, lookers, fast int32 // who waits; of these, callers of AcquireUnless, and those that fail fast
	head, tail       *Hold // waiting
	cur              *Hold // holding; nil when nobody does

	lease  Lease // nil when there is none
	until  time.Time
	stale  instant  // from then on a handoff has the lease renewed
	tokens [2]block // the one in use, and one in store

	attempt Attempt       // under way; nil until unlock has prepared it
	wish    time.Duration // the ttl that it is for

	*pause // nil: no attempt has failed since the last lease

	contest *contest // nil: no rival was met
	slice   instant  // when the lease is to go to a rival, if there is one

	asks *ask // for a refresh of the current Hold, in order

	armed instant // when tick is called; 0: it is not

	holds, holdsBefore int32   // how many Holds this lease has served, maxBlock at most, and the one before
	used               int32   // tokens handed out since reserved
	place              int32   // guarded by the shard's mu: that of the flight's alarm, 0 if it has none
	reserved           instant // when the last block came
}

// pause is what a flight knows of attempts that failed.
type pause struct {
	last   error     // outcome of the last one
	tried  time.Time // when it failed, or the lease was given away
	paused time.Time // when the pause ends
	free   time.Time // when the key could be free, by the last outcome; zero: unknown
	taken  bool      // others' votes are why it failed
	away   bool      // too few nodes could be reached
	owned  bool      // one other has the key, who will tell when it lets go
	holder string    // who had it then, unless there was news of it since; "": unknown
}

// pauseOfLocked is what f knows of failed attempts, from now on.
func (f *flight) pauseOfLocked() *pause {
	if f.pause == nil {
		f.pause = &pause{}
	}
	return f.pause
}

// shard is where f is known.
func (f *flight) shard() *shard { return &f.g.shards[f.home] }

// block is fencing tokens from next to before end.
type block struct{ next, end int64 }

func (b block) left() int64 { return b.end - b.next }

// block is what a grant brought; it may be empty.
func (g Grant) block() block { return block{g.First, max(g.First, g.Last+1)} }

// ask is a holder's wish for a refresh.
type ask struct {
	h       *Hold
	timeout time.Duration
	done    func(error)
	next    *ask
}

// todo is what must happen without mu: the calls in order, and then one of the two steps
// that every lock takes. Never both: no attempt begins before the release was sent. A flight has one only
// between two lines of a critical section, so few are at work, and the Group keeps them.
type todo struct {
	calls  []func()
	tokens int64       // above 0: begin an attempt, for so many
	asker  string      // the contender that it is for, if there is one
	leave  Lease       // not nil: release it
	rival  string      // who is to have the next turn then, if not ""
	failed bool        // what the lease was for has failed
	gone   func(error) // hears what became of that, if it is not nil
}

// todoLocked is what there is to do, to be added to.
func (f *flight) todoLocked() *todo {
	if f.todo == nil {
		f.todo = f.g.todos.Get().(*todo)
	}
	return f.todo
}

func (f *flight) laterLocked(do func()) {
	t := f.todoLocked()
	t.calls = append(t.calls, do)
}

// unlock lets go of mu and does what had to wait for that.
func (f *flight) unlock() { f.unlockInline(false) }

// unlockInline is unlock for a goroutine that may block for NodeTimeout, if inline is true:
// that of a caller that came to acquire or to release.
func (f *flight) unlockInline(inline bool) {
	t, ttl := f.todo, f.wish
	f.todo = nil
	f.mu.Unlock()
	if t == nil { // as after most handoffs
		return
	}
	for _, do := range t.calls {
		do()
	}
	if t.tokens > 0 {
		f.begin(ttl, t.tokens, t.asker, inline)
	}
	if t.leave != nil {
		f.giveBack(t, inline)
	}
	clear(t.calls)
	*t = todo{calls: t.calls[:0]}
	f.g.todos.Put(t)
}

// tell reports who waits and who holds.
func (f *flight) tell() (waiters, held int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cur != nil {
		held = 1
	}
	return int64(f.n), held
}

// join puts h into the queue, and begins an attempt if nobody else is there, which blocks
// for NodeTimeout if inline says that it may. It says no without an error when the flight
// has died meanwhile.
func (f *flight) join(h *Hold, mode Mode, inline bool) (bool, error) {
	f.mu.Lock()
	defer f.unlockInline(inline)
	if f.dead { // find makes a new one
		return false, nil
	}
	idle := f.n == 0 && f.lease == nil // an attempt under way is being cancelled
	if idle && f.g.closed.Load() {
		f.dieLocked()
		return false, f.g.cfg.Closed
	}
	h.f = f
	if !idle {
		h.way = Queued
		if err := f.refuseLocked(h, mode); err != nil {
			return false, err
		}
		if sh := f.shard(); sh.hot.Load() != f {
			sh.hot.Store(f)
		}
	}
	f.pushLocked(h)
	switch {
	case idle && !f.asking && !f.parting:
		f.askLocked(h)
	case h.failsFast() && f.pause != nil && f.away && f.pausingLocked(): // is that so still? The next attempt may be far
		f.askLocked(f.head)
	default:
		f.proceedLocked()
	}
	return true, nil
}

// refuseLocked says why h cannot wait behind others, or has it wait for as long as its
// strategy would go on.
func (f *flight) refuseLocked(h *Hold, mode Mode) error {
	if f.g.closed.Load() {
		return f.g.cfg.Closed
	}
	var wait time.Duration
	bounded := !h.isEndless() && h.unknown == nil
	if bounded {
		h.due = clock.Now() // as if it asked Redis now, and found the key taken
		wait, h.ends = h.outlook(h.due)
	}
	if mode == Try || h.ends && wait == 0 {
		return f.busyLocked()
	}
	if limit := f.g.cfg.MaxWaiters; limit > 0 && int(f.n) >= limit {
		return f.g.cfg.Crowded(f.key)
	}
	if h.unknown != nil {
		h.queueLocked(clock.Now())
	}
	if bounded {
		h.patience = clock.AfterFunc(wait, func() { f.giveUp(h) })
	}
	return nil
}

func (f *flight) busyLocked() error {
	owner := ""
	if f.lease != nil {
		owner = f.lease.Owner()
	}
	return f.g.cfg.Busy(f.key, owner)
}

// seenLocked is what h, whose ctx has ended, has met: nil if it was the first to ask, and nothing is
// known yet.
func (f *flight) seenLocked(h *Hold) error {
	if err := f.knownLocked(); err != nil || h.way == Remote {
		return err
	}
	return f.busyLocked()
}

// outcomeLocked is the error for a waiter that gives up now.
func (f *flight) outcomeLocked() error {
	if err := f.knownLocked(); err != nil {
		return err
	}
	return f.busyLocked()
}

// knownLocked is the last outcome, or how the attempt under way stands; nil when nothing is known.
func (f *flight) knownLocked() error {
	if f.pause != nil && f.last != nil {
		return f.last
	}
	if f.attempt != nil {
		return f.attempt.Peek()
	}
	return nil
}

// giveUp ends the wait of a waiter whose strategy would have given up by now. One that
// paces the flight is left to its strategy's own count: each of its attempts is real.
func (f *flight) giveUp(h *Hold) {
	f.mu.Lock()
	defer f.unlock()
	switch now := clock.Now(); {
	case h.state != waiting || h.patience == nil:
	case h.ends:
		f.turnAwayLocked(h, f.outcomeLocked())
	case h.unknown != nil:
		h.failures = h.ahead
		h.queueLocked(h.due)
	default:
		var wait time.Duration
		h.advance(now)
		wait, h.ends = h.outlook(now)
		h.patience.Reset(wait)
	}
}

// leave ends h's wait because its caller's ctx has ended. It returns nil when h was
// refused already: then that is the outcome.
func (f *flight) leave(h *Hold, ctxErr error) error {
	f.mu.Lock()
	defer f.unlock()
	switch h.state {
	case waiting:
		err := f.g.cfg.GaveUp(f.key, ctxErr, f.seenLocked(h))
		front := h == f.head
		f.dropLocked(h)
		h.state = left
		if h.sent {
			<-h.ready
		}
		f.emptiedLocked()
		if front && f.pausingLocked() { // for as long as h wanted
			f.paceLocked(clock.Now())
		}
		return err
	case left:
		<-h.ready
		return nil
	}
	// Granted in the instant in which ctx ended (and maybe lost since). The caller is
	// told that it ended, so the lease must go on to the next.
	<-h.ready
	var last error // nobody else had it, unless h has waited for them
	if h.way != Remote {
		last = f.busyLocked()
	}
	err := f.g.cfg.GaveUp(f.key, ctxErr, last)
	if h.state == holding {
		f.endLocked(h, released, nil)
		f.passLocked(clock.Now())
	}
	return err
}

// turnAwayLocked ends h's wait with err.
func (f *flight) turnAwayLocked(h *Hold, err error) {
	f.dropLocked(h)
	h.state, h.refusal = left, err
	h.wakeLocked()
	f.emptiedLocked()
}

// turnAwayAllLocked ends the wait of all whom that is about, with err.
func (f *flight) turnAwayAllLocked(err error, who func(*Hold) bool) {
	front := f.head
	for h := front; h != nil; {
		next := h.next
		if who(h) {
			f.dropLocked(h)
			h.state, h.refusal = left, err
			h.wakeLocked()
		}
		h = next
	}
	if f.head == front {
		return
	}
	f.emptiedLocked()
	if f.pausingLocked() {
		f.paceLocked(clock.Now())
	}
}

// emptiedLocked follows the leaving of a waiter: an attempt that nobody wants is
// cancelled, a pause that nobody waits for is over.
func (f *flight) emptiedLocked() {
	if f.n > 0 {
		f.proceedLocked() // the one that left may have been sent
		return
	}
	switch {
	case f.asking:
		f.given = true
		if a := f.attempt; a != nil {
			f.laterLocked(a.Cancel)
		}
	case f.lease == nil:
		f.dieLocked()
	}
}

// dieLocked removes the flight, unless something is still under way. Nobody waits, nothing
// is held.
func (f *flight) dieLocked() {
	if f.dead || f.asking || f.parting {
		return
	}
	f.dead = true
	f.leaveLocked()
	f.g.remove(f)
}

// The queue.

func (f *flight) pushLocked(h *Hold) {
	h.prev = f.tail
	if f.tail == nil {
		f.head = h
	} else {
		f.tail.next = h
	}
	f.tail = h
	f.n++
	if h.news != nil {
		f.lookers++
	}
	if h.failsFast() {
		f.fast++
	}
}

func (f *flight) dropLocked(h *Hold) {
	if h.prev == nil {
		f.head = h.next
	} else {
		h.prev.next = h.next
	}
	if h.next == nil {
		f.tail = h.prev
	} else {
		h.next.prev = h.prev
	}
	h.next, h.prev = nil, nil
	f.n--
	if h.news != nil {
		f.lookers--
	}
	if h.failsFast() {
		f.fast--
	}
	if h.patience != nil {
		h.patience.Stop()
	}
}

// Time.

// armLocked has tick called at t, or earlier.
func (f *flight) armLocked(t time.Time) { f.armAtLocked(f.g.at(t)) }

func (f *flight) armAtLocked(at instant) {
	if f.armed != 0 && at >= f.armed {
		return
	}
	f.armed = at
	f.shard().arm(f, at)
}

// tick does what is due: a Hold whose Until has passed is over, one that is not may have to be
// refreshed, a pause ends.
// The alarm is not moved when a Hold is released; it comes once per ttl and looks.
func (f *flight) tick() {
	f.mu.Lock()
	defer f.unlock()
	f.armed = 0
	now := clock.Now()
	switch {
	case f.dead:
	case f.cur != nil:
		f.overdueLocked(now)
		if h := f.cur; h != nil {
			f.armLocked(f.remindLocked(h, now))
		}
	case f.pausingLocked():
		switch {
		case now.Before(f.paused):
			f.countLocked(now)
		case f.pollsOnlyLocked():
			f.askLocked(f.head)
		default:
			f.tryLocked()
		}
	}
}

// lookEvery is which of the polls that follow on each other without news is a look as well.
const lookEvery = 4

// pollsOnlyLocked reports whether the poll that is due need not be a look: the flight hears what happens to the key, and
// has heard nothing. Tens of thousands of keys may be waited for, with a poll each second, and a look costs a caller's cache more than a
// poll costs a node.
func (f *flight) pollsOnlyLocked() bool {
	c := f.contest
	if c == nil || !c.hears {
		return false
	}
	c.polls++
	return c.polls%lookEvery != 0
}

func (f *flight) pausingLocked() bool {
	return f.n > 0 && f.lease == nil && !f.asking && !f.parting
}

// overdueLocked ends the current Hold if its Until has passed. The lease may have been
// renewed for the waiters meanwhile: then it goes on to them, under a new token.
func (f *flight) overdueLocked(now time.Time) {
	if h := f.cur; h != nil && clock.Passed(now, h.until) {
		f.endLocked(h, lost, h.expiredLocked())
		f.passLocked(now)
	}
}
