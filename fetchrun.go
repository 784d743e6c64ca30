package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
)

// fetchRun is all callers of this process that miss one key, and the work for them: Fetcher.run, on
// a goroutine of its own.
//
//	contending <-> at the gate -> loading -> storing -> over
//	    |              |             +--> over; the error is held for newcomers (failures)
//	    +--------------+--> over (found in the cache; canceled; an error)
//
// A run contends for the lock until a majority of nodes cannot be reached. Then it waits at the
// gate for a slot to load without one, and contends again as soon as a node is back. With MaxLoads
// it waits there before it contends, too.
//
// What it shares with its callers is coalesce.Run's: they join and leave, the last one's leaving
// cancels a run that is not committed, and a canceled one cannot be joined. It is committed when
// it has what a load needs: from there on it runs to its end, and what it has loaded is stored for
// those that come. Besides:
//
//   - Lookup, Load and Store run on the Run's Worker. The run waits for them as long as their
//     ctx allows, and then continues without their answer. But a Load that has not returned keeps the
//     run of its key in place, so that there is never a second Load for it.
//   - Nothing is stored once the lock has been lost. A write that was in progress at that moment can
//     be stopped only by the fence.
type fetchRun[V any] struct {
	coalesce.Run[V]

	// Set before the run starts.
	why       error           // the Lookup error that it began with: no use in contending. Its batch may set it later
	timeouts  int             // Lookups that timed out before it began: 1 if its first caller's did
	refreshes bool            // it began behind a stale value
	base      context.Context // the result of Values
	values    context.Context // base, and node: for Lookup, Load and Store

	node waitNode
	loan loan

	// of runs that FetchMany has begun with others, written before they start or by their goroutine
	together  bool          // it is one of those
	lost      error         // why it had no lock when that was last tried
	lead      *leading      // nil: nobody waits for the end of its waiting
	finished  chan struct{} // closed when others have done its work; nil: they do not
	goesAlone bool          // written before that: they have not
	won       *Lock         // of loadWon

	// only run's goroutine has these
	until    time.Time      // when it stops waiting for the lock, or for a slot; set by its batch if it was in one
	extended bool           // WaitTimeout has begun once more, with the first wait for a slot without a lock
	place    uint64         // at the gate: see joinAt
	scope    coalesce.Scope // of what is loaded
	unseen   bool           // the lookup before the load is left out, because the cache does not answer

	// refused: the lookup before the load has failed, and not only timed out. Written by run's goroutine, or
	// by the batch.
	refused bool
}

// run is the whole work: lock, look up, load, store.
func (f *Fetcher[V]) run(r *fetchRun[V]) {
	defer f.end(r)
	l, p, ok := f.lock(r)
	if !ok {
		return
	}
	values := r.values
	if l != nil {
		// load bounds it; its error is l.Err's, too
		_ = l.autoRefresh(context.Background(), RefreshPolicy{}, new(autoRefresh))
		values = carrying(values, l)
	}
	if f.lookUpToLoad(r, l) {
		f.gate.leave(p)
		f.giveBack(l)
		return
	}
	if v, ok := f.load(r, values, l, p); ok {
		f.store(r, values, l, v)
	}
}

// end gives callers that have no result the error of a Fetcher that is closed: nothing else
// cancels a run that has callers.
func (f *Fetcher[V]) end(r *fetchRun[V]) {
	f.giveBack(r.loan.close())
	if r.Err() != nil {
		var none V
		r.Finish(none, f.errClosed(r.Key()))
	}
}

// lock gets what a load needs, the lock or the reason to do without, and a slot at the gate, and
// commits the run to it. ok is false if there is nothing left to do.
//
// A load without a lock begins only if a majority of nodes cannot be reached, if WaitTimeout has
// passed, if Lookup has failed, or if the load that this run has waited for has failed in another
// process. While it waits for a slot for that, a run locks after all as soon as that is possible again.
func (f *Fetcher[V]) lock(r *fetchRun[V]) (l *Lock, p *slot, ok bool) {
	if r.until.IsZero() {
		r.until = time.Now().Add(f.opts.WaitTimeout)
	}
	for why := r.why; ; {
		var over bool
		back := f.c.recovery.next() // from before the attempt that may fail
		if why == nil {
			l, p, over, why = f.obtain(r)
			if x := r.lead; x != nil {
				x.left, x.found, x.err = r.Err() != nil, over, why
				close(x.over)
				r.lead = nil
			}
			if l != nil && p == nil {
				if !f.loadWon(r, l) {
					return nil, nil, false
				}
				why = r.why
				continue
			}
			if l != nil && !r.Commit() {
				f.gate.leave(p)
				f.giveBack(l)
				return nil, nil, false
			}
			if over || l != nil {
				return l, p, !over
			}
		}
		if !f.mayLoadLocally(r, why) {
			var none V
			r.Finish(none, why)
			return nil, nil, false
		}
		if r.together {
			if !f.loadGathered(r, why) {
				return nil, nil, false
			}
			why = r.why
			continue
		}
		f.extend(r)
		p, over = f.enter(r, unlocked, why, back)
		switch {
		case over:
			return nil, nil, false
		case p == nil: // lock after all
			why = nil
		case !r.Commit():
			f.gate.leave(p)
			return nil, nil, false
		default:
			if !errors.Is(why, errFailedElsewhere) {
				f.seen.without.began(why)
			}
			r.unseen = isUnknown(why)
			return nil, p, true
		}
	}
}

// extend has WaitTimeout begin once more, for the first wait for a slot without a lock.
func (f *Fetcher[V]) extend(r *fetchRun[V]) {
	if !r.extended {
		r.extended, r.until = true, time.Now().Add(f.opts.WaitTimeout)
	}
}

// mayLoadLocally reports whether the run may load without a lock, for the reason why. After a
// load that failed in another process it may, whatever the policy: errors do not cross processes,
// so each finds out by a load of its own, all at the same time.
func (f *Fetcher[V]) mayLoadLocally(r *fetchRun[V], why error) bool {
	return r.Err() == nil && (f.opts.OnUnavailable == LoadLocally || errors.Is(why, errFailedElsewhere)) &&
		!errors.Is(why, ErrClosed) && !errors.Is(why, ErrInvalid) && !errors.Is(why, ErrTooManyWaiters)
}

// obtain gets the lock and a slot among MaxLoads, unless another process fills the cache meanwhile.
//
// Where loads are limited, the slot comes first, with one attempt. If the key is held elsewhere,
// the slot goes back for as long as that lasts, for a hot key of another process must not stop
// the loads of this one. If no slot is free when the lock is won, the lock goes back: another
// process may have a slot for it. The run keeps its place among those that wait for slots. A run that was in a batch
// comes without one, because it gets one with others, and so no slot is here with its lock: see loadWon.
func (f *Fetcher[V]) obtain(r *fetchRun[V]) (l *Lock, p *slot, over bool, err error) {
	defer func() {
		if l == nil || p != nil { // else it may be back here, or in a batch
			f.giveBack(r.loan.close())
		}
	}()
	for once := r.InBackground() || f.opts.MaxLoads > 0; ; once = true {
		if once && !r.together {
			l, p, over, err = f.tryOnce(r)
			if over || !contended(err) {
				return l, p, over, err
			}
		}
		if !r.Wanted() {
			f.refreshedElsewhere(r, err)
			return nil, nil, true, nil
		}
		l, lent, over, err := f.contend(r)
		switch {
		case l == nil:
			return nil, nil, over, err
		case lent: // its caller keeps the lock anyway
			if p, over = f.enter(r, locked, nil, nil); p == nil {
				f.giveBack(l)
				l = nil
			}
			return l, p, over, nil
		case r.together:
			return l, nil, false, nil
		}
		if p = f.gate.joinAt(locked, &r.place); p.isAdmitted() {
			return l, p, false, nil
		}
		f.gate.leave(p)
		f.giveBack(l)
	}
}

// tryOnce makes one attempt, once it has a slot.
func (f *Fetcher[V]) tryOnce(r *fetchRun[V]) (l *Lock, p *slot, over bool, err error) {
	if p, over = f.enter(r, locked, nil, nil); p == nil {
		return nil, nil, over, nil
	}
	step := r.Begin(r.values, noTimeout)
	defer step.End(nil)
	if l, err = f.c.acquire(step, r.Key(), f.opts.TTL, NoRetry(), false); err != nil {
		f.gate.leave(p)
		return nil, nil, false, err
	}
	return l, p, false, nil
}

const noTimeout = -1

// refreshedElsewhere notes that a refresh without callers has ended because somebody has the lock, if err says so.
func (f *Fetcher[V]) refreshedElsewhere(r *fetchRun[V], err error) {
	if r.refreshes && f.opts.StaleWait <= 0 && isInUse(err) { // else those that come next wait for the new value
		f.failures.inUse(r.Key(), clock.Now())
	}
}

// contended reports whether an attempt failed in a way in which the next may not.
func contended(err error) bool {
	return errors.Is(err, ErrNotAcquired) || errors.Is(err, ErrUnavailable) && !unavailable(err)
}

// contend tries to get the lock until another process has filled the cache, WaitTimeout at most.
// over says that the run is. A lock that a caller lends is as good as one that was won.
func (f *Fetcher[V]) contend(r *fetchRun[V]) (l *Lock, lent, over bool, err error) {
	for {
		step := r.Begin(r.values, max(time.Until(r.until), 0))
		if r.loan.beginContending(step) {
			l, over, err = f.contendUntil(r, step)
		}
		step.End(nil)
		switch borrowed := r.loan.take(); {
		case borrowed == nil:
			return l, false, over, err
		case l != nil || over || r.Err() != nil:
			f.giveBack(borrowed)
			return l, false, over, err
		case borrowed.Err() == nil:
			return borrowed, true, false, nil
		default: // it is worth nothing: another one can be made
			f.giveBack(borrowed)
		}
	}
}

// contendUntil contends until step ends.
func (f *Fetcher[V]) contendUntil(r *fetchRun[V], step *coalesce.Step) (l *Lock, over bool, err error) {
	var failed error
	timeouts := r.timeouts
	l, over, err = f.c.contend(step, r.Key(), f.opts.TTL, func(ctx context.Context) bool {
		var done bool
		done, failed = f.lookUpWaiting(r, ctx)
		switch {
		case errors.Is(failed, errTooManyLookups):
			failed = nil
		case !errors.Is(failed, errSlowLookup):
			timeouts = 0
		default: // a busy cache is no outage, and the lock can be had
			if timeouts++; timeouts < maxSlowLookups {
				failed = nil
			}
		}
		return done || failed != nil
	})
	if failed != nil {
		over, err = false, failed
	}
	if err != nil && r.Err() == nil && errors.Is(step.Err(), context.DeadlineExceeded) {
		err = f.waitTimedOut(r.Key(), err)
	}
	return l, over, err
}

// waitTimedOut is the outcome after WaitTimeout. It must not look as if the caller's ctx
// had ended.
func (f *Fetcher[V]) waitTimedOut(key string, err error) error {
	var q *QuorumError
	if errors.As(err, &q) {
		last := *q
		last.ctx = nil
		if last.sentinel == nil { // it ended before anything was known
			last.sentinel, last.reason = ErrNotAcquired, errors.New("no node has answered yet")
		}
		err = &last
	}
	return fmt.Errorf("flightlock: fetch %q: no value within FetchOptions.WaitTimeout, %v: %w", key, f.opts.WaitTimeout,
		within(err))
}

// recheckEvery is how often a run that waits for a slot checks whether it still needs one.
const recheckEvery = time.Second

// enter waits at the gate. Without a slot, the run is over, or it is to lock after all: for an
// unlocked slot only, whose reason was why. back is closed when a node is back. A refresh without
// callers does not wait.
func (f *Fetcher[V]) enter(r *fetchRun[V], k kind, why error, back <-chan struct{}) (_ *slot, over bool) {
	p := f.gate.joinAt(k, &r.place)
	if p.isAdmitted() {
		return p, false
	}
	if !r.Wanted() {
		f.gate.leave(p)
		return nil, true
	}
	for {
		step := r.Begin(r.values, max(min(recheckEvery, time.Until(r.until)), 0))
		returned, urgent := false, false
		select {
		case <-p.admitted:
			step.End(nil)
			return p, false
		case <-r.node.urgent():
			urgent = true
		case <-back:
			back, returned = nil, true
		case <-step.Done():
		}
		step.End(nil)
		if urgent {
			f.gate.leave(p)
			return uncounted, false
		}
		if over, again := f.stillWaits(r, p, why, returned); !again {
			f.gate.leave(p)
			return nil, over
		}
	}
}

// stillWaits checks whether a run that waits at the gate still has to. If not, it is over or
// is to lock after all. It does not look any longer once p is admitted.
func (f *Fetcher[V]) stillWaits(r *fetchRun[V], p *slot, why error, returned bool) (over, again bool) {
	var none V
	k := p.kind
	switch {
	case r.Err() != nil:
		return true, false
	case !time.Now().Before(r.until):
		r.Finish(none, f.full(r.Key(), k, why))
		return true, false
	case k == unlocked && unavailable(why):
		return false, !returned && f.c.away()
	}
	step := r.Begin(r.values, max(time.Until(r.until), 0))
	defer step.End(nil)
	f.gate.interrupt(p, step)
	over, err := f.lookUpWaiting(r, step)
	return over, !over && (k == locked || err != nil || step.Err() != nil || !isUnknown(why))
}

// full is the error for callers whose run waited for a slot in vain.
func (f *Fetcher[V]) full(key string, k kind, why error) error {
	if k == unlocked {
		return fmt.Errorf("%w; and FetchOptions.MaxUnlockedLoads, %d, are running", why, f.opts.MaxUnlockedLoads)
	}
	return fmt.Errorf("flightlock: fetch %q: no slot within FetchOptions.WaitTimeout, %v: "+
		"FetchOptions.MaxLoads, %d, are running: %w",
		key, f.opts.WaitTimeout, f.opts.MaxLoads, ErrNotAcquired)
}

// errSlowLookup says that a Lookup took longer than LookupTimeout, or than a timeout of its own. Thousands of
// them may queue for a cache's connections, so a run that waits tries maxSlowLookups.
var errSlowLookup = errors.New("it has timed out")

const maxSlowLookups = 3

// maxWaitingLookups is how many Lookups a Fetcher makes at once for runs that wait (callers' own
// Lookups have lookupPermits). Thousands at once would wait for connections of the cache's client
// until LookupTimeout, and the cache would seem to be down.
const maxWaitingLookups = 64

// errTooManyLookups reports that no Lookup was made, because maxWaitingLookups are in progress. The
// run continues waiting.
var errTooManyLookups = errors.New("too many Lookups are under way")

var errNoAnswer = errors.New("no answer in time")

// lookUpWaiting makes a Lookup for a run that waits until ctx ends. At most maxWaitingLookups
// of them run at a time. A stale value will do for callers that have none. over is as for lookUp.
func (f *Fetcher[V]) lookUpWaiting(r *fetchRun[V], ctx context.Context) (over bool, err error) {
	if !f.beginWaitingLookup(ctx) {
		return false, errTooManyLookups
	}
	limited, cancel := context.WithTimeout(ctx, f.opts.LookupTimeout)
	defer cancel()
	return f.lookUp(r, ctx, limited, f.least(r), f.lookup, func() { <-f.waitingLookups })
}

// least is how fresh a value has to be that ends the wait of a run.
func (f *Fetcher[V]) least(r *fetchRun[V]) Freshness {
	if r.refreshes && f.opts.StaleWait > 0 { // its callers have that value
		return Fresh
	}
	return Stale
}

// beginWaitingLookup waits for room among the maxWaitingLookups, as long as a Lookup may take.
func (f *Fetcher[V]) beginWaitingLookup(ctx context.Context) bool {
	select {
	case f.waitingLookups <- struct{}{}:
		return true
	default:
	}
	timeout := time.NewTimer(f.opts.LookupTimeout)
	defer timeout.Stop()
	select {
	case f.waitingLookups <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-timeout.C:
	}
	return false
}

// lookUpToLoad makes the Lookup of a run that has what a load needs, and reports whether the run is
// over by it. It does not count among the maxWaitingLookups, because others wait for the lock
// meanwhile, and a stale value will not do. But it has a permit: thousands of locks may be won at once, and what
// is loaded after a Lookup that has waited in vain for a connection is not stored, and loaded again. A load without
// a lock needs it only for the stamp.
func (f *Fetcher[V]) lookUpToLoad(r *fetchRun[V], l *Lock) (over bool) {
	if l == nil && (r.unseen || !f.stamped()) {
		r.scope = f.sending()
		return false
	}
	wait := r.Begin(r.values, noTimeout)
	returned, err := f.permitsToLoad.admit(wait)
	wait.End(nil)
	switch {
	case err == nil:
		step := r.Begin(r.values, f.opts.LookupTimeout)
		over, err = f.lookUp(r, r.values, step, Fresh, f.lookupToLoad, func() {})
		step.End(nil)
		returned(err)
	case r.Err() != nil: // the ctx of Close has ended: there is nothing to load any more
		return true
	default:
		r.scope = f.sending()
		err = f.lookupFailed(r.Key(), err)
	}
	if err != nil && f.opts.OnUnavailable == FailClosed {
		var none V
		r.Finish(none, err)
		return true
	}
	r.refused = err != nil && !errors.Is(err, errSlowLookup) && !ranOut(err)
	return over
}

// lookUp makes a Lookup with limited, which is made of ctx and LookupTimeout. If the cache has a
// value that is at least so fresh, the callers get it, and the run is over. It is over, too, if it was
// canceled meanwhile. returned is called when Lookup has returned, however late.
func (f *Fetcher[V]) lookUp(r *fetchRun[V], ctx, limited context.Context, least Freshness,
	lookup func(context.Context, string) (Found[V], error), returned func()) (over bool, err error) {
	answered := new(answer[V])
	r.scope = f.sending()
	r.Worker.Go(func() {
		defer returned()
		answered.Found, answered.err = lookup(limited, r.Key())
	})
	a, _ := f.await(r, limited, "Lookup", answered)
	switch {
	case a.err != nil && r.Err() != nil: // canceled
		return true, nil
	case a.err != nil && ctx.Err() != nil: // by a loan or WaitTimeout, which say nothing of the cache
		return false, nil
	case a.err != nil && (limited.Err() != nil || ranOut(a.err)):
		return false, fmt.Errorf("%w: %w", f.lookupFailed(r.Key(), a.err), errSlowLookup)
	case a.err != nil:
		return false, f.lookupFailed(r.Key(), a.err)
	}
	r.scope.Stamp = a.Stamp
	if a.Fresh == Fresh || a.Fresh == Stale && least == Stale {
		r.Limit(r.scope)
		r.Finish(a.Value, nil)
		if a.Fresh == Stale {
			f.refreshWith(r.base, r.Key())
		}
		return true, nil
	}
	return false, nil
}

// answer is what a function of the Source has returned.
type answer[V any] struct {
	Found[V]
	err error
}

// await waits until the call that writes a has returned, or ctx has ended. In the latter case a
// is not read any more.
func (f *Fetcher[V]) await(r *fetchRun[V], ctx context.Context, op string, a *answer[V]) (
	_ answer[V], returned bool) {
	p, returned := r.Worker.Wait(ctx)
	switch {
	case !returned:
		return answer[V]{err: errNoAnswer}, false
	case p != nil:
		return answer[V]{err: &PanicError{Op: op, Value: p.Value, Goexit: p.Goexit, Stack: p.Stack}}, true
	}
	return *a, true
}

// grace is how much longer than its LoadTimeout a Load may take to say so itself.
const grace = 100 * time.Millisecond

// load runs Load, with the lock or without, and gives the slot back. ok is false if there is no
// value: the callers have an error, and the lock is released.
func (f *Fetcher[V]) load(r *fetchRun[V], values context.Context, l *Lock, p *slot) (v V, ok bool) {
	f.counts.loads.Add(1)
	if l == nil {
		f.counts.unlocked.Add(1)
	}
	r.Limit(r.scope)
	step := r.Begin(values, f.opts.LoadTimeout)
	defer step.End(nil)
	loaded := new(answer[V])
	r.Worker.Go(func() { loaded.Value, loaded.err = f.src.Load(step, r.Key()) })
	a, returned := f.await(r, step, "Load", loaded)
	if !returned && r.Err() == nil {
		late, cancel := context.WithTimeout(context.Background(), grace)
		a, returned = f.await(r, late, "Load", loaded)
		cancel()
	}
	if !returned {
		f.loadGoesOn(r, l)
	}
	f.gate.leave(p)
	if returned && a.err != nil {
		f.loadFailed(r.Key(), a.err)
		f.fail(r, loadErr(r.Key(), a.err))
		f.giveBackFailed(r, l)
	}
	return a.Value, a.err == nil
}

// loadGoesOn gives the callers an error, because Load ignores its ctx, and waits for it.
func (f *Fetcher[V]) loadGoesOn(r *fetchRun[V], l *Lock) {
	var none V
	r.Limit(coalesce.Scope{}) // as long as Load has not returned, there is nothing else for any caller
	if r.Err() != nil {       // the ctx of Close has ended
		f.counts.loadFailures.Add(1)
		r.Deliver(none, f.errClosed(r.Key()))
	} else {
		err := fmt.Errorf("flightlock: fetch %q: Load continues after FetchOptions.LoadTimeout, %v",
			r.Key(), f.opts.LoadTimeout)
		f.loadFailed(r.Key(), err)
		f.failures.failed(r.Key(), r.scope.Stamp, err, clock.Now())
		r.Deliver(none, err)
	}
	// Other processes may load. In this one the key stays taken.
	f.giveBackFailed(r, l)
	r.Worker.Wait(context.Background())
}

// fail gives the callers the error of a load. Those that come within ErrorHold get it, too.
func (f *Fetcher[V]) fail(r *fetchRun[V], err error) {
	var none V
	f.failures.failed(r.Key(), r.scope.Stamp, err, clock.Now()) // before the next run can begin
	r.Finish(none, err)
}

// store puts the value into the cache, if the lock is still held or there was none, and gives it
// to the callers: when it is stored, or after NodeTimeout.
func (f *Fetcher[V]) store(r *fetchRun[V], values context.Context, l *Lock, v V) {
	defer f.giveBack(l)
	defer r.Finish(v, nil)
	if l != nil && l.Err() != nil {
		f.counts.lost.Add(1)
		f.failures.notStored(r.Key(), clock.Now())
		return
	}
	if f.stamped() && r.scope.Stamp == "" { // there is nothing to compare with
		f.failures.notStored(r.Key(), clock.Now())
		if r.refused {
			r.Finish(v, nil)
			f.giveBackFailed(r, l)
		}
		return
	}
	stored := new(answer[V])
	a, returned := f.runStore(r, values, l, v, stored)
	if returned {
		f.stored(r.Key(), l, a.err)
		if a.err != nil && !ranOut(a.err) && !errors.Is(a.err, ErrOutdated) {
			r.Finish(v, nil)
			f.giveBackFailed(r, l)
		}
		return
	}
	r.Finish(v, nil)
	f.giveBack(l)
	a, _ = f.await(r, context.Background(), "Store", stored)
	f.stored(r.Key(), l, a.err)
}

// runStore calls Store, with a ctx that ends with the lock. The callers have the value after
// NodeTimeout. If its ctx ends before it returns, its answer comes later, in stored.
func (f *Fetcher[V]) runStore(r *fetchRun[V], values context.Context, l *Lock, v V, stored *answer[V]) (
	_ answer[V], returned bool) {
	step := r.Begin(values, f.opts.TTL)
	defer step.End(nil)
	defer l.whenOver(step.End)()
	delivery := time.AfterFunc(f.c.opts.NodeTimeout, func() { r.Deliver(v, nil) })
	defer delivery.Stop()
	r.Worker.Go(func() { stored.err = f.storeOne(step, r, v, l) })
	return f.await(r, step, "Store", stored)
}

func (f *Fetcher[V]) stored(key string, l *Lock, err error) {
	switch {
	case err == nil:
		f.failures.succeeded(key)
	case errors.Is(err, ErrOutdated):
		f.counts.outdated.Add(1)
		f.failures.succeeded(key)
	default:
		f.failures.notStored(key, clock.Now())
		f.counts.storeFailures.Add(1)
		f.seen.failed(key, "store", err)
	}
	if l != nil && errors.Is(l.Err(), ErrLockLost) {
		f.counts.lost.Add(1)
	}
}

// loadFailed counts and reports a load that failed.
func (f *Fetcher[V]) loadFailed(key string, err error) {
	f.counts.loadFailures.Add(1)
	f.seen.failed(key, "load", err)
}

// lookupFailed counts and reports a Lookup that failed, and returns the error for its callers.
func (f *Fetcher[V]) lookupFailed(key string, err error) error {
	f.counts.lookupErrors.Add(1)
	f.seen.failed(key, "lookup", err)
	return &lookupError{lookupErr(key, err)}
}

// A lookupError is why a run cannot tell whether there is a value.
type lookupError struct{ error }

func (e *lookupError) Unwrap() error { return e.error }

func isUnknown(why error) bool {
	var unknown *lookupError
	return errors.As(why, &unknown)
}

// giveBack releases the lock, if there is one.
func (f *Fetcher[V]) giveBack(l *Lock) {
	if l != nil {
		_ = l.Release(context.Background()) // that it is over already was noticed where it mattered
	}
}

// giveBackFailed releases the lock after a load or Store that failed, or a load whose value cannot be
// stored because the lookup before it was refused, and notifies the other processes that wait for it
// of the failure, so that they need not wait for one another. It does not if Close ended the load:
// theirs may succeed. It is not called for a Store or a lookup that timed out: the value was loaded,
// and the cache is busy. If all others then loaded without a lock, their Stores would keep it busy.
func (f *Fetcher[V]) giveBackFailed(r *fetchRun[V], l *Lock) {
	if l != nil && r.Err() == nil {
		_ = l.releaseFailed()
		return
	}
	f.giveBack(l)
}

// whenOver has end called when l is over, until forget. It may be called without a Lock.
func (l *Lock) whenOver(end func(why error)) (forget func()) {
	if l == nil {
		return func() {}
	}
	forget, why, over := l.onEnd(end)
	if over {
		end(why)
		return func() {}
	}
	return forget
}
