package link

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// errTaken ends go-redis' handshake, when the connection is ours.
var errTaken = errors.New("link: the connection was taken")

// dial makes a connection, and logs in: go-redis does both, with its TLS, its credentials and the user's functions, and
// within our deadlines. Then the connection is ours, and go-redis' client is closed.
func (l *Link) dial(ctx context.Context) (*conn.Conn, error) {
	var c *conn.Conn
	var taken atomic.Bool
	own, err := conn.DialOnce(ctx, l.o.Client, l.o.Timeout, l.dials, func(o *redis.Options) {
		dial, greet := o.Dialer, o.OnConnect
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dialed, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			c = conn.Of(dialed)
			return &lent{dialed, &taken}, nil
		}
		o.OnConnect = func(ctx context.Context, rc *redis.Conn) error {
			if err := greet(ctx, rc); err != nil {
				return err
			}
			taken.Store(true)
			return errTaken
		}
		o.ReadBufferSize, o.WriteBufferSize = 1<<10, 1<<10
		o.Protocol = 3 // go-redis does without it where HELLO is refused
	})
	if err != nil {
		return nil, err
	}
	err = own.Ping(ctx).Err() // is never sent
	_ = own.Close()
	switch said := conn.Said(err); {
	case taken.Load():
		c.SetStrict(false)
		return c, c.SetDeadline(time.Time{})
	case conn.IsReply(said):
		return nil, conn.LoginRefused(said)
	}
	return nil, err
}

// lent is a connection that go-redis has until it was taken.
type lent struct {
	net.Conn
	taken *atomic.Bool
}

// Close closes it if it was not taken.
func (c *lent) Close() error {
	if c.taken.Load() {
		return nil
	}
	return c.Conn.Close()
}
