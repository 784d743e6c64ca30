package fetch_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
)

// MaxLoads is the number of concurrent loads, with locks and without, one for many keys being one. Those that
// wait have theirs in the order of their arrival, and no lock: another process that has a slot loads
// meanwhile.
func TestMaxLoads(t *testing.T) {
	for _, down := range []bool{false, true} {
		for _, n := range []int{1, 5} {
			var order []int // of keys, as they are loaded
			var mu sync.Mutex
			cache := &fetchkit.Cache{Takes: time.Second, OnLoad: func(_ context.Context, keys []string) error {
				mu.Lock()
				defer mu.Unlock()
				at, err := strconv.Atoi(keys[0][1:])
				order = append(order, at)
				return err
			}}
			inFleet(t, 1, cache, fetch.Options{MaxLoads: 3}, func(t *testing.T, x *fleet) {
				x.wantMany(t, x.fs[0], []string{"k0"})
				x.down(down)
				time.Sleep(time.Second)
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 12 {
					wg.Go(func() { x.wantMany(t, x.fs[0], fetchkit.Keys(100*i+100, n)) })
					time.Sleep(time.Millisecond)
				}
				if !down {
					other := fetchkit.New(t, x.clients[0], &fetchkit.Cache{}, fetch.Options{})
					began := time.Now()
					x.wantMany(t, other, fetchkit.Keys(1200, n))
					within(t, began, 0, 100*time.Millisecond)
				}
				wg.Wait()
				within(t, began, 4*time.Second, 4300*time.Millisecond)
				if _, most := cache.Most(); most != 3 || len(order) != 13 {
					t.Errorf("%d loads at once, %d in all", most, len(order))
				}
				for i, at := range order { // three at a time; without nodes they queue again when they have found that
					if !down && at > 0 && (at-100)/300 != (i-1)/3 {
						t.Errorf("k%d was load %d: %v", at, i, order)
					}
				}
			})
		}
	}
}

// Loads that get other keys do not wait for slots that they have themselves: also runs that others have
// begun, and which wait for one already, alone or with others.
func TestLoadsInsideLoadsNeedNoSlot(t *testing.T) {
	for name, opts := range map[string]fetch.Options{
		"MaxLoads=1": {MaxLoads: 1}, "MaxLoads=16": {MaxLoads: 16},
		"down": {}, "down/MaxLoads=1": {MaxLoads: 1}, "down/MaxUnlockedLoads=1": {MaxUnlockedLoads: 1},
	} {
		t.Run(name, func(t *testing.T) {
			var f *fetch.Fetcher[string]
			cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, keys []string) (err error) {
				if err := wait(ctx, 10*time.Millisecond); err != nil {
					return err
				}
				switch key := keys[0]; key[0] {
				case 'o':
					_, err = f.GetMany(ctx, []string{"inner" + key[len("outer"):], "leaf"})
				case 'i':
					_, err = f.Get(ctx, "leaf")
				}
				return err
			}}
			inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
				f = x.fs[0]
				x.down(strings.HasPrefix(name, "down"))
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 40 {
					for _, kind := range []string{"outer", "inner"} { // so some join runs that wait for a slot
						wg.Go(func() { x.wantMany(t, f, []string{fmt.Sprint(kind, i)}) })
					}
				}
				wg.Wait()
				within(t, began, 0, 20*time.Second)
			})
		})
	}
}

// One that gets no slot has an error after WaitTimeout, which says so, whatever lookups take meanwhile;
// without locks it also says why there are none. A refresh without callers does not wait.
func TestNoSlot(t *testing.T) {
	for name, c := range map[string]struct {
		opts fetch.Options
		want error
		says string
	}{
		"MaxLoads": {fetch.Options{MaxLoads: 1}, flightlock.ErrNotAcquired,
			"Options.MaxLoads, 1, are running"},
		"nodes are down": {fetch.Options{MaxUnlockedLoads: 1}, flightlock.ErrUnavailable,
			"MaxUnlockedLoads, 1, are running"},
		"store is down": {fetch.Options{MaxUnlockedLoads: 1}, errMine, "MaxUnlockedLoads, 1, are running"},
		"slow lookups": {fetch.Options{MaxLoads: 1, LookupTimeout: 10 * time.Second}, flightlock.ErrNotAcquired,
			"Options.MaxLoads"},
	} {
		for _, keys := range oneAndMany {
			c.opts.WaitTimeout = 3 * time.Second
			cache := &fetchkit.Cache{Takes: 20 * time.Second}
			cache.OnGet = func(ctx context.Context, _ []string) error {
				switch {
				case name == "store is down":
					return errMine
				case name == "slow lookups" && cache.Gets.Load() > 3:
					<-ctx.Done()
				}
				return nil
			}
			inFleet(t, 1, cache, c.opts, func(t *testing.T, x *fleet) {
				x.down(name == "nodes are down")
				first := getting(t.Context(), x.fs[0], "first", 1)
				time.Sleep(time.Second)
				cache.Set(old, "stale")
				if name != "store is down" {
					getting(t.Context(), x.fs[0], "stale", 1).want(t, "old")
					synctest.Wait()
					time.Sleep(100 * time.Millisecond)
					equal(t, "are running", x.fs[0].Stats().Running, 1)
				}
				began := time.Now()
				for key, err := range failMany(t, x.fs[0], keys, c.want) {
					if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), `"`+key+`"`) {
						t.Errorf("%s: %v", name, err)
					}
				}
				within(t, began, 3*time.Second, 3200*time.Millisecond)
				first.want(t, "first@0")
			})
		}
	}
}

// One that waits for a slot has what other processes load meanwhile, though its lookups take long: a slot
// that becomes free meanwhile is used at once.
func TestThoseThatWaitForASlotLookMeanwhile(t *testing.T) {
	for _, keys := range oneAndMany {
		var slow atomic.Bool
		cache := &fetchkit.Cache{OnLoad: takesLong("long", 20*time.Second)}
		cache.OnGet = func(ctx context.Context, _ []string) error {
			if slow.Load() {
				<-ctx.Done()
			}
			return ctx.Err()
		}
		opts := fetch.Options{MaxLoads: 1, LookupTimeout: 15 * time.Second}
		inFleet(t, 2, cache, opts, func(t *testing.T, x *fleet) {
			long := getting(t.Context(), x.fs[0], "long", 1)
			synctest.Wait()
			began := time.Now()
			x.all(100*time.Millisecond, func(f *fetch.Fetcher[string]) { x.wantMany(t, f, keys) })
			within(t, began, 0, 1500*time.Millisecond)
			late := getting(t.Context(), x.fs[0], "late", 1)
			synctest.Wait()
			slow.Store(true)
			long.want(t, "long@0")
			slow.Store(false)
			late.want(t, "late@0")
			within(t, began, 20*time.Second, 21*time.Second)
		})
	}
}

// Those that wait to be loaded without locks are locked after all when the nodes are back, or the store
// answers.
func TestThoseWithoutSlotsAreLockedAfterAll(t *testing.T) {
	for _, storeDown := range []bool{false, true} {
		var fails atomic.Bool
		cache := &fetchkit.Cache{OnLoad: takesLong("k0", 15*time.Second), OnGet: when(&fails)}
		opts := fetch.Options{MaxUnlockedLoads: 1, WaitTimeout: 30 * time.Second}
		inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
			fails.Store(storeDown)
			x.down(!storeDown)
			var wg sync.WaitGroup
			wg.Go(func() { x.wantMany(t, x.fs[0], fetchkit.Keys(0, 2)) }) // it has the slot
			time.Sleep(time.Second)
			wg.Go(func() { x.wantMany(t, x.fs[0], fetchkit.Keys(10, 3)) })
			time.Sleep(time.Second)
			x.down(false)
			fails.Store(false)
			time.Sleep(4 * time.Second)
			if n := cache.Stored.Load(); n != 3 || x.fs[0].Stats().UnlockedLoads != 1 {
				t.Errorf("%d values were stored, %+v", n, x.fs[0].Stats())
			}
			wg.Wait()
			equal(t, "keys were loaded", cache.Loaded.Load(), 5)
		})
	}
}

// takesLong has a load that begins with key take so long.
func takesLong(key string, d time.Duration) func(context.Context, []string) error {
	return func(ctx context.Context, keys []string) error {
		if strings.HasPrefix(keys[0], key) {
			return wait(ctx, d)
		}
		return nil
	}
}
