// Package scale tests flightlock on real servers, with several processes, and at the size of a user:
// thousands of keys at once, busy processors, outages, deploys. It has no code but tests, and they
// use nothing but the public API.
package scale

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
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
	code := m.Run()
	for _, s := range shared {
		if err := s.Close(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// options are the default ones if everything runs in full, on a machine that has nothing else to do.
// Otherwise a node may take long to answer: what the default NodeTimeout promises is tested in virtual time.
func options() flightlock.Options {
	if redistest.Long() {
		return flightlock.Options{}
	}
	return lockkit.Patient
}

// lookupTimeout is that of Fetchers, as options are those of Clients.
func lookupTimeout() time.Duration {
	if redistest.Long() {
		return 0
	}
	return lockkit.Patience
}

// warmUp has c dial its nodes. What they do not answer in time of the release, on a busy machine, is owed.
func warmUp(t *testing.T, c *flightlock.Client) {
	t.Helper()
	_ = lockkit.EventuallyHeld(t, c, "warm").Release(t.Context())
}

// bubble runs a test in virtual time, with default options: nodes in memory, a round trip to them, and a
// Client.
func bubble(t *testing.T, n int, roundTrip time.Duration,
	test func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		nodes := redistest.StartMemNodes(t, n)
		var clients []redis.UniversalClient
		for _, n := range nodes {
			n.SetDelay(roundTrip / 2)
			clients = append(clients, n.Client(t, redistest.Dials(func(dial redistest.Dialer) redistest.Dialer {
				return func(ctx context.Context, network, addr string) (net.Conn, error) {
					time.Sleep(roundTrip)
					return dial(ctx, network, addr)
				}
			})))
		}
		t.Cleanup(func() { time.Sleep(roundTrip) }) // dials that nobody waits for end
		test(t, nodes, lockkit.New(t, flightlock.Options{}, clients...))
	})
}

// shared are the servers of all tests that stop none and leave no lock behind.
var (
	shared = []*redistest.Shared[*redistest.Server]{
		redistest.SharedServer(), redistest.SharedServer(), redistest.SharedServer(),
	}
	deployShared sync.Once
)

// sharedServers are n of them.
func sharedServers(tb testing.TB, n int) (servers []*redistest.Server, addrs []string) {
	tb.Helper()
	var clients []redis.UniversalClient
	for _, s := range shared {
		servers = append(servers, s.Get(tb))
		addrs = append(addrs, s.Get(tb).Addr())
		clients = append(clients, s.Get(tb).Client(tb))
	}
	deployShared.Do(func() { redistest.Deploy(tb, clients...) })
	return servers[:n], addrs[:n]
}

// startServers starts n servers of the test's own.
func startServers(tb testing.TB, n int) (servers []*redistest.Server, addrs []string) {
	tb.Helper()
	for range n {
		s := redistest.StartServer(tb)
		servers, addrs = append(servers, s), append(addrs, s.Addr())
	}
	return servers, addrs
}
