package setup

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// The same server behind two addresses has one vote, and the error names both Nodes.
func TestTheSameServerTwice(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	for _, n := range []int{2, 3} {
		nodes := []redis.UniversalClient{s.Client(t), testkit.Dial(t, proxy.Addr())}
		if n == 3 {
			nodes = append(nodes, redistest.StartServer(t).Client(t))
		}
		c := lockkit.New(t, flightlock.Options{}, nodes...)
		var err error
		redistest.Eventually(t, 20*time.Second, "the twins are found", func() bool {
			var l *flightlock.Lock
			if l, err = c.TryLock(t.Context(), fmt.Sprint("k", rand.Int()), time.Second); err == nil {
				_ = l.Release(t.Context())
			}
			return errors.Is(err, flightlock.ErrInvalid)
		})
		if !strings.Contains(err.Error(), "nodes[0]") || !strings.Contains(err.Error(), "nodes[1]") {
			t.Errorf("%v does not name both", err)
		}
	}
}

// A server that is named in two of its databases would vote twice, since a write in one database is
// not seen in the other. So all nodes must use one database number, and the error names both.
// Nothing is sent for that: it needs no rights, and a node that is down may be the other's
// duplicate.
func TestTheSameServerInTwoDatabases(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	s := redistest.StartServer(t, "--unixsocket", socket)
	here, local := s.Addr(), fmt.Sprintf("localhost:%d", s.Port())
	down := redistest.RefusedAddr(t)
	for name, tc := range map[string]struct{ url, names string }{
		"another address": {"redis://" + local + "/1", local},
		"a parameter":     {"redis://" + local + "?db=15", local},
		"a unix socket":   {"unix://" + socket + "?db=1", socket},
		"TLS":             {"rediss://" + local + "/7", local},
		"a server down":   {"redis://" + down + "/1", down},
		"Sentinels":       {"redis://" + down + "/4?master_name=main", "main"},
		"a Cluster":       {"redis://" + local + "?addr=" + down, local},
	} {
		t.Run(name, func(t *testing.T) {
			first := "redis://" + here
			if name == "a Cluster" { // which has no other database than 0
				first += "/3"
			}
			for _, urls := range [][]string{{first, tc.url}, {tc.url, first}} {
				c, err := flightlock.Open(lockkit.Patient, urls...)
				if err == nil {
					l, err := c.TryLock(t.Context(), "k", time.Second)
					t.Errorf("a lock on %q: %v, %v", urls, l, err)
					lockkit.Close(t, c)
					continue
				}
				lockkit.WantInvalid(t, err, "urls[1]", "urls[0]", "database", here, tc.names)
			}
		})
	}
	var nodes []redis.UniversalClient // any number will do
	for range 2 {
		nodes = append(nodes, redistest.StartServer(t).Client(t, func(o *redis.Options) { o.DB = 1 }))
	}
	lockkit.LockAndRelease(t, lockkit.New(t, lockkit.Patient, nodes...))
}

// A whole Cluster is one of three nodes.
func TestAClusterAmongTheNodes(t *testing.T) {
	t.Parallel()
	_, nodes := lockkit.StartNodes(t, 2)
	nodes = append(nodes, redistest.StartCluster(t, 3).Client(t))
	a, b := lockkit.New(t, lockkit.Patient, nodes...), lockkit.New(t, lockkit.Patient, nodes...)
	for i := range 50 {
		key := fmt.Sprint("k", i)
		l := lockkit.Lock(t, a, key, time.Minute)
		if _, err := b.TryLock(t.Context(), key, time.Minute); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("got %v", err)
		}
		lockkit.Release(t, l)
	}
}
