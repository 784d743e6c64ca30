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

func (v values) get(ctx context.Context, key string) (value string, found bool, err error) {
	value, err = v.rdb.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	return value, err == nil, err
}

// set is for the variants without tokens: the last one wins, also if it is the oldest.
func (v values) set(ctx context.Context, key, value string) error {
	return v.rdb.Set(ctx, key, value, v.fresh).Err()
}
