package flightlock

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/redistest"
)

// Callers of FetchMany get their values without StoreMany after NodeTimeout. The timer's function may be called while
// the batch goes on, or after it: what it does must not depend on what the batch has left by then.
func TestALateDeliveryDoesNotDependOnTheBatch(t *testing.T) {
	b := &batch[string]{}
	g := coalesce.NewGroup[string](func() *fetchRun[string] { return new(fetchRun[string]) }, nil)
	loaded := map[string]string{"a": "1", "b": "2"}
	var runs []*fetchRun[string]
	for key := range loaded {
		r, _, _ := g.Join(key)
		runs = append(runs, r)
	}
	b.runs = slices.Clone(runs)
	deliver := b.delivery(loaded)
	b.each(func(*fetchRun[string], *Lock) bool { return false }) // stored meanwhile
	deliver()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, r := range runs {
		if v, err, left := r.Wait(ctx); left || err != nil || v != loaded[r.Key()] {
			t.Errorf("%s: %q, %v, %v", r.Key(), v, err, left)
		}
		g.Done(r)
	}
}

// A StoreMany that returns before the callers get their values without it, at that moment, or later.
func TestFetchManyStoreEndsAtNodeTimeout(t *testing.T) {
	const nodeTimeout = 50 * time.Millisecond
	for _, takes := range []time.Duration{nodeTimeout - 1, nodeTimeout, nodeTimeout + 1, 10 * nodeTimeout} {
		synctest.Test(t, func(t *testing.T) {
			node := redistest.StartMemNode(t, "10.0.0.1:6379")
			c, err := New(Options{NodeTimeout: nodeTimeout}, node.Client(t))
			if err != nil {
				t.Fatal(err)
			}
			f, err := NewFetcher(c, Source[string]{
				Lookup: func(context.Context, string) (string, Freshness, error) { return "", Miss, nil },
				Load:   func(_ context.Context, key string) (string, error) { return key, nil },
				Store:  func(context.Context, string, string, *Lock) error { return nil },
				LoadMany: func(_ context.Context, keys []string) (map[string]string, error) {
					values := map[string]string{}
					for _, key := range keys {
						values[key] = key
					}
					return values, nil
				},
				StoreMany: func(context.Context, map[string]string, map[string]*Lock) error {
					time.Sleep(takes)
					return nil
				},
			}, FetchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			values, err := f.FetchMany(t.Context(), []string{"a", "b", "c", "d", "e", "f", "g", "h"})
			if took := time.Since(began); err != nil || len(values) != 8 || took > min(takes, nodeTimeout) {
				t.Errorf("%d values, %v, after %v", len(values), err, took)
			}
			if err := f.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if err := c.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
