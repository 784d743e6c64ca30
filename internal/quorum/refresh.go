package quorum

import (
	"errors"
	"math"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// How a lease is refreshed, and how a refresh finds that it was lost.

// Refresh extends the lease to the full ttl, reserves more tokens, and calls done exactly once.
// The caller must not start a second refresh before that: blocks reserved by two at once could
// overlap. A failure with reason NotHeld means that the lease is lost; any other leaves it as it
// was. Grant.Until is the deadline by this refresh; an earlier one may have given a later.
//
// A refresh is one round, whose outcome does not wait for the tokens: if the nodes do not agree
// on a block, the grant has none but says Reserved. The next refresh that is confirmed brings
// that block, and reserves no other. (Two rounds as one refresh lost the lease when the old
// deadline passed during the second, and took twice as long as the caller had allowed.)
//
// With namesRival, the grant names the contender that most nodes name, other than this lease's
// own.
func (l *Lease) Refresh(
	ttl time.Duration, more int64, timeout time.Duration, namesRival bool, done func(Grant, *Failure),
) {
	start := clock.Now()
	l.mu.Lock()
	f := l.notHeldLocked(start, l.until, errExpired)
	until, top, confirms := l.until, l.top, l.reserved > 0
	if more = min(more, math.MaxInt32); confirms { // reserved has no room for more
		more = 0
	}
	if f == nil {
		l.scratch = nil // as Settle does
	}
	l.mu.Unlock()
	if f != nil {
		done(Grant{}, f)
		return
	}
	ref := refresh{more: more, confirms: confirms, before: until, after: start.Add(l.q.Validity(ttl)),
		done: done}
	// A node raises its counter as it renews. A Cluster that has the key and its counter on
	// different masters while it moves their slot renews without a counter: a floor of 0 counts
	// that as a vote. This round is about the ttl; tokens depend on the counters alone.
	r := l.newRound("refresh", node.Renewed, 0, func(r *round) { l.refreshed(r, ref) })
	// not at the same instant at which the holder notices that the lease has expired
	end := until.Add(fixedDrift)
	if timeout < l.q.NodeTimeout {
		end = clock.Earlier(end, start.Add(timeout))
	}
	r.endAt(end)
	for i := range l.entries {
		l.entries[i].Refresh(r, ttl, top, more, until, l.rivalsOf(namesRival))
	}
}

// rivalsOf is the contender whose rivals a refresh reads, "" if it reads none.
func (l *Lease) rivalsOf(namesRival bool) string {
	switch {
	case !namesRival:
		return ""
	case l.target.Contender() == "":
		return l.target.Owner()
	}
	return l.target.Contender()
}

var (
	errNotHeld    = errors.New("it was lost or released before")
	errExpired    = errors.New("its validity was over")
	errLateAnswer = errors.New("the refresh was not confirmed before the validity was over")
)

// notHeldLocked returns the failure of a lease that was lost or released, or that is lost now
// because its deadline has passed; nil if it is held.
func (l *Lease) notHeldLocked(now, until time.Time, late error) *Failure {
	why := errNotHeld
	if l.phase == held {
		if !clock.Passed(now, until) {
			return nil
		}
		l.phase, why = lost, late
	}
	return &Failure{Op: "refresh", Reason: NotHeld, Need: l.q.need, Err: why}
}

// refresh is one call of Refresh.
type refresh struct {
	more          int64     // how many tokens it reserves
	confirms      bool      // instead, it makes those ours that an earlier refresh reserved
	before, after time.Time // the deadline: as it was, and as it is once a majority has confirmed
	done          func(Grant, *Failure)
}

// notRenewedLocked returns why a decided round of a refresh failed, nil if it did not. If others'
// votes are the reason, or answers after the old deadline, the lease is lost.
func (l *Lease) notRenewedLocked(r *round, until time.Time) *Failure {
	if f := l.notHeldLocked(clock.Now(), until, errLateAnswer); f != nil {
		said := r.failureLocked()
		f.Got, f.Nodes = said.Got, said.Nodes
		return f
	}
	if r.won {
		return nil
	}
	f := r.failureLocked()
	if f.Reason == NotHeld {
		l.phase = lost
	}
	return f
}

// refreshed continues after the decided round of a refresh.
func (l *Lease) refreshed(r *round, ref refresh) {
	l.mu.Lock()
	if f := l.notRenewedLocked(r, ref.before); f != nil {
		l.mu.Unlock()
		if f.Reason != NotHeld {
			l.q.probeNow(f)
		} else {
			l.q.quarantine.suspect()
		}
		ref.done(Grant{}, f)
		return
	}
	if ref.after.After(l.until) {
		l.until = ref.after
	}
	g := Grant{Until: ref.after, First: 1, Rival: r.rivalLocked()}
	switch top, agree := r.topCounterLocked(); {
	case ref.confirms && r.confirmedLocked(l.top):
		g.First, g.Last = l.top-int64(l.reserved)+1, l.top
		l.reserved = 0
	case ref.more == 0, top == 0: // no tokens; reserved ones stay so for the next refresh
	case agree:
		g.First, g.Last = top-ref.more+1, top
		l.top = top
	default:
		g.Reserved = true
		l.top, l.reserved = top, int32(ref.more)
	}
	missing := r.missingLocked()
	l.mu.Unlock()

	for _, i := range missing {
		l.repair(i)
	}
	ref.done(g, nil)
}

// probeNow has the nodes probed that have not answered a refresh: the next one is to find those that are
// back.
func (q *Quorum) probeNow(f *Failure) {
	for i := range f.Nodes {
		if f.Nodes[i].Reply.Kind == node.Failed {
			q.Nodes[i].ProbeNow()
		}
	}
}

// repair restores the key and its counter on a node that has lost them, until the lease's deadline.
// It is no vote: a lease that counted repairs could become valid again after it was lost.
func (l *Lease) repair(i int) {
	l.mu.Lock()
	left, until, top, ok := clock.Left(clock.Now(), l.until), l.until, l.top, l.phase == held
	l.mu.Unlock()
	if ok && left >= time.Millisecond {
		l.entries[i].Repair(left, top, until)
	}
}
