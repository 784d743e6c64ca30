package redistest

import (
	"net"
	"sync"
)

// A hub is a listener on a free loopback port that serves every connection on a goroutine
// of its own and can end them all.
type hub struct {
	listener net.Listener
	wg       sync.WaitGroup // the accept loop and all connections

	mu     sync.Mutex // guards what follows
	conns  map[net.Conn]struct{}
	closed bool
}

func newHub(serve func(net.Conn)) (*hub, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	h := &hub{listener: l, conns: map[net.Conn]struct{}{}}
	h.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			h.admit(c, serve)
		}
	})
	return h, nil
}

// admit serves a connection, unless the hub has been closed meanwhile.
func (h *hub) admit(c net.Conn, serve func(net.Conn)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		_ = c.Close()
		return
	}
	h.conns[c] = struct{}{}
	h.wg.Go(func() {
		serve(c)
		_ = c.Close()
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.conns, c)
	})
}

func (h *hub) addr() string { return h.listener.Addr().String() }

// close ends all connections and waits for their goroutines.
func (h *hub) close() {
	_ = h.listener.Close()
	h.mu.Lock()
	h.closed = true
	for c := range h.conns {
		_ = c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
}
