package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/node"
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

// Owners are never used twice, and begin with the label, of up to 256 bytes, whatever it contains. So two
// processes whose labels collide do not share a lock, nor do two of which one label is a prefix of the other.
func TestOwnersAreUnique(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		labels := []string{"worker-1", "worker-1", "worker-10", "w", strings.Repeat("a#b-", 64)}
		var cs []*flightlock.Client
		for _, label := range labels {
			cs = append(cs, lockkit.New(t, flightlock.Options{Label: label}, clients...))
		}
		seen := map[string]bool{}
		for n := range 3 * len(cs) {
			i := n % len(cs)
			l := lockkit.Lock(t, cs[i], "k", time.Second)
			if seen[l.Owner()] || !strings.HasPrefix(l.Owner(), labels[i]+"#") {
				t.Errorf("owner %q of label %q, used before: %v", l.Owner(), labels[i], seen[l.Owner()])
			}
			seen[l.Owner()] = true
			for j, other := range cs {
				if _, err := other.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Errorf("%q while %q holds: %v", labels[j], labels[i], err)
				}
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
		if !errors.Is(err, flightlock.ErrNotAcquired) || errors.Is(err, flightlock.ErrUnavailable) ||
			!errors.As(err, &qe) {
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
// ttl for each node, and not "ok". Nothing changes the key.
func TestAHolderWithAnEmptyValueIsTold(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		lost := lockkit.Lock(t, c, "lost", 5*time.Second)
		synctest.Wait()
		for _, node := range nodes {
			testkit.Must(t, errors.Join(node.Mini.Set("lock:k", ""), node.Mini.Set("lock:lost", "")))
			node.Mini.SetTTL("lock:k", 3*time.Second)
		}
		_, err := c.TryLock(t.Context(), "k", time.Second)
		const empty = "the key has an empty value"
		if !errors.Is(err, flightlock.ErrNotAcquired) || strings.Count(err.Error(), empty+", for 3s") < 2 {
			t.Errorf("TryLock: %v", err)
		}
		err = lost.Refresh(t.Context())
		if !errors.Is(err, flightlock.ErrNotHeld) || strings.Count(err.Error(), empty) < 2 {
			t.Errorf("Refresh: %v", err)
		}
		synctest.Wait()
		for _, node := range nodes {
			for _, key := range []string{"lock:k", "lock:lost"} {
				if v, err := node.Mini.Get(key); v != "" || err != nil {
					t.Errorf("%s is %q, %v on %s", key, v, err, node.Addr())
				}
			}
		}
	})
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

// The caller's ctx ends while the attempt is in flight: it has the error of its ctx alone, what the nodes may
// have granted is released, and other callers of the process are not affected.
func TestContextEndsInMidAttempt(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		testkit.Delay(20*time.Millisecond, nodes...)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		_, err := c.SingleFlightLock(ctx, "k", 10*time.Second, nil)
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, flightlock.ErrNotAcquired) {
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
		ofDo := make(chan error, 1)
		go func() {
			ofDo <- c.Do(t.Context(), "done", time.Minute, nil, func(ctx context.Context, _ *flightlock.Lock) error {
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}()
		for _, key := range []string{"quick", "slow"} {
			wg.Go(func() {
				if _, err := c.SingleFlightLock(t.Context(), key, time.Second, nil); !errors.Is(err,
					flightlock.ErrClosed) {
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
		if _, err := c.SingleFlightLock(t.Context(), "new", time.Second, nil); !errors.Is(err,
			flightlock.ErrClosed) {
			t.Errorf("new work: %v", err)
		}
		if err := quick.Err(); err != nil {
			t.Errorf("a holder was ended early: %v", err)
		}
		lockkit.Release(t, quick)
		testkit.Must(t, <-closed)
		if ctx.Err() == nil {
			t.Error("Close did not wait for the holders")
		}
		if cause := context.Cause(slowCtx); !errors.Is(cause, flightlock.ErrClosed) {
			t.Errorf("cause %v", cause)
		}
		if err := <-ofDo; !errors.Is(err, flightlock.ErrClosed) || !errors.Is(err, flightlock.ErrLockLost) {
			t.Errorf("Do: %v", err)
		}
		for _, l := range []*flightlock.Lock{slow, alone} {
			if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) ||
				!errors.Is(err, flightlock.ErrClosed) {
				t.Errorf("Release after Close: %v", err)
			}
		}
		for _, n := range nodes {
			for _, key := range []string{"quick", "slow", "alone", "done"} {
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

// A node has NodeTimeout from when a release was written: what waits for the releases before it is not
// unavailable, however many there are and however far the node is (S5).
func TestManyReleasesOnADistantNode(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...)
		var locks []*flightlock.Lock
		for i := range 600 {
			locks = append(locks, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute))
		}
		nodes[0].SetDelay(20 * time.Millisecond) // each way
		var failed atomic.Int32
		var all sync.WaitGroup
		for _, l := range locks {
			all.Go(func() {
				if l.Release(t.Context()) != nil {
					failed.Add(1)
				}
			})
		}
		if all.Wait(); failed.Load() > 0 {
			t.Errorf("%d of %d releases failed", failed.Load(), len(locks))
		}
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
				if slices.ContainsFunc(nodes[0].Mini.Keys(),
					func(k string) bool { return strings.Contains(k, "-ready-") }) {
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
		testkit.Must(t, c.Ready(t.Context()))
		if !<-stalled {
			t.Error("the release was not late")
		}
	})
}

// closeTime is the longest time that Close may take, by its documentation, with the default
// NodeTimeout.
const closeTime = 4 * time.Second

// dialer is that of go-redis' options.
type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

var errNoWay = errors.New("no way")

// hangs are ways in which servers do not answer. ended is closed with the test.
var hangs = map[string]func(t *testing.T, ended <-chan struct{}) dialer{
	"they accept connections and are silent": func(t *testing.T, _ <-chan struct{}) dialer {
		mute := redistest.StartMemNode(t, "10.0.0.1:6379")
		mute.Stall(true)
		return mute.Dial
	},
	"their network drops what is sent": func(*testing.T, <-chan struct{}) dialer {
		return func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	},
	"the dialer does not look at its ctx, as for TLS": func(*testing.T, <-chan struct{}) dialer {
		return func(context.Context, string, string) (net.Conn, error) {
			time.Sleep(5 * time.Second)
			return nil, errNoWay
		}
	},
	"the dialer hangs": func(_ *testing.T, ended <-chan struct{}) dialer {
		return func(context.Context, string, string) (net.Conn, error) {
			<-ended
			return nil, errNoWay
		}
	},
}

// deployments are ways to reach nodes at these addresses through that dialer. There are many connections
// because of what MemNode.Options says.
var deployments = map[string]func(d dialer, addrs []string) []redis.UniversalClient{
	"servers": func(d dialer, addrs []string) (nodes []redis.UniversalClient) {
		for _, addr := range addrs {
			nodes = append(nodes, redis.NewClient(&redis.Options{Addr: addr, Dialer: d, PoolSize: 1000}))
		}
		return nodes
	},
	"a Cluster": func(d dialer, addrs []string) []redis.UniversalClient {
		return []redis.UniversalClient{redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, Dialer: d,
			PoolSize: 1000})}
	},
}

// inEveryHang runs test in virtual time, for each way to hang and each deployment.
func inEveryHang(t *testing.T, test func(t *testing.T, nodes []redis.UniversalClient)) {
	for how, hang := range hangs {
		for what, deploy := range deployments {
			for _, addrs := range [][]string{{"10.0.0.1:6379"}, {"10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"}} {
				t.Run(fmt.Sprintf("%d %s, %s", len(addrs), what, how), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						ended := make(chan struct{})
						nodes := deploy(hang(t, ended), addrs)
						t.Cleanup(func() {
							close(ended)
							for _, n := range nodes {
								_ = n.Close()
							}
							time.Sleep(2 * time.Minute) // what hangs in dials ends, while the bubble's clock still goes
						})
						test(t, nodes)
					})
				})
			}
		}
	}
}

// waitInVain has callers wait for keys until they give up; no node answers. One that gives up at once does
// not know that.
func waitInVain(t *testing.T, c *flightlock.Client, d time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	for _, key := range []string{"a", "b", "c", "d"} {
		go func() { _, _ = c.SingleFlightLock(ctx, key, time.Second, nil) }()
	}
	want := flightlock.ErrUnavailable
	if d < 50*time.Millisecond { // NodeTimeout
		want = context.DeadlineExceeded
	}
	if _, err := c.SingleFlightLock(ctx, "k", time.Second, nil); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
}

// Close takes no longer than promised, however servers hang, at any moment. Nor does it outlast its ctx,
// except for the moment in which the releases just sent may be answered.
func TestCloseOfClientsWhoseServersHang(t *testing.T) {
	for _, tc := range []struct{ after, patience time.Duration }{
		{10 * time.Millisecond, time.Hour}, {1900 * time.Millisecond, time.Hour}, {7 * time.Second, time.Hour},
		{100 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(fmt.Sprint("after ", tc.after), func(t *testing.T) {
			inEveryHang(t, func(t *testing.T, nodes []redis.UniversalClient) {
				c, err := flightlock.New(flightlock.Options{}, nodes...)
				testkit.Must(t, err)
				waitInVain(t, c, tc.after)
				ctx, cancel := context.WithTimeout(t.Context(), tc.patience)
				defer cancel()
				began := time.Now()
				if err := c.Close(ctx); err != nil && tc.patience > closeTime {
					t.Error(err)
				}
				if d := time.Since(began); d > min(closeTime, tc.patience+3*50*time.Millisecond) {
					t.Errorf("Close took %v", d)
				}
			})
		})
	}
}

// A dial for notices that hangs forever does not delay other nodes' notices, later ones of its own
// node, or Close. Until there are notices the waiter polls.
func TestADialForNoticesThatHangs(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint("nodes=", n), func(t *testing.T) {
			testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var hang atomic.Bool
				ended := make(chan struct{})
				own := slices.Clone(clients)
				own[0] = nodes[0].Client(t, func(o *redis.Options) {
					o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						if hang.Load() {
							<-ended
							return nil, errNoWay
						}
						return nodes[0].Dial(ctx, network, addr)
					}
				})
				defer time.Sleep(time.Second) // in which what hung ends
				defer close(ended)
				rival := lockkit.New(t, flightlock.Options{}, clients...)
				c, err := flightlock.New(flightlock.Options{}, own...)
				testkit.Must(t, err)
				lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
				hang.Store(true)
				l := lockkit.Lock(t, rival, "k", time.Minute)
				got := make(chan *flightlock.Lock)
				go func() { got <- lockkit.Lock(t, c, "k", time.Minute) }()
				time.Sleep(time.Second)
				if n > 1 && len(nodes[n-1].Mini.PubSubChannels(node.Inbox+"*")) == 0 {
					t.Error("no notices of the other nodes")
				}
				hang.Store(false)
				time.Sleep(closeTime)
				if len(nodes[0].Mini.PubSubChannels(node.Inbox+"*")) == 0 {
					t.Error("no notices of the node, although it can be dialled again")
				}
				lockkit.Release(t, l)
				lockkit.Release(t, <-got)
				began := time.Now()
				testkit.Must(t, c.Close(context.Background()))
				if d := time.Since(began); d > closeTime {
					t.Errorf("Close took %v", d)
				}
			})
		})
	}
}

// A release that is in progress when Close gives up is answered, or fails, within NodeTimeout as at
// any time.
func TestAReleaseDuringCloseTakesNodeTimeout(t *testing.T) {
	const nodeTimeout = 200 * time.Millisecond
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c, err := flightlock.New(flightlock.Options{NodeTimeout: nodeTimeout}, clients...)
		testkit.Must(t, err)
		l := lockkit.Lock(t, c, "k", time.Minute)
		testkit.Stall(true, nodes...)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		closed := make(chan struct{})
		go func() {
			_ = c.Close(ctx)
			close(closed)
		}()
		time.Sleep(90 * time.Millisecond)
		began := time.Now()
		if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("Release: %v", err)
		}
		if d := time.Since(began); d > nodeTimeout+10*time.Millisecond {
			t.Errorf("Release took %v", d)
		}
		<-closed
		time.Sleep(closeTime)
	})
}

// The clients that Open created are closed within ctx, too, however Sentinels or servers hang.
func TestCloseKeepsToItsContextWhenSentinelsHang(t *testing.T) {
	holes := []string{redistest.BlackHole(t), redistest.BlackHole(t)}
	for what, u := range map[string]string{
		"Sentinels": fmt.Sprintf("redis://%s?master_name=m&addr=%s", holes[0], holes[1]),
		"a Cluster": fmt.Sprintf("redis://%s?addr=%s", holes[0], holes[1]),
		"a server":  "redis://" + holes[0],
		"TLS":       "rediss://" + holes[0],
	} {
		t.Run(what, func(t *testing.T) {
			c, err := flightlock.Open(flightlock.Options{}, u)
			testkit.Must(t, err)
			for _, key := range []string{"a", "b"} {
				go func() { _, _ = c.SingleFlightLock(t.Context(), key, time.Second, nil) }()
			}
			redistest.Eventually(t, time.Minute, "no node answers", func() bool {
				_, err := c.TryLock(t.Context(), "k", time.Second)
				return errors.Is(err, flightlock.ErrUnavailable)
			})
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			closed := make(chan error, 1)
			go func() { closed <- c.Close(ctx) }()
			select { // how soon is tested above, in virtual time
			case <-closed:
			case <-time.After(time.Minute):
				t.Error("Close has not returned, and was called for 100ms")
			}
		})
	}
}

// What Close has not waited for to its end is named: a Logger, or what Observer.Opened has returned.
func TestCloseNamesUserCodeThatHangs(t *testing.T) {
	hang := func() { time.Sleep(5 * time.Second) }
	for name, opts := range map[string]flightlock.Options{
		"Logger":   {Logger: testkit.SlowLog(hang)},
		"Observer": {Observers: []*flightlock.Observer{{Opened: func(*flightlock.Client) func() { return hang }}}},
	} {
		testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			c, err := flightlock.New(opts, clients...)
			testkit.Must(t, err)
			nodes[0].Down(true)
			for c.Stats().Suspended == 0 { // which is logged
				_, _ = c.TryLock(t.Context(), "k", time.Second)
				time.Sleep(time.Millisecond) // the bubble's time
			}
			synctest.Wait()
			began := time.Now()
			if err := c.Close(canceled()); !errors.Is(err, context.Canceled) &&
				!errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), name) {
				t.Error(err)
			}
			if d := time.Since(began); d > closeTime {
				t.Errorf("Close took %v", d)
			}
			time.Sleep(time.Minute) // until it has returned
		})
	}
}

// Close returns when every goroutine of the Client has ended: also one that asks the Retry of a
// RefreshPolicy.
func TestCloseWaitsForARefreshStrategy(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", 3*time.Second)
		asked, answered := make(chan struct{}), make(chan struct{})
		testkit.Must(t,
			l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Retry: strategy(func(int) (time.Duration, bool) {
				close(asked)
				time.Sleep(time.Second)
				close(answered)
				return 0, false
			})}))
		nodes[0].Down(true)
		<-asked
		_ = l.Release(t.Context())
		lockkit.Close(t, c)
		select {
		case <-answered:
		default:
			t.Error("Close has returned, and the strategy runs")
			<-answered
		}
	})
}
