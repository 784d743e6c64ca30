package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"golang.org/x/sync/singleflight"
)

// This file is the load of (a): every caller of every client wants one value that is not in the
// cache, at once.

const (
	originTime  = 50 * time.Millisecond // in the main job
	stampedeTTL = 10 * time.Second
	// Nobody waits longer for one miss: then the callers that are left report an error.
	missLimit = time.Minute
	// How long a process leaves the others alone when its callers have the value, before it adds up
	// and reports.
	settleTime = 10 * time.Millisecond
)

// stampede starts all callers together, at the given time, and waits for the last. What only the
// bench needs of a caller, its goroutine, its ctx and the counting, happens before and after.
func (c *localCrew) stampede(ctx context.Context, at time.Time) (err error) {
	ctx, cancel := context.WithTimeout(ctx, missLimit)
	defer cancel()
	start := make(chan struct{}) // closed at that time, or when all callers stand ready if that is later
	var ready, done sync.WaitGroup
	var all []*caller
	for i, cl := range c.clients {
		group := new(singleflight.Group) // each client stands for a process of a service
		var f fetcher
		if c.job.Kind == kindFetch {
			l := &caller{cache: c.cache, takes: c.job.Load, tally: c.tallies[i]}
			if f, err = cl.fetcher(l.store(), fetch.Each(l.value), stampedeTTL); err != nil {
				return err
			}
			defer f.Close(ctx)
		}
		for g := range c.job.Goroutines {
			w := &caller{id: holderID(c.Proc, i, g), client: cl, group: group, fetcher: f, hand: c.hand, reg: c.reg,
				cache:  c.cache,
				prefix: c.Prefix, key: c.job.Key, takes: c.job.Load, tally: c.tallies[i]}
			all = append(all, w)
			own, leave := context.WithCancel(ctx) // as a request has one
			defer leave()
			ready.Add(1)
			done.Go(func() {
				ready.Done()
				<-start
				began := time.Now()
				w.err = w.run(own, c.job.Kind)
				w.took = time.Since(began)
			})
		}
	}
	ready.Wait()
	_ = sleep(ctx, time.Until(at)) // if ctx ends, the callers notice
	close(start)
	done.Wait()
	for _, w := range all {
		w.count()
	}
	return sleep(ctx, settleTime)
}

// caller is one request that needs the value.
type caller struct {
	id      holder
	client  locker
	group   *singleflight.Group
	fetcher fetcher     // of kindFetch
	hand    *setNXLoads // of kindByHand
	reg     *register
	cache   cache
	prefix  string // of all keys
	key     string
	takes   time.Duration // a load
	tally   *tally

	// Set when it is done.
	took time.Duration
	err  error
}

// run gets the value in the given way.
func (w *caller) run(ctx context.Context, kind string) error {
	switch kind {
	case kindUnprotected:
		return w.unlessCached(ctx, w.loadAndStore)
	case kindSingleflight:
		return w.unlessCached(ctx, w.loadShared)
	case kindLock:
		return w.unlessCached(ctx, w.loadLocked)
	case kindByHand:
		return w.unlessCached(ctx, w.loadByHand)
	case kindFetch:
		_, err := w.fetcher.Get(ctx, w.key)
		return err
	}
	return fmt.Errorf("no such kind of job: %q", kind)
}

// count counts how that went.
func (w *caller) count() {
	if w.err != nil {
		w.tally.failed(0, "call", w.err)
		return
	}
	w.tally.granted(0, w.took)
	w.tally.took = append(w.tally.took, w.took)
}

// unlessCached looks the value up, and calls miss if it is not there.
func (w *caller) unlessCached(ctx context.Context, miss func(context.Context) error) error {
	hit, err := w.cache.lookup(ctx, w.key)
	if err != nil || hit {
		return err
	}
	return miss(ctx)
}

// loadAndStore asks the origin and fills the cache.
func (w *caller) loadAndStore(ctx context.Context) error {
	if err := w.load(ctx); err != nil {
		return err
	}
	return w.cache.store(ctx, w.key)
}

func (w *caller) load(ctx context.Context) error {
	w.tally.loads.Add(1)
	began := time.Now()
	defer func() { w.tally.load.Add(int64(time.Since(began))) }()
	return sleep(ctx, w.takes)
}

// loadShared is what people write without a distributed lock.
func (w *caller) loadShared(ctx context.Context) error {
	_, err, _ := w.group.Do(w.key, func() (any, error) { return nil, w.loadAndStore(ctx) })
	return err
}

// loadByHand shares the load with other processes, as far as can be without a lock.
func (w *caller) loadByHand(ctx context.Context) error {
	first := false
	_, err, _ := w.group.Do(w.key, func() (_ any, err error) {
		first, err = w.hand.share(ctx, w.key, w.prefix, w.loadAndStore)
		return nil, err
	})
	if err != nil || !first { // callers that only waited have a first of their own
		return err
	}
	return w.hand.publish(ctx, w.key, w.prefix)
}

// loadLocked is the plain form with one: lock, look again, load only if the value is still missing.
func (w *caller) loadLocked(ctx context.Context) (err error) {
	l, err := w.client.lock(ctx, w.key, stampedeTTL)
	if err != nil {
		return err
	}
	defer func() {
		w.reg.leave(w.id)
		if rerr := l.Release(ctx); err == nil {
			err = rerr
		}
	}()
	w.tally.checked(w.reg.enter(w.id, l, time.Now(), -1))
	return w.unlessCached(ctx, w.loadAndStore)
}

// store is the cache for a Fetcher.
func (w *caller) store() fetch.Store[bool] {
	return fetch.Plain(
		func(ctx context.Context, key string) (v, ok bool, err error) {
			hit, err := w.cache.lookup(ctx, key)
			return hit, hit, err
		},
		func(ctx context.Context, key string, _ bool) error { return w.cache.store(ctx, key) })
}

// value is a load for a Fetcher, whose loads are all w's. How many there were says whether locks excluded
// each other.
func (w *caller) value(ctx context.Context, _ string) (bool, error) { return true, w.load(ctx) }
