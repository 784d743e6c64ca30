package redistest

import (
	"fmt"
	"os"
	"testing"
)

// EnvLong set to 1 runs all tests, at full size. Otherwise those that take long are skipped, or run
// with fewer keys, rounds and combinations.
const EnvLong = "FLIGHTLOCK_LONG"

// Long reports whether all tests are to run at full size.
func Long() bool { return os.Getenv(EnvLong) == "1" }

// OnlyLong skips a test that takes long, unless [Long].
func OnlyLong(tb testing.TB) {
	tb.Helper()
	if !Long() {
		tb.Skip("takes long: " + EnvLong + "=1 runs it")
	}
}

// SayWhatIsLeftOut prints one line unless [Long]: what was left out, and how to run it. It is for
// TestMain. The go command shows it with -v, or for the package in the current directory.
func SayWhatIsLeftOut(what, how string) {
	if !Long() {
		fmt.Printf("left out: %s: %s\n", what, how)
	}
}
