package setup

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A user and a password with every character that is special in URLs, on three servers.
func TestOpenWithUserAndPassword(t *testing.T) {
	t.Parallel()
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
	lockkit.LockAndRelease(t, lockkit.Open(t, lockkit.Patient, urls...))
	for _, s := range servers {
		list := s.Do(t, "CLIENT", "LIST").(string)
		for _, want := range []string{"name=flightlock", "user=app", "db=3"} {
			if !strings.Contains(list, want) {
				t.Errorf("CLIENT LIST does not have %s:\n%s", want, list)
			}
		}
	}
}

func TestOpenOfAUnixSocket(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "redis.sock")
	s := redistest.StartServer(t, "--unixsocket", socket, "--unixsocketperm", "700", "--requirepass", "hunter2")
	c := lockkit.Open(t, lockkit.Patient, "unix://:hunter2@"+socket+"?client_name=mine")
	lockkit.LockAndRelease(t, c)
	if list := s.Do(t, "CLIENT", "LIST").(string); !strings.Contains(list, "name=mine") {
		t.Errorf("CLIENT LIST:\n%s", list)
	}
	r := lockkit.Check(t, c)
	lockkit.WantFinding(t, r, socket, "role", flightlock.StatusOK)
	lockkit.WantFinding(t, r, socket, "persistence", flightlock.StatusWarn, "redis-cli -s "+socket)
}

// With TLS, a certificate that no trusted authority has signed is refused, and the error says so.
func TestOpenWithTLS(t *testing.T) {
	t.Parallel()
	ca, cert, key := redistest.Certificates(t)
	addr := redistest.RefusedAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	redistest.StartServer(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-auth-clients", "no")

	strict := lockkit.Open(t, lockkit.Patient, "rediss://"+addr)
	_, err := strict.TryLock(t.Context(), "k", time.Second)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without the authority: %v", err)
	}
	lockkit.WantFinding(t, lockkit.Check(t, strict), addr, "reachable", flightlock.StatusFail, "certificate")

	lockkit.LockAndRelease(t, lockkit.Open(t, lockkit.Patient, "rediss://"+addr+"?skip_verify=true"))

	rdb := redis.NewClient(&redis.Options{Addr: addr, TLSConfig: &tls.Config{RootCAs: ca}})
	defer rdb.Close()
	lockkit.LockAndRelease(t, lockkit.New(t, lockkit.Patient, rdb))
}

// A server or a proxy that closes connections which were idle for long costs nothing with TLS either: they
// are not used again.
func TestIdleTLSConnectionsThatWereClosedAreNotUsed(t *testing.T) {
	t.Parallel()
	_, cert, key := redistest.Certificates(t)
	addr := redistest.RefusedAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	server := redistest.StartServer(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-auth-clients", "no")
	c := lockkit.Open(t, lockkit.Patient, "rediss://"+addr+"?skip_verify=true")
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
	c := lockkit.Open(t, lockkit.Patient, fmt.Sprintf("redis://:hunter2@%s?addr=%s&addr=%s", addrs[0], addrs[1],
		addrs[2]))
	for i := range 20 { // on all masters
		l := lockkit.Lock(t, c, fmt.Sprint("k", i), 5*time.Second)
		lockkit.Release(t, l)
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
		return len(list) == 1 && strings.Contains(replica.Do(t, "INFO", "replication").(string),
			"master_link_status:up") && strings.Contains(fmt.Sprint(list), "master-link-status ok")
	})
	u := "redis://" + sentinel.Addr() + "?master_name=main"
	c, other := lockkit.Open(t, lockkit.Patient, u), lockkit.Open(t, lockkit.Patient, u)
	r := lockkit.Check(t, c)
	lockkit.WantFinding(t, r, "Sentinel master main", "role", flightlock.StatusOK)

	l := lockkit.Lock(t, c, "k", time.Minute)
	if n := master.Do(t, "WAIT", "1", "20000"); n != int64(1) {
		t.Fatalf("%v replicas have the lock", n)
	}
	redistest.Eventually(t, 30*time.Second, "the lock is on the replica", func() bool {
		return replica.Do(t, "EXISTS", "lock:k") == int64(1)
	})
	if err := master.Kill(); err != nil {
		t.Fatal(err)
	}
	// its connections are reset meanwhile
	redistest.Eventually(t, 40*time.Second, "the replica is master", func() bool {
		return fmt.Sprint(sentinel.Do(t, "SENTINEL", "GET-MASTER-ADDR-BY-NAME",
			"main")) == fmt.Sprintf("[127.0.0.1 %d]", replica.Port())
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
	lockkit.Release(t, l)
	lockkit.LockAndRelease(t, other)
}
