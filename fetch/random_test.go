package fetch_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "the first seed of TestRandomHistories")
	seedsFlag = flag.Uint64("seeds", 0, "how many seeds of it; 0: as many as there is time for")
)

// TestRandomHistories has callers of a fleet get keys while values change, expire and go stale. These hold,
// whatever happens:
//
//   - A Get that begins after an invalidation has returned gets no older value, if there are stamps.
//   - Every call ends, and soon after its ctx has.
//   - Nothing is left: no run, no lock, no slot; and Close returns, also while all that goes on.
//
// And these as long as nothing fails: no key has two loads at once, none is loaded without a lock, no more
// loads run than FleetLoads, and all get values.
func TestRandomHistories(t *testing.T) {
	seeds := testkit.Sized[uint64](4, 1)
	if redistest.Long() {
		seeds = 200
	}
	if *seedsFlag > 0 {
		seeds = *seedsFlag
	}
	for seed := *seedFlag; seed < *seedFlag+seeds; seed++ {
		for _, calm := range []bool{true, false} {
			t.Run(fmt.Sprintf("seed=%d/calm=%v", seed, calm), func(t *testing.T) { runHistory(t, seed, calm) })
		}
	}
}

// A history is one of them.
type history struct {
	*fleet
	calm  bool
	nests bool // loads get other keys
	opts  fetch.Options
	keys  int

	mu      sync.Mutex // guards what follows
	r       *rand.Rand
	changed map[string]int // the version of the last invalidation that has returned

	storeDown atomic.Bool // it refuses all calls
	healed    atomic.Bool // nothing fails any more
}

func (h *history) intN(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.r.IntN(n)
}

// upTo is a time of at most so many milliseconds, mostly a short one.
func (h *history) upTo(ms int) time.Duration {
	return time.Duration(h.intN(1+ms*1000)) * time.Microsecond / time.Duration(1+h.intN(4))
}

func (h *history) key() string { return fmt.Sprint("k", h.intN(h.keys)) }

func (h *history) some() []string { return fetchkit.Keys(h.intN(h.keys), 1+h.intN(h.keys)) }

var errMine = errors.New("mine")

func runHistory(t *testing.T, seed uint64, calm bool) {
	r := rand.New(rand.NewPCG(seed, 0))
	pick := func(of ...int) int { return of[r.IntN(len(of))] }
	h := &history{calm: calm, nests: !calm && r.IntN(2) == 0, r: r, keys: pick(3, 10, 40),
		changed: map[string]int{}}
	h.opts = fetch.Options{
		TTL: 2 * time.Second, LoadTimeout: 3 * time.Second, WaitTimeout: 20 * time.Second,
		MaxLoads: pick(0, 0, 1, 2), MaxBatch: pick(0, 2, 7), MaxUnlockedLoads: pick(0, 1, 2),
		StaleWait: time.Duration(pick(0, 0, 500)) * time.Millisecond, BareContext: r.IntN(3) == 0,
		ErrorHold: time.Duration(pick(-1, 0, 300_000_000)), FailClosed: !calm && r.IntN(4) == 0,
	}
	if more := rand.New(rand.NewPCG(seed, 1)); !h.nests {
		h.opts.FleetLoads = []int{0, 0, 1, 3}[more.IntN(4)]
	}
	if calm {
		h.opts.WaitTimeout = 10 * time.Minute
	}
	cache := &fetchkit.Cache{Unstamped: r.IntN(6) == 0}
	cache.OnGet, cache.OnReserve = h.act("lookup", 3, 3, 60), h.act("lookup", 3, 3, 60)
	cache.OnPut, cache.OnLoad = h.act("store", 100, 100, 20), h.act("load", 2000, 1000, 14)
	cache.NotThere = func(key string) bool { return key == "k2" }
	inFleet(t, 3, cache, h.opts, func(t *testing.T, x *fleet) {
		h.fleet = x
		h.run(t)
		h.heal(t)
	})
}

// act is what code of the user's does, op, before it returns: mostly it takes up to so many milliseconds,
// without faults or with them.
func (h *history) act(op string, calm, usual, odds int) func(ctx context.Context, keys []string) error {
	return func(ctx context.Context, keys []string) error {
		if h.calm || h.healed.Load() {
			return wait(ctx, h.upTo(calm))
		}
		if op != "load" && h.storeDown.Load() {
			return errMine
		}
		switch what := h.intN(odds); {
		case what == 0:
			return errMine
		case what == 1:
			return wait(ctx, h.upTo(3000))
		case what == 2:
			time.Sleep(h.upTo(5000)) // whatever its ctx is
		case what == 3 && op != "lookup": // which may be on a caller's goroutine
			panic("a bug")
		case what == 4 && op != "lookup":
			runtime.Goexit()
		case what == 5:
			return fetch.KeyErrors{keys[len(keys)-1]: errMine}
		case what < 8 && h.nests && op == "load":
			_, _ = h.fs[h.intN(len(h.fs))].GetMany(ctx, h.some())
		}
		return wait(ctx, h.upTo(usual))
	}
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run is the history itself.
func (h *history) run(t *testing.T) {
	var wg sync.WaitGroup
	for range 25 {
		wg.Go(func() {
			for range 8 {
				h.call(t)
				h.change()
				time.Sleep(h.upTo(1000))
			}
		})
	}
	closes := h.intN(2) == 0
	if closes {
		wg.Go(func() {
			time.Sleep(h.upTo(8000))
			ctx, cancel := context.WithTimeout(t.Context(), h.upTo(4000))
			defer cancel()
			if err := h.fs[2].Close(ctx); err != nil && (h.calm || ctx.Err() == nil) {
				t.Errorf("Close: %v", err)
			}
		})
	}
	if !h.calm {
		wg.Go(h.faults)
	}
	wg.Wait()
	if most, all := h.cache.Most(); h.calm && (most > 1 || h.opts.FleetLoads > 0 && all > h.opts.FleetLoads) {
		t.Errorf("%d loads of one key at once, %d of %d in all", most, all, h.opts.FleetLoads)
	}
	for i, f := range h.fs {
		s := f.Stats()
		if h.calm && s.UnlockedLoads+s.LookupErrors+s.Lost+s.StoreFailures > 0 && !(closes && i == 2) {
			t.Errorf("process %d: %+v", i, s)
		}
	}
}

// faults has nodes and the store fail for a while.
func (h *history) faults() {
	for range 6 {
		time.Sleep(h.upTo(2000))
		some, how := h.nodes[:1+h.intN(3)], h.intN(3)
		fault := func(on bool) {
			for _, n := range some {
				switch {
				case how == 0:
					n.Down(on)
				case how == 1:
					n.Stall(on)
				case on:
					n.Cut()
				}
			}
		}
		fault(true)
		time.Sleep(h.upTo(3000))
		h.storeDown.Store(h.intN(2) == 0)
		time.Sleep(h.upTo(500))
		fault(false)
		time.Sleep(h.upTo(500))
		h.storeDown.Store(false)
	}
}

// call gets some keys, for a while or until it has them.
func (h *history) call(t *testing.T) {
	ctx, began, patience := t.Context(), time.Now(), 2*(h.opts.WaitTimeout+h.opts.LoadTimeout)+10*time.Second
	if h.intN(3) == 0 {
		var cancel context.CancelFunc
		patience = h.upTo(2000)
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
		patience += 5*time.Second + time.Millisecond // a lookup of its own that ignores its ctx
	}
	h.mu.Lock()
	least := maps.Clone(h.changed)
	h.mu.Unlock()
	f, keys, values, err := h.fs[h.intN(len(h.fs))], []string{h.key()}, map[string]string{}, error(nil)
	if h.intN(6) == 0 && !h.cache.Unstamped {
		h.refresh(ctx, t, f, keys)
	} else if h.intN(2) == 0 {
		values[keys[0]], err = f.Get(ctx, keys[0])
		if err != nil {
			delete(values, keys[0])
		}
	} else {
		keys = h.some()
		values, err = f.GetMany(ctx, keys)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("%v took %v, more than %v: %v", keys, took, patience, err)
	}
	for key, v := range values {
		name, version, _ := strings.Cut(v, "@")
		n, bad := strconv.Atoi(version)
		if bad != nil || name != key || !slices.Contains(keys, key) {
			t.Errorf("%s: %q", key, v)
		}
		if !h.cache.Unstamped && n < least[key] {
			t.Errorf("%s: %q, which was invalidated at %d", key, v, least[key])
		}
	}
	if h.calm && err != nil && ctx.Err() == nil && !errors.Is(err, flightlock.ErrClosed) &&
		!errors.Is(err, fetch.ErrNotFound) {
		t.Errorf("%v: %v", keys, err)
	}
}

// refresh has keys loaded anew, by loads that begin after it has.
func (h *history) refresh(ctx context.Context, t *testing.T, f *fetch.Fetcher[string], keys []string) {
	before := h.cache.LoadsOf(keys[0])
	err := f.Refresh(ctx, keys...)
	if err == nil && h.cache.LoadsOf(keys[0]) == before {
		t.Errorf("%s was not loaded by a Refresh", keys[0])
	}
	if h.calm && err != nil && ctx.Err() == nil && !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("Refresh %v: %v", keys, err)
	}
}

// change has some keys change, expire or go stale.
func (h *history) change() {
	for range h.intN(4) {
		switch key := h.key(); h.intN(3) {
		case 0:
			version := h.cache.Change(key)
			h.mu.Lock()
			h.changed[key] = max(h.changed[key], version)
			h.mu.Unlock()
		case 1:
			h.cache.Drop(key)
		default:
			h.cache.Age(key)
		}
	}
}

// heal has everything work again, and checks that no slot was lost, and that all keys can be had.
func (h *history) heal(t *testing.T) {
	h.healed.Store(true)
	h.storeDown.Store(false)
	h.stall(false)
	h.down(false)
	time.Sleep(2 * time.Minute) // for loads whose callers have left, and nodes that are dialed again
	for i, f := range h.fs {
		if s := f.Stats(); s.Running != 0 {
			t.Errorf("process %d: %+v", i, s)
		}
		for key := range h.keys {
			if _, err := f.Get(t.Context(), fmt.Sprint("k", key)); err != nil &&
				!errors.Is(err, flightlock.ErrClosed) && !errors.Is(err, fetch.ErrNotFound) {
				t.Errorf("process %d, key %d: %v", i, key, err)
			}
		}
	}
	time.Sleep(10 * time.Second) // for stale values
	synctest.Wait()              // no load reads what follows
	h.cache.OnLoad, h.cache.Takes = nil, time.Second
	for i, f := range h.fs[:2] {
		began := time.Now()
		var all []answers
		slots := max(h.opts.MaxLoads, 1)
		if fleet := h.opts.FleetLoads; fleet > 0 {
			slots = min(slots, fleet)
		}
		for j := range slots {
			all = append(all, getting(t.Context(), f, fmt.Sprint("last", i, j), 1))
		}
		for j, a := range all {
			a.want(t, h.cache.Value(fmt.Sprint("last", i, j)))
		}
		within(t, began, time.Second, 1500*time.Millisecond)
	}
	time.Sleep(10 * time.Second)
}
