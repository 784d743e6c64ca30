package variant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/prom"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// withFlightlock has one Client for the whole process: its goroutines share queues.
type withFlightlock struct {
	c   *flightlock.Client
	rdb *redis.Client
	log *slog.Logger
}

func newFlightlock(env Env) (Locker, error) {
	metrics, err := prom.New(env.Registerer)
	if err != nil {
		return nil, err
	}
	c, err := flightlock.Open(flightlock.Options{
		Logger: env.Log, Observers: []*flightlock.Observer{metrics}, NodeTimeout: env.NodeTimeout,
	}, env.Nodes...)
	if err != nil {
		return nil, err
	}
	return &withFlightlock{c: c, rdb: env.Cache, log: env.Log}, nil
}

func (f *withFlightlock) Ready(ctx context.Context) error { return f.c.Ready(ctx) }

func (f *withFlightlock) Close(ctx context.Context) error { return f.c.Close(ctx) }

// Do queues behind other holders. While Redis is down it fails at once, and its caller decides
// what to do: a request fails, the job and the leader try again.
func (f *withFlightlock) Do(ctx context.Context, key string, ttl time.Duration,
	fn func(context.Context, Lock) error) error {
	err := f.c.Do(ctx, key, ttl, flightlock.FailFast(nil), func(ctx context.Context, l *flightlock.Lock) error {
		return fn(ctx, l)
	})
	return translate(err)
}

// translate adds the errors of this package to those of flightlock.
func translate(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, flightlock.ErrLockLost):
		return fmt.Errorf("%w: %w", ErrLost, err)
	case errors.Is(err, flightlock.ErrNotAcquired), errors.Is(err, flightlock.ErrUnavailable),
		errors.Is(err, flightlock.ErrTooManyWaiters), errors.Is(err, flightlock.ErrClosed):
		return fmt.Errorf("%w: %w", ErrNoLock, err)
	}
	return err
}

// cached is a cache in Redis with one load per miss, over all processes.
type cached struct{ c *rediscache.Cache[string] }

func (f *withFlightlock) NewCache(name string, load Load, opts CacheOptions) (Cache, error) {
	c, err := rediscache.New(f.c, f.rdb, fetch.Each(load), rediscache.Options[string]{
		Name:        name,
		Fresh:       opts.Fresh,
		NotFoundFor: opts.Fresh,
		LockTTL:     5 * time.Second, // how long others wait when a process is killed in a load
		LoadTimeout: opts.LoadTimeout,
		MaxLoads:    opts.MaxLoads,
		OnError:     sampled(f.log.With("cache", name)),
	})
	if err != nil {
		return nil, err
	}
	return cached{c}, nil
}

func (c cached) Fetch(ctx context.Context, key string) (string, error) {
	value, err := c.c.Get(ctx, key)
	return value, translate(err)
}

// Invalidate waits for no lock. If the cache's server fails, the invalidation is repeated in the
// background until it succeeds.
func (c cached) Invalidate(ctx context.Context, keys ...string) error {
	return c.c.Invalidate(ctx, keys...)
}

func (c cached) Stats() Stats {
	s := c.c.Stats()
	return Stats{
		Loads: s.Loads, Unlocked: s.UnlockedLoads,
		LookupErrors: s.LookupErrors, StoreFailures: s.StoreFailures,
	}
}

func (c cached) Close(ctx context.Context) error { return c.c.Close(ctx) }

// sampled logs at most one failure per second, and how many it has omitted since the previous one.
// A Cache calls it on one goroutine, so it needs no mutex.
func sampled(log *slog.Logger) func(key, op string, err error) {
	var last time.Time
	var omitted int
	return func(key, op string, err error) {
		if time.Since(last) < time.Second {
			omitted++
			return
		}
		log.Warn("failed", "op", op, "key", key, "err", err, "omitted", omitted)
		last, omitted = time.Now(), 0
	}
}
