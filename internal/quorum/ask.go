package quorum

import (
	"math"
	"math/bits"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// When the nodes are asked for their votes of an offer. Once a node has granted it, the same release is about to
// grant it at the others, whose messages come within a moment, awaitTime. A node whose message has not come by then
// is asked: it was lost, or that release has not granted the offer there. The latter can be foreseen by what the last
// poll of the offer's contender has met, and such a node need not be waited for. At a node without a vote, that
// poll has met
//
//	nothing yet: no answer has come                 a vote may come, unless the node was asked
//	the owner that it met at a node that has voted  that owner's release grants the offer here, too: a vote will come
//	a free key, or one that a failed attempt had    nobody's release will grant it: ask
//	another owner                                   its release may be far away: ask, if free nodes are too few
//
// and if the votes that there are and those that may come are a majority, nobody is asked before the time is up.

// awaitOthersLocked is called when a node has granted the offer, and that is not enough: others will have done so too.
// Those whose message does not come are asked. A timer, even one that was stopped, wakes an idle process when its time
// comes, so there is none where the first vote decides.
func (l *Lease) awaitOthersLocked() {
	if o := l.offer; o.timer == nil {
		o.timer = clock.AfterFunc(l.awaitTime(), l.askOthers)
	}
}

// awaitTime is how long messages about grants are waited for. With one node there are no others to come.
func (l *Lease) awaitTime() time.Duration {
	if len(l.entries) == 1 {
		return minAwait
	}
	return max(2*l.q.halfRTT(), minAwait)
}

// minAwait is how long messages of different servers may be apart without any being lost.
const minAwait = 2 * time.Millisecond

// metOwn is called when a poll of o's contender has met o's own owner at a node: the message about that grant is
// late, or lost.
func (o *Lease) metOwn() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.phase == acquiring {
		o.offer.voted = true
		o.awaitOthersLocked()
	}
}

// answered takes a node's answer to the poll that t has brought.
func (l *Lease) answered(t *node.Target, i int, rep node.Reply) {
	l.mu.Lock()
	var asks asks
	if n := len(l.offer.polls); n > 0 && l.offer.polls[n-1].target == t {
		if l.offer.met[i] = nobody; rep.Kind == node.Held {
			l.offer.met[i] = rep.Holder
		}
		asks = l.asksNowLocked()
	}
	l.mu.Unlock()
	l.send(asks)
}

// polled is called when the attempt that has brought the last poll has failed, and been undone.
func (l *Lease) polled() {
	l.mu.Lock()
	l.offer.polling = false
	asks := l.asksNowLocked()
	l.mu.Unlock()
	l.send(asks)
}

// nobody stands for the holder of a key that was free, or left to others who wait.
const nobody = node.TurnOf

// askOthers is called when the time for messages is up: it asks the nodes of which no vote has come.
func (l *Lease) askOthers() {
	l.mu.Lock()
	asks := l.asksLocked(math.MaxUint64)
	l.mu.Unlock()
	l.send(asks)
}

// asks are the nodes that are to be asked for their votes of an offer, in its round.
type asks struct {
	r     *round
	s     *scratch // the lease may be held when they are sent, and drop it
	nodes uint64
}

// asksLocked are those of nodes that are to be asked now: no vote of theirs has come, and they were not asked before.
func (l *Lease) asksLocked(nodes uint64) asks {
	r := l.attempt
	if l.phase != acquiring || r == nil || r.decided || r.want != node.Granted {
		return asks{}
	}
	for i := range r.replies {
		if r.replies[i].Kind != node.Pending {
			nodes &^= 1 << i
		}
	}
	nodes &= (1<<len(r.replies) - 1) &^ l.offer.asked
	l.offer.asked |= nodes
	return asks{r, l.scratch, nodes}
}

func (l *Lease) send(a asks) {
	for s := a.s; a.nodes != 0; a.nodes &= a.nodes - 1 {
		i := bits.TrailingZeros64(a.nodes)
		l.entries[i].Acquire(&s.places[i], a.r, s.ttl, s.tokens, false)
	}
}

// asksNowLocked are the nodes that are asked before the time for messages is up. What an older poll has met says
// nothing: many may have had the key since.
func (l *Lease) asksNowLocked() asks {
	o, r := l.offer, l.attempt
	if !o.voted || o.polling || r == nil || len(o.polls) == 0 {
		return asks{}
	}
	begun := o.polls[len(o.polls)-1].begunAt()
	if begun.IsZero() || clock.Since(begun) > l.awaitTime() {
		return asks{}
	}
	votes, free, others := 0, uint64(0), uint64(0) // votes are those that may still come, too
	for i := range r.replies {
		switch {
		case r.replies[i].Kind == node.Granted, r.replies[i].Kind == node.Pending && o.mayVoteLocked(r, i):
			votes++
		case o.met[i] == nobody:
			free |= 1 << i
		default:
			others |= 1 << i
		}
	}
	switch {
	case votes >= l.q.need:
		return asks{}
	case votes+bits.OnesCount64(free) >= l.q.need:
		return l.asksLocked(free)
	}
	return l.asksLocked(free | others)
}

// mayVoteLocked reports whether a message of node i about a grant of o may be on its way: no answer to the poll has
// come, or it has met there the owner whose release has granted o at another node. Where that other node has not
// answered the poll, it may have been any owner.
func (o *offer) mayVoteLocked(r *round, i int) bool {
	switch o.met[i] {
	case "":
		return o.asked&(1<<i) == 0
	case nobody:
		return false
	}
	for j := range r.replies {
		if r.replies[j].Kind == node.Granted && (o.met[j] == "" || o.met[j] == o.met[i]) {
			return true
		}
	}
	return false
}
