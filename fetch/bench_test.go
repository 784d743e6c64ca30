package fetch_test

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// BenchmarkMiss is a miss of a key of its own, by 500 callers at a time, on one real node: its lock, two lookups,
// a load and a store that take no time, and the release.
func BenchmarkMiss(b *testing.B) {
	node := testkit.Dial(b, redistest.StartServer(b).Addr())
	c := lockkit.New(b, flightlock.Options{NodeTimeout: lockkit.Patience}, node)
	var values sync.Map
	f, err := fetch.New(c, fetch.Plain(
		func(_ context.Context, key string) (bool, bool, error) {
			_, ok := values.Load(key)
			return ok, ok, nil
		},
		func(_ context.Context, key string, v bool) error { values.Store(key, v); return nil },
	), fetch.Each(func(context.Context, string) (bool, error) { return true, nil }), fetch.Options{})
	if err != nil {
		b.Fatal(err)
	}
	var n atomic.Int64
	b.SetParallelism(250)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := f.Get(context.Background(), strconv.FormatInt(n.Add(1), 10)); err != nil {
				b.Error(err)
			}
		}
	})
}
