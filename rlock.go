package flightlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
)

// RLock acquires key to read: any number of readers, of all processes, may have it at a time, and nobody
// else. A writer is whoever acquires the same key by SingleFlightLock, TryLock or Do. Arguments and errors
// are theirs. A writer that waits stops new readers, of all processes, and they have the key after it. (One
// that makes a single attempt, as TryLock does, does not wait.) It takes up to half a second, with notices
// usually a round trip, until readers know of it.
//
// The readers of a process share one read lease, which the last Release ends. A reader that finds it sends no
// command, and has at least three quarters of its validity left. Their Locks have one Owner, one Fence, which
// is larger than that of each earlier writer and smaller than that of each later one, and one ttl, the
// longest that any of them has asked for. Refresh of one Lock, and a new reader, extend all of them. So a
// reader that hangs keeps the key while others come, and for ttl at most once a writer waits.
//
// With a ctx made by Lock.Context of a Lock on the same key, RLock returns a nested Lock at once. A writer in
// the ctx of a reader is an ErrInvalid. Without that ctx, a caller that has a read lock and waits to write
// waits for itself, until the ttl ends. With NoRetry, RLock fails while another caller of this process
// acquires the read lease.
func (c *Client) RLock(ctx context.Context, key string, ttl time.Duration,
	retry RetryStrategy) (*Lock, error) {
	if c.flights == nil {
		return nil, errZeroClient
	}
	retry = orDefault(retry)
	if err := errors.Join(c.checkKey(key), c.checkTTL(ttl), checkStrategy(retry)); err != nil {
		return nil, err
	}
	if l := c.reenter(ctx, key); l != nil {
		return l, nil
	}
	ttl = ttl.Truncate(time.Millisecond)
	for {
		if l := c.reads.join(ctx, key, ttl, false); l != nil {
			return l, nil
		}
		if l, err := c.reads.acquire(ctx, key, ttl, retry); l != nil || err != nil {
			return l, err
		}
	}
}

// reads are the read leases of a Client, at most one per key.
//
// A read lease is acquired by a flight of its own group, with read leases for its attempts
// (quorum.Lease.Share), so it waits among writers as they do: in a queue, registered on the nodes, with
// offers. The flight knows one holder, the outermost Lock of the lease, which nobody has: the readers have
// Locks nested in it (reentrant.go). So a reader that finds the lease adds a handle, and the last Release is
// the flight's release. What is added to these two:
//
//   - who waits in the flight while the lease comes, or becomes joinable, is turned away to join it: see
//     acquire;
//   - a lease that a writer waits for is closed: nobody joins it. A recall says so, which each acquire of a
//     writer publishes that finds readers and waits (ReadersInbox), and each refresh that finds a writer
//     among the wants. A refresh that finds none opens the lease again, and those who wait join it; so does a
//     look, for a lease that nobody refreshes.
//
// A lease is refreshed by those who join it, when its last answer is older than its window. So one that is in
// use is extended before it is too short for the next reader, and a lost recall delays a writer by two
// windows. One that is closed is refreshed by its readers only: those who may not join it do not keep it from
// the writer.
type reads struct {
	c       *Client
	flights *flight.Group
	recalls sync.Once // by the first RLock: it subscribes to them
	leases  sync.Map  // of *readLease, by key: those whose Ticket holds
}

// readLease is a read lease that this process has.
type readLease struct {
	outermost  *Lock
	refreshing atomic.Pointer[readRefresh] // nil: none is in progress
	closed     atomic.Bool                 // a writer waits
	looking    atomic.Bool                 // look is about to do something
}

// readRefresh is a refresh by those who want to join.
type readRefresh struct {
	ttl  time.Duration // at least
	over chan struct{} // closed when there is the outcome:
	err  error
}

// succeeds waits for f's outcome, or for ctx to end.
func (f *readRefresh) succeeds(ctx context.Context) bool {
	select {
	case <-f.over:
		return f.err == nil
	case <-ctx.Done():
		return false
	}
}

// A joinError ends the wait of a caller that may join a lease of this process. granted is that which came
// while it waited, so a writer behind it does not keep it out; or nil.
type joinError struct{ granted *readLease }

func (joinError) Error() string { return "this process has a read lease" }

// maxReadWindow, or an eighth of the lease's validity, is how old the last answer to a read lease may be when
// somebody joins it: then it is refreshed. When it is twice as old, nobody joins until there is an answer. So
// who joins has three quarters of the validity left at least, or as much as an acquire would have given it at
// that moment.
const maxReadWindow = 250 * time.Millisecond

// init is called by New. cfg is that of the writers' flights.
func (r *reads) init(c *Client, cfg flight.Config) {
	cfg.Nodes = flightNodes{c: c, prefix: c.opts.KeyPrefix, shared: true}
	// a lease is not handed over in this process, but released when it ends: others may wait before it
	cfg.Slice = -1
	cfg.Rival = r.rivalSeen
	r.c, r.flights = c, flight.NewGroup(cfg)
}

// join returns a Lock of the lease of key; nil if there is none that takes a reader now. One that is too old,
// or for a shorter ttl, is being refreshed then; who waits has the answer first, as of an attempt, also one
// with NoRetry.
func (r *reads) join(ctx context.Context, key string, ttl time.Duration, waits bool) *Lock {
	s := r.of(key)
	for s != nil && !s.closed.Load() && ctx.Err() == nil && !r.flights.Closed() {
		full, until := s.outermost.own.Lengthen(ttl)
		valid := r.c.quorum.Validity(full)
		window, age := min(maxReadWindow, valid/8), valid-clock.Left(clock.Now(), until)
		var f *readRefresh
		if age > window {
			f = r.refresh(key, s, full)
		}
		switch {
		case age <= 2*window:
			return s.outermost.nested()
		case !waits || !f.succeeds(ctx):
			return nil
		case f.ttl >= full && !s.closed.Load(): // else it began before
			return s.outermost.nested()
		}
	}
	return nil
}

// of is the lease of key, nil if there is none.
func (r *reads) of(key string) *readLease {
	s, _ := r.leases.Load(key)
	lease, _ := s.(*readLease)
	return lease
}

// acquire returns a Lock of a new lease of key; or nil and no error when there is one that may be joined.
//
// A caller looks for a lease again when it is in the flight's queue, and a lease is stored, or opened, before
// those in the queue are turned away: so nobody waits behind a lease that came meanwhile. One that is turned
// away and finds the lease closed again begins its wait anew.
func (r *reads) acquire(ctx context.Context, key string, ttl time.Duration,
	retry RetryStrategy) (_ *Lock, err error) {
	r.recalls.Do(func() { r.c.watchRecalls(node.ReadersInbox, r) })
	before := r.of(key)
	closed := before != nil && before.closed.Load()
	if l := r.join(ctx, key, ttl, true); l != nil {
		return l, nil
	}
	l, joins := r.c.newLock(), false
	watched := r.c.watching.wait(ctx, key, &l.own, false)
	err = errPanicked // unless Enter and End return
	defer func() { watched.waited(&l.own, joins, err) }()
	queued := r.flights.Enter(ctx, key, &l.own, ttl, retry)
	switch s := r.of(key); {
	case s == nil:
	case !s.closed.Load() && (s != before || closed):
		r.flights.TurnAway(key, joinError{})
	default:
		r.look(key, s)
	}
	if err = r.flights.End(ctx, queued); err == nil {
		return r.store(key, l), nil
	}
	var join joinError
	if joins = errors.As(err, &join); !joins {
		return nil, err
	} else if join.granted != nil {
		return r.admit(ctx, key, join.granted, ttl), nil
	}
	return nil, nil
}

// admit returns a Lock of s, which was granted, when s is refreshed; nil if s is over, is not refreshed, or
// ctx ends. The Lock is there before: so s is not released meanwhile by readers that need less time than a
// refresh.
func (r *reads) admit(ctx context.Context, key string, s *readLease, ttl time.Duration) *Lock {
	l := s.outermost.nested()
	if l == nil {
		return nil
	}
	full, _ := s.outermost.own.Lengthen(ttl)
	for f := r.refresh(key, s, full); f.succeeds(ctx); f = r.refresh(key, s, full) {
		if f.ttl >= full { // else it began before
			return l
		}
	}
	l.ReleaseAsync()
	return nil
}

// store makes l the lease of key, and returns its first reader's Lock, which is the one handle that l has.
// One that was granted is there for a moment: it is refreshed, which also says whether a writer waits by now.
// Those who wait already are of its turn all the same, as of that of a lease which was acquired.
func (r *reads) store(key string, l *Lock) *Lock {
	s := &readLease{outermost: l}
	granted := l.own.Granted()
	// One Ticket of a key holds at a time. So of two leases, the one that holds is the later, whoever comes here
	// first.
	for old, there := r.leases.LoadOrStore(key, s); there; old, there = r.leases.LoadOrStore(key, s) {
		if l.own.Err() != nil {
			return &Lock{c: r.c, around: l}
		}
		r.leases.CompareAndDelete(key, old)
	}
	forget := func() { r.leases.CompareAndDelete(key, s) }
	if !l.own.AtEnd(forget) {
		forget()
	}
	if granted {
		r.refresh(key, s, l.own.TTL())
		r.flights.TurnAway(key, joinError{s})
	} else if !s.closed.Load() {
		r.flights.TurnAway(key, joinError{})
	}
	return &Lock{c: r.c, around: l}
}

// refresh extends s for ttl, which it has, unless that is being done. Whoever extends s, those who wait are
// turned away by rivalSeen; so if the nodes do not answer, and somebody waits, it is tried again.
func (r *reads) refresh(key string, s *readLease, ttl time.Duration) *readRefresh {
	f := &readRefresh{ttl: ttl, over: make(chan struct{})}
	for !s.refreshing.CompareAndSwap(nil, f) {
		if running := s.refreshing.Load(); running != nil {
			return running
		}
	}
	s.outermost.own.Refresh(r.c.opts.NodeTimeout, func(err error) {
		f.err = err
		s.refreshing.Store(nil)
		close(f.over)
		if err != nil {
			r.look(key, s)
		}
	})
	return f
}

// Confirmed and Lost are for quorum.Recalls. A recall that is missed delays a writer.
func (r *reads) Confirmed(bool) {}
func (r *reads) Lost()          {}

// Recall closes the lease of a key for which a writer waits. Readers that wait, and revocations, are none.
func (r *reads) Recall(recall node.Recall) {
	key, ours := strings.CutPrefix(recall.Key, r.c.opts.KeyPrefix)
	if rival := recall.Contender; ours && rival != "" && rival != node.Revoked && !node.Shares(rival) {
		r.rivalSeen(key, rival)
	}
}

// rivalSeen closes the lease of key if rival, the writer that waits longest for it, is one, and opens it if
// there is none: then those who wait join it.
func (r *reads) rivalSeen(key, rival string) {
	s := r.of(key)
	if s == nil {
		return
	}
	s.closed.Store(rival != "")
	if rival == "" {
		r.flights.TurnAway(key, joinError{})
	} else if r.awaited(key) {
		r.look(key, s)
	}
}

// awaited reports whether anybody waits for key.
func (r *reads) awaited(key string) bool { return r.flights.Waiters(key) > 0 }

// look does, in a moment, what those who wait beside s need. If s is closed, it asks the nodes whether a
// writer still waits, and opens s if none does; and again for as long as readers wait. It extends s only if
// that is open.
func (r *reads) look(key string, s *readLease) {
	if !s.looking.CompareAndSwap(false, true) {
		return
	}
	pause := maxReadWindow
	if s.closed.Load() {
		pause *= 2
	}
	clock.AfterFunc(pause, func() {
		s.looking.Store(false)
		switch {
		case r.of(key) != s:
			return
		case !s.closed.Load():
			if r.awaited(key) {
				r.refresh(key, s, s.outermost.own.TTL())
			}
			return
		}
		in, err := r.c.inspect(context.Background(), "look at", key, r.c.opts.NodeTimeout)
		writer := func(contender string) bool { return !node.Shares(contender) }
		awaits := func(n NodeInspection) bool { return slices.ContainsFunc(n.Waiting, writer) }
		switch {
		case r.of(key) != s:
		case err == nil && !slices.ContainsFunc(in.Nodes, awaits):
			r.rivalSeen(key, "")
		case r.awaited(key):
			r.look(key, s)
		}
	})
}

// errUpgrade is the error of a writer in the ctx of a reader.
func errUpgrade(key string) error {
	return fmt.Errorf("flightlock: %w: ctx carries a read lock of %q, which has to be released before",
		ErrInvalid, key)
}
