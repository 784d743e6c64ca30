package flight

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"
	"unsafe"
)

// slept makes a time look as if the machine had slept for d since: its wall clock reading
// is d earlier, its monotonic one stays. (A Time with a monotonic reading has the wall
// clock's seconds above 30 bits of nanoseconds. There is no such reading in a bubble.)
func slept(t *testing.T, at time.Time, d time.Duration) time.Time {
	before := at
	*(*uint64)(unsafe.Pointer(&before)) -= uint64(d/time.Second) << 30
	if !before.Equal(at) || at.Round(0).Sub(before.Round(0)) != d {
		t.Fatalf("a Time is not what it was: %v became %v", at, before)
	}
	return before
}

// sleepy is a lease of 50s whose machine has slept for d since, with its waiters.
func sleepy(t *testing.T, d time.Duration) (w *world, next *Ticket, answered <-chan struct{}) {
	w = newWorld(t).rich()
	w.refresh = nil
	first := w.heldFor(t, "k", 50*time.Second)
	next, answered = w.waitsFor(t, "k", 20*time.Second)
	f := first.f
	f.mu.Lock()
	f.until = slept(t, f.until, d)
	f.mu.Unlock()
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	return w, next, answered
}

// A lease whose machine has slept since it was granted has less left than the monotonic clock says.
// The next holder must not rely on more, by either clock.
func TestAHandoffAfterSleepEndsWithTheLease(t *testing.T) {
	w, next, answered := sleepy(t, 35*time.Second) // about 14s are left, of 49
	<-answered
	if w.renewals() != 0 || next.kind != Handed {
		t.Fatal("not handed over")
	}
	if over := next.Until().Round(0).Sub(next.f.until.Round(0)); over > 0 {
		t.Errorf("held for %v longer than the lease", over)
	}
	if err := next.Release(); err != nil {
		t.Error(err)
	}
	w.emptyNow()
}

// A lease that has too little left by the wall clock alone is renewed before it is handed over.
func TestAShortLeaseByTheWallClockIsRenewed(t *testing.T) {
	w, next, answered := sleepy(t, 45*time.Second) // about 4s are left
	select {
	case <-answered:
		t.Error("not renewed")
	default:
	}
	w.renewal(1).confirm()
	<-answered
	if err := next.Release(); err != nil {
		t.Error(err)
	}
	w.emptyNow()
}

// soon is for what the docs promise within a second. A busy machine gets more; what does not look
// at the wall clock takes twice as long.
const soon = 20 * time.Second

// heldFor joins a caller that is given the lock, or waits for it.
func (w *world) heldFor(t *testing.T, key string, ttl time.Duration) *Ticket {
	t.Helper()
	h := &Ticket{}
	if _, err := w.enter(key, h, ttl); err != nil {
		t.Fatal(err)
	}
	return h
}

// waitsFor is heldFor, of a caller that has to wait, on a goroutine of its own; answered is closed
// when it has its answer.
func (w *world) waitsFor(t *testing.T, key string, ttl time.Duration) (h *Ticket, answered <-chan struct{}) {
	t.Helper()
	h, done := &Ticket{}, make(chan struct{})
	go func() {
		defer close(done)
		if err := w.g.Acquire(context.Background(), key, h, ttl, patient, Queue); err != nil {
			t.Error(err)
		}
	}()
	for w.g.Counts().Waiters == 0 {
		runtime.Gosched()
	}
	return h, done
}

// told returns why h is over, once it is.
func (h *Ticket) told() <-chan error {
	told := make(chan error, 1)
	if _, why, over := h.OnEnd(func(why error) { told <- why }); over {
		told <- why
	}
	return told
}

func toldSoon(t *testing.T, who string, told <-chan error, want error) {
	t.Helper()
	select {
	case err := <-told:
		if !errors.Is(err, want) {
			t.Errorf("%s got %v", who, err)
		}
	case <-time.After(soon):
		t.Fatalf("%s was not notified for %v", who, soon)
	}
}

// A lock of which Err has said that it is lost stays lost, when the wall clock was set ahead and is
// set back, and when a refresh is confirmed after that.
func TestALostLockStaysLost(t *testing.T) {
	for name, refreshing := range map[string]bool{"held": false, "a refresh is under way": true} {
		t.Run(name, func(t *testing.T) {
			defer clocks.Reset()
			w := newWorld(t)
			w.refresh = nil
			h := w.heldFor(t, "k", time.Minute)
			ended, answered := h.told(), make(chan error, 1)
			if refreshing {
				h.Refresh(time.Second, func(err error) { answered <- err })
			}
			until := h.Until()
			clocks.Sleep(time.Hour)
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("after an hour: %v", err)
			}
			if moved := h.Until(); moved.Round(0).After(until.Round(0)) || moved.After(until) {
				t.Errorf("Until moved from %v to %v", until, moved)
			}
			clocks.Reset()
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("after the wall clock was set back: %v", err)
			}
			if refreshing {
				w.renewal(1).confirm()
				toldSoon(t, "the holder that refreshed", answered, errEnded)
			}
			toldSoon(t, "the holder", ended, errExpired)
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("in the end: %v", err)
			}
			w.emptySoon()
		})
	}
}
