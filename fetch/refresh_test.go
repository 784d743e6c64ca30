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
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
)

// A Refresh loads a fresh value anew, others get the old one meanwhile, and the new one afterwards.
func TestRefresh(t *testing.T) {
	t.Parallel()
	inFleet(t, 2, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		keys := fetchkit.Keys(0, 3)
		x.wantMany(t, x.fs[0], keys)
		synctest.Wait() // the locks are released
		old := x.cache.Value("k0")
		x.cache.Change() // and nothing is invalidated
		var refreshed sync.WaitGroup
		refreshed.Go(func() {
			testkit.Must(t, x.fs[0].Refresh(t.Context(), append(keys, keys...)...))
		})
		time.Sleep(500 * time.Millisecond)
		began := time.Now()
		for _, f := range x.fs {
			getting(t.Context(), f, "k0", 2).want(t, old)
		}
		within(t, began, 0, 0)
		refreshed.Wait()
		for _, f := range x.fs {
			x.wantMany(t, f, keys)
		}
		equal(t, "loads of k0", x.cache.LoadsOf("k0"), 2)
		equal(t, "loads", x.cache.Loads.Load(), 2)
	})
}

// Processes that refresh a key at the same time load it twice at most, whoever comes first, and each Refresh
// returns after a load that began when it had been called.
func TestAFleetRefreshesOnce(t *testing.T) {
	t.Parallel()
	inFleet(t, 5, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		getting(t.Context(), x.fs[0], "k", 1).want(t, x.cache.Value("k"))
		var all sync.WaitGroup
		for _, f := range x.fs {
			for range 3 {
				all.Go(func() {
					version := x.cache.Change()
					testkit.Must(t, f.Refresh(t.Context(), "k"))
					v, err := f.Get(t.Context(), "k")
					var got int
					if _, bad := fmt.Sscanf(v, "k@%d", &got); err != nil || bad != nil || got < version {
						t.Errorf("after a Refresh at %d: %q, %v", version, v, err)
					}
				})
			}
		}
		all.Wait()
		if n := x.cache.LoadsOf("k"); n > 3 {
			t.Errorf("%d loads", n-1)
		}
	})
}

// A load that began before a Refresh is nothing to it, in this process or another one: neither its value nor
// its error.
func TestARefreshDuringALoad(t *testing.T) {
	t.Parallel()
	for i, where := range []string{"this process", "another one"} {
		t.Run(where, func(t *testing.T) {
			inFleet(t, 2, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
				before := getting(t.Context(), x.fs[i], "k", 1)
				time.Sleep(500 * time.Millisecond)
				old := x.cache.Value("k")
				x.cache.Change()
				testkit.Must(t, x.fs[0].Refresh(t.Context(), "k"))
				before.want(t, old)
				getting(t.Context(), x.fs[1], "k", 1).want(t, x.cache.Value("k"))
				equal(t, "loads", x.cache.LoadsOf("k"), 2)
			})
		})
	}
}

// A run that waits for another process, and would end with the old value when it finds that, does not once a
// Refresh waits for it.
func TestARefreshJoinsARunThatWaits(t *testing.T) {
	t.Parallel()
	inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
		release := x.elsewhere("k")
		missed := getting(t.Context(), x.fs[0], "k", 1)
		time.Sleep(10 * time.Millisecond)
		var refreshed sync.WaitGroup
		refreshed.Go(func() { testkit.Must(t, x.fs[0].Refresh(t.Context(), "k")) })
		time.Sleep(10 * time.Millisecond)
		x.cache.Set(fetch.Entry[string]{Value: "old", Fresh: fetch.Stale}, "k")
		time.Sleep(5 * time.Second)
		release()
		refreshed.Wait()
		missed.want(t, x.cache.Value("k"))
	})
}

// A Refresh whose load fails returns the error and leaves the value, also while errors are held; what does
// not exist is no error.
func TestARefreshThatFails(t *testing.T) {
	t.Parallel()
	fails := errors.New("no origin")
	cache := &fetchkit.Cache{NotThere: func(key string) bool { return key == "gone" }}
	inFleet(t, 1, cache, fetch.Options{ErrorHold: time.Hour}, func(t *testing.T, x *fleet) {
		f := x.fs[0]
		getting(t.Context(), f, "k", 1).want(t, x.cache.Value("k"))
		cache.OnLoad = func(context.Context, []string) error { return fails }
		for range 2 { // the second one is in ErrorHold
			wantOnly(t, f.Refresh(t.Context(), "k"), "k", fails)
		}
		equal(t, "loads", cache.LoadsOf("k"), 3)
		getting(t.Context(), f, "k", 1).want(t, x.cache.Value("k"))
		cache.OnLoad = nil
		testkit.Must(t, f.Refresh(t.Context(), "k", "gone"))

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		cache.OnGet = func(ctx context.Context, _ []string) error { return ctx.Err() }
		wantOnly(t, f.Refresh(ctx, "k"), "k", context.Canceled)
		cache.OnGet = func(context.Context, []string) error { return fails }
		wantOnly(t, f.Refresh(t.Context(), "k"), "k", fails)
		equal(t, "lookup errors", f.Stats().LookupErrors, 1)
		cache.OnGet, cache.Takes = nil, time.Minute
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantOnly(t, f.Refresh(short, "k"), "k", context.DeadlineExceeded)
		wantOnly(t, f.Refresh(t.Context(), strings.Repeat("k", 5000)), strings.Repeat("k", 5000),
			flightlock.ErrInvalid)
		time.Sleep(time.Minute)
		testkit.Must(t, f.Close(t.Context()))
		if err := f.Refresh(t.Context(), "k"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
		if _, _, err := f.Peek(t.Context(), "k"); !errors.Is(err, flightlock.ErrClosed) {
			t.Error(err)
		}
	})
	inFleet(t, 1, &fetchkit.Cache{Unstamped: true}, fetch.Options{}, func(t *testing.T, x *fleet) {
		if err := x.fs[0].Refresh(t.Context(), "k"); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
	})
}

// wantOnly wants an error of key alone.
func wantOnly(t *testing.T, err error, key string, match error) {
	t.Helper()
	var many *fetch.ManyError
	if !errors.As(err, &many) || len(many.Errors) != 1 || !errors.Is(many.Errors[key], match) {
		t.Errorf("%v, want %v", err, match)
	}
}

// Peek says what there is, and changes nothing: no load, no counter.
func TestPeek(t *testing.T) {
	t.Parallel()
	inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{}, func(t *testing.T, x *fleet) {
		fails := errors.New("no store")
		for _, c := range []struct {
			e    fetch.Entry[string]
			v    string
			err  error
			gets error
		}{
			{e: fetch.Entry[string]{}},
			{e: fetch.Entry[string]{Value: "ignored", Fresh: 7}},
			{e: fetch.Entry[string]{Value: "v", Fresh: fetch.Fresh}, v: "v"},
			{e: fetch.Entry[string]{Value: "v", Fresh: fetch.Stale}, v: "v"},
			{e: fetch.Entry[string]{Absent: true, Fresh: fetch.Fresh}, err: fetch.ErrNotFound},
			{gets: fails, err: fails},
		} {
			x.cache.Set(c.e, "k")
			x.cache.OnGet = func(context.Context, []string) error { return c.gets }
			before := x.cache.Entry("k")
			fresh := c.e.Fresh
			if fresh > fetch.Fresh {
				fresh = fetch.Miss
			}
			if v, got, err := x.fs[0].Peek(t.Context(), "k"); v != c.v || got != fresh || !errors.Is(err, c.err) {
				t.Errorf("%+v: %q, %v, %v", c.e, v, got, err)
			}
			if after := x.cache.Entry("k"); after != before {
				t.Errorf("%+v: it is %+v now", before, after)
			}
		}
		time.Sleep(time.Minute)
		equal(t, "loads", x.cache.Loads.Load(), 0)
		equal(t, "counters", x.fs[0].Stats(), fetch.Stats{})
	})
}

// A load by LoadFrom gets the value that it replaces, and a load inside it that of its own key.
func TestLoadFrom(t *testing.T) {
	t.Parallel()
	cache := &fetchkit.Cache{}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		var olds []string
		var f *fetch.Fetcher[string]
		load := fetch.LoadFrom(func(ctx context.Context, key string, old fetch.Entry[string]) (string, error) {
			olds = append(olds, fmt.Sprintf("%s: %q %v", key, old.Value, old.Fresh == fetch.Stale))
			if key == "outer" {
				return f.Get(ctx, "k")
			}
			return old.Value + "+", nil
		})
		var err error
		f, err = fetch.New(x.clients[0], cache.Store(), load, fetch.Options{Name: "from"})
		testkit.Must(t, err)
		getting(t.Context(), f, "k", 1).want(t, "+")
		testkit.Must(t, f.Refresh(t.Context(), "k"))
		cache.Set(fetch.Entry[string]{Value: "k of another time", Fresh: fetch.Stale}, "outer")
		cache.Drop("k")
		testkit.Must(t, f.Refresh(t.Context(), "outer"))
		want := []string{`k: "" false`, `k: "+" true`, `outer: "k of another time" true`, `k: "" false`}
		if fmt.Sprint(olds) != fmt.Sprint(want) {
			t.Errorf("%q, want %q", olds, want)
		}
		testkit.Must(t, f.Close(t.Context()))
		if fetch.LoadFrom[string](nil) != nil {
			t.Error("a Loader of nil")
		}
	})
}
