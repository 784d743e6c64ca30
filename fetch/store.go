package fetch

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/flightlock/flightlock/internal/coalesce"
	"golang.org/x/sync/errgroup"
)

// Freshness is what a Store says of an entry.
type Freshness uint8

// The kinds of Freshness. Any other value counts as Miss.
const (
	Miss  Freshness = iota // there is no value: the caller waits for a load
	Stale                  // it may be served, and is refreshed in the background
	Fresh                  // it may be served
)

// Entry is what a Store has for a key; the zero Entry, a Miss without a stamp.
type Entry[V any] struct {
	Value  V
	Absent bool // it is known that there is no such value; Value is not used
	Fresh  Freshness
	// Stamp is new after every write and every invalidation. A Miss may have one, too: see Store.Reserve. ""
	// means: there is no entry, and nothing can be stored.
	Stamp string
	Age   time.Duration // of the value, for LoadFrom; 0: the Store does not say
}

// Store is where the values of a Fetcher are: package rediscache has them in Redis, and Plain makes one of
// two functions. Methods are called concurrently, and should honour their ctx. A KeyErrors is the error of
// its keys, any other one of all; one that is no timeout counts as an outage.
//
// Whoever changes the origin gives the entry a new stamp afterwards, with the new value or none. So no load
// that began before is stored.
type Store[V any] interface {
	// Get returns the entry of key. It is called on the goroutine of a Fetcher's Get, with its ctx.
	Get(ctx context.Context, key string) (Entry[V], error)
	// GetMany is Get for distinct keys, at most Options.MaxBatch. An absent key is a Miss without a stamp.
	GetMany(ctx context.Context, keys []string) (map[string]Entry[V], error)
	// Reserve is GetMany before a load. Where there is no entry, it makes one in the same atomic step, with a
	// stamp and no value (a Miss), that lasts for Options.LoadTimeout and TTL at least.
	Reserve(ctx context.Context, keys []string) (map[string]Entry[V], error)
	// Put stores each item with a new stamp, in one atomic step, if its entry has item.Stamp. Otherwise it
	// writes nothing, and the key is outdated. An item that is Absent need not be stored.
	Put(ctx context.Context, items map[string]Entry[V]) (outdated []string, err error)
}

// Plain makes a Store of two functions for one key, called for 16 at a time. It has no stamps: a load under
// way while the origin changes can bring the old value back, until that expires. That there is no value is
// not stored.
func Plain[V any](get func(ctx context.Context, key string) (v V, ok bool, err error),
	set func(ctx context.Context, key string, v V) error) Store[V] {
	return &plain[V]{get, set}
}

// A plain Store gives every entry this stamp: as far as it knows, nothing ever changes.
const plainStamp = "plain"

type plain[V any] struct {
	get func(ctx context.Context, key string) (V, bool, error)
	set func(ctx context.Context, key string, v V) error
}

func (p *plain[V]) Get(ctx context.Context, key string) (e Entry[V], err error) {
	v, ok, err := p.get(ctx, key)
	if err != nil {
		return e, err
	}
	if e.Stamp = plainStamp; ok {
		e.Value, e.Fresh = v, Fresh
	}
	return e, nil
}

func (p *plain[V]) GetMany(ctx context.Context, keys []string) (map[string]Entry[V], error) {
	return each(ctx, "Lookup", keys, p.Get)
}

func (p *plain[V]) Reserve(ctx context.Context, keys []string) (map[string]Entry[V], error) {
	return p.GetMany(ctx, keys)
}

func (p *plain[V]) Put(ctx context.Context, items map[string]Entry[V]) (outdated []string, err error) {
	keys := make([]string, 0, len(items))
	for key, e := range items {
		if !e.Absent {
			keys = append(keys, key)
		}
	}
	_, err = each(ctx, "Store", keys, func(ctx context.Context, key string) (struct{}, error) {
		return struct{}{}, p.set(ctx, key, items[key].Value)
	})
	return nil, err
}

// Loader gets values from the origin, for at most Options.MaxBatch distinct keys. A key that is not in its
// result does not exist. A KeyErrors is the error of its keys; any other error, and a panic, is everybody's.
// Its ctx ends after Options.LoadTimeout, not with that of a caller, and has the values of one of its
// callers'. Until a Loader that ignores this end returns, callers get an error.
type Loader[V any] func(ctx context.Context, keys []string) (map[string]V, error)

// Each makes a Loader of a function for one key, called for 16 at a time. ErrNotFound, or an error that
// matches it, means that there is no such value.
func Each[V any](load func(ctx context.Context, key string) (V, error)) Loader[V] {
	if load == nil {
		return nil
	}
	return func(ctx context.Context, keys []string) (map[string]V, error) {
		values, err := each(ctx, "Load", keys, load)
		some, _ := err.(KeyErrors) //nolint:errorlint // itself
		maps.DeleteFunc(some, func(_ string, err error) bool { return errors.Is(err, ErrNotFound) })
		if len(some) == 0 {
			return values, nil
		}
		return values, some
	}
}

// atOnce is how many keys each calls its function for at once.
const atOnce = 16

// each calls f for all keys, on goroutines of their own if there are many. Values without an error are in the
// result, errors in a KeyErrors; once ctx has ended, f is not called for those keys that are left. A panic is
// the error of its key, and so is Goexit on a goroutine of its own.
func each[T any](ctx context.Context, op string, keys []string,
	f func(ctx context.Context, key string) (T, error)) (
	map[string]T, error) {
	if len(keys) == 1 { // mostly
		v, err := f(ctx, keys[0])
		if err != nil {
			return map[string]T{}, KeyErrors{keys[0]: err}
		}
		return map[string]T{keys[0]: v}, nil
	}
	var group errgroup.Group
	group.SetLimit(atOnce)
	start := func(f func()) { group.Go(func() error { f(); return nil }) }
	calls, values, failed := make([]*coalesce.Call[T], len(keys)), make(map[string]T, len(keys)), KeyErrors{}
	for i, key := range keys {
		calls[i] = coalesce.Start(start, func() (v T, err error) {
			if err = ctx.Err(); err != nil {
				return v, err
			}
			return f(ctx, key)
		})
	}
	for i, key := range keys {
		if v, err, _ := result(calls[i], context.Background(), op, nil); err != nil {
			failed[key] = err
		} else {
			values[key] = v
		}
	}
	if len(failed) == 0 {
		return values, nil
	}
	return values, failed
}
