package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrLogin is why a server is suspended that can be reached, but lets nobody in: the password is
// another, the user is off, all connections that it allows are in use, it is no Redis.
var ErrLogin = errors.New("it refuses the login")

// loginRefused says that a server has answered so to a login, or to a command before one.
func loginRefused(answer error) error { return fmt.Errorf("%w: %w", ErrLogin, answer) }

// notLoggedIn reports whether a server refused a command because nobody has logged in on the connection, as
// when the client has no password.
func notLoggedIn(err error) bool { return hasCode(err, "NOAUTH") }

// knock finds out whether a server lets c in and answers: nil, ErrLogin, or why it could not be
// reached. It ends with ctx, or when a read has taken timeout.
//
// It takes a connection of its own. One of the pool may have been let in before, and answer
// as ever when everybody else is turned away.
func knock(ctx context.Context, c *redis.Client, timeout time.Duration) error {
	var in atomic.Bool
	var last lastWords
	own := onceDialled(c, timeout, func(o *redis.Options) {
		dial, greet := o.Dialer, o.OnConnect
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &overheard{conn, &last}, nil
		}
		o.OnConnect = func(ctx context.Context, conn *redis.Conn) error {
			if greet != nil {
				if err := greet(ctx, conn); err != nil {
					return err
				}
			}
			in.Store(true)
			return nil
		}
	})
	defer own.Close()
	err := own.Ping(ctx).Err()
	switch said := last.error(); {
	case err == nil, isReply(err) && in.Load() && !notLoggedIn(err): // that it refuses PING is an answer
		return nil
	case isReply(err):
		return loginRefused(err)
	case !in.Load() && said != nil && !timedOut(err):
		return loginRefused(said)
	}
	return err
}

// lastWords are the error with which a server ended what it said on a connection; empty if that was no error. A
// server whose connections are all in use (maxclients) says so at once and closes, and go-redis goes on with the
// handshake: what it gives is that the connection has ended.
type lastWords struct{ text atomic.Pointer[string] }

func (w *lastWords) error() error {
	if text := w.text.Load(); text != nil && *text != "" {
		return serverError(*text)
	}
	return nil
}

// overheard is a connection of which lastWords are known.
type overheard struct {
	net.Conn
	last *lastWords
}

func (c *overheard) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		text, refused := strings.CutPrefix(string(p[:n]), "-")
		line, _, _ := strings.Cut(text, "\r\n")
		if !refused {
			line = ""
		}
		c.last.text.Store(&line)
	}
	return n, err
}
