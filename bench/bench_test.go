package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/semaphore"
)

// The benchmarks to tune by: go test -bench . ./bench
//
// Names have the form nodes=N/goroutines=G/store=S/lock=L. The store is mini (miniredis in this
// process) and, where FLIGHTLOCK_BENCH_REDIS=host:port,host:port,... names servers, redis: for as
// many nodes as there are servers. The lock is flightlock, or a limit: semaphore and mutex need no
// Redis and show what a queue in one process can do at best (nodes=0/store=none); raw is SET NX PX
// and an EVALSHA that compares and deletes, on a plain go-redis client, and shows what two commands
// to one node cost. One driver runs them all, so the ratios within a run are honest.
//
// Here each op is one lock and its release; figures_test.go says where it is not. With store=mini,
// time and allocations contain those of the servers.

// benchServersEnv names real servers.
const benchServersEnv = "FLIGHTLOCK_BENCH_REDIS"

// benchTTL is the longest that is allowed by default, so that nothing expires in a long run and
// renewals are rare.
const benchTTL = time.Minute

// patientTimeout is the NodeTimeout where all nodes are healthy. It is far above the default: an
// embedded node needs 0.2 ms for a script, and any server may have to wait for the CPUs that the
// load needs as well. That should make a benchmark slower, not fail.
const patientTimeout = 30 * time.Second

func BenchmarkUncontended(b *testing.B) {
	forNodes(b, 1, 3, 5)(func(b *testing.B, s benchStore) {
		b.Run("store="+s.name+"/lock=flightlock", func(b *testing.B) { s.flightlock(b, 1, oneKey) })
		if len(s.urls) == 1 {
			b.Run("store="+s.name+"/lock=raw", func(b *testing.B) { s.raw(b, 1) })
		}
	})
}

func BenchmarkHotKey(b *testing.B) {
	for _, g := range benchGoroutines {
		b.Run(fmt.Sprintf("nodes=0/goroutines=%d/store=none/lock=semaphore", g),
			func(b *testing.B) { localSemaphore(b, g) })
		b.Run(fmt.Sprintf("nodes=0/goroutines=%d/store=none/lock=mutex", g),
			func(b *testing.B) { localMutex(b, g) })
	}
	forNodes(b, 1, 3, 5)(func(b *testing.B, s benchStore) {
		for _, g := range benchGoroutines {
			b.Run(fmt.Sprintf("goroutines=%d/store=%s/lock=flightlock", g, s.name), func(b *testing.B) {
				s.flightlock(b, g, oneKey)
			})
		}
	})
}

func BenchmarkDistinctKeys(b *testing.B) {
	forNodes(b, 1, 3, 5)(func(b *testing.B, s benchStore) {
		for _, g := range benchGoroutines {
			name := fmt.Sprintf("goroutines=%d/store=%s/lock=", g, s.name)
			b.Run(name+"flightlock", func(b *testing.B) { s.flightlock(b, g, keyEach) })
			if len(s.urls) == 1 {
				b.Run(name+"raw", func(b *testing.B) { s.raw(b, g) })
			}
		}
	})
}

// BenchmarkFirstLock is from Open to the first lock of a Client: connections, scripts, and what the nodes
// report of themselves. (The first Client of a process has a table to make as well.)
func BenchmarkFirstLock(b *testing.B) {
	forNodes(b, 1, 3, 5)(func(b *testing.B, s benchStore) {
		b.Run("store="+s.name, func(b *testing.B) {
			for b.Loop() {
				c := s.client(b, patientTimeout)
				l, err := c.SingleFlightLock(b.Context(), "first", benchTTL, nil)
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				err = errors.Join(l.Release(b.Context()), c.Close(b.Context()))
				if err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	})
}

var benchGoroutines = []int{1, 100, 1000}

// oneKey and keyEach say which key goroutine g locks.
func oneKey(int) string    { return "hot" }
func keyEach(g int) string { return "key:" + strconv.Itoa(g) }

// benchStore is the nodes of one sub-benchmark.
type benchStore struct {
	name   string // mini or redis
	urls   []string
	prefix string // of all keys
}

// forNodes returns a function that calls f, in a sub-benchmark per number of nodes, with every
// store that has so many.
func forNodes(b *testing.B, counts ...int) func(f func(*testing.B, benchStore)) {
	stores := benchStores(b)
	return func(f func(*testing.B, benchStore)) {
		for _, n := range counts {
			b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) {
				for _, s := range stores {
					if n <= len(s.urls) {
						s.urls = s.urls[:n]
						f(b, s)
					}
				}
			})
		}
	}
}

// benchStores starts the embedded nodes, and reads the environment for real ones. Keys go when the
// benchmark ends.
func benchStores(b *testing.B) []benchStore {
	mini := benchStore{name: "mini", prefix: "flightlock-bench:"}
	for range 5 {
		m := miniredis.RunT(b)
		m.ClockTTL(true)
		mini.urls = append(mini.urls, "redis://"+m.Addr())
	}
	list := os.Getenv(benchServersEnv)
	if list == "" {
		return []benchStore{mini}
	}
	urls, err := parseNodes(list)
	if err != nil {
		b.Fatalf("%s=%q: %v", benchServersEnv, list, err)
	}
	n := &nodes{urls: urls, prefix: "flightlock-bench:" + rand.Text()[:8] + ":"}
	if err := n.ping(b.Context()); err != nil {
		b.Fatalf("%s: %v", benchServersEnv, err)
	}
	b.Cleanup(func() {
		if err := n.cleanUp(context.Background()); err != nil {
			b.Logf("cleaning up: %v", err)
		}
	})
	return []benchStore{mini, {name: "redis", urls: urls, prefix: n.prefix}}
}

// client opens a flightlock client, closed when the benchmark ends. A nodeTimeout of 0 is the default.
func (s benchStore) client(b *testing.B, nodeTimeout time.Duration) *flightlock.Client {
	// Embedded nodes have no INFO server, which the quarantine needs.
	opts := flightlock.Options{KeyPrefix: s.prefix, NodeTimeout: nodeTimeout,
		DisableQuarantine: s.name == "mini"}
	c, err := flightlock.Open(opts, s.urls...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			b.Errorf("closing the client: %v", err)
		}
	})
	return c
}

// flightlock measures SingleFlightLock and Release.
func (s benchStore) flightlock(b *testing.B, goroutines int, key func(g int) string) {
	c := s.client(b, patientTimeout)
	keys := make([]string, goroutines)
	for g := range keys {
		keys[g] = key(g)
	}
	var before flightlock.Stats
	drive(b, goroutines, func() { before = c.Stats() }, func(ctx context.Context, g int) error {
		return lockAndRelease(ctx, c, keys[g])
	})
	b.ReportMetric(float64(c.Stats().Commands-before.Commands)/float64(b.N), "commands/lock")
}

func lockAndRelease(ctx context.Context, c *flightlock.Client, key string) error {
	l, err := c.SingleFlightLock(ctx, key, benchTTL, nil)
	if err != nil {
		return err
	}
	return l.Release(ctx)
}

// compareAndDelete is the release of the canonical lock.
var compareAndDelete = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then
	return redis.call('DEL', KEYS[1])
end
return 0`)

// raw measures the same by hand, every goroutine on a key of its own.
func (s benchStore) raw(b *testing.B, goroutines int) {
	opts, err := redis.ParseURL(s.urls[0])
	if err != nil {
		b.Fatal(err)
	}
	c := redis.NewClient(opts)
	b.Cleanup(func() { c.Close() })
	if err := compareAndDelete.Load(b.Context(), c).Err(); err != nil {
		b.Fatal(err)
	}
	keys := make([][]string, goroutines)
	for g := range keys {
		keys[g] = []string{s.prefix + "raw:" + strconv.Itoa(g)}
	}
	var owner atomic.Int64
	drive(b, goroutines, nil, func(ctx context.Context, g int) error {
		me := strconv.FormatInt(owner.Add(1), 10)
		args := redis.SetArgs{Mode: "NX", TTL: benchTTL}
		if err := c.SetArgs(ctx, keys[g][0], me, args).Err(); err != nil {
			return err
		}
		return compareAndDelete.EvalSha(ctx, c, keys[g], me).Err()
	})
	b.ReportMetric(2, "commands/lock") // by construction
}

// localSemaphore is the limit for a FIFO queue whose waiters can give up.
func localSemaphore(b *testing.B, goroutines int) {
	sem := semaphore.NewWeighted(1)
	drive(b, goroutines, nil, func(ctx context.Context, _ int) error {
		if err := sem.Acquire(ctx, 1); err != nil {
			return err
		}
		sem.Release(1)
		return nil
	})
}

// localMutex is the limit without FIFO and without giving up.
func localMutex(b *testing.B, goroutines int) {
	var mu sync.Mutex
	drive(b, goroutines, nil, func(context.Context, int) error {
		mu.Lock()
		//lint:ignore SA2001 an empty critical section is what is measured
		mu.Unlock()
		return nil
	})
}

// drive runs op b.N times, on goroutines that share one counter, each with a cancelable ctx of its
// own as a request in a service has one. Every goroutine runs op once before the clock starts, so
// that connects and first uses of a key are not measured; then begin is called, if it is not nil.
func drive(b *testing.B, goroutines int, begin func(), op func(ctx context.Context, g int) error) {
	b.Helper()
	start := make(chan struct{}) // closed when all are warm
	var next atomic.Int64
	var warm, done sync.WaitGroup
	var failed sync.Once
	for g := range goroutines {
		warm.Add(1)
		done.Go(func() {
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			err := op(ctx, g)
			warm.Done()
			<-start
			for err == nil && next.Add(1) <= int64(b.N) {
				err = op(ctx, g)
			}
			if err != nil {
				failed.Do(func() { b.Error(err) }) // a thousand goroutines tend to fail alike
			}
		})
	}
	warm.Wait()
	if begin != nil {
		begin()
	}
	b.ReportAllocs()
	b.ResetTimer()
	close(start)
	done.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "locks/s")
}
