package flightlock

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
)

// How a flight of a Fetcher calls functions that it does not know.

// PanicError is what the callers of Fetch get when a function of the Source has panicked,
// or called runtime.Goexit, on a goroutine of the Fetcher.
type PanicError struct {
	Op     string // "Load", "Lookup" or "Store"
	Value  any    // what it panicked with; nil for Goexit
	Goexit bool
	Stack  []byte // of its goroutine
}

// Error gives the value, on one line. Where it came from is in Stack.
func (e *PanicError) Error() string {
	if e.Goexit {
		return fmt.Sprintf("flightlock: %s called runtime.Goexit", e.Op)
	}
	return fmt.Sprintf("flightlock: %s panicked: %s", e.Op, oneLine(e.Value))
}

// Unwrap gives the value, if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// answer is what a function of the Source has returned.
type answer[V any] struct {
	v     V
	fresh Freshness
	err   error
}

// call runs fn on a goroutine of its own. The answer comes whatever fn does, unless it
// never ends; nobody has to wait for it.
func (f *Fetcher[V]) call(op string, fn func() (V, Freshness, error)) <-chan answer[V] {
	f.mu.Lock()
	f.enterLocked()
	f.mu.Unlock()
	answered := make(chan answer[V], 1)
	go func() {
		var a answer[V]
		returned := false
		defer func() {
			if !returned {
				e := &PanicError{Op: op, Value: recover(), Stack: debug.Stack()}
				e.Goexit = e.Value == nil
				a = answer[V]{err: e}
			}
			answered <- a
			f.mu.Lock()
			f.leftLocked(1)
			f.mu.Unlock()
		}()
		a.v, a.fresh, a.err = fn()
		returned = true
	}()
	return answered
}

// flying is a flight that a ctx of its Lookup, Load or Store belongs to, to find out that
// a Fetch in there would wait for itself: directly, or through other flights, of any
// Fetcher. Waiting is an edge from flight to flight; whoever would close a circle gets an
// error instead. Circles through other processes end by WaitTimeout. A flight that another one
// waits for is urgent: it needs no place at the gate.
type flying struct { // guarded by flyingMu
	waits   map[*flying]int // for whom, and how many times
	awaited bool            // some flight has waited for it
	wanted  chan struct{}   // closed when awaited is set; nil until somebody asks
}

var flyingMu sync.Mutex // guards the edges; taken last, and only by a Fetch inside a flight

type flyingKey struct{}

func flightOf(ctx context.Context) *flying {
	x, _ := ctx.Value(flyingKey{}).(*flying)
	return x
}

// await notes that x waits for y, unless y waits for x.
func (x *flying) await(y *flying) bool {
	flyingMu.Lock()
	defer flyingMu.Unlock()
	if y.reaches(x, map[*flying]bool{}) {
		return false
	}
	if x.waits == nil {
		x.waits = map[*flying]int{}
	}
	x.waits[y]++
	if !y.awaited {
		y.awaited = true
		if y.wanted != nil {
			close(y.wanted)
		}
	}
	return true
}

// urgent is closed once another flight waits for x, or has waited.
func (x *flying) urgent() <-chan struct{} {
	flyingMu.Lock()
	defer flyingMu.Unlock()
	if x.wanted == nil {
		x.wanted = make(chan struct{})
		if x.awaited {
			close(x.wanted)
		}
	}
	return x.wanted
}

func (x *flying) forgo(y *flying) {
	flyingMu.Lock()
	defer flyingMu.Unlock()
	if x.waits[y]--; x.waits[y] == 0 {
		delete(x.waits, y)
	}
}

// reaches says whether x is to, or waits for it. The caller holds flyingMu.
func (x *flying) reaches(to *flying, seen map[*flying]bool) bool {
	if x == to {
		return true
	}
	seen[x] = true
	for y := range x.waits {
		if !seen[y] && y.reaches(to, seen) {
			return true
		}
	}
	return false
}
