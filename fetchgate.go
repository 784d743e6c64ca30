package flightlock

import (
	"container/list"
	"sync"

	"github.com/flightlock/flightlock/internal/coalesce"
)

// gate is where the loads of a Fetcher wait for a slot: MaxLoads of them run at once, and of these
// MaxUnlockedLoads without a lock. It admits them in the order in which they came, but one that
// waits for MaxUnlockedLoads holds up none that has a lock.
//
// A run that another one waits for needs no slot: the one that it would wait for may be held by
// the very load that waits for it. It runs beside those that count: see waitNode.urgent.
//
// A run that waits here has no lock, unless a caller that holds it anyway has lent it. Otherwise the
// limits of this process would hold up the others, which may have free slots.
type gate struct {
	maxLoads int // without a limit, a load that has a lock has nothing to do here

	mu      sync.Mutex // guards what follows
	counts  [2]limit   // by kind: unlocked counts loads without a lock, locked counts all
	waiting [2]list.List
	came    uint64
}

// limit is how many there may be, 0 for any number, and how many there are.
type limit struct{ max, used int }

func (l limit) full() bool { return l.max > 0 && l.used >= l.max }

// kind is what a slot is for.
type kind uint8

const (
	locked kind = iota
	unlocked
)

// slot is a load's, or the wait for one. There is nothing to give back until it is admitted, or
// if it does not count.
type slot struct {
	kind     kind
	admitted chan struct{} // closed when it is; nil if it does not count
	number   uint64

	// guarded by the gate's mutex
	at    *list.Element  // while it waits
	looks *coalesce.Step // in which its run does something else meanwhile; may be nil, or have ended
}

// uncounted is the slot of a load that does not count.
var uncounted = &slot{}

// atOnce is closed: the slots that need not wait share it.
var atOnce = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func newGate(maxLoads, maxUnlocked int) *gate {
	return &gate{maxLoads: maxLoads, counts: [2]limit{locked: {max: maxLoads}, unlocked: {max: maxUnlocked}}}
}

func (g *gate) fitsLocked(k kind) bool {
	return !g.counts[locked].full() && (k == locked || !g.counts[unlocked].full())
}

func (g *gate) addLocked(k kind, n int) {
	g.counts[locked].used += n
	if k == unlocked {
		g.counts[unlocked].used += n
	}
}

// join gives a slot, admitted at once if there is room: then no other waits that could take it.
func (g *gate) join(k kind) *slot { return g.joinAt(k, new(uint64)) }

// joinAt is join for one that may have been here before, and keeps its place: 0 if it was not.
func (g *gate) joinAt(k kind, place *uint64) *slot {
	if k == locked && g.maxLoads == 0 {
		return uncounted
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if *place == 0 {
		g.came++
		*place = g.came
	}
	if g.fitsLocked(k) {
		g.addLocked(k, 1)
		return &slot{kind: k, admitted: atOnce}
	}
	p := &slot{kind: k, admitted: make(chan struct{}), number: *place}
	g.queueLocked(p)
	return p
}

// queueLocked puts p where its number belongs: mostly last, and near the front if it was here before.
func (g *gate) queueLocked(p *slot) {
	q := &g.waiting[p.kind]
	if last := q.Back(); last == nil || last.Value.(*slot).number < p.number {
		p.at = q.PushBack(p)
		return
	}
	e := q.Front()
	for e.Value.(*slot).number < p.number {
		e = e.Next()
	}
	p.at = q.InsertBefore(p, e)
}

// isAdmitted reports whether p may load.
func (p *slot) isAdmitted() bool {
	if p.admitted == nil {
		return true
	}
	select {
	case <-p.admitted:
		return true
	default:
		return false
	}
}

// leave gives p back, or takes it out of the queue. It may be called for no slot.
func (g *gate) leave(p *slot) {
	if p == nil || p.admitted == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.at != nil {
		g.waiting[p.kind].Remove(p.at)
		p.at = nil
		return
	}
	g.addLocked(p.kind, -1)
	for next := g.nextLocked(); next != nil; next = g.nextLocked() {
		g.waiting[next.kind].Remove(next.at)
		next.at = nil
		g.addLocked(next.kind, 1)
		close(next.admitted)
		if next.looks != nil {
			next.looks.End(nil)
		}
	}
}

// interrupt has step end when p is admitted: its slot would be idle otherwise.
func (g *gate) interrupt(p *slot, step *coalesce.Step) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.looks = step; p.at == nil {
		step.End(nil)
	}
}

// unlock makes p, a slot among MaxLoads that was admitted, one for a load without a lock, if there is room for that.
// It may be called for no slot.
func (g *gate) unlock(p *slot) bool {
	if p == nil || p.admitted == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.counts[unlocked].full() {
		return false
	}
	g.counts[unlocked].used++
	p.kind = unlocked
	return true
}

// nextLocked is the one that came first of those for whom there is room.
func (g *gate) nextLocked() (next *slot) {
	for _, k := range [...]kind{locked, unlocked} {
		if e := g.waiting[k].Front(); e != nil && g.fitsLocked(k) {
			if p := e.Value.(*slot); next == nil || p.number < next.number {
				next = p
			}
		}
	}
	return next
}
