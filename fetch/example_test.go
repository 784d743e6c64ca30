package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/redis/go-redis/v9"
)

// exampleClient is a Client over a node in memory. A service has one of flightlock.Open.
func exampleClient() (c *flightlock.Client, stop func()) {
	nodes := flightlocktest.Start(1)
	c, err := nodes.Client(flightlock.Options{NodeTimeout: 5 * time.Second})
	if err != nil {
		panic(err)
	}
	return c, nodes.Close
}

// A hundred callers miss a key at once: there is one load, and all get the value.
func Example() {
	c, stop := exampleClient()
	defer stop()
	var loads atomic.Int64
	names := onMap(c, fetch.Each(func(_ context.Context, id string) (string, error) {
		loads.Add(1) // SELECT name FROM users
		return "Ada", nil
	}), fetch.Options{Name: "user"})
	defer names.Close(context.Background())
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if name, err := names.Get(context.Background(), "42"); err != nil || name != "Ada" {
				panic(fmt.Sprint(name, err))
			}
		})
	}
	wg.Wait()
	fmt.Println(loads.Load())
	// Output: 1
}

// onMap is a Fetcher over a map.
func onMap(c *flightlock.Client, load fetch.Loader[string], opts fetch.Options) *fetch.Fetcher[string] {
	var values sync.Map // or any cache
	f, err := fetch.New(c, fetch.Plain(
		func(_ context.Context, key string) (string, bool, error) {
			v, ok := values.Load(key)
			text, _ := v.(string)
			return text, ok, nil
		},
		func(_ context.Context, key, v string) error { values.Store(key, v); return nil },
	), load, opts)
	if err != nil {
		panic(err)
	}
	return f
}

func value(context.Context, string) (string, error) { return "value", nil }

// A caller's ctx limits only its own wait. The load continues for others.
func ExampleFetcher_Get() {
	c, stop := exampleClient()
	defer stop()
	loading, finish := make(chan struct{}), make(chan struct{})
	f := onMap(c, fetch.Each(func(context.Context, string) (string, error) {
		close(loading)
		<-finish
		return "value", nil
	}), fetch.Options{})
	defer f.Close(context.Background())

	impatient, cancel := context.WithCancel(context.Background())
	go func() {
		<-loading
		cancel()
	}()
	_, err := f.Get(impatient, "k")
	fmt.Println(err, errors.Is(err, context.Canceled))
	close(finish)
	fmt.Println(f.Get(context.Background(), "k"))
	// Output:
	// flightlock: fetch "k": context canceled: waiting for the load true
	// value <nil>
}

// Many keys are one lookup, one load and one store. A key that does not exist is absent.
func ExampleFetcher_GetMany() {
	c, stop := exampleClient()
	defer stop()
	f := onMap(c, func(_ context.Context, ids []string) (map[string]string, error) {
		fmt.Println("SELECT id, name FROM users WHERE id IN", ids)
		return map[string]string{"1": "Ada", "2": "Grace"}, nil
	}, fetch.Options{})
	defer f.Close(context.Background())
	fmt.Println(f.GetMany(context.Background(), []string{"1", "2", "3"}))
	_, err := f.Get(context.Background(), "1")
	fmt.Println(err)
	// Output:
	// SELECT id, name FROM users WHERE id IN [1 2 3]
	// map[1:Ada 2:Grace] <nil>
	// <nil>
}

// Close waits for running loads. That of the Client closes its Fetchers, too.
func ExampleFetcher_Close() {
	c, stop := exampleClient()
	defer stop()
	f := onMap(c, fetch.Each(value), fetch.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(f.Close(ctx))
	_, err := f.Get(ctx, "k")
	fmt.Println(errors.Is(err, flightlock.ErrClosed))
	// Output:
	// <nil>
	// true
}

func ExampleFetcher_Stats() {
	c, stop := exampleClient()
	defer stop()
	f := onMap(c, fetch.Each(value), fetch.Options{})
	defer f.Close(context.Background())
	for range 10 {
		f.Get(context.Background(), "k")
	}
	s := f.Stats()
	fmt.Println(s.Hits, s.Misses, s.Loads)
	// Output: 9 1 1
}

// Without Redis there is no lock: by default each process loads by itself, once per key at a time.
func ExampleOptions() {
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer gone.Close()
	c, err := flightlock.New(flightlock.Options{}, gone)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())
	for _, failClosed := range []bool{false, true} {
		f := onMap(c, fetch.Each(value), fetch.Options{FailClosed: failClosed})
		v, err := f.Get(context.Background(), "k")
		fmt.Printf("%q %v\n", v, errors.Is(err, flightlock.ErrUnavailable))
		f.Close(context.Background())
	}
	// Output:
	// "value" false
	// "" true
}

// The origin can take two loads at a time from all processes together.
func ExampleOptions_fleetLoads() {
	var now, most atomic.Int64
	report := fetch.Each(func(_ context.Context, id string) (string, error) {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		time.Sleep(time.Millisecond)
		return "report " + id, nil
	})
	nodes := flightlocktest.Start(3)
	defer nodes.Close()
	var wg sync.WaitGroup
	for process := range 3 {
		c, err := nodes.Client(flightlock.Options{NodeTimeout: 5 * time.Second})
		if err != nil {
			panic(err)
		}
		reports := onMap(c, report, fetch.Options{Name: "report", FleetLoads: 2})
		for i := range 5 {
			wg.Go(func() {
				if _, err := reports.Get(context.Background(), fmt.Sprint(process, i)); err != nil {
					panic(err)
				}
			})
		}
	}
	wg.Wait()
	fmt.Println(most.Load() <= 2)
	// Output: true
}

// A load that failed is not repeated for ErrorHold: callers that come after it get its error at once, and
// learn until when.
func ExampleHeldError() {
	c, stop := exampleClient()
	defer stop()
	down := errors.New("the database is down")
	f := onMap(c, fetch.Each(func(context.Context, string) (string, error) {
		fmt.Println("SELECT")
		return "", down
	}), fetch.Options{ErrorHold: time.Minute})
	defer f.Close(context.Background())

	_, err := f.Get(context.Background(), "k")
	fmt.Println(err == down)
	_, err = f.Get(context.Background(), "k") // no second SELECT
	var held *fetch.HeldError
	if errors.As(err, &held) {
		fmt.Println(held.Err == down, time.Until(held.Until) > 50*time.Second)
	}
	// Output:
	// SELECT
	// true
	// true true
}

// Some of the keys of a load may fail: KeyErrors says which, and their callers find the reason in a
// ManyError. The values of the other keys are there, too.
func ExampleKeyErrors() {
	c, stop := exampleClient()
	defer stop()
	locked := errors.New("the row is locked")
	f := onMap(c, func(_ context.Context, ids []string) (map[string]string, error) {
		return map[string]string{"1": "Ada"}, fetch.KeyErrors{"2": locked}
	}, fetch.Options{})
	defer f.Close(context.Background())

	values, err := f.GetMany(context.Background(), []string{"1", "2"})
	fmt.Println(values)
	fmt.Println(err)
	var many *fetch.ManyError
	if errors.As(err, &many) {
		fmt.Println(many.Errors["2"] == locked, errors.Is(err, locked))
	}
	// Output:
	// map[1:Ada]
	// flightlock: fetch: 1 key has failed; "2": the row is locked
	// true true
}

// stamped is a Store in memory. Package rediscache has one in Redis.
type stamped struct {
	mu      sync.Mutex // guards what follows
	stamps  int
	entries map[string]fetch.Entry[string]
}

// write replaces an entry, and gives it a new stamp.
func (s *stamped) write(key string, e fetch.Entry[string]) fetch.Entry[string] {
	s.stamps++
	e.Stamp = strconv.Itoa(s.stamps)
	s.entries[key] = e
	return e
}

func (s *stamped) Get(ctx context.Context, key string) (fetch.Entry[string], error) {
	found, err := s.GetMany(ctx, []string{key})
	return found[key], err
}

func (s *stamped) GetMany(_ context.Context, keys []string) (map[string]fetch.Entry[string], error) {
	return s.find(keys, false), nil
}

func (s *stamped) Reserve(_ context.Context, keys []string) (map[string]fetch.Entry[string], error) {
	return s.find(keys, true), nil
}

func (s *stamped) find(keys []string, reserve bool) map[string]fetch.Entry[string] {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[string]fetch.Entry[string]{}
	for _, key := range keys {
		e, there := s.entries[key]
		if !there && reserve {
			e = s.write(key, fetch.Entry[string]{}) // a tombstone
		}
		found[key] = e // the zero Entry is a Miss without a stamp
	}
	return found
}

func (s *stamped) Put(_ context.Context,
	items map[string]fetch.Entry[string]) (outdated []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, e := range items {
		if s.entries[key].Stamp != e.Stamp {
			outdated = append(outdated, key)
			continue
		}
		s.write(key, e)
	}
	return outdated, nil
}

func (s *stamped) invalidate(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(key, fetch.Entry[string]{})
}

// Mark makes it a Marker, for Refresh, in the simplest way: a marked value is stale to everybody, and as its
// stamp is another one, a load that is under way is not stored.
func (s *stamped) Mark(_ context.Context, keys []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		e := s.entries[key]
		if e.Fresh = fetch.Stale; e.Stamp != "" {
			s.write(key, e)
		}
	}
	return nil
}

// Refresh loads a value that is there, and Peek shows it. The load gets the old one.
func ExampleMarker() {
	c, stop := exampleClient()
	defer stop()
	cache := &stamped{entries: map[string]fetch.Entry[string]{}}
	load := func(_ context.Context, _ string, old fetch.Entry[string]) (string, error) {
		return old.Value + "+", nil
	}
	f, err := fetch.New(c, cache, fetch.LoadFrom(load), fetch.Options{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())
	ctx := context.Background()
	for range 2 {
		fmt.Println(f.Refresh(ctx, "k"))
		v, fresh, err := f.Peek(ctx, "k")
		fmt.Println(v, fresh == fetch.Fresh, err)
	}
	// Output:
	// <nil>
	// + true <nil>
	// <nil>
	// ++ true <nil>
}

// A load that runs through an invalidation is not stored.
func ExampleStore() {
	c, stop := exampleClient()
	defer stop()
	cache := &stamped{entries: map[string]fetch.Entry[string]{}}
	origin := "old"
	f, err := fetch.New(c, cache, fetch.Each(func(_ context.Context, key string) (string, error) {
		v := origin
		if v == "old" {
			origin = "new" // somebody changes it while it is being loaded
			cache.invalidate(key)
		}
		return v, nil
	}), fetch.Options{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())
	fmt.Println(f.Get(context.Background(), "k")) // it came before the change
	fmt.Println(f.Get(context.Background(), "k"))
	fmt.Println("outdated:", f.Stats().Outdated)
	// Output:
	// old <nil>
	// new <nil>
	// outdated: 1
}

// A panic in a load is returned to the callers as an error, and the process continues.
func ExampleLoader() {
	c, stop := exampleClient()
	defer stop()
	f := onMap(c, func(context.Context, []string) (map[string]string, error) { panic("oh no") }, fetch.Options{})
	defer f.Close(context.Background())
	_, err := f.Get(context.Background(), "k")
	var p *flightlock.PanicError
	if errors.As(err, &p) {
		fmt.Println(p.Op, p.Value, len(p.Stack) > 0)
	}
	// Output: Load oh no true
}
