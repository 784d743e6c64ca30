package rediscache

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/seam"
)

// store is a Cache as its Fetcher sees it.
type store[V any] struct{ c *Cache[V] }

// Count adds what the Cache counts besides its Fetcher, for the metrics.
func (s store[V]) Count(x *seam.Counts) {
	c := s.c
	repeating, dropped := c.repeats.count()
	x.Cached = true
	x.LocalHits, x.Undecodable, x.TooLong = c.counts.local.Load(), c.counts.undecodable.Load(),
		c.counts.tooLong.Load()
	x.Repeating, x.Dropped, x.Down = int64(repeating), dropped, c.server.down()
	if c.tier.Hears() {
		x.Hearing = 1
	}
}

// Get is one GET, of a caller or a run that waits.
func (s store[V]) Get(ctx context.Context, key string) (none fetch.Entry[item[V]], err error) {
	entry, err := s.c.server.get(ctx, key)
	if err != nil {
		return none, err
	}
	return s.c.decode(key, read{entry: entry}, s.c.opts.Codec.Decode), nil
}

// GetMany is Get for many keys.
func (s store[V]) GetMany(ctx context.Context, keys []string) (map[string]fetch.Entry[item[V]], error) {
	found, failed := s.c.server.getMany(ctx, keys)
	return s.c.decodeAll(found), keyErrors(failed)
}

// Reserve is the lookup before a load.
func (s store[V]) Reserve(ctx context.Context, keys []string) (map[string]fetch.Entry[item[V]], error) {
	found, failed := s.c.server.reserve(ctx, keys)
	return s.c.decodeAll(found), keyErrors(failed)
}

// Put stores what was loaded, where the entry has its stamp still.
func (s store[V]) Put(ctx context.Context,
	items map[string]fetch.Entry[item[V]]) (outdated []string, err error) {
	c, ws, failed := s.c, make(map[string]*writing, len(items)), map[string]error{}
	for key, e := range items {
		w, err := guarded("Store", func() (*writing, error) { return c.toStore(key, e) })
		switch {
		case err != nil:
			failed[key] = err
		case w != nil:
			w.stamp = e.Stamp
			ws[key] = w
		}
	}
	put, notPut := c.put(ctx, ws)
	maps.Copy(failed, notPut)
	for key := range ws {
		if !put[key] && failed[key] == nil {
			outdated = append(outdated, key)
		}
	}
	return outdated, keyErrors(failed)
}

// put stores what has its stamp still, after it was added to its tags. What is neither stored nor failed is
// outdated.
func (c *Cache[V]) put(ctx context.Context, ws map[string]*writing) (
	stored map[string]bool, failed map[string]error) {
	outdated, failed := c.tags.add(ctx, ws)
	ws = maps.Clone(ws)
	maps.DeleteFunc(ws, func(key string, _ *writing) bool { return outdated[key] || failed[key] != nil })
	stored, notPut := c.server.put(ctx, ws)
	maps.Copy(failed, notPut)
	return stored, failed
}

func keyErrors(failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	return fetch.KeyErrors(failed)
}

// decodeAll is decode for many keys, or for several callers: a panic of Codec is an error like others, so
// that what cannot be decoded is replaced.
func (c *Cache[V]) decodeAll(found map[string]read) map[string]fetch.Entry[item[V]] {
	entries := make(map[string]fetch.Entry[item[V]], len(found))
	value := func(b []byte) (V, error) {
		return guarded("Lookup", func() (V, error) { return c.opts.Codec.Decode(b) })
	}
	for key, x := range found {
		entries[key] = c.decode(key, x, value)
	}
	return entries
}

// decode is what the entry of key says at its server's time. A reply that says the time is to a run that is
// about to load: what has just been stored elsewhere is fresh to it, however long the lookup has taken.
func (c *Cache[V]) decode(key string, x read, value func(b []byte) (V, error)) (f fetch.Entry[item[V]]) {
	if x.entry == "" {
		return f
	}
	e, ok := parseEntry(x.entry)
	toLoad := x.now != 0
	if f.Stamp = e.stamp; c.opts.Tags != nil && !toLoad {
		f.Stamp = "" // see tags
	}
	if !ok {
		c.counts.undecodable.Add(1)
		return f
	}
	if e.kind == tombstone {
		return f
	}
	now := x.now
	if !toLoad {
		now = c.server.of(key).clock.now(e.stamp)
	}
	if now >= e.expires {
		return f
	}
	f.Value.took, f.Value.size = e.took, len(key)+len(x.entry)
	f.Value.keep = inTier(time.Duration(e.fresh-now)*time.Microsecond,
		time.Duration(e.expires-now)*time.Microsecond)
	if f.Absent = e.kind == absent; !f.Absent {
		v, err := value(e.payload)
		if err != nil {
			c.counts.undecodable.Add(1)
			return fetch.Entry[item[V]]{Stamp: f.Stamp}
		}
		f.Value.v = v
	}
	f.Fresh = fetch.Fresh
	if now >= e.fresh || toLoad && e.kind == marked || !x.exact && c.early(&e, now, toLoad) {
		f.Fresh = fetch.Stale
	}
	if made, ok := madeAt(e.stamp); ok && toLoad {
		f.Age = time.Duration(now-made) * time.Microsecond
	}
	return f
}

// farthest is how many times EarlyRefresh and its load's time before its end an entry may be loaded early: of
// random numbers with an exponential distribution, fewer than one in a hundred is more.
const farthest = 5

// early reports whether a fresh entry is to be loaded anew. A caller decides at random. Then the run that was
// begun because of that has to come to the same conclusion: it does if anybody might have decided so, and
// another process has not loaded meanwhile. An entry is not early as long as its load took: until then, runs
// that missed the key together with that load may come here.
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
	return float64(e.fresh-now) <= factor*c.opts.EarlyRefresh*float64(took)
}

// givenLoad is the load that a GetWith brings along, for one key: in a ctx it reaches Gets of others, too.
type givenLoad[V any] struct {
	cache *Cache[V]
	key   string
	load  func(ctx context.Context, key string) (V, error)
}

// load calls the user's load: the one that came with GetWith for this key, or the Cache's.
func (c *Cache[V]) load(ctx context.Context, keys []string) (map[string]item[V], error) {
	load := c.loader
	if given, _ := ctx.Value(seam.OfLoad{}).(*givenLoad[V]); given != nil && given.cache == c {
		if len(keys) == 1 && keys[0] == given.key {
			load = fetch.Each(given.load)
		}
		ctx = context.WithValue(ctx, seam.OfLoad{}, nil) // it is not for Gets inside this load
	}
	if load == nil {
		return nil, errNoLoad
	}
	generation, began := c.generation(ctx), time.Now()
	values, err := load(withOld[V](ctx), keys)
	took := time.Since(began)
	items := make(map[string]item[V], len(values))
	for key, v := range values {
		items[key] = item[V]{v: v, took: took, keep: c.keepLoaded(v), generation: generation}
	}
	return items, err
}

// inTier is how long a value that was found may be in the local tier: as long as it is fresh, for nobody
// there begins to load a new one. A stale one is there for a second at most, or until it expires.
func inTier(fresh, expires time.Duration) time.Duration { return max(fresh, min(expires, time.Second)) }

// keepLoaded is how long a value that was loaded may be in the local tier: for a second, if it is stored, for
// until then the server has nothing to tell of. The next lookup brings it for longer, and with its size, if
// the tier has to know that.
func (c *Cache[V]) keepLoaded(v V) time.Duration {
	if c.tier == nil || c.opts.MaxLocal < math.MaxInt {
		return 0
	}
	fresh, err := guarded("FreshFor", func() (time.Duration, error) { return c.freshFor(v), nil })
	if err != nil || fresh <= 0 { // encode reports the error
		return 0
	}
	return min(c.shortened(fresh, 1)+c.opts.Stale, time.Second)
}

func (c *Cache[V]) freshFor(v V) time.Duration {
	if c.opts.FreshFor == nil {
		return c.opts.Fresh
	}
	return min(c.opts.FreshFor(v), longest)
}

// toStore is what a load writes. Where nothing is to be stored behind an older value, that may be served no
// longer: each Get of it would load once more. Then a tombstone takes its place.
func (c *Cache[V]) toStore(key string, x fetch.Entry[item[V]]) (w *writing, err error) {
	switch {
	case !x.Absent:
		w, err = c.encode(key, x.Value)
	case c.opts.NotFoundFor > 0:
		d := c.shortened(c.opts.NotFoundFor, rand.Float64())
		return &writing{kind: absent, fresh: d, expires: d}, nil
	}
	if w == nil && err == nil && (c.opts.Stale > 0 || c.opts.EarlyRefresh > 0) {
		w = &writing{kind: tombstone, expires: c.server.tombstone}
	}
	return w, err
}

// encode is what to write for a value: nil if it is not to be stored.
func (c *Cache[V]) encode(key string, x item[V]) (*writing, error) {
	fresh := c.freshFor(x.v)
	if fresh <= 0 {
		return nil, nil
	}
	payload, err := c.opts.Codec.Encode(x.v)
	if err != nil {
		return nil, fmt.Errorf("flightlock: Codec.Encode: %w", err)
	}
	if len(payload) > c.opts.MaxValue {
		c.counts.tooLong.Add(1)
		return nil, invalid("the value", fmt.Sprintf("%d bytes long", len(payload)),
			fmt.Sprintf("Options.MaxValue is %d", c.opts.MaxValue))
	}
	tags, err := c.tagsOf(key, x.v)
	if err != nil {
		return nil, err
	}
	fresh = c.shortened(fresh, rand.Float64())
	return &writing{
		kind: present, fresh: fresh, expires: fresh + c.opts.Stale, took: x.took, payload: payload,
		tags: tags, generation: x.generation,
	}, nil
}

// guarded calls code of the user's for one of many keys, or for a request. A panic is an error, and of that
// only.
func guarded[T any](op string, f func() (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &flightlock.PanicError{Op: op, Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}
