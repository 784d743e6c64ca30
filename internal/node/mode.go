package node

import (
	"strings"

	"github.com/flightlock/flightlock/internal/clock"
)

// Mode is how the node is used, as its links have found out, in words: what server it is, how scripts are
// sent to it (EVALSHA, or EVAL where it refuses SCRIPT LOAD), how the key passes to those who wait (grants,
// turns on nodes that are several servers, polls where no messages come), and whether losing its data costs
// it its vote. It is computed from what decides these things, and not kept. "": no link has booted yet.
//
// Whether there is a connection, or a vote, just now is not part of it: see SuspendedFor and Unverified.
func (n *Node) Mode() string {
	if !n.found.Load() {
		return ""
	}
	words := []string{"Redis Cluster"}
	if n.server != nil {
		words[0] = n.server.epoch.Load().Server
	}
	texts := false
	n.each(func(s *Server) { texts = texts || s.sendsTexts(clock.Now()) })
	if texts {
		words = append(words, "EVAL")
	} else {
		words = append(words, "EVALSHA")
	}
	n.topics.mu.Lock()
	deaf := n.topics.deaf != nil
	n.topics.mu.Unlock()
	switch {
	case deaf || n.Polled:
		words = append(words, "polls")
	case n.TakesOffers():
		words = append(words, "grants")
	default:
		words = append(words, "turns")
	}
	return strings.Join(append(words, n.quarantineMode()), ", ")
}

func (n *Node) quarantineMode() string {
	switch {
	case n.Apart() != nil:
		return "no quarantine: several servers behind one address, use ClusterClient"
	case n.guard == nil || n.guard.Changed == nil:
		return "no quarantine"
	}
	return "quarantine"
}

// foundMode has Moded called if the mode is another one than before. It is called when a link has booted, and
// when messages come, or do not.
func (n *Node) foundMode() {
	if n.Moded == nil {
		return
	}
	if mode := n.Mode(); mode != "" {
		if last := n.moded.Swap(&mode); last == nil || *last != mode {
			n.Moded(n.name, mode)
		}
	}
}
