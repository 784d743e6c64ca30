package forget

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
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
	t.Parallel()
	_, nodes, busy := busyNodes(t)
	busy()
	c := lockkit.New(t, lockkit.Patient, nodes...)
	lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
}

// Nor does a refresh, when a server has forgotten its scripts.
func TestARefreshOfABusyClient(t *testing.T) {
	t.Parallel()
	servers, nodes, busy := busyNodes(t)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	l := lockkit.Lock(t, c, "k", time.Minute)
	busy()
	for _, s := range servers {
		s.Do(t, "SCRIPT", "FLUSH")
	}
	if err := l.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	lockkit.Release(t, l)
}

// A server that comes back with all its data refuses boot.lua, since it is out of memory. Its votes
// do not count, but locks held on it can be refreshed and released.
func TestHeldLocksOfAServerThatRefusesBoot(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t, "--appendonly", "yes", "--appendfsync", "always")
	c := tr.Client(flightlock.Options{})
	var held []*flightlock.Lock
	for i := range 20 { // some of them are sent as a batch
		l := lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute)
		tr.WantOn(l, l.Key(), 0, 1)
		held = append(held, l)
	}
	testkit.Must(t, tr.Servers[0].Restart())
	tr.Servers[0].Do(t, "CONFIG", "SET", "maxmemory", "1")
	testkit.Must(t, tr.Servers[2].Kill())
	for _, l := range held {
		redistest.Eventually(t, 20*time.Second, l.Key()+" is refreshed",
			func() bool { return l.Refresh(t.Context()) == nil })
		testkit.Must(t, l.Err())
	}
	if n := c.Stats().Unverified; n != 1 {
		t.Errorf("%d nodes are unverified", n)
	}
	for _, l := range held {
		lockkit.Release(t, l)
	}
}

// A new deployment works even if the nodes are so far away that their replies to a bootstrap arrive
// after many times NodeTimeout: the bootstrap is repeated.
func TestANewDeploymentFarAway(t *testing.T) {
	t.Parallel()
	var nodes []redis.UniversalClient
	for range 3 {
		s := redistest.StartServer(t)
		p := redistest.StartProxy(t, s.Addr())
		p.SetDelay(40 * time.Millisecond)
		nodes = append(nodes, s.Client(t, func(o *redis.Options) { o.Addr = p.Addr() }))
	}
	c := lockkit.New(t, flightlock.Options{MaxTTL: time.Hour}, nodes...)
	redistest.Eventually(t, 30*time.Second, "it locks", func() bool {
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			return false
		}
		_ = l.Release(t.Context()) // it may take longer
		return true
	})
}

// A refusal is a state in which the first server of a trio refuses commands that boot.lua needs,
// but not all commands (SCRIPT LOAD, for one, is not a write), or in which its replies are cut off.
type refusal struct {
	name           string
	refuse, accept func(tr *lockkit.Trio)
}

// setting is a refusal by a setting of the server.
func setting(name, setting, refuse, accept string) refusal {
	set := func(value string) func(*lockkit.Trio) {
		return func(tr *lockkit.Trio) { tr.Servers[0].Do(tr.T, "CONFIG", "SET", setting, value) }
	}
	return refusal{name, set(refuse), set(accept)}
}

// rights is a refusal by the user's rights.
func rights(name string, refuse ...any) refusal {
	set := func(rights ...any) func(*lockkit.Trio) {
		return func(tr *lockkit.Trio) {
			tr.Servers[0].Do(tr.T, append([]any{"ACL", "SETUSER", "default"}, rights...)...)
		}
	}
	return refusal{name, set(refuse...), set("+@all", "allkeys")}
}

// cutAfter is a reset of the connection after so many bytes of replies.
func cutAfter(n int) refusal {
	return refusal{
		fmt.Sprintf("cut after %d bytes", n),
		func(tr *lockkit.Trio) { tr.Proxy.CutReplies(n) },
		func(tr *lockkit.Trio) { tr.Proxy.CutReplies(-1); tr.Proxy.ResetAll() },
	}
}

var refusals = []refusal{
	setting("NOREPLICAS", "min-replicas-to-write", "1", "0"),
	setting("OOM", "maxmemory", "1", "0"),
	{
		"READONLY",
		func(tr *lockkit.Trio) { tr.Servers[0].Do(tr.T, "REPLICAOF", "127.0.0.1", "1") },
		func(tr *lockkit.Trio) { tr.Servers[0].Do(tr.T, "REPLICAOF", "NO", "ONE") },
	},
	{
		"MISCONF",
		failSnapshots,
		func(tr *lockkit.Trio) { tr.Servers[0].Do(tr.T, "CONFIG", "SET", "stop-writes-on-bgsave-error", "no") },
	},
	rights("NOPERM for SET", "-set"),
	rights("NOPERM for GET", "-get"),
	rights("NOPERM for TIME", "-time"),
	rights("NOPERM for INFO", "-info"),
	rights("NOPERM for APPEND", "-append"), // it is not refused then, but sees less
	rights("NOPERM for OBJECT", "-object"),
	rights("NOPERM for the marker", "resetkeys", "~lock:*", "~flightlock:{???}:*"),
	rights("NOPERM for what is kept beside the marker",
		"resetkeys", "~lock:*", "~flightlock:{???}:*", "~flightlock:{boot}"),
	cutAfter(0), cutAfter(200), cutAfter(300), cutAfter(350), cutAfter(400), cutAfter(450), cutAfter(500),
	cutAfter(600),
}

// failSnapshots makes the server unable to save, so that it refuses writes.
func failSnapshots(tr *lockkit.Trio) {
	gone := filepath.Join(tr.T.TempDir(), "gone")
	testkit.Must(tr.T, os.Mkdir(gone, 0o700))
	s := tr.Servers[0]
	s.Do(tr.T, "CONFIG", "SET", "dir", gone, "stop-writes-on-bgsave-error", "yes", "save", "3600 1")
	testkit.Must(tr.T, os.Remove(gone))
	s.Do(tr.T, "BGSAVE")
	redistest.Eventually(tr.T, 20*time.Second, "the snapshot has failed", func() bool {
		return infoHas(tr.T, s, "persistence", "rdb_last_bgsave_status:err")
	})
}

// infoHas reports whether a section of INFO has a line.
func infoHas(t *testing.T, s *redistest.Server, section, line string) bool {
	t.Helper()
	info, _ := s.Do(t, "INFO", section).(string)
	return slices.Contains(strings.Fields(info), line)
}

// A server that lost its data refuses commands when a client first meets it, or its replies are
// lost, and later everything works. Its votes do not count then either: a client must not have
// loaded scripts into it that make it vote in an epoch that boot.lua did not confirm.
func TestNoSecondGrantWhenBootIsRefusedFirst(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		switch {
		case a.name == "restarted empty", a.name == "flushed": // they have no marker, which every acquire detects
			continue
		case a.name != "stale append-only file" && testkit.InAHurry():
			continue
		}
		for _, r := range refusals {
			t.Run(a.name+"/"+r.name, func(t *testing.T) {
				t.Parallel()
				for range 1 + tries(t)/10 {
					f := newForgettable(t, a)
					f.tr.Proxy.BlackHole(true)
					f.forget()
					r.refuse(f.tr)
					f.tr.Proxy.BlackHole(false)
					f.tr.Proxy.ResetAll()
					f.rivals = append(f.rivals, f.tr.Client(flightlock.Options{}))
					for i, c := range f.rivals {
						redistest.Eventually(t, 20*time.Second, "the server has refused", func() bool {
							return f.try(c, fmt.Sprintf("rival %d, refused", i))
						})
					}
					r.accept(f.tr)
					f.neverVotes("accepted again")
				}
			})
		}
	}
}

// forgettable is a trio with a held lock that its third server does not have. If the first one
// loses it as well, the others are a majority.
type forgettable struct {
	t      *testing.T
	tr     *lockkit.Trio
	forget func()
	held   *flightlock.Lock
	rivals []*flightlock.Client
}

func newForgettable(t *testing.T, a amnesia) *forgettable {
	tr := lockkit.NewTrio(t, a.args...)
	holder := tr.Client(flightlock.Options{})
	f := &forgettable{t: t, tr: tr}
	for range 2 {
		f.rivals = append(f.rivals, tr.Client(flightlock.Options{}))
	}
	for _, c := range f.rivals {
		lockkit.UseOnAll(t, c, "k", tr.Servers...)
	}
	f.forget = a.prepare(tr)
	f.held = tr.Hold(holder, "k", time.Minute)
	t.Cleanup(func() { _ = f.held.Release(context.Background()) }) // it may be on too few nodes by now
	return f
}

// try tries to get the held lock. It reports whether the first server gave no vote.
func (f *forgettable) try(c *flightlock.Client, when string) (refused bool) {
	f.t.Helper()
	second, err := c.SingleFlightLock(f.t.Context(), "k", time.Second,
		flightlock.LimitedRetry(5*time.Millisecond, 5))
	if lost := f.held.Err(); lost != nil {
		f.t.Fatalf("the lock was over, so the try says nothing: %v", lost)
	}
	if err == nil {
		f.t.Fatalf("%s: granted twice, with tokens %d and %d", when, f.held.Fence(), second.Fence())
	}
	var q *flightlock.QuorumError
	return errors.As(err, &q) && q.Nodes[0].Err != nil
}

// neverVotes has the rivals try, until each has seen that the server is in quarantine.
func (f *forgettable) neverVotes(when string) {
	f.t.Helper()
	for i, c := range f.rivals {
		f.try(c, fmt.Sprintf("rival %d, %s", i, when))
	}
	for i, c := range f.rivals {
		lockkit.LockUntilQuarantined(f.t, c, fmt.Sprint("other", i), 1)
		f.try(c, fmt.Sprintf("rival %d, in quarantine", i))
	}
}

// A server ends, and another process comes back with old data, at each step by which a client
// verifies the server's epoch and loads the scripts that it votes by: when a command is about to be
// written, and when its reply has just arrived. What the earlier process replied is not loaded into
// the later one.
func TestNoSecondGrantWhenItRestartsDuringBoot(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		steps := 100
		switch {
		case !strings.HasPrefix(a.name, "stale"):
			continue
		case a.name != "stale append-only file" && testkit.InAHurry():
			continue
		case testkit.InAHurry():
			steps = 12 // by then the scripts are loaded
		}
		for step := 1; step <= steps; step++ {
			t.Run(fmt.Sprint(a.name, "/step ", step), func(t *testing.T) {
				if testkit.InAHurry() { // else one step after the other, until there is none
					t.Parallel()
				}
				f := newForgettable(t, a)
				nodes := f.tr.Nodes()
				b := atStep{left: step, do: f.forget}
				nodes[0] = f.tr.Servers[0].Client(t, func(o *redis.Options) {
					o.Addr, o.DialerRetries = f.tr.Proxy.Addr(), 1
				}, redistest.Through(b.steps))
				late := lockkit.New(t, lockkit.Patient, nodes...)
				f.tr.Servers[0].Do(t, "SCRIPT", "FLUSH") // boot.lua is still to be loaded
				for range 3 {
					f.try(late, "during boot")
				}
				if !b.done() {
					if step <= 12 {
						t.Errorf("there were %d steps only", step-1)
					}
					steps = 0
					return
				}
				f.rivals = append(f.rivals, late)
				f.neverVotes("after boot")
			})
		}
	}
}

// atStep does something at the left-th step.
type atStep struct {
	do func()

	mu   sync.Mutex // guards left
	left int
}

// steps is c, which counts commands that have to do with scripts, and their replies.
func (b *atStep) steps(c net.Conn) net.Conn {
	var scripts atomic.Bool
	return (&redistest.Conn{
		Conn: c,
		OnWrite: func(c net.Conn, p []byte) (int, error) {
			text := bytes.ToLower(p)
			if bytes.Contains(text, []byte("evalsha")) || bytes.Contains(text, []byte("script")) {
				scripts.Store(true)
				b.step()
			}
			return c.Write(p)
		},
		OnRead: func(c net.Conn, p []byte) (int, error) {
			n, err := c.Read(p)
			if scripts.Load() {
				b.step()
			}
			return n, err
		},
	}).Open()
}

func (b *atStep) done() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left <= 0
}

func (b *atStep) step() {
	b.mu.Lock()
	b.left--
	now := b.left == 0
	b.mu.Unlock()
	if now {
		b.do()
	}
}

// A server that refuses boot.lua has no vote, and every observer is notified, with the reason,
// until it accepts it.
func TestANodeThatRefusesBootIsSeen(t *testing.T) {
	t.Parallel()
	for _, r := range refusals {
		words := map[string][2]string{ // of the log, of the fix
			"NOREPLICAS":            {"NOREPLICAS", "min-replicas-to-write"},
			"OOM":                   {"OOM", "maxmemory"},
			"READONLY":              {"READONLY", "use its master"},
			"MISCONF":               {"MISCONF", "repair its disk"},
			"NOPERM for SET":        {"", "+set"},
			"NOPERM for INFO":       {"INFO is refused", "default +info"},
			"NOPERM for the marker": {"", "~flightlock:*"},
		}
		said, isSeen := words[r.name]
		if !isSeen {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			tr := lockkit.NewTrio(t)
			first := tr.Client(flightlock.Options{})
			lockkit.TryLock(t, first, "k") // a new deployment needs all nodes
			lockkit.Close(t, first)        // or it might bootstrap the node before that is refused
			testkit.Must(t, tr.Servers[0].Restart())
			r.refuse(tr)
			var log testkit.LogBuffer
			c := tr.Client(flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			lockUntilUnverified(t, c, 1)
			addr := tr.Proxy.Addr()
			testkit.WantOneLine(t, &log, "level=WARN", "node unverified", addr, "no vote: the node did not report",
				said[0])
			wantUnverified(t, c, addr, true)
			lockkit.WantFinding(t, lockkit.Check(t, c), addr, "quarantine", flightlock.StatusFail, said[1])
			r.accept(tr)
			lockUntilUnverified(t, c, 0)
			testkit.WantOneLine(t, &log, "level=INFO", "verified again", addr)
			wantUnverified(t, c, addr, false)
		})
	}
}

// A node that has no vote with one client until another one has bootstrapped it is verified for the
// first as well, when its vote counts.
func TestANodeThatAnotherClientVerified(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	a, b := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
	lockkit.UseOnAll(t, a, "k", tr.Servers...)
	lockkit.UseOnAll(t, b, "k", tr.Servers...) // it loads no scripts from here on
	noTime := rights("", "-time")
	noTime.refuse(tr)
	lockUntilRefused(tr, a)
	noTime.accept(tr)
	testkit.Must(t, tr.Servers[2].Kill()) // both others are needed from here on
	lockkit.EventuallyLock(t, b, "k")
	lockkit.EventuallyLock(t, a, "k")
	redistest.Eventually(t, 20*time.Second, "it is verified", func() bool { return a.Stats().Unverified == 0 })
}

// A Logger that blocks is called by one goroutine for a node, however often its state changes.
func TestABlockedLoggerIsToldOnce(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	var began atomic.Int64
	end := make(chan struct{})
	c := tr.Client(flightlock.Options{Logger: testkit.SlowLog(func() { began.Add(1); <-end })})
	defer close(end)
	lockkit.UseOnAll(t, c, "k", tr.Servers...)
	noTime := rights("", "-time")
	for range 5 {
		noTime.refuse(tr)
		lockUntilRefused(tr, c)
		noTime.accept(tr)
		lockUntilUnverified(t, c, 0)
	}
	if n := began.Load(); n != 1 {
		t.Errorf("%d lines are being written at once", n)
	}
}

// lockUntilUnverified locks until so many nodes are unverified.
func lockUntilUnverified(t *testing.T, c *flightlock.Client, n int64) {
	t.Helper()
	lockkit.LockUntil(t, c, "k", fmt.Sprintf("%d nodes are unverified", n),
		func() bool { return c.Stats().Unverified == n })
}

// lockUntilRefused has the first node, which refuses boot.lua, lose its scripts, and c lock until that is
// seen. A boot that it has answered before may load them late, or find that they are gone already, and send
// their texts from then on: so the node closes its connections each time that it is not.
func lockUntilRefused(tr *lockkit.Trio, c *flightlock.Client) {
	tr.T.Helper()
	tr.Servers[0].Do(tr.T, "SCRIPT", "FLUSH")
	lockkit.LockUntil(tr.T, c, "k", "a node is unverified", func() bool {
		if c.Stats().Unverified == 1 {
			return true
		}
		tr.Servers[0].Do(tr.T, "SCRIPT", "FLUSH")
		tr.Servers[0].Do(tr.T, "CLIENT", "KILL", "TYPE", "normal")
		tr.Servers[0].Do(tr.T, "CLIENT", "KILL", "TYPE", "pubsub")
		return false
	})
}

// wantUnverified expects the node of that name to have, or not to have, a vote for that reason.
func wantUnverified(t *testing.T, c *flightlock.Client, name string, want bool) {
	t.Helper()
	for _, n := range c.NodeStats() {
		if n.Name == name {
			if n.Unverified != want {
				t.Errorf("%+v, want unverified: %v", n, want)
			}
			return
		}
	}
	t.Errorf("no node %s", name)
}
