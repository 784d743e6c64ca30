package quorum

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Lease is one owner's entry on the nodes, from the first request of the attempt to the last of
// its release. Replies, timers and the holder change its phase, all under one mutex, in this file and
// in refresh.go, except that Forget (offer.go) ends an offer.
//
//	acquiring --q grants, equal counters------> held --loss--> lost --Release--> over
//	   |  \--q grants--> raising --q confirm--/  \---------------------Release----/^
//	   |                    |                                                      |
//	   +--------------------+--- unwinnable, too late, canceled: undone ----------+
//
// Raising is no phase of its own: the phase is still acquiring, and the attempt has a second round (raise).
//
// A lost lease may still be on some nodes, and Release removes it there. Nothing else is possible:
// a lease that became valid again would hold a key that somebody else may have held in between.
//
// Safety, by rule:
//   - Validity starts before the first byte is sent, so no node's ttl can end first.
//   - A round is decided once. Later replies change the node's Entry, which knows what must be
//     released, and nothing on which this round's decision depends; no vote counts twice.
//   - Tokens: the block ends at T, the largest counter of the q votes. It is ours only when q
//     nodes have confirmed, while the key was ours, that their counter is T or more. Then any
//     later majority shares one of these nodes, whose counter is at least T before it grants.
//     Equal votes are such a confirmation. And any earlier holder's majority shares a node with
//     the q votes, where the holder's last token was counted before our grant: so all its tokens
//     are below the block if it ends at the largest vote; with the q-th largest they might not be.
//     A refresh reserves tokens from the highest token of this lease on, on each node. If the
//     counters differ afterwards, the block ends at the largest again, and the next refresh makes
//     it ours, since every refresh raises the counters to the highest token. A block that fewer
//     than q nodes have confirmed is skipped, never used.
//   - The deadline moves only when q nodes have confirmed a refresh before the old deadline.
type Lease struct {
	q      *Quorum
	target node.Target

	// mu guards what follows except the entries, which have their own mutexes. It is not held while a request is
	// sent or an outcome is delivered. It is held while Config.NotifiesRelease runs.
	mu            sync.Mutex
	phase         phase
	canceled      bool
	reserved      int32     // how many of the tokens up to top are not ours until a refresh is confirmed
	until         time.Time // validity deadline
	top           int64     // the highest token reserved
	attempt       *round    // the round of the attempt, until it is decided
	everHeld      uint64    // bit i: node i has held the key for us
	duplicateMask uint64    // bit i: node i is a second name of another node
	entries       []node.Entry
	one           [1]node.Entry // the entries of a quorum of one
	offer         *offer        // what is only of a lease that others may acquire; nil: it is none

	// scratch belongs to the attempt, and later to the release, which may read it without mu. It is nil in
	// between once the lease has turned out to be held for long; that is written under mu, while phase is held.
	scratch *scratch
}

// scratch is the memory of an attempt, which the release uses again. A lock that is held for long
// drops it in between, because it is larger than the rest of the lease.
type scratch struct {
	onAcquired Acquirer
	ttl        time.Duration
	tokens     int64
	carries    *Lease // the offer that the attempt brings to the nodes; nil: none

	onReleased Releaser
	rejoins    *rejoin // what the release brings; nil: nothing

	round  round // see roundLocked
	places []node.RequestBuf
	one    [1]node.RequestBuf // the places of a quorum of one
}

// newScratch makes one for n nodes.
func newScratch(n int) *scratch {
	s := &scratch{}
	if s.places = s.one[:]; n > len(s.one) {
		s.places = make([]node.RequestBuf, n)
	}
	return s
}

// Acquirer receives the outcome of an attempt. It is an interface, and not a func as elsewhere,
// because every lock has one: a pointer in an interface needs no allocation.
type Acquirer interface{ Acquired(Grant, *Failure) }

// Releaser receives the outcome of a release: nil if it succeeded.
type Releaser interface{ Released(*Failure) }

type phase uint8

const (
	acquiring phase = iota
	held
	lost
	over
)

// Acquire makes the attempt and calls by.Acquired exactly once, on a goroutine of a node, of the
// quorum, of a timer, or of the caller: with a grant, or with the reason why there is none. A failed attempt
// is undone on every node that may have granted it: these requests are made before the call.
func (l *Lease) Acquire(inline bool, by Acquirer) {
	s := l.scratch
	s.onAcquired = by
	f := l.q.duplicate.Load()
	if f == nil {
		f = l.q.withoutVotes()
	}
	if f != nil { // nothing is sent
		if s.carries != nil {
			s.carries.unsent(&l.target)
		}
		l.fail(f, false)
		return
	}
	r := l.newRound(l.verb(), node.Granted, 0, func(r *round) { r.l.acquired(r) })
	for i := range l.entries {
		l.entries[i].Acquire(&s.places[i], r, s.ttl, s.tokens, inline)
	}
}

// Owner is the whole stored value.
func (l *Lease) Owner() string { return l.target.Owner() }

// Cancel makes the attempt fail soon, unless its outcome has been delivered or is being delivered.
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

// Peek returns the failure that the attempt would be if it ended now.
func (l *Lease) Peek() *Failure {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.attempt == nil {
		return nil
	}
	f := l.attempt.failureLocked()
	asked := clock.Later(l.attempt.began, l.target.Begun()) // requests may have waited in this process
	f.Early = f.Reason == Unreachable && !f.Away && clock.Since(asked) < l.q.NodeTimeout
	return f
}

var errTooLate = errors.New("a majority was reached, but only after the validity was over")

// acquired continues after the decided first round.
func (l *Lease) acquired(r *round) {
	begun := l.target.Begun() // before the first byte was sent
	until := begun.Add(l.q.Validity(l.scratch.ttl))
	l.mu.Lock()
	if l.offer != nil {
		l.offer.endLocked()
		until = l.offer.decidedLocked(r, until)
	}
	l.until = until
	if r.won {
		l.target.SetFollower(r.rivalLocked())
	}
	top, agree := r.topCounterLocked()
	f := l.attemptFailureLocked(r)
	if (len(l.entries) > 1 || l.scratch.carries != nil) && !begun.IsZero() && l.offer == nil && !l.canceled {
		l.q.rtt.Store(int64(clock.Since(begun)))
	}
	if f == nil && !agree {
		known := slices.Clone(r.replies) // the release may reuse the round's memory before the last node was asked
		l.mu.Unlock()
		l.raise(known, top)
		return
	}
	l.endAttemptAndUnlock(r, top, f)
}

// raise makes top the end of the block on a majority of nodes, whose counters differ. known are
// their answers so far.
func (l *Lease) raise(known []node.Reply, top int64) {
	until, ttl := l.until, l.scratch.ttl // do not change before the lease is held
	r := l.newRound(l.verb(), node.Renewed, top, func(r *round) {
		l.mu.Lock()
		l.endAttemptAndUnlock(r, top, l.attemptFailureLocked(r))
	})
	for i := range l.entries {
		if known[i].Kind == node.Held {
			r.Answer(i, known[i])
		} else {
			l.entries[i].Refresh(r, ttl, top, 0, until, "")
		}
	}
}

// attemptFailureLocked returns why the attempt fails, nil if it has not failed so far.
func (l *Lease) attemptFailureLocked(r *round) *Failure {
	switch {
	case !r.won:
		return r.failureLocked()
	case l.offer != nil && l.q.duplicate.Load() != nil:
		return l.q.duplicate.Load()
	case clock.Passed(clock.Now(), l.until):
		f := r.failureLocked()
		f.Reason, f.Err = Unreachable, errTooLate
		return f
	case l.slowLocked():
		f := r.failureLocked()
		f.Reason, f.Err = Unreachable, errSlowAttempt
		return f
	}
	return nil
}

// slowLocked reports whether a vote of the attempt may be of a node that lost its data so long ago that it
// confirms refreshes of others again: see quarantine. Votes that have come by message are valid for less than
// that.
func (l *Lease) slowLocked() bool {
	begun := l.target.Begun()
	return l.q.quarantine != nil && !begun.IsZero() && clock.Passed(clock.Now(), begun.Add(attemptLimit))
}

// endAttemptAndUnlock ends the attempt, and unlocks mu: the lease is held, unless f says why it is
// not, or the attempt was canceled.
func (l *Lease) endAttemptAndUnlock(r *round, top int64, f *Failure) {
	if f == nil && l.canceled {
		f = r.failureLocked()
	}
	if f != nil {
		l.mu.Unlock()
		l.fail(f, r.won || r.want == node.Renewed)
		return
	}
	l.phase, l.top, l.attempt = held, top, nil
	onAcquired := l.scratch.onAcquired
	g := Grant{Until: l.until, First: top - l.scratch.tokens + 1, Last: top}
	if by := l.target.Replaced(); by != nil && top == by.Top {
		g.First, g.Last = by.Token, by.Token
	}
	if l.offer != nil {
		g.Span = l.offer.span
	}
	l.mu.Unlock()
	onAcquired.Acquired(g, nil)
}

// fail ends the attempt and undoes it on every node that may have granted it, unless another attempt of the
// same client may still attach the same lock. The undo is sent before the outcome is delivered, so that it
// precedes the next attempt.
//
// Usually there was no majority, and nobody waits because of us: then no turn is made, since one for one of
// those whose votes were split would keep them in step, to be split again. An attempt that had a majority and
// was too late, not confirmed, or canceled passes the turn on as a release does.
func (l *Lease) fail(f *Failure, hadMajority bool) {
	l.mu.Lock()
	l.phase, l.attempt = over, nil
	duplicates, s := l.duplicateMask != 0, l.scratch
	var p *node.TurnPass
	if hadMajority || l.canceled {
		p = l.releasePass("", node.NoNews)
	}
	l.offer.endLocked()
	l.mu.Unlock()
	if l.offer != nil {
		l.q.offers.ended(l)
	}
	if l.isUnsettled(f) {
		l.abandonEntries()
	}
	for i := range l.entries { // which ignores those that were abandoned
		l.entries[i].Release(&s.places[i], nil, false, p)
	}
	if duplicates && l.q.tasks.Go(func() { l.failAfterSearch(f) }) {
		return
	}
	l.scratch.onAcquired.Acquired(Grant{}, f)
}

// releasePass is the turnPass of a release. If that names no rival, or Others, the nodes are to agree on the
// one that is next: those that begin to wait at the same moment do so in another order on each node, and
// would have a vote each.
func (l *Lease) releasePass(rival string, news node.News) *node.TurnPass {
	if follower := l.target.Follower(); (rival == "" || rival == Others) && follower != "" &&
		len(l.entries) > 1 {
		return l.turnPass(follower, true, news)
	}
	return l.turnPass(rival, false, news)
}

// turnPass says who is next after this lease: rival, if it is set, or else the contender that
// waits longest; rival may be Others. With a rival this lease's own contender waits on, unless it leaves. All
// of them receive the news.
func (l *Lease) turnPass(rival string, leaves bool, news node.News) *node.TurnPass {
	contender, plain := l.target.Contender(), &plainTurnPass
	if rival == Others {
		rival, plain = "", &othersTurnPass
	}
	switch {
	case contender == "" && rival == "" && news != node.NewsFailed:
		return plain
	case contender == "" && rival != "":
		contender = l.target.Owner()
	}
	return &node.TurnPass{Contender: contender, Rival: rival, Leaves: leaves, News: news}
}

var (
	plainTurnPass  node.TurnPass
	othersTurnPass = node.TurnPass{Contender: node.Nobody}
)

// failAfterSearch waits for the search for duplicates before it reports f, for NodeTimeout at most:
// if the same server is configured twice, the error must say that, and not that the key is held.
func (l *Lease) failAfterSearch(f *Failure) {
	select {
	case <-l.q.searchEnded():
	case <-time.After(l.q.NodeTimeout):
	}
	if duplicate := l.q.duplicate.Load(); duplicate != nil {
		f = duplicate
	}
	l.scratch.onAcquired.Acquired(Grant{}, f)
}

// Settle frees memory that the release would use again, since the lease is held for long.
func (l *Lease) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == held {
		l.scratch = nil
	}
}

// Release ends the lease and calls by.Released exactly once: with nil if a majority of nodes has
// deleted our key. Nodes that have not answered by then receive the release again until they do.
// rival gets the next turn, while this lease's contender registers for another; if it is "", the
// contender that waits longest is next, as with Others, which says that there is one. All contenders receive
// the news; not those of nodes that get the release only later.
func (l *Lease) Release(inline bool, rival string, news node.News, by Releaser) {
	l.release(inline, rival, news, nil, by)
}

func (l *Lease) release(inline bool, rival string, news node.News, rejoins *rejoin, by Releaser) {
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
	s := l.scratch // nobody else uses it any more: there is one release
	s.onReleased, s.rejoins = by, rejoins
	r := l.newRound("release", node.Deleted, 0, func(r *round) { r.l.released(r) })
	if l.offer != nil {
		l.q.offers.ended(l)
	}
	p := l.releasePass(rival, news)
	if rejoins != nil {
		p = l.rejoinPass(p, rejoins)
	}
	for i := range l.entries {
		l.entries[i].Release(&s.places[i], r, inline, p)
	}
}

// rejoinPass is p of a release that brings an offer.
func (l *Lease) rejoinPass(p *node.TurnPass, rejoins *rejoin) *node.TurnPass {
	q := *p
	if q.Contender = l.target.Contender(); q.Contender == "" {
		q.Contender = l.target.Owner()
	}
	q.Rejoin(&rejoins.offer.offer.Offer, rejoins.poll.number, rejoins.poll.span)
	return &q
}

// released delivers the outcome of the decided round of a release. After that l knows neither by whom it was
// released nor what the release has brought: it may be kept for long, because a node does not answer, and is
// not to keep all leases that follow it.
func (l *Lease) released(r *round) {
	by, rejoins := l.scratch.onReleased, l.scratch.rejoins
	l.scratch.onReleased, l.scratch.rejoins = nil, nil
	if r.won && rejoins == nil {
		by.Released(nil)
		return
	}
	var f *Failure
	l.mu.Lock()
	if !r.won {
		f = r.failureLocked()
	}
	rejoined := rejoins != nil && r.rejoinedLocked()
	l.mu.Unlock()
	if rejoins != nil {
		o := rejoins.offer
		o.mu.Lock()
		o.offer.rejoined = rejoined
		o.mu.Unlock()
	}
	by.Released(f)
}
