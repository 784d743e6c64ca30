package flightlock

import (
	"container/list"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// turns limits how many callers of Fetch make their own Lookups at the same time. Without it, the
// Lookups of a burst fill the connection pool of the cache's client, and the Lookups and Stores of
// lock holders queue behind them: locks are held for as long as the burst lasts, waiters poll them
// meanwhile, Lookups and Stores time out, and loaded values are not stored.
//
// A Lookup is either free or in turn. Some freeOnes Lookups at a time are free: they start at once.
// When as many are under way, or while callers wait, further Lookups are made in turn: they start in
// order of arrival, and limit of them may be under way. A cache that keeps up is not slowed down:
//
//   - limit adapts, and is never below minTurns. A Lookup in turn that was not slow raises it by four
//     if more than half of it is in use or callers wait: limit may grow fivefold with every round
//     trip. A slow one lowers it by one.
//   - A Lookup is slow if it took more than twice as long as a free Lookup usually does: then Lookups
//     queue in front of the cache, and it is not only far away. The threshold is a twentieth of
//     LookupTimeout at least, and a fifth at most, which leaves the flights' own Lookups far from
//     their timeout. A cache may have become slower since free Lookups were last timed. So after each
//     LookupTimeout that ends with limit at minTurns, the usual time is raised by a quarter.
//   - If a part of the cache hangs, the answers of the rest raise limit faster than the Lookups that
//     hang use it up. And at least minTurns of the callers that wait get a turn in each LookupTimeout,
//     whatever is under way.
//   - If all of the cache hangs, a caller does not wait for a turn only to wait for its Lookup. The
//     cache counts as hung after a LookupTimeout in which callers waited and no Lookup in turn
//     succeeded, and until one does. Meanwhile a caller that finds no room makes no Lookup. It goes on
//     at once, as after a Lookup that timed out: to the flight of its key. Those that find room make
//     their Lookups, and so find out when the cache answers again.
//   - A Fetch inside a Lookup in turn needs no turn of its own: otherwise all turns might be taken by
//     Lookups that wait for it. Inside a free Lookup it may wait for one, for free Lookups do not take
//     turns from others.
//
// The Lookups of flights are not limited here, so that they do not wait for callers' Lookups.
//
// When nobody waits, a Lookup costs two atomic additions to one of several counters. The first
// Lookup is timed, and of the free ones after it one in timedOf.
type turns struct {
	least, most time.Duration // bounds of the threshold for slow
	period      time.Duration // LookupTimeout
	cells       [turnCells]turnCell
	crowded     atomic.Bool // no Lookup is free: callers wait, hung is set, or there was no Lookup yet. Written under mu

	mu       sync.Mutex    // guards what follows
	begun    bool          // there was a Lookup
	limit    int           // how many Lookups in turn may be under way
	inTurn   int           // Lookups in turn under way
	usual    time.Duration // how long a free Lookup usually takes; 0: not known
	waiting  list.List     // of *turn
	given    int           // turns that were given to waiting callers since the last tick
	answered time.Time     // when a Lookup in turn last succeeded, or callers began to wait if that is later
	hung     bool          // no Lookup in turn succeeded for a period in which callers waited
	ticking  bool          // tick is scheduled
}

const (
	freeOnes  = 64
	minTurns  = 16
	turnCells = 8
	timedOf   = 64
)

// turnCell counts free Lookups under way in its low bits, and hits in the bits above them, so that
// one addition counts the end of a Lookup and its hit. For a hot key all processors count at once, so
// there are several cells, each in a cache line of its own.
type turnCell struct {
	atomic.Uint64
	_ [56]byte
}

const (
	oneHit  = 1 << 24
	looking = oneHit - 1
)

// turn is a caller that waits.
type turn struct {
	given chan struct{} // closed when the wait is over: the caller has a turn, and is counted in inTurn; or none is set
	at    *list.Element // its place in waiting; nil once the wait is over. Guarded by mu
	none  bool          // the caller gets no turn. Written before given is closed
}

// inTurnOf is the ctx key that marks the ctx of a Lookup in turn, for Fetch calls inside it.
type inTurnOf struct{ *turns }

func (t *turns) begin(lookupTimeout time.Duration) {
	t.least, t.most, t.period, t.limit = lookupTimeout/20, lookupTimeout/5, lookupTimeout, minTurns
	t.crowded.Store(true)
}

func (t *turns) hits() (n uint64) {
	for i := range t.cells {
		n += t.cells[i].Load() / oneHit
	}
	return n
}

// way says how a caller makes its Lookup.
type way uint8

const (
	free  way = iota // at once; the caller calls leave afterwards
	timed            // as free; the caller also calls learn
	taken            // in turn: the caller calls wait before it, and leaveTurn afterwards
)

// enter decides how a caller makes its Lookup, and counts it in c if it is free.
func (t *turns) enter() (c *turnCell, _ way) {
	r := rand.Uint32()
	c = &t.cells[r%turnCells]
	if c.Add(1)&looking > freeOnes/turnCells || t.crowded.Load() {
		return c, t.entered(c)
	}
	if r/turnCells%timedOf == 0 {
		return c, timed
	}
	return c, free
}

// entered is enter for a Lookup that is not free, unless it is the first of all.
func (t *turns) entered(c *turnCell) way {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.begun {
		t.begun = true
		t.crowdedLocked()
		return timed
	}
	c.Add(^uint64(0))
	return taken
}

// leave counts the end of a free Lookup.
func (t *turns) leave(c *turnCell, hit bool) {
	n := ^uint64(0)
	if hit {
		n += oneHit
	}
	c.Add(n)
}

// learn updates usual with the time that a free Lookup took: at once if it was less, else slowly.
func (t *turns) learn(took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if took = min(took, t.most); t.usual == 0 || took < t.usual {
		t.usual = max(took, 1)
	}
	t.usual += (took - t.usual) / 32
}

// errHung is the error of a caller that makes no Lookup because the cache hangs. It counts as a
// timeout: see ranOut.
var errHung = fmt.Errorf("none of those that are under way is answered: %w", os.ErrDeadlineExceeded)

// wait waits for a turn. Its error is that of ctx, or errHung.
func (t *turns) wait(ctx context.Context) error {
	t.mu.Lock()
	switch {
	case t.waiting.Len() == 0 && t.roomLocked():
		t.inTurn++
		t.mu.Unlock()
		return nil
	case t.hung:
		t.mu.Unlock()
		return errHung
	}
	x := &turn{given: make(chan struct{})}
	x.at = t.waiting.PushBack(x)
	t.giveLocked(0)
	t.mu.Unlock()
	select {
	case <-x.given:
		return x.err()
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.at == nil { // given at the same moment: the caller has the turn, and Lookup sees that ctx has ended
		return x.err()
	}
	t.waiting.Remove(x.at)
	t.crowdedLocked()
	return fmt.Errorf("too many are under way: %w", ctx.Err())
}

func (x *turn) err() error {
	if x.none {
		return errHung
	}
	return nil
}

// leaveTurn counts the end of a Lookup in turn, adapts limit and usual to the time that it took, and
// gives turns to callers that wait.
func (t *turns) leaveTurn(took time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inTurn--
	if err == nil {
		t.answered, t.hung = time.Now(), false
		if took < t.usual {
			t.usual = took
		}
	}
	switch slow := min(max(2*t.usual, t.least), t.most); {
	case took > slow:
		t.limit = max(t.limit-1, minTurns)
	case 2*t.inTurn > t.limit || t.waiting.Len() > 0: // not only at the limit: Lookups that hang may be near it
		t.limit += 4
	}
	t.giveLocked(0)
}

// roomLocked reports whether one more Lookup in turn may start. Free Lookups do not count: they may
// wait for Lookups in turn, and may hang. So while callers wait, there is a Lookup in turn under way,
// and its end gives the next turn.
func (t *turns) roomLocked() bool { return t.inTurn < t.limit }

func (t *turns) crowdedLocked() { t.crowded.Store(t.waiting.Len() > 0 || t.hung) }

// giveLocked gives turns to waiting callers while there is room, and to the first few in any case. It
// starts the ticks if callers still wait.
func (t *turns) giveLocked(few int) {
	for e := t.waiting.Front(); e != nil && (few > 0 || t.roomLocked()); e = t.waiting.Front() {
		x := t.waiting.Remove(e).(*turn)
		x.at = nil
		t.inTurn++
		close(x.given)
		t.given++
		few--
	}
	t.crowdedLocked()
	if t.waiting.Len() > 0 && !t.ticking {
		t.ticking, t.answered = true, time.Now()
		t.tickLocked()
	}
}

// refuseLocked ends the wait of all callers, without a turn.
func (t *turns) refuseLocked() {
	for e := t.waiting.Front(); e != nil; e = t.waiting.Front() {
		x := t.waiting.Remove(e).(*turn)
		x.at, x.none = nil, true
		close(x.given)
	}
}

// tickLocked schedules the next tick.
func (t *turns) tickLocked() {
	t.given = 0
	time.AfterFunc(t.period, t.tick)
}

// tick runs once per period while callers wait.
func (t *turns) tick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.limit == minTurns {
		t.usual = min(t.usual+t.usual/4, t.most)
	}
	if time.Since(t.answered) >= t.period {
		t.hung = true
		t.refuseLocked()
	}
	t.giveLocked(minTurns - t.given)
	if t.ticking = t.waiting.Len() > 0; t.ticking {
		t.tickLocked()
	}
}
