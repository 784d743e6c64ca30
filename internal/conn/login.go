package conn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrLogin reports a server that can be reached and refuses the login: the password is wrong, the
// user is disabled, all connections that it allows are in use, or it is not Redis.
var ErrLogin = errors.New("login refused")

// LoginRefused wraps the answer of a server to a login, or to a command before one, in ErrLogin. A server
// that is BUSY with a script refuses nearly everything, whoever asks.
func LoginRefused(answer error) error {
	if HasCode(answer, "BUSY") {
		return answer
	}
	return fmt.Errorf("%w: %w", ErrLogin, answer)
}

// NotLoggedIn reports whether a server refused a command because the connection has no login, as
// when the client has no password.
func NotLoggedIn(err error) bool { return HasCode(err, "NOAUTH") }

// RefusedLogin is the answer by which a server refuses a login with c's options, in ErrLogin; nil: it does
// not, or could not be asked. It uses a new connection: a pooled one may have logged in before, and continue
// to work while every new login is refused. Each answer must arrive within step.
func RefusedLogin(ctx context.Context, c *redis.Client, step time.Duration) error {
	own, err := DialOnce(ctx, c.Options(), step, NewLimit(1), func(*redis.Options) {})
	if err != nil {
		return nil
	}
	defer own.Close()
	err = own.Ping(ctx).Err()
	// it refuses PING alone
	said, answers := Said(err), IsReply(err) && own.dialed.greeted.Load() && !NotLoggedIn(err)
	if !IsReply(said) || answers {
		return nil
	}
	return LoginRefused(said)
}

// refusal is the end of a connection that the server has closed after an error reply, before or instead of a
// login: because all its connections are in use (maxclients), or it is in protected mode. go-redis continues
// with its handshake after some of these replies, or has begun to write before it reads them, and would
// report no more than a broken pipe, a reset or the end of the stream.
//
// It is no redis.Error, after which go-redis would continue to use the connection.
type refusal struct {
	said ServerError
	end  error
}

func (r *refusal) Error() string { return r.said.Error() + ", and the server closed the connection" }

// Unwrap returns a list because go-redis unwraps the errors of a handshake, by errors.Unwrap.
func (r *refusal) Unwrap() []error { return []error{r.end} }

// Said is the error reply after which the server has closed the connection, if that is why err ended it, and
// else err.
func Said(err error) error {
	var r *refusal
	if errors.As(err, &r) {
		return r.said
	}
	return err
}

// noteRefusal notes whether what has arrived is an error, during the handshake.
func (c *Conn) noteRefusal(arrived []byte) {
	switch {
	case c.refused.Load() == nil:
	case c.greeted.Load():
		c.refused.Store(nil)
	default:
		text, refused := strings.CutPrefix(string(arrived), "-")
		line, _, _ := strings.Cut(text, "\r\n")
		if !refused {
			line = ""
		}
		c.refused.Store(&line)
	}
}

// unanswered is the end of a connection on which the server has closed it without an answer to the first
// command.
type unanswered struct{ end error }

func (u *unanswered) Error() string {
	return "the connection was closed at HELLO, the first command, as by a server that expects TLS, or a " +
		"proxy that does not know HELLO (twemproxy): " + u.end.Error()
}

// Unwrap returns a list, as that of a refusal.
func (u *unanswered) Unwrap() []error { return []error{u.end} }

// withRefusal is err, which has ended the connection, with what the server has said before.
func (c *Conn) withRefusal(err error) error {
	said := c.refused.Load()
	switch {
	case err == nil, said == nil, TimedOut(err):
		return err
	case *said != "":
		return &refusal{ServerError(*said), err}
	case c.read.Load() == 0 && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		return &unanswered{err}
	}
	return err
}

// readRefusal is err, for which a write has failed, with what the server has said before. That has arrived,
// and has not been read if the write was the first one. An alert of TLS is what the server says, too.
func (c *Conn) readRefusal(err error) error {
	_ = c.Conn.SetReadDeadline(time.Now().Add(MinGrace)) // an end of the connection needs none of it
	var b [4 << 10]byte
	for {
		n, end := c.Conn.Read(b[:])
		if n > 0 {
			c.noteRefusal(b[:n])
		}
		var alert *net.OpError
		if errors.As(end, &alert) && alert.Op == "remote error" {
			return end
		}
		if end != nil {
			return c.withRefusal(err)
		}
	}
}
