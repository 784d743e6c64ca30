package rediscache_test

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/testkit"
)

// A process that only has hits, and so has never been told the server's time, or is not told it again, does not take
// old values for fresh ones for as long as its clock is behind, or its wall clock was set back.
func TestClocksOfAProcessThatOnlyHasHits(t *testing.T) {
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, behind bool) {
		defer testkit.Clocks.Reset()
		opts := options{Stale: 2 * time.Hour}
		a, b := w.cache(opts), w.cache(opts)
		if behind {
			w.values.Mini.SetTime(time.Now().Add(time.Hour))
		} else {
			b = a // which has loaded the value, and heard the time
		}
		w.want("k", "k@0", a)
		w.want("k", "k@0", b)
		w.origin.version.Add(1)
		time.Sleep(2 * time.Minute) // past Fresh
		if behind {
			w.values.Mini.SetTime(time.Now().Add(time.Hour))
		} else {
			testkit.Clocks.Wall.Add(-int64(time.Hour))
		}
		w.want("k", "k@0", b) // and it is refreshed
		time.Sleep(2 * w.origin.takes)
		w.want("k", "k@1", b)
	})
}
