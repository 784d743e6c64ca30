package flightlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
)

// How a client finds out whether its nodes lost data, and loads its scripts, must not depend on how
// their owner uses the rest of the connections.

// busyNodes are three servers with clients whose connections can all be made busy, for some seconds.
func busyNodes(t *testing.T) (servers []*redistest.Server, nodes []redis.UniversalClient, busy func()) {
	var blocked []func()
	for range 3 {
		s := redistest.StartServer(t)
		c := s.Client(t, func(o *redis.Options) { o.PoolSize = 2 })
		servers, nodes = append(servers, s), append(nodes, c)
		blocked = append(blocked, func() {
			for range 2 {
				go c.BLPop(context.Background(), time.Minute, "jobs") // ends with the server
			}
			redistest.Eventually(t, 20*time.Second, "all connections are in use", func() bool {
				return infoHas(t, s, "clients", "blocked_clients:2")
			})
		})
	}
	return servers, nodes, func() {
		for _, f := range blocked {
			f()
		}
	}
}

// The first lock does not wait for the owner's connections.
func TestTheFirstLockOfABusyClient(t *testing.T) {
	_, nodes, busy := busyNodes(t)
	busy()
	c := newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...)
	mustRelease(t, mustLock(t, c, "k", time.Minute))
}

// Nor does a refresh, when a server has forgotten its scripts.
func TestARefreshOfABusyClient(t *testing.T) {
	servers, nodes, busy := busyNodes(t)
	c := newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...)
	l := mustLock(t, c, "k", time.Minute)
	busy()
	for _, s := range servers {
		s.Do(t, "SCRIPT", "FLUSH")
	}
	if err := l.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	mustRelease(t, l)
}

// streaming is a credentials provider that changes the credentials while the client lives.
type streaming struct{}

func (streaming) Subscribe(auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	return auth.NewBasicCredentials("default", ""), func() error { return nil }, nil
}

// A client whose credentials are streamed locks.
func TestStreamedCredentials(t *testing.T) {
	var nodes []redis.UniversalClient
	for range 3 {
		nodes = append(nodes, redistest.StartServer(t).Client(t, func(o *redis.Options) {
			o.StreamingCredentialsProvider = streaming{}
		}))
	}
	c := newClient(t, flightlock.Options{NodeTimeout: time.Second}, nodes...)
	mustRelease(t, mustLock(t, c, "k", time.Minute))
}

// A server that comes back with all its data refuses boot.lua, since it is out of memory. Its votes
// do not count, but locks held on it can be refreshed and released.
func TestHeldLocksOfAServerThatRefusesBoot(t *testing.T) {
	tr := newTrio(t, "--appendonly", "yes", "--appendfsync", "always")
	c := tr.client(flightlock.Options{})
	var held []*flightlock.Lock
	for i := range 20 { // some of them are sent as a batch
		l := mustLock(t, c, fmt.Sprint("k", i), time.Minute)
		tr.wantOn(l, l.Key(), 0, 1)
		held = append(held, l)
	}
	must(t, tr.servers[0].Restart())
	tr.servers[0].Do(t, "CONFIG", "SET", "maxmemory", "1")
	must(t, tr.servers[2].Kill())
	for _, l := range held {
		redistest.Eventually(t, 20*time.Second, l.Key()+" is refreshed", func() bool { return l.Refresh(t.Context()) == nil })
		must(t, l.Err())
	}
	if n := c.Stats().Unverified; n != 1 {
		t.Errorf("%d nodes are unverified", n)
	}
	for _, l := range held {
		mustRelease(t, l)
	}
}

// A new deployment works even if the nodes are so far away that their replies to a bootstrap arrive
// after many times NodeTimeout: the bootstrap is repeated.
func TestANewDeploymentFarAway(t *testing.T) {
	var nodes []redis.UniversalClient
	for range 3 {
		s := redistest.StartServer(t)
		p := redistest.StartProxy(t, s.Addr())
		p.SetDelay(40 * time.Millisecond)
		nodes = append(nodes, s.Client(t, func(o *redis.Options) { o.Addr = p.Addr() }))
	}
	c := newClient(t, flightlock.Options{MaxTTL: time.Hour}, nodes...)
	redistest.Eventually(t, 30*time.Second, "it locks", func() bool {
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			return false
		}
		_ = l.Release(t.Context()) // it may take longer
		return true
	})
}

// A master behind Sentinels is bootstrapped as well, at its own address.
func TestTheMemoryOfASentinelManagedMaster(t *testing.T) {
	var nodes []redis.UniversalClient
	for range 3 {
		master := redistest.StartServer(t)
		sentinel := redistest.StartSentinel(t, redistest.Watch("main", master)...)
		c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main", SentinelAddrs: []string{sentinel.Addr()}})
		t.Cleanup(func() { _ = c.Close() })
		nodes = append(nodes, c)
	}
	c := newClient(t, flightlock.Options{NodeTimeout: 2 * time.Second}, nodes...)
	mustRelease(t, mustLock(t, c, "k", time.Minute))
	if n := c.Stats().Quarantined; n != 0 {
		t.Errorf("%d nodes are in quarantine", n)
	}
}
