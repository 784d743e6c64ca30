package regressions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// redsync cleans up with the caller's ctx, and gotomicro not at all: when ctx ends during the
// attempt, the key is an orphan for the rest of its ttl. redsync's error hides ctx's.
func TestAContextThatEndsDuringTheAttemptLeavesNoOrphan(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		for i, n := range nodes {
			n.SetDelay(time.Duration(i+1) * 5 * time.Millisecond)
		}
		var early, got int
		for patience := time.Millisecond; patience < 45*time.Millisecond; patience += time.Millisecond {
			for name, lock := range map[string]func(context.Context) (*flightlock.Lock, error){
				"SingleFlightLock": func(ctx context.Context) (*flightlock.Lock, error) {
					return c.SingleFlightLock(ctx, "k", time.Minute, nil)
				},
				"TryLock": func(ctx context.Context) (*flightlock.Lock, error) {
					return c.TryLock(ctx, "k", time.Minute)
				},
			} {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				start := time.Now()
				l, err := lock(ctx)
				took := time.Since(start)
				cancel()
				switch {
				case err == nil:
					got++
					lockkit.Release(t, l)
				case !errors.Is(err, context.DeadlineExceeded) ||
					// neither: granted in the instant in which ctx ended
					errors.Is(err, flightlock.ErrNotAcquired) && errors.Is(err, flightlock.ErrUnavailable):
					t.Errorf("%s, %v: %v", name, patience, err)
				default:
					early++
				}
				if took > patience {
					t.Errorf("%s, %v: took %v", name, patience, took)
				}
				time.Sleep(100 * time.Millisecond)
				if keys := lockKeys(nodes); len(keys) != 0 {
					t.Fatalf("%s, %v: left %v", name, patience, keys)
				}
			}
		}
		if early == 0 || got == 0 {
			t.Errorf("%d ended early, %d got the lock: no ctx ended in the middle", early, got)
		}
	})
}

// redsync's acquire is not idempotent: go-redis repeats a SET NX whose reply is lost, and the node
// that holds our key counts as taken, for the whole ttl.
func TestALostReplyDoesNotBlockItsOwner(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	// dial leaves go-redis' retries on.
	c := lockkit.New(t, flightlock.Options{NodeTimeout: 500 * time.Millisecond}, testkit.Dial(t, proxy.Addr()))
	lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
	for i, fault := range []struct {
		begin, end func()
		// what the call makes: a connection that ends is replaced at once, by another owner's attempt
		attempts int64
	}{
		{func() { proxy.CutReplies(0) }, func() {}, 2},
		{func() { proxy.CutReplies(2) }, func() {}, 2},
		{func() { proxy.DropReplies(true) }, func() { proxy.DropReplies(false); proxy.ResetAll() }, 1},
	} {
		key := fmt.Sprint("k", i)
		lockkit.Release(t, lockkit.Lock(t, c, key, time.Second)) // so that its fence counter exists
		before := s.CommandCalls(t)["set"]
		fault.begin()
		l, err := c.SingleFlightLock(t.Context(), key, time.Minute, flightlock.NoRetry())
		fault.end()
		if n := s.CommandCalls(t)["set"] - before; n != fault.attempts {
			t.Errorf("fault %d: one call has acquired %d times", i, n)
		}
		if fault.attempts > 1 {
			testkit.Must(t, err)
			lockkit.Release(t, l)
		} else if !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("fault %d: %v", i, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // far below the ttl
		l, err = c.SingleFlightLock(ctx, key, time.Minute,
			flightlock.ExponentialBackoff(time.Millisecond, 10*time.Millisecond))
		cancel()
		if err != nil {
			t.Fatalf("fault %d, the next attempt: %v", i, err)
		}
		lockkit.Release(t, l)
		redistest.Eventually(t, 20*time.Second, "no key is left", func() bool {
			return !slices.Contains(s.Keys(t), "lock:"+key)
		})
	}
}

// The same while the caller continues by itself: what its lost attempt acquired does not block it.
func TestALostReplyIsRetriedAtOnce(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	proxy := redistest.StartProxy(t, s.Addr())
	c := lockkit.New(t, flightlock.Options{NodeTimeout: time.Second}, testkit.Dial(t, proxy.Addr()))
	lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
	for i := range 20 {
		proxy.CutReplies(i % 4)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		l, err := c.SingleFlightLock(ctx, "k", time.Minute,
			flightlock.ExponentialBackoff(time.Millisecond, 5*time.Millisecond))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		proxy.CutReplies(-1)
		lockkit.Release(t, l)
	}
	redistest.Eventually(t, 20*time.Second, "no key is left", func() bool {
		return !slices.Contains(s.Keys(t), "lock:k")
	})
}

// redislock compares owners by prefix: worker-1 obtains worker-10's lock.
func TestOwnersAreComparedWhole(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, c, "k", time.Minute) // owner ...-1
		lockkit.Release(t, l)
		if err := nodes[0].Mini.Set("lock:k", l.Owner()); err != nil { // as if it had not been released
			t.Fatal(err)
		}
		for range 40 { // owners ...-2, ..., ...-10, ..., ...-1a
			_, err := c.TryLock(t.Context(), "k", time.Minute)
			if !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Fatalf("got %v", err)
			}
		}
		nodes[0].Mini.Del("lock:k")
		for _, other := range []func(owner string) string{
			func(owner string) string { return owner + "0" },
			func(owner string) string { return owner[:len(owner)-1] },
			func(owner string) string { return "x" + owner },
			func(string) string { return "" },
		} {
			for name, use := range map[string]func(*flightlock.Lock) error{
				"Refresh": func(l *flightlock.Lock) error { return l.Refresh(t.Context()) },
				"Release": func(l *flightlock.Lock) error { return l.Release(t.Context()) },
			} {
				l := lockkit.Lock(t, c, "k", time.Minute)
				value := other(l.Owner())
				if err := nodes[0].Mini.Set("lock:k", value); err != nil {
					t.Fatal(err)
				}
				if err := use(l); !errors.Is(err, flightlock.ErrNotHeld) {
					t.Errorf("%s of %q's lock by %q: %v", name, value, l.Owner(), err)
				}
				synctest.Wait()
				if got, err := nodes[0].Mini.Get("lock:k"); got != value || err != nil {
					t.Errorf("%s made %q of %q, %v", name, got, value, err)
				}
				nodes[0].Mini.Del("lock:k")
			}
		}
		// Nor does an attempt acquire the key of an owner that its own is a prefix of, or the other way
		// round.
		l = lockkit.Lock(t, c, "k", time.Minute)
		id, count, _ := cutLast(l.Owner(), "-")
		n, err := strconv.ParseUint(count, 36, 64)
		if err != nil {
			t.Fatal(err)
		}
		lockkit.Release(t, l)
		synctest.Wait()
		for _, other := range []func(owner string) string{
			func(owner string) string { return owner + "0" },
			func(owner string) string { return owner[:len(owner)-1] },
			func(string) string { return "" },
		} {
			n++
			value := other(id + "-" + strconv.FormatUint(n, 36))
			if err := nodes[0].Mini.Set("lock:k", value); err != nil {
				t.Fatal(err)
			}
			if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Errorf("%q is held, and TryLock says %v", value, err)
			}
			synctest.Wait()
			if got, err := nodes[0].Mini.Get("lock:k"); got != value || err != nil {
				t.Errorf("TryLock made %q of %q, %v", got, value, err)
			}
		}
	})
}

// node-redlock's release stalls for seconds after an abort, and its error masks the reason of the
// abort.
func TestReleaseNeverStalls(t *testing.T) {
	testkit.Bubble(t, 4, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 40 * time.Millisecond}, clients...)
		ctx, abort := context.WithCancelCause(t.Context())
		l, err := c.SingleFlightLock(ctx, "k", 30*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		reason := errors.New("the caller's reason")
		work := l.Context(ctx)
		synctest.Wait()
		nodes[0].Stall(true)
		nodes[1].Stall(true)
		abort(reason)
		start := time.Now()
		if err := l.Release(ctx); !errors.Is(err, flightlock.ErrUnavailable) || errors.Is(err, context.Canceled) {
			t.Errorf("with 2 of 4 nodes: %v", err)
		}
		if took := time.Since(start); took > 50*time.Millisecond {
			t.Errorf("took %v", took)
		}
		if context.Cause(work) != reason {
			t.Errorf("cause %v", context.Cause(work))
		}
		nodes[0].Stall(false)
		nodes[1].Stall(false)
		time.Sleep(3 * time.Second) // a tenth of the ttl
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
	})
}

// Redisson leaked 25 million fence counters. Here 50,000 keys of 4 slots (22,000 with the race detector)
// leave 16 counters per slot, and no other key.
func TestFenceCountersAreBounded(t *testing.T) {
	t.Parallel()
	servers, nodes := lockkit.StartNodes(t, 1)
	// Nobody may time out here, however busy the machine is.
	c := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patience}, nodes...)
	tags := []string{"{a}", "{b}", "{c}", "{d}"}
	lockSome := func(from, to int) {
		t.Helper()
		var next atomic.Int64
		next.Store(int64(from))
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
					l, err := c.TryLock(t.Context(), fmt.Sprint(tags[i%len(tags)], i), time.Minute)
					if err != nil {
						t.Error(err)
						return
					}
					if err := l.Release(t.Context()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	memory := func() int64 {
		for line := range strings.Lines(servers[0].Do(t, "INFO", "memory").(string)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory_dataset:"); ok {
				n, _ := strconv.ParseInt(v, 10, 64)
				return n
			}
		}
		t.Fatal("no used_memory_dataset")
		return 0
	}
	lockSome(0, 2000)
	before := memory()
	lockSome(2000, testkit.Sized(50_000, 22_000))
	perSlot := map[string]int{}
	for _, key := range servers[0].Keys(t) {
		slot, _, ok := strings.Cut(key, "}")
		if !strings.HasPrefix(key, "flightlock:") || !ok {
			t.Errorf("left: %q", key)
			continue
		}
		// the node's marker, and its clients' announcements
		if slot != "flightlock:{boot" && slot != "flightlock:{sets" {
			perSlot[slot]++
		}
	}
	for slot, n := range perSlot {
		if n > 16 {
			t.Errorf("%d counters of slot %s", n, slot)
		}
	}
	if len(perSlot) != len(tags) {
		t.Errorf("counters of %d slots: %v", len(perSlot), perSlot)
	}
	if grown := memory() - before; grown > 1<<20 { // 48,000 counters are over 4 MiB, 20,000 over 1.7
		t.Errorf("the dataset grew by %d bytes", grown)
	}
}

// A second Release, and Refresh, AutoRefresh and Context after Release: the lock is over, nothing
// is sent, and nobody else is affected.
func TestAfterRelease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		l := lockkit.Lock(t, a, "k", time.Minute)
		lockkit.Release(t, l)
		synctest.Wait()
		next := lockkit.Lock(t, b, "k", time.Minute)
		synctest.Wait()
		before := a.Stats().Commands
		for name, err := range map[string]error{
			"Release": l.Release(t.Context()), "Refresh": l.Refresh(t.Context()),
			"AutoRefresh": l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}), "Err": l.Err(),
		} {
			if !errors.Is(err, flightlock.ErrNotHeld) {
				t.Errorf("%s: %v", name, err)
			}
		}
		time.Sleep(time.Second)
		if n := a.Stats().Commands - before; n != 0 {
			t.Errorf("%d commands for a lock that was released", n)
		}
		if keys := lockKeys(nodes); len(keys) != 3 || next.Err() != nil {
			t.Errorf("the next holder has %v, %v", keys, next.Err())
		}
		lockkit.Release(t, next)
	})
}
