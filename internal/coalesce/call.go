package coalesce

import (
	"context"
	"runtime/debug"
)

// Call is a call of code that may block, panic or call Goexit, on a goroutine of its own: whoever waits for
// it may stop at any time, and ignore what it returns.
type Call[T any] struct {
	done     chan struct{} // closed when it is over; what follows is written before
	v        T
	err      error
	panicked *Panic
}

// Panic reports that a function panicked or called Goexit.
type Panic struct {
	Value  any // the value of the panic; nil for Goexit
	Goexit bool
	Stack  []byte
}

// Start begins a call of f on a goroutine that goes on by start, which is a Group's Go.
func Start[T any](start func(func()), f func() (T, error)) *Call[T] {
	c := &Call[T]{done: make(chan struct{})}
	start(func() {
		returned := false
		defer func() {
			if !returned {
				c.panicked = &Panic{Value: recover(), Stack: debug.Stack()}
				c.panicked.Goexit = c.panicked.Value == nil
			}
			close(c.done)
		}()
		c.v, c.err = f()
		returned = true
	})
	return c
}

// Wait waits until the call is over, or ctx has ended. It reports which.
func (c *Call[T]) Wait(ctx context.Context) (over bool) {
	select {
	case <-c.done:
		return true
	default:
	}
	select {
	case <-c.done:
		return true
	case <-ctx.Done():
		return false
	}
}

// Result is what a call that is over has returned. p is nil unless it panicked, or called Goexit.
func (c *Call[T]) Result() (v T, err error, p *Panic) { return c.v, c.err, c.panicked }
