package rediscache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/group"
	"github.com/redis/go-redis/v9"
)

// breaker leaves a server alone that does not answer lookups: after maxFailed failures in a row they
// fail at once, so that callers wait for their load only, until a probe is answered. On a Cluster each
// master counts for itself.
//
// Lookups of a burst may also fail because this process is busy, or its connections are. Then the
// server is well, and loads without locks would make it worse. So the first failure begins probes, one
// request at a time, and a server is left alone only when one of them has failed, too.
//
// When a probe fails, so do the lookups that have begun while it was under way. Otherwise those that began
// shortly before its end would hold up the callers that join their runs for another timeout. As long as it has
// not failed, they have all of their time: where it is answered, their replies may be on their way as well.
//
// A hit reads troubled, and nothing else.
type breaker struct {
	s        *server
	tasks    *group.Group
	closed   <-chan struct{}
	troubled atomic.Bool // some server has failed last

	mu      sync.Mutex // guards servers and what they contain; no request is made under it
	servers map[string]*health
}

// health is one server's. It is removed with its first success.
type health struct {
	failed    int           // lookups in a row
	confirmed bool          // by a probe
	probe     chan struct{} // closed when the probe that is under way has failed; nil: none is
}

func (h *health) down() bool { return h != nil && h.confirmed && h.failed >= maxFailed }

const (
	maxFailed  = 2
	probeEvery = 250 * time.Millisecond
)

// errLeftAlone is no timeout: the caller goes on to its load at once, without a lock.
var errLeftAlone = fmt.Errorf("rediscache: the server does not answer; it is probed every %v", probeEvery)

// serverOf is the server that has key.
func (b *breaker) serverOf(ctx context.Context, key string) string {
	if cluster, ok := b.s.rdb.(*redis.ClusterClient); ok {
		if master, err := cluster.MasterForKey(ctx, key); err == nil {
			return master.Options().Addr
		}
	}
	return ""
}

// lookup makes a lookup of key, unless its server is down. request is a method, and not one of a certain
// server: that would be an allocation for each hit.
func lookup[T any](
	ctx context.Context, b *breaker, key string, request func(s *server, ctx context.Context, key string) (T, error),
) (v T, err error) {
	troubled := b.troubled.Load()
	var probe <-chan struct{}
	if troubled {
		var down bool
		if probe, down = b.state(b.serverOf(ctx, key)); down {
			return v, errLeftAlone
		}
	}
	if probe == nil {
		v, err = request(b.s, ctx, key)
	} else {
		v, err = untilFailed(probe, func() (T, error) { return request(b.s, ctx, key) })
	}
	switch {
	case err != nil && b.isOutage(ctx, err):
		if b.failed(ctx, key) {
			err = errLeftAlone
		}
	case err == nil && troubled:
		b.succeeded(b.serverOf(ctx, key))
	}
	return v, err
}

// untilFailed makes a request that fails when a probe does. It has a goroutine of its own, because a client
// reads a reply until the deadline of its ctx, even if that is canceled.
func untilFailed[T any](probe <-chan struct{}, request func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() { // ends with the request, which has its timeout
		v, err := request()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-probe:
		return result{}.v, errTimeout
	}
}

// lookupMany makes a lookup of many keys, except those whose servers are down. request returns what
// has failed for single keys. failed has these errors, and those of keys whose servers are down.
func lookupMany[T any](ctx context.Context, b *breaker, keys []string,
	request func(ctx context.Context, keys []string) ([]T, map[string]error, error),
) (asked []string, values []T, failed map[string]error) {
	failed = map[string]error{}
	asked = keys
	troubled := b.troubled.Load()
	var probe <-chan struct{}
	if troubled {
		asked = nil
		for _, key := range keys {
			of, down := b.state(b.serverOf(ctx, key))
			if down {
				failed[key] = errLeftAlone
				continue
			}
			asked = append(asked, key)
			if !b.isCluster() { // there, servers have probes of their own
				probe = of
			}
		}
	}
	if len(asked) == 0 {
		return nil, nil, failed
	}
	values, some, err := requestMany(ctx, probe, asked, request)
	downs := map[string]bool{} // servers that are counted, and whether they are down now
	for _, key := range asked {
		why := err
		if why == nil {
			why = some[key]
		}
		if why != nil {
			failed[key] = why
		}
		if why == nil && !troubled {
			continue
		}
		server := b.serverOf(ctx, key)
		down, counted := downs[server]
		outage := why != nil && b.isOutage(ctx, why)
		switch {
		case counted:
		case why == nil:
			b.succeeded(server)
		case outage:
			down = b.failed(ctx, key)
		}
		downs[server] = down
		if outage && down {
			failed[key] = errLeftAlone
		}
	}
	if err != nil {
		return nil, nil, failed
	}
	return asked, values, failed
}

// requestMany makes a request that fails when a probe does, if there is one.
func requestMany[T any](ctx context.Context, probe <-chan struct{}, keys []string,
	request func(ctx context.Context, keys []string) ([]T, map[string]error, error),
) ([]T, map[string]error, error) {
	if probe == nil {
		return request(ctx, keys)
	}
	type reply struct {
		values []T
		failed map[string]error
	}
	r, err := untilFailed(probe, func() (reply, error) {
		values, failed, err := request(ctx, keys)
		return reply{values, failed}, err
	})
	return r.values, r.failed, err
}

// isOutage reports whether err is the server's fault. The end of the caller's own ctx is not, nor is
// a pool without a free connection, nor a refusal of this command.
func (b *breaker) isOutage(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	var refused redis.Error
	if !errors.As(err, &refused) {
		return !errors.Is(err, redis.ErrClosed) && !errors.Is(err, redis.ErrPoolTimeout)
	}
	return redis.IsLoadingError(err) || redis.IsClusterDownError(err) || redis.IsMasterDownError(err)
}

func (b *breaker) isCluster() bool {
	_, is := b.s.rdb.(*redis.ClusterClient)
	return is
}

// state reports whether a server is down, and when the probe that is under way has failed; nil: none is.
func (b *breaker) state(server string) (probe <-chan struct{}, down bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil {
		return nil, false
	}
	return h.probe, h.down()
}

func (b *breaker) down() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range b.servers {
		if h.down() {
			n++
		}
	}
	return n
}

// failed counts a lookup that has failed, and reports whether the server is down now.
func (b *breaker) failed(ctx context.Context, key string) (down bool) {
	server := b.serverOf(ctx, key)
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil {
		h = &health{probe: make(chan struct{})}
		if !b.tasks.Go(func() { b.probe(h, server, key) }) {
			return false // the Cache is closed
		}
		b.servers[server] = h
		b.troubled.Store(true)
	}
	h.failed++
	return h.down()
}

func (b *breaker) succeeded(server string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.servers, server)
	b.troubled.Store(len(b.servers) > 0)
}

// probe asks for the key until it is answered, a lookup is, or the Cache is closed. By then the key may
// have moved to another server: what matters is that lookups are answered again.
//
// The first probe has half the time of a lookup, since callers wait for it. The others have all of it: a server that
// needs more than half is left alone for a while at most, and not for ever.
func (b *breaker) probe(h *health, server, key string) {
	exists := func(ctx context.Context) (int64, error) { return b.s.rdb.Exists(ctx, key).Result() }
	for timeout := b.s.lookups / 2; ; timeout = b.s.lookups {
		_, err := do(context.Background(), b.s, timeout, exists)
		if !b.stillFails(h, server, err) {
			return
		}
		select {
		case <-time.After(probeEvery):
		case <-b.closed:
			return
		}
		b.mu.Lock()
		h.probe = make(chan struct{})
		b.mu.Unlock()
	}
}

// stillFails notes the outcome of a probe, and reports whether another one is needed.
func (b *breaker) stillFails(h *health, server string, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	probe := h.probe
	h.probe = nil
	if b.servers[server] != h { // a lookup has succeeded
		return false
	}
	if err != nil && b.isOutage(context.Background(), err) {
		h.confirmed = true
		close(probe)
		return true
	}
	delete(b.servers, server)
	b.troubled.Store(len(b.servers) > 0)
	return false
}
