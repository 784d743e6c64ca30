package flightlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
)

// Freshness is what a Lookup reports about a value.
type Freshness uint8

// The results of a Lookup. Any other value counts as Miss.
const (
	Miss  Freshness = iota // there is no value: the caller waits for a load
	Stale                  // it may be served, and is refreshed in the background
	Fresh                  // it may be served
)

// Source is the cache and the origin of a Fetcher. Load is required, and so are Lookup and Store, or
// LookupStamped and StoreStamped instead. All of them are called concurrently from many goroutines,
// and should honour their ctx. A panic or runtime.Goexit in them becomes an error; in the lookup that
// a caller of Fetch makes on its own goroutine, it is that goroutine's.
type Source[V any] struct {
	// Lookup returns the value that the cache has for key. An error is not a miss:
	// FetchOptions.OnUnavailable applies. But a timeout (of a ctx, of a socket, or of go-redis'
	// connection pool) may come from a cache that is only busy: then the key is locked and looked
	// up again.
	//
	// Lookup is called on every Fetch, on the caller's goroutine and with its ctx, and again while
	// callers wait for another process to load. Fetch does not return before that first call does,
	// so Lookup has to honour ctx: a go-redis client does so only with ContextTimeoutEnabled. About
	// 64 first calls may run at once, and more as long as they return quickly; the others wait for
	// a permit: see FetchOptions.LookupTimeout.
	Lookup func(ctx context.Context, key string) (V, Freshness, error)

	// Load gets the value from the origin. Its ctx ends after LoadTimeout, but not with the ctx of
	// any caller, nor when the lock is lost. The ctx carries the lock: FromContext(ctx) is the
	// Lock, and locking the same key with it returns a nested lock. If a Load ignores its ctx, its
	// callers get an error after LoadTimeout, and so do callers that arrive before it returns,
	// because a key has one Load per process.
	Load func(ctx context.Context, key string) (V, error)

	// Store writes the value to the cache. It is called only while the lock is held, so with
	// l.Err() nil; l is nil for a load without a lock (FetchOptions.OnUnavailable). If an older
	// value must never replace a newer one, make the write conditional on l.Fence(), as package
	// fenced does. A load without a lock has no token, and fenced.Set with 0 is refused wherever a
	// holder has written before: then write only where there is no value (SET NX), for a few
	// seconds, or not at all. ctx carries the lock, as Load's does, and ends with it, and after TTL. The
	// callers get the value when Store has returned, or when it takes longer than Options.NodeTimeout; a
	// failure of Store is counted, and not returned to them.
	Store func(ctx context.Context, key string, v V, l *Lock) error

	// LookupStamped and StoreStamped take the places of Lookup and Store where values can be
	// invalidated: with them, no load that began before an invalidation is stored after it, and no
	// Fetch that begins after it returns what was loaded before, in any process. Package rediscache
	// has them for values in Redis.
	//
	// LookupStamped returns the entry and its stamp. If LoadFollows(ctx) and there is no entry, it
	// makes one in the same atomic step: a tombstone, which has a stamp and no value (Fresh is Miss),
	// and stays at least for LoadTimeout and TTL. It may do so at other times, too.
	//
	// If Lookup is set besides, callers and waiting flights use that, and LookupStamped is called
	// only before loads.
	LookupStamped func(ctx context.Context, key string) (Found[V], error)

	// StoreStamped writes v and a new stamp in one atomic step, if the entry's stamp is stamp; an
	// entry that is missing now has none. Otherwise it writes nothing and returns ErrOutdated. It is
	// called as Store is, and with l nil for a load without a lock, which needs no other rule. It is
	// not called if the lookup before the load failed or had no stamp.
	//
	// Code that changes the origin replaces the entry afterwards, whatever is there: by a tombstone with
	// a new stamp, or by the new value and a new stamp.
	StoreStamped func(ctx context.Context, key string, v V, stamp string, l *Lock) error

	// The following functions are for FetchMany, and for its background refreshes. None is required.
	// Their result for a key is that of the function for one key. keys are distinct, and at most MaxBatch.
	//
	// LookupMany looks up many keys, with stamps if there are any: see LookupStamped. A key that is
	// not in the result is a Miss without a stamp. An error is that of all keys, a KeyErrors that of
	// its keys. Callers that come while others' lookups are under way share the next one: then its ctx
	// has values as FetchOptions.Values says, and ends after LookupTimeout. Without LookupMany, each key
	// is looked up by itself, 16 at a time.
	LookupMany func(ctx context.Context, keys []string) (map[string]Found[V], error)

	// LoadMany loads many values. A key that is not in the result is ErrNotFound. A KeyErrors is the
	// error of its keys. Any other error is that of all keys, and so is a panic: then they are loaded
	// in two halves, and a half that fails alone is halved again, so that one bad key does not fail
	// others; what fails then is not held (ErrorHold). If both halves fail, as where the origin is down,
	// their error is held, without doubling. Keys that callers miss at the same time are loaded together.
	// One call is one load for MaxLoads and for MaxUnlockedLoads. ctx carries the locks of all keys. Without
	// LoadMany, each key is loaded by itself.
	LoadMany func(ctx context.Context, keys []string) (map[string]V, error)

	// StoreMany stores many values, for a Source without stamps. locks has those keys that are locked,
	// all of them or none. A KeyErrors is the error of its keys, any other error that of all. ctx carries
	// the locks, and does not end when one of them is lost.
	StoreMany func(ctx context.Context, values map[string]V, locks map[string]*Lock) error

	// StoreManyStamped is StoreMany for a Source with stamps. It compares each key's stamp by itself;
	// a KeyErrors has ErrOutdated for those that have changed.
	StoreManyStamped func(ctx context.Context, values map[string]V, stamps map[string]string, locks map[string]*Lock) error
}

// Fetcher protects a cache from stampedes: normally there is one Load per miss across all
// processes, and all callers get its value. It is safe for concurrent use.
//
// A hit costs what Lookup costs. All callers of this process that miss a key share one contention
// for its lock, one load and one result. Each waits on its own ctx, and may leave at any time. A
// load that has begun continues when all have left, and its value is stored. Nothing is stored once
// the lock has been lost; a write that was already in progress at that moment can be stopped only
// by the fence.
//
// The lock of an entry is the lock of its key. So a holder of that key must not Fetch the entry: a miss
// would wait for the holder, until ctx or WaitTimeout ends, unless ctx carries the lock (Do, Lock.Context).
//
// A Fetcher has two goroutines for each key that is being loaded or refreshed, one of which calls
// the Source; one more for each call that does not end with its ctx; and one for OnError while
// there are failures to report.
type Fetcher[V any] struct {
	c    *Client
	src  Source[V]
	opts FetchOptions
	gate *gate // for loads

	closed         atomic.Bool
	sent           atomic.Uint64 // numbers the lookups of runs, and loads without one: see Scope
	seenEnd        sync.Once     // ends seen
	counts         fetchCounts
	seen           fetchSeen
	permits        lookupPermits // of callers' Lookups
	permitsToLoad  lookupPermits // of those before loads
	waitingLookups chan struct{} // has an entry for each Lookup of a run that waits, maxWaitingLookups at most
	failures       failures
	gathering      gathering[V] // of FetchMany
	runs           *coalesce.Group[V, *fetchRun[V]]

	aborted context.Context // ends with the ctx of Close
	abort   context.CancelFunc
}

// FetchStats are counters since NewFetcher, and a gauge.
type FetchStats struct {
	Hits   uint64 // Fetch calls that found a fresh value
	Stale  uint64 // Fetch calls that found a stale one, also if StaleWait gave them the new one
	Misses uint64 // Fetch calls that waited for a load, here or elsewhere
	Joined uint64 // of these, those that joined a load of their key in progress

	Loads         uint64 // started; a call of LoadMany is one
	UnlockedLoads uint64 // of these, without a lock
	LoadFailures  uint64 // keys: by an error (ErrNotFound too), a panic, or LoadTimeout; refreshes that cannot lock
	StoreFailures uint64
	LookupErrors  uint64
	Lost          uint64 // locks lost while they were needed: the value was served and maybe not stored
	Outdated      uint64 // values that were loaded and served, and not stored because their entry had changed

	Running int64 // keys that are being locked, loaded or stored now
}

// NewFetcher makes a Fetcher over c's nodes. Keys are locked under their own names, below
// Options.KeyPrefix; the keys of two Fetchers with different values must differ. A bad argument is
// an ErrInvalid that names the field. Close the Fetcher before c.
func NewFetcher[V any](c *Client, src Source[V], opts FetchOptions) (*Fetcher[V], error) {
	if c == nil {
		return nil, invalid("c", "nil", "a Fetcher locks by a Client")
	}
	if c.flights == nil {
		return nil, errZeroClient
	}
	if err := checkSource(src); err != nil {
		return nil, err
	}
	opts, err := opts.validated(c)
	if err == nil {
		_, err = c.refreshPolicy(RefreshPolicy{}, opts.TTL)
	}
	if err != nil {
		return nil, err
	}
	f := &Fetcher[V]{
		c: c, src: src, opts: opts,
		gate:           newGate(opts.MaxLoads, opts.MaxUnlockedLoads),
		failures:       failures{hold: opts.ErrorHold, stamped: src.LookupStamped != nil},
		waitingLookups: make(chan struct{}, maxWaitingLookups),
	}
	f.aborted, f.abort = context.WithCancel(context.Background())
	f.runs = coalesce.NewGroup[V](func() *fetchRun[V] { return new(fetchRun[V]) }, f.run)
	f.runs.Waits = c.flights.Known
	f.permits.begin(opts.LookupTimeout)
	f.permitsToLoad.begin(opts.LookupTimeout)
	f.seen.begin(c, opts, &f.counts.unlocked)
	return f, nil
}

// Fetch returns the value of key: the one that Lookup finds, or the one that a single Load gets for
// all callers in all processes. A stale value is returned at once and refreshed in the background.
// All callers of one load get the same value, so it must not be modified.
//
// ctx limits only this caller's wait. Errors: Load's error unchanged, for all callers that wait for
// it, and as *HeldError for callers that arrive soon after; *PanicError if Load panicked; ctx's
// error; ErrClosed; ErrInvalid, also for a Fetch inside a Load that would wait for that Load; with
// FailClosed, ErrUnavailable, ErrNotAcquired (after WaitTimeout), and Lookup's error;
// ErrNotAcquired if MaxLoads allows no load within WaitTimeout; ErrTooManyWaiters if callers of
// SingleFlightLock already fill the queue of the key (Options.MaxWaiters).
//
// context.DeadlineExceeded and context.Canceled match only if this caller's ctx has ended. The text
// reports an expired deadline of Load itself, LoadTimeout or another.
func (f *Fetcher[V]) Fetch(ctx context.Context, key string) (V, error) {
	for came, first := f.sent.Load(), true; ; first = false {
		if f.closed.Load() {
			var none V
			err := f.errClosed(key)
			return none, err
		}
		found, err := f.callersLookup(ctx, key, first)
		if err == nil && found.Fresh == Fresh {
			return found.Value, nil
		}
		r, v, err := f.miss(ctx, key, came, found, err, first)
		if errors.Is(err, errAgain) {
			continue
		}
		if r == nil {
			return v, err
		}
		var left bool
		if v, err, left = r.Wait(ctx); left { // from here, and not from where the run was found: see there
			err = leftWaiting(key, ctx.Err(), err)
		}
		if left || r.For(came, found.Stamp) {
			return v, err
		}
	}
}

// errAgain says that the result of a run is not good for this caller, who has to look up once more.
var errAgain = errors.New("again")

// callersLookup makes a caller's own Lookup, on its goroutine: free, or with a permit: see
// lookupPermits. count says that a hit counts.
func (f *Fetcher[V]) callersLookup(ctx context.Context, key string, count bool) (found Found[V], err error) {
	c, how := f.permits.enter()
	if how == needsPermit {
		return f.lookupWithPermit(ctx, key, c, count)
	}
	defer func() { f.permits.leave(c, count && err == nil && found.Fresh == Fresh) }() // if it panics, too
	if how == timed {
		return f.lookupTimed(ctx, key)
	}
	return f.lookup(ctx, key)
}

// lookupTimed is callersLookup where the Lookup is free and timed.
func (f *Fetcher[V]) lookupTimed(ctx context.Context, key string) (Found[V], error) {
	began := time.Now()
	found, err := f.lookup(ctx, key)
	if err == nil {
		f.permits.observe(time.Since(began))
	}
	return found, err
}

// lookupWithPermit is callersLookup where the Lookup is not free.
func (f *Fetcher[V]) lookupWithPermit(ctx context.Context, key string, c *lookupCounter,
	count bool) (found Found[V], err error) {
	p := &f.permits
	defer func() {
		if count && err == nil && found.Fresh == Fresh {
			c.Add(oneHit)
		}
	}()
	if ctx.Value(permitOf{p}) != nil { // a Lookup with a permit waits for this one
		return f.lookup(ctx, key)
	}
	if err := p.wait(ctx); err != nil {
		return found, err
	}
	defer func(began time.Time) { p.giveBack(time.Since(began), err) }(time.Now()) // if it panics, too
	return f.lookup(context.WithValue(ctx, permitOf{p}, true), key)
}

// miss is what Fetch does without a fresh value: it returns the result, or else the run to wait for,
// which has counted this caller. count says that the caller was not here before.
func (f *Fetcher[V]) miss(ctx context.Context, key string, came uint64, found Found[V], err error,
	count bool) (*fetchRun[V], V, error) {
	var none V
	switch ended := clock.Ended(ctx); {
	case err == nil && found.Fresh == Stale:
		if count {
			f.counts.stale.Add(1)
		}
		return nil, f.stale(ctx, key, came, found), nil
	case ended != nil: // whatever Lookup says of that
		switch {
		case errors.Is(err, ended): // it says so itself
			return nil, none, fmt.Errorf("flightlock: fetch %q: Lookup: %w", key, err)
		case err != nil:
			err = lookupErr(key, err)
		}
		return nil, none, f.gaveUp(key, ended, err)
	}
	slow := false
	if err != nil {
		found.Stamp = ""
		slow = ranOut(err) // no outage: the cache may only be busy
		err = f.lookupFailed(key, err)
	}
	if err := f.c.checkKey(key); err != nil {
		return nil, none, err
	}
	if count {
		f.counts.misses.Add(1)
	}
	inside := waitNodeOf(ctx)
	r, err := f.join(ctx, key, missed{err, slow, found.Stamp, !count}, inside)
	if err != nil || inside == nil {
		return r, none, err
	}
	defer inside.stopAwaiting(&r.node)
	v, err, left := r.waitFor(ctx)
	if !left && !r.For(came, found.Stamp) {
		return nil, none, errAgain
	}
	return nil, v, err
}

// stale is the value for a caller that has found a stale one: that, or the new one if it comes
// within StaleWait.
func (f *Fetcher[V]) stale(ctx context.Context, key string, came uint64, found Found[V]) V {
	f.refresh(ctx, key)
	if f.opts.StaleWait <= 0 || waitNodeOf(ctx) != nil { // inside a load it might wait for itself
		return found.Value
	}
	r, ok := f.runs.JoinOpen(key)
	if !ok {
		return found.Value
	}
	limited, cancel := context.WithTimeout(ctx, f.opts.StaleWait)
	defer cancel()
	if v, err, left := r.Wait(limited); !left && err == nil && r.For(came, found.Stamp) {
		return v
	}
	return found.Value
}

// missed is what a caller's lookup says of a key without a value.
type missed struct {
	why   error  // of the lookup
	slow  bool   // it is a timeout
	stamp string // of the entry
	again bool   // the caller was counted before
}

// join adds a caller to the run of key, and begins one if there is none. inside is the run that the
// caller itself belongs to.
func (f *Fetcher[V]) join(ctx context.Context, key string, m missed, inside *waitNode) (*fetchRun[V], error) {
	r, first, err := f.enlist(ctx, key, m, inside, f.values(ctx))
	if first {
		f.runs.Start(r)
	}
	return r, err
}

// enlist is join without the beginning of a run that is new: first says that it is.
func (f *Fetcher[V]) enlist(ctx context.Context, key string, m missed, inside *waitNode,
	values context.Context) (_ *fetchRun[V], first bool, _ error) {
	// A caller that holds the lock on key itself would wait for itself.
	lent := f.c.reenter(ctx, key)
	r, first, ok := f.runs.Join(key)
	switch {
	case !ok:
		f.giveBack(lent)
		return nil, false, f.errClosed(key)
	case !first:
		if !m.again {
			f.counts.joined.Add(1)
		}
		if m.why != nil && !m.slow { // the run may wait for a lock that is of no use now
			f.c.flights.Look(key)
		}
	default:
		// A load that has failed just now is not repeated. Its run has noted that before this
		// one could begin.
		if err, scope := f.failures.of(key, m.stamp, clock.Now()); err != nil {
			r.Limit(scope)
			f.refuse(r, err)
			f.giveBack(lent)
			return nil, false, err
		}
		r.setUp(values)
		if m.slow {
			r.timeouts = 1
		} else if r.why = m.why; m.why != nil {
			f.giveBack(r.loan.close())
		}
	}
	if lent != nil && !r.loan.offer(lent) {
		f.giveBack(lent)
	}
	if inside != nil && !inside.await(&r.node) { // so it is not new
		r.Leave()
		return nil, false, fmt.Errorf("flightlock: fetch %q: %w: it is called inside a Load that it would wait for", key,
			ErrInvalid)
	}
	return r, first, nil
}

func (r *fetchRun[V]) setUp(values context.Context) {
	r.base, r.values = values, context.WithValue(values, waitNodeKey{}, &r.node)
}

// values is the ctx that a run begins with. A lock that the caller has is not the run's:
// what it guards is not known to those that share the load.
func (f *Fetcher[V]) values(ctx context.Context) context.Context {
	if f.opts.Values == nil {
		return context.Background()
	}
	values := f.opts.Values(ctx)
	if values == nil {
		return context.Background()
	}
	values = context.WithoutCancel(values)
	if carriedBy(values) != nil {
		values = context.WithValue(values, carriedKey{}, (*carried)(nil))
	}
	return values
}

// refresh begins to reload a stale value, unless something is in progress for key or its last load
// failed not long ago.
func (f *Fetcher[V]) refresh(ctx context.Context, key string) {
	if f.mayRefresh(key) { // else Values has nothing to do
		f.refreshWith(f.values(ctx), key)
	}
}

// mayRefresh reports whether a run may be begun for that. It reports a key that cannot be locked.
func (f *Fetcher[V]) mayRefresh(key string) bool {
	if err := f.c.checkKey(key); err != nil { // it is served, and will never be loaded again
		f.counts.loadFailures.Add(1)
		if f.seen.mayReportRefusal() {
			f.seen.failed(key, "load", err)
		}
		return false
	}
	return !f.runs.Open(key) && f.failures.allowRefresh(key, clock.Now())
}

// refreshWith is refresh with the ctx that values has made.
func (f *Fetcher[V]) refreshWith(values context.Context, key string) {
	if r := f.beginRefresh(values, key); r != nil {
		f.runs.Start(r)
	}
}

// beginRefresh makes a run that reloads a stale value, and is to be started; nil if that is not needed.
func (f *Fetcher[V]) beginRefresh(values context.Context, key string) *fetchRun[V] {
	r, ok := f.runs.Background(key)
	if !ok {
		return nil
	}
	r.setUp(values)
	r.refreshes = true
	if !f.failures.allowRefresh(key, clock.Now()) && !r.Wanted() { // another refresh has failed meanwhile
		f.refuse(r, nil)
		return nil
	}
	return r
}

// refuse ends a run that does not begin. Callers may have joined it, and lent it their lock.
func (f *Fetcher[V]) refuse(r *fetchRun[V], err error) {
	f.giveBack(r.loan.close())
	f.runs.Refuse(r, err)
}

// gaveUp says that the caller's ctx has ended; why, if that is known, says what it met.
func (f *Fetcher[V]) gaveUp(key string, ctxErr, why error) error {
	if why != nil {
		return fmt.Errorf("%w (%w)", why, ctxErr)
	}
	return fmt.Errorf("flightlock: fetch %q: %w", key, ctxErr)
}

// errFetcherClosed is the error of a call for many keys.
var errFetcherClosed = fmt.Errorf("flightlock: fetch: the Fetcher is %w", ErrClosed)

func (f *Fetcher[V]) errClosed(key string) error {
	return fmt.Errorf("flightlock: fetch %q: the Fetcher is %w", key, ErrClosed)
}

// Stats reads the counters.
func (f *Fetcher[V]) Stats() FetchStats {
	s := f.counts.read(f.permits.hits())
	s.Running = int64(f.runs.Running())
	return s
}

// Close ends the Fetcher. New callers get ErrClosed, and so do those whose load has not begun. It
// waits for running loads, and for their Store, until ctx ends; then it ends their ctx, and their
// callers get ErrClosed too. It returns when no goroutine of the Fetcher is left. If functions of
// the Source ignore their ctx, it gives up shortly after ctx has ended, with an error that matches
// ctx's. It may be called again, to wait longer. A call of OnError may outlast it; the Client's
// Close waits for that.
func (f *Fetcher[V]) Close(ctx context.Context) error {
	f.closed.Store(true)
	f.runs.Close(ErrClosed, f.errClosed)
	defer f.seenEnd.Do(f.seen.end)
	select {
	case <-f.runs.Idle():
		return nil
	case <-ctx.Done():
	}
	f.abort()
	f.runs.Abort(ErrClosed)
	grace := time.NewTimer(2 * f.c.opts.NodeTimeout) // for the releases
	defer grace.Stop()
	select {
	case <-f.runs.Idle():
		return nil
	case <-grace.C:
		return fmt.Errorf("flightlock: close: %d goroutines of a Fetcher are still running: %w", f.runs.Goroutines(),
			ctx.Err())
	}
}

// fetchCounts are the counters, except hits, which the lookupCounters count.
type fetchCounts struct {
	stale, misses, joined, loads, unlocked, loadFailures, storeFailures, lookupErrors, lost, outdated atomic.Uint64
}

func (c *fetchCounts) read(hits uint64) FetchStats {
	return FetchStats{
		Hits: hits, Stale: c.stale.Load(), Misses: c.misses.Load(), Joined: c.joined.Load(),
		Loads: c.loads.Load(), UnlockedLoads: c.unlocked.Load(),
		LoadFailures: c.loadFailures.Load(), StoreFailures: c.storeFailures.Load(),
		LookupErrors: c.lookupErrors.Load(), Lost: c.lost.Load(), Outdated: c.outdated.Load(),
	}
}
