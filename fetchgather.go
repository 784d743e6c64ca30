package flightlock

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"
)

// gathering brings together what callers of FetchMany want at the same time: a burst of them wants
// mostly the same keys, and each of them by itself would look up all of its own.
//
// While lookups of many keys are under way, maxLookupsOfMany of them, callers that come have their keys
// put into the next one, which is sent when one of those has returned. So each caller's lookup is sent
// after it came, as it has to be (see Scope), and a caller that comes alone does not wait. One that has
// not returned after LookupTimeout counts as if it had. The runs that such callers begin start together,
// too, MaxBatch of them: with one load, and one attempt for each lock, all at once.
//
// A lookup inside a lookup does not wait: another one may wait for it.
type gathering[V any] struct {
	mu       sync.Mutex // guards what follows, and callers and keys of gathered
	underWay int
	next     []*gathered[V] // wait for one of those to return; callers join the last one
	runs     []*fetchRun[V] // wait for their batch
	starting bool           // startGathered is to take them
}

// maxLookupsOfMany is how many LookupMany for callers are under way at once.
const maxLookupsOfMany = 2

// gathered is a lookup for several callers.
type gathered[V any] struct {
	values  context.Context // those of the first one
	callers int             // that wait for it
	keys    []string
	has     map[string]bool
	done    chan struct{} // closed when it has returned

	found map[string]Found[V] // written before done is closed
	err   error
}

// insideLookup is the ctx key that marks the ctx of a LookupMany.
type insideLookup struct{ fetcher any }

// errLookupsHang is the error of a caller whose lookup was not answered in time. It counts as a timeout:
// see ranOut.
var errLookupsHang = fmt.Errorf("lookups that are under way are not answered: %w", os.ErrDeadlineExceeded)

// lookUpMany makes a caller's lookup of many keys, or has it made with those of others. It may find more
// than keys.
func (f *Fetcher[V]) lookUpMany(ctx context.Context, keys []string) (map[string]Found[V], error) {
	if ctx.Value(insideLookup{f}) != nil {
		return f.lookupsWithPermit(ctx, keys)
	}
	g := &f.gathering
	if !g.begin() {
		values := f.values(ctx) // code of the user's: not under the mutex
		if x := g.join(values, keys, f.opts.MaxBatch); x != nil {
			return f.waitForGathered(ctx, x)
		}
	}
	defer f.untilReturned()()
	return f.lookupsWithPermit(context.WithValue(ctx, insideLookup{f}, true), keys)
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

// join adds keys to the last lookup that waits, or to a new one if they are too many. It is nil if the
// caller may make its own now.
func (g *gathering[V]) join(values context.Context, keys []string, most int) *gathered[V] {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.beginLocked() {
		return nil
	}
	var x *gathered[V]
	if n := len(g.next); n > 0 && g.next[n-1].hasRoomFor(keys, most) {
		x = g.next[n-1]
	} else {
		x = &gathered[V]{values: values, has: make(map[string]bool, len(keys)), done: make(chan struct{})}
		g.next = append(g.next, x)
	}
	x.callers++
	for _, key := range keys {
		if !x.has[key] {
			x.has[key] = true
			x.keys = append(x.keys, key)
		}
	}
	return x
}

func (x *gathered[V]) hasRoomFor(keys []string, most int) bool {
	n := len(x.keys)
	if n+len(keys) <= most {
		return true
	}
	for _, key := range keys {
		if !x.has[key] {
			n++
		}
	}
	return n <= most
}

// waitForGathered waits for a lookup that is made for several callers.
func (f *Fetcher[V]) waitForGathered(ctx context.Context, x *gathered[V]) (map[string]Found[V], error) {
	timeout := time.NewTimer(2 * f.opts.LookupTimeout) // until it is sent, and until it is answered
	defer timeout.Stop()
	var err error
	select {
	case <-x.done:
		return x.found, x.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-timeout.C:
		err = errLookupsHang
	}
	f.gathering.mu.Lock()
	defer f.gathering.mu.Unlock()
	x.callers--
	return nil, err
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
		if x.callers > 0 {
			go f.lookUpGathered(x) // ends with the lookup
			return
		}
	}
	g.underWay--
}

func (f *Fetcher[V]) lookUpGathered(x *gathered[V]) {
	defer f.untilReturned()()
	defer close(x.done)
	ctx, cancel := context.WithTimeout(context.WithValue(x.values, insideLookup{f}, true), f.opts.LookupTimeout)
	defer cancel()
	x.found, x.err = guarded("Lookup", func() (map[string]Found[V], error) { return f.lookupsWithPermit(ctx, x.keys) })
}

// gatherRuns starts runs that a caller has begun, with those that others begin now.
func (f *Fetcher[V]) gatherRuns(runs []*fetchRun[V]) {
	if len(runs) == 0 {
		return
	}
	g := &f.gathering
	g.mu.Lock()
	defer g.mu.Unlock()
	g.runs = append(g.runs, runs...)
	if !g.starting {
		g.starting = true
		go f.startGathered() // each run counts as a goroutine until it is Done
	}
}

// startGathered starts the runs that were gathered, once callers that are about to begin some have done
// so: those whose lookup has just returned.
func (f *Fetcher[V]) startGathered() {
	runtime.Gosched()
	g := &f.gathering
	g.mu.Lock()
	runs := g.runs
	g.runs, g.starting = nil, false
	g.mu.Unlock()
	f.startBatches(runs)
}
