package node

import (
	"context"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// Own says, before the first request, that nobody else uses n's client. Then requests take any of
// its connections, and these are looked at less often: see conn.
func (n *Node) Own() {
	n.own = true
	switch c := n.client.(type) {
	case *redis.Client:
		c.AddHook(trust{})
	case *redis.ClusterClient:
		c.OnNewNode(func(master *redis.Client) { master.AddHook(trust{}) })
	}
}

// trust is a hook that makes a conn of each new connection.
type trust struct{}

func (trust) DialHook(dial redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if s, ok := c.(socket); err == nil && ok {
			return &conn{socket: s}, nil
		}
		return c, err
	}
}

func (trust) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (trust) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// socket is a connection that go-redis can look at. One with TLS is none.
type socket interface {
	net.Conn
	syscall.Conn
}

// trusted is how long after an answer a connection is not looked at.
const trusted = 10 * time.Millisecond

// conn is a connection that spares go-redis most of what it does around each command beside
// writing and reading.
//
// Before it hands out a connection of its pool, go-redis looks whether the server has closed it
// or whether there is anything to be read: a system call, of some four or five that a command
// takes. It is needed after a pause. Right after an answer it would show one of two things:
//
//   - The server has closed it since. Then the request is written, and its answer does not come: a
//     doubt, as for one whose connection dies a moment after the look.
//   - There is something that nobody has asked for. Only an answer that was not read to its end
//     leaves that, for pushes may come at any time and go-redis reads them before an answer. But
//     the last read had room for more than it got, so the rest was in go-redis' buffer, which it
//     looks at when it takes the connection back, or had not come yet, and a look misses it too.
//     And where a read fails, or is not waited for, the connection is closed.
//
// A command also lifts the deadlines of the one before, and sets its own, a moment later than
// those were. Here they are set a little late, and stay until they come too soon.
//
// One goroutine reads and one writes, which may be the same. Whoever takes the connection from
// the pool, and lifts the deadlines, is both.
type conn struct {
	socket
	heard       atomic.Int64 // when the last read brought all there was, on the clock of born; 0: it did not
	read, write due
}

var born = time.Now()

func (c *conn) Read(b []byte) (int, error) {
	if c.read.lift() {
		_ = c.socket.SetReadDeadline(time.Time{}) // if it fails, so does what follows
	}
	n, err := c.socket.Read(b)
	heard := int64(0)
	if err == nil && 0 < n && n < len(b) {
		heard = int64(time.Since(born))
	}
	c.heard.Store(heard)
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	if c.write.lift() {
		_ = c.socket.SetWriteDeadline(time.Time{})
	}
	return c.socket.Write(b)
}

// SyscallConn is what go-redis looks through.
func (c *conn) SyscallConn() (syscall.RawConn, error) {
	if heard := c.heard.Load(); heard != 0 && time.Since(born)-time.Duration(heard) < trusted {
		return nothing{}, nil
	}
	if c.read.lift() {
		_ = c.socket.SetReadDeadline(time.Time{})
	}
	return c.socket.SyscallConn()
}

func (c *conn) SetDeadline(t time.Time) error {
	if t.IsZero() {
		c.read.lifted, c.write.lifted = true, true
		return nil
	}
	c.read, c.write = due{}, due{}
	return c.socket.SetDeadline(t)
}

func (c *conn) SetReadDeadline(t time.Time) error {
	t, stays := c.read.move(t)
	if stays {
		return nil
	}
	return c.socket.SetReadDeadline(t)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	t, stays := c.write.move(t)
	if stays {
		return nil
	}
	return c.socket.SetWriteDeadline(t)
}

// due is when the socket's deadline is, for one direction.
type due struct {
	at     time.Duration // on the clock of born; 0: there is none, or it is not known
	lifted bool          // it is to be lifted before it is waited for again, unless it is moved
}

// move is for a deadline at t. It says that the one that is there will do, because it comes at t
// or up to a sixteenth of the time until then later, or gives one to be set that comes so late.
func (d *due) move(t time.Time) (at time.Time, stays bool) {
	now := time.Now()
	left := t.Sub(now)
	if t.IsZero() || left <= 0 { // none, or to interrupt somebody
		*d = due{}
		return t, false
	}
	want, late := now.Sub(born)+left, left/16
	if d.at >= want && d.at <= want+late {
		d.lifted = false
		return t, true
	}
	*d = due{at: want + late}
	return t.Add(late), false
}

// lift says that the deadline has to be lifted now.
func (d *due) lift() bool {
	was := d.lifted
	if was {
		*d = due{}
	}
	return was
}

// nothing is a connection that is open, and on which there is nothing to be read: it is not even
// looked at.
type nothing struct{}

func (nothing) Control(func(uintptr)) error    { return nil }
func (nothing) Read(func(uintptr) bool) error  { return nil }
func (nothing) Write(func(uintptr) bool) error { return nil }
