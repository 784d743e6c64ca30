//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A scenario is a kind of fault.
type scenario struct {
	name  string
	nodes int // 3 if 0
	// masters is how many with slots a Redis Cluster has that is then the only node, and empty how
	// many without; 0: there is none. There are no proxies in front of it.
	masters, empty int
	args           []string // of each redis-server
	// fault does it once, and repairs it before it returns. It may be called again.
	fault  func(ctx context.Context, c *cell) error
	sample bool // runs in `make test`, too
	sleeps bool // machines of processes sleep
	back   bool // a server is a replica for a while, and a master again
	// runs also on several servers behind one address: it needs no second node, and changes no server
	behind bool
}

var scenarios = []scenario{
	{name: "none", behind: true,
		fault: func(ctx context.Context, c *cell) error { pause(ctx, c.ttl); return nil }},
	{name: "kill -9 of two nodes of five, restarted empty", nodes: 5, fault: killMinority, sample: true},
	{name: "one node restarts empty, while the third lacks locks", fault: losingMemory(restarted)},
	{name: "kill -9 and restart, AOF everysec, while the third node lacks locks", args: everysec,
		fault: losingMemory(restarted)},
	{name: "power loss (the AOF lacks the last second), while the third node lacks locks", args: everysec,
		fault: powerLoss},
	{name: "power loss, and writes refused at first contact, while the third node lacks locks", args: everysec,
		fault: powerLossRefusing, sample: true},
	{name: "FLUSHALL on one node, while the third lacks locks", fault: losingMemory(flushed), sample: true},
	{name: "a lagging replica is promoted, while the third node lacks locks", args: promptSync, fault: promotion,
		sample: true},
	{name: "a lagging replica is promoted, and refuses writes at first, while the third node lacks locks",
		args: promptSync, fault: promotionRefusing},
	{name: "failover to a replica in step, and back, while the third node is away", args: promptSync, back: true,
		fault: overAndBack},
	{name: "rolling restart of all nodes, empty, MaxTTL apart", fault: rollingRestart, sample: true},
	{name: "SIGSTOP of one node", fault: stoppedNode},
	{name: "SIGSTOP of a holder beyond its ttl", behind: true, fault: stoppedHolder, sample: true},
	{name: "SIGSTOP of a process that retains a lease, beyond its ttl", behind: true, fault: stoppedRetainer,
		sample: true},
	{name: "kill -9 of a process that retains a lease", behind: true, fault: killedRetainer, sample: true},
	{name: "sleep of a holder's machine beyond its ttl", behind: true, fault: asleep(false), sample: true,
		sleeps: true}, {name: "SCRIPT FLUSH on all nodes, all the time", fault: scriptFlush},
	{name: "maxmemory: OOM on one node, then on two", fault: outOfMemory, sample: true},
	{name: "CLIENT PAUSE on one node, then on two", fault: clientPause},
	{name: "slow node: each reply 200 ms later", fault: slowNode},
	{name: "black hole before one node", fault: blackHole},
	{name: "asymmetric partition: each process loses the replies of another node", fault: asymmetric,
		sample: true}, {name: "one process is cut off from two nodes", fault: cutOff},
	{name: "resets, and replies cut in the middle, everywhere", fault: resets},
	{name: "slots moving under load to an empty master", masters: 2, empty: 1, args: staysMaster,
		fault: movingSlots}, {name: "a Cluster master replaced for good", masters: 3, fault: replacedMaster},
}

var (
	everysec   = []string{"--appendonly", "yes", "--appendfsync", "everysec"}
	promptSync = []string{"--repl-diskless-sync-delay", "0"}
)

func killMinority(ctx context.Context, c *cell) error {
	for _, s := range c.servers[:2] {
		if err := s.Kill(); err != nil {
			return err
		}
	}
	pause(ctx, 2*c.ttl)
	for i, s := range c.servers[:2] {
		if err := s.Restart(); err != nil {
			return err
		}
		if err := c.votes(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// losingMemory is the case in which a node's data matters: the current locks are on two nodes of
// three, and then one of these two loses them.
func losingMemory(
	forget func(ctx context.Context, c *cell, node int) error,
) func(context.Context, *cell) error {
	return func(ctx context.Context, c *cell) error {
		missing, forgetful := 2, rand.IntN(2)
		if err := withoutNode(ctx, c, missing); err != nil {
			return err
		}
		if err := forget(ctx, c, forgetful); err != nil {
			return err
		}
		pause(ctx, c.ttl*12/10) // MaxTTL apart, or a majority would have lost its data
		return nil
	}
}

func restarted(_ context.Context, c *cell, node int) error { return c.servers[node].Restart() }

func flushed(ctx context.Context, c *cell, node int) error { return c.nodes[node].FlushAll(ctx).Err() }

// withoutNode cuts a node off until the current locks were granted by the others alone.
func withoutNode(ctx context.Context, c *cell, node int) error {
	c.cut(node, true)
	pause(ctx, c.ttl)
	c.cut(node, false)
	return c.votes(ctx, node)
}

func powerLoss(ctx context.Context, c *cell) error {
	forgetful := rand.IntN(2)
	old, err := c.servers[forgetful].SaveAppendOnly()
	if err != nil {
		return err
	}
	return losingMemory(func(context.Context, *cell, int) error {
		return c.servers[forgetful].RestartFrom(old)
	})(ctx, c)
}

// powerLossRefusing is powerLoss of a node that refuses writes when clients meet it again, as a
// master does that waits for its replica, and accepts them while earlier locks are still held.
func powerLossRefusing(ctx context.Context, c *cell) error {
	forgetful := rand.IntN(2)
	old, err := c.servers[forgetful].SaveAppendOnly()
	if err != nil {
		return err
	}
	refuse := func(replicas string) error {
		return c.nodes[forgetful].ConfigSet(ctx, "min-replicas-to-write", replicas).Err()
	}
	return losingMemory(func(context.Context, *cell, int) error {
		c.cut(forgetful, true)
		if err := errors.Join(c.servers[forgetful].RestartFrom(old), refuse("1")); err != nil {
			return err
		}
		c.cut(forgetful, false)
		pause(ctx, c.ttl/3)
		return refuse("0")
	})(ctx, c)
}

// promotion gives a node a replica that is cut off from some moment on, and then takes the master's
// place. The dead master is the next replica.
func promotion(ctx context.Context, c *cell) error { return promote(ctx, c, false) }

// promotionRefusing is promotion of a replica that refuses writes when clients meet it, as one does
// that requires a replica of its own, and accepts them while earlier locks are still held.
func promotionRefusing(ctx context.Context, c *cell) error { return promote(ctx, c, true) }

func promote(ctx context.Context, c *cell, refusing bool) error {
	const node = 1
	line, err := c.proxy(c.servers[node].Addr())
	if err != nil {
		return err
	}
	replica, client, err := replicaOf(ctx, c, line.Addr())
	if err != nil {
		return err
	}
	line.BlackHole(true)
	refuse := func(replicas string) error {
		if !refusing {
			return nil
		}
		return client.ConfigSet(ctx, "min-replicas-to-write", replicas).Err()
	}
	return losingMemory(func(context.Context, *cell, int) error {
		old := c.servers[node]
		c.servers[node], c.nodes[node] = replica, client
		if err := errors.Join(refuse("1"), client.Do(ctx, "REPLICAOF", "NO", "ONE").Err()); err != nil {
			return err
		}
		if err := c.move(node, replica); err != nil {
			return err
		}
		if refusing {
			pause(ctx, c.ttl/3)
		}
		return errors.Join(refuse("0"), old.Close())
	})(ctx, c)
}

// overAndBack makes a replica in sync take a node's place, and the node follow it without a dump,
// until the link breaks. Then the node, the same process, gets its place back. What was refreshed
// meanwhile was refreshed on the replica and on one more node; one of the processes notices none of
// that.
func overAndBack(ctx context.Context, c *cell) error {
	const node, missing = 1, 2
	first, old := c.servers[node], c.nodes[node]
	second, client, err := replicaOf(ctx, c, first.Addr())
	if err != nil {
		return err
	}
	c.cut(missing, true)
	if err := client.Do(ctx, "REPLICAOF", "NO", "ONE").Err(); err != nil {
		return err
	}
	if err := follow(ctx, c, old, second.Addr()); err != nil {
		return err
	}
	if err := old.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err(); err != nil {
		return err
	}
	deaf := c.proxies[rand.IntN(len(c.proxies))][node]
	deaf.BlackHole(true)
	if err := c.move(node, second); err != nil {
		return err
	}
	pause(ctx, 2*c.ttl)
	if err := old.Do(ctx, "REPLICAOF", "NO", "ONE").Err(); err != nil {
		return err
	}
	deaf.BlackHole(false)
	if err := c.move(node, first); err != nil {
		return err
	}
	c.cut(missing, false)
	return c.votes(ctx, node)
}

// replicaOf is a new replica, in sync, of the master at addr.
func replicaOf(ctx context.Context, c *cell, addr string) (*redistest.Server, *redis.Client, error) {
	replica, err := c.launch(c.args...)
	if err != nil {
		return nil, nil, err
	}
	client := c.clientOf(replica)
	return replica, client, follow(ctx, c, client, addr)
}

// follow makes a server a replica of the master at addr, and waits until it is in sync.
func follow(ctx context.Context, c *cell, server *redis.Client, addr string) error {
	if err := server.Do(ctx, "REPLICAOF", "127.0.0.1",
		strings.TrimPrefix(addr, "127.0.0.1:")).Err(); err != nil {
		return err
	}
	return c.await(ctx, "the replica has what the master has", func() bool {
		role, err := server.Do(ctx, "ROLE").Slice()
		return err == nil && len(role) > 3 && role[3] == "connected"
	})
}

// replacedMaster replaces one master after the other: its replica is promoted, in sync, and the old
// one is killed and removed from the Cluster.
func replacedMaster(ctx context.Context, c *cell) error {
	for i := range c.cluster.Servers() {
		if err := c.cluster.Replace(ctx, i); err != nil {
			return err
		}
		pause(ctx, c.ttl)
	}
	return nil
}

func rollingRestart(ctx context.Context, c *cell) error {
	for i, s := range c.servers {
		if err := s.Restart(); err != nil {
			return err
		}
		if err := c.votes(ctx, i); err != nil {
			return err
		}
		pause(ctx, c.ttl*12/10)
	}
	return nil
}

func stoppedNode(ctx context.Context, c *cell) error {
	if err := c.servers[0].Stop(); err != nil {
		return err
	}
	pause(ctx, 5*c.ttl)
	if err := c.servers[0].Cont(); err != nil {
		return err
	}
	return c.votes(ctx, 0)
}

func stoppedHolder(ctx context.Context, c *cell) error {
	key := longKey(rand.IntN(longKeys))
	return c.stopOne(ctx, c.ttl*3/2, func() *process { return c.holder(ctx, key) }, inTime)
}

// stoppedRetainer stops a process whose own key is on the nodes: mostly it retains its lease then,
// for it holds it for a moment only.
func stoppedRetainer(ctx context.Context, c *cell) error {
	key := ownKey(rand.IntN(ownKeys))
	return c.stopOne(ctx, c.ttl*3/2, func() *process { return c.holder(ctx, key) }, inTime)
}

// killedRetainer kills it. The others wait for what is left of the ttl, at most.
func killedRetainer(ctx context.Context, c *cell) error {
	key := ownKey(rand.IntN(ownKeys))
	if err := c.killOne(ctx, func() *process { return c.holder(ctx, key) }); err != nil {
		return err
	}
	pause(ctx, c.ttl*3/2)
	return nil
}

// inTime is for a process whose clocks continued while it was stopped.
func inTime(*process, time.Duration) {}

// asleep makes the machine of a holder sleep until others have its locks. Its monotonic clock says
// that they are still its own. It goes on to lock as before: long holds end by a release.
func asleep(untold bool) func(context.Context, *cell) error {
	return func(ctx context.Context, c *cell) error {
		clock, err := newMachineClock()
		if err != nil {
			return err
		}
		key, sleeper, woken := longKey(rand.IntN(longKeys)), -1, int64(0)
		err = c.stopOne(ctx, c.ttl*3/2, func() *process { return c.holder(ctx, key) },
			func(p *process, stood time.Duration) {
				p.slept(stood, untold)
				sleeper, woken = slices.Index(c.procs, p), clock.now()
			})
		if err != nil || untold {
			return err
		}
		return c.await(ctx, "the process that slept has held a lock for long", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return slices.ContainsFunc(c.history.holds, func(h hold) bool {
				return h.Proc == sleeper && h.Given > woken && h.Released && h.Done-h.Given > int64(c.ttl/2)
			})
		})
	}
}

func scriptFlush(ctx context.Context, c *cell) error {
	for end := time.Now().Add(c.ttl); time.Now().Before(end); pause(ctx, 20*time.Millisecond) {
		for _, n := range c.nodes {
			if err := n.ScriptFlush(ctx).Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// minorityThenMajority causes a fault on one node, then on two, then on none.
func minorityThenMajority(ctx context.Context, c *cell, fault func(node int, d time.Duration) error) error {
	if err := fault(0, 2*c.ttl); err != nil {
		return err
	}
	pause(ctx, c.ttl)
	if err := fault(1, c.ttl); err != nil {
		return err
	}
	pause(ctx, c.ttl)
	return nil
}

func outOfMemory(ctx context.Context, c *cell) error {
	err := minorityThenMajority(ctx, c, func(node int, _ time.Duration) error {
		return c.nodes[node].ConfigSet(ctx, "maxmemory", "1").Err()
	})
	for _, n := range c.nodes {
		if err := n.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
			return err
		}
	}
	return err
}

func clientPause(ctx context.Context, c *cell) error {
	return minorityThenMajority(ctx, c, func(node int, d time.Duration) error {
		return c.nodes[node].Do(ctx, "CLIENT", "PAUSE", d.Milliseconds(), "ALL").Err()
	})
}

func slowNode(ctx context.Context, c *cell) error {
	c.eachProxy(0, func(p *redistest.Proxy) { p.SetDelay(200 * time.Millisecond) })
	pause(ctx, 2*c.ttl)
	c.eachProxy(0, func(p *redistest.Proxy) { p.SetDelay(0) })
	return nil
}

func blackHole(ctx context.Context, c *cell) error {
	return withoutNode(ctx, c, 0)
}

func asymmetric(ctx context.Context, c *cell) error {
	for i, proxies := range c.proxies {
		proxies[i%len(proxies)].DropReplies(true)
	}
	pause(ctx, 2*c.ttl)
	for i, proxies := range c.proxies {
		proxies[i%len(proxies)].DropReplies(false)
		proxies[i%len(proxies)].ResetAll()
	}
	return nil
}

func cutOff(ctx context.Context, c *cell) error {
	for _, p := range c.proxies[0][:2] {
		p.BlackHole(true)
	}
	pause(ctx, 2*c.ttl)
	for _, p := range c.proxies[0][:2] {
		p.BlackHole(false)
		p.ResetAll()
	}
	return nil
}

func resets(ctx context.Context, c *cell) error {
	for end := time.Now().Add(2 * c.ttl); time.Now().Before(end); pause(ctx, rand.N(20*time.Millisecond)) {
		p := c.proxies[rand.IntN(len(c.proxies))][rand.IntN(len(c.servers))]
		switch rand.IntN(3) {
		case 0:
			p.ResetAll()
		case 1:
			p.CutReplies(rand.IntN(200))
		case 2:
			p.SetDelay(rand.N(5 * time.Millisecond))
		}
	}
	for _, proxies := range c.proxies {
		for _, p := range proxies {
			p.CutReplies(-1)
			p.SetDelay(0)
		}
	}
	return nil
}

func (s scenario) String() string { return fmt.Sprintf("%q", s.name) }
