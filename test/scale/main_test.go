// Package scale tests flightlock on real servers, with several processes, and at the size of a user:
// thousands of keys at once, busy processors, outages, deploys. It has no code but tests, and they
// use nothing but the public API.
package scale

import (
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
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

// startServers starts n servers.
func startServers(tb testing.TB, n int) (servers []*redistest.Server, addrs []string) {
	tb.Helper()
	for range n {
		s := redistest.StartServer(tb)
		servers, addrs = append(servers, s), append(addrs, s.Addr())
	}
	return servers, addrs
}
