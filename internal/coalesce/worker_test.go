package coalesce

import (
	"bytes"
	"context"
	"runtime"
	"testing"
	"testing/synctest"
)

// goroutine returns the identity of the goroutine that it runs on.
func goroutine() string {
	b := make([]byte, 64)
	name, _, _ := bytes.Cut(b[:runtime.Stack(b, false)], []byte("["))
	return string(name)
}

// Calls run one after the other on one goroutine. A panic or Goexit is reported, and the next call
// runs.
func TestAWorkerCallsWhateverFunctions(t *testing.T) {
	var count goroutines
	w := Worker{group: &count}
	defer w.Close()
	var names [4]string
	for i, f := range []func(){func() {}, func() {}, func() { panic(errTest) }, runtime.Goexit} {
		w.Go(func() {
			names[i] = goroutine()
			f()
		})
		p, over := w.Wait(t.Context())
		switch {
		case !over, i < 2 && p != nil, i >= 2 && p == nil:
			t.Errorf("call %d: over %v, %v", i, over, p)
		case i == 2 && (p.Value != errTest || p.Goexit || !bytes.Contains(p.Stack, []byte("TestAWorker"))):
			t.Errorf("panic: %v, %v", p.Value, p.Goexit)
		case i == 3 && (p.Value != nil || !p.Goexit):
			t.Errorf("Goexit: %v, %v", p.Value, p.Goexit)
		}
	}
	if names[0] != names[1] || names[1] != names[2] || names[2] == names[3] {
		t.Errorf("they ran on %q", names)
	}
}

// A call that hangs delays nobody: not its owner, not the next call, and not the owner's end. It
// may also be waited for again.
func TestACallThatHangsHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var count goroutines
		w := Worker{group: &count}
		hang := make(chan struct{})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		w.Go(func() { <-hang })
		if _, over := w.Wait(ended); over {
			t.Error("it returned")
		}
		called := false
		w.Go(func() { called = true })
		if _, over := w.Wait(t.Context()); !over || !called {
			t.Error("the next call did not run")
		}
		w.Go(func() { <-hang })
		if _, over := w.Wait(ended); over {
			t.Error("it returned")
		}
		synctest.Wait()
		if n := count.n.Load(); n != 2 {
			t.Errorf("%d goroutines", n)
		}
		close(hang)
		if _, over := w.Wait(t.Context()); !over {
			t.Error("waiting for it timed out")
		}
		w.Close()
		w.Close()
		synctest.Wait()
		if n := count.n.Load(); n != 0 {
			t.Errorf("%d goroutines are left", n)
		}
	})
}
