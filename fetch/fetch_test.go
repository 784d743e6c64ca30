package fetch_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// fleet runs test in virtual time with Fetchers of one cache, each over a Client of its own.
func fleet(t *testing.T, processes int, cache *fetchkit.Cache, opts fetch.Options,
	test func(t *testing.T, nodes []*redistest.MemNode, fs []*fetch.Fetcher[string])) {
	t.Helper()
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var fs []*fetch.Fetcher[string]
		for range processes {
			fs = append(fs, fetchkit.New(t, lockkit.New(t, flightlock.Options{}, clients...), cache, opts))
		}
		test(t, nodes, fs)
	})
}

// getAll has n callers of each Fetcher get key, and returns what they got.
func getAll(ctx context.Context, n int, key string, fs ...*fetch.Fetcher[string]) (values map[string]int, errs []error) {
	values = map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, f := range fs {
		for range n {
			wg.Go(func() {
				v, err := f.Get(ctx, key)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					errs = append(errs, err)
				} else {
					values[v]++
				}
			})
		}
	}
	wg.Wait()
	return values, errs
}

func TestAKeyIsLoadedOnceInTheFleet(t *testing.T) {
	for _, takes := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 30 * time.Second} {
		for _, unstamped := range []bool{false, true} {
			cache := &fetchkit.Cache{Takes: takes, Unstamped: unstamped}
			fleet(t, 4, cache, fetch.Options{LoadTimeout: time.Minute}, func(t *testing.T, _ []*redistest.MemNode,
				fs []*fetch.Fetcher[string]) {
				misses := 10
				if takes > time.Second {
					misses = 1 // they poll for so long
				}
				for range misses {
					began := time.Now()
					values, errs := getAll(t.Context(), 250, "k", fs...)
					if len(values) != 1 || values[cache.Value("k")] != 1000 {
						t.Fatalf("values %v, errors %v", values, errors.Join(errs...))
					}
					if took := time.Since(began); took > takes+100*time.Millisecond {
						t.Errorf("it took %v", took)
					}
					cache.Drop("k")
				}
				if n := cache.Loads.Load(); n != int64(misses) {
					t.Errorf("%d loads for %d misses", n, misses)
				}
			})
		}
	}
}

func TestManyKeysAreLoadedOnceInTheFleet(t *testing.T) {
	cache := &fetchkit.Cache{Takes: 20 * time.Millisecond}
	fleet(t, 4, cache, fetch.Options{}, func(t *testing.T, _ []*redistest.MemNode, fs []*fetch.Fetcher[string]) {
		keys := fetchkit.Keys(0, 1000)
		var wg sync.WaitGroup
		for i, f := range fs {
			wg.Go(func() {
				some := append(keys[i*100:len(keys):len(keys)], keys[:i*100]...)
				values, err := f.GetMany(t.Context(), some)
				if err != nil || len(values) != len(keys) {
					t.Errorf("%d values, %v", len(values), err)
				}
				for key, v := range values {
					if v != cache.Value(key) {
						t.Errorf("%s: %s", key, v)
					}
				}
			})
		}
		wg.Wait()
		if n := cache.Loaded.Load(); n != int64(len(keys)) {
			t.Errorf("%d keys were loaded, in %d loads", n, cache.Loads.Load())
		}
		t.Logf("%d loads, %d lookups", cache.Loads.Load(), cache.Gets.Load())
	})
}
