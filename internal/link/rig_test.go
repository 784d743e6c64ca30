package link

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const timeout = 50 * time.Millisecond

// server is one in memory. It answers each command by answer, in order, unless it is held.
type server struct {
	t      *testing.T
	answer func(c *client, cmd []string) string // RESP; "": nothing
	wrap   func(net.Conn) net.Conn              // changes the client's end of a connection; nil: does not

	mu      sync.Mutex // guards what follows
	cond    sync.Cond
	refuses error // dials
	hangs   bool  // dials do, until they are given up
	resp2   bool  // it knows nothing else. Set before the first dial
	held    bool
	dials   int
	got     []string // commands, but those of go-redis' handshake, their arguments with spaces between
	clients []*client
	running sync.WaitGroup
}

// client is a connection to a server.
type client struct {
	s    *server
	conn net.Conn
	mu   sync.Mutex // writes whole replies
}

func newServer(t *testing.T) *server {
	s := &server{t: t}
	s.cond.L = &s.mu
	s.answer = func(_ *client, cmd []string) string { return bulkOf(strings.Join(cmd, " ")) }
	return s
}

func bulkOf(text string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text) }

func pushOf(items ...string) string {
	b := fmt.Sprintf(">%d\r\n", len(items))
	for _, item := range items {
		b += bulkOf(item)
	}
	return b
}

func (s *server) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dials++
	if s.hangs {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return nil, ctx.Err()
	}
	if s.refuses != nil {
		return nil, s.refuses
	}
	ours, theirs := redistest.Pipe()
	c := &client{s: s, conn: theirs}
	s.clients = append(s.clients, c)
	s.running.Go(c.serve)
	if s.wrap != nil {
		return s.wrap(ours), nil
	}
	return ours, nil
}

// serve reads commands, and answers them on another goroutine, so that neither waits for the other.
func (c *client) serve() {
	s := c.s
	cmds := make(chan []string, 1<<16)
	s.running.Go(func() {
		for cmd := range cmds {
			s.mu.Lock()
			for s.held {
				s.cond.Wait()
			}
			s.mu.Unlock()
			switch strings.ToLower(cmd[0]) {
			case "hello":
				if s.resp2 {
					c.write("-ERR unknown command 'HELLO'\r\n")
					continue
				}
				c.write("%1\r\n+proto\r\n:3\r\n")
				continue
			case "client":
				c.write("+OK\r\n")
				continue
			}
			s.mu.Lock()
			s.got = append(s.got, strings.Join(cmd, " "))
			answer := s.answer
			s.mu.Unlock()
			c.write(answer(c, cmd))
		}
	})
	r := bufio.NewReader(c.conn)
	for {
		cmd, err := readCommand(r)
		if err != nil {
			close(cmds)
			return
		}
		cmds <- cmd
	}
}

func (c *client) write(reply string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = io.WriteString(c.conn, reply)
}

func readCommand(r *bufio.Reader) (cmd []string, err error) {
	number := func(kind byte) (int, error) {
		line, err := r.ReadString('\n')
		if err != nil || len(line) < 4 || line[0] != kind {
			return 0, errors.Join(err, errors.New("no "+string(kind)))
		}
		return strconv.Atoi(line[1 : len(line)-2])
	}
	n, err := number('*')
	for range n {
		size, err := number('$')
		if err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		cmd = append(cmd, string(b[:size]))
	}
	return cmd, err
}

func (s *server) setAnswer(answer func(c *client, cmd []string) string) {
	s.set(func() { s.answer = answer })
}

// set changes the server's state.
func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.cond.Broadcast()
}

// cut ends its connections.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		c.conn.Close()
	}
	s.clients = nil
}

// each calls f with each of its connections.
func (s *server) each(f func(*client)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		f(c)
	}
}

// commands are those that it has got since the last time.
func (s *server) commands() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := strings.Join(s.got, ",")
	s.got = nil
	return got
}

func (s *server) dialled() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dials
}

// rig is a link to a server.
type rig struct {
	*Link
	t *testing.T
	s *server

	mu     sync.Mutex
	events []string // what has become of calls and of the link
}

func (r *rig) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf(format, args...))
}

// want waits until nothing happens any more, and compares what has happened since the last time.
func (r *rig) want(events ...string) {
	r.t.Helper()
	if got, want := strings.Join(r.happened(), "\n"), strings.Join(events, "\n"); got != want {
		r.t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// happened waits until nothing happens any more, and returns what has happened since the last time.
func (r *rig) happened() (events []string) {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	events, r.events = r.events, nil
	return events
}

// wantSorted is want where the order does not matter.
func (r *rig) wantSorted(events ...string) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	slices.Sort(r.events)
	r.mu.Unlock()
	r.want(events...)
}

func (r *rig) wantSent(cmds string) {
	r.t.Helper()
	synctest.Wait()
	if got := r.s.commands(); got != cmds {
		r.t.Errorf("the server got %q, want %q", got, cmds)
	}
}

// link runs test in virtual time with a link whose boot is the command "boot".
func link(t *testing.T, test func(t *testing.T, r *rig), change ...func(*rig, *Options)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, s: newServer(t)}
		o := Options{
			Of: &redis.Options{Addr: "10.0.0.1:6379", Dialer: r.s.dial}, Timeout: timeout,
			Boot: func(s *Session) error {
				_, err := s.Exec("boot")
				return err
			},
			Changed: func(err error) { r.note("suspended: %v", err) },
			Pushed: func(_ *Session, items []Value) {
				text := "push"
				for _, item := range items {
					text += " " + string(item.Text)
				}
				r.note("%s", text)
			},
		}
		for _, f := range change {
			f(r, &o)
		}
		r.Link = New(o)
		test(t, r)
		r.s.set(func() { r.s.held = false })
		r.Close()
		r.s.cut()
		r.s.running.Wait()
	})
}

// Connect has the link made.
func (r *rig) Connect() {
	r.Link.mu.Lock()
	defer r.Link.mu.Unlock()
	r.startLocked()
}

// opened has the link be open.
func (r *rig) opened() {
	r.t.Helper()
	r.Connect()
	r.wantSent("boot")
	r.want()
}

// call is one of a test.
type call struct {
	r        *rig
	name     string
	patient  bool
	urgent   bool
	obsolete func() bool
	encoded  func()
}

func (r *rig) do(names ...string) {
	for _, name := range names {
		name, patient := strings.CutSuffix(name, "!")
		r.Do(&call{r: r, name: name, patient: patient}, false)
	}
}

// waits has a goroutine send a call, and wait for it. What it does after that is noted.
func (r *rig) waits(name string) {
	go func() {
		r.Do(&call{r: r, name: name}, true)
		r.note("back from %s", name)
	}()
	synctest.Wait()
}

func (c *call) Encode(b []byte, _ *Session) ([]byte, bool) {
	if c.obsolete != nil && c.obsolete() {
		return nil, false
	}
	if c.encoded != nil {
		c.encoded()
	}
	return AppendCommand(b, c.name), true
}

func (c *call) Replies() int { return 1 }

func (c *call) Patient() bool { return c.patient }

func (c *call) Urgent() bool { return c.urgent }

func (c *call) Late() { c.r.note("%s is late", c.name) }

func (c *call) Reply(_ *Session, v *Value) bool {
	if v.Kind == Error && strings.HasPrefix(string(v.Text), "NOSCRIPT") {
		c.r.note("%s again", c.name)
		return true
	}
	if got := string(v.Text); got != c.name {
		c.r.note("%s got %s", c.name, got)
	} else {
		c.r.note("%s", c.name)
	}
	return false
}

func (c *call) Fail(how Delivery, err error) {
	if how == Lost {
		c.r.note("%s is lost: %v", c.name, err)
	} else {
		c.r.note("%s was not sent: %v", c.name, err)
	}
}

// stuck makes connections on which the next write can be held up, until it fails.
type stuck struct {
	next  atomic.Pointer[stuckWrite]
	after atomic.Int32 // writes to a connection after one that has failed
}

type stuckWrite struct {
	fails chan struct{} // closed: it fails
	wrote int           // after so many bytes
}

func (x *stuck) wrap(c net.Conn) net.Conn {
	var failed atomic.Bool
	return quietConn(c, &redistest.Conn{Conn: c, OnWrite: func(c net.Conn, p []byte) (int, error) {
		if failed.Load() {
			x.after.Add(1)
		}
		next := x.next.Swap(nil)
		if next == nil {
			return c.Write(p)
		}
		<-next.fails
		_, _ = c.Write(p[:next.wrote])
		failed.Store(true)
		return next.wrote, errRefused
	}})
}

type quiet interface{ Quiet() bool }

// quietConn is the connection changed, which is as quiet as c.
func quietConn(c, changed net.Conn) net.Conn {
	return struct {
		net.Conn
		quiet
	}{changed, c.(quiet)}
}
