package redistest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// clusterSlots is the number of hash slots that the masters share out.
const clusterSlots = 16384

// A Cluster is a Redis Cluster of masters without replicas, so nobody takes over when one
// is killed or stopped, but by Replace. The slots of the others stay served (cluster-require-full-coverage
// no) unless the args say otherwise.
type Cluster struct {
	servers []*Server
	ids     []string      // ids[i] is the cluster's name for servers[i]
	serving int           // so many of servers, the first, began with slots
	args    []string      // of each server
	extra   []*Server     // those that were replaced
	attach  func(*Server) // ties a new server to the test; nil without one
}

// LaunchGrowingCluster starts a cluster and returns when all masters agree on who serves what,
// which takes two to three seconds: a Redis Cluster master waits two seconds before it serves.
// The empty ones, the last of Servers, have no slots yet. Clients do not know them: CLUSTER SLOTS names
// none of them. The args go to every master. The caller must Close it. Tests use [StartCluster] and
// [StartGrowingCluster].
func LaunchGrowingCluster(masters, empty int, args ...string) (*Cluster, error) {
	if masters < 1 {
		return nil, fmt.Errorf("redistest: a cluster of %d masters", masters)
	}
	all := masters + empty
	c := &Cluster{servers: make([]*Server, all), ids: make([]string, all), serving: masters}
	err := c.launchServers(args)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		err = c.form(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// StartCluster starts a cluster and ends it in the test's cleanup. It calls [Require].
// The args go to every master.
func StartCluster(tb testing.TB, masters int, args ...string) *Cluster {
	tb.Helper()
	return StartGrowingCluster(tb, masters, 0, args...)
}

// StartGrowingCluster is StartCluster with some more masters, as [LaunchGrowingCluster] has them.
func StartGrowingCluster(tb testing.TB, masters, empty int, args ...string) *Cluster {
	tb.Helper()
	Require(tb)
	c, err := LaunchGrowingCluster(masters, empty, args...)
	if err != nil {
		tb.Fatal(err)
	}
	c.attach = func(s *Server) { s.attach(tb) }
	for _, s := range c.servers {
		c.attach(s)
	}
	return c
}

// launchServers starts all masters at once.
func (c *Cluster) launchServers(args []string) error {
	c.args = append([]string{
		"--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1",
		"--cluster-node-timeout", "15000", "--cluster-require-full-coverage", "no",
	}, args...)
	errs := make([]error, len(c.servers))
	var wg sync.WaitGroup
	for i := range c.servers {
		wg.Go(func() { c.servers[i], errs[i] = Launch(c.args...) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// form makes one cluster of masters that know nothing of each other.
func (c *Cluster) form(ctx context.Context) error {
	for i, s := range c.servers {
		// Epochs must differ for good: nodes that claim the same one settle it among
		// themselves later, in the middle of somebody's test.
		_, err1 := s.command(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
		var err2 error
		if first, last := i*clusterSlots/c.serving, (i+1)*clusterSlots/c.serving-1; i < c.serving {
			_, err2 = s.command(ctx, "CLUSTER", "ADDSLOTSRANGE", first, last)
		}
		id, err3 := s.command(ctx, "CLUSTER", "MYID")
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		c.ids[i] = id.(string)
	}
	if err := c.meet(ctx); err != nil {
		return err
	}
	return c.settle(ctx)
}

// meet introduces every pair, which is quicker than waiting for gossip to do it.
func (c *Cluster) meet(ctx context.Context) error {
	for i, s := range c.servers {
		for _, other := range c.servers[i+1:] {
			if _, err := s.command(ctx, "CLUSTER", "MEET", "127.0.0.1", other.Port()); err != nil {
				return err
			}
		}
	}
	return nil
}

// settle waits until every master serves and knows all others.
func (c *Cluster) settle(ctx context.Context) error {
	for _, s := range c.servers {
		var why string
		ok := poll(ctx, func() bool {
			why = c.unsettled(ctx, s)
			return why == ""
		})
		if !ok {
			return fmt.Errorf("redistest: cluster node %s: %s; its log:\n%s", s.Addr(), why, s.Log())
		}
	}
	return nil
}

// unsettled says what s still lacks of being a full member, nothing if it is one.
func (c *Cluster) unsettled(ctx context.Context, s *Server) string {
	info, err1 := s.command(ctx, "CLUSTER", "INFO")
	nodes, err2 := s.command(ctx, "CLUSTER", "NODES")
	if err := errors.Join(err1, err2); err != nil {
		return err.Error()
	}
	fields := infoFields(info.(string))
	if fields["cluster_state"] != "ok" || fields["cluster_slots_ok"] != fmt.Sprint(clusterSlots) {
		return info.(string)
	}
	lines := strings.Split(strings.TrimSpace(nodes.(string)), "\n")
	connected := func(line string) bool {
		return strings.Contains(line, " connected") && !strings.Contains(line, "handshake")
	}
	if len(lines) != len(c.servers) || slices.ContainsFunc(lines, func(l string) bool { return !connected(l) }) {
		return nodes.(string)
	}
	return ""
}

// Servers returns the masters. The first one got the lowest slots.
func (c *Cluster) Servers() []*Server { return slices.Clone(c.servers) }

// Addrs returns the masters' addresses, in the order of Servers.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, len(c.servers))
	for i, s := range c.servers {
		addrs[i] = s.Addr()
	}
	return addrs
}

// Client returns a go-redis client of the cluster with default options, changed by the
// given functions in turn. It is closed in the test's cleanup.
//
// The client reloads its map of slots on goroutines that outlive Close by a moment, so a
// leak check must be one that waits (goleak does).
func (c *Cluster) Client(tb testing.TB, change ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	tb.Helper()
	o := &redis.ClusterOptions{Addrs: c.Addrs(), Password: c.servers[0].password()}
	for _, f := range change {
		f(o)
	}
	client := redis.NewClusterClient(o)
	tb.Cleanup(func() { closeClient(tb, client) })
	return client
}

// SlotOf returns the hash slot of key.
func (c *Cluster) SlotOf(tb testing.TB, key string) int {
	tb.Helper()
	return int(c.ask(tb, "CLUSTER", "KEYSLOT", key).(int64))
}

// MasterOf returns the master that serves key, as the first master that answers sees it.
func (c *Cluster) MasterOf(tb testing.TB, key string) *Server {
	tb.Helper()
	slot := int64(c.SlotOf(tb, key))
	for _, r := range c.ask(tb, "CLUSTER", "SLOTS").([]any) {
		r := r.([]any) // first slot, last slot, [ip, port, id, ...] of the master
		if first, last := r[0].(int64), r[1].(int64); slot < first || slot > last {
			continue
		}
		return c.byPort(tb, r[2].([]any)[1].(int64))
	}
	tb.Fatalf("nobody serves slot %d of key %q", slot, key)
	return nil
}

// KeyOn returns a key that the given master serves: prefix followed by a number. Equal
// calls return equal keys as long as no slot moves.
func (c *Cluster) KeyOn(tb testing.TB, s *Server, prefix string) string {
	tb.Helper()
	for i := range 1000 {
		if key := fmt.Sprint(prefix, i); c.MasterOf(tb, key) == s {
			return key
		}
	}
	tb.Fatalf("found no key of %s", s.Addr())
	return ""
}

// ask sends a command about the whole cluster to the first master that answers.
func (c *Cluster) ask(tb testing.TB, args ...any) any {
	tb.Helper()
	var errs []error
	for _, s := range c.servers {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second) // it may be stopped
		v, err := s.command(ctx, args...)
		cancel()
		if err == nil {
			return v
		}
		errs = append(errs, err)
	}
	tb.Fatalf("no cluster node answers %v: %v", args, errors.Join(errs...))
	return nil
}

func (c *Cluster) byPort(tb testing.TB, port int64) *Server {
	tb.Helper()
	i := slices.IndexFunc(c.servers, func(s *Server) bool { return int64(s.Port()) == port })
	if i < 0 {
		tb.Fatalf("the cluster names port %d, which is none of %v", port, c.Addrs())
	}
	return c.servers[i]
}

// Close ends all masters. Calls after the first do nothing.
func (c *Cluster) Close() error {
	var errs []error
	for _, s := range append(c.extra, c.servers...) {
		if s != nil { // it may have failed to start
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}
