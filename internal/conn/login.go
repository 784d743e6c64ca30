package conn

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

// ErrLogin reports a server that can be reached and refuses the login: the password is wrong, the
// user is disabled, all connections that it allows are in use, or it is not Redis.
var ErrLogin = errors.New("login refused")

// LoginRefused wraps the answer of a server to a login, or to a command before one, in ErrLogin. A server that is
// BUSY with a script refuses nearly everything, whoever asks.
func LoginRefused(answer error) error {
	if HasCode(answer, "BUSY") {
		return answer
	}
	return fmt.Errorf("%w: %w", ErrLogin, answer)
}

// NotLoggedIn reports whether a server refused a command because the connection has no login, as
// when the client has no password.
func NotLoggedIn(err error) bool { return HasCode(err, "NOAUTH") }

// Probe reports whether a server accepts a login with c's options and answers a PING and a script: nil,
// ErrLogin, or the reason why it could not be reached. It ends with ctx, or when a read has taken timeout.
//
// A server whose writes are paused (CLIENT PAUSE WRITE, which FAILOVER does as well) answers a PING, but no
// script. The script is one that no server knows: NOSCRIPT is an answer.
//
// It uses a new connection. A pooled one may have logged in before, and continue to work while every
// new login is refused. dials is as for DialOnce.
func Probe(ctx context.Context, c *redis.Client, timeout time.Duration, dials Limit) error {
	var in atomic.Bool
	own, err := DialOnce(ctx, c, timeout, dials, func(o *redis.Options) {
		greet := o.OnConnect
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
	if err != nil {
		return err
	}
	defer own.Close()
	err = own.Ping(ctx).Err()
	switch said := own.Said(); {
	case err == nil, IsReply(err) && in.Load() && !NotLoggedIn(err): // a refused PING is an answer
		if err = own.EvalSha(ctx, unknownScript, nil).Err(); IsReply(err) {
			return nil
		}
		return err
	case IsReply(err):
		return LoginRefused(err)
	case !in.Load() && said != nil && !TimedOut(err):
		return LoginRefused(said)
	}
	return err
}

const unknownScript = "0000000000000000000000000000000000000000"

// lastError is the last reply that a server sent on a connection, if that was an error; else empty. The refusal of
// CLIENT SETINFO or SETNAME, by a server that does not know it or by an ACL, is none.
// A server whose connections are all in use (maxclients) sends an error and closes the connection;
// go-redis continues with the handshake, and reports only that the connection was closed.
type lastError struct{ text atomic.Pointer[string] }

func (l *lastError) error() error {
	if text := l.text.Load(); text != nil && *text != "" {
		return ServerError(*text)
	}
	return nil
}

// recordingConn is a connection that records lastError.
type recordingConn struct {
	net.Conn
	last *lastError
}

func (c *recordingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		text, refused := strings.CutPrefix(string(p[:n]), "-")
		line, _, _ := strings.Cut(text, "\r\n")
		lower := strings.ToLower(line)
		if !refused || strings.Contains(lower, "setinfo") || strings.Contains(lower, "setname") { // the login goes on
			line = ""
		}
		c.last.text.Store(&line)
	}
	return n, err
}
