package flight

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/list"
)

// retention is what a flight needs to retain its lease: to keep it, although nobody in this process
// holds it, for the next caller. A flight has none before the first time.
//
// After the last Release a flight may keep its lease instead of releasing it. The next caller gets
// it by handoff: the next token of the block, and no command. It is kept until one of these:
//
//   - another process wants the key. The acquire script of every client publishes a recall to the inbox
//     of the client whose key it meets, if the owner says that it may be retained (quorum.Marked);
//   - Linger has passed, or so much of the ttl that a handoff would have to renew the lease. Nothing
//     renews it meanwhile, so a process that stands still costs the others no more than a ttl;
//   - there are more than Config.MaxRetained, and this one was not used for the longest time;
//   - the inbox is not confirmed by a majority of nodes any more, or the Group is closed.
//
// A retained lease is a lease: its validity, its tokens and its release are those of any other.
// What is added is one rule: no recall may be missed, or have come too late, without being noticed.
// A recall that finds the lease in use is kept (mark), and one that comes while the attempt is
// still under way too: then the next release is a plain one. One that finds it retained releases it
// under the same mu under which a caller would take it, so after a recall's arrival no caller gets
// the lease. An attempt carries the mark only if the inbox was confirmed before it began, and that
// mark is void as soon as the inbox is not confirmed any more: a rival whose recall was
// published before that, or meanwhile, cannot have been missed. What a lost message costs is
// bounded by the rival's next poll, and if no recall arrives at all, by the next renewal: that of a
// lease which was used again checks who waits elsewhere (checksReuseLocked).
//
// A flight that has met rivals (contention), or was recalled, retains nothing: for it, the turns
// are right. A key that is recalled again and again without a local use in between is left alone
// for a while: see fruitless.
//
// Simpler designs that were rejected: to ask the nodes at each reuse whether somebody waits is a
// round trip, which is what is to be saved; a lease that is refreshed while it is idle never ends
// if its process hangs in a way that leaves timers running.
type retention struct {
	// guarded by the flight's mu
	reused  bool // a local caller got the lease after it was retained
	settled bool // Settle of the lease was called

	// guarded by the retainedList's mu
	links  list.Links[flight]
	listed bool

	recent atomic.Bool // it was reused since the list's hand has passed it
}

// ListLinks are the links of f among the flights that retain leases.
func (f *flight) ListLinks() *list.Links[flight] { return &f.retention.links }

// retainedList bounds how many leases are retained. A flight is in it from the first time that it
// retains its lease until that is released, so that a lease that is used again and again does not
// contend for mu: as in the clock algorithm, a use leaves a mark (recent), and the flight in front
// that was used since the last look goes to the back instead of being dropped.
type retainedList struct {
	mu  sync.Mutex // guards what follows; a leaf
	n   int
	all list.List[flight, *flight]
}

// add adds f, and gives the flight that has to release its lease for that, nil if there is room.
func (l *retainedList) add(f *flight, limit int) (victim *flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.retention.listed {
		return nil
	}
	for l.n >= limit {
		front := l.all.Front()
		l.all.Remove(front)
		if front.retention.recent.Swap(false) {
			l.all.PushBack(front)
			continue
		}
		front.retention.listed = false
		l.n--
		victim = front
	}
	l.all.PushBack(f)
	f.retention.listed = true
	l.n++
	return victim
}

// drop removes f, if it is there.
func (l *retainedList) drop(f *flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.retention.listed {
		l.all.Remove(f)
		f.retention.listed = false
		l.n--
	}
}

// SetLinger has the lease that t is given retained for so long after t's release, if nobody waits
// for it by then: up to 49 days, in whole milliseconds. It is called before Acquire.
func (t *Ticket) SetLinger(d time.Duration) {
	const most = 1<<32 - 1
	t.linger = uint32(min(max(d, 0)/time.Millisecond, most))
}

// lingers is how long the lease may be retained after t's release.
func (t *Ticket) lingers() time.Duration { return time.Duration(t.linger) * time.Millisecond }

// mark is whether a flight may retain its lease.
type mark uint8

const (
	unmarked mark = iota // not this one: its owner does not say so, or a recall may have been missed
	marked               // its owner says so, and no recall can have been missed
	recalled             // another process has recalled a lease of this flight: it retains nothing any more
)

// marksLocked is whether the attempt of t, which is about to begin, is for a lease that may be retained.
func (f *flight) marksLocked(t *Ticket) mark {
	g := f.g
	if t.linger > 0 && g.inbox.Load() && g.cfg.MaxRetained > 0 && g.cfg.Slice >= 0 &&
		f.contention == nil && !f.shard().isFruitless(f.key, clock.InstantNow(g.epoch)) {
		return marked
	}
	return unmarked
}

// unmarkLocked takes the mark away, unless the flight was recalled.
func (f *flight) unmarkLocked() {
	if f.mark == marked {
		f.mark = unmarked
	}
}

// retainLocked keeps the lease, which nobody holds and nobody waits for, for linger at most, and reports
// whether it did.
func (f *flight) retainLocked(now time.Time, linger time.Duration) bool {
	if f.mark != marked || f.contention != nil || f.g.closed.Load() {
		return false
	}
	stay := min(linger, clock.Left(now, f.until)-f.enoughLocked(f.attemptTTL))
	if stay <= 0 {
		return false
	}
	r := f.retention
	if r == nil {
		r = &retention{}
		f.retention = r
	}
	if victim := f.g.retained.add(f, f.g.cfg.MaxRetained); victim != nil {
		f.deferLocked(victim.crowdOut)
	}
	if !r.settled {
		r.settled = true
		f.lease.Settle()
	}
	// A lease that is used again and again is renewed when a quarter of it is gone, not a
	// twentieth: a renewal per twentieth would be most of its traffic.
	f.renewAfter = f.g.at(f.until.Add(-f.g.cfg.Nodes.Validity(f.attemptTTL) / 4 * 3))
	f.lingerLocked(f.g.at(now.Add(stay)))
	return true
}

// reuseLocked gives the retained lease to t, which is new: at once, or, if t asks for a longer ttl
// or the tokens are used up, as soon as it is renewed. A lease that is over, which the alarm is
// about to notice, is released, and t contends.
func (f *flight) reuseLocked(t *Ticket) {
	now := clock.Now()
	t.kind, f.phase = Queued, leased
	f.retention.reused = true
	f.retention.recent.Store(true)
	f.sliceLocked(now) // nobody waits elsewhere, or there would have been a recall
	switch left := clock.Left(now, f.until); {
	case left <= 0:
		f.releaseLocked()
	case left < f.enoughLocked(t.ttl), f.tokens.left() == 0:
		if !f.refreshing {
			f.renewLocked(now)
		}
	default:
		f.shard().counts.reused.Add(1)
		f.giveLocked(t, now, left)
	}
}

// checksReuseLocked reports whether each renewal of the lease is a check for waiters elsewhere, because it is
// used again and again. Recalls may never arrive (a client may be denied PUBLISH, or know of none), and such
// a lease would then never end: each use begins a slice, and is over long before the check at its end.
func (f *flight) checksReuseLocked() bool {
	return f.g.cfg.Slice > 0 && f.retention != nil && f.retention.reused
}

// crowdOut releases the retained lease because there are too many.
func (f *flight) crowdOut() {
	f.mu.Lock()
	defer f.unlock()
	if f.phase == lingering && f.lease != nil {
		f.releaseLocked()
	}
}

// Recall has the lease of key released that has this owner, because contender wants it in another
// process; contender is "" if it has registered nothing. If the lease is in use, it is not retained
// later, and goes to that contender at the end of the slice. For another owner it means nothing:
// that one is gone.
func (g *Group) Recall(key, owner, contender string) {
	if f := g.known(key); f != nil {
		f.recall(owner, contender)
	}
}

// known gives the flight of key, nil if there is none.
func (g *Group) known(key string) *flight {
	sh := &g.shards[g.shardIndex(key)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.flights[key]
}

func (f *flight) recall(owner, contender string) {
	f.mu.Lock()
	defer f.unlock()
	switch {
	case f.lease != nil && f.lease.Owner() == owner:
	// recalled from a node that granted it before all answered
	case f.attempt != nil && f.attempt.Owner() == owner:
		f.mark = recalled
		return
	default:
		return
	}
	f.mark = recalled
	switch {
	case f.phase == lingering:
		f.shard().counts.recalled.Add(1)
		f.noteRecallLocked()
		f.releaseLocked()
	case f.phase != leased || f.n == 0: // its release is a plain one
	case contender == "" || f.g.cfg.Slice <= 0:
		if f.cur == nil { // its next holder waits for a renewal
			f.releaseLocked()
		}
	default:
		if f.contention == nil {
			f.subscribeLocked(owner)
		}
		f.contention.rival = contender
		if f.cur == nil {
			f.yieldLocked()
		}
	}
}

// InboxConfirmed says whether a majority of nodes has confirmed that recalls are received. The
// calls are made one at a time, and do not block. While it is not so, nothing is retained.
func (g *Group) InboxConfirmed(yes bool) { g.inbox.Store(yes) }

// InboxLost is called after that majority was lost: recalls may have been missed. A flight that has read
// inbox before is known by now, and its mu was taken then.
func (g *Group) InboxLost() {
	for i := range g.shards {
		for _, f := range g.shards[i].list() {
			f.unmark()
		}
	}
}

// unmark is called when a recall of f's lease may have been missed.
func (f *flight) unmark() {
	f.mu.Lock()
	defer f.unlock()
	f.unmarkLocked()
	if f.phase == lingering && f.lease != nil {
		f.releaseLocked()
	}
}

// fruitless is what is known of a key whose lease was retained for nothing: it was recalled before
// a local caller used it. The first time may be chance. From the second on, in a row, the key is
// not retained for a second, then two, and so on up to fruitlessMost: that many times less often
// does a rival wait for a recall, and each trial shows whether that has changed.
type fruitless struct {
	times int32
	until clock.Instant
}

const (
	fruitlessLeast = clock.Instant(time.Second)
	fruitlessMost  = clock.Instant(64 * time.Second)
	maxFruitless   = 1024 // keys, per shard; with one more all are forgotten
)

// noteRecallLocked is called when the retained lease was recalled.
func (f *flight) noteRecallLocked() {
	sh, now := f.shard(), clock.InstantNow(f.g.epoch)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if f.retention.reused {
		delete(sh.fruitless, f.key)
		return
	}
	was, known := sh.fruitless[f.key]
	if !known && len(sh.fruitless) >= maxFruitless {
		clear(sh.fruitless)
	}
	if sh.fruitless == nil {
		sh.fruitless = map[string]fruitless{}
	}
	was.times++
	was.until = now
	if was.times > 1 {
		was.until += min(fruitlessLeast<<min(was.times-2, 10), fruitlessMost)
	}
	sh.fruitless[f.key] = was
}

// isFruitless reports whether key is not to be retained for a while.
func (sh *shard) isFruitless(key string, now clock.Instant) bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return now < sh.fruitless[key].until
}

// unretainLocked is called when the lease, which may have been retained, is released.
func (f *flight) unretainLocked() {
	if f.retention != nil {
		f.g.retained.drop(f)
		f.retention = nil
	}
	f.unmarkLocked()
}
