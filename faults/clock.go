//go:build linux

package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// A machineClock gives times that processes of one machine can compare: nanoseconds of
// CLOCK_MONOTONIC, which is one clock for all of them and cannot be set.
//
// It is the clock behind the monotonic reading of a time.Time on Linux, but the standard
// library does not show the reading itself. So we read it once beside time.Now, and add
// what time.Time.Sub says, which is exact. CLOCK_BOOTTIME would do as well: the two differ
// by the time that the machine has slept, which moves every process's readings alike; but a
// Lock's Until could not be told in it. The wall clock would not do: it is stepped and slewed.
type machineClock struct {
	base time.Time
	at   int64 // the machine's clock at base, never too early
}

// newMachineClock reads one clock between two readings of the other until the result is good to 20
// us, and otherwise takes the best of a thousand.
func newMachineClock() (machineClock, error) {
	best, width := machineClock{}, int64(1<<62)
	for range 1000 {
		var before, after unix.Timespec
		err1 := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before)
		now := time.Now()
		err2 := unix.ClockGettime(unix.CLOCK_MONOTONIC, &after)
		if err1 != nil {
			return best, err1
		}
		if err2 != nil {
			return best, err2
		}
		if w := after.Nano() - before.Nano(); w < width {
			best, width = machineClock{now, before.Nano() + w/2}, w
		}
		if width < int64(20*time.Microsecond) {
			break
		}
	}
	return best, nil
}

// now is the machine's time.
func (c machineClock) now() int64 { return c.of(time.Now()) }

// of is the machine's time at t, which has a monotonic reading.
func (c machineClock) of(t time.Time) int64 { return c.at + int64(t.Sub(c.base)) }

// ofWall is the machine's time at t by the wall clock, for a t not long after base.
func (c machineClock) ofWall(t time.Time) int64 { return c.at + t.UnixNano() - c.base.UnixNano() }
