package quorum

import (
	"sync"

	"github.com/flightlock/flightlock/internal/node"
)

// Recalls receives the recalls of a client. Confirmed is called one call at a time and in order, under a
// mutex: yes says that a majority of the nodes has confirmed the client's inbox. Any majority that grants a
// lease shares a node with it, so that the recall of a rival that meets that lease on a majority is received
// by one of its nodes at least. Lost is called each time after that majority was lost, with no mutex held:
// recalls may have been missed, even if it is there again. Recall may be called for one recall by each node.
type Recalls interface {
	Confirmed(yes bool)
	Lost()
	Recall(r node.Recall)
}

// recallWatch receives the recalls from all nodes.
type recallWatch struct {
	q  *Quorum
	by Recalls

	mu         sync.Mutex // guards what follows
	subscribed uint64     // bit i: node i has confirmed
}

// WatchRecalls has by receive the recalls of client, until the watches of q are closed. There must
// be no Cluster among the nodes: there, the inbox is not on the server that publishes.
func (q *Quorum) WatchRecalls(client string, by Recalls) {
	w := &recallWatch{q: q, by: by}
	w.mu.Lock() // events come after this
	defer w.mu.Unlock()
	for i, nd := range q.Nodes {
		if _, subscribed := nd.Watch(node.Inbox+client, node.RecallName, i, w); subscribed {
			w.subscribed |= 1 << i
		}
	}
	by.Confirmed(q.isMajority(w.subscribed))
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
	before := w.q.isMajority(w.subscribed)
	if bit := uint64(1) << i; e.Kind == node.Unsubscribed {
		w.subscribed &^= bit
	} else {
		w.subscribed |= bit
	}
	now := w.q.isMajority(w.subscribed)
	w.by.Confirmed(now)
	w.mu.Unlock()
	if before && !now {
		w.by.Lost()
	}
}
