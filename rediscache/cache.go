package rediscache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/hot"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// ErrNotFound is the error of a Get if the origin has no such value. It is fetch.ErrNotFound.
var ErrNotFound = fetch.ErrNotFound

// Cache is a cache of values in Redis: see the package documentation. It is safe for concurrent use.
//
// It has the goroutines of its Fetcher, one for each server that does not answer, and one while an invalidation is
// being repeated.
type Cache[V any] struct {
	opts     Options[V]
	client   seam.Client
	locks    string          // the prefix of locks; "" is none
	loader   fetch.Loader[V] // nil: only GetWith
	server   *server
	breaker  breaker
	fetcher  *fetch.Fetcher[item[V]]
	repeats  repeats
	tier     *hot.Tier[item[V]] // nil: off
	tasks    group.Group
	closed   chan struct{} // closed by Close
	closing  sync.Once
	finished atomic.Bool // Close was called

	counts struct{ local, undecodable, tooLong atomic.Uint64 }
}

// item is a value on its way between an entry, a load and the callers.
type item[V any] struct {
	v     V
	took  time.Duration // the load
	brief bool          // it may not be served for as long as the local tier keeps a value
}

// Stats are counters since New, and gauges.
type Stats struct {
	fetch.Stats

	LocalHits   uint64 // Gets served from the local tier, which fetch.Stats does not count
	Undecodable uint64 // values found that could not be decoded, or were no entry of this package
	TooLong     uint64 // values not stored because of MaxValue

	Repeating int64  // keys whose invalidation has failed and is being repeated
	Dropped   uint64 // invalidations that were given up, because too many were being repeated
	Down      int64  // servers of entries that do not answer, and are only probed
}

// New makes a Cache of values in rdb, which are loaded by load under locks of c. c and rdb may use the same servers or
// different ones; only different ones if c has no KeyPrefix. c's Close closes the Cache, too; Close rdb after it.
//
// load gets values from the origin: see [fetch.Loader], and [fetch.Each] for a function that loads one. It may be nil
// if only GetWith is used.
//
// rdb is a client of a server, of a Sentinel-managed master or of a Cluster. Reads have to go to the master: a
// *redis.Ring and a *redis.ClusterClient with ReadOnly, RouteByLatency or RouteRandomly are ErrInvalid, and a Sentinel
// client with ReplicaOnly must not be used. Set ContextTimeoutEnabled in its options: else each request needs a
// goroutine of its own, because it may hang for longer than its ctx. Set DialerRetries to 1 and MaxRetries to -1, too,
// so that a server that refuses connections is noticed at once, and with TLS a ConnMaxIdleTime below that of the
// server, or each connection that it has closed costs a failed request. Callers make at most twice as many lookups at
// once as its PoolSize, and others wait for that. A bad option is an ErrInvalid that names the field; after c.Close the
// error is ErrClosed. Nothing is sent yet.
func New[V any](c *flightlock.Client, rdb redis.UniversalClient, load fetch.Loader[V], opts Options[V],
) (*Cache[V], error) {
	if c == nil {
		return nil, invalid("c", "nil", "a Cache locks by a Client")
	}
	inside := seam.Of(c)
	if inside == nil {
		return nil, invalid("c", "not made by New or Open", "a Cache locks by a Client")
	}
	if err := checkServer(rdb); err != nil {
		return nil, err
	}
	opts, err := opts.validated(inside.MaxTTL())
	if err != nil {
		return nil, err
	}
	x := &Cache[V]{opts: opts, client: inside, locks: inside.KeyPrefix(), loader: load, closed: make(chan struct{})}
	x.server = newServer(rdb, opts.prefix(), opts.LookupTimeout, opts.tombstoneTime())
	prefix := x.server.prefix
	if x.locks != "" && strings.HasPrefix(prefix, x.locks) || strings.HasPrefix(prefix, node.Reserved) {
		return nil, invalid("Options.Name and Version", fmt.Sprintf("%q", prefix),
			"all entries would be at keys of locks, or at those that are reserved for flightlock")
	}
	x.breaker = breaker{s: x.server, tasks: &x.tasks, closed: x.closed, servers: map[string]*health{}}
	x.repeats = repeats{b: &x.breaker, tasks: &x.tasks, forget: x.forget, closed: x.closed, keys: map[string]uint64{}}
	if opts.Local > 0 {
		x.tier = hot.New[item[V]](opts.Local, opts.LocalKeys)
	}
	if x.fetcher, err = fetch.New(c, fetch.Store[item[V]](store[V]{x}), x.load, opts.fetch()); err != nil {
		return nil, err
	}
	if !inside.Attach(x, x.Close) {
		return nil, errors.Join(fmt.Errorf("rediscache: the Client is %w", flightlock.ErrClosed),
			x.fetcher.Close(context.Background()))
	}
	return x, nil
}

// Key returns the Redis key of the entry of key.
func (c *Cache[V]) Key(key string) string { return c.server.prefix + key }

func (c *Cache[V]) checkKey(key string) error {
	prefix := c.server.prefix
	switch {
	case key == "":
		return invalid("key", "empty", "an entry needs a name")
	case c.locks != "" && node.StartsWith(prefix, key, c.locks):
		return invalid("key", fmt.Sprintf("%q", key),
			fmt.Sprintf("an entry that begins with %q may be at the key of a lock", c.locks))
	case node.StartsWith(prefix, key, node.Reserved):
		return invalid("key", fmt.Sprintf("%q", key),
			fmt.Sprintf("keys that begin with %q are reserved for flightlock", node.Reserved))
	case c.opts.Version == "" && isVersion(key) && strings.IndexByte(key, ':') >= 0:
		return invalid("key", fmt.Sprintf("%q", key), "its entry would be that of a Cache with an Options.Version")
	case len(prefix)+len(key) > longestKey:
		return invalid("key", fmt.Sprintf("%d bytes long", len(prefix)+len(key)),
			fmt.Sprintf("%d is the limit, with Name and Version", longestKey))
	}
	return nil
}

// Get returns the value of key: the one in Redis, or the one that load returns, once for all callers in all processes.
// A stale value is returned at once, unless StaleWait is set, and a new one is loaded in the background. Callers share
// values, and must not modify them, unless Options.Copy is set.
//
// ctx limits only this caller's wait. Errors: ErrNotFound; those of [fetch.Fetcher.Get]; and ErrInvalid for an empty
// key, one that is longer than 4,096 bytes with Name and Version, and one that could be that of a lock or of another
// Version. If the server of the entries cannot be reached, the value is loaded, or with FailClosed the error returned.
func (c *Cache[V]) Get(ctx context.Context, key string) (V, error) {
	if c.loader == nil {
		var none V
		return none, errNoLoad
	}
	return c.get(ctx, key)
}

// GetWith is Get with a load of its own, for values whose load needs more than the key. If others load the key already,
// all get the value of that load: and so all who Get the key meanwhile get the error of this one, or that it does not
// exist, as if the Cache's own load had said so (see ErrorHold, NotFoundFor). load may run when its caller has left, so
// it must not use anything that ends with the request. A nil load is an ErrInvalid.
func (c *Cache[V]) GetWith(
	ctx context.Context, key string, load func(ctx context.Context, key string) (V, error),
) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil", "GetWith needs it")
	}
	return c.get(context.WithValue(ctx, seam.OfLoad{}, &givenLoad[V]{c, key, load}), key)
}

// GetMany returns the values of many keys: what Get would return for each, with few requests: one MGET, or one pipeline
// on a Cluster, for each MaxBatch of them. What is missing is loaded together, once for all callers in all processes,
// whichever other keys they request with it.
//
// Keys that do not exist are absent from the result. Duplicates count once. If some keys have no value because of an
// error, the error is a *fetch.ManyError with the reason for each of them, and the other keys have their values. After
// Close the error is ErrClosed; without a load it is ErrInvalid. See [fetch.Fetcher.GetMany].
func (c *Cache[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values, failed := make(map[string]V, len(keys)), map[string]error{}
	if c.loader == nil {
		return values, errNoLoad
	}
	if c.finished.Load() {
		return values, errClosed
	}
	wanted := make([]string, 0, len(keys))
	readings := map[string]hot.Reading{}
	for _, key := range keys {
		if err := c.checkKey(key); err != nil {
			failed[key] = err
			continue
		}
		if c.tier == nil {
			wanted = append(wanted, key)
			continue
		}
		_, duplicate := readings[key]
		if _, found := values[key]; duplicate || found {
			continue
		}
		if x, reading, ok := c.tier.Get(key); ok {
			c.counts.local.Add(1)
			values[key] = c.copied(x)
		} else {
			wanted, readings[key] = append(wanted, key), reading
		}
	}
	found, err := c.fetcher.GetMany(ctx, wanted)
	for key, x := range found {
		c.keep(key, x, readings[key])
		values[key] = c.copied(x)
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
	if err := c.checkKey(key); err != nil {
		return v, err
	}
	if c.finished.Load() {
		return v, keyClosed(key)
	}
	var reading hot.Reading
	if c.tier != nil {
		x, r, ok := c.tier.Get(key)
		if ok {
			c.counts.local.Add(1)
			return c.copied(x), nil
		}
		reading = r
	}
	x, err := c.fetcher.Get(ctx, key)
	if err != nil {
		return v, err
	}
	c.keep(key, x, reading)
	return c.copied(x), nil
}

// copied is the value for one caller.
func (c *Cache[V]) copied(x item[V]) V {
	if c.opts.Copy != nil {
		return c.opts.Copy(x.v)
	}
	return x.v
}

// Set stores a value that the caller knows to be current: call it after the commit that changed the origin. When it has
// returned without an error, no Get that begins later returns what was there before, in any process.
//
// If something else changes the entry at the same time, it is not known which value is newer: then Set invalidates the
// entry. Two Sets one after the other count in the order in which they reach the server, so call Set where changes of
// one value exclude each other, or use Invalidate.
//
// It takes two round trips: the first ends after half of LookupTimeout, the second after all of it; if the server is
// known to be down, it fails at once. If it fails, so that the old value may still be there, the entry is invalidated
// in the background: see Invalidate. Errors: those of the server and of ctx; Codec's; ErrClosed; ErrInvalid for a bad
// key, and for a value that is longer than MaxValue: then the entry is invalidated, as it is in the background if Codec
// or FreshFor panics. A value whose FreshFor is 0 or less is not stored, and the entry invalidated.
func (c *Cache[V]) Set(ctx context.Context, key string, v V) error {
	if err := c.checkKey(key); err != nil {
		return err
	}
	if c.finished.Load() {
		return keyClosed(key)
	}
	w, err := c.encodeToSet(key, v)
	if w == nil {
		return errors.Join(err, c.Invalidate(ctx, key))
	}
	stored, err := c.set(ctx, key, w)
	c.forget(key)
	switch {
	case err != nil:
		follows := "it is invalidated in the background"
		if !c.repeats.add(key) {
			follows = "it is not invalidated, " + notRepeated
		}
		return fmt.Errorf("rediscache: set %q: %s: %w", c.Key(key), follows, ofCaller(ctx, within(err)))
	case !stored:
		return c.Invalidate(ctx, key)
	}
	return nil
}

// encodeToSet is encode. The origin has changed: if the user's code panics, the entry is invalidated in the background.
func (c *Cache[V]) encodeToSet(key string, v V) (*writing, error) {
	returned := false
	defer func() {
		if !returned {
			c.forget(key)
			c.repeats.add(key)
		}
	}()
	w, err := c.encode(item[V]{v: v})
	returned = true
	return w, err
}

// set replaces the entry, if nothing changes it meanwhile. A plain SET would be shorter, but the client may send it
// twice, and the server execute the first one late: after an invalidation.
func (c *Cache[V]) set(ctx context.Context, key string, w *writing) (stored bool, err error) {
	keys := []string{key}
	failed := send(ctx, &c.breaker, keys, c.server.reserve, func(_ string, was found) {
		e, _ := parseEntry(was.entry)
		w.stamp, w.took = e.stamp, e.took // else EarlyRefresh would not know how long a load takes
	})
	if failed[key] != nil {
		return false, failed[key]
	}
	failed = c.put(ctx, keys, map[string]*writing{key: w}, func(_ string, was bool) { stored = was })
	return stored, failed[key]
}

// put stores entries that have their stamps still.
func (c *Cache[V]) put(ctx context.Context, keys []string, ws map[string]*writing, got func(key string, stored bool),
) (failed map[string]error) {
	return send(ctx, &c.breaker, keys, func(ctx context.Context, keys []string) ([]bool, map[string]error) {
		return c.server.put(ctx, keys, ws)
	}, got)
}

// Invalidate removes the values of keys, which need not exist. Call it after the commit that changed the origin. When
// it has returned without an error, no load that began earlier can be stored, and no Get that begins later returns what
// was loaded earlier, in any process.
//
// It takes one round trip for up to 500 keys, and waits for no lock. It ends with ctx, and after LookupTimeout for each
// 500 keys; what is on a server that is down is not sent, and fails at once. If it fails, the old values may still be
// there: the error names the first such key, says how many more there are, matches the first one's error, and the
// invalidation is repeated in the background until it succeeds, also if ctx has ended; Close waits for that. Up to
// 10,000 keys are repeated. ErrInvalid for a bad key, and ErrClosed: then nothing is sent.
func (c *Cache[V]) Invalidate(ctx context.Context, keys ...string) error {
	for _, key := range keys {
		if err := c.checkKey(key); err != nil {
			return err
		}
	}
	if c.finished.Load() {
		return errClosed
	}
	failed := map[string]error{}
	for some := range slices.Chunk(keys, maxPipeline) {
		maps.Copy(failed, c.breaker.invalidate(ctx, some))
	}
	for _, key := range keys {
		c.forget(key)
	}
	if len(failed) == 0 {
		return nil
	}
	err := error(nil)
	first, follows := "", "it is repeated in the background"
	for _, key := range keys {
		if failed[key] != nil {
			if !c.repeats.add(key) {
				follows = "it is not repeated for all keys, " + notRepeated
			}
			if err == nil {
				first, err = key, failed[key]
			}
		}
	}
	what := fmt.Sprintf("%q", c.Key(first))
	if len(failed) > 1 {
		what += fmt.Sprintf(" and %d more", len(failed)-1)
	}
	return fmt.Errorf("rediscache: invalidate %s: %s: %w", what, follows, ofCaller(ctx, within(err)))
}

// ofCaller is err, and matches the error of the caller's ctx if that is why a request has timed out: its socket, whose
// deadline is ctx's, says no more than that it has.
func ofCaller(ctx context.Context, err error) error {
	ended := clock.Ended(ctx)
	if ended == nil || errors.Is(err, ended) || !conn.TimedOut(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ended, err)
}

const notRepeated = "because too many invalidations are being repeated or the Cache is closed"

// keep puts a value into the tier in this process, if there is one and the value may be served for as long.
func (c *Cache[V]) keep(key string, x item[V], reading hot.Reading) {
	if c.tier != nil && !x.brief {
		c.tier.Put(key, x, reading)
	}
}

// forget removes a value from the tier in this process.
func (c *Cache[V]) forget(key string) {
	if c.tier != nil {
		c.tier.Remove(key)
	}
}

func within(err error) error { return errtext.Within("rediscache", err) }

var errNoLoad = invalid("load", "nil", "all but GetWith need it")

// errClosed is the error of calls for many keys.
var errClosed = fmt.Errorf("rediscache: the Cache is %w", flightlock.ErrClosed)

func keyClosed(key string) error {
	return fmt.Errorf("rediscache: %q: the Cache is %w", key, flightlock.ErrClosed)
}

// Stats reads the counters.
func (c *Cache[V]) Stats() Stats {
	var own seam.Counts
	store[V]{c}.Count(&own)
	return Stats{
		Stats:     c.fetcher.Stats(),
		LocalHits: own.LocalHits, Undecodable: own.Undecodable, TooLong: own.TooLong,
		Repeating: own.Repeating, Dropped: own.Dropped, Down: own.Down,
	}
}

// Close ends the Cache. New callers get ErrClosed. It waits until running loads are stored and failed invalidations are
// repeated successfully, or ctx ends: then loads are ended, and the error reports how many keys were not invalidated.
// It does not close rdb, nor the Client. It may be called again.
func (c *Cache[V]) Close(ctx context.Context) error {
	c.finished.Store(true)
	defer c.client.Detach(c) // what its Fetcher has left is in the Client's own list
	err := c.fetcher.Close(ctx)
	c.repeats.drain(ctx)
	why := context.Cause(ctx)
	c.closing.Do(func() { close(c.closed) })
	c.tasks.Close()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*c.server.writes) // for a request that is under way
	defer cancel()
	waited := c.tasks.Wait(grace)
	if left, _ := c.repeats.count(); left > 0 {
		if why == nil { // an earlier Close has ended the repeats
			why = flightlock.ErrClosed
		}
		what := "1 key is"
		if left > 1 {
			what = fmt.Sprintf("%d keys are", left)
		}
		err = errors.Join(err, fmt.Errorf("rediscache: close: %s not invalidated: %w", what, why))
	}
	return errors.Join(err, waited)
}

// least is d, shortened as much as it may be.
func (c *Cache[V]) least(d time.Duration) time.Duration {
	return d - time.Duration(c.opts.Jitter*float64(d))
}

// jittered is d, shortened at random.
func (c *Cache[V]) jittered(d time.Duration) time.Duration {
	if c.opts.Jitter <= 0 {
		return d
	}
	return max(d-time.Duration(rand.Float64()*c.opts.Jitter*float64(d)), time.Millisecond)
}
