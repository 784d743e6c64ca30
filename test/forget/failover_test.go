package forget

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A single node fails over to its replica and back. A client that was away meanwhile knows the
// first server, and that server still has its scripts. What the second one had counted, and not
// replicated, is lost. Tokens rise all the same.
func TestTokensRiseAfterAFailoverAndBackThatAClientMissed(t *testing.T) {
	t.Parallel()
	for _, resync := range []bool{true, false} {
		t.Run(fmt.Sprintf("resync=%v", resync), func(t *testing.T) {
			first, second := redistest.StartServer(t, lockkit.AtOnce...), redistest.StartServer(t, lockkit.AtOnce...)
			tr := &lockkit.Trio{T: t, Servers: []*redistest.Server{first},
				Proxy: redistest.StartProxy(t, first.Addr())}
			away, there := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
			rise := rising(t)
			rise(away, "at first")
			rise(there, "at first")
			follow(t, second, first)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			tr.Proxy.SetTarget(second.Addr())
			tr.Proxy.ResetAll()
			rise(there, "on the second")
			if resync {
				follow(t, first, second)
			}
			first.Do(t, "REPLICAOF", "127.0.0.1", "1") // from here on it lags
			rise(there, "on the second, which has no replica")
			first.Do(t, "REPLICAOF", "NO", "ONE")
			tr.Proxy.SetTarget(first.Addr())
			tr.Proxy.ResetAll()
			time.Sleep(120 * time.Millisecond) // a check of the server's identity is reused for 100
			rise(away, "by the one who was away")
			rise(there, "by the one who was there")
		})
	}
}

// A master behind Sentinels is bootstrapped as well, at its own address.
func TestTheMemoryOfASentinelManagedMaster(t *testing.T) {
	t.Parallel()
	var nodes []redis.UniversalClient
	for range 3 {
		master := redistest.StartServer(t)
		sentinel := redistest.StartSentinel(t, redistest.Watch("main", master)...)
		c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main",
			SentinelAddrs: []string{sentinel.Addr()}})
		t.Cleanup(func() { _ = c.Close() })
		nodes = append(nodes, c)
	}
	c := lockkit.New(t, lockkit.Patient, nodes...)
	lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
	if n := c.Stats().Quarantined; n != 0 {
		t.Errorf("%d nodes are in quarantine", n)
	}
}

// The address of a node moves to its replica, as a virtual IP, a name or a proxy does, while
// connections to the old master, which is now a replica, survive. The client finds its way to the
// new one by itself.
func TestAnAddressMovesWhileConnectionsSurvive(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		nodes int
		own   bool // by Open, not by New
		known bool // somebody else has locked on the new master
	}{{1, false, false}, {1, true, false}, {1, true, true}, {3, false, true}, {3, true, false}} {
		t.Run(fmt.Sprintf("%+v", tc), func(t *testing.T) {
			first, second := redistest.StartServer(t, lockkit.AtOnce...), redistest.StartServer(t, lockkit.AtOnce...)
			proxy := redistest.StartProxy(t, first.Addr())
			addrs := []string{proxy.Addr()}
			var last *redistest.Server
			for range tc.nodes - 1 {
				last = redistest.StartServer(t)
				addrs = append(addrs, last.Addr())
			}
			opts := flightlock.Options{NodeTimeout: lockkit.Patience, MaxTTL: time.Second}
			c := movedClient(t, opts, tc.own, addrs...)
			lockAtOnce(t, c, 200)
			follow(t, second, first)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			first.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(second.Port()))
			if tc.known {
				lockAtOnce(t, movedClient(t, opts, tc.own, append([]string{second.Addr()}, addrs[1:]...)...), 1)
			}
			proxy.SetTarget(second.Addr()) // connections stay
			if last != nil {
				testkit.Must(t, last.Kill()) // so that the node is needed
			}
			_ = lockkit.EventuallyHeld(t, c, "k").Release(t.Context()) // the release may go to the old one
			lockAtOnce(t, c, 200)
		})
	}
}

func movedClient(t *testing.T, opts flightlock.Options, own bool, addrs ...string) *flightlock.Client {
	t.Helper()
	if own {
		var urls []string
		for _, addr := range addrs {
			urls = append(urls, "redis://"+addr)
		}
		c, err := flightlock.Open(opts, urls...)
		testkit.Must(t, err)
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	var clients []redis.UniversalClient
	for _, addr := range addrs {
		clients = append(clients, lockkit.DialOnce(t, addr))
	}
	return lockkit.New(t, opts, clients...)
}

// lockAtOnce has many goroutines lock keys of their own at once, and retry until they are granted.
func lockAtOnce(t *testing.T, c *flightlock.Client, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			l, err := c.SingleFlightLock(ctx, fmt.Sprint("many", i), time.Second,
				flightlock.LimitedRetry(10*time.Millisecond, 1000))
			if err != nil {
				t.Error(err)
				return
			}
			_ = l.Release(ctx) // where the old master granted it, it is lost
		})
	}
	wg.Wait()
}

// When the Sentinels name another master, as in a planned failover, a client goes there soon, although the
// one of before continues: the Sentinels make it a replica only after 8 seconds or more, and here, without
// SLAVEOF, never. Processes that start meanwhile use the new master, and would not exclude those of before.
func TestANewMasterIsFollowedWhileTheOldOneContinues(t *testing.T) {
	t.Parallel()
	for _, opened := range []bool{true, false} {
		t.Run(fmt.Sprintf("Open=%v", opened), func(t *testing.T) {
			t.Parallel()
			master := redistest.StartServer(t, "--repl-diskless-sync-delay", "0", "--rename-command", "SLAVEOF", "")
			replica := redistest.StartServer(t, "--replicaof", "127.0.0.1 "+fmt.Sprint(master.Port()))
			sentinel := redistest.StartSentinel(t, redistest.Watch("main", master)...)
			redistest.Eventually(t, 30*time.Second, "the Sentinel knows the replica", func() bool {
				list := fmt.Sprint(sentinel.Do(t, "SENTINEL", "REPLICAS", "main"))
				return strings.Contains(list, "master-link-status ok")
			})
			var c *flightlock.Client
			if opened {
				c = lockkit.Open(t, lockkit.Patient, "redis://"+sentinel.Addr()+"?master_name=main")
			} else {
				rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main",
					SentinelAddrs: []string{sentinel.Addr()}})
				t.Cleanup(func() { rdb.Close() })
				c = lockkit.New(t, lockkit.Patient, rdb)
			}
			lockkit.Lock(t, c, "k", time.Minute)
			redistest.Eventually(t, 30*time.Second, "the failover begins", func() bool {
				return sentinel.Client(t).Do(t.Context(), "SENTINEL", "FAILOVER", "main").Err() == nil
			})
			n := 0
			redistest.Eventually(t, 60*time.Second, "locks are on the new master", func() bool {
				n++
				key := fmt.Sprint("k", n)
				if l, err := c.TryLock(t.Context(), key, time.Minute); err != nil || l.Err() != nil {
					return false
				}
				// its connections are reset at first
				there, _ := replica.Client(t).Exists(t.Context(), "lock:"+key).Result()
				return there == 1 && master.Do(t, "EXISTS", "lock:"+key) == int64(0)
			})
			if role := fmt.Sprint(master.Do(t, "ROLE")); !strings.Contains(role, "master") {
				t.Errorf("the old master has become a replica: %s", role)
			}
		})
	}
}

// A server that was a master, lagged as a replica of its successor and is made master again finds
// its own process in its marker. Its epoch is a different one all the same.
func TestAReplicaThatWasTheMasterBefore(t *testing.T) {
	t.Parallel()
	tr, first, second, holder, rival := followed(t)
	second.Do(t, "REPLICAOF", "NO", "ONE")
	tr.Proxy.SetTarget(second.Addr())
	tr.Proxy.ResetAll()
	follow(t, first, second) // before any client has met the second as a master
	first.Do(t, "REPLICAOF", "127.0.0.1", "1")
	l := tr.LockOn(holder, second)
	defer l.Release(context.Background())
	tr.WantOn(l, "k", 1)
	tr.Servers[2].Do(t, "DEL", "lock:k")
	testkit.Must(t, second.Kill())
	first.Do(t, "REPLICAOF", "NO", "ONE")
	tr.Proxy.SetTarget(first.Addr())
	late := tr.Client(flightlock.Options{})
	for _, c := range []*flightlock.Client{late, rival} {
		if _, err := c.TryLock(t.Context(), "k", time.Second); err == nil {
			t.Error("granted twice")
		}
	}
}

// A node fails over to a replica that lags, and back. A client that was away all the time knows the
// server and its epoch from before, but the first client of the replica has left a marker, and the
// server has that now.
func TestAFailoverAndBackForAClientThatWasAway(t *testing.T) {
	t.Parallel()
	tr, first, second, holder, away := failedOver(t)
	tr.Proxy.SetTarget(second.Addr())
	tr.Proxy.ResetAll()
	before := second.Do(t, "GET", "flightlock:{boot}")
	redistest.Eventually(t, 20*time.Second, "the replica is used", func() bool {
		lockkit.Lock(t, holder, "other", time.Second).Release(t.Context())
		return second.Do(t, "GET", "flightlock:{boot}") != before
	})
	failBack(t, first, second)
	tr.Proxy.SetTarget(first.Addr())
	tr.Proxy.ResetAll()
	if _, err := away.TryLock(t.Context(), "k", time.Second); err == nil {
		t.Error("granted twice")
	}
}

// A node fails over to a replica and back while no client sends it anything, so that no marker
// shows it. What the master had not replicated in time is lost on the way back, and the clients,
// who know the server and its epoch from before, do not count its vote.
func TestAFailoverAndBackThatNobodySaw(t *testing.T) {
	t.Parallel()
	tr, first, second, _, rival := failedOver(t)
	failBack(t, first, second)
	time.Sleep(120 * time.Millisecond) // a check of the server's identity is reused for 100

	// The new client notices anyway.
	for i, c := range []*flightlock.Client{rival, tr.Client(flightlock.Options{})} {
		if _, err := c.TryLock(t.Context(), "k", time.Second); err == nil {
			t.Errorf("client %d was granted it twice", i)
		}
	}
}

// A node fails over to a replica that is in sync, and back: no dump is read. It may fail back
// before any client has used the replica, so that no marker comes back with it either. What it
// granted is lost all the same, and a client that knows the server from before does not count its
// vote.
func TestAFailoverAndBackWithoutADump(t *testing.T) {
	t.Parallel()
	for _, resync := range []bool{true, false} {
		t.Run(fmt.Sprintf("resync=%v", resync), func(t *testing.T) {
			tr, first, second, holder, rival := followed(t)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			if resync {
				first.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(second.Port()))
				redistest.Eventually(t, 20*time.Second, "the first has followed", func() bool {
					return strings.Contains(first.Do(t, "INFO", "replication").(string), "master_link_status:up")
				})
				if got := first.Do(t, "OBJECT", "ENCODING", "flightlock:{boot}"); got != "raw" {
					t.Fatalf("it has read a dump: its marker is %v", got)
				}
			}
			first.Do(t, "REPLICAOF", "127.0.0.1", "1") // the link is gone
			tr.Proxy.SetTarget(second.Addr())
			tr.Proxy.ResetAll()
			l := tr.LockOn(holder, second)
			defer l.Release(context.Background())
			tr.WantOn(l, "k", 1)
			first.Do(t, "REPLICAOF", "NO", "ONE")
			tr.Proxy.SetTarget(first.Addr())
			tr.Proxy.ResetAll()
			tr.Servers[2].Do(t, "DEL", "lock:k") // as if it had missed a refresh
			time.Sleep(120 * time.Millisecond)   // a check of the server's identity is reused for 100
			if _, err := rival.TryLock(t.Context(), "k", time.Second); err == nil {
				t.Error("granted twice")
			}
			if err := l.Err(); err != nil {
				t.Fatalf("the lock was over: %v", err)
			}
		})
	}
}
