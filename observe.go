package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/seam"
)

// An Observer is told what happens in the Clients that have it in Options.Observers, for metrics and traces:
// packages prom and otel make one. Functions that are nil are skipped. It must not be changed after New.
//
// The functions are called concurrently, on the goroutine on which it happens, under no mutex. They must
// return at once, and must not call runtime.Goexit. A panic is logged once, and ignored.
type Observer struct {
	// Of has the kinds for which Started and Ended are called, such as EventWait | EventHold. A kind that no
	// Observer has costs nothing.
	Of EventKind
	// Started is called when a wait, a hold or a load begins, with its caller's ctx. It returns the ctx for
	// Ended, derived from that; nil means the same. Other events have only Ended.
	Started func(ctx context.Context, e Event) context.Context
	Ended   func(ctx context.Context, e Event)

	// Opened is called by New, and FetcherOpened for each Fetcher and Cache made over c. closed, which may be
	// nil, is called at the end of Close. Until it has returned, Client.Stats and NodeStats, or read, may be
	// called at any time, such as at a scrape.
	Opened        func(c *Client) (closed func())
	FetcherOpened func(c *Client, name string, read func() FetcherStats) (closed func())
}

// EventKind is a kind of events, or several: they are bits.
type EventKind uint8

// The kinds of events. In parentheses: the fields that are set, besides Kind, Key and Err.
const (
	// A caller wants a lock: not nested, and with good arguments. The wait ends with the lock or an error
	// (Class, OfFetcher; at its end Took, Cause, Outcome).
	EventWait EventKind = 1 << iota
	// A caller has a lock. The hold ends when that, with all that are nested in it, is released or lost (Class,
	// OfFetcher, Fence; at its start Previous, at its end Took, Outcome).
	EventHold
	// The Loader of a Fetcher is called, with the ctx of the start. The load ends when it has returned, or is
	// not waited for any more (Keys in place of Key, Fetcher; at its end Took, Outcome).
	EventLoad
	// A caller of a Fetcher has waited for a key. Err is nil also if that does not exist (Fetcher, Took).
	EventMiss
	// A lock was lost, as Stats.Lost counts (Class, OfFetcher, Outcome).
	EventLoss
	// A lease was refreshed. Err is nil, ErrNotHeld if the lease is lost, or ErrUnavailable.
	EventRefresh
	// An attempt to acquire a key from the nodes has ended (Took, and one of the first three Outcomes).
	EventAttempt
	// A node has answered, or has not. Err is why not, or an error that was the reply (Node, Took; no Key).
	EventRoundTrip
)

// Event is what an Observer is called with.
type Event struct {
	Kind      EventKind
	Key       string // as it is: none should become a label
	Class     string // of the key, by Options.Class; "" for locks of Fetchers
	OfFetcher bool   // it is a Fetcher's own lock: Key is its name, ":", and the key
	Fence     int64
	Previous  context.Context // of the hold whose lock was handed over; nil if this one comes from the nodes
	Fetcher   string          // its name
	Keys      []string
	Node      string // its name, as in NodeStats

	Took    time.Duration
	Cause   WaitCause
	Outcome Outcome
	Err     error // what the caller gets, or why the lock is over
}

// WaitCause is what a caller waited for.
type WaitCause string

// The causes of waits.
const (
	WaitRemote  WaitCause = "remote"  // the nodes, or another process
	WaitQueue   WaitCause = "queue"   // other callers of this process, and then remote
	WaitHandoff WaitCause = "handoff" // other callers of this process, without Redis
)

// Outcome is how a wait, a hold or a load has ended. The first that applies counts.
type Outcome string

// The outcomes of waits, of holds (the last three of these are losses), and of loads.
const (
	OutcomeAcquired       Outcome = "acquired"
	OutcomeUnavailable    Outcome = "unavailable"    // ErrUnavailable, also if ctx has ended
	OutcomeNotAcquired    Outcome = "not_acquired"   // others have the key, and the strategy gave up
	OutcomeHeldByOthers   Outcome = "held_by_others" // ctx has ended, and others had the key
	OutcomeCanceled       Outcome = "canceled"       // ctx has ended before the state of the key was known
	OutcomeTooManyWaiters Outcome = "too_many_waiters"
	OutcomeClosed         Outcome = "closed"
	OutcomeInvalid        Outcome = "invalid"  // two nodes are one server
	OutcomeNeedless       Outcome = "needless" // of a Fetcher: there is a value now
	OutcomePanicked       Outcome = "panicked" // the RetryStrategy did

	EndReleased Outcome = "released"
	EndRanOut   Outcome = "ran_out" // its ttl passed, and it was never refreshed and had no Context
	EndExpired  Outcome = "expired" // it was not refreshed in time
	EndTaken    Outcome = "taken"   // the nodes report that the key is gone, or has another owner
	EndClosed   Outcome = "closed"  // by Client.Close

	LoadLoaded   Outcome = "loaded"
	LoadFailed   Outcome = "failed" // for some keys or all
	LoadPanicked Outcome = "panicked"
	LoadTimedOut Outcome = "timed_out"
)

// FetcherStats are counters: see fetch.Stats and rediscache.Stats.
type FetcherStats struct {
	Hits, Stale, Misses, Joined                                 uint64
	Loads, UnlockedLoads, LoadFailures, StoreFailures, Unstored uint64
	LookupErrors, Lost, Outdated, NotFound                      uint64
	Running                                                     int64

	Cached                                   bool // it is in a Cache, which counts the following
	LocalHits, Undecodable, TooLong, Dropped uint64
	Repeating, Down, Hearing                 int64
}

// watching calls the Observers of a Client. It is nil if there are none.
type watching struct {
	c        *Client
	all      []*Observer
	of       EventKind // those of all
	closed   func()    // calls what Opened has returned; nil: nothing
	panicked sync.Map  // the functions that have
}

// newWatching is for c, whose nodes it watches. The flights report to cfg.
func newWatching(c *Client, cfg *flight.Observer) *watching {
	x := &watching{c: c}
	for _, o := range c.opts.Observers {
		if o != nil {
			x.all, x.of = append(x.all, o), x.of|o.Of
		}
	}
	if x.all == nil {
		return nil
	}
	if x.of&EventAttempt != 0 {
		cfg.Attempted = x.attempted
	}
	if x.of&EventRefresh != 0 {
		cfg.Refreshed = func(key string, f *quorum.Failure) {
			x.happened(Event{Kind: EventRefresh, Key: key, Err: failure(key, f)})
		}
	}
	if x.of&EventRoundTrip != 0 {
		for _, n := range c.nodes {
			name := n.Name()
			n.Observe = func(took time.Duration, err error) {
				x.happened(Event{Kind: EventRoundTrip, Node: name, Took: took, Err: err})
			}
		}
	}
	return x
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

// started calls Started of those who observe such events, and returns the ctx for Ended.
func (x *watching) started(ctx context.Context, e Event) context.Context {
	for i, o := range x.all {
		if o.Started != nil && o.Of&e.Kind != 0 {
			x.guard(i, "Started", func() { ctx = cmp.Or(o.Started(ctx, e), ctx) })
		}
	}
	return ctx
}

// ended calls Ended of those who observe such events.
func (x *watching) ended(ctx context.Context, e Event) {
	for i, o := range x.all {
		if o.Ended != nil && o.Of&e.Kind != 0 {
			x.guard(i, "Ended", func() { o.Ended(ctx, e) })
		}
	}
}

// happened is ended for an event that has no beginning, and no caller.
func (x *watching) happened(e Event) { x.ended(context.Background(), e) }

// open calls f, which calls the function of that name if the Observer has it, for each, and returns what
// calls all that these have returned.
func (x *watching) open(name string, f func(o *Observer) (closed func())) (closed func()) {
	var all []func()
	for i, o := range x.all {
		x.guard(i, name, func() {
			if closed := f(o); closed != nil {
				all = append(all, func() { x.guard(i, name+"'s closed", closed) })
			}
		})
	}
	return func() {
		for _, closed := range all {
			closed()
		}
	}
}

// opened is for a Client that is complete.
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
	if err := group.For(ctx, x.closed); err != nil {
		return fmt.Errorf("what Observer.Opened has returned has not returned: %w", err)
	}
	return nil
}

// watched is a wait that is observed, and the hold that follows it. That may end, on another goroutine,
// before its caller has had the time to report that it has started: then the caller reports the end, too. The
// flight refers to it, so it does not refer to the Ticket of the Lock (see autoRefresh).
type watched struct {
	x     *watching
	outer context.Context // the caller's
	ctx   context.Context // for Ended, of the wait
	e     Event           // what the events of both have in common
	began time.Time
	watch flight.Watch // of the hold, if anybody wants to know

	mu    sync.Mutex      // guards what follows
	hold  context.Context // for Ended, of the hold; nil before it has started
	since time.Time       // it has
	end   Event           // Outcome is "" before it has ended
	over  time.Time
}

// wait begins to observe a wait for t's lock, if anybody observes anything. waited must be called.
func (x *watching) wait(ctx context.Context, key string, t *flight.Ticket, ofFetcher bool) *watched {
	if x == nil {
		return nil
	}
	w := &watched{x: x, outer: ctx, e: Event{Kind: EventWait, Key: key, OfFetcher: ofFetcher}}
	if class := x.c.opts.Class; class != nil && !ofFetcher {
		w.e.Class = class(key)
	}
	if w.e.Class != "" || x.of&EventHold != 0 || ofFetcher && x.of&EventLoss != 0 {
		w.watch = flight.Watch{Ended: w.ended, Of: w}
		t.SetWatch(&w.watch)
	}
	w.ctx = x.started(ctx, w.e)
	w.began = time.Now()
	return w
}

// waited ends a wait for t's lock with err. needless says that the caller has no lock then, and needs none.
func (w *watched) waited(t *flight.Ticket, needless bool, err error) {
	if w == nil {
		return
	}
	e := w.e
	e.Took, e.Err, e.Cause, e.Outcome = time.Since(w.began), err, waitCauses[t.Kind()], outcomeOf(err)
	if err != nil && e.Cause == WaitHandoff { // just as its ctx ended
		e.Cause = WaitQueue
	}
	if needless && err == nil {
		e.Outcome = OutcomeNeedless
	}
	w.x.ended(w.ctx, e)
	previous := w.watch.Previous
	w.watch.Previous = nil // see there
	if w.watch.Of == nil || e.Outcome != OutcomeAcquired {
		return
	}
	since, start := time.Now(), w.e
	start.Kind, start.Fence = EventHold, t.Fence()
	if previous != nil {
		before := previous.Of.(*watched)
		before.mu.Lock()
		start.Previous = before.hold
		before.mu.Unlock()
	}
	ctx := w.x.started(w.outer, start)
	w.note(func() { w.hold, w.since, w.end.Fence = ctx, since, start.Fence })
}

// ended is what the flight calls when the hold has ended, once.
func (w *watched) ended(why error, ranOut bool) {
	w.note(func() { w.over, w.end.Err, w.end.Outcome = time.Now(), why, endOf(why, ranOut) })
}

// note calls set, and reports the end of the hold when that has both started and ended.
func (w *watched) note(set func()) {
	w.mu.Lock()
	set()
	ctx, e, end := w.hold, w.e, w.end
	e.Kind, e.Fence, e.Took, e.Outcome, e.Err = EventHold, end.Fence, max(w.over.Sub(w.since), 0), end.Outcome,
		end.Err
	w.mu.Unlock()
	if ctx != nil && e.Outcome != "" {
		w.x.ended(ctx, e)
	}
}

// errPanicked is the error of a wait that a panic has ended, for Observers.
var errPanicked = errors.New("flightlock: the RetryStrategy panicked")

var waitCauses = [...]WaitCause{flight.Remote: WaitRemote, flight.Queued: WaitQueue,
	flight.Handed: WaitHandoff}

// outcomeOf is the outcome of a wait with that error. ErrUnavailable comes first, because most callers wait
// for the nodes until their ctx ends, and an outage must not look like callers that left.
func outcomeOf(err error) Outcome {
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

func endOf(why error, ranOut bool) Outcome {
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
	e := Event{Key: key}
	if w != nil {
		e = w.Of.(*watched).e
	}
	e.Kind, e.Outcome, e.Err = EventLoss, endOf(why, false), why
	x.happened(e)
}

func (x *watching) attempted(key string, took time.Duration, f *quorum.Failure) {
	e := Event{Kind: EventAttempt, Key: key, Took: took, Outcome: OutcomeAcquired, Err: failure(key, f)}
	switch {
	case f != nil && f.Outcome() == quorum.Taken:
		e.Outcome = OutcomeNotAcquired
	case f != nil:
		e.Outcome = OutcomeUnavailable
	}
	x.happened(e)
}

// failure is quorumError, or nil where there is none.
func failure(key string, f *quorum.Failure) error {
	if f == nil {
		return nil
	}
	return quorumError(key, f)
}

// fetcher has the Observers, if there are any, observe a Fetcher until closed is called.
func (x *watching) fetcher(name string, read func() seam.Counts) (f seam.Fetcher, closed func()) {
	if x == nil {
		return nil, func() {}
	}
	closed = x.open("FetcherOpened", func(o *Observer) func() {
		if o.FetcherOpened == nil {
			return nil
		}
		return o.FetcherOpened(x.c, name, func() FetcherStats { return FetcherStats(read()) })
	})
	if x.of&(EventLoad|EventMiss) != 0 {
		f = &observedFetcher{x, name}
	}
	return f, closed
}

// observedFetcher reports the loads and misses of one Fetcher.
type observedFetcher struct {
	x    *watching
	name string
}

func (f *observedFetcher) LoadStarted(ctx context.Context, keys []string) context.Context {
	return f.x.started(ctx, Event{Kind: EventLoad, Fetcher: f.name, Keys: keys})
}

func (f *observedFetcher) LoadEnded(ctx context.Context, keys []string, took time.Duration, outcome string,
	err error) {
	f.x.ended(ctx, Event{Kind: EventLoad, Fetcher: f.name, Keys: keys, Took: took, Outcome: Outcome(outcome),
		Err: err})
}

func (f *observedFetcher) MissEnded(ctx context.Context, key string, took time.Duration, err error) {
	f.x.ended(ctx, Event{Kind: EventMiss, Fetcher: f.name, Key: key, Took: took, Err: err})
}
