package node

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/flightlock/flightlock/internal/redistest"
)

// fakeSocket counts what costs a system call or a timer.
type fakeSocket struct {
	net.Conn
	size, looks          int // size: of what a read brings
	err                  error
	all, reading, writes []time.Time // deadlines that were set
}

func (s *fakeSocket) Read([]byte) (int, error)    { return s.size, s.err }
func (s *fakeSocket) Write(b []byte) (int, error) { return len(b), nil }
func (s *fakeSocket) SyscallConn() (syscall.RawConn, error) {
	s.looks++
	return nothing{}, nil
}
func (s *fakeSocket) SetDeadline(t time.Time) error {
	s.all = append(s.all, t)
	return nil
}
func (s *fakeSocket) SetReadDeadline(t time.Time) error {
	s.reading = append(s.reading, t)
	return nil
}
func (s *fakeSocket) SetWriteDeadline(t time.Time) error {
	s.writes = append(s.writes, t)
	return nil
}

// wantLook reports whether go-redis' look reaches the socket.
func wantLook(t *testing.T, when string, c *conn, s *fakeSocket, want bool) {
	t.Helper()
	before := s.looks
	if _, err := c.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	if got := s.looks > before; got != want {
		t.Errorf("%s: looked at the socket: %v, want %v", when, got, want)
	}
}

// A connection is not looked at for a moment after a read that brought all there was, and
// always after anything else.
func TestAConnectionIsLookedAtAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeSocket{size: 5}
		c, b := &conn{socket: s}, make([]byte, 10)
		wantLook(t, "new", c, s, true)
		read := func(size int, err error) {
			s.size, s.err = size, err
			if n, got := c.Read(b); n != size || got != err {
				t.Fatalf("read %d, %v, want %d, %v", n, got, size, err)
			}
		}
		read(5, nil)
		wantLook(t, "after an answer", c, s, false)
		time.Sleep(trusted - 1)
		wantLook(t, "a moment later", c, s, false)
		time.Sleep(1)
		wantLook(t, "after a pause", c, s, true)
		read(10, nil)
		wantLook(t, "when there may be more", c, s, true)
		read(5, nil)
		read(3, errors.New("cut"))
		wantLook(t, "after an error", c, s, true)
	})
}

// A deadline is never early, at most a sixteenth late, and set seldom.
func TestDeadlinesAreSetSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 160 * time.Millisecond
		for name, way := range map[string]func(*conn, *fakeSocket) (set func(time.Time) error, seen *[]time.Time){
			"read": func(c *conn, s *fakeSocket) (func(time.Time) error, *[]time.Time) {
				return c.SetReadDeadline, &s.reading
			},
			"write": func(c *conn, s *fakeSocket) (func(time.Time) error, *[]time.Time) {
				return c.SetWriteDeadline, &s.writes
			},
		} {
			s := &fakeSocket{}
			set, seen := way(&conn{socket: s}, s)
			move := func(at time.Time) (got time.Time) {
				if err := set(at); err != nil {
					t.Fatal(err)
				}
				return (*seen)[len(*seen)-1]
			}
			for range 1000 {
				at := time.Now().Add(timeout)
				if got := move(at); got.Before(at) || got.After(at.Add(timeout/16)) {
					t.Fatalf("%s: the deadline is %v after what was wanted", name, got.Sub(at))
				}
				time.Sleep(time.Millisecond)
			}
			if got := len(*seen); got > 100 {
				t.Errorf("%s: set %d times", name, got)
			}
			sooner := time.Now().Add(timeout / 2)
			if got := move(sooner); got.Before(sooner) || got.After(sooner.Add(timeout/32)) {
				t.Errorf("%s: a sooner deadline was set %v after it", name, got.Sub(sooner))
			}
			for _, at := range []time.Time{time.Now().Add(-1), {}} {
				if got := move(at); !got.Equal(at) {
					t.Errorf("%s: set to %v, want %v", name, got, at)
				}
			}
		}
	})
}

// Deadlines that were lifted between two commands do not end a wait that has none, nor the look.
func TestLiftedDeadlinesAreLifted(t *testing.T) {
	waits := map[string]func(*conn) error{
		"read":  func(c *conn) error { _, err := c.Read(make([]byte, 10)); return err },
		"write": func(c *conn) error { _, err := c.Write(make([]byte, 10)); return err },
		"look":  func(c *conn) error { _, err := c.SyscallConn(); return err },
	}
	for name, wait := range waits {
		s := &fakeSocket{}
		c := &conn{socket: s}
		last := func() time.Time {
			if name == "write" {
				return s.writes[len(s.writes)-1]
			}
			return s.reading[len(s.reading)-1]
		}
		then := time.Now().Add(time.Minute)
		if err := errors.Join(c.SetReadDeadline(then), c.SetWriteDeadline(then), c.SetDeadline(time.Time{})); err != nil {
			t.Fatal(err)
		}
		if last().IsZero() || len(s.all) != 0 {
			t.Errorf("%s: lifted before that is needed", name)
		}
		if err := wait(c); err != nil || !last().IsZero() {
			t.Errorf("%s: error %v, under a deadline at %v", name, err, last())
		}
		if err := c.SetReadDeadline(then); err != nil || len(s.reading) < 2 && name != "write" {
			t.Errorf("%s: error %v, and the deadline is not set again", name, err)
		}
	}
}

// looked is a connection in memory that counts looks.
type looked struct {
	net.Conn
	n *atomic.Int64
}

func (l looked) SyscallConn() (syscall.RawConn, error) {
	l.n.Add(1)
	return nothing{}, nil
}

// go-redis does not look at a connection between commands that follow upon each other, and does
// after a pause.
func TestLooksBetweenCommands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		var looks atomic.Int64
		n := newAlone(t, m.Client(t, func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := m.Dial(ctx, network, addr)
				return looked{c, &looks}, err
			}
		}), time.Second)
		n.Own()
		exchange := func() {
			a := newAttempt(t, n, "k")
			a.acquireHere().want(t, Granted)
			a.releaseHere().want(t, Deleted)
		}
		exchange()
		synctest.Wait() // until the lane is idle again
		exchange()      // on the connection of callers
		looks.Store(0)
		for range 10 {
			exchange()
		}
		if got := looks.Load(); got != 0 {
			t.Errorf("%d looks without a pause", got)
		}
		time.Sleep(trusted)
		exchange()
		if got := looks.Load(); got != 1 {
			t.Errorf("%d looks after a pause, want 1", got)
		}
	})
}

// A connection that has died in a pause is not used: the request goes on another, and is not in doubt.
func TestAConnectionThatDiedInAPauseIsNotUsed(t *testing.T) {
	var conns []*net.TCPConn
	c := redistest.MiniClient(t, redistest.StartMini(t), func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				conns = append(conns, c.(*net.TCPConn))
			}
			return c, err
		}
	})
	n := newAlone(t, c, time.Second)
	n.Own()
	warm := newAttempt(t, n, "k")
	warm.acquire().want(t, Granted)
	warm.release().want(t, Deleted)
	before := len(conns)
	for _, c := range conns {
		_ = c.CloseRead() // as if the server had closed it
	}
	time.Sleep(2 * trusted) // the pause
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.release().want(t, Deleted)
	if len(conns) == before {
		t.Error("no new connection")
	}
	wantDebts(t, n, 0)
}
