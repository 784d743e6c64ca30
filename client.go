package flightlock

import (
	"cmp"
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

	"github.com/flightlock/flightlock/internal/check"
	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/queue"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Client locks keys on a set of nodes. A process needs one for each set of nodes: goroutines that share it
// hand locks to each other without Redis. It is safe for concurrent use.
type Client struct {
	opts    Options
	clients []redis.UniversalClient // the nodes as the caller passed them
	nodes   []*node.Node
	quorum  *quorum.Quorum
	flights *flight.Group
	fetches *flight.Group // for locks of Fetchers: nobody else can queue in it
	reads   reads         // the read leases: see rlock.go

	attaches  *flight.Group // for locks that were attached: nobody queues in it
	attaching sync.Map      // the keys that an Attach is at: one at a time, see unsettled
	unsettled unsettled     // of Attach

	id      string // "#" + UUID + "-", which makes owners unique: see uuid
	seq     atomic.Uint64
	carried atomic.Bool   // some ctx carries a Lock of this Client
	epochs  atomic.Uint64 // for epochName

	own []redis.UniversalClient // made by Open, closed by Close

	retains  bool        // leases may be retained: see Options.Linger
	recalls  sync.Once   // by the first lock that lingers: it subscribes to them
	attached attachments // closed before anything else

	tasks     group.Group        // goroutines beside locking: Close waits for them
	ended     context.Context    // of tasks; ended by Close
	end       context.CancelFunc // ends it
	check     check.Config       // for Check, and for what is announced
	announces atomic.Bool        // the set of nodes: since the first lock
	bursts    bursts             // of what is logged
	logs      queue.Queue[slog.Record]

	watching *watching // nil without Options.Observers

	closing sync.Once
	closed  error // of the first Close
}

// New makes a Client over nodes, the independent Redis deployments that vote. It sends nothing yet. The
// caller closes the nodes' clients after the Client. A bad option or node is an ErrInvalid that names it.
//
// A node is a *redis.Client of a server or of a Sentinel-managed master, or a *redis.ClusterClient: a whole
// Cluster is one node. There may be 1 to 64, usually 1, 3 or 5, all with the same database number (a Cluster
// has number 0). Refused are *redis.Ring, and clients of NewFailoverClusterClient. ReplicaOnly must not be
// set, because a replica cannot vote.
//
// Locks use connections of their own, made with the clients' settings for reaching a server and logging in:
// Addr, Dialer, TLSConfig, credentials, DB, OnConnect, ClientName. Timeouts, retries, pool sizes and hooks of
// the clients have no effect on them, except for a DialTimeout below 1.5s. Check uses the clients themselves:
// set DialerRetries to 1 and DialTimeout to 2s, as Open does, so that it detects a failed node soon.
// docs/operations.md has all settings.
func New(opts Options, nodes ...redis.UniversalClient) (*Client, error) {
	return newClient(opts, "nodes", nodes)
}

// newClient is New. list names the argument with which the caller passed the nodes.
func newClient(opts Options, list string, nodes []redis.UniversalClient) (*Client, error) {
	nodes = slices.Clone(nodes)
	opts, err := opts.validated()
	if err == nil {
		err = checkNodes(list, nodes)
	}
	if err != nil {
		return nil, err
	}
	c := &Client{opts: opts, clients: nodes, id: "#" + uuid.NewString() + "-"}
	c.ended, c.end = context.WithCancel(context.Background())
	for i, n := range nodes {
		nd, err := node.New(n, opts.NodeTimeout, len(nodes) == 1)
		if err != nil {
			return nil, fmt.Errorf("flightlock: %w: %w", ErrInvalid, err)
		}
		nd.Polled = opts.DisableNotify
		nd.Changed = c.onSuspended
		nd.Verified = c.on("flightlock: node unverified", "flightlock: node is verified again")
		nd.Unnamed = c.on("flightlock: connections have no name: the node refuses CLIENT SETNAME", "")
		nd.Unheard = c.on("flightlock: node sends no notices: who waits polls",
			"flightlock: node sends notices again")
		nd.Moded = func(name, mode string) {
			c.changed(name+" mode", slog.LevelInfo, "flightlock: node is in use", "node", name, "mode", mode)
		}
		nd.Rename(strings.ToValidUTF8(nd.Name(), "\uFFFD")) // that of a socket; labels and logs are text
		named := slices.ContainsFunc(c.nodes, func(other *node.Node) bool { return other.Name() == nd.Name() })
		if named || nd.Name() == conn.FailoverAddr { // with dialers of their own, names may be equal
			nd.Rename(fmt.Sprintf("%s nodes[%d]", nd.Name(), i))
		}
		c.nodes = append(c.nodes, nd)
	}
	q := quorum.Config{
		Nodes: c.nodes, NodeTimeout: opts.NodeTimeout, DriftFactor: opts.DriftFactor,
		Owner: c.newOwner, NotifiesRelease: ours,
		Same: func(ctx context.Context, i, j int) (bool, error) {
			return node.SameServer(ctx, nodes[i], nodes[j], uuid.NewString())
		},
		Guarded: c.guarded(), Quarantine: c.quarantineTime(), OnQuarantine: c.onQuarantine, OnApart: c.onApart,
	}
	if !opts.DisableQuarantine {
		q.EpochName = c.epochName
	}
	c.quorum = quorum.New(q)
	c.check = c.checkConfig()
	cfg := flight.Config{
		Nodes: flightNodes{c: c, prefix: opts.KeyPrefix}, Errors: flightErrors{c},
		NodeTimeout: opts.NodeTimeout, Turn: node.TurnTime(opts.NodeTimeout),
		Slice: opts.HandoffSlice, MaxWaiters: opts.MaxWaiters,
	}
	if c.retains = c.mayRetain(); c.retains {
		cfg.MaxRetained = maxRetained
	}
	c.watching = newWatching(c, &cfg.Observer)
	cfg.Observer.Lost = c.lost
	c.flights = flight.NewGroup(cfg)
	cfg.MaxRetained = 0
	c.reads.init(c, cfg)
	cfg.Nodes, cfg.MaxWaiters = flightNodes{c: c, prefix: fetchNamespace + c.opts.KeyPrefix}, 0
	c.fetches = flight.NewGroup(cfg)
	cfg.Nodes = flightNodes{c: c, prefix: opts.KeyPrefix}
	c.attaches = flight.NewGroup(cfg)
	if c.watching != nil {
		c.watching.opened()
	}
	return c, nil
}

// Ready dials all nodes and loads what locking needs, so that the first locks are not delayed. Call it before
// a process takes traffic, with a deadline. It returns nil as soon as locks can be acquired from a majority
// and every node was tried. Otherwise it retries until ctx ends, and returns ctx's error with the last
// outcome and what to do about it. It returns at once if a retry cannot help (see [ErrUnavailable]), or with
// ErrClosed.
//
// Its last step acquires, refreshes and releases three locks of its own, "flightlock-ready-..." below
// Options.KeyPrefix. A refresh or release that is only late is no error.
func (c *Client) Ready(ctx context.Context) error {
	if c.flights == nil {
		return errZeroClient
	}
	// the locks below report the errors
	concurrently(len(c.nodes), func(i int) error { return c.nodes[i].Ready(ctx) })
	err := c.tryKeys(ctx, "ready", nil)
	if err == nil || errors.Is(err, ErrClosed) {
		return err
	}
	err = fmt.Errorf("flightlock: not ready: %w", within(err))
	if fix := c.check.FixAll(nodeErrors(err)); fix != "" {
		err = fmt.Errorf("%w; what to do: %s", err, fix)
	}
	return err
}

// tryKeys acquires, refreshes and releases a lock of the client's own in each of several hash slots. what is
// part of their keys.
func (c *Client) tryKeys(ctx context.Context, what string, retry RetryStrategy) error {
	tags := node.SpreadTags()
	return cmp.Or(concurrently(len(tags), func(i int) error {
		return c.tryKey(ctx, "flightlock-"+what+"-"+c.uuid()+":{"+tags[i]+"}", retry)
	})...)
}

// concurrently calls f for 0 to n-1, each on a goroutine, and returns the errors. If f panics, as code of the
// user's may (Options.Class), so does this when all have ended: on the caller's goroutine, who can recover
// it. runtime.Goexit in f is an error.
func concurrently(n int, f func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	var panicked atomic.Pointer[any]
	for i := range n {
		wg.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					panicked.Store(&v)
				}
			}()
			errs[i] = errGoexit // unless f returns
			errs[i] = f(i)
		})
	}
	wg.Wait()
	if v := panicked.Load(); v != nil {
		panic(*v)
	}
	return errs
}

var errGoexit = errors.New("flightlock: code of the caller's called runtime.Goexit")

// tryKey acquires, refreshes and releases key. Only what a node refuses is an error of the latter two.
func (c *Client) tryKey(ctx context.Context, key string, retry RetryStrategy) error {
	l, err := c.acquire(ctx, key, max(minTTL, min(time.Second, c.opts.MaxTTL)), retry, false)
	if err != nil {
		return err
	}
	for _, err := range []error{l.Refresh(ctx), l.Release(ctx)} {
		if errors.Is(err, ErrClosed) || refused(err) {
			return err
		}
	}
	return nil
}

// refused reports whether err says that a node has refused a request. Otherwise the reply was late, or what
// was requested had run out before.
func refused(err error) bool {
	var q *QuorumError
	return errors.As(err, &q) && slices.ContainsFunc(q.Nodes,
		func(n NodeError) bool { return conn.IsReply(n.Err) })
}

// Stats are counters since New, and gauges.
type Stats struct {
	Acquired  uint64 // locks given to callers, handoffs included, and not read locks that found a lease
	Handoffs  uint64 // locks handed over within the process, without Redis
	Grants    uint64 // leases that the release of another process has granted, without an attempt that won
	Reused    uint64 // handoffs of retained leases: see Options.Linger
	Recalled  uint64 // retained leases that were released because the key was wanted elsewhere
	Attempts  uint64 // remote attempts started
	Refreshes uint64 // remote refreshes, for holders and for flights
	Commands  uint64 // acquires, refreshes and releases written to nodes; a batch counts each of them
	// Lost counts locks that were lost while in use: a majority reported so, they ran out although they were
	// refreshed or had a Context, or after a grant their ttl could not be extended (Lock.Until). Expired counts
	// locks that ran out unused: never refreshed, without a Context, not released.
	Lost, Expired uint64

	Waiters  int64 // callers waiting for a lock now
	Held     int64 // locks held now
	Retained int64 // leases that nobody holds, kept for the next caller: see Options.Linger
	Debts    int64 // releases that the nodes have not confirmed yet
	// OldestDo is the age of the oldest lock that is refreshed automatically: by Do, Lock.AutoRefresh, or a
	// Fetcher. 0: there is none.
	OldestDo time.Duration

	Suspended   int64 // nodes that did not answer or refused the login, and are only probed
	Quarantined int64 // nodes whose votes do not count, because they lost data less than MaxTTL ago
	Unverified  int64 // nodes without a vote, because they do not report whether they lost data
	Unguarded   int64 // nodes that allow no quarantine: see docs/operations.md
}

// NodeStats are the counters and states of one node.
type NodeStats struct {
	Name                                          string // its address
	Suspended, Quarantined, Unverified, Unguarded bool
	// Mode says what the node is and how it is used, such as "Redis 7.0.15, EVALSHA, grants, quarantine": see
	// docs/operations.md. It is empty before the first connection.
	Mode     string
	Debts    int64
	Commands uint64
}

// Stats reads the counters. It takes a short lock for each key in use.
func (c *Client) Stats() Stats {
	if c.flights == nil {
		return Stats{}
	}
	n := c.flights.Counts(c.fetches.Counts(c.attaches.Counts(c.reads.flights.Counts(flight.Counts{}))))
	s := Stats{
		Acquired: n.Acquired, Grants: n.Grants, Handoffs: n.Handoffs, Attempts: n.Attempts, Refreshes: n.Refreshes,
		Lost: n.Lost, Expired: n.Expired, Waiters: n.Waiters, Held: n.Held,
		Reused: n.Reused, Recalled: n.Recalled, Retained: n.Retained, OldestDo: n.OldestTimer,
	}
	for _, n := range c.NodeStats() {
		s.Commands += n.Commands
		s.Debts += n.Debts
		s.Suspended += count(n.Suspended)
		s.Quarantined += count(n.Quarantined)
		s.Unverified += count(n.Unverified)
		s.Unguarded += count(n.Unguarded)
	}
	return s
}

// NodeStats reads the counters of each node, in the order of the nodes.
func (c *Client) NodeStats() []NodeStats {
	all := make([]NodeStats, len(c.nodes))
	for i, n := range c.nodes {
		all[i] = NodeStats{
			Name: n.Name(), Suspended: n.Suspended(), Quarantined: c.quorum.Quarantined(i),
			Unverified: n.Unverified() != nil, Unguarded: n.Apart() != nil,
			Mode: n.Mode(), Debts: int64(n.Debts()), Commands: n.Commands(),
		}
	}
	return all
}

func count(yes bool) int64 {
	if yes {
		return 1
	}
	return 0
}

// Close ends the Client. It refuses new work, fails waiters with ErrClosed, and waits for holders until ctx
// ends. Then it ends the contexts of the remaining locks (cause ErrClosed) and releases these locks, which
// takes at most four times NodeTimeout; they are logged, and counted in Stats.Lost. It returns when every
// goroutine of the Client has ended; or with an error if one still waits for a connection 4s, or four times
// NodeTimeout, after ctx has ended. A second Close waits for the first and returns its error.
func (c *Client) Close(ctx context.Context) error {
	if c.flights == nil {
		return errZeroClient
	}
	c.closing.Do(func() { c.closed = c.close(ctx) })
	return c.closed
}

func (c *Client) close(ctx context.Context) error {
	above := c.attached.close(ctx)
	c.reads.flights.Shut()
	for _, g := range []*flight.Group{c.flights, c.fetches, c.attaches, c.reads.flights} {
		g.Close(ctx)
	}
	limit := time.Now().Add(node.CloseTime(c.opts.NodeTimeout))
	sent, cancel := graced(ctx, 2*c.opts.NodeTimeout, limit) // time for the releases just sent
	defer cancel()
	c.quorum.CloseWatches()
	c.end()
	errs := append(concurrently(len(c.nodes), func(i int) error { return c.nodes[i].Close(sent) }), above)
	c.bursts.flush() // with the losses that the last releases found
	logged, cancel := graced(ctx, c.opts.NodeTimeout, limit)
	defer cancel()
	c.tasks.Close()
	if err := c.tasks.Wait(logged); err != nil { // they were told to end
		errs = append(errs,
			fmt.Errorf("the Logger, an OnError, the Retry of a RefreshPolicy, a Check, or an election's "+
				"write has not returned: %w", err))
	}
	rest, stop := graced(ctx, c.opts.NodeTimeout, limit) // for steps that take no time unless they hang
	defer stop()
	errs = append(errs, c.quorum.Close(rest), closeOwn(rest, c.own), c.watching.close(rest))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("flightlock: close: %w", err)
	}
	return nil
}

// graced is ctx, except that it ends no sooner than grace from now, and otherwise no later than limit.
func graced(ctx context.Context, grace time.Duration, limit time.Time) (context.Context, context.CancelFunc) {
	soonest := time.Now().Add(grace)
	if deadline, ok := ctx.Deadline(); ok {
		limit = clock.Earlier(limit, deadline)
	}
	longer, cancel := context.WithDeadline(context.WithoutCancel(ctx), clock.Later(limit, soonest))
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

func (c *Client) uuid() string { return c.id[1 : len(c.id)-1] }

// newOwner returns the owner of one attempt. It never returns the same owner twice.
func (c *Client) newOwner() string {
	const maxID = len("#") + 36 + len("-") + 13 // 13 digits are the longest sequence number
	owner := make([]byte, 0, maxLabel+maxID)
	owner = append(owner, c.opts.Label...)
	owner = append(owner, c.id...)
	return string(strconv.AppendUint(owner, c.seq.Add(1), 36))
}

// ours reports whether owner (label#UUID-sequence) is of a client of this library, which publishes a notice
// when it releases. So does this client. (An abandoned attempt of its own that was granted late is not found
// by the next one, whose place is behind its undo; unless a connection was lost in between, and then the
// release that is owed publishes a notice.)
func ours(owner string) bool {
	if owner == node.Readers {
		return true
	}
	const idLen = len("#xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx-")
	at := strings.LastIndexByte(owner, '#')
	return at >= 0 && len(owner) > at+idLen && owner[at+idLen-1] == '-' &&
		uuid.Validate(owner[at+1:at+idLen-1]) == nil
}

// hostLabel names the process that holds a lock, for people.
var hostLabel = sync.OnceValue(func() string {
	host, _ := os.Hostname()
	return cmp.Or(host, "unknown") + ":" + strconv.Itoa(os.Getpid())
})

// guarded reports whether nodes that lost data have no vote. Otherwise all votes count: with fewer
// than three nodes no other node could vote instead, and a Cluster loses data in parts.
func (c *Client) guarded() bool {
	return !c.opts.DisableQuarantine && len(c.nodes) >= 3 &&
		!slices.ContainsFunc(c.nodes, func(n *node.Node) bool { return !n.Guardable() })
}

// quarantineTime is how long a node that lost data has no vote: no earlier lock lives longer. By the
// limits of MaxTTL and DriftFactor that is about 36h at most.
func (c *Client) quarantineTime() time.Duration {
	return c.opts.MaxTTL + time.Duration(float64(c.opts.MaxTTL)*c.opts.DriftFactor) + 2*time.Millisecond
}

// epochName names an epoch that begins. It is never the same twice, and not longer than lua.MaxName: 16
// digits of the client's UUID, 60 bits of them at random, and less than 8 of any number that is reached.
func (c *Client) epochName() string {
	return strings.ReplaceAll(c.id[1:], "-", "")[:16] + "m" + strconv.FormatUint(c.epochs.Add(1), 36)
}
