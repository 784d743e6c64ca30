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
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/queue"
	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Client locks keys on a set of nodes. New and Open make one. One Client per process and set of
// nodes is enough, and gives the best throughput, because its goroutines share flights. It is safe
// for concurrent use.
type Client struct {
	opts    Options
	clients []redis.UniversalClient // the nodes as the caller passed them
	nodes   []*node.Node
	quorum  *quorum.Quorum
	flights *flight.Group
	fetches *flight.Group // for locks of Fetchers: nobody else can queue in it

	id      string // "#" + UUID + "-", which makes owners unique
	seq     atomic.Uint64
	carried atomic.Bool   // some ctx carries a Lock of this Client
	epochs  atomic.Uint64 // for epochName

	own []redis.UniversalClient // made by Open, closed by Close

	recalls  recalls
	attached attachments // closed before anything else

	tasks     tasks           // goroutines beside locking
	check     check.Config    // for Check and announcer
	announcer check.Announcer // announces the set of nodes
	loss      manyLog
	longHeld  manyLog // locks that have been refreshed for hours
	dropped   manyLog // locks that were dropped without Release
	logs      queue.Queue[slog.Record]
	recovery  recovery

	watching *watching // nil without Options.Observers

	closing sync.Once
	closed  error // of the first Close
}

// New makes a Client over nodes: the independent Redis deployments that vote, each given by a client
// that the caller created, and will close after the Client. It sends nothing yet. A bad option or
// node is an ErrInvalid that names it.
//
// A node is a *redis.Client (a server, or a Sentinel-managed master) or a *redis.ClusterClient (a
// whole Cluster is one node). There may be 1 to 64 nodes, usually 1, 3 or 5. All must use the same
// database number (a Cluster is database 0), because one server in two databases would vote twice.
// *redis.Ring is refused: when a shard fails, a Ring moves its keys to another shard, and such a key
// would be two locks. So is what NewFailoverClusterClient makes, and NewUniversalClient with
// MasterName and IsClusterMode or a Route option: it looks like a Cluster, for which there is no
// quarantine.
//
// Locks use connections of their own, which the Client makes from the options of those clients and
// closes in Close. Each server has two of them, or four if there is only one node, and one more for
// a short time when the server is contacted for the first time, was restarted, or is probed. So the
// load on the clients' pools does not delay locks. The Client takes over everything that is needed
// to reach a server and to log in: Addr, Dialer, TLSConfig, user and password or their providers,
// DB, Protocol, OnConnect, and ClientName (for CLIENT LIST; a server that refuses CLIENT SETNAME is
// used without, which is logged). It sets pool sizes, timeouts, retries and buffers itself. Hooks of
// the clients are not called for locks.
//
// Notices of release, Check, the published list of nodes (see Check) and the map of a Cluster share
// the clients' connections; notices use one connection to each server. For these, set DialerRetries
// to 1 and DialTimeout to 2s, as Open does, so that a failed node is detected soon. A DialTimeout
// below 1.5s also applies to the connections for locks.
//
// ReplicaOnly of a Sentinel-managed master must be off: a replica cannot vote.
func New(opts Options, nodes ...redis.UniversalClient) (*Client, error) {
	return newClient(opts, "nodes", nodes)
}

// newClient is New. list names the argument with which the caller passed the nodes.
func newClient(opts Options, list string, nodes []redis.UniversalClient) (*Client, error) {
	opts, err := opts.validated()
	if err == nil {
		err = checkNodes(list, nodes)
	}
	if err != nil {
		return nil, err
	}
	c := &Client{opts: opts, clients: slices.Clone(nodes), id: "#" + uuid.NewString() + "-"}
	c.tasks.init()
	for i, n := range nodes {
		nd, err := node.New(n, opts.NodeTimeout, len(nodes) == 1)
		if err != nil {
			return nil, fmt.Errorf("flightlock: %w: %w", ErrInvalid, err)
		}
		nd.Changed, nd.Verified, nd.Unnamed = c.nodeChanged, c.nodeVerified, c.nodeUnnamed
		if name := strings.ToValidUTF8(nd.Name(), "\uFFFD"); name != nd.Name() { // a socket; labels and logs are text
			nd.Rename(name)
		}
		if c.named(nd.Name()) || nd.Name() == conn.FailoverAddr { // with dialers of their own, names may be equal
			nd.Rename(fmt.Sprintf("%s nodes[%d]", nd.Name(), i))
		}
		c.nodes = append(c.nodes, nd)
	}
	q := quorum.Config{
		Nodes: c.nodes, NodeTimeout: opts.NodeTimeout, DriftFactor: opts.DriftFactor,
		Owner: c.newOwner, NotifiesRelease: c.notifiesRelease, Same: c.sameServer,
		Guarded: c.guarded(), Quarantine: c.quarantineTime(), OnQuarantine: c.onQuarantine, OnNoInfo: c.onNoInfo,
		OnUndeclared: c.onUndeclared,
	}
	if !opts.DisableQuarantine {
		q.EpochName = c.epochName
	}
	c.quorum = quorum.New(q)
	c.check = c.checkConfig()
	cfg := c.flightConfig()
	if c.mayRetain() {
		cfg.MaxRetained = maxRetained
	}
	c.recalls.on = cfg.MaxRetained > 0
	c.watching = newWatching(c, &cfg.Observer)
	c.loss.init(c, "flightlock: lock lost", "flightlock: more locks lost")
	c.longHeld.init(c, "flightlock: a lock has been held for hours, and is refreshed until it is released",
		"flightlock: more locks have been held for hours")
	c.dropped.init(c, "flightlock: a lock was dropped without Release, and is released now: nothing refers to it any more",
		"flightlock: more locks were dropped without Release")
	if opts.Logger != nil || c.watching != nil {
		cfg.Observer.Lost = c.lost
	}
	c.flights = flight.NewGroup(cfg)
	cfg.Nodes, cfg.MaxRetained, cfg.MaxWaiters = flightNodes{c, fetchNamespace + c.opts.KeyPrefix}, 0, 0
	c.fetches = flight.NewGroup(cfg)
	if c.watching != nil {
		c.watching.opened()
	}
	return c, nil
}

// named reports whether a node has that name.
func (c *Client) named(name string) bool {
	return slices.ContainsFunc(c.nodes, func(n *node.Node) bool { return n.Name() == name })
}

// Ready dials all nodes and loads what locking needs, so that the first locks are not delayed. Call
// it before a process takes traffic. It returns nil as soon as locks can be acquired from a
// majority and every node was tried; it waits no longer for nodes that are down or still starting
// than a reply may take. Otherwise it retries until ctx ends, and returns ctx's error together with
// the last outcome, as SingleFlightLock does: ErrUnavailable, with each node and its error. If the
// nodes refuse for good (see ErrUnavailable), it does not retry. After Close it returns ErrClosed.
// A server that is older than Redis 6.2 is an ErrUnavailable, too, although locks can be acquired
// there: processes that want the same key would not notice each other.
//
// As its last step, Ready acquires, refreshes and releases three locks of its own, whose keys have
// hash slots that are far apart, because some servers and proxies refuse some slots only. They are
// named "flightlock-ready-", the id of the Client, and a hash tag, below Options.KeyPrefix. A refresh
// or a release that is not confirmed in time is no error, unless nodes refuse it: the Client keeps
// trying. Ready is safe for concurrent use, and may be called again.
func (c *Client) Ready(ctx context.Context) error {
	if c.flights == nil {
		return errZeroClient
	}
	var wg sync.WaitGroup
	unfit := make([]error, len(c.nodes))
	for i, n := range c.nodes {
		wg.Go(func() {
			var e *node.Unfit
			if errors.As(n.Ready(ctx), &e) { // the locks below report the other errors
				unfit[i] = e
			}
		})
	}
	wg.Wait()
	if err := errors.Join(unfit...); err != nil {
		return fmt.Errorf("flightlock: not ready: %w: %w", ErrUnavailable, err)
	}
	tags := node.SpreadTags()
	errs := make([]error, len(tags))
	for i, tag := range tags {
		wg.Go(func() { errs[i] = c.tryKey(ctx, "flightlock-ready-"+c.id[1:len(c.id)-1]+":{"+tag+"}") })
	}
	wg.Wait()
	return cmp.Or(errs...)
}

// tryKey acquires, refreshes and releases key, for Ready.
func (c *Client) tryKey(ctx context.Context, key string) error {
	l, err := c.acquire(ctx, key, max(minTTL, min(time.Second, c.opts.MaxTTL)), nil, false)
	if err != nil {
		return fmt.Errorf("flightlock: not ready: %w", within(err))
	}
	defer func() { _ = l.Release(ctx) }()
	for _, step := range []func(context.Context) error{l.Refresh, l.Release} {
		if err := step(ctx); errors.Is(err, ErrClosed) || refused(err) {
			return err
		}
	}
	return nil
}

// refused reports whether err says that a node has refused a request. Otherwise the reply was late, or what
// was requested had run out before.
func refused(err error) bool {
	var q *QuorumError
	return errors.As(err, &q) && slices.ContainsFunc(q.Nodes, func(n NodeError) bool { return conn.IsReply(n.Err) })
}

// Stats are counters since New, and gauges.
type Stats struct {
	Acquired  uint64 // locks given to callers, handoffs included
	Handoffs  uint64 // locks handed over within the process, without Redis
	Grants    uint64 // leases that the release of another process has granted, without an attempt that won
	Reused    uint64 // handoffs of retained leases: see Options.Linger
	Recalled  uint64 // retained leases that were released because the key was wanted elsewhere
	Attempts  uint64 // remote attempts started
	Refreshes uint64 // remote refreshes, for holders and for flights
	Commands  uint64 // acquires, refreshes and releases written to nodes; a batch counts each of them

	// Lost counts locks that were lost while in use: the nodes report so, or they ran out although
	// they were refreshed or had a Context, or before their full ttl because that could not be given to
	// them after a grant (Lock.Until). Expired counts locks that ended by their ttl: never refreshed,
	// without a Context, and not released before.
	Lost, Expired uint64

	Waiters  int64 // callers waiting for a lock now
	Held     int64 // locks held now
	Retained int64 // leases that nobody holds, kept for the next caller: see Options.Linger
	Debts    int64 // unacknowledged releases: sent or to be sent to nodes, and not confirmed by them yet

	// OldestDo is how long the oldest lock that is refreshed automatically has been held: by Do, by
	// Lock.AutoRefresh, or for a load of a Fetcher; 0 if there is none.
	OldestDo time.Duration

	Suspended   int64 // nodes that did not answer or refused the login, and are only probed
	Quarantined int64 // nodes whose votes do not count, because they lost data less than MaxTTL ago
	Unverified  int64 // nodes without a vote, because they do not report whether they lost data

	// Unguarded counts nodes whose scripts may access only the keys that they declare, or only those of one server of
	// several. With one of them there is no quarantine: see docs/operations.md.
	Unguarded int64
}

// NodeStats are what Stats sums up of one node.
type NodeStats struct {
	Name        string // its address
	Suspended   bool
	Quarantined bool
	Unverified  bool
	Unguarded   bool
	// Unidentified nodes do not report their process: if one restarts with old data, that may go unnoticed.
	Unidentified bool
	Debts        int64
	Commands     uint64
}

// Stats reads the counters. It is cheap: it takes a short lock per shard and per key in use.
func (c *Client) Stats() Stats {
	if c.flights == nil {
		return Stats{}
	}
	n := c.flights.Counts(c.fetches.Counts(flight.Counts{}))
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
			Unverified: n.Unverified() != nil, Unguarded: n.Undeclared() != nil, Unidentified: n.Unidentified() != nil,
			Debts: int64(n.Debts()), Commands: n.Commands(),
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

// Close ends the Client. It refuses new work, fails waiters with ErrClosed, and waits for holders
// until ctx ends. Then it ends the contexts of the remaining locks (cause ErrClosed) and releases
// these locks, which takes at most four times NodeTimeout. Close does not report them: Options.Logger
// logs them, and Stats.Lost counts them. It returns when every goroutine of the Client has ended. A
// goroutine that waits on a stalled connection may need 4s for that, or four times NodeTimeout if that
// is more; when ctx has ended, Close gives up on it and returns an error. A dial, or a request to
// Sentinels or a Cluster, that go-redis has not ended by then ends by the DialTimeout and ReadTimeout
// of its client.
//
// A second Close waits for the first and returns the same error.
func (c *Client) Close(ctx context.Context) error {
	if c.flights == nil {
		return errZeroClient
	}
	c.closing.Do(func() { c.closed = c.close(ctx) })
	return c.closed
}

func (c *Client) close(ctx context.Context) error {
	above := c.attached.close(ctx)
	c.announcer.Stop()
	c.flights.Close(ctx)
	c.fetches.Close(ctx)
	c.loss.flush()
	c.longHeld.flush()
	c.dropped.flush()
	limit := time.Now().Add(node.CloseTime(c.opts.NodeTimeout))
	sent, cancel := graced(ctx, 2*c.opts.NodeTimeout, limit) // time for the releases just sent
	defer cancel()
	errs := make([]error, len(c.nodes))
	var watches, beside error
	var wg sync.WaitGroup
	for i, n := range c.nodes {
		wg.Go(func() { errs[i] = n.Close(sent) })
	}
	wg.Go(func() { watches = c.quorum.CloseWatches(sent) })
	wg.Go(func() { beside = c.tasks.end(sent) })
	wg.Wait()
	rest, stop := graced(ctx, c.opts.NodeTimeout, limit) // for steps that take no time unless they hang
	defer stop()
	errs = append(errs, above, watches, beside, c.quorum.Close(rest), closeOwn(rest, c.own), c.watching.close(rest))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("flightlock: close: %w", err)
	}
	return nil
}

// graced is ctx, except that it ends no sooner than grace from now, and otherwise no later than
// limit.
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

// newOwner returns the owner of one attempt. It never returns the same owner twice.
func (c *Client) newOwner() string {
	owner := make([]byte, 0, maxLabel+maxID)
	owner = append(owner, c.opts.Label...)
	owner = append(owner, c.id...)
	return string(strconv.AppendUint(owner, c.seq.Add(1), 36))
}

// notifiesRelease reports whether owner's client publishes a notice when it releases. Other
// libraries do not. This client does as well. (An abandoned attempt of its own that was granted late is not found
// by the next one, whose place is behind its undo; unless a connection was lost in between, and then the release
// that is owed publishes a notice.)
func (c *Client) notifiesRelease(owner string) bool { return ours(owner) }

// ours reports whether owner was made by a client of this library: label#UUID-sequence.
func ours(owner string) bool {
	const idLen = len("#xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx-")
	at := strings.LastIndexByte(owner, '#')
	return at >= 0 && len(owner) > at+idLen && owner[at+idLen-1] == '-' && uuid.Validate(owner[at+1:at+idLen-1]) == nil
}

// hostLabel names the process that holds a lock, for people.
var hostLabel = sync.OnceValue(func() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + ":" + strconv.Itoa(os.Getpid())
})

// nodeChanged logs that a node was suspended, with the fix if there is one, or that it is back.
func (c *Client) nodeChanged(name string, err error) {
	if err != nil {
		c.recheckAway()
	}
	switch {
	case errors.Is(err, conn.ErrLogin):
		c.log(slog.LevelWarn, "flightlock: node suspended: login refused", "node", name, "err", err, "fix",
			c.check.FixLogin(name, err))
	case err != nil:
		c.log(slog.LevelWarn, "flightlock: node suspended: it does not answer", "node", name, "err", err)
	default:
		c.recovery.announce()
		c.log(slog.LevelInfo, "flightlock: node is back", "node", name)
	}
}

// recheckAway notifies the flights if no majority can be reached, so that callers that fail fast end
// their wait.
func (c *Client) recheckAway() {
	c.tasks.Go(func() {
		if c.away() {
			c.flights.Recheck()
			c.fetches.Recheck()
		}
	})
}

// nodeVerified logs that a node refuses to report whether it lost data, or has done so.
func (c *Client) nodeVerified(name string, err error) {
	if err != nil {
		c.recheckAway()
		c.log(slog.LevelWarn, "flightlock: node unverified", "node", name, "err", err)
	} else {
		c.recovery.announce()
		c.log(slog.LevelInfo, "flightlock: node is verified again", "node", name)
	}
}

// nodeUnnamed logs that a node refuses names for connections.
func (c *Client) nodeUnnamed(name string, err error) {
	c.log(slog.LevelWarn, "flightlock: connections have no name: the node refuses CLIENT SETNAME", "node", name,
		"err", err)
}

// lost is called for every lock that was lost.
func (c *Client) lost(key string, w *flight.Watch, why error) {
	if c.watching != nil {
		c.watching.lost(key, w, why)
	}
	c.loss.of(key, "err", why)
}

func (c *Client) sameServer(ctx context.Context, i, j int) (bool, error) {
	return node.SameServer(ctx, c.clients[i], c.clients[j], uuid.NewString())
}

// tasks are a Client's goroutines beside the lock traffic. Close waits for them, and ends the
// contexts that they use.
type tasks struct {
	group.Group
	closed context.Context // ended by end
	cancel context.CancelFunc
}

func (t *tasks) init() { t.closed, t.cancel = context.WithCancel(context.Background()) }

// context is parent, which end also ends, with ErrClosed as its cause. cancel frees it.
func (t *tasks) context(parent context.Context) (_ context.Context, cancel context.CancelFunc) {
	ctx, stopped := context.WithCancelCause(parent)
	stop := context.AfterFunc(t.closed, func() { stopped(ErrClosed) })
	if t.closed.Err() != nil { // not only soon
		stopped(ErrClosed)
	}
	return ctx, func() { stop(); stopped(nil) }
}

// end refuses further tasks, ends their contexts, and waits for them until ctx ends.
func (t *tasks) end(ctx context.Context) error {
	t.Close()
	t.cancel()
	if err := t.Wait(ctx); err != nil {
		return fmt.Errorf("the Logger, an OnError, the Retry of a RefreshPolicy, or a Check has not returned: %w", err)
	}
	return nil
}
