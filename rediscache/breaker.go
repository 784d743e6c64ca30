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
// From the first failure on, lookups wait no longer than the probe that is under way: when that has
// failed, all of them have. Otherwise those that began shortly before would hold up the callers that
// join their runs for another timeout.
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
	failed    int   // lookups in a row
	confirmed bool  // by a probe
	probe     probe // that is under way
}

// probe is a request that decides whether a server is down. The zero probe is none.
type probe struct {
	ends time.Time     // at the latest
	over chan struct{} // closed when its outcome is known
}

func newProbe(timeout time.Duration) probe {
	return probe{ends: time.Now().Add(timeout), over: make(chan struct{})}
}

// limit is ctx for a lookup that waits no longer than p.
func (p probe) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if p.over == nil {
		return ctx, func() {}
	}
	return context.WithDeadlineCause(ctx, p.ends, errTimeout)
}

// decides reports whether p has ended, and what has failed now was limited by it. Then p's outcome,
// for which it waits, says whether the server is down.
func (p probe) decides(ctx context.Context) bool {
	if p.over == nil || time.Now().Before(p.ends) {
		return false
	}
	select {
	case <-p.over:
		return true
	case <-ctx.Done():
		return false
	}
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

// lookup makes a lookup of key, unless its server is down.
func lookup[T any](ctx context.Context, b *breaker, key string, request func(ctx context.Context, key string) (T, error)) (v T, err error) {
	troubled := b.troubled.Load()
	limited, probe := ctx, probe{}
	if troubled {
		var down bool
		if probe, down = b.state(b.serverOf(ctx, key)); down {
			return v, errLeftAlone
		}
		var cancel context.CancelFunc
		limited, cancel = probe.limit(ctx)
		defer cancel()
	}
	v, err = request(limited, key)
	switch {
	case err != nil && b.isOutage(ctx, err):
		b.failed(ctx, key)
		if probe.decides(ctx) && b.isDown(ctx, key) {
			err = errLeftAlone
		}
	case err == nil && troubled:
		b.succeeded(b.serverOf(ctx, key))
	}
	return v, err
}

// lookupMany makes a lookup of many keys, except those whose servers are down. request returns what
// has failed for single keys. failed has these errors, and those of keys whose servers are down.
func lookupMany[T any](ctx context.Context, b *breaker, keys []string,
	request func(ctx context.Context, keys []string) ([]T, map[string]error, error)) (asked []string, values []T, failed map[string]error) {
	failed = map[string]error{}
	asked = keys
	troubled := b.troubled.Load()
	limited, one := ctx, probe{}
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
				one = of
			}
		}
		var cancel context.CancelFunc
		limited, cancel = one.limit(ctx)
		defer cancel()
	}
	if len(asked) == 0 {
		return nil, nil, failed
	}
	values, some, err := request(limited, asked)
	counted := map[string]bool{} // servers
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
		switch {
		case counted[server]:
		case why == nil:
			b.succeeded(server)
		case b.isOutage(ctx, why):
			b.failed(ctx, key)
		}
		counted[server] = true
	}
	if err != nil {
		if one.decides(ctx) {
			for _, key := range asked {
				if b.isDown(ctx, key) {
					failed[key] = errLeftAlone
				}
			}
		}
		return nil, nil, failed
	}
	return asked, values, failed
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

// timeout is that of a probe: half of a lookup's, since all callers wait for it, and no other request
// of this process is before it on its connection.
func (b *breaker) timeout() time.Duration { return b.s.lookups / 2 }

func (b *breaker) isCluster() bool {
	_, is := b.s.rdb.(*redis.ClusterClient)
	return is
}

// isDown reports whether the server that has key is down.
func (b *breaker) isDown(ctx context.Context, key string) bool {
	_, down := b.state(b.serverOf(ctx, key))
	return down
}

// state reports whether a server is down, and the probe that is under way.
func (b *breaker) state(server string) (_ probe, down bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil {
		return probe{}, false
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

func (b *breaker) failed(ctx context.Context, key string) {
	server := b.serverOf(ctx, key)
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.servers[server]
	if h == nil {
		h = &health{probe: newProbe(b.timeout())}
		if !b.tasks.Go(func() { b.probe(h, server, key) }) {
			return // the Cache is closed
		}
		b.servers[server] = h
		b.troubled.Store(true)
	}
	h.failed++
}

func (b *breaker) succeeded(server string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.servers, server)
	b.troubled.Store(len(b.servers) > 0)
}

// probe asks for the key until it is answered, a lookup is, or the Cache is closed. By then the key may
// have moved to another server: what matters is that lookups are answered again.
func (b *breaker) probe(h *health, server, key string) {
	for {
		_, err := do(context.Background(), b.s, b.timeout(), func(ctx context.Context) (int64, error) { return b.s.rdb.Exists(ctx, key).Result() })
		if !b.stillFails(h, server, err) {
			return
		}
		select {
		case <-time.After(probeEvery):
			b.mu.Lock()
			h.probe = newProbe(b.timeout())
			b.mu.Unlock()
		case <-b.closed:
			return
		}
	}
}

// stillFails notes the outcome of a probe, and reports whether another one is needed.
func (b *breaker) stillFails(h *health, server string, err error) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(h.probe.over)
	h.probe = probe{}
	if b.servers[server] != h { // a lookup has succeeded
		return false
	}
	if err != nil && b.isOutage(context.Background(), err) {
		h.confirmed = true
		return true
	}
	delete(b.servers, server)
	b.troubled.Store(len(b.servers) > 0)
	return false
}
