package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/seam"
	"golang.org/x/sync/semaphore"
)

// batch is the runs that a caller has begun together, mostly one, and the work for them, on one goroutine:
//
//	a slot -> one attempt for each lock, all at once
//	    those won:        a permit -> look up -> load -> store -> release (load.go)
//	    others have them: wait for one of these locks, and look up all now and then: see await
//	    no majority:      a slot for loads without locks -> as those won; or all again when nodes are back
//
// It never waits for a lock while it has another one. So two batches with common keys, in whatever order, do
// not wait for each other: each has what it won, and gives it back before its callers have waited for the
// rest. Where the runs of a batch have to go different ways, they become batches of their own.
//
// Runs are canceled when their callers leave, until they have what a load needs. Then they are committed.
type batch[V any] struct {
	f        *Fetcher[V]
	runs     []*run[V]
	why      error     // they are to be loaded without locks, because of that; nil: with locks
	until    time.Time // when they stop waiting for a lock, or for a slot
	extended bool      // until has begun once more, with the first wait for a slot without a lock

	waits bool          // they were tried, and others have their locks
	tried time.Time     // when that was
	pause time.Duration // until they are tried again
	// what another process has loaded for one of them has failed, and so may theirs: see try
	failing error
	slow    int // lookups in a row that timed out
}

const (
	// firstPause is the first of the pauses between the lookups of runs that wait together, and pauseGrowth how
	// many percent each is longer than the one before: a value is found later by hardly more than so much of the
	// wait.
	firstPause  = 5 * time.Millisecond
	pauseGrowth = 30

	longestRetry = 5 * time.Second // between attempts for all locks of a batch
	recheckEvery = time.Second     // how often runs that wait for a slot check whether they still need one

	// maxSlowLookups in a row that time out, while runs wait, count as an outage of the store. Fewer: it may be
	// busy.
	maxSlowLookups = 3
)

// start starts runs, MaxBatch of them together. Those that begin with a lookup error are loaded without
// locks.
func (f *Fetcher[V]) start(runs []*run[V]) {
	if len(runs) == 0 { // mostly
		return
	}
	all := &batch[V]{f: f, runs: runs, until: time.Now().Add(f.opts.WaitTimeout)}
	down := all.take(func(r *run[V]) bool { return r.Data.lost != nil })
	for _, list := range [][]*run[V]{all.runs, down.runs} {
		for some := range slices.Chunk(list, f.opts.MaxBatch) {
			f.fork(all.part(some[0].Data.lost, some...))
		}
	}
}

// fork goes on with a batch on a goroutine of its own.
func (f *Fetcher[V]) fork(b *batch[V]) {
	if len(b.runs) > 0 {
		f.runs.Go(b.drive)
	}
}

// fail ends runs that are not loaded, and gives their callers the reason.
func (b *batch[V]) fail(why error) {
	for _, r := range b.runs {
		if r.Data.refreshes { // the next stale hits are not to try what has just been tried in vain
			b.f.failures.inUse(r.Key(), clock.Now())
		}
		var none V
		r.Finish(none, fmt.Errorf("flightlock: fetch %q: %w", r.Key(), within(why)))
	}
	b.end()
}

// drive is the whole work for a batch.
func (b *batch[V]) drive() {
	f := b.f
	for b.alive() {
		// After a load that failed in another process runs are loaded, whatever the policy: errors do not cross
		// processes, so each finds out by a load of its own, all at the same time.
		if b.why != nil && f.opts.FailClosed && f.c.Why(b.why) != seam.FailedElsewhere {
			b.fail(b.why)
			return
		}
		wait := b.enter
		if b.waits && b.why == nil {
			wait = b.await
		}
		s, ok := wait()
		if !ok {
			continue
		}
		if b.why != nil {
			b.load(s)
			return
		}
		if won := b.try(); len(won.runs) > 0 {
			f.fork(b)
			won.load(s)
			return
		}
		s.leave()
	}
}

// alive ends runs that were canceled, and reports whether any are left.
func (b *batch[V]) alive() bool {
	b.take(func(r *run[V]) bool { return r.Context().Err() != nil }).end()
	return len(b.runs) > 0
}

// part is a batch for some of the runs.
func (b *batch[V]) part(why error, runs ...*run[V]) *batch[V] {
	return &batch[V]{f: b.f, runs: runs, why: why, until: b.until, extended: b.extended}
}

// take moves those runs for which it reports true to a batch of their own.
func (b *batch[V]) take(which func(r *run[V]) bool) *batch[V] {
	other := b.part(nil)
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		taken := which(r)
		if taken {
			other.runs = append(other.runs, r)
		}
		return taken
	})
	return other
}

// end ends the runs, and gives their locks back.
func (b *batch[V]) end() {
	b.release()
	for _, r := range b.runs {
		r.Done()
	}
	b.runs = nil
}

// release gives the locks of the runs back, and waits for no node. It says of those that have failed that
// they have.
func (b *batch[V]) release() {
	for _, r := range b.runs {
		l, end := r.Data.lock, release
		if l == nil {
			continue
		}
		// else Close has ended it: theirs may succeed
		if r.Data.lock = nil; r.Data.failed && r.Context().Err() == nil {
			end = b.f.c.ReleaseFailed
		}
		end(l)
	}
}

func release(l seam.Lock) { l.ReleaseAsync() } // that it is over already was noticed where it mattered

func (b *batch[V]) keys() []string { return keysOf(b.runs, (*run[V]).Key) }

// set says what the runs wait for.
func (b *batch[V]) set(waits string) {
	for _, r := range b.runs {
		r.Data.waits.Store(waits)
	}
}

// enter waits for a slot. It reports false if it has none because the runs have ended, or can be locked after
// all. A refresh without callers does not wait, nor does a batch with a run that is to hurry: it has the zero
// slot.
func (b *batch[V]) enter() (slot, bool) {
	f, locked := b.f, b.why == nil
	if s, ok := f.gate.try(locked); ok {
		return s, true
	}
	b.dropUnwanted()
	return b.queue(waitsForSlot, func(waiting context.Context) slot {
		s, _ := f.gate.enter(locked, func(x *semaphore.Weighted) bool { return x.Acquire(waiting, 1) == nil })
		return s
	})
}

// dropUnwanted ends refreshes that nobody waits for.
func (b *batch[V]) dropUnwanted() {
	b.take(func(r *run[V]) bool {
		if r.Wanted() {
			return false
		}
		b.f.failures.inUse(r.Key(), clock.Now())
		return true
	}).end()
}

// queue waits for what acquire gets before its ctx ends, as enter does for a slot.
func (b *batch[V]) queue(waits string, acquire func(waiting context.Context) slot) (slot, bool) {
	f, locked := b.f, b.why == nil
	b.set(waits)
	if !locked && !b.extended {
		b.extended, b.until = true, time.Now().Add(f.opts.WaitTimeout)
	}
	waiting, end := context.WithCancel(context.Background())
	defer end()
	for _, r := range b.runs {
		if r.Data.entering.Swap(&end) == &hurried {
			r.Data.hurry()
		}
	}
	var s slot
	over := make(chan struct{}) // closed when waiting has ended, and s is set
	f.runs.Go(func() {
		defer close(over)
		defer end()
		s = acquire(waiting)
	})
	for b.alive() && locked == (b.why == nil) {
		if !time.Now().Before(b.until) {
			b.fail(b.noSlot(waits))
			break
		}
		select {
		case <-over:
			return s, true
		case <-b.runs[0].Context().Done():
		case <-time.After(min(recheckEvery, time.Until(b.until))):
			b.recheck(waiting)
		}
	}
	end()
	<-over
	s.leave()
	return nil, false
}

// noSlot is the error of runs that have waited for one, or for a permit, in vain.
func (b *batch[V]) noSlot(waits string) error {
	if waits == waitsForPermit {
		return fmt.Errorf("%w: no permit within Options.WaitTimeout, %v: Options.FleetLoads, %d, are running",
			flightlock.ErrNotAcquired, b.f.opts.WaitTimeout, b.f.opts.FleetLoads)
	}
	if b.why != nil {
		return fmt.Errorf("%w; and Options.MaxUnlockedLoads, %d, are running", b.why, b.f.opts.MaxUnlockedLoads)
	}
	return fmt.Errorf("%w: no slot within Options.WaitTimeout, %v: Options.MaxLoads, %d, are running",
		flightlock.ErrNotAcquired, b.f.opts.WaitTimeout, b.f.opts.MaxLoads)
}

// recheck checks whether runs that wait for a slot without locks can be locked after all, and ends those that
// others have loaded meanwhile. Its lookup ends with waiting, and when the runs have waited for too long: a
// slot that becomes free is not kept idle for as long as a busy store takes.
func (b *batch[V]) recheck(waiting context.Context) {
	if b.why != nil && b.f.c.Why(b.why) == seam.Away {
		if !b.f.c.Away() {
			b.why = nil
		}
		return
	}
	ctx, cancel := context.WithDeadline(b.runs[0].Context(), b.until)
	defer cancel()
	defer context.AfterFunc(waiting, cancel)()
	if answered, err := b.look(ctx); err == nil && answered && isLookup(b.why) {
		b.why = nil
	}
}

// try makes one attempt for the lock of each run, all at the same time, and returns the runs that have
// theirs, with the one that await has left. b keeps those whose locks others have. For a single run, await
// makes the attempt.
func (b *batch[V]) try() (won *batch[V]) {
	f := b.f
	b.waits, won = true, b.take(func(r *run[V]) bool { return r.Data.lock != nil })
	if n := len(b.runs); n == 0 || n == 1 && f.opts.MaxLoads == 0 && !b.runs[0].Data.refreshes &&
		b.failing == nil {
		return won
	}
	b.set(waitsForTurn)
	b.tried, b.pause = time.Now(), min(max(2*b.pause, 2*f.c.NodeTimeout()), longestRetry)
	ends := make(map[*run[V]]func() (seam.Lock, error), len(b.runs))
	for _, r := range b.runs {
		ends[r] = f.c.Begin(r.Context(), f.lockKey(r.Key()), f.opts.TTL)
	}
	away, taken := b.part(nil), b.part(b.failing)
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		before := f.c.Holder(r.Data.lost)
		l, err := ends[r]()
		r.Data.lost = err
		switch why := f.c.Why(err); {
		case err == nil:
			won.runs, r.Data.lock = append(won.runs, r), l
		case r.Context().Err() != nil:
			r.Done()
		case why == seam.Refused:
			b.part(nil, r).fail(err)
		case why == seam.Away:
			away.runs, away.why = append(away.runs, r), err
		case !r.Wanted():
			if why == seam.InUse && f.opts.StaleWait <= 0 { // else those that come next wait for the new value
				f.failures.inUse(r.Key(), clock.Now())
			}
			r.Done()
		case b.failing != nil && f.c.Holder(err) != before: // that one may fail, too, and so may the next
			taken.runs = append(taken.runs, r)
		default:
			return false
		}
		return true
	})
	b.failing = nil
	if len(away.runs) > 0 { // those whose attempts ended a moment before that was known are loaded with them
		again := b.take(func(r *run[V]) bool { return f.c.Why(r.Data.lost) == seam.Again })
		away.runs = append(away.runs, again.runs...)
	}
	f.fork(away)
	f.fork(taken)
	return won
}

// await waits for runs whose keys are being loaded elsewhere: mostly by one load, which brings all values at
// the same time. So one of them waits for its lock, to hear at once when its load is over: one whose lock
// nobody has, if there is one. On each event of its key all are looked up, and besides now and then. If there
// is no value when the lock is free, all locks are tried again, and so they are after a while in any case. It
// reports false when no run has its lock and a slot, because there is something else to do for b.
func (b *batch[V]) await() (s slot, ok bool) {
	f := b.f
	lead := b.runs[max(0, slices.IndexFunc(b.runs, func(r *run[V]) bool {
		return r.Data.lost != nil && f.c.Why(r.Data.lost) == seam.Again
	}))]
	isLead := func(r *run[V]) bool { return r == lead }
	ctx, cancel := context.WithDeadline(lead.Context(), b.until)
	defer cancel()
	b.set(waitsForLock)
	key := f.lockKey(lead.Key())
	if len(b.runs) > 1 {
		f.runs.Go(func() { // until ctx ends
			for pause := firstPause; ; pause = min(pause+pause*pauseGrowth/100, recheckEvery) {
				select {
				case <-time.After(pause):
					f.c.Look(key)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	again, failed := false, error(nil)
	l, _, err := f.c.Contend(ctx, key, f.opts.TTL, func(ctx context.Context) bool {
		_, failed = b.look(ctx)
		again = len(b.runs) > 1 && time.Since(b.tried) >= b.pause
		return again || failed != nil || !slices.Contains(b.runs, lead)
	})
	switch why := f.c.Why(err); {
	case l != nil:
		if slices.Contains(b.runs, lead) {
			b.waits = false
			s, ok = f.gate.try(true)
		}
		if ok {
			lead.Data.lock = l
		} else { // its value is there, or another process may have a slot
			release(l)
		}
	case failed != nil:
		b.why, b.waits = failed, false
	case again:
		b.waits = false
	case err == nil, lead.Context().Err() != nil: // there is nothing to do for it any more
	case ctx.Err() != nil:
		b.waits, b.why = false, fmt.Errorf("%w: no value within Options.WaitTimeout, %v: %w",
			flightlock.ErrNotAcquired, f.opts.WaitTimeout, notCtx(within(err)))
	case why == seam.FailedElsewhere:
		f.fork(b.part(err, b.take(isLead).runs...))
		if b.failing, b.waits = err, false; len(b.runs) > 0 {
			time.Sleep(firstPause) // the other process gives back its other locks just now
		}
	case why == seam.Refused:
		b.take(isLead).fail(err)
	default: // too few nodes can be reached
		b.why, b.waits = err, false
	}
	return s, ok
}

// look looks up all runs, and ends those whose value is there. A stale one will do for callers that have
// none, and is refreshed. answered says that the store has answered; err is that it is down.
func (b *batch[V]) look(ctx context.Context) (answered bool, err error) {
	f := b.f
	if !b.alive() {
		return false, nil
	}
	turn, cancel := context.WithTimeout(ctx, f.opts.LookupTimeout)
	defer cancel()
	if f.lookups.Acquire(turn, 1) != nil { // too many are under way: it waits on
		return false, nil
	}
	scope := f.sending()
	_, found, err, over := call(b, context.WithValue(ctx, seam.OfRun{}, true), f.opts.LookupTimeout, "Lookup",
		func(ctx context.Context, keys []string) (map[string]Entry[V], error) {
			defer f.lookups.Release(1) // and not when it is not waited for any more: it is under way
			return f.lookUp(ctx, keys)
		})
	var stale []*run[V]
	ended, down := b.part(nil), b.part(nil)
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		e, why := found[r.Key()], errorOf(err, r.Key())
		switch {
		case why == nil && (e.Fresh == Fresh || e.Fresh == Stale && !(r.Data.refreshes && f.opts.StaleWait > 0)) &&
			r.Data.endsWithFound():
			scope.Stamp = e.Stamp
			r.Limit(scope)
			r.Finish(e.result())
			if e.Fresh == Stale {
				stale = append(stale, f.refresh(r.Context(), r.Key())...)
			}
			ended.runs = append(ended.runs, r)
			return true
		case why == nil:
			answered = true
		case ctx.Err() == nil && over && !timedOut(why):
			down.runs, down.why = append(down.runs, r), f.lookupFailed(r.Key(), why)
			return true
		}
		return false
	})
	ended.end()
	f.start(stale)
	switch {
	case len(down.runs) > 0 && len(b.runs) == 0:
		b.runs = down.runs
		return false, down.why
	case len(down.runs) > 0: // a part of the store
		f.fork(down)
	case err == nil || answered || ctx.Err() != nil:
		b.slow = 0
	default:
		b.slow++
		if err = f.lookupFailed(b.runs[0].Key(), err); b.slow >= maxSlowLookups {
			return false, err
		}
	}
	return answered || err == nil, nil
}

// lookUp looks up keys, with the least that the store has for that.
func (f *Fetcher[V]) lookUp(ctx context.Context, keys []string) (map[string]Entry[V], error) {
	if len(keys) > 1 {
		return f.store.GetMany(ctx, keys)
	}
	e, err := f.store.Get(ctx, keys[0])
	return map[string]Entry[V]{keys[0]: e}, err
}

// call calls code of the user's for the keys of b, for timeout at most, with an error for errorOf: over is
// false if ctx has ended before. c is the call, which goes on then.
func call[V, T any](b *batch[V], ctx context.Context, timeout time.Duration, op string,
	f func(ctx context.Context, keys []string) (T, error)) (c *coalesce.Call[T], v T, err error, over bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	keys := b.keys() // f may change them, and have them when it is not waited for any more
	c = coalesce.Start(b.f.runs.Go, func() (T, error) { return f(ctx, keys) })
	v, err, over = result(c, ctx, op, b.keys())
	return c, v, err, over
}

// result is what a call for keys has returned, as in call.
func result[T any](c *coalesce.Call[T], ctx context.Context, op string,
	keys []string) (v T, err error, over bool) {
	if !c.Wait(ctx) {
		return v, errors.New("no answer in time"), false
	}
	v, err, p := c.Result()
	if p != nil {
		err = &flightlock.PanicError{Op: op, Value: p.Value, Goexit: p.Goexit, Stack: p.Stack}
	}
	return v, keyed(err, keys), true
}
