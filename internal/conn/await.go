package conn

import (
	"context"
	"fmt"
)

// A Limit limits how many calls of one kind may hang at once: it has a token for each.
type Limit chan struct{}

// NewLimit makes a Limit of n calls.
func NewLimit(n int) Limit { return make(Limit, n) }

// Await returns the result of call, or ctx's error as soon as ctx has ended. In that case call may
// continue, and its late result, if it has no error, is passed to discard (unless that is nil).
//
// go-redis does not always return when a ctx ends: a socket is read for as long as the timeouts of
// the client allow, which the user may have set; a TLS dial ignores its ctx, and so may the user's
// dialer; a Sentinel-managed client queries its Sentinels under a mutex. Where that could block a
// goroutine that others wait for, the call is made on a separate goroutine. Nothing waits for that
// goroutine: it ends by the timeouts of the client, or when the dialer returns. If call panics, that is its
// error.
func Await[T any](ctx context.Context, l Limit, call func() (T, error), discard func(T)) (T, error) {
	select {
	case l <- struct{}{}:
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
	return AwaitOn(ctx, func(f func()) {
		go func() { // ends with call
			defer func() { <-l }()
			f()
		}()
	}, call, discard, ctx.Err)
}

// AwaitOn is Await with the goroutine that run starts, and the error that late returns once ctx has
// ended.
func AwaitOn[T any](ctx context.Context, run func(func()), call func() (T, error), discard func(T),
	late func() error) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result)
	run(func() {
		var v T
		err := Guard(func() (err error) {
			v, err = call()
			return err
		})
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

// Guard returns the error of call, or one for its panic. On its way to a server, go-redis calls code of the
// user's: a dialer, OnConnect, a provider of credentials, hooks. On a goroutine of ours, where the user
// cannot recover it, their panic would end the process.
func Guard(call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("a Dialer, a hook or another function of the client has panicked: %v", p)
		}
	}()
	return call()
}
