package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

// errTaken ends go-redis' handshake, when the connection is ours.
var errTaken = errors.New("link: the connection was taken")

// dialAny makes a connection, by one dial, or where that hangs, by the first of several that succeeds. What
// was sent to a network that loses everything is sent again after a second, and more; a dial that begins when
// the network is back takes no longer than usual. So there is another one, now and then, while something has
// waited for too long, and when Hurry is called.
func (l *Link) dialAny() (*conn.Conn, error) {
	ctx, cancel := context.WithCancel(l.life)
	type result struct {
		c     *conn.Conn
		err   error
		first bool // of the first dial, which has the most time
	}
	var failed error // the first one has, so that there will be no more
	results, running := make(chan result, hurriedDial*dialsPerTimeout+2), 0
	start := func(most time.Duration, may hanging) {
		first := running == 0
		running++
		l.wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, most)
			defer cancel()
			c, err := conn.Await(ctx, may.logins, func() (*conn.Conn, error) { return l.dial(ctx, may.dials) }, l.drop)
			results <- result{c, err, first} // there is room
		})
	}
	began := time.Now()
	l.mu.Lock()
	l.hurried = false // this is the dial
	l.mu.Unlock()
	start(max(2*conn.DialTimeout, conn.DialTimeout+4*l.o.Timeout), l.mayHang)
	defer func() { // the others are late
		cancel()
		late := running
		l.wg.Go(func() {
			for range late {
				l.drop((<-results).c)
			}
		})
	}()
	every := l.o.Timeout / dialsPerTimeout
	again := time.NewTicker(every)
	defer again.Stop()
	for {
		select {
		case <-again.C:
			l.mu.Lock()
			hurried := l.hurried || l.queuedLocked() > 0 && time.Since(began) >= hurriedDial*l.o.Timeout
			l.hurried = false
			l.mu.Unlock()
			if hurried && failed == nil && running <= hurriedDial*dialsPerTimeout {
				start(hurriedDial*l.o.Timeout, l.mayHurry)
			}
		case r := <-results:
			running--
			if r.err == nil {
				return r.c, nil
			}
			if r.first {
				failed = r.err
			}
			if running == 0 {
				return nil, failed
			}
		case <-l.life.Done():
			return nil, ErrClosed
		}
	}
}

// hanging limits how many dials may hang at once, and how many logins: with a dialer of the user's, a
// provider of credentials, or an OnConnect that ignores its ctx.
type hanging struct{ dials, logins conn.Limit }

func newHanging(n int) hanging { return hanging{conn.NewLimit(n), conn.NewLimit(n)} }

// drop closes a connection that nobody needs, if there is one.
func (l *Link) drop(c *conn.Conn) {
	if c != nil {
		_ = c.Close()
	}
}

// dial makes a connection, and logs in: go-redis does both, with its TLS, its credentials and the user's
// functions, and within our deadlines. Then the connection is ours, and go-redis' client is closed.
func (l *Link) dial(ctx context.Context, dials conn.Limit) (*conn.Conn, error) {
	var c *lent
	var connecting time.Duration
	own, err := conn.DialOnce(ctx, l.o.Of, l.o.Timeout, dials, func(o *redis.Options) {
		dial, greet := o.Dialer, o.OnConnect
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			began := time.Now()
			dialed, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			c, connecting = &lent{Conn: dialed}, time.Since(began)
			return c, nil
		}
		o.OnConnect = func(ctx context.Context, rc *redis.Conn) error {
			if err := greet(ctx, rc); err != nil {
				return err
			}
			c.taken.Store(true)
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
	case c.taken.Load():
		ours := c.Conn.(*conn.Conn)
		ours.SetStrict(false)
		ours.RESP3, ours.Name = c.first == '%', own.Name
		if err := ours.SetDeadline(time.Time{}); err != nil {
			l.drop(ours)
			return nil, err
		}
		return ours, nil
	case conn.IsReply(said):
		return nil, conn.LoginRefused(said)
	case conn.TimedOut(err):
		return nil, fmt.Errorf("no answer to the login within %v, which is NodeTimeout; to connect took %v: %w",
			l.o.Timeout, connecting.Round(time.Microsecond), err)
	}
	return nil, err
}

// lent is a connection that go-redis has until it was taken.
type lent struct {
	net.Conn
	taken  atomic.Bool
	first  byte  // what the server has said begins with it: the answer to HELLO, a map if that is RESP3's
	unsent error // why the login could not be written
}

// Write of a login that fails says that it was written, so that go-redis reads on: a server that closes a
// connection has said why before, in an alert of TLS or an error.
func (c *lent) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil && !conn.TimedOut(err) && !c.taken.Load() {
		c.unsent = err
		return len(p), nil
	}
	return n, err
}

func (c *lent) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.first == 0 {
		c.first = p[0]
	}
	if c.unsent != nil && errors.Is(err, io.EOF) {
		err = c.unsent // the server has said nothing
	}
	return n, err
}

// Close closes it if it was not taken.
func (c *lent) Close() error {
	if c.taken.Load() {
		return nil
	}
	return c.Conn.Close()
}
