// Package flight is the local tier: everything in this process that wants one key.
//
// It knows nothing of Redis. What it needs of the quorum it gets through Config, so its
// tests run on fakes and virtual time.
package flight

import (
	"context"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Lease is one owner's entry on the nodes: of an attempt, and if that is won, of many Tickets in
// turn. It is a *quorum.Lease.
type Lease interface {
	// Owner is the whole stored value.
	Owner() string
	// Acquire makes the attempt; by gets its outcome exactly once, on any goroutine, and maybe
	// before Acquire returns.
	Acquire(inline bool, by quorum.Acquirer)
	// Cancel has the attempt, once it was begun, end soon, with a failure, unless it has just won. It may be
	// called before Acquire.
	Cancel()
	// Peek is the failure that the attempt would be if it ended now; nil when there is nothing to
	// say.
	Peek() *quorum.Failure
	// Refresh asks for the full ttl again and for more tokens. The flight has one refresh of a lease
	// in progress at a time. If namesRival is true, the grant names who waits.
	Refresh(ttl time.Duration, more int64, timeout time.Duration, namesRival bool,
		done func(quorum.Grant, *quorum.Failure))
	// Withdraw takes an offer back, with what its contender wanted. It reports false if the offer has
	// ended by itself.
	Withdraw() bool
	// Forget ends an offer whose contender has the key by an attempt. Its outcome may be delivered
	// still, or not.
	Forget()
	// Rejoined reports, when the release that was to bring this offer to the nodes has its outcome, whether they
	// know of it: if nobody else waits for the key, they do not.
	Rejoined() bool
	// Abandon ends the lease without a release: see quorum.Lease.Abandon.
	Abandon() (top int64, ok bool)
	// Settle says that the lease will be held for long: what it keeps ready for its release is
	// not worth the memory.
	Settle()
	// Release releases the lease; by gets the outcome. If there is a rival, the next turn is its, and the
	// flight's contender waits again. All that wait for the key elsewhere are notified of the event.
	Release(inline bool, rival string, news quorum.News, by quorum.Releaser)
}

// Nodes is how the local tier reaches the quorum.
type Nodes interface {
	// Prepare makes the lease of an attempt. contender is "" until the flight has lost one, or
	// quorum.Marked if the lease may be retained.
	Prepare(key string, ttl time.Duration, tokens int64, contender string) Lease
	// Offer makes a lease that releases elsewhere may grant to contender; by gets its outcome as that
	// of an attempt, once there is one. nil: the nodes grant nothing.
	Offer(key string, ttl time.Duration, tokens int64, contender string, by quorum.Acquirer) Lease
	// Carry has an attempt, which is not made yet, bring an offer to the nodes: they keep the key for span
	// when they grant it. With waits, the attempt leaves a free key to those who wait longer.
	Carry(attempt, offer Lease, span time.Duration, waits bool)
	// Rejoin is Release of lease, for a contender that wants the key again at once: the release brings the offer
	// to the nodes, which keep the key for span when they grant it.
	Rejoin(lease, offer Lease, span time.Duration, inline bool, by quorum.Releaser)
	// Watch calls onEvent for each event of key, until stop is called. A nil stop says that there
	// are no notices.
	Watch(key, contender string, onEvent func(quorum.Event)) (stop func())
	// Leave takes back what contender wanted.
	Leave(key, contender string)
	Validity(ttl time.Duration) time.Duration
}

// Errors phrases what callers get.
type Errors interface {
	// Failed is of an attempt or a refresh. If ctxErr is set, the caller's ctx has ended: then f is the outcome
	// so far, nil if that is unknown.
	Failed(key string, f *quorum.Failure, ctxErr error) error
	TooManyWaiters(key string) error // MaxWaiters reached
	FailedElsewhere() error          // for AcquireUnless: what the caller has waited for has failed elsewhere
	Closed() error

	Ended(key string, why error) error // the Ticket is over already, because of one of these:
	Released() error
	Lost(key string, f *quorum.Failure) error
	Revoked(key string) error // somebody has revoked it
	// Expired is of a Ticket whose Until passed. stopped says why nobody refreshed it any more,
	// failed how the last refresh did; nil: that is not known. If both are nil, all of a key are equal.
	Expired(key string, stopped, failed error) error
}

// Observer has functions that are called when something has happened, with no mutex held. Any may
// be nil.
type Observer struct {
	// Attempted is called after each attempt, Refreshed after each refresh; f is nil if it
	// succeeded.
	Attempted func(key string, took time.Duration, f *quorum.Failure)
	Refreshed func(key string, f *quorum.Failure)
	// Lost is called for each Ticket that was lost, except those that ran out and were never to be
	// refreshed. w is the Ticket's; it may be nil.
	Lost func(key string, w *Watch, why error)
}

// Watch is for observing one Ticket.
type Watch struct {
	// Ended is called when the Ticket that was given to a caller has ended, with no mutex held: why is nil if it
	// was released. ranOut says that it ended by its ttl and was never to be refreshed. It may be called before
	// the caller that holds has continued. nil: nobody wants to know.
	Ended func(why error, ranOut bool)
	// Previous is that of the Ticket whose lease was handed over, if it has one. It is set before the caller has
	// its answer, which is to clear it: or it would refer to all that were before.
	Previous *Watch
	Of       any // its maker's
}

// Config is how the local tier reaches the world. No function of Nodes or of a Lease may block, except
// Acquire, Release and Rejoin: for NodeTimeout, when inline is true. Prepare, Owner, Peek, Settle, Abandon,
// Validity and all Errors may be called with a flight's mutex held, and must not call back; all others are
// called without.
type Config struct {
	Nodes       Nodes
	Errors      Errors
	Observer    Observer
	NodeTimeout time.Duration
	Turn        time.Duration // how long a turn is kept
	Slice       time.Duration // negative: no handoff
	MaxWaiters  int           // per key; 0: no limit
	MaxRetained int           // leases at once; 0: none is retained

	// Rival is called after each refresh with the contender that waits longest, "" if nobody does. nil: the
	// flight needs to know that at the end of its slices only.
	Rival func(key, rival string)
}

// shards spreads the keys over mutexes, so that distinct keys do not contend.
const shards = 64

// Group is all flights of one client. It is safe for concurrent use.
type Group struct {
	cfg    Config
	epoch  time.Time // of instants
	seed   maphash.Seed
	shards [shards]shard
	closed atomic.Bool
	died   chan struct{} // has an entry when a flight died after close began

	// unsubscribing counts what flights have still to do about their contention: to have
	// subscribed, and when they have died, to unsubscribe and to leave.
	unsubscribing sync.WaitGroup

	contending atomic.Int64 // how many flights wait among rivals, or expect some

	watch sleepWatch

	inbox    atomic.Bool // recalls are received from a majority of nodes
	retained retainedList

	// waiters are for Tickets whose callers wait, each with its channel, which is empty. The pool
	// is the Group's own because a channel made in a test's synctest bubble must not leave it.
	waiters sync.Pool

	// deferreds are for flights, and empty.
	deferreds sync.Pool

	// releases are for waiting for a release. Each gets one value per use.
	releases sync.Pool
}

// releaseOutcome is for waiting for the outcome of a release.
type releaseOutcome chan *quorum.Failure

// Released is that outcome.
func (r releaseOutcome) Released(f *quorum.Failure) { r <- f }

func (r releaseOutcome) wait() *quorum.Failure { return <-r }

// ignored is for releases for which nobody waits.
type ignored struct{}

func (ignored) Released(*quorum.Failure) {}

func (g *Group) at(t time.Time) clock.Instant { return clock.InstantOf(g.epoch, t) }

type shard struct {
	mu      sync.Mutex // guards what follows; taken after a flight's mu, never before
	flights map[string]*flight
	alarms  timerHeap

	// lastHit is the flight that a caller queued in last, nil once it has died: a caller that wants
	// a hot key finds its flight without mu. Written under the flight's mu, while it lives; so
	// a caller that finds it dead finds it gone from here too.
	lastHit atomic.Pointer[flight]

	fruitless map[string]fruitless // keys that were retained for nothing

	counts struct { // of its flights
		granted, grants, handoffs, attempts, refreshes, lost, expired, reused, recalled atomic.Uint64
	}
}

// Counts are what flights have done.
type Counts struct {
	Acquired, Grants, Handoffs, Attempts, Refreshes, Lost, Expired uint64
	Reused, Recalled                                               uint64
	Waiters, Held, Retained                                        int64

	// how long ago the first Timer was set of those that are not over; 0: there is none
	OldestTimer time.Duration
}

// NewGroup makes an empty Group.
func NewGroup(cfg Config) *Group {
	g := &Group{cfg: cfg, epoch: clock.Now().Add(-1), seed: maphash.MakeSeed(),
		died: make(chan struct{}, 1)}
	g.waiters.New = func() any { return &waiter{ready: make(chan struct{}, 1)} }
	g.deferreds.New = func() any { return new(deferred) }
	g.releases.New = func() any { return make(releaseOutcome, 1) }
	g.watch.epoch = g.epoch
	for i := range g.shards {
		sh := &g.shards[i]
		sh.flights = map[string]*flight{}
		sh.alarms.epoch, sh.alarms.wake = g.epoch, sh.wake
		sh.alarms.watch = func() { g.watch.add(sh) }
	}
	return g
}

// find gives the flight for key, a new one if there is none; nil once the group is closed.
func (g *Group) find(key string) *flight {
	shardIndex := g.shardIndex(key)
	sh := &g.shards[shardIndex]
	if f := sh.lastHit.Load(); f != nil && f.key == key {
		return f
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	f := sh.flights[key]
	if f == nil {
		if g.closed.Load() {
			return nil
		}
		f = &flight{g: g, shardIndex: shardIndex, key: key}
		sh.flights[key] = f
	}
	return f
}

// shardIndex is the place of key's shard.
func (g *Group) shardIndex(key string) uint8 { return uint8(maphash.String(g.seed, key) % shards) }

// remove deletes a flight that has died. The caller holds f.mu.
func (g *Group) remove(f *flight) {
	sh := f.shard()
	sh.lastHit.CompareAndSwap(f, nil)
	sh.mu.Lock()
	delete(sh.flights, f.key)
	sh.alarms.drop(f)
	sh.mu.Unlock()
	if g.closed.Load() {
		select {
		case g.died <- struct{}{}:
		default:
		}
	}
}

// list gives the flights of a shard.
func (sh *shard) list() []*flight {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	all := make([]*flight, 0, len(sh.flights))
	for _, f := range sh.flights {
		all = append(all, f)
	}
	return all
}

// Counts adds what all flights have done and have in progress to sum.
func (g *Group) Counts(sum Counts) Counts {
	now := clock.Now()
	for i := range g.shards {
		sh := &g.shards[i]
		for _, f := range sh.list() {
			f.addTo(&sum, now)
		}
		handoffs := sh.counts.handoffs.Load()
		sum.Acquired += sh.counts.granted.Load() + handoffs
		sum.Handoffs += handoffs
		sum.Grants += sh.counts.grants.Load()
		sum.Attempts += sh.counts.attempts.Load()
		sum.Refreshes += sh.counts.refreshes.Load()
		sum.Lost += sh.counts.lost.Load()
		sum.Expired += sh.counts.expired.Load()
		sum.Reused += sh.counts.reused.Load()
		sum.Recalled += sh.counts.recalled.Load()
	}
	return sum
}

// Look has the callers of AcquireUnless that wait for key ask whether they still need it. One that is asking
// just now is left alone: if it had to ask again each time, it would make no attempt where Look is called all
// the time.
func (g *Group) Look(key string) {
	f := g.known(key)
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.unlock()
	f.wakeLookersLocked(func(t *Ticket) bool { return !t.waiter.inUserCode })
}

// Recheck has each flight with a waiter that fails fast find out now, and not when its next attempt
// is due, whether too few nodes can be reached.
func (g *Group) Recheck() {
	for i := range g.shards {
		for _, f := range g.shards[i].list() {
			f.recheck()
		}
	}
}

// Close refuses new callers, fails those that wait, waits for holders until ctx ends, and
// then ends them too and releases their leases. It returns when no flight is left, so
// every release has been sent, and reports whether holders had to be ended. It is called
// once.
func (g *Group) Close(ctx context.Context) (forced bool) {
	g.Shut()
	for ended := ctx.Done(); g.any(); {
		select {
		case <-g.died:
		case <-ended:
			ended = nil // what is left then does not wait for nodes
			forced = g.evict()
		}
	}
	g.unsubscribing.Wait() // flights that are gone add nothing
	g.watch.stop()
	for i := range g.shards {
		g.shards[i].stop()
	}
	return forced
}

// Shut is the first part of Close: it refuses new callers, and fails those that wait.
func (g *Group) Shut() {
	g.closed.Store(true)
	for _, f := range g.all() {
		f.shut()
	}
}

// Closed reports whether new callers are refused.
func (g *Group) Closed() bool { return g.closed.Load() }

// evict ends all holders, and sends the releases of their leases.
func (g *Group) evict() (some bool) {
	for _, f := range g.all() {
		some = f.evict() || some
	}
	return some
}

// all gives the flights by their keys, so that Close ends them in the same order each time.
func (g *Group) all() (all []*flight) {
	for i := range g.shards {
		all = append(all, g.shards[i].list()...)
	}
	slices.SortFunc(all, func(a, b *flight) int { return strings.Compare(a.key, b.key) })
	return all
}

func (g *Group) any() bool {
	for i := range g.shards {
		sh := &g.shards[i]
		sh.mu.Lock()
		n := len(sh.flights)
		sh.mu.Unlock()
		if n > 0 {
			return true
		}
	}
	return false
}

// shut ends the wait of all who wait.
func (f *flight) shut() {
	f.mu.Lock()
	defer f.unlock()
	for f.n > 0 {
		f.turnAwayLocked(f.head(), f.g.cfg.Errors.Closed())
	}
	if f.phase == lingering {
		f.nobodyCameLocked()
	}
}

// evict ends the current Ticket and sends the release of the lease, which is over, whatever the nodes answer.
func (f *flight) evict() bool {
	f.mu.Lock()
	defer f.unlock()
	t := f.cur
	if t == nil {
		return false
	}
	f.endLocked(t, lost, f.g.cfg.Errors.Closed())
	f.releaseLocked()
	return true
}
