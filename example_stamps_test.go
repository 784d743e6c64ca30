package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/flightlock/flightlock"
)

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
