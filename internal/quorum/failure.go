package quorum

import (
	"errors"
	"fmt"
	"slices"
	"time"

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
	bad, final    int // no vote; of these, what asking again cannot mend
	pending, held int
}

func (r *round) tallyLocked() tally {
	t := tally{nodes: len(r.replies), need: r.l.q.need}
	for i := range r.replies {
		rep := &r.replies[i]
		switch {
		case rep.Kind == node.Pending:
			t.pending++
		case rep.Kind == r.want && rep.Counter >= r.floor:
			t.yes++
		case rep.Kind == node.Held:
			t.no++
			t.held++
		case rep.Kind == node.Missing:
			t.no++
		default:
			t.bad++
			if node.Final(rep.Err) {
				t.final++
			}
		}
	}
	return t
}

// outOfReach is how many nodes it takes to make a majority of the others impossible.
func (t tally) outOfReach() int { return t.nodes - t.need + 1 }

// split reports whether a majority answered an acquire and no one has it.
func (t tally) split() bool {
	return t.held > 0 && t.yes+t.pending < t.need && t.yes+t.held >= t.need
}

// lost reports whether the rest cannot change that the round failed, nor why: a key that
// is held must not be called unreachable because the errors came in first.
func (t tally) lost(acquire bool) bool {
	return t.pending == 0 && t.yes < t.need ||
		t.no >= t.outOfReach() || t.bad >= t.outOfReach() ||
		acquire && t.split()
}

// failureLocked says why the round failed, by what is known now.
func (r *round) failureLocked() *Failure {
	t := r.tallyLocked()
	f := &Failure{Op: r.op, Reason: Unreachable, Need: t.need, Got: t.yes, Final: t.final >= t.outOfReach()}
	if t.no >= t.outOfReach() {
		f.Reason = NotHeld
	}
	if r.want == node.Granted && (t.held >= t.outOfReach() || t.held > 0 && t.yes+t.held >= t.need) {
		f.Reason = Taken
		f.Free = r.freeLocked(t)
	}
	f.Nodes = make([]NodeAnswer, len(r.replies))
	for i, rep := range r.replies {
		f.Nodes[i] = NodeAnswer{Name: r.l.q.Nodes[i].Name(), Reply: rep}
		if rep.Kind == node.Pending {
			f.Nodes[i].Reply = node.Reply{Kind: node.Failed, Err: r.noAnswerLocked(r.l.q.Nodes[i])}
		}
	}
	return f
}

// freeLocked is when enough of the nodes that another holds could be free to make, with
// those that granted us, a majority. A holder's ttl may be unknown; then so is this.
func (r *round) freeLocked(t tally) time.Duration {
	var left []time.Duration
	for _, rep := range r.replies {
		if rep.Kind == node.Held && rep.TTL >= 0 {
			left = append(left, rep.TTL+time.Millisecond)
		}
	}
	want := t.need - t.yes
	if want > len(left) {
		return 0
	}
	slices.Sort(left)
	return left[want-1]
}

// noAnswerLocked says of a node that it has not answered: in time, or by the moment in
// which the others decided.
func (r *round) noAnswerLocked(n *node.Node) error {
	text := "no answer yet when the others decided"
	if r.expired {
		text = fmt.Sprintf("no answer within %v", r.timeout)
	}
	if last := n.LastErr(); last != nil {
		return fmt.Errorf("%s (connection: %w)", text, last)
	}
	return errors.New(text)
}
