package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
)

// Missing keys are looked up, loaded and stored together, and found together afterwards; processes that get
// overlapping sets of keys at the same time load each key once, and wait for hardly more than a load.
func TestManyKeysAreLoadedOnceInTheFleet(t *testing.T) {
	inFleet(t, 4, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		began := time.Now()
		x.wantMany(t, x.fs[0], fetchkit.Keys(1000, 100))
		within(t, began, time.Second, 1020*time.Millisecond)
		if c := x.cache; c.Loads.Load() != 1 || c.Gets.Load() != 1 || c.Reserves.Load() != 1 || c.Puts.Load() != 1 {
			t.Errorf("%d loads, %d and %d lookups, %d puts", c.Loads.Load(), c.Gets.Load(), c.Reserves.Load(),
				c.Puts.Load())
		}
		began = time.Now()
		var wg sync.WaitGroup
		for i, f := range x.fs {
			for j := range 10 {
				keys := fetchkit.Keys((i*10+j)*7%80, 40)
				if j%2 == 1 {
					slices.Reverse(keys)
				}
				wg.Go(func() { x.wantMany(t, f, keys) })
			}
		}
		wg.Wait()
		// Of those who just missed an event, the next poll comes 250 ms later at most.
		within(t, began, time.Second, 1300*time.Millisecond)
		equal(t, "keys were loaded", x.cache.Loaded.Load(), 100+118)
	})
}

// What another process is loading is looked up together, until it is there, by no attempts for each key;
// those who leave take nobody with them.
func TestKeysThatAreLoadedElsewhereAreAwaitedTogether(t *testing.T) {
	for _, takes := range []time.Duration{5 * time.Millisecond, 400 * time.Millisecond} {
		inFleet(t, 2, &fetchkit.Cache{Takes: takes}, fetch.Options{}, func(t *testing.T, x *fleet) {
			keys := fetchkit.Keys(0, 50)
			var wg sync.WaitGroup
			wg.Go(func() { x.wantMany(t, x.fs[0], keys) })
			synctest.Wait()
			before, began := x.cache.Gets.Load(), time.Now()
			leaves, cancel := context.WithTimeout(t.Context(), takes/2)
			defer cancel()
			wg.Go(func() { _, _ = x.fs[1].GetMany(leaves, keys[:25]) })
			synctest.Wait()
			x.wantMany(t, x.fs[1], keys)
			within(t, began, 0, takes+5*time.Millisecond)
			wg.Wait()
			if n := x.cache.Gets.Load() - before; n > 60 || x.cache.Loads.Load() != 1 {
				t.Errorf("%d lookups, %d loads", n, x.cache.Loads.Load())
			}
		})
	}
}

// Another process stores a stale value while callers wait for the lock: they get it, and it is refreshed.
func TestAStaleValueEndsTheWait(t *testing.T) {
	for _, keys := range [][]string{{"k0"}, fetchkit.Keys(0, 10)} {
		inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
			release := x.elsewhere(keys...)
			time.AfterFunc(500*time.Millisecond, func() {
				x.cache.Set(old, keys...)
				release()
			})
			began := time.Now()
			values, err := x.fs[0].GetMany(t.Context(), keys)
			if len(values) != len(keys) || values["k0"] != "old" || err != nil {
				t.Errorf("%v, %v", values, err)
			}
			within(t, began, 500*time.Millisecond, 600*time.Millisecond)
			time.Sleep(2 * time.Second)
			_, _ = x.fs[0].GetMany(t.Context(), keys) // those whose locks were not released yet
			time.Sleep(2 * time.Second)
			x.wantMany(t, x.fs[0], keys)
		})
	}
}

// A batch loads the keys that it has locked before it waits for others: no lock is held meanwhile.
func TestNoLockIsHeldWhileOthersAreWaitedFor(t *testing.T) {
	inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		release := x.elsewhere("k0", "k2")
		var wg sync.WaitGroup
		wg.Go(func() { x.wantMany(t, x.fs[0], fetchkit.Keys(0, 3)) })
		time.Sleep(1500 * time.Millisecond)
		if s := x.fs[0].Stats(); s.Loads != 1 || slices.Contains(x.locks(), lockName("k1")) || s.Running != 2 {
			t.Errorf("%+v, %v", s, x.locks())
		}
		release()
		wg.Wait()
		equal(t, "keys were loaded", x.cache.Loaded.Load(), 3)
	})
}

// WaitTimeout, and not less, is how long others' locks are waited for, whatever lookups take meanwhile. Then
// the policy applies; the error is not that of a ctx.
func TestWaitTimeout(t *testing.T) {
	for i, keys := range [][]string{{"k0"}, {"k0"}, fetchkit.Keys(0, 20), fetchkit.Keys(0, 20)} {
		failClosed, batches := i%2 == 1, uint64(len(keys)+9)/10
		cache := &fetchkit.Cache{Takes: time.Second}
		cache.OnGet = func(ctx context.Context, _ []string) error {
			if cache.Gets.Load() > int64(batches) {
				<-ctx.Done()
			}
			return ctx.Err()
		}
		opts := fetch.Options{FailClosed: failClosed, WaitTimeout: 7 * time.Second, LookupTimeout: 20 * time.Second,
			MaxBatch: 10}
		inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
			defer x.elsewhere(keys...)()
			began := time.Now()
			if !failClosed {
				x.wantMany(t, x.fs[0], keys)
				within(t, began, 8*time.Second, 8100*time.Millisecond)
			} else {
				for key, err := range failMany(t, x.fs[0], keys, flightlock.ErrNotAcquired) {
					if errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "WaitTimeout, 7s") ||
						!strings.Contains(err.Error(), fmt.Sprintf("%q", key)) {
						t.Error(err)
					}
				}
				within(t, began, 7*time.Second, 7100*time.Millisecond)
			}
			if s := x.fs[0].Stats(); s.LookupErrors > 0 ||
				!failClosed && (s.UnlockedLoads != batches || s.Loads != batches) {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A lookup of those that wait which times out, by LookupTimeout or before, is no reason to load without a
// lock: three in a row are. One that fails in another way is, at once; and where only some keys fail, these
// alone.
func TestLookupsOfThoseThatWait(t *testing.T) {
	timeout := &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
	for name, c := range map[string]struct {
		err              error
		times            int64
		unlocked, errors uint64
	}{
		"two timeouts": {timeout, 2, 0, 2}, "three timeouts": {timeout, 3, 1, 3},
		"an error": {errMine, 1, 1, 3}, "of one key": {fetch.KeyErrors{"k0": errMine}, 1, 1, 1},
	} {
		for _, keys := range oneAndMany {
			t.Run(fmt.Sprintf("%s/keys=%d", name, len(keys)), func(t *testing.T) {
				cache := &fetchkit.Cache{}
				cache.OnGet = func(context.Context, []string) error {
					if n := cache.Gets.Load(); n > 1 && n <= 1+c.times {
						return c.err
					}
					return nil
				}
				inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
					time.AfterFunc(5*time.Second, x.elsewhere(keys...))
					x.wantMany(t, x.fs[0], keys)
					if name == "an error" {
						c.errors = uint64(len(keys))
					}
					if s := x.fs[0].Stats(); s.UnlockedLoads != c.unlocked || s.LookupErrors != c.errors ||
						c.unlocked > 0 && cache.LoadsOf("k0") != 1 {
						t.Errorf("%+v", s)
					}
					time.Sleep(5 * time.Second)
				})
			})
		}
	}
}

// The nodes are down: there is one load per key at a time, and MaxUnlockedLoads in all, each of a batch; what
// is loaded is stored by its stamp. Without the store, nothing is stored. With FailClosed the callers get the
// reason at once.
func TestOutages(t *testing.T) {
	for down, reason := range map[string]error{
		"nodes": flightlock.ErrUnavailable, "store": errMine, "nodes, store": errMine,
	} {
		for _, failClosed := range []bool{false, true} {
			var fails atomic.Bool
			fails.Store(strings.Contains(down, "store"))
			cache := &fetchkit.Cache{Takes: 200 * time.Millisecond, OnGet: when(&fails), OnReserve: when(&fails)}
			inFleet(t, 1, cache, fetch.Options{FailClosed: failClosed, MaxUnlockedLoads: 2},
				func(t *testing.T, x *fleet) {
					getting(t.Context(), x.fs[0], "warm", 1) // or the first attempts find different states
					time.Sleep(time.Second)
					warm := cache.Loads.Load()
					x.down(strings.Contains(down, "nodes"))
					time.Sleep(time.Second)
					began := time.Now()
					var wg sync.WaitGroup
					for i := range 10 {
						keys := fetchkit.Keys(100*i, 20)
						wg.Go(func() {
							if failClosed {
								failMany(t, x.fs[0], keys, reason)
							} else {
								x.wantMany(t, x.fs[0], keys)
							}
						})
						wg.Go(func() { _, _ = x.fs[0].Get(t.Context(), keys[0]) })
					}
					wg.Wait()
					s, stored, n := x.fs[0].Stats(), cache.Stored.Load(), cache.Loads.Load()-warm
					if failClosed {
						within(t, began, 0, 200*time.Millisecond)
						equal(t, "loads with FailClosed", n, 0)
						return
					}
					most, atOnce := cache.Most()
					if most != 1 || atOnce > 2 || n < 10 || n > 30 || s.UnlockedLoads < uint64(n) ||
						down == "nodes" && stored != 201 || down != "nodes" && stored != 0 {
						t.Errorf("%s: %d and %d loads at once; %d loads, %d stored; %+v", down, most, atOnce, n, stored, s)
					}
				})
		}
	}
}

// Those that wait, alone or together, load together when they have waited in vain: because a process was
// killed, the nodes go down, or the store fails.
func TestWaitsInVain(t *testing.T) {
	for _, why := range []string{"killed", "nodes", "store"} {
		for maxLoads, keys := range oneAndMany {
			t.Run(fmt.Sprintf("%s/keys=%d", why, len(keys)), func(t *testing.T) {
				var fails atomic.Bool
				cache := &fetchkit.Cache{Takes: 100 * time.Millisecond, OnGet: when(&fails)}
				inFleet(t, 3, cache, fetch.Options{MaxLoads: maxLoads, TTL: time.Second}, func(t *testing.T, x *fleet) {
					x.killed(map[bool]time.Duration{true: 2 * time.Second, false: time.Minute}[why == "killed"], keys...)
					time.AfterFunc(2*time.Second, func() {
						x.down(why == "nodes")
						fails.Store(why == "store")
					})
					began := time.Now()
					x.all(0, func(f *fetch.Fetcher[string]) { x.wantMany(t, f, keys) })
					within(t, began, 2*time.Second, 4*time.Second)
					if n := cache.Loads.Load(); why == "killed" && cache.Loaded.Load() != int64(len(keys)) || n > 9 {
						t.Errorf("%d loads of %d keys", n, cache.Loaded.Load())
					}
					fails.Store(false)
				})
			})
		}
	}
}

// An attempt that is once not answered is repeated: nobody loads without a lock because of it, and no
// FailClosed caller gets an error. A refresh ends, and the next caller begins another.
func TestOneAttemptIsNotAnswered(t *testing.T) {
	for _, failClosed := range []bool{false, true} {
		for _, keys := range oneAndMany {
			inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{FailClosed: failClosed}, func(t *testing.T, x *fleet) {
				x.wantMany(t, x.fs[0], []string{"warm"})
				x.cache.Set(old, "stale")
				x.stall(true)
				getting(t.Context(), x.fs[0], "stale", 1).want(t, "old")
				time.AfterFunc(80*time.Millisecond, func() { x.stall(false) })
				x.wantMany(t, x.fs[0], keys)
				if s := x.fs[0].Stats(); s.UnlockedLoads != 0 || x.cache.LoadsOf("stale") > 0 {
					t.Errorf("%+v", s)
				}
				time.Sleep(time.Second)
				getting(t.Context(), x.fs[0], "stale", 1).want(t, "old")
				time.Sleep(time.Second)
				getting(t.Context(), x.fs[0], "stale", 1).want(t, "stale@0")
			})
		}
	}
}

// Keys whose votes were split have no owner, so they are tried again soon.
func TestSplitVotes(t *testing.T) {
	for _, keys := range [][]string{{"k0"}, fetchkit.Keys(0, 5)} {
		inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{}, func(t *testing.T, x *fleet) {
			for i, n := range x.nodes {
				for _, key := range keys {
					_ = n.Mini.Set(lockName(key), fmt.Sprint("other", i))
					n.Mini.SetTTL(lockName(key), 30*time.Millisecond)
				}
			}
			began := time.Now()
			x.wantMany(t, x.fs[0], keys)
			within(t, began, 0, 200*time.Millisecond)
		})
	}
}

// However many runs wait, in however many batches, or are about to load, no more than 64 lookups are made for
// them at once: so a store with few connections is not taken to be down, and all is loaded once, with locks,
// and stored.
func TestAColdStoreBehindAFewConnections(t *testing.T) {
	var conns chan struct{}
	var now, most atomic.Int64
	request := func(ctx context.Context, _ []string) error {
		select {
		case conns <- struct{}{}:
			defer func() { <-conns }()
			return wait(ctx, 10*time.Millisecond)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	count := func(ctx context.Context, keys []string) error {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		return request(ctx, keys)
	}
	cache := &fetchkit.Cache{OnGet: request, OnReserve: count}
	inFleet(t, 2, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		conns = make(chan struct{}, 20)
		keys := testkit.Sized(500, 200)
		var wg sync.WaitGroup
		for _, f := range x.fs {
			for _, key := range fetchkit.Keys(0, keys) {
				wg.Go(func() { getting(t.Context(), f, key, 1).want(t, key+"@0") })
			}
		}
		wg.Wait()
		for _, f := range x.fs {
			if s := f.Stats(); s.UnlockedLoads+s.StoreFailures+s.Unstored+s.LookupErrors > 0 {
				t.Errorf("%+v", s)
			}
		}
		if n := cache.Loads.Load(); n != int64(keys) || most.Load() > 2*64 {
			t.Errorf("%d loads of %d keys, %d lookups at once", n, keys, most.Load())
		}
	})
}
