package flightlock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// An innerError is an error of a Load or Lookup that matches an error of contexts: its own
// deadline has passed, or something that it called was canceled. That ctx is not the caller's,
// whose errors.Is must not take one for the other. Everything else that it matches, it matches
// here.
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

// lookupErr is Lookup's error, for its own caller or all of a run.
func lookupErr(key string, err error) error {
	return fmt.Errorf("flightlock: fetch %q: Lookup: %w", key, notCtx(err))
}

// leftWaiting is the error of a caller whose ctx has ended while it waited for a run. lock is what is known of the
// lock, if the run waited for that.
func leftWaiting(key string, ctxErr, lock error) error { return &waitError{key, ctxErr, lock} }

// waitFor is Wait, with the error of a caller whose ctx has ended.
func (r *fetchRun[V]) waitFor(ctx context.Context) (v V, err error, left bool) {
	if v, err, left = r.Wait(ctx); left {
		err = leftWaiting(r.Key(), ctx.Err(), err)
	}
	return v, err, left
}

type waitError struct {
	key       string
	ctx, lock error
}

func (e *waitError) Error() string {
	text := fmt.Sprintf("flightlock: fetch %q: %v", e.key, e.ctx)
	if e.lock != nil { // mostly, that another process has it
		text += fmt.Sprintf(": waiting for its lock: %v", within(e.lock))
	}
	return text
}

// Unwrap gives the error of the ctx alone: a caller that tests for ErrNotAcquired has not asked for a lock.
func (e *waitError) Unwrap() error { return e.ctx }

// KeyErrors is the error that LookupMany, LoadMany, StoreMany and StoreManyStamped return if they fail
// for some of their keys: the error of each of these keys. It may be wrapped.
type KeyErrors map[string]error

// Error is one line, with one of the errors.
func (e KeyErrors) Error() string { return "flightlock: " + someOf(e) }

// Unwrap returns all errors, in the order of their keys.
func (e KeyErrors) Unwrap() []error { return inOrder(e) }

// ManyError is the error of FetchMany if some of the keys have no value; the values of the other keys
// are returned with it. It matches what any of its errors matches.
type ManyError struct {
	Errors map[string]error // by key; each is what Fetch would have returned
}

// Error is one line, with one of the errors.
func (e *ManyError) Error() string { return "flightlock: fetch: " + someOf(e.Errors) }

// Unwrap returns all errors, in the order of their keys.
func (e *ManyError) Unwrap() []error { return inOrder(e.Errors) }

func inOrder(errs map[string]error) []error {
	list := make([]error, 0, len(errs))
	for _, key := range slices.Sorted(maps.Keys(errs)) {
		list = append(list, errs[key])
	}
	return list
}

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
	return fmt.Sprintf("%s; %.100q: %s", failed, first, oneLine(within(errs[first])))
}

// errorOf is the error of key in err, which may be that of all keys or a KeyErrors.
func errorOf(err error, key string) error {
	if err == nil {
		return nil
	}
	var some KeyErrors
	if errors.As(err, &some) {
		return some[key]
	}
	return err
}

// PanicError is the error of callers of Fetch and FetchMany if a function of the Source panicked, or called
// runtime.Goexit, on a goroutine of the Fetcher.
type PanicError struct {
	Op     string // "Lookup", "Load", "LoadMany", "Store" or "StoreMany"; "rdb" for a hook of a rediscache.Cache's client
	Value  any    // the value of the panic; nil for Goexit
	Goexit bool
	Stack  []byte // of its goroutine
}

// Error returns the value on one line. Stack has its origin.
func (e *PanicError) Error() string {
	if e.Goexit {
		return fmt.Sprintf("flightlock: %s called runtime.Goexit", e.Op)
	}
	return fmt.Sprintf("flightlock: %s panicked: %s", e.Op, oneLine(e.Value))
}

// Unwrap returns the value, if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// HeldError is returned to callers that miss a key soon after its load failed, instead of loading
// again: see [FetchOptions.ErrorHold].
type HeldError struct {
	Err   error     // the error of the failed load
	Until time.Time // the next Fetch after it loads again
}

// Error is one line.
func (e *HeldError) Error() string {
	return fmt.Sprintf("flightlock: a load that failed is not repeated before %s: %s", e.Until.Format("15:04:05.000"),
		oneLine(e.Err))
}

// Unwrap returns Err.
func (e *HeldError) Unwrap() error { return e.Err }

// oneLine is what there is to say of v, for logs that take a line for an entry.
func oneLine(v any) string { return strings.ReplaceAll(fmt.Sprint(v), "\n", "; ") }
