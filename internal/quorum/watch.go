package quorum

import (
	"math/bits"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Event is something that happens to a watched key.
type Event uint8

// The kinds of events.
const (
	Subscribed   Event = iota + 1 // a majority of nodes has confirmed the subscription; may come again
	Unsubscribed                  // that majority is lost
	OurTurn                       // the turn is this contender's
	OtherTurn                     // the turn is another's
	Failed                        // somebody has released the key because its work has failed
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
// OurTurn is delivered when a majority of nodes has published it, or half a round trip after the first has:
// with the first alone, the attempt would meet nodes where the key is still held; and a message may be lost,
// or contenders that have no offers may be registered at different nodes.
type watch struct {
	q         *Quorum
	contender string
	onEvent   func(Event)
	names     []string // what the messages of each node begin with
	nodes     []*node.Watch

	mu         sync.Mutex  // guards what follows
	subscribed uint64      // bit i: node i has confirmed
	ourTurn    uint64      // bit i: node i has published our turn
	failed     string      // the owner whose failure was delivered last
	timer      *time.Timer // for a turn that fewer than a majority have published
	stopped    bool
}

// Watch calls onEvent for each event of key until stop is called; one call may still be under way
// then. The calls are made with no mutex held, on goroutines of the nodes or of a timer; the first one is
// made on the caller's goroutine, before Watch returns, if this client is subscribed already. One node's
// message suffices for Failed: nothing is granted because of it.
func (q *Quorum) Watch(key, contender string, onEvent func(Event)) (stop func()) {
	w := &watch{q: q, contender: contender, onEvent: onEvent}
	w.mu.Lock() // events come after this
	for i, nd := range q.Nodes {
		channel, name := nd.Channel(key, contender)
		n, subscribed := nd.Watch(channel, name, i, w)
		if subscribed {
			w.subscribed |= 1 << i
		}
		w.names, w.nodes = append(w.names, name), append(w.nodes, n)
	}
	subscribed := q.isMajority(w.subscribed)
	w.mu.Unlock()
	if subscribed {
		w.deliver(Subscribed)
	}
	return w.stop
}

func (w *watch) stop() {
	w.mu.Lock()
	w.stopped = true
	if w.timer != nil {
		w.timer.Stop()
	}
	w.mu.Unlock()
	for _, n := range w.nodes {
		n.Stop()
	}
}

// OnEvent receives an event of node i.
func (w *watch) OnEvent(i int, e node.Event) {
	w.mu.Lock()
	event := w.eventLocked(i, e)
	w.mu.Unlock()
	w.deliver(event)
}

// deliver delivers event, unless it is 0.
func (w *watch) deliver(event Event) {
	for event != 0 {
		w.onEvent(event)
		event = w.correct(event)
	}
}

// correct returns the event that must follow delivered, or 0: another node's goroutine may have
// delivered the opposite in between, and so out of order.
func (w *watch) correct(delivered Event) Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch subscribed := w.q.isMajority(w.subscribed); {
	case delivered == Subscribed && !subscribed:
		return Unsubscribed
	case delivered == Unsubscribed && subscribed:
		return Subscribed
	}
	return 0
}

func (w *watch) eventLocked(i int, e node.Event) Event {
	bit := uint64(1) << i
	before := w.q.isMajority(w.subscribed)
	switch e.Kind {
	case node.Subscribed:
		w.subscribed |= bit
		if w.q.isMajority(w.subscribed) {
			return Subscribed
		}
	case node.Unsubscribed:
		w.subscribed &^= bit
		if before && !w.q.isMajority(w.subscribed) {
			return Unsubscribed
		}
	default:
		return w.noticeLocked(bit, node.ParseNotice(w.names[i], w.contender, e.Text))
	}
	return 0
}

// noticeLocked takes a notice. A failure is delivered once, though several nodes publish it.
func (w *watch) noticeLocked(bit uint64, notice node.Notice) Event {
	switch {
	case notice.Failed != "":
		if notice.Failed == w.failed {
			return 0
		}
		w.failed = notice.Failed
		return Failed
	case notice.Contender != w.contender:
		return OtherTurn
	}
	first := w.ourTurn == 0
	switch w.ourTurn |= bit; {
	case w.stopped:
	case w.q.isMajority(w.ourTurn):
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
	ours := w.ourTurn != 0 && !w.stopped
	w.ourTurn = 0
	w.mu.Unlock()
	if ours {
		w.onEvent(OurTurn)
	}
}

// isMajority reports whether the nodes of mask, each of which has a bit, are one.
func (q *Quorum) isMajority(mask uint64) bool { return bits.OnesCount64(mask) >= q.need }

// halfRTT is half the duration of the last attempt.
func (q *Quorum) halfRTT() time.Duration {
	return min(time.Duration(q.rtt.Load())/2, q.NodeTimeout/2)
}
