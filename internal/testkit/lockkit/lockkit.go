// Package lockkit has what tests of flightlock's clients share: the one place that makes clients, locks that
// must succeed, and nodes of real servers.
package lockkit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

// Patience is the NodeTimeout of clients on real servers, unless a test is about it: it outlasts a busy
// machine.
const Patience = 10 * time.Second

// Patient are the options of a client that has Patience.
var Patient = flightlock.Options{NodeTimeout: Patience}

// New is a Client over nodes that is closed when the test ends.
func New(tb testing.TB, opts flightlock.Options, nodes ...redis.UniversalClient) *flightlock.Client {
	tb.Helper()
	c, err := flightlock.New(opts, nodes...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { Close(tb, c) })
	return c
}

// Close closes c, which takes less than ten seconds.
func Close(tb testing.TB, c *flightlock.Client) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		tb.Errorf("Close: %v", err)
	}
}

// StartNodes starts n servers and gives a client to each.
func StartNodes(tb testing.TB, n int) (servers []*redistest.Server, nodes []redis.UniversalClient) {
	tb.Helper()
	for range n {
		s := redistest.StartServer(tb)
		servers = append(servers, s)
		nodes = append(nodes, s.Client(tb))
	}
	redistest.Deploy(tb, nodes...)
	return servers, nodes
}

// Lock is a lock, which must succeed.
func Lock(tb testing.TB, c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	tb.Helper()
	l, err := c.SingleFlightLock(tb.Context(), key, ttl, nil)
	if err != nil {
		tb.Fatalf("SingleFlightLock(%q): %v", key, err)
	}
	return l
}

// Release releases l, which must succeed.
func Release(tb testing.TB, l *flightlock.Lock) {
	tb.Helper()
	if err := l.Release(context.Background()); err != nil {
		tb.Errorf("Release: %v", err)
	}
}

// Open is a Client over urls that is closed when the test ends.
func Open(tb testing.TB, opts flightlock.Options, urls ...string) *flightlock.Client {
	tb.Helper()
	c, err := flightlock.Open(opts, urls...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { Close(tb, c) })
	return c
}

// LockAndRelease checks that c locks.
func LockAndRelease(t *testing.T, c *flightlock.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, "k", 5*time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	Release(t, l)
}

// WantInvalid checks that err is ErrInvalid and contains all of says.
func WantInvalid(t *testing.T, err error, says ...string) {
	t.Helper()
	if !errors.Is(err, flightlock.ErrInvalid) {
		t.Fatalf("got %v, want ErrInvalid", err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q does not say %q", err, s)
		}
	}
}

// TryLock is one attempt, which must succeed: a busy machine has as long for it as MaxTTL allows, and another
// attempt if that was not enough.
func TryLock(t *testing.T, c *flightlock.Client, key string) {
	t.Helper()
	var l *flightlock.Lock
	err, late := flightlock.ErrInvalid, 0
	for ttl := time.Minute; err != nil; {
		began := time.Now()
		l, err = c.TryLock(t.Context(), key, ttl)
		if errors.Is(err, flightlock.ErrInvalid) {
			ttl /= 2
		} else if late++; time.Since(began) < ttl/2 || late == 5 {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	Release(t, l)
}

// EventuallyLock locks and releases key within much less than a quarantine.
func EventuallyLock(t *testing.T, c *flightlock.Client, key string) {
	t.Helper()
	Release(t, EventuallyHeld(t, c, key))
}

// EventuallyHeld is a lock within much less than a quarantine.
func EventuallyHeld(t *testing.T, c *flightlock.Client, key string) *flightlock.Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, key, time.Second, flightlock.LimitedRetry(10*time.Millisecond, 1000))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Many has goroutines lock a key of their own each, so many times one after the other.
func Many(t *testing.T, c *flightlock.Client, goroutines, times int) {
	t.Helper()
	done := make(chan error, goroutines)
	for g := range goroutines {
		go func() {
			for range times {
				l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("key", g), 5*time.Second, nil)
				if err == nil {
					err = l.Release(t.Context())
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range goroutines {
		testkit.Must(t, <-done)
	}
}
