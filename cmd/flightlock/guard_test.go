package main

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
)

// fakeLock is a lock whose refreshes end at some time, or that is lost then at once.
type fakeLock struct {
	ttl    time.Duration
	begun  time.Time
	outage time.Duration // when refreshes begin to fail; they come when half of the ttl is left. 0: never
	taken  time.Duration // when nodes say that it is lost; 0: never
}

func (l *fakeLock) Until() time.Time {
	age := time.Since(l.begun)
	if l.outage > 0 {
		age = min(age, l.outage)
	}
	return l.begun.Add(age.Truncate(l.ttl/2) + l.ttl)
}

func (l *fakeLock) Err() error {
	if l.taken > 0 && time.Since(l.begun) >= l.taken || time.Now().After(l.Until()) {
		return flightlock.ErrLockLost
	}
	return nil
}

// grantedLock was granted for 450 ms, and its first refreshes fail.
type grantedLock struct {
	until time.Time
	fail  int
}

func (l *grantedLock) Until() time.Time { return l.until }

func (l *grantedLock) Err() error {
	if time.Now().After(l.until) {
		return flightlock.ErrLockLost
	}
	return nil
}

func (l *grantedLock) Refresh(ctx context.Context) error {
	time.Sleep(100 * time.Millisecond)
	if l.Err() != nil {
		return l.Err()
	}
	if l.fail--; l.fail >= 0 {
		return flightlock.ErrUnavailable
	}
	l.until = time.Now().Add(10 * time.Second)
	return nil
}

// A lock that another process's release has granted is refreshed before CMD runs, more than once if need be.
func TestAGrantIsRefreshedBeforeCMDRuns(t *testing.T) {
	for fail, want := range []error{nil, nil, nil, nil, flightlock.ErrLockLost} {
		synctest.Test(t, func(t *testing.T) {
			l := &grantedLock{until: time.Now().Add(450 * time.Millisecond), fail: fail}
			if err := refreshed(t.Context(), l, 10*time.Second); !errors.Is(err, want) {
				t.Errorf("after %d refreshes that failed: %v, want %v", fail, err, want)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		l := &grantedLock{until: time.Now().Add(450 * time.Millisecond), fail: 1}
		if err := refreshed(ctx, l, 10*time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("after a signal: %v", err)
		}
	})
}

// fakeCmd is a CMD whose first process ends by itself after its span, and by TERM if it does not ignore that.
// leaves is a second process, which ends by KILL only.
type fakeCmd struct {
	begun         time.Time
	done          chan struct{}
	ignores       bool
	leaves        bool
	terminated    time.Duration // when TERM came; 0: never
	killed, ended time.Duration // when KILL came, and the first process ended
}

func (c *fakeCmd) end() {
	if c.ended == 0 {
		c.ended = time.Since(c.begun)
		close(c.done)
	}
}

func (c *fakeCmd) signal(s os.Signal) {
	switch s {
	case syscall.SIGTERM:
		c.terminated = time.Since(c.begun)
		if !c.ignores {
			c.end()
		}
	case syscall.SIGKILL:
		c.killed = time.Since(c.begun)
		c.leaves = false
		c.end()
	}
}

func (c *fakeCmd) exited() <-chan struct{} { return c.done }
func (c *fakeCmd) empty() bool             { return !c.leaves }

// No process of CMD outlives the lock: TERM when a fifth of the ttl is left, KILL when a tenth is; and
// nothing happens to one whose lock is refreshed. After CMD's first process, those that it left behind end
// while the lock is held.
func TestNoProcessOutlivesTheLock(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		lock          fakeLock
		span          time.Duration // of CMD; 0: none
		ignores       bool          // TERM
		leaves        bool
		lost          bool
		killed, ended time.Duration // 0: no KILL
		terminated    time.Duration
		late          time.Duration // when the guard begins to look
	}{
		"ends by itself":          {span: 95 * s, ended: 95 * s},
		"leaves processes behind": {span: 95 * s, leaves: true, ended: 95 * s, terminated: 95 * s, killed: 96 * s},
		"outage, and obeys": {lock: fakeLock{outage: 97 * s}, lost: true, terminated: 103 * s,
			ended: 103 * s},
		"outage, and ignores TERM": {lock: fakeLock{outage: 97 * s}, ignores: true, lost: true, terminated: 103 * s,
			killed: 104 * s, ended: 104 * s},
		"outage, and leaves behind": {lock: fakeLock{outage: 97 * s}, leaves: true, lost: true, terminated: 103 * s,
			ended: 103 * s, killed: 104 * s},
		"ends by itself in an outage": {lock: fakeLock{outage: 97 * s}, span: 102 * s, ended: 102 * s},
		"leaves behind in an outage": {lock: fakeLock{outage: 97 * s}, span: 102 * s, leaves: true, ended: 102 * s,
			terminated: 102 * s, killed: 103 * s},
		"is taken away": {lock: fakeLock{taken: 97 * s}, ignores: true, lost: true, terminated: 97 * s,
			killed: 97 * s,
			ended:  97 * s},
		"leaves behind, and is taken away": {lock: fakeLock{taken: 97 * s}, span: 97*s - s/2, leaves: true,
			lost:  true,
			ended: 97*s - s/2, terminated: 97*s - s/2, killed: 97 * s},
		"TERM comes late": {lock: fakeLock{outage: s}, ignores: true, lost: true, late: 8*s + s/2,
			terminated: 8*s + s/2,
			killed:     9 * s, ended: 9 * s},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, now := &c.lock, time.Now()
				l.ttl, l.begun = 10*s, now
				cmd := &fakeCmd{begun: now, done: make(chan struct{}), ignores: c.ignores, leaves: c.leaves}
				over := make(chan struct{})
				if l.taken > 0 {
					time.AfterFunc(l.taken, func() { close(over) })
				}
				if c.span > 0 {
					time.AfterFunc(c.span, cmd.end)
				}
				g := guard{lock: l, over: over, ttl: l.ttl, cmd: cmd}
				time.Sleep(c.late)
				lost := g.watch()
				near := func(a, b time.Duration) bool { return (a - b).Abs() <= pollEvery }
				if lost != c.lost || !near(cmd.ended, c.ended) || !near(cmd.terminated, c.terminated) ||
					!near(cmd.killed, c.killed) {
					t.Errorf("lost %v, ended %v, TERM %v, KILL %v; want %+v", lost, cmd.ended, cmd.terminated, cmd.killed, c)
				}
				if left := time.Until(l.Until()); l.taken == 0 && left < l.ttl/10-pollEvery {
					t.Errorf("only %v were left", left)
				}
			})
		})
	}
}
