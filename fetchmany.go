package flightlock

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// FetchMany returns the values of many keys: what Fetch would return for each, with few calls of the
// Source. Hits are looked up together. The keys that are missing are locked at the same time, those
// that this process gets are loaded together, and those that others are loading already are waited
// for. Every key has its own flight, which it shares with callers of Fetch, so each key is loaded
// once across all processes, whichever other keys it is requested with. FetchMany holds no lock while
// it waits for another one.
//
// Callers that come at the same time share lookups and loads: a burst of them costs few of either.
//
// Duplicates count once. ctx limits this caller's wait. If some keys have no value, the error is a
// *ManyError with the reason for each of them, and the others have their values. The error is
// ErrClosed if the Fetcher is closed. Values are shared with other callers, and must not be modified.
func (f *Fetcher[V]) FetchMany(ctx context.Context, keys []string) (map[string]V, error) {
	m := &many[V]{
		f: f, ctx: ctx, came: f.sent.Load(), inside: waitNodeOf(ctx),
		values: make(map[string]V, len(keys)), errs: map[string]error{},
	}
	if f.closed.Load() {
		return m.values, errFetcherClosed
	}
	pending := m.distinct(keys)
	for first := true; len(pending) > 0; first = false {
		pending = m.round(pending, first)
	}
	if len(m.errs) > 0 {
		for key := range m.errs {
			delete(m.values, key)
		}
		return m.values, &ManyError{m.errs}
	}
	return m.values, nil
}

// many is one call of FetchMany. Only its caller's goroutine uses it.
type many[V any] struct {
	f      *Fetcher[V]
	ctx    context.Context
	came   uint64    // see Scope
	inside *waitNode // the run that the caller belongs to
	run    context.Context

	values map[string]V // at first of all keys, at last of those without an error
	errs   map[string]error
}

// wanted is a key that has no value yet. In a burst there are hundreds for each of hundreds of callers: so
// there is one slice of them, and not a map for each of what follows.
type wanted[V any] struct {
	key   string
	stamp string       // that the last lookup has found
	why   error        // of that lookup
	run   *fetchRun[V] // that this caller has joined
}

// distinct gives each key once, and puts it into values.
func (m *many[V]) distinct(keys []string) []wanted[V] {
	list := make([]wanted[V], 0, len(keys))
	var none V
	for _, key := range keys {
		if m.values[key] = none; len(m.values) > len(list) {
			list = append(list, wanted[V]{key: key})
		}
	}
	return list
}

// runValues is the ctx that all runs of this call begin with.
func (m *many[V]) runValues() context.Context {
	if m.run == nil {
		m.run = m.f.values(m.ctx)
	}
	return m.run
}

// round looks up keys, waits for those that are missing, and returns those whose results were not
// good for this caller. first says that it is the first one.
func (m *many[V]) round(keys []wanted[V], first bool) (again []wanted[V]) {
	missing, stale, hits := keys[:0], []wanted[V](nil), uint64(0)
	for batch := range slices.Chunk(keys, m.f.opts.MaxBatch) {
		if len(missing) > 0 && clock.Ended(m.ctx) != nil { // enlist gives them the error
			missing = append(missing, batch...)
			continue
		}
		in := m.lookups(batch, first)
		for i, w := range batch {
			var x Found[V]
			x, w.why = in[i].of(w.key)
			w.stamp = x.Stamp
			switch {
			case w.why == nil && x.Fresh == Fresh:
				m.succeeded(w.key, x.Value)
				hits++
			case w.why == nil && x.Fresh == Stale:
				m.succeeded(w.key, x.Value)
				stale = append(stale, w)
			default:
				if w.why != nil {
					w.stamp = ""
				}
				missing = append(missing, w)
			}
		}
	}
	if first {
		m.f.counts.stale.Add(uint64(len(stale)))
		if m.f.src.LookupMany != nil { // else callersLookup counts them
			m.f.permits.counters[0].Add(hits * oneHit)
		}
	}
	runs := m.refresh(stale)
	joined, begun := m.enlist(missing, first)
	m.f.gatherRuns(append(runs, begun...))
	m.waitForStale(stale)
	return m.wait(joined)
}

// refresh begins runs for stale keys. Without LoadMany they start at once.
func (m *many[V]) refresh(stale []wanted[V]) (runs []*fetchRun[V]) {
	f := m.f
	for _, w := range stale {
		if !f.mayRefresh(w.key) {
			continue
		}
		if r := f.beginRefresh(m.runValues(), w.key); r != nil && f.src.LoadMany == nil {
			f.runs.Start(r)
		} else if r != nil {
			runs = append(runs, r)
		}
	}
	return runs
}

// waitForStale waits for the new values of stale keys, StaleWait for all of them together.
func (m *many[V]) waitForStale(stale []wanted[V]) {
	if m.f.opts.StaleWait <= 0 || m.inside != nil || len(stale) == 0 {
		return
	}
	limited, cancel := context.WithTimeout(m.ctx, m.f.opts.StaleWait)
	defer cancel()
	wait := stale[:0]
	for _, w := range stale {
		if r, ok := m.f.runs.JoinOpen(w.key); ok {
			w.run = r
			wait = append(wait, w)
		}
	}
	for _, w := range wait {
		if v, err, left := w.run.Wait(limited); !left && err == nil && w.run.For(m.came, w.stamp) {
			m.values[w.key] = v
		}
	}
}

// enlist joins the runs of missing keys. begun are those that are new, and wait for startBatches.
func (m *many[V]) enlist(missing []wanted[V], first bool) (joined []wanted[V], begun []*fetchRun[V]) {
	f := m.f
	joined = missing[:0]
	for _, w := range missing {
		if err := clock.Ended(m.ctx); err != nil { // whatever the lookup says of that
			m.failed(w.key, f.gaveUp(w.key, err, nil))
			continue
		}
		if err := f.c.checkKey(w.key); err != nil {
			m.failed(w.key, err)
			continue
		}
		if w.why == errFetcherClosed { //nolint:errorlint // it, and not one of the Source's
			m.failed(w.key, f.errClosed(w.key))
			continue
		}
		miss := missed{stamp: w.stamp, again: !first}
		if w.why != nil {
			miss.slow, miss.why = ranOut(w.why), f.lookupFailed(w.key, w.why)
		}
		if first {
			f.counts.misses.Add(1)
		}
		r, isNew, err := f.enlist(m.ctx, w.key, miss, m.inside, m.runValues())
		if err != nil {
			m.failed(w.key, err)
			continue
		}
		w.run = r
		joined = append(joined, w)
		switch {
		case !isNew:
		case f.src.LoadMany == nil || r.loan.isOffered():
			f.runs.Start(r)
		default:
			begun = append(begun, r)
		}
	}
	return joined, begun
}

// wait waits for runs, and returns the keys whose results are not good for this caller.
func (m *many[V]) wait(joined []wanted[V]) (again []wanted[V]) {
	again = joined[:0]
	for _, w := range joined {
		v, err, left := w.run.waitFor(m.ctx)
		if m.inside != nil {
			m.inside.stopAwaiting(&w.run.node)
		}
		switch {
		case !left && !w.run.For(m.came, w.stamp):
			again = append(again, w)
		case err != nil:
			m.failed(w.key, err)
		default:
			m.succeeded(w.key, v)
		}
	}
	return again
}

// succeeded and failed are for a key's result.
func (m *many[V]) succeeded(key string, v V) { m.values[key] = v }

func (m *many[V]) failed(key string, err error) { m.errs[key] = err }

// lookups looks up keys for the caller, as callersLookup does for one. LookupMany runs on the
// caller's goroutine, with one permit. in has the lookup that each of the keys is in.
func (m *many[V]) lookups(batch []wanted[V], count bool) (in []*gathered[V]) {
	f, keys := m.f, make([]string, len(batch))
	for i, w := range batch {
		keys[i] = w.key
	}
	if f.src.LookupMany != nil {
		return f.lookUpMany(m.ctx, m.runValues, keys)
	}
	x := new(gathered[V])
	x.found, x.err = f.lookupEach(m.ctx, keys, func(key string) (Found[V], error) {
		return f.callersLookup(m.ctx, key, count)
	})
	return slices.Repeat([]*gathered[V]{x}, len(keys))
}

func (f *Fetcher[V]) lookupsWithPermit(ctx context.Context, keys []string) (found map[string]Found[V], err error) {
	p := &f.permits
	c, how := p.enter()
	if how != needsPermit {
		defer p.leave(c, false) // if it panics, too
		began := time.Now()
		if found, err = f.src.LookupMany(ctx, keys); err == nil && how == timed {
			p.observe(time.Since(began))
		}
		return found, err
	}
	if ctx.Value(permitOf{p}) != nil {
		return f.src.LookupMany(ctx, keys)
	}
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	defer func(began time.Time) { p.giveBack(time.Since(began), err) }(time.Now())
	return f.src.LookupMany(context.WithValue(ctx, permitOf{p}, true), keys)
}

// lookupsAtOnce is how many lookups of single keys lookupEach makes at once.
const lookupsAtOnce = 16

// lookupEach looks up keys one by one, several at once, and begins none of the later ones when ctx has ended. A panic
// is the error of its key: it is not on the caller's goroutine.
func (f *Fetcher[V]) lookupEach(ctx context.Context, keys []string,
	lookup func(key string) (Found[V], error)) (map[string]Found[V], error) {
	var mu sync.Mutex // guards what follows
	found, failed := make(map[string]Found[V], len(keys)), KeyErrors{}
	var wg sync.WaitGroup
	slots := make(chan struct{}, lookupsAtOnce)
	for i, key := range keys {
		slots <- struct{}{}
		if err := ctx.Err(); err != nil && i >= lookupsAtOnce { // the first ones may be hits
			<-slots
			mu.Lock()
			failed[key] = err
			mu.Unlock()
			continue
		}
		wg.Go(func() { // ends with the lookup
			defer func() { <-slots }()
			x, err := guarded("Lookup", func() (Found[V], error) { return lookup(key) })
			mu.Lock()
			defer mu.Unlock()
			if found[key] = x; err != nil {
				failed[key] = err
			}
		})
	}
	wg.Wait()
	if len(failed) > 0 {
		return found, failed
	}
	return found, nil
}

// guarded calls f on a goroutine of ours: a panic is an error, and so is Goexit, by a goroutine more.
func guarded[T any](op string, f func() (T, error)) (v T, err error) {
	done := make(chan struct{})
	go func() { // ends with f
		returned := false
		defer close(done)
		defer func() {
			if !returned {
				p := &PanicError{Op: op, Value: recover(), Stack: debug.Stack()}
				p.Goexit = p.Value == nil
				err = p
			}
		}()
		v, err = f()
		returned = true
	}()
	<-done
	return v, err
}

var errLoadManyGoesOn = errors.New("LoadMany continues after FetchOptions.LoadTimeout")

// manyErr is the error of key from a LoadMany.
func manyErr(key string, err error) error {
	if errors.Is(err, errLoadManyGoesOn) {
		return fmt.Errorf("flightlock: fetch %q: %w", key, err)
	}
	return loadErr(key, err)
}
