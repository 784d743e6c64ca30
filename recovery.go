package flightlock

import "sync"

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
