package setup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A server whose writes are paused answers all commands but scripts: it cannot vote.
func TestCheckWhileWritesArePaused(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	c := lockkit.New(t, lockkit.Patient, nodes...)
	servers[0].Do(t, "CLIENT", "PAUSE", 600_000, "WRITE")
	r := lockkit.CheckReached(t, c)
	servers[0].Do(t, "CLIENT", "UNPAUSE")
	lockkit.WantFinding(t, r, servers[0].Addr(), "script rights", flightlock.StatusFail, "EVALSHA",
		"CLIENT UNPAUSE")
}

// Servers with recommended settings have nothing but ok, and Check leaves no key behind but the marker and
// counters that every lock leaves.
func TestCheckOfGoodServers(t *testing.T) {
	t.Parallel()
	var servers []*redistest.Server
	var nodes []redis.UniversalClient
	for range 3 {
		s := redistest.StartServer(t, "--appendonly", "yes", "--appendfsync", "always")
		servers = append(servers, s)
		nodes = append(nodes, s.Client(t))
	}
	c := lockkit.New(t, lockkit.Patient, nodes...)
	var r flightlock.Report
	// a machine may be too busy to measure its clocks
	redistest.Eventually(t, time.Minute, "all is well", func() bool {
		r = lockkit.Check(t, c)
		return r.Status == flightlock.StatusOK
	})
	if len(r.Findings) != 3*12+3 {
		t.Errorf("%d findings", len(r.Findings))
	}
	for _, s := range servers {
		lockkit.WantFinding(t, r, s.Addr(), "reachable", flightlock.StatusOK, "answers in")
		lockkit.WantFinding(t, r, s.Addr(), "version", flightlock.StatusOK)
		for _, key := range s.Keys(t) {
			if !strings.HasPrefix(key, "flightlock:{boot}") && !strings.Contains(key, "}:fence:") {
				t.Errorf("left: %q", key)
			}
		}
	}
	lockkit.WantFinding(t, r, "", "same server", flightlock.StatusOK, "3 nodes")
	lockkit.WantFinding(t, r, "", "node sets", flightlock.StatusOK)

	table := r.String()
	if !strings.Contains(table, "0 fail, 0 warn, 0 unknown, 39 ok") || strings.Count(table, "\n") != 40 {
		t.Errorf("table:\n%s", table)
	}
	data, err := json.Marshal(r)
	var back flightlock.Report
	if err != nil || json.Unmarshal(data, &back) != nil || back.String() != table ||
		!bytes.Contains(data, []byte(`"status":"ok"`)) {
		t.Errorf("JSON %s, %v", data, err)
	}
}

// What is wrong with a server is found, and the finding names the command that fixes it.
func TestCheckFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	t.Run("eviction", func(t *testing.T) {
		for limit, want := range map[string]flightlock.Status{"0": flightlock.StatusWarn,
			"64mb": flightlock.StatusFail} {
			s := redistest.StartServer(t, "--maxmemory-policy", "allkeys-lru", "--maxmemory", limit)
			r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t)))
			lockkit.WantFinding(t, r, s.Addr(), "eviction", want, "allkeys-lru",
				"CONFIG SET maxmemory-policy noeviction")
		}
	})
	t.Run("persistence", func(t *testing.T) {
		for args, says := range map[string]string{
			"--appendonly no":  "no append-only file",
			"--appendonly yes": "appendfsync is everysec",
		} {
			s := redistest.StartServer(t, strings.Fields(args)...)
			r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t)))
			lockkit.WantFinding(t, r, s.Addr(), "persistence", flightlock.StatusWarn, says, "MaxTTL (1m0s)",
				"appendfsync always", "in its configuration") // by CONFIG SET alone a restart would lose the locks
		}
	})
	t.Run("appendfsync always, but not always", func(t *testing.T) {
		for args, says := range map[string]string{
			"--appendonly no --appendfsync always": "no append-only file",
			"--appendonly yes --appendfsync always --no-appendfsync-on-rewrite yes": "no-appendfsync-on-rewrite is " +
				"yes",
		} {
			s := redistest.StartServer(t, strings.Fields(args)...)
			r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t)))
			lockkit.WantFinding(t, r, s.Addr(), "persistence", flightlock.StatusWarn, says)
			var nodes []redis.UniversalClient
			for range 3 {
				nodes = append(nodes, redistest.StartServer(t, strings.Fields(args)...).Client(t))
			}
			r = lockkit.Check(t, lockkit.New(t, lockkit.Patient, nodes...))
			lockkit.WantFinding(t, r, "", "persistence", flightlock.StatusOK, "no vote for")
		}
	})
	t.Run("a node without INFO", func(t *testing.T) {
		tr := lockkit.NewTrio(t)
		nodes := tr.Nodes()
		redistest.Deploy(t, nodes...) // or the others would be new for a minute, because one does not say so
		tr.Servers[1].Do(t, "ACL", "SETUSER", "app", "on", ">pw", "allkeys", "allchannels", "allcommands", "-info")
		nodes[1] = tr.Servers[1].Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, nodes...))
		lockkit.WantFinding(t, r, "", "locks", flightlock.StatusOK)
		lockkit.WantFinding(t, r, tr.Servers[1].Addr(), "quarantine", flightlock.StatusFail, "INFO is refused",
			"ACL SETUSER app +info")
		lockkit.WantFinding(t, r, tr.Servers[1].Addr(), "persistence", flightlock.StatusUnknown)
	})
	t.Run("quarantine", func(t *testing.T) {
		tr := lockkit.NewTrio(t)
		c := lockkit.New(t, lockkit.Patient, tr.Nodes()...)
		lockkit.TryLock(t, c, "k")
		tr.Servers[2].Do(t, "FLUSHALL")
		lockkit.LockUntilQuarantined(t, c, "k", 1)
		r := lockkit.Check(t, c)
		lockkit.WantFinding(t, r, tr.Proxy.Addr(), "quarantine", flightlock.StatusOK, "on, for 1m0.602s")
		lockkit.WantFinding(t, r, tr.Proxy.Addr(), "persistence", flightlock.StatusOK, "no vote")
		lockkit.WantFinding(t, r, tr.Servers[2].Addr(), "quarantine", flightlock.StatusWarn, "lost data")
		tr.Servers[0].Do(t, "FLUSHALL")
		redistest.Eventually(t, 20*time.Second, "the other loss is noticed", func() bool {
			_, err := c.TryLock(t.Context(), "k", time.Second)
			return err != nil && c.Stats().Quarantined == 2
		})
		r = lockkit.Check(t, c)
		lockkit.WantFinding(t, r, tr.Servers[2].Addr(), "quarantine", flightlock.StatusFail,
			"1 of 3 nodes have a vote")
		opts := lockkit.Patient
		opts.DisableQuarantine = true
		r = lockkit.Check(t, lockkit.New(t, opts, tr.Nodes()...))
		lockkit.WantFinding(t, r, tr.Proxy.Addr(), "quarantine", flightlock.StatusOK, "off")
		lockkit.WantFinding(t, r, tr.Proxy.Addr(), "persistence", flightlock.StatusWarn)
	})
	t.Run("replica", func(t *testing.T) {
		master := redistest.StartServer(t)
		s := redistest.StartServer(t, "--replicaof", "127.0.0.1 "+fmt.Sprint(master.Port()))
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t)))
		lockkit.WantFinding(t, r, s.Addr(), "role", flightlock.StatusFail, "replica of "+master.Addr(),
			"REPLICAOF NO ONE")
		lockkit.WantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail, "READONLY")
	})
	t.Run("sentinel", func(t *testing.T) {
		s := redistest.StartSentinel(t)
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, lockkit.DialOnce(t, s.Addr())))
		lockkit.WantFinding(t, r, s.Addr(), "role", flightlock.StatusFail, "a Sentinel", "master_name=")
	})
	t.Run("out of memory", func(t *testing.T) {
		s := redistest.StartServer(t, "--maxmemory", "1")
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t)))
		lockkit.WantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail, "OOM", "maxmemory")
	})
	t.Run("refused", func(t *testing.T) {
		addr := redistest.RefusedAddr(t)
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, lockkit.DialOnce(t, addr)))
		lockkit.WantFinding(t, r, addr, "reachable", flightlock.StatusFail, "refused", "PING")
	})
	t.Run("wrong password", func(t *testing.T) {
		s := redistest.StartServer(t, "--requirepass", "hunter2")
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient,
			s.Client(t, func(o *redis.Options) { o.Password = "hunter3" })))
		lockkit.WantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail, "WRONGPASS", "password")
		if text := r.String(); strings.Contains(text, "hunter") {
			t.Errorf("shows a password:\n%s", text)
		}
	})
	t.Run("database refused", func(t *testing.T) {
		s := redistest.StartServer(t)
		s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-select")
		rdb := s.Client(t, func(o *redis.Options) { o.Username, o.Password, o.DB = "app", "pw", 3 })
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, rdb))
		lockkit.WantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail, "NOPERM", "select", "+select")
	})
	t.Run("too many clients", func(t *testing.T) {
		s := redistest.StartServer(t)
		c := lockkit.New(t, lockkit.Patient, lockkit.DialOnce(t, s.Addr()))
		s.Do(t, "CONFIG", "SET", "maxclients", "1")
		last := s.Client(t).Conn()
		defer last.Close()
		testkit.Must(t, last.Ping(t.Context()).Err())
		lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "reachable", flightlock.StatusFail,
			"max number of clients", "raise maxclients")
	})
	t.Run("twins", func(t *testing.T) {
		s, other := redistest.StartServer(t), redistest.StartServer(t)
		p := redistest.StartProxy(t, s.Addr())
		r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, s.Client(t), other.Client(t),
			lockkit.DialOnce(t, p.Addr())))
		lockkit.WantFinding(t, r, "", "same server", flightlock.StatusFail,
			"nodes[0] ("+s.Addr()+") and nodes[2] ("+p.Addr()+")")
	})
}

// A user with no more rights than locking needs can run Check. What it is not allowed to read is
// unknown, and a right that locking lacks is found.
func TestCheckNeedsNoMoreThanLocking(t *testing.T) {
	t.Parallel()
	const all = "on >pw ~lock:* ~flightlock:* &flightlock:inbox:* "
	smallestACL := strings.Join(lockkit.DocumentedACL(t)[0].Commands, " ")
	for name, tc := range map[string]struct {
		rights  string
		scripts flightlock.Status
		says    string
		pubsub  flightlock.Status
	}{
		"all rights": {all + smallestACL, flightlock.StatusOK, "all commands", flightlock.StatusOK},
		"no EVALSHA": {all + smallestACL + " -evalsha", flightlock.StatusFail, "EVALSHA: NOPERM",
			flightlock.StatusOK},
		"no SCRIPT LOAD": {all + strings.Replace(smallestACL, "+script|load", "", 1), flightlock.StatusFail,
			"SCRIPT LOAD: NOPERM", flightlock.StatusOK},
		"no INCRBY": {all + smallestACL + " -incrby", flightlock.StatusFail, "INCRBY: ", flightlock.StatusOK},
		"other keys": {strings.Replace(all, "~lock:*", "~locks:*", 1) + smallestACL, flightlock.StatusFail,
			"NOPERM", flightlock.StatusOK},
		"other channels": {strings.Replace(all, "&flightlock:inbox:*", "&lock:*", 1) + smallestACL,
			flightlock.StatusOK, "", flightlock.StatusWarn},
		"no SUBSCRIBE": {all + smallestACL + " -subscribe", flightlock.StatusOK, "", flightlock.StatusWarn},
		"no PUBLISH":   {all + smallestACL + " -publish", flightlock.StatusOK, "", flightlock.StatusWarn},
	} {
		t.Run(name, func(t *testing.T) {
			s := redistest.StartServer(t)
			s.Do(t, lockkit.ACLSetUser("app", tc.rights)...)
			c := lockkit.New(t, lockkit.Patient, s.Client(t,
				func(o *redis.Options) { o.Username, o.Password = "app", "pw" }))
			r := lockkit.CheckReached(t, c)
			lockkit.WantFinding(t, r, s.Addr(), "reachable", flightlock.StatusOK)
			lockkit.WantFinding(t, r, s.Addr(), "version", flightlock.StatusOK)
			lockkit.WantFinding(t, r, s.Addr(), "role", flightlock.StatusOK)
			lockkit.WantFinding(t, r, s.Addr(), "eviction", flightlock.StatusUnknown, "not reported", "NOPERM",
				"CONFIG GET")
			lockkit.WantFinding(t, r, s.Addr(), "persistence", flightlock.StatusUnknown)
			lockkit.WantFinding(t, r, s.Addr(), "script rights", tc.scripts, tc.says)
			lockkit.WantFinding(t, r, s.Addr(), "pubsub rights", tc.pubsub)
			if tc.scripts == flightlock.StatusFail {
				lockkit.WantFinding(t, r, s.Addr(), "script rights", tc.scripts,
					"ACL SETUSER app '~lock:*' '~flightlock:*' '&flightlock:inbox:*'")
			}
		})
	}
}

// What a finding says is to be run has the prefix and the socket quoted for a shell.
func TestCheckQuotesForAShell(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "+@all")
	opts := lockkit.Patient
	opts.KeyPrefix = "bob's:"
	r := lockkit.CheckReached(t, lockkit.New(t, opts, s.Client(t, func(o *redis.Options) {
		o.Username,
			o.Password = "app", "pw"
	})))
	lockkit.WantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail,
		`ACL SETUSER app '~bob'\''s:*' '~flightlock:*' '&`)

	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: "/no such/redis.sock", DialerRetries: 1})
	defer rdb.Close()
	r = lockkit.Check(t, lockkit.New(t, lockkit.Patient, rdb))
	lockkit.WantFinding(t, r, "redis.sock", "reachable", flightlock.StatusFail,
		`redis-cli -s '/no such/redis.sock' PING`)
}

// A node that never answers costs Check its own bounded time, whatever ctx says, and the other
// nodes are checked all the same.
func TestCheckIsBoundedByItself(t *testing.T) {
	t.Parallel()
	good, hole := redistest.StartServer(t), redistest.BlackHole(t)
	c := lockkit.New(t, lockkit.Patient, good.Client(t), lockkit.DialOnce(t, hole))
	done := make(chan flightlock.Report)
	go func() {
		r, err := c.Check(context.Background())
		if err != nil {
			t.Error(err)
		}
		done <- r
	}()
	select {
	case r := <-done:
		lockkit.WantFinding(t, r, hole, "reachable", flightlock.StatusFail)
		lockkit.WantFinding(t, r, good.Addr(), "script rights", flightlock.StatusOK)
		lockkit.WantFinding(t, r, "", "same server", flightlock.StatusUnknown)
		lockkit.WantFinding(t, r, "", "node sets", flightlock.StatusUnknown)
	case <-time.After(time.Minute):
		t.Fatal("Check does not end")
	}
}

// If the servers of a Cluster are not known because they refuse to name them, the fix is about that, and
// not to start them.
func TestCheckOfAClusterThatIsNotNamed(t *testing.T) {
	t.Parallel()
	rules := lockkit.DocumentedACL(t)
	cluster := redistest.StartCluster(t, 3)
	for _, s := range cluster.Servers() {
		rules[0].Apply(t, s) // those of a server, and of a Cluster +cluster|slots is missing
	}
	servers := []*redistest.Server{redistest.StartServer(t), redistest.StartServer(t)}
	for u, says := range map[string][]string{
		"redis://app:pw@" + cluster.Addrs()[0] + "?addr=" +
			cluster.Addrs()[1]: {"NOPERM", "on each of its servers: " +
			"redis-cli --user ADMIN --askpass ACL SETUSER app '~lock:*'", rules[1].Commands[3], rules[1].Commands[4]},
		"redis://" + servers[0].Addr() + "?addr=" + servers[1].Addr(): {"cluster support disabled", "no Cluster",
			"url of its own"},
	} {
		r := lockkit.Check(t, lockkit.Open(t, lockkit.Patient, u))
		lockkit.WantFinding(t, r, "cluster[", "reachable", flightlock.StatusFail, says...)
		notToStart(t, r)
	}
}

// Every master of a Cluster is checked; a member by itself is not a node.
func TestCheckOfClusters(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	r := lockkit.Check(t, lockkit.New(t, lockkit.Patient, cluster.Client(t)))
	for _, addr := range cluster.Addrs() {
		lockkit.WantFinding(t, r, addr, "role", flightlock.StatusOK)
		lockkit.WantFinding(t, r, addr, "script rights", flightlock.StatusOK, "all commands")
		lockkit.WantFinding(t, r, addr, "pubsub rights", flightlock.StatusOK, "arrives")
	}
	lockkit.WantFinding(t, r, "", "node sets", flightlock.StatusOK)
	tagged := lockkit.Patient
	tagged.KeyPrefix = "{app}:"
	r = lockkit.Check(t, lockkit.New(t, tagged, cluster.Client(t)))
	untried := 0
	for _, f := range r.Findings {
		if f.Check == "script rights" && strings.Contains(f.Found, "not tried") {
			untried++
		}
	}
	if untried != 2 {
		t.Errorf("%d masters without a key of the prefix, want 2", untried)
	}
	r = lockkit.Check(t, lockkit.New(t, lockkit.Patient, cluster.Servers()[0].Client(t)))
	lockkit.WantFinding(t, r, cluster.Servers()[0].Addr(), "role", flightlock.StatusFail, "member of a Cluster",
		"addr=")
}

// tripped is a circuit breaker that is open, and counts what is reported to it.
type tripped struct{ reports atomic.Int64 }

func (*tripped) Allow() error { return errors.New("circuit breaker is open") }

func (b *tripped) ReportResult(error) { b.reports.Add(1) }

// A Limiter of the client's stops its other commands, not locks: nor does it make Check report that a server
// which grants locks cannot be reached.
func TestCheckOfAClientWithALimiter(t *testing.T) {
	t.Parallel()
	server, breaker := redistest.StartServer(t), &tripped{}
	c := lockkit.New(t, lockkit.Patient, server.Client(t, func(o *redis.Options) { o.Limiter = breaker }))
	lockkit.LockAndRelease(t, c)
	r := lockkit.Check(t, c)
	for _, name := range []string{"reachable", "script rights", "pubsub rights"} {
		lockkit.WantFinding(t, r, server.Addr(), name, flightlock.StatusOK)
	}
	lockkit.WantFinding(t, r, "", "node sets", flightlock.StatusOK)
	if n := breaker.reports.Load(); n > 0 {
		t.Errorf("%d results were reported to it", n)
	}
}

// An error of the client's OnConnect is reported as what it is, although the server has refused something
// before: the name of the library, which may be refused.
func TestCheckOfAnOnConnectThatFails(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	server.Do(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-client", "+client|setname")
	c := lockkit.New(t, lockkit.Patient, server.Client(t, func(o *redis.Options) {
		o.Username, o.Password = "app", "secret"
		o.OnConnect = func(context.Context, *redis.Conn) error { return errors.New("no mood") }
	}))
	for range 2 { // the second time it may be suspended
		r := lockkit.Check(t, c)
		lockkit.WantFinding(t, r, server.Addr(), "reachable", flightlock.StatusFail, "no mood")
		for _, f := range r.Findings {
			if strings.Contains(f.Found, "setinfo") {
				t.Errorf("%+v", f)
			}
		}
		_, err := c.TryLock(t.Context(), "k", time.Minute)
		if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "no mood") {
			t.Error(err)
		}
	}
}
