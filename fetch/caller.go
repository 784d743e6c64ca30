package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/errtext"
)

// GetMany returns what Get would for each key. What is missing is loaded together, each key once over all
// processes. Keys that do not exist are absent from the result, and duplicates count once. The error is a
// *ManyError for those keys that failed, or ErrClosed. Do not modify the values.
func (f *Fetcher[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values := make(map[string]V, len(keys))
	if f.closed.Load() {
		return values, errClosed
	}
	wants, errs := distinct[V](keys), map[string]error{}
	c := &caller[V]{f: f, ctx: ctx, came: f.sent.Load(), ask: f.store.GetMany}
	c.lookUp(wants)
	c.finish(wants)
	for _, w := range wants {
		if w.err == nil {
			values[w.key] = w.v
		} else if !errors.Is(w.err, ErrNotFound) {
			errs[w.key] = w.err
		}
	}
	if len(errs) > 0 {
		return values, &ManyError{errs}
	}
	return values, nil
}

// caller is one call of Get or GetMany. Only its goroutine uses it.
type caller[V any] struct {
	f    *Fetcher[V]
	ctx  context.Context
	came uint64    // see coalesce.Scope
	wait time.Time // when its misses began to wait

	// ask is the Store's GetMany, or Get for a caller of Get: a panic in either is the caller's.
	ask    func(ctx context.Context, keys []string) (map[string]Entry[V], error)
	looked bool // it has looked something up
}

// want is a key that has no value yet, and then its result.
type want[V any] struct {
	key    string
	entry  Entry[V] // of the last lookup
	failed error    // of that lookup
	run    *run[V]  // that this caller has joined last; nil: none, so nothing has been counted for the key

	v   V
	err error
}

// distinct gives each key once.
func distinct[V any](keys []string) []*want[V] {
	all, seen := make([]want[V], len(keys)), make(map[string]bool, len(keys))
	wants := make([]*want[V], 0, len(keys))
	for i, key := range keys {
		if !seen[key] {
			seen[key], all[i].key = true, key
			wants = append(wants, &all[i])
		}
	}
	return wants
}

// lookUp looks up wants, MaxBatch of them together.
func (c *caller[V]) lookUp(wants []*want[V]) {
	for some := range slices.Chunk(wants, c.f.opts.MaxBatch) {
		var found map[string]Entry[V]
		err := c.ctx.Err()
		if c.f.closed.Load() {
			err = errClosed
		}
		if err == nil || !c.looked { // what a ctx that has ended finds at first may be hits
			keys := keysOf(some, func(w *want[V]) string { return w.key })
			found, err = c.ask(c.ctx, keys)
			err = keyed(err, keys)
		}
		c.looked = true
		for _, w := range some {
			w.entry, w.failed = found[w.key], errorOf(err, w.key)
		}
	}
}

func keysOf[T any](list []T, key func(T) string) []string {
	keys := make([]string, len(list))
	for i, x := range list {
		keys[i] = key(x)
	}
	return keys
}

// finish gives wants, which were looked up, their results. Where these are not for this caller, it looks up
// again.
func (c *caller[V]) finish(wants []*want[V]) {
	for {
		stale, joined := c.begin(wants)
		c.waitForStale(stale)
		if wants = c.await(joined); len(wants) == 0 {
			return
		}
		c.lookUp(wants)
	}
}

// begin gives wants that were found their results, and has the others join a run, or begin one.
func (c *caller[V]) begin(wants []*want[V]) (stale, joined []*want[V]) {
	var begun []*run[V]
	defer func() { c.f.start(begun) }() // also if code of the user's panics: others may have joined them
	for _, w := range wants {
		isNew, fresh := false, w.entry.Fresh
		if w.failed == nil && (fresh == Fresh || fresh == Stale) {
			w.v, w.err = c.f.found(&w.entry, w.run == nil)
			if fresh == Stale {
				stale = append(stale, w)
				begun = append(begun, c.f.refresh(c.ctx, w.key)...)
			}
		} else if isNew, w.err = c.join(w); w.err == nil {
			joined = append(joined, w)
			if isNew {
				begun = append(begun, w.run)
			}
			continue
		}
		c.f.seen.waited(c.ctx, w.key, c.wait, w.err)
	}
	return stale, joined
}

// waitForStale waits for the new values of stale keys, StaleWait for all of them together.
func (c *caller[V]) waitForStale(stale []*want[V]) {
	// inside a load it might wait for itself
	if c.f.opts.StaleWait <= 0 || len(stale) == 0 || chainOf(c.ctx) != nil {
		return
	}
	limited, cancel := context.WithTimeout(c.ctx, c.f.opts.StaleWait)
	defer cancel()
	stale = slices.DeleteFunc(stale, func(w *want[V]) bool {
		w.run, _ = c.f.runs.JoinOpen(w.key)
		return w.run == nil
	})
	for _, w := range stale {
		v, err, left := w.run.Wait(limited)
		if !left && (err == nil || errors.Is(err, ErrNotFound)) && w.run.For(c.came, w.entry.Stamp) {
			w.v, w.err = v, err
		}
	}
}

// join adds the caller to the run of a key that is missing; isNew says that the run is to be started.
func (c *caller[V]) join(w *want[V]) (isNew bool, err error) {
	f, first, slow := c.f, w.run == nil, timedOut(w.failed) // no outage: the store may only be busy
	switch ended := clock.Ended(c.ctx); {
	case w.failed == errClosed: //nolint:errorlint // it, and not one of the Store's
		return false, keyClosed(w.key)
	case ended != nil: // whatever the lookup says of that
		if w.failed == ended { //nolint:errorlint // what else it says is of use
			w.failed = nil
		}
		return false, f.left(w.key, ended, waitsForLookup, w.failed)
	case w.failed != nil:
		w.entry.Stamp = ""
		w.failed = f.lookupFailed(w.key, w.failed)
	}
	inside := chainOf(c.ctx)
	if err := f.mayLoad(inside, w.key); err != nil {
		return false, err
	}
	r, isNew, ok := f.runs.Join(f.base(c.ctx), w.key)
	if !ok {
		return false, keyClosed(w.key)
	}
	if first {
		if f.counts.misses.Add(1); !isNew {
			f.counts.joined.Add(1)
		}
	}
	if w.run = r; inside != nil {
		r.Data.hurry()
	}
	switch {
	case isNew:
		// A load that has failed just now is not repeated. Its run has noted that before this one could begin.
		if err, known := f.failures.of(w.key, w.entry.Stamp, clock.Now()); err != nil {
			r.Limit(coalesce.Scope{Limited: known, Stamp: w.entry.Stamp})
			r.Finish(w.v, err)
			r.Done()
			return false, err
		}
		if w.failed != nil && !slow {
			r.Data.lost = w.failed
		}
	case w.failed != nil && !slow: // the run may wait for a lock that is of no use now
		f.c.Look(f.lockKey(w.key))
	}
	return isNew, nil
}

// await waits for runs, and returns the keys whose results are not good for this caller.
func (c *caller[V]) await(joined []*want[V]) (again []*want[V]) {
	if len(joined) > 0 && c.wait.IsZero() {
		c.wait = time.Now()
	}
	for _, w := range joined {
		v, err, left := w.run.Wait(c.ctx)
		switch {
		case left:
			w.err = c.f.left(w.key, c.ctx.Err(), w.run.Data.what(), nil)
		case !w.run.For(c.came, w.entry.Stamp):
			again = append(again, w)
			continue
		default:
			w.v, w.err = v, err
		}
		c.f.seen.waited(c.ctx, w.key, c.wait, w.err)
	}
	return again
}

// refresh begins to reload a stale value, unless something is in progress for key or its last load
// failed not long ago. What it returns, if anything, is to be started. It reports a key that cannot be
// locked.
func (f *Fetcher[V]) refresh(ctx context.Context, key string) (begun []*run[V]) {
	if err := f.c.CheckKey(key); err != nil { // it is served, and will never be loaded again
		f.counts.loadFailures.Add(1)
		f.seen.refused(key, err)
		return nil
	}
	if !f.failures.allowRefresh(key, clock.Now()) {
		return nil
	}
	r, ok := f.runs.Background(f.base(ctx), key)
	if !ok {
		return nil
	}
	r.Data.refreshes = true
	if !f.failures.allowRefresh(key, clock.Now()) && !r.Wanted() { // another refresh has failed meanwhile
		r.Done()
		return nil
	}
	return []*run[V]{r}
}

// lookupFailed counts and reports a lookup that failed, and returns the error for its callers.
func (f *Fetcher[V]) lookupFailed(key string, err error) error {
	f.counts.lookupErrors.Add(1)
	f.seen.failed(key, "lookup", err)
	return &innerError{lookup, err}
}

// What a run waits for, for a caller that leaves it.
const (
	waitsForTurn   = "" // nothing is known
	waitsForSlot   = "a slot"
	waitsForPermit = "a permit"
	waitsForLock   = "another process's load"
	waitsForLookup = "the store"
	waitsForLoad   = "the load"
	waitsForStore  = "the value to be stored"
)

// left is the error of a caller whose ctx has ended while it waited. It matches the error of the ctx alone:
// one that tests for ErrNotAcquired has not asked for a lock. known is more of it, if that is known.
func (f *Fetcher[V]) left(key string, ctxErr error, waits string, known error) error {
	text := ""
	if waits != waitsForTurn {
		text = ": waiting for " + waits
	}
	switch waits {
	case waitsForSlot:
		text += fmt.Sprintf(": MaxLoads is %d, MaxUnlockedLoads %d", f.opts.MaxLoads, f.opts.MaxUnlockedLoads)
	case waitsForPermit:
		text += fmt.Sprintf(": FleetLoads is %d", f.opts.FleetLoads)
	case waitsForLock:
		known = f.c.Known(f.lockKey(key))
	}
	if known != nil {
		text += ": " + errtext.OneLine(within(known))
	}
	return fmt.Errorf("flightlock: fetch %q: %w%s", key, ctxErr, text)
}
