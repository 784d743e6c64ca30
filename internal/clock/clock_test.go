package clock

import (
	"context"
	"math"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wall moves the wall clock reading of at, whose monotonic reading stays. (A Time with a
// monotonic reading has the wall clock's seconds above 30 bits of nanoseconds.)
func wall(t *testing.T, at time.Time, d time.Duration) time.Time {
	moved := at
	*(*uint64)(unsafe.Pointer(&moved)) += uint64(d/time.Second) << 30
	if !moved.Equal(at) || moved.Round(0).Sub(at.Round(0)) != d {
		t.Fatalf("a Time is not what it was: %v became %v", at, moved)
	}
	return moved
}

// A deadline has passed as soon as either clock says so, and the time left is the lesser of the
// two.
func TestEitherClockEndsIt(t *testing.T) {
	start := time.Now()
	deadline := start.Add(10 * time.Second)
	for _, c := range []struct {
		name      string
		mono, sys time.Duration // how far each clock has moved
		left      time.Duration
	}{
		{"at once", 0, 0, 10 * time.Second},
		{"both on the way", 4 * time.Second, 4 * time.Second, 6 * time.Second},
		{"the machine slept", time.Second, 20 * time.Second, -10 * time.Second},
		{"the wall clock was set back", 11 * time.Second, -time.Hour, -time.Second},
		{"the wall clock was set back a little", 4 * time.Second, 2 * time.Second, 6 * time.Second},
		{"the wall clock was set forward a little", 2 * time.Second, 4 * time.Second, 6 * time.Second},
		{"at the deadline", 10 * time.Second, 10 * time.Second, 0},
		{"at the deadline by the wall clock", 9 * time.Second, 10 * time.Second, 0},
		{"at the deadline by the monotonic clock", 10 * time.Second, 9 * time.Second, 0},
	} {
		now := wall(t, start.Add(c.mono), c.sys-c.mono)
		if got := Left(now, deadline); got != c.left {
			t.Errorf("%s: %v left, want %v", c.name, got, c.left)
		}
		if got := Passed(now, deadline); got != (c.left <= 0) {
			t.Errorf("%s: passed is %v", c.name, got)
		}
	}
}

// Without a monotonic reading, as after a trip through a file, the wall clock decides.
func TestWallClockAlone(t *testing.T) {
	now := time.Now()
	deadline := now.Add(time.Second).Round(0)
	if Passed(now, deadline) || !Passed(now.Add(time.Second), deadline) {
		t.Error("not by the wall clock")
	}
}

// A deadline that was never set has passed.
func TestNoDeadlineHasPassed(t *testing.T) {
	if !Passed(time.Now(), time.Time{}) {
		t.Error("the zero deadline has not passed")
	}
}

// Sums and products stop at the ends.
func TestSumsDoNotWrap(t *testing.T) {
	const most, least = time.Duration(math.MaxInt64), time.Duration(math.MinInt64)
	for _, c := range []struct{ a, b, sum time.Duration }{
		{1, 2, 3}, {-1, 2, 1}, {0, 0, 0},
		{most, 0, most}, {most, 1, most}, {1, most, most}, {most, most, most}, {most - 1, 1, most},
		{least, 0, least}, {least, -1, least}, {least, least, least}, {least + 1, -1, least},
		{least, most, -1}, {most, least, -1},
	} {
		if got := Add(c.a, c.b); got != c.sum {
			t.Errorf("%d + %d = %d, want %d", c.a, c.b, got, c.sum)
		}
	}
	for _, c := range []struct {
		n    int64
		unit time.Duration
		want time.Duration
	}{
		{0, time.Hour, 0}, {-2, time.Millisecond, -2 * time.Millisecond}, {1, most, most},
		{9223372036854, time.Millisecond, 9223372036854 * time.Millisecond},
		{9223372036855, time.Millisecond, most}, {18446744073710, time.Millisecond, most},
		{-9223372036855, time.Millisecond, least},
		{math.MaxInt64, 1, most}, {math.MaxInt64, most, most},
		{math.MinInt64, 1, least}, {math.MinInt64, time.Hour, least},
	} {
		if got := Mul(c.n, c.unit); got != c.want {
			t.Errorf("%d * %v = %v, want %v", c.n, c.unit, got, c.want)
		}
	}
}

// What the other layers count on: a time.Time takes any duration on top, and the difference of two
// stops at the ends.
func TestTimesTakeAnyDuration(t *testing.T) {
	now := time.Now()
	for _, d := range []time.Duration{
		math.MaxInt64, math.MaxInt64 - 1, math.MaxInt64 - 10*time.Minute, 100 * 365 * 24 * time.Hour,
	} {
		then := now.Add(d)
		if !then.After(now) || then.Before(now) || Passed(now, then) ||
			then.Sub(now) < d-time.Minute || Left(now, then) < d-time.Minute {
			t.Errorf("%v from now: %v, which is %v from now, %v left", d, then, then.Sub(now), Left(now, then))
		}
		if twice := then.Add(d); !twice.After(then) || twice.Sub(now) < d {
			t.Errorf("twice %v from now: %v", d, twice)
		}
	}
	if then := now.Add(math.MinInt64); !then.Before(now) || then.Sub(now) > -math.MaxInt64/2 {
		t.Errorf("long ago: %v", then)
	}
}

// untimed is a ctx whose timer does not fire.
type untimed struct {
	context.Context
	deadline time.Time
}

func (c untimed) Deadline() (time.Time, bool) { return c.deadline, true }

// A ctx whose deadline has passed has ended, whether or not its timer has fired; one that was canceled says
// so.
func TestEnded(t *testing.T) {
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	now := time.Now()
	for i, x := range []struct {
		ctx  context.Context
		want error
	}{
		{context.Background(), nil},
		{canceled, context.Canceled},
		{untimed{context.Background(), now.Add(time.Hour)}, nil},
		{untimed{context.Background(), now}, context.DeadlineExceeded},
		{untimed{canceled, now}, context.Canceled},
	} {
		if got := Ended(x.ctx); got != x.want { //nolint:errorlint // as it is
			t.Errorf("%d: %v, want %v", i, got, x.want)
		}
	}
}
