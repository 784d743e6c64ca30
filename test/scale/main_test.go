// Package scale tests flightlock on real servers, with several processes, and at the size of a user:
// thousands of keys at once, busy processors, outages, deploys. It has no code but tests, and they
// use nothing but the public API.
package scale

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	if os.Getenv(processEnv) != "" {
		os.Exit(processMain(os.Stdin, os.Stdout))
	}
	if os.Getenv(serviceEnv) != "" {
		os.Exit(serviceMain(os.Stdin, os.Stdout))
	}
	redistest.SayWhatIsLeftOut(
		"deploys, busy processors, most keys, and most combinations of nodes and clients",
		"FLIGHTLOCK_LONG=1, or make long")
	goleak.VerifyTestMain(m)
}

// newClient is a Client over nodes that is closed when the test ends.
func newClient(tb testing.TB, opts flightlock.Options, nodes ...redis.UniversalClient) *flightlock.Client {
	tb.Helper()
	opts.Nodes = nodes
	return closing(tb)(flightlock.New(opts))
}

// mustOpen is a Client of urls that is closed when the test ends.
func mustOpen(tb testing.TB, opts flightlock.Options, urls ...string) *flightlock.Client {
	tb.Helper()
	return closing(tb)(flightlock.Open(urls, opts))
}

// closing wants a Client without an error, and closes it when the test ends.
func closing(tb testing.TB) func(*flightlock.Client, error) *flightlock.Client {
	return func(c *flightlock.Client, err error) *flightlock.Client {
		tb.Helper()
		must(tb, err)
		tb.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := c.Close(ctx); err != nil {
				tb.Errorf("Close: %v", err)
			}
		})
		return c
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func mustRelease(tb testing.TB, l *flightlock.Lock) {
	tb.Helper()
	if err := l.Release(context.Background()); err != nil {
		tb.Errorf("Release: %v", err)
	}
}

func mustLock(tb testing.TB, c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	tb.Helper()
	l, err := c.SingleFlightLock(tb.Context(), key, ttl, nil)
	must(tb, err)
	return l
}

// lockAndRelease shows that c locks.
func lockAndRelease(tb testing.TB, c *flightlock.Client) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, "k", 5*time.Second, nil)
	must(tb, err)
	mustRelease(tb, l)
}

// eventually is a lock that the nodes may refuse for a while.
func eventually(tb testing.TB, c *flightlock.Client, key string) *flightlock.Lock {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, key, time.Second, flightlock.LimitedRetry(10*time.Millisecond, 1000))
	must(tb, err)
	return l
}

// startServers starts n servers.
func startServers(tb testing.TB, n int) (servers []*redistest.Server, addrs []string) {
	tb.Helper()
	for range n {
		s := redistest.StartServer(tb)
		servers, addrs = append(servers, s), append(addrs, s.Addr())
	}
	return servers, addrs
}

// dial is a client to addr that is closed when the test ends.
func dial(tb testing.TB, addr string) redis.UniversalClient {
	tb.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr})
	tb.Cleanup(func() { c.Close() })
	return c
}
