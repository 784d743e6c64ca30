package quorum

import (
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Lease is one owner's entry on the nodes, from the first request of the attempt to the
// last of its release. All its state changes here, under one mutex, whoever brings the
// news: a reply, a timer, the holder.
//
//	asking --q grants, equal counters---------> held --loss--> lost --Release--> over
//	   |  \--q grants--> raising --q confirm--/  \---------------------Release----/^
//	   |                    |                                                      |
//	   +--------------------+--- out of reach, too late, cancelled: undone --------+
//
// A lease that was lost may still be on some nodes, which Release takes it from. It can do
// nothing else any more: what came back later would be the holder of a key that was
// somebody else's in between.
//
// Safety, by rule:
//   - Validity starts before the first byte is sent, so no node's ttl can end first.
//   - A round is decided once. Replies that come later move the node's Entry on, which
//     keeps what must be released, and change nothing here; no vote counts twice.
//   - Tokens: the block ends at T, the largest counter of the q votes. Only when q nodes
//     have confirmed, while the key was ours, that their counter is T or more, is the
//     block ours: any later majority shares one of these nodes, whose counter is then
//     at least T before it grants. Equal votes are such a confirmation by themselves.
//     And any earlier holder's majority shares one with the q votes, where its last
//     token was counted before our grant; so the largest vote leaves all of them below
//     the block, and the q-th largest would not. A reservation is counted from the
//     highest token of this lease, on each node. Where the counters differ after it, it
//     ends at the largest again, and the next refresh, which raises the counters to the
//     highest token as every refresh does, makes it ours. One that fewer than q nodes have
//     answered is skipped, never used.
//   - The deadline moves only when q nodes confirmed a refresh, and only if they did
//     before the old deadline.
type Lease struct {
	q      *Quorum
	target node.Target

	mu       sync.Mutex // guards what follows, but the entries, which guard themselves; never held while a request goes out or a caller is called
	phase    phase
	canceled bool
	granted  bool      // a majority has granted the attempt
	reserved int32     // how many of the tokens up to top are not ours before a refresh is confirmed
	until    time.Time // validity deadline
	top      int64     // the highest token reserved
	attempt      *round    // the round of the attempt, until it is decided
	everHeld      uint64    // bit i: node i has had the key
	duplicateMask  uint64    // bit i: node i has proven to be a second name of another node
	entries  []node.Entry
	one      [1]node.Entry // the entries of a quorum of one

	// scratch is that of the attempt, and later of the release. Between them, nil once the lease
	// is known to be held for long.
	scratch *scratch
}

// scratch is what an attempt takes until it is over, and what the release takes that follows it.
// A lock that is held for long gives it back meanwhile, because it is larger than the rest of
// the lease; for others the release finds its memory there.
type scratch struct {
	onAcquired  Acquirer
	ttl    time.Duration
	tokens int64

	onReleased Releaser

	round  round // see roundLocked
	places []node.Place
	one    [1]node.Place // the places of a quorum of one
}

// newScratch is one for n nodes.
func newScratch(n int) *scratch {
	e := &scratch{}
	if e.places = e.one[:]; n > len(e.one) {
		e.places = make([]node.Place, n)
	}
	return e
}

// Acquirer hears what became of an attempt. It is an interface, and not a func as elsewhere,
// because every lock has one: a pointer in an interface costs no allocation.
type Acquirer interface{ Acquired(Grant, *Failure) }

// Releaser hears what became of a release: nil when it succeeded.
type Releaser interface{ Released(*Failure) }

type phase uint8

const (
	acquiring phase = iota
	held
	lost
	over
)

// Acquire makes the attempt and tells by exactly once, from a goroutine of a node, of a
// timer, or of the caller: with a grant, or with the reason why there is none. A failed
// attempt is being undone on every node that may have granted it by the time by is told,
// whatever became of the caller.
func (l *Lease) Acquire(inline bool, by Acquirer) {
	e := l.scratch
	e.onAcquired = by
	if f := l.q.duplicate.Load(); f != nil {
		l.fail(f)
		return
	}
	r := l.round("acquire", node.Granted, 0, func(r *round) { r.l.acquired(r) })
	for i := range l.entries {
		l.entries[i].Acquire(&e.places[i], r, e.ttl, e.tokens, min(l.q.NodeTimeout, e.ttl), l.mayBlock(inline))
	}
}

// mayBlock reports whether a request may be made on the goroutine of its caller. With
// several nodes it may not: each would wait for the one before.
func (l *Lease) mayBlock(inline bool) bool { return inline && len(l.entries) == 1 }

// Key is the lock key, prefix included.
func (l *Lease) Key() string { return l.target.Key() }

// Owner is the whole stored value.
func (l *Lease) Owner() string { return l.target.Owner() }

// Cancel gives the attempt up: it fails soon, unless its outcome was told already or is just
// being told.
func (l *Lease) Cancel() {
	l.mu.Lock()
	l.canceled = true
	r := l.attempt
	ends := r != nil && r.decideLocked(true)
	l.mu.Unlock()
	if ends {
		r.end()
	}
}

// Peek says how the attempt stands: the failure that it would be if it ended now.
func (l *Lease) Peek() *Failure {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.attempt == nil {
		return nil
	}
	return l.attempt.failureLocked()
}

var errTooLate = errors.New("a majority was reached, but only after the validity was over")

// acquired goes on from the decided first round.
func (l *Lease) acquired(r *round) {
	begun := l.target.Begun() // before the first byte was sent
	until := begun.Add(l.q.Validity(l.scratch.ttl))
	l.mu.Lock()
	l.granted, l.until = r.won, until
	top, agree := r.topCounterLocked()
	f := l.checkLocked(r)
	if len(l.entries) > 1 && !begun.IsZero() {
		l.q.rtt.Store(int64(clock.Since(begun)))
	}
	if f == nil && !agree {
		known := slices.Clone(r.replies) // the round's place may be the release's before the last node was asked
		l.mu.Unlock()
		l.raise(known, top)
		return
	}
	l.endLocked(r, top, f)
}

// raise makes top the end of the block on a majority of nodes, because their counters
// differ. known is what they have answered so far.
func (l *Lease) raise(known []node.Reply, top int64) {
	until, ttl := l.until, l.scratch.ttl // do not move before the lease is held
	r := l.round("acquire", node.Renewed, top, func(r *round) {
		l.mu.Lock()
		l.endLocked(r, top, l.checkLocked(r))
	})
	for i := range l.entries {
		if known[i].Kind == node.Held {
			r.Answer(i, known[i])
		} else {
			l.entries[i].Refresh(r, ttl, top, 0, min(l.q.NodeTimeout, ttl), until, "")
		}
	}
}

// checkLocked says why the attempt fails, nil if it stands so far.
func (l *Lease) checkLocked(r *round) *Failure {
	switch {
	case !r.won:
		return r.failureLocked()
	case clock.Passed(clock.Now(), l.until):
		f := r.failureLocked()
		f.Reason, f.Err = Unreachable, errTooLate
		return f
	}
	return nil
}

// endLocked ends the attempt, and lets go of mu: the lease is held, unless f says why it is
// not, or it was cancelled on the way.
func (l *Lease) endLocked(r *round, top int64, f *Failure) {
	if f == nil && l.canceled {
		f = r.failureLocked()
	}
	if f != nil {
		l.mu.Unlock()
		l.fail(f)
		return
	}
	l.phase, l.top, l.attempt = held, top, nil
	by := l.scratch.onAcquired
	g := Grant{Until: l.until, First: top - l.scratch.tokens + 1, Last: top}
	l.mu.Unlock()
	by.Acquired(g, nil)
}

// fail ends the attempt and undoes it on every node that may have granted it. The undo
// goes out before the asker is told, so that it comes before whatever is tried next.
func (l *Lease) fail(f *Failure) {
	l.mu.Lock()
	l.phase, l.attempt = over, nil
	twins, e := l.duplicateMask != 0, l.scratch
	p := l.undoLocked()
	l.mu.Unlock()
	for i := range l.entries {
		l.entries[i].Release(&e.places[i], nil, false, p)
	}
	if twins && l.q.start(func() { l.failAfterCheck(f) }) {
		return
	}
	l.scratch.onAcquired.Acquired(Grant{}, f)
}

// undoLocked says how a failed attempt leaves the nodes that granted it. Usually there was
// no majority, and nobody else waits because of us: then a turn for one of those who split
// the votes would keep them in step, to split them again. An attempt that had its majority
// and was too late, or was not confirmed, or was cancelled, passes the turn on like a release.
func (l *Lease) undoLocked() *node.Parting {
	if !l.granted && !l.canceled {
		return nil
	}
	return l.handover("", false)
}

// handover is how the lease is left to others: to rival, if there is one, or else to the one
// that waits longest. All are told if what it was for has failed.
func (l *Lease) handover(rival string, failed bool) *node.Parting {
	contender := l.target.Contender()
	switch {
	case contender == "" && rival == "" && !failed:
		return &plainHandover
	case contender == "" && rival != "":
		contender = l.target.Owner()
	}
	return &node.Parting{Contender: contender, Rival: rival, Failed: failed}
}

var plainHandover node.Parting

// failAfterCheck waits for the search for twins before it reports f, so that whoever
// configured the same server twice is told so and not that the key is taken. It takes one
// NodeTimeout at most.
func (l *Lease) failAfterCheck(f *Failure) {
	select {
	case <-l.q.searchEnded():
	case <-time.After(l.q.NodeTimeout):
	}
	if twins := l.q.duplicate.Load(); twins != nil {
		f = twins
	}
	l.scratch.onAcquired.Acquired(Grant{}, f)
}

// Refresh asks for the full ttl again, and for more tokens, and calls done exactly once.
// The caller sees to it that a lease has one refresh at a time: blocks reserved by two at
// once could overlap. A failure with reason NotHeld means that the lease is lost; any
// other leaves it as it was. Grant.Until is what this refresh gives; an earlier one may
// have given more.
//
// A refresh is one round, whose outcome is not kept back for the tokens: if the nodes did not
// agree on a block, the grant has none but says Reserved. The next refresh that is confirmed brings
// that block, and asks for no other. (Two rounds as one refresh lost the lease when the old
// deadline passed in the second, and took twice as long as its caller had allowed for.)
//
// If look is true, the grant names the rival that most nodes name, other than this lease's
// own contender.
func (l *Lease) Refresh(ttl time.Duration, more int64, timeout time.Duration, namesRival bool, done func(Grant, *Failure)) {
	start := clock.Now()
	l.mu.Lock()
	f := l.overLocked(start, l.until, errOver)
	until, top, confirms := l.until, l.top, l.reserved > 0
	if more = min(more, math.MaxInt32); confirms { // reserved has no room for more
		more = 0
	}
	if f == nil {
		l.scratch = nil // as Settle does
	}
	l.mu.Unlock()
	if f != nil {
		done(Grant{}, f)
		return
	}
	ref := refresh{more: more, confirms: confirms, until: until, given: start.Add(l.q.Validity(ttl)), done: done}
	// A node raises its counter as it renews. A Cluster that has the key and its counter apart, while it
	// moves their slot, renews all the same: a floor of 0 counts that. The ttl is what this round is about;
	// tokens are brought by counters alone.
	r := l.round("refresh", node.Renewed, 0, func(r *round) { l.refreshed(r, ref) })
	r.endAt(until.Add(fixedDrift)) // and not in the instant in which whoever holds the lease finds that it is over
	for i := range l.entries {
		l.entries[i].Refresh(r, ttl, top, more, min(timeout, ttl), until, l.waitersOtherThan(namesRival))
	}
}

// waitersOtherThan is who asks for rivals, "" if nobody does.
func (l *Lease) waitersOtherThan(look bool) string {
	switch {
	case !look:
		return ""
	case l.target.Contender() == "":
		return l.target.Owner()
	}
	return l.target.Contender()
}

var (
	errNotHeld    = errors.New("it was lost or let go before")
	errOver       = errors.New("its validity was over")
	errLateAnswer = errors.New("the refresh was not confirmed before the validity was over")
)

// overLocked says that the lease is lost or let go, or that it is lost now because its
// deadline has passed; nil if it is held.
func (l *Lease) overLocked(now, until time.Time, late error) *Failure {
	why := errNotHeld
	if l.phase == held {
		if !clock.Passed(now, until) {
			return nil
		}
		l.phase, why = lost, late
	}
	return &Failure{Op: "refresh", Reason: NotHeld, Need: l.q.need, Err: why}
}

// refresh is what one call of Refresh is about.
type refresh struct {
	more         int64     // tokens that it reserves
	confirms     bool      // instead, it makes those ours that were reserved before
	until, given time.Time // the deadline before, and the one that a majority makes true
	done         func(Grant, *Failure)
}

// notRenewedLocked says why a decided round of a refresh failed, nil if it did not. When
// others' votes are the reason, or an answer after the old deadline, the lease is lost.
func (l *Lease) notRenewedLocked(r *round, until time.Time) *Failure {
	if f := l.overLocked(clock.Now(), until, errLateAnswer); f != nil {
		said := r.failureLocked()
		f.Got, f.Nodes = said.Got, said.Nodes
		return f
	}
	if r.won {
		return nil
	}
	f := r.failureLocked()
	if f.Reason == NotHeld {
		l.phase = lost
	}
	return f
}

// refreshed goes on from a decided refresh.
func (l *Lease) refreshed(r *round, ref refresh) {
	l.mu.Lock()
	if f := l.notRenewedLocked(r, ref.until); f != nil {
		l.mu.Unlock()
		ref.done(Grant{}, f)
		return
	}
	if ref.given.After(l.until) {
		l.until = ref.given
	}
	g := Grant{Until: ref.given, First: 1, Rival: r.rivalLocked()}
	switch top, agree := r.topCounterLocked(); {
	case ref.confirms && r.confirmedLocked(l.top):
		g.First, g.Last = l.top-int64(l.reserved)+1, l.top
		l.reserved = 0
	case ref.more == 0, top == 0: // it brings none, and another time those that are reserved
	case agree:
		g.First, g.Last = top-ref.more+1, top
		l.top = top
	default:
		g.Reserved = true
		l.top, l.reserved = top, int32(ref.more)
	}
	missing := r.missingLocked()
	l.mu.Unlock()

	for _, i := range missing {
		l.repair(i)
	}
	ref.done(g, nil)
}

// repair gives the key and the fence back to a node that lost them, for as long as the
// lease is valid. It is no vote: a lease that counted repairs could come back from loss.
func (l *Lease) repair(i int) {
	l.mu.Lock()
	left, until, top, ok := clock.Left(clock.Now(), l.until), l.until, l.top, l.phase == held
	l.mu.Unlock()
	if ok && left >= time.Millisecond {
		l.entries[i].Repair(left, top, until)
	}
}

// Settle gives back what a release would find ready. The lease will be held for long.
func (l *Lease) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == held {
		l.scratch = nil
	}
}

// Release ends the lease and tells by exactly once: nil when a majority of nodes deleted our
// key. The nodes that did not answer by then are chased until they do. rival is who gets
// the next turn, while this lease's contender waits for another; "" if it does not and
// whoever waits longest is next. With failed all who want the key are told that what the lease was for
// has failed; a release that a node did not get by then says nothing of that.
func (l *Lease) Release(inline bool, rival string, failed bool, by Releaser) {
	l.mu.Lock()
	had := l.phase == held || l.phase == lost
	if had {
		l.phase = over
		if l.scratch == nil {
			l.scratch = newScratch(len(l.entries))
		}
	}
	l.mu.Unlock()
	if !had {
		by.Released(&Failure{Op: "release", Reason: NotHeld, Need: l.q.need})
		return
	}
	e := l.scratch // nobody else comes to it any more: there is one release
	e.onReleased = by
	r := l.round("release", node.Deleted, 0, func(r *round) { r.l.released(r) })
	l.q.deadlines.add(r)
	p := l.handover(rival, failed)
	for i := range l.entries {
		l.entries[i].Release(&e.places[i], r, l.mayBlock(inline), p)
	}
}

// released reports the decided round of the release.
func (l *Lease) released(r *round) {
	if r.won {
		l.scratch.onReleased.Released(nil)
		return
	}
	l.mu.Lock()
	f := r.failureLocked()
	l.mu.Unlock()
	l.scratch.onReleased.Released(f)
}
