package flightlock

import (
	"context"
	"sync"

	"github.com/flightlock/flightlock/internal/coalesce"
)

// A Fetch inside a Load, and one by a caller that holds the lock itself, would wait for themselves
// without what is here.

// waitNode is a run in the wait graph. A ctx of its Lookup, Load or Store carries it, to find
// out that a Fetch in there would wait for itself: directly, or through other runs, of any
// Fetcher. Waiting is an edge from run to run; a Fetch that would close a circle gets an
// error instead. Circles through other processes end by WaitTimeout. A run that another one
// waits for is urgent: it needs no slot at the gate.
//
// That a ctx carries the keys around it would not do: in a circle of loads that were begun by
// callers of their own, none has another's key in its ctx.
type waitNode struct { // guarded by waitGraphMu
	waits    map[*waitNode]int // for which ones, and how many times
	isUrgent bool              // some run has waited for it
	became   chan struct{}     // closed when isUrgent is set; nil until urgent is called
}

var waitGraphMu sync.Mutex // guards the edges; taken last, and only by a Fetch inside a run

type waitNodeKey struct{}

func waitNodeOf(ctx context.Context) *waitNode {
	x, _ := ctx.Value(waitNodeKey{}).(*waitNode)
	return x
}

// await notes that x waits for y, unless y waits for x.
func (x *waitNode) await(y *waitNode) bool {
	waitGraphMu.Lock()
	defer waitGraphMu.Unlock()
	if y.reaches(x, map[*waitNode]bool{}) {
		return false
	}
	if x.waits == nil {
		x.waits = map[*waitNode]int{}
	}
	x.waits[y]++
	if !y.isUrgent {
		y.isUrgent = true
		if y.became != nil {
			close(y.became)
		}
	}
	return true
}

// urgent is closed once another run waits for x, or has waited.
func (x *waitNode) urgent() <-chan struct{} {
	waitGraphMu.Lock()
	defer waitGraphMu.Unlock()
	if x.became == nil {
		x.became = make(chan struct{})
		if x.isUrgent {
			close(x.became)
		}
	}
	return x.became
}

// hasBeenAwaited reports whether urgent is closed.
func (x *waitNode) hasBeenAwaited() bool {
	waitGraphMu.Lock()
	defer waitGraphMu.Unlock()
	return x.isUrgent
}

// stopAwaiting notes that x waits for y no more.
func (x *waitNode) stopAwaiting(y *waitNode) {
	waitGraphMu.Lock()
	defer waitGraphMu.Unlock()
	if x.waits[y]--; x.waits[y] == 0 {
		delete(x.waits, y)
	}
}

// reaches says whether x is to, or waits for it. The caller holds waitGraphMu.
func (x *waitNode) reaches(to *waitNode, seen map[*waitNode]bool) bool {
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

// loan is a lock on a run's key that a caller holds itself. The caller waits for the run, and
// the run would wait for the lock. The run gets a Lock that is nested in it.
type loan struct {
	mu     sync.Mutex // guards what follows
	lock   *Lock
	step   *coalesce.Step // ended by an offer; nil while the run does not contend
	closed bool
}

// offer gives l to the run, and reports whether that has a use for it.
func (x *loan) offer(l *Lock) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed || x.lock != nil {
		return false
	}
	x.lock = l
	if x.step != nil {
		x.step.End(nil)
	}
	return true
}

// beginContending has an offer end step, in which the run contends. It reports false if there is a
// lock already.
func (x *loan) beginContending(step *coalesce.Step) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.step = step
	return x.lock == nil
}

// take gives the lock that was offered, or nil. The run does not contend any more.
func (x *loan) take() *Lock {
	x.mu.Lock()
	defer x.mu.Unlock()
	l := x.lock
	x.lock, x.step = nil, nil
	return l
}

// isOffered reports whether there is a lock to take.
func (x *loan) isOffered() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.lock != nil
}

// close is take, and refuses further offers.
func (x *loan) close() *Lock {
	x.mu.Lock()
	x.closed = true
	x.mu.Unlock()
	return x.take()
}
