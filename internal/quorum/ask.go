package quorum

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// When the nodes are asked for their votes of an offer. Once a node has granted it, the same release is about
// to grant it at the others, whose messages come within a moment, awaitTime. A node of which no message has
// come by then is asked, once: that was lost, or the release has not granted the offer there.

// awaitOthersLocked is called when a node has granted the offer, and that is not enough. A timer, even one
// that was stopped, wakes an idle process when its time comes, so there is none where the first vote decides.
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

// askOthers asks the nodes of which no vote has come.
func (l *Lease) askOthers() {
	var nodes []int
	l.mu.Lock()
	r, s := l.attempt, l.scratch // the lease may be held when they are sent, and drop it
	if l.phase == acquiring && r != nil && !r.decided && r.want == node.Granted {
		for i := range r.replies {
			if r.replies[i].Kind == node.Pending {
				nodes = append(nodes, i)
			}
		}
	}
	l.mu.Unlock()
	for _, i := range nodes {
		l.entries[i].Acquire(&s.places[i], r, s.ttl, s.tokens, false)
	}
}
