package setup

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// notToStart fails the test if Check advises to start a server that is up.
func notToStart(t *testing.T, r flightlock.Report) {
	t.Helper()
	for _, f := range r.Findings {
		if strings.Contains(f.Fix, "start the server") {
			t.Errorf("the server is up: %+v", f)
		}
	}
}

// What is wrong with TLS is fixed at the certificates and the URLs, not by starting the server.
func TestCheckOfTLS(t *testing.T) {
	t.Parallel()
	ca, cert, key := redistest.Certificates(t)
	tlsServer := func(args ...string) (addr string, s *redistest.Server) {
		addr = redistest.RefusedAddr(t)
		_, port, _ := net.SplitHostPort(addr)
		return addr, redistest.StartServer(t,
			append([]string{"--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file",
				cert}, args...)...)
	}
	addr, server := tlsServer("--tls-auth-clients", "no")
	_, port, _ := net.SplitHostPort(addr)
	mutual, _ := tlsServer("--tls-auth-clients", "yes")
	over := func(addr string, cfg *tls.Config) *redis.Client {
		c := redis.NewClient(&redis.Options{Addr: addr, TLSConfig: cfg, DialerRetries: 1})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	for name, tc := range map[string]struct {
		c    *flightlock.Client
		node string
		says []string
	}{
		"an unknown authority": {lockkit.Open(t, lockkit.Patient, "rediss://"+addr), addr,
			[]string{"certificate", "SSL_CERT_FILE", "RootCAs"}},
		"another authority": {lockkit.New(t, lockkit.Patient, over(addr, &tls.Config{RootCAs: x509.NewCertPool()})),
			addr, []string{"RootCAs", "-p " + port + " --tls --cacert FILE PING"}},
		"another name": {lockkit.New(t, lockkit.Patient, over("localhost:"+port, &tls.Config{RootCAs: ca})),
			"localhost:" + port, []string{"ServerName"}},
		"no TLS here, TLS there": {lockkit.Open(t, lockkit.Patient, "redis://"+addr), addr, []string{"rediss://"}},
		"TLS here, no TLS there": {lockkit.Open(t, lockkit.Patient, "rediss://"+server.Addr()), server.Addr(),
			[]string{"redis://", "--tls"}},
		"a client's certificate, too": {lockkit.New(t, lockkit.Patient, over(mutual, &tls.Config{RootCAs: ca})),
			mutual, []string{"TLSConfig.Certificates"}},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 2 { // the second time it may be suspended
				r := lockkit.Check(t, tc.c)
				lockkit.WantFinding(t, r, tc.node, "reachable", flightlock.StatusFail, tc.says...)
				if tc.node == server.Addr() { // it does not answer, as if it were down
					if i > 0 {
						break
					}
				} else {
					notToStart(t, r)
				}
				if _, err := tc.c.TryLock(t.Context(), "k", time.Second); err == nil {
					t.Error("it locks")
				}
			}
		})
	}
}

// The commands that Check prints reach the server as the client does: with TLS, as its user, and
// they show no password.
func TestCommandsOfCheck(t *testing.T) {
	t.Parallel()
	_, cert, key := redistest.Certificates(t)
	addr := redistest.RefusedAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	s := redistest.StartServer(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-auth-clients", "no", "--maxmemory-policy", "allkeys-lru")
	s.Do(t, "ACL", "SETUSER", "app", "on", ">hunter2", "~*", "&*", "+@all")
	s.Do(t, "CONFIG", "SET", "maxmemory", "100mb")
	s.Do(t, "ACL", "SETUSER", "default", "nopass")
	secure, plain := "redis-cli -h 127.0.0.1 -p "+port, "redis-cli -h 127.0.0.1 -p "+portOf(s.Addr())
	for u, cli := range map[string]string{
		"rediss://app:hunter2@" + addr + "/3?skip_verify=true": secure +
			" --tls --insecure --user ADMIN --askpass CONFIG SET maxmemory-policy",
		"redis://app:hunter2@" + s.Addr(): plain + " --user ADMIN --askpass CONFIG SET",
		"redis://:hunter3@" + s.Addr():    plain + " --askpass CONFIG SET",
		"redis://" + s.Addr():             plain + " CONFIG SET",
	} {
		r := lockkit.Check(t, lockkit.Open(t, lockkit.Patient, u))
		lockkit.WantFinding(t, r, "127.0.0.1", "eviction", flightlock.StatusFail, cli)
		if strings.Contains(r.String(), "hunter2") {
			t.Errorf("the password is shown: %s", r)
		}
	}
}

// If the client has a certificate, the server may require one, so the commands have it, too.
func TestCommandsOfCheckWithAClientCertificate(t *testing.T) {
	t.Parallel()
	ca, cert, key := redistest.Certificates(t)
	own, err := tls.LoadX509KeyPair(cert, key)
	testkit.Must(t, err)
	for name, cfg := range map[string]*tls.Config{
		"a list": {RootCAs: ca, Certificates: []tls.Certificate{own}},
		"a function": {RootCAs: ca,
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				return &own, nil
			}},
	} {
		t.Run(name, func(t *testing.T) {
			addr := redistest.RefusedAddr(t)
			rdb := redis.NewClient(&redis.Options{Addr: addr, TLSConfig: cfg, DialerRetries: 1})
			t.Cleanup(func() { _ = rdb.Close() })
			lockkit.WantFinding(t, lockkit.Check(t, lockkit.New(t, lockkit.Patient, rdb)), addr, "reachable",
				flightlock.StatusFail,
				"-p "+portOf(addr)+" --tls --cacert FILE --cert FILE --key FILE PING")
		})
	}
}

func portOf(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return port
}

// A master that no Sentinel knows by that name is not reachable; the name is wrong, and the
// Sentinels are up. Check says so while a lock dials it, and when the node is suspended.
func TestCheckOfAMasterThatNoSentinelKnows(t *testing.T) {
	t.Parallel()
	master := redistest.StartServer(t)
	sentinel := redistest.StartSentinel(t, redistest.Watch("main", master)...)
	c := lockkit.Open(t, lockkit.Patient, "redis://"+sentinel.Addr()+"?master_name=mian")
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "mian",
		SentinelAddrs: []string{sentinel.Addr()},
		DialerRetries: 1})
	t.Cleanup(func() { _ = rdb.Close() })
	for name, c := range map[string]*flightlock.Client{"Sentinel master mian": c,
		"FailoverClient": lockkit.New(t, lockkit.Patient, rdb)} {
		for range 2 {
			r := lockkit.Check(t, c)
			lockkit.WantFinding(t, r, name, "reachable", flightlock.StatusFail, "know no such master",
				"SENTINEL MASTERS", "master_name")
			notToStart(t, r)
			if _, err := c.TryLock(t.Context(), "k", time.Second); err == nil {
				t.Error("it locks")
			}
		}
	}
	redistest.Eventually(t, 10*time.Second, "the node is suspended", func() bool {
		_, _ = c.TryLock(t.Context(), "k", time.Second)
		return c.Stats().Suspended == 1
	})
	down := lockkit.Open(t, lockkit.Patient, "redis://"+redistest.RefusedAddr(t)+"?master_name=main")
	lockkit.WantFinding(t, lockkit.Check(t, down), "Sentinel master main", "reachable", flightlock.StatusFail,
		"Sentinels", "SENTINEL MASTERS")
}

// A user's name is one word of the command.
func TestCheckAsAUserWithAnOddName(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "it's", "on", ">hunter2", "~*", "&*", "+@all")
	c := lockkit.Open(t, lockkit.Patient, "redis://it%27s:hunter2@"+s.Addr())
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "reachable", flightlock.StatusFail,
		"redis-cli -h 127.0.0.1 -p "+portOf(s.Addr())+` --user 'it'\''s' --askpass PING`)
}
