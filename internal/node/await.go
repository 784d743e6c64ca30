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
	type result struct {
		v   T
		err error
	}
	var none T
	select {
	case h <- struct{}{}:
	case <-ctx.Done():
		return none, ctx.Err()
	}
	done := make(chan result)
	go func() { // ends with call
		defer func() { <-h }()
		v, err := call()
		select {
		case done <- result{v, err}:
		case <-ctx.Done():
			if err == nil && discard != nil {
				discard(v)
			}
		}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}
