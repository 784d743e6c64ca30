package rediscache_test

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// A wall clock that is set back does not make values fresh for as long, in a process that only has hits, and so does
// not hear the server's time again.
func TestAWallClockThatIsSetBack(t *testing.T) {
	const fresh = 200 * time.Millisecond
	locks, err := flightlock.New(flightlock.Options{
		Nodes: []redis.UniversalClient{redistest.MiniClient(t, redistest.StartMini(t))}, DisableQuarantine: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close(t.Context())
	var o origin
	rdb := redistest.MiniClient(t, redistest.StartMini(t))
	c, err := rediscache.New(locks, rdb, o.load, rediscache.Options[string]{Fresh: fresh, Stale: time.Hour, Jitter: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	defer clocks.Reset()
	get := func() {
		t.Helper()
		if v, err := c.Get(t.Context(), "k"); v != "k@0" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
	}
	get()
	clocks.Wall.Add(-int64(time.Hour))
	// The process hears the server's time as late as the replies arrive, so it may take the value for fresh for longer
	// than fresh, by the time that a busy machine needs for that.
	redistest.Eventually(t, 20*time.Second, "the value is loaded again", func() bool {
		get()
		return o.loads.Load() == 2
	})
}
