package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// cache is the cache of (a). It knows only whether a value is there.
//
// In one process it is a map: then the figures are those of the lock, for 4,000 callers who look
// twice into a Redis server would mostly measure that. Processes need one that they share: then it
// is a key on the first node, or, for the same reason, a word of memory that they share.
type cache interface {
	lookup(ctx context.Context, key string) (bool, error)
	store(ctx context.Context, key string) error
	close() error
}

// sharedMemory is the url of the cache that processes have in the register.
const sharedMemory = "shared memory"

func newCache(url, prefix string, reg *register) (cache, error) {
	switch url {
	case sharedMemory:
		return sharedCache{reg}, nil
	case "":
		return new(mapCache), nil
	}
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	opts.PoolTimeout = 30 * time.Second // a thousand callers queue for a few connections
	return redisCache{redis.NewClient(opts), prefix + "value:"}, nil
}

// sharedCache has one value. The register is reset before each job, and so is that.
type sharedCache struct{ reg *register }

func (s sharedCache) lookup(context.Context, string) (bool, error) {
	return s.reg.words[regValue].Load() == 1, nil
}

func (s sharedCache) store(context.Context, string) error {
	s.reg.words[regValue].Store(1)
	return nil
}

func (s sharedCache) close() error { return nil }

type mapCache struct{ values sync.Map }

func (m *mapCache) lookup(_ context.Context, key string) (bool, error) {
	_, ok := m.values.Load(key)
	return ok, nil
}

func (m *mapCache) store(_ context.Context, key string) error {
	m.values.Store(key, true)
	return nil
}

func (m *mapCache) close() error { return nil }

type redisCache struct {
	c      *redis.Client
	prefix string
}

func (r redisCache) lookup(ctx context.Context, key string) (bool, error) {
	err := r.c.Get(ctx, r.prefix+key).Err()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return err == nil, err
}

// store leaves a value that goes away by itself, should the clean-up not reach the server.
func (r redisCache) store(ctx context.Context, key string) error {
	return r.c.Set(ctx, r.prefix+key, "value", time.Minute).Err()
}

func (r redisCache) close() error { return r.c.Close() }
