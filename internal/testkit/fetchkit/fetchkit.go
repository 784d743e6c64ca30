// Package fetchkit is what tests of package fetch have in common: one cache with its origin, and one way to
// make Fetchers.
package fetchkit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// Cache is a Store that all Fetchers of a test share, and the origin of its values. The zero Cache is empty.
// The value of a key is "key@version", of the version that the origin has when the load begins.
type Cache struct {
	Takes     time.Duration // a load
	Unstamped bool          // entries have no stamps: a Store made by fetch.Plain

	// They are called before what they are named after, if they are set, and their errors are its.
	OnGet, OnReserve, OnLoad, OnPut func(ctx context.Context, keys []string) error // OnGet: of Get and GetMany
	// after Reserve: it delays the reply
	OnFound func(ctx context.Context, keys []string)
	// NotThere says of each key whether the origin does not have it.
	NotThere func(key string) bool

	Gets, Reserves, Loads, Puts atomic.Int64 // calls
	Loaded, Stored              atomic.Int64 // keys

	mu      sync.Mutex // guards what follows
	version int
	stamps  int
	entries map[string]fetch.Entry[string]
	loading map[string]int
	most    int // loads of one key at once
	byKey   map[string]int
	now     int // loads
	atOnce  int
}

// Get is of fetch.Store, as are GetMany, Reserve and Put.
func (c *Cache) Get(ctx context.Context, key string) (fetch.Entry[string], error) {
	found, err := c.GetMany(ctx, []string{key})
	return found[key], err
}

// GetMany is of fetch.Store.
func (c *Cache) GetMany(ctx context.Context, keys []string) (map[string]fetch.Entry[string], error) {
	c.Gets.Add(1)
	if c.OnGet != nil {
		if err := c.OnGet(ctx, keys); err != nil {
			return nil, err
		}
	}
	return c.find(keys, false), nil
}

// Reserve is of fetch.Store.
func (c *Cache) Reserve(ctx context.Context, keys []string) (map[string]fetch.Entry[string], error) {
	c.Reserves.Add(1)
	if c.OnReserve != nil {
		if err := c.OnReserve(ctx, keys); err != nil {
			return nil, err
		}
	}
	found := c.find(keys, true)
	if c.OnFound != nil {
		c.OnFound(ctx, keys)
	}
	return found, nil
}

func (c *Cache) find(keys []string, reserve bool) map[string]fetch.Entry[string] {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := map[string]fetch.Entry[string]{}
	for _, key := range keys {
		e, there := c.entries[key]
		if !there && reserve {
			e = c.putLocked(key, fetch.Entry[string]{})
			there = true
		}
		if reserve && e.Stamp != unmarked(e.Stamp) && e.Fresh == fetch.Fresh {
			e.Fresh = fetch.Stale
		}
		if there {
			found[key] = e
		}
	}
	return found
}

// Put is of fetch.Store.
func (c *Cache) Put(ctx context.Context,
	items map[string]fetch.Entry[string]) (outdated []string, err error) {
	c.Puts.Add(1)
	if c.OnPut != nil {
		if err := c.OnPut(ctx, slices.Collect(maps.Keys(items))); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, e := range items {
		old := c.entries[key]
		if !c.Unstamped && (old.Stamp == "" || unmarked(old.Stamp) != unmarked(e.Stamp)) {
			outdated = append(outdated, key)
			continue
		}
		marked := old.Stamp != e.Stamp && !c.Unstamped
		if c.putLocked(key, e); marked {
			c.markLocked(key)
		}
		c.Stored.Add(1)
	}
	return outdated, nil
}

func (c *Cache) putLocked(key string, e fetch.Entry[string]) fetch.Entry[string] {
	if c.entries == nil {
		c.entries = map[string]fetch.Entry[string]{}
	}
	c.stamps++
	if e.Stamp = ""; !c.Unstamped {
		e.Stamp = fmt.Sprint("stamp-", c.stamps)
	}
	c.entries[key] = e
	return e
}

// Mark is of fetch.Marker. It fails as Get does.
func (c *Cache) Mark(ctx context.Context, keys []string) error {
	if c.OnGet != nil {
		if err := c.OnGet(ctx, keys); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		c.markLocked(key)
	}
	return nil
}

func (c *Cache) markLocked(key string) {
	if e, there := c.entries[key]; there {
		c.stamps++
		e.Stamp = fmt.Sprint(unmarked(e.Stamp), "+", c.stamps)
		c.entries[key] = e
	}
}

func unmarked(stamp string) string {
	stamp, _, _ = strings.Cut(stamp, "+")
	return stamp
}

// Load is the Loader. A load takes Takes, and ends with its ctx.
func (c *Cache) Load(ctx context.Context, keys []string) (map[string]string, error) {
	version := c.begin(keys)
	defer c.end(keys)
	if c.OnLoad != nil {
		if err := c.OnLoad(ctx, keys); err != nil {
			return nil, err
		}
	}
	if c.Takes > 0 {
		select {
		case <-time.After(c.Takes):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	values := map[string]string{}
	for _, key := range keys {
		if c.NotThere == nil || !c.NotThere(key) {
			values[key] = value(key, version)
		}
	}
	return values, nil
}

func (c *Cache) begin(keys []string) (version int) {
	c.Loads.Add(1)
	c.Loaded.Add(int64(len(keys)))
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loading == nil {
		c.loading, c.byKey = map[string]int{}, map[string]int{}
	}
	c.now++
	c.atOnce = max(c.atOnce, c.now)
	for _, key := range keys {
		c.byKey[key]++
		c.loading[key]++
		c.most = max(c.most, c.loading[key])
	}
	return c.version
}

func (c *Cache) end(keys []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now--
	for _, key := range keys {
		c.loading[key]--
	}
}

func value(key string, version int) string { return fmt.Sprint(key, "@", version) }

// Value is what a load of key that begins now returns.
func (c *Cache) Value(key string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return value(key, c.version)
}

// Change changes the origin, which has the new version then, and invalidates keys.
func (c *Cache) Change(keys ...string) (version int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	for _, key := range keys {
		c.putLocked(key, fetch.Entry[string]{})
	}
	return c.version
}

// Age makes the values of keys stale, where there are any.
func (c *Cache) Age(keys ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		if e := c.entries[key]; e.Fresh == fetch.Fresh {
			e.Fresh = fetch.Stale
			c.entries[key] = e
		}
	}
}

// Drop removes the entries of keys, as where they expire.
func (c *Cache) Drop(keys ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		delete(c.entries, key)
	}
}

// Set gives keys the entry e, with a stamp of its own each.
func (c *Cache) Set(e fetch.Entry[string], keys ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		c.putLocked(key, e)
	}
}

// Entry returns the entry of key.
func (c *Cache) Entry(key string) fetch.Entry[string] {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries[key]
}

// Most returns how many loads of one key, and how many loads at all, ran at once at most.
func (c *Cache) Most() (ofOneKey, atOnce int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.most, c.atOnce
}

// LoadsOf returns how often key was loaded.
func (c *Cache) LoadsOf(key string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byKey[key]
}

// Store is the Store to make a Fetcher with.
func (c *Cache) Store() fetch.Store[string] {
	if !c.Unstamped {
		return c
	}
	return fetch.Plain(
		func(ctx context.Context, key string) (string, bool, error) {
			e, err := c.Get(ctx, key)
			return e.Value, e.Fresh != fetch.Miss, err
		},
		func(ctx context.Context, key, v string) error {
			_, err := c.Put(ctx, map[string]fetch.Entry[string]{key: {Value: v, Fresh: fetch.Fresh}})
			return err
		})
}

// New makes a Fetcher of cache, which is closed at the end of the test.
func New(tb testing.TB, c *flightlock.Client, cache *Cache, opts fetch.Options) *fetch.Fetcher[string] {
	tb.Helper()
	f, err := fetch.New(c, cache.Store(), cache.Load, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), lockkit.Patience)
		defer cancel()
		if err := f.Close(ctx); err != nil {
			tb.Errorf("Close: %v", err)
		}
	})
	return f
}

// Keys are n keys, from "k<first>" on.
func Keys(first, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprint("k", first+i)
	}
	return keys
}
