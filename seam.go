package flightlock

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// What other packages of this repository reach of a Client: see package seam.

func init() {
	seam.Of = func(client any) seam.Client {
		if c := client.(*Client); c.flights != nil {
			return insideOf(c)
		}
		return nil
	}
}

// inside is a Client for them.
type inside struct {
	c             *Client
	*flight.Group // that of Fetchers' locks: Look and Known
	*attachments
}

func insideOf(c *Client) inside { return inside{c, c.fetches, &c.attached} }

func (x inside) KeyPrefix() string { return x.c.opts.KeyPrefix }

func (x inside) Nodes() []redis.UniversalClient { return x.c.clients }

func (x inside) NodeTimeout() time.Duration { return x.c.opts.NodeTimeout }

func (x inside) MaxTTL() time.Duration { return x.c.opts.MaxTTL }

func (x inside) Holders(key string) []func() error {
	timeout := x.c.opts.NodeTimeout
	return slices.Concat(x.c.flights.Holders(key, timeout), x.c.attaches.Holders(key, timeout),
		x.c.reads.flights.Holders(key, timeout))
}

func (x inside) Log(level slog.Level, msg string, args ...any) { x.c.log(level, msg, args...) }

func (x inside) Go(f func()) bool { return x.c.tasks.Go(f) }

func (x inside) Observe(name string, read func() seam.Counts) (f seam.Fetcher, closed func()) {
	return x.c.watching.fetcher(name, read)
}

// Bare hides the locks that ctx carries.
func (inside) Bare(ctx context.Context) context.Context {
	if carriedBy(ctx) == nil {
		return ctx
	}
	return context.WithValue(ctx, carriedKey{}, (*carried)(nil))
}

// fetchNamespace begins every key of a Fetcher's lock. What follows is KeyPrefix, because deployments that
// share nodes are told apart by it, the Fetcher's Name and its key, whose hash tag counts: Name has no
// braces.
const fetchNamespace = "flightlock:fetch:"

// CheckTTL also checks that Options.Refresh fits the ttl.
func (x inside) CheckTTL(ttl time.Duration) error {
	_, err := x.c.refreshPolicy(RefreshPolicy{}, ttl.Truncate(time.Millisecond))
	return err
}

func (inside) CheckKey(key string) error { return checkName(key) }

// Begin is one attempt.
func (x inside) Begin(ctx context.Context, key string, ttl time.Duration) (end func() (seam.Lock, error)) {
	begun := x.c.begin(ctx, key, x.c.newLock(), ttl, true)
	return func() (seam.Lock, error) {
		l, err := begun()
		if err != nil {
			return nil, err
		}
		return kept(l), nil
	}
}

// Contend waits in the local tier.
func (x inside) Contend(ctx context.Context, key string, ttl time.Duration,
	needless func(ctx context.Context) bool) (_ seam.Lock, stopped bool, err error) {
	l := x.c.newLock()
	w := x.c.watching.wait(ctx, key, &l.own, true)
	defer func() { w.waited(&l.own, stopped, err) }()
	stopped, err = x.c.fetches.AcquireUnless(ctx, key, &l.own, ttl.Truncate(time.Millisecond), orDefault(nil),
		needless)
	if stopped || err != nil {
		return nil, stopped, err
	}
	return kept(l), false, nil
}

// kept is l, which is refreshed from now on. Whoever has it releases it, whatever happens.
func kept(l *Lock) *Lock {
	p := l.c.opts.Refresh
	p.MaxHold, p.MaxRefreshes = math.MaxInt64, 0              // LoadTimeout bounds it
	_, _ = l.autoRefresh(context.Background(), p, l.ticket()) // its error is l.Err's, too
	return l
}

func (inside) ReleaseFailed(l seam.Lock) { _ = l.(*Lock).releaseFailed() }

func (inside) Why(err error) seam.Reason {
	q := new(QuorumError)
	errors.As(err, &q)
	switch {
	case errors.Is(err, errFailedElsewhere):
		return seam.FailedElsewhere
	case q.away:
		return seam.Away
	case errors.Is(err, ErrNotAcquired) && !q.undecided:
		return seam.InUse
	case errors.Is(err, ErrNotAcquired), errors.Is(err, ErrUnavailable):
		return seam.Again
	}
	return seam.Refused
}

// Holder is who has a lock, for most of the nodes that have answered an attempt.
func (inside) Holder(err error) (holder string) {
	var e *QuorumError
	if !errors.As(err, &e) {
		return ""
	}
	votes := map[string]int{}
	for _, n := range e.Nodes {
		if votes[n.Holder]++; n.Holder != "" && votes[n.Holder] > votes[holder] {
			holder = n.Holder
		}
	}
	return holder
}

func (x inside) Away() bool { return x.c.away() }

// attachments are the Fetchers and Caches that are made over a Client. The zero value has none.
type attachments struct {
	mu     sync.Mutex // guards what follows
	closed bool
	all    map[any]func(ctx context.Context) error
}

// Attach has Close call close, until what is detached. It reports false after Close.
func (a *attachments) Attach(what any, close func(ctx context.Context) error) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	if a.all == nil {
		a.all = map[any]func(ctx context.Context) error{}
	}
	a.all[what] = close
	return true
}

// Detach is for what was closed.
func (a *attachments) Detach(what any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.all, what)
}

// close closes all, at the same time, and returns their errors.
func (a *attachments) close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := slices.Collect(maps.Values(a.all))
	a.mu.Unlock()
	return errors.Join(concurrently(len(all), func(i int) error { return all[i](ctx) })...)
}

// away reports whether so many nodes have no vote now that there is no majority.
func (c *Client) away() bool {
	n := 0
	for i, nd := range c.nodes {
		if nd.Suspended() || c.quorum.Quarantined(i) || nd.Unverified() != nil {
			n++
		}
	}
	return n > len(c.nodes)-c.quorum.Need()
}
