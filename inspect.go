package flightlock

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
)

// Inspection is what was known of a lock a moment ago: see [Client.Inspect].
type Inspection struct {
	Key   string
	Owner string        // that a majority of the nodes has, as Lock.Owner; "": nobody holds the lock
	Label string        // Options.Label of the owner's Client
	TTL   time.Duration // how long a majority keeps the key for the owner, unless it refreshes; 0: no owner
	Fence int64         // no token of the key is larger so far; the owner's may be smaller
	// the owner's Client may keep the lease although nobody holds the lock: see Options.Linger
	Retained bool

	// Waiting are the processes that wait, named as owners are, in the order of the node that knows most of
	// them; at most 1,000.
	Waiting     []string
	WaitingHere int // callers of this Client that wait

	Nodes []NodeInspection // in the order of the nodes
}

// NodeInspection is what one node knows of a lock.
type NodeInspection struct {
	Node    string        // its address
	Owner   string        // "": none
	TTL     time.Duration // below 0 if unknown, as for a key that never expires
	Fence   int64         // its counter
	Waiting []string      // in order
	Err     error         // why nothing is known
}

// Inspect reads from all nodes who holds the lock on key, and who waits for it. It changes nothing, and
// proves nothing: the lock may have another holder by the time it returns. It looks below this Client's
// KeyPrefix.
//
// It takes as long as the slowest node, at most a second, or NodeTimeout if that is more. If fewer than a
// majority of the nodes answer, the error is ErrUnavailable, with ctx's error if that has ended, and the
// Inspection has the answers. Other errors: ErrInvalid, ErrClosed.
func (c *Client) Inspect(ctx context.Context, key string) (Inspection, error) {
	if c.flights == nil {
		return Inspection{}, errZeroClient
	}
	if err := c.checkKey(key); err != nil {
		return Inspection{}, err
	}
	return c.inspect(ctx, "inspect", key, max(time.Second, c.opts.NodeTimeout))
}

// inspect is Inspect for an operation, within limit. revokes are an owner, its inbox and a message for that.
func (c *Client) inspect(ctx context.Context, op, key string, limit time.Duration,
	revokes ...any) (Inspection, error) {
	if c.ended.Err() != nil {
		return Inspection{}, errClosed
	}
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer context.AfterFunc(c.ended, cancel)()
	in := Inspection{Key: key}
	for _, g := range []*flight.Group{c.flights, c.attaches, c.reads.flights} {
		in.WaitingHere += g.Waiters(key)
	}
	e := &QuorumError{Op: op, Key: key, Need: c.quorum.Need(), sentinel: ErrUnavailable}
	for i, s := range c.check.Inspect(inner, c.opts.KeyPrefix+key, revokes...) {
		n := NodeInspection{Node: c.nodes[i].Name(), Owner: s.Owner, TTL: s.TTL, Fence: s.Counter,
			Waiting: s.Waiting,
			Err:     s.Err}
		in.Nodes = append(in.Nodes, n)
		e.Nodes = append(e.Nodes, NodeError{Node: n.Node, Holder: n.Owner, HolderTTL: n.TTL, Err: n.Err})
		if n.Err == nil {
			e.Got++
		}
		in.Fence = max(in.Fence, n.Fence)
		if len(n.Waiting) > len(in.Waiting) {
			in.Waiting = n.Waiting
		}
	}
	in.findOwner(e.Need)
	if e.Got < e.Need {
		e.ctx = ctx.Err()
		return in, e
	}
	return in, nil
}

// findOwner sets what concerns the owner that need nodes have.
func (in *Inspection) findOwner(need int) {
	for _, n := range in.Nodes {
		var left []time.Duration // as long as each node keeps the key for n's owner
		for _, other := range in.Nodes {
			if other.Err == nil && other.Owner == n.Owner {
				left = append(left, other.TTL)
			}
		}
		if n.Err != nil || n.Owner == "" || strings.HasPrefix(n.Owner, node.TurnOf) || len(left) < need {
			continue
		}
		slices.Sort(left)
		in.Owner, in.TTL, in.Retained = n.Owner, left[len(left)-need], node.Retains(n.Owner)
		in.Label = n.Owner[:max(0, strings.LastIndexByte(n.Owner, '#'))]
		return
	}
}

// has reports whether any node has the key in owner's name.
func (in *Inspection) has(owner string) bool {
	return slices.ContainsFunc(in.Nodes, func(n NodeInspection) bool { return n.Owner == owner })
}

// without is how many nodes do not have the key in owner's name.
func (in *Inspection) without(owner string) (n int) {
	for _, node := range in.Nodes {
		if node.Err == nil && node.Owner != owner {
			n++
		}
	}
	return n
}
