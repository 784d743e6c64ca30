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
)

// Without a Name, a user who chooses a key might choose that of a lock, or one that a node keeps
// for all its clients: a lookup would overwrite it.
func TestNoEntryIsAtTheKeyOfALock(t *testing.T) {
	s := redistest.StartServer(t)
	c := lockClient(t, s.Addr(), flightlock.Options{NodeTimeout: 10 * time.Second})
	l, err := c.SingleFlightLock(t.Context(), "7", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release(context.Background())
	load := func(context.Context, string) (string, error) { return "v", nil }
	for _, name := range []string{"lock", "lock:users", "flightlock:{x}"} {
		opts := rediscache.Options[string]{Name: name, Fresh: time.Minute}
		_, err := rediscache.New(c, s.Client(t, honouring), load, opts)
		if !errors.Is(err, flightlock.ErrInvalid) || !strings.Contains(err.Error(), "Options.Name") {
			t.Errorf("New with the Name %q: %v", name, err)
		}
	}
	cache, err := rediscache.New(c, s.Client(t, honouring), load, rediscache.Options[string]{Fresh: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close(context.Background())
	before := s.Do(t, "GET", "lock:7")
	for _, key := range []string{"lock:7", "flightlock:{x}", "flightlock:{x}:want"} {
		if _, err := cache.Get(t.Context(), key); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("Get of %s: %v", key, err)
		}
		if err := cache.Invalidate(t.Context(), key); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("Invalidate of %s: %v", key, err)
		}
		if err := cache.Set(t.Context(), key, "w"); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("Set of %s: %v", key, err)
		}
		if _, err := cache.GetMany(t.Context(), []string{key}); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("GetMany of %s: %v", key, err)
		}
	}
	if after := s.Do(t, "GET", "lock:7"); after != before {
		t.Errorf("the lock was %v, and is %v", before, after)
	}
	if err := l.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
}
