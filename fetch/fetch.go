package fetch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/seam"
	fleet "github.com/flightlock/flightlock/semaphore"
	"golang.org/x/sync/semaphore"
)

// Fetcher protects a cache from stampedes: normally there is one load per miss across all processes, and all
// callers get its value. A hit costs what the Store's Get costs. A load that has begun continues, and is
// stored, even if all callers have left. It is safe for concurrent use.
type Fetcher[V any] struct {
	c      seam.Client
	store  Store[V]
	loader Loader[V]
	opts   Options

	closed   atomic.Bool
	sent     atomic.Uint64 // numbers the lookups of runs, and loads without one: see coalesce.Scope
	counts   counts
	seen     seen
	failures failures
	gate     gate
	fleet    *fleet.Semaphore    // of FleetLoads; nil: no limit
	lookups  *semaphore.Weighted // of runs that wait: see maxLookups
	reserves *semaphore.Weighted // before loads
	runs     *coalesce.Group[V, miss[V]]
}

// run is all callers of this process that miss one key.
type run[V any] = coalesce.Run[V, miss[V]]

// miss is what a run has besides its callers. Those who drive it, one after the other, write it: see batch.
type miss[V any] struct {
	refreshes bool          // it began behind a stale value
	ends      atomic.Uint32 // what ends it: see byLoad
	lost      error         // why it had no lock when that was last tried
	lock      seam.Lock     // that it has won, until that is given back
	scope     coalesce.Scope
	loaded    Entry[V] // before it is loaded, a stale value that it replaces

	// Its work has failed: then the other processes that wait for its lock are notified, so that they need not
	// wait for one another. Not where a store or a lookup only timed out: the value was loaded, and the store is
	// busy; if all others then loaded without a lock, their stores would keep it busy.
	failed bool

	waits    atomic.Value                       // for what, a string: see waitsForSlot
	entering atomic.Pointer[context.CancelFunc] // ends its wait for a slot, if there was one, or is &hurried
}

// what is what its callers wait for.
func (m *miss[V]) what() string {
	waits, _ := m.waits.Load().(string)
	return waits
}

// hurry has a run not wait for a slot, because a load waits for it that may have the slot.
func (m *miss[V]) hurry() {
	if end := m.entering.Swap(&hurried); end != nil {
		(*end)()
	}
}

var hurried context.CancelFunc = func() {}

// maxLookups is how many lookups a Fetcher makes at once for runs that wait, and how many before loads, which
// must not queue behind those. Thousands would wait for connections until LookupTimeout, and the store would
// seem to be down.
const maxLookups = 64

// Stats are counters since New, and a gauge.
type Stats struct {
	Hits     uint64 // keys that were found fresh by a caller
	Stale    uint64 // keys that were found stale, also if StaleWait gave the new value
	Misses   uint64 // keys that were waited for: a load, here or elsewhere
	Joined   uint64 // of these, those that joined a load of their key in progress
	NotFound uint64 // of Hits and Stale: keys that are known not to exist

	Loads         uint64 // started; one of many keys is one
	UnlockedLoads uint64 // of these, without a lock
	LoadFailures  uint64 // keys: by an error, a panic, or LoadTimeout; refreshes that cannot lock
	StoreFailures uint64 // keys that were loaded and served, and not stored because of an error
	Unstored      uint64 // ... because the lookup before the load had left no stamp
	Outdated      uint64 // ... because their entry had changed meanwhile
	Lost          uint64 // locks lost while they were needed: the value was served and maybe not stored
	LookupErrors  uint64

	Running int64 // keys that are being locked, loaded or stored now
}

// New makes a Fetcher of what s has, or load gets under locks of c. It sends nothing yet. A bad argument is
// an ErrInvalid that names the field; after c.Close the error is ErrClosed. c's Close closes the Fetcher,
// too.
func New[V any](c *flightlock.Client, s Store[V], load Loader[V], o Options) (*Fetcher[V], error) {
	switch {
	case c == nil:
		return nil, invalid("c", "nil", "a Fetcher locks by a Client")
	case s == nil:
		return nil, invalid("s", "nil", "a Fetcher needs a Store: see Plain")
	case load == nil:
		return nil, invalid("load", "nil", "it is required: see Each")
	}
	if p, plain := s.(*plain[V]); plain && (p.get == nil || p.set == nil) {
		return nil, invalid("Plain's get or set", "nil",
			"both are required: other processes find a value where set puts it")
	}
	inside := seam.Of(c)
	if inside == nil {
		return nil, invalid("c", "not made by New or Open", "a Fetcher locks by a Client")
	}
	o, err := o.validated(inside.MaxTTL())
	if err != nil {
		return nil, err
	}
	if err := inside.CheckTTL(o.TTL); err != nil {
		return nil, fmt.Errorf("%w: Options.TTL of a Fetcher, %v", err, o.TTL)
	}
	permits, err := newFleet(c, o)
	if err != nil {
		return nil, err
	}
	f := &Fetcher[V]{
		c: inside, store: s, loader: load, opts: o,
		failures: failures{hold: o.ErrorHold},
		gate:     newGate(o.MaxLoads, o.MaxUnlockedLoads),
		fleet:    permits,
		lookups:  semaphore.NewWeighted(maxLookups),
		reserves: semaphore.NewWeighted(maxLookups),
		runs:     coalesce.New[V, miss[V]](keyClosed),
	}
	f.seen = seen{c: inside, name: o.Name, onError: o.OnError, unlocked: &f.counts.unlocked}
	var closed func()
	f.seen.observer, closed = inside.Observe(o.Name, f.read)
	f.seen.end = sync.OnceFunc(func() {
		f.seen.withLocksAgain()
		closed()
	})
	if !inside.Attach(f, f.Close) {
		f.seen.end()
		return nil, fmt.Errorf("flightlock: fetch: the Client is %w", flightlock.ErrClosed)
	}
	return f, nil
}

// Get returns the value of key: the Store's, or the one that a single load gets for all callers in all
// processes. They share it: do not modify it. A stale value is returned at once and refreshed in the
// background.
//
// ctx limits only this caller's wait. Errors: ErrNotFound; the load's, and as *HeldError soon after;
// *flightlock.PanicError if it panicked; ctx's; ErrClosed; ErrInvalid in a load that would wait for itself;
// ErrNotAcquired if MaxLoads or FleetLoads allow no load within WaitTimeout; and with FailClosed
// ErrUnavailable, ErrNotAcquired if another process loads for longer than WaitTimeout, and the Store's.
func (f *Fetcher[V]) Get(ctx context.Context, key string) (v V, err error) {
	came := f.sent.Load()
	if f.closed.Load() {
		return v, keyClosed(key)
	}
	e, err := f.store.Get(ctx, key)
	if err == nil && e.Fresh == Fresh {
		return f.found(&e, true)
	}
	w := &want[V]{key: key, entry: e, failed: err}
	c := &caller[V]{f: f, ctx: ctx, came: came, ask: f.lookUp, looked: true}
	c.finish([]*want[V]{w})
	return w.v, w.err
}

// found is what a caller gets of a fresh or stale entry, which counts the first time.
func (f *Fetcher[V]) found(e *Entry[V], first bool) (V, error) {
	if first {
		if e.Fresh == Fresh {
			f.counts.hits.Add(1)
		} else {
			f.counts.stale.Add(1)
		}
		if e.Absent {
			f.counts.notFound.Add(1)
		}
	}
	return e.result()
}

// result is what an entry is to its caller.
func (e *Entry[V]) result() (v V, err error) {
	if e.Absent {
		return v, ErrNotFound
	}
	return e.Value, nil
}

// Stats reads the counters.
func (f *Fetcher[V]) Stats() Stats {
	running, _ := f.runs.Count()
	c := &f.counts
	return Stats{
		Hits: c.hits.Load(), Stale: c.stale.Load(), Misses: c.misses.Load(), Joined: c.joined.Load(),
		NotFound: c.notFound.Load(), Loads: c.loads.Load(), UnlockedLoads: c.unlocked.Load(),
		LoadFailures: c.loadFailures.Load(), StoreFailures: c.storeFailures.Load(), Unstored: c.unstored.Load(),
		Outdated: c.outdated.Load(), Lost: c.lost.Load(), LookupErrors: c.lookupErrors.Load(),
		Running: int64(running),
	}
}

// counts are the counters of Stats.
type counts struct {
	hits, stale, misses, joined, notFound                                                atomic.Uint64
	loads, unlocked, loadFailures, storeFailures, unstored, outdated, lost, lookupErrors atomic.Uint64
}

// read is Stats for Observers.
func (f *Fetcher[V]) read() seam.Counts {
	s := f.Stats()
	c := seam.Counts{
		Hits: s.Hits, Stale: s.Stale, Misses: s.Misses, Joined: s.Joined, NotFound: s.NotFound,
		Loads: s.Loads, UnlockedLoads: s.UnlockedLoads, LoadFailures: s.LoadFailures,
		StoreFailures: s.StoreFailures,
		Unstored:      s.Unstored, Outdated: s.Outdated, Lost: s.Lost, LookupErrors: s.LookupErrors,
		Running: s.Running,
	}
	if own, ok := f.store.(seam.Counting); ok {
		own.Count(&c)
	}
	return c
}

// Close ends the Fetcher. New callers get ErrClosed, and so do those whose load has not begun. Running loads
// are waited for, and stored, until ctx ends; then their ctx is ended, too. If the Loader or the Store
// ignores that, Close returns soon with ctx's error: call it again to wait longer.
func (f *Fetcher[V]) Close(ctx context.Context) error {
	f.closed.Store(true)
	f.runs.Close(flightlock.ErrClosed)
	defer f.seen.end()
	select {
	case <-f.runs.Idle():
	case <-ctx.Done():
		f.runs.Abort(flightlock.ErrClosed)
		select {
		case <-f.runs.Idle():
		case <-time.After(2 * f.c.NodeTimeout()): // for the releases
			_, goroutines := f.runs.Count()
			return fmt.Errorf("flightlock: close: %d goroutines of a Fetcher are still running: %w", goroutines,
				ctx.Err())
		}
	}
	f.c.Detach(f)
	return nil
}

// lockKey is the name of key's lock.
func (f *Fetcher[V]) lockKey(key string) string { return f.opts.Name + ":" + key }

// sending is called right before a lookup or load whose result many callers may get, and returns its scope so
// far.
//
// Callers that share a run would see the old value of an origin that was changed, if they came after the
// change. So each result has a scope: it is for callers that came before the lookup on which it is based was
// sent, and for those whose own lookup brought the same stamp, because then nothing had changed until they
// came. The others look up again, and find what was stored, or join the next run. All of its lookups are
// later than they: they wait for two at most.
func (f *Fetcher[V]) sending() coalesce.Scope {
	if _, is := f.store.(*plain[V]); is { // whatever its lookups say, nothing ever changes
		return coalesce.Scope{Stamp: plainStamp}
	}
	return coalesce.Scope{Limited: true, Before: f.sent.Add(1)}
}

// A chain is the loads that a ctx is in, from the inside out: a Get in there that would wait for one of them
// gets an error, and any other one is not to wait for a slot that they may have. A circle of loads that were
// begun by callers of their own ends by their timeouts.
type chain struct {
	fetcher any
	keys    []string
	outer   *chain
}

type chainKey struct{}

func chainOf(ctx context.Context) *chain {
	c, _ := ctx.Value(chainKey{}).(*chain)
	return c
}

// loads reports whether the Fetcher loads key in one of them.
func (c *chain) loads(fetcher any, key string) bool {
	for ; c != nil; c = c.outer {
		if c.fetcher == fetcher && slices.Contains(c.keys, key) {
			return true
		}
	}
	return false
}

// base is the ctx that a run begins with: the values of its first caller's. A lock that the caller has is not
// the run's: what it guards is not known to those that share the load.
func (f *Fetcher[V]) base(ctx context.Context) context.Context {
	if f.opts.BareContext {
		bare := context.WithValue(context.Background(), chainKey{}, ctx.Value(chainKey{}))
		return context.WithValue(bare, seam.OfLoad{}, ctx.Value(seam.OfLoad{}))
	}
	return f.c.Bare(ctx)
}
