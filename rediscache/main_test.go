package rediscache_test

import (
	"errors"
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"go.uber.org/goleak"
)

// The tests share a server for the locks, one for values, and a Cluster. Their caches have names of their own
// there.
var (
	lockServer  = redistest.SharedServer()
	valueServer = redistest.SharedServer()
	cluster     = redistest.SharedCluster(3)
)

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	testkit.Clocks.Install()
	if os.Getenv(fleetChild) != "" {
		fleetMain()
		return
	}
	if !redistest.Long() {
		redistest.SayWhatIsLeftOut("most of the random histories", "make long")
	}
	code := m.Run()
	err := errors.Join(lockServer.Close(), valueServer.Close(), cluster.Close(), goleak.Find())
	if err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}
