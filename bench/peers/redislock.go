package main

import (
	"context"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"
)

type redislockClient struct {
	rdb  *redis.Client
	c    *redislock.Client
	ttl  time.Duration
	opts *redislock.Options
}

func openRedislock(s settings) (locker, error) {
	rdb := goredis(s.Addrs[0], nil)
	return &redislockClient{rdb, redislock.New(rdb), s.TTL,
		&redislock.Options{RetryStrategy: redislock.LinearBackoff(s.Delay)}}, nil
}

// lock gives up after the ttl, for its ctx has no deadline; the loads call it again.
func (r *redislockClient) lock(ctx context.Context, key string) (held, error) {
	l, err := r.c.Obtain(ctx, key, r.ttl, r.opts)
	if err != nil {
		return nil, err
	}
	return redislockHeld{l}, nil
}

func (r *redislockClient) close() { _ = r.rdb.Close() }

type redislockHeld struct{ l *redislock.Lock }

func (h redislockHeld) release() error { return h.l.Release(context.Background()) }
