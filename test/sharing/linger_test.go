package sharing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// lingering is a Client that retains leases for a minute, and has received the confirmation of its
// inbox.
func lingering(t *testing.T, opts flightlock.Options, nodes ...redis.UniversalClient) *flightlock.Client {
	t.Helper()
	if opts.Linger == 0 && opts.LingerFor == nil {
		opts.Linger = time.Minute
	}
	c := lockkit.New(t, opts, nodes...)
	redistest.Eventually(t, 10*time.Second, "a lease is retained", func() bool {
		lockkit.Release(t, lockkit.Lock(t, c, "first", lingerTTL))
		return c.Stats().Retained > 0
	})
	return c
}

const lingerTTL = 10 * time.Second

// locksOf is the number of lock keys on the server.
func locksOf(t *testing.T, s *redistest.Server) (n int) {
	for _, key := range s.Keys(t) {
		if strings.HasPrefix(key, "lock:") {
			n++
		}
	}
	return n
}

// A lock that is used again sends nothing, for any caller of the process; its tokens rise. Another
// process gets it within a few round trips, with any of the methods.
func TestLingerOnRealNodes(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		_, nodes := lockkit.StartNodes(t, n)
		opts := lockkit.Patient
		a, b := lingering(t, opts, nodes...), lockkit.New(t, opts, nodes...)
		first := lockkit.Lock(t, a, "k", lingerTTL)
		lockkit.Release(t, first)
		before, last := a.Stats(), first.Fence()
		for range 3 { // as many as the block has tokens left
			l, err := a.TryLock(t.Context(), "k", lingerTTL)
			if err != nil {
				t.Fatal(err)
			}
			if l.Fence() <= last || l.Owner() != first.Owner() {
				t.Errorf("token %d after %d, owner %s after %s", l.Fence(), last, l.Owner(), first.Owner())
			}
			if left := time.Until(l.Until()); left < lingerTTL/2 {
				t.Errorf("valid for %v", left)
			}
			last = l.Fence()
			lockkit.Release(t, l)
		}
		after := a.Stats()
		if after.Attempts != before.Attempts || after.Reused != before.Reused+3 || after.Held != 0 ||
			after.Retained != before.Retained {
			t.Errorf("%d nodes: before %+v, after %+v", n, before, after)
		}
		for i, lock := range []func() (*flightlock.Lock, error){
			func() (*flightlock.Lock, error) { return b.SingleFlightLock(t.Context(), "k", lingerTTL, nil) },
			func() (*flightlock.Lock, error) { return tryUntilRecalled(t, b, "k") },
		} {
			began := time.Now()
			l, err := lock()
			if err != nil {
				t.Fatalf("%d nodes, %d: %v", n, i, err)
			}
			if took := time.Since(began); took > lingerTTL/2 || l.Fence() <= last {
				t.Errorf("%d nodes, %d: it took %v, token %d after %d", n, i, took, l.Fence(), last)
			}
			lockkit.Release(t, l)
			lockkit.Release(t, lockkit.Lock(t, a, "k", lingerTTL)) // it is retained, and used once
			l = lockkit.Lock(t, a, "k", lingerTTL)
			last = l.Fence()
			lockkit.Release(t, l)
		}
		if s := a.Stats(); s.Recalled < 2 {
			t.Errorf("%+v", s)
		}
	}
}

// tryUntilRecalled is TryLock of a key whose lease is retained. Each call recalls the lease, and on
// a busy machine gives up before it is released: then it is called again, for as long as its client
// may take for a recall.
func tryUntilRecalled(t *testing.T, c *flightlock.Client, key string) (l *flightlock.Lock, err error) {
	t.Helper()
	for began := time.Now(); time.Since(began) < lingerTTL/2; {
		if l, err = c.TryLock(t.Context(), key, lingerTTL); !errors.Is(err, flightlock.ErrNotAcquired) {
			break
		}
	}
	return l, err
}

// From its first attempt to the lock, a rival waits for messages only, and for no timer: on an idle
// processor a timer for part of a round trip fires a millisecond late. These nodes do not grant, so
// that a rival that is faster than the release gets a turn, in a third round trip.
func TestARecallWaitsForNoTimer(t *testing.T) {
	const oneWay = 10 * time.Millisecond
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		opts := lockkit.Patient
		a, b := lingering(t, opts, clients...), lingering(t, opts, clients...)
		nodes[0].SetDelay(oneWay)
		for i := range 10 {
			key := fmt.Sprint(i)
			lockkit.Release(t, lockkit.Lock(t, a, key, lingerTTL))
			began := time.Now()
			l := lockkit.Lock(t, b, key, lingerTTL)
			if took := time.Since(began); took%oneWay != 0 || took > 12*oneWay { // some open a connection
				t.Errorf("%s: it took %v, and one way is %v", key, took, oneWay)
			}
			lockkit.Release(t, l)
		}
		if n := a.Stats().Recalled; n < 10 {
			t.Errorf("%d were recalled", n)
		}
	})
}

// A lease that is in use when it is recalled is kept: the rival waits for its release, which grants
// the key to it. (Not always: a poll of the rival's may be under way at that moment. Then it asks again.)
func TestARecallWaitsForTheHolder(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	opts := lockkit.Patient
	a, b := lingering(t, opts, nodes...), lockkit.New(t, opts, nodes...)
	const rounds = 5
	for i := range rounds {
		key, attempts := fmt.Sprint("k", i), b.Stats().Attempts
		held := lockkit.Lock(t, a, key, lingerTTL)
		got := make(chan *flightlock.Lock, 1)
		go func() {
			l, _ := b.SingleFlightLock(t.Context(), key, lingerTTL, nil)
			got <- l
		}()
		redistest.Eventually(t, 10*time.Second, "it has asked, and made an offer", func() bool {
			return b.Stats().Attempts > attempts+1 && offersFor(t, servers, key) == len(servers)
		})
		if held.Err() != nil || len(got) > 0 {
			t.Error("it is held by both")
		}
		if _, err := b.TryLock(t.Context(), key, lingerTTL); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("TryLock: %v", err)
		}
		lockkit.Release(t, held)
		l := <-got
		if l == nil || l.Fence() <= held.Fence() {
			t.Fatalf("%v", l)
		}
		lockkit.Release(t, l)
	}
	if s := b.Stats(); s.Grants == 0 {
		t.Errorf("%d locks, %d attempts and no grant: it was given a turn, and had to ask again", rounds,
			s.Attempts)
	}
}

// offersFor is on how many servers somebody who waits for key has an offer. An offer of an earlier round may
// be left on one: it expires by itself.
func offersFor(t *testing.T, servers []*redistest.Server, key string) (n int) {
	for _, s := range servers {
		for _, offers := range s.Keys(t) {
			if tag, ok := strings.CutSuffix(offers, ":offers:lock:"+key); ok {
				contenders, _ := s.Do(t, "ZRANGE", tag+":wants:lock:"+key, "0", "-1").([]any)
				if slices.ContainsFunc(contenders, func(contender any) bool {
					return s.Do(t, "HEXISTS", offers, contender) == int64(1)
				}) {
					n++
				}
			}
		}
	}
	return n
}

// Without an inbox on a majority of nodes nothing is retained, and what is retained is released
// when the majority is lost. (S21)
func TestNothingIsRetainedWithoutInboxes(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 3)
	a := lingering(t, lockkit.Patient, nodes...)
	retained := func(keys int) {
		redistest.Eventually(t, 10*time.Second, "all are retained", func() bool {
			for i := range keys {
				lockkit.Release(t, lockkit.Lock(t, a, fmt.Sprint(i), lingerTTL))
			}
			return a.Stats().Retained == 21
		})
	}
	retained(20)
	forbid := func(s *redistest.Server) {
		s.Do(t, "ACL", "SETUSER", "default", "-subscribe")
		s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
	}
	forbid(servers[0]) // a majority is left
	redistest.Eventually(t, 10*time.Second, "the connection was closed", func() bool {
		return len(servers[0].Do(t, "PUBSUB", "CHANNELS", node.Inbox+"*").([]any)) == 0
	})
	retained(1)
	forbid(servers[1])
	redistest.Eventually(t, 10*time.Second, "all are released", func() bool {
		return a.Stats().Retained == 0 && locksOf(t, servers[0])+locksOf(t, servers[1])+locksOf(t, servers[2]) == 0
	})
	l := lockkit.Lock(t, a, "0", lingerTTL)
	if node.Retains(l.Owner()) {
		t.Errorf("%s is marked", l.Owner())
	}
	lockkit.Release(t, l)
	if n := a.Stats().Retained; n != 0 {
		t.Errorf("%d are retained", n)
	}
	servers[1].Do(t, "ACL", "SETUSER", "default", "+subscribe")
}

// Where recalls may not be published, a rival waits for as long as the lease lingers, and no
// longer.
func TestARecallThatIsRefused(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	servers[0].Do(t, "ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-publish")
	mute := servers[0].Client(t, func(o *redis.Options) { o.Username, o.Password = "mute", "x" })
	a := lingering(t, flightlock.Options{NodeTimeout: lockkit.Patience, Linger: 300 * time.Millisecond},
		nodes...)
	b := lockkit.New(t, lockkit.Patient, mute)
	lockkit.Release(t, lockkit.Lock(t, a, "k", lingerTTL))
	began := time.Now()
	lockkit.Release(t, lockkit.Lock(t, b, "k", lingerTTL))
	if took := time.Since(began); took > lingerTTL/2 {
		t.Errorf("it took %v", took)
	}
	if s := a.Stats(); s.Recalled != 0 {
		t.Errorf("%+v", s)
	}
}

// Nor does such a process wait for ever while the lease is used again and again: its renewals find who waits.
func TestALeaseInUseEndsWithoutARecall(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	servers[0].Do(t, "ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-publish")
	mute := servers[0].Client(t, func(o *redis.Options) { o.Username, o.Password = "mute", "x" })
	a := lingering(t, lockkit.Patient, nodes...)
	b := lockkit.New(t, lockkit.Patient, mute)
	lockkit.Release(t, lockkit.Lock(t, a, "k", 2*time.Second))
	ctx, served := context.WithTimeout(t.Context(), 20*time.Second)
	defer served()
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil { // short holds, one after the other
			if l, err := a.SingleFlightLock(ctx, "k", 2*time.Second, nil); err == nil {
				_ = l.Release(ctx)
			}
			time.Sleep(time.Millisecond) // else it leaves the test's other goroutines little of a processor
		}
	})
	l, err := b.SingleFlightLock(ctx, "k", 2*time.Second, nil)
	served()
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	lockkit.Release(t, l)
}

// Close releases retained leases, in batches.
func TestCloseReturnsRetainedLeases(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	c, err := flightlock.New(flightlock.Options{Linger: time.Minute, NodeTimeout: lockkit.Patience}, nodes...)
	if err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, 10*time.Second, "a lease is retained", func() bool {
		lockkit.Release(t, lockkit.Lock(t, c, "first", lingerTTL))
		return c.Stats().Retained > 0
	})
	const keys = 5000
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 100 {
		wg.Go(func() {
			for i := next.Add(1); i < keys; i = next.Add(1) {
				lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint(i), 40*time.Second))
			}
		})
	}
	wg.Wait()
	if n := c.Stats().Retained; n != keys {
		t.Errorf("%d are retained, want %d", n, keys)
	}
	lockkit.Close(t, c)
	if n := locksOf(t, servers[0]); n != 0 {
		t.Errorf("%d locks are left", n)
	}
}

// What is not retained, and whose owners do not allow it: without Linger; with NoPrefix, without
// notices, without handoff; keys that LingerFor excludes.
func TestWhereNothingLingers(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	for name, opts := range map[string]flightlock.Options{
		"off":           {},
		"NoPrefix":      {Linger: time.Minute, NoPrefix: true},
		"DisableNotify": {Linger: time.Minute, DisableNotify: true},
		"no handoff":    {Linger: time.Minute, HandoffSlice: -1},
		"LingerFor":     {Linger: time.Minute, LingerFor: func(string) time.Duration { return 0 }},
	} {
		opts.NodeTimeout = lockkit.Patience
		c := lockkit.New(t, opts, nodes...)
		lockkit.Release(t, lockkit.Lock(t, c, "k", lingerTTL)) // loads the scripts
		before := c.Stats().Commands
		for range 5 {
			for _, how := range []func() (*flightlock.Lock, error){
				func() (*flightlock.Lock, error) { return c.SingleFlightLock(t.Context(), "k", lingerTTL, nil) },
				func() (*flightlock.Lock, error) { return c.TryLock(t.Context(), "k", lingerTTL) },
			} {
				l, err := how()
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if node.Retains(l.Owner()) {
					t.Errorf("%s: %s is marked", name, l.Owner())
				}
				lockkit.Release(t, l)
			}
		}
		if s := c.Stats(); s.Retained != 0 || s.Reused != 0 || s.Commands-before != 20 {
			t.Errorf("%s: %+v", name, s)
		}
		if n := len(servers[0].Do(t, "PUBSUB", "CHANNELS", "*").([]any)); n != 0 {
			t.Errorf("%s: %d channels", name, n)
		}
	}
}

// With a Cluster among the nodes nothing is retained.
func TestNothingLingersOnACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	c := lockkit.New(t, flightlock.Options{Linger: time.Minute, NodeTimeout: lockkit.Patience},
		cluster.Client(t))
	for range 5 {
		l := lockkit.Lock(t, c, "k", lingerTTL)
		if node.Retains(l.Owner()) {
			t.Errorf("%s is marked", l.Owner())
		}
		lockkit.Release(t, l)
	}
	if s := c.Stats(); s.Retained != 0 {
		t.Errorf("%+v", s)
	}
}

// A key that a Fetcher has locked is not retained.
func TestFetchRetainsNothing(t *testing.T) {
	t.Parallel()
	_, nodes := lockkit.StartNodes(t, 1)
	c := lingering(t, lockkit.Patient, nodes...)
	f := fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{})
	before := c.Stats()
	for i := range 3 {
		if _, err := f.Get(t.Context(), fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if s := c.Stats(); s.Retained != before.Retained || s.Acquired == before.Acquired {
		t.Errorf("%+v", s)
	}
}

// LingerFor decides for each key, instead of Linger, and runs on its caller's goroutine: if it
// panics, nothing is left of the call.
func TestLingerFor(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	c := lingering(t, flightlock.Options{NodeTimeout: lockkit.Patience,
		LingerFor: func(key string) time.Duration {
			switch key {
			case "first", "sticky":
				return time.Minute
			case "bad":
				panic("LingerFor of the user's")
			}
			return -1
		}}, nodes...)
	for _, key := range []string{"sticky", "cron"} {
		lockkit.Release(t, lockkit.Lock(t, c, key, lingerTTL))
	}
	v := testkit.Recovered(func() { _, _ = c.TryLock(context.Background(), "bad", lingerTTL) })
	if fmt.Sprint(v) != "LingerFor of the user's" {
		t.Errorf("recovered %v", v)
	}
	if n, s := locksOf(t, servers[0]), c.Stats(); n != 2 || s.Retained != 2 || s.Waiters != 0 {
		t.Errorf("%d locks, %+v", n, s)
	}
}

// Options out of range are refused by name.
func TestLingerOptions(t *testing.T) {
	t.Parallel()
	_, nodes := lockkit.StartNodes(t, 1)
	_, err := flightlock.New(flightlock.Options{Linger: -1}, nodes...)
	lockkit.WantInvalid(t, err, "Options.Linger is -1ns, but it must not be below 0")
}

// Processes that take turns at one key do not retain it, and each process that repeatedly uses a
// key alone does.
func TestTurnsAndAffinity(t *testing.T) {
	t.Parallel()
	_, nodes := lockkit.StartNodes(t, 1)
	opts := lockkit.Patient
	var clients []*flightlock.Client
	for range 3 {
		clients = append(clients, lingering(t, opts, nodes...))
	}
	var held, most atomic.Int64
	var last atomic.Int64
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			for i := range 300 {
				l := lockkit.Lock(t, c, "k", lingerTTL)
				most.Store(max(most.Load(), held.Add(1)))
				if f := l.Fence(); last.Swap(f) >= f {
					t.Errorf("token %d is not above the last", f)
				}
				held.Add(-1)
				lockkit.Release(t, l)
				if i%10 == 0 {
					lockkit.Release(t, lockkit.Lock(t, c, "mine"+fmt.Sprintf("%p", c), lingerTTL))
				}
			}
		})
	}
	wg.Wait()
	if most.Load() != 1 {
		t.Errorf("%d hold at once", most.Load())
	}
}
