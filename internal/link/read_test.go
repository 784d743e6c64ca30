package link

import (
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// readers notes which goroutine begins to read.
type readers struct {
	mu   sync.Mutex
	last string
	all  []string // without repetitions
}

func (x *readers) wrap(c net.Conn) net.Conn {
	return quietConn(c, &redistest.Conn{Conn: c, OnRead: func(c net.Conn, p []byte) (int, error) {
		stack := make([]byte, 64<<10)
		who := "go-redis"
		switch stack = stack[:runtime.Stack(stack, false)]; {
		case strings.Contains(string(stack), "(*Session).readFor"):
			who = "caller"
		case strings.Contains(string(stack), "(*Session).serve"):
			who = "session"
		}
		x.mu.Lock()
		if who != x.last {
			x.last, x.all = who, append(x.all, who)
		}
		x.mu.Unlock()
		return c.Read(p)
	}})
}

// want compares who has begun to read since the last time.
func (x *readers) want(t *testing.T, who string) {
	t.Helper()
	synctest.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	if got := strings.Join(x.all, ", "); got != who {
		t.Errorf("read by %s, want %s", got, who)
	}
	x.last, x.all = "", nil
}

// callersRead is link with CallersRead, when the link is open and at rest.
func callersRead(t *testing.T, test func(t *testing.T, r *rig, x *readers)) {
	t.Helper()
	var x *readers
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		x.want(t, "go-redis, session")
		test(t, r, x)
	}, func(r *rig, o *Options) {
		x = &readers{}
		o.CallersRead, r.s.wrap = true, x.wrap
	})
}

// A caller that waits, and whose call is the only one, reads its reply itself. Any other call is read by the
// session's goroutine; and when it is at rest again, a caller reads.
func TestACallerReadsItsReply(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		for _, name := range []string{"a", "b"} {
			r.waits(name)
			r.want(name, "back from "+name)
			x.want(t, "caller")
		}
		r.do("c")
		r.want("c")
		x.want(t, "session")
		r.waits("d")
		r.want("d", "back from d")
		x.want(t, "caller")
	})
}

// Others send while a caller reads, and wait for nothing that it does; it reads for none of them.
func TestOthersSendWhileACallerReads(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		r.s.set(func() { r.s.held = true })
		r.waits("a")
		r.do("b")
		r.waits("c")
		r.want("back from c")
		x.want(t, "caller")
		r.s.setAnswer(func(_ *client, cmd []string) string {
			if cmd[0] == "a" { // all in one piece
				return bulkOf("a") + bulkOf("b") + bulkOf("c")
			}
			return ""
		})
		r.s.set(func() { r.s.held = false })
		r.wantSorted("a", "b", "back from a", "c")
		x.want(t, "") // what was read for a is passed on for all
		r.do("d")
		synctest.Wait()
		x.want(t, "session")
	})
}

// A caller that has waited for Timeout goes, before its call is late; what it has read of the answer is not
// lost.
func TestACallerReadsForTimeout(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		rest := make(chan struct{})
		r.s.setAnswer(func(c *client, cmd []string) string {
			if cmd[0] != "a" {
				return bulkOf(cmd[0])
			}
			c.write("$1\r\n")
			<-rest
			return "a\r\n"
		})
		r.waits("a")
		x.want(t, "caller")
		time.Sleep(timeout)
		r.want("back from a")
		time.Sleep(isLate - timeout)
		r.want("a is late")
		x.want(t, "session")
		close(rest)
		r.want("a")
		r.waits("b")
		r.want("b", "back from b")
		x.want(t, "caller")
	})
}

// Whatever ends a session, or has it boot again, does so while a caller reads, and the next call is answered.
func TestWhatHappensWhileACallerReads(t *testing.T) {
	for name, test := range map[string]struct {
		does   func(r *rig)
		events []string
		dials  int
	}{
		"Reboot": {func(r *rig) { r.Reboot() }, []string{"a", "back from a"}, 1},
		"Moved":  {func(r *rig) { r.Moved(errRefused) }, []string{"a", "back from a"}, 2},
		"Drop":   {func(r *rig) { r.Session().Drop(errRefused) }, []string{"a is lost: refused", "back from a"}, 2},
		"cut":    {func(r *rig) { r.s.cut() }, []string{"a is lost: " + closedEOF, "back from a"}, 2},
		"silence": {func(*rig) { time.Sleep(10 * timeout) }, []string{
			"a is late", "a is lost: " + silent, "back from a", "suspended: <nil>", "suspended: " + silent,
		}, 2},
		"NOSCRIPT": {func(r *rig) {
			r.s.setAnswer(func(_ *client, cmd []string) string {
				r.s.setAnswer(newServer(r.t).answer)
				return "-NOSCRIPT\r\n"
			})
		}, []string{"a", "a again", "back from a"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			callersRead(t, func(t *testing.T, r *rig, x *readers) {
				time.Sleep(time.Minute)
				r.s.set(func() { r.s.held = true })
				r.waits("a")
				x.want(t, "caller")
				go func() {
					time.Sleep(4 * timeout)
					r.s.set(func() { r.s.held = false })
				}()
				test.does(r)
				if name == "Reboot" || name == "Moved" || name == "NOSCRIPT" {
					r.s.set(func() { r.s.held = false })
				}
				time.Sleep(time.Second)
				r.wantSorted(test.events...)
				r.waits("b")
				r.wantSorted("b", "back from b")
				if n := r.s.dialled(); n != test.dials {
					t.Errorf("%d dials, want %d", n, test.dials)
				}
			})
		})
	}
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		r.s.set(func() { r.s.held = true })
		r.waits("a")
		r.Close()
		r.wantSorted("a is lost: client closed", "back from a")
	})
}

// Nobody reads from a link at rest. What has arrived meanwhile is found by the next call, before it is
// written: an end of the connection loses nothing, and a message goes first.
func TestWhatArrivesAtRest(t *testing.T) {
	for _, waits := range []bool{false, true} {
		callersRead(t, func(t *testing.T, r *rig, x *readers) {
			send := func(name string) {
				r.Do(&call{r: r, name: name}, waits)
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Minute)
			r.s.cut()
			synctest.Wait()
			send("a")
			r.want("a")
			x.want(t, "session, go-redis, session")
			r.s.mu.Lock()
			c := r.s.clients[0]
			r.s.mu.Unlock()
			c.write(pushOf("message"))
			r.want()
			send("b")
			r.want("push message", "b")
			half := pushOf("message", "inbox")
			c.write(half[:10])
			r.s.set(func() { r.s.held = true })
			go send("c") // what has arrived is read, and it is written
			time.Sleep(time.Millisecond)
			c.write(half[10:])
			r.want("push message inbox")
			r.s.set(func() { r.s.held = false })
			r.wantSent("boot,a,b,c")
			r.want("c")
			time.Sleep(time.Millisecond)
		})
	}
}

// What a caller has read behind its reply is passed on, although no call has no answer.
func TestAMessageBehindAReply(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		r.s.setAnswer(func(_ *client, cmd []string) string { return bulkOf(cmd[0]) + pushOf("message") })
		r.waits("a")
		r.wantSorted("a", "back from a", "push message")
		x.want(t, "caller")
	})
}

// A connection of which one cannot see whether anything has arrived is always read.
func TestWhatCannotBeSeenIsRead(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.mu.Lock()
		c := r.s.clients[0]
		r.s.mu.Unlock()
		c.write(pushOf("message"))
		r.want("push message")
		time.Sleep(time.Minute)
		r.s.cut()
		synctest.Wait()
		if r.Session() != nil {
			t.Error("its end was not noticed")
		}
	}, func(r *rig, o *Options) {
		o.CallersRead = true
		r.s.wrap = func(c net.Conn) net.Conn { return &redistest.Conn{Conn: c} }
	})
}

// again is a call that is sent once more by its Reply.
type again struct {
	call
	sent bool
}

func (c *again) Reply(s *Session, v *Value) bool {
	if !c.sent {
		c.sent = true
		c.r.Do(c, true)
		return false
	}
	return c.call.Reply(s, v)
}

// A caller reads for what it has sent, and not for what is sent by the reply to that: it takes no longer than
// Timeout.
func TestACallerReadsOneReply(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		r.s.setAnswer(func(_ *client, cmd []string) string {
			time.Sleep(timeout / 5 * 4)
			return bulkOf(cmd[0])
		})
		go func() {
			r.Do(&again{call: call{r: r, name: "a"}}, true)
			r.note("back")
		}()
		time.Sleep(timeout)
		r.want("back")
		x.want(t, "caller, session")
		time.Sleep(timeout)
		r.want("a")
	})
}
