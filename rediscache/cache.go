package rediscache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/hot"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// ErrNotFound is fetch.ErrNotFound, the error of a Get for what does not exist.
var ErrNotFound = fetch.ErrNotFound

// Cache is a cache of values in Redis. It is safe for concurrent use.
type Cache[V any] struct {
	opts     Options[V]
	client   seam.Client
	loader   fetch.Loader[V] // nil: only GetWith
	server   *server
	tags     tags // empty without Options.Tags
	fetcher  *fetch.Fetcher[item[V]]
	repeats  repeats
	tier     *hot.Tier[item[V]] // nil: off
	hearing  *hearing           // of changes, for the tier; nil: it keeps nothing for so long
	finished atomic.Bool        // Close was called

	counts struct{ local, undecodable, tooLong atomic.Uint64 }
}

// item is a value on its way between an entry, a load and the callers.
type item[V any] struct {
	v    V
	took time.Duration // the load
	keep time.Duration // how long it may be in the local tier
	size int           // there; what was loaded does not know its size

	generation int64 // in which the load began: see tags
}

// Stats are counters since New, and gauges.
type Stats struct {
	fetch.Stats

	LocalHits   uint64 // Gets served from the local tier, which fetch.Stats does not count
	Undecodable uint64 // values found that could not be decoded, or were no entry of this package
	TooLong     uint64 // values not stored because of MaxValue
	Repeating   int64  // keys whose invalidation has failed and is being repeated
	Dropped     uint64 // invalidations that were given up, because too many were being repeated
	Down        int64  // servers of entries that do not answer, and are only probed
	Hearing     bool   // of changes, so that the local tier keeps values for longer than 1s: see Options.Local
}

// New makes a Cache of values in rdb, which load gets under locks of c; a nil load is for GetWith only. It
// sends nothing yet. c and rdb may use the same servers if c has a KeyPrefix. c's Close closes the Cache,
// too; close rdb after it. A bad option is an ErrInvalid that names the field; after c.Close the error is
// ErrClosed.
//
// rdb is a client of a server, a Sentinel-managed master or a Cluster, without ReplicaOnly. ReadOnly,
// RouteByLatency, RouteRandomly and a *redis.Ring are ErrInvalid. Set ContextTimeoutEnabled, or each request
// needs a goroutine, and the timeouts of docs/operations.md. Callers make at most twice as many lookups at
// once as its PoolSize.
func New[V any](c *flightlock.Client, rdb redis.UniversalClient, load fetch.Loader[V], opts Options[V],
) (*Cache[V], error) {
	if c == nil {
		return nil, invalid("c", "nil", "a Cache locks by a Client")
	}
	inside := seam.Of(c)
	if inside == nil {
		return nil, invalid("c", "not made by New or Open", "a Cache locks by a Client")
	}
	opts, err := opts.validated(inside)
	if err := cmp.Or(checkServer(rdb, opts.Local), err); err != nil {
		return nil, err
	}
	x := &Cache[V]{opts: opts, client: inside, loader: load}
	x.server = newServer(rdb, opts.prefix(), opts.LookupTimeout, opts.tombstoneTime())
	if opts.Tags != nil {
		x.tags.server = newServer(rdb, tagPrefix(opts.prefix()), opts.LookupTimeout, opts.tombstoneTime())
	}
	if opts.Local > 0 {
		x.tier = hot.New[item[V]](opts.Local, opts.LocalKeys, opts.MaxLocal)
	}
	if opts.Local > time.Second {
		x.hearing = newHearing(x.server, x.tier, inside.Log)
	}
	x.repeats = repeats{s: x.server, forget: x.tier.Remove, keys: map[string]bool{}}
	if x.fetcher, err = fetch.New(c, fetch.Store[item[V]](store[V]{x}), x.load, opts.fetch()); err != nil {
		return nil, err
	}
	if !inside.Attach(x, x.Close) {
		return nil, errors.Join(fmt.Errorf("flightlock: the Client is %w", flightlock.ErrClosed),
			x.fetcher.Close(context.Background()))
	}
	return x, nil
}

// Key returns the Redis key of the entry of key.
func (c *Cache[V]) Key(key string) string { return c.server.prefix + key }

// check is the error of a call for these keys.
func (c *Cache[V]) check(keys ...string) error {
	for _, key := range keys {
		if err := c.checkKey(key); err != nil {
			return err
		}
	}
	if c.finished.Load() {
		return errClosed
	}
	return nil
}

func (c *Cache[V]) checkKey(key string) error {
	prefix, locks := c.server.prefix, c.client.KeyPrefix()
	switch {
	case key == "":
		return invalid("key", "empty", "an entry needs a name")
	case locks != "" && node.StartsWith(prefix, key, locks):
		return invalid("key", strconv.Quote(key),
			fmt.Sprintf("an entry that begins with %q may be at the key of a lock", locks))
	case node.StartsWith(prefix, key, node.Reserved):
		return invalid("key", strconv.Quote(key),
			fmt.Sprintf("keys that begin with %q are reserved for flightlock", node.Reserved))
	case c.opts.Version == "" && isVersion(key) && strings.IndexByte(key, ':') >= 0:
		return invalid("key", strconv.Quote(key), "its entry would be that of a Cache with an Options.Version")
	case len(prefix)+len(key) > longestKey:
		return invalid("key", fmt.Sprintf("%d bytes long", len(prefix)+len(key)),
			fmt.Sprintf("%d is the limit, with Name and Version", longestKey))
	}
	return nil
}

// Get returns the value of key: the one in Redis, or the one that load returns, once for all callers in all
// processes. They share it, and must not modify it, unless Options.Copy is set. A stale value is returned at
// once and refreshed in the background. If the server of the entry cannot be reached, the value is loaded
// (see FailClosed).
//
// ctx limits only this caller's wait. Errors: those of fetch.Fetcher.Get; ErrInvalid for a key that is empty,
// longer than 4,096 bytes with Name and Version, or could be that of a lock or another Version.
func (c *Cache[V]) Get(ctx context.Context, key string) (V, error) {
	if c.loader == nil {
		var none V
		return none, errNoLoad
	}
	return c.get(ctx, key)
}

// GetWith is Get with a load of its own, for values whose load needs more than the key. If others load the
// key already, theirs is used. All who wait for the key share the outcome, also an error or ErrNotFound. load
// may run after its caller has left, so it must not use what ends with the request.
func (c *Cache[V]) GetWith(
	ctx context.Context, key string, load func(ctx context.Context, key string) (V, error),
) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil", "GetWith needs it")
	}
	return c.get(context.WithValue(ctx, seam.OfLoad{}, &givenLoad[V]{c, key, load}), key)
}

// GetMany returns what Get would for each key, by one MGET (on a Cluster a pipeline) per MaxBatch of them.
// What is missing is loaded together. Keys that do not exist are absent from the result. The error is a
// *fetch.ManyError for keys that failed; ErrClosed; ErrInvalid without a load.
func (c *Cache[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values, failed := make(map[string]V, len(keys)), map[string]error{}
	if c.loader == nil {
		return values, errNoLoad
	}
	if c.finished.Load() {
		return values, errClosed
	}
	wanted, readings := make([]string, 0, len(keys)), make(map[string]hot.Reading, len(keys))
	for _, key := range keys {
		if err := c.checkKey(key); err != nil {
			failed[key] = err
			continue
		}
		if _, duplicate := readings[key]; duplicate {
			continue
		}
		x, reading := c.tier.Get(key)
		if readings[key] = reading; x != nil {
			c.counts.local.Add(1)
			values[key] = c.opts.Copy(x.v)
		} else {
			wanted = append(wanted, key)
		}
	}
	found, err := c.fetcher.GetMany(ctx, wanted)
	for key, x := range found {
		values[key] = c.kept(key, x, readings[key])
	}
	var many *fetch.ManyError
	switch {
	case errors.As(err, &many):
		maps.Copy(failed, many.Errors)
	case err != nil:
		return values, err
	}
	if len(failed) > 0 {
		return values, &fetch.ManyError{Errors: failed}
	}
	return values, nil
}

func (c *Cache[V]) get(ctx context.Context, key string) (v V, err error) {
	if err := c.check(key); err != nil {
		return v, err
	}
	near, reading := c.tier.Get(key)
	if near != nil {
		c.counts.local.Add(1)
		return c.opts.Copy(near.v), nil
	}
	x, err := c.fetcher.Get(ctx, key)
	if err != nil {
		return v, err
	}
	return c.kept(key, x, reading), nil
}

// kept puts a value into the tier in this process if it may be served from there. It returns that of one
// caller.
func (c *Cache[V]) kept(key string, x item[V], reading hot.Reading) V {
	if x.keep > 0 {
		if c.hearing != nil {
			c.hearing.start()
		}
		c.tier.Put(key, x, reading, x.keep, x.size)
	}
	return c.opts.Copy(x.v)
}

// Set stores a value that the caller knows to be current: call it after the commit that changed the origin.
// If something else changes the entry at the same time, Set invalidates it, because nothing says which value
// is newer. Of two Sets one after the other, the one that reaches the server last counts: use Invalidate
// where changes of a value do not exclude each other.
//
// It takes two round trips, within LookupTimeout. If it fails, the entry is invalidated in the background:
// see Invalidate. Errors: the server's, ctx's and Codec's; ErrClosed; ErrInvalid, also for a value longer
// than MaxValue.
func (c *Cache[V]) Set(ctx context.Context, key string, v V) error {
	return c.SetMany(ctx, map[string]V{key: v})
}

// set replaces the entries that nothing changes meanwhile. A plain SET would be shorter, but the client may
// send it twice, and the server execute the first one late: after an invalidation.
func (c *Cache[V]) set(ctx context.Context,
	ws map[string]*writing) (stored map[string]bool, failed map[string]error) {
	generation := c.generation(ctx)
	found, failed := c.server.reserve(ctx, slices.Collect(maps.Keys(ws)))
	reserved := make(map[string]*writing, len(found))
	for key, x := range found {
		e, _ := parseEntry(x.entry)
		w := ws[key]
		w.stamp, w.took = e.stamp, e.took // else EarlyRefresh would not know how long a load takes
		w.generation, reserved[key] = generation, w
	}
	if len(reserved) == 0 {
		return nil, failed
	}
	stored, notPut := c.put(ctx, reserved)
	if failed == nil {
		return stored, notPut
	}
	maps.Copy(failed, notPut)
	return stored, failed
}

// Invalidate removes the values of keys, which need not exist. Call it after the commit that changed the
// origin. It takes one round trip for up to 500 keys, at most LookupTimeout each, and waits for no lock.
//
// If it fails, old values may still be there: the error names the first such key and the number of others,
// and the invalidation is repeated in the background until it succeeds, for up to 10,000 keys, also if ctx
// has ended. Close waits for that. For a server that is down it fails at once. After ErrInvalid for a bad
// key, or ErrClosed, nothing was sent.
func (c *Cache[V]) Invalidate(ctx context.Context, keys ...string) error {
	return c.replace(ctx, "invalidate", keys, func(some []string) map[string]error {
		return c.server.invalidate(ctx, some)
	})
}

// replace replaces the entries of keys in parts, and forgets them here. What fails is invalidated in the
// background.
func (c *Cache[V]) replace(ctx context.Context, op string, keys []string,
	do func(some []string) (failed map[string]error)) error {
	if err := c.check(keys...); err != nil {
		return err
	}
	failed := map[string]error{}
	for some := range slices.Chunk(keys, maxPipeline) {
		maps.Copy(failed, do(some))
	}
	for _, key := range keys {
		c.tier.Remove(key)
	}
	return c.repeat(ctx, op, failed)
}

// repeat has those keys invalidated in the background for which op has failed, and returns the error of that;
// nil if there are none.
func (c *Cache[V]) repeat(ctx context.Context, op string, failed map[string]error) error {
	follows := "it is invalidated in the background"
	for key := range failed {
		if !c.repeats.add(key) {
			follows = "not all are invalidated, because too many invalidations are being repeated or the Cache is " +
				"closed"
		}
	}
	return c.someFailed(ctx, op, failed, follows)
}

// someFailed is the error of an op that has failed for some keys, and what follows: it names the first of
// them.
func (c *Cache[V]) someFailed(ctx context.Context, op string, failed map[string]error, follows string) error {
	if len(failed) == 0 {
		return nil
	}
	first, more := slices.Min(slices.Collect(maps.Keys(failed))), ""
	if len(failed) > 1 {
		more = fmt.Sprintf(" and %d more", len(failed)-1)
	}
	why := ofCaller(ctx, within(failed[first]))
	return fmt.Errorf("flightlock: %s %q%s: %s: %w", op, c.Key(first), more, follows, why)
}

// ofCaller is err, and matches the error of the caller's ctx if that is why a request has timed out: its
// socket, whose deadline is ctx's, says no more than that it has.
func ofCaller(ctx context.Context, err error) error {
	ended := clock.Ended(ctx)
	if ended == nil || errors.Is(err, ended) || !conn.TimedOut(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ended, err)
}

func within(err error) error { return errtext.Within("flightlock", err) }

var errNoLoad = invalid("load", "nil", "all but GetWith need it")
var errClosed = fmt.Errorf("flightlock: the Cache is %w", flightlock.ErrClosed)

// Stats reads the counters.
func (c *Cache[V]) Stats() Stats {
	var own seam.Counts
	store[V]{c}.Count(&own)
	return Stats{
		Stats:     c.fetcher.Stats(),
		LocalHits: own.LocalHits, Undecodable: own.Undecodable, TooLong: own.TooLong,
		Repeating: own.Repeating, Dropped: own.Dropped, Down: own.Down, Hearing: own.Hearing == 1,
	}
}

// Close ends the Cache. New callers get ErrClosed. It waits until running loads are stored and failed
// invalidations repeated, or ctx ends: then loads are ended, and the error has the number of keys not
// invalidated. It may be called again.
func (c *Cache[V]) Close(ctx context.Context) error {
	c.finished.Store(true)
	defer c.client.Detach(c) // what its Fetcher has left is in the Client's own list
	err := c.fetcher.Close(ctx)
	c.repeats.drain(ctx)
	why := cmp.Or(context.Cause(ctx), flightlock.ErrClosed) // else an earlier Close has ended the repeats
	waited := c.server.close(ctx)
	if c.opts.Tags != nil {
		waited = errors.Join(waited, c.tags.close(ctx))
	}
	if left, _ := c.repeats.count(); left > 0 {
		err = errors.Join(err, fmt.Errorf("flightlock: close: keys that are not invalidated: %d: %w", left, why))
	}
	return errors.Join(err, waited)
}

// shortened is d without a part of what Jitter may take from it.
func (c *Cache[V]) shortened(d time.Duration, part float64) time.Duration {
	return d - time.Duration(part*c.opts.Jitter*float64(d))
}
