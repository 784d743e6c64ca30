package flight

import (
	"testing"

	"github.com/flightlock/flightlock/internal/clocktest"
	"go.uber.org/goleak"
)

// clocks are those of this package's tests outside of bubbles.
var clocks clocktest.Clocks

func TestMain(m *testing.M) {
	clocks.Install()
	goleak.VerifyTestMain(m)
}
