package coalesce

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A step ends after its timeout, whether the run's timer was set for an earlier step that was to
// take longer or less.
func TestStepsEndAfterTheirTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r steps
		defer r.cancel(nil)
		for _, timeouts := range [][]time.Duration{
			{time.Hour, time.Second, 3 * time.Second, 2 * time.Second, 10 * time.Second},
			{time.Second, time.Minute, time.Second},
			{0, time.Second},
		} {
			for i, timeout := range timeouts {
				began := time.Now()
				s := r.Begin(context.Background(), timeout)
				if deadline, ok := s.Deadline(); !ok || deadline.Sub(began) != timeout {
					t.Errorf("deadline in %v, want %v", deadline.Sub(began), timeout)
				}
				if i%2 == 0 && timeout != 0 && i < len(timeouts)-1 { // it ends by itself
					time.Sleep(timeout / 2)
					s.End(nil)
					if !errors.Is(s.Err(), context.Canceled) {
						t.Error(s.Err())
					}
					continue
				}
				<-s.Done()
				took := time.Since(began)
				if took != timeout || s.Err() != context.DeadlineExceeded || context.Cause(s) != context.DeadlineExceeded {
					t.Errorf("it took %v, want %v; %v", took, timeout, s.Err())
				}
			}
		}
		for _, never := range []time.Duration{-1, math.MaxInt64} {
			s := r.Begin(context.Background(), never)
			time.Sleep(1000 * time.Hour)
			if s.Err() != nil {
				t.Error(s.Err())
			}
			s.End(nil)
		}
	})
}

// The end of a step, its error and its cause are those of all contexts that are derived from it,
// and deriving one starts no goroutine.
func TestDerivedContextsEndWithTheStep(t *testing.T) {
	type key struct{}
	values := context.WithValue(context.Background(), key{}, 7)
	for name, c := range map[string]struct {
		end        func(r *steps, s *Step)
		err, cause error
	}{
		"End":            {func(_ *steps, s *Step) { s.End(nil) }, context.Canceled, context.Canceled},
		"End by a cause": {func(_ *steps, s *Step) { s.End(errTest) }, context.Canceled, errTest},
		"cancel":         {func(r *steps, _ *Step) { r.cancel(errTest) }, context.Canceled, errTest},
		"timeout": {func(*steps, *Step) { time.Sleep(time.Minute) },
			context.DeadlineExceeded, context.DeadlineExceeded},
		"End, and cancel": {func(r *steps, s *Step) { s.End(nil); r.cancel(errTest) }, context.Canceled, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var r steps
				defer r.cancel(nil)
				s := r.Begin(values, time.Minute)
				before := runtime.NumGoroutine()
				child, cancel := context.WithCancel(s)
				defer cancel()
				value := context.WithValue(child, "a", 1) //nolint:staticcheck,revive // a test's key
				grandchild, cancel := context.WithTimeout(value, time.Hour)
				defer cancel()
				var called, taken atomic.Bool
				context.AfterFunc(s, func() { called.Store(true) })
				if stop := context.AfterFunc(s, func() { taken.Store(true) }); !stop() || stop() {
					t.Error("stop")
				}
				if n := runtime.NumGoroutine(); n > before {
					t.Errorf("%d goroutines more", n-before)
				}
				if s.Err() != nil || grandchild.Err() != nil || s.Value(key{}) != 7 || grandchild.Value(key{}) != 7 {
					t.Error("it has ended, or has no values")
				}
				c.end(&r, s)
				synctest.Wait()
				for _, ctx := range []context.Context{s, child, grandchild} {
					<-ctx.Done()
					if ctx.Err() != c.err || context.Cause(ctx) != c.cause || ctx.Value(key{}) != 7 {
						t.Errorf("%v, cause %v; want %v, %v", ctx.Err(), context.Cause(ctx), c.err, c.cause)
					}
				}
				if !called.Load() || taken.Load() {
					t.Errorf("called %v; one that was taken back: %v", called.Load(), taken.Load())
				}
				late := make(chan struct{})
				if stop := context.AfterFunc(s, func() { close(late) }); stop() {
					t.Error("stopped after the end")
				}
				<-late
			})
		})
	}
}

// After the run's cancellation every step has ended before it begins.
func TestNoStepAfterTheCancellation(t *testing.T) {
	var r steps
	r.cancel(errTest)
	r.cancel(nil)
	s := r.Begin(context.Background(), time.Hour)
	<-s.Done()
	if s.Err() != context.Canceled || context.Cause(s) != errTest || r.Err() != errTest {
		t.Errorf("%v, %v, %v", s.Err(), context.Cause(s), r.Err())
	}
}
