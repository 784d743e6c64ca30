package rediscache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/flightlock/flightlock"
)

// What a Cache is to its Fetcher: the functions of a flightlock.Source. Keys are those in Redis.

// loadKey is the ctx key of the load that a GetWith brings along.
type loadKey struct{ cache any }

// givenLoad is for one key: in a ctx it reaches Gets of others, too.
type givenLoad[V any] struct {
	key  string
	load func(ctx context.Context, key string) (V, error)
}

// values passes the load of GetWith on to the run, besides what the user wants there.
func (c *Cache[V]) values(caller context.Context) context.Context {
	var values context.Context
	if c.opts.Fetch.Values != nil {
		values = c.opts.Fetch.Values(caller)
	}
	given := caller.Value(loadKey{c})
	if given == nil {
		return values
	}
	if values == nil {
		values = context.Background()
	}
	return context.WithValue(values, loadKey{c}, given)
}

// lookup is the lookup of callers and waiting runs, one GET, or the one before a load.
func (c *Cache[V]) lookup(ctx context.Context, key string) (none flightlock.Found[item[V]], err error) {
	if flightlock.LoadFollows(ctx) {
		f, err := send(ctx, &c.breaker, key, (*server).getToLoad)
		if err != nil {
			return none, err
		}
		return c.decode(f.entry, f.now, true, c.guardedDecode), nil
	}
	x, err := send(ctx, &c.breaker, key, (*server).get)
	if err != nil {
		return none, err
	}
	return c.decode(x, c.server.now(), false, c.opts.Codec.Decode), nil
}

// decode is what an entry says at the server's time now. toLoad says that a load follows.
func (c *Cache[V]) decode(
	x stored, now int64, toLoad bool, value func(b []byte) (V, error),
) (f flightlock.Found[item[V]]) {
	if x.bytes == nil {
		return f
	}
	e, ok := parseEntry(x)
	f.Stamp = e.stamp
	if !ok {
		c.counts.undecodable.Add(1)
		return f
	}
	if e.kind == tombstone {
		return f
	}
	if !toLoad {
		now = c.server.notBefore(e.stamp, now)
	}
	if now >= e.expires {
		return f
	}
	f.Value.took, f.Value.brief = e.took, e.expires-now < c.opts.Local.Microseconds()
	if e.kind == absent {
		f.Value.absent = true
	} else {
		v, err := value(e.payload)
		if err != nil {
			c.counts.undecodable.Add(1)
			return flightlock.Found[item[V]]{Stamp: e.stamp}
		}
		f.Value.v = v
	}
	f.Fresh = flightlock.Fresh
	if now >= e.fresh || c.early(&e, now, toLoad) {
		f.Fresh = flightlock.Stale
	}
	return f
}

// farthest is how many times EarlyRefresh and its load's time before its end an entry may be loaded
// early: of random numbers with an exponential distribution, fewer than one in a hundred is more.
const farthest = 5

// early reports whether a fresh entry is to be loaded anew. A caller decides at random. Then the run
// that was begun because of that has to come to the same conclusion: it does if anybody might have
// decided so, and another process has not loaded meanwhile. An entry is not early as long as its load took: until
// then, runs that missed the key together with that load may come here.
func (c *Cache[V]) early(e *entry, now int64, toLoad bool) bool {
	if c.opts.EarlyRefresh <= 0 || e.kind == absent {
		return false
	}
	took := e.took.Microseconds()
	if made, ok := madeAt(e.stamp); ok && now-made < took {
		return false
	}
	factor := float64(farthest)
	if !toLoad {
		factor = min(rand.ExpFloat64(), farthest)
	}
	ahead := factor * c.opts.EarlyRefresh * float64(took)
	return float64(e.fresh-now) <= min(ahead, math.MaxInt64)
}

// load calls the user's load: the one that came with GetWith for this key, or the Cache's.
func (c *Cache[V]) load(ctx context.Context, full string) (x item[V], err error) {
	key, load := full[len(c.prefix):], c.loadOne
	if given, _ := ctx.Value(loadKey{c}).(*givenLoad[V]); given != nil {
		if given.key == full {
			load = given.load
		}
		ctx = context.WithValue(ctx, loadKey{c}, nil) // it is not for Gets inside this load
	}
	if load == nil {
		load = c.loadOneOfMany
	}
	began := time.Now()
	x.v, err = load(ctx, key)
	x.took = time.Since(began)
	if err != nil && c.opts.NotFoundFor > 0 && errors.Is(err, ErrNotFound) {
		x, err = item[V]{absent: true, took: x.took}, nil
	}
	if err == nil {
		x.brief = c.isBrief(x)
	}
	return x, err
}

// isBrief reports whether a value that was loaded is stored for less than it would be in the local tier, or not at all.
func (c *Cache[V]) isBrief(x item[V]) bool {
	switch {
	case c.tier == nil:
		return false
	case x.absent:
		return c.least(c.opts.NotFoundFor) < c.opts.Local
	case c.opts.FreshFor == nil:
		return c.least(c.opts.Fresh)+c.opts.Stale < c.opts.Local
	}
	fresh, err := guarded("FreshFor", func() (time.Duration, error) { return c.freshFor(x.v), nil })
	return err != nil || fresh <= 0 || c.least(fresh)+c.opts.Stale < c.opts.Local // encode reports the error
}

func (c *Cache[V]) freshFor(v V) time.Duration { return min(c.opts.FreshFor(v), longest) }

// loadOneOfMany loads one key with LoadMany.
func (c *Cache[V]) loadOneOfMany(ctx context.Context, key string) (v V, err error) {
	if c.opts.LoadMany == nil {
		return v, invalid("load", "nil", "this Get needs it, or Options.LoadMany")
	}
	values, err := c.opts.LoadMany(ctx, []string{key})
	var some flightlock.KeyErrors
	if errors.As(err, &some) { // it may have errors of other keys, or none
		err = some[key]
	}
	if v, ok := values[key]; ok || err != nil {
		return v, err
	}
	return v, ErrNotFound
}

// store stores a loaded value, if the entry has the stamp still.
func (c *Cache[V]) store(ctx context.Context, full string, x item[V], stamp string, _ *flightlock.Lock) error {
	w, err := c.toStore(x)
	if w == nil {
		return err
	}
	w.stamp = stamp
	stored, err := c.put(ctx, full, w)
	if err == nil && !stored {
		return flightlock.ErrOutdated
	}
	return err
}

// put stores an entry if it has the stamp still, unless its server is down.
func (c *Cache[V]) put(ctx context.Context, full string, w *writing) (stored bool, err error) {
	return send(ctx, &c.breaker, full, func(s *server, ctx context.Context, key string) (bool, error) {
		return s.put(ctx, key, w)
	})
}

// toStore is encode for a load. Where a value that is not to be stored was loaded behind an older one, that may be
// served no longer: each Get of it would load once more. Then a tombstone takes its place.
func (c *Cache[V]) toStore(x item[V]) (*writing, error) {
	w, err := c.encode(x)
	if w == nil && err == nil && (c.opts.Stale > 0 || c.opts.EarlyRefresh > 0) {
		w = &writing{kind: string(rune(tombstone)), expires: c.server.tombstone}
	}
	return w, err
}

// encode is what to write for x: nil if it is not to be stored.
func (c *Cache[V]) encode(x item[V]) (*writing, error) {
	if x.absent {
		d := c.jittered(c.opts.NotFoundFor)
		return &writing{kind: string(rune(absent)), fresh: d, expires: d, took: x.took}, nil
	}
	fresh := c.opts.Fresh
	if c.opts.FreshFor != nil {
		if fresh = c.freshFor(x.v); fresh <= 0 {
			return nil, nil
		}
	}
	payload, err := c.opts.Codec.Encode(x.v)
	if err != nil {
		return nil, fmt.Errorf("rediscache: Codec.Encode: %w", err)
	}
	if len(payload) > c.opts.MaxValue {
		c.counts.tooLong.Add(1)
		return nil, invalid("the value", fmt.Sprintf("%d bytes long", len(payload)),
			fmt.Sprintf("Options.MaxValue is %d", c.opts.MaxValue))
	}
	fresh = c.jittered(fresh)
	return &writing{
		kind: string(rune(present)), fresh: fresh, expires: fresh + c.opts.Stale, took: x.took, payload: payload,
	}, nil
}

// lookupMany is lookup for many keys.
func (c *Cache[V]) lookupMany(ctx context.Context, keys []string) (map[string]flightlock.Found[item[V]], error) {
	toLoad := flightlock.LoadFollows(ctx)
	request := func(ctx context.Context, keys []string) ([]found, map[string]error, error) {
		if toLoad {
			list, failed := c.server.getManyToLoad(ctx, keys)
			return list, failed, nil
		}
		entries, failed, err := c.server.getMany(ctx, keys)
		list, now := make([]found, len(entries)), c.server.now()
		for i, entry := range entries {
			list[i] = found{entry, now}
		}
		return list, failed, err
	}
	asked, list, failed := sendMany(ctx, &c.breaker, keys, request)
	values := make(map[string]flightlock.Found[item[V]], len(asked))
	for i, key := range asked {
		if failed[key] == nil {
			values[key] = c.decode(list[i].entry, list[i].now, toLoad, c.guardedDecode)
		}
	}
	if len(failed) > 0 {
		return values, flightlock.KeyErrors(failed)
	}
	return values, nil
}

// guardedDecode is Codec.Decode for several callers: a panic is an error like others, so that what cannot
// be decoded is replaced.
func (c *Cache[V]) guardedDecode(b []byte) (V, error) {
	return guarded("Lookup", func() (V, error) { return c.opts.Codec.Decode(b) })
}

// guarded calls code of the user's for one of many keys, or for a request. A panic is an error, and of that only.
func guarded[T any](op string, f func() (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &flightlock.PanicError{Op: op, Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}

// manyLoader is loadMany, or nil without a LoadMany.
func (c *Cache[V]) manyLoader() func(ctx context.Context, full []string) (map[string]item[V], error) {
	if c.opts.LoadMany == nil {
		return nil
	}
	return c.loadMany
}

// loadMany calls the user's LoadMany.
func (c *Cache[V]) loadMany(ctx context.Context, full []string) (map[string]item[V], error) {
	keys := make([]string, len(full))
	for i, key := range full {
		keys[i] = key[len(c.prefix):]
	}
	began := time.Now()
	values, err := c.opts.LoadMany(ctx, keys)
	took := time.Since(began)
	var some flightlock.KeyErrors
	if err != nil && !errors.As(err, &some) {
		return nil, err
	}
	items, failed := make(map[string]item[V], len(keys)), flightlock.KeyErrors{}
	for _, name := range full { // and not keys, which LoadMany may have sorted
		key := name[len(c.prefix):]
		v, there := values[key]
		why := some[key]
		if why == nil && !there {
			why = ErrNotFound
		}
		x := item[V]{v: v, took: took}
		switch {
		case why == nil:
		case c.opts.NotFoundFor > 0 && errors.Is(why, ErrNotFound):
			x = item[V]{absent: true, took: took}
		default:
			failed[name] = why
			continue
		}
		x.brief = c.isBrief(x)
		items[name] = x
	}
	if len(failed) > 0 {
		return items, failed
	}
	return items, nil
}

// storeMany is store for many keys.
func (c *Cache[V]) storeMany(
	ctx context.Context, items map[string]item[V], stamps map[string]string, _ map[string]*flightlock.Lock,
) error {
	var keys []string
	ws, failed := map[string]*writing{}, flightlock.KeyErrors{}
	for key, x := range items {
		w, err := guarded("Store", func() (*writing, error) { return c.toStore(x) })
		if w == nil {
			if err != nil {
				failed[key] = err
			}
			continue
		}
		w.stamp = stamps[key]
		keys, ws[key] = append(keys, key), w
	}
	request := func(ctx context.Context, keys []string) ([]bool, map[string]error, error) {
		stored, failed := c.server.putMany(ctx, keys, ws)
		return stored, failed, nil
	}
	sent, stored, notStored := sendMany(ctx, &c.breaker, keys, request)
	maps.Copy(failed, notStored)
	for i, key := range sent {
		if notStored[key] == nil && !stored[i] {
			failed[key] = flightlock.ErrOutdated
		}
	}
	if len(failed) > 0 {
		return failed
	}
	return nil
}
