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
)

type flight struct{ Run[int] }

func group(do func(*flight)) *Group[int, *flight] {
	return NewGroup[int](func() *flight { return new(flight) }, do)
}

// join is Join, and Start of a run that is new.
func join(g *Group[int, *flight], key string) *flight {
	fl, first, _ := g.Join(key)
	if first {
		g.Start(fl)
	}
	return fl
}

var errTest = errors.New("test")

func closed(string) error { return errTest }

// All callers that arrive before the result get it, and the function runs once; a caller that
// arrives after it begins a new run.
func TestCallersShareOneRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		g := group(func(fl *flight) {
			n++
			time.Sleep(time.Second)
			fl.Finish(n, nil)
		})
		for round := 1; round <= 2; round++ {
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					if v, err, left := join(g, "k").Wait(t.Context()); v != round || err != nil || left {
						t.Errorf("%d, %v, left %v", v, err, left)
					}
				})
			}
			wg.Wait()
		}
		synctest.Wait()
		if g.Running() != 0 || g.Goroutines() != 0 || g.Open("k") {
			t.Errorf("%d runs, %d goroutines", g.Running(), g.Goroutines())
		}
	})
}

// A caller leaves with its own ctx, and no other does. The last one's leaving cancels the run,
// and the next caller begins a new one.
func TestTheLastCallersLeavingCancelsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var causes []error
		g := group(func(fl *flight) {
			step := fl.Begin(context.Background(), -1)
			<-step.Done()
			causes = append(causes, context.Cause(step))
		})
		first := join(g, "k")
		for i := range 3 {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i+1)*time.Second)
				defer cancel()
				fl := first
				if i > 0 {
					fl = join(g, "k")
				}
				if _, _, left := fl.Wait(ctx); !left || fl != first {
					t.Errorf("left %v, another run %v", left, fl != first)
				}
			}()
		}
		time.Sleep(2500 * time.Millisecond)
		if first.Err() != nil || !g.Open("k") {
			t.Error("it was canceled before the last caller left")
		}
		time.Sleep(time.Second)
		if first.Err() == nil || g.Open("k") || len(causes) != 1 || causes[0] != errNoCallers {
			t.Errorf("canceled %v, causes %v", first.Err(), causes)
		}
		if next := join(g, "k"); next == first {
			t.Error("a canceled run was joined")
		} else {
			next.Leave()
		}
	})
}

// A run that is committed continues when all callers have left, and can be joined meanwhile.
func TestACommittedRunGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := group(func(fl *flight) {
			if !fl.Commit() {
				t.Error("it was canceled")
			}
			time.Sleep(time.Second)
			fl.Finish(7, nil)
		})
		fl := join(g, "k")
		synctest.Wait()
		fl.Leave()
		if v, err, left := join(g, "k").Wait(t.Context()); v != 7 || err != nil || left {
			t.Errorf("%d, %v, left %v", v, err, left)
		}
	})
}

// When the last caller leaves in the instant in which the run commits, the run is either canceled
// and cannot be joined, or continues and can be; never anything in between.
func TestTheLastCallerLeavesInTheInstantOfTheCommit(t *testing.T) {
	g := group(nil)
	outcomes := map[bool]int{}
	for outcomes[true] == 0 || outcomes[false] == 0 || outcomes[true]+outcomes[false] < 1000 {
		fl, _, _ := g.Join("k")
		var committed bool
		var wg sync.WaitGroup
		wg.Go(func() { fl.Leave() })
		wg.Go(func() { committed = fl.Commit() })
		wg.Wait()
		if canceled := fl.Err() != nil; committed == canceled || committed != g.Open("k") {
			t.Fatalf("committed %v, canceled %v, joinable %v", committed, canceled, g.Open("k"))
		}
		g.Refuse(fl, nil)
		outcomes[committed]++
	}
	t.Log(outcomes)
}

// A run that ends removes itself, and never the next run of its key.
func TestARunForgetsOnlyItself(t *testing.T) {
	g := group(nil)
	first, _, _ := g.Join("k")
	first.Leave()
	next, _, _ := g.Join("k")
	first.Finish(1, nil)
	g.Refuse(first, errTest)
	if fl, isNew, _ := g.Join("k"); fl != next || isNew {
		t.Error("the next run was removed")
	}
	g.Refuse(next, nil)
}

// A caller whose ctx ends when there is a result has the result. One whose run was canceled by
// its own leaving has left.
func TestAResultIsNotLeftBehind(t *testing.T) {
	g := group(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		fl, _, _ := g.Join("k")
		fl.Deliver(7, nil)
		if v, err, left := fl.Wait(ctx); v != 7 || err != nil || left {
			t.Fatalf("%d, %v, left %v", v, err, left)
		}
		g.Refuse(fl, nil)
	}
}

// Deliver leaves the run to be joined, and the first result stays.
func TestTheFirstResultCounts(t *testing.T) {
	g := group(nil)
	fl, _, _ := g.Join("k")
	fl.Deliver(1, nil)
	fl.Finish(2, errTest)
	if v, err, _ := fl.Wait(t.Context()); v != 1 || err != nil {
		t.Errorf("%d, %v", v, err)
	}
	g.Refuse(fl, errTest)
}

// A run in the background continues without callers, until it has to wait; with callers it waits,
// and ends with them.
func TestRunsInTheBackground(t *testing.T) {
	g := group(nil)
	fl, ok := g.Background("k")
	if !ok || !fl.InBackground() || fl.Wanted() || g.Open("k") {
		t.Errorf("for nobody: ok %v, joinable %v", ok, g.Open("k"))
	}
	g.Refuse(fl, nil)
	fl, _ = g.Background("k")
	if _, ok := g.Background("k"); ok {
		t.Error("two runs for a key")
	}
	caller, first, _ := g.Join("k")
	caller.Leave()
	if caller != fl || first || fl.Err() != nil {
		t.Error("a caller's leaving ended it")
	}
	_, _, _ = g.Join("k")
	if !fl.Wanted() || fl.InBackground() {
		t.Error("it does not wait for its caller")
	}
	fl.Leave()
	if fl.Err() == nil {
		t.Error("it continues without its caller")
	}
	g.Refuse(fl, nil)
}

// A run that is refused returns the error to those that have joined it meanwhile.
func TestRefuse(t *testing.T) {
	g := group(nil)
	fl, _, _ := g.Join("k")
	other, _, _ := g.Join("k")
	g.Refuse(fl, errTest)
	if _, err, _ := other.Wait(t.Context()); err != errTest || g.Open("k") || g.Running() != 0 {
		t.Errorf("%v, %d runs", err, g.Running())
	}
}

// Close ends runs that are not committed; Abort ends all; and Idle is closed when no goroutine is
// left.
func TestCloseAndAbort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		g := group(func(fl *flight) {
			if fl.Key() == "committed" {
				fl.Commit()
			}
			step := fl.Begin(context.Background(), time.Hour)
			fl.Worker.Go(func() { <-hang })
			if _, over := fl.Worker.Wait(step); over {
				t.Error("it returned")
			}
			if !errors.Is(context.Cause(step), errTest) {
				t.Errorf("cause %v", context.Cause(step))
			}
			fl.Finish(1, nil)
		})
		open, committed := join(g, "open"), join(g, "committed")
		synctest.Wait()
		g.Close(errTest, closed)
		g.Close(errTest, closed)
		if _, err, _ := open.Wait(t.Context()); err != errTest {
			t.Error(err)
		}
		if _, _, ok := g.Join("new"); ok {
			t.Error("joined")
		}
		if _, ok := g.Background("new"); ok || !g.Open("new") {
			t.Error("begun")
		}
		synctest.Wait()
		if g.Running() != 1 || g.Goroutines() != 3 {
			t.Errorf("%d runs, %d goroutines", g.Running(), g.Goroutines())
		}
		g.Abort(errTest)
		if v, err, _ := committed.Wait(t.Context()); v != 1 || err != nil {
			t.Errorf("%d, %v", v, err)
		}
		synctest.Wait()
		select {
		case <-g.Idle():
			t.Error("idle, while calls hang")
		default:
		}
		close(hang)
		<-g.Idle()
	})
	g := group(nil)
	g.Close(errTest, closed)
	<-g.Idle()
}

// Whatever callers and runs do at the same time, every caller has a result of its run, or has left,
// and nothing is left.
func TestCallersComeAndGo(t *testing.T) {
	var committed, canceled atomic.Int64
	g := group(func(fl *flight) {
		step := fl.Begin(context.Background(), time.Duration(rand.IntN(300))*time.Microsecond)
		defer step.End(nil)
		fl.Worker.Go(func() { <-step.Done() })
		fl.Worker.Wait(context.Background())
		if !fl.Commit() {
			canceled.Add(1)
			return
		}
		if committed.Add(1) > 1 {
			t.Error("two runs that are committed")
		}
		runtime.Gosched()
		committed.Add(-1) // before the next run can begin
		fl.Finish(7, nil)
	})
	var wg sync.WaitGroup
	var got, gone atomic.Int64
	for range 20 {
		wg.Go(func() {
			for range 300 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(400))*time.Microsecond)
				switch v, err, left := join(g, "k").Wait(ctx); {
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
	g.Close(errTest, closed)
	<-g.Idle()
	t.Logf("%d results, %d left, %d runs canceled", got.Load(), gone.Load(), canceled.Load())
}

// A result is for callers in its scope. One that is not makes the run unjoinable, and it continues.
func TestScope(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		finished := make(chan struct{})
		g := group(func(fl *flight) {
			fl.Limit(Scope{Limited: true, Before: 5, Stamp: "s"})
			fl.Deliver(1, nil)
			fl.Limit(Scope{}) // too late
			<-finished
			fl.Finish(2, nil)
		})
		fl := join(g, "k")
		if v, err, left := fl.Wait(t.Context()); v != 1 || err != nil || left {
			t.Error(v, err, left)
		}
		for _, c := range []struct {
			came  uint64
			stamp string
			want  bool
		}{{4, "", true}, {4, "x", true}, {5, "s", true}, {9, "s", true}} {
			if fl.For(c.came, c.stamp) != c.want {
				t.Errorf("%+v", c)
			}
		}
		if again, ok := g.JoinOpen("k"); !ok || again != fl {
			t.Error("it cannot be joined")
		}
		fl.Leave()
		for _, stamp := range []string{"", "x"} {
			if fl.For(5, stamp) {
				t.Errorf("%q is not in scope", stamp)
			}
		}
		if _, ok := g.JoinOpen("k"); ok || g.Running() != 1 {
			t.Error("it can be joined, or has ended")
		}
		close(finished)
		synctest.Wait()
		if g.Running() != 0 {
			t.Error("it has not ended")
		}
	})
}
