// Package group runs goroutines that end with their owner.
package group

import (
	"context"
	"sync"
)

// Group runs goroutines until it is closed. The zero value is an open Group. It is safe for
// concurrent use.
//
// sync.WaitGroup alone does not do: Go must not be called concurrently with a Wait that may
// return, so somebody has to decide, under a mutex, which goroutines still begin.
type Group struct {
	wg sync.WaitGroup

	mu     sync.Mutex // guards closed, and calls of wg.Go
	closed bool
}

// Go runs f on a goroutine. It reports false, and does not run f, once the Group is closed.
func (g *Group) Go(f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.wg.Go(f)
	}
	return !g.closed
}

// Close makes Go refuse. It does not wait.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Wait waits until all goroutines of a closed Group have ended, or until ctx ends: then it returns
// ctx's error.
func (g *Group) Wait(ctx context.Context) error { return For(ctx, g.wg.Wait) }

// For calls f, which does not look at a ctx itself, and returns when f does, with nil, or with ctx's error
// when that has ended before. Then f continues, on a goroutine that ends with it.
func For(ctx context.Context, f func()) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
