package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A whole Cluster casts one vote. The subtests share one, in this order.
func TestCluster(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3)
	for _, sub := range []struct {
		name string
		run  func(t *testing.T, c *redistest.Cluster)
	}{
		{"keys of many slots", clusterManySlots},
		{"a moved slot", clusterMoved},
		{"a slot on the move", clusterAsk},
		{"a stopped master does not hold up the others", clusterStopped},
		{"a stopped master does not hold up the router", clusterStoppedUnknown},
		{"a master that was away", clusterAway},
		{"slots that move under load", clusterStress},
		{"close", clusterClose},
		{"a master that is replaced for good", clusterReplaced},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(t, c) })
	}
}

func clusterNode(t *testing.T, c *redistest.Cluster) *Node {
	return newNode(t, c.Client(t, redistest.WithoutMaintenance))
}

// routed gives n a router that the test can inspect.
func routed(n *Node, c *redis.ClusterClient) *router {
	ro := newRouter(n, c)
	n.route, n.router = ro.route, ro
	return ro
}

// wantEmpty expects that no lock key is left on any master.
func wantEmpty(t *testing.T, c *redistest.Cluster) {
	t.Helper()
	for _, s := range c.Servers() {
		redistest.Eventually(t, patience, "no key is left on "+s.Addr(),
			func() bool { return len(lockKeys(t, s)) == 0 })
	}
}

func clusterManySlots(t *testing.T, c *redistest.Cluster) {
	n := clusterNode(t, c)
	var wg sync.WaitGroup
	for i := range 500 {
		wg.Go(func() {
			a := newAttempt(t, n, fmt.Sprint("many", i))
			if rep := <-a.acquire().heard; rep.Kind != Granted {
				t.Errorf("acquire: %v", rep)
			}
			if rep := <-a.refresh().heard; rep.Kind != Renewed {
				t.Errorf("refresh: %v", rep)
			}
			if rep := <-a.release().heard; rep.Kind != Deleted {
				t.Errorf("release: %v", rep)
			}
		})
	}
	wg.Wait()
	wantEmpty(t, c)
	for _, s := range c.Servers() {
		if got := s.CommandCalls(t)["script|load"]; got != 4 { // not release
			t.Errorf("%s loaded %d scripts", s.Addr(), got)
		}
	}
}

// Requests follow a slot to its new master, and go there directly from then on.
func clusterMoved(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[0], c.Servers()[1]
	n := clusterNode(t, c)
	known := newAttempt(t, n, c.KeyOn(t, to, "known")) // else the topology would be read again for it
	known.acquire().want(t, Granted)
	known.release().want(t, Deleted)
	key := c.KeyOn(t, from, "moved")
	slot := c.SlotOf(t, key)
	a := newAttempt(t, n, key)
	a.acquire().want(t, Granted)

	c.SetMigrating(t, slot, from, to)
	c.FinishMigration(t, slot, from, to)
	a.refresh().want(t, Renewed)
	commands := n.Commands()
	a.refresh().want(t, Renewed)
	if got := n.Commands() - commands; got != 1 {
		t.Errorf("%d commands: the new master was not remembered", got)
	}
	a.release().want(t, Deleted)
	b := newAttempt(t, n, key)
	b.acquire().want(t, Granted)
	b.release().want(t, Deleted)
	wantEmpty(t, c)
}

// While a slot moves, a held lock can be refreshed and released wherever it is; a new one may have to
// wait, because its bucket and its key are not in one place. Nothing is left behind.
func clusterAsk(t *testing.T, c *redistest.Cluster) {
	from, to := c.Servers()[1], c.Servers()[2]
	n := clusterNode(t, c)
	tag := c.KeyOn(t, from, "ask")
	slot := c.SlotOf(t, tag)
	moved, stays := newAttempt(t, n, "{"+tag+"}1"), newAttempt(t, n, "{"+tag+"}2")
	moved.acquire().want(t, Granted)
	stays.acquire().want(t, Granted)

	c.SetMigrating(t, slot, from, to)
	c.MigrateKeys(t, from, to, moved.t0().Key())
	moved.refresh().want(t, Renewed) // key and bucket are apart
	moved.release().want(t, Deleted) // follows ASK
	stays.refresh().want(t, Renewed)
	stays.release().want(t, Deleted)

	fresh := newAttempt(t, n, "{"+tag+"}3")
	if rep := fresh.acquire().want(t, Failed); !conn.HasCode(rep.Err, "TRYAGAIN") || Final(rep.Err) {
		t.Error(rep.Err)
	}
	fresh.release().wantNow(t, Missing)
	c.FinishMigration(t, slot, from, to)
	fresh = newAttempt(t, n, "{"+tag+"}3")
	fresh.acquire().want(t, Granted)
	fresh.release().want(t, Deleted)
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// Keys of other masters are served while one master is stopped, those of unused slots among them.
func clusterStopped(t *testing.T, c *redistest.Cluster) {
	n := clusterNode(t, c)
	stopped, fine := c.Servers()[0], c.Servers()[2]
	dead, known := c.KeyOn(t, stopped, "dead"), c.KeyOn(t, fine, "fine")
	unknown := c.KeyOn(t, fine, "new")
	for _, key := range []string{dead, known} {
		a := newAttempt(t, n, key)
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	_ = stopped.Stop()
	before := n.Commands()
	var stuck []*attempt
	var ears []*ear
	for range 10 {
		a := newAttempt(t, n, dead)
		stuck, ears = append(stuck, a), append(ears, a.acquire())
	}
	redistest.Eventually(t, patience, "they wait for the master", func() bool { return n.Commands() > before })
	for _, key := range []string{known, unknown} {
		a := newAttempt(t, n, key)
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	for _, e := range ears {
		if e.n.Load() != 0 {
			t.Error("held up until the requests to the master that has stopped had failed")
		}
	}
	for _, a := range stuck {
		a.release()
	}
	_ = stopped.Cont()
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// Nor do those whose slot has to be looked up first wait for a master that has stopped.
func clusterStoppedUnknown(t *testing.T, c *redistest.Cluster) {
	n := startNode(t, c.Client(t, func(o *redis.ClusterOptions) { o.DialerRetries = 1 }), conn.TransportTimeout)
	stopped, fine := c.Servers()[0], c.Servers()[2]
	for _, key := range []string{c.KeyOn(t, stopped, "warm"), c.KeyOn(t, fine, "warm")} {
		a := newAttempt(t, n, key)
		a.acquire().want(t, Granted)
		a.release().want(t, Deleted)
	}
	stuck, a := newAttempt(t, n, c.KeyOn(t, stopped, "unknown slot")),
		newAttempt(t, n, c.KeyOn(t, fine, "unknown slot"))
	_ = stopped.Stop()
	answer := stuck.acquire()
	a.acquire().want(t, Granted)
	if answer.n.Load() != 0 {
		t.Error("held up by a master that has stopped")
	}
	a.release().want(t, Deleted)
	stuck.release()
	_ = stopped.Cont()
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// A master that cannot be reached is dropped and looked up again; a master for which the cluster
// client made a new client gets a new link.
func clusterAway(t *testing.T, c *redistest.Cluster) {
	s := c.Servers()[0]
	client := c.Client(t)
	n := newNode(t, client)
	ro := routed(n, client)
	key := c.KeyOn(t, s, "away")
	a := newAttempt(t, n, key)
	a.acquire().want(t, Granted)

	// The cluster client closes the clients of masters that have left its topology. Closing
	// it here and routing to a new one is what a return looks like.
	master, err := client.MasterForKey(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	_ = master.Close()
	fresh := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer fresh.Close()
	b := newAttempt(t, n, key)
	b.acquire().want(t, Held) // the link has a connection of its own
	b.release().wantNow(t, Missing)

	anew := ro.server(fresh)
	if anew.of.Addr != s.Addr() || ro.server(fresh) != anew {
		t.Error("no link of its own")
	}
	ro.owner[a.t0().slot].Store(anew)
	a.release().want(t, Deleted)
	if ro.server(fresh) != anew {
		t.Error("the link was not kept")
	}
	wantEmpty(t, c)
}

// Slots that move back and forth while many owners lock in them lose no request and leave no key
// behind.
func clusterStress(t *testing.T, c *redistest.Cluster) {
	n := clusterNode(t, c)
	one, two := c.Servers()[0], c.Servers()[2]
	tag := c.KeyOn(t, one, "stress")
	slot := c.SlotOf(t, tag)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for g := range 20 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 0))
			for ctx.Err() == nil {
				a := newAttempt(t, n, fmt.Sprint("{", tag, "}", rnd.IntN(10)))
				asked := a.acquire()
				if rnd.IntN(2) == 0 {
					<-asked.heard
				}
				<-a.release().heard
			}
		})
	}
	for range 5 {
		c.SetMigrating(t, slot, one, two)
		time.Sleep(20 * time.Millisecond)
		c.FinishMigration(t, slot, one, two)
		time.Sleep(20 * time.Millisecond)
		one, two = two, one
	}
	cancel()
	wg.Wait()
	wantDebts(t, n, 0)
	wantEmpty(t, c)
}

// Releases that wait for their master to be looked up are still tried when the node closes.
func clusterClose(t *testing.T, c *redistest.Cluster) {
	client := c.Client(t)
	n := newNode(t, client)
	ro := routed(n, client)
	var held []*attempt
	for i := range 50 {
		a := newAttempt(t, n, fmt.Sprint("close", i))
		a.acquire().want(t, Granted)
		held = append(held, a)
	}
	for i := range ro.owner {
		ro.owner[i].Store(nil)
	}
	var ears []*ear
	for _, a := range held {
		ears = append(ears, a.release())
	}
	if err := n.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for _, e := range ears {
		e.wantNow(t, Deleted)
	}
	wantEmpty(t, c)
}

// Masters that are replaced permanently, one after the other, leave nothing behind in the client.
func clusterReplaced(t *testing.T, c *redistest.Cluster) {
	running := goroutines(t)
	n := clusterNode(t, c)
	key := c.KeyOn(t, c.Servers()[0], "replaced")
	for _, s := range c.Servers() {
		eventuallyGranted(t, n, c.KeyOn(t, s, "replaced"))
	}
	held := newAttempt(t, n, key)
	held.acquire().want(t, Granted)
	before := running()
	times := 1
	if redistest.Long() {
		times = 5
	}
	for range times {
		c.MustReplace(t, 0)
		eventuallyGranted(t, n, key+"other{"+key+"}")
		redistest.Eventually(t, patience, "nobody is suspended",
			func() bool { return serversOf(n) == 3 && !n.Suspended() })
	}
	held.refresh().want(t, Renewed)
	held.release().want(t, Deleted)
	wantDebts(t, n, 0)
	redistest.Eventually(t, patience, "the goroutines are as many as before",
		func() bool { return running() <= before })
	wantEmpty(t, c)
}

// A slot moves to a master that the map does not name yet, while the map cannot be read: each try hangs.
// Requests that were sent on wait for one try together, and not for one each, one after the other.
func TestRequestsThatWereSentOnWaitForOneTryToReadTheMap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		target := redistest.StartMemNode(t, "10.0.0.2:6379")
		source := answering(t, "10.0.0.1:6379", fmt.Sprintf("MOVED 1 %s", target.Addr()))
		var reads atomic.Int32
		c := clusterOfOne(t, source, target.Dial, func(ctx context.Context) error {
			if reads.Add(1) > 1 {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		n := startNode(t, c, 500*time.Millisecond)
		const requests = 6
		var ears []*ear
		for i := range requests {
			ears = append(ears, newAttempt(t, n, fmt.Sprint("{k}", i)).acquire())
		}
		for _, e := range ears {
			e.want(t, Granted)
		}
		if tries := reads.Load() - 1; tries > requests/2 {
			t.Errorf("%d requests took %d tries to read the map, one after the other", requests, tries)
		}
	})
}

// A master that says that the keys are not its own, and names no other, has the map read again, once for many
// requests, and these sent once more: to the master that the map names then. If it is the same one, its
// answer is the outcome.
func TestAMasterThatDoesNotHaveTheKeysHasTheMapReadAgain(t *testing.T) {
	const nonLocal = "ERR Script attempted to access a non local key in a cluster node script: f, on " +
		"@user_script:1."
	for _, moved := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			source, target := answering(t, "10.0.0.1:6379", nonLocal), redistest.StartMemNode(t, "10.0.0.2:6379")
			var reads atomic.Int32
			c := redis.NewClusterClient(&redis.ClusterOptions{
				DialerRetries: 1, Protocol: 2, MaxRetries: -1, MaxRedirects: 1,
				MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
				Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
					if addr == target.Addr() {
						return target.Dial(ctx, network, addr)
					}
					return source.Dial(ctx, network, addr)
				},
				ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
					named := source.Addr()
					if reads.Add(1) > 1 && moved {
						named = target.Addr()
					}
					return []redis.ClusterSlot{{Start: 0, End: slots - 1, Nodes: []redis.ClusterNode{{Addr: named}}}}, nil
				},
			})
			t.Cleanup(func() { _ = c.Close() })
			n := startNode(t, c, 500*time.Millisecond)
			const requests = 20
			var ears []*ear
			for i := range requests {
				ears = append(ears, newAttempt(t, n, fmt.Sprint("{k}", i)).acquire())
			}
			for _, e := range ears {
				if moved {
					e.want(t, Granted)
				} else if rep := e.want(t, Failed); !strings.Contains(rep.Err.Error(), "non local key") {
					t.Error(rep.Err)
				}
			}
			if n := reads.Load(); n > 4 {
				t.Errorf("%d requests have had the map read %d times", requests, n)
			}
		})
	}
}

// movesAway is a Cluster of one master that answers all requests, once moved is set, with the address of
// another, whose map cannot be read from then on: each try hangs until hangs is closed.
func movesAway(t *testing.T) (
	n *Node, source, target *redistest.MemNode, moved *atomic.Bool, hangs chan struct{},
) {
	source, target = redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
	moved, hangs = new(atomic.Bool), make(chan struct{})
	source.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
		if cmd != "EVALSHA" || !moved.Load() {
			return false
		}
		c.WriteError("MOVED 1 " + target.Addr())
		return true
	})
	c := clusterOfOne(t, source, target.Dial, func(ctx context.Context) error {
		if moved.Load() {
			select {
			case <-hangs:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	return startNode(t, c, 50*time.Millisecond), source, target, moved, hangs
}

// Nobody waits for longer than NodeTimeout for a release whose master is looked up, be it the one that is or
// one behind it. It is sent when that is known.
func TestNobodyWaitsForTheMapToBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, _, target, moved, hangs := movesAway(t)
		var all []*attempt
		for i := range 4 {
			a := newAttempt(t, n, fmt.Sprint("{k}", i))
			a.acquire().want(t, Granted)
			all = append(all, a)
		}
		time.Sleep(time.Second)
		moved.Store(true)
		began := time.Now()
		var ears []*ear
		for _, a := range all[:3] {
			ears = append(ears, a.release())
		}
		time.Sleep(n.timeout / 2)
		last := all[3].release()
		for i, e := range ears {
			if rep := e.want(t, Failed); !errors.Is(rep.Err, errNoMaster) || time.Since(began) > n.timeout {
				t.Errorf("%d: %v after %v", i, rep.Err, time.Since(began))
			}
		}
		if time.Sleep(n.timeout/2 - 1); last.n.Load() > 0 {
			t.Error("the last one has not had NodeTimeout")
		}
		time.Sleep(1)
		synctest.Wait()
		last.wantNow(t, Failed)
		close(hangs)
		time.Sleep(time.Second)
		if n.Debts() > 0 || target.Mini.Exists("{k}0") {
			t.Errorf("%d debts", n.Debts())
		}
		for i, e := range append(ears, last) {
			if got := e.n.Load(); got != 1 {
				t.Errorf("%d: %d answers", i, got)
			}
		}
	})
}

// Close does not wait for a master to be found for a release that was lost, and is repeated.
func TestCloseDoesNotWaitForTheMapBecauseOfARepeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, source, _, moved, _ := movesAway(t)
		a := newAttempt(t, n, "k")
		a.acquire().want(t, Granted)
		time.Sleep(time.Second)
		source.Stall(true)
		released := a.release()
		synctest.Wait()
		moved.Store(true)
		source.Cut()
		source.Stall(false)
		synctest.Wait()
		began := time.Now()
		if err := n.Close(t.Context()); err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		released.want(t, Failed)
	})
}
