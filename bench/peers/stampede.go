package main

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/singleflight"
)

// This file is the stampede: callers in every process want one value at once, which is not in the
// cache, a key on the first server. A wait is the time until a caller has the value; loads are
// counted, of which one is enough.

// fetcher gets a value, loading it if it must.
type fetcher interface {
	fetch(ctx context.Context, key string) error
	close()
}

// cache is what the processes share.
type cache struct{ rdb *redis.Client }

func (c cache) has(ctx context.Context, key string) (bool, error) {
	err := c.rdb.Get(ctx, "value:"+key).Err()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return err == nil, err
}

func (c cache) put(ctx context.Context, key string) error {
	return c.rdb.Set(ctx, "value:"+key, "value", time.Minute).Err()
}

// source loads values, and counts.
type source struct {
	cache
	takes time.Duration
	loads atomic.Uint64
}

func (s *source) load() {
	s.loads.Add(1)
	time.Sleep(s.takes)
}

func newFetcher(l locker, src *source) (fetcher, error) {
	switch l := l.(type) {
	case *flightClient:
		return newFlightFetcher(l, src)
	case nil:
		return &plainFetcher{src: src}, nil
	}
	return &recheckFetcher{plainFetcher{src: src}, l}, nil
}

// flightFetcher is flightlock's package fetch.
type flightFetcher struct {
	f *fetch.Fetcher[bool]
}

func newFlightFetcher(l *flightClient, src *source) (fetcher, error) {
	store := fetch.Plain(
		func(ctx context.Context, key string) (v, ok bool, err error) {
			ok, err = src.has(ctx, key)
			return ok, ok, err
		},
		func(ctx context.Context, key string, _ bool) error { return src.put(ctx, key) })
	load := func(context.Context, string) (bool, error) { src.load(); return true, nil }
	f, err := fetch.New(l.c, store, fetch.Each(load), fetch.Options{TTL: l.ttl})
	return flightFetcher{f}, err
}

func (f flightFetcher) fetch(ctx context.Context, key string) error {
	_, err := f.f.Get(ctx, key)
	return err
}

func (f flightFetcher) close() { _ = f.f.Close(context.Background()) }

// plainFetcher is x/sync singleflight alone: every process loads.
type plainFetcher struct {
	src   *source
	group singleflight.Group
}

func (p *plainFetcher) fetch(ctx context.Context, key string) error {
	if ok, err := p.src.has(ctx, key); ok || err != nil {
		return err
	}
	_, err, _ := p.group.Do(key, func() (any, error) {
		p.src.load()
		return nil, p.src.put(ctx, key)
	})
	return err
}

func (p *plainFetcher) close() {}

// recheckFetcher is the loop that people write by hand around singleflight and a lock: look, lock,
// look again, load.
type recheckFetcher struct {
	plainFetcher
	l locker
}

func (r *recheckFetcher) fetch(ctx context.Context, key string) error {
	if ok, err := r.src.has(ctx, key); ok || err != nil {
		return err
	}
	_, err, _ := r.group.Do(key, func() (any, error) { return nil, r.fetchLocked(ctx, key) })
	return err
}

func (r *recheckFetcher) fetchLocked(ctx context.Context, key string) error {
	h, err := r.l.lock(ctx, "lock:"+key)
	if err != nil {
		return err
	}
	defer func() { _ = h.release() }() // a lock that was lost did its work all the same
	if ok, err := r.src.has(ctx, key); ok || err != nil {
		return err
	}
	r.src.load()
	return r.src.put(ctx, key)
}

// runStampede is one cold key. The worker calls it once per episode, with another key each.
func runStampede(f fetcher, src *source, t task, key string, at time.Time) (*result, error) {
	r := newRun(nil, t)
	defer r.cancel()
	before := src.loads.Load()
	res := r.burst(at, func(int) func(context.Context) error {
		return func(ctx context.Context) error { return f.fetch(ctx, key) }
	})
	res.Extra["loads"] = float64(src.loads.Load() - before)
	return res, r.finish(res)
}
