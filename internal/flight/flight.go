package flight

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/list"
	"github.com/flightlock/flightlock/internal/quorum"
)

// flight is everything in this process that wants one key: the queue, the current Ticket, the
// lease, and the remote attempt in progress. It exists from the first caller's arrival until nobody
// wants the key and nothing is held.
//
// Callers queue in order of arrival. The lease goes to the first of them that does not run user
// code just then (see nextHolderLocked): by handoff (Dice, Marathe and Shavit, "Lock Cohorting",
// PPoPP 2012), or when an attempt or an offer has won it. Only giveLocked and endLocked change which
// Ticket is current, and both run under mu. These rules keep it safe:
//
//   - A Ticket is current from giveLocked to endLocked; each gets a token larger than all
//     before it, from a block that the quorum has made safe.
//   - Until of a Ticket is never later than the lease's deadline, and a renewal that the
//     flight makes for its own sake does not move it past the Ticket's own ttl. So a holder
//     that hangs loses the lock, however many wait and renew.
//   - A waiter leaves the queue under mu, either given the lease or not. One whose ctx
//     ends in the instant in which it is given the lease finds out under mu, and passes
//     the lease on as a release would. No wake-up and no lease is lost.
//   - The attempt belongs to the flight, not to the caller that makes it. It is canceled
//     when the last waiter has left, or when the flight's offer was granted meanwhile.
//   - No attempt begins, and the flight does not die, before the release of the lease was
//     sent: the next attempt would find this process's own entry.
//
// Callers that wait make the attempts, on their own goroutines: see Group.acquire. A goroutine
// per flight would cost two context switches per lock; a channel as the queue is not FIFO under
// cancellation. What becomes of a lease is decided where something happens to it: by the caller
// that releases, by the reply to a refresh, by the alarm. What they must do without mu is deferred
// until unlock.
type flight struct {
	g          *Group
	key        string
	shardIndex uint8

	mu       sync.Mutex // guards what follows, except alarmAt
	deferred *deferred  // for unlock; nil: there is nothing to do

	phase      phase
	refreshing bool // a refresh of the lease is in progress
	checked    bool // a check for waiters elsewhere has begun in this slice
	worked     bool // a caller of AcquireUnless has released this lease: its work may be done
	retry      bool // an event has come since the attempt began: try again if it fails
	mark       mark // whether the lease, or the attempt in progress, may be retained

	n, lookers int32                      // who waits; of these, callers of AcquireUnless
	queue      list.List[Ticket, *Ticket] // who waits
	cur        *Ticket                    // holding; nil when nobody does

	lease      Lease // nil when there is none
	until      time.Time
	renewAfter clock.Instant // from then on a handoff has the lease renewed
	tokens     block         // those that are left of the lease's

	attempt   Lease         // of the attempt in progress, or about to be made
	attempted clock.Instant // when it, or the last one, began
	// the ttl that it is for; after that, of the last holder whose lease may be retained
	attemptTTL  time.Duration
	nextAttempt time.Time // while idle: when it is due; zero: now

	backoff *backoff // nil: no attempt has failed since the last lease

	contention *contention   // nil: no rival was met, or expected
	sliceEnds  clock.Instant // when the lease is to go to a rival, if there is one

	// of the current Ticket, in order; those of the refresh in progress come first
	refreshRequests *refreshRequest

	retention *retention // nil: the lease was never retained

	watch *Watch // of the last Ticket that the lease was given to

	armed        clock.Instant // when tick is called; 0: it is not
	lingersUntil clock.Instant // while lingering: when that ends

	served  int32         // how many Tickets the lease has served, or the last one did, maxBlock at most
	used    int32         // tokens handed out since blockAt
	alarmAt int32         // guarded by the shard's mu: the place of the flight's alarm, 0 if it has none
	blockAt clock.Instant // when the last block came
}

// phase is what a flight is at.
//
//	idle --driver--> acquiring --granted--> leased --release--> releasing --sent--> idle
//	  ^                  |   \                  (or dead, if nobody waits)
//	  +----- failed -----+
//
// A lease that nobody holds is being renewed: the next holder gets it when the refresh in progress
// has made it long enough, or has brought tokens. Or nobody wants it, and the flight lingers (see linger.go):
//
//	leased --last release--> lingering --next caller--> leased, or idle
//	     \--> releasing --------^  \--its time is over, or a recall--> releasing, or dead
type phase uint8

const (
	idle phase = iota // no lease, and no attempt in progress: the driver makes it when it is due
	// an attempt is in progress; with retry, one that was canceled, since all waiters had left
	acquiring
	leased    // there is a lease, which cur holds, or which is being renewed for the next holder
	releasing // the lease is gone, and its release has not been sent yet
	lingering // nobody holds or waits, and the flight keeps what it has, until lingersUntil
	dead      // nothing of all this; the next caller makes a new flight
)

// backoff is a flight's state about attempts that failed.
type backoff struct {
	last      *quorum.Failure // outcome of the last one, or passedOn; nil: there was none
	failedAt  time.Time       // when it failed, or the lease was given away
	freeAt    time.Time       // when the key could be free, by the last outcome; zero: unknown
	owner     string          // of the last one
	awaySince time.Time       // since when too few nodes had a vote, if last says so
}

// ensureBackoffLocked returns f's state about failed attempts, and makes it if there is none.
func (f *flight) ensureBackoffLocked() *backoff {
	if f.backoff == nil {
		f.backoff = &backoff{}
	}
	return f.backoff
}

// lastLocked is the outcome of the last attempt, an empty one if none has failed since the last lease.
func (f *flight) lastLocked() *quorum.Failure {
	if f.backoff == nil || f.backoff.last == nil {
		return &noFailure
	}
	return f.backoff.last
}

var noFailure quorum.Failure

// shard is where f is known.
func (f *flight) shard() *shard { return &f.g.shards[f.shardIndex] }

// block is fencing tokens from next to before end.
type block struct{ next, end int64 }

func (b block) left() int64 { return b.end - b.next }

// blockOf is what a grant brought; it may be empty.
func blockOf(g quorum.Grant) block { return block{g.First, max(g.First, g.Last+1)} }

// refreshRequest is what the holder asks for.
type refreshRequest struct {
	timeout time.Duration
	sent    bool // by the refresh in progress
	done    func(error)
	next    *refreshRequest
}

// deferred is work for after mu is unlocked: callbacks in order, then a release. A flight has one
// only between two lines of a critical section, so few are in use, and the Group keeps them.
type deferred struct {
	calls   []func()
	release Lease           // not nil: release it
	rival   string          // who is to have the next turn then, if not ""; or quorum.Others
	news    quorum.News     // what the release publishes besides
	done    quorum.Releaser // gets the outcome of the release, if it is not nil
	rejoins time.Duration   // not 0: the release has the flight wait for the key again, for that ttl
}

// deferredLocked is what there is to do, to be added to.
func (f *flight) deferredLocked() *deferred {
	if f.deferred == nil {
		f.deferred = f.g.deferreds.Get().(*deferred)
	}
	return f.deferred
}

func (f *flight) deferLocked(do func()) {
	d := f.deferredLocked()
	d.calls = append(d.calls, do)
}

// unlock unlocks mu and does what was deferred: this is where requests are sent and callbacks called.
func (f *flight) unlock() { f.unlockInline(false) }

// unlockInline is unlock for a goroutine that may block for NodeTimeout, if inline is true:
// that of a caller that came to release.
func (f *flight) unlockInline(inline bool) {
	d := f.deferred
	f.deferred = nil
	f.mu.Unlock()
	if d == nil { // as after most handoffs
		return
	}
	for _, do := range d.calls {
		do()
	}
	if d.release != nil {
		f.sendRelease(d, inline)
	}
	clear(d.calls)
	*d = deferred{calls: d.calls[:0]}
	f.g.deferreds.Put(d)
}

// addTo adds to sum who waits, who holds and since when that is refreshed, and whether the lease is retained.
func (f *flight) addTo(sum *Counts, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum.Waiters += int64(f.n)
	if f.cur != nil {
		sum.Held++
		if !clock.Passed(now, f.cur.until) {
			sum.OldestTimer = max(sum.OldestTimer, f.cur.oldestTimerLocked(now))
		}
	}
	if f.phase == lingering && f.lease != nil {
		sum.Retained++
	}
}

// join puts t into the queue, and says what its caller has to do: to make the first attempt, if
// nobody else is there; or to look for another flight, because this one has died meanwhile.
func (f *flight) join(t *Ticket) (step, error) {
	f.mu.Lock()
	defer f.unlock()
	if f.phase == dead { // find makes a new one
		return again, nil
	}
	if f.phase == lingering && !f.g.closed.Load() && f.cameBackLocked(t) {
		if t.state != waiting { // it has the lease that was kept for it
			return stay, nil
		}
		return f.stepLocked(t), nil
	}
	first := f.n == 0 && f.lease == nil // an attempt in progress is being canceled
	if first && f.g.closed.Load() {
		if f.phase == idle { // else it dies when what is in progress has ended: Close waits for that
			f.dieLocked()
		}
		return stay, f.g.cfg.Errors.Closed()
	}
	if !first {
		t.kind = Queued
		if err := f.refuseLocked(t); err != nil {
			return stay, err
		}
		if sh := f.shard(); sh.lastHit.Load() != f {
			sh.lastHit.Store(f)
		}
	}
	t.f = f
	f.pushLocked(t)
	switch {
	case first && f.phase == idle:
		f.startAttemptLocked(t)
		return attempt, nil
	case t.failsFast() && f.lastLocked().Away && f.phase == idle:
		// Too few nodes could be reached. The next attempt, which shows whether that is still so, may be far.
		f.attemptNowLocked()
	}
	if first {
		return stay, nil
	}
	return f.stepLocked(t), nil // all others may run code of the user's
}

// refuseLocked says why t cannot wait behind others, nil if it can. A strategy that gives up at the first
// failure has met that failure already: the key is busy.
func (f *flight) refuseLocked(t *Ticket) error {
	if f.g.closed.Load() {
		return f.g.cfg.Errors.Closed()
	}
	if p := &t.waiter.plan; p.ended && len(p.delays) == 0 {
		return f.failed(f.busyLocked())
	}
	if limit := f.g.cfg.MaxWaiters; limit > 0 && int(f.n) >= limit {
		return f.g.cfg.Errors.TooManyWaiters(f.key)
	}
	return nil
}

// failed is the error for a caller whose attempt or refresh ends with why.
func (f *flight) failed(why *quorum.Failure) error { return f.g.cfg.Errors.Failed(f.key, why, nil) }

// waitedFor is the failure of a caller that others of this process precede.
var waitedFor = &quorum.Failure{Op: "acquire", Reason: quorum.Taken,
	Err: errors.New("others of this process wait for it")}

// busyLocked is the failure of a caller for which this process holds or wants the key already.
func (f *flight) busyLocked() *quorum.Failure {
	if f.lease == nil {
		return waitedFor
	}
	return &quorum.Failure{Op: "acquire", Reason: quorum.Taken,
		Err: fmt.Errorf("this process holds it, as %q", f.lease.Owner())}
}

// outcomeLocked is the failure of a waiter that gives up now.
func (f *flight) outcomeLocked() *quorum.Failure {
	if known := f.knownLocked(); known != nil {
		return known
	}
	return f.busyLocked()
}

// knownLocked is the last outcome, or how the attempt in progress stands; nil when nothing is
// known: nodes that still have time to answer are not called unreachable.
func (f *flight) knownLocked() *quorum.Failure {
	switch {
	case f.backoff != nil && f.backoff.last != nil:
		return f.backoff.last
	case f.attempt != nil:
		if known := f.attempt.Peek(); known != nil && !known.Early {
			return known
		}
	}
	return nil
}

// Known is the last outcome of an attempt at key, or how the one in progress stands. It is nil if nothing is
// known, or nobody of this process waits for key.
func (g *Group) Known(key string) error {
	f := g.known(key)
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.unlock()
	if known := f.knownLocked(); known != nil {
		return f.failed(known)
	}
	return nil
}

// The queue.

// head is the Ticket that has waited longest, nil if nobody waits.
func (f *flight) head() *Ticket { return f.queue.Front() }

func (f *flight) pushLocked(t *Ticket) {
	f.queue.PushBack(t)
	f.n++
	if t.waiter.needless != nil {
		f.lookers++
	}
}

// dropLocked takes t out of the queue.
func (f *flight) dropLocked(t *Ticket) {
	f.queue.Remove(t)
	f.n--
	if t.waiter.needless != nil {
		f.lookers--
	}
}

// Time.

// armLocked has tick called at that time, or earlier.
func (f *flight) armLocked(t time.Time) { f.armAtLocked(f.g.at(t)) }

func (f *flight) armAtLocked(at clock.Instant) {
	if f.armed != 0 && at >= f.armed {
		return
	}
	f.armed = at
	f.shard().arm(f, at)
}

// tick does what is due. A Ticket whose Until has passed is over; if it is not, its lease may have to be
// refreshed, and its Timers may be due. What lingers may be over. Without a lease, an
// attempt may be due, or a question to the driver's strategy. The alarm is not moved when a Ticket is
// released: it comes once per ttl, and then there may be nothing to do.
func (f *flight) tick() {
	f.mu.Lock()
	defer f.unlock()
	f.armed = 0
	now := clock.Now()
	switch {
	case f.cur != nil:
		f.overdueLocked(now)
		if t := f.cur; t != nil {
			f.completeLocked(now)
			f.armLocked(f.dueTimersLocked(t, now))
		}
	case f.phase == lingering:
		f.lapseLocked(now)
	case f.phase != idle || f.n == 0:
	case !now.Before(f.nextAttempt):
		f.tryLocked()
	default:
		f.paceLocked()
	}
}

// overdueLocked ends the current Ticket if its Until has passed. The lease may have been renewed
// for the waiters meanwhile: then it is passed on to them, under a new token.
func (f *flight) overdueLocked(now time.Time) {
	if t := f.cur; t != nil && clock.Passed(now, t.until) {
		f.endLocked(t, lost, t.expiredLocked())
		f.handOverOrReleaseLocked(now, 0) // its holder may hang: the lease is for those who wait, or for nobody
	}
}
