package variant

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// cacheTimeout bounds a lookup, with which every request begins, and a store, for which a shutdown
// waits. FetchOptions has a LookupTimeout for a Fetcher's own lookups only: those of its callers
// end with their ctx, and a store ends with the lock. If the timeout is too short, a process whose
// processors are busy takes its own delays for an outage of the cache, and loads without locks. A
// cache that hangs costs every request that much.
const cacheTimeout = 800 * time.Millisecond

func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cacheTimeout)
}

// values are strings in Redis, each with a ttl.
type values struct {
	rdb   *redis.Client
	fresh time.Duration
}

func (v values) get(ctx context.Context, key string) (value string, found bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	value, err = v.rdb.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	return value, err == nil, err
}

// set is for variants without tokens: the last write wins, even if its value is the oldest.
func (v values) set(ctx context.Context, key, value string) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return v.rdb.Set(ctx, key, value, v.fresh).Err()
}
