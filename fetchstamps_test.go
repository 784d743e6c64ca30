package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// stampedCache is a cache with stamps. Its values name the version of the origin that they are.
type stampedCache struct {
	takes   time.Duration // a load
	answers time.Duration // how long the reply to a lookup before a load takes to arrive
	writes  time.Duration // how long a store takes
	fails   atomic.Bool   // lookups do
	loadErr atomic.Pointer[error]

	version              atomic.Int64 // of the origin
	loads, stores, marks atomic.Int64

	mu      sync.Mutex // guards what follows
	stamps  int
	entries map[string]stampedEntry
}

type stampedEntry struct {
	stamp, value string
	stale        bool
}

func (s *stampedCache) source() flightlock.Source[string] {
	return flightlock.Source[string]{LookupStamped: s.lookup, StoreStamped: s.store, Load: s.load}
}

func (s *stampedCache) nextStampLocked() string {
	s.stamps++
	return fmt.Sprint("stamp ", s.stamps)
}

func (s *stampedCache) lookup(ctx context.Context, key string) (flightlock.Found[string], error) {
	if s.fails.Load() {
		return flightlock.Found[string]{}, errMine
	}
	s.mu.Lock()
	e := s.entries[key]
	if flightlock.LoadFollows(ctx) {
		s.marks.Add(1)
		if e.stamp == "" {
			e.stamp = s.nextStampLocked()
			s.putLocked(key, e)
		}
	}
	s.mu.Unlock()
	if flightlock.LoadFollows(ctx) {
		time.Sleep(s.answers)
	}
	found := flightlock.Found[string]{Value: e.value, Stamp: e.stamp}
	switch {
	case e.value == "":
	case e.stale:
		found.Fresh = flightlock.Stale
	default:
		found.Fresh = flightlock.Fresh
	}
	return found, nil
}

func (s *stampedCache) load(ctx context.Context, key string) (string, error) {
	s.loads.Add(1)
	v := fmt.Sprint("v", s.version.Load())
	err := s.loadErr.Load()
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if err != nil {
		return "", *err
	}
	return v, nil
}

func (s *stampedCache) store(_ context.Context, key, v, stamp string, l *flightlock.Lock) error {
	if stamp == "" {
		panic("a store without a stamp")
	}
	time.Sleep(s.writes)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entries[key].stamp != stamp {
		return flightlock.ErrOutdated
	}
	s.stores.Add(1)
	s.putLocked(key, stampedEntry{stamp: s.nextStampLocked(), value: v})
	return nil
}

func (s *stampedCache) putLocked(key string, e stampedEntry) {
	if s.entries == nil {
		s.entries = map[string]stampedEntry{}
	}
	s.entries[key] = e
}

// set changes the entry as a writer does.
func (s *stampedCache) set(key string, e stampedEntry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.stamp = s.nextStampLocked()
	s.putLocked(key, e)
}

// change changes the origin and invalidates the entry.
func (s *stampedCache) change(key string) {
	s.version.Add(1)
	s.set(key, stampedEntry{})
}

// expire removes the entry.
func (s *stampedCache) expire(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.entries, key)
}

// goStale makes the value of the entry, if it has one, a stale one.
func (s *stampedCache) goStale(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e.value != "" {
		e.stale = true
		s.entries[key] = e
	}
}

func newStampedFetcher(t *testing.T, c *flightlock.Client, s *stampedCache,
	opts flightlock.FetchOptions) *flightlock.Fetcher[string] {
	t.Helper()
	f, err := flightlock.NewFetcher(c, s.source(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return f
}

// stampedTest is a Fetcher over a stampedCache with loads of a second, in a bubble.
func stampedTest(t *testing.T, opts flightlock.FetchOptions,
	test func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], node *redistest.MemNode)) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		s := &stampedCache{takes: time.Second}
		f := newStampedFetcher(t, lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...), s, opts)
		test(t, s, f, nodes[0])
	})
}

// A load that spans an invalidation is for the callers that came before it. It is not stored, and
// later callers get a load that began later.
func TestLoadThroughAnInvalidation(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			before := fetching(t.Context(), f, "k", 3)
			time.Sleep(s.takes / 4)
			during := fetching(t.Context(), f, "k", 3) // they arrive during the load, and nothing has changed
			time.Sleep(s.takes / 4)
			s.change("k")
			after := fetching(t.Context(), f, "k", 3)
			wantAll(t, before, 3, "v0")
			wantAll(t, during, 3, "v0")
			wantAll(t, after, 3, "v1")
			wantAll(t, fetching(t.Context(), f, "k", 3), 3, "v1")
			if n := s.loads.Load(); n != 2 {
				t.Errorf("%d loads", n)
			}
			if got := f.Stats(); got.Outdated != 1 || got.StoreFailures != 0 || got.Misses != 9 || got.Hits != 3 {
				t.Errorf("%+v", got)
			}
		})
}

// All callers of a cold key share one load: those that arrive before its lookup have no stamp, and
// those that arrive after it find that of the tombstone.
func TestCallersOfAColdKeyShareALoad(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			results := make(chan result, 1000)
			for range 1000 {
				go func() {
					v, err := f.Fetch(t.Context(), "k")
					results <- result{v, err}
				}()
				time.Sleep(s.takes / 2000)
			}
			wantAll(t, results, 1000, "v0")
			if got := f.Stats(); got.Loads != 1 || s.marks.Load() != 1 {
				t.Errorf("%+v, %d lookups before loads", got, s.marks.Load())
			}
		})
}

// An entry that expires, is evicted or flushed during a load costs a load: without a stamp nothing
// is stored.
func TestNothingIsStoredWhereTheStampIsGone(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			results := fetching(t.Context(), f, "k", 1)
			time.Sleep(s.takes / 2)
			s.change("k")
			s.expire("k")
			late := fetching(t.Context(), f, "k", 1)
			wantAll(t, results, 1, "v0")
			if n := s.stores.Load(); n != 0 {
				t.Errorf("%d stores", n)
			}
			wantAll(t, late, 1, "v1")
		})
}

// Without a stamp nothing is stored: the lookup before the load has failed.
func TestNothingIsStoredWithoutAStamp(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			s.fails.Store(true)
			early := fetching(t.Context(), f, "k", 1)
			time.Sleep(s.takes / 2)
			s.fails.Store(false)
			s.change("k")
			s.fails.Store(true)
			late := fetching(t.Context(), f, "k", 5) // they cannot know whether anything has changed
			wantAll(t, early, 1, "v0")
			s.fails.Store(false)
			wantAll(t, late, 5, "v1")
			if got := f.Stats(); got.Loads != 2 || got.StoreFailures != 0 || s.stores.Load() > 1 {
				t.Errorf("%+v, %d stores", got, s.stores.Load())
			}
		})
}

// Without the nodes of the lock, loads are stored by the same rule.
func TestLoadsWithoutALockCompareStamps(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], node *redistest.MemNode) {
			node.Down(true)
			wantAll(t, fetching(t.Context(), f, "k", 5), 5, "v0")
			if got := f.Stats(); got.UnlockedLoads != 1 || s.stores.Load() != 1 {
				t.Errorf("%+v, %d stores", got, s.stores.Load())
			}
			s.change("k")
			early := fetching(t.Context(), f, "k", 1)
			time.Sleep(s.takes / 2)
			s.change("k")
			wantAll(t, early, 1, "v1")
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "v2")
			if got := f.Stats(); got.Outdated != 1 {
				t.Errorf("%+v", got)
			}
		})
}

// What a lookup finds is for callers that arrived before it was sent: its reply may be in flight
// while the entry is invalidated.
func TestALookupIsSharedWithEarlierCallers(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{LookupTimeout: 5 * time.Second},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], node *redistest.MemNode) {
			const trip = 20 * time.Millisecond
			node.SetDelay(trip / 2)
			s.answers = time.Second // of the lookup with the lock
			s.change("k")
			early := fetching(t.Context(), f, "k", 1)
			time.Sleep(trip / 2)
			s.set("k", stampedEntry{value: "v1"}) // another process; the lookup finds it
			redistest.Eventually(t, time.Second, "the lookup", func() bool { return s.marks.Load() == 1 })
			s.change("k")
			late := fetching(t.Context(), f, "k", 1)
			wantAll(t, early, 1, "v1")
			wantAll(t, late, 1, "v2")
		})
}

// "not found" is held for new callers, until the entry changes. So are other errors.
func TestHeldErrorsEndWithTheirStamp(t *testing.T) {
	for _, failure := range []error{flightlock.ErrNotFound, errMine} {
		opts := flightlock.FetchOptions{ErrorHold: time.Minute}
		stampedTest(t, opts, func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			s.loadErr.Store(&failure)
			wantErrors(t, fetching(t.Context(), f, "k", 3), 3, failure)
			wantErrors(t, fetching(t.Context(), f, "k", 3), 3, failure)
			var held *flightlock.HeldError
			if _, err := f.Fetch(t.Context(), "k"); !errors.As(err, &held) || s.loads.Load() != 1 {
				t.Errorf("%v after %d loads", err, s.loads.Load())
			}
			s.loadErr.Store(nil)
			s.change("k")
			wantAll(t, fetching(t.Context(), f, "k", 3), 3, "v1")
		})
	}
}

// In an outage of the cache nothing is known of the entry. An error of the origin is held all the
// same, and "not found" is not.
func TestHeldErrorsInAnOutageOfTheCache(t *testing.T) {
	for failure, loads := range map[error]int64{flightlock.ErrNotFound: 2, errMine: 1} {
		opts := flightlock.FetchOptions{ErrorHold: time.Minute}
		stampedTest(t, opts, func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			s.fails.Store(true)
			s.loadErr.Store(&failure)
			wantErrors(t, fetching(t.Context(), f, "k", 1), 1, failure)
			wantErrors(t, fetching(t.Context(), f, "k", 1), 1, failure)
			if n := s.loads.Load(); n != loads {
				t.Errorf("%v: %d loads", failure, n)
			}
		})
	}
}

// An outage of the cache begins after a load failed: callers that cannot look up the entry do not know whether the
// origin has changed since. An error of the origin is held for them, and "not found" is not.
func TestHeldErrorsWhenAnOutageOfTheCacheBegins(t *testing.T) {
	for failure, loads := range map[error]int64{flightlock.ErrNotFound: 2, errMine: 1} {
		opts := flightlock.FetchOptions{ErrorHold: time.Minute}
		stampedTest(t, opts, func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			s.loadErr.Store(&failure)
			wantErrors(t, fetching(t.Context(), f, "k", 1), 1, failure)
			s.fails.Store(true)
			wantErrors(t, fetching(t.Context(), f, "k", 1), 1, failure)
			if n := s.loads.Load(); n != loads {
				t.Errorf("%v: %d loads", failure, n)
			}
		})
	}
}

// A value whose Store hangs is returned to its callers. Callers that arrive after an invalidation
// do not get it, and do not wait for that Store.
func TestAValueThatIsBeingStoredIsNotForLaterCallers(t *testing.T) {
	stampedTest(t, flightlock.FetchOptions{TTL: 10 * time.Second},
		func(t *testing.T, s *stampedCache, f *flightlock.Fetcher[string], _ *redistest.MemNode) {
			s.writes = 5 * time.Second
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "v0")
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "v0") // its store is under way
			s.change("k")
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "v1")
			if n := s.loads.Load(); n != 2 {
				t.Errorf("%d loads", n)
			}
		})
}

// A stale value is served when the new one does not arrive within StaleWait, and the new one when
// it does, also from another process.
func TestStaleWait(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		for _, wait := range []time.Duration{0, 500 * time.Millisecond, 2 * time.Second} {
			s := &stampedCache{takes: time.Second}
			c := lockkit.New(t, flightlock.Options{}, clients...)
			other := lockkit.New(t, flightlock.Options{}, clients...)
			f := newStampedFetcher(t, c, s, flightlock.FetchOptions{StaleWait: wait})
			g := newStampedFetcher(t, other, s, flightlock.FetchOptions{StaleWait: wait})
			key := fmt.Sprint("k", wait)
			s.set(key, stampedEntry{value: "old", stale: true})
			want, began := "old", time.Now()
			if wait > s.takes {
				want = "v0"
			}
			here, there := fetching(t.Context(), f, key, 3), fetching(t.Context(), g, key, 3)
			wantAll(t, here, 3, want)
			wantAll(t, there, 3, want)
			if took := time.Since(began); took > min(wait, s.takes)+100*time.Millisecond {
				t.Errorf("%v: it took %v", wait, took)
			}
			time.Sleep(2 * s.takes)
			wantAll(t, fetching(t.Context(), f, key, 1), 1, "v0")
			if n := s.loads.Load(); n != 1 {
				t.Errorf("%v: %d loads", wait, n)
			}
		}
	})
}

// A Source that also has Lookup uses it for hits, and LookupStamped before loads.
func TestLookupBesideLookupStamped(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		s := &stampedCache{takes: time.Second}
		src := s.source()
		var plain atomic.Int64
		src.Lookup = func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
			plain.Add(1)
			found, err := s.lookup(ctx, key)
			return found.Value, found.Fresh, err
		}
		f, err := flightlock.NewFetcher(lockkit.New(t, flightlock.Options{}, clients...), src, flightlock.FetchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close(context.Background())
		early := fetching(t.Context(), f, "k", 3)
		time.Sleep(s.takes / 2)
		s.change("k")
		late := fetching(t.Context(), f, "k", 3)
		wantAll(t, early, 3, "v0")
		wantAll(t, late, 3, "v1")
		wantAll(t, fetching(t.Context(), f, "k", 3), 3, "v1")
		if n := s.marks.Load(); n != 2 || plain.Load() < 9 {
			t.Errorf("%d stamped lookups, %d plain ones", n, plain.Load())
		}
	})
}

// A Source needs the functions of one kind or the other.
func TestSourcesThatLackSomething(t *testing.T) {
	full := (&stampedCache{}).source()
	for want, change := range map[string]func(*flightlock.Source[string]){
		"Source.Load is nil":          func(s *flightlock.Source[string]) { s.Load = nil },
		"Source.LookupStamped is nil": func(s *flightlock.Source[string]) { s.LookupStamped = nil },
		"Source.StoreStamped is nil":  func(s *flightlock.Source[string]) { s.StoreStamped = nil },
		"Source.Lookup is nil":        func(s *flightlock.Source[string]) { s.LookupStamped, s.StoreStamped = nil, nil },
	} {
		src := full
		change(&src)
		c := lockkit.New(t, flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
		if _, err := flightlock.NewFetcher(c, src, flightlock.FetchOptions{}); !errors.Is(err, flightlock.ErrInvalid) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
