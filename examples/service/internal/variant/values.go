package variant

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// cacheTimeout bounds a lookup, with which every request begins, and a store. A cache that hangs
// costs every request that much.
const cacheTimeout = 800 * time.Millisecond

func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cacheTimeout)
}

// values are strings in Redis, each with a ttl: what the variants without flightlock have.
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

func (v values) delete(ctx context.Context, keys ...string) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	return v.rdb.Del(ctx, keys...).Err()
}
