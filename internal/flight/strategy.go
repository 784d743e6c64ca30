package flight

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Pace is a retry strategy: how long to wait after the attempt-th failure, and whether
// to try again. Its code may be anybody's, so it runs on its caller's goroutine, with no mutex
// held.
type Pace interface {
	Next(attempt int) (delay time.Duration, ok bool)
}

// Traits are what a Pace says of itself, if it has a method of that name.
type Traits uint8

// The traits.
const (
	Endless  Traits = 1 << iota // it never gives up
	FailFast                    // its caller gives up when too few nodes can be reached
	Quick                       // Next returns at once and does not panic
)

// TraitsOf gives those of p.
func TraitsOf(p Pace) Traits {
	if p, says := p.(interface{ Traits() Traits }); says {
		return p.Traits()
	}
	return 0
}

// WithinOf gives how long after its call began p gives up at the latest, if it has a method Within; 0: p
// alone decides.
func WithinOf(p Pace) time.Duration {
	if p, says := p.(interface{ Within() time.Duration }); says {
		return p.Within()
	}
	return 0
}

// Forever is a wait without an end.
const Forever = time.Duration(math.MaxInt64)

// Patience is how long a call with p waits at the latest, by its delays and its Within; Forever, if it never
// gives up. It calls p's Next. Of the first thousand delays each counts, and then one of some, which stands
// for those up to the next that is asked for: a thousandth of their number, so that a long strategy costs no
// more than some calls. One that has more than sixteen million is taken to be endless.
func Patience(p Pace) time.Duration {
	within := cmp.Or(WithinOf(p), Forever)
	if TraitsOf(p)&Endless != 0 {
		return within
	}
	sum := time.Duration(0)
	for n := 1; n <= 1<<24 && sum < within; {
		delay, more := p.Next(n)
		if !more {
			return sum
		}
		step := max(1, n/1000)
		if delay = min(max(delay, minDelay), maxDelay); delay > (Forever-sum)/time.Duration(step) {
			return within
		}
		sum += delay * time.Duration(step)
		n += step
	}
	return within
}

// plan is when a waiter makes attempts, by its strategy, and when it gives up: the strategy is asked for
// maxAsked delays when its caller arrives, and for as many again when these are over. So it bounds the wait
// of callers behind others, which make no attempt, and nobody has to call code of the user's when an attempt
// has failed.
//
// The delays count from the arrival; the time that attempts of its own take does not count. A strategy that
// never gives up is not asked before the first one: nothing has to be known of it until then.
//
// It was rejected to ask after each failure: a waiter has to know when it will have given up, so the answers
// had to be predicted, and those that a strategy gave later were others.
type plan struct {
	pace    Pace
	until   time.Time       // when it gives up, whatever pace says; zero: pace alone decides
	asked   int             // about how many failures pace was asked
	nextTry time.Time       // when the next attempt is, by the strategy; if it has passed, the last one was
	delays  []time.Duration // from nextTry to the next attempt, and so on, in reverse order
	ended   bool            // after these pace gives up; else it is to be asked further
	tried   bool            // its waiter makes the attempts
}

const (
	maxAsked = 64
	minDelay = time.Millisecond // keeps a strategy that returns nothing from spinning
	maxDelay = time.Duration(1 << 55)
)

// begin is for a caller that has just arrived.
func (p *plan) begin(ctx context.Context, pace Pace, endless bool) {
	p.pace = pace
	if d := WithinOf(pace); d > 0 {
		p.until = clock.Now().Add(d)
	}
	if !endless {
		p.ask(ctx)
	}
}

// ask asks the strategy for more delays, after those that there were, unless ctx ends. They count from now,
// if it took so long.
func (p *plan) ask(ctx context.Context) {
	p.nextTry, p.delays = p.end(), p.delays[:0]
	for len(p.delays) < maxAsked && !p.ended && ctx.Err() == nil {
		p.asked = min(p.asked, math.MaxInt-1) + 1
		d, ok := p.pace.Next(p.asked)
		if ok {
			p.delays = slices.Grow(p.delays, maxAsked-len(p.delays)) // its waiter is used again
			p.delays = append(p.delays, min(max(d, minDelay), maxDelay))
		}
		p.ended = !ok
	}
	slices.Reverse(p.delays)
	if len(p.delays) > 0 || p.nextTry.IsZero() { // else the last attempt has been made
		p.nextTry = clock.Later(p.nextTry, clock.Now())
	}
}

// askFurther is ask when all delays are over.
func (p *plan) askFurther(ctx context.Context) {
	p.ask(ctx)
	p.step()
}

// gaveUp reports whether there is nothing to be asked any more.
func (p *plan) gaveUp(now time.Time) bool {
	return p.ended || !p.until.IsZero() && !now.Before(p.until)
}

// step goes on to the next attempt, if there is one.
func (p *plan) step() {
	if last := len(p.delays) - 1; last >= 0 {
		p.nextTry = p.inTime(p.nextTry.Add(p.delays[last]))
		p.delays = p.delays[:last]
	}
}

// skip goes on to the last attempt that is not after t.
func (p *plan) skip(t time.Time) {
	for last := len(p.delays) - 1; last >= 0 && !p.nextTry.Add(p.delays[last]).After(t); last-- {
		p.step()
	}
}

// failed goes on to the attempt that follows one that began then, and failed at that time; unless that one
// came before it was due by the strategy. If none follows, nextTry is not after at. It may be called again.
func (p *plan) failed(began, at time.Time, endless bool) {
	switch {
	case p.nextTry.After(at):
		return
	case endless:
		p.nextTry = at
	case p.tried:
		if p.skip(began); len(p.delays) > 0 {
			p.nextTry = p.inTime(p.nextTry.Add(at.Sub(began)))
		}
	default:
		p.skip(at)
	}
	if p.until.IsZero() || at.Before(p.until) {
		p.step()
	}
}

// end is when the plan is over: then the strategy has given up, or is asked further.
func (p *plan) end() time.Time {
	end := p.nextTry
	for _, d := range p.delays {
		end = end.Add(d)
	}
	return p.inTime(end)
}

// inTime is t, or when the strategy gives up if that is before.
func (p *plan) inTime(t time.Time) time.Time {
	if p.until.IsZero() {
		return t
	}
	return clock.Earlier(t, p.until)
}

// What follows from a plan.

// behindLocked ends t's wait if its strategy would have given up by now, and else has it woken when that will
// be so. One that makes the attempts is not bounded by time: its last attempt decides.
func (f *flight) behindLocked(t *Ticket) step {
	w := t.waiter
	if w.isEndless() || f.cur == nil && f.driverLocked() == t {
		return stay
	}
	now := clock.Now()
	w.plan.tried = false
	for !now.Before(w.plan.end()) {
		switch {
		case w.plan.gaveUp(now):
			f.turnAwayLocked(t, f.failed(f.outcomeLocked()))
			return stay
		case w.traits&Quick == 0:
			return f.enterUserCodeLocked(t, ask)
		}
		w.plan.askFurther(context.Background())
	}
	w.setGiveUpTimer(f, t)
	return stay
}

// dueLocked is what t, the driver, has to do while the flight is idle: make an attempt, or ask its strategy
// further. If there is nothing, the alarm is set for when there will be; if its strategy has given up, t is
// refused.
//
// A strategy gives up after an attempt that has failed. The key may have been held by a client that does not
// notify, so there is such an attempt at the end of the plan, whatever was known before.
func (f *flight) dueLocked(t *Ticket) step {
	now, w, b := clock.Now(), t.waiter, f.backoff
	if !now.Before(f.nextAttempt) {
		return attempt
	}
	p := &w.plan
	p.failed(f.g.epoch.Add(time.Duration(f.attempted)), b.failedAt, w.isEndless())
	for !p.nextTry.After(b.failedAt) || !w.isEndless() && !now.Before(p.end()) {
		switch {
		case !p.gaveUp(now) && w.traits&Quick == 0:
			return ask
		case !p.gaveUp(now):
			p.askFurther(context.Background())
		case p.nextTry.After(b.failedAt) && w.repeats <= 0:
			return attempt
		default:
			return f.endOfPlanLocked(t, now)
		}
	}
	f.contendLocked()
	if w.repeats <= 0 {
		f.nextAttempt = f.nextAttemptLocked(t)
	}
	next := f.nextAttempt
	if !w.isEndless() {
		next = clock.Earlier(next, p.end())
	}
	f.armLocked(next)
	return stay
}

// endOfPlanLocked is what t has to do, whose strategy gives up after an attempt that has failed. If that left
// open whether somebody holds the key, the attempt is repeated; else t is refused.
//
// If the votes were split, and all gave up, nobody would have the key. Of those that split them one makes
// the next attempt at once, the foremost by the answers of the nodes, and usually wins, because the others
// have undone theirs by then. They, and those that had no vote, come half a round trip later at least: then
// the foremost has its votes. And not much more than a round trip later, in case it has not: it may release
// the key that soon. Before that they look at the answers that have come meanwhile: an attempt fails as
// soon as others have half of the nodes, and the next answer may be that one of them has a majority.
//
// An attempt whose connection has ended before the answer came is repeated at once, one time, by another
// owner (S2). Its own owner may have the key: its release goes before the next attempt, and is owed.
func (f *flight) endOfPlanLocked(t *Ticket, now time.Time) step {
	w, b := t.waiter, f.backoff
	p, undecided := &w.plan, b.last != nil
	if undecided && !p.nextTry.After(b.failedAt) {
		var pause time.Duration
		if pause, undecided = w.pause(b.last); undecided {
			w.repeats++
			if p.nextTry = b.failedAt.Add(pause); now.Before(p.nextTry) {
				f.armLocked(p.nextTry)
				return stay
			}
		}
	}
	if undecided {
		if b.last = b.last.Now(); b.last.Undecided() || b.last.Lost {
			f.nextAttempt = time.Time{}
			return attempt
		}
	}
	f.turnAwayLocked(t, f.failed(f.outcomeLocked()))
	return stay
}

// paceLocked finds out what the driver has to do after a failure, or because another waiter is the driver
// now, and wakes it for that.
func (f *flight) paceLocked() {
	if t := f.driverLocked(); t != nil && f.phase == idle && f.dueLocked(t) != stay {
		t.wakeLocked()
	}
}

// setGiveUpTimer has t, whose waiter w is, woken at the end of its plan.
func (w *waiter) setGiveUpTimer(f *flight, t *Ticket) {
	wait := max(1, w.plan.end().Sub(clock.Now())) // one that is due already would run here, in a synctest bubble
	if w.giveUpTimer == nil {
		w.giveUpTimer = clock.AfterFunc(wait, func() { f.wake(t) })
	} else {
		w.giveUpTimer.Reset(wait)
	}
}

// pause is how long w waits before it repeats an attempt that has failed as last says, if it does: see
// endOfPlanLocked. A lease that was recalled is released after half a round trip if its process needs no time
// for that.
func (w *waiter) pause(last *quorum.Failure) (pause time.Duration, repeats bool) {
	n := w.repeats
	if w.lost {
		n-- // that repeat counts for itself
	}
	switch {
	case n < 0:
		return 0, false
	case last.Lost && !w.lost:
		w.lost = true
		return 0, true
	case last.Retained && n < maxRecalls:
		return last.Took/4<<n + recallPause<<(2*n), true
	case !last.Split || n >= maxRepeats:
		return 0, false
	case !last.Foremost:
		pause = last.Took/2 + jitter.N(last.Took/2+1)
	}
	return pause, true
}

const (
	maxRepeats  = 8                      // of an attempt that leaves open whether somebody holds the key
	maxRecalls  = 2                      // of these, because the lease may only be retained
	recallPause = 125 * time.Microsecond // before the first of the latter, besides a quarter of a round trip
)
