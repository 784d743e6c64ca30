package flightlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// SingleFlightLock acquires key (1 to 4,096 bytes) for ttl (10ms to Options.MaxTTL, in whole milliseconds).
// Callers of this process that want the key queue in order of arrival, and a released lock is handed to the
// next one, with at least half of its ttl left (usually over 95%; less only where DriftFactor makes the
// validity short). [Lock.Until] is the deadline.
//
// It waits until retry gives up (nil means ExponentialBackoff(5ms, 250ms)), also in the queue, or ctx ends,
// or a retry cannot help. Errors: ErrNotAcquired, ErrUnavailable, ErrTooManyWaiters, ErrClosed, ErrInvalid.
// If ctx has ended, the error also matches ctx's error, and only that if the state of the key was not known.
// With a ctx made by Lock.Context of a lock on the same key, it returns a nested Lock at once.
func (c *Client) SingleFlightLock(ctx context.Context, key string, ttl time.Duration,
	retry RetryStrategy) (*Lock, error) {
	return c.acquire(ctx, key, ttl, retry, c.retains)
}

// TryLock is SingleFlightLock with NoRetry. If the key is held, wanted or being acquired in this process, it
// returns ErrNotAcquired at once and sends nothing.
func (c *Client) TryLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error) {
	return c.SingleFlightLock(ctx, key, ttl, NoRetry())
}

// acquire is SingleFlightLock. Unless lingers is set, the lease is not retained.
func (c *Client) acquire(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy,
	lingers bool) (_ *Lock, err error) {
	if c.flights == nil {
		return nil, errZeroClient
	}
	retry = orDefault(retry)
	if err := errors.Join(c.checkKey(key), c.checkTTL(ttl), checkStrategy(retry)); err != nil {
		return nil, err
	}
	l, nested, err := c.arrive(ctx, key, lingers)
	if nested || err != nil {
		return l, err
	}
	w := c.watching.wait(ctx, key, &l.own, false)
	err = errPanicked // unless Acquire returns
	defer func() { w.waited(&l.own, false, err) }()
	if err = c.flights.Acquire(ctx, key, &l.own, ttl.Truncate(time.Millisecond), retry); err != nil {
		return nil, err
	}
	return l, nil
}

// arrive returns a Lock that is about to be acquired, or a nested one of key that ctx carries.
func (c *Client) arrive(ctx context.Context, key string, lingers bool) (l *Lock, nested bool, err error) {
	if l := c.reenter(ctx, key); l != nil {
		if node.Shares(l.Owner()) {
			l.ReleaseAsync()
			return nil, true, errUpgrade(key)
		}
		return l, true, nil
	}
	l = c.newLock()
	if lingers {
		l.own.SetLinger(c.linger(key))
	}
	return l, false, nil
}

// begin has l, which is new, acquired by one attempt, for a caller that wants many keys: it does not wait for
// the outcome. end is the rest, and must be called. A Fetcher's attempt is in its own group, and is not
// repeated if it decides nothing; others are as that of TryLock.
func (c *Client) begin(ctx context.Context, key string, l *Lock, ttl time.Duration, ofFetcher bool) (
	end func() (*Lock, error)) {
	g := c.flights
	if ofFetcher {
		g = c.fetches
	}
	w := c.watching.wait(ctx, key, &l.own, ofFetcher)
	begun := g.Begin(ctx, key, &l.own, ttl.Truncate(time.Millisecond), NoRetry(), ofFetcher)
	return func() (*Lock, error) {
		err := g.End(ctx, begun)
		if w.waited(&l.own, false, err); err != nil {
			return nil, err
		}
		return l, nil
	}
}

// newLock is a Lock that is about to be acquired. The first one has the Client begin to publish its list of
// nodes.
func (c *Client) newLock() *Lock {
	c.startAnnouncing()
	l := &Lock{c: c}
	l.handles.Store(1)
	return l
}

// flightNodes is the quorum as the local tier sees it. The local tier has keys without the prefix, so
// that a lock that is handed over allocates no string; the prefix is added here.
type flightNodes struct {
	c      *Client
	prefix string
	shared bool // its leases are read leases
}

// newLease is a lease that is not prepared yet.
func (n flightNodes) newLease() *quorum.Lease {
	l := new(quorum.Lease)
	if n.shared {
		l.Share()
	}
	return l
}

func (n flightNodes) Prepare(key string, ttl time.Duration, tokens int64, contender string) flight.Lease {
	l := n.newLease()
	n.c.quorum.Prepare(l, n.prefix+key, ttl, tokens, contender)
	return l
}

func (n flightNodes) Offer(key string, ttl time.Duration, tokens int64, contender string,
	by quorum.Acquirer) flight.Lease {
	if n.c.quorum.GrantsNothing() {
		return nil
	}
	l := n.newLease()
	n.c.quorum.Offer(l, n.prefix+key, ttl, tokens, contender, by)
	return l
}

func (n flightNodes) Carry(attempt, offer flight.Lease, span time.Duration, waits bool) {
	attempt.(*quorum.Lease).Carry(offer.(*quorum.Lease), span, waits)
}

func (n flightNodes) Rejoin(lease, offer flight.Lease, span time.Duration, inline bool, by quorum.Releaser) {
	lease.(*quorum.Lease).Rejoin(offer.(*quorum.Lease), span, inline, by)
}

func (n flightNodes) Watch(key, contender string, onEvent func(quorum.Event)) (stop func()) {
	if n.c.opts.DisableNotify {
		return nil
	}
	return n.c.quorum.Watch(n.prefix+key, contender, onEvent)
}

func (n flightNodes) Leave(key, contender string) { n.c.quorum.Leave(n.prefix+key, contender) }

func (n flightNodes) Validity(ttl time.Duration) time.Duration { return n.c.quorum.Validity(ttl) }

// errFailedElsewhere is the error of contend when another process, for which it has waited, released
// the key because its work failed: see Lock.releaseFailed.
var errFailedElsewhere = fmt.Errorf(
	"flightlock: %w: the load that this process has waited for has failed in another one", ErrNotAcquired)

// mayRetain reports whether this client may retain leases: others must be able to recall them, and
// it to hand them over.
func (c *Client) mayRetain() bool {
	o := &c.opts
	return (o.Linger > 0 || o.LingerFor != nil) && o.KeyPrefix != "" && c.hasInbox() && o.HandoffSlice >= 0
}

// hasInbox reports whether this client can receive what is for no key that it waits for: recalls. The inboxes
// of a Cluster are the channels of keys.
func (c *Client) hasInbox() bool {
	return !c.opts.DisableNotify && !slices.ContainsFunc(c.nodes, (*node.Node).IsCluster)
}

// listen has the client receive its recalls, and revocations among them, until Close.
func (c *Client) listen() { c.recalls.Do(func() { c.watchRecalls(c.uuid(), recalled{c}) }) }

// watchRecalls has by receive what comes to an inbox, if this client can.
func (c *Client) watchRecalls(inbox string, by quorum.Recalls) {
	if c.hasInbox() {
		c.quorum.WatchRecalls(inbox, by)
	}
}

// linger is how long the lease of key may be retained. With the first key for which it may, the
// client subscribes to its recalls, until Close.
func (c *Client) linger(key string) time.Duration {
	d := c.opts.Linger
	if c.opts.LingerFor != nil {
		d = c.opts.LingerFor(key)
	}
	if d <= 0 {
		return 0
	}
	c.listen()
	return max(d, time.Millisecond)
}

// recalled is a Client that receives its recalls.
type recalled struct{ c *Client }

// Confirmed says whether recalls are received, and Lost that some may have been missed.
func (r recalled) Confirmed(yes bool) { r.c.flights.InboxConfirmed(yes) }
func (r recalled) Lost()              { r.c.flights.InboxLost() }

// Recall has the lease released, or not retained; or the lock that has it ended.
func (r recalled) Recall(recall node.Recall) {
	key, ours := strings.CutPrefix(recall.Key, r.c.opts.KeyPrefix)
	switch {
	case !ours:
	case recall.Contender == node.Revoked:
		r.c.flights.Revoke(key, recall.Owner)
		r.c.attaches.Revoke(key, recall.Owner)
	default:
		r.c.flights.Recall(key, recall.Owner, recall.Contender)
	}
}
