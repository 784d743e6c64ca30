// Package clock has the one rule about time that every layer shares, and the one way in which
// they are called when it is time.
package clock

import (
	"context"
	"math"
	"time"
)

// Left is how long it is from now until deadline, by the monotonic or by the wall clock,
// whichever says less. The monotonic clock stands still while a machine sleeps, and a
// lease does not; the wall clock may be set back, and a lease is not longer for it.
func Left(now, deadline time.Time) time.Duration {
	// cheaper than Sub without the monotonic readings
	wall := time.Duration(deadline.UnixNano() - now.UnixNano())
	return min(deadline.Sub(now), wall)
}

// Passed reports whether deadline has come at now, by either clock.
func Passed(now, deadline time.Time) bool { return Left(now, deadline) <= 0 }

// Add is a + b; where that is more, or less, than a T can be, it is the largest, or the smallest,
// that there is. Callers may say "for ever" by the largest duration, and a sum that wraps would
// have been over long ago. (time.Time.Add needs no such care: it reaches 292 years from now on, and
// then drops the monotonic reading; Sub stops at the ends by itself.)
func Add[T ~int64](a, b T) T {
	switch sum := a + b; {
	case a > 0 && b > 0 && sum < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && sum >= 0:
		return math.MinInt64
	default:
		return sum
	}
}

// Earlier is the earlier of a and b.
func Earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// Later is the later of a and b.
func Later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Instant is a time by the monotonic clock, in nanoseconds since an epoch of its user's. Where the
// epoch is just before anything else, 0 is none. It takes a third of the room of a time.Time, and
// knows nothing of the wall clock: it is not for the deadline of a lease.
type Instant int64

// InstantOf is t, counted from epoch.
func InstantOf(epoch, t time.Time) Instant { return Instant(t.Sub(epoch)) }

// InstantNow is now, counted from epoch.
func InstantNow(epoch time.Time) Instant { return Instant(Since(epoch)) }

// Add is i + d, and stops at the ends as the function Add does.
func (i Instant) Add(d time.Duration) Instant { return Add(i, Instant(d)) }

// Mul is n units, which are above 0, and stops at the ends as Add does.
func Mul(n int64, unit time.Duration) time.Duration {
	switch {
	case n > int64(math.MaxInt64/unit):
		return math.MaxInt64
	case n < int64(math.MinInt64/unit):
		return math.MinInt64
	}
	return time.Duration(n) * unit
}

// What has to do with the validity of leases reads the clocks by Now and Since, which are those of
// package time. Only tests replace them, before anything runs: see package clocktest.
var (
	Now   = time.Now
	Since = time.Since
)

// AfterFunc is time.AfterFunc. Only a simulation replaces it, before anything runs: the timers of a
// process that pauses go off when it continues.
var AfterFunc = time.AfterFunc

// Ended is ctx.Err(), or context.DeadlineExceeded if ctx's deadline has passed: a request fails by the
// deadline of its socket, which is ctx's own, often a moment before ctx's timer.
func Ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return nil
}
