package quorum

import "github.com/flightlock/flightlock/internal/node"

// tally counts the replies of one round.
type tally struct {
	nodes, need   int
	yes, no       int // votes for us; votes that say the key is not ours
	neverHeld     int // release: nodes that do not have our key and never had
	bad, final    int // no votes; of these, those that a retry cannot change
	away          int // of bad: those that an immediate retry cannot change
	lost          int // of bad: connections that have ended by this request, or during it
	pending, held int
	late          int // of the pending, those whose answers come too late to be votes
	undecided     int // grants that a bootstrap may make votes
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
		case (rep.Kind == node.Granted || rep.Kind == node.Renewed) && !r.isVoteLocked(i):
			if rep.Kind == node.Granted && r.l.q.quarantine.underWay() {
				t.undecided++
			} else {
				t.bad++
				t.away++
			}
		case rep.Kind == r.want && rep.Counter >= r.floor:
			t.yes++
		case (rep.Kind == node.Missing || rep.Kind == node.Held) && r.op == "release" && r.l.everHeld&(1<<i) == 0:
			t.neverHeld++
		case rep.Kind == node.Held:
			t.no++
			t.held++
		case rep.Kind == node.Missing:
			t.no++
		default:
			t.bad++
			if node.Away(rep.Err) {
				t.away++
			}
			if rep.Lost {
				t.lost++
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

// released reports whether a majority of nodes no longer has our key. Nodes that never had it
// count, unless another node has lost it.
func (t tally) released() bool { return t.yes > 0 && t.no == 0 && t.yes+t.neverHeld >= t.need }

// unrecoverable reports whether a majority is out of reach for reasons that a retry cannot change.
func (t tally) unrecoverable() bool { return t.final >= t.outOfReach() }

// failedForGood reports whether the round has failed, and answers still to come can change neither
// that nor the reason. With an even number of nodes, when errors have put a majority out of reach,
// the other nodes are still enough to say that the key is held: a held key must not be called
// unreachable because the errors came first.
//
// An attempt that a majority has answered has failed for good, too, if only nodes whose answers
// come too late to be votes could still win it: nobody else gets the nodes that it has meanwhile.
func (t tally) failedForGood(acquire bool) bool {
	if acquire && t.late > 0 && t.yes+t.undecided+t.pending-t.late < t.need && t.refused(true) {
		return true
	}
	if t.yes+t.pending+t.undecided >= t.need || t.pending > 0 && t.neverHeld > 0 && t.no == 0 {
		return false
	}
	most := t // with as many votes of others as possible
	most.no += t.pending
	most.held += t.pending
	most.yes += t.undecided
	return t.refused(acquire) || !most.refused(acquire) || acquire && t.unrecoverable()
}
