package coalesce

import (
	"context"
	"sync"
	"time"
)

// steps are the contexts of a run, one after the other.
//
// A chain of context.WithTimeout did the same, at a timer, two closures and an entry in the
// parent's map for each of them. Here the steps of a run share one timer, and a Step that nobody
// watches is one allocation.
type steps struct {
	mu    sync.Mutex // guards what follows; taken after the group's
	step  *Step      // the one that has not ended, if there is one
	timer *time.Timer
	due   time.Time // when timer fires; zero: it is not set
	cause error     // of the run's cancellation
}

// Step is the ctx of one step of a run. It ends after its timeout, with the run's cancellation, or
// by End. Its values are those of another ctx. Contexts that are derived from it need no goroutine,
// because it has a method AfterFunc: see context.AfterFunc.
type Step struct {
	values   context.Context
	run      *steps
	deadline time.Time // zero: none

	// guarded by run.mu
	done  chan struct{}        // closed when the Step ends; nil until somebody asks
	err   error                // set when it has ended
	ended context.Context      // has ended with the cause; nil if there is none
	funcs map[*func()]struct{} // to be called then
}

// Begin makes the next step, with values' values. There is no other that has not ended. It has no
// timeout if that is below 0.
func (r *steps) Begin(values context.Context, timeout time.Duration) *Step {
	s := &Step{values: values, run: r}
	if timeout >= 0 {
		s.deadline = time.Now().Add(timeout)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.cause != nil:
		s.endLocked(context.Canceled, r.cause)
	case timeout == 0:
		s.endLocked(context.DeadlineExceeded, nil)
	default:
		r.step = s
		r.armLocked(timeout)
	}
	return s
}

// soon is when a run's timer fires at first, even if its first step has more time. Most runs are
// over by then, and have set their timer once.
const soon = time.Second

// armLocked has expire called after that time or before. A timer that was set for an earlier
// step, and fires sooner, stays.
func (r *steps) armLocked(after time.Duration) {
	deadline := r.step.deadline
	switch {
	case deadline.IsZero(), !r.due.IsZero() && r.due.Before(deadline):
	case r.timer == nil:
		after = min(after, soon)
		r.due = time.Now().Add(after)
		r.timer = time.AfterFunc(after, r.expire)
	default:
		r.due = deadline
		r.timer.Reset(after)
	}
}

// expire ends the step that is under way, if its time is over.
func (r *steps) expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, now := r.step, time.Now()
	if now.Before(r.due) { // it was set again in this instant
		return
	}
	r.due = time.Time{}
	switch {
	case s == nil, s.deadline.IsZero():
	case now.Before(s.deadline):
		r.armLocked(s.deadline.Sub(now))
	default:
		s.endLocked(context.DeadlineExceeded, nil)
	}
}

// cancel ends the run's step, and all later ones at once. The first cause counts; nil is that of
// a run that is over.
func (r *steps) cancel(cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cause == nil {
		cause = context.Canceled
	}
	if r.cause == nil {
		r.cause = cause
	}
	if r.step != nil {
		r.step.endLocked(context.Canceled, cause)
	}
	if r.timer != nil {
		r.timer.Stop()
	}
}

// Err is the cause of the run's cancellation, nil as long as there is none.
func (r *steps) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cause
}

// End ends the step, unless it has ended. cause is what context.Cause gives; nil stands for
// context.Canceled.
func (s *Step) End(cause error) {
	s.run.mu.Lock()
	defer s.run.mu.Unlock()
	s.endLocked(context.Canceled, cause)
}

func (s *Step) endLocked(err, cause error) {
	if s.run.step == s {
		s.run.step = nil
	}
	if s.err != nil {
		return
	}
	s.err = err
	if cause != nil {
		s.ended = canceledBy(s.values, cause)
	}
	if s.done != nil {
		close(s.done)
	}
	for f := range s.funcs {
		go (*f)()
	}
	s.funcs = nil
}

// canceledBy is a ctx that has ended with cause.
func canceledBy(values context.Context, cause error) context.Context {
	ctx, cancel := context.WithCancelCause(values)
	cancel(cause)
	return ctx
}

// Deadline is when the timeout is over.
func (s *Step) Deadline() (time.Time, bool) { return s.deadline, !s.deadline.IsZero() }

// Done is closed when the step ends.
func (s *Step) Done() <-chan struct{} {
	s.run.mu.Lock()
	defer s.run.mu.Unlock()
	if s.done == nil {
		s.done = make(chan struct{})
		if s.err != nil {
			close(s.done)
		}
	}
	return s.done
}

// Err is context.DeadlineExceeded after the timeout, context.Canceled after any other end.
func (s *Step) Err() error {
	s.run.mu.Lock()
	defer s.run.mu.Unlock()
	return s.err
}

// Value gives the values. When the step has ended with a cause of its own, package context finds
// that, too: it asks for a value of a ctx that it has made itself.
func (s *Step) Value(key any) any {
	s.run.mu.Lock()
	values := s.ended
	s.run.mu.Unlock()
	if values == nil {
		values = s.values
	}
	return values.Value(key)
}

// AfterFunc has f called, on a goroutine of its own, when the step has ended. stop takes that
// back; it reports whether it was in time.
func (s *Step) AfterFunc(f func()) (stop func() bool) {
	s.run.mu.Lock()
	defer s.run.mu.Unlock()
	if s.err != nil {
		go f()
		return func() bool { return false }
	}
	if s.funcs == nil {
		s.funcs = map[*func()]struct{}{}
	}
	at := &f
	s.funcs[at] = struct{}{}
	return func() bool {
		s.run.mu.Lock()
		defer s.run.mu.Unlock()
		_, waits := s.funcs[at]
		delete(s.funcs, at)
		return waits
	}
}
