package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dtm-labs/rockscache"
	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/rediscache"
	redcache "github.com/go-redis/cache/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"
	"github.com/viccon/sturdyc"
)

// This file has the rivals of the loads of caches: each as its documentation uses it, over the first
// server.

// valueCache is one cache of one process, under test.
type valueCache interface {
	get(ctx context.Context, key string) (string, error)
	// getMany returns how many of the keys it has values of.
	getMany(ctx context.Context, keys []string) (int, error)
	// invalidate is called after the value of key has changed where it comes from.
	invalidate(ctx context.Context, key string) error
	close()
}

// loader is where values come from, and counts.
type loader struct {
	value func(key string) (string, error) // of a load that begins now
	takes func() time.Duration

	keys  atomic.Uint64 // loaded
	calls atomic.Uint64 // loads, of one key or of many

	commands atomic.Uint64 // that clients over go-redis have sent
}

func (l *loader) one(key string) (string, error) {
	l.calls.Add(1)
	l.keys.Add(1)
	v, err := l.value(key)
	time.Sleep(l.takes())
	return v, err
}

func (l *loader) many(keys []string) (map[string]string, error) {
	l.calls.Add(1)
	l.keys.Add(uint64(len(keys)))
	values := make(map[string]string, len(keys))
	for _, key := range keys {
		v, err := l.value(key)
		if err != nil {
			return nil, err
		}
		values[key] = v
	}
	time.Sleep(l.takes())
	return values, nil
}

// client is a client over go-redis whose commands are counted: those of a pipeline each, a script as one.
func (l *loader) client(s settings) *redis.Client {
	rdb := goredis(s.Addrs[0], func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	rdb.AddHook(countCommands{&l.commands})
	return rdb
}

type countCommands struct{ n *atomic.Uint64 }

func (countCommands) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (c countCommands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmd)
	}
}

func (c countCommands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(uint64(len(cmds)))
		return next(ctx, cmds)
	}
}

// openFlightCache is rediscache. Its locks are on the same server.
func openFlightCache(s settings, l *loader) (valueCache, error) { return newFlightCache(s, l, 0) }

// openHearing is rediscache with a local tier that hears of changes.
func openHearing(s settings, l *loader) (valueCache, error) { return newFlightCache(s, l, time.Minute) }

// openFlightLoop is rediscache with one Get for each key.
func openFlightLoop(s settings, l *loader) (valueCache, error) {
	c, err := newFlightCache(s, l, 0)
	return flightLoop{c}, err
}

func newFlightCache(s settings, l *loader, local time.Duration) (flightCache, error) {
	locks := l.client(s)
	c, err := flightlock.New(flightlock.Options{NodeTimeout: nodeTimeout}, locks)
	if err != nil {
		return flightCache{}, err
	}
	rdb := l.client(s)
	load := func(_ context.Context, keys []string) (map[string]string, error) {
		if len(keys) > 1 {
			return l.many(keys)
		}
		v, err := l.one(keys[0])
		return map[string]string{keys[0]: v}, err
	}
	x, err := rediscache.New(c, rdb, load, rediscache.Options[string]{
		Name: "cache", Fresh: s.Fresh, Jitter: -1, Local: local,
	})
	return flightCache{x, func() { _, _, _ = c.Close(context.Background()), rdb.Close(), locks.Close() }}, err
}

type flightCache struct {
	c    *rediscache.Cache[string]
	done func()
}

func (f flightCache) get(ctx context.Context, key string) (string, error) { return f.c.Get(ctx, key) }

func (f flightCache) getMany(ctx context.Context, keys []string) (int, error) {
	values, err := f.c.GetMany(ctx, keys)
	return len(values), err
}

func (f flightCache) invalidate(ctx context.Context, key string) error {
	return f.c.Invalidate(ctx, key)
}

func (f flightCache) close() {
	_ = f.c.Close(context.Background()) // what it says was measured by then
	f.done()
}

type flightLoop struct{ flightCache }

func (f flightLoop) getMany(ctx context.Context, keys []string) (int, error) {
	return getEach(ctx, f, keys)
}

// getEach is what one writes without a call for many: all keys at the same time.
func getEach(ctx context.Context, c valueCache, keys []string) (n int, err error) {
	var mu sync.Mutex // guards n and err
	var wg sync.WaitGroup
	for _, key := range keys {
		wg.Go(func() {
			_, e := c.get(ctx, key)
			mu.Lock()
			defer mu.Unlock()
			if e == nil {
				n++
			}
			err = errors.Join(err, e)
		})
	}
	wg.Wait()
	return n, err
}

// sturdyCache is sturdyc: values are in the memory of each process only. Its goroutine for evictions has no
// end, so it is off.
type sturdyCache struct {
	c *sturdyc.Client[string]
	l *loader
}

func openSturdyc(s settings, l *loader) (valueCache, error) {
	return sturdyCache{sturdyc.New[string](100_000, 64, s.Fresh, 10, sturdyc.WithNoContinuousEvictions()), l},
		nil
}

func (c sturdyCache) get(ctx context.Context, key string) (string, error) {
	return c.c.GetOrFetch(ctx, key, func(context.Context) (string, error) { return c.l.one(key) })
}

func (c sturdyCache) getMany(ctx context.Context, keys []string) (int, error) {
	load := func(_ context.Context, keys []string) (map[string]string, error) { return c.l.many(keys) }
	values, err := c.c.GetOrFetchBatch(ctx, keys, c.c.BatchKeyFn("k"), load)
	return len(values), err
}

// invalidate reaches its own process only: there is nothing for the others.
func (c sturdyCache) invalidate(_ context.Context, key string) error {
	c.c.Delete(key)
	return nil
}

func (c sturdyCache) close() {}

// rocksCache is rockscache: a lock and a mark of deletion in the hash that has the value.
type rocksCache struct {
	rdb   *redis.Client
	c     *rockscache.Client
	l     *loader
	fresh time.Duration
}

func openRocks(s settings, l *loader) (valueCache, error)       { return newRocks(s, l, false), nil }
func openRocksStrong(s settings, l *loader) (valueCache, error) { return newRocks(s, l, true), nil }

func newRocks(s settings, l *loader, strong bool) rocksCache {
	rdb := l.client(s)
	o := rockscache.NewDefaultOptions()
	o.StrongConsistency = strong
	return rocksCache{rdb, rockscache.NewClient(rdb, o), l, max(s.Fresh, 2*time.Second)} // it counts in seconds
}

func (c rocksCache) get(ctx context.Context, key string) (string, error) {
	return c.c.Fetch2(ctx, key, c.fresh, func() (string, error) { return c.l.one(key) })
}

func (c rocksCache) getMany(ctx context.Context, keys []string) (int, error) {
	values, err := c.c.FetchBatch2(ctx, keys, c.fresh, func(at []int) (map[int]string, error) {
		some := make([]string, len(at))
		for i, n := range at {
			some[i] = keys[n]
		}
		loaded, err := c.l.many(some)
		byIndex := make(map[int]string, len(at))
		for i, n := range at {
			byIndex[n] = loaded[some[i]]
		}
		return byIndex, err
	})
	return len(values), err
}

func (c rocksCache) invalidate(ctx context.Context, key string) error {
	return c.c.TagAsDeleted2(ctx, key)
}

func (c rocksCache) close() { _ = c.rdb.Close() }

// asideCache is rueidisaside: client-side caching, and a placeholder while a value is loaded.
type asideCache struct {
	c     rueidisaside.CacheAsideClient
	l     *loader
	fresh time.Duration
}

func openAside(s settings, l *loader) (valueCache, error) {
	c, err := rueidisaside.NewClient(rueidisaside.ClientOption{
		ClientOption: rueidis.ClientOption{InitAddress: s.Addrs[:1]},
	})
	return asideCache{c, l, s.Fresh}, err
}

func (c asideCache) get(ctx context.Context, key string) (string, error) {
	return c.c.Get(ctx, c.fresh, key, func(_ context.Context, key string) (string, error) {
		return c.l.one(key)
	})
}

func (c asideCache) getMany(ctx context.Context, keys []string) (int, error) {
	return getEach(ctx, c, keys)
}

func (c asideCache) invalidate(ctx context.Context, key string) error { return c.c.Del(ctx, key) }

func (c asideCache) close() { c.c.Close() }

// goredisCache is go-redis/cache, with a local cache as its documentation has it.
type goredisCache struct {
	c     *redcache.Cache
	rdb   *redis.Client
	l     *loader
	fresh time.Duration
}

func openGoredisCache(s settings, l *loader) (valueCache, error) {
	rdb := l.client(s)
	c := redcache.New(&redcache.Options{Redis: rdb, LocalCache: redcache.NewTinyLFU(1000, time.Minute)})
	return goredisCache{c, rdb, l, s.Fresh}, nil
}

func (c goredisCache) get(ctx context.Context, key string) (v string, err error) {
	err = c.c.Once(&redcache.Item{Ctx: ctx, Key: key, Value: &v, TTL: c.fresh,
		Do: func(*redcache.Item) (any, error) {
			return c.l.one(key)
		}})
	return v, err
}

func (c goredisCache) getMany(ctx context.Context, keys []string) (int, error) {
	return getEach(ctx, c, keys)
}

func (c goredisCache) invalidate(ctx context.Context, key string) error { return c.c.Delete(ctx, key) }

func (c goredisCache) close() { _ = c.rdb.Close() }

// deletingCache is the loop that people write by hand around a lock: look, lock, look again, load,
// store; and it deletes after a write.
type deletingCache struct {
	rdb   *redis.Client
	locks locker
	l     *loader
	fresh time.Duration
}

func openDeleting(open func(settings) (locker, error)) func(settings, *loader) (valueCache, error) {
	return func(s settings, l *loader) (valueCache, error) {
		locks, err := open(s)
		return deletingCache{l.client(s), locks, l, s.Fresh}, err
	}
}

func (c deletingCache) look(ctx context.Context, key string) (value string, found bool, err error) {
	value, err = c.rdb.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	return value, err == nil, err
}

func (c deletingCache) get(ctx context.Context, key string) (string, error) {
	if value, found, err := c.look(ctx, key); found || err != nil {
		return value, err
	}
	h, err := c.locks.lock(ctx, "lock:"+key)
	if err != nil {
		return "", err
	}
	defer func() { _ = h.release() }() // a lock that was lost did its work all the same
	if value, found, err := c.look(ctx, key); found || err != nil {
		return value, err
	}
	value, err := c.l.one(key)
	if err != nil {
		return "", err
	}
	return value, c.rdb.Set(ctx, key, value, c.fresh).Err()
}

func (c deletingCache) getMany(ctx context.Context, keys []string) (int, error) {
	return getEach(ctx, c, keys)
}

func (c deletingCache) invalidate(ctx context.Context, key string) error {
	return c.rdb.Del(ctx, key).Err()
}

func (c deletingCache) close() {
	_ = c.rdb.Close()
	c.locks.close()
}

// versionsOf are those of values, on the server: which one is current, and which one is announced to have
// replaced what was before.
type versionsOf struct {
	rdb    *redis.Client
	prefix string
}

func (v versionsOf) current(key string) (string, error) {
	version, err := v.rdb.Get(context.Background(), v.prefix+"current:"+key).Result()
	if errors.Is(err, redis.Nil) {
		return "0", nil
	}
	return version, err
}

func (v versionsOf) raise(key string) (int64, error) {
	return v.rdb.Incr(context.Background(), v.prefix+"current:"+key).Result()
}

var announceScript = redis.NewScript(`
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
end
return 1`)

func (v versionsOf) announce(key string, version int64) error {
	return announceScript.Run(context.Background(), v.rdb, []string{v.prefix + "announced:" + key},
		version).Err()
}

func (v versionsOf) announced(key string) (int64, error) {
	n, err := v.rdb.Get(context.Background(), v.prefix+"announced:"+key).Int64()
	if errors.Is(err, redis.Nil) {
		err = nil
	}
	return n, err
}

// older reports whether a value is older than a version.
func older(value string, version int64) (bool, error) {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return false, fmt.Errorf("a value that nobody has loaded: %w", err)
	}
	return n < version, nil
}
