// Package clocktest has the two clocks of package clock run apart, for tests: while a machine
// sleeps its monotonic clock stands still, and its wall clock continues.
package clocktest

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/flightlock/flightlock/internal/clock"
)

// Clocks are clocks that read more, or less, than those of the machine, by as many nanoseconds.
// They may be moved at any time. Those of a synctest bubble, which have no monotonic reading, they
// leave as they are.
type Clocks struct{ Monotonic, Wall atomic.Int64 }

// Install has package clock read its clocks with c. That must come before anything that reads them.
func (c *Clocks) Install() {
	clock.Now = c.now
	clock.Since = func(t time.Time) time.Duration { return c.now().Sub(t) }
}

// Sleep is as if the machine had slept for d: the wall clock is so far ahead.
func (c *Clocks) Sleep(d time.Duration) { c.Wall.Add(int64(d)) }

// Reset has c read what the machine's clocks do.
func (c *Clocks) Reset() {
	c.Monotonic.Store(0)
	c.Wall.Store(0)
}

func (c *Clocks) now() time.Time {
	now := time.Now()
	wall, mono := c.Wall.Load(), c.Monotonic.Load()
	r := (*reading)(unsafe.Pointer(&now))
	if wall == 0 && mono == 0 || r.wall&hasMonotonic == 0 {
		return now
	}
	now = now.Add(time.Duration(wall)) // moves both
	r.monotonic += mono - wall
	return now
}

// A reading is a time.Time with a monotonic reading, which package time does not let anybody
// set.
type reading struct {
	wall      uint64
	monotonic int64
	_         *time.Location
}

const hasMonotonic = 1 << 63
