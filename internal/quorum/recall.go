package quorum

import (
	"math/bits"
	"sync"

	"github.com/flightlock/flightlock/internal/node"
)

// Recalls receives the recalls of a client. Confirmed is called one call at a time and in order:
// yes says that a majority of the nodes has confirmed the client's inbox. Any majority that grants
// a lease shares a node with it, so that the recall of a rival that meets that lease on a majority
// is received by one of its nodes at least. Recall may be called for one recall by each node.
type Recalls interface {
	Confirmed(yes bool)
	Recall(r node.Recall)
}

// recallWatch receives the recalls from all nodes.
type recallWatch struct {
	q  *Quorum
	by Recalls

	mu         sync.Mutex // guards what follows
	subscribed uint64     // bit i: node i has confirmed
	reported   bool       // what Confirmed was called with last
	gap        bool       // a majority was lost, and that was not reported yet: it may be there again
	reporting  bool       // a goroutine calls Confirmed, and goes on until there is nothing new
}

// WatchRecalls has by receive the recalls of client, until the watches of q are closed. There must
// be no Cluster among the nodes: there, the inbox is not on the server that publishes.
func (q *Quorum) WatchRecalls(client string, by Recalls) {
	w := &recallWatch{q: q, by: by}
	w.mu.Lock() // events come after this
	for i, nd := range q.Nodes {
		if _, subscribed := nd.Watch(node.Inbox+client, node.RecallName, i, w); subscribed {
			w.subscribed |= 1 << i
		}
	}
	w.mu.Unlock()
	w.report()
}

// OnEvent receives an event of node i.
func (w *recallWatch) OnEvent(i int, e node.Event) {
	if e.Kind == node.Message {
		if r, ok := node.ParseRecall(e.Text); ok {
			w.by.Recall(r)
		}
		return
	}
	w.mu.Lock()
	before := w.majorityLocked()
	if bit := uint64(1) << i; e.Kind == node.Unsubscribed {
		w.subscribed &^= bit
	} else {
		w.subscribed |= bit
	}
	w.gap = w.gap || before && !w.majorityLocked()
	w.mu.Unlock()
	w.report()
}

// report reports what is new.
func (w *recallWatch) report() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.reporting {
		return
	}
	w.reporting = true
	for {
		gap := w.gap && w.reported // to be reported, after which it is over
		w.gap = false
		confirmed := w.majorityLocked() && !gap
		if confirmed == w.reported {
			break
		}
		w.reported = confirmed
		w.mu.Unlock()
		w.by.Confirmed(confirmed)
		w.mu.Lock()
	}
	w.reporting = false
}

func (w *recallWatch) majorityLocked() bool { return bits.OnesCount64(w.subscribed) >= w.q.need }
