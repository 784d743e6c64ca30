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
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/hot"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// ErrNotFound is what load returns if the origin has no such value, and what Get returns then. It is
// flightlock.ErrNotFound.
var ErrNotFound = flightlock.ErrNotFound

// Cache is a cache of values in Redis: see the package documentation. It is safe for concurrent use.
//
// It has the goroutines of its Fetcher, one for each server that does not answer, and one while an
// invalidation is being repeated.
type Cache[V any] struct {
	opts      Options[V]
	prefix    string
	locks     string                                           // the prefix of locks; "" is none
	loadOne   func(ctx context.Context, key string) (V, error) // nil: only GetWith
	server    *server
	breaker   breaker
	fetcher   *flightlock.Fetcher[item[V]]
	repeats   repeats
	tier      *hot.Tier[item[V]] // nil: off
	tasks     group.Group
	closed    chan struct{} // closed by Close
	closing   sync.Once
	unobserve func()      // ends what Observers have of it
	finished  atomic.Bool // Close was called

	counts struct{ local, notFound, undecodable, tooLong atomic.Uint64 }
}

// item is a value on its way between an entry, a load and the callers.
type item[V any] struct {
	v      V
	absent bool          // load has returned ErrNotFound, and that is remembered
	took   time.Duration // the load
	brief  bool          // it may not be served for as long as the local tier keeps a value
}

// Stats are counters since New, and gauges.
type Stats struct {
	flightlock.FetchStats

	LocalHits   uint64 // Gets served from the local tier, which FetchStats does not count
	NotFound    uint64 // Gets that returned a remembered ErrNotFound
	Undecodable uint64 // values found that could not be decoded, or were no entry of this package
	TooLong     uint64 // values not stored because of MaxValue

	Repeating int64  // keys whose invalidation has failed and is being repeated
	Dropped   uint64 // invalidations that were given up, because too many were being repeated
	Down      int64  // servers of entries that do not answer, and are only probed
}

// New makes a Cache of values in rdb, which are loaded by load under locks of c. c and rdb may use
// the same servers or different ones; only different ones if c has no KeyPrefix. Close the Cache
// before both.
//
// load gets the value of a key from the origin; see [flightlock.Source] for what it may do and how
// its errors are treated. It may be nil if LoadMany is set, or if only GetWith is used.
//
// rdb is a client of a server, of a Sentinel-managed master or of a Cluster. Reads have to go to the
// master: a *redis.Ring and a *redis.ClusterClient with ReadOnly, RouteByLatency or RouteRandomly are
// ErrInvalid, and a Sentinel client with ReplicaOnly must not be used. Set ContextTimeoutEnabled in
// its options: else each request needs a goroutine of its own, because it may hang for longer than its
// ctx. Set DialerRetries to 1 and MaxRetries to -1, too, so that a server that refuses connections is
// noticed at once, and with TLS a ConnMaxIdleTime below that of the server, or each connection that it has closed
// costs a failed request. A bad option is an ErrInvalid that names the field. Nothing is sent yet.
func New[V any](
	c *flightlock.Client, rdb redis.UniversalClient, load func(ctx context.Context, key string) (V, error),
	opts Options[V],
) (*Cache[V], error) {
	if c == nil {
		return nil, invalid("c", "nil", "a Cache locks by a Client")
	}
	if err := checkServer(rdb); err != nil {
		return nil, err
	}
	opts, err := opts.validated()
	if err != nil {
		return nil, err
	}
	x := &Cache[V]{opts: opts, prefix: opts.prefix(), locks: seam.Of(c).KeyPrefix(), loadOne: load, closed: make(chan struct{})}
	if x.locks != "" && strings.HasPrefix(x.prefix, x.locks) || strings.HasPrefix(x.prefix, node.Reserved) {
		return nil, invalid("Options.Name and Version", fmt.Sprintf("%q", x.prefix),
			"all entries would be at keys of locks, or at those that are reserved for flightlock")
	}
	x.server = newServer(rdb, opts.Fetch.LookupTimeout, opts.tombstoneTime())
	x.breaker = breaker{s: x.server, tasks: &x.tasks, closed: x.closed, servers: map[string]*health{}}
	x.repeats = repeats{b: &x.breaker, tasks: &x.tasks, forget: x.forget, closed: x.closed, keys: map[string]uint64{}}
	if opts.Local > 0 {
		x.tier = hot.New[item[V]](opts.Local, opts.LocalKeys)
	}
	fetch := opts.Fetch
	fetch.Values = x.values
	x.fetcher, err = flightlock.NewFetcher(c, flightlock.Source[item[V]]{
		LookupStamped: x.lookup, Load: x.load, StoreStamped: x.store,
		LookupMany: x.lookupMany, LoadMany: x.manyLoader(), StoreManyStamped: x.storeMany,
	}, fetch)
	if err != nil {
		return nil, err
	}
	_, x.unobserve = seam.Of(c).Observe(opts.Name, x.observed)
	return x, nil
}

// Key returns the Redis key of the entry of key.
func (c *Cache[V]) Key(key string) string { return c.prefix + key }

func (c *Cache[V]) checkKey(key string) error {
	switch {
	case key == "":
		return invalid("key", "empty", "an entry needs a name")
	case c.locks != "" && startsWith(c.prefix, key, c.locks):
		return invalid("key", fmt.Sprintf("%q", key),
			fmt.Sprintf("an entry that begins with %q may be at the key of a lock", c.locks))
	case startsWith(c.prefix, key, node.Reserved):
		return invalid("key", fmt.Sprintf("%q", key),
			fmt.Sprintf("keys that begin with %q are reserved for flightlock", node.Reserved))
	case len(c.prefix)+len(key) > longestKey:
		return invalid("key", fmt.Sprintf("%d bytes long", len(c.prefix)+len(key)),
			fmt.Sprintf("%d is the limit, with Name and Version", longestKey))
	}
	return nil
}

// startsWith reports whether prefix and key together begin with s.
func startsWith(prefix, key, s string) bool {
	n := min(len(prefix), len(s))
	return prefix[:n] == s[:n] && strings.HasPrefix(key, s[n:])
}

// Get returns the value of key: the one in Redis, or the one that load returns, once for all callers
// in all processes. A stale value is returned at once, unless StaleWait is set, and a new one is
// loaded in the background. Callers share values, and must not modify them, unless Options.Copy is
// set.
//
// ctx limits only this caller's wait. Errors: ErrNotFound; those of flightlock.Fetcher.Fetch; and
// ErrInvalid for an empty key or one that is longer than 4,096 bytes with Name and Version. If the
// server of the entries cannot be reached, the value is loaded, or with FailClosed the error returned.
func (c *Cache[V]) Get(ctx context.Context, key string) (V, error) {
	if c.loadOne == nil && c.opts.LoadMany == nil {
		var none V
		return none, invalid("load", "nil", "Get needs it, or Options.LoadMany")
	}
	return c.get(ctx, key)
}

// GetWith is Get with a load of its own, for values whose load needs more than the key. If others
// load the key already, all get the value of that load. load may run when its caller has left, so
// it must not use anything that ends with the request; its ctx has values as FetchOptions.Values
// says. A nil load is an ErrInvalid.
func (c *Cache[V]) GetWith(
	ctx context.Context, key string, load func(ctx context.Context, key string) (V, error),
) (V, error) {
	if load == nil {
		var none V
		return none, invalid("load", "nil", "GetWith needs it")
	}
	return c.get(context.WithValue(ctx, loadKey{c}, &givenLoad[V]{c.prefix + key, load}), key)
}

// GetMany returns the values of many keys: what Get would return for each, with few requests: one
// MGET, or one pipeline on a Cluster, for each FetchOptions.MaxBatch of them. What is missing is
// loaded by LoadMany, or by load for each key at the same time without it, once for all callers in
// all processes, whichever other keys they request with it.
//
// Duplicates count once. If some keys have no value, the error is a *flightlock.ManyError with the
// reason for each of them, such as ErrNotFound, and the other keys have their values. After Close the
// error is ErrClosed; without load and LoadMany it is ErrInvalid. See flightlock.Fetcher.FetchMany.
func (c *Cache[V]) GetMany(ctx context.Context, keys []string) (map[string]V, error) {
	values, failed := make(map[string]V, len(keys)), map[string]error{}
	if c.loadOne == nil && c.opts.LoadMany == nil {
		return values, invalid("load", "nil", "GetMany needs it, or Options.LoadMany")
	}
	if c.finished.Load() {
		return values, errClosed
	}
	put := func(key string, x item[V], err error) {
		if v, err := c.result(x, err); err != nil {
			failed[key] = err
		} else {
			values[key] = v
		}
	}
	full := make([]string, 0, len(keys))
	readings := map[string]hot.Reading{}
	for _, key := range keys {
		if err := c.checkKey(key); err != nil {
			failed[key] = err
			continue
		}
		name := c.prefix + key
		if c.tier == nil {
			full = append(full, name)
			continue
		}
		_, duplicate := readings[name]
		_, found := values[key]
		if duplicate || found || failed[key] != nil {
			continue
		}
		if x, reading, ok := c.tier.Get(name); ok {
			c.counts.local.Add(1)
			put(key, x, nil)
		} else {
			full, readings[name] = append(full, name), reading
		}
	}
	found, err := c.fetcher.FetchMany(ctx, full)
	for name, x := range found {
		c.keep(name, x, readings[name])
		put(name[len(c.prefix):], x, nil)
	}
	var many *flightlock.ManyError
	switch {
	case errors.As(err, &many):
		for name, err := range many.Errors {
			failed[name[len(c.prefix):]] = err
		}
	case err != nil:
		return values, err
	}
	if len(failed) > 0 {
		return values, &flightlock.ManyError{Errors: failed}
	}
	return values, nil
}

func (c *Cache[V]) get(ctx context.Context, key string) (v V, err error) {
	if err := c.checkKey(key); err != nil {
		return v, err
	}
	full := c.prefix + key
	if c.finished.Load() {
		return v, c.errClosed(full)
	}
	if c.tier == nil {
		x, err := c.fetcher.Fetch(ctx, full)
		return c.result(x, err)
	}
	x, reading, ok := c.tier.Get(full)
	if ok {
		c.counts.local.Add(1)
	} else if x, err = c.fetcher.Fetch(ctx, full); err == nil {
		c.keep(full, x, reading)
	}
	return c.result(x, err)
}

// result is what a Get returns.
func (c *Cache[V]) result(x item[V], err error) (v V, _ error) {
	switch {
	case err != nil:
		return v, err
	case x.absent:
		c.counts.notFound.Add(1)
		return v, ErrNotFound
	case c.opts.Copy != nil:
		return c.opts.Copy(x.v), nil
	}
	return x.v, nil
}

// Set stores a value that the caller knows to be current: call it after the commit that changed the
// origin. When it has returned without an error, no Get that begins later returns what was there
// before, in any process.
//
// If something else changes the entry at the same time, it is not known which value is newer: then
// Set invalidates the entry. Two Sets one after the other count in the order in which they reach the
// server, so call Set where changes of one value exclude each other, or use Invalidate.
//
// It takes two round trips: the first ends after half of LookupTimeout, the second after all of it; if
// the server is known to be down, it fails at once. If it fails, so that the old value may still be
// there, the entry is invalidated in the background: see Invalidate. Errors: those of the server and of
// ctx; Codec's; ErrClosed; ErrInvalid for a bad key, and for a value that is longer than MaxValue: then
// the entry is invalidated, as it is in the background if Codec or FreshFor panics. A value whose
// FreshFor is 0 or less is not stored, and the entry invalidated.
func (c *Cache[V]) Set(ctx context.Context, key string, v V) error {
	if err := c.checkKey(key); err != nil {
		return err
	}
	full := c.prefix + key
	if c.finished.Load() {
		return c.errClosed(full)
	}
	w, err := c.encodeToSet(full, v)
	if w == nil {
		return errors.Join(err, c.Invalidate(ctx, key))
	}
	stored, err := c.set(ctx, full, w)
	c.forget(full)
	switch {
	case err != nil:
		follows := "it is invalidated in the background"
		if !c.repeats.add(full) {
			follows = "it is not invalidated, " + notRepeated
		}
		return fmt.Errorf("rediscache: set %q: %s: %w", full, follows, ofCaller(ctx, within(err)))
	case !stored:
		return c.Invalidate(ctx, key)
	}
	return nil
}

// encodeToSet is encode. The origin has changed: if the user's code panics, the entry is invalidated in the background.
func (c *Cache[V]) encodeToSet(full string, v V) (*writing, error) {
	returned := false
	defer func() {
		if !returned {
			c.forget(full)
			c.repeats.add(full)
		}
	}()
	w, err := c.encode(item[V]{v: v})
	returned = true
	return w, err
}

// set replaces the entry, if nothing changes it meanwhile. A plain SET would be shorter, but the
// client may send it twice, and the server execute the first one late: after an invalidation.
func (c *Cache[V]) set(ctx context.Context, full string, w *writing) (stored bool, err error) {
	was, err := send(ctx, &c.breaker, full, (*server).getToLoad)
	if err != nil {
		return false, err
	}
	e, _ := parseEntry(was.entry)
	w.stamp, w.took = e.stamp, e.took // else EarlyRefresh would not know how long a load takes
	return c.put(ctx, full, w)
}

// Invalidate removes the values of keys, which need not exist. Call it after the commit that changed
// the origin. When it has returned without an error, no load that began earlier can be stored, and no
// Get that begins later returns what was loaded earlier, in any process.
//
// It takes one round trip for up to 500 keys, and waits for no lock. It ends with ctx, and after
// LookupTimeout for each 500 keys; what is on a server that is down is not sent, and fails at once. If it
// fails, the old values may still be there: the error names the first such key, says how many more there
// are, matches the first one's error, and the invalidation is repeated in the background until it
// succeeds, also if ctx has ended; Close waits for that. Up to 10,000 keys are repeated. ErrInvalid for a
// bad key, and ErrClosed: then nothing is sent.
func (c *Cache[V]) Invalidate(ctx context.Context, keys ...string) error {
	full := make([]string, len(keys))
	for i, key := range keys {
		if err := c.checkKey(key); err != nil {
			return err
		}
		full[i] = c.prefix + key
	}
	if c.finished.Load() {
		return errClosed
	}
	failed := map[string]error{}
	for some := range slices.Chunk(full, maxPipeline) {
		maps.Copy(failed, c.breaker.invalidate(ctx, some))
	}
	for _, key := range full {
		c.forget(key)
	}
	if len(failed) == 0 {
		return nil
	}
	err := error(nil)
	first, follows := "", "it is repeated in the background"
	for _, key := range full {
		if failed[key] != nil {
			if !c.repeats.add(key) {
				follows = "it is not repeated for all keys, " + notRepeated
			}
			if err == nil {
				first, err = key, failed[key]
			}
		}
	}
	what := fmt.Sprintf("%q", first)
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
func (c *Cache[V]) keep(full string, x item[V], reading hot.Reading) {
	if c.tier != nil && !x.brief {
		c.tier.Put(full, x, reading)
	}
}

// forget removes a value from the tier in this process.
func (c *Cache[V]) forget(full string) {
	if c.tier != nil {
		c.tier.Remove(full)
	}
}

func within(err error) error { return errtext.Within("rediscache", err) }

// errClosed is the error of calls for many keys.
var errClosed = fmt.Errorf("rediscache: the Cache is %w", flightlock.ErrClosed)

func (c *Cache[V]) errClosed(key string) error {
	return fmt.Errorf("rediscache: %q: the Cache is %w", key, flightlock.ErrClosed)
}

// Stats reads the counters.
func (c *Cache[V]) Stats() Stats {
	repeating, dropped := c.repeats.count()
	return Stats{
		FetchStats: c.fetcher.Stats(),
		LocalHits:  c.counts.local.Load(), NotFound: c.counts.notFound.Load(),
		Undecodable: c.counts.undecodable.Load(), TooLong: c.counts.tooLong.Load(),
		Repeating: int64(repeating), Dropped: dropped, Down: int64(c.breaker.down()),
	}
}

// observed is Stats for Observers.
func (c *Cache[V]) observed() seam.Counts {
	s := c.Stats()
	return seam.Counts{
		Hits: s.Hits, Stale: s.Stale, Misses: s.Misses, Joined: s.Joined, Loads: s.Loads, UnlockedLoads: s.UnlockedLoads,
		LoadFailures: s.LoadFailures, StoreFailures: s.StoreFailures, LookupErrors: s.LookupErrors, Lost: s.Lost,
		Outdated: s.Outdated, NotFound: s.NotFound, Running: s.Running,
		Cached: true, LocalHits: s.LocalHits, Undecodable: s.Undecodable, TooLong: s.TooLong, Dropped: s.Dropped,
		Repeating: s.Repeating, Down: s.Down,
	}
}

// Close ends the Cache. New callers get ErrClosed. It waits until running loads are stored and failed
// invalidations are repeated successfully, or ctx ends: then loads are ended, and the error reports how
// many keys were not invalidated. It does not close rdb, nor the Client. It may be called again.
func (c *Cache[V]) Close(ctx context.Context) error {
	c.finished.Store(true)
	err := c.fetcher.Close(ctx)
	c.repeats.drain(ctx)
	why := context.Cause(ctx)
	c.closing.Do(func() {
		close(c.closed)
		c.unobserve()
	})
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
