package flightlock

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/redis/go-redis/v9"
)

// An innerError is an error of a Load or Lookup that matches an error of contexts: its own deadline has
// passed, or something that it called was cancelled. That ctx is not the caller's, whose errors.Is
// must not take one for the other. Everything else that it matches, it matches here.
type innerError struct{ err error }

func (e *innerError) Error() string { return e.err.Error() }

func (e *innerError) Is(target error) bool {
	return target != context.DeadlineExceeded && target != context.Canceled && errors.Is(e.err, target)
}

func (e *innerError) As(target any) bool { return errors.As(e.err, target) }

// ofCtx reports whether err matches an error of contexts.
func ofCtx(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// ranOut reports whether err is a timeout: of a ctx, or of the cache's client. A ctx that was
// canceled counts as one.
func ranOut(err error) bool {
	var timeout net.Error
	return ofCtx(err) || errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, redis.ErrPoolTimeout)
}

// notCtx is err, which does not.
func notCtx(err error) error {
	if ofCtx(err) {
		return &innerError{err}
	}
	return err
}

// loadErr is Load's error for all its callers: as it is, unless it looks as if their ctx had ended.
func loadErr(key string, err error) error {
	if ofCtx(err) {
		return fmt.Errorf("flightlock: fetch %q: Load: %w", key, notCtx(err))
	}
	return err
}

// lookupErr is Lookup's error, for its own caller or all of a flight.
func lookupErr(key string, err error) error {
	return fmt.Errorf("flightlock: fetch %q: Lookup: %w", key, notCtx(err))
}
