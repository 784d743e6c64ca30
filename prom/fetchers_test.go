package prom_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// What Fetchers do is counted by their names. Those with the same name are one; a name goes with its last
// Fetcher, and no counter decreases before.
func TestMetricsOfFetchers(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		reg := prometheus.NewPedanticRegistry()
		c := lockkit.New(t, options(t, reg, flightlock.Options{}), clients...)
		cache := &fetchkit.Cache{Takes: time.Second}
		cache.OnLoad = func(ctx context.Context, keys []string) error {
			switch keys[0] {
			case "bad":
				return errors.New("no database")
			case "panics":
				panic("no database")
			case "slow":
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		users := fetchkit.New(t, c, cache, fetch.Options{Name: "users", LoadTimeout: 5 * time.Second})
		fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{})
		got := make(chan error, 10)
		for range 10 {
			go func() {
				_, err := users.Get(t.Context(), "k")
				got <- err
			}()
		}
		for range 10 {
			testkit.Must(t, <-got)
		}
		if _, err := users.Get(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, _ = users.Get(ctx, "left")
		cancel()
		for _, key := range []string{"bad", "panics", "slow"} {
			_, _ = users.Get(t.Context(), key)
		}
		seen := map[string]float64{
			"hits_total": 1, "misses_total": 14, "joined_total": 9, "loads_total": 5, "unlocked_loads_total": 0,
			"in_flight": 0, "load loaded": 2, "load failed": 1, "load panicked": 1, "load timed_out": 1,
			"wait value": 10, "wait error": 3, "wait canceled": 1,
		}
		want := func() {
			t.Helper()
			synctest.Wait()
			all := gathered(t, reg)
			for name, v := range seen {
				series := `flightlock_fetch_` + name + `{fetcher="users"}`
				if what, outcome, ok := strings.Cut(name, " "); ok {
					series = `flightlock_fetch_` + what + `_duration_seconds{fetcher="users",outcome="` + outcome + `"}`
				}
				if g, there := all[series]; g != v || !there {
					t.Errorf("%s is %v (%v), want %v", series, g, there, v)
				}
			}
		}
		time.Sleep(2 * time.Second)
		want()
		twin := fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{Name: "users"})
		want()
		testkit.Must(t, users.Close(t.Context()))
		want()
		testkit.Must(t, twin.Close(t.Context()))
		for name := range gathered(t, reg) {
			if strings.Contains(name, "users") {
				t.Errorf("%s stays", name)
			}
		}
		lockkit.Close(t, c)
		if got := gathered(t, reg); len(got) > 0 {
			t.Errorf("%v stays", got)
		}
	})
}
