package redistest

import (
	"errors"
	"net"
	"sync"
	"time"
)

// A link is one proxied connection: a connection with the client, one with the target, and
// a line in each direction between them. Faults strike where the bytes leave a line.
//
// It ends when both directions have ended. The client's end travels up behind its last
// request, as a half-close; the target's end travels down behind its last reply and takes
// the link with it.
type link struct {
	proxy    *Proxy
	client   *net.TCPConn
	up, down *line

	mu     sync.Mutex   // guards what follows
	target *net.TCPConn // nil until connected
	dead   bool         // reset already, so a target that comes now is to be closed
}

// run forwards until the link has ended.
func (k *link) run(dial func() (*net.TCPConn, error)) {
	defer k.reset()
	target, err := dial()
	switch {
	case errors.Is(err, errSwallowed):
		k.swallow()
		return
	case err != nil || !k.connected(target):
		return
	}
	var wg sync.WaitGroup
	wg.Go(k.receiveUp)
	wg.Go(k.sendUp)
	wg.Go(k.receiveDown)
	wg.Go(k.sendDown)
	wg.Wait()
}

// connected takes note of the connection with the target, unless it comes too late.
func (k *link) connected(target *net.TCPConn) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dead {
		_ = target.Close()
		return false
	}
	k.target = target
	return true
}

// swallow reads from a client that has no target, until it gives up.
func (k *link) swallow() {
	_ = receive(k.client, func(b []byte) { k.proxy.up.Add(int64(len(b))) })
}

// receiveUp puts what the client sends on the up line, then the client's end.
func (k *link) receiveUp() {
	_ = receive(k.client, func(b []byte) {
		k.proxy.up.Add(int64(len(b)))
		_ = k.up.put(b, time.Time{}) // fails on a link that is over, where nobody wants it
	})
	k.up.finish()
}

// receiveDown puts what the target sends on the down line, then the target's end.
func (k *link) receiveDown() {
	_ = receive(k.target, func(b []byte) {
		k.proxy.down.Add(int64(len(b)))
		_ = k.down.put(b, time.Now().Add(k.proxy.now().delay))
	})
	k.down.finish()
}

// receive hands every chunk from c to take, which keeps it, and returns when c has ended,
// however it did.
func receive(c net.Conn, take func([]byte)) error {
	for {
		buf := make([]byte, chunkSize)
		n, err := c.Read(buf)
		if n > 0 {
			take(buf[:n:n])
		}
		if err != nil {
			return err
		}
	}
}

// chunkSize is what is read from a socket at once, at most.
const chunkSize = 16 << 10

// sendUp forwards the requests. Those of a client that is gone go out all the same.
func (k *link) sendUp() {
	buf := make([]byte, chunkSize)
	lost := false
	for {
		n, err := k.up.read(buf)
		lost = lost || k.proxy.now().blackHole
		if err != nil {
			break
		}
		if !lost {
			_, err = k.target.Write(buf[:n])
			lost = err != nil // the target's end is on its way down
		}
	}
	if lost {
		_ = k.target.Close() // nothing will come of it, and it must not outlive its client
		return
	}
	_ = k.target.CloseWrite()
}

// sendDown forwards the replies. When the client is gone it continues taking them, so that the
// target is not disturbed in executing what is left.
func (k *link) sendDown() {
	buf := make([]byte, chunkSize)
	lost, gone := false, false
	for {
		n, err := k.down.read(buf)
		f := k.proxy.now()
		lost = lost || f.blackHole || (err == nil && f.dropReplies)
		if err != nil {
			break
		}
		if lost || gone {
			continue
		}
		pass, cut := k.proxy.allow(n)
		_, err = k.client.Write(buf[:pass])
		gone = err != nil
		if cut {
			k.reset()
		}
	}
	if k.proxy.now().blackHole {
		return // the client learns nothing, not even this
	}
	_ = k.client.Close()
	k.up.breakOff(errReset)
}

// reset ends the link at once. The client gets a TCP reset.
func (k *link) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dead = true
	_ = k.client.SetLinger(0) // makes Close send RST instead of FIN
	_ = k.client.Close()
	if k.target != nil {
		_ = k.target.Close()
	}
	k.up.breakOff(errReset)
	k.down.breakOff(errReset)
}
