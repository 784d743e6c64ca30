package flightlock_test

import (
	"context"
	"errors"
	"fmt"
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

// elsewhere has another process load keys, which takes s.takes.
func elsewhere(t *testing.T, f *flightlock.Fetcher[string], keys []string) (wait func()) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() { wantMany(t, f, keys, "v0") })
	synctest.Wait()
	return wg.Wait
}

// A caller that holds the lock of a key itself lends it to the run that is awaited with others, and that
// would otherwise wait for the lock, and the caller for the run.
func TestALockIsLentToARunThatIsAwaitedWithOthers(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, node.Client(t))
		f, err := flightlock.NewFetcher(c, s.source(), flightlock.FetchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i, late := range []time.Duration{0, 7 * time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond} {
			keys := keysFrom(10*i, 3)
			l := lockkit.Lock(t, c, keys[0], time.Minute)
			var wg sync.WaitGroup
			wg.Go(func() { wantMany(t, f, keys, "v0") })
			synctest.Wait()
			time.Sleep(late)
			began := time.Now()
			v, err := f.Fetch(l.Context(t.Context()), keys[0])
			if took := time.Since(began); v == "" || err != nil || took > s.takes+10*time.Millisecond {
				t.Errorf("after %v: %q, %v, in %v", late, v, err, took)
			}
			lockkit.Release(t, l)
			wg.Wait()
		}
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// WaitTimeout includes the time for which keys are awaited together.
func TestKeysAreAwaitedTogetherWithinWaitTimeout(t *testing.T) {
	opts := flightlock.FetchOptions{WaitTimeout: 20 * time.Millisecond, OnUnavailable: flightlock.FailClosed}
	manyTest(t, 2, opts, nil, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		keys := keysFrom(0, 10)
		wait := elsewhere(t, fs[0], keys)
		began := time.Now()
		_, err := fs[1].FetchMany(t.Context(), keys)
		if took := time.Since(began); !errors.Is(err, flightlock.ErrNotAcquired) || took > 25*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
		wait()
	})
}

// A stale value does for callers that have none, and is refreshed, with the others.
func TestAStaleValueEndsTheAwaiting(t *testing.T) {
	manyTest(t, 1, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		c := lockkit.New(t, flightlock.Options{}, node.Client(t))
		keys := keysFrom(0, 10)
		var locks []*flightlock.Lock
		for _, key := range keys {
			locks = append(locks, lockkit.Lock(t, c, key, time.Minute))
		}
		time.AfterFunc(8*time.Millisecond, func() {
			for _, key := range keys {
				s.set(key, stampedEntry{value: "old", stale: true})
			}
			for _, l := range locks {
				lockkit.Release(t, l)
			}
		})
		began := time.Now()
		wantMany(t, fs[0], keys, "old")
		if took := time.Since(began); took > 15*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		time.Sleep(2 * s.takes)
		_, _ = fs[0].FetchMany(t.Context(), keys) // refreshes one whose lock was not released yet at the first
		time.Sleep(2 * s.takes)
		wantMany(t, fs[0], keys, "v0")
		if n := s.loads.Load(); n > 1 || s.bulk.Load() != 1 { // one waits for its lock, and is refreshed by itself
			t.Errorf("%d loads of single keys, %d of many", n, s.bulk.Load())
		}
	})
}

// However many runs are awaited, in however many groups, no more lookups are made for them at once than for
// runs that wait by themselves.
func TestLookupsOfAwaitedRunsHaveALimit(t *testing.T) {
	var now, most atomic.Int64
	var slow atomic.Bool
	manyTest(t, 2, flightlock.FetchOptions{}, func(src *flightlock.Source[string]) {
		lookup := src.LookupMany
		src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
			if slow.Load() && !flightlock.LoadFollows(ctx) {
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
				time.Sleep(30 * time.Millisecond)
			}
			return lookup(ctx, keys)
		}
	}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
		keys := keysFrom(0, 400)
		wait := elsewhere(t, fs[0], keys)
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() { wantMany(t, fs[1], keys[2*i:2*i+2], "v0") })
			synctest.Wait() // or they would be one group
		}
		slow.Store(true)
		time.Sleep(20 * time.Millisecond)
		slow.Store(false)
		wg.Wait()
		wait()
		if n := most.Load(); n > 64 {
			t.Errorf("%d lookups at once", n)
		}
	})
}

// Those who leave take nobody with them: the others are still awaited together, without a lookup for each that left.
func TestCallersLeaveRunsThatAreAwaitedTogether(t *testing.T) {
	for _, answers := range []time.Duration{0, 3 * time.Millisecond} {
		t.Run(fmt.Sprint("a lookup takes ", answers), func(t *testing.T) {
			manyTest(t, 2, flightlock.FetchOptions{}, func(src *flightlock.Source[string]) {
				lookup := src.LookupMany
				src.LookupMany = func(ctx context.Context, keys []string) (map[string]flightlock.Found[string], error) {
					select {
					case <-time.After(answers):
					case <-ctx.Done():
						return nil, ctx.Err()
					}
					return lookup(ctx, keys)
				}
			}, func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
				s.takes = 40 * time.Millisecond
				keys := keysFrom(0, 60)
				wait := elsewhere(t, fs[0], keys)
				time.Sleep(2 * answers)
				var wg sync.WaitGroup
				leaves := func(keys []string, after time.Duration) {
					wg.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), after)
						defer cancel()
						if _, err := fs[1].FetchMany(ctx, keys); !errors.Is(err, context.DeadlineExceeded) {
							t.Error(err)
						}
					})
				}
				leaves(keys, 3*answers+time.Millisecond) // first, so that it begins all runs together
				synctest.Wait()
				time.Sleep(answers)
				wg.Go(func() { wantMany(t, fs[1], keys[50:], "v0") })
				for i := range 50 {
					leaves(keys[i:i+1], 3*answers+time.Duration(i+1)*time.Millisecond/2)
				}
				time.Sleep(2 * answers)
				synctest.Wait()
				before := s.lookups.Load()
				wg.Wait()
				wait()
				if n := s.lookups.Load() - before; n > 10 || s.singles.Load() > 4 || s.most() != 1 {
					t.Errorf("%d lookups of many keys, %d of single ones, loaded %d times", n, s.singles.Load(), s.most())
				}
			})
		})
	}
}

// Only keys that somebody has are awaited. Without an answer of the nodes there is nothing to wait for: with
// FailClosed callers have the error as soon as those of a single key.
func TestNothingIsAwaitedInAnOutage(t *testing.T) {
	opts := flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed}
	manyTest(t, 1, opts, nil, func(
		t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		wantMany(t, fs[0], keysFrom(100, 2), "v0")
		node.Down(true)
		_, err := fs[0].Fetch(t.Context(), "k50")
		if !errors.Is(err, flightlock.ErrUnavailable) {
			t.Error(err)
		}
		before, began := s.lookups.Load(), time.Now()
		_, err = fs[0].FetchMany(t.Context(), keysFrom(0, 10))
		if took := time.Since(began); !errors.Is(err, flightlock.ErrUnavailable) || took > 20*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
		if n := s.lookups.Load() - before; n != 1 {
			t.Errorf("%d lookups", n)
		}
	})
}

// Keys whose votes were split have no owner, so they are contended for at once.
func TestKeysWithSplitVotesAreNotAwaited(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		s := &manyOrigin{}
		c := lockkit.New(t, flightlock.Options{NodeTimeout: time.Second}, clients...)
		f, err := flightlock.NewFetcher(c, s.source(), flightlock.FetchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		keys := keysFrom(0, 5)
		for i, node := range nodes {
			for _, key := range keys {
				if err := node.Mini.Set("lock:"+key, fmt.Sprint("other", i)); err != nil {
					t.Fatal(err)
				}
				node.Mini.SetTTL("lock:"+key, 30*time.Millisecond)
			}
		}
		began := time.Now()
		wantMany(t, f, keys, "v0")
		if took := time.Since(began); took > 200*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What becomes of a load elsewhere is heard at once by those who await its keys together: a value is found a round trip
// later, however long the load has taken; and if it has failed, they load at once, with few calls, and do not wait for
// one another's failures.
func TestKeysThatAreAwaitedTogetherHearOfTheirLoad(t *testing.T) {
	for _, nodeTimeout := range []time.Duration{50 * time.Millisecond, 500 * time.Millisecond} {
		for _, takes := range []time.Duration{5 * time.Millisecond, 40 * time.Millisecond, 400 * time.Millisecond} {
			for _, fails := range []bool{false, true} {
				t.Run(fmt.Sprintf("NodeTimeout=%v/takes=%v/fails=%v", nodeTimeout, takes, fails), func(t *testing.T) {
					heardTest(t, nodeTimeout, takes, fails)
				})
			}
		}
	}
}

func heardTest(t *testing.T, nodeTimeout, takes time.Duration, fails bool) {
	manyTest(t, 0, flightlock.FetchOptions{}, nil, func(
		t *testing.T, s *manyOrigin, _ []*flightlock.Fetcher[string], node *redistest.MemNode,
	) {
		s.takes = takes
		s.load2 = func(_ context.Context, keys []string) (map[string]string, error) {
			time.Sleep(takes)
			values, failed := map[string]string{}, flightlock.KeyErrors{}
			for _, key := range keys {
				if values[key] = "v0"; fails {
					failed[key] = errMine
				}
			}
			if fails {
				return nil, failed
			}
			return values, nil
		}
		const processes = 4
		var fs []*flightlock.Fetcher[string]
		for range processes {
			c := lockkit.New(t, flightlock.Options{NodeTimeout: nodeTimeout}, node.Client(t))
			f, err := flightlock.NewFetcher(c, s.source(), flightlock.FetchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			fs = append(fs, f)
		}
		var wg sync.WaitGroup
		var ends [processes]time.Time
		for i, f := range fs {
			wg.Go(func() {
				values, err := f.FetchMany(t.Context(), keysFrom(0, 100))
				if len(values) == 100 == fails || errors.Is(err, errMine) != fails {
					t.Errorf("process %d: %d values, %v", i, len(values), err)
				}
				ends[i] = time.Now()
			})
			synctest.Wait()
			time.Sleep(time.Millisecond)
		}
		wg.Wait()
		most := time.Millisecond
		if fails {
			most = 2*takes + 10*time.Millisecond
		}
		for i, end := range ends {
			if took := end.Sub(ends[0]); took > most {
				t.Errorf("process %d waited for %v after the load, more than %v", i, took, most)
			}
		}
		if n := s.loads.Load(); n > 2*processes || s.bulk.Load() > 1+3*processes { // those that have waited for their locks
			t.Errorf("%d loads of single keys, %d of many", n, s.bulk.Load())
		}
		for _, f := range fs {
			if err := f.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}
