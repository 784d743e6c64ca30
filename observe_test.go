package flightlock_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// recorder keeps what an Observer is called with, a line for each call.
type recorder struct {
	mu    sync.Mutex
	lines []string
}

func (r *recorder) add(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

func (r *recorder) count(prefix string) (n int) {
	for _, line := range r.all() {
		if strings.HasPrefix(line, prefix) {
			n++
		}
	}
	return n
}

type (
	callerKey struct{} // in the ctx of a caller: its name
	startKey  struct{} // in the ctx of a start: what started
)

// observer reports all but attempts and exchanges with nodes, and checks that an end finds its start.
func (r *recorder) observer() *flightlock.Observer {
	started := func(ctx context.Context, what string) context.Context {
		return context.WithValue(ctx, startKey{}, fmt.Sprint(what, " of ", ctx.Value(callerKey{})))
	}
	return &flightlock.Observer{
		Opened: func(c *flightlock.Client) func() {
			r.add("opened %d", len(c.NodeStats()))
			return func() { r.add("closed") }
		},
		Of: flightlock.EventWait | flightlock.EventHold | flightlock.EventLoss | flightlock.EventRefresh,
		Started: func(ctx context.Context, e flightlock.Event) context.Context {
			if e.Kind == flightlock.EventWait {
				return started(ctx, "wait for "+e.Key)
			}
			from := "the nodes"
			if e.Previous != nil {
				from = fmt.Sprint(e.Previous.Value(startKey{}))
			}
			r.add("holds %s by %v from %s", e.Key+e.Class, ctx.Value(callerKey{}), from)
			return started(ctx, "hold")
		},
		Ended: func(ctx context.Context, e flightlock.Event) {
			caller, began := ctx.Value(callerKey{}), ctx.Value(startKey{})
			switch e.Kind {
			case flightlock.EventWait:
				if began != fmt.Sprint("wait for ", e.Key, " of ", caller) {
					r.add("a wait for %s of %v ended as %v", e.Key, caller, began)
				}
				r.add("waited %s %s: %s %v", e.Outcome, e.Cause, e.Key+e.Class, e.Took)
			case flightlock.EventHold:
				if began != fmt.Sprint("hold of ", caller) || e.Fence == 0 {
					r.add("a hold by %v ended as %v with fence %d", caller, began, e.Fence)
				}
				if (e.Err == nil) != (e.Outcome == flightlock.EndReleased) {
					r.add("%s with %v", e.Outcome, e.Err)
				}
				r.add("held %s: %s %v", e.Outcome, e.Key+e.Class, e.Took)
			case flightlock.EventLoss:
				r.add("lost %s: %s", e.Outcome, e.Key+e.Class)
			case flightlock.EventRefresh:
				r.add("refreshed %s %v", e.Key, e.Err == nil)
			}
		},
	}
}

func observed(t *testing.T, clients []redis.UniversalClient,
	o flightlock.Options) (*flightlock.Client, *recorder) {
	t.Helper()
	r := &recorder{}
	o.Observers = append(o.Observers, nil, r.observer())
	return lockkit.New(t, o, clients...), r
}

func as(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, callerKey{}, name)
}

// A lock is waited for, handed over, refreshed, nested and released, and each step is observed with its
// caller's ctx.
func TestObserverOfALock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		classes := 0
		c, r := observed(t, clients, flightlock.Options{Class: func(string) string { classes++; return "!" }})
		first, err := c.SingleFlightLock(as(t.Context(), "A"), "k", 10*time.Second, nil)
		testkit.Must(t, err)
		second := make(chan *flightlock.Lock)
		go func() {
			l, _ := c.SingleFlightLock(as(t.Context(), "B"), "k", 10*time.Second, nil)
			second <- l
		}()
		synctest.Wait()
		time.Sleep(time.Second)
		testkit.Must(t, first.Refresh(t.Context()))
		testkit.Must(t, first.Release(t.Context()))
		l := <-second
		inner, err := c.SingleFlightLock(l.Context(t.Context()), "k", 10*time.Second, nil)
		testkit.Must(t, err)
		time.Sleep(time.Second)
		lockkit.Release(t, l)
		synctest.Wait()
		if n := r.count("held"); n != 1 {
			t.Errorf("%d holds have ended, and one is nested: %q", n, r.all())
		}
		lockkit.Release(t, inner)
		lockkit.Close(t, c)
		want := []string{"opened 3", "waited acquired remote: k! 0s", "holds k! by A from the nodes",
			"refreshed k true",
			"waited acquired handoff: k! 1s", "holds k! by B from hold of A", "held released: k! 1s",
			"held released: k! 1s", "closed"}
		got := r.all()
		slices.Sort(got[4 : len(got)-1]) // A and B run at the same time
		slices.Sort(want[4 : len(want)-1])
		if !slices.Equal(got, want) {
			t.Errorf("%q\nwant\n%q", got, want)
		}
		if classes != 2 {
			t.Errorf("Class was called %d times for 2 waits", classes)
		}
	})
}

// How a wait has ended is one of the outcomes. If ctx has ended, it counts whether others had the key.
func TestObserverOfWaits(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, r := observed(t, clients, flightlock.Options{MaxWaiters: 1, Class: func(key string) string {
			if key == "bad" {
				panic(key)
			}
			return ""
		}})
		if v := testkit.Recovered(func() { _, _ = c.TryLock(t.Context(), "bad", time.Second) }); v != "bad" {
			t.Errorf("a panic of Class is its caller's: %v", v)
		}
		held := lockkit.Lock(t, c, "here", time.Minute)
		other := lockkit.New(t, flightlock.Options{}, clients...)
		elsewhere := lockkit.Lock(t, other, "elsewhere", time.Minute)
		for _, x := range []struct {
			key   string
			end   time.Duration
			retry flightlock.RetryStrategy
			want  string
		}{
			{"elsewhere", time.Second, nil, "held_by_others remote: elsewhere 1s"},
			{"here", time.Second, nil, "held_by_others queue: here 1s"},
			{"elsewhere", time.Second, flightlock.NoRetry(), "not_acquired remote: elsewhere 0s"},
			{"free", 0, nil, "canceled remote: free 0s"},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), x.end)
			_, err := c.SingleFlightLock(ctx, x.key, time.Second, x.retry)
			cancel()
			if lines := r.all(); err == nil || lines[len(lines)-1] != "waited "+x.want {
				t.Errorf("%q, want %q", lines[len(lines)-1], x.want)
			}
		}
		var wg sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() { _, _ = c.SingleFlightLock(ctx, "here", time.Second, nil) })
		synctest.Wait()
		_, _ = c.SingleFlightLock(ctx, "here", time.Second, nil)
		cancel()
		wg.Wait()
		testkit.Recovered(func() { _, _ = c.SingleFlightLock(t.Context(), "elsewhere", time.Second, panicsAt(1)) })
		testkit.Stall(true, nodes...)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		_, _ = c.SingleFlightLock(ctx, "free", time.Second, nil)
		cancel()
		testkit.Stall(false, nodes...)
		time.Sleep(5 * time.Second)
		lockkit.Release(t, held)
		lockkit.Release(t, elsewhere)
		lockkit.Close(t, c)
		_, _ = c.TryLock(t.Context(), "k", time.Second)
		for _, outcome := range []string{"too_many_waiters", "panicked", "unavailable", "closed"} {
			if r.count("waited "+outcome) != 1 {
				t.Errorf("no outcome %s, or several: %q", outcome, r.all())
			}
		}
		if n := r.count("holds"); n != 1 {
			t.Errorf("%d holds, and one caller got a lock: %q", n, r.all())
		}
	})
}

// An Observer that panics is logged once for each of its functions, and changes nothing else.
func TestObserverThatPanics(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		bad := &flightlock.Observer{
			Of:      math.MaxUint8,
			Opened:  func(*flightlock.Client) func() { panic(1) },
			Started: func(context.Context, flightlock.Event) context.Context { panic(1) },
			Ended:   func(context.Context, flightlock.Event) { panic(1) },
		}
		c, r := observed(t, clients, flightlock.Options{
			Logger: slog.New(slog.NewTextHandler(&log, nil)), Observers: []*flightlock.Observer{bad}})
		for range 3 {
			l := lockkit.Lock(t, c, "k", time.Second)
			testkit.Must(t, l.Refresh(t.Context()))
			lockkit.Release(t, l)
		}
		lockkit.Close(t, c)
		for _, name := range []string{"Opened", "Started", "Ended"} {
			if n := strings.Count(log.String(), "function="+name+" "); n != 1 {
				t.Errorf("%d lines about %s", n, name)
			}
		}
		if r.count("held released") != 3 || r.count("closed") != 1 {
			t.Errorf("the other one was called with %q", r.all())
		}
	})
}

// A program that imports only this package has neither metrics nor tests' servers in it.
func TestDependencies(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	testkit.Must(t, err)
	for _, name := range []string{"prometheus", "protobuf", "miniredis", "opentelemetry"} {
		if bytes.Contains(out, []byte(name)) {
			t.Errorf("this package imports %s", name)
		}
	}
}
