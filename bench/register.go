package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
)

// register is the check: the one place that every holder of the contended key enters after it was
// granted the lock and leaves before it releases. It finds two holders at once and a fence that
// does not rise from one holder to the next.
//
// The library promises mutual exclusion within validity: a Lock holds from its grant until its
// release or its Until, whichever comes first. So somebody inside whose Until has passed is no
// second holder, and neither is a newcomer whose own Lock is over (Err is not nil).
//
// It is a few words of memory, not a Go struct, for with -procs it lies in a file that all
// processes have mapped. A check through Redis was rejected: it would cost more than the lock, and
// its round trips would hide short overlaps. Times are wall-clock nanoseconds, the only clock that
// processes share in the standard library; a Lock's Until ends with the wall clock too. (A wall
// clock that is set back during the run can accuse a Lock that had expired.)
//
// As long as the lock works, nobody ever waits for the latch.
type register struct{ words []atomic.Uint64 }

// The words of a register. All but the latch are guarded by it.
const (
	regLatch  = iota              // 1 while somebody is at the words below
	regHolder                     // who is inside; 0 for nobody
	regUntil                      // when the Lock of the one inside ends
	regHeld                       // its fence
	regFence                      // highest fence that has entered
	regLast                       // when somebody last entered, or the measuring began; 0: gaps are not measured
	regPart                       // in which part of the phase that was
	regGap                        // longest gap between two entries, a word for each part of the phase
	regValue  = regGap + maxParts // 1 when the value of (a) is in a sharedCache; not guarded
	regWords  = regValue + 1
)

// maxParts is the most parts that a phase is cut into: before, during, after.
const maxParts = 3

func newRegister() *register { return &register{words: make([]atomic.Uint64, regWords)} }

// errLost is enter's answer to a holder whose lock was over before it could enter.
var errLost = errors.New("the lock was lost before it was used")

// errStuck means that a process died at the register's words.
var errStuck = errors.New("the check's register has been locked for 10s: a process died or was stopped in it")

// violation is a promise of the library that was seen broken.
type violation struct{ what string }

func (v *violation) Error() string { return v.what }

// enter notes that who holds l since now, in the given part of the phase (negative: outside of
// all). After a violation who is inside nevertheless, so that the check continues.
func (r *register) enter(who holder, l heldLock, now time.Time, part int) error {
	if !r.lock() {
		return errStuck
	}
	defer r.unlock()
	err := r.judge(who, l)
	// The order matters: the words show the one inside as inside and valid. If our own Lock is
	// valid only now, after they were read, then both were valid in between.
	if err != nil && l.Err() != nil {
		return errLost
	}
	r.noteGap(now, part)
	r.words[regHolder].Store(uint64(who))
	r.words[regUntil].Store(uint64(l.Until().UnixNano()))
	fence := uint64(l.Fence())
	r.words[regHeld].Store(fence)
	r.words[regFence].Store(max(fence, r.words[regFence].Load()))
	return err
}

// judge compares a newcomer with the register. Caller holds the latch.
func (r *register) judge(who holder, l heldLock) error {
	fence, last := l.Fence(), int64(r.words[regFence].Load())
	if in := holder(r.words[regHolder].Load()); in != 0 {
		left := time.Duration(int64(r.words[regUntil].Load()) - time.Now().UnixNano())
		if left > 0 {
			return &violation{fmt.Sprintf("two holders at once: "+
				"%s got the lock (fence %d) while %s was inside (fence %d, valid for another %v)",
				who, fence, in, r.words[regHeld].Load(), left)}
		}
	}
	if fence <= last {
		return &violation{fmt.Sprintf("the fence did not rise: %s got fence %d after a holder with fence %d", who,
			fence, last)}
	}
	return nil
}

// leave notes that who is no longer inside. It must come before Release: afterwards the next one may be in.
func (r *register) leave(who holder) {
	if !r.lock() {
		return
	}
	if holder(r.words[regHolder].Load()) == who {
		r.words[regHolder].Store(0)
	}
	r.unlock()
}

// reset forgets everything: the next job has another key, and fences of two keys cannot be compared.
func (r *register) reset() {
	for i := range r.words {
		r.words[i].Store(0)
	}
}

// startGaps begins to measure how long the key goes without a new holder.
func (r *register) startGaps(now time.Time) {
	if r.lock() {
		r.words[regLast].Store(uint64(now.UnixNano()))
		r.words[regPart].Store(0)
		r.unlock()
	}
}

// endGaps counts the gap that was open when the last part ended, and returns the longest gap of
// each part. A gap counts in full in every part that it touches.
func (r *register) endGaps(now time.Time, parts int) []time.Duration {
	gaps := make([]time.Duration, parts)
	if !r.lock() {
		return gaps
	}
	r.noteGap(now, parts-1)
	for i := range gaps {
		gaps[i] = time.Duration(r.words[regGap+i].Load())
	}
	r.unlock()
	return gaps
}

// noteGap is called with the latch held.
func (r *register) noteGap(now time.Time, part int) {
	last, t := int64(r.words[regLast].Load()), now.UnixNano()
	if last == 0 || part < 0 || t <= last {
		return
	}
	for p := int(r.words[regPart].Load()); p <= part; p++ {
		gap := &r.words[regGap+p]
		gap.Store(max(gap.Load(), uint64(t-last)))
	}
	r.words[regLast].Store(uint64(t))
	r.words[regPart].Store(uint64(part))
}

// lock takes the latch. It spins, for a sync.Mutex does not work between processes, and gives up
// after 10 seconds.
func (r *register) lock() bool {
	if r.words[regLatch].CompareAndSwap(0, 1) {
		return true
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
		if r.words[regLatch].CompareAndSwap(0, 1) {
			return true
		}
	}
	return false
}

func (r *register) unlock() { r.words[regLatch].Store(0) }

// holder names one goroutine of one client of one process, in a word; 0 is nobody.
type holder uint64

func holderID(proc, client, goroutine int) holder {
	return holder(uint64(proc+1)<<48 | uint64(client)<<32 | uint64(goroutine))
}

func (h holder) String() string {
	return fmt.Sprintf("process %d client %d goroutine %d", h>>48-1, h>>32&0xffff, h&0xffffffff)
}
