package fetch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/redis/go-redis/v9"
)

// ErrNotFound is the error of a Get, and of a load of Each, for what does not exist.
var ErrNotFound = errors.New("flightlock: not found")

// KeyErrors is the error of some keys, of a Loader or a Store. It may be wrapped.
type KeyErrors map[string]error

// Error is one line, with one of the errors.
func (e KeyErrors) Error() string { return "flightlock: " + someOf(e) }

// Unwrap returns all errors, in the order of their keys.
func (e KeyErrors) Unwrap() []error {
	list := make([]error, 0, len(e))
	for _, key := range slices.Sorted(maps.Keys(e)) {
		list = append(list, e[key])
	}
	return list
}

// ManyError is the error of GetMany if keys failed. It matches what its errors do.
type ManyError struct {
	Errors map[string]error // by key; each is what Get would have returned
}

// Error is one line, with one of the errors.
func (e *ManyError) Error() string { return "flightlock: fetch: " + someOf(e.Errors) }

// Unwrap returns all errors, in the order of their keys.
func (e *ManyError) Unwrap() []error { return KeyErrors(e.Errors).Unwrap() }

// someOf reports how many keys have failed, and the error of the first one.
func someOf(errs map[string]error) string {
	if len(errs) == 0 {
		return "no key has failed"
	}
	first := slices.Min(slices.Collect(maps.Keys(errs)))
	failed := "1 key has failed"
	if len(errs) > 1 {
		failed = fmt.Sprintf("%d keys have failed", len(errs))
	}
	return fmt.Sprintf("%s; %.100q: %s", failed, first, errtext.OneLine(within(errs[first])))
}

// keyed is the error of a call for keys as errorOf reads it: a KeyErrors, or everybody's. A KeyErrors of
// other keys, as of a load that has another Fetcher or Store in it, and one that was panicked with, are
// everybody's.
func keyed(err error, keys []string) error {
	var some KeyErrors
	var p *flightlock.PanicError
	if !errors.As(err, &some) || errors.As(err, &p) {
		return err
	}
	if len(some) > 0 && !slices.ContainsFunc(keys, func(key string) bool { return some[key] != nil }) {
		return err
	}
	return some
}

// errorOf is the error of key in err, which is of keyed.
func errorOf(err error, key string) error {
	if some, ok := err.(KeyErrors); ok { //nolint:errorlint // it, and not what is in it
		return some[key]
	}
	return err
}

// HeldError is the error of misses soon after a failed load: see [Options.ErrorHold].
type HeldError struct {
	Err   error     // the error of the failed load
	Until time.Time // the next Get after it loads again
}

// Error is one line.
func (e *HeldError) Error() string {
	return fmt.Sprintf("flightlock: a load that failed is not repeated before %s: %s",
		e.Until.Format("15:04:05.000"), errtext.OneLine(e.Err))
}

// Unwrap returns Err.
func (e *HeldError) Unwrap() error { return e.Err }

// An innerError is an error of a load or a Store that matches an error of contexts: its own deadline has
// passed, or something that it called was canceled. That ctx is not the caller's, whose errors.Is must not
// take one for the other. Everything else that it matches, it matches here.
type innerError struct {
	op  string // lookup, or ""
	err error
}

const lookup = "lookup: " // of the Store, so that it is not known whether there is a value

func (e *innerError) Error() string { return e.op + e.err.Error() }

func (e *innerError) Is(target error) bool {
	return target != context.DeadlineExceeded && target != context.Canceled && errors.Is(e.err, target)
}

func (e *innerError) As(target any) bool { return errors.As(e.err, target) }

// ofCtx reports whether err matches an error of contexts.
func ofCtx(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// timedOut reports whether err is a timeout: of a ctx, which may have been canceled, or of the store's
// client.
func timedOut(err error) bool {
	var timeout net.Error
	return ofCtx(err) || errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, redis.ErrPoolTimeout)
}

// notCtx is err, which does not match an error of contexts.
func notCtx(err error) error {
	if ofCtx(err) {
		return &innerError{"", err}
	}
	return err
}

// isLookup reports whether err is the Store's.
func isLookup(err error) bool {
	var inner *innerError
	return errors.As(err, &inner) && inner.op == lookup
}

// errClosed is the error of a call for many keys.
var errClosed = fmt.Errorf("flightlock: fetch: the Fetcher is %w", flightlock.ErrClosed)

func keyClosed(key string) error {
	return fmt.Errorf("flightlock: fetch %q: the Fetcher is %w", key, flightlock.ErrClosed)
}

// invalid is an ErrInvalid that names a field or argument, its value, and the limit.
func invalid(field string, value any, limit string) error {
	return fmt.Errorf("flightlock: %w: %s is %v, but %s", flightlock.ErrInvalid, field, value, limit)
}

func within(err error) error { return errtext.Within("flightlock", err) }
