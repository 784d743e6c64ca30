package flight

import (
	"math"
	"testing"
	"time"
)

// counting is a Pace that records for which failures it was called.
type counting struct{ asked *[]int }

func (c counting) Next(attempt int) (time.Duration, bool) {
	*c.asked = append(*c.asked, attempt)
	return -1, true
}

// A strategy is called with numbers of failures that keep rising, however many there are: one that
// counts from below zero again would restart its backoff, and never give up.
func TestFailuresDoNotWrap(t *testing.T) {
	var asked []int
	w := &waiter{pace: counting{&asked}, failures: math.MaxInt32 - 1}
	now := time.Now()
	for range 3 {
		if !w.goOn(now) {
			t.Fatal("it has given up")
		}
		now = now.Add(time.Second)
	}
	w.countPastFailures(w.nextTry)
	if w.planGiveUp(now); w.givesUp {
		t.Error("it will give up")
	}
	for i := 1; i < len(asked); i++ {
		if asked[i] < asked[i-1] {
			t.Fatalf("asked about %d after %d", asked[i], asked[i-1])
		}
	}
}

// Any delay, of any length and below 0, is a time in the future, and the longest is never reached.
func TestDelaysOfAnyLength(t *testing.T) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, math.MaxInt64 - 1, math.MaxInt64} {
		inBubble(t, func(t *testing.T, w *world) {
			w.down(0)
			front, behind := w.start(pace(limited{d, math.MaxInt})), w.start(pace(limited{d, math.MaxInt}))
			time.Sleep(25 * time.Hour / 24 / 60 / 60) // some delays of a millisecond
			if d > 0 {
				time.Sleep(time.Second)
			}
			front.waits()
			behind.waits()
			front.leaves()
			behind.leaves()
		})
	}
}

// A slice of any length ends in time, or never.
func TestSlicesOfAnyLength(t *testing.T) {
	for _, slice := range []time.Duration{1, math.MaxInt64 / 2, math.MaxInt64 - 1, math.MaxInt64} {
		g := NewGroup(Config{Slice: slice, Errors: fakeErrors{}})
		f := &flight{g: g, contention: &contention{rival: "r"}}
		now := time.Now()
		f.sliceLocked(now)
		later := now.Add(time.Hour)
		if got, want := f.decideLocked(later), handOff; slice > 1 && got != want {
			t.Errorf("after an hour of a slice of %v: %d", slice, got)
		} else if slice == 1 && got != yield {
			t.Errorf("after an hour of a slice of %v: %d", slice, got)
		}
		if f.sliceEnds <= 0 {
			t.Errorf("a slice of %v ends at %d", slice, f.sliceEnds)
		}
	}
}
