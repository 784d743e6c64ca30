// Package clock has the one rule about time that every layer shares, and the one way in which
// they are called when it is time.
package clock

import "time"

// Left is how long it is from now until deadline, by the monotonic or by the wall clock,
// whichever says less. The monotonic clock stands still while a machine sleeps, and a
// lease does not; the wall clock may be set back, and a lease is not longer for it.
func Left(now, deadline time.Time) time.Duration {
	wall := time.Duration(deadline.UnixNano() - now.UnixNano()) // cheaper than Sub without the monotonic readings
	return min(deadline.Sub(now), wall)
}

// Passed reports whether deadline has come at now, by either clock.
func Passed(now, deadline time.Time) bool { return Left(now, deadline) <= 0 }

// AfterFunc is time.AfterFunc. Only a simulation replaces it, before anything runs: the timers of
// a process that pauses go off when it goes on.
var AfterFunc = time.AfterFunc
