package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clock"
)

// Marker is a Store that can mark entries, which Refresh needs.
type Marker interface {
	// Mark marks the entries of distinct keys, at most Options.MaxBatch, and leaves their values. Reserve
	// returns a marked entry as Stale. A mark is part of the stamp: a Put with it removes the mark, and one with
	// the stamp from before stores its item and leaves the mark. A missing entry needs none.
	Mark(ctx context.Context, keys []string) error
}

// How the runs of a key relate to a Refresh of it: see miss.ends.
const (
	byAnyValue uint32 = iota // it ends when its value is found, and no Refresh waits for it
	byLoad                   // a Refresh waits for it: what a lookup without the lock finds does not end it
	wasFound                 // it has ended with a value that was found, which is nothing to a Refresh
)

// endsWithFound reports whether the run may end with a value that a lookup has found, and has it do so.
func (m *miss[V]) endsWithFound() bool {
	return m.ends.CompareAndSwap(byAnyValue, wasFound)
}

// Refresh loads keys now, fresh or not, and returns when they are stored, or NodeTimeout after they were
// loaded. Others get what the Store has meanwhile, and if the load fails. Calls in all processes that come
// before a load begins share it. It is no invalidation: a load under way may be stored first. ctx limits only
// this caller's wait. The error is a *ManyError for those keys that failed (ErrorHold does not apply);
// ErrClosed; ErrInvalid unless the Store is a Marker.
func (f *Fetcher[V]) Refresh(ctx context.Context, keys ...string) error {
	marker, ok := f.store.(Marker)
	if !ok {
		return invalid("s", "a Store without Mark", "Refresh needs a Marker")
	}
	if f.closed.Load() {
		return errClosed
	}
	wants, errs := distinct[V](keys), map[string]error{}
	fail := func(w *want[V], err error) bool {
		if err != nil && !errors.Is(err, ErrNotFound) {
			errs[w.key] = err
		}
		return err != nil
	}
	wants = slices.DeleteFunc(wants, func(w *want[V]) bool { return fail(w, f.mayLoad(chainOf(ctx), w.key)) })
	for some := range slices.Chunk(wants, f.opts.MaxBatch) {
		names := keysOf(some, func(w *want[V]) string { return w.key })
		err := keyed(marker.Mark(ctx, slices.Clone(names)), names)
		for _, w := range some {
			if w.failed = errorOf(err, w.key); w.failed == nil {
				continue
			}
			if ended := clock.Ended(ctx); ended != nil {
				w.failed = f.left(w.key, ended, waitsForLookup, w.failed)
			} else {
				w.failed = f.lookupFailed(w.key, w.failed)
			}
		}
	}
	wants = slices.DeleteFunc(wants, func(w *want[V]) bool { return fail(w, w.failed) })
	for came := f.sent.Load(); len(wants) > 0; { // what was sent before may be from before the marks
		f.startAnew(ctx, wants)
		wants = slices.DeleteFunc(wants, func(w *want[V]) bool {
			if w.run == nil {
				return fail(w, keyClosed(w.key))
			}
			_, err, left := w.run.Wait(ctx)
			if left {
				return fail(w, f.left(w.key, ctx.Err(), w.run.Data.what(), nil))
			}
			again := w.run.Data.ends.Load() == wasFound || !w.run.For(came, "")
			return !again && (fail(w, err) || true)
		})
	}
	if len(errs) > 0 {
		return &ManyError{errs}
	}
	return nil
}

// startAnew has wants join runs, or begins some, which are to load. A want has no run after Close.
func (f *Fetcher[V]) startAnew(ctx context.Context, wants []*want[V]) {
	var begun []*run[V]
	for _, w := range wants {
		r, isNew, ok := f.runs.Join(f.base(ctx), w.key)
		if w.run = r; !ok {
			continue
		}
		if r.Data.ends.CompareAndSwap(byAnyValue, byLoad); chainOf(ctx) != nil {
			r.Data.hurry()
		}
		if isNew {
			begun = append(begun, r)
		}
	}
	f.start(begun)
}

// mayLoad is the error of a key that cannot be locked, or that a load asks for which it would wait for.
func (f *Fetcher[V]) mayLoad(inside *chain, key string) error {
	if err := f.c.CheckKey(key); err != nil {
		return err
	}
	if inside.loads(f, key) {
		return fmt.Errorf("flightlock: fetch %q: %w: it is called inside a load that it would wait for", key,
			flightlock.ErrInvalid)
	}
	return nil
}

// Peek returns what the Store has for key, and loads and counts nothing. A Miss is no error. Errors:
// ErrNotFound; the Store's; ErrClosed.
func (f *Fetcher[V]) Peek(ctx context.Context, key string) (v V, fresh Freshness, err error) {
	if f.closed.Load() {
		return v, Miss, keyClosed(key)
	}
	e, err := f.store.Get(ctx, key)
	if err != nil || e.Fresh != Fresh && e.Fresh != Stale {
		return v, Miss, err
	}
	v, err = e.result()
	return v, e.Fresh, err
}
