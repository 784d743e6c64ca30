package fetch

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/seam"
)

// batch is the runs that a caller has begun together, mostly one, and the work for them, on one goroutine:
//
//	a slot -> one attempt for each lock, all at once
//	    those won:        look up -> load -> store -> release (load.go)
//	    others have them: wait for one of these locks, and look up all now and then: see await
//	    no majority:      a slot for loads without locks -> as those won; or all again when nodes are back
//
// It never waits for a lock while it has another one. So two batches with common keys, in whatever order, do not wait
// for each other: each has what it won, and gives it back before its callers have waited for the rest. Where the runs
// of a batch have to go different ways, they become batches of their own.
//
// Runs are canceled when their callers leave, until they are committed: when they have what a load needs. From there on
// they go to their end.
type batch[V any] struct {
	f     *Fetcher[V]
	runs  []*run[V]
	why   error                // they are to be loaded without locks, because of that; nil: with locks
	locks map[string]seam.Lock // that were won, while they are loaded

	waits   bool          // they were tried, and others have their locks
	tried   time.Time     // when that was
	pause   time.Duration // until they are tried again
	failing error         // what another process has loaded for one of them has failed, and so may theirs: see try
	slow    int           // lookups in a row that timed out
}

const (
	// firstPause is the first of the pauses between the lookups of runs that wait together, and pauseGrowth how many
	// percent each is longer than the one before. So a value is found later than it could be by hardly more than so many
	// percent of the wait.
	firstPause  = 5 * time.Millisecond
	pauseGrowth = 30

	longestRetry = 5 * time.Second // between attempts for all locks of a batch

	recheckEvery = time.Second // how often runs that wait for a slot check whether they still need one

	// maxSlowLookups is how many lookups may time out in a row before they count as an outage of the store, while runs
	// wait: it may only be busy.
	maxSlowLookups = 3
)

// start starts runs, MaxBatch of them together. Those that begin with a lookup error are loaded without locks.
func (f *Fetcher[V]) start(runs []*run[V]) {
	until := time.Now().Add(f.opts.WaitTimeout)
	var lock, other []*run[V]
	for _, r := range runs {
		if r.Data.until = until; r.Data.lost == nil {
			lock = append(lock, r)
		} else {
			other = append(other, r)
		}
	}
	for some := range slices.Chunk(lock, f.opts.MaxBatch) {
		f.fork(&batch[V]{f: f, runs: slices.Clip(some)})
	}
	for some := range slices.Chunk(other, f.opts.MaxBatch) {
		f.fork(&batch[V]{f: f, runs: slices.Clip(some), why: some[0].Data.lost})
	}
}

// fork goes on with a batch on a goroutine of its own.
func (f *Fetcher[V]) fork(b *batch[V]) {
	if len(b.runs) > 0 {
		f.runs.Go(b.drive)
	}
}

// end ends a run. Callers that have no result get the error of a Fetcher that is closed: nothing else cancels a run
// that has callers.
func (f *Fetcher[V]) end(r *run[V]) {
	if !r.Delivered() {
		var none V
		r.Finish(none, keyClosed(r.Key()))
	}
	r.Done()
}

// fail ends a run that is not loaded, with the reason.
func (f *Fetcher[V]) fail(r *run[V], why error) {
	f.notRefreshed(r)
	var none V
	r.Finish(none, fmt.Errorf("flightlock: fetch %q: %w", r.Key(), within(why)))
	r.Done()
}

// notRefreshed keeps the next stale hits from trying what has just been tried in vain.
func (f *Fetcher[V]) notRefreshed(r *run[V]) {
	if r.Data.refreshes {
		f.failures.inUse(r.Key(), clock.Now())
	}
}

// drive is the whole work for a batch.
func (b *batch[V]) drive() {
	f := b.f
	for b.alive() {
		if b.why != nil && !b.mayLoad() {
			for _, r := range b.runs {
				f.fail(r, b.why)
			}
			return
		}
		var won *batch[V]
		var s slot
		var ok bool
		if b.waits && b.why == nil {
			lead, l := b.await()
			if l == nil {
				continue
			}
			b.waits = false
			if s, ok = f.gate.try(true); !ok { // another process may have one
				release(l)
				continue
			}
			b.without(lead)
			won = b.try()
			if !won.add(lead, l) {
				release(l)
				f.end(lead)
			}
		} else {
			if s, ok = b.enter(); !ok {
				continue
			}
			if b.why != nil {
				b.commit()
				b.load(s)
				return
			}
			won = b.try()
		}
		if len(won.runs) > 0 {
			f.fork(b)
			won.load(s)
			return
		}
		s.leave()
	}
}

// alive ends runs that were canceled, and reports whether any are left.
func (b *batch[V]) alive() bool {
	b.drop(func(r *run[V]) bool { return r.Canceled() != nil })
	return len(b.runs) > 0
}

// drop ends those runs for which done reports true.
func (b *batch[V]) drop(done func(r *run[V]) bool) {
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		if !done(r) {
			return false
		}
		b.f.end(r)
		return true
	})
}

// take moves those runs for which it reports true to a batch of their own.
func (b *batch[V]) take(which func(r *run[V]) bool) *batch[V] {
	other := &batch[V]{f: b.f}
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		taken := which(r)
		if taken {
			other.runs = append(other.runs, r)
		}
		return taken
	})
	return other
}

// without takes one run out, which is in it.
func (b *batch[V]) without(r *run[V]) {
	b.runs = slices.DeleteFunc(b.runs, func(other *run[V]) bool { return other == r })
}

// keys are those of the runs.
func (b *batch[V]) keys() []string { return keysOf(b.runs, (*run[V]).Key) }

// set says what the runs wait for.
func (b *batch[V]) set(waits int32) {
	for _, r := range b.runs {
		r.Data.waits.Store(waits)
	}
}

// mayLoad reports whether the runs may be loaded without locks because of why. After a load that failed in another
// process they may, whatever the policy: errors do not cross processes, so each finds out by a load of its own, all at
// the same time.
func (b *batch[V]) mayLoad() bool {
	return !b.f.opts.FailClosed || b.f.c.Why(b.why) == seam.FailedElsewhere
}

// commit commits runs that are to be loaded without locks, and ends those whose callers have left.
func (b *batch[V]) commit() {
	if b.f.c.Why(b.why) != seam.FailedElsewhere {
		b.f.seen.without.began(b.why)
	}
	b.drop(func(r *run[V]) bool { return !r.Commit() })
}

// enter waits for a slot. It reports false if it has none because the runs have ended, or can be locked after all. A
// refresh without callers does not wait.
func (b *batch[V]) enter() (slot, bool) {
	f, locked := b.f, b.why == nil
	if s, ok := f.gate.try(locked); ok {
		return s, true
	}
	b.drop(func(r *run[V]) bool {
		if r.Wanted() {
			return false
		}
		f.notRefreshed(r)
		return true
	})
	b.set(waitsForSlot)
	hurry, is := make(chan struct{}, 1), false
	for _, r := range b.runs {
		if is = r.Data.hurry.watch(hurry) || is; !locked && !r.Data.extended {
			r.Data.extended, r.Data.until = true, time.Now().Add(f.opts.WaitTimeout)
		}
	}
	if is {
		return nil, true
	}
	back := f.c.Back()
	ctx, cancel := context.WithCancel(context.Background())
	waiting, ends := context.WithCancel(ctx)
	got := make(chan slot, 1)
	f.runs.Go(func() {
		f.gate.enter(ctx, locked, func(s slot, ok bool) {
			if ok {
				got <- s
			}
			close(got)
			ends()
		})
	})
	refuse := func() (slot, bool) {
		cancel()
		s := <-got
		s.leave()
		return nil, false
	}
	for b.stillWaits() {
		recheck := time.NewTimer(max(min(recheckEvery, time.Until(b.runs[0].Data.until)), 0))
		select {
		case s := <-got:
			recheck.Stop()
			cancel()
			return s, true
		case <-hurry:
			refuse()
			return nil, true
		case <-f.closing:
			return refuse()
		case <-back:
			back = nil
			if !locked && f.c.Why(b.why) == seam.Away {
				b.why = nil
			}
		case <-recheck.C:
			b.recheck(waiting)
		}
		recheck.Stop()
		if locked != (b.why == nil) {
			return refuse()
		}
	}
	return refuse()
}

// stillWaits ends runs that wait for a slot no longer, and reports whether any are left.
func (b *batch[V]) stillWaits() bool {
	f, now := b.f, time.Now()
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		switch {
		case r.Canceled() != nil:
			f.end(r)
		case now.Before(r.Data.until):
			return false
		case b.why != nil:
			f.fail(r, fmt.Errorf("%w; and Options.MaxUnlockedLoads, %d, are running", b.why, f.opts.MaxUnlockedLoads))
		default:
			f.fail(r, fmt.Errorf("%w: no slot within Options.WaitTimeout, %v: Options.MaxLoads, %d, are running",
				flightlock.ErrNotAcquired, f.opts.WaitTimeout, f.opts.MaxLoads))
		}
		return true
	})
	return len(b.runs) > 0
}

// recheck checks whether runs that wait for a slot without locks can be locked after all, and ends those that others
// have loaded meanwhile. Its lookup ends with waiting, and when the runs have waited for too long: a slot that becomes
// free is not kept idle for as long as a busy store takes.
func (b *batch[V]) recheck(waiting context.Context) {
	f := b.f
	if b.why != nil && f.c.Why(b.why) == seam.Away {
		if !f.c.Away() {
			b.why = nil
		}
		return
	}
	ctx, cancel := context.WithDeadline(b.runs[0].Context(), b.runs[0].Data.until)
	defer cancel()
	defer context.AfterFunc(waiting, cancel)()
	answered, err := b.look(ctx)
	if err == nil && answered && isLookup(b.why) {
		b.why = nil
	}
	b.set(waitsForSlot)
}

// try makes one attempt for the lock of each run, all at the same time, and returns those that are won. b keeps those
// whose locks others have. A single run with callers is left to await, which makes the attempt.
func (b *batch[V]) try() (won *batch[V]) {
	f := b.f
	won = &batch[V]{f: f}
	b.waits = true
	if n := len(b.runs); n == 0 || n == 1 && f.opts.MaxLoads == 0 && !b.runs[0].InBackground() && b.failing == nil {
		return won
	}
	b.set(waitsForTurn)
	b.tried, b.pause = time.Now(), min(max(2*b.pause, 2*f.c.NodeTimeout()), longestRetry)
	ends := make([]func() (seam.Lock, error), len(b.runs))
	for i, r := range b.runs {
		ends[i] = f.c.Begin(r.Context(), f.lockKey(r.Key()), f.opts.TTL)
	}
	away, taken, rest := &batch[V]{f: f}, &batch[V]{f: f, why: b.failing}, b.runs[:0]
	left := &batch[V]{f: f, locks: map[string]seam.Lock{}}
	for i, r := range b.runs {
		before := f.c.Holder(r.Data.lost)
		var l seam.Lock
		if l, r.Data.lost = ends[i](); r.Data.lost == nil {
			if !won.add(r, l) {
				left.runs, left.locks[r.Key()] = append(left.runs, r), l
			}
			continue
		}
		switch why := f.c.Why(r.Data.lost); {
		case r.Canceled() != nil:
			f.end(r)
		case why == seam.Refused:
			f.fail(r, r.Data.lost)
		case why == seam.Away:
			away.runs, away.why = append(away.runs, r), r.Data.lost
		case !r.Wanted():
			f.refreshedElsewhere(r)
		case b.failing != nil && f.c.Holder(r.Data.lost) != before: // that one may fail, too, and so may the next
			taken.runs = append(taken.runs, r)
		default:
			rest = append(rest, r)
		}
	}
	b.runs, b.failing = rest, nil
	if len(away.runs) > 0 { // those whose attempts ended a moment before that was known are loaded with them
		again := b.take(func(r *run[V]) bool { return f.c.Why(r.Data.lost) == seam.Again })
		away.runs = append(away.runs, again.runs...)
	}
	f.fork(away)
	f.fork(taken)
	left.over(left.runs, never)
	for _, r := range left.runs {
		f.end(r)
	}
	return won
}

// add adds a run whose lock is won, unless its callers have left: then it reports false, and the lock goes back.
func (b *batch[V]) add(r *run[V], l seam.Lock) bool {
	if !r.Commit() {
		return false
	}
	if b.locks == nil {
		b.locks = map[string]seam.Lock{}
	}
	b.runs = append(b.runs, r)
	b.locks[r.Key()] = l
	return true
}

// release gives a lock back, if there is one.
func release(l seam.Lock) {
	if l != nil {
		_ = l.Release(context.Background()) // that it is over already was noticed where it mattered
	}
}

// refreshedElsewhere ends a refresh without callers because somebody has the lock.
func (f *Fetcher[V]) refreshedElsewhere(r *run[V]) {
	if f.c.Why(r.Data.lost) == seam.InUse && f.opts.StaleWait <= 0 { // else those that come next wait for the new value
		f.failures.inUse(r.Key(), clock.Now())
	}
	f.end(r)
}

// await waits for runs whose keys are being loaded elsewhere: mostly by one load, which brings all values at the same
// time. So one of them waits for its lock, to hear at once when its load is over. On each event of its key all are
// looked up, and besides now and then. If there is no value when the lock is free, all locks are tried again, and so
// they are after a while in any case. It returns the run that has won its lock, and the lock, or none when
// there is something else to do for b.
func (b *batch[V]) await() (lead *run[V], l seam.Lock) {
	f := b.f
	lead = b.lead()
	ctx, cancel := context.WithDeadline(lead.Context(), lead.Data.until)
	defer cancel()
	b.set(waitsForLock)
	key := f.lockKey(lead.Key())
	if len(b.runs) > 1 {
		f.runs.Go(func() { f.lookNowAndThen(ctx, key) }) // ends with ctx
	}
	again, failed := false, error(nil)
	l, _, err := f.c.Contend(ctx, key, f.opts.TTL, func(ctx context.Context) bool {
		_, failed = b.look(ctx)
		again = len(b.runs) > 1 && time.Since(b.tried) >= b.pause
		return again || failed != nil || !slices.Contains(b.runs, lead)
	})
	switch {
	case l != nil && slices.Contains(b.runs, lead):
		return lead, l
	case l != nil:
		release(l)
	case failed != nil:
		b.why, b.waits = failed, false
	case again:
		b.waits = false
	case err == nil, lead.Canceled() != nil: // there is nothing to do for it any more
	case ctx.Err() != nil:
		late := b.take(func(r *run[V]) bool { return !time.Now().Before(r.Data.until) })
		late.why = fmt.Errorf("%w: no value within Options.WaitTimeout, %v: %w", flightlock.ErrNotAcquired,
			f.opts.WaitTimeout, notCtx(within(err)))
		f.fork(late)
	default:
		b.lost(lead, err)
	}
	return lead, nil
}

// lead is the run that is to wait for its lock: one whose lock nobody has, if there is one.
func (b *batch[V]) lead() *run[V] {
	for _, r := range b.runs {
		if r.Data.lost != nil && b.f.c.Why(r.Data.lost) == seam.Again {
			return r
		}
	}
	return b.runs[0]
}

// lookNowAndThen has those that wait for key look, until ctx ends.
func (f *Fetcher[V]) lookNowAndThen(ctx context.Context, key string) {
	for pause := firstPause; ; pause = min(pause+pause*pauseGrowth/100, recheckEvery) {
		select {
		case <-time.After(pause):
			f.c.Look(key)
		case <-ctx.Done():
			return
		}
	}
}

// lost is for a run that waits for its lock no longer, because of err.
func (b *batch[V]) lost(lead *run[V], err error) {
	f := b.f
	switch f.c.Why(err) {
	case seam.FailedElsewhere:
		b.without(lead)
		f.fork(&batch[V]{f: f, runs: []*run[V]{lead}, why: err})
		if b.failing, b.waits = err, false; len(b.runs) > 0 {
			time.Sleep(firstPause) // the other process gives back its other locks just now
		}
	case seam.Refused:
		b.without(lead)
		f.fail(lead, err)
	default: // too few nodes can be reached
		b.why, b.waits = err, false
	}
}

// look looks up all runs, and ends those whose value is there. A stale one will do for callers that have none, and is
// refreshed. answered says that the store has answered; err is that it is down. It is one of maxLookups.
func (b *batch[V]) look(ctx context.Context) (answered bool, err error) {
	f := b.f
	if b.alive(); len(b.runs) == 0 {
		return false, nil
	}
	if !f.admitted(ctx) { // too many are under way: it waits on
		return false, nil
	}
	limited, cancel := context.WithTimeout(context.WithValue(ctx, seam.OfRun{}, true), f.opts.LookupTimeout)
	defer cancel()
	keys, scope := b.keys(), f.sending()
	c := coalesce.Start(f.runs.Go, func() (map[string]Entry[V], error) {
		defer f.lookups.Release(1)
		return f.lookUp(limited, keys)
	})
	found, err, over := result(c, limited, "Lookup", b.keys())
	var stale []*run[V]
	down := &batch[V]{f: f}
	b.runs = slices.DeleteFunc(b.runs, func(r *run[V]) bool {
		e, why := found[r.Key()], errorOf(err, r.Key())
		switch {
		case why == nil && (e.Fresh == Fresh || e.Fresh == Stale && !(r.Data.refreshes && f.opts.StaleWait > 0)):
			base := context.WithoutCancel(r.Context())
			f.deliverFound(r, scope, e)
			r.Done()
			if e.Fresh == Stale {
				if again := f.refresh(func() context.Context { return base }, r.Key()); again != nil {
					stale = append(stale, again)
				}
			}
			return true
		case why == nil:
			answered = true
			return false
		case ctx.Err() != nil || !over || timedOut(why):
			return false
		}
		down.why = f.lookupFailed(r.Key(), why)
		down.runs = append(down.runs, r)
		return true
	})
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

// admitted waits until a lookup may begin that is one of maxLookups, as long as one may take.
func (f *Fetcher[V]) admitted(ctx context.Context) bool {
	if f.lookups.TryAcquire(1) {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, f.opts.LookupTimeout)
	defer cancel()
	return f.lookups.Acquire(ctx, 1) == nil
}

// lookUp looks up keys, with the least that the store has for that.
func (f *Fetcher[V]) lookUp(ctx context.Context, keys []string) (map[string]Entry[V], error) {
	if len(keys) > 1 {
		return f.store.GetMany(ctx, keys)
	}
	e, err := f.store.Get(ctx, keys[0])
	return map[string]Entry[V]{keys[0]: e}, err
}

func (f *Fetcher[V]) deliverFound(r *run[V], scope coalesce.Scope, e Entry[V]) {
	scope.Stamp = e.Stamp
	r.Limit(scope)
	r.Finish(e.result())
}

// result is what a call of the user's code for keys has returned, with an error for errorOf: over is false if ctx has
// ended before. keys are not those that it was called with, which it may still have, and have changed.
func result[T any](c *coalesce.Call[T], ctx context.Context, op string, keys []string) (v T, err error, over bool) {
	if !c.Wait(ctx) {
		return v, errNoAnswer, false
	}
	v, err, p := c.Result()
	if p != nil {
		err = panicked(op, p)
	}
	return v, keyed(err, keys), true
}
