package redistest

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A pipe is an in-memory connection: two lines between two ends, a client's and a server's.
// Unlike with net.Pipe a writer does not wait for the reader. With net.Pipe a client that
// writes a long pipeline and a server that answers its first commands wait for each
// other for ever.
//
// It stays usable inside a testing/synctest bubble: the one that waits, waits on a channel or a
// timer of the bubble.
type pipe struct {
	client, server *pipeEnd
	up, down       *line
	served         chan struct{} // closed with the server's end: nothing more is executed
}

// newPipe makes a connection. delay is asked at every write, for how long those bytes travel.
func newPipe(addr string, delay func() time.Duration) *pipe {
	p := &pipe{up: newLine(), down: newLine(), served: make(chan struct{})}
	here, there := pipeAddr("memory"), pipeAddr(addr)
	p.client = &pipeEnd{in: p.down, out: p.up, local: here, remote: there, delay: delay, closed: func() {}}
	p.server = &pipeEnd{in: p.up, out: p.down, local: there, remote: here, delay: delay,
		closed: sync.OnceFunc(func() { close(p.served) })}
	return p
}

// Pipe makes a connection in memory, and returns its ends. What is written to one can be read from the other
// at once.
func Pipe() (client, server net.Conn) {
	p := newPipe("10.0.0.1:6379", func() time.Duration { return 0 })
	return p.client, p.server
}

// hold stops both directions: bytes and ends of file stay on their lines.
func (p *pipe) hold(on bool) {
	p.up.hold(on)
	p.down.hold(on)
}

// cut resets the connection: both ends get an error, what is on the way is lost.
func (p *pipe) cut() {
	p.up.breakOff(errReset)
	p.down.breakOff(errReset)
}

// A pipeEnd is one end of a pipe, a net.Conn.
type pipeEnd struct {
	in, out       *line
	local, remote pipeAddr
	delay         func() time.Duration
	closed        func() // called by Close
	writeDeadline atomic.Pointer[time.Time]
}

func (e *pipeEnd) Read(b []byte) (int, error) {
	n, err := e.in.read(b)
	return n, e.wrap("read", err)
}

// Write never waits, so a deadline only matters if it has passed.
func (e *pipeEnd) Write(b []byte) (int, error) {
	if t := e.writeDeadline.Load(); t != nil && !t.IsZero() && !time.Now().Before(*t) {
		return 0, e.wrap("write", os.ErrDeadlineExceeded)
	}
	if len(b) == 0 {
		return 0, nil
	}
	data := append([]byte(nil), b...)
	if err := e.out.put(data, time.Now().Add(e.delay())); err != nil {
		return 0, e.wrap("write", err)
	}
	return len(b), nil
}

// Quiet reports whether a read would wait, or begin with a push, as one sees of a socket.
func (e *pipeEnd) Quiet() bool { return e.in.quiet() }

// Close ends the connection. The other end still gets what was written.
func (e *pipeEnd) Close() error {
	e.in.breakOff(net.ErrClosed)
	e.out.finish()
	e.closed()
	return nil
}

func (e *pipeEnd) LocalAddr() net.Addr  { return e.local }
func (e *pipeEnd) RemoteAddr() net.Addr { return e.remote }

// SetDeadline ends a read that waits when both deadlines are set, so that its reader does not see an old one.
func (e *pipeEnd) SetDeadline(t time.Time) error {
	_ = e.SetWriteDeadline(t)
	return e.SetReadDeadline(t)
}

func (e *pipeEnd) SetReadDeadline(t time.Time) error {
	e.in.setDeadline(t)
	return nil
}

func (e *pipeEnd) SetWriteDeadline(t time.Time) error {
	e.writeDeadline.Store(&t)
	return nil
}

// A socketEnd is a pipeEnd that go-redis takes for a socket, which it checks before each use.
type socketEnd struct{ *pipeEnd }

func (e socketEnd) SyscallConn() (syscall.RawConn, error) { return pipeSocket{e.in}, nil }

// A pipeSocket is the part of a socket that the check needs.
type pipeSocket struct{ in *line }

// Read returns how the line has ended, in place of calling a function that looks at the socket.
func (s pipeSocket) Read(func(fd uintptr) bool) error { return s.in.ended() }

func (pipeSocket) Control(func(fd uintptr)) error    { return errors.ErrUnsupported }
func (pipeSocket) Write(func(fd uintptr) bool) error { return errors.ErrUnsupported }

// wrap makes errors look as those of a TCP connection do, but for end of file, which
// stays bare there as well.
func (e *pipeEnd) wrap(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: e.local, Addr: e.remote, Err: err}
}

// pipeAddr is the address of a pipe's end.
type pipeAddr string

func (pipeAddr) Network() string  { return "tcp" }
func (a pipeAddr) String() string { return string(a) }
