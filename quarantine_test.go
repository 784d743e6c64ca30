package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A trio is three nodes, of which the first can lose its data. It is reached through a proxy, so
// that another server can take its place.
type trio struct {
	t       *testing.T
	servers []*redistest.Server
	proxy   *redistest.Proxy
}

func newTrio(t *testing.T, args ...string) *trio {
	tr := &trio{t: t}
	for range 3 {
		tr.servers = append(tr.servers, redistest.StartServer(t, append(args, atOnce...)...))
	}
	tr.proxy = redistest.StartProxy(t, tr.servers[0].Addr())
	return tr
}

// atOnce makes a server replicate its data without waiting for other replicas, and lets a test set
// where its files are.
var atOnce = []string{"--repl-diskless-sync-delay", "0", "--enable-protected-configs", "yes"}

// client has its own connections to the nodes. A node may take long to answer here, since the
// machine may be busy.
func (tr *trio) client(opts flightlock.Options) *flightlock.Client {
	tr.t.Helper()
	if opts.NodeTimeout == 0 {
		opts.NodeTimeout = 2 * time.Second
	}
	return newClient(tr.t, opts, tr.nodes()...)
}

func (tr *trio) nodes() (nodes []redis.UniversalClient) {
	for i, s := range tr.servers {
		addr := s.Addr()
		if i == 0 {
			addr = tr.proxy.Addr()
		}
		nodes = append(nodes, s.Client(tr.t, func(o *redis.Options) { o.Addr, o.DialerRetries = addr, 1 }))
	}
	return nodes
}

// wantOn waits until these nodes have the lock: two others may have decided before.
func (tr *trio) wantOn(l *flightlock.Lock, key string, nodes ...int) {
	tr.t.Helper()
	redistest.Eventually(tr.t, 20*time.Second, fmt.Sprintf("nodes %v have the key", nodes), func() bool {
		return !slices.ContainsFunc(nodes, func(i int) bool {
			return tr.servers[i].Do(tr.t, "GET", "lock:"+key) != l.Owner()
		})
	})
}

// wantFree waits until none of these servers has the key. A release returns when a majority of nodes has
// executed it, and a lock that comes before the last one would not be on that node.
func wantFree(t *testing.T, key string, servers ...*redistest.Server) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, key+" is free on all nodes", func() bool {
		return !slices.ContainsFunc(servers, func(s *redistest.Server) bool {
			return s.Do(t, "EXISTS", "lock:"+key) != int64(0)
		})
	})
}

// lockOnAll is a lock that all these servers have. A lock is there when a majority of nodes has answered, and the
// others may be late, or have answered too late for it to be written.
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
			wantFree(t, key, servers...)
			l, began = mustLock(t, c, key, ttl), time.Now()
		}
		return !slices.ContainsFunc(servers, func(s *redistest.Server) bool {
			return s.Do(t, "GET", "lock:"+key) != l.Owner()
		})
	})
	return l
}

// useOnAll has c lock, and release, on all these servers. None of its requests is in progress when
// it returns. On a busy machine a release may not be answered in time: it is repeated until the key is free.
func useOnAll(t *testing.T, c *flightlock.Client, key string, servers ...*redistest.Server) {
	t.Helper()
	err := lockOnAll(t, c, key, 5*time.Second, servers...).Release(t.Context())
	if err != nil && !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("Release: %v", err)
	}
	wantFree(t, key, servers...)
}

// hold has c lock a key that the third node does not have then, as if it had missed it: the first
// two are the majority.
func (tr *trio) hold(c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	tr.t.Helper()
	l := lockOnAll(tr.t, c, key, ttl, tr.servers...) // a late request would put it back
	tr.servers[2].Do(tr.t, "DEL", "lock:"+key)
	return l
}

// amnesia is a way in which the first node loses what it has stored since prepare.
type amnesia struct {
	name    string
	args    []string // of the servers
	prepare func(tr *trio) (forget func())
}

var amnesias = []amnesia{
	{name: "restarted empty", prepare: func(tr *trio) func() {
		return func() { must(tr.t, tr.servers[0].Restart()) }
	}},
	{name: "stale snapshot", args: []string{"--dbfilename", "dump.rdb"}, prepare: func(tr *trio) func() {
		tr.servers[0].Do(tr.t, "SAVE")
		return func() { must(tr.t, tr.servers[0].Restart()) }
	}},
	{name: "stale append-only file", args: []string{"--appendonly", "yes", "--appendfsync", "everysec"},
		prepare: func(tr *trio) func() {
			saved, err := tr.servers[0].SaveAppendOnly()
			must(tr.t, err)
			return func() { must(tr.t, tr.servers[0].RestartFrom(saved)) }
		}},
	{name: "flushed", prepare: func(tr *trio) func() {
		return func() { tr.servers[0].Do(tr.t, "FLUSHALL") }
	}},
	{name: "lagging replica", prepare: func(tr *trio) func() {
		// The replica loses its master before the lock is granted, and is promoted afterwards.
		replica := redistest.StartServer(tr.t, atOnce...)
		follow(tr.t, replica, tr.servers[0])
		replica.Do(tr.t, "REPLICAOF", "127.0.0.1", "1")
		return func() {
			must(tr.t, tr.servers[0].Kill())
			replica.Do(tr.t, "REPLICAOF", "NO", "ONE")
			tr.proxy.SetTarget(replica.Addr())
			tr.servers[0] = replica
		}
	}},
}

// follow makes replica a replica of master that has all its data.
func follow(t *testing.T, replica, master *redistest.Server) {
	t.Helper()
	replica.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(master.Port()))
	redistest.Eventually(t, 20*time.Second, "the replica has its master's data", func() bool {
		info := replica.Do(t, "INFO", "replication").(string)
		return strings.Contains(info, "master_link_status:up") && !strings.Contains(info, "master_sync_in_progress:1") &&
			slices.Equal(replica.Keys(t), master.Keys(t))
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tries is how often each amnesia is tried; FLIGHTLOCK_TRIES raises it.
func tries(t *testing.T) int {
	text := os.Getenv("FLIGHTLOCK_TRIES")
	if text == "" {
		return 2
	}
	n, err := strconv.Atoi(text)
	must(t, err)
	return n
}

// inAHurry reports whether not every combination is to be tried.
func inAHurry() bool { return os.Getenv("FLIGHTLOCK_TRIES") == "" }

// A lock is held that the third node missed, and the first node loses it. Nobody else gets the key:
// not a client that has locked before, not a new one, not several at once, however often they try.
func TestNoSecondGrantAfterANodeForgot(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		t.Run(a.name, func(t *testing.T) {
			tr := newTrio(t, a.args...)
			holder, rival := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
			for i := range tries(t) {
				if n := secondGrants(tr, a, fmt.Sprint("k", i), holder, rival, tr.client(flightlock.Options{})); n > 0 {
					t.Fatalf("try %d: %d others got the key", i, n)
				}
				for _, s := range tr.servers { // all begin anew, together
					s.Do(t, "FLUSHALL")
				}
			}
		})
	}
}

// Without quarantine it is granted twice: the test above could fail, and so could that of
// oddAmnesias. On a busy machine a rival may get too few answers in time, so it has some tries.
func TestSecondGrantsWithoutQuarantine(t *testing.T) {
	t.Parallel()
	off := flightlock.Options{DisableQuarantine: true}
	for _, a := range slices.Concat(amnesias, oddAmnesias) {
		t.Run(a.name, func(t *testing.T) {
			tr := newTrio(t, a.args...)
			holder, rival := tr.client(off), tr.client(off)
			for i := range 10 {
				if secondGrants(tr, a, fmt.Sprint("k", i), holder, rival, tr.client(off)) > 0 {
					return
				}
				for _, s := range tr.servers { // all begin anew, together
					s.Do(t, "FLUSHALL")
				}
			}
			t.Error("nobody else got the key")
		})
	}
}

// Whatever MaxTTL a client is given: it is refused, or nodes that lost data have no vote. An
// overflow of a sum of it is no reason to have no quarantine.
func TestNoSecondGrantWithAnyMaxTTL(t *testing.T) {
	t.Parallel()
	tr := newTrio(t)
	for i, opts := range []flightlock.Options{
		{MaxTTL: math.MaxInt64}, {MaxTTL: math.MaxInt64, DriftFactor: 0.49}, {MaxTTL: math.MaxInt64 - time.Millisecond},
		{MaxTTL: 24 * time.Hour}, {MaxTTL: 24 * time.Hour, DriftFactor: math.Nextafter(0.5, 0)},
		{MaxTTL: time.Minute, DriftFactor: math.SmallestNonzeroFloat64},
	} {
		refused := opts
		refused.Nodes = tr.nodes()
		c, err := flightlock.New(refused)
		if err != nil {
			wantInvalid(t, err, "Options.MaxTTL")
			continue
		}
		closeClient(t, c)
		holder, rival, third := tr.client(opts), tr.client(opts), tr.client(opts)
		if n := secondGrants(tr, amnesias[0], fmt.Sprint("k", i), holder, rival, third); n > 0 {
			t.Errorf("MaxTTL %v, DriftFactor %v: %d others got the key", opts.MaxTTL, opts.DriftFactor, n)
		}
		for _, c := range []*flightlock.Client{holder, rival, third} {
			closeClient(t, c)
		}
		for _, s := range tr.servers { // all begin anew, and nobody knows them
			s.Do(t, "FLUSHALL")
		}
	}
}

// secondGrants has holder lock key, the first node lose its data, and the rivals try to get the
// lock. It returns how many got it while the holder could consider its lock valid.
func secondGrants(
	tr *trio, a amnesia, key string,
	holder *flightlock.Client, rivals ...*flightlock.Client,
) (granted int) {
	t := tr.t
	t.Helper()
	useOnAll(t, rivals[0], "warm", tr.servers...) // it knows the nodes, and a bucket
	forget := a.prepare(tr)
	l := tr.hold(holder, key, time.Minute)
	defer l.Release(context.Background()) // it may be on too few nodes by now
	forget()
	var mu sync.Mutex
	try := func(c *flightlock.Client, retry flightlock.RetryStrategy) {
		second, err := c.Lock(t.Context(), key, time.Second, retry)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil && l.Err() == nil:
			granted++
			t.Cleanup(func() { second.Release(context.Background()) })
		case err == nil:
			t.Error("the holder's lock ended first: the try says nothing")
		case !errors.Is(err, flightlock.ErrNotAcquired) && !errors.Is(err, flightlock.ErrUnavailable):
			t.Error(err)
		}
	}
	var wg sync.WaitGroup
	for _, c := range rivals {
		for range 5 {
			wg.Go(func() {
				for range 3 {
					try(c, flightlock.NoRetry())
				}
			})
		}
	}
	wg.Wait()
	for _, c := range rivals { // one by one: above they may only have split the votes
		try(c, flightlock.LimitedRetry(5*time.Millisecond, 5))
	}
	return granted
}

// A deployment whose nodes were never used works at once, at the first attempt, and several clients
// may bootstrap it together.
func TestANewDeploymentWorksAtOnce(t *testing.T) {
	for i := range tries(t) {
		tr := newTrio(t)
		var wg sync.WaitGroup
		for j := range 1 + 4*i {
			c := tr.client(patient)
			wg.Go(func() {
				l, err := c.TryLock(t.Context(), fmt.Sprint("k", j), time.Minute)
				if err != nil {
					t.Errorf("client %d of %d: %v", j, 1+4*i, err)
					return
				}
				mustRelease(t, l)
			})
		}
		wg.Wait()
	}
}

// All nodes restarted empty at the same time, or flushed, are no new deployment to a client that ran before: the lock
// of another may be valid still. It says so in its log, and to a client that begins after it.
func TestNoSecondGrantAfterAllNodesForgot(t *testing.T) {
	t.Parallel()
	forgets := map[string]func(*testing.T, *redistest.Server){
		"restarted empty": func(t *testing.T, s *redistest.Server) { must(t, s.Restart()) },
		"flushed":         func(t *testing.T, s *redistest.Server) { s.Do(t, "FLUSHALL") },
	}
	for name, forget := range forgets {
		t.Run(name, func(t *testing.T) {
			tr := newTrio(t)
			for i := range tries(t) {
				var log lines
				opts := flightlock.Options{MaxTTL: 10 * time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))}
				holder, rival := tr.client(opts), tr.client(opts)
				useOnAll(t, rival, "warm", tr.servers...)
				l := mustLock(t, holder, "k", 5*time.Minute)
				var wg sync.WaitGroup
				for _, s := range tr.servers {
					wg.Go(func() { forget(t, s) })
				}
				wg.Wait()
				redistest.Eventually(t, 20*time.Second, "a running client finds that all nodes lost their data", func() bool {
					if second, err := rival.TryLock(t.Context(), "k", time.Minute); err == nil {
						t.Fatalf("try %d: %s has it, as has %s: %v", i, second.Owner(), l.Owner(), l.Err())
					}
					return rival.Stats().Quarantined == 3
				})
				if l.Err() != nil {
					t.Fatalf("the holder's lock ended first: %v", l.Err())
				}
				late := tr.client(flightlock.Options{MaxTTL: opts.MaxTTL})
				if second, err := late.TryLock(t.Context(), "k", time.Minute); err == nil {
					t.Fatalf("try %d: a client that began later has it: %s", i, second.Owner())
				}
				if log.count("level=WARN", "quarantined") < 3 {
					t.Errorf("the log says nothing of it:\n%s", log.text())
				}
				// The way out: nobody is left who knows.
				_ = l.Release(t.Context()) // it is on no node any more
				for _, c := range []*flightlock.Client{holder, rival, late} {
					closeClient(t, c)
				}
				for _, s := range tr.servers {
					s.Do(t, "FLUSHALL")
				}
				lockAndRelease(t, tr.client(patient))
				for _, s := range tr.servers {
					s.Do(t, "FLUSHALL")
				}
			}
		})
	}
}

// tryLock is one attempt, which must succeed: a busy machine has as long for it as MaxTTL allows, and another attempt
// if that was not enough.
func tryLock(t *testing.T, c *flightlock.Client, key string) {
	t.Helper()
	var l *flightlock.Lock
	err, late := flightlock.ErrInvalid, 0
	for ttl := time.Minute; err != nil; {
		began := time.Now()
		l, err = c.TryLock(t.Context(), key, ttl)
		if errors.Is(err, flightlock.ErrInvalid) {
			ttl /= 2
		} else if late++; time.Since(began) < ttl/2 || late == 5 {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	mustRelease(t, l)
}

// eventuallyLock is a lock within much less than a quarantine.
func eventuallyLock(t *testing.T, c *flightlock.Client, key string) {
	t.Helper()
	mustRelease(t, eventually(t, c, key))
}

// lockUntilQuarantined locks until so many nodes are in quarantine.
func lockUntilQuarantined(t *testing.T, c *flightlock.Client, key string, n int64) {
	t.Helper()
	lockUntil(t, c, key, fmt.Sprintf("%d nodes are in quarantine", n), func() bool { return c.Stats().Quarantined == n })
}

// lockUntil locks until cond holds. One lock is not enough: it sends no request to a node that was
// down a moment ago. Each is held for a moment: after a release no request is needed to a node that
// the others were faster than.
func lockUntil(t *testing.T, c *flightlock.Client, key, what string, cond func() bool) {
	t.Helper()
	var l *flightlock.Lock
	release := func() {
		if l != nil {
			_ = l.Release(t.Context()) // it may have run out
		}
	}
	redistest.Eventually(t, 20*time.Second, what, func() bool {
		if l != nil && cond() {
			return true
		}
		release()
		l, _ = c.TryLock(t.Context(), key, time.Second)
		return false
	})
	release()
}

func eventually(t *testing.T, c *flightlock.Client, key string) *flightlock.Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	l, err := c.SingleFlightLock(ctx, key, time.Second, flightlock.LimitedRetry(10*time.Millisecond, 1000))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func wantQuarantined(t *testing.T, c *flightlock.Client, n int64) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("%d nodes are in quarantine", n), func() bool {
		return c.Stats().Quarantined == n
	})
}

// wantOneLine waits for a line of the log that contains all of what, which follows the event by a
// moment, and allows no more than one.
func wantOneLine(t *testing.T, log *lines, what ...string) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("the log has a line with %q", what), func() bool {
		return log.count(what...) > 0
	})
	if n := log.count(what...); n != 1 {
		t.Errorf("%d lines tell of %q:\n%s", n, what, log.text())
	}
}

// A node that lost data has no vote until MaxTTL is over, and then it votes: meanwhile, without
// another one, there is no majority. That is not "held", and the error says why and how long.
func TestQuarantineEnds(t *testing.T) {
	t.Parallel()
	tr := newTrio(t)
	var log lines
	opts := flightlock.Options{MaxTTL: 2 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	c := tr.client(opts)
	tryLock(t, c, "k")
	wantFree(t, "k", tr.servers...)
	must(t, tr.servers[1].Kill())
	tr.servers[0].Do(t, "FLUSHALL")
	forgot := time.Now()

	_, err := c.TryLock(t.Context(), "k", time.Second)
	if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	var qe *flightlock.QuorumError
	if !errors.As(err, &qe) || !strings.Contains(qe.Nodes[0].Error(), "quarantined until") ||
		qe.Nodes[2].Err != nil || qe.Got != 1 {
		t.Errorf("%v", err)
	}
	wantQuarantined(t, c, 1)
	wantOneLine(t, &log, "node quarantined", tr.proxy.Addr())
	redistest.Eventually(t, 20*time.Second, "the grant that did not count is undone", func() bool {
		return tr.servers[0].Do(t, "EXISTS", "lock:k") == int64(0)
	})

	l, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.LimitedRetry(5*time.Millisecond, 10000))
	if err != nil {
		t.Fatal(err)
	}
	if waited := time.Since(forgot); waited < opts.MaxTTL {
		t.Errorf("it had a vote again after %v", waited)
	}
	mustRelease(t, l)
	wantQuarantined(t, c, 0)
	wantOneLine(t, &log, "out of quarantine", tr.proxy.Addr())
	tryLock(t, tr.client(opts), "another client sees no quarantine any more")
}

// A client that meets a node for the first time after the end of its quarantine counts its vote at
// once, if another client saw that it lost data.
func TestALateClientSeesNoQuarantine(t *testing.T) {
	t.Parallel()
	tr := newTrio(t)
	opts := flightlock.Options{MaxTTL: 2 * time.Second}
	c := tr.client(opts)
	tryLock(t, c, "k")
	restarted := time.Now()
	must(t, tr.servers[0].Restart())
	lockUntilQuarantined(t, c, "k", 1)
	noticed := time.Now()
	closeClient(t, c) // no client is there when it is over
	must(t, tr.servers[1].Kill())
	late := tr.client(opts)
	if _, err := late.TryLock(t.Context(), "k", time.Second); err == nil && time.Since(restarted) < opts.MaxTTL {
		t.Error("locked in the quarantine")
	}
	closeClient(t, late)
	time.Sleep(time.Until(noticed.Add(opts.MaxTTL + 100*time.Millisecond)))
	tryLock(t, tr.client(opts), "k2")
}

// A flushed script cache is not a loss of data, and neither is a lost connection.
func TestScriptFlushIsNoMemoryLoss(t *testing.T) {
	tr := newTrio(t)
	c := tr.client(flightlock.Options{})
	lockAndRelease(t, c)
	must(t, tr.servers[2].Kill())
	for range 3 {
		tr.servers[0].Do(t, "SCRIPT", "FLUSH")
		tryLock(t, c, "k")
		tr.proxy.ResetAll()
		eventuallyLock(t, c, "k")
	}
	tryLock(t, tr.client(flightlock.Options{}), "k")
	wantQuarantined(t, c, 0)
}

// A node that is down does not matter while the others are established; a new deployment has to
// wait for it, and works as soon as it is there.
func TestANodeIsAwayFromTheBeginning(t *testing.T) {
	tr := newTrio(t)
	must(t, tr.servers[2].Kill())
	c := tr.client(flightlock.Options{})
	_, err := c.TryLock(t.Context(), "k", time.Minute)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "quarantined until") {
		t.Fatal(err)
	}
	must(t, tr.servers[2].Restart())
	eventuallyLock(t, c, "k")
	must(t, tr.servers[2].Kill())
	eventuallyLock(t, c, "k")
	tryLock(t, tr.client(flightlock.Options{}), "k")
	must(t, tr.servers[2].Restart())
	lockUntilQuarantined(t, c, "k", 1)
	wantFree(t, "k", tr.servers...)
	must(t, tr.servers[1].Kill())
	if _, err := c.TryLock(t.Context(), "k", time.Minute); !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("one node that knows is enough: %v", err)
	}
}

// A refresh restores a live lock on a node that lost it, in quarantine or not. The node confirms it
// when attempts that it granted before are over, even if it is still in quarantine.
func TestRefreshRepairsANodeInQuarantine(t *testing.T) {
	t.Parallel()
	tr := newTrio(t)
	c := tr.client(flightlock.Options{})
	l := mustLock(t, c, "k", 50*time.Second)
	tr.wantOn(l, "k", 0, 1)
	must(t, tr.servers[0].Restart())
	redistest.Eventually(t, 20*time.Second, "the node has the key again", func() bool {
		return l.Refresh(t.Context()) == nil && tr.servers[0].Do(t, "GET", "lock:k") == l.Owner()
	})
	wantQuarantined(t, c, 1)
	must(t, tr.servers[2].Kill())
	if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("the node that was repaired has confirmed at once: %v", err)
	}
	redistest.Eventually(t, 20*time.Second, "one node confirms, and one that was repaired", func() bool {
		return l.Refresh(t.Context()) == nil
	})
	wantQuarantined(t, c, 1)
	mustRelease(t, l)
}

// Without the right to INFO a deployment works: that is logged once. What leaves a node empty is
// noticed; what leaves it with the data of a snapshot, if the marker's encoding shows it.
func TestQuarantineWithoutINFO(t *testing.T) {
	for _, rights := range []string{"-info", "-info -object", "-info -append", "-info -append -object"} {
		t.Run(rights, func(t *testing.T) {
			sees := rights == "-info"
			tr := newTrio(t, "--dbfilename", "dump.rdb")
			deny := func(s *redistest.Server) {
				args := []any{"ACL", "SETUSER", "default"}
				for _, r := range strings.Fields(rights) {
					args = append(args, r)
				}
				s.Do(t, args...)
			}
			for _, s := range tr.servers {
				deny(s)
			}
			var log lines
			opts := flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
			c := tr.client(opts)
			tryLock(t, c, "k")
			wantFree(t, "k", tr.servers...) // or the snapshot has the lock
			redistest.Eventually(t, 20*time.Second, "the log says that INFO is refused", func() bool {
				return log.count("+info") == 1
			})
			tr.servers[0].Do(t, "SAVE")
			must(t, tr.servers[0].Restart())
			deny(tr.servers[0])
			if sees {
				lockUntilQuarantined(t, c, "k", 1)
			} else {
				eventuallyLock(t, c, "k")
				must(t, tr.servers[2].Kill())
				eventuallyLock(t, c, "k") // by its old data it has the same epoch
				tr.servers[0].Do(t, "FLUSHALL")
				if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("a flush was not noticed: %v", err)
				}
			}
			if n := log.count("+info"); n != 1 {
				t.Errorf("said %d times:\n%s", n, log.text())
			}
		})
	}
}

// Clients begin without the right to INFO, which is granted later, while they run or by a restart.
// After that they do not trust a server that comes back with old data.
func TestNoSecondGrantWhenINFOIsAllowedLater(t *testing.T) {
	t.Parallel()
	for _, byRestart := range []bool{false, true} {
		t.Run(fmt.Sprintf("byRestart=%v", byRestart), func(t *testing.T) {
			a := amnesias[slices.IndexFunc(amnesias, func(a amnesia) bool { return a.name == "stale append-only file" })]
			tr := newTrio(t, a.args...)
			allow := func(right string) {
				for _, s := range tr.servers {
					s.Do(t, "ACL", "SETUSER", "default", right)
				}
			}
			for _, s := range tr.servers { // an epoch that began in the same second as its process is not trusted either
				redistest.Eventually(t, 20*time.Second, "a second has passed", func() bool {
					return !infoHas(t, s, "server", "uptime_in_seconds:0")
				})
			}
			allow("-info")
			holder, rival := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
			for _, c := range []*flightlock.Client{holder, rival} {
				useOnAll(t, c, "k", tr.servers...)
			}
			forget := a.prepare(tr)
			if !byRestart {
				allow("+info")
			}
			held := tr.hold(holder, "k", time.Minute)
			defer held.Release(context.Background())
			forget()
			allow("+info")
			for i, c := range []*flightlock.Client{rival, tr.client(flightlock.Options{})} {
				l, err := c.Lock(t.Context(), "k", time.Second, flightlock.LimitedRetry(5*time.Millisecond, 5))
				if lost := held.Err(); lost != nil {
					t.Fatalf("the lock was over, so the try says nothing: %v", lost)
				}
				if err == nil {
					t.Errorf("client %d: granted twice, with tokens %d and %d", i, held.Fence(), l.Fence())
				}
				lockUntilQuarantined(t, c, fmt.Sprint("other", i), 1)
			}
		})
	}
}

// A right that is revoked, or granted again, while clients run is not a loss of data: they see
// less, or more.
func TestRightsThatChangeAreNoMemoryLoss(t *testing.T) {
	tr := newTrio(t)
	full, less := tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
	set := func(rights ...any) {
		for _, s := range tr.servers {
			s.Do(t, append([]any{"ACL", "SETUSER", "default"}, rights...)...)
		}
	}
	tryLock(t, full, "k")
	for range 3 {
		set("-object", "-append")
		tryLock(t, less, "k")
		tryLock(t, full, "k")
		set("+@all")
		tryLock(t, tr.client(flightlock.Options{}), "k")
		tryLock(t, less, "k")
		tryLock(t, full, "k")
	}
	wantQuarantined(t, full, 0)
	wantQuarantined(t, less, 0)
}

// A server that was a master, lagged as a replica of its successor and is made master again finds
// its own process in its marker. Its epoch is a different one all the same.
func TestAReplicaThatWasTheMasterBefore(t *testing.T) {
	tr, first, second, holder, rival := followed(t)
	second.Do(t, "REPLICAOF", "NO", "ONE")
	tr.proxy.SetTarget(second.Addr())
	tr.proxy.ResetAll()
	follow(t, first, second) // before any client has met the second as a master
	first.Do(t, "REPLICAOF", "127.0.0.1", "1")
	l := tr.lockOn(holder, second)
	defer l.Release(context.Background())
	tr.wantOn(l, "k", 1)
	tr.servers[2].Do(t, "DEL", "lock:k")
	must(t, second.Kill())
	first.Do(t, "REPLICAOF", "NO", "ONE")
	tr.proxy.SetTarget(first.Addr())
	late := tr.client(flightlock.Options{})
	for _, c := range []*flightlock.Client{late, rival, holder} {
		if _, err := c.Lock(t.Context(), "k", time.Second, flightlock.NoRetry()); err == nil {
			t.Error("granted twice")
		}
	}
}

// lockOn is a lock of k that s, which is in the place of the first server, has as well.
func (tr *trio) lockOn(c *flightlock.Client, s *redistest.Server) (l *flightlock.Lock) {
	tr.t.Helper()
	redistest.Eventually(tr.t, 20*time.Second, "the server votes", func() bool {
		if l != nil {
			l.Release(tr.t.Context())
		}
		wantFree(tr.t, "k", s, tr.servers[1], tr.servers[2])
		l = mustLock(tr.t, c, "k", 50*time.Second)
		return s.Do(tr.t, "GET", "lock:k") == l.Owner()
	})
	return l
}

// followed is a trio whose first server has a replica with its data, and two clients that know
// the first.
func followed(t *testing.T) (tr *trio, first, second *redistest.Server, holder, other *flightlock.Client) {
	t.Helper()
	tr = newTrio(t)
	first, second = tr.servers[0], redistest.StartServer(t, atOnce...)
	holder, other = tr.client(flightlock.Options{}), tr.client(flightlock.Options{})
	useOnAll(t, holder, "k", tr.servers...)
	useOnAll(t, other, "k", tr.servers...)
	follow(t, second, first)
	return tr, first, second, holder, other
}

// failedOver is followed by a failover that lagged: the second was made a master too, and lacks the
// lock that the holder has on the first two.
func failedOver(t *testing.T) (tr *trio, first, second *redistest.Server, holder, other *flightlock.Client) {
	t.Helper()
	tr, first, second, holder, other = followed(t)
	second.Do(t, "REPLICAOF", "127.0.0.1", "1") // from here on it lags
	l := tr.hold(holder, "k", 50*time.Second)
	t.Cleanup(func() { _ = l.Release(context.Background()) })
	second.Do(t, "REPLICAOF", "NO", "ONE")
	return tr, first, second, holder, other
}

// failBack makes the first the master again, with the data of the second.
func failBack(t *testing.T, first, second *redistest.Server) {
	t.Helper()
	follow(t, first, second)
	if got := first.Do(t, "GET", "lock:k"); got != nil {
		t.Fatalf("the first still has %v", got)
	}
	first.Do(t, "REPLICAOF", "NO", "ONE")
}

// A node fails over to a replica that lags, and back. A client that was away all the time knows the
// server and its epoch from before, but the first client of the replica has left a marker, and the
// server has that now.
func TestAFailoverAndBackForAClientThatWasAway(t *testing.T) {
	tr, first, second, holder, away := failedOver(t)
	tr.proxy.SetTarget(second.Addr())
	tr.proxy.ResetAll()
	before := second.Do(t, "GET", "flightlock:{boot}")
	redistest.Eventually(t, 20*time.Second, "the replica is used", func() bool {
		mustLock(t, holder, "other", time.Second).Release(t.Context())
		return second.Do(t, "GET", "flightlock:{boot}") != before
	})
	failBack(t, first, second)
	tr.proxy.SetTarget(first.Addr())
	tr.proxy.ResetAll()
	if _, err := away.Lock(t.Context(), "k", time.Second, flightlock.NoRetry()); err == nil {
		t.Error("granted twice")
	}
}

// A node fails over to a replica and back while no client sends it anything, so that no marker
// shows it. What the master had not replicated in time is lost on the way back, and the clients,
// who know the server and its epoch from before, do not count its vote.
func TestAFailoverAndBackThatNobodySaw(t *testing.T) {
	tr, first, second, _, rival := failedOver(t)
	failBack(t, first, second)
	time.Sleep(120 * time.Millisecond) // a check of the server's identity is reused for 100

	// The new client notices anyway.
	for i, c := range []*flightlock.Client{rival, tr.client(flightlock.Options{})} {
		if _, err := c.Lock(t.Context(), "k", time.Second, flightlock.NoRetry()); err == nil {
			t.Errorf("client %d was granted it twice", i)
		}
	}
}

// A node fails over to a replica that is in sync, and back: no dump is read. It may fail back
// before any client has used the replica, so that no marker comes back with it either. What it
// granted is lost all the same, and a client that knows the server from before does not count its
// vote.
func TestAFailoverAndBackWithoutADump(t *testing.T) {
	t.Parallel()
	for _, resync := range []bool{true, false} {
		t.Run(fmt.Sprintf("resync=%v", resync), func(t *testing.T) {
			tr, first, second, holder, rival := followed(t)
			second.Do(t, "REPLICAOF", "NO", "ONE")
			if resync {
				first.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(second.Port()))
				redistest.Eventually(t, 20*time.Second, "the first has followed", func() bool {
					return strings.Contains(first.Do(t, "INFO", "replication").(string), "master_link_status:up")
				})
				if got := first.Do(t, "OBJECT", "ENCODING", "flightlock:{boot}"); got != "raw" {
					t.Fatalf("it has read a dump: its marker is %v", got)
				}
			}
			first.Do(t, "REPLICAOF", "127.0.0.1", "1") // the link is gone
			tr.proxy.SetTarget(second.Addr())
			tr.proxy.ResetAll()
			l := tr.lockOn(holder, second)
			defer l.Release(context.Background())
			tr.wantOn(l, "k", 1)
			first.Do(t, "REPLICAOF", "NO", "ONE")
			tr.proxy.SetTarget(first.Addr())
			tr.proxy.ResetAll()
			tr.servers[2].Do(t, "DEL", "lock:k") // as if it had missed a refresh
			time.Sleep(120 * time.Millisecond)   // a check of the server's identity is reused for 100
			if _, err := rival.Lock(t.Context(), "k", time.Second, flightlock.NoRetry()); err == nil {
				t.Error("granted twice")
			}
			if err := l.Err(); err != nil {
				t.Fatalf("the lock was over: %v", err)
			}
		})
	}
}

// lines is a log for tests.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// count returns how many lines contain all these words.
func (l *lines) count(words ...string) (n int) {
	for line := range strings.Lines(l.text()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

// While too few nodes have a vote, nobody gets a lock. The error says that, and not that others hold it, although
// the keys of their attempts are on the nodes.
func TestWithoutVotersItIsNotHeldByOthers(t *testing.T) {
	t.Parallel()
	tr := newTrio(t)
	c := tr.client(flightlock.Options{})
	tryLock(t, c, "k")
	wantFree(t, "k", tr.servers...)
	for _, s := range tr.servers[1:] {
		s.Do(t, "FLUSHALL")
	}
	redistest.Eventually(t, 20*time.Second, "both losses are noticed", func() bool {
		if l, err := c.TryLock(t.Context(), "another", time.Second); err == nil {
			_ = l.Release(t.Context())
		}
		return c.Stats().Quarantined == 2
	})
	for _, held := range [][]int{{0, 1}, {1, 2}, {0, 1, 2}} { // by attempts of others, which cannot win
		for _, i := range held {
			tr.servers[i].Do(t, "SET", "lock:k", "other#id-1", "PX", "60000")
		}
		for what, retry := range map[string]flightlock.RetryStrategy{
			"once": flightlock.NoRetry(), "FailFast": flightlock.FailFast(nil),
		} {
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, retry)
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
				!strings.Contains(err.Error(), ": not asked, because") || !strings.Contains(err.Error(), ": quarantined until ") {
				t.Errorf("%v, %s: %v", held, what, err)
			}
		}
		for _, s := range tr.servers {
			s.Do(t, "DEL", "lock:k")
		}
	}
}
