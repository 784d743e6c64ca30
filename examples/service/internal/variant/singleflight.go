package variant

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// withSingleflight has one load per key and process, by x/sync. Nothing keeps processes apart.
type withSingleflight struct{ env Env }

func newSingleflight(env Env) *withSingleflight { return &withSingleflight{env} }

func (s *withSingleflight) Ready(ctx context.Context) error { return s.env.Cache.Ping(ctx).Err() }

func (s *withSingleflight) Close(context.Context) error { return nil }

// Do runs fn without any lock.
func (s *withSingleflight) Do(ctx context.Context, _ string, _ time.Duration,
	fn func(context.Context, Lock) error) error {
	return fn(ctx, noLock{})
}

type noLock struct{}

func (noLock) Fence() int64 { return 0 }
func (noLock) Err() error   { return nil }

func (s *withSingleflight) NewCache(name string, load Load, opts CacheOptions) (Cache, error) {
	return &grouped{plain: plain{
		values: values{s.env.Cache, opts.Fresh}, load: load, opts: opts, log: s.env.Log.With("cache", name),
	}}, nil
}

// grouped is a cache in Redis behind a singleflight.Group.
type grouped struct {
	plain
	group singleflight.Group
	busy  sync.WaitGroup // loads
}

func (g *grouped) Fetch(ctx context.Context, key string) (string, error) {
	if value, found := g.get(ctx, key); found {
		return value, nil
	}
	result := g.group.DoChan(key, func() (any, error) {
		g.busy.Add(1)
		defer g.busy.Done()
		return g.fill(context.WithoutCancel(ctx), key, false) // the first caller may leave
	})
	select {
	case r := <-result:
		value, _ := r.Val.(string)
		return value, r.Err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (g *grouped) Close(ctx context.Context) error {
	done := make(chan struct{})
	go func() { g.busy.Wait(); close(done) }() // LoadTimeout ends it
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("loads go on: %w", ctx.Err())
	}
}
