package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// FleetLoads is the number of concurrent loads of all processes, one for many keys being one, and all permits
// are used. What all processes want is loaded once.
func TestFleetLoads(t *testing.T) {
	for _, n := range []int{1, 5} {
		cache := &fetchkit.Cache{Takes: time.Second}
		inFleet(t, 4, cache, fetch.Options{FleetLoads: 2, LoadTimeout: time.Minute}, func(t *testing.T, x *fleet) {
			began := time.Now()
			var wg sync.WaitGroup
			for i, f := range x.fs {
				for j := range 3 {
					wg.Go(func() { x.wantMany(t, f, fetchkit.Keys(1000*i+100*j, n)) })
				}
			}
			wg.Wait()
			within(t, began, 6*time.Second, 6500*time.Millisecond)
			x.all(0, func(f *fetch.Fetcher[string]) { x.wantMany(t, f, fetchkit.Keys(0, 40)) })
			if _, most := cache.Most(); most != 2 || cache.Loaded.Load() != int64(12*n+40-n) {
				t.Errorf("%d loads at once, %d keys were loaded", most, cache.Loaded.Load())
			}
		})
	}
}

// Without a majority of nodes there are no permits, and what loads without a lock loads without one, too:
// also what has waited for a permit under its lock by then. With FailClosed both is an error. Afterwards the
// limit holds again.
func TestFleetLoadsWithoutNodes(t *testing.T) {
	for _, closed := range []bool{false, true} {
		for _, keys := range oneAndMany {
			cache := &fetchkit.Cache{Takes: 20 * time.Second}
			opts := fetch.Options{FleetLoads: 1, MaxUnlockedLoads: 2, FailClosed: closed}
			inFleet(t, 2, cache, opts, func(t *testing.T, x *fleet) {
				first := getting(t.Context(), x.fs[0], "first", 1)
				time.Sleep(time.Second)
				var wg sync.WaitGroup
				get := func() {
					if closed {
						failMany(t, x.fs[1], keys, flightlock.ErrUnavailable)
					} else {
						x.wantMany(t, x.fs[1], keys)
					}
				}
				wg.Go(get)
				time.Sleep(time.Second)
				equal(t, "loads", cache.Loads.Load(), 1)
				x.down(true)
				time.Sleep(2 * time.Second)
				if !closed {
					equal(t, "loads", cache.Loads.Load(), 2)
				}
				wg.Wait()
				first.want(t, "first@0")
				cache.Drop(keys...)
				wg.Go(get)
				wg.Wait()
				if closed {
					equal(t, "loads without locks", x.fs[1].Stats().UnlockedLoads, 0)
				} else {
					equal(t, "loads without locks", x.fs[1].Stats().UnlockedLoads, 2)
				}
				x.down(false)
				time.Sleep(2 * time.Minute) // for the quarantine
				at := cache.Loads.Load()
				x.all(time.Second, func(f *fetch.Fetcher[string]) { getting(t.Context(), f, fmt.Sprintf("%p", f), 1) })
				time.Sleep(time.Second)
				equal(t, "loads", cache.Loads.Load()-at, 1)
				time.Sleep(time.Minute)
			})
		}
	}
}

// What gets no permit has an error after WaitTimeout, which says so, with and without FailClosed: the limit
// holds. A refresh without callers does not wait. A caller that leaves takes its run with it, and what it
// says is what it has waited for. A value that comes from elsewhere ends the wait. Nothing is left of all
// that.
func TestNoPermit(t *testing.T) {
	for _, closed := range []bool{false, true} {
		for _, keys := range oneAndMany {
			cache := &fetchkit.Cache{Takes: time.Minute}
			opts := fetch.Options{FleetLoads: 1, WaitTimeout: 3 * time.Second, FailClosed: closed,
				LoadTimeout: time.Hour}
			inFleet(t, 2, cache, opts, func(t *testing.T, x *fleet) {
				first := getting(t.Context(), x.fs[0], "first", 1)
				time.Sleep(time.Second)
				cache.Set(old, "stale")
				getting(t.Context(), x.fs[1], "stale", 1).want(t, "old")
				synctest.Wait()
				time.Sleep(100 * time.Millisecond)
				equal(t, "are running", x.fs[1].Stats().Running, 0)

				began := time.Now()
				for key, err := range failMany(t, x.fs[1], keys, flightlock.ErrNotAcquired) {
					if !strings.Contains(err.Error(), "Options.FleetLoads, 1, are running") ||
						!strings.Contains(err.Error(), `"`+key+`"`) {
						t.Errorf("%v", err)
					}
				}
				within(t, began, 3*time.Second, 3200*time.Millisecond)

				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				_, err := x.fs[1].Get(ctx, keys[0])
				cancel()
				if !errors.Is(err, context.DeadlineExceeded) ||
					!strings.Contains(err.Error(), "a permit: FleetLoads is 1") {
					t.Errorf("%v", err)
				}
				time.Sleep(time.Second)
				equal(t, "are running", x.fs[1].Stats().Running, 0)

				began = time.Now()
				found := getting(t.Context(), x.fs[1], keys[0], 3)
				time.Sleep(500 * time.Millisecond)
				cache.Set(old, keys...)
				found.want(t, "old")
				within(t, began, 500*time.Millisecond, 1500*time.Millisecond)
				time.Sleep(100 * time.Millisecond)
				for _, key := range x.locks() {
					if key != lockName("first") {
						t.Errorf("%q is locked", key)
					}
				}
				first.want(t, "first@0")
				equal(t, "loads", cache.Loads.Load(), 1)
			})
		}
	}
}

// A permit of a process that was killed is back within its ttl, Options.TTL. Fetchers of another Name, or
// with another FleetLoads, have permits of their own.
func TestPermitsOfAFleet(t *testing.T) {
	opts := fetch.Options{FleetLoads: 1, TTL: 5 * time.Second}
	inFleet(t, 2, &fetchkit.Cache{}, opts, func(t *testing.T, x *fleet) {
		lockkit.Lock(t, x.clients[0], "fetch:fetch:1:0", 5*time.Second) // never refreshed, nor released
		began := time.Now()
		for _, o := range []fetch.Options{{FleetLoads: 2}, {FleetLoads: 1, Name: "other"}, {}} {
			x.wantMany(t, fetchkit.New(t, x.clients[1], &fetchkit.Cache{}, o), []string{"k"})
		}
		within(t, began, 0, 100*time.Millisecond)
		x.wantMany(t, x.fs[1], []string{"k"})
		within(t, began, 4*time.Second, 5100*time.Millisecond)
	})
}

// Loads that get other keys do not wait for permits that they have themselves: neither by themselves, nor by
// runs that others of their process have begun, and which wait for one already.
func TestLoadsInsideLoadsNeedNoPermit(t *testing.T) {
	for name, opts := range map[string]fetch.Options{
		"one": {FleetLoads: 1}, "one of one": {FleetLoads: 1, MaxLoads: 1}, "some": {FleetLoads: 5, MaxLoads: 10},
	} {
		t.Run(name, func(t *testing.T) {
			var f *fetch.Fetcher[string]
			cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, keys []string) (err error) {
				if err := wait(ctx, 10*time.Millisecond); err != nil {
					return err
				}
				if n, outer := strings.CutPrefix(keys[0], "outer"); outer {
					_, err = f.GetMany(ctx, []string{"inner" + n, "leaf"})
				}
				return err
			}}
			inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
				f = x.fs[0]
				began := time.Now()
				var wg sync.WaitGroup
				for i := range 20 {
					for _, kind := range []string{"outer", "inner"} {
						wg.Go(func() { x.wantMany(t, f, []string{fmt.Sprint(kind, i)}) })
					}
				}
				wg.Wait()
				within(t, began, 0, 20*time.Second)
			})
		})
	}
}

// A load with the only permit gets a key whose lock another process has, which waits for that permit: that
// ends by LoadTimeout, and what was waited for is loaded.
func TestACircleOfPermitsEnds(t *testing.T) {
	var x *fleet
	cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, keys []string) (err error) {
		if keys[0] == "outer" {
			time.Sleep(time.Second)
			_, err = x.fs[0].Get(ctx, "inner")
		}
		return err
	}}
	opts := fetch.Options{FleetLoads: 1, LoadTimeout: 10 * time.Second}
	inFleet(t, 2, cache, opts, func(t *testing.T, fleet *fleet) {
		x = fleet
		outer := getting(t.Context(), x.fs[0], "outer", 1)
		time.Sleep(500 * time.Millisecond)
		began := time.Now()
		inner := getting(t.Context(), x.fs[1], "inner", 1)
		if got := <-outer; got.err == nil || !strings.Contains(got.err.Error(), "deadline") {
			t.Errorf("%v", got.err)
		}
		inner.want(t, "inner@0")
		within(t, began, 9*time.Second, 11*time.Second)
	})
}
