package quorum

import (
	"errors"
	"math/bits"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// round is one request to all nodes and its decision: by the first q agreeing votes, or as soon
// as q votes are out of reach. A slow minority adds no latency.
//
// It has no deadline of its own: each node answers, or its request fails after its own timeout, which counts
// from when it was written (S5). But a refresh is decided fixedDrift after the end of the lease at the
// latest, wherever the requests are by then.
type round struct {
	l         *Lease
	op        string
	want      node.Kind    // the reply that is a vote for us
	began     time.Time    // before the first request was made; not of a release
	floor     int64        // a vote must have at least this counter
	onDecided func(*round) // called once, after the decision, without l.mu
	timer     *time.Timer  // of a refresh

	// guarded by l.mu
	decided bool
	won     bool
	expired bool  // the time was up
	pending uint8 // nodes that have not answered yet
	replies []node.Reply
	one     [1]node.Reply // the replies of a quorum of one
}

// acquires reports whether the round belongs to an attempt. The one of raise does, too: its
// outcome is that of the attempt.
func (r *round) acquires() bool { return r.op == "acquire" }

// newRound begins a round, whose requests its caller then makes. If the attempt has been
// canceled, the round is decided already, and the requests are not sent.
func (l *Lease) newRound(op string, want node.Kind, floor int64, onDecided func(*round)) *round {
	l.mu.Lock()
	r := l.roundLocked(op)
	r.op, r.want, r.floor, r.onDecided = op, want, floor, onDecided
	if op != "release" {
		r.began = clock.Now()
	}
	r.pending = uint8(len(l.entries))
	// A message about a grant may have been lost: a node that is no second name of another one counts again. A
	// lease may be refreshed for hours, and is not to do without one of its nodes for that.
	l.duplicateMask &^= l.q.distinct.Load()
	for mask := l.duplicateMask; mask != 0; mask &= mask - 1 {
		r.replies[bits.TrailingZeros64(mask)] = node.Reply{Kind: node.Failed, Err: errDuplicate}
	}
	if l.phase == acquiring {
		l.attempt = r
	}
	ends := l.phase == acquiring && l.canceled && r.decideLocked(true)
	l.mu.Unlock()
	if ends {
		r.end()
	}
	return r
}

// endAt decides the round at t, by the answers that have come by then. The caller has not sent it
// yet. The timer may fire before r.timer is set, which end reads: mu, which expire locks first,
// prevents that.
func (r *round) endAt(t time.Time) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.timer = clock.AfterFunc(clock.Left(clock.Now(), t), r.expire)
}

// reservedForUs reports whether a node reserves the key for our turn because our acquire arrived
// there before the release that made the turn ours. A refresh has to repair that.
func (l *Lease) reservedForUs(holder string) bool {
	return l.target.Contender() != "" && len(holder) == len(node.TurnOf)+len(l.target.Contender()) &&
		holder[:len(node.TurnOf)] == node.TurnOf && holder[len(node.TurnOf):] == l.target.Contender()
}

// roundLocked returns memory for the next round: that of the lease's scratch for the first round of
// an attempt, and for the release if nobody uses the attempt's round any more: all nodes have
// answered, and there was no timer. (Not of an offer: a node may have been asked and have voted by
// message. The quarantine may still reconsider a round whose memory the release has by then: that
// decides only what the replies decide anyway.)
func (l *Lease) roundLocked(op string) *round {
	var r *round
	if l.scratch != nil {
		r = &l.scratch.round
	}
	switch {
	case op != "refresh" && r.l == nil: // new
	case op == "release" && l.offer == nil && r.decided && r.pending == 0 && r.timer == nil:
		clear(r.replies)
		r.decided, r.won, r.expired = false, false, false
		return r
	default:
		r = &round{}
	}
	r.l, r.replies = l, r.one[:]
	if len(l.entries) > len(r.one) {
		r.replies = make([]node.Reply, len(l.entries))
	}
	return r
}

var errDuplicate = errors.New("answered as if it were the same server as another node: its vote does not " +
	"count")

// Answer receives node i's reply.
func (r *round) Answer(i int, rep node.Reply) {
	l := r.l
	if rep.Kind == node.Held && l.reservedForUs(rep.Holder) {
		rep = node.Reply{Kind: node.Missing}
	}
	if l.offer != nil && r.want == node.Granted {
		l.mu.Lock()
		voted, late := r.replies[i].Kind != node.Pending, l.offer.late&(1<<i) != 0
		l.mu.Unlock()
		if voted { // by message, since it was asked: that vote is of the same owner
			return
		}
		if late && rep.Kind == node.Replayed { // by somebody's release: the node has said so
			rep.Kind = node.Granted
		}
	}
	duplicate := rep.Kind == node.Replayed // the owner is new to this node
	if duplicate {
		rep = node.Reply{Kind: node.Failed, Err: errDuplicate}
		l.q.reportDuplicate(i) // before the decision, which may wait for its result
	}
	l.mu.Lock()
	if l.offer != nil && r.want == node.Granted && r.replies[i].Kind != node.Pending {
		l.mu.Unlock() // a vote has come by message meanwhile
		return
	}
	r.pending--
	if duplicate {
		l.duplicateMask |= 1 << i
	}
	if rep.Kind == node.Granted || rep.Kind == node.Renewed {
		l.everHeld |= 1 << i
	}
	if rep.Presumed && l.everHeld&(1<<i) == 0 {
		rep = node.Reply{Kind: node.Missing}
	}
	if r.decided {
		if r.acquires() && !r.won { // for Failure.Now
			r.replies[i] = rep
		}
		repair := r.won && r.op == "refresh" && rep.Kind == node.Missing
		l.mu.Unlock()
		if repair {
			l.repair(i)
		}
		return
	}
	if l.duplicateMask&(1<<i) != 0 && rep.Kind != node.Failed { // it may have been noticed during this round
		rep = node.Reply{Kind: node.Failed, Err: errDuplicate}
	}
	r.replies[i] = rep
	ends := r.decideLocked(false)
	l.mu.Unlock()
	if ends {
		r.end()
	}
}

// expire decides the round by the answers that have come, unless it is decided already.
func (r *round) expire() {
	r.l.mu.Lock()
	ends := r.decideLocked(true)
	r.expired = r.expired || ends
	r.l.mu.Unlock()
	if ends {
		r.end()
	}
}

// decideLocked decides the round if that is possible, or in any case if force is set. It reports
// whether this call has decided; then the caller unlocks and calls end.
func (r *round) decideLocked(force bool) bool {
	if r.decided {
		return false
	}
	t := r.tallyLocked()
	if t.undecided > 0 && !force && !r.l.q.quarantine.awaitBootstrap(r) { // the bootstrap has just ended
		t = r.tallyLocked()
	}
	r.won = t.yes >= t.need
	r.decided = r.won || force || t.failedForGood(r.acquires())
	r.won = r.won || r.decided && t.released()
	return r.decided
}

// reconsider decides the round, if possible, at the end of a bootstrap that it waited for.
func (r *round) reconsider() {
	r.l.mu.Lock()
	ends := r.decideLocked(false)
	r.l.mu.Unlock()
	if ends {
		r.end()
	}
}

// isVoteLocked reports whether node i's grant is a vote, or its confirmation is one. Once it is, it stays
// one.
func (r *round) isVoteLocked(i int) bool {
	rep := &r.replies[i]
	if rep.Epoch == nil { // only a quarantine has votes with an epoch
		return true
	}
	now := r.l.q.Nodes[i].Epoch()
	ok := r.l.q.quarantine.isOff() || rep.Kind == node.Granted && isVote(rep.Epoch, now) ||
		rep.Kind == node.Renewed && confirms(rep.Epoch, now, r.began)
	if ok {
		rep.Epoch = nil
	}
	return ok
}

func (r *round) end() {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.onDecided(r)
}

// topCounterLocked returns the largest counter of the votes, and whether all votes have it. A vote
// without a counter has 0, and agrees with no other.
func (r *round) topCounterLocked() (top int64, agree bool) {
	agree = true
	for i, rep := range r.replies {
		if rep.Kind != r.want || !r.isVoteLocked(i) {
			continue
		}
		if rep.Counter == 0 || top != 0 && rep.Counter != top {
			agree = false
		}
		top = max(top, rep.Counter)
	}
	return top, agree
}

// confirmedLocked reports whether a majority of the votes have a counter of at least top.
func (r *round) confirmedLocked(top int64) bool {
	n := 0
	for i, rep := range r.replies {
		if rep.Kind == r.want && rep.Counter >= top && r.isVoteLocked(i) {
			n++
		}
	}
	return n >= r.l.q.need
}

// rejoinedLocked reports whether, by the answers to a release, its contender waits again on a majority of
// nodes.
func (r *round) rejoinedLocked() bool {
	n := 0
	for i := range r.replies {
		if r.replies[i].Rejoined {
			n++
		}
	}
	return n >= r.l.q.need
}

func (r *round) missingLocked() (missing []int) {
	for i, rep := range r.replies {
		if rep.Kind == node.Missing {
			missing = append(missing, i)
		}
	}
	return missing
}

// rivalLocked is the contender that most nodes name, and of several the first in order of names,
// so that all callers choose the same.
func (r *round) rivalLocked() (rival string) {
	best := 0
	for _, rep := range r.replies {
		if rep.Kind != r.want || rep.Rival == "" {
			continue
		}
		n := 0
		for _, other := range r.replies {
			if other.Kind == r.want && other.Rival == rep.Rival {
				n++
			}
		}
		if n > best || n == best && rep.Rival < rival {
			best, rival = n, rep.Rival
		}
	}
	return rival
}
