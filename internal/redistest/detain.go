package redistest

import (
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Detainer delays the requests of a client of a node in memory, as [Proxy.HoldRequests] does on sockets.
// What is written between Hold and LetGo to the connections of before arrives at LetGo, also if the client
// has given them up by then. Others are as ever.
type Detainer struct {
	mu    sync.Mutex // guards conns
	conns []*detained
}

// Options is for a client whose requests are to be held.
func (d *Detainer) Options(o *redis.Options) {
	Through(func(c net.Conn) net.Conn {
		own := &detained{Conn: c}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.conns = append(d.conns, own)
		return own
	})(o)
}

// Hold holds what is written from now on.
func (d *Detainer) Hold() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		c.mu.Lock()
		c.held = true
		c.mu.Unlock()
	}
}

// LetGo delivers what was held.
func (d *Detainer) LetGo() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		c.letGo()
	}
}

type detained struct {
	net.Conn

	mu     sync.Mutex // guards what follows
	held   bool
	closed bool
	buf    []byte
}

func (d *detained) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held {
		return d.Conn.Write(p)
	}
	d.buf = append(d.buf, p...)
	return len(p), nil
}

func (d *detained) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed = true; d.held {
		return nil
	}
	return d.Conn.Close()
}

func (d *detained) letGo() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held {
		return
	}
	d.held = false
	_, _ = d.Conn.Write(d.buf)
	d.buf = nil
	if d.closed {
		time.AfterFunc(time.Second, func() { _ = d.Conn.Close() }) // the node has read it
	}
}
