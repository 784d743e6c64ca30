package link

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// history is what has become of calls that several senders have sent one after the other, each behind its
// last.
type history struct {
	mu       sync.Mutex
	executed map[string]int // calls, and how often
	ended    map[string]string
	// connections, and the last call of each sender that was executed on them
	last map[*client]map[string]int
	t    *testing.T
}

// traced is a call of a history: its name is its sender's and a number.
type traced struct {
	h      *history
	name   string
	urgent bool
}

func (c *traced) Encode(b []byte, _ *Session) ([]byte, bool) { return AppendCommand(b, c.name), true }

func (c *traced) Replies() int { return 1 }

func (c *traced) Patient() bool { return strings.HasSuffix(c.name, "0") }

func (c *traced) Urgent() bool { return c.urgent }

func (c *traced) Late() {
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	if was := c.h.ended[c.name]; was != "" {
		c.h.t.Errorf("%s is late, and has ended before: %s", c.name, was)
	}
}

func (c *traced) Reply(_ *Session, v *Value) (again bool) {
	switch text := string(v.Text); {
	case text == "NOSCRIPT":
		return true
	case text != c.name:
		c.h.t.Errorf("%s got %s", c.name, text)
	}
	c.ends("replied")
	return false
}

func (c *traced) Fail(how Delivery, _ error) { c.ends([]string{"not sent", "lost"}[how]) }

func (c *traced) ends(how string) {
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	if was := c.h.ended[c.name]; was != "" {
		c.h.t.Errorf("%s has ended twice: %s, %s", c.name, was, how)
	}
	c.h.ended[c.name] = how
}

// waits sends c, and waits for it, which takes no longer than Timeout.
func (h *history) waits(r *rig, c *traced) {
	began := time.Now()
	r.Do(c, true)
	if took := time.Since(began); took > timeout {
		h.t.Errorf("the caller of %s has waited for %v", c.name, took)
	}
}

// executes notes a command of a connection.
func (h *history) executes(c *client, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.executed[name]++
	from, n, _ := strings.Cut(name, ".")
	i, _ := strconv.Atoi(n)
	if h.last[c] == nil {
		h.last[c] = map[string]int{}
	}
	if last := h.last[c][from]; i <= last {
		h.t.Errorf("%s was executed after %s.%d", name, from, last)
	}
	h.last[c][from] = i
}

// Whatever becomes of the server and its connections: each call ends once; what was not sent is never
// executed, what has a reply was executed once, and nothing is executed twice; and one connection executes
// what came first, first.
func TestRandomHistories(t *testing.T) {
	outcomes := map[string]int{}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		h := &history{
			executed: map[string]int{}, ended: map[string]string{}, last: map[*client]map[string]int{}, t: t,
		}
		var x stuck
		sent := 0
		link(t, func(t *testing.T, r *rig) {
			var waiting sync.WaitGroup
			var forgot bool // guarded by h.mu
			r.s.answer = func(c *client, cmd []string) string {
				h.mu.Lock()
				unknown := forgot && cmd[0] != "boot"
				forgot = unknown
				h.mu.Unlock()
				switch {
				case unknown:
					return "-NOSCRIPT\r\n"
				case cmd[0] != "boot":
					h.executes(c, cmd[0])
				}
				return bulkOf(cmd[0])
			}
			for i := range 200 {
				sent++
				switch c := (&traced{h: h, name: fmt.Sprintf("%d.%d", i%3, i+1)}); random.IntN(8) {
				case 0:
					h.waits(r, c)
				case 1, 2: // is a sender of its own
					c.name, c.urgent = fmt.Sprintf("%d.%d", i+3, i+1), random.IntN(2) == 0
					waiting.Go(func() { h.waits(r, c) })
				default:
					r.Do(c, false)
				}
				if r.Err() != nil && random.IntN(4) == 0 {
					time.Sleep(redialEvery)
				}
				switch random.IntN(40) {
				case 0:
					r.s.set(func() { r.s.held = true })
				case 1, 2, 3:
					r.s.set(func() { r.s.held = false })
				case 4:
					r.s.cut()
				case 5:
					h.mu.Lock()
					forgot = true
					h.mu.Unlock()
				case 6:
					r.s.set(func() { r.s.refuses = errRefused })
				case 7, 8:
					r.s.set(func() { r.s.refuses = nil })
				case 9:
					write := &stuckWrite{make(chan struct{}), random.IntN(2) * 10}
					close(write.fails)
					x.next.Store(write)
				case 10:
					r.Reboot()
				case 11:
					time.Sleep(time.Duration(random.IntN(int(8 * timeout))))
				case 12, 13, 14:
					time.Sleep(time.Duration(random.IntN(int(time.Millisecond))))
				case 15:
					synctest.Wait()
				}
			}
			defer waiting.Wait()
			if random.IntN(2) == 0 {
				r.s.set(func() { r.s.held, r.s.refuses = false, nil })
				time.Sleep(10 * time.Second)
			}
		}, func(r *rig, o *Options) { r.s.wrap, o.CallersRead = x.wrap, seed%3 > 0 })
		for name, how := range h.ended {
			if n := h.executed[name]; n > 1 || n == 1 && how == "not sent" || n == 0 && how == "replied" {
				t.Errorf("%s: %s, executed %d times", name, how, n)
			}
			outcomes[how]++
		}
		if n := x.after.Load(); n > 0 {
			t.Errorf("%d times something was written after a write that failed", n)
		}
		if len(h.ended) != sent {
			t.Errorf("%d of %d calls have ended", len(h.ended), sent)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	for how, n := range outcomes {
		if n < 1000 {
			t.Errorf("only %d %s", n, how)
		}
	}
	t.Log(outcomes)
}
