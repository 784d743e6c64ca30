package node

import "context"

// go-redis does not always come back when a ctx ends: a socket is read for as long as the timeouts of
// the client say, which may be somebody else's; a TLS dial does not look at its ctx, nor a dialer of the
// user's; a Sentinel-managed client asks its Sentinels under a mutex. Where that could hold up a goroutine
// that others wait for, it is left to a goroutine of its own. Close does not wait for those: they end by
// the timeouts of the client, or with the dialer that hangs.

// hangable bounds how many calls of one kind hang at once: it has a place for each.
type hangable chan struct{}

func newHangable(most int) hangable { return make(hangable, most) }

// await gives what call gives, or the ctx's error as soon as that has ended. Then call may go on, and what
// it gives late without an error goes to discard, unless that is nil.
func await[T any](ctx context.Context, h hangable, call func() (T, error), discard func(T)) (T, error) {
	select {
	case h <- struct{}{}:
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
	return resultOf(ctx, func(f func()) {
		go func() { // ends with call
			defer func() { <-h }()
			f()
		}()
	}, call, discard, ctx.Err)
}

// resultOf has run run call, and gives what that gives, or late's error as soon as ctx has ended. Then call
// may go on, and what it gives without an error goes to discard, unless that is nil.
func resultOf[T any](ctx context.Context, run func(func()), call func() (T, error), discard func(T), late func() error) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result)
	run(func() {
		v, err := call()
		select {
		case done <- result{v, err}:
		case <-ctx.Done():
			if err == nil && discard != nil {
				discard(v)
			}
		}
	})
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		var none T
		return none, late()
	}
}
