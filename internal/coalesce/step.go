package coalesce

import (
	"context"
	"sync"
	"time"
)

// steps are the successive contexts of a run.
//
// A chain of context.WithTimeout would do the same, but needs a timer, two closures and an entry in
// the parent's map for each step. Here the steps of a run share one timer, and a Step whose Done is
// not called is one allocation.
type steps struct {
	mu    sync.Mutex // guards what follows; taken after the group's
	step  *Step      // the one that has not ended; nil if there is none
	timer *time.Timer
	due   time.Time // when timer fires; zero: it is not set
	cause error     // of the run's cancellation; nil: not canceled
}

// Step is the ctx of one step of a run. It ends after its timeout, when the run is canceled, or by
// End. Its values are those of another ctx. Contexts derived from it need no goroutine, because it
// has a method AfterFunc: see context.AfterFunc.
type Step struct {
	values   context.Context
	run      *steps
	deadline time.Time // zero: none

	// guarded by run.mu
	done  chan struct{}        // closed when the Step ends; nil until Done is called
	err   error                // nil until the Step ends
	ended context.Context      // canceled with the cause; nil if the Step has no cause of its own
	funcs map[*func()]struct{} // called when the Step ends
}

// Begin begins the next step, with the values of that ctx. The previous step must have ended. A
// negative timeout means none.
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

// soon is the longest time for which a run's timer is first set, even if its first step has more
// time. Most runs are over by then, and have set their timer once.
const soon = time.Second

// armLocked sets the timer to call expire after that time or earlier. A timer that was set for an
// earlier step and fires sooner is left as it is.
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

// expire ends the current step if its timeout has passed.
func (r *steps) expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, now := r.step, time.Now()
	if now.Before(r.due) { // the timer was set again while this call was starting
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

// cancel ends the run's current step, and every later one as it begins. Only the first cause
// counts. A run that is over is canceled with nil.
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

// Err returns the cause of the run's cancellation, or nil.
func (r *steps) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cause
}

// End ends the step, unless it has ended. context.Cause returns cause, or context.Canceled if that
// is nil.
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

// canceledBy returns a ctx that was canceled with cause.
func canceledBy(values context.Context, cause error) context.Context {
	ctx, cancel := context.WithCancelCause(values)
	cancel(cause)
	return ctx
}

// Deadline returns when the timeout ends.
func (s *Step) Deadline() (time.Time, bool) { return s.deadline, !s.deadline.IsZero() }

// Done returns a channel that is closed when the step ends.
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

// Err returns context.DeadlineExceeded after the timeout, context.Canceled after any other end.
func (s *Step) Err() error {
	s.run.mu.Lock()
	defer s.run.mu.Unlock()
	return s.err
}

// Value returns the value for key. If the step ended with a cause of its own, context.Cause finds it
// here too: it reads the cause by a key of package context, which only a ctx of that package has.
func (s *Step) Value(key any) any {
	s.run.mu.Lock()
	values := s.ended
	s.run.mu.Unlock()
	if values == nil {
		values = s.values
	}
	return values.Value(key)
}

// AfterFunc calls f on a new goroutine when the step has ended. stop prevents the call, and reports
// whether it did.
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
