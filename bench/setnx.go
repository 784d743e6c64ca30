package main

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// setNXLoads is the least that processes can do over Redis to share a load: SET NX, and the one
// that has set it loads, stores and publishes; the others have subscribed long before. It is no
// lock. Nothing is fenced, refreshed or released, a process that dies or a notice that is lost
// leaves the others waiting, and nobody can leave before. So what it takes beyond the load is what
// this machine needs for so many goroutines in so many processes, and for two trips to Redis among
// them.
type setNXLoads struct {
	rdb *redis.Client
	sub *redis.PubSub

	mu     sync.Mutex // guards what follows
	told   map[string]chan struct{}
	closed chan struct{} // when nobody listens any more
}

const loadedChannel = "loaded"

func newSetNXLoads(ctx context.Context, url, prefix string) (*setNXLoads, error) {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	h := &setNXLoads{rdb: redis.NewClient(opts), told: map[string]chan struct{}{}, closed: make(chan struct{})}
	h.sub = h.rdb.Subscribe(ctx, prefix+loadedChannel)
	if _, err := h.sub.Receive(ctx); err != nil { // the confirmation
		h.sub.Close()
		h.rdb.Close()
		return nil, err
	}
	go h.listen()
	return h, nil
}

// listen ends when the subscription is closed.
func (h *setNXLoads) listen() {
	defer close(h.closed)
	for {
		m, err := h.sub.ReceiveMessage(context.Background())
		if err != nil {
			return
		}
		close(h.filled(m.Payload))
	}
}

// filled is closed when the load of key is published, which happens once.
func (h *setNXLoads) filled(key string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.told[key]
	if c == nil {
		c = make(chan struct{})
		h.told[key] = c
	}
	return c
}

// share has one of all processes load key. It says whether that is this one, which is to publish then.
func (h *setNXLoads) share(ctx context.Context, key, prefix string,
	load func(context.Context) error) (first bool, err error) {
	filled := h.filled(key)
	first, err = h.rdb.SetNX(ctx, prefix+key, "me", time.Minute).Result()
	switch {
	case err != nil:
		return false, err
	case first:
		return true, load(ctx)
	}
	select {
	case <-filled:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

func (h *setNXLoads) publish(ctx context.Context, key, prefix string) error {
	return h.rdb.Publish(ctx, prefix+loadedChannel, key).Err()
}

func (h *setNXLoads) close() {
	h.sub.Close()
	h.rdb.Close()
	<-h.closed
}
