package flightlock_test

import (
	"context"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	leftOut := "most moments at which nodes can forget; services at full size (test/scale)"
	how := "make forget; make long"
	if redistest.Raced {
		leftOut, how = leftOut+"; many rounds, keys and combinations", how+"; go test ."
	}
	redistest.SayWhatIsLeftOut(leftOut, how)
	clocks.Install()
	goleak.VerifyTestMain(m)
}

// sized is a number of rounds or keys, or a time: full, or less with the race detector, which makes
// everything several times slower. With FLIGHTLOCK_LONG=1 it is full then, too.
func sized[T any](full, raced T) T {
	if redistest.Raced && !redistest.Long() {
		return raced
	}
	return full
}

// newClient is a Client over nodes that is closed when the test ends.
func newClient(tb testing.TB, opts flightlock.Options, nodes ...redis.UniversalClient) *flightlock.Client {
	tb.Helper()
	opts.Nodes = nodes
	c, err := flightlock.New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { closeClient(tb, c) })
	return c
}

func closeClient(tb testing.TB, c *flightlock.Client) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		tb.Errorf("Close: %v", err)
	}
}

// realNodes starts n servers and gives a client to each.
func realNodes(tb testing.TB, n int) (servers []*redistest.Server, nodes []redis.UniversalClient) {
	tb.Helper()
	for range n {
		s := redistest.StartServer(tb)
		servers = append(servers, s)
		nodes = append(nodes, s.Client(tb))
	}
	redistest.Deploy(tb, nodes...)
	return servers, nodes
}

func mustLock(tb testing.TB, c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	tb.Helper()
	l, err := c.SingleFlightLock(tb.Context(), key, ttl, nil)
	if err != nil {
		tb.Fatalf("SingleFlightLock(%q): %v", key, err)
	}
	return l
}

func mustRelease(tb testing.TB, l *flightlock.Lock) {
	tb.Helper()
	if err := l.Release(context.Background()); err != nil {
		tb.Errorf("Release: %v", err)
	}
}
