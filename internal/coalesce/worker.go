package coalesce

import (
	"context"
	"runtime/debug"
)

// Worker calls functions on a goroutine beside its owner's, one at a time. The owner waits for
// each as long as it likes, and then goes on without it: what the function does later is nobody's
// business. A panic or Goexit ends the call and nothing else.
//
// The goroutine is kept from one call to the next, because a stack that has grown once need not
// grow again. While a call is under way that the owner does not wait for any more, the next one
// gets another goroutine.
//
// All methods are for the owner.
type Worker struct {
	group *goroutines
	r     *routine // nil before the first call
	busy  bool     // r's call was not waited for to its end
}

// routine is one goroutine of a Worker.
type routine struct {
	group    *goroutines
	f        func()        // the call; set by the owner before it sends to calls
	panicked *Panic        // what came of it; set before returned
	calls    chan struct{} // closed when the owner needs the goroutine no more
	returned chan struct{} // of each call; has room for one
}

// Panic says that a function has not come back.
type Panic struct {
	Value  any // what it panicked with; nil for Goexit
	Goexit bool
	Stack  []byte
}

// Go begins a call.
func (w *Worker) Go(f func()) {
	if w.busy {
		w.dismiss()
	}
	w.busy = true
	if w.r == nil {
		w.r = &routine{group: w.group, f: f, calls: make(chan struct{}), returned: make(chan struct{}, 1)}
		w.group.add()
		go w.r.work()
		return
	}
	w.r.f = f
	w.r.calls <- struct{}{}
}

// Wait waits until the call that was begun last is over, or ctx has ended.
func (w *Worker) Wait(ctx context.Context) (p *Panic, over bool) {
	select {
	case <-w.r.returned:
		w.busy = false
		p := w.r.panicked
		if p != nil {
			w.dismiss() // Goexit has ended its goroutine
		}
		return p, true
	case <-ctx.Done():
		return nil, false
	}
}

// Close lets the goroutine go, when it has finished its call.
func (w *Worker) Close() {
	if w.r != nil {
		w.dismiss()
	}
}

func (w *Worker) dismiss() {
	close(w.r.calls)
	w.r, w.busy = nil, false
}

func (r *routine) work() {
	defer r.group.done()
	for more := true; more; _, more = <-r.calls {
		r.call()
	}
}

func (r *routine) call() {
	returned := false
	defer func() {
		if !returned {
			r.panicked = &Panic{Value: recover(), Stack: debug.Stack()}
			r.panicked.Goexit = r.panicked.Value == nil
		}
		r.returned <- struct{}{}
	}()
	r.f()
	returned = true
}
