package flightlock_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// patient keeps a loaded machine from being judged too slow.
var patient = flightlock.Options{NodeTimeout: 10 * time.Second}

func check(t *testing.T, c *flightlock.Client) flightlock.Report {
	t.Helper()
	r, err := c.Check(t.Context())
	if err != nil {
		t.Fatalf("Check: %v\n%s", err, r)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("report:\n%s", r)
		}
	})
	return r
}

// checkReached is a Check that had time to reach all nodes: on a busy machine, it is repeated.
func checkReached(t *testing.T, c *flightlock.Client) (r flightlock.Report) {
	t.Helper()
	redistest.Eventually(t, time.Minute, "all nodes answer in time", func() bool {
		r = check(t, c)
		return !slices.ContainsFunc(r.Findings, func(f flightlock.Finding) bool {
			return f.Check == "reachable" && f.Status != flightlock.StatusOK
		})
	})
	return r
}

// A server whose writes are paused answers all commands but scripts: it cannot vote.
func TestCheckWhileWritesArePaused(t *testing.T) {
	t.Parallel()
	servers, nodes := realNodes(t, 1)
	c := newClient(t, patient, nodes...)
	servers[0].Do(t, "CLIENT", "PAUSE", 600_000, "WRITE")
	r := checkReached(t, c)
	servers[0].Do(t, "CLIENT", "UNPAUSE")
	wantFinding(t, r, servers[0].Addr(), "script rights", flightlock.StatusFail, "EVALSHA", "CLIENT UNPAUSE")
}

// wantFinding finds one finding, by its check and a part of its node's name, and compares its
// status and text.
func wantFinding(t *testing.T, r flightlock.Report, nodeName, name string, status flightlock.Status, says ...string) {
	t.Helper()
	for _, f := range r.Findings {
		if f.Check != name || !strings.Contains(f.Node, nodeName) {
			continue
		}
		if f.Status != status {
			t.Errorf("%s: %s, want %s", name, f.Status, status)
		}
		for _, s := range says {
			if !strings.Contains(f.Found+" | "+f.Fix, s) {
				t.Errorf("%s does not say %q: %+v", name, s, f)
			}
		}
		if f.Why == "" || (f.Status == flightlock.StatusWarn || f.Status == flightlock.StatusFail) && f.Fix == "" {
			t.Errorf("%s without why or fix: %+v", name, f)
		}
		return
	}
	t.Errorf("no finding %q on %q", name, nodeName)
}

// Servers with recommended settings have nothing but ok, and Check leaves no key behind.
func TestCheckOfGoodServers(t *testing.T) {
	t.Parallel()
	var servers []*redistest.Server
	var nodes []redis.UniversalClient
	for range 3 {
		s := redistest.StartServer(t, "--appendonly", "yes", "--appendfsync", "always")
		servers = append(servers, s)
		nodes = append(nodes, s.Client(t))
	}
	c := newClient(t, patient, nodes...)
	var r flightlock.Report
	redistest.Eventually(t, time.Minute, "all is well", func() bool { // a machine may be too busy to measure its clocks
		r = check(t, c)
		return r.Status == flightlock.StatusOK
	})
	if len(r.Findings) != 3*10+2 {
		t.Errorf("%d findings", len(r.Findings))
	}
	for _, s := range servers {
		wantFinding(t, r, s.Addr(), "reachable", flightlock.StatusOK, "answers in")
		wantFinding(t, r, s.Addr(), "version", flightlock.StatusOK)
		if keys := s.Keys(t); len(keys) != 0 {
			t.Errorf("keys left: %v", keys)
		}
	}
	wantFinding(t, r, "", "same server", flightlock.StatusOK, "3 nodes")
	wantFinding(t, r, "", "node sets", flightlock.StatusOK)

	table := r.String()
	if !strings.Contains(table, "0 fail, 0 warn, 0 unknown, 32 ok") || strings.Count(table, "\n") != 33 {
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
		for limit, want := range map[string]flightlock.Status{"0": flightlock.StatusWarn, "64mb": flightlock.StatusFail} {
			s := redistest.StartServer(t, "--maxmemory-policy", "allkeys-lru", "--maxmemory", limit)
			r := check(t, newClient(t, patient, s.Client(t)))
			wantFinding(t, r, s.Addr(), "eviction", want, "allkeys-lru", "CONFIG SET maxmemory-policy noeviction")
		}
	})
	t.Run("persistence", func(t *testing.T) {
		for args, says := range map[string]string{
			"--appendonly no":  "no append-only file",
			"--appendonly yes": "appendfsync is everysec",
		} {
			s := redistest.StartServer(t, strings.Fields(args)...)
			r := check(t, newClient(t, patient, s.Client(t)))
			wantFinding(t, r, s.Addr(), "persistence", flightlock.StatusWarn, says, "MaxTTL (1m0s)",
				"appendfsync always", "in its configuration") // by CONFIG SET alone a restart would lose the locks
		}
	})
	t.Run("appendfsync always, but not always", func(t *testing.T) {
		for args, says := range map[string]string{
			"--appendonly no --appendfsync always":                                  "no append-only file",
			"--appendonly yes --appendfsync always --no-appendfsync-on-rewrite yes": "no-appendfsync-on-rewrite is yes",
		} {
			s := redistest.StartServer(t, strings.Fields(args)...)
			r := check(t, newClient(t, patient, s.Client(t)))
			wantFinding(t, r, s.Addr(), "persistence", flightlock.StatusWarn, says)
			var nodes []redis.UniversalClient
			for range 3 {
				nodes = append(nodes, redistest.StartServer(t, strings.Fields(args)...).Client(t))
			}
			r = check(t, newClient(t, patient, nodes...))
			wantFinding(t, r, "", "persistence", flightlock.StatusOK, "no vote for")
		}
	})
	t.Run("quarantine", func(t *testing.T) {
		tr := newTrio(t)
		tr.servers[1].Do(t, "ACL", "SETUSER", "app", "on", ">pw", "allkeys", "allchannels", "allcommands", "-info")
		nodes := tr.nodes()
		nodes[1] = tr.servers[1].Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })
		c := newClient(t, patient, nodes...)
		tryLock(t, c, "k")
		tr.servers[2].Do(t, "FLUSHALL")
		lockUntilQuarantined(t, c, "k", 1)
		r := check(t, c)
		wantFinding(t, r, tr.proxy.Addr(), "quarantine", flightlock.StatusOK, "on, for 1m0.602s")
		wantFinding(t, r, tr.proxy.Addr(), "persistence", flightlock.StatusOK, "no vote")
		wantFinding(t, r, tr.servers[1].Addr(), "quarantine", flightlock.StatusWarn, "NOPERM", "ACL SETUSER app +info")
		wantFinding(t, r, tr.servers[1].Addr(), "persistence", flightlock.StatusWarn)
		wantFinding(t, r, tr.servers[2].Addr(), "quarantine", flightlock.StatusWarn, "lost data")
		tr.servers[0].Do(t, "FLUSHALL")
		redistest.Eventually(t, 20*time.Second, "the other loss is noticed", func() bool {
			_, err := c.TryLock(t.Context(), "k", time.Second)
			return err != nil && c.Stats().Quarantined == 2
		})
		r = check(t, c)
		wantFinding(t, r, tr.servers[2].Addr(), "quarantine", flightlock.StatusFail, "1 of 3 nodes have a vote")
		opts := patient
		opts.DisableQuarantine = true
		r = check(t, newClient(t, opts, tr.nodes()...))
		wantFinding(t, r, tr.proxy.Addr(), "quarantine", flightlock.StatusOK, "off")
		wantFinding(t, r, tr.proxy.Addr(), "persistence", flightlock.StatusWarn)
	})
	t.Run("replica", func(t *testing.T) {
		master := redistest.StartServer(t)
		s := redistest.StartServer(t, "--replicaof", "127.0.0.1 "+fmt.Sprint(master.Port()))
		r := check(t, newClient(t, patient, s.Client(t)))
		wantFinding(t, r, s.Addr(), "role", flightlock.StatusFail, "replica of "+master.Addr(), "REPLICAOF NO ONE")
		wantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail, "READONLY")
	})
	t.Run("sentinel", func(t *testing.T) {
		s := redistest.StartSentinel(t)
		r := check(t, newClient(t, patient, redistestClient(t, s.Addr())))
		wantFinding(t, r, s.Addr(), "role", flightlock.StatusFail, "a Sentinel", "master_name=")
	})
	t.Run("out of memory", func(t *testing.T) {
		s := redistest.StartServer(t, "--maxmemory", "1")
		r := check(t, newClient(t, patient, s.Client(t)))
		wantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail, "OOM", "maxmemory")
	})
	t.Run("refused", func(t *testing.T) {
		addr := redistest.RefusedAddr(t)
		r := check(t, newClient(t, patient, redistestClient(t, addr)))
		wantFinding(t, r, addr, "reachable", flightlock.StatusFail, "refused", "PING")
	})
	t.Run("wrong password", func(t *testing.T) {
		s := redistest.StartServer(t, "--requirepass", "hunter2")
		r := check(t, newClient(t, patient, s.Client(t, func(o *redis.Options) { o.Password = "hunter3" })))
		wantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail, "WRONGPASS", "password")
		if text := r.String(); strings.Contains(text, "hunter") {
			t.Errorf("shows a password:\n%s", text)
		}
	})
	t.Run("database refused", func(t *testing.T) {
		s := redistest.StartServer(t)
		s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-select")
		rdb := s.Client(t, func(o *redis.Options) { o.Username, o.Password, o.DB = "app", "pw", 3 })
		r := check(t, newClient(t, patient, rdb))
		wantFinding(t, r, s.Addr(), "reachable", flightlock.StatusFail, "NOPERM", "select", "+select")
	})
	t.Run("too many clients", func(t *testing.T) {
		s := redistest.StartServer(t)
		c := newClient(t, patient, redistestClient(t, s.Addr()))
		s.Do(t, "CONFIG", "SET", "maxclients", "1")
		last := s.Client(t).Conn()
		defer last.Close()
		must(t, last.Ping(t.Context()).Err())
		wantFinding(t, check(t, c), s.Addr(), "reachable", flightlock.StatusFail, "max number of clients", "raise maxclients")
	})
	t.Run("twins", func(t *testing.T) {
		s, other := redistest.StartServer(t), redistest.StartServer(t)
		p := redistest.StartProxy(t, s.Addr())
		r := check(t, newClient(t, patient, s.Client(t), other.Client(t), redistestClient(t, p.Addr())))
		wantFinding(t, r, "", "same server", flightlock.StatusFail, "Nodes[0] ("+s.Addr()+") and Nodes[2] ("+p.Addr()+")")
	})
}

// redistestClient is a client of some address that limits the time of dials as those of Open do.
func redistestClient(t *testing.T, addr string) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr, DialerRetries: 1})
	t.Cleanup(func() { c.Close() })
	return c
}

// A user with no more rights than locking needs can run Check. What it is not allowed to read is
// unknown, and a right that locking lacks is found.
func TestCheckNeedsNoMoreThanLocking(t *testing.T) {
	t.Parallel()
	const all = "on >pw ~lock:* ~flightlock:* &flightlock:inbox:* "
	smallestACL := strings.Join(documentedACL(t)[0].commands, " ")
	for name, tc := range map[string]struct {
		rights  string
		scripts flightlock.Status
		says    string
		pubsub  flightlock.Status
	}{
		"all rights": {all + smallestACL, flightlock.StatusOK, "all commands", flightlock.StatusOK},
		"no EVALSHA": {all + smallestACL + " -evalsha", flightlock.StatusFail, "EVALSHA: NOPERM", flightlock.StatusOK},
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
			s.Do(t, aclSetUser("app", tc.rights)...)
			c := newClient(t, patient, s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }))
			r := checkReached(t, c)
			wantFinding(t, r, s.Addr(), "reachable", flightlock.StatusOK)
			wantFinding(t, r, s.Addr(), "version", flightlock.StatusOK)
			wantFinding(t, r, s.Addr(), "role", flightlock.StatusOK)
			wantFinding(t, r, s.Addr(), "eviction", flightlock.StatusUnknown, "not reported", "NOPERM", "CONFIG GET")
			wantFinding(t, r, s.Addr(), "persistence", flightlock.StatusUnknown)
			wantFinding(t, r, s.Addr(), "script rights", tc.scripts, tc.says)
			wantFinding(t, r, s.Addr(), "pubsub rights", tc.pubsub)
			if tc.scripts == flightlock.StatusFail {
				wantFinding(t, r, s.Addr(), "script rights", tc.scripts,
					"ACL SETUSER app '~lock:*' '~flightlock:*' '&flightlock:inbox:*'")
			}
		})
	}
}

// What a finding says is to be run has the prefix and the socket quoted for a shell.
func TestCheckQuotesForAShell(t *testing.T) {
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "app", "on", ">pw", "+@all")
	opts := patient
	opts.KeyPrefix = "bob's:"
	r := checkReached(t, newClient(t, opts, s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" })))
	wantFinding(t, r, s.Addr(), "script rights", flightlock.StatusFail, `ACL SETUSER app '~bob'\''s:*' '~flightlock:*' '&`)

	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: "/no such/redis.sock", DialerRetries: 1})
	defer rdb.Close()
	r = check(t, newClient(t, patient, rdb))
	wantFinding(t, r, "redis.sock", "reachable", flightlock.StatusFail, `redis-cli -s '/no such/redis.sock' PING`)
}

// aclSetUser is the command that creates a user with these rights.
func aclSetUser(user, rights string) []any {
	args := []any{"ACL", "SETUSER", user}
	for _, r := range strings.Fields(rights) {
		args = append(args, r)
	}
	return args
}

// A node that never answers costs Check its own bounded time, whatever ctx says, and the other
// nodes are checked all the same.
func TestCheckIsBoundedByItself(t *testing.T) {
	t.Parallel()
	good, hole := redistest.StartServer(t), redistest.BlackHole(t)
	c := newClient(t, patient, good.Client(t), redistestClient(t, hole))
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
		wantFinding(t, r, hole, "reachable", flightlock.StatusFail)
		wantFinding(t, r, good.Addr(), "script rights", flightlock.StatusOK)
		wantFinding(t, r, "", "same server", flightlock.StatusUnknown)
		wantFinding(t, r, "", "node sets", flightlock.StatusUnknown)
	case <-time.After(time.Minute):
		t.Fatal("Check does not end")
	}
}

// The end of ctx, or Close, ends Check, which returns what is known by then.
func TestCheckEnds(t *testing.T) {
	c := newClient(t, patient, redistestClient(t, redistest.BlackHole(t)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := c.Check(ctx); !errors.Is(err, context.Canceled) || len(r.Findings) == 0 {
		t.Errorf("got %v, %v", r, err)
	}
	got := make(chan error)
	go func() {
		_, err := c.Check(context.Background())
		got <- err
	}()
	closeClient(t, c)
	if err := <-got; !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("closed meanwhile: %v", err)
	}
	if _, err := c.Check(t.Context()); !errors.Is(err, flightlock.ErrClosed) {
		t.Errorf("closed before: %v", err)
	}
}

// Clocks that are apart, and clocks that run at different rates, are found.
func TestCheckOfClocks(t *testing.T) {
	t.Parallel()
	began := time.Now()
	clock := func(now func() time.Time) *redis.Client {
		f := redistest.StartFake(t, func(cmd []string) string {
			if strings.EqualFold(cmd[0], "TIME") {
				at := now()
				sec, usec := fmt.Sprint(at.Unix()), fmt.Sprint(at.Nanosecond()/1000)
				return fmt.Sprintf("*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(sec), sec, len(usec), usec)
			}
			return "-ERR unknown command\r\n"
		})
		return redistestClient(t, f.Addr())
	}
	right, late := clock(time.Now), clock(func() time.Time { return time.Now().Add(-time.Hour) })
	fast := clock(func() time.Time { return began.Add(3 * time.Since(began)) })
	other := clock(time.Now)
	r := checkReached(t, newClient(t, patient, right, late, fast, other))
	wantFinding(t, r, right.Options().Addr, "clock offset", flightlock.StatusOK)
	wantFinding(t, r, late.Options().Addr, "clock offset", flightlock.StatusWarn, "chronyc")
	wantFinding(t, r, fast.Options().Addr, "clock drift", flightlock.StatusFail, "chronyc", "DriftFactor")
	wantFinding(t, r, right.Options().Addr, "version", flightlock.StatusUnknown, "unknown command")
	wantFinding(t, r, right.Options().Addr, "role", flightlock.StatusUnknown)
}

// Old servers are found by what HELLO or INFO says.
func TestCheckOfVersions(t *testing.T) {
	for name, tc := range map[string]struct {
		info string
		want flightlock.Status
	}{
		"redis 6.0":  {"redis_version:6.0.16", flightlock.StatusFail},
		"redis 6.2":  {"redis_version:6.2.0", flightlock.StatusOK},
		"redis 10.0": {"redis_version:10.0.1", flightlock.StatusOK},
		"valkey 7.2": {"redis_version:7.2.4\r\nvalkey_version:7.2.5", flightlock.StatusOK},
		"valkey 7.1": {"redis_version:7.2.4\r\nvalkey_version:7.1.0", flightlock.StatusFail},
	} {
		t.Run(name, func(t *testing.T) {
			f := redistest.StartFake(t, func(cmd []string) string {
				if strings.EqualFold(cmd[0], "INFO") {
					return fmt.Sprintf("$%d\r\n%s\r\n", len(tc.info), tc.info)
				}
				return "-ERR unknown command\r\n"
			})
			r := check(t, newClient(t, patient, redistestClient(t, f.Addr())))
			wantFinding(t, r, f.Addr(), "version", tc.want)
		})
	}
}

// A client whose INFO was refused uses what it found out then, until the next lock verifies the
// node. Check does not report ok just because INFO is allowed by now.
func TestCheckOfAClientThatWasRefusedINFO(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.StartServer(t), redistest.StartServer(t), redistest.StartServer(t)}
	var nodes []redis.UniversalClient
	for _, s := range servers {
		s.Do(t, "ACL", "SETUSER", "default", "-info")
		nodes = append(nodes, s.Client(t))
	}
	c := newClient(t, patient, nodes...)
	eventuallyLock(t, c, "k")
	wantFinding(t, check(t, c), servers[0].Addr(), "quarantine", flightlock.StatusWarn, "INFO is refused")
	for _, s := range servers {
		s.Do(t, "ACL", "SETUSER", "default", "+info")
	}
	wantFinding(t, check(t, c), servers[0].Addr(), "quarantine", flightlock.StatusWarn, "INFO was refused")
	wantFinding(t, check(t, newClient(t, patient, nodes...)), servers[0].Addr(), "quarantine", flightlock.StatusOK)
}

// If the servers of a Cluster are not known because they refuse to name them, the fix is about that, and
// not to start them.
func TestCheckOfAClusterThatIsNotNamed(t *testing.T) {
	t.Parallel()
	rules := documentedACL(t)
	cluster := redistest.StartCluster(t, 3)
	for _, s := range cluster.Servers() {
		rules[0].apply(t, s) // those of a server, and of a Cluster +cluster|slots is missing
	}
	servers := []*redistest.Server{redistest.StartServer(t), redistest.StartServer(t)}
	for u, says := range map[string][]string{
		"redis://app:pw@" + cluster.Addrs()[0] + "?addr=" + cluster.Addrs()[1]: {"NOPERM", "on each of its servers: " +
			"redis-cli --user ADMIN --askpass ACL SETUSER app '~lock:*'", rules[1].commands[3], rules[1].commands[4]},
		"redis://" + servers[0].Addr() + "?addr=" + servers[1].Addr(): {"cluster support disabled", "no Cluster",
			"url of its own"},
	} {
		r := check(t, mustOpen(t, patient, u))
		wantFinding(t, r, "cluster[", "reachable", flightlock.StatusFail, says...)
		notToStart(t, r)
	}
}

// Every master of a Cluster is checked; a member by itself is not a node.
func TestCheckOfClusters(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	r := check(t, newClient(t, patient, cluster.Client(t)))
	for _, addr := range cluster.Addrs() {
		wantFinding(t, r, addr, "role", flightlock.StatusOK)
		wantFinding(t, r, addr, "script rights", flightlock.StatusOK, "all commands")
		wantFinding(t, r, addr, "pubsub rights", flightlock.StatusOK, "arrives")
	}
	wantFinding(t, r, "", "node sets", flightlock.StatusOK)
	tagged := patient
	tagged.KeyPrefix = "{app}:"
	r = check(t, newClient(t, tagged, cluster.Client(t)))
	untried := 0
	for _, f := range r.Findings {
		if f.Check == "script rights" && strings.Contains(f.Found, "not tried") {
			untried++
		}
	}
	if untried != 2 {
		t.Errorf("%d masters without a key of the prefix, want 2", untried)
	}
	r = check(t, newClient(t, patient, cluster.Servers()[0].Client(t)))
	wantFinding(t, r, cluster.Servers()[0].Addr(), "role", flightlock.StatusFail, "member of a Cluster", "addr=")
}

// A service that is moved from 3 nodes to 5 has clients of both kinds for a while. Each finds out
// by the announcements of the others, soon after their first lock.
func TestCheckFindsOtherSetsOfNodes(t *testing.T) {
	t.Parallel()
	lockOnce := func(t *testing.T, opts flightlock.Options, clients ...redis.UniversalClient) *flightlock.Client {
		c := newClient(t, opts, clients...)
		mustRelease(t, mustLock(t, c, "k", time.Second))
		return c
	}
	sets := map[string]struct {
		ours, theirs []int
		want         flightlock.Status
	}{
		"3 to 5":             {[]int{0, 1, 2}, []int{0, 1, 2, 3, 4}, flightlock.StatusFail},
		"5 to 3":             {[]int{0, 1, 2, 3, 4}, []int{0, 1, 2}, flightlock.StatusFail},
		"1 to 3":             {[]int{0}, []int{0, 1, 2}, flightlock.StatusFail},
		"one replaced":       {[]int{0, 1, 2}, []int{0, 1, 3}, flightlock.StatusFail},
		"one added":          {[]int{0, 1, 2}, []int{0, 1, 2, 3}, flightlock.StatusWarn},
		"one removed":        {[]int{0, 1, 2, 3}, []int{0, 1, 2}, flightlock.StatusWarn},
		"in another order":   {[]int{0, 1, 2}, []int{2, 0, 1}, flightlock.StatusOK},
		"nothing in common":  {[]int{0, 1, 2}, []int{3, 4}, flightlock.StatusOK}, // other locks, or nobody can know
		"one of four is new": {[]int{0, 1, 2, 3}, []int{0, 1, 2, 4}, flightlock.StatusWarn},
	}
	ofEach := []string{"3 to 5", "one added", "in another order", "nothing in common"} // one of each kind
	for _, name := range sized(slices.Collect(maps.Keys(sets)), ofEach) {
		tc := sets[name]
		t.Run(name, func(t *testing.T) {
			bubble(t, 5, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				pick := func(of []int) (some []redis.UniversalClient) {
					for _, i := range of {
						some = append(some, clients[i])
					}
					return some
				}
				var log syncBuffer
				ours := lockOnce(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, pick(tc.ours)...)
				theirs := lockOnce(t, flightlock.Options{}, pick(tc.theirs)...)
				time.Sleep(4 * time.Minute) // both have announced themselves, and again
				wantFinding(t, check(t, ours), "", "node sets", tc.want)
				warnings := 0
				if tc.want == flightlock.StatusFail {
					warnings = 1
				}
				if n := strings.Count(log.String(), "another set of nodes"); n != warnings {
					t.Errorf("logged %d times, want %d:\n%s", n, warnings, log.String())
				}
				closeClient(t, theirs)
				time.Sleep(6 * time.Minute)
				wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusOK)
			})
		})
	}
	t.Run("another prefix", func(t *testing.T) {
		bubble(t, 5, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			ours := lockOnce(t, flightlock.Options{}, clients[:3]...)
			lockOnce(t, flightlock.Options{KeyPrefix: "other:"}, clients...)
			time.Sleep(time.Minute)
			wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusOK)
		})
	})
	// A client's announcement is bounded, and is JSON: neither may lose which keys it locks.
	for name, tc := range map[string]struct{ prefix, addr string }{
		"long":            {strings.Repeat("\x01", 4095), strings.Repeat("x", 1000)},
		"a binary prefix": {"\xff\x00\n:", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var nodes []redis.UniversalClient
				for i, n := range redistest.StartMemNodes(t, 5) {
					nodes = append(nodes, n.Client(t, func(o *redis.Options) {
						o.Addr = fmt.Sprintf("%s192.168.0.%d:1", tc.addr, i+1)
					}))
				}
				ours := lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix}, nodes[:3]...)
				lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix}, nodes...)
				lockOnce(t, flightlock.Options{KeyPrefix: tc.prefix + "x"}, nodes[:2]...)
				time.Sleep(time.Minute)
				wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusFail, "counts 5 nodes")
				if found := check(t, ours).String(); strings.Contains(found, "counts 2 nodes") {
					t.Errorf("a set for other keys is among the others:\n%s", found)
				}
			})
		})
	}
	t.Run("other names", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var ours, theirs []redis.UniversalClient
			for i, n := range redistest.StartMemNodes(t, 3) {
				ours = append(ours, n.Client(t))
				theirs = append(theirs, n.Client(t, func(o *redis.Options) { o.Addr = fmt.Sprintf("192.168.0.%d:1", i+1) }))
			}
			c := lockOnce(t, flightlock.Options{}, ours...)
			lockOnce(t, flightlock.Options{}, theirs...)
			time.Sleep(time.Minute)
			wantFinding(t, check(t, c), "", "node sets", flightlock.StatusOK)
		})
	})
	t.Run("a node that does not answer", func(t *testing.T) {
		bubble(t, 4, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			ours := lockOnce(t, flightlock.Options{}, clients[:3]...)
			lockOnce(t, flightlock.Options{}, clients...)
			time.Sleep(time.Minute)
			nodes[0].Down(true)
			wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusUnknown)
		})
	})
}

// Sentinel-managed masters of different sets have equal names in New, and so they have in Open where all of them are
// called "mymaster". The sets differ all the same; and a set is no other one after a failover, even to a replica that
// knows nothing.
func TestCheckFindsOtherSetsOfSentinelManagedMasters(t *testing.T) {
	bubble(t, 5, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
		masters := make([]atomic.Pointer[redistest.MemNode], len(nodes))
		for i, n := range nodes {
			masters[i].Store(n)
		}
		var log syncBuffer
		logger := slog.New(slog.NewTextHandler(&log, nil))
		locks := func(of ...int) *flightlock.Client {
			var clients []redis.UniversalClient
			for _, i := range of {
				clients = append(clients, redistest.SentinelClient(t, masters[i].Load))
			}
			c := newClient(t, flightlock.Options{Logger: logger}, clients...)
			mustRelease(t, mustLock(t, c, "k", time.Second))
			return c
		}
		wantWarnings := func(want int) {
			t.Helper()
			if n := strings.Count(log.String(), "another set of nodes"); n != want {
				t.Errorf("logged %d times, want %d:\n%s", n, want, log.String())
			}
		}
		ours := locks(0, 1, 2)
		locks(2, 1, 0)
		time.Sleep(4 * time.Minute) // in the bubble's time: several announcements
		wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusOK)
		masters[2].Store(nodes[4])
		nodes[2].Down(true)
		for range 8 {
			time.Sleep(time.Minute)                     // until the next announcement
			for _, f := range check(t, ours).Findings { // a connection to the old master may have to fail first
				if f.Check == "node sets" && f.Status == flightlock.StatusFail {
					t.Error(f)
				}
			}
		}
		wantWarnings(0)
		locks(0, 1, 3)
		time.Sleep(4 * time.Minute) // several announcements
		wantFinding(t, check(t, ours), "", "node sets", flightlock.StatusFail, "10.0.0.4:6379")
		wantWarnings(3) // by each of them
	})
}

// A client that locks nothing announces nothing, and an announcement is one short-lived key.
func TestWordIsLeftOnlyByThoseWhoLock(t *testing.T) {
	bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		nodes[0].Mini.FlushAll()
		c := newClient(t, flightlock.Options{}, clients...)
		time.Sleep(time.Hour)
		if keys := nodes[0].Mini.Keys(); len(keys) != 0 {
			t.Errorf("keys %v", keys)
		}
		mustRelease(t, mustLock(t, c, "k", time.Second))
		time.Sleep(time.Hour)
		if !nodes[0].Mini.Exists("flightlock:{sets}") {
			t.Error("no announcement")
		}
		closeClient(t, c)
		time.Sleep(6 * time.Minute)
		if nodes[0].Mini.Exists("flightlock:{sets}") {
			t.Error("an announcement outlives its client")
		}
	})
}

// tripped is a circuit breaker that is open, and counts what is reported to it.
type tripped struct{ reports atomic.Int64 }

func (*tripped) Allow() error         { return errors.New("circuit breaker is open") }
func (b *tripped) ReportResult(error) { b.reports.Add(1) }

// A Limiter of the client's stops its other commands, not locks: nor does it make Check report that a server which
// grants locks cannot be reached.
func TestCheckOfAClientWithALimiter(t *testing.T) {
	t.Parallel()
	server, breaker := redistest.StartServer(t), &tripped{}
	c := newClient(t, patient, server.Client(t, func(o *redis.Options) { o.Limiter = breaker }))
	lockAndRelease(t, c)
	r := check(t, c)
	for _, name := range []string{"reachable", "script rights", "pubsub rights"} {
		wantFinding(t, r, server.Addr(), name, flightlock.StatusOK)
	}
	wantFinding(t, r, "", "node sets", flightlock.StatusOK)
	if n := breaker.reports.Load(); n > 0 {
		t.Errorf("%d results were reported to it", n)
	}
}

// An error of the client's OnConnect is reported as what it is, although the server has refused something before: the
// name of the library, which may be refused.
func TestCheckOfAnOnConnectThatFails(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	server.Do(t, "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-client", "+client|setname")
	c := newClient(t, patient, server.Client(t, func(o *redis.Options) {
		o.Username, o.Password = "app", "secret"
		o.OnConnect = func(context.Context, *redis.Conn) error { return errors.New("no mood") }
	}))
	for range 2 { // the second time it may be suspended
		r := check(t, c)
		wantFinding(t, r, server.Addr(), "reachable", flightlock.StatusFail, "no mood")
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
