package lockkit

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Saying is a client on the servers behind proxies that change what INFO says.
func (tr *Trio) Saying(opts flightlock.Options,
	fields map[string]string) (*flightlock.Client, []*redistest.Endpoint) {
	tr.T.Helper()
	var nodes []redis.UniversalClient
	var points []*redistest.Endpoint
	for _, s := range tr.Servers {
		e := redistest.StartKind(tr.T, redistest.WithInfo(fields), s.Addr())
		points = append(points, e)
		nodes = append(nodes, s.Client(tr.T, func(o *redis.Options) { o.Addr = e.Addr() }))
	}
	opts.NodeTimeout = Patience
	return New(tr.T, opts, nodes...), points
}

// A trio is three nodes, of which the first can lose its data. It is reached through a proxy, so
// that another server can take its place.
type Trio struct {
	T       *testing.T
	Servers []*redistest.Server
	Proxy   *redistest.Proxy
}

func NewTrio(t *testing.T, args ...string) *Trio {
	tr := &Trio{T: t}
	for range 3 {
		tr.Servers = append(tr.Servers, redistest.StartServer(t, append(args, AtOnce...)...))
	}
	tr.Proxy = redistest.StartProxy(t, tr.Servers[0].Addr())
	return tr
}

// AtOnce makes a server replicate its data without waiting for other replicas, and lets a test set
// where its files are.
var AtOnce = []string{"--repl-diskless-sync-delay", "0", "--enable-protected-configs", "yes"}

// Client has its own connections to the nodes. A node may take long to answer here, since the
// machine may be busy.
func (tr *Trio) Client(opts flightlock.Options) *flightlock.Client {
	tr.T.Helper()
	if opts.NodeTimeout == 0 {
		opts.NodeTimeout = Patience
	}
	return New(tr.T, opts, tr.Nodes()...)
}

func (tr *Trio) Nodes() (nodes []redis.UniversalClient) {
	for i, s := range tr.Servers {
		addr := s.Addr()
		if i == 0 {
			addr = tr.Proxy.Addr()
		}
		nodes = append(nodes, s.Client(tr.T, func(o *redis.Options) { o.Addr, o.DialerRetries = addr, 1 }))
	}
	return nodes
}

// WantOn waits until these nodes have the lock: two others may have decided before.
func (tr *Trio) WantOn(l *flightlock.Lock, key string, nodes ...int) {
	tr.T.Helper()
	redistest.Eventually(tr.T, 20*time.Second, fmt.Sprintf("nodes %v have the key", nodes), func() bool {
		return !slices.ContainsFunc(nodes, func(i int) bool {
			return tr.Servers[i].Do(tr.T, "GET", "lock:"+key) != l.Owner()
		})
	})
}

// WantFree waits until none of these servers has the key. A release returns when a majority of nodes has
// executed it, and a lock that comes before the last one would not be on that node.
func WantFree(t *testing.T, key string, servers ...*redistest.Server) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, key+" is free on all nodes", func() bool {
		return !slices.ContainsFunc(servers, func(s *redistest.Server) bool {
			return s.Do(t, "EXISTS", "lock:"+key) != int64(0)
		})
	})
}

// lockOnAll is a lock that all these servers have. A lock is there when a majority of nodes has answered, and
// the others may be late, or have answered too late for it to be written.
func lockOnAll(t *testing.T, c *flightlock.Client, key string, ttl time.Duration,
	servers ...*redistest.Server) (l *flightlock.Lock) {
	t.Helper()
	var began time.Time
	redistest.Eventually(t, 20*time.Second, key+" is locked on all nodes", func() bool {
		if l != nil && (l.Err() != nil || time.Since(began) > 2*time.Second) {
			_ = l.Release(t.Context()) // it may have run out
			l = nil
		}
		if l == nil {
			WantFree(t, key, servers...)
			l, began = Lock(t, c, key, ttl), time.Now()
		}
		return !slices.ContainsFunc(servers, func(s *redistest.Server) bool {
			return s.Do(t, "GET", "lock:"+key) != l.Owner()
		})
	})
	return l
}

// UseOnAll has c lock, and release, on all these servers. None of its requests is in progress when
// it returns. On a busy machine a release may not be answered in time: it is repeated until the key is free.
func UseOnAll(t *testing.T, c *flightlock.Client, key string, servers ...*redistest.Server) {
	t.Helper()
	err := lockOnAll(t, c, key, 5*time.Second, servers...).Release(t.Context())
	if err != nil && !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("Release: %v", err)
	}
	WantFree(t, key, servers...)
}

// Hold has c lock a key that the third node does not have then, as if it had missed it: the first
// two are the majority.
func (tr *Trio) Hold(c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	tr.T.Helper()
	l := lockOnAll(tr.T, c, key, ttl, tr.Servers...) // a late request would put it back
	tr.Servers[2].Do(tr.T, "DEL", "lock:"+key)
	return l
}

// LockUntilQuarantined locks until so many nodes are in quarantine.
func LockUntilQuarantined(t *testing.T, c *flightlock.Client, key string, n int64) {
	t.Helper()
	LockUntil(t, c, key, fmt.Sprintf("%d nodes are in quarantine", n),
		func() bool { return c.Stats().Quarantined == n })
}

// LockUntil locks until cond holds. One lock is not enough: it sends no request to a node that was
// down a moment ago. Each is held for a moment: after a release no request is needed to a node that
// the others were faster than.
func LockUntil(t *testing.T, c *flightlock.Client, key, what string, cond func() bool) {
	t.Helper()
	var l *flightlock.Lock
	var err error
	release := func() {
		if l != nil {
			_ = l.Release(t.Context()) // it may have run out
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("the last lock: %v", err)
		}
	}()
	redistest.Eventually(t, 20*time.Second, what, func() bool {
		if l != nil && cond() {
			return true
		}
		release()
		l, err = c.TryLock(t.Context(), key, time.Second)
		return false
	})
	release()
}

// LockOn is a lock of k that s, which is in the place of the first server, has as well.
func (tr *Trio) LockOn(c *flightlock.Client, s *redistest.Server) (l *flightlock.Lock) {
	tr.T.Helper()
	redistest.Eventually(tr.T, 20*time.Second, "the server votes", func() bool {
		if l != nil {
			l.Release(tr.T.Context())
		}
		WantFree(tr.T, "k", s, tr.Servers[1], tr.Servers[2])
		l = Lock(tr.T, c, "k", 50*time.Second)
		return s.Do(tr.T, "GET", "lock:k") == l.Owner()
	})
	return l
}
