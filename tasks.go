package flightlock

import (
	"context"

	"github.com/flightlock/flightlock/internal/group"
)

// tasks are a Client's goroutines beside the lock traffic. Close waits for them, and ends the
// contexts that they use.
type tasks struct {
	group.Group
	closed context.Context // ended by end
	cancel context.CancelFunc
}

func (t *tasks) init() { t.closed, t.cancel = context.WithCancel(context.Background()) }

// context is parent, which end also ends, with ErrClosed as its cause. cancel frees it.
func (t *tasks) context(parent context.Context) (_ context.Context, cancel context.CancelFunc) {
	ctx, stopped := context.WithCancelCause(parent)
	stop := context.AfterFunc(t.closed, func() { stopped(ErrClosed) })
	if t.closed.Err() != nil { // not only soon
		stopped(ErrClosed)
	}
	return ctx, func() { stop(); stopped(nil) }
}

// end refuses further tasks, ends their contexts, and waits for them until ctx ends.
func (t *tasks) end(ctx context.Context) error {
	t.Close()
	t.cancel()
	return t.Wait(ctx)
}
