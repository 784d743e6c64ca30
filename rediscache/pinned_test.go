package rediscache_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
)

// What is remembered of a load that has failed is a few words, and not the old value that its lookup has found.
func TestFailedLoadsDoNotKeepOldValues(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(rediscache.Options[string]{Fresh: time.Second, Stale: time.Hour})
		const keys, size = 30, 1 << 20
		value := strings.Repeat("x", size)
		for i := range keys {
			if err := c.Set(t.Context(), fmt.Sprint("k", i), value); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * time.Second) // the bubble's time: they are stale
		before := redistest.Heap()
		err := errors.New("the origin is down")
		w.origin.err.Store(&err)
		for i := range keys {
			w.want(fmt.Sprint("k", i), value, c)
		}
		time.Sleep(2 * time.Minute) // no timer keeps a run in memory any more
		if n := c.Stats().LoadFailures; n != keys {
			t.Errorf("%d loads have failed", n)
		}
		if more := redistest.Heap() - before; more > keys*size/4 {
			t.Errorf("%d bytes more are in use", more)
		}
	})
}
