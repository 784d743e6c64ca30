package quorum

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Reason says why an operation failed.
type Reason uint8

// The reasons.
const (
	Taken         Reason = iota + 1 // others' votes put a majority out of reach, or votes are split
	Unreachable                     // too few nodes answered
	NotHeld                         // the lease was lost, released or never won
	Misconfigured                   // the nodes cannot serve as a quorum
)

// Failure is the outcome of an operation that did not succeed.
type Failure struct {
	Op     string
	Reason Reason
	Final  bool          // retrying cannot help
	Free   time.Duration // how soon a majority could be free; 0 when unknown
	// Declined is set if the attempt could have won, had it not left the key to others who wait longer. On
	// some nodes these may be gone.
	Declined bool

	Queued bool // acquire: others put a majority out of reach, and publish their release
	Owned  bool // acquire: a majority of nodes has one owner, which publishes its release, or keeps one turn
	// so many nodes have no vote that the others are no majority, and not for one late answer: see node.Away
	Away  bool
	Early bool // of Peek: the nodes still have time to answer, and what they have answered decides nothing
	Need  int
	Got   int // votes
	Nodes []NodeAnswer
	Err   error // further cause, may be nil

	// Split: several contenders have votes, none is known to have a majority, and none is about to get the key.
	// Foremost is set besides if this attempt has votes and no other has more; of those with as many, it has
	// the smallest owner. All that split the votes agree on that one, if they have all answers.
	Split, Foremost bool
	// Retained: one owner, which was recalled, puts a majority out of reach. It may only retain its lease.
	Retained bool
	// Lost: with the votes that were lost with their connections, there might have been a majority. Who holds
	// the key on those nodes is not known: it may be this attempt's owner.
	Lost bool
	Took time.Duration // acquire: since the first byte was sent, or since the requests were made

	round *round // of an attempt; nil: it has asked no node
}

// Undecided reports whether the attempt has failed although perhaps nobody holds the key, or will when the
// attempts that are in progress have ended.
func (f *Failure) Undecided() bool { return f.Split || f.Retained }

// Now is f with the answers that have come since.
func (f *Failure) Now() *Failure {
	if f.round == nil {
		return f
	}
	f.round.l.mu.Lock()
	defer f.round.l.mu.Unlock()
	return f.round.failureLocked()
}

// NodeAnswer is the answer of one node, or why there is none.
type NodeAnswer struct {
	Name  string
	Reply node.Reply
}

func (f *Failure) Error() string {
	return fmt.Sprintf("%s: %d of %d votes", f.Op, f.Got, f.Need)
}

// Outcome is the reason for the caller: without a majority of votes nobody gets the lock now, whether or not
// somebody holds it.
func (f *Failure) Outcome() Reason {
	if f.Reason == Taken && f.Away {
		return Unreachable
	}
	return f.Reason
}

// failureLocked returns why the round failed, as far as is known now.
func (r *round) failureLocked() *Failure {
	t := r.tallyLocked()
	f := &Failure{Op: r.op, Reason: Unreachable, Need: t.need, Got: t.yes, Final: t.unrecoverable()}
	switch {
	case r.acquires() && t.unrecoverable(): // even if others hold the key at the moment
	case r.acquires() && t.refused(true):
		f.Reason, f.Free = Taken, r.freeInLocked(t)
		f.Owned = r.ownedLocked(t)
		f.Queued = r.notifyingLocked() >= t.outOfReach()
		n := r.declinedLocked()
		f.Declined = n > 0 && t.yes+n+t.pending >= t.need
	case !r.acquires() && t.refused(false):
		f.Reason = NotHeld
	}
	f.Away = (f.Reason == Unreachable || f.Reason == Taken) && t.away >= t.outOfReach()
	if r.acquires() {
		f.round = r
		f.Took = clock.Since(clock.Later(r.began, r.l.target.Begun())) // requests may have waited in this process
		f.Lost = f.Outcome() == Unreachable && t.lost > 0 && t.bad-t.lost < t.outOfReach()
		if f.Outcome() == Taken {
			f.Split, f.Foremost, f.Retained = r.splitLocked(t)
		}
	}
	f.Nodes = make([]NodeAnswer, len(r.replies))
	for i, rep := range r.replies {
		f.Nodes[i] = NodeAnswer{Name: r.l.q.Nodes[i].Name(), Reply: rep}
		if rep.Kind == node.Pending {
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed, Err: r.noAnswerLocked(r.l.q.Nodes[i])}
		}
		switch {
		case rep.Kind == node.Granted && !r.isVoteLocked(i):
			e := *rep.Epoch
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed, Err: &Quarantined{e, e.Began.Add(r.l.q.Quarantine)}}
		case rep.Kind == node.Renewed && !r.isVoteLocked(i):
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed,
				Err: unconfirmed(r.l.q.Nodes[i].Epoch(), r.l.q.Quarantine)}
		}
	}
	return f
}

// withoutVotes is the failure of an attempt that no answers could win, because too many nodes are known to
// have no vote for now; nil: enough may have one. Such an attempt sends nothing: tens of thousands of keys
// may be waited for, and a quarantine lasts for as long as the longest lock.
func (q *Quorum) withoutVotes() *Failure {
	t := tally{nodes: len(q.Nodes), need: q.need}
	for i := range q.Nodes {
		if why := q.whyNoVote(i); why != nil {
			t.bad++
			if node.Final(why) {
				t.final++
			}
		}
	}
	if t.bad < t.outOfReach() {
		return nil
	}
	f := &Failure{Op: "acquire", Reason: Unreachable, Final: t.unrecoverable(), Away: true, Need: t.need}
	for i, n := range q.Nodes {
		why := q.whyNoVote(i)
		if why == nil {
			why = errNotAsked
		}
		f.Nodes = append(f.Nodes, NodeAnswer{n.Name(), node.Reply{Kind: node.Failed, Err: why}})
	}
	return f
}

var errNotAsked = errors.New("not asked, because too many others have no vote")

// whyNoVote is why node i has no vote for now, whoever has the key there: it is suspended, or in quarantine.
// nil: it may have one.
func (q *Quorum) whyNoVote(i int) error {
	if err := q.Nodes[i].SuspendedFor(); err != nil {
		return err
	}
	return q.quarantinedUntil(i)
}

// freeInLocked is how soon enough of the nodes that others hold could be free to make a majority
// with those that granted us and those still to answer. It is 0, which means unknown, if the nodes
// have reported too few of the holders' ttls.
func (r *round) freeInLocked(t tally) time.Duration {
	var left []time.Duration
	for _, rep := range r.replies {
		if rep.Kind == node.Held && rep.TTL >= 0 {
			left = append(left, clock.Add(rep.TTL, time.Millisecond))
		}
	}
	want := max(t.need-t.yes-t.pending, 1) // it failed: at least one must become free
	if want > len(left) {
		return 0
	}
	slices.Sort(left)
	return left[want-1]
}

// ownedLocked reports whether one owner has a majority, whose client publishes the release. Clients of other
// libraries do not; and if the votes are split, there is no such owner. If a majority keeps the key for one
// contender's turn, that contender will publish its release.
func (r *round) ownedLocked(t tally) bool {
	for _, rep := range r.replies {
		n := 0
		for _, other := range r.replies {
			if rep.Kind == node.Held && other.Kind == node.Held && other.Holder == rep.Holder {
				n++
			}
		}
		if n >= t.need {
			return r.l.q.notifiesRelease(rep.Holder)
		}
	}
	return false
}

// notifiesRelease reports whether holder, an owner or a turn, is of a client that publishes its release.
func (q *Quorum) notifiesRelease(holder string) bool {
	return q.NotifiesRelease == nil || strings.HasPrefix(holder, node.TurnOf) || q.NotifiesRelease(holder)
}

// splitLocked returns Split, Foremost and Retained of an attempt that others' votes have failed. If a node
// reserves the key for a turn, that contender will get it.
func (r *round) splitLocked(t tally) (split, foremost, retained bool) {
	settled := false
	foremost = t.yes > 0
	for _, rep := range r.replies {
		if rep.Kind != node.Held {
			continue
		}
		n := 0
		for _, other := range r.replies {
			if other.Kind == node.Held && other.Holder == rep.Holder {
				n++
			}
		}
		settled = settled || n >= t.need || strings.HasPrefix(rep.Holder, node.TurnOf)
		split = split || t.yes > 0 || n < t.held
		foremost = foremost && (n < t.yes || n == t.yes && r.l.target.Owner() < rep.Holder)
		retained = retained || n >= t.outOfReach() && node.Retains(rep.Holder)
	}
	split = split && !settled
	return split, split && foremost, retained
}

// declinedLocked is how many nodes have the key free, and leave it to others.
func (r *round) declinedLocked() (n int) {
	for _, rep := range r.replies {
		if rep.Kind == node.Held && rep.Holder == node.TurnOf {
			n++
		}
	}
	return n
}

// notifyingLocked is how many nodes have the key of others whose clients publish its release.
func (r *round) notifyingLocked() (n int) {
	for _, rep := range r.replies {
		if rep.Kind == node.Held && r.l.q.notifiesRelease(rep.Holder) {
			n++
		}
	}
	return n
}

// noAnswerLocked is the error of a node that has not answered in time, or not before the others
// decided, or the attempt was given up.
func (r *round) noAnswerLocked(n *node.Node) error {
	text := "no answer yet when the others decided"
	switch {
	case r.expired: // a refresh
		text = "no answer before the validity was over"
	case !r.decided, r.acquires() && r.l.canceled: // no others have
		text = "no answer yet when the attempt was given up"
	}
	if last := n.LastErr(); last != nil {
		return fmt.Errorf("%s (connection: %w)", text, last)
	}
	return errors.New(text)
}
