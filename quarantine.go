package flightlock

import (
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/check"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// This file turns on the quarantine of nodes that lost data, and logs its changes (type quarantine in
// internal/quorum implements it); and it notifies loads without a lock that nodes are back.

// guarded reports whether nodes that lost data have no vote. Otherwise all votes count: with fewer
// than three nodes no other node could vote instead, and a Cluster loses data in parts.
func (c *Client) guarded() bool {
	return !c.opts.DisableQuarantine && len(c.nodes) >= 3 &&
		!slices.ContainsFunc(c.nodes, func(n *node.Node) bool { return !n.Guardable() })
}

// quarantineTime is how long a node that lost data has no vote: no earlier lock lives longer. By the
// limits of MaxTTL and DriftFactor that is about 36h at most.
func (c *Client) quarantineTime() time.Duration {
	return c.opts.MaxTTL + time.Duration(float64(c.opts.MaxTTL)*c.opts.DriftFactor) + 2*time.Millisecond
}

// epochName names an epoch that begins. It is never the same twice, and not longer than
// lua.MaxName: 16 digits of the client's UUID, 60 bits of them at random, and less than 8 of any
// number that is reached.
func (c *Client) epochName() string {
	return strings.ReplaceAll(c.id[1:], "-", "")[:16] + "m" + strconv.FormatUint(c.epochs.Add(1), 36)
}

// onNoInfo is called when node i does not report its process.
func (c *Client) onNoInfo(i int, why error) {
	reason := "its INFO does not identify the process"
	if errors.Is(why, node.ErrInfoRefused) {
		reason = "the right to INFO is missing (ACL SETUSER ... +info)"
	}
	c.log(slog.LevelWarn, "flightlock: a node that restarts with old data, or fails over, may go undetected: "+reason,
		"node", c.nodes[i].Name(), "err", why)
}

// onUndeclared is called when it was found that scripts on a node may access only the keys that
// they declare, or that they may access others by now.
func (c *Client) onUndeclared(i int, why error) {
	name := c.nodes[i].Name()
	if why != nil {
		c.log(slog.LevelWarn, "flightlock: quarantine is off: it needs a key that scripts do not declare, which this node "+
			"refuses; if a node loses data, it may grant a lock that is held", "node", name, "err", why,
			"fix", check.FixUndeclared(why))
	} else {
		c.log(slog.LevelInfo, "flightlock: scripts on the node may access keys that they do not declare, as the "+
			"quarantine needs", "node", name)
	}
}

// onQuarantine is called when a node has entered quarantine, or has left it.
func (c *Client) onQuarantine(i int, s quorum.Quarantined) {
	name := c.nodes[i].Name()
	if !s.Until.IsZero() {
		c.recheckAway()
		c.log(slog.LevelWarn, "flightlock: node quarantined: its votes do not count", "node", name, "until",
			s.Until.Round(0), "err", &s)
	} else {
		c.recovery.announce()
		c.log(slog.LevelInfo, "flightlock: node is out of quarantine", "node", name)
	}
}

// recovery notifies loads without a lock that a node is back. The zero value is ready for use.
type recovery struct {
	mu   sync.Mutex
	back chan struct{} // closed when the next node comes back; nil until next is called
}

// next returns a channel that is closed when a node comes back after this call.
func (r *recovery) next() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back == nil {
		r.back = make(chan struct{})
	}
	return r.back
}

// announce reports that a node is back. It only closes a channel.
func (r *recovery) announce() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back != nil {
		close(r.back)
		r.back = nil
	}
}

// away reports whether so many nodes have no vote now that there is no majority.
func (c *Client) away() bool {
	n := 0
	for i, nd := range c.nodes {
		if nd.Suspended() || c.quorum.Quarantined(i) || nd.Unverified() != nil {
			n++
		}
	}
	return n > len(c.nodes)-c.quorum.Need()
}
