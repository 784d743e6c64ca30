// Package check determines whether nodes are fit for locking, and announces on them the set of nodes
// that a client locks on.
package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// timeout limits an announcement, and a check of nodes that are near, even if sockets hang; longest any
// check.
const (
	timeout = 5 * time.Second
	longest = 30 * time.Second
)

// Limit is how long a check may take, which asks one thing after the other.
func Limit(nodeTimeout time.Duration) time.Duration {
	return max(timeout, min(60*nodeTimeout, longest))
}

// Config describes a client's nodes and settings. It is immutable.
type Config struct {
	Clients []redis.UniversalClient
	Nodes   []*node.Node // of these clients, in the same order

	KeyPrefix           string
	NodeTimeout, MaxTTL time.Duration
	DriftFactor         float64
	DisableNotify       bool
	DisableQuarantine   bool

	Guarded     bool             // nodes that lost their data have no vote
	Quarantine  time.Duration    // how long they have none
	Quarantined func(i int) bool // whether node i is quarantined

	// TryLocks acquires, refreshes and releases locks of several hash slots as users do. byNode are the errors
	// of the nodes that have no vote, by their names, if err is not nil.
	TryLocks func(ctx context.Context) (byNode map[string]error, err error)

	Process string       // a name for this process, for people
	Run     func(func()) // starts a goroutine that the client waits for when it is closed

	announced sync.Map // the names of the sets that this client has announced: more than one after failovers
}

// Status is the verdict of a Finding.
type Status string

// The statuses. The client's Check documents them.
const (
	OK      Status = "ok"
	Unknown Status = "unknown"
	Warn    Status = "warn"
	Fail    Status = "fail"
)

// Finding is the result of one rule, for one server.
type Finding struct {
	Node   string // the server's address; empty if it concerns all nodes
	Check  string
	Status Status
	Found  string
	Why    string
	Fix    string
}

// nodeInfo is what was found out about a node's servers, or the reason why nothing was.
type nodeInfo struct {
	servers []serverInfo
	err     error
}

// inspections are the state of one check.
type inspections struct {
	*Config
	nonce string
	nodes []nodeInfo
	sets  []result[string] // by node
	locks Finding

	mu         sync.Mutex // guards what follows
	duplicates [][2]int
	uncompared int
}

// Check inspects all nodes concurrently and judges the results: first each node, then what concerns
// all of them. When ctx ends, it returns what was found by then. nonce makes names that no other
// check uses.
func (c *Config) Check(ctx context.Context, nonce string) []Finding {
	in := &inspections{Config: c, nonce: nonce, nodes: make([]nodeInfo, len(c.Nodes))}
	var wg sync.WaitGroup
	wg.Go(func() { in.sets = c.readSets(ctx) })
	wg.Go(func() { in.locks = in.tryLocks(ctx) })
	for i, client := range c.Clients {
		wg.Go(func() {
			in.nodes[i].servers, in.nodes[i].err = inspect(ctx, client, c.KeyPrefix, nonce,
				max(stepTime, min(10*c.NodeTimeout, longestStep)), c.Run)
		})
		for j := range i {
			wg.Go(func() { in.compare(ctx, j, i) })
		}
	}
	wg.Wait()
	return in.judge()
}

// compare determines whether two nodes are one server.
func (in *inspections) compare(ctx context.Context, i, j int) {
	a, b := withTimeout(in.Clients[i]), withTimeout(in.Clients[j])
	same, err := await(ctx, in.Run, func() (bool, error) {
		return node.SameServer(ctx, a, b, in.nonce+fmt.Sprint(i, j))
	})
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case err != nil:
		in.uncompared++
	case same:
		in.duplicates = append(in.duplicates, [2]int{i, j})
	}
}

// withTimeout returns client with timeouts of our own, where go-redis supports that.
func withTimeout(client redis.UniversalClient) redis.UniversalClient {
	if c, ok := client.(*redis.Client); ok {
		return conn.WithTimeout(c, stepTime)
	}
	return client
}

func (in *inspections) judge() (all []Finding) {
	middle, unguarded := in.middleClock(), ""
	for i, n := range in.nodes {
		for _, s := range n.servers {
			if s.Apart != nil {
				unguarded = in.Nodes[i].Name()
			}
		}
	}
	for i, n := range in.nodes {
		if n.err != nil {
			all = append(all, in.unknownCluster(i, n.err))
		}
		for _, s := range n.servers {
			if !s.Cluster { // where a Sentinel-managed master is, only its dialer knows
				s.Addr = in.Nodes[i].Name()
			}
			if s.Err != nil {
				all = append(all, unreachable(in.command(i, s.Addr), s.Err))
				continue
			}
			t := target{Config: in.Config, i: i, serverInfo: s, middle: middle, unguarded: unguarded}
			for _, rule := range rules {
				found := rule.judge(t)
				found.Node, found.Check, found.Why = s.Addr, rule.name, rule.why
				all = append(all, found)
			}
		}
		if mode := in.Nodes[i].Mode(); mode != "" { // else it cannot be reached, and has a finding that says so
			all = append(all, Finding{Node: in.Nodes[i].Name(), Check: "mode", Status: OK, Found: mode,
				Why: "locks do without what a server refuses: that costs more commands, or a loss of data is not " +
					"noticed"})
		}
	}
	return append(all, in.judgeDuplicates(), in.judgeSets(), in.locks)
}

// tryLocks is the finding that counts: whether locks can be had from these nodes, whatever the others say.
func (in *inspections) tryLocks(ctx context.Context) Finding {
	f := Finding{Check: "locks", Status: OK, Found: "acquired, refreshed and released, in several hash slots",
		Why: "whatever the reason, nobody gets a lock that this client cannot get"}
	if byNode, err := in.TryLocks(ctx); err != nil {
		f.Status, f.Found, f.Fix = Fail, errtext.OneLine(err), in.FixAll(byNode)
		if ctx.Err() != nil {
			f.Status = Unknown
		}
	}
	return f
}

// FixAll returns what to do about nodes that have no vote for these errors, by their names; "" if that is not
// known.
func (c *Config) FixAll(byNode map[string]error) string {
	var all []string
	for i, n := range c.Nodes {
		if err := byNode[n.Name()]; err != nil {
			if fix := c.fix(i, err); fix != "" {
				all = append(all, n.Name()+": "+fix)
			}
		}
	}
	return strings.Join(all, "; ")
}

// fix returns what to do about the i-th node, which has no vote for err.
func (c *Config) fix(i int, err error) string {
	cli := c.command(i, c.Nodes[i].Name())
	t := target{Config: c, i: i, serverInfo: serverInfo{Addr: cli.addr, User: cli.user,
		Cluster: c.Nodes[i].IsCluster()}}
	_, noMaster := conn.NoMaster(err)
	switch text := errtext.OneLine(err); {
	case !noMaster && conn.NoRights(err):
		return t.grant()
	case noMaster, errors.Is(err, conn.ErrLogin):
		return doesNotServe(cli, err).Fix
	case node.IsLate(err):
		return fmt.Sprintf("answers take longer than NodeTimeout, which is %v: set Options.NodeTimeout to ten "+
			"times a "+
			"round trip, or use a nearer node", c.NodeTimeout)
	case c.Quarantined(i):
		return "wait: it votes again by itself"
	case conn.IsReply(err):
		return cmp.Or(t.remedy(text), doesNotServe(cli, err).Fix)
	case errors.Is(err, node.ErrSuspended) && conn.TimedOut(err):
		return fmt.Sprintf("%s; or, if that takes longer than NodeTimeout, which is %v, raise Options.NodeTimeout",
			doesNotServe(cli, err).Fix, c.NodeTimeout)
	case errors.Is(err, node.ErrSuspended):
		return doesNotServe(cli, err).Fix
	}
	return ""
}

// unknownCluster is the finding for the i-th node, a Cluster whose servers are not known because of err.
func (in *inspections) unknownCluster(i int, err error) Finding {
	cli := in.command(i, in.Nodes[i].Name())
	f := unreachable(cli, err)
	switch {
	case conn.HasCode(err, "NOPERM"): // to CLUSTER SLOTS, or to a step of the login
		t := target{Config: in.Config, i: i, serverInfo: serverInfo{Addr: cli.addr, User: cli.user, Cluster: true}}
		f.Fix = t.grant()
	case strings.Contains(f.Found, "cluster support disabled"):
		f.Fix = "it is no Cluster: give each server a url of its own, without ?addr=, for Open, " +
			"and a client by redis.NewClient for New"
	}
	return f
}

func (in *inspections) judgeDuplicates() Finding {
	f := Finding{Check: "same server",
		Why: "a server that is in the list twice has two votes, so a majority may be one machine"}
	switch {
	case len(in.duplicates) > 0:
		var pairs []string
		for _, t := range in.duplicates {
			pairs = append(pairs, fmt.Sprintf("nodes[%d] (%s) and nodes[%d] (%s)",
				t[0], in.Nodes[t[0]].Name(), t[1], in.Nodes[t[1]].Name()))
		}
		f.Status, f.Found = Fail, strings.Join(pairs, ", ")+" are the same server"
		f.Fix = "give each server once; every node must be a server of its own"
	case in.uncompared > 0:
		f.Status, f.Found = Unknown, fmt.Sprintf("%d pairs of nodes could not be compared", in.uncompared)
	case len(in.Nodes) == 1:
		f.Status, f.Found = OK, "one node"
	default:
		f.Status, f.Found = OK, fmt.Sprintf("%d nodes, all different", len(in.Nodes))
	}
	return f
}

// middleClock returns the median of the nodes' clock offsets; 0 if none is known. That of a Cluster is the
// median of its masters, so that these do not outvote the other nodes.
func (in *inspections) middleClock() time.Duration {
	var nodes []time.Duration
	for _, n := range in.nodes {
		var servers []time.Duration
		for _, s := range n.servers {
			if s.Err == nil && s.ClockErr == nil {
				servers = append(servers, s.Clock.Offset)
			}
		}
		if len(servers) > 0 {
			nodes = append(nodes, median(servers))
		}
	}
	if len(nodes) == 0 {
		return 0
	}
	return median(nodes)
}

// median is the middle one of all, the lower one of two. It sorts all.
func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[(len(all)-1)/2]
}
