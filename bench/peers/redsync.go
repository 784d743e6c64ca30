package main

import (
	"context"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	goredis9 "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

type redsyncClient struct {
	clients []*redis.Client
	rs      *redsync.Redsync
	opts    []redsync.Option
}

// openRedsync takes the defaults of both libraries.
func openRedsync(s settings) (locker, error) {
	return newRedsync(s.Addrs, nil, redsync.WithExpiry(s.TTL)), nil
}

// openFailFast takes what serves redsync best: the first quorum of answers decides, a deadline of a
// ctx bounds the socket, and a caller goes on until its ctx ends.
func openFailFast(s settings) (locker, error) {
	return newFailFast(s), nil
}

func newFailFast(s settings) *redsyncClient {
	return newRedsync(s.Addrs, func(o *redis.Options) { o.ContextTimeoutEnabled = true },
		redsync.WithExpiry(s.TTL), redsync.WithFailFast(true), redsync.WithTries(1<<30),
		redsync.WithRetryDelay(s.Delay))
}

func newRedsync(addrs []string, change func(*redis.Options), opts ...redsync.Option) *redsyncClient {
	r := &redsyncClient{opts: opts}
	var pools []syncredis.Pool
	for _, a := range addrs {
		c := goredis(a, change)
		r.clients = append(r.clients, c)
		pools = append(pools, goredisPool(c))
	}
	r.rs = redsync.New(pools...)
	return r
}

func goredisPool(c *redis.Client) syncredis.Pool { return goredis9.NewPool(c) }

func (r *redsyncClient) lock(ctx context.Context, key string) (held, error) {
	m := r.rs.NewMutex(key, r.opts...)
	if err := m.LockContext(ctx); err != nil {
		return nil, err
	}
	return redsyncHeld{m}, nil
}

func (r *redsyncClient) close() {
	for _, c := range r.clients {
		_ = c.Close()
	}
}

type redsyncHeld struct{ m *redsync.Mutex }

func (h redsyncHeld) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := h.m.UnlockContext(ctx)
	return err
}
