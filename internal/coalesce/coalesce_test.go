package coalesce

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type group struct{ *Group[int, struct{}] }

type run = Run[int, struct{}]

func newGroup() group { return group{New[int, struct{}](closed)} }

// join is Join; do drives a run that is new.
func (g group) join(key string, do func(r *run)) *run {
	r, first, _ := g.Join(context.Background(), key)
	if first {
		g.Go(func() {
			defer r.Done()
			do(r)
		})
	}
	return r
}

// begin is Join for a run that the test drives itself.
func (g group) begin() *run {
	r, _, _ := g.Join(context.Background(), "k")
	return r
}

var errTest = errors.New("test")

func closed(string) error { return errTest }

// A run has the values of the ctx that it began with, and does not end with it, but when it is Done.
func TestTheContextOfARun(t *testing.T) {
	type key struct{}
	g := newGroup()
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, 7))
	cancel()
	r, _, _ := g.Join(ctx, "k")
	if r.Context().Err() != nil || r.Context().Value(key{}) != 7 || r.Key() != "k" {
		t.Errorf("%v", r.Context().Err())
	}
	r.Done()
	if r.Context().Err() == nil || g.Open("k") {
		t.Error("it is not over")
	}
}

// A caller leaves with its own ctx, and no other does. The last one's leaving cancels the run, which cannot be joined
// any more.
func TestTheLastCallersLeavingCancelsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup()
		first := g.begin()
		for i := range 3 {
			r := first
			if i > 0 {
				r = g.begin()
			}
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i+1)*time.Second)
				defer cancel()
				if _, _, left := r.Wait(ctx); !left || r != first {
					t.Errorf("left %v, another run %v", left, r != first)
				}
			}()
		}
		time.Sleep(2500 * time.Millisecond)
		if first.Context().Err() != nil || !g.Open("k") {
			t.Error("it was canceled before the last caller left")
		}
		time.Sleep(time.Second)
		if first.Context().Err() == nil || g.Open("k") || first.Commit() {
			t.Error("it was not canceled")
		}
		next := g.begin()
		if next == first {
			t.Error("a canceled run was joined")
		}
		first.Finish(1, nil) // a run that ends removes only itself
		first.Done()
		if r, ok := g.JoinOpen("k"); !ok || r != next {
			t.Error("the next run was removed")
		}
		next.Done()
		if _, ok := g.JoinOpen("k"); ok {
			t.Error("a run that is done was joined")
		}
	})
}

// When the last caller leaves in the instant in which the run commits, the run is either canceled and cannot be joined,
// or continues and can be; never anything in between.
func TestTheLastCallerLeavesInTheInstantOfTheCommit(t *testing.T) {
	g := newGroup()
	outcomes := map[bool]int{}
	for outcomes[true] == 0 || outcomes[false] == 0 || outcomes[true]+outcomes[false] < 1000 {
		r, committed := g.begin(), false
		var wg sync.WaitGroup
		wg.Go(func() { r.Leave() })
		wg.Go(func() { committed = r.Commit() })
		wg.Wait()
		if canceled := r.Context().Err() != nil; committed == canceled || committed != g.Open("k") {
			t.Fatalf("committed %v, canceled %v, joinable %v", committed, canceled, g.Open("k"))
		}
		r.Done()
		outcomes[committed]++
	}
}

// The first result counts, and a caller whose ctx has ended has it, too. After Deliver the run can still be joined,
// after Finish it cannot.
func TestResults(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // select takes any branch
		g := newGroup()
		r := g.begin()
		r.Deliver(7, nil)
		if again, first, _ := g.Join(ctx, "k"); again != r || first {
			t.Fatal("it cannot be joined")
		}
		r.Finish(8, errTest)
		for range 2 {
			if v, err, left := r.Wait(ctx); v != 7 || err != nil || left {
				t.Fatalf("%d, %v, left %v", v, err, left)
			}
		}
		if !r.Leave() || g.Open("k") {
			t.Fatal("it has no result, or can be joined")
		}
		r.Done()
	}
}

// A run in the background continues without callers, until it has to wait; with callers it waits, and ends with them.
func TestRunsInTheBackground(t *testing.T) {
	g := newGroup()
	r, ok := g.Background(t.Context(), "k")
	if !ok || r.Wanted() || g.Open("k") {
		t.Errorf("for nobody: ok %v, joinable %v", ok, g.Open("k"))
	}
	r.Done()
	r, _ = g.Background(t.Context(), "k")
	if _, ok := g.Background(t.Context(), "k"); ok {
		t.Error("two runs for a key")
	}
	caller, first, _ := g.Join(t.Context(), "k")
	if caller.Leave(); caller != r || first || r.Context().Err() != nil {
		t.Error("a caller's leaving ended it")
	}
	_, _, _ = g.Join(t.Context(), "k")
	if !r.Wanted() {
		t.Error("it does not wait for its caller")
	}
	if r.Leave(); r.Context().Err() == nil || g.Open("k") {
		t.Error("it continues without its caller")
	}
	r.Done()
}

// Close ends runs that are not committed, Abort ends all, and Idle is closed when no run and no goroutine is left.
func TestCloseAndAbort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, g := make(chan struct{}), newGroup()
		wantIdle := func(g group, want bool) {
			t.Helper()
			synctest.Wait()
			idle := false
			select {
			case <-g.Idle():
				idle = true
			default:
			}
			if idle != want {
				t.Errorf("idle: %v", idle)
			}
		}
		do := func(r *run) {
			if r.Key() == "committed" {
				r.Commit()
			}
			g.Go(func() { <-hang })
			<-r.Context().Done()
			if err := context.Cause(r.Context()); err != errTest { //nolint:errorlint // it is that one
				t.Errorf("cause %v", err)
			}
			r.Finish(1, nil)
		}
		open, committed := g.join("open", do), g.join("committed", do)
		synctest.Wait()
		g.Close(errTest)
		g.Close(errTest)
		if _, err, _ := open.Wait(t.Context()); err != errTest { //nolint:errorlint // it is that one
			t.Error(err)
		}
		if _, _, ok := g.Join(t.Context(), "new"); ok {
			t.Error("joined")
		}
		if _, ok := g.JoinOpen("committed"); ok {
			t.Error("joined one that is open")
		}
		if _, ok := g.Background(t.Context(), "new"); ok || !g.Open("new") {
			t.Error("begun")
		}
		synctest.Wait()
		if runs, goroutines := g.Count(); runs != 1 || goroutines != 3 {
			t.Errorf("%d runs, %d goroutines", runs, goroutines)
		}
		wantIdle(g, false)
		g.Abort(errTest)
		if v, err, _ := committed.Wait(t.Context()); v != 1 || err != nil {
			t.Errorf("%d, %v", v, err)
		}
		wantIdle(g, false)
		close(hang)
		wantIdle(g, true)
		g = newGroup()
		r := g.begin()
		g.Close(errTest)
		wantIdle(g, false) // with a run that is not done
		r.Done()
		wantIdle(g, true)
		g = newGroup()
		g.Close(errTest)
		wantIdle(g, true)
	})
}

// Whatever callers and runs do at the same time, every caller has a result of its run, or has left, and nothing is
// left.
func TestCallersComeAndGo(t *testing.T) {
	var committed, canceled, got, gone atomic.Int64
	g := newGroup()
	do := func(r *run) {
		select {
		case <-r.Context().Done():
		case <-time.After(time.Duration(rand.IntN(300)) * time.Microsecond):
		}
		if !r.Commit() {
			canceled.Add(1)
			return
		}
		if committed.Add(1) > 1 {
			t.Error("two runs that are committed")
		}
		runtime.Gosched()
		committed.Add(-1) // before the next run can begin
		r.Finish(7, nil)
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 300 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(400))*time.Microsecond)
				switch v, err, left := g.join("k", do).Wait(ctx); {
				case left:
					gone.Add(1)
				case v == 7 && err == nil:
					got.Add(1)
				default:
					t.Errorf("%d, %v", v, err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	g.Close(errTest)
	<-g.Idle()
	t.Logf("%d results, %d left, %d runs canceled", got.Load(), gone.Load(), canceled.Load())
}

// A result is for callers in its scope. One that is not makes the run unjoinable, and it continues.
func TestScope(t *testing.T) {
	g := newGroup()
	r := g.begin()
	r.Limit(Scope{Limited: true, Before: 5, Stamp: "s"})
	r.Deliver(1, nil)
	r.Limit(Scope{}) // too late
	for _, c := range []struct {
		came  uint64
		stamp string
	}{{4, ""}, {4, "x"}, {5, "s"}, {9, "s"}} {
		if !r.For(c.came, c.stamp) {
			t.Errorf("%+v", c)
		}
	}
	if again, ok := g.JoinOpen("k"); !ok || again != r {
		t.Error("it cannot be joined")
	}
	r.Leave()
	for _, stamp := range []string{"", "x"} {
		if r.For(5, stamp) {
			t.Errorf("%q is in scope", stamp)
		}
	}
	if n, _ := g.Count(); g.Open("k") || n != 1 || r.Context().Err() != nil {
		t.Error("it can be joined, or has ended")
	}
	r.Done()
	if s := (Scope{}); !s.Includes(9, "") {
		t.Error("the zero Scope is not all")
	}
	if s := (Scope{Limited: true}); s.Includes(0, "") {
		t.Error("no stamp is taken for the same stamp")
	}
}

// A call that returns, panics or exits is over, and says how; one that hangs delays nobody, and can be waited for
// again.
func TestCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, hang := newGroup(), make(chan struct{})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for how, f := range map[string]func() (int, error){
			"returns": func() (int, error) { return 7, errTest },
			"panics":  func() (int, error) { panic(errTest) },
			"exits":   func() (int, error) { runtime.Goexit(); return 0, nil },
			"hangs":   func() (int, error) { <-hang; return 7, errTest },
		} {
			c := Start(g.Go, f)
			synctest.Wait()
			if c.Wait(ended) == (how == "hangs") {
				t.Errorf("%s: over", how)
			}
			if how == "hangs" {
				close(hang)
				c.Wait(t.Context())
			}
			v, err, p := c.Result()
			switch {
			case how == "panics" && (p == nil || p.Value != errTest || p.Goexit || len(p.Stack) == 0),
				how == "exits" && (p == nil || !p.Goexit || p.Value != nil),
				(how == "returns" || how == "hangs") && (v != 7 || err != errTest || p != nil): //nolint:errorlint // that one
				t.Errorf("%s: %d, %v, %+v", how, v, err, p)
			}
		}
		synctest.Wait()
		if _, n := g.Count(); n != 0 {
			t.Errorf("%d goroutines", n)
		}
	})
}
