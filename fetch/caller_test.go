package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/redis/go-redis/v9"
)

// Callers whose deadlines are shorter than the load arrive one after the other: it completes once, and is
// stored; also that of many keys.
func TestCallersWithShortDeadlines(t *testing.T) {
	inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		for range 15 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			_, _ = x.fs[0].Get(ctx, "k0")
			_, _ = x.fs[0].GetMany(ctx, fetchkit.Keys(1, 10))
			cancel()
		}
		time.Sleep(time.Second)
		x.wantMany(t, x.fs[0], fetchkit.Keys(0, 11))
		if s := x.fs[0].Stats(); s.Loads != 2 || x.cache.Stored.Load() != 11 {
			t.Errorf("%+v, %d stored", s, x.cache.Stored.Load())
		}
	})
}

// Callers of many keys that leave, at whatever moment, leave no lock behind, and no key in use.
func TestCallersOfManyKeysLeaveNothing(t *testing.T) {
	for maxLoads := range 2 {
		opts := fetch.Options{MaxLoads: maxLoads}
		inFleet(t, 1, &fetchkit.Cache{Takes: 5 * time.Millisecond}, opts, func(t *testing.T, x *fleet) {
			x.delay(10 * time.Millisecond)
			for i := 1; i < 45; i += 2 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
				_, _ = x.fs[0].GetMany(ctx, fetchkit.Keys(10*i, 3))
				cancel()
				time.Sleep(time.Second)
				if locks := x.locks(); x.fs[0].Stats().Running != 0 || len(locks) > 0 {
					t.Fatalf("left after %dms: %+v, %v", i, x.fs[0].Stats(), locks)
				}
			}
		})
	}
}

// Get and GetMany share loads, whichever comes first.
func TestManyAndSingleKeysShareLoads(t *testing.T) {
	inFleet(t, 2, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		all := map[string]answers{
			"k3": getting(t.Context(), x.fs[0], "k3", 3),
			"k4": getting(t.Context(), x.fs[1], "k4", 3),
		}
		synctest.Wait()
		var wg sync.WaitGroup
		wg.Go(func() { x.wantMany(t, x.fs[0], fetchkit.Keys(0, 10)) })
		synctest.Wait()
		all["k5"], all["k6"] = getting(t.Context(), x.fs[0], "k5", 3), getting(t.Context(), x.fs[1], "k6", 3)
		for key, a := range all {
			a.want(t, key+"@0")
		}
		wg.Wait()
		equal(t, "keys were loaded", x.cache.Loaded.Load(), 10)
	})
}

// Nothing is looked up for a caller whose ctx has ended, and each key has that error.
func TestManyKeysAfterTheCtx(t *testing.T) {
	cache := &fetchkit.Cache{OnGet: func(ctx context.Context, _ []string) error {
		return wait(ctx, 100*time.Millisecond)
	}}
	inFleet(t, 1, cache, fetch.Options{MaxBatch: 100}, func(t *testing.T, x *fleet) {
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := x.fs[0].GetMany(ctx, fetchkit.Keys(0, 10_000))
		within(t, began, 150*time.Millisecond, 200*time.Millisecond)
		var many *fetch.ManyError
		if !errors.As(err, &many) || len(many.Errors) != 10_000 || !errors.Is(err, context.DeadlineExceeded) {
			t.Error("not the error of all keys")
		}
		synctest.Wait()
		if s := x.fs[0].Stats(); s.LookupErrors+s.Loads > 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A stale value is returned at once, and one refresh for all processes runs in the background, also when the
// caller's ctx ends. With StaleWait callers wait so long for the new one, also for another process's.
func TestStaleValues(t *testing.T) {
	for staleWait, want := range map[time.Duration]string{0: "old", time.Second / 2: "old",
		2 * time.Second: "k0@0"} {
		for _, keys := range oneAndMany {
			cache := &fetchkit.Cache{Takes: time.Second}
			inFleet(t, 4, cache, fetch.Options{StaleWait: staleWait}, func(t *testing.T, x *fleet) {
				cache.Set(old, keys...)
				began := time.Now()
				x.all(0, func(f *fetch.Fetcher[string]) {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					values, err := f.GetMany(ctx, keys)
					if values["k0"] != want || len(values) != len(keys) || err != nil {
						t.Errorf("%v: %v, %v", staleWait, values, err)
					}
				})
				within(t, began, 0, min(staleWait, cache.Takes)+50*time.Millisecond)
				time.Sleep(2 * time.Second)
				// where all have tried at the same time, nobody may have won a lock
				_, _ = x.fs[0].GetMany(t.Context(), keys)
				time.Sleep(2 * time.Second)
				for _, f := range x.fs {
					x.wantMany(t, f, keys)
					if s, n := f.Stats(), uint64(len(keys)); s.Stale < n || s.Hits < n || s.Misses != 0 {
						t.Errorf("%+v", s)
					}
				}
				equal(t, "keys were loaded", cache.Loaded.Load(), int64(len(keys)))
			})
		}
	}
}

// StaleWait waits for no refresh that does not begin, because the last one has just failed; for one that
// fails the stale value is served; and nobody gets a value whose load began before the entry that the caller
// has found.
func TestStaleWaitGivesNothingWorse(t *testing.T) {
	cache := &fetchkit.Cache{Takes: time.Second}
	var fails atomic.Bool
	cache.OnLoad = func(ctx context.Context, _ []string) error {
		if fails.Load() {
			return errors.Join(errMine, wait(ctx, time.Second))
		}
		return nil
	}
	stale := old
	inFleet(t, 1, cache, fetch.Options{StaleWait: 10 * time.Second, ErrorHold: time.Minute},
		func(t *testing.T, x *fleet) {
			keys := fetchkit.Keys(0, 2)
			cache.Set(stale, keys...)
			before := getting(t.Context(), x.fs[0], "k0", 1)
			time.Sleep(cache.Takes / 2)
			cache.Change()
			cache.Set(fetch.Entry[string]{Value: "newer", Fresh: fetch.Stale}, keys...)
			getting(t.Context(), x.fs[0], "k0", 3).want(t, "newer")
			before.want(t, "k0@0")
			time.Sleep(10 * time.Second)
			fails.Store(true)
			cache.Set(stale, keys...)
			for i := range 2 {
				began := time.Now()
				values, err := x.fs[0].GetMany(t.Context(), keys)
				if values["k0"] != "old" || values["k1"] != "old" || err != nil {
					t.Errorf("%v, %v", values, err)
				}
				within(t, began, 0, time.Duration(1-i)*1100*time.Millisecond)
			}
		})
}

// While another process refreshes stale keys, hits hardly ever try their locks; when it has died, they are
// refreshed here.
func TestStaleKeysThatAreRefreshedElsewhere(t *testing.T) {
	for _, keys := range oneAndMany {
		inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{}, func(t *testing.T, x *fleet) {
			x.cache.Set(old, keys...)
			x.killed(3*time.Second, keys...)
			hits := func(n int, apart time.Duration) {
				for range n {
					if values, err := x.fs[0].GetMany(t.Context(), keys); len(values) != len(keys) || err != nil {
						t.Errorf("%v, %v", values, err)
					}
					time.Sleep(apart)
				}
			}
			hits(1, time.Millisecond)
			before := x.nodes[0].Mini.CommandCount()
			hits(1000, time.Millisecond)
			const attempt = 8 // commands, with those in the script
			if got := x.nodes[0].Mini.CommandCount() - before; got > 10*attempt*len(keys) {
				t.Errorf("1000 hits on %d keys: %d commands to a node", len(keys), got)
			}
			if hits(30, 100*time.Millisecond); x.fs[0].Stats().Loads == 0 {
				t.Error("nothing was refreshed")
			}
		})
	}
}

// An origin that fails while a stale value is served, or whose values cannot be stored, is called once a
// second at most, and not more often than ErrorHold allows; the value is still served.
func TestAFailingOriginBehindAStaleValue(t *testing.T) {
	for _, c := range []struct {
		hold, least time.Duration
		load        error
	}{{0, time.Second, errMine}, {5 * time.Second, 5 * time.Second, errMine},
		{5 * time.Second, time.Second, nil}} {
		cache, last := &fetchkit.Cache{}, time.Time{}
		cache.OnLoad = func(context.Context, []string) error {
			if since := time.Since(last); since < c.least {
				t.Errorf("%v after the last load", since)
			}
			last = time.Now()
			return c.load
		}
		cache.OnPut = func(context.Context, []string) error { return errMine }
		inFleet(t, 1, cache, fetch.Options{ErrorHold: c.hold}, func(t *testing.T, x *fleet) {
			cache.Set(old, "k")
			for range 2000 {
				getting(t.Context(), x.fs[0], "k", 1).want(t, "old")
				time.Sleep(10 * time.Millisecond)
			}
			if n := time.Duration(cache.Loads.Load()); n > 20*time.Second/c.least+1 || n < 10*time.Second/c.least {
				t.Errorf("%d loads in 20 seconds", n)
			}
		})
	}
}

// An error is served to newcomers for ErrorHold, instead of a load, whichever failure it was: so an origin
// that has recovered is called after that time at the latest, and at once where the entry has changed.
func TestErrorsAreHeld(t *testing.T) {
	for option, hold := range map[time.Duration]time.Duration{0: time.Second, time.Minute: time.Minute} {
		for _, storeDown := range []bool{false, true} {
			var fails, down atomic.Bool
			fails.Store(true)
			cache := &fetchkit.Cache{OnLoad: when(&fails), OnGet: when(&down)}
			inFleet(t, 1, cache, fetch.Options{ErrorHold: option}, func(t *testing.T, x *fleet) {
				for n := range 3 {
					getting(t.Context(), x.fs[0], "k", 3).fail(t, errMine)
					down.Store(storeDown) // nothing is known of the entry then
					var held *fetch.HeldError
					err := getting(t.Context(), x.fs[0], "k", 3).fail(t, errMine)
					if !errors.As(err, &held) || held.Err != errMine ||
						time.Until(held.Until) != hold { //nolint:errorlint // itself
						t.Fatalf("%v", err)
					}
					equal(t, "loads", cache.LoadsOf("k"), n+1)
					down.Store(false)
					time.Sleep(hold)
				}
				_, _ = x.fs[0].Get(t.Context(), "k")
				fails.Store(false)
				getting(t.Context(), x.fs[0], "k", 1).fail(t, errMine)
				cache.Change("k")
				getting(t.Context(), x.fs[0], "k", 3).want(t, "k@1")
			})
		}
	}
}

// A caller's lookup that timed out in the store's client is no reason to load without a lock: the processors
// or the store may be busy. One that was refused is one; with FailClosed it is the caller's error.
func TestACallersLookupFails(t *testing.T) {
	for _, c := range []struct {
		err      error
		down     bool
		unlocked uint64
		match    error // with FailClosed; nil: none
	}{
		{context.DeadlineExceeded, false, 0, nil},
		{&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, false, 0, nil},
		{fmt.Errorf("cache: %w", redis.ErrPoolTimeout), false, 0, nil},
		{syscall.ECONNREFUSED, false, 1, syscall.ECONNREFUSED},
		{context.DeadlineExceeded, true, 1, flightlock.ErrUnavailable},
	} {
		for _, failClosed := range []bool{false, true} {
			cache := &fetchkit.Cache{}
			cache.OnGet = func(context.Context, []string) error {
				if cache.Gets.Load() > 1 {
					return nil
				}
				return c.err
			}
			inFleet(t, 1, cache, fetch.Options{FailClosed: failClosed}, func(t *testing.T, x *fleet) {
				x.down(c.down)
				if results := getting(t.Context(), x.fs[0], "k", 1); failClosed && c.match != nil {
					results.fail(t, c.match)
				} else {
					results.want(t, "k@0")
				}
				if s := x.fs[0].Stats(); s.LookupErrors != 1 || !failClosed && s.UnlockedLoads != c.unlocked {
					t.Errorf("%v: %+v", c.err, s)
				}
			})
		}
	}
}
