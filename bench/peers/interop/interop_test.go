package interop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A rival is another client of the same nodes.
type rival interface {
	// tryLock makes one attempt, and returns the way to release.
	tryLock(ctx context.Context, key string, ttl time.Duration) (release func() bool, ok bool)
}

// redsyncRival is redsync over its adapter for go-redis.
type redsyncRival struct{ *redsync.Redsync }

func newRedsync(nodes []redis.UniversalClient) rival {
	var pools []redsyncredis.Pool
	for _, n := range nodes {
		pools = append(pools, goredis.NewPool(n))
	}
	return redsyncRival{redsync.New(pools...)}
}

func (r redsyncRival) tryLock(ctx context.Context, key string, ttl time.Duration) (func() bool, bool) {
	m := r.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(1))
	if err := m.TryLockContext(ctx); err != nil {
		return nil, false
	}
	return func() bool {
		ok, err := m.UnlockContext(ctx)
		return ok && err == nil
	}, true
}

// redislockRival is redislock, which knows one server.
type redislockRival struct{ *redislock.Client }

func (r redislockRival) tryLock(ctx context.Context, key string, ttl time.Duration) (func() bool, bool) {
	l, err := r.Obtain(ctx, key, ttl, nil)
	if err != nil {
		return nil, false
	}
	return func() bool { return l.Release(ctx) == nil }, true
}

// plainRival is what the Redlock page says: SET NX PX everywhere, and a script that compares
// and deletes.
type plainRival struct{ nodes []redis.UniversalClient }

var compareAndDelete = redis.NewScript(`
if redis.call("get",KEYS[1]) == ARGV[1] then
	return redis.call("del",KEYS[1])
else
	return 0
end`)

var owners atomic.Int64

func (r plainRival) tryLock(ctx context.Context, key string, ttl time.Duration) (func() bool, bool) {
	owner := fmt.Sprint("plain-", owners.Add(1))
	release := func() bool {
		gone := 0
		for _, n := range r.nodes {
			if k, err := compareAndDelete.Run(ctx, n, []string{key}, owner).Int(); err == nil {
				gone += k
			}
		}
		return gone > len(r.nodes)/2
	}
	votes := 0
	for _, n := range r.nodes {
		if n.SetArgs(ctx, key, owner, redis.SetArgs{Mode: "NX", TTL: ttl}).Val() == "OK" {
			votes++
		}
	}
	if votes <= len(r.nodes)/2 {
		release()
		return nil, false
	}
	return release, true
}

// eachRival runs test against each rival on 1 and 3 real servers.
func eachRival(t *testing.T,
	test func(t *testing.T, c *flightlock.Client, r rival, nodes []redis.UniversalClient)) {
	for _, n := range []int{1, 3} {
		for name, make := range map[string]func([]redis.UniversalClient) rival{
			"redsync":   newRedsync,
			"redislock": func(nodes []redis.UniversalClient) rival { return redislockRival{redislock.New(nodes[0])} },
			"plain":     func(nodes []redis.UniversalClient) rival { return plainRival{nodes} },
		} {
			if name == "redislock" && n > 1 {
				continue
			}
			t.Run(fmt.Sprintf("rival=%s/nodes=%d", name, n), func(t *testing.T) {
				var nodes []redis.UniversalClient
				for range n {
					nodes = append(nodes, redistest.StartServer(t).Client(t))
				}
				c, err := flightlock.New(flightlock.Options{
					NoPrefix: true, NodeTimeout: 10 * time.Second,
				}, nodes...)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close(context.Background())
				test(t, c, make(nodes), nodes)
			})
		}
	}
}

// While one has the key the other does not get it, and after a release it does.
func TestWeExcludeEachOther(t *testing.T) {
	eachRival(t, func(t *testing.T, c *flightlock.Client, r rival, nodes []redis.UniversalClient) {
		for range 3 {
			l, err := c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := r.tryLock(t.Context(), "k", time.Minute); ok {
				t.Error("the rival got the key that we hold")
			}
			if err := l.Refresh(t.Context()); err != nil {
				t.Errorf("Refresh after the rival's attempt: %v", err)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release: %v", err)
			}
			wantGone(t, nodes)

			release, ok := r.tryLock(t.Context(), "k", time.Minute)
			if !ok {
				t.Fatal("the rival does not get the key that we released")
			}
			_, err = c.TryLock(t.Context(), "k", time.Minute)
			var qe *flightlock.QuorumError
			if !errors.Is(err, flightlock.ErrNotAcquired) || !errors.As(err, &qe) {
				t.Fatalf("TryLock of the rival's key: %v", err)
			}
			for _, n := range qe.Nodes {
				if n.Err == nil && (n.Holder == "" || n.HolderTTL <= 0 || n.HolderTTL > time.Minute) {
					t.Errorf("node %s: holder %q for %v", n.Node, n.Holder, n.HolderTTL)
				}
			}
			if !release() {
				t.Error("the rival's key was not its own any more")
			}
		}
		wantGone(t, nodes)
	})
}

// wantGone waits until no node has the key: a release is over when a majority has deleted it.
func wantGone(t *testing.T, nodes []redis.UniversalClient) {
	t.Helper()
	redistest.Eventually(t, 10*time.Second, "no key is left", func() bool {
		return !slices.ContainsFunc(nodes, func(n redis.UniversalClient) bool {
			return n.Exists(t.Context(), "k").Val() != 0
		})
	})
}

// A rival that dies has its key until the ttl ends, and we wait for that, and the other way round.
func TestTheDeadAreWaitedFor(t *testing.T) {
	eachRival(t, func(t *testing.T, c *flightlock.Client, r rival, _ []redis.UniversalClient) {
		began := time.Now()
		if _, ok := r.tryLock(t.Context(), "k", 300*time.Millisecond); !ok {
			t.Fatal("the rival does not get a free key")
		}
		l, err := c.SingleFlightLock(t.Context(), "k", time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(began); waited < 300*time.Millisecond {
			t.Errorf("we got the key after %v", waited)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Under contention of many goroutines of either kind, never two have the key.
func TestNeverTwoHolders(t *testing.T) {
	eachRival(t, func(t *testing.T, c *flightlock.Client, r rival, _ []redis.UniversalClient) {
		const rounds = 25
		var holders, ours, theirs atomic.Int64
		critical := func(count *atomic.Int64) {
			if n := holders.Add(1); n != 1 {
				t.Errorf("%d holders", n)
			}
			time.Sleep(time.Millisecond)
			count.Add(1)
			holders.Add(-1)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range rounds {
					l, err := c.SingleFlightLock(ctx, "k", 20*time.Second, nil)
					if err != nil {
						t.Error(err)
						return
					}
					critical(&ours)
					if err := l.Release(ctx); err != nil {
						t.Error(err)
					}
				}
			})
			wg.Go(func() {
				for done := 0; done < rounds && ctx.Err() == nil; {
					release, ok := r.tryLock(ctx, "k", 20*time.Second)
					if !ok {
						time.Sleep(2 * time.Millisecond)
						continue
					}
					critical(&theirs)
					release()
					done++
				}
			})
		}
		wg.Wait()
		if ours.Load() != 4*rounds || theirs.Load() != 4*rounds {
			t.Errorf("we had the key %d times, the rivals %d, want %d each", ours.Load(), theirs.Load(), 4*rounds)
		}
	})
}

// A process whose callers queue keeps the key from the old clients, which it cannot see waiting. Without
// handoff each release deletes it, so that a client that polls gets the key although the queue never ends.
func TestOldClientsGetABusyKeyWithoutHandoff(t *testing.T) {
	node := redistest.StartServer(t).Client(t)
	c, err := flightlock.New(flightlock.Options{
		NoPrefix: true, NodeTimeout: 10 * time.Second,
		HandoffSlice: -1,
	}, node)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	busy, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	var ours atomic.Int64
	for range 4 {
		wg.Go(func() {
			for busy.Err() == nil {
				l, err := c.SingleFlightLock(busy, "k", 20*time.Second, nil)
				if err != nil {
					if busy.Err() == nil {
						t.Error(err)
					}
					return
				}
				ours.Add(1)
				time.Sleep(time.Millisecond) // the work, in which the others come to queue
				if err := l.Release(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	r := newRedsync([]redis.UniversalClient{node})
	for got := range 3 {
		had := ours.Load()
		redistest.Eventually(t, 20*time.Second, "the callers have the key and queue for it", func() bool {
			return ours.Load() > had+8
		})
		redistest.Eventually(t, 20*time.Second, fmt.Sprintf("redsync gets the key, after %d times", got),
			func() bool {
				release, ok := r.tryLock(ctx, "k", 20*time.Second)
				return ok && release()
			})
	}
}

// A redislock client takes over a key whose value begins with its token. Our owners begin with their label.
func TestATokenOfRedislock(t *testing.T) {
	node := redistest.StartServer(t).Client(t)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		label string
		want  error // of redislock
	}{
		"the label is the host's name": {"", nil},
		"a label of its own":           {"flightlock@" + host, redislock.ErrNotObtained},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := flightlock.New(flightlock.Options{
				NoPrefix: true, NodeTimeout: 10 * time.Second,
				Label: tc.label,
			}, node)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close(context.Background())
			l, err := c.SingleFlightLock(t.Context(), name, time.Minute, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release(t.Context())
			opts := &redislock.Options{Token: host}
			if _, err := redislock.New(node).Obtain(t.Context(), name, time.Minute, opts); !errors.Is(err, tc.want) {
				t.Errorf("redislock: %v, want %v", err, tc.want)
			}
			if err := l.Refresh(t.Context()); (err != nil) != (tc.want == nil) {
				t.Errorf("Refresh: %v", err)
			}
		})
	}
}

// redislock's TTL is 0 when a lock is gone. Our Until does not move: docs/migration.md has Err for that.
func TestALockThatIsGone(t *testing.T) {
	node := redistest.StartServer(t).Client(t)
	c, err := flightlock.New(flightlock.Options{
		NoPrefix: true, NodeTimeout: 10 * time.Second,
	}, node)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	theirs, err := redislock.New(node).Obtain(t.Context(), "theirs", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := c.TryLock(t.Context(), "ours", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	until := ours.Until()
	node.Del(t.Context(), "theirs", "ours")
	if ttl, err := theirs.TTL(t.Context()); err != nil || ttl != 0 {
		t.Errorf("redislock: a ttl of %v, %v", ttl, err)
	}
	if err := ours.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
		t.Errorf("Refresh: %v", err)
	}
	if !errors.Is(ours.Err(), flightlock.ErrLockLost) || !ours.Until().Equal(until) {
		t.Errorf("Err is %v, and Until has moved by %v", ours.Err(), ours.Until().Sub(until))
	}
}
