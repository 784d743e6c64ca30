package quorum

import (
	"math/bits"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/pubsub"
)

// Event is something that happens to a watched key.
type Event uint8

// The kinds of events.
const (
	Subscribed   Event = iota + 1 // a majority of nodes has confirmed the subscription; may come again
	Unsubscribed                  // that majority is lost
	OurTurn                       // the turn is this contender's
	OtherTurn                     // the turn is another's
	Failed                        // the owner that is named has released the key because its work has failed
)

// News is what the end of a lease is to those who wait for the key elsewhere.
type News = node.News

// The kinds of news.
const (
	NoNews     = node.NoNews
	NewsLook   = node.NewsLook   // what the lease was for may be done
	NewsFailed = node.NewsFailed // what the lease was for has failed
)

// watch receives what concerns one contender for a key, from all nodes: by the inbox of this client, or
// on a Cluster by the channel of the key.
//
// OurTurn is delivered when a majority of nodes has published it, or half a round trip after the
// first has: with the first alone, the attempt would meet nodes where the key is still held; and
// a message may be lost.
type watch struct {
	q         *Quorum
	contender string
	onEvent   func(n Event, owner string)
	names     []string // what the messages of each node begin with
	nodes     []*pubsub.Watch

	mu         sync.Mutex  // guards what follows
	subscribed uint64      // bit i: node i has confirmed
	ourTurn    uint64      // bit i: node i has published our turn
	failed     string      // the owner whose failure was delivered last
	timer      *time.Timer // for a turn that fewer than a majority have published
	closed     bool
}

// Watch calls onEvent for each event of key, on goroutines of the nodes or of a timer, with no
// mutex held, until stop is called; one call may still be under way then. owner is set for Failed
// only. One node's message suffices for Failed: nothing is granted because of it.
func (q *Quorum) Watch(key, contender string, hear func(n Event, owner string)) (stop func()) {
	w := &watch{q: q, contender: contender, onEvent: hear}
	for i, subs := range q.subs {
		channel, name := q.Nodes[i].Channel(key, contender)
		w.names = append(w.names, name)
		w.nodes = append(w.nodes, subs.Watch(channel, name, i, w))
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

// OnEvent receives an event of node i.
func (w *watch) OnEvent(i int, e pubsub.Event) {
	var notice node.Notice
	if e.Kind == pubsub.Message {
		if notice = node.ParseNotice(w.names[i], w.contender, e.Text); notice.Failed != "" {
			w.onFailed(notice.Failed)
			return
		}
	}
	w.mu.Lock()
	event := w.eventLocked(i, e.Kind, notice)
	w.mu.Unlock()
	for event != 0 {
		w.onEvent(event, "")
		event = w.correct(event)
	}
}

// onFailed delivers a failure once, though several nodes publish it.
func (w *watch) onFailed(owner string) {
	w.mu.Lock()
	known := w.closed || owner == w.failed
	w.failed = owner
	w.mu.Unlock()
	if !known {
		w.onEvent(Failed, owner)
	}
}

// correct returns the event that must follow delivered, or 0: another node's goroutine may have
// delivered the opposite in between, and so out of order.
func (w *watch) correct(delivered Event) Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch subscribed := w.majority(w.subscribed); {
	case w.closed:
	case delivered == Subscribed && !subscribed:
		return Unsubscribed
	case delivered == Unsubscribed && subscribed:
		return Subscribed
	}
	return 0
}

func (w *watch) eventLocked(i int, kind pubsub.Kind, notice node.Notice) Event {
	bit := uint64(1) << i
	before := w.majority(w.subscribed)
	switch {
	case w.closed:
	case kind == pubsub.Subscribed:
		w.subscribed |= bit
		if w.majority(w.subscribed) {
			return Subscribed
		}
	case kind == pubsub.Unsubscribed:
		w.subscribed &^= bit
		if before && !w.majority(w.subscribed) {
			return Unsubscribed
		}
	case notice.Contender != w.contender:
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

// waitedForMore delivers OurTurn though fewer than a majority of nodes have published it.
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

// halfRTT is half the duration of the last attempt.
func (q *Quorum) halfRTT() time.Duration {
	return min(time.Duration(q.rtt.Load())/2, q.NodeTimeout/2)
}
