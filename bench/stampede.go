package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
	"golang.org/x/sync/singleflight"
)

// This file is the load of (a): every caller of every client wants one value that is not in the cache, at once.

const (
	originTime  = 50 * time.Millisecond // in the main job
	stampedeTTL = 10 * time.Second
	// Nobody waits longer for one miss: then the callers that are left report an error.
	missLimit = time.Minute
	// How long a process leaves the others alone when its callers have the value, before it adds up and reports.
	settleTime = 10 * time.Millisecond
)

// stampede starts all callers together, at the given time, and waits for the last.
func (c *localCrew) stampede(ctx context.Context, at time.Time) (err error) {
	ctx, cancel := context.WithTimeout(ctx, missLimit)
	defer cancel()
	start := make(chan struct{}) // closed at that time, or when all callers stand ready if that is later
	var ready, done sync.WaitGroup
	for i, cl := range c.clients {
		group := new(singleflight.Group) // each client stands for a process of a service
		var f fetcher
		if c.job.Kind == kindFetch {
			l := &caller{id: holderID(c.Proc, i, c.job.Goroutines), reg: c.reg, cache: c.cache, takes: c.job.Load, tally: c.tallies[i]}
			if f, err = cl.fetcher(l.source(), stampedeTTL); err != nil {
				return err
			}
			defer f.Close(ctx)
		}
		took := make([]time.Duration, c.job.Goroutines)
		c.tallies[i].took = took
		for g := range c.job.Goroutines {
			w := &caller{id: holderID(c.Proc, i, g), client: cl, group: group, fetcher: f, reg: c.reg, cache: c.cache, key: c.job.Key, takes: c.job.Load, tally: c.tallies[i]}
			ready.Add(1)
			done.Go(func() {
				ready.Done()
				<-start
				took[g] = w.run(ctx, c.job.Kind)
			})
		}
	}
	ready.Wait()
	_ = sleep(ctx, time.Until(at)) // if ctx ends, the callers notice
	close(start)
	done.Wait()
	return sleep(ctx, settleTime)
}

// caller is one request that needs the value.
type caller struct {
	id      holder
	client  locker
	group   *singleflight.Group
	fetcher fetcher // of kindFetch
	reg     *register
	cache   cache
	key     string
	takes   time.Duration // a load
	tally   *tally
}

// run gets the value in the given way, and counts and returns how long that took; 0 if it failed.
func (w *caller) run(ctx context.Context, kind string) time.Duration {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	var err error
	switch kind {
	case kindUnprotected:
		err = w.unlessCached(ctx, w.loadAndStore)
	case kindSingleflight:
		err = w.unlessCached(ctx, w.loadShared)
	case kindLock:
		err = w.unlessCached(ctx, w.loadLocked)
	case kindFetch:
		_, err = w.fetcher.Fetch(ctx, w.key)
	default:
		err = fmt.Errorf("no such kind of job: %q", kind)
	}
	if err != nil {
		w.tally.failed(0, "call", err)
		return 0
	}
	took := time.Since(began)
	w.tally.granted(0, took)
	return took
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

// source is the same for a Fetcher, whose loads are all w's.
func (w *caller) source() flightlock.Source[bool] {
	return flightlock.Source[bool]{
		Lookup: func(ctx context.Context, key string) (bool, flightlock.Freshness, error) {
			hit, err := w.cache.lookup(ctx, key)
			if hit {
				return true, flightlock.Fresh, err
			}
			return false, flightlock.Miss, err
		},
		Load: func(ctx context.Context, key string) (bool, error) {
			if l := flightlock.FromContext(ctx); l != nil {
				w.tally.checked(w.reg.enter(w.id, l, time.Now(), -1))
				defer w.reg.leave(w.id)
			}
			return true, w.load(ctx)
		},
		Store: func(ctx context.Context, key string, _ bool, _ *flightlock.Lock) error {
			return w.cache.store(ctx, key)
		},
	}
}
