package pubsub

import (
	"runtime"
	"sync/atomic"

	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/flightlock/flightlock/internal/redistest"
)

// On a Cluster the watches of a key live on the master of its slot. The subtests share
// one Cluster, in this order.
func TestClusterNotices(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3)
	for _, sub := range []struct {
		name string
		run  func(t *testing.T, c *redistest.Cluster)
	}{
		{"keys of all masters", noticesManySlots},
		{"a slot that moves", noticesMoved},
		{"masters that do not know of the move", noticesStale},
		{"connections that are killed", noticesKilled},
		{"slots that move all the time", noticesStress},
		{"watches that come and go", noticesComeAndGo},
		{"a stopped master", noticesStopped},
		{"masters that are replaced for good", noticesReplaced},
		{"a failover", noticesFailover}, // the last one: a master is gone
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(t, c) })
	}
}

// agreed waits until all masters know the slot's owner and each other's epochs: a master that takes
// a slot back before it knows that the other one took a higher epoch takes none itself, and then
// others may follow the wrong one for good.
func agreed(t *testing.T, c *redistest.Cluster, slot int, owner *redistest.Server) {
	t.Helper()
	knows := func(s *redistest.Server) bool {
		for _, r := range s.Do(t, "CLUSTER", "SLOTS").([]any) {
			r := r.([]any) // first slot, last slot, [ip, port, id, ...] of the master
			if r[0].(int64) <= int64(slot) && int64(slot) <= r[1].(int64) {
				return r[2].([]any)[1].(int64) == int64(owner.Port())
			}
		}
		return false
	}
	epoch := func(s *redistest.Server) string {
		_, after, _ := strings.Cut(s.Do(t, "CLUSTER", "INFO").(string), "cluster_current_epoch:")
		return strings.Fields(after)[0]
	}
	for _, s := range c.Servers() {
		redistest.Eventually(t, patience, s.Addr()+" knows the new owner", func() bool {
			return knows(s) && epoch(s) == epoch(owner)
		})
	}
}

// spublish publishes to the one watch.
func spublish(t *testing.T, s *redistest.Server, key, text string) {
	t.Helper()
	if got := s.Do(t, "SPUBLISH", key, text); got != int64(1) {
		t.Fatalf("SPUBLISH %q reached %v", key, got)
	}
}

// Each master has one connection; notices come from the master of the key.
func noticesManySlots(t *testing.T, c *redistest.Cluster) {
	n := clusterSubs(t, c)
	hasten(n)
	const keys = 3000
	var all []*recorder
	var watches []*Watch
	for i := range keys {
		r := newRecorder(t)
		all, watches = append(all, r), append(watches, watchAs(n, fmt.Sprint("k", i), "", r))
	}
	for _, r := range all {
		r.want(Subscribed, "")
	}
	for i := 0; i < keys; i += keys / 20 {
		key := fmt.Sprint("k", i)
		spublish(t, c.MasterOf(t, key), key, "x")
		all[i].want(Message, "x")
	}
	for _, s := range c.Servers() {
		if got := subscribers(t, s); got != 1 {
			t.Errorf("%d connections", got)
		}
	}
	for _, w := range watches {
		w.Stop()
	}
	wantNothing(t, n, c.Servers()...)
}

// A watch moves with its slot.
func noticesMoved(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[1]
	n := clusterSubs(t, c)
	key := c.KeyOn(t, from, "moved")
	slot := c.SlotOf(t, key)
	stays := subscribed(t, n, c.KeyOn(t, from, "stays"))
	r, same := subscribed(t, n, key), subscribed(t, n, "{"+key+"}2")
	for i := range 4 {
		c.SetMigrating(t, slot, from, to)
		spublish(t, from, key, fmt.Sprint(i))
		r.want(Message, fmt.Sprint(i))
		c.FinishMigration(t, slot, from, to)
		for _, r := range []*recorder{r, same} {
			r.want(Unsubscribed, "")
			r.until(Subscribed, "")
		}
		agreed(t, c, slot, to)
		spublish(t, to, key, "there")
		r.want(Message, "there")
		from, to = to, from
	}
	if len(stays.heard) != 0 {
		t.Errorf("a watch of another slot received %v", <-stays.heard)
	}
}

// A watch that begins where the client's map is out of date finds its master.
func noticesStale(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[1], c.Servers()[2]
	n := clusterSubs(t, c)
	key := c.KeyOn(t, from, "stale")
	subscribed(t, n, c.KeyOn(t, from, "warm"))
	slot := c.SlotOf(t, key)
	c.SetMigrating(t, slot, from, to)
	c.FinishMigration(t, slot, from, to)
	subscribed(t, n, key)
	agreed(t, c, slot, to)
	spublish(t, to, key, "x")
	c.SetMigrating(t, slot, to, from)
	c.FinishMigration(t, slot, to, from)
	agreed(t, c, slot, from)
}

func noticesKilled(t *testing.T, c *redistest.Cluster) {
	n := clusterSubs(t, c)
	keys := map[string]*recorder{}
	for _, s := range c.Servers() {
		key := c.KeyOn(t, s, "killed")
		keys[key] = subscribed(t, n, key)
	}
	for range 3 {
		for _, s := range c.Servers() {
			s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
		}
		for key, r := range keys {
			r.want(Unsubscribed, "")
			r.want(Subscribed, "")
			spublish(t, c.MasterOf(t, key), key, "x")
			r.want(Message, "x")
		}
	}
}

// Whatever the slots do, in the end each watch is where its slot is, once.
func noticesStress(t *testing.T, c *redistest.Cluster) {
	n := clusterSubs(t, c)
	n.topicIdle = time.Millisecond
	one, two := c.Servers()[0], c.Servers()[2]
	tag := c.KeyOn(t, one, "stress")
	slot := c.SlotOf(t, tag)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for g := range 5 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				r := newRecorder(t)
				w := watchAs(n, fmt.Sprint("{", tag, "}", g, i%3), "", r)
				if i%2 == 0 {
					r.hears(Subscribed, "")
				}
				w.Stop()
			}
		})
	}
	r := subscribed(t, n, tag)
	for range 10 {
		c.SetMigrating(t, slot, one, two)
		c.FinishMigration(t, slot, one, two)
		agreed(t, c, slot, two)
		one, two = two, one
	}
	cancel()
	wg.Wait()
	redistest.Eventually(t, patience, "the watch has gone with its slot", func() bool {
		return one.Do(t, "SPUBLISH", tag, "last") == int64(1)
	})
	r.until(Message, "last")
}

func noticesComeAndGo(t *testing.T, c *redistest.Cluster) {
	n := clusterSubs(t, c)
	hasten(n)
	for i := range 1000 {
		r := newRecorder(t)
		w := watchAs(n, fmt.Sprint("k", i), "", r)
		if i%10 == 0 {
			r.until(Subscribed, "")
		}
		w.Stop()
	}
	wantNothing(t, n, c.Servers()...)
}

// A master that has stopped does not affect the watches of the others, new ones included.
func noticesStopped(t *testing.T, c *redistest.Cluster) {
	n := clusterSubs(t, c)
	hasten(n)
	stopped, fine := c.Servers()[0], c.Servers()[2]
	key := c.KeyOn(t, fine, "fine")
	dead, alive := subscribed(t, n, c.KeyOn(t, stopped, "dead")), subscribed(t, n, key)
	later := c.KeyOn(t, fine, "later")
	_ = stopped.Stop()
	dead.want(Unsubscribed, "")
	subscribed(t, n, later)
	spublish(t, fine, key, "x")
	alive.want(Message, "x")
	_ = stopped.Cont()
	dead.want(Subscribed, "")
}

// When a replica takes the place of its master, the watches move there.
func noticesFailover(t *testing.T, c *redistest.Cluster) {
	master := c.Servers()[0]
	replica := redistest.StartServer(t, "--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1",
		"--cluster-require-full-coverage", "no")
	master.Do(t, "CONFIG", "SET", "repl-diskless-sync-delay", 0) // or it waits for more replicas
	id := master.Do(t, "CLUSTER", "MYID").(string)
	nodes := func(s *redistest.Server) string { return s.Do(t, "CLUSTER", "NODES").(string) }
	replica.Do(t, "CLUSTER", "MEET", "127.0.0.1", master.Port())
	redistest.Eventually(t, patience, "the nodes know each other", func() bool {
		return strings.Contains(nodes(replica), id) && strings.Count(nodes(replica), "connected") == 4 &&
			!strings.Contains(nodes(replica), "handshake")
	})
	replica.Do(t, "CLUSTER", "REPLICATE", id)
	redistest.Eventually(t, patience, "the replica is in sync, and all know of it", func() bool {
		for _, s := range c.Servers() {
			if !strings.Contains(nodes(s), "slave "+id) {
				return false
			}
		}
		return strings.Contains(replica.Do(t, "INFO", "replication").(string), "master_link_status:up")
	})

	n := clusterSubs(t, c)
	key, other := c.KeyOn(t, master, "failover"), c.KeyOn(t, c.Servers()[1], "other")
	r, same := subscribed(t, n, key), subscribed(t, n, other)
	_ = master.Kill()
	r.want(Unsubscribed, "")
	replica.Do(t, "CLUSTER", "FAILOVER", "TAKEOVER")
	r.want(Subscribed, "")
	spublish(t, replica, key, "x")
	r.want(Message, "x")
	spublish(t, c.Servers()[1], other, "y")
	same.want(Message, "y")
}

// A Cluster without sharded pub/sub, older than Redis 7, is not queried again and again. Its
// watches poll.
func TestAnOldClusterIsLeftAlone(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 1, "--rename-command", "SSUBSCRIBE", "")
	s := c.Servers()[0]
	n := clusterSubs(t, c)
	hasten(n)
	r := newRecorder(t)
	w := watchAs(n, "k", "", r)
	r.want(Unsubscribed, "")
	watch(t, n, "k2")
	errors := func() string { // not NOSUB, with which Valkey answers an SUNSUBSCRIBE of nothing
		_, rest, _ := strings.Cut(s.Do(t, "INFO", "errorstats").(string), "errorstat_ERR:")
		count, _, _ := strings.Cut(rest, "\r\n")
		return count
	}
	pinged, before := timesCalled(t, s, "ping"), errors()
	redistest.Eventually(t, patience, "some time has passed", func() bool { return timesCalled(t, s, "ping") > pinged+1 })
	if after := errors(); after != before || before == "" {
		t.Errorf("it is queried again and again: %s, then %s", before, after)
	}
	w.Stop()
}

// A slot that no master has is refused by any of them, which serves its own slots all the same: what is
// subscribed there stays, and the slot is subscribed when somebody has it again.
func TestASlotOfNobodyLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 1) // which does not require that all slots have a master
	s := c.Servers()[0]
	n := clusterSubs(t, c)
	stays := subscribed(t, n, "stays")
	lost := subscribed(t, n, "gone")
	s.Do(t, "CLUSTER", "DELSLOTS", c.SlotOf(t, "gone"))
	lost.until(Unsubscribed, "")
	before := timesCalled(t, s, "ssubscribe")
	redistest.Eventually(t, patience, "it is requested again", func() bool {
		return timesCalled(t, s, "ssubscribe") > before+1
	})
	if len(stays.heard) != 0 {
		t.Errorf("a watch of a slot that is served received %v", <-stays.heard)
	}
	s.Do(t, "CLUSTER", "ADDSLOTS", c.SlotOf(t, "gone"))
	lost.want(Subscribed, "")
	spublish(t, s, "gone", "x")
	lost.want(Message, "x")
}

// Two masters that each name the other one are not asked as fast as they answer: after a few redirections the key
// rests for a moment.
func TestMastersThatDisagreeAreLeftAlone(t *testing.T) {
	t.Parallel()
	var masters [2]*redistest.Fake
	var ports [2]string
	ready := make(chan struct{})
	for i := range masters {
		masters[i] = redistest.StartFake(t, func(cmd []string) string {
			<-ready
			switch strings.ToUpper(cmd[0]) {
			case "CLUSTER":
				return "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:" + ports[i] + "\r\n"
			case "SSUBSCRIBE":
				return "-MOVED 1 127.0.0.1:" + ports[1-i] + "\r\n"
			case "PING":
				return "+PONG\r\n"
			}
			return "-ERR unknown command\r\n"
		})
		_, ports[i], _ = net.SplitHostPort(masters[i].Addr())
	}
	close(ready)
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{masters[0].Addr()}, Protocol: 2})
	t.Cleanup(func() { _ = c.Close() })
	n := newSubs(t, c)
	r := watch(t, n, "k")
	r.want(Unsubscribed, "")
	redistest.Eventually(t, patience, "the key rests", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.topics["k"].state == refused
	})
}

// Close does not wait for a Cluster whose topology nobody can report.
func TestCloseWhileMastersAreLookedUp(t *testing.T) {
	t.Parallel()
	for name, addr := range map[string]string{"refused": redistest.RefusedAddr(t), "silent": redistest.BlackHole(t)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{addr}, ReadTimeout: time.Second})
			defer c.Close()
			n := newSubs(t, c)
			for i := range 100 {
				watchAs(n, fmt.Sprint("k", i), "", newRecorder(t)).Stop()
			}
			if name == "refused" {
				r := watch(t, n, "k")
				r.want(Unsubscribed, "")
				redistest.Eventually(t, patience, "what was stopped is forgotten", func() bool { return topics(n) == 1 })
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := n.Close(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// When masters are replaced permanently, one after the other, the watches move with their slots,
// and nothing is left behind in the client.
func noticesReplaced(t *testing.T, c *redistest.Cluster) {
	n := newSubs(t, c.Client(t, redistest.WithoutMaintenance))
	for _, s := range c.Servers() {
		subscribed(t, n, c.KeyOn(t, s, "replaced"))
	}
	r := subscribed(t, n, c.KeyOn(t, c.Servers()[0], "replaced"))
	before := runtime.NumGoroutine()
	times := 1
	if redistest.Long() {
		times = 5
	}
	for range times {
		c.MustReplace(t, 0)
		r.until(Unsubscribed, "")
		r.until(Subscribed, "")
		redistest.Eventually(t, patience, "the subscriber of the old master has ended", func() bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return len(n.subscribers) == 3
		})
	}
	redistest.Eventually(t, patience, "the goroutines are as many as before", func() bool {
		return runtime.NumGoroutine() <= before
	})
}

// A watch on a master that has died, and that is no longer part of the Cluster, moves to the new
// one. It costs neither commands nor goroutines, however many there have been.
func TestAWatchLeavesAMasterThatIsGone(t *testing.T) {
	s := redistest.StartServer(t)
	var master atomic.Pointer[string]
	var reads atomic.Int64 // of the slots
	shift := func(to *redistest.Server) {
		addr := to.Addr()
		master.Store(&addr)
	}
	shift(s)
	o := redis.ClusterOptions{ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
		reads.Add(1)
		return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: *master.Load()}}}}, nil
	}}
	redistest.WithoutMaintenance(&o)
	client := redis.NewClusterClient(&o)
	t.Cleanup(func() { _ = client.Close() })
	n := newSubs(t, client)
	r := subscribed(t, n, "k")
	before := runtime.NumGoroutine()
	for range 3 {
		_ = s.Kill()
		s = redistest.StartServer(t)
		shift(s)
		r.until(Unsubscribed, "")
		r.until(Subscribed, "")
	}
	redistest.Eventually(t, patience, "the goroutines are as many as before", func() bool {
		return runtime.NumGoroutine() <= before
	})
	// A request without an end would be repeated several times in half a second.
	redistest.Eventually(t, patience, "the slots are not read without a need", func() bool {
		read := reads.Load()
		time.Sleep(time.Second / 2)
		return reads.Load() == read
	})
}
