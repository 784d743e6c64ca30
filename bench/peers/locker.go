package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// locker is one client of one process, under test. It is safe for concurrent use.
type locker interface {
	// lock waits for key until it has it or ctx ends.
	lock(ctx context.Context, key string) (held, error)
	close()
}

// held is one lock. Implementations are single pointers, so that the interface costs no allocation.
type held interface {
	// release returns when the key is free, or the lock is somebody else's.
	release() error
}

// keeper is a locker that can refresh a lock for as long as it is held.
type keeper interface {
	keep(ctx context.Context, key string) (held, error)
}

// retainer is a locker that retains leases, and counts that.
type retainer interface {
	// retained is how many locks needed no command so far, and how many retained leases others have wanted.
	retained() (reused, recalled uint64)
}

// settings are what every rival gets alike.
type settings struct {
	Addrs  []string      // of the servers, host:port
	TTL    time.Duration // of a lock
	Linger time.Duration // how long leases are retained, by who retains them
	Delay  time.Duration // between tries, for who polls; 0: the best that was found, see delays.go
	Fresh  time.Duration // of a value in a cache

	Versions string // of values in caches: the address of their server

	NodeTimeout time.Duration // flightlock's; 0: nodeTimeout
}

const (
	// ttl is long enough that nothing expires in a load, where it does not say otherwise.
	ttl = 10 * time.Second
	// nodeTimeout is how long one node may take. It is what redsync allows at this ttl.
	nodeTimeout = ttl / 20
	// poolSize is the number of connections that every client over go-redis may have. Open gives
	// flightlock as many, on two processors, and it uses four of them.
	poolSize = 20
)

// rival is one library, or one way of using it.
type rival struct {
	name  string
	about string // for RESULTS.md
	nodes []int  // on how many nodes it can lock; nil: on any number
	local bool   // a limit: it knows no Redis
	// set says that it sends SET on its own. Those inside scripts are not commands of a client.
	set  bool
	open func(settings) (locker, error)
	// cache is for the loads of caches.
	cache func(settings, *loader) (valueCache, error)
}

const (
	nameOurs      = "flightlock"
	nameLinger    = "flightlock-linger"
	nameAsync     = "flightlock-async"
	nameRedsync   = "redsync"
	nameFailFast  = "redsync-failfast"
	nameRedislock = "redislock"
	nameRueidis   = "rueidislock"
	nameByHand    = "singleflight"
	nameSemaphore = "semaphore"
	nameMutex     = "mutex"
	nameRaw       = "raw"
	nameRawRedis  = "raw-goredis"

	nameLoop        = "loop of Get"
	nameSturdyc     = "sturdyc"
	nameRocks       = "rockscache"
	nameRocksStrong = "rockscache-strong"
	nameAside       = "rueidisaside"
	nameHearing     = "flightlock-local"
	nameGoredis     = "go-redis/cache"
)

var rivals = []rival{
	{name: nameOurs, about: "SingleFlightLock, default options but NodeTimeout; of caches: package rediscache",
		open: openFlightlock, cache: openFlightCache},
	{name: nameLinger, about: "the same, with Options.Linger", open: openLingering},
	{name: nameAsync, about: "the same, with ReleaseAsync in place of Release", open: openAsync},
	{name: nameRedsync, set: true, open: openRedsync,
		about: "redsync v4.18.1 with its defaults: waits for every node, 32 tries 50 to 250 ms apart; " +
			"called again when those are used up"},
	{name: nameFailFast, set: true, open: openFailFast, cache: openDeleting(openFailFast),
		about: "redsync v4.18.1 WithFailFast, context deadlines on sockets, " +
			"and the retry delay that was found best for the load"},
	{name: nameRedislock, nodes: []int{1}, open: openRedislock, cache: openDeleting(openRedislock),
		about: "bsm/redislock v0.9.4, LinearBackoff with the delay that was found best for the load"},
	{name: nameRueidis, open: openRueidislock,
		about: "rueidislock v1.0.79, NoLoopTracking; on 3 and 5 nodes it takes 3 and 5 keys of ONE server, " +
			"for it knows no independent nodes"},
	{name: nameByHand, set: true, open: openByHand,
		about: "what people write by hand: x/sync singleflight elects one caller of the process, " +
			"who takes a redsync fail-fast lock; the others then try again"},
	{name: nameSemaphore, local: true, open: openSemaphore,
		about: "x/sync semaphore.Weighted(1): one process, no Redis; what a FIFO queue costs at best"},
	{name: nameRaw, open: openRawBaton,
		about: "no lock, but a ring of processes on Go's net package that hand over by " +
			"one script and one message per node: what that costs at best"},
	{name: nameRawRedis, open: openRawGoredis,
		about: "the same ring over go-redis, for whose users flightlock is: what that costs at best"},
	{name: nameLoop, about: "package rediscache, a Get for each key, all at the same time",
		cache: openFlightLoop}, {name: nameSturdyc, cache: openSturdyc,
		about: "viccon/sturdyc v1.1.5: GetOrFetchBatch, in the memory of each process, without Redis"},
	{name: nameRocks, cache: openRocks,
		about: "dtm-labs/rockscache v0.1.1: FetchBatch2, Fetch2 and TagAsDeleted2, default options"},
	{name: nameRocksStrong, about: "rockscache with StrongConsistency", cache: openRocksStrong},
	{name: nameAside, about: "rueidisaside v1.0.64, default options, Del after a change", cache: openAside},
	{name: nameHearing, about: "package rediscache with Local of a minute", cache: openHearing},
	{name: nameGoredis, about: "go-redis/cache v9.0.0: Once and Delete, TinyLFU(1000, 1m) in each process",
		cache: openGoredisCache},
	{name: nameMutex, local: true, open: openMutex,
		about: "sync.Mutex: one process, no Redis, no ctx, not FIFO"},
}

func rivalNamed(name string) (rival, error) {
	i := slices.IndexFunc(rivals, func(r rival) bool { return r.name == name })
	if i < 0 {
		return rival{}, fmt.Errorf("no rival is called %q", name)
	}
	return rivals[i], nil
}

// goredis is a client as every rival over go-redis gets it. A thousand goroutines queue for its
// connections, and are not turned away.
func goredis(addr string, change func(*redis.Options)) *redis.Client {
	o := &redis.Options{Addr: addr, PoolSize: poolSize, PoolTimeout: 30 * time.Second, ConnMaxIdleTime: -1}
	if change != nil {
		change(o)
	}
	return redis.NewClient(o)
}
