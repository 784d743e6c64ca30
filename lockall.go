package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
)

// LockSet is several locks, acquired by LockAll. It is safe for concurrent use.
type LockSet struct {
	locks []*Lock // in the order of their keys, each once; while LockAll runs, nil is one that it does not hold
}

// LockAll acquires all keys, or none. Keys that are free take one round trip. Those that others hold are
// waited for one after the other, as by SingleFlightLock, and the locks held meanwhile are refreshed.
// LockAlls never deadlock with each other, in whatever order they name the keys. Each lock returned is valid
// for two thirds of the ttl or more (see Lock.Until for the exception).
//
// retry and ctx bound the wait for all keys together. A key that is named twice counts once. For keys that
// ctx carries (Lock.Context) the locks are nested; they must come before the other keys, in the order of
// their bytes, or the error is ErrInvalid, as for no keys. Other errors are those of SingleFlightLock, for
// one of the keys.
func (c *Client) LockAll(ctx context.Context, keys []string, ttl time.Duration,
	retry RetryStrategy) (*LockSet, error) {
	if c.flights == nil {
		return nil, errZeroClient
	}
	retry = orDefault(retry)
	err := errors.Join(c.checkTTL(ttl), checkStrategy(retry))
	if len(keys) == 0 {
		err = invalid("keys", "empty", "at least one key is needed")
	}
	for _, key := range keys {
		err = cmp.Or(err, c.checkKey(key))
	}
	if err != nil {
		return nil, err
	}
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	if err := c.checkOrder(ctx, keys); err != nil {
		return nil, err
	}
	// No two LockAlls wait for each other: who waits for a key holds only keys that come before it in the order
	// of their bytes. What it holds beyond that comes from attempts that do not wait, and is released first.
	//
	//	attempt at all keys that it does not hold, at once -> all held
	//	  -> the first one that is in use: release what comes after it, wait for it in its queue -> attempt ...
	//
	// To wait for each key in turn from the beginning was rejected: ten free keys would take ten round trips.
	began, patience := time.Now(), time.Duration(-1)
	s, done := &LockSet{make([]*Lock, len(keys))}, false
	// without recover: after a panic of the user's code, or its Goexit, nothing stays locked either
	defer func() {
		if !done {
			s.release(0)
		}
	}()
	for {
		first, err := s.attempt(ctx, c, keys, ttl)
		if first < 0 {
			if done = s.Err() == nil; done {
				return s, nil
			}
			continue // one that was held has been lost meanwhile
		}
		if patience < 0 {
			patience = flight.Patience(retry)
		}
		left := patience - time.Since(began)
		switch {
		case ctx.Err() != nil, errors.Is(err, ErrClosed), patience != flight.Forever && left <= 0:
			return nil, err
		case patience != flight.Forever:
			retry = Within(retry, max(left, time.Millisecond))
		}
		s.release(first + 1)
		if s.locks[first], err = s.wait(ctx, c, first, keys[first], ttl, retry); err != nil {
			return nil, err
		}
	}
}

// checkOrder refuses to wait for one of the sorted keys while ctx carries a lock of a later one of them: a
// LockAll that has the former may wait for that. Locks of other keys in ctx are the caller's affair.
func (c *Client) checkOrder(ctx context.Context, keys []string) error {
	first := slices.IndexFunc(keys, func(key string) bool { return c.carriedLock(ctx, key) == nil })
	for _, key := range keys[first+1:] {
		if first >= 0 && c.carriedLock(ctx, key) != nil {
			return invalid("keys", fmt.Sprintf("%q, with a ctx that carries a lock of %q", keys[first], key),
				"who holds a key may wait for later ones only: lock them all at once, or in order")
		}
	}
	return nil
}

// attempt makes one attempt at each key that is not held, or was lost, all at once, and returns the first one
// that is in use, with the error; -1 if there is none.
func (s *LockSet) attempt(ctx context.Context, c *Client, keys []string,
	ttl time.Duration) (first int, err error) {
	first = -1
	ends := make([]func() (*Lock, error), len(keys))
	defer func() { // also of those that had begun when LingerFor, which is the user's, panicked
		for i, end := range ends {
			if end == nil {
				continue
			}
			var failed error
			if s.locks[i], failed = end(); failed != nil && first < 0 {
				first, err = i, failed
			}
		}
	}()
	for i, key := range keys {
		if s.locks[i] != nil && s.locks[i].Err() == nil {
			continue
		}
		l, nested, err := c.arrive(ctx, key, c.retains)
		if nested || err != nil {
			ends[i] = func() (*Lock, error) { return l, err }
		} else {
			ends[i] = c.begin(ctx, key, l, ttl, false)
		}
	}
	return first, err
}

// wait waits for a key in its queue, while the first n locks are refreshed.
func (s *LockSet) wait(ctx context.Context, c *Client, n int, key string, ttl time.Duration,
	retry RetryStrategy) (*Lock, error) {
	defer s.keep(n)()
	return c.SingleFlightLock(ctx, key, ttl, retry)
}

// release releases what is held from the i-th key on.
func (s *LockSet) release(i int) {
	for ; i < len(s.locks); i++ {
		if s.locks[i] != nil {
			s.locks[i].ReleaseAsync()
			s.locks[i] = nil
		}
	}
}

// keep has the first n locks refreshed until over is called. Nested locks do that, because the locks
// themselves are the caller's, who may call AutoRefresh once. One that is lost is found by the next attempt.
func (s *LockSet) keep(n int) (over func()) {
	var nested []*Lock
	for _, l := range s.locks[:n] {
		if in := l.nested(); in != nil {
			interval := l.c.refreshInterval(in.ticket().TTL()) / 3 * 2 // leaveToOthers adds up to half of that
			policy := RefreshPolicy{Interval: max(interval, minInterval)}
			_, _ = in.autoRefresh(context.Background(), policy, in.ticket())
			nested = append(nested, in)
		}
	}
	return func() {
		for _, l := range nested {
			l.ReleaseAsync()
		}
	}
}

// DoAll runs fn under all keys, as Do does under one. fn's ctx is the Context of all locks. If one of them
// was lost, the error matches ErrLockLost.
func (c *Client) DoAll(ctx context.Context, keys []string, ttl time.Duration, retry RetryStrategy,
	fn func(ctx context.Context, locks *LockSet) error) (err error) {
	if fn == nil {
		return invalid("fn", "nil", "it is the function to run")
	}
	if c.flights != nil && c.checkTTL(ttl) == nil { // otherwise LockAll reports it
		if _, err := c.refreshPolicy(RefreshPolicy{}, ttl.Truncate(time.Millisecond)); err != nil {
			return err
		}
	}
	s, err := c.LockAll(ctx, keys, ttl, retry)
	if err != nil {
		return err
	}
	inner := s.Context(ctx)
	defer func() { // without recover: a panic keeps its value and its stack
		before := make([]error, len(s.locks)) // fn may have released some itself
		for i, l := range s.locks {
			before[i] = l.Err()
		}
		released := s.releaseAll(ctx)
		for i, l := range s.locks {
			if lost := l.lossBy(before[i], released[i]); lost != nil {
				err = lostDuring(ctx, inner, err, lost)
				return
			}
		}
	}()
	for _, l := range s.locks {
		if _, err := l.autoRefresh(ctx, l.policyOfDo(ttl), l.ticket()); err != nil {
			return err
		}
	}
	return fn(inner, s)
}

// Lock returns the lock of key, or nil if it has none.
func (s *LockSet) Lock(key string) *Lock {
	for _, l := range s.locks {
		if l.Key() == key {
			return l
		}
	}
	return nil
}

// Err returns nil while all locks are held, and otherwise Lock.Err of the first one that is not.
func (s *LockSet) Err() error {
	for _, l := range s.locks {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Context returns a ctx derived from parent that ends when one of the locks does, and carries all of them.
func (s *LockSet) Context(parent context.Context) context.Context {
	for _, l := range s.locks {
		parent = l.Context(parent)
	}
	return parent
}

// AutoRefresh refreshes all locks, as Lock.AutoRefresh does, and returns the errors of all. Locks remain held
// if it fails.
func (s *LockSet) AutoRefresh(ctx context.Context, p RefreshPolicy) error {
	errs := make([]error, len(s.locks))
	for i, l := range s.locks {
		errs[i] = l.AutoRefresh(ctx, p)
	}
	return errors.Join(errs...)
}

// Release releases all locks at once, as Lock.Release does, and returns the errors of all.
func (s *LockSet) Release(ctx context.Context) error { return errors.Join(s.releaseAll(ctx)...) }

func (s *LockSet) releaseAll(ctx context.Context) []error {
	return concurrently(len(s.locks), func(i int) error { return s.locks[i].Release(ctx) })
}
