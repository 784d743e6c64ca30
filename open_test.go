package flightlock_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// Open refuses a bad url, says which and why, and does not show its password.
func TestOpenHidesPasswords(t *testing.T) {
	for _, bad := range []string{
		"redis://u:hunter2@127.0.0.1:99999999/x",
		"http://u:hunter2@127.0.0.1:6379",
		"redis://u:hunter2@127.0.0.1:6379?nonsense=1",
		"redis://u:hunter2@[::1",
		"redis://u:hunter2@127.0.0.1:6379/%zz",
		"://u:hunter2@x",
		"redis://u:hunter2",
		"redis:u:hunter2@h",
		"redis://u:%68unter2@h:1/x",
		"redis://u:%68%75%6e%74%65%72%32@h:1?typo=%68unter2",
		"redis://h:1?master_name=m&username=app&password=hunter2&typo=1",
		"redis://h:1?addr=h:2&sentinel_password=hunter2&typo=1",
		"redis://h:1?Password=hunter2",
		"redis://h:1?pass=hunter2",
		"redis://h:1?auth=hunter2",
		"redis://h:1?hunter2@h",
		"redis://h:1?password=a&hunter2",
		"redis://h:1?p%61ssword=hunter2",
		"redis://u:hunter2@h:1?addr=h:2&read_only=true",
		"redis://h:1?master_name=m&replica_only=true&password=hunter2",
		"unix://u:hunter2@/run/redis.sock?typo=1",
		"unix://u:hunter2@run/redis.sock",
		"127.0.0.1:6379",
		"u:hunter2@127.0.0.1:6379",
		"",
	} {
		_, err := flightlock.Open([]string{"redis://127.0.0.1:1", bad}, flightlock.Options{})
		wantInvalid(t, err, "urls[1]")
		if strings.Contains(err.Error(), "unter2") {
			t.Errorf("%q: %q shows the password", bad, err)
		}
	}
	_, err := flightlock.Open(nil, flightlock.Options{})
	wantInvalid(t, err, "len(urls) is 0")
	if strings.Contains(err.Error(), "Nodes") {
		t.Errorf("%v: there are no Nodes to give", err)
	}
}

// What go-redis misinterprets, or dials forever in vain, is refused: several hosts in one URL,
// invalid ports, a Sentinel's master without a name; and a size of its pool with which it panics.
func TestOpenRefusesWhatCannotBeDialled(t *testing.T) {
	for bad, says := range map[string]string{
		"redis://h1:6379,h2:6379":                         "several hosts",
		"redis://u:hunter2@h1:6379,h2:6379,h3:6379":       "several hosts",
		"redis://h1,h2":                                   "several hosts",
		"redis://h1:26379,h2:26379?master_name=m":         "several hosts",
		"redis://h1:26379?master_name=m&addr=h2:1,h3:1":   "several hosts",
		"redis://h:99999":                                 "from 1 to 65535",
		"rediss://u:hunter2@h:65536/1":                    "from 1 to 65535",
		"redis://h:0":                                     "from 1 to 65535",
		"redis://h:99999?master_name=m":                   "from 1 to 65535",
		"redis://h:1?master_name=m&addr=h2:99999":         "from 1 to 65535",
		"redis://h:1?addr=h2:99999":                       "from 1 to 65535",
		"redis://h:1?addr=h2:http":                        "from 1 to 65535",
		"redis://h:1?addr=h2:":                            "from 1 to 65535",
		"redis://h:26379?master_name=":                    "master_name",
		"redis://u:hunter2@h:26379?master_name=&addr=h:1": "master_name",
		"redis://h:1?pool_size=-1":                        "pool_size must not be negative",
		"redis://h:1?addr=h2:1&pool_size=5&pool_size=-5":  "pool_size must not be negative",
		"redis://h:1?master_name=m&pool_size=-5":          "pool_size must not be negative",
	} {
		_, err := flightlock.Open([]string{"redis://127.0.0.1:1", bad}, flightlock.Options{})
		wantInvalid(t, err, "urls[1]", says)
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %q shows the password", bad, err)
		}
	}
	for _, good := range []string{"redis://h", "redis://h:", "redis://[::1]:6379", "redis://:6379",
		"redis://h:1?addr=h2:2&addr=[::1]:65535", "redis://h?master_name=m&addr=h2:65535"} {
		c, err := flightlock.Open([]string{good}, flightlock.Options{})
		if err != nil {
			t.Errorf("%q: %v", good, err)
			continue
		}
		closeClient(t, c)
	}
	_, err := flightlock.Open([]string{"redis://127.0.0.1:1", "redis://127.0.0.1:1"}, flightlock.Options{})
	wantInvalid(t, err, "urls[1]", "urls[0]")
	_, err = flightlock.Open([]string{"redis://127.0.0.1:1/1", "redis://127.0.0.1:2/2"}, flightlock.Options{})
	wantInvalid(t, err, "urls[1]", "urls[0]")
	_, err = flightlock.Open(slices.Repeat([]string{"redis://127.0.0.1:1"}, 65), flightlock.Options{})
	wantInvalid(t, err, "len(urls) is 65", "64")
}

// A socket's name may have any bytes; as the label of a metric it is text, and the names of two
// nodes remain different.
func TestNodesWhoseNamesAreNoText(t *testing.T) {
	dir := t.TempDir()
	reg := prometheus.NewRegistry()
	c := mustOpen(t, flightlock.Options{Registerer: reg}, "unix://"+dir+"/%ff.sock", "unix://"+dir+"/%fe.sock",
		"unix://"+dir+"/%ff%fe.sock")
	if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("TryLock: %v", err)
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

// A password with a character that should have been written as %XX makes a URL that means something
// else. However it is parsed, no half of the password is shown.
func TestOpenHidesHalvesOfPasswords(t *testing.T) {
	for _, form := range []string{
		"redis://u:PW@h:1/x", "redis://:PW@h:1/x", "redis://PW@h:1/x",
		"rediss://u:PW@h:1?typo=1", "unix://u:PW@/run/r.sock?typo=1",
		"redis://u:PW@h:1?addr=h:2&typo=1", "redis://u:PW@h:1?master_name=m&typo=1",
		"redis://h:1?master_name=m&password=PW&typo=1", "redis://h:1?sentinel_password=PW&addr=h:2",
	} {
		for c := rune(' '); c < 127; c++ {
			halves := []string{"7531864", "9876543"}
			for range 2 {
				u := strings.Replace(form, "PW", halves[0]+string(c)+halves[1], 1)
				cl, err := flightlock.Open([]string{u}, flightlock.Options{})
				if err == nil {
					closeClient(t, cl)
					continue
				}
				if c == ':' && strings.HasPrefix(form, "redis://PW@") {
					continue // a user and a password
				}
				if text := err.Error(); strings.Contains(text, halves[0]) || strings.Contains(text, halves[1]) {
					t.Errorf("%q: shown in %q", u, text)
				}
				halves = []string{"correcthorse", "batterystaple"}
			}
		}
	}
}

// The error gives the reason, as far as it is not secret.
func TestOpenSaysWhatIsWrong(t *testing.T) {
	for bad, says := range map[string][]string{
		"127.0.0.1:6379":                      {"127.0.0.1:6379", "want redis://host:port"},
		"redis://h:1/x?db=1":                  {"redis://h:1/x?db=1", `"x"`},
		"redis://u:p@h:1?read_timeout=soon":   {"redis://u:xxxxx@h:1?read_timeout=soon", "read_timeout"},
		"redis://h:1?addr=h:2&read_only=true": {"read_only", "replica"},
		"redis://h:1?master_name=m&typo=5&password=secret": {"redis://h:1?master_name=m&typo=xxxxx&password=xxxxx",
			"unexpected option: typo"},
		"redis://u:12#b@h:1":    {"redis://xxxxx", "%XX"},
		"redis://u:a/b@h:1":     {"redis://xxxxx", "%XX"},
		"unix://run/redis.sock": {"unix://run/redis.sock", "three slashes"},
		"ftp://h:1":             {"ftp://h:1", "scheme"},
	} {
		_, err := flightlock.Open([]string{bad}, flightlock.Options{})
		wantInvalid(t, err, append(says, "urls[0]")...)
	}
}

// mustOpen is a Client over urls that is closed when the test ends.
func mustOpen(t *testing.T, opts flightlock.Options, urls ...string) *flightlock.Client {
	t.Helper()
	c, err := flightlock.Open(urls, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClient(t, c) })
	return c
}

// lockAndRelease checks that c locks.
func lockAndRelease(t *testing.T, c *flightlock.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, "k", 5*time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	mustRelease(t, l)
}

// A user and a password with every character that is special in URLs, on three servers.
func TestOpenWithUserAndPassword(t *testing.T) {
	const password = `p@ss:w/r?d#1%&= "x`
	var urls []string
	var servers []*redistest.Server
	for range 3 {
		s := redistest.StartServer(t)
		s.Do(t, "ACL", "SETUSER", "app", "on", ">"+password, "~*", "&*", "+@all")
		s.Do(t, "ACL", "SETUSER", "default", "on", "nopass")
		u := url.URL{Scheme: "redis", User: url.UserPassword("app", password), Host: s.Addr(), Path: "/3"}
		urls = append(urls, u.String())
		servers = append(servers, s)
	}
	lockAndRelease(t, mustOpen(t, patient, urls...))
	for _, s := range servers {
		list := s.Do(t, "CLIENT", "LIST").(string)
		for _, want := range []string{"name=flightlock", "user=app", "db=3"} {
			if !strings.Contains(list, want) {
				t.Errorf("CLIENT LIST does not have %s:\n%s", want, list)
			}
		}
	}
}

// A URL whose dial_timeout asks for no timeout has that of Open. go-redis would give up each dial before it
// began.
func TestOpenWithoutADialTimeout(t *testing.T) {
	s := redistest.StartMini(t)
	for _, none := range []string{"0", "-1", "0s"} {
		lockAndRelease(t, mustOpen(t, patient, "redis://"+s.Addr()+"?dial_timeout="+none))
	}
}

func TestOpenOfAUnixSocket(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "redis.sock")
	s := redistest.StartServer(t, "--unixsocket", socket, "--unixsocketperm", "700", "--requirepass", "hunter2")
	c := mustOpen(t, patient, "unix://:hunter2@"+socket+"?client_name=mine")
	lockAndRelease(t, c)
	if list := s.Do(t, "CLIENT", "LIST").(string); !strings.Contains(list, "name=mine") {
		t.Errorf("CLIENT LIST:\n%s", list)
	}
	r := check(t, c)
	wantFinding(t, r, socket, "role", flightlock.StatusOK)
	wantFinding(t, r, socket, "persistence", flightlock.StatusWarn, "redis-cli -s "+socket)
}

// With TLS, a certificate that no trusted authority has signed is refused, and the error says so.
func TestOpenWithTLS(t *testing.T) {
	ca, cert, key := redistest.Certificates(t)
	addr := redistest.RefusedAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	redistest.StartServer(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients",
		"no")

	strict := mustOpen(t, patient, "rediss://"+addr)
	_, err := strict.TryLock(t.Context(), "k", time.Second)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without the authority: %v", err)
	}
	wantFinding(t, check(t, strict), addr, "reachable", flightlock.StatusFail, "certificate")

	lockAndRelease(t, mustOpen(t, patient, "rediss://"+addr+"?skip_verify=true"))

	rdb := redis.NewClient(&redis.Options{Addr: addr, TLSConfig: &tls.Config{RootCAs: ca}})
	defer rdb.Close()
	lockAndRelease(t, newClient(t, patient, rdb))
}

// A server or a proxy that closes connections which were idle for long costs nothing with TLS either: they are not
// used again.
func TestIdleTLSConnectionsThatWereClosedAreNotUsed(t *testing.T) {
	t.Parallel()
	_, cert, key := redistest.Certificates(t)
	addr := redistest.RefusedAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	server := redistest.StartServer(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-auth-clients", "no")
	c := mustOpen(t, patient, "rediss://"+addr+"?skip_verify=true")
	for range 5 {
		server.Do(t, "CLIENT", "KILL", "TYPE", "normal")
		l, err := c.TryLock(t.Context(), "k", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		server.Do(t, "CLIENT", "KILL", "TYPE", "normal")
		if err := l.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		server.Do(t, "CLIENT", "KILL", "TYPE", "normal")
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenOfACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, "--requirepass", "hunter2", "--masterauth", "hunter2")
	addrs := cluster.Addrs()
	c := mustOpen(t, patient, fmt.Sprintf("redis://:hunter2@%s?addr=%s&addr=%s", addrs[0], addrs[1], addrs[2]))
	for i := range 20 { // on all masters
		l := mustLock(t, c, fmt.Sprint("k", i), 5*time.Second)
		mustRelease(t, l)
	}
	for _, s := range cluster.Servers() {
		if list := s.Do(t, "CLIENT", "LIST").(string); !strings.Contains(list, "name=flightlock") {
			t.Errorf("CLIENT LIST of %s:\n%s", s.Addr(), list)
		}
	}
}

// A Sentinel-managed master is found, and when it dies while a lock is held the holder continues
// with the replica that takes its place: the lock was replicated.
func TestOpenOfASentinelsMaster(t *testing.T) {
	t.Parallel()
	master := redistest.StartServer(t, "--repl-diskless-sync-delay", "0")
	replica := redistest.StartServer(t, "--replicaof", "127.0.0.1 "+fmt.Sprint(master.Port()))
	sentinel := redistest.StartSentinel(t, redistest.Watch("main", master)...)
	redistest.Eventually(t, 30*time.Second, "the Sentinel knows the replica", func() bool {
		list := sentinel.Do(t, "SENTINEL", "REPLICAS", "main").([]any)
		return len(list) == 1 && strings.Contains(replica.Do(t, "INFO", "replication").(string), "master_link_status:up") &&
			strings.Contains(fmt.Sprint(list), "master-link-status ok")
	})
	u := "redis://" + sentinel.Addr() + "?master_name=main"
	c, other := mustOpen(t, patient, u), mustOpen(t, patient, u)
	r := check(t, c)
	wantFinding(t, r, "Sentinel master main", "role", flightlock.StatusOK)

	l := mustLock(t, c, "k", time.Minute)
	if n := master.Do(t, "WAIT", "1", "20000"); n != int64(1) {
		t.Fatalf("%v replicas have the lock", n)
	}
	redistest.Eventually(t, 30*time.Second, "the lock is on the replica", func() bool {
		return replica.Do(t, "EXISTS", "lock:k") == int64(1)
	})
	if err := master.Kill(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 40*time.Second, "the replica is master", func() bool { // its connections are reset meanwhile
		return fmt.Sprint(sentinel.Do(t, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")) == fmt.Sprintf("[127.0.0.1 %d]",
			replica.Port())
	})
	redistest.Eventually(t, 20*time.Second, "the lock is refreshed on the new master", func() bool {
		return l.Refresh(t.Context()) == nil
	})
	redistest.Eventually(t, 20*time.Second, "the other client reaches the new master", func() bool {
		_, err := other.TryLock(t.Context(), "k", time.Second)
		if err == nil {
			t.Fatal("two holders")
		}
		return errors.Is(err, flightlock.ErrNotAcquired)
	})
	mustRelease(t, l)
	lockAndRelease(t, other)
}

// When the Sentinels name another master, as in a planned failover, a client goes there soon, although the one of
// before continues: the Sentinels make it a replica only after 8 seconds or more, and here, without SLAVEOF, never.
// Processes that start meanwhile use the new master, and would not exclude those of before.
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
				c = mustOpen(t, patient, "redis://"+sentinel.Addr()+"?master_name=main")
			} else {
				rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main", SentinelAddrs: []string{sentinel.Addr()}})
				t.Cleanup(func() { rdb.Close() })
				c = newClient(t, patient, rdb)
			}
			mustLock(t, c, "k", time.Minute)
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
				there, _ := replica.Client(t).Exists(t.Context(), "lock:"+key).Result() // its connections are reset at first
				return there == 1 && master.Do(t, "EXISTS", "lock:"+key) == int64(0)
			})
			if role := fmt.Sprint(master.Do(t, "ROLE")); !strings.Contains(role, "master") {
				t.Errorf("the old master has become a replica: %s", role)
			}
		})
	}
}

// Nodes whose clients have dialers of their own may have equal addresses; errors and logs
// distinguish them nevertheless.
func TestNodesHaveDifferentNames(t *testing.T) {
	t.Parallel()
	a, b := redistest.StartMini(t), redistest.StartMini(t)
	var nodes []redis.UniversalClient
	for _, addr := range []string{a.Addr(), b.Addr(), redistest.RefusedAddr(t)} {
		rdb := redis.NewClient(&redis.Options{Addr: "10.0.0.1:1", DialerRetries: 1,
			Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			}})
		t.Cleanup(func() { rdb.Close() })
		nodes = append(nodes, rdb)
	}
	r := check(t, newClient(t, patient, nodes...))
	names := map[string]bool{}
	for _, f := range r.Findings {
		names[f.Node] = true
	}
	for _, want := range []string{"10.0.0.1:1", "10.0.0.1:1 Nodes[1]", "10.0.0.1:1 Nodes[2]"} {
		if !names[want] {
			t.Errorf("no node %q in %v", want, names)
		}
	}
}
