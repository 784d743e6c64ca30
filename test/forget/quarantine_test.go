package forget

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
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// oddAmnesias are ways to lose data that no fault causes, but somebody at the server's console
// does: the process continues, has the scripts, and has the data of another time or place.
var oddAmnesias = []amnesia{
	{name: "an old snapshot loaded by the same process",
		args: []string{"--dbfilename", "dump.rdb", "--enable-debug-command", "yes"},
		prepare: func(tr *lockkit.Trio) func() {
			tr.Servers[0].Do(tr.T, "SAVE")
			return func() { tr.Servers[0].Do(tr.T, "DEBUG", "RELOAD", "NOSAVE") }
		}},
	{name: "the data of another node", prepare: func(tr *lockkit.Trio) func() {
		return func() {
			follow(tr.T, tr.Servers[0], tr.Servers[2])
			tr.Servers[0].Do(tr.T, "REPLICAOF", "NO", "ONE")
		}
	}},
	{name: "flushed, and the marker put back", prepare: func(tr *lockkit.Trio) func() {
		return func() {
			rdb := tr.Servers[0].Client(tr.T)
			dumped := map[string]string{}
			for _, key := range []string{"flightlock:{boot}", "flightlock:{boot}:past"} {
				if v, err := rdb.Dump(tr.T.Context(), key).Result(); err == nil { // else there is no quarantine
					dumped[key] = v
				}
			}
			rdb.FlushAll(tr.T.Context())
			for key, value := range dumped {
				testkit.Must(tr.T, rdb.Restore(tr.T.Context(), key, 0, value).Err())
			}
		}
	}},
	{name: "an empty database swapped in", prepare: func(tr *lockkit.Trio) func() {
		return func() { tr.Servers[0].Do(tr.T, "SWAPDB", 0, 9) }
	}},
}

// Nobody is granted the key a second time once the last check of the server's identity has expired.
func TestNoSecondGrantByANodeWithOtherData(t *testing.T) {
	t.Parallel()
	for i, a := range oddAmnesias {
		t.Run(a.name, func(t *testing.T) {
			forgets := a
			forgets.prepare = func(tr *lockkit.Trio) func() {
				forget := a.prepare(tr)
				return func() {
					forget()
					time.Sleep(120 * time.Millisecond) // a look counts for 100
				}
			}
			tr := lockkit.NewTrio(t, a.args...)
			holder, rival := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
			if n := secondGrants(tr, forgets, fmt.Sprint("k", i), holder, rival,
				tr.Client(flightlock.Options{})); n > 0 {
				t.Errorf("%d others got the key", n)
			}
		})
	}
}

// amnesia is a way in which the first node loses what it has stored since prepare.
type amnesia struct {
	name    string
	args    []string // of the servers
	prepare func(tr *lockkit.Trio) (forget func())
}

var amnesias = []amnesia{
	{name: "restarted empty", prepare: func(tr *lockkit.Trio) func() {
		return func() { testkit.Must(tr.T, tr.Servers[0].Restart()) }
	}},
	{name: "stale snapshot", args: []string{"--dbfilename", "dump.rdb"}, prepare: func(tr *lockkit.Trio) func() {
		tr.Servers[0].Do(tr.T, "SAVE")
		return func() { testkit.Must(tr.T, tr.Servers[0].Restart()) }
	}},
	{name: "stale append-only file", args: []string{"--appendonly", "yes", "--appendfsync", "everysec"},
		prepare: func(tr *lockkit.Trio) func() {
			saved, err := tr.Servers[0].SaveAppendOnly()
			testkit.Must(tr.T, err)
			return func() { testkit.Must(tr.T, tr.Servers[0].RestartFrom(saved)) }
		}},
	{name: "flushed", prepare: func(tr *lockkit.Trio) func() {
		return func() { tr.Servers[0].Do(tr.T, "FLUSHALL") }
	}},
	{name: "lagging replica", prepare: func(tr *lockkit.Trio) func() {
		// The replica loses its master before the lock is granted, and is promoted afterwards.
		replica := redistest.StartServer(tr.T, lockkit.AtOnce...)
		follow(tr.T, replica, tr.Servers[0])
		replica.Do(tr.T, "REPLICAOF", "127.0.0.1", "1")
		return func() {
			testkit.Must(tr.T, tr.Servers[0].Kill())
			replica.Do(tr.T, "REPLICAOF", "NO", "ONE")
			tr.Proxy.SetTarget(replica.Addr())
			tr.Servers[0] = replica
		}
	}},
}

// follow makes replica a replica of master that has all its data.
func follow(t *testing.T, replica, master *redistest.Server) {
	t.Helper()
	replica.Do(t, "REPLICAOF", "127.0.0.1", strconv.Itoa(master.Port()))
	redistest.Eventually(t, 20*time.Second, "the replica has its master's data", func() bool {
		info := replica.Do(t, "INFO", "replication").(string)
		return strings.Contains(info, "master_link_status:up") &&
			!strings.Contains(info, "master_sync_in_progress:1") && slices.Equal(replica.Keys(t), master.Keys(t))
	})
}

// tries is how often each amnesia is tried; FLIGHTLOCK_TRIES raises it.
func tries(t *testing.T) int {
	text := os.Getenv("FLIGHTLOCK_TRIES")
	if text == "" {
		return 2
	}
	n, err := strconv.Atoi(text)
	testkit.Must(t, err)
	return n
}

// A lock is held that the third node missed, and the first node loses it. Nobody else gets the key:
// not a client that has locked before, not a new one, not several at once, however often they try.
func TestNoSecondGrantAfterANodeForgot(t *testing.T) {
	t.Parallel()
	for _, a := range amnesias {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			tr := lockkit.NewTrio(t, a.args...)
			for i := range tries(t) {
				opts := flightlock.Options{}
				holder, rival, third := tr.Client(opts), tr.Client(opts), tr.Client(opts)
				if n := secondGrants(tr, a, fmt.Sprint("k", i), holder, rival, third); n > 0 {
					t.Fatalf("try %d: %d others got the key", i, n)
				}
				anew(tr, holder, rival, third)
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
			tr := lockkit.NewTrio(t, a.args...)
			holder, rival := tr.Client(off), tr.Client(off)
			for i := range 10 {
				if secondGrants(tr, a, fmt.Sprint("k", i), holder, rival, tr.Client(off)) > 0 {
					return
				}
				for _, s := range tr.Servers { // all begin anew, together
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
	tr := lockkit.NewTrio(t)
	for i, opts := range []flightlock.Options{
		{MaxTTL: math.MaxInt64}, {MaxTTL: math.MaxInt64, DriftFactor: 0.49},
		{MaxTTL: math.MaxInt64 - time.Millisecond},
		{MaxTTL: 24 * time.Hour}, {MaxTTL: 24 * time.Hour, DriftFactor: math.Nextafter(0.5, 0)},
		{MaxTTL: time.Minute, DriftFactor: math.SmallestNonzeroFloat64},
	} {
		c, err := flightlock.New(opts, tr.Nodes()...)
		if err != nil {
			lockkit.WantInvalid(t, err, "Options.MaxTTL")
			continue
		}
		lockkit.Close(t, c)
		holder, rival, third := tr.Client(opts), tr.Client(opts), tr.Client(opts)
		if n := secondGrants(tr, amnesias[0], fmt.Sprint("k", i), holder, rival, third); n > 0 {
			t.Errorf("MaxTTL %v, DriftFactor %v: %d others got the key", opts.MaxTTL, opts.DriftFactor, n)
		}
		anew(tr, holder, rival, third)
	}
}

// secondGrants has holder lock key, the first node lose its data, and the rivals try to get the
// lock. It returns how many got it while the holder could consider its lock valid.
func secondGrants(
	tr *lockkit.Trio, a amnesia, key string,
	holder *flightlock.Client, rivals ...*flightlock.Client,
) (granted int) {
	t := tr.T
	t.Helper()
	lockkit.UseOnAll(t, rivals[0], "warm", tr.Servers...) // it knows the nodes, and a bucket
	forget := a.prepare(tr)
	l := tr.Hold(holder, key, time.Minute)
	defer l.Release(context.Background()) // it may be on too few nodes by now
	forget()
	var mu sync.Mutex
	try := func(c *flightlock.Client, retry flightlock.RetryStrategy) {
		second, err := c.SingleFlightLock(t.Context(), key, time.Second, retry)
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

// anew closes all clients that know the servers, and empties these: to the next client they are a new
// deployment.
func anew(tr *lockkit.Trio, clients ...*flightlock.Client) {
	tr.T.Helper()
	for _, c := range clients {
		lockkit.Close(tr.T, c)
	}
	for _, s := range tr.Servers {
		s.Do(tr.T, "FLUSHALL")
	}
}

// A deployment whose nodes were never used works at once, at the first attempt, and several clients
// may bootstrap it together.
func TestANewDeploymentWorksAtOnce(t *testing.T) {
	t.Parallel()
	for i := range tries(t) {
		tr := lockkit.NewTrio(t)
		var wg sync.WaitGroup
		for j := range 1 + 4*i {
			c := tr.Client(lockkit.Patient)
			wg.Go(func() {
				l, err := c.TryLock(t.Context(), fmt.Sprint("k", j), time.Minute)
				if err != nil {
					t.Errorf("client %d of %d: %v", j, 1+4*i, err)
					return
				}
				lockkit.Release(t, l)
			})
		}
		wg.Wait()
	}
}

// All nodes restarted empty at the same time, or flushed, are no new deployment to a client that ran before:
// the lock of another may be valid still. It says so in its log, and to a client that begins after it.
func TestNoSecondGrantAfterAllNodesForgot(t *testing.T) {
	t.Parallel()
	forgets := map[string]func(*testing.T, *redistest.Server){
		"restarted empty": func(t *testing.T, s *redistest.Server) { testkit.Must(t, s.Restart()) },
		"flushed":         func(t *testing.T, s *redistest.Server) { s.Do(t, "FLUSHALL") },
	}
	for name, forget := range forgets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr := lockkit.NewTrio(t)
			for i := range tries(t) {
				var log testkit.LogBuffer
				opts := flightlock.Options{MaxTTL: 10 * time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))}
				holder, rival := tr.Client(opts), tr.Client(opts)
				lockkit.UseOnAll(t, rival, "warm", tr.Servers...)
				l := lockkit.Lock(t, holder, "k", 5*time.Minute)
				var wg sync.WaitGroup
				for _, s := range tr.Servers {
					wg.Go(func() { forget(t, s) })
				}
				wg.Wait()
				redistest.Eventually(t, 20*time.Second, "a running client finds that all nodes lost their data",
					func() bool {
						if second, err := rival.TryLock(t.Context(), "k", time.Minute); err == nil {
							t.Fatalf("try %d: %s has it, as has %s: %v", i, second.Owner(), l.Owner(), l.Err())
						}
						return rival.Stats().Quarantined == 3
					})
				if l.Err() != nil {
					t.Fatalf("the holder's lock ended first: %v", l.Err())
				}
				late := tr.Client(flightlock.Options{MaxTTL: opts.MaxTTL})
				if second, err := late.TryLock(t.Context(), "k", time.Minute); err == nil {
					t.Fatalf("try %d: a client that began later has it: %s", i, second.Owner())
				}
				if log.Count("level=WARN", "quarantined") < 3 {
					t.Errorf("the log says nothing of it:\n%s", log.String())
				}
				// The way out: nobody is left who knows.
				_ = l.Release(t.Context()) // it is on no node any more
				anew(tr, holder, rival, late)
				lockkit.LockAndRelease(t, tr.Client(lockkit.Patient))
				for _, s := range tr.Servers {
					s.Do(t, "FLUSHALL")
				}
			}
		})
	}
}

func wantQuarantined(t *testing.T, c *flightlock.Client, n int64) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("%d nodes are in quarantine", n), func() bool {
		return c.Stats().Quarantined == n
	})
}

// A node that lost data has no vote until MaxTTL is over, and then it votes: meanwhile, without
// another one, there is no majority. That is not "held", and the error says why and how long.
func TestQuarantineEnds(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	var log testkit.LogBuffer
	opts := flightlock.Options{MaxTTL: 2 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	c := tr.Client(opts)
	lockkit.TryLock(t, c, "k")
	lockkit.WantFree(t, "k", tr.Servers...)
	testkit.Must(t, tr.Servers[1].Kill())
	tr.Servers[0].Do(t, "FLUSHALL")
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
	testkit.WantOneLine(t, &log, "node quarantined", tr.Proxy.Addr())
	redistest.Eventually(t, 20*time.Second, "the grant that did not count is undone", func() bool {
		return tr.Servers[0].Do(t, "EXISTS", "lock:k") == int64(0)
	})

	l, err := c.SingleFlightLock(t.Context(), "k", time.Second,
		flightlock.LimitedRetry(5*time.Millisecond, 10000))
	if err != nil {
		t.Fatal(err)
	}
	if waited := time.Since(forgot); waited < opts.MaxTTL {
		t.Errorf("it had a vote again after %v", waited)
	}
	lockkit.Release(t, l)
	wantQuarantined(t, c, 0)
	testkit.WantOneLine(t, &log, "out of quarantine", tr.Proxy.Addr())
	lockkit.TryLock(t, tr.Client(opts), "another client sees no quarantine any more")
}

// A client that meets a node for the first time after the end of its quarantine counts its vote at
// once, if another client saw that it lost data.
func TestALateClientSeesNoQuarantine(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	opts := flightlock.Options{MaxTTL: 2 * time.Second}
	c := tr.Client(opts)
	lockkit.TryLock(t, c, "k")
	restarted := time.Now()
	testkit.Must(t, tr.Servers[0].Restart())
	lockkit.LockUntilQuarantined(t, c, "k", 1)
	noticed := time.Now()
	lockkit.Close(t, c) // no client is there when it is over
	testkit.Must(t, tr.Servers[1].Kill())
	late := tr.Client(opts)
	if _, err := late.TryLock(t.Context(), "k", time.Second); err == nil && time.Since(restarted) < opts.MaxTTL {
		t.Error("locked in the quarantine")
	}
	lockkit.Close(t, late)
	time.Sleep(time.Until(noticed.Add(opts.MaxTTL + 100*time.Millisecond)))
	lockkit.TryLock(t, tr.Client(opts), "k2")
}

// A flushed script cache is not a loss of data, and neither is a lost connection.
func TestScriptFlushIsNoMemoryLoss(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	c := tr.Client(flightlock.Options{})
	lockkit.LockAndRelease(t, c)
	testkit.Must(t, tr.Servers[2].Kill())
	for range 3 {
		tr.Servers[0].Do(t, "SCRIPT", "FLUSH")
		lockkit.TryLock(t, c, "k")
		tr.Proxy.ResetAll()
		lockkit.EventuallyLock(t, c, "k")
	}
	lockkit.TryLock(t, tr.Client(flightlock.Options{}), "k")
	wantQuarantined(t, c, 0)
}

// A node that is down does not matter while the others are established; a new deployment has to
// wait for it, and works as soon as it is there.
func TestANodeIsAwayFromTheBeginning(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	testkit.Must(t, tr.Servers[2].Kill())
	c := tr.Client(flightlock.Options{})
	_, err := c.TryLock(t.Context(), "k", time.Minute)
	if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "quarantined until") {
		t.Fatal(err)
	}
	testkit.Must(t, tr.Servers[2].Restart())
	lockkit.EventuallyLock(t, c, "k")
	testkit.Must(t, tr.Servers[2].Kill())
	lockkit.EventuallyLock(t, c, "k")
	lockkit.TryLock(t, tr.Client(flightlock.Options{}), "k")
	testkit.Must(t, tr.Servers[2].Restart())
	lockkit.LockUntilQuarantined(t, c, "k", 1)
	lockkit.WantFree(t, "k", tr.Servers...)
	testkit.Must(t, tr.Servers[1].Kill())
	if _, err := c.TryLock(t.Context(), "k", time.Minute); !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("one node that knows is enough: %v", err)
	}
}

// A refresh restores a live lock on a node that lost it, in quarantine or not. The node confirms it
// when attempts that it granted before are over, even if it is still in quarantine.
func TestRefreshRepairsANodeInQuarantine(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	c := tr.Client(flightlock.Options{})
	l := lockkit.Lock(t, c, "k", 50*time.Second)
	tr.WantOn(l, "k", 0, 1)
	testkit.Must(t, tr.Servers[0].Restart())
	redistest.Eventually(t, 20*time.Second, "the node has the key again", func() bool {
		return l.Refresh(t.Context()) == nil && tr.Servers[0].Do(t, "GET", "lock:k") == l.Owner()
	})
	wantQuarantined(t, c, 1)
	testkit.Must(t, tr.Servers[2].Kill())
	if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
		t.Errorf("the node that was repaired has confirmed at once: %v", err)
	}
	redistest.Eventually(t, 20*time.Second, "one node confirms, and one that was repaired", func() bool {
		return l.Refresh(t.Context()) == nil
	})
	wantQuarantined(t, c, 1)
	lockkit.Release(t, l)
}

// followed is a trio whose first server has a replica with its data, and two clients that know
// the first.
func followed(t *testing.T) (
	tr *lockkit.Trio, first, second *redistest.Server, holder, other *flightlock.Client,
) {
	t.Helper()
	tr = lockkit.NewTrio(t)
	first, second = tr.Servers[0], redistest.StartServer(t, lockkit.AtOnce...)
	holder, other = tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
	lockkit.UseOnAll(t, holder, "k", tr.Servers...)
	lockkit.UseOnAll(t, other, "k", tr.Servers...)
	follow(t, second, first)
	return tr, first, second, holder, other
}

// failedOver is followed by a failover that lagged: the second was made a master too, and lacks the
// lock that the holder has on the first two.
func failedOver(t *testing.T) (
	tr *lockkit.Trio, first, second *redistest.Server, holder, other *flightlock.Client,
) {
	t.Helper()
	tr, first, second, holder, other = followed(t)
	second.Do(t, "REPLICAOF", "127.0.0.1", "1") // from here on it lags
	l := tr.Hold(holder, "k", 50*time.Second)
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

// While too few nodes have a vote, nobody gets a lock. The error says that, and not that others hold it,
// although the keys of their attempts are on the nodes.
func TestWithoutVotersItIsNotHeldByOthers(t *testing.T) {
	t.Parallel()
	tr := lockkit.NewTrio(t)
	c := tr.Client(flightlock.Options{})
	lockkit.TryLock(t, c, "k")
	lockkit.WantFree(t, "k", tr.Servers...)
	for _, s := range tr.Servers[1:] {
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
			tr.Servers[i].Do(t, "SET", "lock:k", "other#id-1", "PX", "60000")
		}
		for what, retry := range map[string]flightlock.RetryStrategy{
			"once": flightlock.NoRetry(), "FailFast": flightlock.FailFast(nil),
		} {
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, retry)
			if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
				!strings.Contains(err.Error(), ": not asked, because") ||
				!strings.Contains(err.Error(), ": quarantined until ") {
				t.Errorf("%v, %s: %v", held, what, err)
			}
		}
		for _, s := range tr.Servers {
			s.Do(t, "DEL", "lock:k")
		}
	}
}
