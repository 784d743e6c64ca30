package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
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

// deployments are ways to reach nodes at these addresses through that dialer. There are many connections because of
// what MemNode.Options says.
var deployments = map[string]func(d dialer, addrs []string) []redis.UniversalClient{
	"servers": func(d dialer, addrs []string) (nodes []redis.UniversalClient) {
		for _, addr := range addrs {
			nodes = append(nodes, redis.NewClient(&redis.Options{Addr: addr, Dialer: d, PoolSize: 1000}))
		}
		return nodes
	},
	"a Cluster": func(d dialer, addrs []string) []redis.UniversalClient {
		return []redis.UniversalClient{redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, Dialer: d, PoolSize: 1000})}
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

// waitInVain has callers wait for keys until they give up; no node answers. One that gives up at once does not know
// that.
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

// Close takes no longer than promised, however servers hang, at any moment. Nor does it outlast its ctx, except for the
// moment in which the releases just sent may be answered.
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
			if err := c.Close(canceled()); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(err.Error(), name) {
				t.Error(err)
			}
			if d := time.Since(began); d > closeTime {
				t.Errorf("Close took %v", d)
			}
			time.Sleep(time.Minute) // until it has returned
		})
	}
}

// Close returns when every goroutine of the Client has ended: also one that asks the Retry of a RefreshPolicy.
func TestCloseWaitsForARefreshStrategy(t *testing.T) {
	inBubble(t, 1, func(t *testing.T, c *flightlock.Client, nodes []*redistest.MemNode) {
		l := lockkit.Lock(t, c, "k", 3*time.Second)
		asked, answered := make(chan struct{}), make(chan struct{})
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Retry: strategy(func(int) (time.Duration, bool) {
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
