package flightlock

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
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
		values: make(map[string]V, len(keys)), errs: map[string]error{}, stamps: map[string]string{},
	}
	if f.closed.Load() {
		return m.values, errFetcherClosed
	}
	pending := distinct(keys)
	for first := true; len(pending) > 0; first = false {
		pending = m.round(pending, first)
	}
	if len(m.errs) > 0 {
		return m.values, &ManyError{m.errs}
	}
	return m.values, nil
}

func distinct(keys []string) []string {
	seen := make(map[string]bool, len(keys))
	list := make([]string, 0, len(keys))
	for _, key := range keys {
		if !seen[key] {
			seen[key] = true
			list = append(list, key)
		}
	}
	return list
}

// many is one call of FetchMany. Only its caller's goroutine uses it.
type many[V any] struct {
	f      *Fetcher[V]
	ctx    context.Context
	came   uint64    // see Scope
	inside *waitNode // the run that the caller belongs to
	run    context.Context

	values map[string]V
	errs   map[string]error
	stamps map[string]string // that the last lookups have found
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
func (m *many[V]) round(keys []string, first bool) (again []string) {
	var stale []string
	missing := make([]string, 0, len(keys))
	failed := map[string]error{}
	for batch := range slices.Chunk(keys, m.f.opts.MaxBatch) {
		in := m.f.callersLookups(m.ctx, batch, first)
		for i, key := range batch {
			x, why := in[i].of(key)
			switch {
			case why == nil && x.Fresh == Fresh:
				m.values[key] = x.Value
			case why == nil && x.Fresh == Stale:
				m.values[key] = x.Value
				stale = append(stale, key)
			default:
				if why != nil {
					x.Stamp, failed[key] = "", why
				}
				missing = append(missing, key)
			}
			if x.Stamp != "" {
				m.stamps[key] = x.Stamp
			} else if !first {
				delete(m.stamps, key)
			}
		}
	}
	if first {
		m.f.counts.stale.Add(uint64(len(stale)))
	}
	runs := m.refresh(stale)
	joined, begun := m.enlist(missing, failed, first)
	m.f.gatherRuns(append(runs, begun...))
	return append(m.waitForStale(stale), m.wait(joined)...)
}

// refresh begins runs for stale keys. Without LoadMany they start at once.
func (m *many[V]) refresh(stale []string) (runs []*fetchRun[V]) {
	f := m.f
	for _, key := range stale {
		switch {
		case f.src.LoadMany == nil || f.c.checkKey(key) != nil:
			f.refresh(m.ctx, key)
		case f.mayRefresh(key):
			if r := f.beginRefresh(m.runValues(), key); r != nil {
				runs = append(runs, r)
			}
		}
	}
	return runs
}

// waitForStale waits for the new values of stale keys, StaleWait for all of them together.
func (m *many[V]) waitForStale(stale []string) (none []string) {
	if m.f.opts.StaleWait <= 0 || m.inside != nil || len(stale) == 0 {
		return nil
	}
	limited, cancel := context.WithTimeout(m.ctx, m.f.opts.StaleWait)
	defer cancel()
	var wait []*fetchRun[V]
	for _, key := range stale {
		if r, ok := m.f.runs.JoinOpen(key); ok {
			wait = append(wait, r)
		}
	}
	for _, r := range wait {
		if v, err, left := r.Wait(limited); !left && err == nil && r.For(m.came, m.stamps[r.Key()]) {
			m.values[r.Key()] = v
		}
	}
	return nil
}

// enlist joins the runs of missing keys. begun are those that are new, and wait for startBatches.
func (m *many[V]) enlist(missing []string, failed map[string]error, first bool) (joined, begun []*fetchRun[V]) {
	f := m.f
	joined = make([]*fetchRun[V], 0, len(missing))
	for _, key := range missing {
		if err := m.ctx.Err(); err != nil { // whatever the lookup says of that
			m.errs[key] = f.gaveUp(key, err, nil)
			continue
		}
		if err := f.c.checkKey(key); err != nil {
			m.errs[key] = err
			continue
		}
		miss := missed{stamp: m.stamps[key]}
		if why := failed[key]; why != nil {
			miss.slow, miss.why = ranOut(why), f.lookupFailed(key, why)
		}
		if first {
			f.counts.misses.Add(1)
		}
		r, isNew, err := f.enlist(m.ctx, key, miss, m.inside, m.runValues())
		if err != nil {
			m.errs[key] = err
			continue
		}
		joined = append(joined, r)
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
func (m *many[V]) wait(runs []*fetchRun[V]) (again []string) {
	for _, r := range runs {
		v, err, left := m.f.timedWait(m.ctx, r)
		if m.inside != nil {
			m.inside.stopAwaiting(&r.node)
		}
		switch {
		case !left && !r.For(m.came, m.stamps[r.Key()]):
			again = append(again, r.Key())
		case err != nil:
			m.errs[r.Key()] = err
		default:
			m.values[r.Key()] = v
		}
	}
	return again
}

// callersLookups looks up keys for a caller, as callersLookup does for one. LookupMany runs on the
// caller's goroutine, with one permit. in has the lookup that each of the keys is in.
func (f *Fetcher[V]) callersLookups(ctx context.Context, keys []string, count bool) (in []*gathered[V]) {
	if f.src.LookupMany == nil {
		x := new(gathered[V])
		x.found, x.err = f.lookupEach(keys, func(key string) (Found[V], error) { return f.callersLookup(ctx, key, count) })
		return slices.Repeat([]*gathered[V]{x}, len(keys))
	}
	in = f.lookUpMany(ctx, keys)
	if count {
		hits := uint64(0)
		for i, key := range keys {
			if x, err := in[i].of(key); err == nil && x.Fresh == Fresh {
				hits++
			}
		}
		f.permits.counters[0].Add(hits * oneHit)
	}
	return in
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

// lookupEach looks up keys one by one, several at once. A panic is the error of its key: it is not on
// the caller's goroutine.
func (f *Fetcher[V]) lookupEach(keys []string, lookup func(key string) (Found[V], error)) (map[string]Found[V], error) {
	var mu sync.Mutex // guards what follows
	found, failed := make(map[string]Found[V], len(keys)), KeyErrors{}
	var wg sync.WaitGroup
	slots := make(chan struct{}, lookupsAtOnce)
	for _, key := range keys {
		slots <- struct{}{}
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
