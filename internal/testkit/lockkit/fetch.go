package lockkit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// Origin is a cache that all Fetchers of a test share, and the source of its values. Each load
// makes a new value.
type Origin struct {
	Takes time.Duration // a load

	// They replace the plain functions, if set.
	Lookup func(ctx context.Context, key string) (string, flightlock.Freshness, error)
	Load   func(ctx context.Context, key string) (string, error)
	Store  func(ctx context.Context, key, v string, l *flightlock.Lock) error

	Loads, Stores atomic.Int64

	mu      sync.Mutex // guards what follows
	values  map[string]string
	stale   map[string]bool
	loading map[string]int
	most    int // loads of one key at once
}

func (o *Origin) Source() flightlock.Source[string] {
	s := flightlock.Source[string]{Lookup: o.PlainLookup, Load: o.PlainLoad, Store: o.PlainStore}
	if o.Lookup != nil {
		s.Lookup = o.Lookup
	}
	if o.Load != nil {
		s.Load = o.Load
	}
	if o.Store != nil {
		s.Store = o.Store
	}
	return s
}

func (o *Origin) PlainLookup(_ context.Context, key string) (string, flightlock.Freshness, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	v, ok := o.values[key]
	switch {
	case !ok:
		return "", flightlock.Miss, nil
	case o.stale[key]:
		return v, flightlock.Stale, nil
	}
	return v, flightlock.Fresh, nil
}

func (o *Origin) PlainLoad(ctx context.Context, key string) (string, error) {
	return o.load(ctx, key, o.Takes)
}

func (o *Origin) load(ctx context.Context, key string, takes time.Duration) (string, error) {
	n := o.Loads.Add(1)
	o.mu.Lock()
	if o.loading == nil {
		o.loading = map[string]int{}
	}
	o.loading[key]++
	o.most = max(o.most, o.loading[key])
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.loading[key]--
		o.mu.Unlock()
	}()
	select {
	case <-time.After(takes):
		return fmt.Sprintf("%s=%d", key, n), nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (o *Origin) PlainStore(_ context.Context, key, v string, l *flightlock.Lock) error {
	o.Stores.Add(1)
	if l != nil && l.Err() != nil {
		panic("Store with a lock that is over")
	}
	o.Set(key, v, false)
	return nil
}

func (o *Origin) Set(key, v string, stale bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.values == nil {
		o.values, o.stale = map[string]string{}, map[string]bool{}
	}
	o.values[key], o.stale[key] = v, stale
}

func (o *Origin) Drop(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.values, key)
}

// MostAtOnce is how many loads of one key have run at once.
func (o *Origin) MostAtOnce() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.most
}

// NewFetcher is a Fetcher over o that is closed when the test ends.
func NewFetcher(tb testing.TB, c *flightlock.Client, o *Origin,
	opts flightlock.FetchOptions) *flightlock.Fetcher[string] {
	tb.Helper()
	f, err := flightlock.NewFetcher(c, o.Source(), opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := f.Close(ctx); err != nil {
			tb.Errorf("Close of the Fetcher: %v", err)
		}
	})
	return f
}

// TakesRandom is a load that takes a random time.
func (o *Origin) TakesRandom(ctx context.Context, key string) {
	_, _ = o.load(ctx, key, time.Duration(rand.IntN(4000))*time.Microsecond)
}
