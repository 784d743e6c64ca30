package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// manyOrigin is a stampedCache with functions for many keys.
type manyOrigin struct {
	stampedCache
	bulk    atomic.Int64 // calls of LoadMany
	lookups atomic.Int64 // calls of LookupMany
	stored  atomic.Int64 // calls of StoreManyStamped
	singles atomic.Int64 // lookups of one key

	load2 func(ctx context.Context, keys []string) (map[string]string, error) // replaces loadMany, if set

	mu2    sync.Mutex // guards what follows
	loaded map[string]int
}

func (s *manyOrigin) source() flightlock.Source[string] {
	src := s.stampedCache.source()
	src.LookupMany, src.LoadMany, src.StoreManyStamped = s.lookupMany, s.loadMany, s.storeMany
	src.LookupStamped = func(ctx context.Context, key string) (flightlock.Found[string], error) {
		s.singles.Add(1)
		return s.lookup(ctx, key)
	}
	load := src.Load
	src.Load = func(ctx context.Context, key string) (string, error) {
		s.count(key)
		return load(ctx, key)
	}
	return src
}

func (s *manyOrigin) count(keys ...string) {
	s.mu2.Lock()
	defer s.mu2.Unlock()
	if s.loaded == nil {
		s.loaded = map[string]int{}
	}
	for _, key := range keys {
		s.loaded[key]++
	}
}

// most is how many times the key that was loaded most often was.
func (s *manyOrigin) most() (most int) {
	s.mu2.Lock()
	defer s.mu2.Unlock()
	for _, n := range s.loaded {
		most = max(most, n)
	}
	return most
}

func (s *manyOrigin) lookupMany(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
	s.lookups.Add(1)
	if s.fails.Load() {
		return nil, errMine
	}
	found := map[string]flightlock.Found[string]{}
	for _, key := range keys {
		found[key], _ = s.lookup(ctx, key)
	}
	return found, nil
}

func (s *manyOrigin) loadMany(ctx context.Context, keys []string) (map[string]string, error) {
	s.bulk.Add(1)
	s.count(keys...)
	if s.load2 != nil {
		return s.load2(ctx, keys)
	}
	values := map[string]string{}
	for _, key := range keys {
		values[key] = fmt.Sprintf("%s=v%d", key, s.version.Load())
	}
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return values, nil
}

func (s *manyOrigin) storeMany(ctx context.Context, values, stamps map[string]string,
	locks map[string]*flightlock.Lock) error {
	s.stored.Add(1)
	failed := flightlock.KeyErrors{}
	for key, v := range values {
		if err := s.store(ctx, key, v, stamps[key], locks[key]); err != nil {
			failed[key] = err
		}
	}
	if len(failed) > 0 {
		return failed
	}
	return nil
}

// slowForK0 is a loadMany that takes no time unless k0 is loaded, but for that d of the bubble's time.
func slowForK0(d time.Duration) func(context.Context, []string) (map[string]string, error) {
	return func(_ context.Context, keys []string) (map[string]string, error) {
		if slices.Contains(keys, "k0") {
			time.Sleep(d)
		}
		values := map[string]string{}
		for _, key := range keys {
			values[key] = "v0"
		}
		return values, nil
	}
}

// manyTest is some Fetchers over one manyOrigin, each of a process of its own, in a bubble.
func manyTest(t *testing.T, processes int, opts flightlock.FetchOptions, change func(*flightlock.Source[string]),
	test func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode)) {
	t.Helper()
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		s := &manyOrigin{}
		s.takes = time.Second
		src := s.source()
		if change != nil {
			change(&src)
		}
		var fs []*flightlock.Fetcher[string]
		for range processes {
			c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...)
			f, err := flightlock.NewFetcher(c, src, opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := f.Close(context.Background()); err != nil {
					t.Error(err)
				}
			})
			fs = append(fs, f)
		}
		test(t, s, fs, nodes[0])
	})
}

func keysFrom(first, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint("k", first+i))
	}
	return keys
}

// wantMany fetches keys, and wants a value of this version for each.
func wantMany(t *testing.T, f *flightlock.Fetcher[string], keys []string, version string) {
	t.Helper()
	values, err := f.FetchMany(t.Context(), keys)
	if err != nil || len(values) != len(keys) {
		t.Errorf("%d values of %d keys, %v", len(values), len(keys), err)
	}
	for key, v := range values {
		if v != key+"="+version && v != version {
			t.Errorf("%s: %q, want %s", key, v, version)
		}
	}
}

// Missing keys are looked up, loaded and stored together, and found together afterwards.
func TestFetchManyLoadsTogether(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		keys := keysFrom(0, 100)
		began := time.Now()
		wantMany(t, fs[0], append(keys, keys[:10]...)[:100], "v0")
		if took := time.Since(began); took > s.takes+20*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		if s.bulk.Load() != 1 || s.lookups.Load() != 2 || s.stored.Load() != 1 ||
			s.stores.Load() != 100 || s.loads.Load() != 0 {
			t.Errorf("%d loads, %d lookups, %d stores", s.bulk.Load(), s.lookups.Load(), s.stored.Load())
		}
		wantMany(t, fs[0], keys, "v0")
		if got := fs[0].Stats(); got.Hits != 100 || got.Misses != 100 || got.Loads != 1 || s.lookups.Load() != 3 {
			t.Errorf("%+v, %d lookups", got, s.lookups.Load())
		}
	})
}

// Processes that fetch overlapping sets of keys at the same time load each key once, and wait for
// hardly more than a load.
func TestFetchManyLoadsEachKeyOnceInTheFleet(t *testing.T) {
	manyTest(t, 4, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		var wg sync.WaitGroup
		var worst atomic.Int64
		for i, f := range fs {
			for j := range 25 {
				wg.Go(func() {
					began := time.Now()
					keys := keysFrom((i*25+j)*3%300, 100)
					if j%2 == 1 {
						slices.Reverse(keys)
					}
					wantMany(t, f, keys, "v0")
					worst.Store(max(worst.Load(), int64(time.Since(began))))
				})
			}
		}
		wg.Wait()
		if s.most() != 1 {
			t.Errorf("a key was loaded %d times", s.most())
		}
		if took := time.Duration(worst.Load()); took > s.takes*11/10 {
			t.Errorf("somebody waited %v", took)
		}
	})
}

// What another process is loading is looked up together, until it is there; by no attempts for each key.
func TestKeysThatAreLoadedElsewhereAreAwaitedTogether(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.takes = 30 * time.Millisecond
		keys := keysFrom(0, 100)
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keys, "v0") })
		synctest.Wait()
		before, began := s.lookups.Load(), time.Now()
		wantMany(t, fs[1], keys, "v0")
		if took := time.Since(began); took > s.takes*14/10 {
			t.Errorf("it took %v", took)
		}
		wg.Wait()
		if n := s.lookups.Load() - before; n > 6 || s.singles.Load() > 2 || s.most() != 1 { // one waits for its lock
			t.Errorf("%d lookups of many keys, %d of single ones, loaded %d times", n, s.singles.Load(), s.most())
		}
	})
}

// Keys that are awaited together, and whose load elsewhere fails, or takes long, are loaded here, or waited for, as
// any other; runs that their callers have left end at once.
func TestKeysAreAwaitedTogetherForAWhile(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.takes = 20 * time.Millisecond
		var failing atomic.Bool
		failing.Store(true)
		s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
			time.Sleep(s.takes)
			values, failed := map[string]string{}, flightlock.KeyErrors{}
			for _, key := range keys {
				if failing.Load() {
					failed[key] = errMine
				} else {
					values[key] = "v0"
				}
			}
			if len(failed) > 0 {
				return nil, failed
			}
			return values, nil
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := fs[0].FetchMany(t.Context(), keysFrom(0, 100)); !errors.Is(err, errMine) {
				t.Error(err)
			}
			failing.Store(false)
		})
		synctest.Wait()
		wg.Go(func() { wantMany(t, fs[1], keysFrom(50, 50), "v0") })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := fs[1].FetchMany(ctx, keysFrom(0, 50)); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		began := time.Now()
		wg.Wait()
		if took := time.Since(began); took > 200*time.Millisecond {
			t.Errorf("it took %v", took)
		}
	})
}

// Single Fetches and FetchMany share loads, whichever comes first.
func TestFetchManySharesLoadsWithFetch(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		single := fetching(t.Context(), fs[0], "k3", 3)
		elsewhere := fetching(t.Context(), fs[1], "k4", 3)
		synctest.Wait()
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 10), "v0") })
		synctest.Wait()
		joined := fetching(t.Context(), fs[0], "k5", 3)
		other := fetching(t.Context(), fs[1], "k6", 3)
		wantAll(t, single, 3, "v0")
		wantAll(t, elsewhere, 3, "v0")
		wantAll(t, joined, 3, "k5=v0")
		wantAll(t, other, 3, "k6=v0")
		wg.Wait()
		if s.most() != 1 {
			t.Errorf("a key was loaded %d times", s.most())
		}
	})
}

// Each key has its own error: a KeyErrors, not found, a bad key.
func TestFetchManyErrors(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{ErrorHold: time.Minute}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
			values := map[string]string{}
			for _, key := range keys {
				if key != "none" && key != "bad" {
					values[key] = key + "=v0"
				}
			}
			return values, fmt.Errorf("some failed: %w", flightlock.KeyErrors{"bad": errMine})
		}
		keys := append(keysFrom(0, 5), "none", "bad", "", strings.Repeat("x", 5000))
		for round := range 2 {
			values, err := fs[0].FetchMany(t.Context(), keys)
			var many *flightlock.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 4 || len(values) != 5 {
				t.Fatalf("%v, %v", values, err)
			}
			for key, want := range map[string]error{"none": flightlock.ErrNotFound, "bad": errMine, "": flightlock.ErrInvalid} {
				if !errors.Is(many.Errors[key], want) || !errors.Is(err, want) {
					t.Errorf("%q: %v", key, many.Errors[key])
				}
			}
			var held *flightlock.HeldError
			if errors.As(many.Errors["bad"], &held) != (round == 1) {
				t.Errorf("round %d: %v", round, many.Errors["bad"])
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q", err)
			}
		}
		if n := s.bulk.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
	})
}

// A LoadMany that fails as a whole, or panics, is repeated in halves, and a half that fails alone once more, until
// only the key to blame has failed; that is not held. If both halves fail, it is not repeated.
func TestFetchManyInHalves(t *testing.T) {
	for name, fail := range map[string]func() (map[string]string, error){
		"error": func() (map[string]string, error) { return nil, errMine },
		"panic": func() (map[string]string, error) { panic(errMine) },
	} {
		t.Run(name, func(t *testing.T) {
			opts := flightlock.FetchOptions{ErrorHold: time.Minute}
			manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
				broken := true
				s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
					if broken && slices.Contains(keys, "k9") {
						return fail()
					}
					values := map[string]string{}
					for _, key := range keys {
						values[key] = key + "=v0"
					}
					return values, nil
				}
				values, err := fs[0].FetchMany(t.Context(), keysFrom(0, 10))
				var many *flightlock.ManyError
				if !errors.As(err, &many) || !errors.Is(err, errMine) ||
					len(many.Errors) != 1 || many.Errors["k9"] == nil || len(values) != 9 || s.bulk.Load() != 9 {
					t.Errorf("%d values, %v, %d loads", len(values), err, s.bulk.Load())
				}
				s.bulk.Store(0)
				values, err = fs[0].FetchMany(t.Context(), []string{"k9", "k10", "k11", "k12"})
				if !errors.As(err, &many) || len(many.Errors) != 1 || many.Errors["k9"] == nil ||
					len(values) != 3 || s.bulk.Load() != 5 {
					t.Errorf("%d values, %v, %d loads", len(values), err, s.bulk.Load())
				}
				s.bulk.Store(0)
				working := s.load2
				s.load2 = func(context.Context, []string) (map[string]string, error) { return fail() }
				values, err = fs[0].FetchMany(t.Context(), keysFrom(20, 10))
				if !errors.As(err, &many) || len(many.Errors) != 10 || len(values) != 0 || s.bulk.Load() != 3 {
					t.Errorf("an outage: %d values, %v, %d loads", len(values), err, s.bulk.Load())
				}
				s.load2 = working
				broken = false
				wantMany(t, fs[0], keysFrom(0, 10), "v0")
			})
		})
	}
}

// An origin that fails for all keys, each time as a whole, is left alone for ErrorHold after each time. That does not
// double for a key that others were loaded with, but for one that came to be loaded by itself.
func TestFetchManyFromAnOriginThatIsDown(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.load2 = func(context.Context, []string) (map[string]string, error) {
			time.Sleep(20 * time.Millisecond) // the bubble's time
			return nil, errMine
		}
		keys, began := keysFrom(0, 50), time.Now()
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				for time.Since(began) < 20*time.Second {
					if _, err := fs[i%2].FetchMany(t.Context(), keys); !errors.Is(err, errMine) {
						t.Error(err)
					}
					time.Sleep(50 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		if n := s.bulk.Load(); n > 400 { // each process, the whole and its halves; and not all keys at the same time
			t.Errorf("%d loads in 20 seconds", n)
		}
		s.load2 = nil
		time.Sleep(time.Second)
		if values, _ := fs[0].FetchMany(t.Context(), keys); len(values) < len(keys)*3/4 {
			t.Errorf("%d values of %d keys", len(values), len(keys))
		}
		time.Sleep(10 * time.Second)
		wantMany(t, fs[0], keys, "v0")
	})
}

// An invalidation during a bulk load: nothing is stored for that key, and later callers do not get it.
func TestFetchManyThroughAnInvalidation(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 10), "v0") })
		time.Sleep(s.takes / 2)
		s.change("k5")
		values, err := fs[0].FetchMany(t.Context(), keysFrom(0, 10))
		for key, v := range values {
			if want := "v0"; key != "k5" && v != key+"="+want || key == "k5" && !strings.HasSuffix(v, "v1") {
				t.Errorf("%s: %q", key, v)
			}
		}
		if err != nil || len(values) != 10 {
			t.Errorf("%d values, %v", len(values), err)
		}
		wg.Wait()
		if got := fs[0].Stats(); got.Outdated != 1 || s.stores.Load() != 10 {
			t.Errorf("%+v, %d stores", got, s.stores.Load())
		}
	})
}

// Without the nodes of the lock, and without the cache, many keys are one load.
func TestFetchManyInOutages(t *testing.T) {
	for _, cacheToo := range []bool{false, true} {
		manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			node.Down(true)
			s.fails.Store(cacheToo)
			wantMany(t, fs[0], keysFrom(0, 50), "v0")
			wantStores := int64(50)
			if cacheToo {
				wantStores = 0
			}
			if got := fs[0].Stats(); s.bulk.Load() != 1 || got.UnlockedLoads != 1 || s.stores.Load() != wantStores {
				t.Errorf("%+v, %d bulk loads, %d stores", got, s.bulk.Load(), s.stores.Load())
			}
		})
	}
}

// A cache that can be read and not written, because it is full or read-only, stores nothing. Processes that miss
// the same keys do not load one after the other then, each of them to find that the one before has stored nothing.
func TestProcessesDoNotQueueForACacheThatRefusesWrites(t *testing.T) {
	refuses := func(src *flightlock.Source[string]) {
		lookup, lookupMany := src.LookupStamped, src.LookupMany
		src.LookupStamped = func(ctx context.Context, key string) (flightlock.Found[string], error) {
			if flightlock.LoadFollows(ctx) {
				return flightlock.Found[string]{}, errMine
			}
			return lookup(ctx, key)
		}
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if flightlock.LoadFollows(ctx) {
				return nil, errMine
			}
			return lookupMany(ctx, keys)
		}
	}
	for _, many := range []bool{true, false} {
		manyTest(t, 8, flightlock.FetchOptions{}, refuses, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
		) {
			began := time.Now()
			var wg sync.WaitGroup
			for _, f := range fs {
				wg.Go(func() {
					if many {
						wantMany(t, f, keysFrom(0, 10), "v0")
					} else if v, err := f.Fetch(t.Context(), "k"); v != "v0" || err != nil {
						t.Errorf("%q, %v", v, err)
					}
				})
				time.Sleep(10 * time.Millisecond) // the first one has all locks
			}
			wg.Wait()
			if took := time.Since(began); took > 2*s.takes+s.takes/2 {
				t.Errorf("many=%v: it took %v, and a load %v", many, took, s.takes)
			}
		})
	}
}

// Without the nodes of the lock, the slot that a batch has among MaxLoads is for its load, also if there is no other.
func TestFetchManyWithMaxLoadsInAnOutage(t *testing.T) {
	for _, maxLoads := range []int{1, 3} {
		manyTest(t, 1, flightlock.FetchOptions{MaxLoads: maxLoads}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			node.Down(true)
			for range 2 {
				began := time.Now()
				var wg sync.WaitGroup
				for i := range maxLoads {
					wg.Go(func() { wantMany(t, fs[0], keysFrom(100*i, 20), "v0") })
					time.Sleep(time.Millisecond) // they do not share a load
				}
				wg.Wait()
				if took := time.Since(began); took > s.takes+s.takes/2 {
					t.Errorf("MaxLoads %d: it took %v, and a load %v", maxLoads, took, s.takes)
				}
				for i := range maxLoads {
					for _, key := range keysFrom(100*i, 20) {
						s.expire(key)
					}
				}
			}
		})
	}
}

// With MaxLoads one call of LoadMany is one load. Those that wait for a slot have one load, too.
func TestFetchManyWithMaxLoads(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{MaxLoads: 1}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() { wantMany(t, fs[0], keysFrom(100*i, 50), "v0") })
			time.Sleep(time.Millisecond) // callers that come at once have one load together
		}
		wg.Wait()
		if took := time.Since(began); s.bulk.Load() != 3 || took < 3*s.takes || took > 3*s.takes+300*time.Millisecond {
			t.Errorf("%d loads in %v", s.bulk.Load(), took)
		}
	})
}

// With MaxLoads a FetchMany that gets no slot has an error after WaitTimeout.
func TestFetchManyWithoutASlot(t *testing.T) {
	opts := flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 3 * time.Second}
	manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		s.takes = 10 * time.Second
		getsNoSlot(t, fs[0], opts.WaitTimeout)
	})
}

// getsNoSlot checks that a FetchMany has an error after wait, while another has the only slot for longer.
func getsNoSlot(t *testing.T, f *flightlock.Fetcher[string], wait time.Duration) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() { wantMany(t, f, keysFrom(0, 2), "v0") })
	synctest.Wait()
	began := time.Now()
	_, err := f.FetchMany(t.Context(), keysFrom(10, 2))
	took := time.Since(began)
	if !errors.Is(err, flightlock.ErrNotAcquired) || took < wait || took > wait+time.Second {
		t.Errorf("%v after %v", err, took)
	}
	wg.Wait()
}

// Also where a node may take longer to answer than the wait may last.
func TestFetchManyWithoutASlotAndSlowNodes(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		s := &manyOrigin{}
		s.takes = 20 * time.Second
		opts := flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 3 * time.Second}
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 10 * time.Second}, clients...)
		f, err := flightlock.NewFetcher(c, s.source(), opts)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close(context.Background())
		getsNoSlot(t, f, opts.WaitTimeout)
	})
}

// A FetchMany that waits for a slot has the values that other processes load meanwhile, as a Fetch has.
func TestFetchManyWithoutASlotFindsValues(t *testing.T) {
	for _, many := range []bool{false, true} {
		opts := flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 10 * time.Second}
		change := func(src *flightlock.Source[string]) {
			if !many {
				src.LookupMany = nil
			}
		}
		manyTest(t, 2, opts, change, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
		) {
			s.load2 = slowForK0(20 * time.Second) // longer than all that follows
			var wg sync.WaitGroup
			wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 2), "v0") }) // it has the slot
			synctest.Wait()
			began := time.Now()
			wg.Go(func() {
				if wantMany(t, fs[0], keysFrom(10, 3), "v0"); time.Since(began) > 3*time.Second {
					t.Errorf("it took %v", time.Since(began))
				}
			})
			synctest.Wait()
			wantMany(t, fs[1], keysFrom(10, 3), "v0")
			wg.Wait()
		})
	}
}

// A FetchMany inside a load needs no slot, and one that would wait for its own load is refused.
func TestFetchManyInsideALoad(t *testing.T) {
	opts := flightlock.FetchOptions{MaxLoads: 1}
	manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		s.load2 = func(ctx context.Context, keys []string) (map[string]string, error) {
			values := map[string]string{}
			for _, key := range keys {
				values[key] = key + "=v0"
			}
			if slices.Contains(keys, "k1") {
				inner, err := fs[0].FetchMany(ctx, []string{"i1", "i2", "k2"})
				var many *flightlock.ManyError
				if !errors.As(err, &many) || len(many.Errors) != 1 ||
					!errors.Is(many.Errors["k2"], flightlock.ErrInvalid) || len(inner) != 2 {
					t.Errorf("%v, %v", inner, err)
				}
			}
			return values, nil
		}
		wantMany(t, fs[0], keysFrom(0, 5), "v0")
	})
}

// A LoadMany that ignores its ctx fails after LoadTimeout, and its keys are not loaded again before it
// returns.
func TestFetchManyThatGoesOn(t *testing.T) {
	opts := flightlock.FetchOptions{LoadTimeout: time.Second, ErrorHold: -1}
	manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		var quick atomic.Bool
		s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
			if !quick.Load() {
				time.Sleep(10 * time.Second)
				return nil, nil
			}
			values := map[string]string{}
			for _, key := range keys {
				values[key] = "v0"
			}
			return values, nil
		}
		for range 2 {
			_, err := fs[0].FetchMany(t.Context(), keysFrom(0, 3))
			if err == nil || !strings.Contains(err.Error(), "LoadMany continues") || errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		}
		if n := s.bulk.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
		time.Sleep(10 * time.Second)
		quick.Store(true)
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
	})
}

// The caller may leave; a load that has begun is stored.
func TestFetchManyWhoseCallerLeaves(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		ctx, cancel := context.WithTimeout(t.Context(), s.takes/2)
		defer cancel()
		values, err := fs[0].FetchMany(ctx, keysFrom(0, 10))
		if len(values) != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, %v", values, err)
		}
		time.Sleep(s.takes)
		if n := s.stores.Load(); n != 10 {
			t.Errorf("%d stores", n)
		}
	})
}

// Stale keys are served at once, and loaded anew together.
func TestFetchManyOfStaleKeys(t *testing.T) {
	for _, wait := range []time.Duration{0, 2 * time.Second} {
		opts := flightlock.FetchOptions{StaleWait: wait}
		manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			keys := keysFrom(0, 20)
			for _, key := range keys {
				s.set(key, stampedEntry{value: "old", stale: true})
			}
			want := "old"
			if wait > 0 {
				want = "v0"
			}
			began := time.Now()
			wantMany(t, fs[0], keys, want)
			if took := time.Since(began); took > min(wait, s.takes)+20*time.Millisecond {
				t.Errorf("it took %v", took)
			}
			time.Sleep(2 * s.takes)
			wantMany(t, fs[0], keys, "v0")
			if n := s.bulk.Load(); n != 1 || s.most() != 1 {
				t.Errorf("%d loads", n)
			}
		})
	}
}

// While another process refreshes stale keys, hits hardly ever try their locks; and when it has died, they are
// refreshed here.
func TestStaleKeysThatAreRefreshedElsewhere(t *testing.T) {
	for _, n := range []int{1, 50} {
		manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			keys := keysFrom(0, n)
			hit := func(f *flightlock.Fetcher[string]) {
				if n > 1 {
					wantMany(t, f, keys, "v0")
				} else if v, err := f.Fetch(t.Context(), keys[0]); v != "v0" || err != nil {
					t.Errorf("%q, %v", v, err)
				}
			}
			other := lockkit.New(t, flightlock.Options{}, node.Client(t))
			for _, key := range keys {
				s.set(key, stampedEntry{value: "v0", stale: true})
				if _, err := other.TryLock(t.Context(), key, 3*time.Second); err != nil { // and nobody releases it
					t.Fatal(err)
				}
			}
			hit(fs[0])
			synctest.Wait()
			before := node.Mini.CommandCount()
			for range 1000 {
				time.Sleep(time.Millisecond) // the bubble's time
				hit(fs[0])
			}
			if got := node.Mini.CommandCount() - before; got > 60*n {
				t.Errorf("1000 hits on %d keys: %d commands to the node of the locks", n, got)
			}
			for range 30 {
				time.Sleep(100 * time.Millisecond)
				hit(fs[0])
			}
			synctest.Wait()
			if got := fs[0].Stats().Loads; got == 0 {
				t.Error("nothing was refreshed")
			}
		})
	}
}

// More keys than MaxBatch are several calls.
func TestFetchManyInBatches(t *testing.T) {
	opts := flightlock.FetchOptions{MaxBatch: 30}
	manyTest(t, 1, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		began := time.Now()
		wantMany(t, fs[0], keysFrom(0, 100), "v0")
		if took := time.Since(began); s.bulk.Load() != 4 || took > s.takes+20*time.Millisecond {
			t.Errorf("%d loads in %v", s.bulk.Load(), took)
		}
	})
}

// A Source without functions for many keys is used key by key, all at the same time.
func TestFetchManyOfASourceForSingleKeys(t *testing.T) {
	without := func(src *flightlock.Source[string]) {
		src.LookupMany, src.LoadMany, src.StoreManyStamped = nil, nil, nil
	}
	manyTest(t, 2, flightlock.FetchOptions{}, without, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		began := time.Now()
		var wg sync.WaitGroup
		for _, f := range fs {
			wg.Go(func() { wantMany(t, f, keysFrom(0, 50), "v0") })
		}
		wg.Wait()
		if took := time.Since(began); s.loads.Load() != 50 || took > s.takes+100*time.Millisecond {
			t.Errorf("%d loads in %v", s.loads.Load(), took)
		}
		wantMany(t, fs[0], keysFrom(0, 50), "v0")
	})
}

// A Source without stamps stores with its locks.
func TestFetchManyWithoutStamps(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		src := o.Source()
		var locked, calls atomic.Int64
		src.LoadMany = func(ctx context.Context, keys []string) (map[string]string, error) {
			calls.Add(1)
			values := map[string]string{}
			for _, key := range keys {
				values[key] = key + "=v0"
			}
			return values, nil
		}
		src.StoreMany = func(_ context.Context, values map[string]string, locks map[string]*flightlock.Lock) error {
			for key, v := range values {
				if locks[key].Err() == nil && locks[key].Key() == key {
					locked.Add(1)
				}
				o.Set(key, v, false)
			}
			return nil
		}
		f, err := flightlock.NewFetcher(lockkit.New(t, flightlock.Options{}, clients...), src, flightlock.FetchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wantMany(t, f, keysFrom(0, 20), "v0")
		wantMany(t, f, keysFrom(0, 20), "v0")
		if locked.Load() != 20 || calls.Load() != 1 {
			t.Errorf("%d with locks, %d loads", locked.Load(), calls.Load())
		}
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
		values, err := f.FetchMany(t.Context(), keysFrom(0, 2))
		if !errors.Is(err, flightlock.ErrClosed) || len(values) != 0 {
			t.Errorf("%v, %v", slices.Collect(maps.Keys(values)), err)
		}
	})
}

// A Store may lock its own key, as a Load may: also that of a value that was loaded with others. Otherwise it would
// wait for itself, for as long as the lock is kept.
func TestStoresOfManyValuesNestTheirLocks(t *testing.T) {
	for _, together := range []bool{false, true} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			c, o := lockkit.New(t, flightlock.Options{}, clients...), &lockkit.Origin{}
			src := o.Source()
			src.LoadMany = func(_ context.Context, keys []string) (map[string]string, error) {
				values := map[string]string{}
				for _, key := range keys {
					values[key] = key + "=v0"
				}
				return values, nil
			}
			src.Store = func(ctx context.Context, key, v string, l *flightlock.Lock) error {
				return c.Do(ctx, key, time.Second, nil, func(_ context.Context, nested *flightlock.Lock) error {
					if nested.Fence() != l.Fence() {
						t.Errorf("%s: another lock", key)
					}
					o.Set(key, v, false)
					return nil
				})
			}
			if together {
				src.StoreMany = func(ctx context.Context, values map[string]string, locks map[string]*flightlock.Lock) error {
					failed := flightlock.KeyErrors{}
					for key, v := range values {
						if err := src.Store(ctx, key, v, locks[key]); err != nil {
							failed[key] = err
						}
					}
					if len(failed) > 0 {
						return failed
					}
					return nil
				}
			}
			f, err := flightlock.NewFetcher(c, src, flightlock.FetchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if v, err := f.Fetch(t.Context(), "one"); err != nil {
				t.Error(v, err)
			}
			wantMany(t, f, keysFrom(0, 3), "v0")
			if err := f.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if s, took := f.Stats(), time.Since(began); s.StoreFailures > 0 || took > time.Second {
				t.Errorf("together: %v: %d values were not stored, after %v", together, s.StoreFailures, took)
			}
		})
	}
}

// A LoadMany that fails as a whole is repeated in halves. One that continues after LoadTimeout fails its own keys,
// which can be loaded again as soon as it returns; the other half has its values at once, or is not loaded if no time
// is left.
func TestAHalfThatContinuesAfterLoadTimeout(t *testing.T) {
	for _, which := range []int64{0, 1} {
		t.Run(fmt.Sprint("half ", which), func(t *testing.T) {
			opts := flightlock.FetchOptions{LoadTimeout: time.Second, ErrorHold: -1, MaxLoads: 2}
			manyTest(t, 2, opts, nil, func(
				t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
			) {
				var calls atomic.Int64
				s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
					values := map[string]string{}
					for _, key := range keys {
						values[key] = "v0"
					}
					switch calls.Add(1) {
					case 1:
						return nil, errMine
					case 2 + which:
						time.Sleep(5 * time.Second)
						return nil, errMine
					}
					return values, nil
				}
				keys, began := keysFrom(0, 4), time.Now()
				values, err := fs[0].FetchMany(t.Context(), keys)
				if took := time.Since(began); err == nil || len(values) != 2*int(which) || took > 1200*time.Millisecond {
					t.Errorf("%v, %v after %v", values, err, took)
				}
				wantMany(t, fs[1], keys, "v0") // no lock is held
				time.Sleep(5 * time.Second)
				for _, key := range keys {
					s.set(key, stampedEntry{})
				}
				wantMany(t, fs[0], keys, "v0")
				synctest.Wait()
				if n := fs[0].Stats().Running; n != 0 {
					t.Errorf("%d keys are being loaded", n)
				}
			})
		})
	}
}

// Nothing is looked up for a caller whose ctx has ended, except what was begun before: ctx limits its wait.
func TestFetchManyLooksNothingUpAfterItsCtx(t *testing.T) {
	for _, together := range []bool{true, false} {
		manyTest(t, 1, flightlock.FetchOptions{MaxBatch: 100}, func(src *flightlock.Source[string]) {
			src.LookupStamped = func(context.Context, string) (flightlock.Found[string], error) {
				time.Sleep(100 * time.Millisecond) // the bubble's time
				return flightlock.Found[string]{}, nil
			}
			src.LookupMany = nil
			if together {
				src.LookupMany = func(context.Context, []string) (map[string]flightlock.Found[string], error) {
					time.Sleep(100 * time.Millisecond) // the bubble's time
					return nil, nil
				}
			}
		}, func(t *testing.T, _ *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
			defer cancel()
			began := time.Now()
			_, err := fs[0].FetchMany(ctx, keysFrom(0, 10_000))
			if took := time.Since(began); took > 300*time.Millisecond || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("together %v: it took %v", together, took)
			}
			var many *flightlock.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 10_000 {
				t.Error("not the error of all keys")
			}
		})
	}
}

// Close returns when no goroutine of the Fetcher is left: also none that looks up for callers of FetchMany that have
// left.
func TestCloseAwaitsGatheredLookups(t *testing.T) {
	t.Run("until they end", func(t *testing.T) { closesWhileOneLooksUp(t, 2*time.Minute) })
	t.Run("until it ends them", func(t *testing.T) { closesWhileOneLooksUp(t, time.Second) })
}

func closesWhileOneLooksUp(t *testing.T, patience time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		var inside atomic.Int64
		src := nothingStored()
		src.LookupMany = func(ctx context.Context, _ []string) (map[string]flightlock.Found[string], error) {
			inside.Add(1)
			defer inside.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		f := fetcherOnOneNode(t, src, flightlock.FetchOptions{LookupTimeout: time.Minute})
		var wg sync.WaitGroup
		many := func(d time.Duration) {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), d)
				defer cancel()
				if _, err := f.FetchMany(ctx, []string{"a", "b"}); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		many(time.Second)
		many(time.Second)
		many(2 * time.Second)
		wg.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := f.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if n := inside.Load(); n > 0 {
			t.Errorf("%d LookupMany are running after Close", n)
		}
		time.Sleep(2 * time.Minute) // or the bubble would report it, too
	})
}

// Close with an ended ctx while keys are looked up together, with their locks: callers get ErrClosed, whatever the
// policy, and it is no failure of the cache.
func TestCloseDuringTheLookupOfABatch(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.FailClosed, flightlock.LoadLocally} {
		manyTest(t, 1, flightlock.FetchOptions{OnUnavailable: policy}, func(src *flightlock.Source[string]) {
			lookup := src.LookupMany
			src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
				if flightlock.LoadFollows(ctx) {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return lookup(ctx, keys)
			}
		}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			errs := make(chan error)
			go func() {
				_, err := fs[0].FetchMany(t.Context(), keysFrom(0, 3))
				errs <- err
			}()
			time.Sleep(100 * time.Millisecond) // the bubble's time: until they are looked up
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			closed := make(chan error, 1)
			go func() { closed <- fs[0].Close(ctx) }()
			var many *flightlock.ManyError
			if err := <-errs; !errors.As(err, &many) {
				t.Fatal(err)
			}
			for key, err := range many.Errors {
				if !errors.Is(err, flightlock.ErrClosed) {
					t.Errorf("%v, %s: %v", policy, key, err)
				}
			}
			if err := <-closed; err != nil {
				t.Error(err)
			}
			if s := fs[0].Stats(); s.LookupErrors+s.LoadFailures+s.Loads != 0 {
				t.Errorf("%v: %+v", policy, s)
			}
			if n := s.bulk.Load(); n != 0 {
				t.Errorf("%d calls of LoadMany", n)
			}
		})
	}
}

// After Close no LookupMany begins.
func TestNoLookupBeginsAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed atomic.Bool
		var late atomic.Int64
		src := nothingStored()
		src.LookupMany = func(context.Context, []string) (map[string]flightlock.Found[string], error) {
			if closed.Load() {
				late.Add(1)
			}
			time.Sleep(500 * time.Millisecond) // the bubble's time
			return nil, nil
		}
		f := fetcherOnOneNode(t, src, flightlock.FetchOptions{})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				v, err := f.FetchMany(t.Context(), []string{"a", "b"})
				if !errors.Is(err, flightlock.ErrClosed) {
					t.Error(v, err)
				}
			})
			synctest.Wait()
		}
		if err := f.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		closed.Store(true)
		wg.Wait()
		if n := late.Load(); n > 0 {
			t.Errorf("%d LookupMany began after Close", n)
		}
	})
}

// nothingStored is a Source of a cache that stays empty.
func nothingStored() flightlock.Source[string] {
	return flightlock.Source[string]{
		Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { return "", flightlock.Miss, nil },
		Load:   func(context.Context, string) (string, error) { return "new", nil },
		Store:  func(context.Context, string, string, *flightlock.Lock) error { return nil },
	}
}

func fetcherOnOneNode(t *testing.T, src flightlock.Source[string],
	opts flightlock.FetchOptions) *flightlock.Fetcher[string] {
	t.Helper()
	nodes := flightlocktest.Start(1)
	t.Cleanup(nodes.Close)
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := flightlock.NewFetcher(c, src, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close(context.Background()) })
	return f
}

// FetchOptions.Values is called at most once per caller.
func TestValuesOncePerCaller(t *testing.T) {
	t.Run("FetchMany of stale keys", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			src := nothingStored()
			src.Lookup = func(context.Context, string) (string, flightlock.Freshness, error) {
				return "old", flightlock.Stale, nil
			}
			f := fetcherOnOneNode(t, src, flightlock.FetchOptions{
				Values: func(ctx context.Context) context.Context { calls.Add(1); return ctx },
			})
			if _, err := f.FetchMany(t.Context(), []string{"a", "b", "c"}); err != nil {
				t.Fatal(err)
			}
			if n := calls.Load(); n > 1 {
				t.Errorf("%d calls for one caller", n)
			}
		})
	})
	t.Run("FetchMany that shares a lookup", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			calls := map[any]int{}
			type id struct{}
			src := nothingStored()
			src.LookupMany = func(context.Context, []string) (map[string]flightlock.Found[string], error) {
				time.Sleep(100 * time.Millisecond) // the bubble's time
				return nil, nil
			}
			f := fetcherOnOneNode(t, src, flightlock.FetchOptions{Values: func(ctx context.Context) context.Context {
				mu.Lock()
				defer mu.Unlock()
				calls[ctx.Value(id{})]++
				return ctx
			}})
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() {
					_, _ = f.FetchMany(context.WithValue(t.Context(), id{}, i), []string{fmt.Sprint("a", i), fmt.Sprint("b", i)})
				})
			}
			wg.Wait()
			for i, n := range calls {
				if n > 1 {
					t.Errorf("%d calls for caller %v", n, i)
				}
			}
		})
	})
}
