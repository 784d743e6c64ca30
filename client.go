package flightlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Client locks keys on a set of nodes. One Client per process and set of nodes is enough,
// and gives the best throughput: its goroutines share flights. It is safe for concurrent
// use.
type Client struct {
	opts    Options
	nodes   []*node.Node
	quorum  *quorum.Quorum
	flights *flight.Group

	began    time.Time
	id       string // "#" + UUID + "-", which makes owners unique
	seq      atomic.Uint64
	carried  atomic.Bool   // some ctx carries a Lock of this Client
	memories atomic.Uint64 // of nodes, that this client has thought of names for

	own []redis.UniversalClient // made by Open, closed by Close

	tasks  tasks  // what goes on beside locking
	word   wordOf // that this client leaves on its nodes
	loss   lossLog
	logs   queue[slog.Record]
	back   recovery
	doings doings

	metrics *metrics // nil without Options.Registerer

	closing sync.Once
	closed  error // of the first Close
}

// New makes a Client over clients that the caller built and will close, after the Client.
// It talks to no node yet. Bad options are an ErrInvalid that names the field.
//
// Locks have connections of their own, which the Client makes from the options of those clients and
// closes in Close: to each server two with several nodes, four with one, and one more for a
// moment when it is met first, was restarted, or is probed. So the load on the clients' pools does not
// delay locks. What leads to a server and logs in is taken over: Addr, Dialer, TLSConfig, user and password or
// their providers, DB, Protocol, OnConnect, ClientName (for CLIENT LIST). Pool sizes, timeouts, retries and
// buffers are the Client's own. Hooks of the clients are not called for locks.
//
// Notices of release, Check, the list of nodes that is left on them (see Check) and the map of a Cluster do share
// the clients' connections, one to each server for notices. For these it is well to set, as Open does, DialerRetries 1 and
// DialTimeout 2s, so that a node that is down is noticed soon. A DialTimeout below 1.5s holds for the
// connections for locks as well.
//
// ReplicaOnly of a Sentinel-managed master must be off: a replica cannot vote.
func New(opts Options) (*Client, error) { return newClient(opts, "Options.Nodes") }

// newClient is New. list is what the caller gave the nodes in.
func newClient(opts Options, list string) (*Client, error) {
	opts, err := opts.validated(list)
	if err != nil {
		return nil, err
	}
	c := &Client{opts: opts, began: time.Now(), id: "#" + uuid.NewString() + "-"}
	for i, n := range opts.Nodes {
		nd, err := node.New(n, opts.NodeTimeout, len(opts.Nodes) == 1)
		if err != nil {
			return nil, fmt.Errorf("flightlock: %w: %w", ErrInvalid, err)
		}
		nd.Changed, nd.Verified = c.nodeChanged, c.nodeVerified
		if name := strings.ToValidUTF8(nd.Name(), "\uFFFD"); name != nd.Name() { // a socket; labels and logs are text
			nd.Rename(name)
		}
		if c.named(nd.Name()) || nd.Name() == failoverAddr { // with dialers of their own, names may be equal
			nd.Rename(fmt.Sprintf("%s Nodes[%d]", nd.Name(), i))
		}
		c.nodes = append(c.nodes, nd)
	}
	q := quorum.Config{
		Nodes: c.nodes, NodeTimeout: opts.NodeTimeout, DriftFactor: opts.DriftFactor,
		Owner: c.newOwner, Tells: c.tells, Same: c.sameServer,
		Guarded: c.guarded(), Quarantine: c.quarantine(), Told: c.quarantined, Blind: c.blind,
	}
	if !opts.DisableQuarantine {
		q.MemoryName = c.memoryName
	}
	c.quorum = quorum.New(q)
	cfg := c.flightConfig()
	if opts.Registerer != nil {
		if c.metrics, err = newMetrics(c, opts.Registerer); err != nil {
			return nil, err
		}
		cfg.Acquired = c.metrics.acquired
	}
	if c.loss.c = c; opts.Logger != nil || c.metrics != nil {
		cfg.Lost = c.lost
	}
	c.flights = flight.NewGroup(cfg)
	return c, nil
}

// named reports whether a node has that name.
func (c *Client) named(name string) bool {
	return slices.ContainsFunc(c.nodes, func(n *node.Node) bool { return n.Name() == name })
}

// Ready dials all nodes and has them load what locking needs, so that the first locks take no longer than others:
// call it before a process takes traffic. It comes back with nil as soon as locks can be had, by a majority, and all
// nodes were tried; nodes that are down or still starting do not hold it up for longer than their answer may take.
// Else it goes on trying until ctx ends, and gives ctx's error together with the last outcome, as SingleFlightLock
// does: ErrUnavailable, which names the nodes and what is wrong with each. ErrClosed. For the last step it takes a
// lock of its own, "flightlock-ready-" and the id of the Client, behind Options.KeyPrefix. It is safe for
// concurrent use, and may be called again.
func (c *Client) Ready(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, n := range c.nodes {
		wg.Go(func() { _ = n.Ready(ctx) }) // what is wrong, the lock tells
	}
	wg.Wait()
	l, err := c.Lock(ctx, "flightlock-ready-"+c.id[1:len(c.id)-1], max(minTTL, min(time.Second, c.opts.MaxTTL)), nil)
	if err != nil {
		return err
	}
	return l.Release(ctx)
}

// Lock makes key the caller's for ttl, by the quorum alone: every caller contends by
// itself, against its own process too. That suits keys that are rarely wanted twice at
// once; for hot keys SingleFlightLock is hundreds of times faster.
//
// It goes on by retry until that gives up or ctx ends. Errors: ErrNotAcquired,
// ErrUnavailable, ErrClosed, ErrInvalid; ctx's error matches besides if ctx ended, and alone
// if nothing was known by then.
func (c *Client) Lock(ctx context.Context, key string, ttl time.Duration, retry RetryStrategy) (*Lock, error) {
	return c.acquire(ctx, key, ttl, retry, flight.Unqueued)
}

// Stats are counters since New, and gauges.
type Stats struct {
	Acquired  uint64 // locks given to callers, handoffs included
	Handoffs  uint64 // locks given without asking Redis
	Attempts  uint64 // remote attempts
	Refreshes uint64 // remote refreshes, of holders and of flights
	Lost      uint64 // locks that were lost while somebody relied on them: by expiry, though they were to be refreshed or their Context was asked for, or because the nodes say so
	Expired   uint64 // locks that ran out as their ttl says: never refreshed, their Context never asked for, and not released before
	Commands  uint64 // acquires, refreshes, releases written to nodes; each counts, though a server may get many as one

	Waiters int64 // callers that wait for a lock now
	Held    int64 // locks held now
	Debts   int64 // releases owed to nodes that have not confirmed them yet

	OldestDo time.Duration // how long the oldest lock of Do, DoWith and Wrap has been held; 0: none was held so long that it was to be refreshed

	Suspended   int64 // nodes that are left alone until they answer a probe
	Quarantined int64 // nodes whose votes do not count, because they lost their memory not long ago
	Unverified  int64 // nodes without a vote, because they refuse the script that tells whether they lost their memory
}

// Stats reads the counters. It is cheap: a short lock per shard and per key in use.
func (c *Client) Stats() Stats {
	n := c.flights.Counts()
	s := Stats{
		Acquired: n.Acquired, Handoffs: n.Handoffs, Attempts: n.Attempts, Refreshes: n.Refreshes,
		Lost: n.Lost, Expired: n.Expired, Waiters: n.Waiters, Held: n.Held,
	}
	if since, some := c.doings.oldest(); some {
		s.OldestDo = time.Since(c.began) - since
	}
	for i, nd := range c.nodes {
		s.Commands += nd.Commands()
		s.Debts += int64(nd.Debts())
		if nd.Suspended() {
			s.Suspended++
		}
		if c.quorum.Quarantined(i) {
			s.Quarantined++
		}
		if nd.Unverified() != nil {
			s.Unverified++
		}
	}
	return s
}

// Close ends the Client. It refuses new work, fails waiters with ErrClosed, waits for
// holders until ctx ends, then ends the contexts of the remaining locks (cause ErrClosed)
// and releases them, for which it takes four times NodeTimeout at most. It returns when every
// goroutine of the Client has ended; one that waits on a stalled connection may need 4s for that,
// or four times NodeTimeout if that is more, and Close gives up on it, with an error, when ctx has
// ended. What go-redis has not ended by then, a dial or a question to Sentinels or a Cluster, ends
// by the DialTimeout and ReadTimeout of its client. A second Close waits for the first and returns
// the same.
func (c *Client) Close(ctx context.Context) error {
	c.closing.Do(func() { c.closed = c.close(ctx) })
	return c.closed
}

func (c *Client) close(ctx context.Context) error {
	c.word.stop()
	c.flights.Close(ctx)
	c.loss.flush()
	limit := time.Now().Add(node.CloseTime(c.opts.NodeTimeout))
	sent, cancel := graced(ctx, 2*c.opts.NodeTimeout, limit) // the releases just sent get their time
	defer cancel()
	errs := make([]error, len(c.nodes))
	var beside, meters error
	var wg sync.WaitGroup
	for i, n := range c.nodes {
		wg.Go(func() { errs[i] = n.Close(sent) })
	}
	wg.Go(func() { beside = c.tasks.close(sent) })
	wg.Go(func() { meters = c.metrics.unregister(sent) })
	wg.Wait()
	rest, stop := graced(ctx, c.opts.NodeTimeout, limit) // for what takes no time unless it hangs
	defer stop()
	errs = append(errs, beside, meters, c.quorum.Close(rest), closeOwn(rest, c.own))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("flightlock: close: %w", err)
	}
	return nil
}

// graced is ctx, but ends no sooner than grace from now, and else no later than limit.
func graced(ctx context.Context, grace time.Duration, limit time.Time) (context.Context, context.CancelFunc) {
	soonest := time.Now().Add(grace)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(limit) {
		limit = deadline
	}
	if limit.Before(soonest) {
		limit = soonest
	}
	longer, cancel := context.WithDeadline(context.WithoutCancel(ctx), limit)
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) { // not by its deadline, which is known
			time.AfterFunc(time.Until(soonest), cancel)
		}
	})
	return longer, func() {
		stop()
		cancel()
	}
}

// maxID is the length of id, and of the longest sequence number behind it.
const maxID = len("#") + 36 + len("-") + 13

// newOwner makes the owner of one attempt. It is never the same twice.
func (c *Client) newOwner() string {
	label := c.label()
	owner := make([]byte, 0, maxLabel+maxID)
	owner = append(owner, label[:min(len(label), maxLabel)]...)
	owner = append(owner, c.id...)
	return string(strconv.AppendUint(owner, c.seq.Add(1), 36))
}

// label is what NewOwner gives. It is called in the middle of an attempt, which has to go on if it panics.
func (c *Client) label() (label string) {
	defer func() {
		if v := recover(); v != nil {
			label = fmt.Sprintf("NewOwner panicked: %v", v)
		}
	}()
	return c.opts.NewOwner()
}

// tells reports whether the holder named owner will tell when it lets go. A client of another
// library does not. Nor may one of this very client: what a flight finds of its own process
// when it asks is mostly the late grant of an attempt that it has given up.
func (c *Client) tells(owner string) bool { return ours(owner) && !strings.Contains(owner, c.id) }

// ours reports whether a client of this library made owner: label#UUID-sequence.
func ours(owner string) bool {
	const idLen = len("#xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx-")
	at := strings.LastIndexByte(owner, '#')
	return at >= 0 && len(owner) > at+idLen && owner[at+idLen-1] == '-' && uuid.Validate(owner[at+1:at+idLen-1]) == nil
}

// hostLabel tells people which process holds a lock.
var hostLabel = sync.OnceValue(func() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + ":" + strconv.Itoa(os.Getpid())
})

// nodeChanged logs that a node was suspended, and what to do, or that it is back.
func (c *Client) nodeChanged(name string, err error) {
	if err != nil {
		c.nodesLeft()
	}
	switch {
	case errors.Is(err, node.ErrLogin):
		c.log(slog.LevelWarn, "flightlock: node suspended: it refuses the login", "node", name, "err", err, "fix", doesNotServe(c.commandOf(name), err).Fix)
	case err != nil:
		c.log(slog.LevelWarn, "flightlock: node suspended: it does not answer", "node", name, "err", err)
	default:
		c.back.announce()
		c.log(slog.LevelInfo, "flightlock: node is back", "node", name)
	}
}

// nodesLeft has callers that fail fast hear at once when too few nodes are left.
func (c *Client) nodesLeft() {
	c.tasks.run(func() {
		if c.away() {
			c.flights.Recheck()
		}
	})
}

// commandOf is redis-cli for the node of that name.
func (c *Client) commandOf(name string) command {
	for i, n := range c.nodes {
		if n.Name() == name {
			return c.commandFor(i, name)
		}
	}
	return command{addr: name}
}

// nodeVerified logs that a node's memory cannot be verified, or was.
func (c *Client) nodeVerified(name string, err error) {
	if err != nil {
		c.nodesLeft()
		c.log(slog.LevelWarn, "flightlock: node unverified", "node", name, "err", err)
	} else {
		c.back.announce()
		c.log(slog.LevelInfo, "flightlock: node is verified again", "node", name)
	}
}

// lost hears of every lock that was lost.
func (c *Client) lost(key string, why error) {
	c.metrics.lostOne(why)
	if c.opts.Logger != nil {
		c.loss.lost(key, why)
	}
}

func (c *Client) sameServer(ctx context.Context, i, j int) (bool, error) {
	return node.SameServer(ctx, c.opts.Nodes[i], c.opts.Nodes[j], uuid.NewString())
}
