package coalesce

import (
	"context"
	"runtime/debug"
)

// Worker calls functions, one at a time, on a goroutine other than its owner's. The owner may stop
// waiting for a call at any time; the effects of an abandoned call are ignored. A panic or Goexit
// ends only the call.
//
// The goroutine is reused for the next call, because a stack that has grown need not grow again. If
// an abandoned call is still running, the next call gets another goroutine.
//
// Only the owner may call the methods.
type Worker struct {
	group *goroutines
	r     *routine // nil before the first call
	busy  bool     // r's call was not waited for to its end
}

// routine is one goroutine of a Worker.
type routine struct {
	group    *goroutines
	f        func()        // the call; set by the owner before it sends to calls
	panicked *Panic        // nil if the call returned; set before the send to returned
	calls    chan struct{} // closed when the owner no longer needs the goroutine
	returned chan struct{} // receives one value per call; buffered, so that an abandoned call ends
}

// Panic reports that a function panicked or called Goexit.
type Panic struct {
	Value  any // the value of the panic; nil for Goexit
	Goexit bool
	Stack  []byte
}

// Go starts a call.
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

// Wait waits until the last call that was started is over, or ctx has ended.
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

// Close ends the goroutine after its current call.
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
