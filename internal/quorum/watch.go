package quorum

import (
	"math/bits"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Event is what is heard of a key.
type Event uint8

// The kinds of news.
const (
	Subscribed  Event = iota + 1 // a majority of nodes has confirmed that notices are heard, maybe again
	Unsubscribed                   // not any more
	OurTurn                   // the turn is this contender's
	OtherTurn                 // the turn is another's
	Failed                 // what the owner that is named had the key for has failed; it has let go of the key
)

// watch listens on all nodes for what happens to a key.
//
// A turn of ours is news when a majority has told of it, or half a round trip after the
// first node has: the first alone would send us to nodes where the key is still held, and
// a notice may be lost.
type watch struct {
	q         *Quorum
	contender string
	onEvent      func(n Event, owner string)
	nodes     []*node.Watch

	mu     sync.Mutex  // guards what follows
	subscribed  uint64      // bit i: node i has confirmed
	ourTurn   uint64      // bit i: node i has told of our turn
	failed string      // the owner whose failure was told last
	timer  *time.Timer // for the turn that some nodes have told of
	closed bool
}

// Watch has hear told of what happens to key, from goroutines of the nodes or a timer, with
// no lock held, until stop is called; one call may still be under way then.
// owner is "" but for Failed. One node is enough to tell of a failure: nobody is granted anything for it.
func (q *Quorum) Watch(key, contender string, hear func(n Event, owner string)) (stop func()) {
	w := &watch{q: q, contender: contender, onEvent: hear}
	for i, n := range q.Nodes {
		w.nodes = append(w.nodes, n.Watch(key, i, w))
	}
	return w.stop
}

func (w *watch) stop() {
	w.mu.Lock()
	w.closed = true
	if w.timer != nil {
		w.timer.Stop()
	}
	w.mu.Unlock()
	for _, n := range w.nodes {
		n.Stop()
	}
}

// Hear takes what node i tells.
func (w *watch) Hear(i int, s node.Signal, notice string) {
	owner, failed := node.FailedOwner(notice)
	if failed {
		w.onFailed(owner)
		return
	}
	w.mu.Lock()
	news := w.eventLocked(i, s, notice)
	w.mu.Unlock()
	for news != 0 {
		w.onEvent(news, "")
		news = w.correct(news)
	}
}

// onFailed tells of a failure once, though several nodes do.
func (w *watch) onFailed(owner string) {
	w.mu.Lock()
	known := w.closed || owner == w.failed
	w.failed = owner
	w.mu.Unlock()
	if !known {
		w.onEvent(Failed, owner)
	}
}

// correct is what to tell after news, because another node's goroutine may have told the
// opposite meanwhile, and before it: 0 for nothing.
func (w *watch) correct(told Event) Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch hears := w.majority(w.subscribed); {
	case w.closed:
	case told == Subscribed && !hears:
		return Unsubscribed
	case told == Unsubscribed && hears:
		return Subscribed
	}
	return 0
}

func (w *watch) eventLocked(i int, s node.Signal, contender string) Event {
	bit := uint64(1) << i
	before := w.majority(w.subscribed)
	switch {
	case w.closed:
	case s == node.Subscribed:
		w.subscribed |= bit
		if w.majority(w.subscribed) {
			return Subscribed
		}
	case s == node.Broken:
		w.subscribed &^= bit
		if before && !w.majority(w.subscribed) {
			return Unsubscribed
		}
	case contender != w.contender:
		return OtherTurn
	default:
		return w.turnLocked(bit)
	}
	return 0
}

func (w *watch) turnLocked(bit uint64) Event {
	first := w.ourTurn == 0
	w.ourTurn |= bit
	switch {
	case w.majority(w.ourTurn):
		w.ourTurn = 0
		if w.timer != nil {
			w.timer.Stop()
		}
		return OurTurn
	case first && w.timer == nil:
		w.timer = clock.AfterFunc(w.q.halfRTT(), w.waitedForMore)
	case first:
		w.timer.Reset(w.q.halfRTT())
	}
	return 0
}

// waitedForMore gives up waiting for more nodes to tell of our turn.
func (w *watch) waitedForMore() {
	w.mu.Lock()
	ours := w.ourTurn != 0 && !w.closed
	w.ourTurn = 0
	w.mu.Unlock()
	if ours {
		w.onEvent(OurTurn, "")
	}
}

func (w *watch) majority(mask uint64) bool { return bits.OnesCount64(mask) >= w.q.need }

// halfRTT is half of what the last attempt needed for its answers.
func (q *Quorum) halfRTT() time.Duration {
	return min(time.Duration(q.rtt.Load())/2, q.NodeTimeout/2)
}
