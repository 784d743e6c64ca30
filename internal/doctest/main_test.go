// Package doctest tests what the documentation says: that its snippets compile and run, that what it names exists,
// that everything exported has an example, and that the exported API is the one listed in api. It has no code but
// tests.
package doctest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
)

// TestMain runs the tests in the root of the module: the paths in them begin there.
func TestMain(m *testing.M) {
	for {
		if _, err := os.Stat("go.mod"); err == nil {
			break
		}
		dir, err := os.Getwd()
		if err != nil || dir == filepath.Dir(dir) {
			panic("no go.mod above the directory of this package")
		}
		if err := os.Chdir(".."); err != nil {
			panic(err)
		}
	}
	redistest.SilenceRedis()
	os.Exit(m.Run())
}
