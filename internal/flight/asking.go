package flight

import (
	"context"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// unknown is what a wait has besides if its pace is code that we do not know. That may block, or
// panic, so it is never called where anybody else waits for it, least of all with a flight's mu
// held: the flight asks the caller, which has it called, and goes on. Until the answer comes the
// flight polls by Config.Pace if the caller is in front.
//
// What is asked is when failures would follow one that the caller has met: the next one, for the
// caller in front, whose attempts these are; as far as one can see, for a caller behind, so that it
// has one timer and not one wake-up for each failure that it would have met.
//
// The strategy is called on a goroutine beside the caller's, one at a time, which ends with that
// call: a caller whose strategy hangs still gets the lock when it comes, and leaves when its ctx
// ends. To call it on the caller's own goroutine would be simpler. Then a lock could be granted to
// a caller that is not there to take it, and would be kept from all others for a whole ttl.
type unknown struct {
	questions chan question // to the caller; has room for the one that there is at a time

	// guarded by f.mu
	asking bool      // there is a question without an answer
	polls  int       // failures since then, which do not count
	at     time.Time // when failure number h.failures was
	met    bool      // by an attempt
	ahead  int       // behind others: how many there will be before h.due
	last   bool      // it gives up at the next attempt that fails
}

// question is about a strategy: what comes after a failure.
type question struct {
	failure int       // its number
	at      time.Time // when it was
	until   time.Time // what to find out: the first failure after that
	ahead   bool      // until is in the future: the caller is behind others
}

// verdict is the answer.
type verdict struct {
	failure  int       // the last failure up to question.until,
	at       time.Time // when it is,
	due      time.Time // and when the next one is, if ok; else it gives up there
	ok       bool
	panicked any // instead, what the strategy panicked with
}

// inquireLocked asks about what comes after failure number h.failures, which was at u.at. No
// question is open.
func (h *Hold) inquireLocked(until time.Time, ahead bool) {
	u := h.unknown
	u.asking, u.polls = true, 0
	u.questions <- question{h.failures, u.at, until, ahead}
}

// metLocked counts a failure that h, in front, has met just now; attempted says that it is an
// attempt's. Without an answer about the one before it does not count.
func (h *Hold) metLocked(now time.Time, attempted bool) {
	u := h.unknown
	if !u.asking {
		h.failures = more(h.failures, 1)
		u.at, u.met = now, attempted
		h.inquireLocked(now, false)
	}
	h.pollLocked(now)
}

// pollLocked sets when the next attempt is, by Config.Pace.
func (h *Hold) pollLocked(now time.Time) {
	h.polls = more(h.polls, 1)
	d, _ := h.f.g.cfg.Pace.Next(h.polls)
	h.due = now.Add(max(d, minDelay))
}

// queueLocked asks how long h, which is behind others, would go on after a failure at that time,
// its next.
func (h *Hold) queueLocked(at time.Time) {
	h.failures = more(h.failures, 1)
	h.at, h.met = at, false
	h.inquireLocked(at.Add(maxWait), true)
}

// frontLocked asks where h is in its strategy, now that it is in front.
func (h *Hold) frontLocked(now time.Time) {
	if !h.asking { // else the answer will be asked for again
		h.met = false
		h.inquireLocked(now, false)
	}
	h.pollLocked(now)
}

// told takes the answer to q, which is not about a panic.
func (f *flight) told(h *Hold, q question, v verdict) {
	f.mu.Lock()
	defer f.unlock()
	if h.state != waiting {
		return
	}
	h.asking = false
	now, paces := clock.Now(), h == f.head && f.lease == nil
	switch {
	case q.ahead && paces: // it has come to the front meanwhile
		h.frontLocked(now)
	case q.ahead:
		f.boundLocked(h, v, now)
	case v.ok:
		h.failures, h.at, h.due = v.failure, v.at, v.due
		if f.pausingLocked() && paces {
			f.restLocked()
		}
	default:
		f.lastLocked(h, now)
	}
}

// boundLocked sets the timer of h, which is behind others.
func (f *flight) boundLocked(h *Hold, v verdict, now time.Time) {
	at := v.at
	if h.ends = !v.ok; v.ok {
		at, h.due, h.ahead = v.due, v.due, v.failure
	}
	if h.ends && !at.After(now) {
		f.turnAwayLocked(h, f.outcomeLocked())
		return
	}
	h.patience = clock.AfterFunc(at.Sub(now), func() { f.giveUp(h) })
}

// lastLocked follows that h, which is or was in front, gives up at the failure that it was asked
// about. If that was no attempt's, one is made first: see countLocked.
func (f *flight) lastLocked(h *Hold, now time.Time) {
	h.last = true
	switch {
	case !f.pausingLocked() || h != f.head: // by the attempt that is under way
	case h.met:
		f.turnAwayLocked(h, f.outcomeLocked())
		if f.pausingLocked() {
			f.paceLocked(now)
		}
	default:
		f.askLocked(h)
	}
}

// waitAsking waits for h's answer, and asks its strategy meanwhile.
func (g *Group) waitAsking(ctx context.Context, f *flight, h *Hold) error {
	pace, questions := h.pace, h.questions
	var q question
	var verdicts chan verdict
	for {
		select { // an outcome that is there already counts, even if ctx has ended too
		case <-h.ready:
			if !h.sent || f.goes(h, g.mayBlock(ctx)) {
				return g.answered(h)
			}
		default:
		}
		select {
		case <-h.ready:
			if !h.sent || f.goes(h, g.mayBlock(ctx)) {
				return g.answered(h)
			}
		case <-ctx.Done():
			return f.quit(h, ctx.Err())
		case q = <-questions:
			verdicts = make(chan verdict, 1)
			go q.judge(pace, verdicts)
		case v := <-verdicts:
			if v.panicked != nil {
				_ = f.quit(h, context.Canceled) // a lock that came in this instant goes on to others
				panic(v.panicked)
			}
			f.told(h, q, v)
		}
	}
}

// judge asks the strategy. One that calls runtime.Goexit gives up. A panic is one when its failure
// has come.
func (q question) judge(pace Pace, to chan<- verdict) {
	v := verdict{failure: q.failure, at: q.at}
	defer func() {
		if p := recover(); p != nil && q.ahead && v.failure > q.failure {
			v = verdict{failure: v.failure - 1, due: v.at, ok: true}
		} else if p != nil {
			v = verdict{panicked: p}
		}
		to <- v
	}()
	for step := 1; ; step++ {
		d, ok := pace.Next(v.failure)
		if !ok {
			return
		}
		next := v.at.Add(max(d, minDelay))
		if next.After(q.until) || step == maxSteps {
			v.due, v.ok = next, true
			return
		}
		v.failure, v.at = more(v.failure, 1), next
	}
}
