package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A fleet is some processes, each with a Fetcher of one cache over a Client of its own, in virtual time.
type fleet struct {
	t       *testing.T
	cache   *fetchkit.Cache
	nodes   []*redistest.MemNode
	clients []*flightlock.Client
	fs      []*fetch.Fetcher[string]
}

// inFleet runs test, and then checks that nothing is left: no run, no lock, and that Close returns.
func inFleet(t *testing.T, processes int, cache *fetchkit.Cache, opts fetch.Options,
	test func(t *testing.T, x *fleet)) {
	t.Helper()
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		x := &fleet{t: t, cache: cache, nodes: nodes}
		for range processes {
			c := lockkit.New(t, flightlock.Options{}, clients...)
			x.clients = append(x.clients, c)
			x.fs = append(x.fs, fetchkit.New(t, c, cache, opts))
		}
		test(t, x)
		x.wantQuiet()
	})
}

// down cuts all nodes off, or lets them be reached again.
func (x *fleet) down(on bool) {
	testkit.Down(on, x.nodes...)
}

// lockName is where the nodes have the lock of a Fetcher's key.
func lockName(key string) string { return "flightlock:fetch:lock:fetch:" + key }

// locks are the keys of the Fetchers' locks that the nodes have.
func (x *fleet) locks() (keys []string) {
	for _, n := range x.nodes {
		for _, key := range n.Mini.Keys() {
			if owner, err := n.Mini.Get(key); strings.HasPrefix(key, lockName("")) && err == nil && owner != "killed" {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// wantQuiet checks that nothing is left of all calls.
func (x *fleet) wantQuiet() {
	x.t.Helper()
	x.stall(false)
	x.down(false)
	time.Sleep(5 * time.Second) // for releases that are repeated
	for i, f := range x.fs {
		if s := f.Stats(); s.Running != 0 {
			x.t.Errorf("process %d: %+v", i, s)
		}
	}
	for i, c := range x.clients {
		if n := c.Stats().Held; n != 0 {
			x.t.Errorf("process %d holds %d locks", i, n)
		}
	}
	if keys := x.locks(); len(keys) > 0 {
		x.t.Errorf("the nodes still have %.300q", keys)
	}
}

// elsewhere has another process lock the keys of Fetchers, until release is called.
func (x *fleet) elsewhere(keys ...string) (release func()) {
	x.t.Helper()
	var clients []redis.UniversalClient
	for _, n := range x.nodes {
		clients = append(clients, n.Client(x.t))
	}
	c := seam.Of(lockkit.New(x.t, flightlock.Options{}, clients...))
	var locks []seam.Lock
	for _, key := range keys {
		l, err := c.Begin(x.t.Context(), "fetch:"+key, 10*time.Second)()
		if err != nil {
			x.t.Fatal(err)
		}
		locks = append(locks, l)
	}
	return func() {
		var wg sync.WaitGroup
		for _, l := range locks {
			wg.Go(func() { _ = l.(*flightlock.Lock).Release(context.Background()) })
		}
		wg.Wait()
	}
}

// all has all processes get something at the same time, or one after the other: then the first one has all
// locks.
func (x *fleet) all(apart time.Duration, get func(f *fetch.Fetcher[string])) {
	var wg sync.WaitGroup
	for _, f := range x.fs {
		wg.Go(func() { get(f) })
		time.Sleep(apart)
	}
	wg.Wait()
}

// killed has the nodes keep the locks of a process that was killed, for so long.
func (x *fleet) killed(ttl time.Duration, keys ...string) {
	x.t.Helper()
	for _, n := range x.nodes {
		for _, key := range keys {
			testkit.Must(x.t, n.Mini.Set(lockName(key), "killed"))
			n.Mini.SetTTL(lockName(key), ttl)
		}
	}
}

// answers are what callers have got, in any order.
type answers <-chan answer

type answer struct {
	v   string
	err error
}

// getting has n callers of f get key.
func getting(ctx context.Context, f *fetch.Fetcher[string], key string, n int) answers {
	results := make(chan answer, n)
	for range n {
		go func() {
			v, err := f.Get(ctx, key)
			results <- answer{v, err}
		}()
	}
	return results
}

// want wants v for all callers.
func (a answers) want(t *testing.T, v string) {
	t.Helper()
	for range cap(a) {
		if got := <-a; got.v != v || got.err != nil {
			t.Errorf("got %q, %v; want %q", got.v, got.err, v)
		}
	}
}

// fail wants an error that matches for all callers. It returns one.
func (a answers) fail(t *testing.T, match error) (err error) {
	t.Helper()
	for range cap(a) {
		got := <-a
		if err = got.err; got.v != "" || !errors.Is(err, match) {
			t.Errorf("got %q, %v; want %v", got.v, err, match)
		}
	}
	return err
}

// wantMany wants the values that the origin has now.
func (x *fleet) wantMany(t *testing.T, f *fetch.Fetcher[string], keys []string) {
	t.Helper()
	values, err := f.GetMany(t.Context(), keys)
	if err != nil || len(values) != len(keys) {
		t.Errorf("%d values of %d keys, %v", len(values), len(keys), err)
	}
	for key, v := range values {
		if v != x.cache.Value(key) {
			t.Errorf("%s: %q", key, v)
		}
	}
}

// failMany wants an error that matches, or any if match is nil, for each of keys.
func failMany(t *testing.T, f *fetch.Fetcher[string], keys []string, match error) map[string]error {
	t.Helper()
	values, err := f.GetMany(t.Context(), keys)
	var many *fetch.ManyError
	if !errors.As(err, &many) || len(many.Errors) != len(keys) || len(values) != 0 {
		t.Fatalf("%v, %v", values, err)
	}
	for key, err := range many.Errors {
		if match != nil && !errors.Is(err, match) {
			t.Errorf("%s: %v, want %v", key, err, match)
		}
	}
	return many.Errors
}

// equal checks a number of what.
func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%v %s, want %v", got, what, want)
	}
}

// within checks how long it took since began.
func within(t *testing.T, began time.Time, least, most time.Duration) {
	t.Helper()
	if took := time.Since(began); took < least || took > most {
		t.Errorf("it took %v, want %v to %v", took, least, most)
	}
}

// stall has all nodes not answer, or answer again.
func (x *fleet) stall(on bool) {
	testkit.Stall(on, x.nodes...)
}

// delay has all nodes answer so much later.
func (x *fleet) delay(d time.Duration) {
	testkit.Delay(d, x.nodes...)
}

// when is an error of a Store or a Loader as long as on is set.
func when(on *atomic.Bool) func(context.Context, []string) error {
	return func(context.Context, []string) error {
		if on.Load() {
			return errMine
		}
		return nil
	}
}

var old = fetch.Entry[string]{Value: "old", Fresh: fetch.Stale}

// oneAndMany are the keys of tests of one run, and of a batch.
var oneAndMany = [][]string{{"k0"}, fetchkit.Keys(0, 3)}

// misbehave does what a function of the user's may do.
func misbehave(how string, unblock <-chan struct{}) error {
	switch how {
	case "error":
		return errMine
	case "panic":
		panic(errMine)
	case "goexit":
		runtime.Goexit()
	case "block":
		<-unblock
	}
	return nil
}

func TestAKeyIsLoadedOnceInTheFleet(t *testing.T) {
	for _, takes := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 30 * time.Second} {
		for _, unstamped := range []bool{false, true} {
			cache := &fetchkit.Cache{Takes: takes, Unstamped: unstamped}
			inFleet(t, 4, cache, fetch.Options{LoadTimeout: time.Minute}, func(t *testing.T, x *fleet) {
				misses := 3
				if takes > time.Second {
					misses = 1 // they poll for so long
				}
				for range misses {
					began := time.Now()
					x.all(0, func(f *fetch.Fetcher[string]) {
						getting(t.Context(), f, "k", testkit.Sized(250, 20)).want(t, cache.Value("k"))
					})
					within(t, began, takes, takes+100*time.Millisecond)
					cache.Drop("k")
				}
				equal(t, "loads", cache.Loads.Load(), int64(misses))
			})
		}
	}
}

// A hit is what the Store has, and nothing else happens.
func TestAHit(t *testing.T) {
	inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{}, func(t *testing.T, x *fleet) {
		x.cache.Set(fetch.Entry[string]{Value: "v", Fresh: fetch.Fresh}, "k")
		x.cache.Set(fetch.Entry[string]{Absent: true, Fresh: fetch.Fresh}, "none")
		getting(t.Context(), x.fs[0], "k", 100).want(t, "v")
		getting(t.Context(), x.fs[0], "none", 3).fail(t, fetch.ErrNotFound)
		values, err := x.fs[0].GetMany(t.Context(), []string{"none", "k", "k"})
		if !maps.Equal(values, map[string]string{"k": "v"}) || err != nil {
			t.Errorf("%v, %v", values, err)
		}
		if s := x.fs[0].Stats(); s != (fetch.Stats{Hits: 105, NotFound: 4}) || x.clients[0].Stats().Commands != 0 {
			t.Errorf("%+v, %d commands", s, x.clients[0].Stats().Commands)
		}
	})
}

// A hit costs no allocation beyond the Store's, and many keys those of their lists and maps.
func TestAHitAllocatesNothing(t *testing.T) {
	c := lockkit.New(t, flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
	s := fetch.Plain(func(context.Context, string) (int, bool, error) { return 7, true, nil },
		func(context.Context, string, int) error { return nil })
	load := fetch.Each(func(context.Context, string) (int, error) { return 0, errMine })
	f, err := fetch.New(c, s, load, fetch.Options{})
	testkit.Must(t, err)
	ctx := t.Context()
	if n := testing.AllocsPerRun(1000, func() { _, _ = f.Get(ctx, "k") }); n != 0 {
		t.Errorf("%v allocations per hit", n)
	}
	f, err = fetch.New(c, s, load, fetch.Options{BareContext: true})
	testkit.Must(t, err)
	if n := testing.AllocsPerRun(1000, func() { _, _ = f.GetMany(ctx, nil) }); n > 3 {
		t.Errorf("%v allocations for no keys", n)
	}
}

func TestBadInput(t *testing.T) {
	inFleet(t, 1, &fetchkit.Cache{}, fetch.Options{}, func(t *testing.T, x *fleet) {
		c, s, load := x.clients[0], x.cache.Store(), x.cache.Load
		for field, o := range map[string]fetch.Options{
			"TTL": {TTL: time.Hour}, "Options.TTL": {TTL: time.Millisecond}, "LoadTimeout": {LoadTimeout: -1},
			"WaitTimeout": {WaitTimeout: -1}, "MaxUnlockedLoads": {MaxUnlockedLoads: -1}, "MaxLoads": {MaxLoads: -1},
			"FleetLoads is -1": {FleetLoads: -1}, "1001, but it must be from 1 to 1000": {FleetLoads: 1001},
			"LookupTimeout": {LookupTimeout: -1}, "MaxBatch": {MaxBatch: -1}, "StaleWait": {StaleWait: -1},
			"Name": {Name: "\xff"}, "Options.Name": {Name: "{a}"}, "128 bytes": {Name: strings.Repeat("n", 129)},
		} {
			_, err := fetch.New(c, s, load, o)
			lockkit.WantInvalid(t, err, field)
		}
		of := func(c *flightlock.Client, s fetch.Store[string], load fetch.Loader[string]) error {
			_, err := fetch.New(c, s, load, fetch.Options{})
			return err
		}
		lockkit.WantInvalid(t, of(nil, s, load), "c is nil")
		lockkit.WantInvalid(t, of(&flightlock.Client{}, s, load), "not made by")
		lockkit.WantInvalid(t, of(c, nil, load), "s is nil")
		lockkit.WantInvalid(t, of(c, s, fetch.Each[string](nil)), "load is nil")
		lockkit.WantInvalid(t, of(c, fetch.Plain[string](nil, nil), load), "Plain's get")
		long := strings.Repeat("k", 5000)
		_, err := x.fs[0].Get(t.Context(), long)
		lockkit.WantInvalid(t, err, "key")
		x.cache.Set(old, long)
		for range 3 { // served, and never loaded
			getting(t.Context(), x.fs[0], long, 1).want(t, "old")
		}
		if s := x.fs[0].Stats(); s.LoadFailures != 3 || s.Loads != 0 || x.clients[0].Stats().Commands != 0 {
			t.Errorf("%+v", s)
		}
		small := lockkit.New(t, flightlock.Options{MaxTTL: time.Second}, x.nodes[0].Client(t))
		fetchkit.New(t, small, x.cache, fetch.Options{}) // the default TTL adapts
	})
}

// Every time and count may be the largest possible: no sum of them overflows.
func TestWithoutLimits(t *testing.T) {
	const most = math.MaxInt64
	for _, opts := range []fetch.Options{
		{LoadTimeout: most - 200*time.Millisecond, WaitTimeout: most - 1, MaxLoads: math.MaxInt},
		{TTL: time.Minute, LoadTimeout: most, LookupTimeout: most, WaitTimeout: most, MaxBatch: math.MaxInt,
			MaxLoads: math.MaxInt, MaxUnlockedLoads: math.MaxInt, ErrorHold: most, StaleWait: most},
	} {
		inFleet(t, 2, &fetchkit.Cache{Takes: 2 * time.Second}, opts, func(t *testing.T, x *fleet) {
			x.all(0, func(f *fetch.Fetcher[string]) { getting(t.Context(), f, "k", 3).want(t, "k@0") })
			x.down(true) // without a lock
			getting(t.Context(), x.fs[0], "l", 1).want(t, "l@0")
		})
	}
}

// The locks of a Fetcher are in a namespace of their own: one who holds user:42 may get entry 42 of the
// Fetcher user, and so may everybody else meanwhile.
func TestAHolderOfALockGetsTheEntryOfThatName(t *testing.T) {
	inFleet(t, 2, &fetchkit.Cache{Takes: time.Second}, fetch.Options{Name: "user"},
		func(t *testing.T, x *fleet) {
			began := time.Now()
			l := lockkit.Lock(t, x.clients[0], "user:42", 10*time.Second)
			x.all(0, func(f *fetch.Fetcher[string]) { getting(l.Context(t.Context()), f, "42", 3).want(t, "42@0") })
			if err := l.Release(t.Context()); err != nil || x.cache.Loads.Load() != 1 {
				t.Errorf("%v, %d loads", err, x.cache.Loads.Load())
			}
			within(t, began, time.Second, 1200*time.Millisecond)
		})
}

// A load has the values of the first caller's ctx, or none with BareContext; neither its deadline, nor its
// lock: neither does the Store.
func TestWhatALoadHasOfItsCallersCtx(t *testing.T) {
	type key struct{}
	for i := range 4 {
		bare, down := i%2 == 1, i > 1
		var f *fetch.Fetcher[string]
		check := func(timeout time.Duration) func(ctx context.Context, keys []string) error {
			return func(ctx context.Context, keys []string) error {
				deadline, _ := ctx.Deadline()
				if v := ctx.Value(key{}); flightlock.FromContext(ctx) != nil || time.Until(deadline) != timeout ||
					(v == 7) == bare {
					t.Errorf("bare %v: %v, %v, lock %v", bare, v, time.Until(deadline), flightlock.FromContext(ctx))
				}
				if timeout == 30*time.Second && keys[0] == "k" { // what is inside has not even the outer caller's lock
					_, _ = f.Get(ctx, "inner")
				}
				return nil
			}
		}
		cache := &fetchkit.Cache{OnReserve: check(time.Second), OnLoad: check(30 * time.Second),
			OnPut: check(10 * time.Second)}
		inFleet(t, 1, cache, fetch.Options{BareContext: bare}, func(t *testing.T, x *fleet) {
			f = x.fs[0]
			l := lockkit.Lock(t, x.clients[0], "another", time.Minute)
			x.down(down)
			ctx, cancel := context.WithTimeout(context.WithValue(l.Context(t.Context()), key{}, 7), 5*time.Second)
			getting(ctx, f, "k", 1).want(t, "k@0")
			cancel()
			x.down(false)
			_ = l.Release(t.Context())
			equal(t, "values were stored", cache.Stored.Load(), 2)
		})
	}
}

// A Get inside a load works for another key, and is served a stale value at once. One that would wait for a
// load that it is in is refused at once: directly, through another Fetcher, or with many keys.
func TestGetsInsideLoads(t *testing.T) {
	cache, other := &fetchkit.Cache{}, &fetchkit.Cache{}
	var f, g *fetch.Fetcher[string]
	cache.OnLoad = func(ctx context.Context, keys []string) (err error) {
		switch keys[0] {
		case "self", "stale":
			_, err = f.Get(ctx, keys[0])
		case "circle":
			_, err = g.Get(ctx, "circle")
		case "a":
			values, err := f.GetMany(ctx, []string{"a", "b", "inner"})
			var many *fetch.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 2 || len(values) != 1 {
				t.Errorf("%v, %v", values, err)
			}
		}
		return err
	}
	other.OnLoad = func(ctx context.Context, keys []string) error {
		_, err := f.Get(ctx, keys[0])
		return err
	}
	for _, bare := range []bool{false, true} {
		opts := fetch.Options{MaxLoads: 1, BareContext: bare, ErrorHold: -1, StaleWait: time.Minute}
		inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
			f, g = x.fs[0], fetchkit.New(t, x.clients[0], other,
				fetch.Options{Name: "other", BareContext: bare, ErrorHold: -1})
			began := time.Now()
			cache.Set(old, "stale")
			getting(t.Context(), f, "stale", 1).want(t, "stale@0")
			for _, key := range []string{"self", "circle"} {
				getting(t.Context(), f, key, 3).fail(t, flightlock.ErrInvalid)
			}
			getting(t.Context(), g, "free", 1).want(t, "free@0") // a chain, and no circle
			x.wantMany(t, f, []string{"a", "b"})
			within(t, began, 0, time.Second)
			cache.Drop("a", "b", "inner", "free")
			other.Drop("free")
		})
	}
}

// Of a circle of loads that callers of their own began, no load knows that it waits for itself. It ends by
// LoadTimeout.
func TestACircleOfLoadsEnds(t *testing.T) {
	var f *fetch.Fetcher[string]
	cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, keys []string) error {
		time.Sleep(10 * time.Millisecond)
		_, err := f.Get(ctx, map[string]string{"a": "b", "b": "a"}[keys[0]])
		return err
	}}
	inFleet(t, 1, cache, fetch.Options{LoadTimeout: time.Second}, func(t *testing.T, x *fleet) {
		f = x.fs[0]
		began := time.Now()
		a, b := getting(t.Context(), f, "a", 1), getting(t.Context(), f, "b", 1)
		for _, got := range []answer{<-a, <-b} {
			if got.err == nil || errors.Is(got.err, context.DeadlineExceeded) {
				t.Error(got.err)
			}
		}
		within(t, began, 0, 1200*time.Millisecond)
	})
}

// Close, of the Fetcher or of its Client, refuses new callers and those that wait for a load that has not
// begun, and waits for loads that have. Over a Client that is closed there is no Fetcher.
func TestClose(t *testing.T) {
	for _, ofClient := range []bool{false, true} {
		inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{MaxLoads: 1},
			func(t *testing.T, x *fleet) {
				defer x.elsewhere("held")()
				f, end := x.fs[0], x.fs[0].Close
				if ofClient {
					end = x.clients[0].Close
				}
				held := getting(t.Context(), f, "held", 10)
				time.Sleep(100 * time.Millisecond)
				loading := getting(t.Context(), f, "k", 1)
				time.Sleep(100 * time.Millisecond)
				joined := getting(t.Context(), f, "k", 10)
				slot := getting(t.Context(), f, "slot", 10)
				synctest.Wait()
				closed := make(chan error, 1)
				go func() { closed <- end(t.Context()) }()
				held.fail(t, flightlock.ErrClosed)
				slot.fail(t, flightlock.ErrClosed)
				getting(t.Context(), f, "new", 1).fail(t, flightlock.ErrClosed)
				values, err := f.GetMany(t.Context(), []string{"a", "b"})
				if len(values) != 0 || !errors.Is(err, flightlock.ErrClosed) {
					t.Errorf("%v, %v", values, err)
				}
				loading.want(t, "k@0")
				joined.want(t, "k@0")
				if err = errors.Join(<-closed, end(t.Context())); err != nil || x.cache.Stored.Load() != 1 {
					t.Errorf("%v, %d stored", err, x.cache.Stored.Load())
				}
				_, err = fetch.New(x.clients[0], x.cache.Store(), x.cache.Load, fetch.Options{})
				if ofClient != errors.Is(err, flightlock.ErrClosed) {
					t.Errorf("New: %v", err)
				}
			})
	}
}

// When its ctx ends, Close ends the ctx of what runs: the callers get ErrClosed, and nobody is to blame. A
// call that ignores its ctx is an error of Close, which can be called again.
func TestCloseWithoutPatience(t *testing.T) {
	for _, during := range []string{"lookup", "load", "store"} {
		for _, ignores := range []bool{false, true} {
			var unblock chan struct{}
			hang := func(op string) func(ctx context.Context, _ []string) error {
				return func(ctx context.Context, _ []string) error {
					if op != during {
						return nil
					}
					if ignores {
						<-unblock
					}
					<-ctx.Done()
					return ctx.Err()
				}
			}
			cache := &fetchkit.Cache{OnReserve: hang("lookup"), OnLoad: hang("load"), OnPut: hang("store")}
			opts := fetch.Options{LoadTimeout: time.Hour, LookupTimeout: time.Hour}
			inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
				unblock = make(chan struct{})
				f := x.fs[0]
				one, many := getting(t.Context(), f, "one", 3), make(chan error, 1)
				go func() {
					_, err := f.GetMany(t.Context(), fetchkit.Keys(0, 3))
					many <- err
				}()
				for i := range 70 { // more than look up at once
					getting(t.Context(), f, fmt.Sprint("more", i), 1)
				}
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				defer cancel()
				began := time.Now()
				if err := f.Close(ctx); ignores != errors.Is(err, context.DeadlineExceeded) || !ignores && err != nil {
					t.Errorf("%s: Close: %v", during, err)
				}
				within(t, began, 10*time.Millisecond, 200*time.Millisecond)
				if err := <-many; during == "store" {
					one.want(t, "one@0")
					testkit.Must(t, err)
				} else if one.fail(t, flightlock.ErrClosed); !errors.Is(err, flightlock.ErrClosed) {
					t.Errorf("%s: %v", during, err)
				}
				close(unblock)
				testkit.Must(t, f.Close(t.Context()))
				s := f.Stats()
				if during == "lookup" && s.Loads+s.LookupErrors > 0 || !ignores && s.LoadFailures > 0 {
					t.Errorf("%s: %+v", during, s)
				}
			})
		}
	}
}

// A Get whose ctx ends says what it has waited for, and matches only its ctx.
func TestWhatACallerThatLeavesHasWaitedFor(t *testing.T) {
	const long = 10 * time.Second
	cache := &fetchkit.Cache{OnGet: takesLong("get", long), OnReserve: takesLong("reserve", long),
		OnLoad: takesLong("load", long), OnPut: takesLong("put", long)}
	opts := fetch.Options{MaxLoads: 1, LookupTimeout: time.Minute, LoadTimeout: time.Minute, TTL: time.Minute}
	inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
		defer x.elsewhere("held")()
		for key, says := range map[string]string{
			"get":     "the store",
			"reserve": "the store",
			"load":    "the load",
			"held":    "another process's load: acquire",
			"slot":    "a slot: MaxLoads is 1",
			"put":     "the value to be stored",
		} {
			if key == "slot" {
				getting(t.Context(), x.fs[0], "load again", 1)
				synctest.Wait()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			_, err := x.fs[0].Get(ctx, key)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, flightlock.ErrNotAcquired) ||
				!strings.HasPrefix(
					err.Error(), fmt.Sprintf("flightlock: fetch %q: context deadline exceeded: waiting for %s", key, says)) {
				t.Errorf("%v; want %s", err, says)
			}
			time.Sleep(long + time.Second)
		}
	})
}
