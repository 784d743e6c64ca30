package node

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// maxDebts limits the memory that a dead node can cost. Past it a release that gets no answer is
// dropped, and the key stays until its ttl ends.
const maxDebts = 1 << 16

// debtSpread is below what anybody could notice.
const debtSpread = 100 * time.Microsecond

// debts are the releases that one node has not acknowledged: each entry whose release had no answer, or
// whose answer leaves it indeterminate, with the timer that will send the release again.
type debts struct {
	mu     sync.Mutex // guards what follows
	open   map[*Entry]*time.Timer
	closed bool
}

// owe sends e's release again after due, and a moment more that depends on its owner: what
// falls due together is sent in an order that a simulation can repeat.
func (d *debts) owe(e *Entry, due time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.open) >= maxDebts {
		return
	}
	if due > 0 {
		due += time.Duration(hashOf(e.t.Owner())) % debtSpread
	}
	d.open[e] = clock.AfterFunc(due, func() {
		d.mu.Lock()
		_, open := d.open[e]
		delete(d.open, e)
		d.mu.Unlock()
		if open {
			e.n.route(e.releaseAgain())
		}
	})
}

// hurry sends all debts now: the node answers again, and what others wait for may be behind one of
// them.
func (d *debts) hurry() {
	d.mu.Lock()
	all := make([]*Entry, 0, len(d.open))
	for e := range d.open {
		if d.open[e].Stop() { // else it is being sent
			delete(d.open, e)
			all = append(all, e)
		}
	}
	d.mu.Unlock()
	slices.SortFunc(all, byOwner)
	for _, e := range all {
		e.n.route(e.releaseAgain())
	}
}

// byOwner is an order that does not depend on the map: a simulation repeats what it did.
func byOwner(a, b *Entry) int { return strings.Compare(a.t.Owner(), b.t.Owner()) }

func (d *debts) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open)
}

func (d *debts) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for e, timer := range d.open {
		timer.Stop()
		delete(d.open, e)
	}
}
