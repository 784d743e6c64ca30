package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/prometheus/client_golang/prometheus"
)

// gathered are the values of the series of caches, by name and label.
func gathered(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		short, is := strings.CutPrefix(f.GetName(), "flightlock_cache_")
		for _, m := range f.GetMetric() {
			if is {
				values[short+" "+m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return values
}

// What Stats counts is in the metrics of the Client, under the name of the Cache. Caches of one name
// are one there, and what a closed one has counted stays with those that are open.
func TestMetricsOfCaches(t *testing.T) {
	synctest.Test(t, testMetricsOfCaches)
}

func testMetricsOfCaches(t *testing.T) {
	nodes := flightlocktest.Start(2)
	defer nodes.Close()
	reg := prometheus.NewRegistry()
	c, err := nodes.Client(flightlock.Options{Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	load := func(_ context.Context, key string) (string, error) {
		if key == "none" {
			return "", rediscache.ErrNotFound
		}
		return strings.Repeat("x", len(key)), nil
	}
	rdb := nodes.Redis(1)
	open := func(name string) *rediscache.Cache[string] {
		cache, err := rediscache.New(c, rdb, fetch.Each(load), rediscache.Options[string]{
			Name: name, Fresh: time.Hour, NotFoundFor: time.Hour, MaxValue: 8, Local: time.Second,
			LookupTimeout: 200 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		return cache
	}
	one, other := open("items"), open("items")
	get := func(c *rediscache.Cache[string], key string) {
		if _, err := c.Get(t.Context(), key); err != nil && !errors.Is(err, rediscache.ErrNotFound) {
			t.Fatal(err)
		}
	}
	get(one, "none")
	get(other, "none") // found in Redis
	get(one, "longer than 8 bytes")
	get(one, "a")
	get(one, "a") // from the tier
	rdb.Set(t.Context(), one.Key("b"), "no entry", 0)
	get(one, "b")
	want := func(when string, caches ...*rediscache.Cache[string]) {
		t.Helper()
		expect := map[string]float64{}
		for _, c := range caches {
			s := c.Stats()
			expect["local_hits_total items"] += float64(s.LocalHits)
			expect["not_found_total items"] += float64(s.NotFound)
			expect["undecodable_total items"] += float64(s.Undecodable)
			expect["too_long_total items"] += float64(s.TooLong)
			expect["dropped_invalidations_total items"] += float64(s.Dropped)
			expect["repeated_invalidations items"] += float64(s.Repeating)
			expect["servers_down items"] += float64(s.Down)
		}
		got := gathered(t, reg)
		if fmt.Sprint(got) != fmt.Sprint(expect) {
			t.Errorf("%s:\n%v\nwant\n%v", when, got, expect)
		}
	}
	want("at first", one, other)
	if s := one.Stats(); s.LocalHits != 1 || s.NotFound != 1 || s.TooLong != 1 || s.Undecodable == 0 {
		t.Errorf("%+v", s) // else the comparison is one of zeros
	}
	nodes.Down(true, 1)
	if err := one.Invalidate(t.Context(), "a"); err == nil || gathered(t, reg)["repeated_invalidations items"] != 1 {
		t.Errorf("%v, %v", err, gathered(t, reg))
	}
	nodes.Down(false, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := one.Close(ctx); err != nil { // it waits for the invalidation
		t.Fatal(err)
	}
	want("after the first Close", one, other)
	if err := other.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if got := gathered(t, reg); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
	plain, err := flightlock.NewFetcher(c, flightlock.Source[int]{
		Lookup: func(context.Context, string) (int, flightlock.Freshness, error) { return 0, flightlock.Miss, nil },
		Load:   func(context.Context, string) (int, error) { return 1, nil },
		Store:  func(context.Context, string, int, *flightlock.Lock) error { return nil },
	}, flightlock.FetchOptions{Name: "plain"})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close(context.Background())
	if got := gathered(t, reg); len(got) > 0 {
		t.Errorf("of a Fetcher that is no Cache: %v", got)
	}
}
