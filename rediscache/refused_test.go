package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

const tooMany = "ERR max number of clients reached"

// wantReason checks that each use of the cache ends with an error that has the text, at the same time and one after
// the other.
func wantReason(t *testing.T, c *rediscache.Cache[string], text string) {
	t.Helper()
	uses := map[string]func() error{
		"Get": func() error {
			_, err := c.Get(t.Context(), "k")
			return err
		},
		"GetMany": func() error {
			_, err := c.GetMany(t.Context(), []string{"a", "b"})
			var many *flightlock.ManyError
			if errors.As(err, &many) {
				err = many.Errors["a"]
			}
			return err
		},
		"Set":        func() error { return c.Set(t.Context(), "k", "v") },
		"Invalidate": func() error { return c.Invalidate(t.Context(), "k") },
	}
	for round := range 3 {
		var wg sync.WaitGroup
		for name, use := range uses {
			for range 2 {
				check := func() {
					if err := use(); err == nil || !strings.Contains(err.Error(), text) {
						t.Errorf("%s in round %d ended with %v", name, round, err)
					}
				}
				if round == 1 {
					wg.Go(check)
				} else {
					check()
				}
			}
		}
		wg.Wait()
	}
}

// A server that refuses a connection and closes it says why, and that is the error, from the first one on: not that a
// write has failed, or that the stream has ended, which is all that go-redis reports.
func TestTheReasonOfARefusalIsTheError(t *testing.T) {
	for writes := range 4 {
		t.Run(fmt.Sprint(writes, " writes"), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				rdb := w.values.Client(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.MaxRetries, o.DialerRetries = true, -1, 1
					o.Dialer = redistest.RefusingDialer(tooMany, writes)
				})
				wantReason(t, w.cacheOf(rdb, rediscache.Options[string]{
					Fetch: flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed},
				}), tooMany)
			})
		})
	}
}

// So it is with a real server.
func TestTheReasonOfARealRefusalIsTheError(t *testing.T) {
	for range 3 { // which call fails of the connection that is closed depends on when its end arrives
		locks, values := redistest.StartServer(t), redistest.StartServer(t)
		c := lockClient(t, locks.Addr(), flightlock.Options{NodeTimeout: 10 * time.Second})
		admin := values.Client(t, func(o *redis.Options) { o.PoolSize = 1 }).Conn()
		defer admin.Close()
		if err := admin.ConfigSet(t.Context(), "maxclients", "1").Err(); err != nil {
			t.Fatal(err)
		}
		load := func(context.Context, string) (string, error) { return "v", nil }
		cache, err := rediscache.New(c, values.Client(t, honouring), load, rediscache.Options[string]{
			Fresh: time.Minute,
			Fetch: flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed, LookupTimeout: 20 * time.Second},
		})
		if err != nil {
			t.Fatal(err)
		}
		wantReason(t, cache, tooMany)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		_ = cache.Close(ended) // what failed is repeated, and fails again
		locks.Kill()
		values.Kill()
	}
}

// So it is where a server lets in nobody else, and answers on the connections that the cache has: those that find none
// free are told why.
func TestTheReasonOfARefusalIsTheErrorBesideConnectionsOfBefore(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		var full atomic.Bool
		rdb := w.values.Client(t, func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.MaxRetries, o.DialerRetries = true, -1, 1
			dial, refuse := o.Dialer, redistest.RefusingDialer(tooMany, 2)
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if full.Load() {
					return refuse(ctx, network, addr)
				}
				return dial(ctx, network, addr)
			}
		})
		c := w.cacheOf(rdb, rediscache.Options[string]{
			Fetch: flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed},
		})
		w.want("k", "k@0", c)
		full.Store(true)
		w.values.SetDelay(10 * time.Millisecond)
		var wg sync.WaitGroup
		var failed atomic.Int64
		for range 3 {
			wg.Go(func() {
				if _, err := c.Get(t.Context(), "k"); err != nil {
					failed.Add(1)
					if !strings.Contains(err.Error(), tooMany) {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if n := failed.Load(); n != 2 {
			t.Errorf("%d of 3 have failed, with one connection", n)
		}
	})
}
