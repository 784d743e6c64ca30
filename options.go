package flightlock

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
)

// Options configure a Client. The zero value of each field means its default.
type Options struct {
	// KeyPrefix is prepended to every lock key. "" means "lock:", so that a lock on the name of a cache entry
	// does not collide with the entry. At most 4,096 bytes.
	KeyPrefix string

	// NoPrefix stores keys exactly as callers pass them, so that this Client and other Redlock clients on the
	// same nodes exclude each other. It turns Linger off. With a KeyPrefix it is an ErrInvalid.
	NoPrefix bool

	// Label is the part of every owner by which people recognise the process: the owner is Label + "#" + client
	// UUID + "-" + sequence. "" means "host:pid". At most 256 bytes.
	Label string

	// NodeTimeout is how long a node may take to answer a request, from when it was written to a connection that
	// is ready; never more than the ttl. Time in this process does not count, nor a dial (1.5s, and NodeTimeout
	// for each step of its handshake). A node that answers nothing for three times NodeTimeout is suspended, and
	// only probed. Default 50ms; 1ms to 1m.
	NodeTimeout time.Duration

	// MaxTTL is the longest ttl accepted, and how long a node that lost its data has no vote. It must be equal
	// in all clients of the same nodes. Default 1m; 10ms to 24h.
	MaxTTL time.Duration

	// DriftFactor is the fraction of a ttl by which the clocks of client and nodes may drift apart. It is
	// subtracted from the validity, together with a fixed 2ms. Default 0.01; below 0.5.
	DriftFactor float64

	// HandoffSlice is how long one process may hand a lease on while another process waits for the key. With
	// shorter slices processes wait less for each other, and need more round trips. Default 20ms; negative: no
	// handoff.
	HandoffSlice time.Duration

	// Linger is how long the process keeps the lease of a key after the last of its callers has released it, so
	// that the next caller gets the lock without a Redis command: for keys that one process uses again and
	// again. It costs other processes that want the key two round trips, or if this process has died the rest of
	// the ttl. At most half the ttl counts, and 10,000 leases are kept. docs/usage.md lists where it has no
	// effect. Default 0: off; it must not be negative.
	Linger time.Duration

	// LingerFor, if not nil, returns the Linger of a key, in place of Linger: 0 or less means none. The last
	// holder's result counts. It is called as Class is, also without Observers.
	LingerFor func(key string) time.Duration

	// Refresh is how Do and Fetchers keep their locks, and what the zero policy means to Lock.AutoRefresh. If
	// its Interval does not suit a ttl, calls with that ttl return ErrInvalid.
	Refresh RefreshPolicy

	// MaxWaiters is how many callers of this process may wait for one key. Further callers get
	// ErrTooManyWaiters. Default 0: no limit; it must not be negative.
	MaxWaiters int

	// DisableNotify turns notices of release off: waiters poll, as their strategy says and at least every 50ms,
	// and locks pass more slowly between processes.
	DisableNotify bool

	// DisableQuarantine makes the votes of a node count even if it has just lost data, by a restart, a flush, or
	// a failover. By default, and with 3 nodes or more, such a node has no vote for MaxTTL plus DriftFactor,
	// because it might grant a lock that it has granted before; nor has one that refuses INFO, because nobody
	// would notice. There is no quarantine if a node is a Cluster, or one address of several servers.
	//
	// Set it for nodes that cannot lose data (appendfsync always), or for embedded nodes, equally in all clients
	// of the same nodes. With 1 or 2 nodes it only means that after a loss of data tokens may repeat. See
	// docs/operations.md.
	DisableQuarantine bool

	// Observers receive what this Client does: packages prom and otel make metrics and traces of it. Several
	// Clients may have one Observer.
	Observers []*Observer

	// Class returns the class of a key for Observers: a label with few values, such as the key's first part. It
	// is called concurrently, on the caller's goroutine, for each lock that does not nest, if there are
	// Observers. It should return at once; if it panics, the call panics. nil: no classes.
	Class func(key string) string

	// Logger receives changes of state, not single operations, and never passwords. Warn: nodes without a vote
	// or with missing rights, locks that were lost, held for an hour or dropped, other clients on another set of
	// nodes, loads without locks. Error: an OnError or Observer panicked. Info: a node votes again, or how it is
	// used. docs/operations.md lists the lines. A log that hangs or panics delays nothing: up to 128 lines wait,
	// and further ones are dropped and counted. nil: no log.
	Logger *slog.Logger
}

// The limits of what clients and servers compute with. With them, every sum and product below (a quarantine,
// a validity, the duration of an exchange, a ttl in milliseconds) stays far from the end of an int64, and the
// validity of any ttl is at least 3ms.
const (
	minTTL             = 10 * time.Millisecond
	longestTTL         = 24 * time.Hour
	longestNodeTimeout = time.Minute // an exchange is given up after four of them, which Close waits for

	maxKey      = 4 << 10
	maxNodes    = 64
	maxLabel    = 256
	maxRetained = 10_000 // leases of a Client: some 10 MB, and a Close that returns them within a second
)

// validated fills in the defaults and reports a field that is out of range.
func (o Options) validated() (Options, error) {
	if o.NoPrefix && o.KeyPrefix != "" {
		return o, invalid("Options.KeyPrefix", fmt.Sprintf("%q", o.KeyPrefix),
			"Options.NoPrefix is set: use one of them")
	}
	if !o.NoPrefix {
		o.KeyPrefix = cmp.Or(o.KeyPrefix, "lock:")
	}
	o.NodeTimeout = cmp.Or(o.NodeTimeout, 50*time.Millisecond)
	o.MaxTTL = cmp.Or(o.MaxTTL, time.Minute)
	o.DriftFactor = cmp.Or(o.DriftFactor, 0.01)
	o.HandoffSlice = cmp.Or(o.HandoffSlice, 20*time.Millisecond)
	if o.Label == "" {
		o.Label = hostLabel()
	}
	if math.IsNaN(o.DriftFactor) || o.DriftFactor < 0 || o.DriftFactor >= 0.5 {
		return o, invalid("Options.DriftFactor", o.DriftFactor, "it must be from 0 to below 0.5")
	}
	if err := cmp.Or(
		inRange("Options.NodeTimeout", o.NodeTimeout, time.Millisecond, longestNodeTimeout),
		inRange("Options.MaxTTL", o.MaxTTL, minTTL, longestTTL),
		notBelow0("Options.MaxWaiters", o.MaxWaiters),
		notBelow0("Options.Linger", o.Linger),
		checkLength("Options.Label", o.Label, maxLabel),
		checkLength("Options.KeyPrefix", o.KeyPrefix, maxKey),
		checkReserved("Options.KeyPrefix", o.KeyPrefix, ""),
	); err != nil {
		return o, err
	}
	return o, o.Refresh.check("Options.Refresh", o.MaxTTL)
}

// checkNodes reports nodes that cannot vote together. list names where the caller passed them.
func checkNodes(list string, nodes []redis.UniversalClient) error {
	if len(nodes) == 0 {
		return invalid(list, "empty", "at least one node is needed")
	}
	if len(nodes) > maxNodes {
		return invalid(list, fmt.Sprintf("%d nodes", len(nodes)), fmt.Sprintf("%d is the limit", maxNodes))
	}
	for i, n := range nodes {
		field := fmt.Sprintf("%s[%d]", list, i)
		if err := checkNode(field, n); err != nil {
			return err
		}
		name, e := database(n)
		for j, m := range nodes[:i] {
			if sameServer(m, n) {
				return invalid(field, name, fmt.Sprintf("that server is already %s[%d]: one server has one vote", list,
					j))
			}
		}
		if first, d := database(nodes[0]); d != e {
			return invalid(field, fmt.Sprintf("database %d at %s", e, name),
				fmt.Sprintf("%s[0] is database %d at %s: all nodes must use one number, "+
					"or a server behind two of them would vote twice", list, d, first))
		}
	}
	return nil
}

func checkNode(field string, n redis.UniversalClient) error {
	if n == nil || reflect.ValueOf(n).Kind() == reflect.Pointer && reflect.ValueOf(n).IsNil() {
		return invalid(field, "nil", "a *redis.Client or *redis.ClusterClient is needed")
	}
	switch n := n.(type) {
	case *redis.Client:
		return nil
	case *redis.ClusterClient:
		if !isFailoverCluster(n) {
			return nil
		}
		return invalid(field, "of NewFailoverClusterClient",
			"that looks like a Cluster, for which there is no quarantine: use NewFailoverClient, one for each master")
	case *redis.Ring:
		return invalid(field, "a *redis.Ring",
			"a Ring moves keys to other shards when one fails: pass each shard as a node of its own")
	}
	return invalid(field, fmt.Sprintf("a %T", n), "a *redis.Client or *redis.ClusterClient is needed")
}

// isFailoverCluster reports whether go-redis made c for a Sentinel-managed master and its replicas, as if
// these were a Cluster. Only the name of the function that returns its slots shows that.
func isFailoverCluster(c *redis.ClusterClient) bool {
	slots := c.Options().ClusterSlots
	if slots == nil {
		return false
	}
	f := runtime.FuncForPC(reflect.ValueOf(slots).Pointer())
	return f != nil && strings.Contains(f.Name(), "go-redis/v9.NewFailoverClusterClient")
}

// sameServer reports, without sending anything, whether two clients obviously use one server. A
// case that it does not detect is detected when the nodes vote.
func sameServer(a, b redis.UniversalClient) bool {
	x, ok1 := a.(*redis.Client)
	y, ok2 := b.(*redis.Client)
	if !ok1 || !ok2 || x == y {
		return a == b
	}
	ox, oy := x.Options(), y.Options()
	// With a dialer of its own, the address may mean anything.
	return ox.Network == oy.Network && ox.Addr == oy.Addr && dialsPlainly(ox) && dialsPlainly(oy)
}

// database returns where n stores its keys, and its database number there, which must be that of all nodes.
// Then a server that has two names, now or after a failover or a change of DNS, shows a key that was written
// under one of them in the reply to the acquire under the other, before that is a vote. Between two databases
// there is no such sign, and comparing processes instead (INFO run_id) would need a right that not all users
// have.
func database(n redis.UniversalClient) (name string, number int) {
	if c, ok := n.(*redis.Client); ok {
		return c.Options().Addr, max(c.Options().DB, 0)
	}
	return fmt.Sprint(n.(*redis.ClusterClient).Options().Addrs), 0
}

func dialsPlainly(o *redis.Options) bool {
	return reflect.ValueOf(o.Dialer).Pointer() == plainDialer()
}

// plainDialer identifies the dialer that go-redis gives to a client without one of its own.
var plainDialer = sync.OnceValue(func() uintptr {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // a name would be looked up
	defer c.Close()
	return reflect.ValueOf(c.Options().Dialer).Pointer()
})

// checkKey reports keys that cannot be locked.
func (c *Client) checkKey(key string) error {
	return cmp.Or(checkName(key), checkReserved("key", c.opts.KeyPrefix, key))
}

// checkName is checkKey for a key that has a namespace of its own.
func checkName(key string) error {
	if key == "" {
		return invalid("key", "empty", "a lock needs a name")
	}
	return checkLength("key", key, maxKey)
}

// checkLength reports a text of more than that many bytes. The name of the field comes first here and below.
func checkLength(field, text string, most int) error {
	if len(text) > most {
		return invalid(field, fmt.Sprintf("%d bytes long", len(text)), fmt.Sprintf("%d is the limit", most))
	}
	return nil
}

func inRange(field string, d, least, most time.Duration) error {
	if d < least || d > most {
		return invalid(field, d, fmt.Sprintf("it must be from %v to %v", least, most))
	}
	return nil
}

func notBelow0[N int | time.Duration](field string, n N) error {
	if n < 0 {
		return invalid(field, n, "it must not be below 0")
	}
	return nil
}

func above0(field string, d time.Duration) error {
	if d <= 0 {
		return invalid(field, d, "it must be above 0")
	}
	return nil
}

// checkReserved reports a key, with that prefix, that flightlock keeps for itself on a node.
func checkReserved(field, prefix, key string) error {
	for _, begin := range [...]string{node.Reserved, fetchNamespace} {
		if node.StartsWith(prefix, key, begin) {
			return invalid(field, fmt.Sprintf("%q", cmp.Or(key, prefix)),
				fmt.Sprintf("keys that begin with %q are reserved for flightlock", begin))
		}
	}
	return nil
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
