package rediscache

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/seam"
)

// Refresh loads keys now, fresh or not: see fetch.Fetcher.Refresh. Others get what is there meanwhile. After
// a change use Invalidate or Set.
func (c *Cache[V]) Refresh(ctx context.Context, keys ...string) error {
	if c.loader == nil {
		return errNoLoad
	}
	if err := c.check(keys...); err != nil {
		return err
	}
	err := c.fetcher.Refresh(ctx, keys...)
	for _, key := range keys {
		c.tier.Remove(key)
	}
	return err
}

// Mark is of fetch.Marker.
func (s store[V]) Mark(ctx context.Context, keys []string) error {
	return keyErrors(s.c.server.touch(ctx, markScript, keys))
}

// Peek returns what Redis has for key. It loads and changes nothing, is not counted, and does not ask the
// local tier. fresh is Stale if a Get would begin a load, and Miss, which is no error, if it would wait for
// one. Errors: ErrNotFound; the server's; ctx's; ErrInvalid; ErrClosed.
func (c *Cache[V]) Peek(ctx context.Context, key string) (v V, fresh fetch.Freshness, err error) {
	if err := c.check(key); err != nil {
		return v, fetch.Miss, err
	}
	entry, err := c.server.get(ctx, key)
	if err != nil {
		return v, fetch.Miss, ofCaller(ctx, within(err))
	}
	e := c.decode(key, read{entry: entry, exact: true}, c.opts.Codec.Decode)
	if e.Absent {
		return v, e.Fresh, ErrNotFound
	}
	if e.Fresh == fetch.Miss { // Copy is for values that a codec has made
		return v, fetch.Miss, nil
	}
	return c.opts.Copy(e.Value.v), e.Fresh, nil
}

// Expire makes the values of keys stale, which need not exist: the old value may be served for Options.Stale
// more, while a new one is loaded or if that fails. When it has returned nil, no load that began earlier is
// stored, and a Get that is served the old value begins a new load, unless another process loads. All else is
// as for Invalidate.
func (c *Cache[V]) Expire(ctx context.Context, keys ...string) error {
	if c.opts.Stale <= 0 { // nothing may be served: processes' clocks differ, so no value is left
		return c.Invalidate(ctx, keys...)
	}
	return c.replace(ctx, "expire", keys, func(some []string) map[string]error {
		return c.server.touch(ctx, expireScript, some, c.opts.Stale.Microseconds())
	})
}

// SetMany is Set for many values, in two round trips per 500 of them. Each is stored or invalidated by
// itself. The error names one key per kind of failure.
func (c *Cache[V]) SetMany(ctx context.Context, values map[string]V) error {
	keys := slices.Sorted(maps.Keys(values))
	if err := c.check(keys...); err != nil {
		return err
	}
	failed, bad := map[string]error{}, map[string]error{}
	var without []string
	for some := range slices.Chunk(keys, maxPipeline) {
		ws := make(map[string]*writing, len(some))
		for _, key := range some {
			w, err := guarded("Set", func() (*writing, error) { return c.encode(key, item[V]{v: values[key]}) })
			if err != nil {
				bad[key] = err
			}
			if w != nil {
				ws[key] = w
			}
		}
		stored, notSent := c.set(ctx, ws)
		maps.Copy(failed, notSent)
		for _, key := range some {
			c.tier.Remove(key)
			if !stored[key] && failed[key] == nil {
				without = append(without, key)
			}
		}
	}
	return errors.Join(c.someFailed(ctx, "set", bad, "it is invalidated"),
		c.repeat(ctx, "set", failed), c.Invalidate(ctx, without...))
}

// withOld is ctx for a load by fetch.LoadFrom, which gets what it replaces in terms of its own.
func withOld[V any](ctx context.Context) context.Context {
	items, _ := ctx.Value(seam.OfOld{}).(map[string]fetch.Entry[item[V]])
	if len(items) == 0 { // mostly
		return ctx
	}
	values := make(map[string]fetch.Entry[V], len(items))
	for key, e := range items {
		values[key] = fetch.Entry[V]{Value: e.Value.v, Fresh: e.Fresh, Stamp: e.Stamp, Age: e.Age}
	}
	return context.WithValue(ctx, seam.OfOld{}, values)
}
