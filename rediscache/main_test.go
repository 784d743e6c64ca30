package rediscache_test

import (
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/clocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"go.uber.org/goleak"
)

// clocks are those of this package's tests outside of bubbles.
var clocks clocktest.Clocks

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	clocks.Install()
	if os.Getenv(fleetChild) != "" {
		if err := fleetMain(); err != nil {
			println("a process of the fleet:", err.Error())
			os.Exit(1)
		}
		return
	}
	if !redistest.Long() {
		redistest.SayWhatIsLeftOut("a million interleavings of the model, and more of the real code", "make long")
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}
