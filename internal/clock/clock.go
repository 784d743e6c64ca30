// Package clock has the one rule about time that every layer shares.
package clock

import "time"

// Passed reports whether deadline has come at now, by the monotonic or by the wall clock,
// whichever says so first. The monotonic clock stands still while a machine sleeps, and a
// lease does not; the wall clock may be set back, and a lease is not longer for it.
func Passed(now, deadline time.Time) bool {
	return !now.Before(deadline) || !now.Round(0).Before(deadline.Round(0))
}
