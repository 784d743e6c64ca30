package flightlock

import (
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// Retained leases (Options.Linger): the local tier keeps them (internal/flight/retained.go); here
// is what it is told about recalls, and how long leases are kept.

// recalls are what a Client receives of other clients that want a key whose lease it may retain.
type recalls struct {
	on    bool      // leases may be retained
	start sync.Once // by the first lock that lingers
}

// mayRetain reports whether this client may retain leases: others must be able to recall them, and
// it to hand them over.
func (c *Client) mayRetain() bool {
	o := &c.opts
	if o.Linger == 0 && o.LingerFor == nil || o.KeyPrefix == "" || o.DisableNotify || o.HandoffSlice < 0 {
		return false
	}
	for _, n := range c.clients {
		if _, cluster := n.(*redis.ClusterClient); cluster { // its inboxes are the channels of keys
			return false
		}
	}
	return true
}

// linger is how long the lease of key may be retained. With the first key for which it may, the
// client subscribes to its recalls, until Close.
func (c *Client) linger(key string) time.Duration {
	d := c.opts.Linger
	if c.opts.LingerFor != nil {
		d = c.opts.LingerFor(key)
	}
	if d <= 0 {
		return 0
	}
	c.recalls.start.Do(func() { c.quorum.WatchRecalls(c.id[1:len(c.id)-1], recalled{c}) })
	return max(d, time.Millisecond)
}

// recalled is a Client that receives its recalls.
type recalled struct{ c *Client }

// Confirmed says whether recalls are received.
func (r recalled) Confirmed(yes bool) { r.c.flights.InboxConfirmed(yes) }

// Recall has the lease released, or not retained.
func (r recalled) Recall(recall node.Recall) {
	if key, ours := strings.CutPrefix(recall.Key, r.c.opts.KeyPrefix); ours {
		r.c.flights.Recall(key, recall.Owner, recall.Contender)
	}
}
