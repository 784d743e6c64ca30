// Package doctest tests what the documentation says: that its snippets compile and run, that what it names
// exists, that everything exported has an example, and that the exported API is the one listed in api. It has
// no code but tests.
package doctest

import (
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// TestMain runs the tests in the root of the module: the paths in them begin there.
func TestMain(m *testing.M) {
	if err := os.Chdir(testkit.File(".")); err != nil {
		panic(err)
	}
	redistest.SilenceRedis()
	os.Exit(m.Run())
}
