package node

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// The first lock of a process takes three round trips: the login, boot.lua, and the acquire. So it is also
// where no process has been before, whose server knows no scripts.
func TestRoundTripsOfTheFirstLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const way = 10 * time.Millisecond
		m := redistest.StartMemNode(t, "first")
		m.SetDelay(way)
		for _, server := range []string{"new", "known"} {
			n := newNode(t, m.Client(t, func(o *redis.Options) { o.DisableIdentity, o.ClientName = false, "app" }))
			guard(n)
			began := time.Now()
			a := newAttempt(t, n, "k")
			a.acquire().want(t, Granted)
			if trips := time.Since(began) / (2 * way); trips > 3 {
				t.Errorf("a %s server was waited for %d times before the first lock", server, trips)
			}
			a.release().want(t, Deleted)
		}
	})
}
