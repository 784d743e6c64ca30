package flightlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/list"
)

// lookupPermits limits how many callers of Fetch make their own Lookups at the same time. Without
// it, the Lookups of a burst fill the connection pool of the cache's client, and the Lookups and
// Stores of lock holders queue behind them: locks are held for as long as the burst lasts,
// waiters poll them meanwhile, Lookups and Stores time out, and loaded values are not stored.
//
// A Lookup either is free or needs a permit. Some freeLookups at a time are free: they start at
// once. When as many are in progress, or while callers wait, further Lookups need permits: they get
// them in order of arrival, and limit of them may be in use. A cache that keeps up is not slowed
// down:
//
//   - limit adapts, and is never below minPermits. A Lookup with a permit that was not slow raises it
//     by four if more than half of it is in use or callers wait: limit may grow fivefold with every
//     round trip. A slow one lowers it by one.
//   - A Lookup is slow if it took more than twice as long as a free Lookup usually does: then Lookups
//     queue in front of the cache, and it is not only far away. The threshold is a twentieth of
//     LookupTimeout at least, and a fifth at most, which leaves the runs' own Lookups far from
//     their timeout: as far as the cache is concerned. Where the processors of this machine are busy for as
//     long, goroutines wait for them, and others for connections that these have, until some Lookups time
//     out before they were written, though the cache would answer at once. No limit here prevents that.
//   - A cache may have become slower since free Lookups were last timed. So after each LookupTimeout that
//     ends with limit at minPermits, the usual time is raised by a quarter.
//   - If a part of the cache hangs, the answers of the rest raise limit faster than the Lookups that
//     hang use it up. And at least minPermits of the callers that wait get a permit in each
//     LookupTimeout, whatever is in progress.
//   - If all of the cache hangs, a caller does not wait for a permit only to wait for its Lookup. The
//     cache counts as hung after a LookupTimeout in which callers waited and no Lookup with a permit
//     succeeded, and until one does. Meanwhile a caller that finds no room makes no Lookup. It continues
//     at once, as after a Lookup that timed out: to the run of its key. Those that find room make
//     their Lookups, and so find out when the cache answers again.
//   - A Fetch inside a Lookup with a permit needs none of its own: otherwise all permits might be in
//     use by Lookups that wait for it. Inside a free Lookup it may wait for one, for free Lookups use
//     no permits.
//
// The Lookups of runs have no permits of these, so that they do not wait for callers' Lookups. Those before loads have
// permits of their own.
//
// When no caller waits, a Lookup costs two atomic additions to one of several counters. The first
// Lookup is timed, and of the free ones after it one in timedOf.
type lookupPermits struct {
	least, most time.Duration // bounds of the threshold for slow
	period      time.Duration // LookupTimeout
	counters    [lookupCounters]lookupCounter
	crowded     atomic.Bool // no Lookup is free: callers wait, hung is set, or there was no Lookup yet. Written under mu

	mu       sync.Mutex    // guards what follows
	begun    bool          // there was a Lookup
	limit    int           // how many permits there are
	used     int           // permits in use
	usual    time.Duration // how long a free Lookup usually takes; 0: not known
	waiting  list.List[permitWait, *permitWait]
	given    int       // permits that were given to waiting callers since the last tick
	answered time.Time // when a Lookup with a permit last succeeded, or callers began to wait if that is later
	hung     bool      // no Lookup with a permit succeeded for a period in which callers waited
	ticking  bool      // tick is scheduled
}

const (
	freeLookups    = 64
	minPermits     = 16
	lookupCounters = 8
	timedOf        = 64
)

// lookupCounter counts free Lookups in progress in its low bits, and hits in the bits above them,
// so that one addition counts the end of a Lookup and its hit. For a hot key all processors count
// at once, so there are several counters, each in a cache line of its own.
type lookupCounter struct {
	atomic.Uint64
	_ [56]byte
}

const (
	oneHit   = 1 << 24
	underWay = oneHit - 1
)

// permitWait is a caller that waits for a permit.
type permitWait struct {
	over    chan struct{} // closed when the wait is over: the permit counts as used, or refused is set
	refused bool          // the caller gets no permit. Written before over is closed

	links list.Links[permitWait] // in waiting; guarded by mu, as is waits
	waits bool                   // it is in waiting
}

// ListLinks is for package list.
func (x *permitWait) ListLinks() *list.Links[permitWait] { return &x.links }

// permitOf is the ctx key that marks the ctx of a Lookup with a permit, for Fetch calls inside it.
type permitOf struct{ *lookupPermits }

func (p *lookupPermits) begin(lookupTimeout time.Duration) {
	p.least, p.most, p.period, p.limit = lookupTimeout/20, lookupTimeout/5, lookupTimeout, minPermits
	p.crowded.Store(true)
}

func (p *lookupPermits) hits() (n uint64) {
	for i := range p.counters {
		n += p.counters[i].Load() / oneHit
	}
	return n
}

// admission says how a caller makes its Lookup.
type admission uint8

const (
	free        admission = iota // at once; the caller calls leave afterwards
	timed                        // as free; the caller also calls observe
	needsPermit                  // the caller calls wait before it, and giveBack afterwards
)

// enter decides how a caller makes its Lookup, and counts it in c if it is free.
func (p *lookupPermits) enter() (c *lookupCounter, _ admission) {
	r := rand.Uint32()
	c = &p.counters[r%lookupCounters]
	if c.Add(1)&underWay > freeLookups/lookupCounters || p.crowded.Load() {
		return c, p.entered(c)
	}
	if r/lookupCounters%timedOf == 0 {
		return c, timed
	}
	return c, free
}

// entered is enter for a Lookup that is not free, unless it is the first of all.
func (p *lookupPermits) entered(c *lookupCounter) admission {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.begun {
		p.begun = true
		p.crowdedLocked()
		return timed
	}
	c.Add(^uint64(0))
	return needsPermit
}

// leave counts the end of a free Lookup.
func (p *lookupPermits) leave(c *lookupCounter, hit bool) {
	n := ^uint64(0)
	if hit {
		n += oneHit
	}
	c.Add(n)
}

// admit waits until a Lookup may begin that is not a caller's own. Its outcome is passed to returned.
func (p *lookupPermits) admit(ctx context.Context) (returned func(err error), _ error) {
	c, how := p.enter()
	began := time.Now()
	if how != needsPermit {
		return func(err error) {
			if err == nil && how == timed {
				p.observe(time.Since(began))
			}
			p.leave(c, false)
		}, nil
	}
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	began = time.Now()
	return func(err error) { p.giveBack(time.Since(began), err) }, nil
}

// observe updates usual with the time that a free Lookup took: at once if it was less, else slowly.
func (p *lookupPermits) observe(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if took = min(took, p.most); p.usual == 0 || took < p.usual {
		p.usual = max(took, 1)
	}
	p.usual += (took - p.usual) / 32
}

// errHung is the error of a caller that makes no Lookup because the cache hangs. It counts as a
// timeout: see ranOut.
var errHung = fmt.Errorf("none of those that are under way is answered: %w", os.ErrDeadlineExceeded)

// wait waits for a permit. Its error is that of ctx, or errHung.
func (p *lookupPermits) wait(ctx context.Context) error {
	p.mu.Lock()
	switch {
	case p.waiting.Front() == nil && p.roomLocked():
		p.used++
		p.mu.Unlock()
		return nil
	case p.hung:
		p.mu.Unlock()
		return errHung
	}
	x := &permitWait{over: make(chan struct{}), waits: true}
	p.waiting.PushBack(x)
	p.giveLocked(0)
	p.mu.Unlock()
	select {
	case <-x.over:
		return x.err()
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !x.waits { // given at the same moment: the caller has the permit, and Lookup sees that ctx has ended
		return x.err()
	}
	p.waiting.Remove(x)
	p.crowdedLocked()
	return fmt.Errorf("too many are under way: %w", ctx.Err())
}

func (x *permitWait) err() error {
	if x.refused {
		return errHung
	}
	return nil
}

// giveBack counts the end of a Lookup with a permit, adapts limit and usual to the time that it
// took, and gives permits to callers that wait.
func (p *lookupPermits) giveBack(took time.Duration, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used--
	if err == nil {
		p.answered, p.hung = time.Now(), false
		if took < p.usual {
			p.usual = took
		}
	}
	switch slow := min(max(2*p.usual, p.least), p.most); {
	case took > slow:
		p.limit = max(p.limit-1, minPermits)
	case 2*p.used > p.limit || p.waiting.Front() != nil: // not only at the limit: Lookups that hang may be near it
		p.limit += 4
	}
	p.giveLocked(0)
}

// roomLocked reports whether one more Lookup with a permit may start. Free Lookups do not count:
// they may wait for those, and may hang. So while callers wait, there is a Lookup with a permit in
// progress, and its end gives the next permit.
func (p *lookupPermits) roomLocked() bool { return p.used < p.limit }

func (p *lookupPermits) crowdedLocked() { p.crowded.Store(p.waiting.Front() != nil || p.hung) }

// giveLocked gives permits to waiting callers while there is room, and to the first few in any
// case. It starts the ticks if callers still wait.
func (p *lookupPermits) giveLocked(few int) {
	for x := p.waiting.Front(); x != nil && (few > 0 || p.roomLocked()); x = p.waiting.Front() {
		p.waiting.Remove(x)
		x.waits = false
		p.used++
		close(x.over)
		p.given++
		few--
	}
	p.crowdedLocked()
	if p.waiting.Front() != nil && !p.ticking {
		p.ticking, p.answered = true, time.Now()
		p.tickLocked()
	}
}

// refuseLocked ends the wait of all callers, without a permit.
func (p *lookupPermits) refuseLocked() {
	for x := p.waiting.Front(); x != nil; x = p.waiting.Front() {
		p.waiting.Remove(x)
		x.waits, x.refused = false, true
		close(x.over)
	}
}

// tickLocked schedules the next tick.
func (p *lookupPermits) tickLocked() {
	p.given = 0
	time.AfterFunc(p.period, p.tick)
}

// tick runs once per period while callers wait.
func (p *lookupPermits) tick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limit == minPermits {
		p.usual = min(p.usual+p.usual/4, p.most)
	}
	if time.Since(p.answered) >= p.period {
		p.hung = true
		p.refuseLocked()
	}
	p.giveLocked(minPermits - p.given)
	if p.ticking = p.waiting.Front() != nil; p.ticking {
		p.tickLocked()
	}
}
