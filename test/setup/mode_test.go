package setup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
)

// How a node is used is said in the same words by NodeStats, the log, Check and the metrics.
func TestTheModeOfANodeIsReportedEverywhereInTheSameWords(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	cluster := redistest.StartCluster(t, 3)
	product := regexp.MustCompile(`^(Redis|Valkey) \d+\.\d+\.\d+$`)
	for _, tc := range []struct {
		name, addr, want string
		opts             flightlock.Options
	}{
		{"a server", server.Addr(), "EVALSHA, grants, no quarantine", lockkit.Patient},
		{"without notices", server.Addr(), "EVALSHA, polls, no quarantine",
			flightlock.Options{DisableNotify: true, NodeTimeout: lockkit.Patient.NodeTimeout}},
		{"without SCRIPT", redistest.StartNamed(t, "no-script", redistest.StartServer(t).Addr()).Addr(),
			"EVAL, grants, no quarantine", lockkit.Patient},
		{"one address", redistest.StartNamed(t, "one-endpoint", cluster.Addrs()...).Addr(),
			"EVALSHA, turns, no quarantine: several servers behind one address, use ClusterClient", lockkit.Patient},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log testkit.LogBuffer
			metrics := prometheus.NewRegistry()
			observer, err := prom.New(metrics)
			testkit.Must(t, err)
			opts := tc.opts
			opts.Logger, opts.Observers = slog.New(slog.NewTextHandler(&log, nil)), []*flightlock.Observer{observer}
			c := lockkit.Open(t, opts, "redis://"+tc.addr)
			if mode := c.NodeStats()[0].Mode; mode != "" {
				t.Errorf("before the first connection: %q", mode)
			}
			testkit.Must(t, c.Ready(t.Context()))
			mode := c.NodeStats()[0].Mode
			if version, rest, _ := strings.Cut(mode, ", "); rest != tc.want || !product.MatchString(version) {
				t.Errorf("%q, and not %q", mode, tc.want)
			}
			testkit.WantOneLine(t, &log, "level=INFO", "node is in use", tc.addr, mode)
			r := lockkit.Check(t, c)
			lockkit.WantFinding(t, r, tc.addr, "mode", flightlock.StatusOK, mode)
			lockkit.WantFinding(t, r, "", "locks", flightlock.StatusOK)
			if n := scrapedModes(t, metrics); len(n) != 1 || n[0] != mode {
				t.Errorf("metrics: %q", n)
			}
		})
	}
}

// A node that is replaced by one with RESP3 is known to grant from then on, also if nobody has waited.
func TestTheModeOfANodeThatSpeaksRESP3Later(t *testing.T) {
	t.Parallel()
	proxy := redistest.StartProxy(t, redistest.StartServer(t, "--rename-command", "HELLO", "").Addr())
	c := lockkit.Open(t, lockkit.Patient, "redis://"+proxy.Addr())
	for _, want := range []string{", polls, ", ", grants, "} {
		redistest.Eventually(t, 10*time.Second, want, func() bool {
			l, err := c.TryLock(t.Context(), "k", 10*time.Second)
			if err == nil {
				lockkit.Release(t, l)
			}
			return strings.Contains(c.NodeStats()[0].Mode, want)
		})
		proxy.SetTarget(redistest.StartServer(t).Addr())
		proxy.ResetAll()
	}
}

// scrapedModes are the modes that the metrics have.
func scrapedModes(t *testing.T, metrics prometheus.Gatherer) (modes []string) {
	t.Helper()
	families, err := metrics.Gather()
	testkit.Must(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == "flightlock_node_mode" && l.GetName() == "mode" && m.GetGauge().GetValue() == 1 {
					modes = append(modes, l.GetValue())
				}
			}
		}
	}
	return modes
}

// closesAtOnce is the address of one that closes each connection when it has got a command, without an
// answer.
func closesAtOnce(t *testing.T) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() { // ends with the listener
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1<<10))
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

// Where no lock can be had, Ready and Check fail, whatever the reason, and say what to do about it.
func TestReadyAndCheckFailWhereNoLockCanBeHad(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		opts  flightlock.Options
		nodes func(t *testing.T) (urls []string)
		says  []string // of what is to be done
	}{
		{"replicas are missing", lockkit.Patient, func(t *testing.T) []string {
			return []string{"redis://" + redistest.StartServer(t, "--min-replicas-to-write", "1").Addr()}
		}, []string{"NOREPLICAS", "INFO replication"}},
		{"no memory", lockkit.Patient, func(t *testing.T) []string {
			return []string{"redis://" + redistest.StartServer(t, "--maxmemory", "1").Addr()}
		}, []string{"OOM", "raise maxmemory"}},
		{"a replica", lockkit.Patient, func(t *testing.T) []string {
			s := redistest.StartServer(t)
			s.Do(t, "REPLICAOF", "127.0.0.1", "1")
			return []string{"redis://" + s.Addr()}
		}, []string{"READONLY", "use its master"}},
		{"a member of a Cluster", lockkit.Patient, func(t *testing.T) []string {
			return []string{"redis://" + redistest.StartCluster(t, 3).Servers()[0].Addr()}
		}, []string{"redis.NewClusterClient"}},
		{"too far away", flightlock.Options{NodeTimeout: 5 * time.Millisecond}, func(t *testing.T) []string {
			p := redistest.StartProxy(t, redistest.StartServer(t).Addr())
			p.SetDelay(300 * time.Millisecond) // more than timers are late on a busy machine
			return []string{"redis://" + p.Addr()}
		}, []string{"NodeTimeout"}},
		{"a proxy that does not know HELLO", lockkit.Patient, func(t *testing.T) []string {
			return []string{"redis://" + closesAtOnce(t)}
		}, []string{"closed at HELLO", "twemproxy, cannot be used"}},
		{"two of three refuse", lockkit.Patient, func(t *testing.T) (urls []string) {
			for _, replicas := range []string{"0", "1", "1"} {
				urls = append(urls, "redis://"+redistest.StartServer(t, "--min-replicas-to-write", replicas).Addr())
			}
			return urls
		}, []string{"INFO replication"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := lockkit.Open(t, tc.opts, tc.nodes(t)...)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			err := c.Ready(ctx)
			if err == nil || !errors.Is(err, flightlock.ErrUnavailable) {
				t.Errorf("Ready: %v", err)
				return
			}
			ready := err.Error()
			r, err := c.Check(t.Context())
			testkit.Must(t, err)
			for _, says := range tc.says {
				if !strings.Contains(ready, says) {
					t.Errorf("Ready does not say %q: %s", says, ready)
				}
			}
			lockkit.WantFinding(t, r, "", "locks", flightlock.StatusFail, tc.says...)
		})
	}
}

// A Cluster behind one address, as the only node, has what others cost: one connection, and nothing that is
// asked or loaded again and again.
func TestOneAddressOfAClusterCostsWhatAServerCosts(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]string{
		"scripts are loaded everywhere": "one-endpoint", "on one master": "one-endpoint-loads-on-one",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := redistest.StartCluster(t, 3)
			calls := func() map[string]int64 {
				all := map[string]int64{}
				for _, s := range cluster.Servers() {
					for command, n := range s.CommandCalls(t) {
						all[command] += n
					}
				}
				return all
			}
			p := redistest.StartProxy(t, redistest.StartNamed(t, kind, cluster.Addrs()...).Addr())
			c := lockkit.Open(t, lockkit.Patient, "redis://"+p.Addr())
			before := calls()
			const locks = 200
			for i := range locks {
				lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("key ", i%50), time.Minute))
			}
			after := calls()
			for _, command := range []string{"info", "script|load"} {
				if n := after[command] - before[command]; n > locks/5 {
					t.Errorf("%d times %s", n, command)
				}
			}
			if n := p.Accepted(); n > 3 {
				t.Errorf("%d connections", n)
			}
			if up := p.BytesUp(); up > locks*1<<10 {
				t.Errorf("%d bytes for %d locks", up, locks)
			}
		})
	}
}
