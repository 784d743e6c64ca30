package redistest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

// echoer is a target that sends everything back and remembers it.
type echoer struct {
	mu   sync.Mutex
	seen bytes.Buffer
}

func startEcho(t *testing.T) (*echoer, *Proxy) {
	t.Helper()
	e := &echoer{}
	h := startHub(t, func(c net.Conn) {
		_ = receive(c, func(b []byte) {
			e.mu.Lock()
			e.seen.Write(b)
			e.mu.Unlock()
			_, _ = c.Write(b)
		})
	})
	return e, StartProxy(t, h.addr())
}

func (e *echoer) got() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.seen.String()
}

func send(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func expectReply(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("reply %q, %v, want %q", got, err, want)
	}
}

// expectNothing waits for a reply for a moment. It is only called after the target is known to have
// replied, so the test does not depend on that moment.
func expectNothing(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read %d bytes, %v, want none", n, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
}

func expectReset(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 100)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("read %d bytes, %v, want a reset", n, err)
	}
}

// Without a fault the proxy forwards and counts, both ends of a connection included.
func TestProxyForwards(t *testing.T) {
	_, p := startEcho(t)
	c := dialRaw(t, p.Addr())
	big := string(bytes.Repeat([]byte("0123456789"), 50_000))
	go func() { _, _ = io.WriteString(c, big) }()
	expectReply(t, c, big)
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
	if n := int64(len(big)); p.Accepted() != 1 || p.BytesUp() != n || p.BytesDown() != n {
		t.Errorf("accepted %d, up %d, down %d", p.Accepted(), p.BytesUp(), p.BytesDown())
	}
}

// A target that does not exist shows as a reset.
func TestProxyWithoutATargetResets(t *testing.T) {
	p := StartProxy(t, RefusedAddr(t))
	c, err := net.Dial("tcp", p.Addr())
	if err == nil { // the reset may be so quick that it hits the connect
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
}

// A proxy that was switched to another target connects new connections to that and leaves the open
// ones alone.
func TestProxyMovesToAnotherTarget(t *testing.T) {
	first, p := startEcho(t)
	second, other := startEcho(t)
	old := dialRaw(t, p.Addr())
	send(t, old, "a")
	expectReply(t, old, "a")
	p.SetTarget(other.Addr())
	moved := dialRaw(t, p.Addr())
	send(t, moved, "b")
	expectReply(t, moved, "b")
	send(t, old, "c")
	expectReply(t, old, "c")
	if first.got() != "ac" || second.got() != "b" {
		t.Errorf("the first target got %q, the second %q", first.got(), second.got())
	}
}

// Delayed replies come late, in order, and a hundred of them as late as one.
func TestDelayIsAPipeline(t *testing.T) {
	_, p := startEcho(t)
	c := dialRaw(t, p.Addr())
	const delay, n = time.Second, 100
	p.SetDelay(delay)
	begin := time.Now()
	var want string
	for i := range n {
		piece := string(rune('A' + i%26))
		want += piece
		send(t, c, piece)
		// One chunk each: the target has replied before the next request is sent.
		Eventually(t, 40*time.Second, "the target has replied", func() bool { return p.BytesDown() == int64(i+1) })
	}
	sent := time.Now()
	expectReply(t, c, want[:1])
	if d := time.Since(begin); d < delay {
		t.Errorf("the first reply after %v", d)
	}
	expectReply(t, c, want[1:])
	if d := time.Since(sent); d > n*delay/2 { // one after the other they would take twice as long
		t.Errorf("all replies %v after the last request", d)
	}
	p.SetDelay(0)
	send(t, c, "x")
	expectReply(t, c, "x")
}

// In a black hole nothing gets through, not even the end of a connection. Later, new connections
// work, and those that lost bytes stay silent.
func TestBlackHoleSwallowsEverything(t *testing.T) {
	e, p := startEcho(t)
	old, idle := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
	send(t, old, "a")
	expectReply(t, old, "a")
	send(t, idle, "b")
	expectReply(t, idle, "b")

	p.BlackHole(true)
	young := dialRaw(t, p.Addr())
	send(t, old, "lost")
	send(t, young, "lost")
	Eventually(t, 10*time.Second, "the requests are swallowed", func() bool { return p.BytesUp() == 10 })
	expectNothing(t, old)
	expectNothing(t, young)

	p.BlackHole(false)
	send(t, idle, "c")
	expectReply(t, idle, "c")
	send(t, old, "mute")
	Eventually(t, 10*time.Second, "the request is swallowed", func() bool { return p.BytesUp() == 15 })
	expectNothing(t, old)
	fresh := dialRaw(t, p.Addr())
	send(t, fresh, "d")
	expectReply(t, fresh, "d")
	if got := e.got(); got != "abcd" {
		t.Errorf("the target got %q", got)
	}
}

// The target executes, the client never receives the reply.
func TestDroppedRepliesStillExecute(t *testing.T) {
	e, p := startEcho(t)
	c := dialRaw(t, p.Addr())
	p.DropReplies(true)
	send(t, c, "a")
	Eventually(t, 40*time.Second, "the target has replied", func() bool { return p.BytesDown() == 1 })
	expectNothing(t, c)
	p.DropReplies(false)
	send(t, c, "b") // its reply would pass for a's
	Eventually(t, 40*time.Second, "the target has replied", func() bool { return p.BytesDown() == 2 })
	expectNothing(t, c)
	fresh := dialRaw(t, p.Addr())
	send(t, fresh, "c")
	expectReply(t, fresh, "c")
	if got := e.got(); got != "abc" {
		t.Errorf("the target got %q", got)
	}
}

// A cut lets exactly n bytes through, over all connections, and happens once.
func TestCutStrikesInTheMiddleOfAReply(t *testing.T) {
	_, p := startEcho(t)
	one, two := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
	p.CutReplies(5)
	send(t, one, "ab")
	expectReply(t, one, "ab")
	send(t, two, "cdefgh")
	expectReply(t, two, "cde")
	expectReset(t, two)
	send(t, one, "more than five")
	expectReply(t, one, "more than five")

	p.CutReplies(0)
	p.CutReplies(-1)
	send(t, one, "x")
	expectReply(t, one, "x")
	p.CutReplies(0)
	send(t, one, "y")
	expectReset(t, one)
}

// ResetAll ends what is open, and only that.
func TestResetAllResets(t *testing.T) {
	_, p := startEcho(t)
	c := dialRaw(t, p.Addr())
	send(t, c, "a")
	expectReply(t, c, "a")
	p.ResetAll()
	expectReset(t, c)
	c = dialRaw(t, p.Addr())
	send(t, c, "b")
	expectReply(t, c, "b")
}

// Refuse keeps new connections out and lets open ones live.
func TestRefuseClosesThePortForAWhile(t *testing.T) {
	_, p := startEcho(t)
	c := dialRaw(t, p.Addr())
	send(t, c, "a")
	expectReply(t, c, "a")
	for range 2 {
		if err := p.Refuse(true); err != nil {
			t.Fatal(err)
		}
		if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial: %v", err)
		}
		if err := errors.Join(p.Refuse(false), p.Refuse(false)); err != nil {
			t.Fatal(err)
		}
	}
	send(t, c, "b")
	expectReply(t, c, "b")
	c = dialRaw(t, p.Addr())
	send(t, c, "c")
	expectReply(t, c, "c")
}

// Held requests go out on release, in order, also those of a client that has left.
func TestHeldRequestsExecuteLate(t *testing.T) {
	e, p := startEcho(t)
	p.HoldRequests()
	dead, live := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
	send(t, dead, "dead")
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	send(t, live, "live")
	Eventually(t, 10*time.Second, "the requests are held", func() bool { return p.BytesUp() == 8 })
	if got := e.got(); got != "" {
		t.Errorf("the target got %q", got)
	}
	p.ReleaseRequests()
	expectReply(t, live, "live")
	Eventually(t, 10*time.Second, "the dead connection's request arrives", func() bool {
		return e.got() == "deadlive" || e.got() == "livedead"
	})
}

// The same with a client that resets and a real server: the SET is executed.
func TestHeldCommandOfADeadConnectionExecutes(t *testing.T) {
	s := StartServer(t)
	p := StartProxy(t, s.Addr())
	p.HoldRequests()
	c := dialRaw(t, p.Addr())
	const cmd = "SET late 1\r\n"
	send(t, c, cmd)
	Eventually(t, 10*time.Second, "the command is held", func() bool { return p.BytesUp() == int64(len(cmd)) })
	if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
	p.ReleaseRequests()
	Eventually(t, 10*time.Second, "the SET is executed", func() bool { return len(s.Keys(t)) == 1 })
}

// Close does not wait for anything that a fault holds back.
func TestProxyClosesInTheMiddleOfEveryFault(t *testing.T) {
	_, p := startEcho(t)
	p.SetDelay(time.Hour)
	delayed := dialRaw(t, p.Addr())
	send(t, delayed, "a")
	Eventually(t, 10*time.Second, "the reply is delayed", func() bool { return p.BytesDown() == 1 })
	p.HoldRequests()
	send(t, dialRaw(t, p.Addr()), "b")
	Eventually(t, 10*time.Second, "the request is held", func() bool { return p.BytesUp() == 2 })
	p.BlackHole(true)
	send(t, dialRaw(t, p.Addr()), "c")
	Eventually(t, 10*time.Second, "the request is swallowed", func() bool { return p.BytesUp() == 3 })
	for range 2 {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	expectReset(t, delayed)
	if err := p.listen(); err == nil {
		t.Error("a closed proxy listens again")
	}
}
