package rediscache

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/seam"
)

// Refresh loads keys now, also those whose values are fresh: see [fetch.Fetcher.Refresh]. Others get what is there
// meanwhile, in other processes for as long as Options.Local says. After a change use Invalidate or Set, which others
// cannot miss. It takes one round trip for up to MaxBatch keys besides that of their loads.
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

// Peek returns what Redis has for key, by one GET, and changes nothing: it loads nothing, however old the value is, and
// is not counted. It does not ask the local tier. fresh is Stale if a Get would begin to load it, EarlyRefresh aside,
// and Miss if a Get would wait for a load, which is no error. Errors: ErrNotFound if that is what Redis has; those of
// the server and of ctx; ErrInvalid for a bad key; ErrClosed.
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

// Expire makes the values of keys stale, which need not exist: it is an Invalidate after which the old value may still
// be served for Options.Stale, while a new one is loaded or if that fails. When it has returned without an error, no
// load that began earlier can be stored, and a Get that begins later and is served the old value begins a new load, as
// soon as no other process has the key's lock. If it fails, the keys are invalidated in the background; all else is as
// for Invalidate.
func (c *Cache[V]) Expire(ctx context.Context, keys ...string) error {
	if c.opts.Stale <= 0 { // nothing may be served: processes' clocks differ, so no value is left
		return c.Invalidate(ctx, keys...)
	}
	return c.replace(ctx, "expire", keys, func(some []string) map[string]error {
		return c.server.touch(ctx, expireScript, some, c.opts.Stale.Microseconds())
	})
}

// SetMany is Set for many values, in two round trips for up to 500 of them. Each is stored, or its entry
// invalidated, as by Set, whatever happens to the others. The error names the first key of each kind of failure.
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
