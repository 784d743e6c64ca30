package rediscache_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// go-redis gives the commands of a pipeline no error if the server refuses the login of its connection:
// only Exec reports it. An invalidation that was never sent must not count as done.
func TestARefusedLoginInvalidatesNothing(t *testing.T) {
	s := redistest.StartServer(t)
	c := lockClient(t, s.Addr(), flightlock.Options{NodeTimeout: 10 * time.Second})
	load := func(context.Context, string) (string, error) { return "v", nil }
	refused := s.Client(t, func(o *redis.Options) { honouring(o); o.Username, o.Password = "nobody", "wrong" })
	cache, err := rediscache.New(c, refused, load, rediscache.Options[string]{Name: "n", Fresh: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	defer cache.Close(ended) // what failed is repeated, and fails again
	for _, keys := range [][]string{{"a"}, {"a", "b"}} {
		err := cache.Invalidate(t.Context(), keys...)
		if err == nil || !strings.Contains(err.Error(), "WRONGPASS") || !strings.Contains(err.Error(), `"n:a"`) {
			t.Errorf("Invalidate of %v: %v", keys, err)
		}
	}
	if n := cache.Stats().Repeating; n != 2 {
		t.Errorf("%d invalidations are repeated, not 2", n)
	}
	many, err := cache.GetMany(t.Context(), []string{"a", "b"})
	if err != nil || len(many) != 2 {
		t.Errorf("GetMany: %v %v", many, err)
	}
}

// An error of several keys names none rather than an empty one.
func TestErrorsOfAClosedCacheNameNoEmptyKey(t *testing.T) {
	s := redistest.StartServer(t)
	c := lockClient(t, s.Addr(), flightlock.Options{NodeTimeout: 10 * time.Second})
	load := func(context.Context, string) (string, error) { return "v", nil }
	cache, err := rediscache.New(c, s.Client(t, honouring), load, rediscache.Options[string]{Fresh: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if err := cache.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, many := cache.GetMany(t.Context(), []string{"a"})
	for _, err := range []error{many, cache.Invalidate(t.Context(), "a")} {
		if !errors.Is(err, flightlock.ErrClosed) || strings.Contains(err.Error(), `""`) {
			t.Error(err)
		}
	}
}
