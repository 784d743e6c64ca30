package flight

import (
	"math"
	"testing"
	"time"
)

// TestPatience is how long strategies wait, at the latest: also those that end after many delays, which are
// not all asked for, or whose Within is earlier.
func TestPatience(t *testing.T) {
	for _, c := range []struct {
		p         countedPace
		least, to time.Duration
	}{
		{countedPace{each: time.Second, max: 0}, 0, 0},
		{countedPace{each: time.Second, max: 1000}, 1000 * time.Second, 1000 * time.Second},
		{countedPace{max: 10}, 10 * time.Millisecond, 10 * time.Millisecond},
		{countedPace{each: time.Second, max: 1_000_000}, 1_000_000 * time.Second, 1_002_000 * time.Second},
		{countedPace{each: time.Second, max: 1_000_000, within: time.Hour}, time.Hour, time.Hour},
		{countedPace{each: time.Second, max: 10, within: time.Hour}, 10 * time.Second, 10 * time.Second},
		{countedPace{each: time.Second, max: math.MaxInt}, Forever, Forever},
		{countedPace{each: math.MaxInt64, max: 1000}, Forever, Forever},
		{countedPace{each: time.Second, max: math.MaxInt, within: time.Hour}, time.Hour, time.Hour},
	} {
		asked := 0
		c.p.asked = &asked
		if got := Patience(c.p); got < c.least || got > c.to {
			t.Errorf("%d delays of %v, within %v: %v", c.p.max, c.p.each, c.p.within, got)
		}
		if asked > 12_000 {
			t.Errorf("%d delays of %v: it was asked %d times", c.p.max, c.p.each, asked)
		}
	}
}

// countedPace is a Pace that has so many equal delays.
type countedPace struct {
	each, within time.Duration
	max          int
	asked        *int
}

func (p countedPace) Within() time.Duration { return p.within }

func (p countedPace) Next(n int) (time.Duration, bool) {
	*p.asked++
	return p.each, n <= p.max
}
