package scale

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

// This file is a service as users build it: a Client with default options, a Fetcher over a cache
// in Redis, and thousands of callers. It runs in the test's process, or in one of its own, which is
// this test binary started again: they communicate over the child's stdin and stdout, a line of
// JSON each way, and SIGTERM ends it as a deploy does.

// serviceEnv, set to a serviceConfig in JSON, makes the test binary such a process.
const serviceEnv = "FLIGHTLOCK_TEST_SERVICE"

// serviceConfig says how the service is set up.
type serviceConfig struct {
	Nodes []string // addresses
	Cache string   // address of the cache's server; "": a map in this process
	Open  bool     // by Open, else by New over clients with go-redis' default options
	Busy  int      // goroutines per processor that spin
	Cold  bool     // nothing is dialled before the first run

	NodeTimeout      time.Duration // 0: that of options
	MaxUnlockedLoads int
	TTL              time.Duration // of the Fetcher's locks; 0: the default
}

// A workload is what callers do, all at once or at a rate.
type workload struct {
	Prefix string // of the keys
	Keys   int    // distinct ones
	Each   int    // callers of each key, all at once; or
	Rate   int    // callers per second, each of a random key, until SIGTERM; or as many as come in For
	For    time.Duration
	Load   time.Duration // that a load takes
	Fresh  time.Duration // that a value stays; 0: a minute
	Fails  string        // "load" or "store": what fails
}

// outcome is the result.
type outcome struct {
	Callers  int
	Failed   int      // callers with an error
	Errors   []string // some of them
	Slowest  time.Duration
	Loads    uint64
	Unlocked uint64 // loads
	Lookups  uint64 // errors of Lookup
	Stored   uint64 // failures of Store
}

func (r outcome) String() string {
	return fmt.Sprintf("%d callers, %d failed %q, slowest %v; "+
		"%d loads, %d without a lock, %d failed lookups, %d failed stores",
		r.Callers, r.Failed, r.Errors, r.Slowest.Round(time.Millisecond), r.Loads, r.Unlocked, r.Lookups, r.Stored)
}

// with adds up two results.
func (r outcome) with(other outcome) outcome {
	r.Callers += other.Callers
	r.Failed += other.Failed
	r.Errors = append(r.Errors, other.Errors...)
	r.Errors = r.Errors[:min(3, len(r.Errors))]
	r.Slowest = max(r.Slowest, other.Slowest)
	r.Loads += other.Loads
	r.Unlocked += other.Unlocked
	r.Lookups += other.Lookups
	r.Stored += other.Stored
	return r
}

// service is one that runs.
type service struct {
	c     *flightlock.Client
	f     *fetch.Fetcher[string]
	rdb   *redis.Client // the cache, or
	local sync.Map
	nodes []redis.UniversalClient
	calm  func() // ends the goroutines that spin
	work  atomic.Pointer[workload]

	unlocked   atomic.Uint64 // loads without a lock, when the watch for another one began
	unlockedAt atomic.Int64  // when the first load without a lock began, since watched
}

func startService(cfg serviceConfig) (*service, error) {
	s := &service{calm: func() {}}
	if cfg.Cache != "" {
		s.rdb = redis.NewClient(&redis.Options{Addr: cfg.Cache, PoolTimeout: time.Minute, ReadTimeout: time.Minute})
	}
	opts := options()
	if cfg.NodeTimeout > 0 {
		opts.NodeTimeout = cfg.NodeTimeout
	}
	var err error
	if cfg.Open {
		var urls []string
		for _, addr := range cfg.Nodes {
			urls = append(urls, "redis://"+addr)
		}
		s.c, err = flightlock.Open(opts, urls...)
	} else {
		for _, addr := range cfg.Nodes {
			s.nodes = append(s.nodes, redis.NewClient(&redis.Options{Addr: addr}))
		}
		s.c, err = flightlock.New(opts, s.nodes...)
	}
	if err != nil {
		return nil, err
	}
	s.f, err = s.fetcher(s.c,
		fetch.Options{TTL: cfg.TTL, MaxUnlockedLoads: cfg.MaxUnlockedLoads, LookupTimeout: lookupTimeout()})
	if err != nil {
		return nil, err
	}
	if !cfg.Cold {
		l, err := s.c.SingleFlightLock(context.Background(), fmt.Sprint("warm", os.Getpid()), time.Second, nil)
		if err != nil {
			return nil, err
		}
		_ = l.Release(context.Background())
	}
	if cfg.Busy > 0 {
		s.calm = spin(cfg.Busy)
	}
	return s, nil
}

// spin keeps every processor of this process busy with n goroutines, until calm is called.
func spin(n int) (calm func()) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range n * runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for x := 0; !stop.Load(); x++ {
			}
		})
	}
	return func() { stop.Store(true); wg.Wait() }
}

var errOrigin = errors.New("the origin is down")

// fetcher is one for the service's cache.
func (s *service) fetcher(c *flightlock.Client, opts fetch.Options) (*fetch.Fetcher[string], error) {
	return fetch.New(c, fetch.Plain(s.get, s.set), fetch.Each(s.load), opts)
}

func (s *service) get(ctx context.Context, key string) (v string, ok bool, err error) {
	if s.rdb == nil {
		v, ok := s.local.Load(key)
		text, _ := v.(string)
		return text, ok, nil
	}
	v, err = s.rdb.Get(ctx, "value:"+key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	return v, err == nil, err
}

func (s *service) load(_ context.Context, key string) (string, error) {
	if s.f.Stats().UnlockedLoads > s.unlocked.Load() {
		s.unlockedAt.CompareAndSwap(0, time.Now().UnixNano())
	}
	w := s.work.Load()
	time.Sleep(w.Load)
	if w.Fails == "load" {
		return "", errOrigin
	}
	return key, nil
}

func (s *service) set(ctx context.Context, key, v string) error {
	w := s.work.Load()
	if w.Fails == "store" {
		return errOrigin
	}
	if s.rdb == nil {
		s.local.Store(key, v)
		return nil
	}
	ttl := time.Minute
	if w.Fresh > 0 {
		ttl = w.Fresh
	}
	return s.rdb.Set(ctx, "value:"+key, v, ttl).Err()
}

// run has the callers arrive, until all are served, or ctx has ended and those that arrived are
// served.
func (s *service) run(ctx context.Context, w workload) outcome {
	s.work.Store(&w)
	before := s.f.Stats()
	var mu sync.Mutex // guards r
	var r outcome
	var wg sync.WaitGroup
	call := func(key string) {
		wg.Go(func() {
			began := time.Now()
			v, err := s.f.Get(context.Background(), key)
			took := time.Since(began)
			if err == nil && v != key {
				err = fmt.Errorf("%q is the value of %q", v, key)
			}
			mu.Lock()
			defer mu.Unlock()
			one := outcome{Callers: 1, Slowest: took}
			if err != nil {
				one.Failed, one.Errors = 1, []string{err.Error()}
			}
			r = r.with(one)
		})
	}
	if w.Rate == 0 {
		for i := range w.Keys {
			for range max(1, w.Each) {
				call(fmt.Sprint(w.Prefix, i))
			}
		}
	} else {
		s.atRate(ctx, w, call)
	}
	wg.Wait()
	after := s.f.Stats()
	r.Loads, r.Unlocked = after.Loads-before.Loads, after.UnlockedLoads-before.UnlockedLoads
	r.Lookups, r.Stored = after.LookupErrors-before.LookupErrors, after.StoreFailures-before.StoreFailures
	return r
}

// atRate has so many callers come per second, however late this goroutine runs.
func (s *service) atRate(ctx context.Context, w workload, call func(key string)) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	all := math.MaxInt
	if w.For > 0 {
		all = int(w.For.Seconds() * float64(w.Rate))
	}
	began := time.Now()
	for came := 0; came < all; {
		for due := min(all, int(time.Since(began).Seconds()*float64(w.Rate))); came < due; came++ {
			call(fmt.Sprint(w.Prefix, rand.IntN(w.Keys)))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// close ends the service as a deploy does: without callers.
func (s *service) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := errors.Join(s.f.Close(ctx), s.c.Close(ctx))
	s.calm()
	for _, n := range s.nodes {
		_ = n.Close()
	}
	if s.rdb != nil {
		_ = s.rdb.Close()
	}
	return err
}

// mustService is one in this process.
func mustService(t *testing.T, cfg serviceConfig) *service {
	t.Helper()
	s, err := startService(cfg)
	testkit.Must(t, err)
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// fetchOn is the Fetcher of a service, with its cache in memory, over a Client of the test's.
func fetchOn(t *testing.T, c *flightlock.Client, opts fetch.Options) *service {
	t.Helper()
	s := &service{c: c}
	f, err := s.fetcher(c, opts)
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, f.Close(context.Background())) })
	s.f = f
	return s
}

// serviceMain serves until in ends or SIGTERM comes.
func serviceMain(in io.Reader, out io.Writer) int {
	var cfg serviceConfig
	if err := json.Unmarshal([]byte(os.Getenv(serviceEnv)), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	term, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, err := startService(cfg)
	enc := json.NewEncoder(out)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := enc.Encode(outcome{}); err != nil { // ready
		return 1
	}
	for dec := json.NewDecoder(bufio.NewReader(in)); term.Err() == nil; {
		var w workload
		if dec.Decode(&w) != nil {
			break
		}
		r := s.run(term, w)
		if term.Err() != nil { // so that what Close says is seen, too
			if err := s.close(); err != nil {
				r.Failed++
				r.Errors = []string{err.Error()}
			}
		}
		if enc.Encode(r) != nil {
			return 1
		}
	}
	if term.Err() == nil {
		_ = s.close()
	}
	return 0
}

// serviceProcess is a service in a process of its own.
type serviceProcess struct{ *procs.Child }

// startServiceProcess starts one; it is ready when ready returns.
func startServiceProcess(t *testing.T, cfg serviceConfig) *serviceProcess {
	t.Helper()
	env, err := json.Marshal(cfg)
	testkit.Must(t, err)
	return &serviceProcess{startChild(t, serviceEnv+"="+string(env))}
}

func (p *serviceProcess) ready(t *testing.T) {
	t.Helper()
	var r outcome
	testkit.Must(t, p.Receive(&r))
}

func (p *serviceProcess) run(w workload) (r outcome, err error) {
	err = p.Call(context.Background(), w, &r)
	return r, err
}

// startServiceProcesses starts n of them, and waits until they are ready.
func startServiceProcesses(t *testing.T, n int, cfg serviceConfig) (ps []*serviceProcess) {
	t.Helper()
	for range n {
		ps = append(ps, startServiceProcess(t, cfg))
	}
	for _, p := range ps {
		p.ready(t)
	}
	return ps
}

// runAll gives all processes the same workload at once, and adds the results up.
func runAll(t *testing.T, ps []*serviceProcess, w workload) (sum outcome, each []outcome) {
	t.Helper()
	each = make([]outcome, len(ps))
	errs := make([]error, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Go(func() { each[i], errs[i] = p.run(w) })
	}
	wg.Wait()
	testkit.Must(t, errors.Join(slices.Clone(errs)...))
	for _, r := range each {
		sum = sum.with(r)
	}
	return sum, each
}
