package clocktest

import (
	"testing"
	"testing/synctest"
	"time"
)

// Each clock goes its own way: the monotonic one is what Sub says, the wall clock what is left
// without its reading.
func TestClocksRunApart(t *testing.T) {
	for _, want := range []struct{ mono, wall time.Duration }{
		{}, {0, time.Hour}, {-90 * time.Second, 0}, {time.Minute, -1500 * time.Millisecond},
		{-time.Nanosecond, 999_999_999},
	} {
		var c Clocks
		c.Monotonic.Store(int64(want.mono))
		c.Wall.Store(int64(want.wall))
		before, got, after := time.Now(), c.now(), time.Now()
		width := after.Sub(before)
		if mono := got.Sub(before) - want.mono; mono < 0 || mono > width {
			t.Errorf("%v: the monotonic clock is %v off", want, mono)
		}
		if wall := got.Round(0).Sub(before.Round(0)) - want.wall; wall < 0 ||
			wall > after.Round(0).Sub(before.Round(0)) {
			t.Errorf("%v: the wall clock is %v off", want, wall)
		}
	}
}

// In a bubble there is one clock.
func TestABubbleIsLeftAlone(t *testing.T) {
	var c Clocks
	c.Sleep(time.Hour)
	synctest.Test(t, func(t *testing.T) {
		if now := c.now(); now != time.Now() {
			t.Errorf("moved to %v", now)
		}
	})
}
