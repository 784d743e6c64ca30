package flightlock_test

import (
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) {
	if redistest.Raced {
		redistest.SayWhatIsLeftOut("many rounds, keys and combinations", "go test .")
	}
	testkit.Main(m)
}
