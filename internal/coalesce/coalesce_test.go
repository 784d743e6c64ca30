package coalesce

import (
	"context"
	"errors"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type group struct{ *Group[int, struct{}] }

type run = Run[int, struct{}]

func newGroup() group { return group{New[int, struct{}](closed)} }

// begin is Join for a run that the test drives itself.
func (g group) begin() *run {
	r, _, _ := g.Join(context.Background(), "k")
	return r
}

// isOpen reports whether there is a run that can be joined.
func (g group) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open["k"] != nil
}

var errTest = errors.New("test")

func closed(string) error { return errTest }

// A run has the values of the ctx that it began with, and ends not with that, but when it is Done.
func TestTheContextOfARun(t *testing.T) {
	type key struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, 7))
	cancel()
	r, _, _ := newGroup().Join(ctx, "k")
	if r.Context().Err() != nil || r.Context().Value(key{}) != 7 {
		t.Errorf("%v, %v", r.Context().Err(), r.Context().Value(key{}))
	}
	if r.Done(); r.Context().Err() == nil {
		t.Error("it goes on")
	}
}

// A caller leaves with its own ctx, and no other does. The last one's leaving cancels the run, which cannot
// be joined any more.
func TestTheLastCallersLeavingCancelsTheRun(t *testing.T) {
	g := newGroup()
	first, ended := g.begin(), g.begin()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, left := ended.Wait(ctx); !left || ended != first || first.Context().Err() != nil || !g.isOpen() {
		t.Error("it was canceled before the last caller left")
	}
	if _, _, left := first.Wait(ctx); !left || first.Context().Err() == nil || g.isOpen() || first.Commit() {
		t.Error("it was not canceled")
	}
	next := g.begin()
	first.Finish(1, nil) // a run that ends removes only itself
	first.Done()
	if r, ok := g.JoinOpen("k"); !ok || r != next || r == first {
		t.Error("the next run was removed, or a canceled one joined")
	}
	next.Done()
	if _, ok := g.JoinOpen("k"); ok {
		t.Error("a run that is done was joined")
	}
}

// When the last caller leaves in the instant in which the run commits, the run is either canceled and cannot
// be joined, or continues and can be; never anything in between.
func TestTheLastCallerLeavesInTheInstantOfTheCommit(t *testing.T) {
	g := newGroup()
	outcomes := map[bool]int{}
	for outcomes[true] == 0 || outcomes[false] == 0 || outcomes[true]+outcomes[false] < 1000 {
		r, committed := g.begin(), false
		var wg sync.WaitGroup
		wg.Go(func() { r.Leave() })
		wg.Go(func() { committed = r.Commit() })
		wg.Wait()
		if canceled := r.Context().Err() != nil; committed == canceled || committed != g.isOpen() {
			t.Fatalf("committed %v, canceled %v, joinable %v", committed, canceled, g.isOpen())
		}
		r.Done()
		outcomes[committed]++
	}
}

// The first result counts, and a caller whose ctx has ended has it, too. After Deliver the run can still be
// joined, after Finish it cannot.
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
		if !r.Leave() || g.isOpen() {
			t.Fatal("it has no result, or can be joined")
		}
		r.Done()
	}
}

// A run in the background continues without callers, until it has to wait; with callers it waits, and ends
// with them.
func TestRunsInTheBackground(t *testing.T) {
	g := newGroup()
	r, ok := g.Background(t.Context(), "k")
	if !ok || r.Wanted() || g.isOpen() {
		t.Errorf("for nobody: ok %v, joinable %v", ok, g.isOpen())
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
	if r.Leave(); r.Context().Err() == nil || g.isOpen() {
		t.Error("it continues without its caller")
	}
	r.Done()
}

// Close ends runs that are not committed, Abort ends all, and Idle is closed when no run and no goroutine is
// left.
func TestCloseAndAbort(t *testing.T) {
	g, hang := newGroup(), make(chan struct{})
	isIdle := func() bool {
		select {
		case <-g.Idle():
			return true
		default:
			return false
		}
	}
	open, _, _ := g.Join(t.Context(), "open")
	committed := g.begin()
	committed.Commit()
	g.Go(func() { <-hang })
	g.Close(errTest)
	g.Close(errTest)
	_, err, _ := open.Wait(t.Context())
	//nolint:errorlint // itself
	if err != errTest || context.Cause(open.Context()) != errTest || committed.Context().Err() != nil {
		t.Errorf("%v; committed: %v", err, committed.Context().Err())
	}
	_, _, joined := g.Join(t.Context(), "new")
	_, open2 := g.JoinOpen("k")
	if _, begun := g.Background(t.Context(), "new"); joined || open2 || begun {
		t.Error("it is not closed")
	}
	open.Done()
	g.Abort(errTest)
	committed.Finish(1, nil)
	v, err, _ := committed.Wait(t.Context())
	if v != 1 || err != nil || context.Cause(committed.Context()) != errTest { //nolint:errorlint // it
		t.Errorf("%d, %v", v, err)
	}
	committed.Done()
	if runs, goroutines := g.Count(); runs != 0 || goroutines != 1 || isIdle() {
		t.Errorf("%d runs, %d goroutines", runs, goroutines)
	}
	close(hang)
	<-g.Idle()
	g = newGroup()
	r := g.begin()
	if g.Close(errTest); isIdle() {
		t.Error("it is idle with a run that is not done")
	}
	if r.Done(); !isIdle() {
		t.Error("it is not idle")
	}
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
	if n, _ := g.Count(); g.isOpen() || n != 1 || r.Context().Err() != nil {
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
