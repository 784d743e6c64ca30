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
	NotHeld                         // the lease was lost, let go or never won
	Misconfigured                   // the nodes cannot serve as a quorum
)

// Failure is the outcome of an operation that did not succeed.
type Failure struct {
	Op     string
	Reason Reason
	Final  bool          // trying again cannot help
	Free   time.Duration // how soon a majority could be free; 0 when unknown
	Owned  bool          // acquire: a majority of nodes says that one and the same has the key
	Holder string        // acquire: the owner that has the key on a majority of nodes; "": none, or unknown
	Away   bool          // a majority cannot be reached, and more than one answer is missing for that: see node.Away
	Need   int
	Got    int // votes
	Nodes  []NodeAnswer
	Err    error // what else there is to say
}

// NodeAnswer is what one node said, or why it said nothing.
type NodeAnswer struct {
	Name  string
	Reply node.Reply
}

func (f *Failure) Error() string {
	return fmt.Sprintf("%s: %d of %d votes", f.Op, f.Got, f.Need)
}

// tally counts the replies of one round.
type tally struct {
	nodes, need   int
	yes, no       int // votes for us; votes that say the key is not ours
	neverHeld        int // release: nodes that have nothing of ours, and never had
	bad, final    int // no vote; of these, what asking again cannot mend
	away          int // of bad: what asking again at once cannot mend
	pending, held int
	late          int // of the pending, those whose answers come too late to be votes
	undecided         int // grants that a roll call may yet make votes
}

func (r *round) tallyLocked() tally {
	t := tally{nodes: len(r.replies), need: r.l.q.need}
	for i := range r.replies {
		rep := &r.replies[i]
		switch {
		case rep.Kind == node.Pending:
			t.pending++
			if r.l.q.Nodes[i].Late() {
				t.late++
			}
		case rep.Kind == node.Granted && !r.countsLocked(i):
			if r.l.q.quarantine.open() {
				t.undecided++
			} else {
				t.bad++
				t.away++
			}
		case rep.Kind == r.want && rep.Counter >= r.floor:
			t.yes++
		case rep.Kind == node.Held:
			t.no++
			t.held++
		case rep.Kind == node.Missing && r.op == "release" && r.l.everHeld&(1<<i) == 0:
			t.neverHeld++
		case rep.Kind == node.Missing:
			t.no++
		default:
			t.bad++
			if node.Away(rep.Err) {
				t.away++
			}
			if node.Final(rep.Err) {
				t.final++
			}
		}
	}
	return t
}

// outOfReach is how many nodes it takes to make a majority of the others impossible.
func (t tally) outOfReach() int { return t.nodes - t.need + 1 }

// refused reports whether others' votes are why there is no majority: they put it out of
// reach, or a majority answered an acquire and no one has it.
func (t tally) refused(acquire bool) bool {
	if acquire {
		return t.held >= t.outOfReach() || t.held > 0 && t.yes+t.held >= t.need
	}
	return t.no > 0 && t.no+t.neverHeld >= t.outOfReach()
}

// released reports whether a majority is released of our key, counting the nodes that never had it:
// they say nothing as soon as another one has lost it.
func (t tally) released() bool { return t.yes > 0 && t.no == 0 && t.yes+t.neverHeld >= t.need }

// unrecoverable reports whether what asking again cannot mend puts a majority out of reach.
func (t tally) unrecoverable() bool { return t.final >= t.outOfReach() }

// decided reports whether the nodes that are still to answer can change neither that the
// round failed nor why. With an even number of nodes, as many errors as put a majority out
// of reach leave enough nodes to say that others hold the key: a key that is held must
// not be called unreachable because the errors came in first.
//
// An attempt that a majority has answered is decided, too, if only nodes whose answers come too
// late to be votes could still win it: what it has meanwhile, nobody else gets.
func (t tally) decided(acquire bool) bool {
	if acquire && t.late > 0 && t.yes+t.undecided+t.pending-t.late < t.need && t.refused(true) {
		return true
	}
	if t.yes+t.pending+t.undecided >= t.need || t.pending > 0 && t.neverHeld > 0 && t.no == 0 {
		return false
	}
	most := t // what others' votes can come to
	most.no += t.pending
	most.held += t.pending
	most.yes += t.undecided
	return t.refused(acquire) || !most.refused(acquire) || acquire && t.unrecoverable()
}

// failureLocked says why the round failed, by what is known now.
func (r *round) failureLocked() *Failure {
	t := r.tallyLocked()
	f := &Failure{Op: r.op, Reason: Unreachable, Need: t.need, Got: t.yes, Final: t.unrecoverable()}
	switch {
	case r.acquires() && t.unrecoverable(): // even if others hold the key for now
	case r.acquires() && t.refused(true):
		f.Reason, f.Free = Taken, r.freeInLocked(t)
		f.Holder, f.Owned = r.holderLocked(t)
	case !r.acquires() && t.refused(false):
		f.Reason = NotHeld
	}
	f.Away = f.Reason == Unreachable && t.away >= t.outOfReach()
	f.Nodes = make([]NodeAnswer, len(r.replies))
	for i, rep := range r.replies {
		f.Nodes[i] = NodeAnswer{Name: r.l.q.Nodes[i].Name(), Reply: rep}
		if rep.Kind == node.Pending {
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed, Err: r.noAnswerLocked(r.l.q.Nodes[i])}
		}
		if rep.Kind == node.Granted && !r.countsLocked(i) {
			m := *rep.Memory
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed, Err: &Quarantined{m, m.Began.Add(r.l.q.Quarantine)}}
		}
	}
	return f
}

// freeInLocked is when enough of the nodes that another holds could be free to make, with
// those that granted us and those that may yet say that they do, a majority. A holder's
// ttl may be unknown; then so is this.
func (r *round) freeInLocked(t tally) time.Duration {
	var left []time.Duration
	for _, rep := range r.replies {
		if rep.Kind == node.Held && rep.TTL >= 0 {
			left = append(left, clock.Add(rep.TTL, time.Millisecond))
		}
	}
	want := t.need - t.yes
	if !r.expired {
		want -= t.pending
	}
	want = max(want, 1) // it failed: one at least must come free
	if want > len(left) {
		return 0
	}
	slices.Sort(left)
	return left[want-1]
}

// holderLocked says who else has a majority, and whether it will tell when it lets go. If
// not, those who want the key may have split the votes, and nobody will say when to try
// again; nor will a client that is none of ours. A turn that is kept for another has no holder yet.
func (r *round) holderLocked(t tally) (holder string, tells bool) {
	if t.held < t.need {
		return "", false
	}
	for _, rep := range r.replies {
		n := 0
		for _, other := range r.replies {
			if rep.Kind == node.Held && other.Kind == node.Held && other.Holder == rep.Holder {
				n++
			}
		}
		if n >= t.need {
			if strings.HasPrefix(rep.Holder, node.TurnOf) {
				return "", true
			}
			return rep.Holder, r.l.q.NotifiesRelease == nil || r.l.q.NotifiesRelease(rep.Holder)
		}
	}
	return "", false
}

// noAnswerLocked says of a node that it has not answered: in time, or by the moment in
// which the others decided.
func (r *round) noAnswerLocked(n *node.Node) error {
	text := "no answer yet when the others decided"
	if r.expired {
		text = fmt.Sprintf("no answer within %v", r.l.q.NodeTimeout)
		if r.op == "refresh" {
			text = "no answer before the validity was over"
		}
	}
	if last := n.LastErr(); last != nil {
		return fmt.Errorf("%s (connection: %w)", text, last)
	}
	return errors.New(text)
}
