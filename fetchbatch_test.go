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
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// wantUnlocked checks that another process can lock keys, which therefore nobody has.
func wantUnlocked(t *testing.T, node *redistest.MemNode, keys []string) {
	t.Helper()
	c := lockkit.New(t, flightlock.Options{}, node.Client(t))
	for _, key := range keys {
		l, err := c.TryLock(t.Context(), key, time.Second)
		if err != nil {
			t.Errorf("%s: %v", key, err)
			continue
		}
		lockkit.Release(t, l)
	}
}

// wantManyErrors fetches keys, and wants this error for each of them.
func wantManyErrors(t *testing.T, f *flightlock.Fetcher[string], keys []string, want error) {
	t.Helper()
	values, err := f.FetchMany(t.Context(), keys)
	var many *flightlock.ManyError
	if !errors.As(err, &many) || len(many.Errors) != len(keys) || len(values) != 0 {
		t.Errorf("%v, %v", values, err)
		return
	}
	for key, err := range many.Errors {
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", key, err, want)
		}
	}
}

// Values that are there when their locks are won are served, and the locks and the slot given back: with a LookupMany
// and without.
func TestABatchThatFindsItsValuesReleases(t *testing.T) {
	for _, many := range []bool{true, false} {
		var s *manyOrigin
		var once sync.Once
		fill := func(ctx context.Context) {
			if !flightlock.LoadFollows(ctx) {
				return
			}
			once.Do(func() {
				for _, key := range keysFrom(0, 3) {
					s.set(key, stampedEntry{value: "found"})
				}
			})
		}
		change := func(src *flightlock.Source[string]) {
			lookup, lookupMany := src.LookupStamped, src.LookupMany
			src.LookupStamped = func(ctx context.Context, key string) (flightlock.Found[string], error) {
				fill(ctx)
				return lookup(ctx, key)
			}
			src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
				fill(ctx)
				return lookupMany(ctx, keys)
			}
			if !many {
				src.LookupMany = nil
			}
		}
		opts := flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 5 * time.Second}
		manyTest(t, 1, opts, change, func(
			t *testing.T, origin *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s = origin
			wantMany(t, fs[0], keysFrom(0, 3), "found")
			synctest.Wait()
			wantUnlocked(t, node, keysFrom(0, 3))
			if s := fs[0].Stats(); s.Loads != 0 || s.Running != 0 {
				t.Errorf("many %v: %+v", many, s)
			}
			wantMany(t, fs[0], keysFrom(10, 3), "v0")
		})
	}
}

// What is found when the locks are won is not for those that come after an invalidation, while the locks are released.
func TestWhatABatchFindsIsForThoseBefore(t *testing.T) {
	var s *manyOrigin
	var filled atomic.Bool // once
	change := func(src *flightlock.Source[string]) {
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if flightlock.LoadFollows(ctx) && filled.CompareAndSwap(false, true) {
				for _, key := range keys {
					s.set(key, stampedEntry{value: "found"})
				}
			}
			return lookup(ctx, keys)
		}
	}
	manyTest(t, 1, flightlock.FetchOptions{}, change, func(
		t *testing.T, origin *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		s = origin
		node.SetDelay(20 * time.Millisecond)
		keys := keysFrom(0, 3)
		wantMany(t, fs[0], keys, "found")
		for _, key := range keys {
			s.change(key)
		}
		if fs[0].Stats().Running == 0 {
			t.Error("the locks have been released already")
		}
		wantMany(t, fs[0], keys, "v3")
	})
}

// With FailClosed nothing is loaded after a lookup that has failed, and the callers have its error: the first lookup,
// and that under the locks, which are released.
func TestABatchWithFailClosedReportsItsLookup(t *testing.T) {
	for _, second := range []bool{false, true} {
		change := func(src *flightlock.Source[string]) {
			lookup := src.LookupMany
			src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
				if flightlock.LoadFollows(ctx) == second {
					return nil, errMine
				}
				return lookup(ctx, keys)
			}
		}
		opts := flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed}
		manyTest(t, 1, opts, change, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			wantManyErrors(t, fs[0], keysFrom(0, 3), errMine)
			synctest.Wait()
			wantUnlocked(t, node, keysFrom(0, 3))
			if st := fs[0].Stats(); st.Loads != 0 || st.LookupErrors != 3 {
				t.Errorf("second %v: %+v", second, st)
			}
		})
	}
}

// Keys that are to be loaded without locks while all slots for that are in use are loaded when one is free.
func TestABatchWithoutLocksAndSlots(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{MaxUnlockedLoads: 1}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.fails.Store(true)
		s.takes = 100 * time.Millisecond
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 3), "v0") })
		synctest.Wait()
		wantMany(t, fs[0], keysFrom(10, 3), "v0")
		wg.Wait()
		synctest.Wait()
		// None is looked up again before its load: the cache does not answer.
		st := fs[0].Stats()
		if s.most() != 1 || st.UnlockedLoads != st.Loads || st.LookupErrors != 6 || st.Running != 0 {
			t.Errorf("%d loads of one key; %+v", s.most(), st)
		}
	})
}

// What many callers miss while nothing can be locked is loaded by one LoadMany for each of their batches, also by those
// that have to wait because MaxUnlockedLoads are running: not key by key.
func TestBatchesWithoutLocksWaitForSlots(t *testing.T) {
	for _, cacheToo := range []bool{false, true} {
		manyTest(t, 1, flightlock.FetchOptions{MaxUnlockedLoads: 2}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			node.Down(true)
			s.fails.Store(cacheToo)
			s.takes = 200 * time.Millisecond
			began := time.Now()
			var wg sync.WaitGroup
			for i := range 10 {
				wg.Go(func() { wantMany(t, fs[0], keysFrom(100*i, 20), "v0") })
				time.Sleep(2 * time.Millisecond) // they do not share a load
			}
			wg.Wait()
			if took := time.Since(began); took > 6*s.takes || s.bulk.Load() != 10 || fs[0].Stats().Loads != 10 {
				t.Errorf("%v, %d of many keys; %+v", took, s.bulk.Load(), fs[0].Stats())
			}
		})
	}
}

// Keys that wait to be loaded without locks are locked after all when a node is back, or the cache answers. Of those
// that wait together, each does so by itself.
func TestBatchesWithoutLocksAreLockedAfterAll(t *testing.T) {
	for _, down := range []string{"node", "cache", "half of the cache"} {
		var failing atomic.Bool
		change := func(src *flightlock.Source[string]) {
			lookup := src.LookupMany
			src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
				if !failing.Load() {
					return lookup(ctx, keys)
				}
				failed := flightlock.KeyErrors{}
				for _, key := range keys {
					if key == "k10" {
						failed[key] = errMine
					}
				}
				found, _ := lookup(ctx, keys)
				return found, failed
			}
		}
		opts := flightlock.FetchOptions{
			MaxUnlockedLoads: 1, WaitTimeout: 20 * time.Second, LoadTimeout: 20 * time.Second,
		}
		manyTest(t, 1, opts, change, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s.load2 = slowForK0(10 * time.Second) // longer than all that follows
			node.Down(down == "node")
			s.fails.Store(down != "node")
			var wg sync.WaitGroup
			wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 2), "v0") }) // it has the slot
			time.Sleep(time.Second)
			wg.Go(func() { wantMany(t, fs[0], keysFrom(10, 3), "v0") })
			time.Sleep(time.Second)
			failing.Store(down == "half of the cache")
			s.fails.Store(false)
			node.Down(false)
			time.Sleep(4 * time.Second)
			want := []string{"k10", "k11", "k12"}
			if failing.Load() {
				want = want[1:]
			}
			var got []string
			s.mu.Lock()
			for key, e := range s.entries {
				if e.value != "" {
					got = append(got, key)
				}
			}
			s.mu.Unlock()
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("%s: stored %v, want %v", down, got, want)
			}
			if got := fs[0].Stats(); got.UnlockedLoads != 1 || got.Loads != 2 {
				t.Errorf("%s: %+v", down, got)
			}
			failing.Store(false)
			wg.Wait()
			if got := fs[0].Stats(); got.UnlockedLoads > 2 || s.most() != 1 {
				t.Errorf("%s: %+v, %d loads of one key", down, got, s.most())
			}
		})
	}
}

// So are those that have waited for their locks one by one.
func TestKeysThatHaveWaitedAreLockedAfterAll(t *testing.T) {
	opts := flightlock.FetchOptions{
		MaxUnlockedLoads: 1, WaitTimeout: 20 * time.Second, LoadTimeout: 20 * time.Second,
	}
	manyTest(t, 1, opts, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		s.load2 = slowForK0(10 * time.Second) // longer than all that follows
		var wg sync.WaitGroup
		node.Down(true)
		wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 2), "v0") }) // it has the slot
		time.Sleep(time.Second)
		node.Down(false)
		time.Sleep(time.Second)
		other := lockkit.New(t, flightlock.Options{}, node.Client(t))
		var locks []*flightlock.Lock
		for _, key := range keysFrom(10, 3) {
			l, err := other.SingleFlightLock(t.Context(), key, time.Minute, nil)
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, l)
		}
		began := time.Now()
		wg.Go(func() {
			if wantMany(t, fs[0], keysFrom(10, 3), "v0"); time.Since(began) > 6*time.Second {
				t.Errorf("it took %v", time.Since(began))
			}
		})
		time.Sleep(time.Second)
		node.Down(true)
		time.Sleep(time.Second)
		node.Down(false)
		for _, l := range locks {
			_ = l.Release(t.Context())
		}
		wg.Wait()
		if got := fs[0].Stats(); got.UnlockedLoads != 1 || got.Loads > 4 || s.most() != 1 {
			t.Errorf("%+v, %d loads of one key", got, s.most())
		}
	})
}

// Callers whose keys get no slot have an error that says why there were no locks, after WaitTimeout.
func TestBatchesWithoutLocksThatGetNoSlot(t *testing.T) {
	for _, want := range []error{flightlock.ErrUnavailable, errMine} {
		opts := flightlock.FetchOptions{
			MaxUnlockedLoads: 1, WaitTimeout: 3 * time.Second, LoadTimeout: 20 * time.Second,
		}
		manyTest(t, 1, opts, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			node.Down(true)
			s.fails.Store(want == errMine) //nolint:errorlint // it is that one
			s.takes = 10 * time.Second
			var wg sync.WaitGroup
			wg.Go(func() { wantMany(t, fs[0], keysFrom(0, 2), "v0") })
			time.Sleep(time.Second)
			began := time.Now()
			_, err := fs[0].FetchMany(t.Context(), keysFrom(10, 3))
			if took := time.Since(began); took < opts.WaitTimeout || took > 2*opts.WaitTimeout {
				t.Errorf("it took %v", took)
			}
			var failed *flightlock.ManyError
			if !errors.As(err, &failed) || len(failed.Errors) != 3 {
				t.Fatal(err)
			}
			for key, err := range failed.Errors {
				if !errors.Is(err, want) || !strings.Contains(err.Error(), "MaxUnlockedLoads, 1, are running") ||
					!strings.Contains(err.Error(), `"`+key+`"`) {
					t.Errorf("%s: %v", key, err)
				}
			}
			wg.Wait()
		})
	}
}

// A StoreMany that does not end with its ctx keeps neither callers nor locks. That it has failed is counted when it
// returns.
func TestAStoreOfManyThatContinuesAfterItsTime(t *testing.T) {
	for _, panics := range []bool{false, true} {
		var reported atomic.Int64
		opts := flightlock.FetchOptions{TTL: 2 * time.Second, OnError: func(_, op string, err error) {
			var p *flightlock.PanicError
			if op == "store" && (errors.Is(err, errMine) || errors.As(err, &p)) {
				reported.Add(1)
			}
		}}
		change := func(src *flightlock.Source[string]) {
			src.StoreManyStamped = func(context.Context, map[string]string, map[string]string,
				map[string]*flightlock.Lock) error {
				time.Sleep(time.Minute) // the bubble's time
				if panics {
					panic("mine")
				}
				return errMine
			}
		}
		manyTest(t, 1, opts, change, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			keys := keysFrom(0, 3)
			wantMany(t, fs[0], keys, "v0")
			time.Sleep(opts.TTL + time.Second) // the bubble's time
			wantUnlocked(t, node, keys)
			if n := fs[0].Stats().StoreFailures; n != 0 {
				t.Errorf("%d failures before it has returned", n)
			}
			time.Sleep(time.Minute) // the bubble's time
			if st := fs[0].Stats(); st.StoreFailures != 3 || st.Running != 0 || reported.Load() != 3 {
				t.Errorf("panics %v: %+v; %d reported", panics, st, reported.Load())
			}
		})
	}
}

// A panic in StoreMany is a failure to store, and nothing else.
func TestAPanicInAStoreOfMany(t *testing.T) {
	change := func(src *flightlock.Source[string]) {
		src.StoreManyStamped = func(context.Context, map[string]string, map[string]string,
			map[string]*flightlock.Lock) error {
			panic("mine")
		}
	}
	manyTest(t, 1, flightlock.FetchOptions{}, change, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
		synctest.Wait()
		wantUnlocked(t, node, keysFrom(0, 3))
		if st := fs[0].Stats(); st.StoreFailures != 3 || st.Running != 0 {
			t.Errorf("%+v", st)
		}
	})
}

// A LoadMany that Close ends is no failure of the origin: its callers get ErrClosed.
func TestCloseDuringALoadOfMany(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		s.takes = time.Hour
		var wg sync.WaitGroup
		wg.Go(func() { wantManyErrors(t, fs[0], keysFrom(0, 3), flightlock.ErrClosed) })
		time.Sleep(100 * time.Millisecond) // the bubble's time: until they are loaded
		if s.bulk.Load() != 1 {
			t.Error("nothing is loaded")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := fs[0].Close(ctx); err != nil {
			t.Error(err)
		}
		wg.Wait()
		wantUnlocked(t, node, keysFrom(0, 3))
	})
}

// Callers of many keys that leave, at whatever moment, leave no lock behind, and no key in use.
func TestCallersOfManyKeysLeaveNoLocks(t *testing.T) {
	for _, maxLoads := range []int{0, 1} {
		manyTest(t, 1, flightlock.FetchOptions{MaxLoads: maxLoads}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s.takes = 5 * time.Millisecond
			node.SetDelay(10 * time.Millisecond)
			for i := range 45 {
				keys := keysFrom(10*i, 3)
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
				_, _ = fs[0].FetchMany(ctx, keys)
				cancel()
				time.Sleep(time.Second) // the bubble's time
				if n := fs[0].Stats().Running; n != 0 {
					t.Fatalf("left after %dms: %d keys are in use", i, n)
				}
				wantUnlocked(t, node, keys)
			}
		})
	}
}

// StaleWait waits for no refresh that does not begin, because the last one has just failed; and for one that fails the
// stale value is served.
func TestStaleWaitAfterAFailure(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{StaleWait: 10 * time.Second, ErrorHold: time.Minute}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.loadErr.Store(&errMine)
		s.load2 = func(context.Context, []string) (map[string]string, error) {
			time.Sleep(s.takes) // the bubble's time
			return nil, errMine
		}
		one, keys := "one", keysFrom(0, 3)
		for _, key := range append(keysFrom(0, 3), one) {
			s.set(key, stampedEntry{value: "old", stale: true})
		}
		var loads uint64
		for i := range 2 {
			wantMany(t, fs[0], keys, "old")
			if v, err := fs[0].Fetch(t.Context(), one); v != "old" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
			if n := fs[0].Stats().Loads; i == 0 {
				loads = n
			} else if n != loads || n == 0 {
				t.Errorf("%d loads, and %d before", n, loads)
			}
		}
	})
}

// StaleWait gives nobody a value whose load began before the entry that the caller has found.
func TestStaleWaitThroughAnInvalidation(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{StaleWait: 10 * time.Second}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		keys := keysFrom(0, 2)
		change := func(value string) {
			for _, key := range keys {
				s.set(key, stampedEntry{value: value, stale: true})
			}
		}
		change("old")
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keys, "v0") })
		time.Sleep(s.takes / 2) // the bubble's time
		s.version.Add(1)
		change("newer")
		wg.Go(func() {
			if v, err := fs[0].Fetch(t.Context(), keys[0]); v != "newer" || err != nil {
				t.Errorf("Fetch: %q, %v", v, err)
			}
		})
		wantMany(t, fs[0], keys, "newer")
		wg.Wait()
	})
}

// A Load that fetches its own key, or one that waits for it, is served the stale value at once: with StaleWait, too.
func TestStaleWaitInsideALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := nothingStored()
		src.Lookup = func(context.Context, string) (string, flightlock.Freshness, error) {
			return "old", flightlock.Stale, nil
		}
		var f *flightlock.Fetcher[string]
		var took time.Duration
		src.Load = func(ctx context.Context, key string) (string, error) {
			began := time.Now()
			one, err := f.Fetch(ctx, key)
			many, err2 := f.FetchMany(ctx, []string{key})
			took = time.Since(began)
			return fmt.Sprint("new, after ", one, " and ", many[key]), errors.Join(err, err2)
		}
		f = fetcherOnOneNode(t, src, flightlock.FetchOptions{StaleWait: 20 * time.Second})
		v, err := f.Fetch(t.Context(), "k")
		if v != "new, after old and old" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		if took > 0 {
			t.Errorf("it waited %v for itself", took)
		}
	})
}

// A LoadMany that continues after its time keeps no other process from loading.
func TestALoadOfManyThatContinuesHasNoLocks(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{LoadTimeout: time.Second, ErrorHold: -1}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		s.load2 = func(context.Context, []string) (map[string]string, error) {
			time.Sleep(time.Minute) // the bubble's time
			return nil, nil
		}
		if _, err := fs[0].FetchMany(t.Context(), keysFrom(0, 3)); err == nil {
			t.Error("no error")
		}
		synctest.Wait()
		if n := fs[0].Stats().Running; n != 3 {
			t.Errorf("%d keys are in use", n)
		}
		wantUnlocked(t, node, keysFrom(0, 3))
	})
}

// A batch that waits for a slot, and is needed by the load that has it, takes none, and leaves none in use.
func TestABatchThatALoadWaitsForLeavesNoSlotInUse(t *testing.T) {
	var f *flightlock.Fetcher[string]
	change := func(src *flightlock.Source[string]) {
		load := src.Load
		src.Load = func(ctx context.Context, key string) (string, error) {
			if key == "outer" {
				time.Sleep(time.Second) // the bubble's time
				return f.Fetch(ctx, "k0")
			}
			return load(ctx, key)
		}
	}
	manyTest(t, 1, flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 10 * time.Second}, change, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		f = fs[0]
		var wg sync.WaitGroup
		wg.Go(func() {
			if v, err := f.Fetch(t.Context(), "outer"); v != "k0=v0" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
		})
		synctest.Wait()
		wantMany(t, f, keysFrom(0, 3), "v0")
		wg.Wait()
		wantMany(t, f, keysFrom(10, 3), "v0")
	})
}

// Keys whose load elsewhere has failed are tried again. If no slot is free then, they wait for one together, and
// none is lost.
func TestKeysThatAreTriedAgainWithoutASlot(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 10 * time.Second}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
			time.Sleep(20 * time.Millisecond) // the bubble's time
			values, failed := map[string]string{}, flightlock.KeyErrors{}
			for _, key := range keys {
				if values[key] = "v0"; s.bulk.Load() == 1 {
					failed[key] = errMine
				}
			}
			if len(failed) > 0 {
				return nil, failed
			}
			return values, nil
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := fs[0].FetchMany(t.Context(), keysFrom(0, 9)); !errors.Is(err, errMine) {
				t.Error(err)
			}
		})
		synctest.Wait()
		wg.Go(func() { wantMany(t, fs[1], keysFrom(0, 9), "v0") })
		synctest.Wait()
		wg.Go(func() { // it has the only slot for a second
			if v, err := fs[1].Fetch(t.Context(), "other"); v != "v0" || err != nil {
				t.Errorf("%q, %v", v, err)
			}
		})
		began := time.Now()
		wg.Wait()
		wantMany(t, fs[1], keysFrom(20, 3), "v0")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// Where a process was killed in a load of many keys, the others that wait for these load them together when the locks
// have ended. With MaxLoads each such load has one slot, and gives it back.
func TestKeysOfAKilledProcessAreLoadedTogether(t *testing.T) {
	for _, maxLoads := range []int{0, 1, 2} {
		manyTest(t, 3, flightlock.FetchOptions{MaxLoads: maxLoads}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s.takes = 10 * time.Millisecond
			killed := lockkit.New(t, flightlock.Options{}, node.Client(t))
			keys := keysFrom(0, 50)
			for _, key := range keys {
				if _, err := killed.TryLock(t.Context(), key, time.Second); err != nil { // and nobody releases it
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			for _, f := range fs {
				wg.Go(func() { wantMany(t, f, keys, "v0") })
			}
			wg.Wait()
			if s.bulk.Load() > 3 || s.most() != 1 {
				t.Errorf("%d loads of many keys, %d of one", s.bulk.Load(), s.most())
			}
			for i, f := range fs { // all its slots can be had at once, and no more
				began := time.Now()
				for j := range maxLoads + 1 {
					wg.Go(func() { wantMany(t, f, keysFrom(1000*(i+1)+100*j, 3), "v0") })
					time.Sleep(time.Millisecond) // they do not share a load
				}
				wg.Wait()
				if took := time.Since(began); maxLoads > 0 && (took < 2*s.takes || took >= 3*s.takes) {
					t.Errorf("later it took %v", took)
				}
			}
			var loads uint64
			for _, f := range fs {
				loads += f.Stats().Loads
			}
			if uint64(s.bulk.Load()) != loads {
				t.Errorf("%d loads, %d of them of many keys", loads, s.bulk.Load())
			}
		})
	}
}

// If this process has no slot when such locks end, the keys wait for one together, and without locks: another process
// may load them meanwhile.
func TestKeysOfAKilledProcessWaitForASlotTogether(t *testing.T) {
	for _, elsewhere := range []bool{false, true} {
		manyTest(t, 2, flightlock.FetchOptions{MaxLoads: 1}, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			other := lockkit.New(t, flightlock.Options{}, node.Client(t))
			keys := keysFrom(0, 50)
			for _, key := range keys {
				if _, err := other.TryLock(t.Context(), key, time.Second); err != nil { // and nobody releases it
					t.Fatal(err)
				}
			}
			s.takes = 3 * time.Second
			var wg sync.WaitGroup
			wg.Go(func() { wantMany(t, fs[0], keys[:40], "v0") })
			ctx, leave := context.WithTimeout(t.Context(), 2*time.Second)
			defer leave()
			wg.Go(func() { _, _ = fs[0].FetchMany(ctx, keys[40:]) })
			time.Sleep(500 * time.Millisecond) // the bubble's time
			wg.Go(func() { wantMany(t, fs[0], keysFrom(100, 3), "v0") })
			time.Sleep(time.Second)
			if elsewhere {
				wantMany(t, fs[1], keys[:40], "v0")
			}
			wg.Wait()
			wantMany(t, fs[0], keysFrom(200, 3), "v0") // the slot is free
			if n := s.bulk.Load(); n != 3 || s.most() != 1 || uint64(n) != fs[0].Stats().Loads+fs[1].Stats().Loads {
				t.Errorf("%d loads of many keys; %+v", n, fs[0].Stats())
			}
			if s.loaded["k40"] > 0 {
				t.Error("a key was loaded whose callers had left")
			}
		})
	}
}

// Keys that have waited for the loads of another process, each for its lock, are loaded together when that is in vain:
// because their time is over, the nodes go down, or the cache fails.
func TestKeysThatHaveWaitedInVainAreLoadedTogether(t *testing.T) {
	for _, why := range []string{"time", "nodes", "cache"} {
		opts := flightlock.FetchOptions{WaitTimeout: 5 * time.Second}
		manyTest(t, 1, opts, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			s.takes = 200 * time.Millisecond
			other := lockkit.New(t, flightlock.Options{}, node.Client(t))
			keys := keysFrom(0, 50)
			for _, key := range keys {
				if _, err := other.TryLock(t.Context(), key, time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			time.AfterFunc(2*time.Second, func() {
				node.Down(why == "nodes")
				s.fails.Store(why == "cache")
			})
			wantMany(t, fs[0], keys, "v0")
			if n := s.bulk.Load(); n > 3 || uint64(n) != fs[0].Stats().Loads || s.most() != 1 {
				t.Errorf("%s: %d loads of many keys; %+v", why, n, fs[0].Stats())
			}
		})
	}
}

// Keys that are loaded together after they have waited one by one are no more than MaxBatch in one call.
func TestKeysThatHaveWaitedAreLoadedInBatches(t *testing.T) {
	for _, held := range []time.Duration{2 * time.Second, time.Minute} { // less than WaitTimeout, and more
		opts := flightlock.FetchOptions{WaitTimeout: 5 * time.Second, MaxBatch: 3}
		manyTest(t, 1, opts, nil, func(
			t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
		) {
			var most atomic.Int64
			s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
				most.Store(max(most.Load(), int64(len(keys))))
				values := map[string]string{}
				for _, key := range keys {
					values[key] = "v0"
				}
				return values, nil
			}
			killed := lockkit.New(t, flightlock.Options{}, node.Client(t))
			for _, key := range keysFrom(0, 50) {
				if _, err := killed.TryLock(t.Context(), key, held); err != nil { // and nobody releases it
					t.Fatal(err)
				}
			}
			if wantMany(t, fs[0], keysFrom(0, 50), "v0"); most.Load() != 3 {
				t.Errorf("%v: %d keys in one call", held, most.Load())
			}
		})
	}
}

// Values of many that are not stored because they were invalidated are no failure: the processes that wait for them
// lock.
func TestOutdatedValuesOfManyAreNoFailure(t *testing.T) {
	manyTest(t, 2, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		keys := keysFrom(0, 3)
		var wg sync.WaitGroup
		wg.Go(func() { wantMany(t, fs[0], keys, "v0") })
		synctest.Wait()
		wg.Go(func() { wantMany(t, fs[1], keys, "v3") })
		time.Sleep(s.takes / 2) // the bubble's time
		for _, key := range keys {
			s.change(key)
		}
		wg.Wait()
		if a, b := fs[0].Stats(), fs[1].Stats(); a.Outdated != 3 || b.UnlockedLoads != 0 {
			t.Errorf("%+v\n%+v", a, b)
		}
	})
}

// A caller that holds the lock itself, and whose Fetch ends because the Fetcher is closed, has lent nothing.
func TestALoanToAClosedFetcherIsGivenBack(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		src := nothingStored()
		src.Lookup = func(context.Context, string) (string, flightlock.Freshness, error) {
			time.Sleep(time.Second) // the bubble's time
			return "", flightlock.Miss, nil
		}
		f, err := flightlock.NewFetcher(c, src, flightlock.FetchOptions{LookupTimeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		l := lockkit.Lock(t, c, "k", time.Minute)
		results := fetching(l.Context(t.Context()), f, "k", 1)
		synctest.Wait()
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantErrors(t, results, 1, flightlock.ErrClosed)
		lockkit.Release(t, l)
		wantUnlocked(t, nodes[0], []string{"k"})
	})
}

// A value that could not be stored because the cache was too slow was loaded all the same: the processes that wait for
// it lock, and do not load all at once. It was slow with the lookup before the load, or with the store.
func TestASlowCacheIsNoFailureOfTheLoad(t *testing.T) {
	for _, slow := range []string{"lookup", "store"} {
		for _, many := range []bool{true, false} {
			t.Run(fmt.Sprint(slow, ", many ", many), func(t *testing.T) { slowCache(t, slow, many) })
		}
	}
}

func slowCache(t *testing.T, slow string, many bool) {
	var failed atomic.Bool // once
	fails := func(step string) bool { return step == slow && failed.CompareAndSwap(false, true) }
	change := func(src *flightlock.Source[string]) {
		lookup, lookupMany := src.LookupStamped, src.LookupMany
		store, storeMany := src.StoreStamped, src.StoreManyStamped
		src.LookupStamped = func(ctx context.Context, key string) (flightlock.Found[string], error) {
			if flightlock.LoadFollows(ctx) && fails("lookup") {
				return flightlock.Found[string]{}, errTimeout{}
			}
			return lookup(ctx, key)
		}
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if flightlock.LoadFollows(ctx) && fails("lookup") {
				return nil, errTimeout{}
			}
			return lookupMany(ctx, keys)
		}
		src.StoreStamped = func(ctx context.Context, key, v, stamp string, l *flightlock.Lock) error {
			if fails("store") {
				return errTimeout{}
			}
			return store(ctx, key, v, stamp, l)
		}
		src.StoreManyStamped = func(ctx context.Context, values, stamps map[string]string,
			locks map[string]*flightlock.Lock) error {
			if fails("store") {
				return errTimeout{}
			}
			return storeMany(ctx, values, stamps, locks)
		}
	}
	manyTest(t, 2, flightlock.FetchOptions{}, change, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		keys := keysFrom(0, 1)
		if many {
			keys = keysFrom(0, 3)
		}
		var wg sync.WaitGroup
		for _, f := range fs {
			wg.Go(func() { wantMany(t, f, keys, "v0") })
			synctest.Wait()
		}
		wg.Wait()
		if a, b := fs[0].Stats(), fs[1].Stats(); a.Loads != 1 || b.Loads == 0 || b.UnlockedLoads != 0 {
			t.Errorf("%+v\n%+v", a, b)
		}
	})
}

// The lock of a caller that lends it is that caller's alone again: when another has lent it before, and when there is
// no slot for the load.
func TestALoanThatIsNotUsedIsGivenBack(t *testing.T) {
	t.Run("lent before", func(t *testing.T) {
		lendTest(t, flightlock.FetchOptions{}, func(t *testing.T, l *flightlock.Lock, f *flightlock.Fetcher[string]) {
			first := fetching(l.Context(t.Context()), f, "k", 1)
			synctest.Wait()
			second := fetching(l.Context(t.Context()), f, "k", 1)
			wantAll(t, first, 1, "k=1")
			wantAll(t, second, 1, "k=1")
		})
	})
	t.Run("no slot", func(t *testing.T) {
		opts := flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: time.Second}
		lendTest(t, opts, func(t *testing.T, l *flightlock.Lock, f *flightlock.Fetcher[string]) {
			first := fetching(t.Context(), f, "k", 1)
			synctest.Wait()
			other := fetching(t.Context(), f, "other", 1)
			synctest.Wait()
			second := fetching(l.Context(t.Context()), f, "k", 1)
			wantErrors(t, first, 1, flightlock.ErrNotAcquired)
			wantErrors(t, second, 1, flightlock.ErrNotAcquired)
			wantAll(t, other, 1, "other=1")
		})
	})
}

// lendTest calls test with a lock on "k" and a Fetcher of the same Client whose loads take 10 s, and checks that the
// key is free when the lock has been released.
func lendTest(t *testing.T, opts flightlock.FetchOptions,
	test func(t *testing.T, l *flightlock.Lock, f *flightlock.Fetcher[string])) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		f := lockkit.NewFetcher(t, c, &lockkit.Origin{Takes: 10 * time.Second}, opts)
		l := lockkit.Lock(t, c, "k", time.Minute)
		test(t, l, f)
		synctest.Wait()
		lockkit.Release(t, l)
		wantUnlocked(t, nodes[0], []string{"k"})
	})
}

// A load that has given up waiting for other keys may be waited for by their load.
func TestALoadThatHasGivenUpIsWaitedFor(t *testing.T) {
	var f *flightlock.Fetcher[string]
	change := func(src *flightlock.Source[string]) {
		src.Load = func(ctx context.Context, _ string) (string, error) {
			limited, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
			if _, err := f.FetchMany(limited, keysFrom(0, 2)); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			time.Sleep(2 * time.Second) // the bubble's time
			return "outer", nil
		}
		src.LoadMany = func(ctx context.Context, keys []string) (map[string]string, error) {
			time.Sleep(time.Second) // the bubble's time
			v, err := f.Fetch(ctx, "outer")
			if err != nil {
				return nil, err
			}
			return map[string]string{keys[0]: v, keys[1]: v}, nil
		}
	}
	manyTest(t, 1, flightlock.FetchOptions{}, change, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode,
	) {
		f = fs[0]
		if v, err := f.Fetch(t.Context(), "outer"); v != "outer" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		wantMany(t, f, keysFrom(0, 2), "outer")
	})
}

// What a batch has loaded for keys whose locks were lost meanwhile is given to the callers, and not stored. The others
// are stored.
func TestABatchStoresNothingAfterALossOfTheLock(t *testing.T) {
	var stored []string
	manyTest(t, 1, flightlock.FetchOptions{TTL: time.Second}, func(src *flightlock.Source[string]) {
		store := src.StoreManyStamped
		src.StoreManyStamped = func(ctx context.Context, values, stamps map[string]string,
			locks map[string]*flightlock.Lock) error {
			stored = append(stored, slices.Sorted(maps.Keys(values))...)
			return store(ctx, values, stamps, locks)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode) {
		s.takes = 10 * time.Second
		time.AfterFunc(5*time.Second, func() { node.Mini.Del("lock:k0") })
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
		if got := fs[0].Stats(); !slices.Equal(stored, []string{"k1", "k2"}) || got.Lost != 1 {
			t.Errorf("stored: %v; %+v", stored, got)
		}
	})
}

// A batch loads the keys that it has locked before it waits for others: no lock is held meanwhile.
func TestABatchLoadsBeforeItWaitsForLocks(t *testing.T) {
	var loading time.Time
	manyTest(t, 1, flightlock.FetchOptions{}, func(src *flightlock.Source[string]) {
		load := src.LoadMany
		src.LoadMany = func(ctx context.Context, keys []string) (map[string]string, error) {
			if slices.Contains(keys, "k1") {
				loading = time.Now()
			}
			return load(ctx, keys)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode) {
		c := lockkit.New(t, flightlock.Options{}, node.Client(t))
		locks := []*flightlock.Lock{lockkit.Lock(t, c, "k0", time.Minute), lockkit.Lock(t, c, "k2", time.Minute)}
		time.AfterFunc(3*s.takes, func() {
			for _, l := range locks {
				lockkit.Release(t, l)
			}
		})
		began := time.Now()
		wantMany(t, fs[0], keysFrom(0, 3), "v0")
		if took := loading.Sub(began); took < 0 || took > time.Millisecond { // the bubble's time
			t.Errorf("the load of k1 began after %v", took)
		}
	})
}
