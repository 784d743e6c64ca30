// Package outage tests nodes that stop, hang, refuse or come back, and machines that sleep.
package outage

import (
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
