package sharing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// sideEnv tells TestMain that it runs in a process that locks and detaches, or attaches: the addresses of the
// nodes.
const sideEnv = "FLIGHTLOCK_SIDE"

// A task is what such a process is told: to lock Key and to detach that, or to attach what Text is of.
type task struct{ Key, Text string }

// A report is what it says, at once: it had a valid lock at the moment At, until Until; or one of the others.
type report struct {
	Ready     bool
	At, Until int64 // Unix nanoseconds
	Fence     int64
	Text      string // of the lock that it has detached
	Releases  bool   // it is about to
}

const sideTTL, sideTimeout = time.Second, 200 * time.Millisecond

// sideMain does one task, and says at any time, if it is so, that it has the lock.
func sideMain(addrs string) int {
	c, err := flightlock.New(flightlock.Options{NodeTimeout: sideTimeout}, nodesAt(strings.Split(addrs, ","))...)
	if err != nil {
		return 1
	}
	ctx, in := context.Background(), json.NewDecoder(os.Stdin)
	var mu sync.Mutex // guards out
	out := json.NewEncoder(os.Stdout)
	say := func(r report) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(r)
	}
	var do task
	if say(report{Ready: c.Ready(ctx) == nil}); in.Decode(&do) != nil {
		return 1
	}
	go func() {
		_ = in.Decode(new(task)) // until the parent has ended, or has heard enough
		os.Exit(0)
	}()
	var l *flightlock.Lock
	var d flightlock.Detached
	if do.Text == "" {
		l, err = c.SingleFlightLock(ctx, do.Key, sideTTL, nil)
	} else if err = d.UnmarshalText([]byte(do.Text)); err == nil {
		l, err = c.Attach(ctx, d)
		for errors.Is(err, flightlock.ErrUnavailable) {
			l, err = c.Attach(ctx, d)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 0
	}
	look := func() bool {
		var h had
		if !h.note(l) {
			return false
		}
		say(h.first)
		return true
	}
	look()
	go func() {
		for look() {
			time.Sleep(200 * time.Microsecond)
		}
	}()
	time.Sleep(rand.N(4 * time.Millisecond))
	if do.Text != "" {
		_ = l.Refresh(ctx)
		say(report{Releases: true})
		_ = l.Release(ctx)
		select {}
	}
	var text []byte
	if d, err = l.Detach(); err == nil {
		text, err = d.MarshalText()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 0
	}
	say(report{Text: string(text)})
	select {}
}

// A side is such a process, and what it has said.
type side struct {
	*procs.Child
	ready, has, text chan struct{} // closed when it has said so
	ended            chan struct{} // closed when it says nothing any more; then the others may be read
	had
	detached string
}

func startSide(t *testing.T, addrs string) *side {
	cmd, err := procs.Self(sideEnv + "=" + addrs)
	testkit.Must(t, err)
	child, err := procs.StartChild(cmd)
	testkit.Must(t, err)
	t.Cleanup(child.Kill)
	s := &side{Child: child, ready: make(chan struct{}), has: make(chan struct{}), text: make(chan struct{}),
		ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		for {
			var r report
			if child.Receive(&r) != nil {
				return
			}
			switch {
			case r.Ready:
				close(s.ready)
			case r.Text != "":
				s.detached = r.Text
				close(s.text)
			case r.Releases:
				s.releases = true
			default:
				first := s.first.At == 0
				if s.saw(r); first {
					close(s.has)
				}
			}
		}
	}()
	return s
}

// end ends it, and hears all that it has said.
func (s *side) end() {
	s.Kill()
	<-s.ended
}

// reached waits until a side has said something, or is gone.
func (s *side) reached(said chan struct{}) bool {
	select {
	case <-said:
		return true
	case <-s.ended:
		return false
	}
}

// had is what a lock was like when it was valid first, and last.
type had struct {
	first, last report
	releases    bool
}

// note reports whether the lock is valid.
func (h *had) note(l *flightlock.Lock) bool {
	until, now := l.Until().UnixNano(), time.Now().UnixNano()
	if l.Err() != nil {
		return false
	}
	h.saw(report{At: now, Until: until, Fence: l.Fence()})
	return true
}

func (h *had) saw(r report) {
	if h.last = r; h.first.At == 0 {
		h.first = r
	}
}

// With FLIGHTLOCK_LONG=1 there are 200 tries for each number of nodes.
//
// A process locks a key and detaches the lock, and another one attaches it; one of them is killed at some
// moment. A third waits for the key all the time, and if the second is killed, a fourth tries to attach the
// lock, too. Never do two of them have the key, nor does the third before the lock that it follows was
// released or is over; and the third has it in the end.
func TestProcessesThatDetachAndAttachAreKilled(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d nodes", n), func(t *testing.T) {
			servers, nodes := lockkit.StartNodes(t, n)
			opts := flightlock.Options{NodeTimeout: sideTimeout}
			third, fourth := lockkit.New(t, opts, nodes...), lockkit.New(t, opts, nodes...)
			var addrs []string
			for _, s := range servers {
				addrs = append(addrs, s.Addr())
			}
			var mu sync.Mutex
			came := map[string]int{}
			t.Cleanup(func() {
				for how, n := range came {
					t.Logf("%3d tries: %s", n, how)
				}
			})
			for i := range testkit.Full(200, 8) {
				t.Run(fmt.Sprint("k", i), func(t *testing.T) {
					t.Parallel()
					key := fmt.Sprint("k", i)
					how := killOne(t, key, strings.Join(addrs, ","), third, fourth)
					lockkit.WantFree(t, key, servers...)
					mu.Lock()
					defer mu.Unlock()
					came[how]++
				})
			}
		})
	}
}

// killOne is one try. It says what came of it.
func killOne(t *testing.T, key, addrs string, third, fourth *flightlock.Client) (how string) {
	a, b := startSide(t, addrs), startSide(t, addrs)
	if !a.reached(a.ready) || !b.reached(b.ready) {
		t.Fatal("a process has ended")
	}
	when := rand.IntN(3)
	kill := func(at int, s *side) {
		if at == when {
			time.AfterFunc(rand.N(6*time.Millisecond), s.Kill)
		}
	}
	kill(0, a)
	_ = a.Send(task{Key: key})
	a.reached(a.has)
	var last, heir had
	served := make(chan error, 1)
	go func() {
		l, err := third.SingleFlightLock(t.Context(), key, sideTTL, flightlock.Within(nil, time.Minute))
		if err == nil {
			last.note(l)
			time.Sleep(time.Millisecond)
			last.note(l)
			_ = l.Release(t.Context())
		}
		served <- err
	}()
	kill(1, a)
	if a.reached(a.text) {
		kill(2, b)
		_ = b.Send(task{Text: a.detached})
		if when == 2 {
			<-b.Done()
			attachToo(t, a.detached, fourth, &heir)
		}
	}
	testkit.Must(t, <-served)
	a.end()
	b.end()
	before := had{}
	for _, h := range []had{a.had, b.had, heir, last} {
		switch {
		case h.first.At == 0:
			continue
		case h.first.At < before.last.At:
			t.Errorf("%+v has the key beside %+v", h, before)
		case h.first.Fence < before.last.Fence:
			t.Errorf("%+v has a smaller token than %+v", h, before)
		case h == last && (h.first.At < before.last.Until && !before.releases ||
			h.first.Fence <= before.last.Fence):
			t.Errorf("%+v has the key too early, after %+v", h, before)
		}
		before = h
	}
	if last.first.At == 0 || b.first.At != 0 && heir.first.At != 0 {
		t.Errorf("third: %+v; attached by %+v and %+v", last, b.had, heir)
	}
	return fmt.Sprintf("%s is killed: A had it %v, has detached it %v; B had it %v, has released it %v; "+
		"another had it %v",
		[]string{"A", "A", "B"}[when], a.first.At != 0, a.detached != "", b.first.At != 0, b.releases,
		heir.first.At != 0)
}

// attachToo attaches a lock when another process may have done so.
func attachToo(t *testing.T, text string, c *flightlock.Client, heir *had) {
	var d flightlock.Detached
	testkit.Must(t, d.UnmarshalText([]byte(text)))
	l, err := c.Attach(t.Context(), d)
	for errors.Is(err, flightlock.ErrUnavailable) {
		l, err = c.Attach(t.Context(), d)
	}
	if err != nil {
		if !errors.Is(err, flightlock.ErrNotHeld) {
			t.Error(err)
		}
		return
	}
	heir.note(l)
	time.Sleep(rand.N(4 * time.Millisecond))
	heir.note(l)
	heir.releases = true
	_ = l.Release(t.Context())
}
