package variant

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
)

// withSingleflight has one load per key and process. Nothing keeps processes apart.
type withSingleflight struct {
	env Env
}

func newSingleflight(env Env) *withSingleflight { return &withSingleflight{env} }

func (s *withSingleflight) Ready(ctx context.Context) error { return s.env.Cache.Ping(ctx).Err() }

func (s *withSingleflight) Close(context.Context) error { return nil }

// Do runs fn, with no lock whatever.
func (s *withSingleflight) Do(ctx context.Context, _ string, _ time.Duration, fn func(context.Context, Lock) error) error {
	return fn(ctx, noLock{})
}

type noLock struct{}

func (noLock) Fence() int64 { return 0 }
func (noLock) Err() error   { return nil }

func (s *withSingleflight) NewCache(name string, load Load, opts CacheOptions) (Cache, error) {
	return &grouped{values: values{s.env.Cache, opts.Fresh}, load: load, opts: opts, log: s.env.Log.With("cache", name)}, nil
}

// grouped is a cache in Redis behind a singleflight.Group.
type grouped struct {
	values values
	load   Load
	opts   CacheOptions
	log    *slog.Logger
	group  singleflight.Group
	counts counts
	busy   sync.WaitGroup
}

// counts are Stats that are being counted.
type counts struct{ loads, unlocked, lookupErrors, storeFailures atomic.Uint64 }

func (c *counts) read() Stats {
	return Stats{c.loads.Load(), c.unlocked.Load(), c.lookupErrors.Load(), c.storeFailures.Load()}
}

// get is the lookup of the variants that go on without the cache when it fails.
func (c *counts) get(ctx context.Context, v values, key string) (value string, found bool) {
	value, found, err := v.get(ctx, key)
	if err != nil {
		c.lookupErrors.Add(1)
	}
	return value, found
}

// set is the store of the variants that have no tokens. It is a failure that is nobody's who waits for the value.
func (c *counts) set(ctx context.Context, v values, log *slog.Logger, key, value string) {
	if err := v.set(ctx, key, value); err != nil {
		c.storeFailures.Add(1)
		log.Debug("not stored", "key", key, "err", err)
	}
}

func (g *grouped) Fetch(ctx context.Context, key string) (string, error) {
	if value, found := g.counts.get(ctx, g.values, key); found {
		return value, nil
	}
	result := g.group.DoChan(key, func() (any, error) {
		g.busy.Add(1)
		defer g.busy.Done()
		// Not by the ctx of the first caller, who may leave.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.opts.LoadTimeout)
		defer cancel()
		g.counts.loads.Add(1)
		g.counts.unlocked.Add(1)
		value, err := g.load(ctx, key, 0)
		if err == nil {
			g.counts.set(ctx, g.values, g.log, key, value)
		}
		return value, err
	})
	select {
	case r := <-result:
		value, _ := r.Val.(string)
		return value, r.Err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (g *grouped) Stats() Stats { return g.counts.read() }

func (g *grouped) Close(ctx context.Context) error { return waitFor(ctx, &g.busy) }

// waitFor waits for the loads that are running.
func waitFor(ctx context.Context, busy *sync.WaitGroup) error {
	done := make(chan struct{})
	go func() { busy.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("loads go on: %w", ctx.Err())
	}
}
