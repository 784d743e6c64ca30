// Package wait waits for what does not look at a ctx itself.
package wait

import "context"

// For calls f and returns when f does, with nil, or with ctx's error when that has ended before.
// Then f continues, on a goroutine that ends with it.
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
