package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// This file is the loads of caches.
//
// Cold keys: callers in every process want many keys at once, each its own choice of them, and none is
// in the cache. A wait is the time until a caller has all its values. Loads are counted, of which one for
// each key is enough.
//
// Invalidation: callers get values, which are loaded slowly, while others change them. A value is stale
// if the Get that returned it began after the call that invalidated its key had returned, and the load
// before the change. What is announced goes through a server of its own, as what everybody knows.

// cacheJob is what a worker has for these loads.
type cacheJob struct {
	l     *loader
	c     valueCache
	rdb   *redis.Client // for versions
	takes atomic.Int64  // nanoseconds, of a load
	v     versionsOf
}

func openCacheJob(r rival, t task) (*cacheJob, error) {
	j := &cacheJob{rdb: goredis(t.Settings.Versions, nil)}
	j.v = versionsOf{j.rdb, "versions:"}
	j.takes.Store(int64(t.Load.Work))
	j.l = &loader{value: j.v.current, takes: func() time.Duration { return time.Duration(j.takes.Load()) }}
	if t.Load.Kind == coldKeys {
		j.l.value = func(string) (string, error) { return "0", nil }
	} else {
		j.l.takes = func() time.Duration { // one in ten takes ten times as long
			if rand.IntN(10) == 0 {
				return 10 * t.Load.Work
			}
			return t.Load.Work
		}
	}
	var err error
	j.c, err = r.cache(t.Settings, j.l)
	return j, err
}

func (j *cacheJob) close() {
	j.c.close()
	_ = j.rdb.Close()
}

// warmUp makes the connections, and has the server know the scripts.
func (j *cacheJob) warmUp(t task) error {
	takes := j.takes.Swap(int64(time.Millisecond))
	defer j.takes.Store(takes)
	var wg sync.WaitGroup
	errs := make(chan error, poolSize)
	for g := range poolSize {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			keys := []string{fmt.Sprintf("warm:%d:%d:%d", pid(), g, 0), fmt.Sprintf("warm:%d:%d:%d", pid(), g, 1)}
			_, err := j.c.getMany(ctx, keys)
			errs <- err
		})
	}
	wg.Wait()
	for range poolSize {
		if err := <-errs; err != nil {
			return fmt.Errorf("warming up: %w", err)
		}
	}
	return nil
}

// chosenPerCall is how many of the keys one call wants.
const chosenPerCall = 100

// runCold has each caller get a choice of the cold keys once.
func (j *cacheJob) runCold(t task, prefix string, at time.Time) (*result, error) {
	r := newRun(nil, t)
	defer r.cancel()
	keys, calls, commands := j.l.keys.Load(), j.l.calls.Load(), j.l.commands.Load()
	res := r.burst(at, func(g int) func(context.Context) error {
		rng := rand.New(rand.NewPCG(uint64(pid()), uint64(g)))
		want := make([]string, 0, chosenPerCall)
		for _, n := range rng.Perm(t.Load.Keys)[:chosenPerCall] {
			want = append(want, fmt.Sprintf("%s:%d", prefix, n))
		}
		return func(ctx context.Context) error {
			n, err := j.c.getMany(ctx, want)
			if err == nil && n != len(want) {
				err = fmt.Errorf("%d values of %d", n, len(want))
			}
			return err
		}
	})
	per := float64(t.Load.Keys)
	res.Extra["loads_key"] = float64(j.l.keys.Load()-keys) / per
	res.Extra["bulk_proc"] = float64(j.l.calls.Load()-calls) / float64(coldProcs)
	res.Extra["commands_key"] = float64(j.l.commands.Load()-commands) / per
	return res, r.finish(res)
}

// changers is how many goroutines of a process change values.
const changers = 2

// runInvalidation has callers get values and others change them, for as long as the window is.
func (j *cacheJob) runInvalidation(t task, prefix string, at time.Time) (*result, error) {
	r := newRun(nil, t)
	defer r.cancel()
	var stale, changes atomic.Uint64
	loads := j.l.keys.Load()
	var reads atomic.Uint64
	var wg sync.WaitGroup
	time.Sleep(time.Until(at))
	m := readMeter()
	loop := func(most time.Duration, once func(key string) error) {
		wg.Go(func() {
			for !r.stopped.Load() {
				r.failed(r.ctx, once(fmt.Sprintf("%s:%d", prefix, rand.IntN(t.Load.Keys))))
				time.Sleep(rand.N(most))
			}
		})
	}
	for g := range t.Load.Goroutines {
		loop(2*time.Millisecond, func(key string) error {
			floor, err := j.v.announced(key)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
			defer cancel()
			began := time.Now()
			value, err := j.c.get(ctx, key)
			if err != nil {
				return err
			}
			r.record(g, time.Since(began))
			reads.Add(1)
			old, err := older(value, floor)
			if old {
				stale.Add(1)
			}
			return err
		})
	}
	for range changers {
		loop(50*time.Millisecond, func(key string) error {
			version, err := j.v.raise(key)
			if err != nil {
				return err
			}
			if err := j.c.invalidate(r.ctx, key); err != nil {
				return err
			}
			changes.Add(1)
			return j.v.announce(key, version)
		})
	}
	time.Sleep(t.Load.Window)
	r.stopped.Store(true)
	wg.Wait()
	res := m.result()
	res.Locks = reads.Load()
	res.Extra["stale"] = float64(stale.Load())
	res.Extra["reads"] = float64(reads.Load())
	res.Extra["changes"] = float64(changes.Load())
	res.Extra["value_loads"] = float64(j.l.keys.Load() - loads)
	return res, r.finish(res)
}
