package redistest

import (
	"context"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// RefusingDialer is a Dialer whose connections were closed by the server at once, after an error reply: as
// those of a server whose connections are all in use. The first of their writes succeed, as long as the
// client's kernel does not know of the end, and the others fail. The reply has arrived.
func RefusingDialer(reply string,
	writes int) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		return &refusedConn{strings.NewReader("-" + reply + "\r\n"), writes}, nil
	}
}

type refusedConn struct {
	received *strings.Reader
	writes   int // that succeed still
}

func (c *refusedConn) Read(p []byte) (int, error) { return c.received.Read(p) }

func (c *refusedConn) Write(p []byte) (int, error) {
	if c.writes--; c.writes < 0 {
		return 0, &net.OpError{Op: "write", Net: "tcp", Addr: c.RemoteAddr(),
			Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	return len(p), nil
}

func (*refusedConn) Close() error { return nil }

func (*refusedConn) LocalAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

func (*refusedConn) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 6379}
}

func (*refusedConn) SetDeadline(time.Time) error { return nil }

func (*refusedConn) SetReadDeadline(time.Time) error { return nil }

func (*refusedConn) SetWriteDeadline(time.Time) error { return nil }
