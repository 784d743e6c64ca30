package flightlock_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
)

// A StoreMany that returns at the moment at which its callers get their values without it: both give
// them their values, and neither may see the other's list of keys half written. The race detector
// decides.
func TestFetchManyStoreEndsAtNodeTimeout(t *testing.T) {
	nodes := flightlocktest.Start(1)
	defer nodes.Close()
	const nodeTimeout = 2 * time.Millisecond
	c, err := nodes.Client(flightlock.Options{NodeTimeout: nodeTimeout})
	if err != nil {
		t.Fatal(err)
	}
	f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
		Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { return "", flightlock.Miss, nil },
		Load:   func(_ context.Context, key string) (string, error) { return key, nil },
		Store:  func(context.Context, string, string, *flightlock.Lock) error { return nil },
		LoadMany: func(_ context.Context, keys []string) (map[string]string, error) {
			values := map[string]string{}
			for _, key := range keys {
				values[key] = key
			}
			return values, nil
		},
		StoreMany: func(context.Context, map[string]string, map[string]*flightlock.Lock) error {
			end := time.Now().Add(nodeTimeout + time.Duration(rand.IntN(600)-300)*time.Microsecond)
			for time.Now().Before(end) {
				runtime.Gosched()
			}
			return nil
		},
	}, flightlock.FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close(context.Background())
	busy, idle := context.WithCancel(t.Context())
	defer idle()
	for range 4 {
		go func() {
			for busy.Err() == nil {
				runtime.Gosched()
			}
		}()
	}
	keys := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for range 300 {
		values, err := f.FetchMany(t.Context(), keys)
		if err != nil || len(values) != len(keys) {
			t.Fatalf("%d values, %v", len(values), err)
		}
	}
}
