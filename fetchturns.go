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

// turns is where callers of Fetch wait to make their own Lookups when very many come at once. Without it, the Lookups
// of a burst all queue for the connections of the cache's client, and the Lookups and Stores of those that hold locks queue
// behind them: locks are held for as long as the burst lasts, waiters poll them meanwhile, Lookups and Stores run out of
// time, and what was loaded is not stored.
//
// The first few Lookups under way, some freeOnes, are free. Those that come while so many are under way are made in turn,
// in order of arrival, so that limit of them are under way besides. A cache that keeps up sees none of this:
//
//   - limit is minTurns at least. While half of it is used, or callers wait, each Lookup in turn that is not slow raises
//     it by four, so that it grows fivefold with every round trip; each one that is lowers it by one.
//   - Slow is what takes more than twice as long as a free Lookup usually does: then there is a queue in front of the
//     cache, and it is not just far away. It is no less than a twentieth of LookupTimeout, and no more than a fifth, so
//     that the flights' own Lookups are far from it. A cache that has become slower since, and is not met by free Lookups
//     any more, is found out in time: with each LookupTimeout that all of them are slow, they may be a little slower.
//   - Where a part of a cache hangs, the others' answers raise the limit faster than what hangs uses it up. Whatever is
//     under way, minTurns callers get their turn in each LookupTimeout.
//   - Where all of it hangs, nobody waits for a turn, to wait for a Lookup after that. A LookupTimeout in which callers
//     waited and nothing was answered shows that. From then on, until something is answered, who finds no room goes on as
//     after a Lookup that ran out of time, at once: to the flight of its key. Those that find room find out whether it still hangs.
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
	crowded     atomic.Bool // somebody waits, nobody has begun, or nothing is answered. Written under mu

	mu       sync.Mutex // guards what follows
	begun    bool       // there was a Lookup
	limit    int
	inTurn   int           // Lookups in turn under way
	usual    time.Duration // what free ones take; 0: not known
	waiting  list.List     // of *turn
	given    int           // turns since the last tick
	answered time.Time     // when a Lookup in turn last had no error, or callers began to wait
	hung     bool          // nothing is answered
	ticking  bool          // tick will run
}

const (
	freeOnes  = 64
	minTurns  = 16
	turnCells = 8
	timedOf   = 64
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
	given chan struct{} // closed when it may look, and is counted; or when it is to go on without
	at    *list.Element // nil when that is so
	none  bool          // it is to go on without. Written before given is closed
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
	if c.Add(1)&looking > freeOnes/turnCells || t.crowded.Load() {
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

// leave counts a free Lookup out.
func (t *turns) leave(c *turnCell, hit bool) {
	n := ^uint64(0)
	if hit {
		n += oneHit
	}
	c.Add(n)
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

// errHung is why a caller does not look. It is that time has run out.
var errHung = fmt.Errorf("none of those that are under way is answered: %w", os.ErrDeadlineExceeded)

// wait returns when the caller may look, or with ctx's error or errHung.
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
	if x.at == nil { // given in this moment: Lookup sees ctx
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

// leaveTurn counts a Lookup in turn out, which took so long, and gives its turn to the next.
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
	case 2*t.inTurn > t.limit || t.waiting.Len() > 0: // before those that hang have all of it
		t.limit += 4
	}
	t.giveLocked(0)
}

// roomLocked reports whether there is room for one more in turn. Free ones take none of it: they may wait for those in
// turn, and may be of a part of the cache that hangs. So while anybody waits there is always one in turn whose end
// gives the next turn.
func (t *turns) roomLocked() bool { return t.inTurn < t.limit }

func (t *turns) crowdedLocked() { t.crowded.Store(t.waiting.Len() > 0 || t.hung) }

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

// refuseLocked has all who wait go on without a Lookup.
func (t *turns) refuseLocked() {
	for e := t.waiting.Front(); e != nil; e = t.waiting.Front() {
		x := t.waiting.Remove(e).(*turn)
		x.at, x.none = nil, true
		close(x.given)
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
	if time.Since(t.answered) >= t.period {
		t.hung = true
		t.refuseLocked()
	}
	t.giveLocked(minTurns - t.given)
	if t.ticking = t.waiting.Len() > 0; t.ticking {
		t.tickLocked()
	}
}
