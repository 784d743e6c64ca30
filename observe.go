package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/flightlock/flightlock/internal/wait"
)

// An Observer is called when something has happened in the Clients that have it in Options.Observers,
// for metrics and traces: packages prom and otel make one. Functions that are nil are skipped, and
// what no function observes costs nothing. It must not be changed after New.
//
// The functions are called concurrently, on the goroutine on which it happens; those that get a ctx on
// that of the caller, or of the load, with the caller's ctx (HoldEnded on that of the release). No mutex
// is held. They must return at once, and must not call runtime.Goexit. If one panics, that is logged
// once, and ignored.
//
// A wait, a hold and a load have a start and an end. The ctx that the start returns is passed to the
// end, so that both find what belongs together; it must be derived from the start's, and nil means that.
//
// Keys are passed as they are. They come and go, so none should become a label: see Options.Class.
type Observer struct {
	// Opened is called by New. closed, which may be nil, is called when Close has ended everything
	// else. In between, Client.Stats and NodeStats may be read at any time, for instance at a
	// scrape.
	Opened func(c *Client) (closed func())

	// WaitStarted is called when a caller wants a lock that is not nested in one that it has, and its
	// arguments are good; WaitEnded when it has the lock, or an error.
	WaitStarted func(ctx context.Context, w WaitInfo) context.Context
	WaitEnded   func(ctx context.Context, w WaitInfo)
	// HoldStarted is called when a caller has been given a lock, after WaitEnded; HoldEnded when that was
	// released, with all that are nested in it, or is over.
	HoldStarted func(ctx context.Context, h HoldInfo) context.Context
	HoldEnded   func(ctx context.Context, h HoldInfo)

	// Lost is called for each lock that Stats.Lost counts: of h it gets Key, Class, End and Err.
	Lost func(h HoldInfo)
	// Refreshed is called after each refresh of a lease, for its holder or for those who wait behind it.
	// err is nil, or matches ErrNotHeld if the lease is lost, and else ErrUnavailable.
	Refreshed func(key string, err error)
	// Attempted is called after each attempt to acquire a key from the nodes: of w it gets Key, Took,
	// Err, and as Outcome one of the first three.
	Attempted func(w WaitInfo)
	// RoundTrip is called after each exchange with a node. err is why there was no reply, or an error
	// that was the reply.
	RoundTrip func(node string, took time.Duration, err error)

	// FetcherOpened is called for each Fetcher and Cache that is made over c, with its name. read gives
	// its counters, until the call of closed, which may be nil, has returned.
	FetcherOpened func(c *Client, name string, read func() FetcherStats) (closed func())
	// LoadStarted is called before the Loader of a Fetcher, which gets its ctx; LoadEnded when that has
	// returned, or is not waited for any more.
	LoadStarted func(ctx context.Context, l LoadInfo) context.Context
	LoadEnded   func(ctx context.Context, l LoadInfo)
	// MissEnded is called for each key for which a caller of that Fetcher has waited. err is what the
	// caller gets, and nil also if the key does not exist.
	MissEnded func(ctx context.Context, fetcher, key string, took time.Duration, err error)
}

// WaitInfo describes a caller's wait for a lock.
type WaitInfo struct {
	Key     string
	Class   string // by Options.Class; "" without it, and if Fetcher is true
	Fetcher bool   // a Fetcher waits for a lock of its own: Key is its name, ":", and the key

	// Only when it has ended:
	Took    time.Duration
	For     WaitCause
	Outcome WaitOutcome
	Err     error // what the caller gets
}

// WaitCause is what a caller waited for.
type WaitCause string

// The causes of waits.
const (
	WaitRemote  WaitCause = "remote"  // the nodes, or another process
	WaitQueue   WaitCause = "queue"   // other callers of this process, and then remote
	WaitHandoff WaitCause = "handoff" // other callers of this process, without Redis
)

// WaitOutcome is how a wait has ended. The first that applies counts.
type WaitOutcome string

// The outcomes of waits.
const (
	OutcomeAcquired       WaitOutcome = "acquired"
	OutcomeUnavailable    WaitOutcome = "unavailable"    // ErrUnavailable, also if ctx has ended
	OutcomeNotAcquired    WaitOutcome = "not_acquired"   // others have the key, and the strategy gave up
	OutcomeHeldByOthers   WaitOutcome = "held_by_others" // ctx has ended, and others had the key
	OutcomeCanceled       WaitOutcome = "canceled"       // ctx has ended before the state of the key was known
	OutcomeTooManyWaiters WaitOutcome = "too_many_waiters"
	OutcomeClosed         WaitOutcome = "closed"
	OutcomeInvalid        WaitOutcome = "invalid"  // two nodes are one server
	OutcomeNeedless       WaitOutcome = "needless" // of a Fetcher: there is a value now
	OutcomePanicked       WaitOutcome = "panicked" // the RetryStrategy did
)

// HoldInfo describes the time for which a lock is held.
type HoldInfo struct {
	Key     string
	Class   string
	Fetcher bool
	Fence   int64

	// Previous, only when it has started, is the ctx that HoldStarted returned for the holder of this
	// process that has handed the lock over; nil if the lock comes from the nodes.
	Previous context.Context

	// Only when it has ended:
	Took time.Duration
	End  HoldEnd
	Err  error // why it is over; nil if it was released
}

// HoldEnd is how a lock has ended.
type HoldEnd string

// The ends of locks. The last three are losses.
const (
	EndReleased HoldEnd = "released"
	EndRanOut   HoldEnd = "ran_out" // its ttl passed, and it was never refreshed and had no Context
	EndExpired  HoldEnd = "expired" // it was not refreshed in time
	EndTaken    HoldEnd = "taken"   // the nodes report that the key is gone, or has another owner
	EndClosed   HoldEnd = "closed"  // by Client.Close
)

// LoadInfo describes a call of a Loader of package fetch.
type LoadInfo struct {
	Fetcher string // its name
	Keys    []string

	// Only when it has ended:
	Took    time.Duration
	Outcome LoadOutcome
	Err     error
}

// LoadOutcome is how a load has ended.
type LoadOutcome string

// The outcomes of loads.
const (
	LoadLoaded   LoadOutcome = "loaded"
	LoadFailed   LoadOutcome = "failed" // for some keys or all
	LoadPanicked LoadOutcome = "panicked"
	LoadTimedOut LoadOutcome = "timed_out"
)

// FetcherStats are the counters of a Fetcher, and of the Cache that it is in: see fetch.Stats and
// rediscache.Stats.
type FetcherStats struct {
	Hits, Stale, Misses, Joined                                 uint64
	Loads, UnlockedLoads, LoadFailures, StoreFailures, Unstored uint64
	LookupErrors, Lost, Outdated, NotFound                      uint64
	Running                                                     int64

	Cached                                   bool // it is in a Cache, which counts the following
	LocalHits, Undecodable, TooLong, Dropped uint64
	Repeating, Down                          int64
}

// watching calls the Observers of a Client. It is nil if there are none.
type watching struct {
	c        *Client
	all      []*Observer
	closed   func()   // what Opened has returned; nil: nothing
	panicked sync.Map // the functions that have
}

func newWatching(c *Client) *watching {
	all := slices.DeleteFunc(slices.Clone(c.opts.Observers), func(o *Observer) bool { return o == nil })
	if len(all) == 0 {
		return nil
	}
	return &watching{c: c, all: all}
}

// any reports whether there is an Observer which has that function.
func (x *watching) any(has func(o *Observer) bool) bool {
	return slices.ContainsFunc(x.all, has)
}

// guard calls f, which calls the function of that name of an Observer.
func (x *watching) guard(observer int, name string, f func()) {
	defer func() {
		if v := recover(); v != nil {
			if _, again := x.panicked.LoadOrStore(fmt.Sprint(observer, name), nil); !again {
				x.c.log(slog.LevelError, "flightlock: a function of an Observer panicked; its next panics are not logged",
					"observer", observer, "function", name, "panic", fmt.Sprint(v))
			}
		}
	}()
	f()
}

// call has f, which calls the function of that name if the Observer has it, called for each.
func (x *watching) call(name string, f func(o *Observer)) {
	for i, o := range x.all {
		x.guard(i, name, func() { f(o) })
	}
}

// configure has the flights and the nodes report what is observed.
func (x *watching) configure(cfg *flight.Observer) {
	if x.any(func(o *Observer) bool { return o.Attempted != nil }) {
		cfg.Attempted = x.attempted
	}
	if x.any(func(o *Observer) bool { return o.Refreshed != nil }) {
		cfg.Refreshed = x.refreshed
	}
	if !x.any(func(o *Observer) bool { return o.RoundTrip != nil }) {
		return
	}
	for _, n := range x.c.nodes {
		name := n.Name()
		n.Observe = func(took time.Duration, err error) {
			x.call("RoundTrip", func(o *Observer) {
				if o.RoundTrip != nil {
					o.RoundTrip(name, took, err)
				}
			})
		}
	}
}

// open calls f, which calls the function of that name if the Observer has it, for each, and returns what calls all that
// these have returned; nil: nothing.
func (x *watching) open(name string, f func(o *Observer) (closed func())) (closed func()) {
	var all []func()
	for i, o := range x.all {
		x.guard(i, name, func() {
			if closed := f(o); closed != nil {
				all = append(all, func() { x.guard(i, name+"'s closed", closed) })
			}
		})
	}
	if all == nil {
		return nil
	}
	return func() {
		for _, closed := range all {
			closed()
		}
	}
}

func (x *watching) opened() {
	x.closed = x.open("Opened", func(o *Observer) func() {
		if o.Opened == nil {
			return nil
		}
		return o.Opened(x.c)
	})
}

// close is for a Client that was closed. It waits for its Observers until ctx ends.
func (x *watching) close(ctx context.Context) error {
	if x == nil || x.closed == nil {
		return nil
	}
	if err := wait.For(ctx, x.closed); err != nil {
		return fmt.Errorf("what Observer.Opened has returned has not returned: %w", err)
	}
	return nil
}

// waiting is a wait that is observed.
type waiting struct {
	x      *watching
	outer  context.Context // the caller's
	ctx    context.Context // with what WaitStarted has added
	info   WaitInfo
	began  time.Time
	ticket *flight.Ticket
	held   *held // nil: nobody wants to know
}

// wait begins to observe a wait for t's lock. end must be called.
func (x *watching) wait(ctx context.Context, key string, t *flight.Ticket, fetcher bool) waiting {
	w := waiting{x: x, outer: ctx, ctx: ctx, info: WaitInfo{Key: key, Fetcher: fetcher}, ticket: t}
	if class := x.c.opts.Class; class != nil && !fetcher {
		w.info.Class = class(key)
	}
	if w.info.Class != "" || x.any(func(o *Observer) bool { return o.HoldStarted != nil || o.HoldEnded != nil }) {
		w.held = &held{x: x, info: HoldInfo{Key: key, Class: w.info.Class, Fetcher: fetcher}}
		w.held.watch = flight.Watch{Ended: w.held.end, Of: w.held}
		t.SetWatch(&w.held.watch)
	}
	x.call("WaitStarted", func(o *Observer) {
		if o.WaitStarted != nil {
			w.ctx = cmp.Or(o.WaitStarted(w.ctx, w.info), w.ctx)
		}
	})
	w.began = time.Now()
	return w
}

// end is for a caller whose wait has ended with err. needless says that it has no lock then, and needs none.
func (w *waiting) end(needless bool, err error) {
	w.info.Took, w.info.Err = time.Since(w.began), err
	w.info.For, w.info.Outcome = waitCauses[w.ticket.Kind()], outcomeOf(err)
	if err != nil && w.info.For == WaitHandoff { // just as its ctx ended
		w.info.For = WaitQueue
	}
	if needless && err == nil {
		w.info.Outcome = OutcomeNeedless
	}
	w.x.call("WaitEnded", func(o *Observer) {
		if o.WaitEnded != nil {
			o.WaitEnded(w.ctx, w.info)
		}
	})
	if h := w.held; h != nil {
		previous := h.watch.Previous
		h.watch.Previous = nil // see there
		if w.info.Outcome == OutcomeAcquired {
			h.start(w.outer, w.ticket.Fence(), previous)
		}
	}
}

// errPanicked is the error of a wait that a panic has ended, for Observers.
var errPanicked = errors.New("flightlock: the RetryStrategy panicked")

var waitCauses = [...]WaitCause{flight.Remote: WaitRemote, flight.Queued: WaitQueue, flight.Handed: WaitHandoff}

// outcomeOf is the outcome of a wait with that error. ErrUnavailable comes first, because most callers wait for the
// nodes until their ctx ends, and an outage must not look like callers that left.
func outcomeOf(err error) WaitOutcome {
	over := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	switch {
	case err == nil:
		return OutcomeAcquired
	case err == errPanicked: //nolint:errorlint // it, and no other
		return OutcomePanicked
	case errors.Is(err, ErrUnavailable):
		return OutcomeUnavailable
	case over && errors.Is(err, ErrNotAcquired):
		return OutcomeHeldByOthers
	case over:
		return OutcomeCanceled
	case errors.Is(err, ErrNotAcquired):
		return OutcomeNotAcquired
	case errors.Is(err, ErrTooManyWaiters):
		return OutcomeTooManyWaiters
	case errors.Is(err, ErrClosed):
		return OutcomeClosed
	}
	return OutcomeInvalid
}

// held is a hold that is observed. It may end, on another goroutine, before its caller has had the time to start it:
// then start ends it.
type held struct {
	x     *watching
	watch flight.Watch

	mu    sync.Mutex // guards what follows
	info  HoldInfo
	began time.Time
	ctx   context.Context // with what HoldStarted has added; nil before
}

func (h *held) start(ctx context.Context, fence int64, previous *flight.Watch) {
	h.mu.Lock()
	h.info.Fence, h.began = fence, time.Now()
	info := HoldInfo{Key: h.info.Key, Class: h.info.Class, Fetcher: h.info.Fetcher, Fence: fence}
	h.mu.Unlock()
	if previous != nil {
		info.Previous = previous.Of.(*held).context()
	}
	h.x.call("HoldStarted", func(o *Observer) {
		if o.HoldStarted != nil {
			ctx = cmp.Or(o.HoldStarted(ctx, info), ctx)
		}
	})
	h.mu.Lock()
	h.ctx = ctx
	h.mu.Unlock()
	h.report()
}

func (h *held) context() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ctx
}

// end is what the flight calls, once.
func (h *held) end(why error, ranOut bool) {
	h.mu.Lock()
	h.info.End, h.info.Err = endOf(why, ranOut), withKey(h.info.Key, why)
	if !h.began.IsZero() {
		h.info.Took = time.Since(h.began)
	}
	h.mu.Unlock()
	h.report()
}

// report calls the Observers when the hold has both started and ended.
func (h *held) report() {
	h.mu.Lock()
	ctx, info := h.ctx, h.info
	h.mu.Unlock()
	if ctx == nil || info.End == "" {
		return
	}
	h.x.call("HoldEnded", func(o *Observer) {
		if o.HoldEnded != nil {
			o.HoldEnded(ctx, info)
		}
	})
}

func endOf(why error, ranOut bool) HoldEnd {
	switch {
	case why == nil:
		return EndReleased
	case ranOut:
		return EndRanOut
	case errors.Is(why, ErrClosed):
		return EndClosed
	case errors.Is(why, ErrNotHeld): // the nodes say so
		return EndTaken
	}
	return EndExpired
}

// lost is called for every lock that was lost.
func (x *watching) lost(key string, w *flight.Watch, why error) {
	h := HoldInfo{Key: key, End: endOf(why, false), Err: withKey(key, why)}
	if w != nil {
		h.Class, h.Fetcher = w.Of.(*held).info.Class, w.Of.(*held).info.Fetcher // which do not change
	}
	x.call("Lost", func(o *Observer) {
		if o.Lost != nil {
			o.Lost(h)
		}
	})
}

func (x *watching) refreshed(key string, f *quorum.Failure) {
	var err error
	if f != nil {
		err = quorumError(key, f)
	}
	x.call("Refreshed", func(o *Observer) {
		if o.Refreshed != nil {
			o.Refreshed(key, err)
		}
	})
}

func (x *watching) attempted(key string, took time.Duration, f *quorum.Failure) {
	w := WaitInfo{Key: key, Took: took, For: WaitRemote, Outcome: OutcomeAcquired}
	if f != nil {
		w.Err, w.Outcome = quorumError(key, f), OutcomeUnavailable
		if f.Outcome() == quorum.Taken {
			w.Outcome = OutcomeNotAcquired
		}
	}
	x.call("Attempted", func(o *Observer) {
		if o.Attempted != nil {
			o.Attempted(w)
		}
	})
}

// observedFetcher is one of Options.Observers' Fetchers.
type observedFetcher struct {
	x    *watching
	name string
}

// fetcher has the Observers observe a Fetcher until closed is called.
func (x *watching) fetcher(name string, read func() seam.Counts) (f seam.Fetcher, closed func()) {
	closed = x.open("FetcherOpened", func(o *Observer) func() {
		if o.FetcherOpened == nil {
			return nil
		}
		return o.FetcherOpened(x.c, name, func() FetcherStats { return FetcherStats(read()) })
	})
	if x.any(func(o *Observer) bool { return o.LoadStarted != nil || o.LoadEnded != nil || o.MissEnded != nil }) {
		f = &observedFetcher{x, name}
	}
	return f, closed
}

func (f *observedFetcher) LoadStarted(ctx context.Context, keys []string) context.Context {
	f.x.call("LoadStarted", func(o *Observer) {
		if o.LoadStarted != nil {
			ctx = cmp.Or(o.LoadStarted(ctx, LoadInfo{Fetcher: f.name, Keys: keys}), ctx)
		}
	})
	return ctx
}

func (f *observedFetcher) LoadEnded(ctx context.Context, keys []string, took time.Duration, outcome string, err error) {
	l := LoadInfo{Fetcher: f.name, Keys: keys, Took: took, Outcome: LoadOutcome(outcome), Err: err}
	f.x.call("LoadEnded", func(o *Observer) {
		if o.LoadEnded != nil {
			o.LoadEnded(ctx, l)
		}
	})
}

func (f *observedFetcher) MissEnded(ctx context.Context, key string, took time.Duration, err error) {
	f.x.call("MissEnded", func(o *Observer) {
		if o.MissEnded != nil {
			o.MissEnded(ctx, f.name, key, took, err)
		}
	})
}
