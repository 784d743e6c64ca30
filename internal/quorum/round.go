package quorum

import (
	"errors"
	"math/bits"
	"time"

	"github.com/flightlock/flightlock/internal/node"
)

// round is one request to all nodes and its decision: by the first q agreeing votes, or
// as soon as q is out of reach, or when the time is up. A slow node costs nothing.
type round struct {
	l       *Lease
	op      string
	want    node.Kind // the reply that is a vote for us
	floor   int64     // with at least this counter
	timeout time.Duration
	next    func(*round) // called once, after the decision, without l.mu

	timer *time.Timer

	// guarded by l.mu
	replies []node.Reply
	decided bool
	won     bool
	expired bool // the time was up
}

// round begins a round. Its requests are sent by the caller, next.
func (l *Lease) round(op string, want node.Kind, floor int64, timeout time.Duration, next func(*round)) *round {
	r := &round{
		l: l, op: op, want: want, floor: floor, timeout: timeout, next: next,
		replies: make([]node.Reply, len(l.entries)),
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for mask := l.shadows; mask != 0; mask &= mask - 1 {
		r.replies[bits.TrailingZeros64(mask)] = node.Reply{Kind: node.Failed, Err: errShadow}
	}
	if l.phase == asking {
		l.now = r
	}
	r.timer = time.AfterFunc(r.timeout, r.expire)
	return r
}

var errShadow = errors.New("answered as if it were the same server as another node: its vote does not count")

// Answer takes node i's reply.
func (r *round) Answer(i int, rep node.Reply) {
	l := r.l
	l.mu.Lock()
	if rep.Kind == node.Replayed { // to an owner that this node cannot have seen
		l.shadows |= 1 << i
		rep = node.Reply{Kind: node.Failed, Err: errShadow}
		defer l.q.suspect(i)
	}
	if r.decided {
		repair := r.won && r.op == "refresh" && rep.Kind == node.Missing
		l.mu.Unlock()
		if repair {
			l.repair(i)
		}
		return
	}
	if l.shadows&(1<<i) == 0 || rep.Kind == node.Failed {
		r.replies[i] = rep
	}
	ends := r.decideLocked(false)
	l.mu.Unlock()
	if ends {
		r.end()
	}
}

// expire decides the round by what was answered in time.
func (r *round) expire() {
	r.l.mu.Lock()
	ends := r.decideLocked(true)
	r.expired = ends
	r.l.mu.Unlock()
	if ends {
		r.end()
	}
}

// decideLocked decides the round if it can be, or must be now, and reports whether this
// call did so. The one who decided calls end.
func (r *round) decideLocked(now bool) bool {
	if r.decided {
		return false
	}
	t := r.tallyLocked()
	r.won = t.yes >= t.need
	r.decided = r.won || now || t.lost(r.want == node.Granted)
	return r.decided
}

func (r *round) end() {
	r.timer.Stop()
	r.next(r)
}

// countersLocked gives the largest counter of the votes, and whether all have it.
func (r *round) countersLocked() (top int64, agree bool) {
	agree = true
	for _, rep := range r.replies {
		if rep.Kind != r.want {
			continue
		}
		if top != 0 && rep.Counter != top {
			agree = false
		}
		top = max(top, rep.Counter)
	}
	return top, agree
}

func (r *round) missingLocked() (missing []int) {
	for i, rep := range r.replies {
		if rep.Kind == node.Missing {
			missing = append(missing, i)
		}
	}
	return missing
}

// shadow is one of the nodes that proved to be another name of a server.
func (l *Lease) shadow() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bits.TrailingZeros64(l.shadows)
}
