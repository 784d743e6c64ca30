// Package testkit has what tests share that is not about Redis itself (see internal/redistest): virtual time,
// logs, the path of a file of the module, and the main function of a package of tests. It does not import
// flightlock, so that every package can use it; lockkit, below it, has clients.
package testkit

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/flightlock/flightlock/internal/clocktest"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

// Recovered calls f and returns what it panicked with.
func Recovered(f func()) (v any) {
	defer func() { v = recover() }()
	f()
	return nil
}

// Dial is a client to addr that is closed when the test ends.
func Dial(tb testing.TB, addr string) redis.UniversalClient {
	tb.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr})
	tb.Cleanup(func() { c.Close() })
	return c
}

// Sized is a number of rounds or keys, or a time: full, or less with the race detector, which makes
// everything several times slower. With FLIGHTLOCK_LONG=1 it is full then, too.
func Sized[T any](full, raced T) T {
	if redistest.Raced && !redistest.Long() {
		return raced
	}
	return full
}

// Full is a number of rounds or keys, or a time: full with FLIGHTLOCK_LONG=1, as make soak runs the test, and
// less in make test.
func Full[T any](full, less T) T {
	if redistest.Long() {
		return full
	}
	return less
}

// Must ends the test if there is an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// InAHurry reports whether not every combination is to be tried.
func InAHurry() bool { return os.Getenv("FLIGHTLOCK_TRIES") == "" }

// Clocks are the clocks of tests outside of bubbles, which Main installs.
var Clocks clocktest.Clocks

func init() { redistest.SmallStacks() }

// Main runs the tests of a package: no goroutine may be left when they have ended.
func Main(m *testing.M) {
	redistest.SilenceRedis()
	Clocks.Install()
	goleak.VerifyTestMain(m)
}

// File returns the path of a file of this module, whose name is relative to its root.
func File(name string) string {
	_, here, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(here), "..", "..", name)
}
