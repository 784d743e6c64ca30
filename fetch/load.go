package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/seam"
)

// grace is how much longer than its LoadTimeout a load may take to say so itself.
const grace = 100 * time.Millisecond

// load is what is done for runs that have their locks, or the reason to do without, and a slot, which it gives back.
// They are committed. All of them end here:
//
//	look up -> load -> store -> release
//
// What is decided together belongs to all of them; the context of the first one serves them all, since from here on
// only the end of Close's ctx cancels them.
func (b *batch[V]) load(s slot) {
	f, all := b.f, slices.Clone(b.runs)
	if len(all) == 0 {
		s.leave()
		return
	}
	defer func() {
		for _, r := range all {
			f.end(r)
		}
	}()
	ctx := all[0].Context()
	b.reserve(ctx)
	if len(b.runs) == 0 {
		s.leave()
		return
	}
	loading, values := b.callLoader(ctx)
	if loading == nil {
		s.leave()
	}
	if len(b.runs) > 0 {
		b.put(ctx, values)
	}
	if loading != nil { // in this process the keys stay taken
		loading.Wait(context.Background())
		s.leave()
	}
}

// over ends the work for some of the runs, and releases their locks, all at once. failed says that it has failed:
// then the other processes that wait for them are notified, so that they need not wait for one another. They are not
// if Close ended it: theirs may succeed. Nor if a store or a lookup timed out: the value was loaded, and the store is
// busy; if all others then loaded without a lock, their stores would keep it busy.
func (b *batch[V]) over(runs []*run[V], failed func(r *run[V]) bool) {
	var wg sync.WaitGroup
	for _, r := range runs {
		l := b.locks[r.Key()]
		if l == nil {
			continue
		}
		delete(b.locks, r.Key())
		end := release
		if failed(r) && r.Canceled() == nil {
			end = b.f.c.ReleaseFailed
		}
		if len(runs) == 1 {
			end(l)
			return
		}
		wg.Go(func() { end(l) })
	}
	wg.Wait()
}

func never[T any](T) bool { return false }

func always[T any](T) bool { return true }

// reserve looks up all runs before the load, and ends those that others have loaded: a stale value will not do. Those
// that are left have the stamps of their entries. It is one of maxLookups, so that LookupTimeout is the store's:
// thousands of locks may be won at once, and what is loaded without a stamp is not stored, and loaded again.
func (b *batch[V]) reserve(ctx context.Context) {
	f := b.f
	b.set(waitsForLookup)
	if isLookup(b.why) { // the store does not answer
		scope := f.sending()
		for _, r := range b.runs {
			r.Data.scope = scope
		}
		return
	}
	if f.reserves.Acquire(ctx, 1) != nil { // the ctx of Close has ended
		b.over(b.take(always).runs, never)
		return
	}
	limited, cancel := context.WithTimeout(ctx, f.opts.LookupTimeout)
	defer cancel()
	keys, scope := b.keys(), f.sending()
	c := coalesce.Start(f.runs.Go, func() (map[string]Entry[V], error) {
		return f.store.Reserve(limited, keys)
	})
	found, err, over := result(c, limited, "Lookup", b.keys())
	f.reserves.Release(1) // and not when it returns: one that hangs must not keep others from loading
	done := b.take(func(r *run[V]) bool {
		e, why := found[r.Key()], errorOf(err, r.Key())
		r.Data.scope = scope
		switch {
		case why != nil && ctx.Err() != nil: // of Close: that says nothing of the store
			r.Data.refused = false
		case why != nil:
			r.Data.refused = over && !timedOut(why)
			if why = f.lookupFailed(r.Key(), why); !f.opts.FailClosed {
				return false
			}
			var none V
			b.deliver(r, none, fmt.Errorf("flightlock: fetch %q: %w", r.Key(), why))
		case e.Fresh == Fresh:
			r.Data.scope.Stamp = e.Stamp
			r.Limit(r.Data.scope)
			v, err := e.result()
			b.deliver(r, v, err)
		default:
			r.Data.scope.Stamp = e.Stamp
			return false
		}
		return true
	})
	b.over(done.runs, never)
	forget(done.runs)
}

// forget has later callers of runs that have their results, and no lock any more, begin others: these runs end with
// those that are loaded with them.
func forget[V any](runs []*run[V]) {
	for _, r := range runs {
		if r.Delivered() { // else Close has ended it
			var none V
			r.Finish(none, nil)
		}
	}
}

// deliver gives r's callers their result. Its key stays taken until the end if it is locked: a new run would find that
// it is. Without a lock the next caller may begin one at once.
func (b *batch[V]) deliver(r *run[V], v V, err error) {
	if b.locks[r.Key()] == nil {
		r.Finish(v, err)
	} else {
		r.Deliver(v, err)
	}
}

// callLoader loads all runs. Those that fail are over; values has what the others get, also that it does not exist.
// loading is a call that ignores the end of its ctx.
func (b *batch[V]) callLoader(ctx context.Context) (loading *coalesce.Call[map[string]V], values map[string]Entry[V]) {
	f := b.f
	f.counts.loads.Add(1)
	if b.locks == nil {
		f.counts.unlocked.Add(1)
	}
	b.set(waitsForLoad)
	for _, r := range b.runs {
		r.Limit(r.Data.scope)
	}
	keys, asked := b.keys(), b.keys() // the Loader may change its own, and have them when it is not waited for any more
	observed, ended := f.seen.loading(ctx, asked)
	limited, cancel := context.WithTimeout(f.in(observed, keys), f.opts.LoadTimeout)
	defer cancel()
	c := coalesce.Start(f.runs.Go, func() (map[string]V, error) { return f.loader(limited, keys) })
	loaded, err, over := result(c, limited, "Load", asked)
	if !over && ctx.Err() == nil {
		late, cancel := context.WithTimeout(context.Background(), grace)
		loaded, err, over = result(c, late, "Load", asked)
		cancel()
	}
	ended(err, over)
	if !over {
		loading = c
	}
	if _, some := err.(KeyErrors); !some && errors.Is(err, ErrNotFound) { //nolint:errorlint // see errorOf
		err = notFound(err, asked)
	}
	values = make(map[string]Entry[V], len(b.runs))
	failed := b.take(func(r *run[V]) bool {
		why := errorOf(err, r.Key())
		if why != nil && !errors.Is(why, ErrNotFound) {
			b.failed(ctx, r, why, over)
			return true
		}
		v, there := loaded[r.Key()]
		values[r.Key()] = Entry[V]{Value: v, Absent: !there, Fresh: Fresh, Stamp: r.Data.scope.Stamp}
		return false
	})
	b.over(failed.runs, always)
	return loading, values
}

// failed gives the callers of a run the error of its load. Those that come within ErrorHold get it, too. over is false
// for a load that goes on: as long as it has not returned, there is nothing else for any caller of this process, and
// other processes may load.
func (b *batch[V]) failed(ctx context.Context, r *run[V], why error, over bool) {
	f := b.f
	var none V
	switch {
	case ctx.Err() != nil && (!over || ofCtx(why)): // the ctx of Close has ended: that is no failure
		r.Limit(coalesce.Scope{})
		r.Deliver(none, keyClosed(r.Key()))
		return
	case !over:
		r.Limit(coalesce.Scope{})
		why = fmt.Errorf("flightlock: fetch %q: the load continues after Options.LoadTimeout, %v", r.Key(),
			f.opts.LoadTimeout)
	}
	f.counts.loadFailures.Add(1)
	f.seen.failed(r.Key(), "load", why)
	why = loadErr(r.Key(), why)
	f.failures.failed(r.Key(), r.Data.scope.Stamp, why, clock.Now()) // before the next run can begin
	if over {
		r.Finish(none, why)
	} else {
		r.Deliver(none, why)
	}
}

// put stores what was loaded, unless a lock was lost or there is no stamp to compare with, and gives it to the callers:
// when it is stored, or after NodeTimeout. Then the locks are released.
func (b *batch[V]) put(ctx context.Context, values map[string]Entry[V]) {
	f := b.f
	b.set(waitsForStore)
	unfit := b.take(func(r *run[V]) bool {
		switch l := b.locks[r.Key()]; {
		case l != nil && l.Err() != nil:
			f.counts.lost.Add(1)
		case f.stamped && r.Data.scope.Stamp == "":
			f.counts.unstored.Add(1)
		default:
			return false
		}
		f.failures.notStored(r.Key(), clock.Now())
		b.deliverLoaded(r, values)
		return true
	})
	items := make(map[string]Entry[V], len(b.runs))
	for _, r := range b.runs {
		items[r.Key()] = values[r.Key()]
	}
	var c *coalesce.Call[[]string]
	limited, cancel := context.WithTimeout(ctx, f.opts.TTL)
	defer cancel()
	if len(items) > 0 {
		c = coalesce.Start(f.runs.Go, func() ([]string, error) { return f.store.Put(limited, items) })
	}
	b.over(unfit.runs, func(r *run[V]) bool { return r.Data.refused })
	forget(unfit.runs)
	if c == nil {
		return
	}
	runs := b.runs
	delivery := time.AfterFunc(f.c.NodeTimeout(), func() {
		for _, r := range runs {
			v := values[r.Key()]
			r.Deliver(v.result())
		}
	})
	outdated, err, over := result(c, limited, "Store", b.keys())
	delivery.Stop()
	for _, r := range runs { // before anything else: hundreds of callers wait for many of them
		b.deliverLoaded(r, values)
	}
	if !over { // the next callers load, however long it takes
		b.over(runs, never)
		for _, r := range runs {
			b.deliverLoaded(r, values)
		}
		outdated, err, _ = result(c, context.Background(), "Store", b.keys())
	}
	for _, r := range runs {
		b.stored(r, errorOf(err, r.Key()))
	}
	f.counts.outdated.Add(uint64(len(outdated)))
	b.over(runs, func(r *run[V]) bool {
		why := errorOf(err, r.Key())
		return why != nil && !timedOut(why)
	})
}

// deliverLoaded gives r's callers what was loaded.
func (b *batch[V]) deliverLoaded(r *run[V], values map[string]Entry[V]) {
	e := values[r.Key()]
	v, err := e.result()
	b.deliver(r, v, err)
}

// stored notes the outcome of storing a value.
func (b *batch[V]) stored(r *run[V], err error) {
	f := b.f
	if err == nil {
		f.failures.succeeded(r.Key())
	} else {
		f.failures.notStored(r.Key(), clock.Now())
		f.counts.storeFailures.Add(1)
		f.seen.failed(r.Key(), "store", err)
	}
	if l := b.locks[r.Key()]; l != nil && errors.Is(l.Err(), flightlock.ErrLockLost) {
		f.counts.lost.Add(1)
	}
}

var _ seam.Lock = (*flightlock.Lock)(nil)
