package rediscache_test

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
)

// A wall clock that is set back does not make values fresh for as long, in a process that only has hits, and so does
// not hear the server's time again.
func TestAWallClockThatIsSetBack(t *testing.T) {
	const fresh = 200 * time.Millisecond
	locks, err := flightlock.New(flightlock.Options{
		DisableQuarantine: true,
	}, redistest.MiniClient(t, redistest.StartMini(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close(t.Context())
	var o origin
	rdb := redistest.MiniClient(t, redistest.StartMini(t))
	c, err := rediscache.New(locks, rdb, fetch.Each(o.load),
		options{Fresh: fresh, Stale: time.Hour, Jitter: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	defer testkit.Clocks.Reset()
	get := func() {
		t.Helper()
		if v, err := c.Get(t.Context(), "k"); v != "k@0" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
	}
	get()
	testkit.Clocks.Wall.Add(-int64(time.Hour))
	// The process hears the server's time as late as the replies arrive, so it may take the value for fresh for longer
	// than fresh, by the time that a busy machine needs for that.
	redistest.Eventually(t, 20*time.Second, "the value is loaded again", func() bool {
		get()
		return o.loads.Load() == 2
	})
}

// So does one that only has hits, and so has never been told the server's time: it does not take old values for fresh
// ones for as long as its clock is behind.
func TestASlowClockOfAProcessThatOnlyHasHits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		const behind = time.Hour
		opts := options{Fresh: time.Minute, Stale: 2 * behind}
		a, b := w.cache(opts), w.cache(opts)
		w.values.Mini.SetTime(time.Now().Add(behind))
		w.want("k", "k@0", a)
		w.want("k", "k@0", b)
		w.origin.version.Add(1)
		time.Sleep(2 * time.Minute) // past Fresh
		w.values.Mini.SetTime(time.Now().Add(behind))
		w.want("k", "k@0", b) // and it is refreshed
		time.Sleep(2 * w.origin.takes)
		w.want("k", "k@1", b)
	})
}
