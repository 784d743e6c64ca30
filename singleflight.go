package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// SingleFlightLock acquires key for ttl (10ms to Options.MaxTTL, in whole milliseconds). All
// callers of this process that want the key queue in order of arrival. One of them at a time
// contends with other processes, and a released lock is handed directly to the next caller. A Lock
// that was handed over may have as little as half its ttl left (usually over 95%): see Lock.Until.
//
// It retries until retry gives up or ctx ends; nil means ExponentialBackoff(5ms, 250ms). A caller
// that queues behind others gives up when its strategy would have given up against Redis. Errors:
// ErrNotAcquired, ErrUnavailable, ErrTooManyWaiters, ErrClosed, ErrInvalid. If ctx ended, the error
// also matches ctx's error, and only that if nothing was known of the key by then.
//
// With a ctx made by Lock.Context of a lock on the same key, it returns a nested Lock at once.
func (c *Client) SingleFlightLock(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy) (*Lock, error) {
	return c.acquire(ctx, key, ttl, retry, flight.Queue)
}

func (c *Client) acquire(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy, mode flight.Mode) (*Lock, error) {
	retry = orDefault(retry)
	if err := c.checked(key, ttl, retry); err != nil {
		return nil, err
	}
	if mode != flight.Unqueued {
		if l := c.reenter(ctx, key); l != nil {
			return l, nil
		}
	}
	l := c.newLock()
	if err := c.flights.Acquire(ctx, key, &l.own, ttl.Truncate(time.Millisecond), retry, mode); err != nil {
		return nil, err
	}
	return l, nil
}

// checked says what of that which a caller asks for cannot be.
func (c *Client) checked(key string, ttl time.Duration, retry RetryStrategy) error {
	return errors.Join(c.checkKey(key), c.checkTTL(ttl), checkStrategy(retry))
}

// newLock is the Lock of a caller that is about to ask for it.
func (c *Client) newLock() *Lock {
	c.startAnnouncing()
	return &Lock{c: c}
}

// flightConfig connects the local tier to the quorum, and gives it the words for errors. The
// local tier knows keys as callers do, so that a lock that is handed over costs no string; the
// prefix comes before them where they go to the nodes.
func (c *Client) flightConfig() flight.Config {
	return flight.Config{
		Prepare: func(key string, ttl time.Duration, tokens int64, contender string, done func(flight.Lease, flight.Grant, *flight.Outcome)) flight.Attempt {
			l := &lease{c: c, asked: done}
			c.quorum.Prepare(&l.Lease, c.full(key), ttl, tokens, contender)
			return l
		},
		Watch: c.watch(), Leave: func(key, contender string) { c.quorum.Leave(c.full(key), contender) },
		Turn:     node.TurnTime(c.opts.NodeTimeout),
		Validity: c.quorum.Validity, NodeTimeout: c.opts.NodeTimeout,
		Slice: c.opts.HandoffSlice, MaxWaiters: c.opts.MaxWaiters,
		Busy: c.busy, GaveUp: c.gaveUp, Crowded: c.crowded, Ended: c.ended, Away: awayFor,
		Closed:    fmt.Errorf("flightlock: the Client is %w", ErrClosed),
		NotHeld:   errReleased,
		Failed:    errFailedElsewhere,
		Expired:   fmt.Errorf("flightlock: %w: its validity ended before it was refreshed or released", ErrLockLost),
		ExpiredBy: expiredBy,
		LostWith:  func(err error) error { return fmt.Errorf("flightlock: %w: %w", ErrLockLost, err) },
	}
}

// expiredBy is the loss of a lock whose validity ended, if it is known why.
func expiredBy(stopped, failed error) error {
	switch {
	case failed == nil:
		return fmt.Errorf("flightlock: %w: its validity ended: %w", ErrLockLost, stopped)
	case stopped == nil:
		return fmt.Errorf("flightlock: %w: its validity ended; the last refresh failed: %w", ErrLockLost, failed)
	}
	return fmt.Errorf("flightlock: %w: its validity ended: %w; the last refresh failed: %w", ErrLockLost, stopped, failed)
}

// watch is how a flight hears that its key was let go; nil for a client that only polls.
func (c *Client) watch() func(key, contender string, hear func(flight.Event, string)) (stop func()) {
	if c.opts.DisableNotify {
		return nil
	}
	return func(key, contender string, hear func(flight.Event, string)) func() {
		return c.quorum.Watch(c.full(key), contender, func(n quorum.Event, owner string) { hear(flight.Event(n), owner) })
	}
}

// lease is a quorum's lease as the local tier sees it.
type lease struct {
	quorum.Lease
	c     *Client
	asked func(flight.Lease, flight.Grant, *flight.Outcome) // hears of the attempt; nil when it is over
	gone  func(error)                                       // hears of the release
	began time.Duration                                     // the attempt, on the Client's clock, if that is measured
}

// Start makes the attempt for which l was prepared.
func (l *lease) Start(inline bool) {
	if l.c.metrics != nil {
		l.began = time.Since(l.c.began)
	}
	l.Lease.Acquire(inline, l)
}

// Acquired is the outcome of that.
func (l *lease) Acquired(g quorum.Grant, f *quorum.Failure) {
	asked := l.asked
	l.asked = nil // a lease may be held for long
	if l.c.metrics != nil {
		l.c.metrics.attempted(time.Since(l.c.began)-l.began, f)
	}
	if f != nil {
		asked(nil, flight.Grant{}, outcome(l.key(), f))
		return
	}
	asked(l, flight.Grant(g), nil)
}

// key is the lock key as the caller knows it.
func (l *lease) key() string { return l.Key()[len(l.c.opts.KeyPrefix):] }

func (l *lease) Refresh(ttl time.Duration, more int64, timeout time.Duration, look bool, done func(flight.Grant, *flight.Outcome)) {
	l.Lease.Refresh(ttl, more, timeout, look, func(g quorum.Grant, f *quorum.Failure) {
		l.c.metrics.refreshed(f)
		if f != nil {
			done(flight.Grant{}, outcome(l.key(), f))
			return
		}
		done(flight.Grant(g), nil)
	})
}

func (l *lease) Release(inline bool, rival string, failed bool, done func(error)) {
	l.gone = done // the flight releases a lease once
	l.Lease.Release(inline, rival, failed, l)
}

// Released is the outcome of that.
func (l *lease) Released(f *quorum.Failure) {
	if f != nil {
		l.gone(quorumError(l.key(), f))
		return
	}
	l.gone(nil)
}

// Peek says how the attempt stands.
func (l *lease) Peek() error {
	if f := l.Lease.Peek(); f != nil {
		return quorumError(l.key(), f)
	}
	return nil
}

func outcome(key string, f *quorum.Failure) *flight.Outcome {
	return &flight.Outcome{Err: quorumError(key, f), Final: f.Final, Lost: f.Reason == quorum.NotHeld, Free: f.Free,
		Taken: f.Reason == quorum.Taken, Owned: f.Owned, Holder: f.Holder, Away: f.Away}
}

// full is a lock key as the nodes know it.
func (c *Client) full(key string) string { return c.opts.KeyPrefix + key }

// busy is the error for a key that somebody in this process has or wants.
func (c *Client) busy(key, owner string) error {
	e := &QuorumError{Op: "acquire", Key: key, Need: c.quorum.Need(), sentinel: ErrNotAcquired,
		reason: errors.New("others of this process wait for it")}
	if owner != "" {
		e.reason = fmt.Errorf("this process holds it, as %q", owner)
	}
	return e
}

// gaveUp adds to the last outcome, if there is one, that the caller's ctx has ended.
func (c *Client) gaveUp(key string, ctxErr, last error) error {
	e := QuorumError{Op: "acquire", Key: key, Need: c.quorum.Need()}
	var seen *QuorumError
	if errors.As(last, &seen) {
		e = *seen
	}
	e.ctx = ctxErr
	return &e
}

// awayFor is the error for a caller that waits for key, when a refresh has found out that the nodes are away.
func awayFor(_ string, err error) error {
	var seen *QuorumError
	if !errors.As(err, &seen) {
		return err
	}
	e := *seen
	e.Op = "acquire"
	return &e
}

func (c *Client) crowded(key string) error {
	return fmt.Errorf("flightlock: acquire %q: %w: Options.MaxWaiters is %d", key, ErrTooManyWaiters, c.opts.MaxWaiters)
}

// ended is the error for using a lock that is over.
func (c *Client) ended(key string, why error) error {
	if errors.Is(why, ErrNotHeld) {
		return fmt.Errorf("lock %q: %w", key, why)
	}
	return fmt.Errorf("lock %q: %w: %w", key, ErrNotHeld, why)
}
