package rediscache_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// The random history once more, with all that is real: four processes, which are stopped and killed
// while they load, get, set and invalidate, and servers that are stopped, flushed and killed.
//
// What the processes know of each other goes through the origin, a server without faults: it has the
// version of each key, which a change raises and a load returns, and the version that is announced,
// by a Set or Invalidate that has returned. A process that gets a key reads first what is announced.
// So no clocks are compared, and it does not matter where a process is stopped in between. What was done, and
// what was wrong, is there, too.
//
//	go test ./rediscache -run TestFleet -fleet 10m -timeout 30m

var fleetFor = flag.Duration("fleet", 0, "how long TestFleet runs, in each of its three modes")

const (
	fleetChild = "FLIGHTLOCK_TEST_FLEET" // makes the test binary a process of the fleet, with that fleetSetup
	fleetSize  = 4
	fleetName  = "fleet"                // of the Caches
	fleetLocal = 300 * time.Millisecond // of the tier, if that is on
)

// fleetKeys are all of them. Changes of one value have to exclude each other where Set is used: those
// of "set<i>" are made by process i only. Those of "any<i>" are made by all, by Invalidate.
func fleetKeys() (keys []string) {
	for i := range fleetSize {
		keys = append(keys, fmt.Sprintf("set%d", i), fmt.Sprintf("any%d", i))
	}
	return keys
}

// fleetSetup is the configuration of a process.
type fleetSetup struct {
	Number                int
	Values, Locks, Origin string // addresses
	Local                 time.Duration
	Seed                  uint64
}

// fleetOrigin is the server that all processes share, which does not fail.
type fleetOrigin struct{ rdb *redis.Client }

func newFleetOrigin(addr string) fleetOrigin {
	return fleetOrigin{redis.NewClient(&redis.Options{Addr: addr, ReadTimeout: -1, WriteTimeout: -1,
		PoolSize: 200})}
}

// must ends a process of the fleet where the origin fails, or what it begins and ends with.
func must[T any](v T, err error) T {
	if err != nil && !errors.Is(err, redis.Nil) {
		panic(err)
	}
	return v
}

// raise is the change.
func (o fleetOrigin) raise(key string) (version int64) {
	return must(o.rdb.Incr(context.Background(), "version:"+key).Result())
}

func (o fleetOrigin) version(key string) int64 {
	return must(o.rdb.Get(context.Background(), "version:"+key).Int64())
}

// announceScript records a version, when that was, and the last one that the process itself has announced.
var announceScript = redis.NewScript(`
local time = redis.call('TIME')
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0)[1]
if not last or tonumber(last) < tonumber(ARGV[1]) then
  redis.call('ZADD', KEYS[1], time[1] * 1000000 + time[2], ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1000)
end
redis.call('SET', KEYS[2], math.max(tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(ARGV[1])))
return 1`)

// floorScript is the last version that was announced longer ago than ARGV[1], in microseconds, or by the
// process.
var floorScript = redis.NewScript(`
local time = redis.call('TIME')
local newest = time[1] * 1000000 + time[2] - ARGV[1]
local v = redis.call('ZREVRANGEBYSCORE', KEYS[1], newest, '-inf', 'LIMIT', 0, 1)[1]
return math.max(tonumber(v or 0), tonumber(redis.call('GET', KEYS[2]) or 0))`)

// count counts what was done; failed: changes that returned an error.
func (o fleetOrigin) count(what string, n int) {
	must(o.rdb.HIncrBy(context.Background(), "counts", what, int64(n)).Result())
}

// enough reports what has happened, and whether that is so much that the history says something.
func (o fleetOrigin) enough() (counts map[string]string, enough bool) {
	counts, enough = must(o.rdb.HGetAll(context.Background(), "counts").Result()), true
	for what, least := range map[string]int{"Gets": 100, "GetManys": 10, "changes": 10, "loads": 10} {
		n, _ := strconv.Atoi(counts[what])
		enough = enough && n >= least
	}
	return counts, enough
}

// fleetProcess is one process, in the child.
type fleetProcess struct {
	fleetSetup
	origin  fleetOrigin
	cache   *rediscache.Cache[string]
	writer  map[string]*sync.Mutex // changes of one value, one after the other
	pending sync.Map               // the last version of a key whose change has failed
}

// wrong reports what may not happen: stale values, from before what had been announced, and errors that no
// Get may return.
func (p *fleetProcess) wrong(format string, args ...any) {
	text := fmt.Sprintf("process %d: ", p.Number) + fmt.Sprintf(format, args...)
	must(p.origin.rdb.RPush(context.Background(), "wrong", text).Result())
}

// fleetMain is the child: it works until its stdin ends.
func fleetMain() {
	p := &fleetProcess{writer: map[string]*sync.Mutex{}}
	must(0, json.Unmarshal([]byte(os.Getenv(fleetChild)), &p.fleetSetup))
	for _, key := range fleetKeys() {
		p.writer[key] = &sync.Mutex{}
	}
	p.origin = newFleetOrigin(p.Origin)
	c := must(flightlock.Open(flightlock.Options{}, "redis://"+p.Locks))
	rng := rand.New(rand.NewPCG(p.Seed, 15))
	rdb := redis.NewClient(&redis.Options{Addr: p.Values, ContextTimeoutEnabled: rng.IntN(4) > 0, MaxRetries: 2})
	p.cache = must(rediscache.New(c, rdb, fetch.Each(p.load), options{
		Fresh:       time.Duration(20+rng.IntN(1000)) * time.Millisecond,
		Stale:       time.Duration(rng.IntN(1000)) * time.Millisecond,
		NotFoundFor: time.Duration(rng.IntN(1000)) * time.Millisecond,
		Name:        fleetName, Local: p.Local, EarlyRefresh: float64(rng.IntN(2)),
		LockTTL: 500 * time.Millisecond, LookupTimeout: time.Second, LoadTimeout: 5 * time.Second,
	}))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	p.work(ctx)
	p.close(c)
}

func (p *fleetProcess) work(ctx context.Context) {
	var wg sync.WaitGroup
	loop := func(most time.Duration, f func()) {
		wg.Go(func() {
			for ctx.Err() == nil {
				f()
				time.Sleep(rand.N(most))
			}
		})
	}
	keys := fleetKeys()
	for range 8 {
		loop(4*time.Millisecond, func() { p.get(keys[rand.IntN(len(keys))]) })
	}
	for range 2 {
		loop(20*time.Millisecond, func() { p.getMany(keys) })
	}
	loop(60*time.Millisecond, func() { p.change(fmt.Sprintf("set%d", p.Number), rand.IntN(2) == 0) })
	loop(100*time.Millisecond, func() { p.change(fmt.Sprintf("any%d", rand.IntN(fleetSize)), false) })
	wg.Wait()
}

// load takes its value when it begins, and then its time.
func (p *fleetProcess) load(_ context.Context, key string) (string, error) {
	p.origin.count("loads", 1)
	v := p.origin.version(key)
	takes := rand.N(30 * time.Millisecond)
	if rand.IntN(50) == 0 {
		takes = rand.N(3 * time.Second)
	}
	time.Sleep(takes) // the work of the load
	if rand.IntN(50) == 0 {
		return "", rediscache.ErrNotFound
	}
	return strconv.FormatInt(v, 10), nil
}

// announcements are where the versions of key are that all processes, and this one, have announced.
func (p *fleetProcess) announcements(key string) []string {
	return []string{"announced:" + key, fmt.Sprintf("own:%d:%s", p.Number, key)}
}

func (p *fleetProcess) announce(key string, version int64) {
	must(announceScript.Run(context.Background(), p.origin.rdb, p.announcements(key), version).Int64())
}

// floor is the oldest version that a Get which begins now may return. Versions that this process
// has announced itself are not in its tier any more.
func (p *fleetProcess) floor(key string) int64 {
	ago := min(p.Local, time.Second).Microseconds()
	return must(floorScript.Run(context.Background(), p.origin.rdb, p.announcements(key), ago).Int64())
}

// read gets keys, and reports what may not be.
func (p *fleetProcess) read(how string, keys []string,
	get func(ctx context.Context) (map[string]string, error)) {
	floors := map[string]int64{}
	for _, key := range keys {
		floors[key] = p.floor(key)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	values, err := get(ctx)
	p.origin.count(how, 1)
	failed := map[string]error{"all": err}
	if many := (*fetch.ManyError)(nil); errors.As(err, &many) {
		failed = many.Errors
	}
	for key, err := range failed {
		if err != nil && !errors.Is(err, rediscache.ErrNotFound) && !errors.Is(err, context.DeadlineExceeded) {
			p.wrong("%s of %s: %v", how, key, err)
		}
	}
	for key, value := range values {
		if v, err := strconv.ParseInt(value, 10, 64); err != nil || v < floors[key] {
			p.wrong("%s of %s, which began after version %d was announced, saw %q", how, key, floors[key], value)
		}
	}
}

func (p *fleetProcess) get(key string) {
	p.read("Gets", []string{key}, func(ctx context.Context) (map[string]string, error) {
		value, err := p.cache.Get(ctx, key)
		if err != nil {
			return nil, err
		}
		return map[string]string{key: value}, nil
	})
}

func (p *fleetProcess) getMany(keys []string) {
	p.read("GetManys", keys, func(ctx context.Context) (map[string]string, error) {
		return p.cache.GetMany(ctx, keys)
	})
}

// change raises the version, and announces it if the cache has taken it.
func (p *fleetProcess) change(key string, set bool) {
	p.writer[key].Lock()
	defer p.writer[key].Unlock()
	v := p.origin.raise(key)
	use := func() error { return p.cache.Invalidate(context.Background(), key) }
	if set {
		use = func() error { return p.cache.Set(context.Background(), key, strconv.FormatInt(v, 10)) }
	}
	if use() != nil {
		p.origin.count("failed", 1)
		p.pending.Store(key, v)
		return
	}
	p.origin.count("changes", 1)
	p.announce(key, v)
}

// close ends the cache, which repeats what has failed until it succeeds: then that is announced, too.
func (p *fleetProcess) close(c *flightlock.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(0, p.cache.Close(ctx))
	for key, v := range p.pending.Range {
		p.announce(key.(string), v.(int64))
		p.origin.count("repeated until Close", 1)
	}
	p.origin.count("outdated", int(p.cache.Stats().Outdated))
	must(0, c.Close(ctx))
}

// fleet is all processes, in the parent.
type fleet struct {
	t             *testing.T
	values, locks *redistest.Server
	origin        fleetOrigin
	setup         fleetSetup
}

func (f *fleet) start(i int) *procs.Child {
	setup := f.setup
	setup.Number, setup.Seed = i, rand.Uint64()
	text, err := json.Marshal(setup)
	testkit.Must(f.t, err)
	cmd, err := procs.Self(fleetChild + "=" + string(text))
	testkit.Must(f.t, err)
	child, err := procs.StartChild(cmd)
	testkit.Must(f.t, err)
	return child
}

// member is one process after the other, until the end: some are killed.
func (f *fleet) member(i int, stop <-chan struct{}) {
	for child := f.start(i); ; {
		select {
		case <-stop:
			if err := child.End(2 * time.Minute); err != nil {
				f.t.Error(err)
			}
			return
		case <-child.Done():
			f.t.Errorf("process %d has ended: %v", i, child.Wait())
			return
		case <-time.After(rand.N(4 * time.Second)):
		}
		if rand.IntN(5) > 0 {
			f.try(child.Stop, rand.N(3*time.Second), child.Cont)
			continue
		}
		child.Kill()
		_ = child.End(time.Second) // it was killed
		child = f.start(i)
	}
}

// fault breaks something of the servers.
func (f *fleet) fault() {
	server := f.values
	if rand.IntN(3) == 0 {
		server = f.locks
	}
	switch rand.IntN(8) {
	case 0, 1:
		server.Do(f.t, "FLUSHALL")
	case 2, 3: // evicted
		key := fleetKeys()[rand.IntN(2*fleetSize)]
		f.values.Do(f.t, "DEL", fleetName+":"+key)
	case 4:
		server.Do(f.t, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		server.Do(f.t, "CLIENT", "KILL", "TYPE", "pubsub")
	case 5, 6:
		f.try(server.Stop, rand.N(2*time.Second), server.Cont)
	default:
		f.try(server.Kill, rand.N(time.Second), server.Restart)
	}
}

// try breaks something for a time.
func (f *fleet) try(breaks func() error, takes time.Duration, mends func() error) {
	err := breaks()
	time.Sleep(takes)
	if err := errors.Join(err, mends()); err != nil {
		f.t.Error(err)
	}
}

// run returns what was done, and what was wrong.
func (f *fleet) run(takes time.Duration) (counts map[string]string, wrong []string) {
	stop := make(chan struct{})
	var members sync.WaitGroup
	for i := range fleetSize {
		members.Go(func() { f.member(i, stop) })
	}
	enough, end := false, time.Now().Add(takes)
	for time.Now().Before(end) || time.Since(end) < time.Minute && !enough { // longer on a busy machine
		time.Sleep(rand.N(time.Second))
		f.fault()
		_, enough = f.origin.enough()
	}
	close(stop)
	members.Wait()
	if counts, enough = f.origin.enough(); !enough {
		f.t.Error("too little happened")
	}
	// After the processes have closed their caches, nobody may find anything older than they had announced by
	// then.
	p := &fleetProcess{fleetSetup: fleetSetup{Number: fleetSize}, origin: f.origin}
	c := lockkit.Open(f.t, lockkit.Patient, "redis://"+f.locks.Addr())
	p.cache = newCache(f.t, c, f.values.Client(f.t), fetch.Each(p.load),
		options{Name: fleetName, Fresh: time.Minute})
	p.getMany(fleetKeys())
	return counts, must(f.origin.rdb.LRange(f.t.Context(), "wrong", 0, -1).Result())
}

// Four processes and three servers, all of which fail: no Get that began after a Set or Invalidate
// had returned sees what was loaded before it; with the tier, none does for longer than the tier's
// ttl, or a second if it hears of changes.
func TestFleet(t *testing.T) {
	takes := 5 * time.Second
	if redistest.Long() {
		takes = time.Minute
	}
	takes = cmp.Or(*fleetFor, takes)
	t.Parallel()
	run, wait := testkit.Together(t)
	defer wait()
	for name, local := range map[string]time.Duration{"tier=off": 0, "tier=on": fleetLocal,
		"tier=hears": time.Hour} {
		run(name, func(t *testing.T) {
			f := &fleet{t: t, values: redistest.StartServer(t), locks: redistest.StartServer(t)}
			origin := redistest.StartServer(t).Addr()
			f.origin = newFleetOrigin(origin)
			defer f.origin.rdb.Close()
			f.setup = fleetSetup{Values: f.values.Addr(), Locks: f.locks.Addr(), Origin: origin, Local: local}
			counts, wrong := f.run(takes)
			for _, what := range wrong[:min(len(wrong), 20)] {
				t.Error(what)
			}
			t.Logf("%v, %d keys: %v, %d wrong", takes, len(fleetKeys()), counts, len(wrong))
		})
	}
}
