package flightlock

import (
	"context"
	"errors"
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
	if err := c.checkArguments(key, ttl, retry); err != nil {
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

// checkArguments returns an ErrInvalid for each argument that is none.
func (c *Client) checkArguments(key string, ttl time.Duration, retry RetryStrategy) error {
	return errors.Join(c.checkKey(key), c.checkTTL(ttl), checkStrategy(retry))
}

// newLock is a Lock that is about to be acquired.
func (c *Client) newLock() *Lock {
	c.startAnnouncing()
	return &Lock{c: c}
}

// flightConfig connects the local tier to the quorum, and gives it the words for errors.
func (c *Client) flightConfig() flight.Config {
	return flight.Config{
		Nodes: flightNodes{c}, Errors: flightErrors{c}, NodeTimeout: c.opts.NodeTimeout, Turn: node.TurnTime(c.opts.NodeTimeout),
		Slice: c.opts.HandoffSlice, MaxWaiters: c.opts.MaxWaiters,
	}
}

// flightNodes is the quorum as the local tier sees it. The local tier has keys without the prefix, so
// that a lock that is handed over allocates no string; the prefix is added here.
type flightNodes struct{ c *Client }

func (n flightNodes) Prepare(key string, ttl time.Duration, tokens int64, contender string) flight.Lease {
	l := new(quorum.Lease)
	n.c.quorum.Prepare(l, n.c.full(key), ttl, tokens, contender)
	return l
}

func (n flightNodes) Watch(key, contender string, onEvent func(quorum.Event, string)) (stop func()) {
	if n.c.opts.DisableNotify {
		return nil
	}
	return n.c.quorum.Watch(n.c.full(key), contender, onEvent)
}

func (n flightNodes) Leave(key, contender string) { n.c.quorum.Leave(n.c.full(key), contender) }

func (n flightNodes) Validity(ttl time.Duration) time.Duration { return n.c.quorum.Validity(ttl) }

// full is key with the prefix, as the nodes have it.
func (c *Client) full(key string) string { return c.opts.KeyPrefix + key }
