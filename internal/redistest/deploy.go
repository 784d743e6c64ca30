package redistest

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Deploy makes nodes that were never used ones whose epoch is established, so that no test waits until
// clients find that out.
func Deploy(tb testing.TB, nodes ...redis.UniversalClient) {
	tb.Helper()
	for _, n := range nodes {
		for range 2 {
			// A process that cannot be seen is established in a later second only: for it, a quarantine is over at
			// once.
			err := n.Eval(tb.Context(), lua.Boot.Source, []string{lua.Marker, lua.Past},
				"deployed", time.Minute.Microseconds(), "deployed", 0, "deployed").Err()
			if err != nil {
				tb.Fatalf("redistest: boot.lua: %v", err)
			}
		}
	}
}
