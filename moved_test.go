package flightlock_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// The address of a node moves to its replica, as a virtual IP, a name or a proxy does, while
// connections to the old master, which is now a replica, survive. The client finds its way to the
// new one by itself.
func TestAnAddressMovesWhileConnectionsSurvive(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		nodes int
		own   bool // by Open, not by New
		known bool // somebody else has locked on the new master
	}{{1, false, false}, {1, true, false}, {1, true, true}, {3, false, true}, {3, true, false}} {
		t.Run(fmt.Sprintf("%+v", tc), func(t *testing.T) {
			first, second := redistest.StartServer(t, atOnce...), redistest.StartServer(t, atOnce...)
			proxy := redistest.StartProxy(t, first.Addr())
			addrs := []string{proxy.Addr()}
			var last *redistest.Server
			for range tc.nodes - 1 {
				last = redistest.StartServer(t)
				addrs = append(addrs, last.Addr())
			}
			opts := flightlock.Options{NodeTimeout: 2 * time.Second, MaxTTL: time.Second}
			c := movedClient(t, opts, tc.own, addrs...)
			lockAtOnce(t, c, 200)
			follow(t, second, first)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			first.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(second.Port()))
			if tc.known {
				lockAtOnce(t, movedClient(t, opts, tc.own, append([]string{second.Addr()}, addrs[1:]...)...), 1)
			}
			proxy.SetTarget(second.Addr()) // connections stay
			if last != nil {
				must(t, last.Kill()) // so that the node is needed
			}
			_ = eventually(t, c, "k").Release(t.Context()) // the release may go to the old one
			lockAtOnce(t, c, 200)
		})
	}
}

func movedClient(t *testing.T, opts flightlock.Options, own bool, addrs ...string) *flightlock.Client {
	t.Helper()
	if own {
		var urls []string
		for _, addr := range addrs {
			urls = append(urls, "redis://"+addr)
		}
		c, err := flightlock.Open(urls, opts)
		must(t, err)
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	var clients []redis.UniversalClient
	for _, addr := range addrs {
		clients = append(clients, redistestClient(t, addr))
	}
	return newClient(t, opts, clients...)
}

// lockAtOnce has many goroutines lock keys of their own at once, and retry until they are granted.
func lockAtOnce(t *testing.T, c *flightlock.Client, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			l, err := c.SingleFlightLock(ctx, fmt.Sprint("many", i), time.Second,
				flightlock.LimitedRetry(10*time.Millisecond, 1000))
			if err != nil {
				t.Error(err)
				return
			}
			_ = l.Release(ctx) // where the old master granted it, it is lost
		})
	}
	wg.Wait()
}
