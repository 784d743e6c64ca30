package variant

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// values are strings in Redis, each for a time.
type values struct {
	rdb   *redis.Client
	fresh time.Duration
}

// cacheTimeout bounds a look into the cache, with which every request begins, and a write to it. A Fetcher's
// LookupTimeout is for its own looks only; those of its callers end with their ctx. Where it is too short, a process
// whose processors are busy takes its own delays for an outage of the cache, and loads without a lock; a hanging
// cache costs every request so long.
const cacheTimeout = 800 * time.Millisecond

func (v values) get(ctx context.Context, key string) (value string, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, cacheTimeout)
	defer cancel()
	value, err = v.rdb.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	return value, err == nil, err
}

// set is for the variants without tokens: the last one wins, also if it is the oldest.
func (v values) set(ctx context.Context, key, value string) error {
	ctx, cancel := context.WithTimeout(ctx, cacheTimeout)
	defer cancel()
	return v.rdb.Set(ctx, key, value, v.fresh).Err()
}
