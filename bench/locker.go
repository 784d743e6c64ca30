package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
)

// This file is the bench's view of the library, and the seam where its tests put a broken lock in
// the library's place.

// locker is one client under test.
type locker interface {
	// lock is SingleFlightLock with the default retry strategy, or every pollEvery if the client polls.
	lock(ctx context.Context, key string, ttl time.Duration) (heldLock, error)
	// fetcher makes a fetch.Fetcher whose leases have the given ttl.
	fetcher(s fetch.Store[bool], load fetch.Loader[bool], ttl time.Duration) (fetcher, error)
	stats() flightlock.Stats
	close(ctx context.Context) error
}

// fetcher is what the bench needs of a *fetch.Fetcher.
type fetcher interface {
	Get(ctx context.Context, key string) (bool, error)
	Close(ctx context.Context) error
}

// heldLock is what the bench needs of a *flightlock.Lock.
type heldLock interface {
	Fence() int64
	Until() time.Time
	Err() error
	Release(ctx context.Context) error
}

// opener makes one client over the nodes at urls.
type opener func(urls []string, opts flightlock.Options) (locker, error)

type realClient struct {
	c     *flightlock.Client
	retry flightlock.RetryStrategy // nil: the default
}

// Who polls asks every 10 ms, as lock clients without notices do, and does not give up before the run ends.
const (
	pollEvery = 10 * time.Millisecond
	pollTimes = int(2 * maxDuration / pollEvery)
)

// openClient opens a client that polls if it is to receive no notices.
func openClient(urls []string, opts flightlock.Options) (locker, error) {
	c, err := flightlock.Open(opts, urls...)
	if err != nil {
		return nil, err
	}
	if opts.DisableNotify {
		return realClient{c, flightlock.LimitedRetry(pollEvery, pollTimes)}, nil
	}
	return realClient{c, nil}, nil
}

func (r realClient) lock(ctx context.Context, key string, ttl time.Duration) (heldLock, error) {
	l, err := r.c.SingleFlightLock(ctx, key, ttl, r.retry)
	if err != nil {
		return nil, err // not l: a nil *Lock in an interface is not nil
	}
	return l, nil
}

// fetcher takes FailClosed: an overloaded machine is to show as errors, and not as a load more.
func (r realClient) fetcher(s fetch.Store[bool], load fetch.Loader[bool],
	ttl time.Duration) (fetcher, error) {
	return fetch.New(r.c, s, load, fetch.Options{TTL: ttl, FailClosed: true})
}

func (r realClient) stats() flightlock.Stats         { return r.c.Stats() }
func (r realClient) close(ctx context.Context) error { return r.c.Close(ctx) }

// errorKinds are the library's words for what can go wrong, most telling first.
var errorKinds = []struct {
	err  error
	name string
}{
	{flightlock.ErrLockLost, "lock lost"},
	{flightlock.ErrNotHeld, "not held any more"},
	{flightlock.ErrUnavailable, "unavailable"},
	{flightlock.ErrNotAcquired, "not acquired"},
	{flightlock.ErrTooManyWaiters, "too many waiters"},
	{flightlock.ErrClosed, "closed"},
	{flightlock.ErrInvalid, "invalid"},
	{context.Canceled, "ctx canceled"},
	{context.DeadlineExceeded, "ctx deadline exceeded"},
}

// kindOf names the kind of an error that op met: "lock: unavailable".
func kindOf(op string, err error) string {
	for _, k := range errorKinds {
		if errors.Is(err, k.err) {
			return op + ": " + k.name
		}
	}
	return fmt.Sprintf("%s: %T", op, err)
}
