package flightlock

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A nested Lock that is released in the instant in which its AutoRefresh begins is no longer
// refreshed, though others are still held: AutoRefresh has checked whether it was released before
// Release returns.
func TestReleaseOfANestedLockStopsAnAutoRefreshThatBegins(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // goroutines run in the order of waiting, until they wait again
	synctest.Test(t, func(t *testing.T) {
		node := redistest.StartMemNodes(t, 1)[0]
		c, err := New(Options{Nodes: []redis.UniversalClient{node.Client(t)}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := c.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		outer, err := c.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			l := outer.nested()
			began, released := make(chan error, 1), make(chan error, 1)
			n := l.reentry.Load()
			n.mu.Lock()
			go func() { began <- l.AutoRefresh(RefreshPolicy{Interval: time.Second}) }()
			yield()
			go func() { released <- l.Release(t.Context()) }()
			yield()
			n.mu.Unlock()
			if err := <-released; err != nil {
				t.Error(err)
			}
			if err := <-began; err != nil && !errors.Is(err, ErrNotHeld) {
				t.Error(err)
			}
		}
		before := c.Stats().Refreshes
		time.Sleep(5 * time.Second)
		if n := c.Stats().Refreshes; n != before {
			t.Errorf("%d refreshes of Locks that were released", n-before)
		}
	})
}

// yield lets all others run until they wait.
func yield() {
	for range 100 {
		runtime.Gosched()
	}
}
