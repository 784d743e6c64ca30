// Package setup tests what people set up: URLs, rights, TLS, names of nodes, and Check.
package setup

import (
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
