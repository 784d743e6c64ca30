package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fenced"
	"github.com/redis/go-redis/v9"
)

// user stands for a value that a service caches.
type user struct{ Name string }

// A hundred callers miss a key at once: there is one load, and all get the value.
func ExampleFetcher() {
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	rdb := nodes[0] // the cache may be anywhere
	var loads atomic.Int64
	users, err := flightlock.NewFetcher(c, flightlock.Source[user]{
		Lookup: func(ctx context.Context, key string) (user, flightlock.Freshness, error) {
			name, err := rdb.Get(ctx, key).Result()
			if errors.Is(err, redis.Nil) {
				return user{}, flightlock.Miss, nil
			}
			return user{name}, flightlock.Fresh, err
		},
		Load: func(ctx context.Context, key string) (user, error) {
			loads.Add(1) // SELECT ... FROM users
			return user{"Ada"}, nil
		},
		Store: func(ctx context.Context, key string, u user, l *flightlock.Lock) error {
			if l == nil { // loaded without a lock, since Redis was down: there is no token, so nothing is overwritten
				return rdb.SetNX(ctx, key, u.Name, 5*time.Second).Err()
			}
			return fenced.Set(ctx, rdb, key, u.Name, l.Fence(), time.Hour)
		},
	}, flightlock.FetchOptions{TTL: 5 * time.Second})
	if err != nil {
		panic(err)
	}
	defer users.Close(context.Background())

	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if u, err := users.Fetch(context.Background(), "user:42"); err != nil || u.Name != "Ada" {
				panic(fmt.Sprint(u, err))
			}
		})
	}
	wg.Wait()
	fmt.Println(loads.Load())
	// Output: 1
}

// exampleFetcher is a Fetcher over a map.
func exampleFetcher(
	c *flightlock.Client, opts flightlock.FetchOptions,
	load func(ctx context.Context, key string) (string, error),
) *flightlock.Fetcher[string] {
	var values sync.Map
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		Lookup: func(_ context.Context, key string) (string, flightlock.Freshness, error) {
			if v, ok := values.Load(key); ok {
				return v.(string), flightlock.Fresh, nil
			}
			return "", flightlock.Miss, nil
		},
		Load:  load,
		Store: func(_ context.Context, key, v string, _ *flightlock.Lock) error { values.Store(key, v); return nil },
	}, opts)
	if err != nil {
		panic(err)
	}
	return f
}

func ExampleNewFetcher() {
	c, stop := exampleClient()
	defer stop()
	_, err := flightlock.NewFetcher(c, flightlock.Source[string]{}, flightlock.FetchOptions{})
	fmt.Println(err)
	// Output: flightlock: invalid: Source.Lookup is nil, but it is required
}

// A caller's ctx limits only its own wait. The load continues for others.
func ExampleFetcher_Fetch() {
	c, stop := exampleClient()
	defer stop()
	loading, finish := make(chan struct{}), make(chan struct{})
	f := exampleFetcher(c, flightlock.FetchOptions{}, func(context.Context, string) (string, error) {
		close(loading)
		<-finish
		return "value", nil
	})
	defer f.Close(context.Background())

	impatient, cancel := context.WithCancel(context.Background())
	go func() {
		<-loading
		cancel()
	}()
	_, err := f.Fetch(impatient, "k")
	fmt.Println(errors.Is(err, context.Canceled))
	close(finish)
	fmt.Println(f.Fetch(context.Background(), "k"))
	// Output:
	// true
	// value <nil>
}

// Close waits for running loads.
func ExampleFetcher_Close() {
	c, stop := exampleClient()
	defer stop()
	f := exampleFetcher(c, flightlock.FetchOptions{}, func(context.Context, string) (string, error) {
		return "value", nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(f.Close(ctx))
	_, err := f.Fetch(ctx, "k")
	fmt.Println(errors.Is(err, flightlock.ErrClosed))
	// Output:
	// <nil>
	// true
}

func ExampleFetcher_Stats() {
	c, stop := exampleClient()
	defer stop()
	f := exampleFetcher(c, flightlock.FetchOptions{}, func(context.Context, string) (string, error) {
		return "value", nil
	})
	defer f.Close(context.Background())
	for range 10 {
		f.Fetch(context.Background(), "k")
	}
	s := f.Stats()
	fmt.Println(s.Hits, s.Misses, s.Loads)
	// Output: 9 1 1
}

// Without Redis there is no lock: by default each process loads by itself, once per key at a time.
func ExampleFetchOptions() {
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer gone.Close()
	c, err := flightlock.New(flightlock.Options{}, gone)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())
	for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
		f := exampleFetcher(c, flightlock.FetchOptions{OnUnavailable: policy},
			func(context.Context, string) (string, error) { return "value", nil })
		v, err := f.Fetch(context.Background(), "k")
		fmt.Printf("%q %v\n", v, errors.Is(err, flightlock.ErrUnavailable))
		f.Close(context.Background())
	}
	// Output:
	// "value" false
	// "" true
}

// A stale value is served at once, and refreshed in the background.
func ExampleSource() {
	c, stop := exampleClient()
	defer stop()
	var cached atomic.Value
	cached.Store("old")
	stored := make(chan struct{})
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		Lookup: func(context.Context, string) (string, flightlock.Freshness, error) {
			v := cached.Load().(string)
			if v == "old" { // its soft ttl has passed
				return v, flightlock.Stale, nil
			}
			return v, flightlock.Fresh, nil
		},
		Load: func(context.Context, string) (string, error) { return "new", nil },
		Store: func(_ context.Context, _, v string, _ *flightlock.Lock) error {
			cached.Store(v)
			close(stored)
			return nil
		},
	}, flightlock.FetchOptions{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())

	fmt.Println(f.Fetch(context.Background(), "k"))
	<-stored
	fmt.Println(f.Fetch(context.Background(), "k"))
	// Output:
	// old <nil>
	// new <nil>
}

// A panic in a Load is returned to the callers as an error, and the process continues.
func ExamplePanicError() {
	c, stop := exampleClient()
	defer stop()
	f := exampleFetcher(c, flightlock.FetchOptions{}, func(context.Context, string) (string, error) { panic("oh no") })
	defer f.Close(context.Background())
	_, err := f.Fetch(context.Background(), "k")
	var p *flightlock.PanicError
	if errors.As(err, &p) {
		fmt.Println(p.Op, p.Value, len(p.Stack) > 0)
	}
	// Output: Load oh no true
}

// stampedMap is a cache with stamps in memory. Package rediscache has one in Redis.
type stampedMap struct {
	mu      sync.Mutex // guards what follows
	stamps  int
	entries map[string]flightlock.Found[string]
}

// write replaces an entry, and gives it a new stamp.
func (m *stampedMap) write(key string, e flightlock.Found[string]) flightlock.Found[string] {
	m.stamps++
	e.Stamp = strconv.Itoa(m.stamps)
	m.entries[key] = e
	return e
}

func (m *stampedMap) lookup(ctx context.Context, key string) (flightlock.Found[string], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, there := m.entries[key]
	if !there && flightlock.LoadFollows(ctx) {
		e = m.write(key, flightlock.Found[string]{}) // a tombstone
	}
	return e, nil
}

func (m *stampedMap) store(_ context.Context, key, v, stamp string, _ *flightlock.Lock) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries[key].Stamp != stamp {
		return flightlock.ErrOutdated
	}
	m.write(key, flightlock.Found[string]{Value: v, Fresh: flightlock.Fresh})
	return nil
}

func (m *stampedMap) invalidate(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.write(key, flightlock.Found[string]{})
}

// A load that runs through an invalidation is not stored.
func ExampleLoadFollows() {
	c, stop := exampleClient()
	defer stop()
	cache := &stampedMap{entries: map[string]flightlock.Found[string]{}}
	origin := "old"
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		LookupStamped: cache.lookup,
		StoreStamped: func(ctx context.Context, key, v, stamp string, l *flightlock.Lock) error {
			err := cache.store(ctx, key, v, stamp, l)
			if errors.Is(err, flightlock.ErrOutdated) {
				fmt.Println("not stored:", v)
			}
			return err
		},
		Load: func(_ context.Context, key string) (string, error) {
			v := origin
			if v == "old" {
				origin = "new" // somebody changes it while it is being loaded
				cache.invalidate(key)
			}
			return v, nil
		},
	}, flightlock.FetchOptions{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())
	fmt.Println(f.Fetch(context.Background(), "k")) // it came before the change
	fmt.Println(f.Fetch(context.Background(), "k"))
	fmt.Println("outdated:", f.Stats().Outdated)
	// Output:
	// not stored: old
	// old <nil>
	// new <nil>
	// outdated: 1
}

// Many keys are one lookup, one load and one store. A key without a value has its own error.
func ExampleFetcher_FetchMany() {
	c, stop := exampleClient()
	defer stop()
	cache := &stampedMap{entries: map[string]flightlock.Found[string]{}}
	names := map[string]string{"1": "Ada", "2": "Grace"}
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		LookupStamped: cache.lookup,
		StoreStamped:  cache.store,
		Load: func(_ context.Context, id string) (string, error) {
			if name, ok := names[id]; ok {
				return name, nil
			}
			return "", flightlock.ErrNotFound
		},
		LoadMany: func(_ context.Context, ids []string) (map[string]string, error) {
			fmt.Println("SELECT id, name FROM users WHERE id IN", ids)
			return names, nil
		},
	}, flightlock.FetchOptions{})
	if err != nil {
		panic(err)
	}
	defer f.Close(context.Background())
	values, err := f.FetchMany(context.Background(), []string{"1", "2", "3"})
	fmt.Println(values["1"], values["2"])
	fmt.Println(errors.Is(err, flightlock.ErrNotFound), err)
	// Output:
	// SELECT id, name FROM users WHERE id IN [1 2 3]
	// Ada Grace
	// true flightlock: fetch: 1 key has failed; "3": not found
}
