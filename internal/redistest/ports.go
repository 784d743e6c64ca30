package redistest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Ports come from a range of our own, below the one from which the kernel picks ports for
// outgoing connections (from 32768 on Linux, from 49152 elsewhere). Otherwise an unrelated
// client socket could sit on a server's port between its Kill and its Restart.
// A Redis Cluster node also listens on port+busOffset, which is why the range ends
// below firstPort+busOffset.
const (
	firstPort = 10100
	lastPort  = 19999
	busOffset = 10000
)

// guardHost is where a port is reserved: a second loopback address on which nobody
// serves anything. Holding guardHost:p is how test processes that run at the same time
// (go test ./... runs packages side by side) keep off each other's p, also while the server
// on 127.0.0.1:p is down. The kernel takes the reservation back when a process dies.
const guardHost = "127.0.0.77"

// A port is a TCP port of 127.0.0.1 that no other user of this package gets until release.
type port struct {
	number int
	guard  net.Listener // nil where guardHost does not exist (only Linux has all of 127/8)
	once   sync.Once
}

// ReserveAddr returns a free address of 127.0.0.1, where connections are refused, for a server that the
// caller starts there, and may start there again. No other user of this package gets its port until release.
func ReserveAddr() (addr string, release func(), err error) {
	p, err := reservePort()
	if err != nil {
		return "", nil, err
	}
	if err := p.awaitRefused(); err != nil { // see portPatience
		p.release()
		return "", nil, err
	}
	return p.addr(), p.release, nil
}

// reservePort finds a free port whose cluster bus port is free as well.
func reservePort() (*port, error) {
	var last error
	for range 200 {
		p, err := tryPort(firstPort + rand.IntN(lastPort-firstPort+1))
		if err == nil {
			return p, nil
		}
		last = err
	}
	return nil, fmt.Errorf("redistest: no free port in %d..%d: %w", firstPort, lastPort, last)
}

func tryPort(number int) (*port, error) {
	guard, err := net.Listen("tcp", hostPort(guardHost, number))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, err
	}
	// Any other error: this system has no such address, so there is only the look below.
	p := &port{number: number, guard: guard}
	if err := errors.Join(probe(number), probe(number+busOffset)); err != nil {
		p.release()
		return nil, err
	}
	return p, nil
}

// portPatience is how long a port may be in use that is ours. A process that is being started has, until its
// program begins, copies of all sockets of its parent: also of the one by which probe has just looked, and of
// one that was closed to be opened again.
const portPatience = 5 * time.Second

// listen listens on the port.
func (p *port) listen() (l net.Listener, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), portPatience)
	defer cancel()
	poll(ctx, func() bool {
		l, err = net.Listen("tcp", p.addr())
		return !errors.Is(err, syscall.EADDRINUSE)
	})
	return l, err
}

// awaitRefused waits until nobody listens on the port any more.
func (p *port) awaitRefused() error {
	ctx, cancel := context.WithTimeout(context.Background(), portPatience)
	defer cancel()
	refused := poll(ctx, func() bool {
		c, err := net.DialTimeout("tcp", p.addr(), portPatience)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	if !refused {
		return fmt.Errorf("redistest: %s still accepts connections after %v", p.addr(), portPatience)
	}
	return nil
}

// probe reports whether somebody outside this package listens on the port.
func probe(number int) error {
	l, err := net.Listen("tcp", hostPort("127.0.0.1", number))
	if err != nil {
		return err
	}
	return l.Close()
}

func (p *port) addr() string { return hostPort("127.0.0.1", p.number) }

// release lets others have the port. It may be called more than once.
func (p *port) release() {
	p.once.Do(func() {
		if p.guard != nil {
			_ = p.guard.Close()
		}
	})
}

func hostPort(host string, number int) string {
	return net.JoinHostPort(host, strconv.Itoa(number))
}
