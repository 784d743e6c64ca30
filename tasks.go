package flightlock

import (
	"context"
	"sync"

	"github.com/flightlock/flightlock/internal/wait"
)

// tasks are goroutines beside the lock traffic, for which Close waits. The zero value is ready for
// use.
type tasks struct {
	wg sync.WaitGroup

	mu     sync.Mutex // guards what follows
	closed bool
	open   map[*context.CancelCauseFunc]struct{} // of contexts in use
}

// run starts f, unless close was called, and reports whether it did.
func (t *tasks) run(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.wg.Go(f)
	}
	return !t.closed
}

// context is parent, which close ends too, with ErrClosed as its cause. cancel releases its
// resources.
func (t *tasks) context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		cancel(ErrClosed)
		return ctx, func() {}
	}
	if t.open == nil {
		t.open = map[*context.CancelCauseFunc]struct{}{}
	}
	t.open[&cancel] = struct{}{}
	return ctx, func() {
		t.mu.Lock()
		delete(t.open, &cancel)
		t.mu.Unlock()
		cancel(nil)
	}
}

// close lets no more tasks begin, ends their contexts, and waits for them until ctx ends.
func (t *tasks) close(ctx context.Context) error {
	t.mu.Lock()
	t.closed = true
	for cancel := range t.open {
		(*cancel)(ErrClosed)
	}
	t.mu.Unlock()
	return wait.For(ctx, t.wg.Wait)
}
