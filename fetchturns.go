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
// A cache that keeps up sees none of this:
//
//   - Nobody waits while fewer than minTurns Lookups are under way.
//   - While callers wait, each Lookup that is answered before slow is over raises the limit by one, so that it doubles with
//     every round trip, and each one that takes longer lowers it by one, down to minTurns. So a Lookup takes about slow
//     when there are too many, whatever the cache's latency and rate are.
//   - Where a part of a cache hangs, the others' answers raise the limit faster than what hangs uses it up. Whatever is
//     under way, minTurns callers get their turn in each LookupTimeout, and all do after one in which nothing was
//     answered: then there is nothing to protect, and each has its own client's error to wait for.
//
// Turns are given in order of arrival. The Lookups that flights make take no part: they go before all of these.
//
// Where nobody waits, a Lookup costs two additions to a counter that few processors share.
type turns struct {
	slow    time.Duration // a twentieth of LookupTimeout, so that the flights' own Lookups are far from it
	period  time.Duration // LookupTimeout
	cells   [turnCells]turnCell
	crowded atomic.Bool // somebody waits. Set under mu, and read by those who leave, after they have counted themselves out

	mu       sync.Mutex // guards what follows
	limit    int
	waiting  list.List // of *turn
	given    int       // turns since the last tick
	answered int       // Lookups without an error since the last tick, as far as callers waited
	ticking  bool      // tick will run
}

const (
	minTurns  = 64
	turnCells = 8
)

// turnCell counts Lookups under way in its low bits, and hits above them: an end and a hit are one addition. On a hot
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
	cell  *turnCell
	given chan struct{} // closed when it may look, and is counted
	at    *list.Element // nil when it is
}

func (t *turns) begin(lookupTimeout time.Duration) {
	t.slow, t.period, t.limit = lookupTimeout/20, lookupTimeout, minTurns
}

func (t *turns) hits() (n uint64) {
	for i := range t.cells {
		n += t.cells[i].Load() / oneHit
	}
	return n
}

// underWay is how many Lookups are.
func (t *turns) underWay() (n int) {
	for i := range t.cells {
		n += int(t.cells[i].Load() & looking)
	}
	return n
}

// enter counts a Lookup. inTurn says that the caller has to call wait before it looks, and timed after it.
func (t *turns) enter() (c *turnCell, inTurn bool) {
	c = &t.cells[rand.Uint32()%turnCells]
	return c, c.Add(1)&looking > minTurns/turnCells || t.crowded.Load()
}

// leave counts a Lookup out, and gives its turn to the next.
func (t *turns) leave(c *turnCell, hit bool, err error) {
	n := ^uint64(0)
	if hit {
		n += oneHit
	}
	c.Add(n)
	if t.crowded.Load() {
		t.left(err)
	}
}

func (t *turns) left(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		t.answered++
	}
	t.giveLocked(0)
}

// wait returns when the caller may look, or with ctx's error, and then it is counted out.
func (t *turns) wait(ctx context.Context, c *turnCell) error {
	t.mu.Lock()
	if t.waiting.Len() == 0 && t.underWay() <= t.limit {
		t.mu.Unlock()
		return nil
	}
	c.Add(^uint64(0))
	x := &turn{cell: c, given: make(chan struct{})}
	x.at = t.waiting.PushBack(x)
	t.crowded.Store(true) // before the count: who leaves after that gives
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
	t.crowded.Store(t.waiting.Len() > 0)
	return fmt.Errorf("too many are under way: %w", ctx.Err())
}

// timed says how long a Lookup took that was made in turn.
func (t *turns) timed(took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case took > t.slow:
		t.limit = max(t.limit-1, minTurns)
	case t.waiting.Len() > 0:
		t.limit++
		t.giveLocked(0)
	}
}

// giveLocked gives turns while there is room, and in any case to the first few.
func (t *turns) giveLocked(few int) {
	for e := t.waiting.Front(); e != nil && (few > 0 || t.underWay() < t.limit); e = t.waiting.Front() {
		x := t.waiting.Remove(e).(*turn)
		x.at = nil
		x.cell.Add(1)
		close(x.given)
		t.given++
		few--
	}
	t.crowded.Store(t.waiting.Len() > 0)
	if t.waiting.Len() > 0 && !t.ticking {
		t.given, t.answered, t.ticking = 0, 0, true
		time.AfterFunc(t.period, t.tick)
	}
}

// tick is called a period after callers began to wait, and after the last tick.
func (t *turns) tick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ticking = false
	few := minTurns - t.given
	if t.answered == 0 {
		few = t.waiting.Len()
	}
	t.giveLocked(few)
}
