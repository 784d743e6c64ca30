package flightlock

import "sync"

// recovery is how those who do without the nodes learn that one is back. The zero value is ready for use.
type recovery struct {
	mu   sync.Mutex
	back chan struct{} // closed when the next node comes back; nil until somebody waits for that
}

// next is closed when a node comes back from now on.
func (r *recovery) next() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back == nil {
		r.back = make(chan struct{})
	}
	return r.back
}

// announce tells of a node that is back. Nobody runs on this goroutine for it.
func (r *recovery) announce() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back != nil {
		close(r.back)
		r.back = nil
	}
}

// away reports whether so many nodes have no vote now that no majority is left.
func (c *Client) away() bool {
	n := 0
	for i, nd := range c.nodes {
		if nd.Suspended() || c.quorum.Quarantined(i) || nd.Unverified() != nil {
			n++
		}
	}
	return n > len(c.nodes)-c.quorum.Need()
}
