package quorum

import (
	"math/bits"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/pubsub"
)

// News is what is heard of a key.
type News uint8

// The kinds of news.
const (
	Hears  News = iota + 1 // a majority of nodes has confirmed that notices are heard, maybe again
	Deaf                   // not any more
	Ours                   // the turn is this contender's
	Theirs                 // the turn is another's
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
	hear      func(n News, owner string)
	nodes     []*pubsub.Watch

	mu     sync.Mutex  // guards what follows
	hears  uint64      // bit i: node i has confirmed
	told   uint64      // bit i: node i has told of our turn
	failed string      // the owner whose failure was told last
	timer  *time.Timer // for the turn that some nodes have told of
	closed bool
}

// Watch has hear told of what happens to key, from goroutines of the nodes or a timer, with
// no lock held, until stop is called; one call may still be under way then.
// owner is "" but for Failed. One node is enough to tell of a failure: nobody is granted anything for it.
func (q *Quorum) Watch(key, contender string, hear func(n News, owner string)) (stop func()) {
	w := &watch{q: q, contender: contender, hear: hear}
	for i, subs := range q.subs {
		w.nodes = append(w.nodes, subs.Watch(key, i, w))
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

// OnEvent handles an event of node i.
func (w *watch) OnEvent(i int, e pubsub.Event) {
	owner, failed := node.FailedOwner(e.Text)
	if failed {
		w.hearFailed(owner)
		return
	}
	w.mu.Lock()
	news := w.hearLocked(i, e)
	w.mu.Unlock()
	for news != 0 {
		w.hear(news, "")
		news = w.correct(news)
	}
}

// hearFailed tells of a failure once, though several nodes do.
func (w *watch) hearFailed(owner string) {
	w.mu.Lock()
	known := w.closed || owner == w.failed
	w.failed = owner
	w.mu.Unlock()
	if !known {
		w.hear(Failed, owner)
	}
}

// correct is what to tell after news, because another node's goroutine may have told the
// opposite meanwhile, and before it: 0 for nothing.
func (w *watch) correct(told News) News {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch hears := w.majority(w.hears); {
	case w.closed:
	case told == Hears && !hears:
		return Deaf
	case told == Deaf && hears:
		return Hears
	}
	return 0
}

func (w *watch) hearLocked(i int, e pubsub.Event) News {
	bit := uint64(1) << i
	before := w.majority(w.hears)
	switch {
	case w.closed:
	case e.Kind == pubsub.Subscribed:
		w.hears |= bit
		if w.majority(w.hears) {
			return Hears
		}
	case e.Kind == pubsub.Unsubscribed:
		w.hears &^= bit
		if before && !w.majority(w.hears) {
			return Deaf
		}
	case e.Text != w.contender:
		return Theirs
	default:
		return w.turnLocked(bit)
	}
	return 0
}

func (w *watch) turnLocked(bit uint64) News {
	first := w.told == 0
	w.told |= bit
	switch {
	case w.majority(w.told):
		w.told = 0
		if w.timer != nil {
			w.timer.Stop()
		}
		return Ours
	case first && w.timer == nil:
		w.timer = clock.AfterFunc(w.q.halfTrip(), w.late)
	case first:
		w.timer.Reset(w.q.halfTrip())
	}
	return 0
}

// late gives up waiting for more nodes to tell of our turn.
func (w *watch) late() {
	w.mu.Lock()
	ours := w.told != 0 && !w.closed
	w.told = 0
	w.mu.Unlock()
	if ours {
		w.hear(Ours, "")
	}
}

func (w *watch) majority(mask uint64) bool { return bits.OnesCount64(mask) >= w.q.need }

// halfTrip is half of what the last attempt needed for its answers.
func (q *Quorum) halfTrip() time.Duration {
	return min(time.Duration(q.trip.Load())/2, q.NodeTimeout/2)
}
