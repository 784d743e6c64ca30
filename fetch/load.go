package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
)

// grace is how much longer than its LoadTimeout a load may take to say so itself.
const grace = 100 * time.Millisecond

// load is what is done for runs that have their locks, or the reason to do without, and a slot, which it
// gives back. They are committed here, and all of them end here:
//
//	a permit of the fleet -> look up -> load -> store -> release
//
// What is decided together belongs to all of them; the context of the first one that is left serves them all,
// since from here on only the end of Close's ctx cancels them.
func (b *batch[V]) load(s slot) {
	defer func() { // also if an Observer calls Goexit
		s.leave()
		b.end()
	}()
	if !b.permit(&s) {
		return
	}
	b.take(func(r *run[V]) bool { return !r.Commit() }).end() // whose callers have left
	for _, step := range []func(){b.reserve, b.callLoader, s.leave, b.put} {
		if len(b.runs) > 0 { // they are not over yet
			step()
		}
	}
}

// reserve looks up all runs before the load, and ends those that others have loaded: a stale value will not
// do. Those that are left have the stamps of their entries. It is one of maxLookups, so that LookupTimeout is
// the store's: thousands of locks may be won at once, and what is loaded without a stamp is not stored, and
// loaded again.
func (b *batch[V]) reserve() {
	f, ctx, down := b.f, b.runs[0].Context(), isLookup(b.why)
	b.set(waitsForLookup)
	if !down && f.reserves.Acquire(ctx, 1) != nil { // the ctx of Close has ended
		b.end()
		return
	}
	scope := f.sending()
	for _, r := range b.runs {
		r.Data.scope = scope
	}
	if down { // the store does not answer
		return
	}
	_, found, err, over := call(b, ctx, f.opts.LookupTimeout, "Lookup", f.store.Reserve)
	f.reserves.Release(1) // and not when it returns: one that hangs must not keep others from loading
	b.take(func(r *run[V]) bool {
		e, why := found[r.Key()], errorOf(err, r.Key())
		switch {
		case why != nil && ctx.Err() != nil: // of Close: that says nothing of the store
		case why != nil:
			refused := over && !timedOut(why)
			if why = f.lookupFailed(r.Key(), why); !f.opts.FailClosed {
				r.Data.failed = refused
				return false
			}
			var none V
			r.Deliver(none, fmt.Errorf("flightlock: fetch %q: %w", r.Key(), why))
		default:
			if r.Data.scope.Stamp = e.Stamp; e.Fresh != Fresh {
				r.Data.loaded = e
				return false
			}
			r.Limit(r.Data.scope)
			r.Deliver(e.result())
		}
		return true
	}).end()
}

// callLoader loads all runs. Those that fail are over; the others have what was loaded, also that it does not
// exist.
func (b *batch[V]) callLoader() {
	f, ctx := b.f, b.runs[0].Context()
	if b.why != nil {
		f.seen.withoutLocks(b.why)
		f.counts.unlocked.Add(1)
	}
	f.counts.loads.Add(1)
	b.set(waitsForLoad)
	for _, r := range b.runs {
		r.Limit(r.Data.scope)
	}
	keys := b.keys()
	observed, ended := f.seen.loading(ctx, b.keys())
	inside := context.WithValue(observed, chainKey{}, &chain{f, keys, chainOf(ctx)})
	c, loaded, err, over := call(b, withOld(inside, b.runs), f.opts.LoadTimeout, "Load", f.loader)
	if !over && ctx.Err() == nil {
		late, cancel := context.WithTimeout(context.Background(), grace)
		loaded, err, over = result(c, late, "Load", keys)
		cancel()
	}
	ended(err, over)
	if _, some := err.(KeyErrors); !some && len(keys) > 1 &&
		errors.Is(err, ErrNotFound) { //nolint:errorlint // itself
		// of none in particular: no absence
		err = fmt.Errorf("flightlock: fetch: a load of %d keys: %v", len(keys), err)
	}
	failed := b.take(func(r *run[V]) bool {
		why := errorOf(err, r.Key())
		if why != nil && !errors.Is(why, ErrNotFound) {
			b.failed(ctx, r, why, over)
			return true
		}
		v, there := loaded[r.Key()]
		r.Data.loaded = Entry[V]{Value: v, Absent: !there, Fresh: Fresh, Stamp: r.Data.scope.Stamp}
		return false
	})
	failed.release()
	c.Wait(context.Background()) // it may ignore the end of its ctx: in this process the keys stay taken
	failed.end()
}

// failed gives the callers of a run the error of its load. Those that come within ErrorHold get it, too. over
// is false for a load that goes on: until it returns, callers of this process get nothing else, and other
// processes may load.
func (b *batch[V]) failed(ctx context.Context, r *run[V], why error, over bool) {
	f := b.f
	var none V
	r.Data.failed = true
	closed := ctx.Err() != nil && (!over || ofCtx(why)) // the ctx of Close has ended: that is no failure
	if closed || !over {
		r.Limit(coalesce.Scope{})
	}
	switch {
	case closed:
		r.Deliver(none, keyClosed(r.Key()))
		return
	case !over:
		why = fmt.Errorf("flightlock: fetch %q: the load continues after Options.LoadTimeout, %v", r.Key(),
			f.opts.LoadTimeout)
	}
	f.counts.loadFailures.Add(1)
	f.seen.failed(r.Key(), "load", why)
	if ofCtx(why) { // it must not look as if the ctx of a caller had ended
		why = fmt.Errorf("flightlock: fetch %q: load: %w", r.Key(), notCtx(why))
	}
	f.failures.failed(r.Key(), r.Data.scope.Stamp, why, clock.Now()) // before the next run can begin
	end := r.Deliver
	if over {
		end = r.Finish
	}
	end(none, why)
}

// put stores what was loaded, unless a lock was lost or there is no stamp to compare with, and gives it to
// the callers: when it is stored, or after NodeTimeout. Then the locks are released.
func (b *batch[V]) put() {
	f := b.f
	b.set(waitsForStore)
	deliver := func(runs []*run[V]) {
		for _, r := range runs {
			r.Deliver(r.Data.loaded.result())
		}
	}
	unstored := b.take(func(r *run[V]) bool {
		switch l := r.Data.lock; {
		case l != nil && l.Err() != nil:
			f.counts.lost.Add(1)
		case r.Data.scope.Stamp == "":
			f.counts.unstored.Add(1)
		default:
			return false
		}
		f.failures.failed(r.Key(), "", nil, clock.Now())
		return true
	})
	if deliver(unstored.runs); len(unstored.runs) > 0 {
		f.runs.Go(unstored.end) // the others are stored meanwhile
	}
	if len(b.runs) == 0 {
		return
	}
	items := make(map[string]Entry[V], len(b.runs))
	for _, r := range b.runs {
		items[r.Key()], r.Data.failed = r.Data.loaded, false
	}
	runs := b.runs
	delivery := time.AfterFunc(f.c.NodeTimeout(), func() { deliver(runs) })
	c, outdated, err, over := call(b, runs[0].Context(), f.opts.TTL, "Store",
		func(ctx context.Context, _ []string) ([]string, error) { return f.store.Put(ctx, items) })
	delivery.Stop()
	deliver(runs) // before anything else: hundreds of callers wait for many of them
	if !over {    // the next callers load, however long it takes
		b.release()
		for _, r := range runs {
			r.Finish(r.Data.loaded.result())
		}
		outdated, err, _ = result(c, context.Background(), "Store", b.keys())
	}
	f.counts.outdated.Add(uint64(len(outdated)))
	for _, r := range runs {
		why := errorOf(err, r.Key())
		if r.Data.failed = why != nil && !timedOut(why); why == nil {
			f.failures.succeeded(r.Key())
		} else {
			f.failures.failed(r.Key(), "", nil, clock.Now())
			f.counts.storeFailures.Add(1)
			f.seen.failed(r.Key(), "store", why)
		}
		if l := r.Data.lock; l != nil && errors.Is(l.Err(), flightlock.ErrLockLost) {
			f.counts.lost.Add(1)
		}
	}
}
