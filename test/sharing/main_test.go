// Package sharing tests processes that share keys: exclusion while nodes fail, fairness, retained leases,
// split votes.
package sharing

import (
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(crewEnv); text != "" {
		os.Exit(crewMain(text))
	}
	if addrs := os.Getenv(sideEnv); addrs != "" {
		os.Exit(sideMain(addrs))
	}
	if spec := os.Getenv(onceEnv); spec != "" {
		os.Exit(onceMain(spec))
	}
	testkit.Main(m)
}
