package flightlock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// What is stored is the canonical form: prefix + key holds the owner, with a ttl.
func TestTheKeyHoldsTheOwnerOnEveryNode(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Label: "me"}, clients...)
		l := lockkit.Lock(t, c, "order:7", 10*time.Second)
		synctest.Wait()
		for _, node := range nodes {
			got, err := node.Mini.Get("lock:order:7")
			if err != nil || got != l.Owner() {
				t.Errorf("%s holds %q, %v; want %q", node.Addr(), got, err, l.Owner())
			}
			if ttl := node.Mini.TTL("lock:order:7"); ttl <= 0 || ttl > 10*time.Second {
				t.Errorf("ttl %v", ttl)
			}
		}
		if !strings.HasPrefix(l.Owner(), "me#") {
			t.Errorf("owner %q does not begin with its label", l.Owner())
		}
		if l.Key() != "order:7" || l.Fence() <= 0 || l.Err() != nil {
			t.Errorf("key %q, fence %d, err %v", l.Key(), l.Fence(), l.Err())
		}
		if left := time.Until(l.Until()); left <= 9*time.Second || left >= 10*time.Second-2*time.Millisecond {
			t.Errorf("valid for %v", left)
		}
		lockkit.Release(t, l)
		synctest.Wait()
		for _, node := range nodes {
			if node.Mini.Exists("lock:order:7") {
				t.Errorf("%s still has the key", node.Addr())
			}
		}
	})
}

// Two processes whose labels collide do not share a lock, nor do two of which one label is a prefix
// of the other.
func TestEqualLabelsDoNotShareALock(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		labels := []string{"worker-1", "worker-1", "worker-10", "w"}
		var cs []*flightlock.Client
		for _, label := range labels {
			cs = append(cs, lockkit.New(t, flightlock.Options{Label: label}, clients...))
		}
		for i, holder := range cs {
			l := lockkit.Lock(t, holder, "k", time.Second)
			for j, other := range cs {
				if i == j {
					continue
				}
				if _, err := other.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Errorf("%q while %q holds: %v", labels[j], labels[i], err)
				}
			}
			lockkit.Release(t, l)
		}
	})
}

// Owners are never used twice, and begin with the label, of up to 256 bytes, whatever it contains.
func TestOwnersAreUnique(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		label := strings.Repeat("a#b-", 64)
		c := lockkit.New(t, flightlock.Options{Label: label}, clients...)
		seen := map[string]bool{}
		for range 10 {
			l := lockkit.Lock(t, c, "k", time.Second)
			if seen[l.Owner()] {
				t.Errorf("owner %q again", l.Owner())
			}
			seen[l.Owner()] = true
			if !strings.HasPrefix(l.Owner(), label+"#") {
				t.Errorf("owner %q does not begin with its label", l.Owner())
			}
			lockkit.Release(t, l)
		}
	})
}

// The error for a lock that another process holds names the holder, the node, and the remaining
// ttl.
func TestNotAcquiredSaysWhoHolds(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", 5*time.Second)
		synctest.Wait()
		_, err := b.TryLock(t.Context(), "k", time.Second)
		var qe *flightlock.QuorumError
		if !errors.Is(err, flightlock.ErrNotAcquired) || errors.Is(err, flightlock.ErrUnavailable) || !errors.As(err, &qe) {
			t.Fatalf("got %v", err)
		}
		if qe.Op != "acquire" || qe.Key != "k" || qe.Need != 2 || qe.Got != 0 || len(qe.Nodes) != 3 {
			t.Errorf("%+v", qe)
		}
		holders := 0
		for _, n := range qe.Nodes {
			if n.Holder == l.Owner() && n.HolderTTL > 4*time.Second && n.HolderTTL <= 5*time.Second {
				holders++
			}
		}
		if holders < 2 {
			t.Errorf("%d nodes name the holder: %v", holders, err)
		}
		lockkit.Release(t, l)
	})
}

// A key with an empty value is held, by a client of another library: the error gives that and the
// ttl for each node, and not "ok".
func TestAHolderWithAnEmptyValueIsTold(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		lost := lockkit.Lock(t, c, "lost", 5*time.Second)
		synctest.Wait()
		for _, node := range nodes {
			node.Mini.Set("lock:k", "")
			node.Mini.SetTTL("lock:k", 3*time.Second)
			node.Mini.Set("lock:eternal", "")
			node.Mini.Set("lock:lost", "")
		}
		_, err := c.TryLock(t.Context(), "k", time.Second)
		wantEmptyHolder(t, err, flightlock.ErrNotAcquired, 3*time.Second)
		_, err = c.TryLock(t.Context(), "eternal", time.Second)
		wantEmptyHolder(t, err, flightlock.ErrNotAcquired, -1)
		wantEmptyHolder(t, lost.Refresh(t.Context()), flightlock.ErrNotHeld, -1)
		synctest.Wait()
		for _, node := range nodes {
			for _, key := range []string{"lock:k", "lock:eternal", "lock:lost"} {
				if v, err := node.Mini.Get(key); v != "" || err != nil {
					t.Errorf("%s is %q, %v on %s", key, v, err, node.Addr())
				}
			}
		}
	})
}

// wantEmptyHolder expects err to report for each node that the key has an empty value, and for how
// long.
func wantEmptyHolder(t *testing.T, err, sentinel error, ttl time.Duration) {
	t.Helper()
	var qe *flightlock.QuorumError
	if !errors.Is(err, sentinel) || !errors.As(err, &qe) {
		t.Fatalf("got %v, want %v", err, sentinel)
	}
	told := 0
	for _, n := range qe.Nodes {
		text := n.Error()
		switch {
		case strings.Contains(text, "no answer yet"):
		case n.Holder != "" || n.Err == nil || n.HolderTTL.Truncate(time.Second) != ttl.Truncate(time.Second),
			!strings.Contains(text, "empty value"), strings.Contains(text, "for 3s") != (ttl > 0):
			t.Errorf("%v (%+v), want an empty value for %v", n, n, ttl)
		default:
			told++
		}
	}
	if told < qe.Need {
		t.Errorf("%d nodes report: %v", told, err)
	}
}

// Within one process the lock is handed over without Redis, each time with a larger fence, and
// TryLock does not overtake.
func TestHandoff(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		first := lockkit.Lock(t, c, "k", 10*time.Second)
		got := make(chan *flightlock.Lock, 5)
		for range 5 {
			go func() {
				l, err := c.SingleFlightLock(t.Context(), "k", 10*time.Second, nil)
				if err != nil {
					t.Error(err)
				}
				got <- l
			}()
			synctest.Wait()
		}
		before := c.Stats()
		if before.Waiters != 5 || before.Held != 1 {
			t.Errorf("%+v", before)
		}
		if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("TryLock behind a queue: %v", err)
		}
		if n := c.Stats().Attempts; n != 1 {
			t.Errorf("%d remote attempts", n)
		}
		last := first
		for range 5 {
			lockkit.Release(t, last)
			next := <-got
			if next.Fence() <= last.Fence() {
				t.Errorf("fence %d after %d", next.Fence(), last.Fence())
			}
			if err := last.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("second Release: %v", err)
			}
			if err := last.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("Refresh after Release: %v", err)
			}
			if next.Err() != nil {
				t.Errorf("the successor was harmed: %v", next.Err())
			}
			last = next
		}
		lockkit.Release(t, last)
		if s := c.Stats(); s.Acquired != 6 || s.Handoffs != 5 || s.Attempts != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// Fences rise over all clients, and over a restart of the nodes that loses the counters.
func TestFencesRise(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		var last int64
		for i := range 20 {
			c := a
			if i%2 == 1 {
				c = b
			}
			l := lockkit.Lock(t, c, "k", time.Second)
			if l.Fence() <= last {
				t.Errorf("fence %d after %d", l.Fence(), last)
			}
			last = l.Fence()
			lockkit.Release(t, l)
			synctest.Wait()
			if i == 10 {
				time.Sleep(time.Second) // here the clock keeps the order
				for _, n := range nodes {
					n.Mini.FlushAll()
				}
			}
		}
	})
}

// Expiry: Err reports it by the clock, Release and Refresh return ErrNotHeld, and the Context ends
// before the entry in Redis can have expired.
func TestALockThatExpires(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, _ []*redistest.MemNode) {
		start := time.Now()
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		<-ctx.Done()
		if held, most := time.Since(start), time.Second-12*time.Millisecond; held > most+time.Millisecond {
			t.Errorf("the Context ended after %v, want %v: 1%% and 2ms before the entry expires", held, most)
		}
		if cause := context.Cause(ctx); !errors.Is(cause, flightlock.ErrLockLost) {
			t.Errorf("cause %v", cause)
		}
		if err := l.Err(); !errors.Is(err, flightlock.ErrLockLost) {
			t.Errorf("Err: %v", err)
		}
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Refresh: %v", err)
		}
		if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Errorf("Release: %v", err)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		if s := c.Stats(); s.Lost != 1 || s.Held != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A lock that another has taken is not released or refreshed by its old holder.
func TestAfterAnotherTookTheKey(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		for name, use := range map[string]func(*flightlock.Lock) error{
			"refresh": func(l *flightlock.Lock) error { return l.Refresh(t.Context()) },
			"release": func(l *flightlock.Lock) error { return l.Release(t.Context()) },
		} {
			l := lockkit.Lock(t, c, name, 10*time.Second)
			synctest.Wait()
			for _, n := range nodes {
				testkit.Must(t, n.Mini.Set("lock:"+name, "somebody else"))
			}
			ctx := l.Context(t.Context())
			if err := use(l); !errors.Is(err, flightlock.ErrNotHeld) || !strings.Contains(err.Error(), "somebody else") {
				t.Errorf("%s: %v", name, err)
			}
			if name == "refresh" {
				<-ctx.Done()
				if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
					t.Errorf("cause %v", context.Cause(ctx))
				}
			}
			synctest.Wait()
			for _, n := range nodes {
				if v, _ := n.Mini.Get("lock:" + name); v != "somebody else" {
					t.Errorf("%s: the other's key became %q", name, v)
				}
			}
		}
	})
}

// Release works with a ctx that has ended, and the lock's Context ends with Canceled.
func TestReleaseWithAnEndedContext(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		ctx, cancel := context.WithCancel(t.Context())
		l, err := c.SingleFlightLock(ctx, "k", time.Minute, nil)
		testkit.Must(t, err)
		lctx := l.Context(context.Background())
		cancel()
		if err := l.Release(ctx); err != nil {
			t.Error(err)
		}
		<-lctx.Done()
		if context.Cause(lctx) != context.Canceled {
			t.Errorf("cause %v", context.Cause(lctx))
		}
		if over := l.Context(context.Background()); over.Err() == nil {
			t.Error("a Context made after Release has not ended")
		}
		synctest.Wait()
		if nodes[0].Mini.Exists("lock:k") {
			t.Error("the key is still there")
		}
	})
}

// ctx ended before the call, while queued here, or while another process holds the lock: ctx's
// error and the outcome so far both match, at once.
func TestContextEnds(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := a.SingleFlightLock(ended, "k", time.Second, nil)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("ended before: %v", err)
		}
		if n := a.Stats().Commands; n != 0 {
			t.Errorf("%d commands for an ended ctx", n)
		}
		l := lockkit.Lock(t, a, "k", time.Minute)
		synctest.Wait()
		for name, c := range map[string]*flightlock.Client{"queued": a, "remote": b} {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			start := time.Now()
			_, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, flightlock.ErrNotAcquired) ||
				errors.Is(err, flightlock.ErrUnavailable) {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(start); took != 300*time.Millisecond {
				t.Errorf("%s: took %v", name, took)
			}
		}
		lockkit.Release(t, l)
		synctest.Wait()
		if s := a.Stats(); s.Waiters != 0 || s.Held != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// The caller's ctx ends while the attempt is in flight: what the nodes may have granted is
// released, and other callers of the process are not affected.
func TestContextEndsInMidAttempt(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		for _, n := range nodes {
			n.SetDelay(20 * time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		if _, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		time.Sleep(200 * time.Millisecond)
		for _, n := range nodes {
			if n.Mini.Exists("lock:k") {
				t.Errorf("orphan on %s", n.Addr())
			}
		}
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
	})
}

// Close fails waiters, lets holders finish until its ctx ends, then ends and releases them.
func TestCloseWithHoldersAndWaiters(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, err := flightlock.New(flightlock.Options{}, clients...)
		testkit.Must(t, err)
		quick, slow := lockkit.Lock(t, c, "quick", time.Minute), lockkit.Lock(t, c, "slow", time.Minute)
		alone := lockkit.Lock(t, c, "alone", time.Minute)
		var wg sync.WaitGroup
		for _, key := range []string{"quick", "slow"} {
			wg.Go(func() {
				if _, err := c.SingleFlightLock(t.Context(), key, time.Second, nil); !errors.Is(err, flightlock.ErrClosed) {
					t.Errorf("a waiter got %v", err)
				}
			})
		}
		synctest.Wait()
		slowCtx := slow.Context(context.Background())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		closed := make(chan error)
		go func() { closed <- c.Close(ctx) }()
		synctest.Wait()
		wg.Wait()
		if _, err := c.SingleFlightLock(t.Context(), "new", time.Second, nil); !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("new work: %v", err)
		}
		if err := quick.Err(); err != nil {
			t.Errorf("a holder was ended early: %v", err)
		}
		lockkit.Release(t, quick)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if ctx.Err() == nil {
			t.Error("Close did not wait for the holders")
		}
		if cause := context.Cause(slowCtx); !errors.Is(cause, flightlock.ErrClosed) {
			t.Errorf("cause %v", cause)
		}
		for _, l := range []*flightlock.Lock{slow, alone} {
			if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) || !errors.Is(err, flightlock.ErrClosed) {
				t.Errorf("Release after Close: %v", err)
			}
		}
		for _, n := range nodes {
			for _, key := range []string{"quick", "slow", "alone"} {
				if n.Mini.Exists("lock:" + key) {
					t.Errorf("%s outlived Close on %s", key, n.Addr())
				}
			}
		}
		if err := c.Close(t.Context()); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// One of three nodes is down, then another: locking continues, then ErrUnavailable names the failed
// nodes; it is never reported as held.
func TestNodesGoDownAndComeBack(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		nodes[0].Down(true)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		nodes[1].Down(true)
		_, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.LimitedRetry(10*time.Millisecond, 3))
		if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) ||
			errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		for _, n := range nodes[:2] {
			if err == nil || !strings.Contains(err.Error(), n.Addr()) {
				t.Errorf("%v does not name %s", err, n.Addr())
			}
		}
		nodes[0].Down(false)
		nodes[1].Down(false)
		lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
	})
}

// A release of Ready's own lock that is not confirmed in time is not what Ready waits for.
func TestReadyWhoseReleaseIsLate(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 20 * time.Millisecond}, clients...)
		nodes[0].SetDelay(5 * time.Millisecond)
		stalled := make(chan bool)
		go func() {
			defer close(stalled)
			for range 1000 {
				if slices.ContainsFunc(nodes[0].Mini.Keys(), func(k string) bool { return strings.Contains(k, "-ready-") }) {
					time.Sleep(5*time.Millisecond + 100*time.Microsecond) // the reply has arrived
					nodes[0].Stall(true)
					time.Sleep(30 * time.Millisecond)
					nodes[0].Stall(false)
					stalled <- true
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
		if err := c.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		if !<-stalled {
			t.Error("the release was not late")
		}
	})
}
