package link

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
)

// isLate is when a call is late: its deadline is put off once, as there may be an answer that nobody has had
// time to read.
const isLate = timeout + conn.MinGrace

const (
	silent    = "no answer to anything for three times NodeTimeout"
	suspended = "circuit open: suspended, probing every 250ms: "
	stalled   = "not sent: connection stalled, the requests before this one have no answer"
	closedEOF = "it closed the connection: EOF"
)

var errRefused = errors.New("refused")

// Calls of many goroutines get their own replies, by one connection, and in the order in which each of them
// has sent them.
func TestEachGetsItsReply(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				for j := range 10 {
					r.do(fmt.Sprintf("%d.%d", i, j))
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		next := map[string]int{}
		for _, e := range r.events {
			i, j, _ := strings.Cut(e, ".")
			if j != fmt.Sprint(next[i]) {
				t.Fatalf("%q, want %d", e, next[i])
			}
			next[i]++
		}
		if len(r.events) != 1000 || r.s.dialled() != 1 {
			t.Errorf("%d replies, %d dials", len(r.events), r.s.dialled())
		}
	})
}

// Nothing is sent before the link has booted, and what has waited for that is sent in its order.
func TestNothingIsSentBeforeTheBoot(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.held = true
		r.do("a", "b")
		r.wantSent("")
		r.s.set(func() { r.s.held = false })
		r.do("c")
		r.wantSent("boot,a,b,c")
		r.want("a", "b", "c")
	})
}

// A link whose boot is refused is suspended, as one that cannot be dialled; what waits fails, with the
// reason.
func TestBootRefused(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.setAnswer(func(*client, []string) string { return "-OOM command not allowed\r\n" })
		r.do("a")
		r.want("a was not sent: "+suspended+"OOM command not allowed", "suspended: OOM command not allowed")
		r.do("b")
		r.want("b was not sent: " + suspended + "OOM command not allowed")
		r.s.setAnswer(newServer(t).answer)
		time.Sleep(redialEvery)
		r.want("suspended: <nil>")
		r.do("c")
		r.want("c")
	})
}

// A server without an answer: each call is told that it is late after Timeout, what comes then is refused
// unless it is patient, and after three times Timeout the connection is over. The server is dialled at once.
func TestSilence(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		time.Sleep(time.Minute)
		r.s.set(func() { r.s.held = true })
		r.do("a")
		time.Sleep(timeout / 2)
		r.do("b")
		time.Sleep(isLate - timeout/2)
		r.want("a is late")
		r.do("c", "d!")
		r.want("c was not sent: " + stalled)
		time.Sleep(2*timeout - 1) // the deadline was put off by MinGrace once
		r.want("b is late", "d is late")
		time.Sleep(1)
		r.wantSorted("a is lost: "+silent, "b is lost: "+silent, "d is lost: "+silent, "suspended: "+silent)
		r.s.set(func() { r.s.held = false })
		r.want("suspended: <nil>")
		if n := r.s.dialled(); n != 2 {
			t.Errorf("%d dials", n)
		}
	})
}

// Any answer ends that: a late one is passed on, and what comes after it is sent.
func TestALateAnswer(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		r.do("a")
		time.Sleep(2 * timeout)
		r.want("a is late")
		r.s.set(func() { r.s.held = false })
		synctest.Wait()
		r.do("b")
		r.want("a", "b")
		time.Sleep(time.Hour)
		r.want()
	})
}

// A call has Timeout from when it was written itself, and not from when the one before it was.
func TestDeadlinesCountFromTheWrite(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		var slow atomic.Bool
		slow.Store(true)
		echo := r.s.answer
		r.s.setAnswer(func(c *client, cmd []string) string {
			time.Sleep(timeout * 3 / 5)
			return echo(c, cmd)
		})
		r.do("a")
		time.Sleep(timeout * 2 / 5)
		r.do("b") // is answered after 4/5
		time.Sleep(time.Second)
		r.want("a", "b")
	})
}

// A connection that has ended: what was written is lost, and the next call has a new one at once.
func TestAConnectionThatEnds(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		time.Sleep(time.Minute)
		r.s.set(func() { r.s.held = true })
		r.do("a")
		synctest.Wait()
		r.s.set(r.s.clientsCutLocked)
		r.want("a is lost: " + closedEOF)
		r.do("b")
		r.s.set(func() { r.s.held = false })
		r.want("b")
		r.s.cut()
		r.do("c")
		r.want("c")
		r.s.cut()
		synctest.Wait()
		r.Reboot()
		r.wantSent("a,boot,b,boot,c,boot")
		r.s.cut() // soon, and it has answered nothing: it is not dialled again at once
		r.want("suspended: " + closedEOF)
		r.do("c")
		r.want("c was not sent: " + suspended + closedEOF)
		time.Sleep(redialEvery)
		r.want("suspended: <nil>")
	})
}

func (s *server) clientsCutLocked() {
	for _, c := range s.clients {
		c.conn.Close()
	}
	s.clients = nil
}

// What was certainly not written goes to the next connection: what has waited for a writer, and what a write
// that has written nothing has left. What is of no use any more does not.
func TestWhatWasNotWrittenIsSentAgain(t *testing.T) {
	for _, wrote := range []int{0, 5} {
		var x stuck
		link(t, func(t *testing.T, r *rig) {
			r.opened()
			time.Sleep(time.Minute)
			write := &stuckWrite{make(chan struct{}), wrote}
			x.next.Store(write)
			go r.do("a")
			synctest.Wait()
			var useless atomic.Bool
			r.do("b")
			r.Do(&call{r: r, name: "useless", obsolete: useless.Load}, false)
			r.do("c")
			useless.Store(true)
			close(write.fails)
			if wrote == 0 {
				r.wantSent("boot,a,b,c")
				r.wantSorted("a", "b", "c", "useless was not sent: "+ErrObsolete.Error())
			} else {
				r.wantSent("boot,b,c")
				r.wantSorted("a is lost: refused", "b", "c", "useless was not sent: "+ErrObsolete.Error())
			}
		}, func(r *rig, _ *Options) { r.s.wrap = x.wrap })
	}
}

// Hurry has no dial come later, however long Timeout is.
func TestHurryWithALongTimeout(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.refuses = errRefused
		r.do("a")
		r.Hurry()
		synctest.Wait()
		before := r.s.dialled()
		for range 10 {
			r.Hurry()
			time.Sleep(redialEvery)
		}
		if n := r.s.dialled() - before; n < 9 {
			t.Errorf("%d dials", n)
		}
	}, func(_ *rig, o *Options) { o.Timeout = time.Minute })
}

// A dial that hangs is not waited for: neither by what has waited for too long, nor by one who is in a hurry;
// but a server that is down is not dialled more often than four times in Timeout.
func TestHurry(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.hangs = true
		r.do("a")
		time.Sleep(hurriedDial*timeout - 1)
		synctest.Wait()
		if n := r.s.dialled(); n != 1 {
			t.Errorf("%d dials: too soon", n)
		}
		r.s.set(func() { r.s.hangs = false })
		time.Sleep(timeout / dialsPerTimeout)
		r.want("a")
		r.s.set(func() { r.s.hangs = true })
		r.s.cut()
		before := r.s.dialled()
		time.Sleep(time.Hour)
		if n := r.s.dialled() - before; n != 0 {
			t.Errorf("%d dials although nothing wants to be sent", n)
		}
		r.do("b")
		synctest.Wait()
		r.s.set(func() { r.s.hangs = false })
		r.Hurry()
		time.Sleep(timeout / dialsPerTimeout)
		r.want("b")
		r.s.set(func() { r.s.refuses = errRefused })
		r.s.cut()
		r.do("c")
		time.Sleep(10 * time.Second)
		n := r.s.dialled()
		for range int(time.Second / time.Millisecond) {
			r.Hurry()
			time.Sleep(time.Millisecond)
		}
		if more, most := r.s.dialled()-n, dialsPerTimeout*int(time.Second/timeout)+1; more < most/2 || more > most {
			t.Errorf("%d dials in a second", more)
		}
		r.events = nil
	})
}

// A server that has lost its scripts: what it has executed stays executed, and what it has not is sent again
// in its order after the next boot, and before what came later; but not what is of no use any more.
func TestAgain(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		var flushed atomic.Bool
		flushed.Store(true)
		echo := r.s.answer
		r.s.setAnswer(func(c *client, cmd []string) string {
			switch {
			case cmd[0] == "boot":
				flushed.Store(false)
			case flushed.Load() && cmd[0] != "undo":
				return "-NOSCRIPT no\r\n"
			}
			return echo(c, cmd)
		})
		var undone atomic.Bool
		r.s.set(func() { r.s.held = true })
		r.Do(&call{r: r, name: "acquire", obsolete: undone.Load}, false)
		r.do("a")
		undone.Store(true)
		r.do("undo", "b")
		synctest.Wait() // until they are written
		r.s.set(func() { r.s.held = false })
		r.wantSent("acquire,a,undo,b,boot,a,b")
		r.wantSorted("a", "a again", "acquire again", "acquire was not sent: "+ErrObsolete.Error(), "b", "b again",
			"undo")
	})
}

// What comes while the link boots again waits for that; if the connection ends meanwhile, it goes to the next
// one, after what was not executed.
func TestAConnectionThatEndsBeforeItBootsAgain(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		time.Sleep(time.Minute)
		var first atomic.Bool
		first.Store(true)
		echo := r.s.answer
		r.s.setAnswer(func(c *client, cmd []string) string {
			if cmd[0] == "a" && first.Swap(false) {
				r.s.set(func() { r.s.held = true })
				return "-NOSCRIPT no\r\n"
			}
			return echo(c, cmd)
		})
		r.do("a")
		synctest.Wait()
		r.do("b")
		r.wantSent("a")
		r.s.cut()
		r.s.set(func() { r.s.held = false })
		r.wantSent("boot,boot,a,b")
		r.want("a again", "a", "b")
	})
}

// slowAgain ends its session, and is to be sent again when its gate is closed.
type slowAgain struct {
	call
	once bool
	gate chan struct{}
}

func (c *slowAgain) Reply(s *Session, v *Value) bool {
	if !c.once {
		c.once = true
		s.Drop(errRefused)
		<-c.gate
		c.r.note("%s again", c.name)
		return true
	}
	return c.call.Reply(s, v)
}

// A call that is to be sent again keeps its place before what came later, also if its session ends before
// that is known.
func TestWhatIsSentAgainGoesFirst(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		time.Sleep(time.Second)
		c := &slowAgain{call: call{r: r, name: "a"}, gate: make(chan struct{})}
		r.Do(c, false)
		for r.Session() != nil {
			runtime.Gosched()
		}
		r.do("b")
		for range 100000 {
			runtime.Gosched()
		}
		close(c.gate)
		time.Sleep(30 * time.Second)
		r.want("a again", "a", "b")
	})
}

// Reboot has an idle link boot again, too.
func TestReboot(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.Reboot()
		r.do("a")
		r.wantSent("boot,a")
		r.want("a")
	})
}

// A session that was dropped delivers nothing, even if it was read already.
func TestNothingComesFromASessionThatIsOver(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		s := r.Session()
		r.s.setAnswer(func(c *client, cmd []string) string {
			return pushOf("drop") + bulkOf(cmd[0]) + pushOf("message")
		})
		r.do("c")
		r.want("push drop", "c is lost: refused", "suspended: refused")
		if r.Session() == s {
			t.Error("it is open")
		}
	}, func(r *rig, o *Options) {
		pushed := o.Pushed
		o.Pushed = func(s *Session, items []Value) {
			pushed(s, items)
			if string(items[0].Text) == "drop" {
				s.Drop(errRefused)
			}
		}
	})
}

// What is no RESP, and an answer to nothing, ends the connection; an error before that is the reason.
func TestServersThatAreNone(t *testing.T) {
	for answer, why := range map[string]string{
		"HTTP/1.1 400 Bad Request\r\n":                 `not a Redis server: "HTTP/1.1 400 Bad Request\r"`,
		"+a\r\n+b\r\n":                                 "not a Redis server: an answer to nothing",
		"+a\r\n-ERR max number of clients reached\r\n": "ERR max number of clients reached",
		"$2000000\r\n":                                 "not a Redis server: a string of 2000000 bytes",
	} {
		link(t, func(t *testing.T, r *rig) {
			r.opened()
			r.s.setAnswer(func(*client, []string) string { return answer })
			for range 100 { // a boot may be over before what follows its answer is read: that is then a's
				if r.do("a"); r.Err() != nil {
					break
				}
				synctest.Wait()
			}
			if err := r.Err(); err == nil || err.Error() != suspended+why {
				t.Errorf("%q: %v", answer, err)
			}
		})
	}
}

// Close ends what waits, what was sent and what comes, and leaves no goroutine.
func TestClose(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		r.do("a")
		r.Close()
		r.do("b")
		r.want("a is lost: client closed", "b was not sent: client closed")
	})
	link(t, func(t *testing.T, r *rig) {
		r.s.hangs = true
		r.do("a")
		r.Close()
		r.want("a was not sent: client closed")
	})
}

// A Boot that panics is one that is refused.
func TestABootThatPanics(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.do("a")
		synctest.Wait()
		if err := r.Err(); err == nil || !strings.Contains(err.Error(), "has panicked: oops") {
			t.Error(err)
		}
		r.events = nil
	}, func(_ *rig, o *Options) {
		o.Boot = func(*Session) error { panic("oops") }
	})
}

// More than maxCalls are refused, but not an urgent one, as a refresh of a lock, because of those that are
// not.
func TestFull(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.hangs = true
		for range maxCalls {
			r.Do(&call{r: r, name: "a"}, false)
		}
		r.want()
		r.do("b")
		r.want("b was not sent: " + ErrFull.Error())
		r.Do(&call{r: r, name: "c", urgent: true}, false)
		r.want()
	})
}

// What the server has no room for waits here, for as long as that takes: it is not late, for it was not sent.
// What is urgent goes first, behind what was sent before.
func TestWindow(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		var want []string
		for i := range firstWindow {
			want = append(want, fmt.Sprint("a", i))
		}
		r.do(want...)
		r.do("b", "c!")
		r.Do(&call{r: r, name: "d", urgent: true}, false)
		r.Do(&call{r: r, name: "e", urgent: true}, false)
		time.Sleep(timeout / 2)
		r.s.set(func() { r.s.held = false })
		synctest.Wait()
		want = append(want, "d", "e", "b", "c")
		r.want(want...)
		r.wantSent(strings.Join(want, ","))
	})
}

// While a call is late, nothing else is sent but for patient calls, as far as there is room: what waits is
// refused as what comes.
func TestWhatWaitsBehindALateCall(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		for range firstWindow {
			r.Do(&call{r: r, name: "a", patient: true}, false)
		}
		r.do("b", "c!")
		r.Do(&call{r: r, name: "d", urgent: true}, false)
		time.Sleep(isLate)
		r.do("e!")
		var got []string
		for _, event := range r.happened() {
			if !strings.HasPrefix(event, "a ") {
				got = append(got, event)
			}
		}
		var want []string
		for _, name := range []string{"b", "c", "d", "e"} {
			want = append(want, name+" was not sent: "+ErrLate.Error())
		}
		slices.Sort(got) // what waits ends in no order with what comes
		if !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		r.s.set(func() { r.s.held = false })
		synctest.Wait()
		if events := r.happened(); len(events) != firstWindow {
			t.Errorf("%d events, the last ones %q", len(events), events[max(0, len(events)-3):])
		}
	})
}

// What waits for a connection that boots is not refused because the boot takes longer than Timeout.
func TestWhatWaitsForASlowBoot(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.setAnswer(func(_ *client, cmd []string) string {
			if cmd[0] == "boot" {
				time.Sleep(2 * timeout)
			}
			return bulkOf(cmd[0])
		})
		r.do("a")
		time.Sleep(timeout * 3 / 2)
		r.do("b")
		time.Sleep(timeout)
		r.want("a", "b")
	})
}

// The window is for what the server takes, and not for the way to it, however late that was found out, and
// with other calls on the way: a server that is far away gets as much at once as another one. But what takes
// longer because of all that was sent shrinks it, before any call is late.
func TestTheWindowOfAServerThatIsFarAway(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, way  time.Duration // there and back: when the link boots, and then
		each        time.Duration // that the server takes for a call
		calls, most int           // how many times way and what the server takes that may last
	}{
		{"near", 0, 0, timeout / 500, 5000, 1},
		{"far", timeout * 8 / 10, timeout * 8 / 10, 0, 1000, 8},
		{"far, a bit busy", timeout * 8 / 10, timeout * 8 / 10, timeout / 2000, 1000, 12},
		{"further than before", timeout / 50, timeout * 8 / 10, 0, 1000, 8},
		{"further than before, a bit busy", timeout / 50, timeout * 8 / 10, timeout / 2000, 1000, 12},
		{"nearer than before", timeout * 8 / 10, 0, timeout / 500, 5000, 1},
		{"slow", 0, 0, timeout / 150, 5000, 1},
		{"slow, and far", timeout / 2, timeout / 2, timeout / 500, 2000, 40},
		{"slow, and further than before", timeout / 50, timeout / 2, timeout / 500, 2000, 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			link(t, func(t *testing.T, r *rig) {
				d := newDistance(r.s)
				defer d.close()
				d.way.Store(int64(c.first))
				r.Connect()
				time.Sleep(time.Second)
				r.want()
				d.way.Store(int64(c.way))
				d.each.Store(int64(c.each))
				r.do("warm")
				time.Sleep(time.Second)
				r.want("warm")
				began := time.Now()
				var want []string
				for range c.calls {
					want = append(want, "a")
				}
				r.do(want...)
				var got []string
				for len(got) < c.calls && time.Since(began) < time.Minute {
					time.Sleep(timeout / 10)
					got = append(got, r.happened()...)
				}
				took := time.Since(began)
				if !slices.Equal(got, want) {
					i := slices.IndexFunc(got, func(e string) bool { return e != "a" })
					t.Errorf("%d events, one of them %q", len(got), got[max(i, 0)])
				}
				if most := time.Duration(c.most)*c.way + time.Duration(c.calls)*c.each*5/4 + timeout; took > most {
					t.Errorf("took %v, want %v at most", took, most)
				}
			})
		})
	}
}

// distance has a server's answers take their time, in order.
type distance struct {
	way, each atomic.Int64
	replies   chan func()
}

func newDistance(s *server) *distance {
	d := &distance{replies: make(chan func(), 1<<16)}
	go func() {
		for reply := range d.replies {
			reply()
		}
	}()
	s.setAnswer(func(c *client, cmd []string) string {
		time.Sleep(time.Duration(d.each.Load()))
		arrives := time.Now().Add(time.Duration(d.way.Load()))
		d.replies <- func() {
			time.Sleep(time.Until(arrives))
			c.write(bulkOf(cmd[0]))
		}
		return ""
	})
	return d
}

func (d *distance) close() { close(d.replies) }

// A patient call does not wait for longer than Timeout for a link that is not there, whether it came before
// the dial or while that hangs.
func TestPatientCallsThatWaitForTheLink(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		failed := func(name string) string {
			return name + " was not sent: " + errNoLink.Error() + " " + timeout.String()
		}
		r.s.set(func() { r.s.hangs = true })
		r.do("a!")
		time.Sleep(timeout / 2)
		r.do("b!", "c")
		time.Sleep(timeout/2 - 1)
		r.want()
		time.Sleep(1)
		r.want(failed("a"), failed("b"))
		r.do("d!")
		time.Sleep(timeout - 1)
		r.want()
		r.s.set(func() { r.s.hangs = false }) // the next dial is soon: one that something has waited for
		time.Sleep(timeout)
		r.want(failed("d"), "c")
		r.do("e!")
		r.want("e")
		time.Sleep(2 * timeout)
		r.want()
	})
}

// Nor because what is answered before it boots again takes longer.
func TestWhatWaitsForALateReboot(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		r.do("a")
		synctest.Wait()
		r.Reboot()
		r.do("b")
		time.Sleep(timeout * 3 / 2)
		r.do("c")
		r.s.set(func() { r.s.held = false })
		r.want("a is late", "a", "b", "c")
	})
}

// Urgent calls that come and come leave what waits the room that they do not need.
func TestUrgentCallsLeaveRoom(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		answers := make(chan struct{}, 4*firstWindow)
		r.s.setAnswer(func(_ *client, cmd []string) string {
			<-answers
			return bulkOf(cmd[0])
		})
		for range firstWindow {
			r.do("a")
		}
		r.do("waits")
		for i := range 2 * firstWindow {
			answers <- struct{}{}
			synctest.Wait()
			if i >= firstWindow/4 {
				r.Do(&call{r: r, name: "u", urgent: true}, false)
			}
		}
		if !slices.Contains(r.happened(), "waits") {
			t.Error("what waits was not sent, though a quarter of the window was free")
		}
		close(answers)
		synctest.Wait()
	})
}

// Who shuts a link that is not there waits for it no longer than a patient call does.
func TestShutWaitsForTheLink(t *testing.T) {
	for _, boots := range []time.Duration{timeout / 2, timeout * 3 / 2} {
		link(t, func(t *testing.T, r *rig) {
			r.s.setAnswer(func(_ *client, cmd []string) string {
				if cmd[0] == "boot" {
					time.Sleep(boots)
				}
				return bulkOf(cmd[0])
			})
			r.do("a!")
			<-r.Shut()
			if boots > timeout {
				r.want("a was not sent: " + errNoLink.Error() + " " + timeout.String())
			} else {
				r.want("a")
			}
		})
	}
}

// A call whose answer is being passed on is left until that is over: it may be sent once more, as a release
// that has found somebody waiting.
func TestShutWaitsForAnAnswerThatIsBeingPassedOn(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		c := &twice{call: call{r: r, name: "release", patient: true}, goesOn: make(chan struct{})}
		r.Do(c, false)
		synctest.Wait()
		shut := r.Shut()
		select {
		case <-shut:
			t.Error("shut while an answer is being passed on")
		default:
		}
		close(c.goesOn)
		<-shut
		r.want("release")
		r.wantSent("release,release")
	})
}

// twice is a call that its first answer has sent once more.
type twice struct {
	call
	goesOn chan struct{}
	again  bool
}

func (c *twice) Reply(s *Session, v *Value) bool {
	if c.again {
		return c.call.Reply(s, v)
	}
	<-c.goesOn
	c.again = true
	c.r.Do(c, false)
	return false
}

// slowly is a call whose Late takes its time, as on a machine without a free processor.
type slowly struct {
	call
	late time.Duration
	busy atomic.Bool
}

func (c *slowly) Late() {
	c.busy.Store(true)
	defer c.busy.Store(false)
	c.call.Late()
	time.Sleep(c.late)
}

func (c *slowly) Reply(s *Session, v *Value) bool {
	if c.busy.Load() {
		c.r.t.Errorf("Reply of %s during its Late", c.name)
	}
	return c.call.Reply(s, v)
}

// While a call is told that it is late, another one may become late, and both may be answered. Nothing
// becomes of a call until it was told.
func TestLateAndThenAnswered(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		r.s.set(func() { r.s.held = true })
		r.Do(&slowly{call: call{r: r, name: "a"}, late: 20 * time.Millisecond}, false)
		time.Sleep(time.Millisecond)
		r.Do(&slowly{call: call{r: r, name: "b"}, late: 40 * time.Millisecond}, false)
		time.Sleep(isLate + 25*time.Millisecond)
		r.s.set(func() { r.s.held = false })
		time.Sleep(time.Second)
		r.want("a is late", "b is late", "a", "b")
	})
}

// A command of a boot is for the connection that has booted: what it says of the server may not be so of
// another.
func TestACommandOfABootIsForItsSessionAlone(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		before := r.Session()
		time.Sleep(time.Second) // then its end is no suspension
		r.s.cut()
		r.do("a")
		synctest.Wait()
		r.want("a")
		var got error
		r.Do(&exec{s: before, args: []string{"x"}, done: func(_ *Value, err error) { got = err }}, false)
		synctest.Wait()
		if !errors.Is(got, ErrObsolete) {
			t.Error(got)
		}
	})
}
