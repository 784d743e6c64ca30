// Package sharing tests processes that share keys: exclusion while nodes fail, fairness, retained leases, split
// votes.
package sharing

import (
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
