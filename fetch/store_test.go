package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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

// Each calls its function for 16 keys at once, and for no more when ctx has ended. Each key has its own
// outcome.
func TestEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		load := fetch.Each(func(ctx context.Context, key string) (string, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			time.Sleep(time.Second) // the bubble's time
			switch key {
			case "k1":
				return "", fmt.Errorf("mine: %w", fetch.ErrNotFound)
			case "k2":
				return "", errMine
			case "k3":
				panic(errMine)
			case "k4":
				runtime.Goexit()
			}
			return key, nil
		})
		began := time.Now()
		values, err := load(t.Context(), fetchkit.Keys(0, 40))
		within(t, began, 3*time.Second, 3*time.Second)
		var some fetch.KeyErrors
		var p *flightlock.PanicError
		if len(values) != 36 || !errors.As(err, &some) || len(some) != 3 || !errors.Is(some["k2"], errMine) ||
			!errors.Is(some["k3"], errMine) || !errors.As(some["k4"], &p) || !p.Goexit || p.Op != "Load" ||
			most.Load() != 16 {
			t.Errorf("%d values, %v, %d at once", len(values), err, most.Load())
		}
		for key, want := range map[string]error{"k1": nil, "k2": errMine} {
			values, err := load(t.Context(), []string{key}) // to which a Loader around it may add
			if values == nil || len(values) != 0 || !errors.Is(err, want) {
				t.Errorf("%s: %v, %v", key, values, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		began = time.Now()
		values, err = load(ctx, fetchkit.Keys(10, 100))
		within(t, began, 2*time.Second, 2*time.Second)
		if !errors.Is(err, context.DeadlineExceeded) || len(values) != 32 {
			t.Errorf("%d values, %v", len(values), err)
		}
	})
}

// Plain calls its functions for one key at a time, also for many, and stores no absence. A panic in one of
// many calls is that key's, and says where it was.
func TestPlain(t *testing.T) {
	var stored sync.Map
	s := fetch.Plain(func(_ context.Context, key string) (string, bool, error) {
		if key == "k2" {
			return "", false, errMine
		}
		v, ok := stored.Load(key)
		text, _ := v.(string)
		return text, ok, nil
	}, func(_ context.Context, key, v string) error {
		if key == "k3" {
			panic("ouch")
		}
		stored.Store(key, v)
		return nil
	})
	put := map[string]fetch.Entry[string]{"k0": {Value: "v"}, "k1": {Absent: true}, "k3": {}, "k4": {Value: "v"}}
	outdated, err := s.Put(t.Context(), put)
	var some fetch.KeyErrors
	var p *flightlock.PanicError
	if len(outdated) != 0 || !errors.As(err, &some) || len(some) != 1 || !errors.As(some["k3"], &p) ||
		p.Op != "Store" {
		t.Errorf("%v, %v", outdated, err)
	}
	for _, look := range []func(context.Context, []string) (map[string]fetch.Entry[string], error){s.GetMany,
		s.Reserve} {
		found, err := look(t.Context(), []string{"k0", "k1", "k2", "k4"})
		if found["k0"].Value != "v" || found["k0"].Fresh != fetch.Fresh || found["k1"].Fresh != fetch.Miss ||
			found["k4"].Value != "v" || !errors.As(err, &some) || some["k2"] != errMine { //nolint:errorlint // itself
			t.Errorf("%v, %v", found, err)
		}
	}
	_, err = s.Put(t.Context(), map[string]fetch.Entry[string]{"k1": {Absent: true}})
	testkit.Must(t, err)
}

// A value whose lookup has failed is stored all the same: nothing else would ever replace one that cannot be
// read. And it is for callers that come while it is loaded, whose lookups fail, too.
func TestPlainWhoseLookupsFail(t *testing.T) {
	cache := &fetchkit.Cache{Unstamped: true, Takes: time.Second}
	cache.OnGet = func(context.Context, []string) error {
		if cache.Stored.Load() == 0 {
			return errMine
		}
		return nil
	}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		early := getting(t.Context(), x.fs[0], "k", 1)
		time.Sleep(cache.Takes / 2)
		getting(t.Context(), x.fs[0], "k", 3).want(t, "k@0")
		early.want(t, "k@0")
		getting(t.Context(), x.fs[0], "k", 1).want(t, "k@0")
		if cache.Loads.Load() != 1 || cache.Stored.Load() != 1 {
			t.Errorf("%d loads, %d stored", cache.Loads.Load(), cache.Stored.Load())
		}
	})
}

// A Store around a plain one stores, too.
func TestAStoreAroundAPlainOne(t *testing.T) {
	cache := &fetchkit.Cache{Unstamped: true}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		f, err := fetch.New(x.clients[0], struct{ fetch.Store[string] }{cache.Store()}, cache.Load, fetch.Options{})
		testkit.Must(t, err)
		x.wantMany(t, f, fetchkit.Keys(0, 3))
		equal(t, "values were stored", cache.Stored.Load(), 3)
	})
}

// The panic of a Store in a caller's own lookup is that caller's, and leaves nothing behind.
func TestAStorePanicsOnItsCaller(t *testing.T) {
	cache := &fetchkit.Cache{OnGet: func(context.Context, []string) error { panic(errMine) }}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		for _, f := range []func(){
			func() { _, _ = x.fs[0].Get(t.Context(), "k") },
			func() { _, _ = x.fs[0].GetMany(t.Context(), fetchkit.Keys(0, 3)) },
		} {
			if v := testkit.Recovered(f); v != errMine {
				t.Errorf("recovered %v", v)
			}
		}
	})
}

// The errors of many keys name one, in one line, and match all.
func TestErrorsOfManyKeys(t *testing.T) {
	errs := fetch.KeyErrors{"b": errMine, "a": errors.New("line\nline"), "c": fetch.ErrNotFound}
	for prefix, err := range map[string]error{"": errs, "fetch: ": &fetch.ManyError{Errors: errs}} {
		equal(t, "is the text", err.Error(), "flightlock: "+prefix+`3 keys have failed; "a": line; line`)
		equal(t, "matches all", errors.Is(err, errMine) && errors.Is(err, fetch.ErrNotFound), true)
	}
	equal(t, "is the text of none", fetch.KeyErrors{}.Error(), "flightlock: no key has failed")
}
