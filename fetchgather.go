package flightlock

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// gathering brings together what callers of FetchMany want at the same time: a burst of them wants
// mostly the same keys, and each of them by itself would look up all of its own.
//
// While lookups of many keys are under way, maxLookupsOfMany of them, callers that come have their keys
// put into the next ones, MaxBatch in each, which are sent when those have returned. A key is in one of
// them, whoever wants it. So each caller's lookups are sent after it came, as they have to be (see Scope),
// and a caller that comes alone does not wait. One that has not returned after LookupTimeout counts as if
// it had. The runs that such callers begin start together, too, MaxBatch of them: with one load, and one
// attempt for each lock, all at once.
//
// A lookup inside a lookup does not wait: another one may wait for it.
type gathering[V any] struct {
	mu       sync.Mutex // guards what follows but the crowds, and callers and keys of gathered
	underWay int
	next     []*gathered[V]          // wait for one of those to return; what comes is put into the last one
	waiting  map[string]*gathered[V] // the keys of next

	runs     crowd[V] // wait for startGathered
	unlocked crowd[V] // wait for startUnlocked: see loadGathered
	won      crowd[V] // wait for startWon: see loadWon
}

// crowd is runs that start together.
type crowd[V any] struct {
	mu   sync.Mutex
	runs []*fetchRun[V]
}

// add adds runs, and reports whether they are the first: then somebody is to take all, a moment later.
func (c *crowd[V]) add(runs ...*fetchRun[V]) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first = len(c.runs) == 0
	c.runs = append(c.runs, runs...)
	return first && len(runs) > 0
}

func (c *crowd[V]) take() []*fetchRun[V] {
	c.mu.Lock()
	defer c.mu.Unlock()
	runs := c.runs
	c.runs = nil
	return runs
}

// maxLookupsOfMany is how many LookupMany for callers are under way at once.
const maxLookupsOfMany = 2

// gathered is a lookup, which may be for several callers.
type gathered[V any] struct {
	values  context.Context // those of the first one
	callers int             // that wait for it, once for each of their keys
	keys    []string
	done    chan struct{} // closed when it has returned

	found map[string]Found[V] // written before done is closed
	err   error
}

// insideLookup is the ctx key that marks the ctx of a LookupMany.
type insideLookup struct{ fetcher any }

// errLookupsHang is the error of a caller whose lookup was not answered in time. It counts as a timeout:
// see ranOut.
var errLookupsHang = fmt.Errorf("lookups that are under way are not answered: %w", os.ErrDeadlineExceeded)

// of is what the lookup says of key.
func (x *gathered[V]) of(key string) (Found[V], error) { return x.found[key], errorOf(x.err, key) }

// lookUpMany makes a caller's lookup of many keys, or has it made with those of others, with the values of the first
// of them. in has the lookup that each of the keys is in, which has returned.
func (f *Fetcher[V]) lookUpMany(ctx context.Context, runValues func() context.Context,
	keys []string) (in []*gathered[V]) {
	g, own := &f.gathering, ctx.Value(insideLookup{f}) != nil
	if !own {
		if own = g.begin(); !own {
			values := runValues() // code of the user's: not under the mutex
			if in = g.join(values, keys, f.opts.MaxBatch); in != nil {
				return f.waitForGathered(ctx, in)
			}
		}
		defer f.untilReturned()()
		ctx = context.WithValue(ctx, insideLookup{f}, true)
	}
	x := new(gathered[V])
	x.found, x.err = f.lookupsWithPermit(ctx, keys)
	return slices.Repeat([]*gathered[V]{x}, len(keys))
}

// begin reports whether a caller may make its own lookup now.
func (g *gathering[V]) begin() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.beginLocked()
}

func (g *gathering[V]) beginLocked() bool {
	if g.underWay >= maxLookupsOfMany {
		return false
	}
	g.underWay++
	return true
}

// join puts keys into lookups that wait, and returns which. It is nil if the caller may make its own now.
func (g *gathering[V]) join(values context.Context, keys []string, most int) (in []*gathered[V]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.beginLocked() {
		return nil
	}
	if g.waiting == nil {
		g.waiting = map[string]*gathered[V]{}
	}
	in = make([]*gathered[V], len(keys))
	for i, key := range keys {
		x := g.waiting[key]
		if x == nil {
			x = g.lastLocked(values, most)
			g.waiting[key] = x
			x.keys = append(x.keys, key)
		}
		x.callers++
		in[i] = x
	}
	return in
}

// lastLocked is the lookup that waits, and has room for one more key.
func (g *gathering[V]) lastLocked(values context.Context, most int) *gathered[V] {
	if n := len(g.next); n > 0 && len(g.next[n-1].keys) < most {
		return g.next[n-1]
	}
	x := &gathered[V]{values: values, done: make(chan struct{})}
	g.next = append(g.next, x)
	return x
}

// waitForGathered waits for lookups that are made for several callers. Those that it does not wait for any
// longer have an error in what it returns.
func (f *Fetcher[V]) waitForGathered(ctx context.Context, in []*gathered[V]) []*gathered[V] {
	// until it is sent, and until it is answered
	timeout := time.NewTimer(clock.Add(f.opts.LookupTimeout, f.opts.LookupTimeout))
	defer timeout.Stop()
	for i, x := range in {
		select {
		case <-x.done: // most are in one that has been waited for
			continue
		default:
		}
		var err error
		select {
		case <-x.done:
			continue
		case <-ctx.Done():
			err = ctx.Err()
		case <-timeout.C:
			err = errLookupsHang
		}
		return f.leaveGathered(in, i, err)
	}
	return in
}

// leaveGathered has a caller leave the lookups that have not returned yet: none of those before from are.
func (f *Fetcher[V]) leaveGathered(in []*gathered[V], from int, err error) []*gathered[V] {
	f.gathering.mu.Lock()
	defer f.gathering.mu.Unlock()
	left := &gathered[V]{err: err}
	for i, x := range in[from:] {
		select {
		case <-x.done:
		default:
			x.callers--
			in[from+i] = left
		}
	}
	return in
}

// untilReturned counts a lookup as under way until the function that it returns is called, or
// LookupTimeout is over. Then the next one begins.
func (f *Fetcher[V]) untilReturned() (returned func()) {
	var once sync.Once
	over := func() { once.Do(f.beginNext) }
	timeout := time.AfterFunc(f.opts.LookupTimeout, over)
	return func() {
		timeout.Stop()
		over()
	}
}

// beginNext sends the next lookup that has callers, in place of one that has returned.
func (f *Fetcher[V]) beginNext() {
	g := &f.gathering
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.next) > 0 {
		x := g.next[0]
		g.next = g.next[1:]
		for _, key := range x.keys {
			delete(g.waiting, key)
		}
		switch {
		case x.callers == 0:
		case !f.runs.Enter():
			x.err = errFetcherClosed
			close(x.done)
		default:
			go f.lookUpGathered(x) // ends with the lookup
			return
		}
	}
	g.underWay--
}

func (f *Fetcher[V]) lookUpGathered(x *gathered[V]) {
	defer f.runs.Exit()
	defer f.untilReturned()()
	defer close(x.done)
	ctx, cancel := context.WithTimeout(context.WithValue(x.values, insideLookup{f}, true), f.opts.LookupTimeout)
	defer cancel()
	defer context.AfterFunc(f.aborted, cancel)()
	x.found, x.err = guarded("Lookup", func() (map[string]Found[V], error) { return f.lookupsWithPermit(ctx, x.keys) })
}

// gatherRuns starts runs that a caller has begun, with those that others begin now.
func (f *Fetcher[V]) gatherRuns(runs []*fetchRun[V]) {
	if f.gathering.runs.add(runs...) {
		go f.startGathered() // each run counts as a goroutine until it is Done
	}
}

// startGathered starts the runs that were gathered, once callers that are about to begin some have done
// so: those whose lookup has just returned.
func (f *Fetcher[V]) startGathered() {
	runtime.Gosched()
	f.startBatches(f.gathering.runs.take())
}
