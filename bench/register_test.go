package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

// fakeLock is a Lock with given properties.
type fakeLock struct {
	fence   int64
	until   time.Time
	release func() error
}

func (l *fakeLock) Fence() int64     { return l.fence }
func (l *fakeLock) Until() time.Time { return l.until }
func (l *fakeLock) Err() error {
	if time.Now().Before(l.until) {
		return nil
	}
	return errors.New("over")
}
func (l *fakeLock) Release(context.Context) error { return l.release() }

func validLock(fence int64) *fakeLock {
	return &fakeLock{fence: fence, until: time.Now().Add(time.Hour)}
}
func overLock(fence int64) *fakeLock {
	return &fakeLock{fence: fence, until: time.Now().Add(-time.Second)}
}

func enter(r *register, who int, l heldLock) error {
	return r.enter(holderID(0, 0, who), l, time.Now(), -1)
}

func wantViolation(t *testing.T, err error, what string) {
	t.Helper()
	var v *violation
	if !errors.As(err, &v) || !strings.Contains(v.what, what) {
		t.Errorf("got %v, want a violation with %q", err, what)
	}
}

func TestSecondHolderIsCaught(t *testing.T) {
	r := newRegister()
	if err := enter(r, 1, validLock(1)); err != nil {
		t.Fatal(err)
	}
	err := enter(r, 2, validLock(2))
	wantViolation(t, err, "two holders at once")
	wantViolation(t, err, "goroutine 1 ")
	wantViolation(t, err, "goroutine 2 ")
}

func TestNextHolderMayEnterAfterLeave(t *testing.T) {
	r := newRegister()
	for fence := range int64(100) {
		if err := enter(r, int(fence), validLock(fence+1)); err != nil {
			t.Fatal(err)
		}
		r.leave(holderID(0, 0, int(fence)))
	}
}

// A Lock holds until its release or its Until, whichever comes first.
func TestHolderWhoseLockIsOverIsNoSecondHolder(t *testing.T) {
	r := newRegister()
	if err := enter(r, 1, overLock(1)); err != nil {
		t.Fatal(err)
	}
	if err := enter(r, 2, validLock(2)); err != nil {
		t.Errorf("entering after a holder that expired: %v", err)
	}
	r.leave(holderID(0, 0, 1)) // late: it must not free the place of goroutine 2
	wantViolation(t, enter(r, 3, validLock(3)), "two holders at once")
}

func TestNewcomerWhoseLockIsOverIsNoSecondHolder(t *testing.T) {
	r := newRegister()
	if err := enter(r, 1, validLock(2)); err != nil {
		t.Fatal(err)
	}
	if err := enter(r, 2, overLock(1)); !errors.Is(err, errLost) {
		t.Errorf("got %v, want errLost", err)
	}
	// ... and it has not taken the place of the one inside.
	wantViolation(t, enter(r, 3, validLock(3)), "goroutine 1 ")
}

func TestFenceThatDoesNotRiseIsCaught(t *testing.T) {
	for _, fence := range []int64{6, 7} {
		r := newRegister()
		if err := enter(r, 1, validLock(7)); err != nil {
			t.Fatal(err)
		}
		r.leave(holderID(0, 0, 1))
		wantViolation(t, enter(r, 2, validLock(fence)), "the fence did not rise")
	}
	wantViolation(t, enter(newRegister(), 1, validLock(0)), "the fence did not rise")
}

func TestResetForgetsFencesAndHolders(t *testing.T) {
	r := newRegister()
	if err := enter(r, 1, validLock(7)); err != nil {
		t.Fatal(err)
	}
	r.reset()
	if err := enter(r, 2, validLock(1)); err != nil {
		t.Error(err)
	}
}

// A gap counts in every part that it touches, so that a part in which nobody entered does not look
// like one without a gap.
func TestGapsAreMeasuredByPart(t *testing.T) {
	r, start := newRegister(), time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	r.startGaps(start)
	for i, e := range []struct{ ms, part int }{{10, 0}, {15, 0}, {60, 0}, {61, 1}, {70, 1}} {
		if err := r.enter(1, validLock(int64(i+1)), at(e.ms), e.part); err != nil {
			t.Fatal(err)
		}
		r.leave(1)
	}
	gaps := r.endGaps(at(100), 3)
	if gaps[0] != 45*time.Millisecond || gaps[1] != 30*time.Millisecond || gaps[2] != 30*time.Millisecond {
		t.Errorf("gaps %v, want 45ms, 30ms and 30ms", gaps)
	}
	r.reset()
	r.startGaps(start)
	if gaps := r.endGaps(at(90), 3); gaps[0] != 90*time.Millisecond || gaps[1] != gaps[0] || gaps[2] != gaps[0] {
		t.Errorf("gaps %v without anybody, want 90ms each", gaps)
	}
}

// Two mappings of the file stand for two processes: each sees the holder and the fence of the other.
func TestSharedRegisterCatchesHoldersOfOtherProcesses(t *testing.T) {
	a, path, err := createShared()
	if err != nil {
		t.Skip(err)
	}
	b, err := openShared(path)
	os.Remove(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := enter(a, 1, validLock(5)); err != nil {
		t.Fatal(err)
	}
	wantViolation(t, enter(b, 2, validLock(6)), "two holders at once")
	b.leave(holderID(0, 0, 2))
	wantViolation(t, enter(a, 3, validLock(6)), "the fence did not rise")
}

func TestHolderNamesItself(t *testing.T) {
	if got := holderID(3, 2, 99_999).String(); got != "process 3 client 2 goroutine 99999" {
		t.Error(got)
	}
	if holderID(0, 0, 0) == 0 {
		t.Error("the first holder looks like nobody")
	}
}
