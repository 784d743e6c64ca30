package flightlock

import (
	"container/list"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// turns is where callers of Fetch wait to make their own Lookups when very many come at once. Without it, the Lookups
// of a burst all queue for the connections of the cache's client, and the Lookups and Stores of those that hold locks queue
// behind them: locks are held for as long as the burst lasts, waiters poll them meanwhile, Lookups and Stores run out of
// time, and what was loaded is not stored.
//
// The first few Lookups under way, some minTurns, are free. Those that come while so many are under way are made in turn,
// in order of arrival, so that limit are under way in all. A cache that keeps up sees none of this:
//
//   - limit is minTurns at least. While callers wait, each Lookup in turn that is not slow raises it by four, so that it
//     grows fivefold with every round trip, and each one that is lowers it by one.
//   - Slow is what takes more than twice as long as a free Lookup usually does: then there is a queue in front of the
//     cache, and it is not just far away. It is no less than a twentieth of LookupTimeout, and no more than a fifth, so
//     that the flights' own Lookups are far from it. A cache that has become slower since, and is not met by free Lookups
//     any more, is found out in time: with each LookupTimeout that all of them are slow, they may be a little slower.
//   - Where a part of a cache hangs, the others' answers raise the limit faster than what hangs uses it up. Whatever is
//     under way, minTurns callers get their turn in each LookupTimeout, and all do after one in which nothing was
//     answered: then there is nothing to protect, and each has its own client's error to wait for.
//   - A Fetch inside a Lookup in turn waits for none, or all turns might be those of Lookups that wait for it. Those
//     that are free may do so: they hold nobody up.
//
// The Lookups that flights make take no part: they go before all of these.
//
// Where nobody waits, a Lookup costs two additions to a counter that few processors share; the first one, and one of
// timedOf, is timed.
type turns struct {
	least, most time.Duration // what slow is between
	period      time.Duration // LookupTimeout
	cells       [turnCells]turnCell
	crowded     atomic.Bool // somebody waits, or nobody has begun. Written under mu

	mu       sync.Mutex // guards what follows
	begun    bool       // there was a Lookup
	limit    int
	inTurn   int           // Lookups in turn under way
	usual    time.Duration // what free ones take; 0: not known
	waiting  list.List     // of *turn
	given    int           // turns since the last tick
	answered time.Time     // when a Lookup in turn last had no error, or callers began to wait
	ticking  bool          // tick will run
}

const (
	minTurns    = 64
	leastInTurn = 4
	turnCells   = 8
	timedOf     = 64
)

// turnCell counts free Lookups under way in its low bits, and hits above them: an end and a hit are one addition. On a hot
// key all processors are here at once, so there are several cells, a cache line each.
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
	given chan struct{} // closed when it may look, and is counted
	at    *list.Element // nil when it is
}

// inTurnOf is the key of a ctx by which a Lookup is made in turn.
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

func (t *turns) freeOnes() (n int) {
	for i := range t.cells {
		n += int(t.cells[i].Load() & looking)
	}
	return n
}

// way is how a Lookup is made.
type way uint8

const (
	free  way = iota // at once; leave has to be called after it
	timed            // likewise, and learn
	taken            // in turn: wait has to be called before it, and leaveTurn after it
)

// enter counts a Lookup, if it is free.
func (t *turns) enter() (c *turnCell, _ way) {
	r := rand.Uint32()
	c = &t.cells[r%turnCells]
	if c.Add(1)&looking > minTurns/turnCells || t.crowded.Load() {
		return c, t.entered(c)
	}
	if r/turnCells%timedOf == 0 {
		return c, timed
	}
	return c, free
}

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

// leave counts a free Lookup out, and gives its place to one in turn.
func (t *turns) leave(c *turnCell, hit bool) {
	n := ^uint64(0)
	if hit {
		n += oneHit
	}
	c.Add(n)
	if t.crowded.Load() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.giveLocked(0)
	}
}

// learn notes how long a free Lookup took.
func (t *turns) learn(took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if took = min(took, t.most); t.usual == 0 || took < t.usual {
		t.usual = max(took, 1)
	}
	t.usual += (took - t.usual) / 32
}

// wait returns when the caller may look, or with ctx's error.
func (t *turns) wait(ctx context.Context) error {
	t.mu.Lock()
	if t.waiting.Len() == 0 && t.roomLocked() {
		t.inTurn++
		t.mu.Unlock()
		return nil
	}
	x := &turn{given: make(chan struct{})}
	x.at = t.waiting.PushBack(x)
	t.giveLocked(0)
	t.mu.Unlock()
	select {
	case <-x.given:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.at == nil { // given in this moment: Lookup sees ctx
		return nil
	}
	t.waiting.Remove(x.at)
	t.crowdedLocked()
	return fmt.Errorf("too many are under way: %w", ctx.Err())
}

// leaveTurn counts a Lookup in turn out, which took so long, and gives its turn to the next.
func (t *turns) leaveTurn(took time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inTurn--
	if err == nil {
		t.answered = time.Now()
		if took < t.usual {
			t.usual = took
		}
	}
	switch slow := min(max(2*t.usual, t.least), t.most); {
	case took > slow:
		t.limit = max(t.limit-1, minTurns)
	case t.waiting.Len() > 0:
		t.limit += 4
	}
	t.giveLocked(0)
}

// roomLocked reports whether there is room for one more in turn. However many are free, that is so for a few: there is
// always one in turn whose end gives the next turn, while anybody waits, and free ones may wait for those.
func (t *turns) roomLocked() bool {
	return t.inTurn < max(t.limit-minTurns+leastInTurn, t.limit-t.freeOnes())
}

func (t *turns) crowdedLocked() { t.crowded.Store(t.waiting.Len() > 0) }

// giveLocked gives turns while there is room, and in any case to the first few.
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

func (t *turns) tickLocked() {
	t.given = 0
	time.AfterFunc(t.period, t.tick)
}

// tick is called in each period while callers wait.
func (t *turns) tick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.limit == minTurns {
		t.usual = min(t.usual+t.usual/4, t.most)
	}
	few := minTurns - t.given
	if time.Since(t.answered) >= t.period {
		few = t.waiting.Len()
	}
	t.giveLocked(few)
	if t.ticking = t.waiting.Len() > 0; t.ticking {
		t.tickLocked()
	}
}
