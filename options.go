package flightlock

import (
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// Options say how a Client locks. The zero value of each field but Nodes is its default.
type Options struct {
	// Nodes are the independent Redis deployments that vote: *redis.Client (a server, or
	// a Sentinel-managed master) or *redis.ClusterClient (a whole Cluster is one node).
	// *redis.Ring is refused: a key that moves to another shard when one fails is two
	// locks. 1 to 64, usually 1, 3 or 5. All must use one database number (a Cluster is
	// database 0): one server in two databases would vote twice. The Client makes connections
	// of its own from their options, see New, and never closes these clients.
	Nodes []redis.UniversalClient

	// KeyPrefix goes before every lock key; "" means "lock:", so that locking the name of
	// a cache entry does not meet its value. NoPrefix for none: then other Redlock clients
	// on the same nodes and keys exclude us and we exclude them.
	KeyPrefix string

	// NodeTimeout is how long one node may take to answer a request once that was written to a
	// connection that is ready, and never more than the ttl. What a request waits before that, in
	// this process or for a connection, does not count. A new connection has 1.5s to be
	// established, and NodeTimeout for each step of its handshake. A node that has
	// not answered anything for three times NodeTimeout is suspended: nothing but a probe is
	// sent to it until it answers. Default 50ms; 1ms to 1m.
	NodeTimeout time.Duration

	// MaxTTL is the longest ttl accepted. Default 1m; 10ms to 24h. It is also how long a
	// node that lost its memory has no vote. It must be equal in all clients of the same nodes.
	MaxTTL time.Duration

	// DriftFactor is the share of a ttl by which the clocks of client and nodes may run
	// apart; validity loses it, and a fixed 2ms. Default 0.01, below 0.5. Where that leaves less than
	// two thirds of a ttl, a lock is handed over with three quarters of its validity or more.
	DriftFactor float64

	// HandoffSlice is how long one process may keep a lease by handing it on while another
	// process waits for it; then it is the other's turn. Default 20ms; negative turns
	// handoff off; there is no upper limit. Shorter slices make processes wait less for each
	// other, and cost more round trips.
	HandoffSlice time.Duration

	// MaxWaiters is how many callers of this process may wait for one key; one more gets
	// ErrTooManyWaiters. 0 means no limit.
	MaxWaiters int

	// NewOwner gives a label for the owner of an attempt, to be recognised by people; nil
	// means host name and process id. What is stored is label + "#" + client UUID + "-" +
	// sequence, so two processes with equal labels do not share a lock. Labels are cut at
	// 256 bytes. It may be called from any goroutine, at once, and must not block. If it panics,
	// the label says so.
	NewOwner func() string

	// DisableNotify has waiters poll, as their strategy says and every 50ms at least,
	// without subscribing to notices of release. It saves one connection per server, and
	// costs latency when a lock passes between processes.
	DisableNotify bool

	// DisableQuarantine has the votes of nodes count that have just lost their memory: that
	// were restarted or flushed, or failed over to a replica that lagged. Otherwise, with 3
	// nodes or more and no Cluster among them, such a node has no vote for MaxTTL and
	// DriftFactor on top, for it might grant what it had granted before. That is for nodes
	// that cannot forget (appendfsync always), or for embedded ones. With fewer nodes every
	// vote counts anyway; there it turns off that tokens go on above those that a node forgot.
	// It must be equal in all clients of the same nodes. See docs/guarantees.md.
	DisableQuarantine bool

	// Registerer gets the metrics of this Client, until it is closed: docs/metrics.md. Two
	// Clients on one Registerer need a label each, by prometheus.WrapRegistererWith. nil
	// means no metrics, at no cost. One that panics is an error of New and Close; one that
	// hangs is an error of New after 5s, and of Close when its ctx ends.
	Registerer prometheus.Registerer

	// Logger hears, at level Warn, that nodes are suspended, in quarantine, or refuse to say whether
	// they lost their memory, that locks are lost (the first
	// of a second with its key and reason, the rest as a number), and that other clients
	// use another set of nodes; at level Info, that nodes are back or vote again. It hears of no single
	// operation, and of no password. One goroutine writes, beside the locks: a log that hangs
	// holds up nothing, up to 128 lines wait for it, and more are only counted. If it panics, that
	// line is lost, and nothing else. nil means silence.
	Logger *slog.Logger
}

// NoPrefix as Options.KeyPrefix stands for no prefix at all.
const NoPrefix = "\x00"

const (
	minTTL   = 10 * time.Millisecond
	maxKey   = 4 << 10
	maxNodes = 64
	maxLabel = 256
)

// The limits of what clients and servers compute with. All that is added up or multiplied below
// (a quarantine, a validity, the time of an exchange, a ttl in milliseconds) stays far from the
// end of an int64 by these, and with minTTL the validity of any ttl is 3ms at least.
const (
	longestTTL         = 24 * time.Hour
	longestNodeTimeout = time.Minute // an exchange is given up after four of them, which Close waits for
	maxDriftFactor     = 0.5         // below it
)

// validated fills in the defaults and finds what cannot be.
func (o Options) validated(list string) (Options, error) {
	switch o.KeyPrefix {
	case "":
		o.KeyPrefix = "lock:"
	case NoPrefix:
		o.KeyPrefix = ""
	}
	setDefault(&o.NodeTimeout, 50*time.Millisecond)
	setDefault(&o.MaxTTL, time.Minute)
	setDefault(&o.DriftFactor, 0.01)
	setDefault(&o.HandoffSlice, 20*time.Millisecond)
	if o.NewOwner == nil {
		o.NewOwner = hostLabel
	}
	switch {
	case o.NodeTimeout < time.Millisecond || o.NodeTimeout > longestNodeTimeout:
		return o, invalid("Options.NodeTimeout", o.NodeTimeout, fmt.Sprintf("it must be from 1ms to %v", longestNodeTimeout))
	case o.MaxTTL < minTTL || o.MaxTTL > longestTTL:
		return o, invalid("Options.MaxTTL", o.MaxTTL, fmt.Sprintf("it must be from %v to %v", minTTL, longestTTL))
	case math.IsNaN(o.DriftFactor) || o.DriftFactor < 0 || o.DriftFactor >= maxDriftFactor:
		return o, invalid("Options.DriftFactor", o.DriftFactor, "it must be from 0 to below 0.5")
	case o.MaxWaiters < 0:
		return o, invalid("Options.MaxWaiters", o.MaxWaiters, "it must not be below 0")
	case len(o.KeyPrefix) > maxKey:
		return o, invalid("Options.KeyPrefix", fmt.Sprintf("%d bytes long", len(o.KeyPrefix)), fmt.Sprintf("%d is the limit", maxKey))
	}
	return o, checkNodes(list, o.Nodes)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// checkNodes finds nodes that cannot vote together. list is what the caller gave them in.
func checkNodes(list string, nodes []redis.UniversalClient) error {
	if len(nodes) == 0 {
		return invalid(list, "empty", "at least one node is needed")
	}
	if len(nodes) > maxNodes {
		return invalid(list, fmt.Sprintf("%d nodes", len(nodes)), fmt.Sprintf("%d is the limit", maxNodes))
	}
	short := strings.TrimPrefix(list, "Options.")
	for i, n := range nodes {
		field := fmt.Sprintf("%s[%d]", list, i)
		if err := checkNode(field, n); err != nil {
			return err
		}
		for j, m := range nodes[:i] {
			if name, same := sameServer(m, n); same {
				return invalid(field, name, fmt.Sprintf("that is %s[%d] already: one server has one vote", short, j))
			}
		}
		first, d := database(nodes[0])
		if name, e := database(n); d != e {
			return invalid(field, fmt.Sprintf("database %d at %s", e, name),
				fmt.Sprintf("%s[0] is database %d at %s: all nodes must use one number, or a server behind two of them would vote twice", short, d, first))
		}
	}
	return nil
}

func checkNode(field string, n redis.UniversalClient) error {
	if n == nil || reflect.ValueOf(n).IsNil() {
		return invalid(field, "nil", "a *redis.Client or *redis.ClusterClient is needed")
	}
	switch n.(type) {
	case *redis.Client, *redis.ClusterClient:
		return nil
	case *redis.Ring:
		return invalid(field, "a *redis.Ring", "a Ring moves keys to other shards when one fails: give each shard as a node of its own")
	}
	return invalid(field, fmt.Sprintf("a %T", n), "a *redis.Client or *redis.ClusterClient is needed")
}

// sameServer finds out, without asking them, whether two clients obviously talk to one
// server. What it cannot see is found when the nodes vote.
func sameServer(a, b redis.UniversalClient) (name string, same bool) {
	if a == b {
		return fmt.Sprint(a), true
	}
	x, ok1 := a.(*redis.Client)
	y, ok2 := b.(*redis.Client)
	if !ok1 || !ok2 {
		return "", false
	}
	ox, oy := x.Options(), y.Options()
	// With a dialer of its own, the address may mean anything.
	same = ox.Network == oy.Network && ox.Addr == oy.Addr && dialsPlainly(ox) && dialsPlainly(oy)
	return ox.Addr, same
}

// database is where n keeps its keys, and the number of the database there.
//
// All nodes must have the same. What one server was told by one of its names it then shows to the
// other, in the answer to the acquire itself, before that is a vote: also if a server becomes
// the twin of another later, by a failover or a change of names. Between databases there is no such sign.
// To compare processes (INFO run_id) takes a right that not all users have, and an answer of all
// nodes, and holds for the moment only.
func database(n redis.UniversalClient) (name string, number int) {
	if c, ok := n.(*redis.Client); ok {
		return c.Options().Addr, max(c.Options().DB, 0)
	}
	return fmt.Sprint(n.(*redis.ClusterClient).Options().Addrs), 0
}

func dialsPlainly(o *redis.Options) bool {
	return reflect.ValueOf(o.Dialer).Pointer() == plainDialer()
}

// plainDialer tells the dialer that go-redis gives to a client that brings none.
var plainDialer = sync.OnceValue(func() uintptr {
	c := redis.NewClient(&redis.Options{})
	defer c.Close()
	return reflect.ValueOf(c.Options().Dialer).Pointer()
})

// checkKey finds keys that cannot be locked.
func (c *Client) checkKey(key string) error {
	switch {
	case key == "":
		return invalid("key", "empty", "a lock needs a name")
	case len(key) > maxKey:
		return invalid("key", fmt.Sprintf("%d bytes long", len(key)), fmt.Sprintf("%d is the limit", maxKey))
	case startsWith(c.opts.KeyPrefix, key, node.Reserved):
		return invalid("key", fmt.Sprintf("%q", key), fmt.Sprintf("keys that begin with %q are flightlock's own", node.Reserved))
	}
	return nil
}

// startsWith reports whether prefix and key together begin with s.
func startsWith(prefix, key, s string) bool {
	n := min(len(prefix), len(s))
	return prefix[:n] == s[:n] && strings.HasPrefix(key, s[n:])
}

func (c *Client) checkTTL(ttl time.Duration) error {
	switch {
	case ttl < minTTL:
		return invalid("ttl", ttl, fmt.Sprintf("it must be %v or more", minTTL))
	case ttl > c.opts.MaxTTL:
		return invalid("ttl", ttl, fmt.Sprintf("Options.MaxTTL is %v", c.opts.MaxTTL))
	}
	return nil
}
