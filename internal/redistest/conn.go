package redistest

import (
	"context"
	"net"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Conn is a connection whose writes and reads a test replaces. Those that are nil are the connection's own.
type Conn struct {
	net.Conn
	OnWrite, OnRead func(c net.Conn, p []byte) (int, error)
}

func (c *Conn) Write(p []byte) (int, error) {
	if c.OnWrite != nil {
		return c.OnWrite(c.Conn, p)
	}
	return c.Conn.Write(p)
}

func (c *Conn) Read(p []byte) (int, error) {
	if c.OnRead != nil {
		return c.OnRead(c.Conn, p)
	}
	return c.Conn.Read(p)
}

// Open returns the connection, with the socket of the one below if that has one: then a client sees whether
// bytes wait in it, and whether it is closed.
func (c *Conn) Open() net.Conn {
	if socket, ok := c.Conn.(syscall.Conn); ok {
		return socketConn{c, socket}
	}
	return c
}

type (
	socket     syscall.Conn
	socketConn struct {
		*Conn
		socket
	}
)

// A Dialer is that of a client's options.
type Dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dials changes how a client dials, from its Dialer, or from that of sockets if it has none.
func Dials(change func(Dialer) Dialer) func(*redis.Options) {
	return func(o *redis.Options) {
		if o.Dialer == nil {
			o.Dialer = (&net.Dialer{}).DialContext
		}
		o.Dialer = change(o.Dialer)
	}
}

// Through changes the connections of a client.
func Through(change func(net.Conn) net.Conn) func(*redis.Options) {
	return Dials(func(dial Dialer) Dialer {
		return func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return change(c), nil
		}
	})
}

// Writes replaces the writes of a client's connections.
func Writes(write func(c net.Conn, p []byte) (int, error)) func(*redis.Options) {
	return Through(func(c net.Conn) net.Conn { return (&Conn{Conn: c, OnWrite: write}).Open() })
}

// Late delays what a client sends by d.
func Late(d time.Duration) func(*redis.Options) {
	return Writes(func(c net.Conn, p []byte) (int, error) {
		time.Sleep(d)
		return c.Write(p)
	})
}
