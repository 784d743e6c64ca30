package main

import (
	"os"
	"syscall"
	"time"
)

// A guard sees to it that no process of CMD outlives the lock, as long as this process runs.
//
//	running -> ending (TERM was sent) -> killing (KILL was sent) -> over (no process is left)
//
// A lock that cannot be refreshed is valid until a known moment, and nobody else has it before. So the guard
// does not wait until it is lost: when a fifth of the ttl is left, it sends TERM, and when a tenth is left,
// KILL. The other tenth is for the processes to die, and for this one to be late. A lock that is lost before
// its time, since the nodes say so, leaves no time: KILL comes at once. (They say so only if somebody deleted
// the key, or they lost it.)
//
// CMD is not over when its first process is: what that leaves behind gets TERM, and KILL a tenth of the ttl
// later. The lock is refreshed until nobody is left.
type guard struct {
	lock lock
	over <-chan struct{} // closed when the lock is over
	ttl  time.Duration
	cmd  processes
}

// lock is what the guard looks at of a *flightlock.Lock.
type lock interface {
	Until() time.Time
	Err() error
}

// processes are those of CMD: a *group.
type processes interface {
	signal(os.Signal)
	exited() <-chan struct{} // closed when the first one has ended
	empty() bool             // once that has ended: whether all have
}

// pollEvery is how often the guard looks whether processes are left, of which it is not the parent.
const pollEvery = 5 * time.Millisecond

// lastFifth is what is left of a lock when TERM is due, if that happens while CMD runs.
func lastFifth(ttl time.Duration) time.Duration { return ttl / 5 }

// left is how long the lock is valid; 0 if it is over.
func (g *guard) left() time.Duration {
	if g.lock.Err() != nil {
		return 0
	}
	return max(0, time.Until(g.lock.Until()))
}

// watch returns when no process is left. lost is whether the lock was lost before, or would have been.
func (g *guard) watch() (lost bool) {
	exited, over := g.cmd.exited(), g.over
	var killAt time.Time // zero until TERM was sent
	for {
		if exited == nil && g.cmd.empty() {
			return lost
		}
		left := g.left()
		lost = lost || left == 0 || left <= lastFifth(g.ttl) && exited != nil
		if killAt.IsZero() && (lost || exited == nil) {
			g.cmd.signal(syscall.SIGTERM)
			killAt = time.Now().Add(g.ttl / 10)
		}
		wait := left - lastFifth(g.ttl)
		if !killAt.IsZero() {
			wait = min(left-g.ttl/10, time.Until(killAt)) // TERM may have been late
			if wait <= 0 {
				g.cmd.signal(syscall.SIGKILL)
			}
		}
		if exited == nil || wait <= 0 {
			wait = pollEvery
		}
		select {
		case <-exited:
			exited = nil
		case <-over:
			over = nil
		case <-time.After(wait):
		}
	}
}
