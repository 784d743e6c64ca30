package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
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

type outage struct {
	nodes []*redistest.MemNode
	hangs *atomic.Bool // the dials do
}

// cut ends all connections.
func (o outage) cut() {
	for _, n := range o.nodes {
		n.Cut()
	}
}

// A release of nodes that do not answer blocks its caller for NodeTimeout, and a moment by which deadlines are put off,
// whatever is the matter with them, and with how many others at once.
func TestReleaseInEveryOutage(t *testing.T) {
	const nodeTimeout = 50 * time.Millisecond
	for name, begin := range map[string]func(o outage){
		"down":   func(o outage) { testkit.Down(true, o.nodes...) },
		"silent": func(o outage) { testkit.Stall(true, o.nodes...) },
		"slow":   func(o outage) { testkit.Delay(nodeTimeout*8/10, o.nodes...) },
		"reset, and dials hang": func(o outage) {
			o.hangs.Store(true)
			o.cut()
		},
		"reset later, and dials hang": func(o outage) {
			testkit.Stall(true, o.nodes...)
			time.AfterFunc(nodeTimeout/2, func() {
				o.hangs.Store(true)
				o.cut()
			})
		},
		"reset, and nobody answers": func(o outage) {
			testkit.Stall(true, o.nodes...)
			o.cut()
		},
	} {
		for _, locks := range []int{1, 300} {
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%s, %d locks, %d nodes", name, locks, n), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						o := outage{nodes: redistest.StartMemNodes(t, n), hangs: new(atomic.Bool)}
						var clients []redis.UniversalClient
						for _, node := range o.nodes {
							clients = append(clients, node.Client(t, hanging(o.hangs)))
						}
						c := lockkit.New(t, flightlock.Options{NodeTimeout: nodeTimeout}, clients...)
						var held []*flightlock.Lock
						for i := range locks {
							held = append(held, lockkit.Lock(t, c, fmt.Sprint("k", i), time.Minute))
						}
						time.Sleep(time.Second)
						begin(o)
						synctest.Wait()
						var all sync.WaitGroup
						began := time.Now()
						for _, l := range held {
							all.Go(func() {
								err := l.Release(t.Context())
								if err != nil && !errors.Is(err, flightlock.ErrUnavailable) {
									t.Error(err)
								}
							})
						}
						all.Wait()
						if took := time.Since(began); took > 2*nodeTimeout {
							t.Errorf("took %v", took)
						}
						o.hangs.Store(false)
						testkit.Stall(false, o.nodes...)
						testkit.Down(false, o.nodes...)
						testkit.Delay(0, o.nodes...)
						time.Sleep(10 * time.Second)
						if s := c.Stats(); s.Debts != 0 {
							t.Errorf("%d debts", s.Debts)
						}
						for _, n := range o.nodes {
							for i := range locks {
								if n.Mini.Exists(fmt.Sprint("lock:k", i)) {
									t.Fatalf("the key %d is left", i)
								}
							}
						}
					})
				})
			}
		}
	}
}

// Close does not wait for a link that is not there to repeat a release that was lost with its connection, whether it
// was lost before or meanwhile, and whatever Close's ctx says.
func TestCloseWhileAReleaseIsLost(t *testing.T) {
	const nodeTimeout = 50 * time.Millisecond
	for name, before := range map[string]bool{"lost before": true, "lost meanwhile": false} {
		for ctxName, ended := range map[string]bool{"": false, ", ctx has ended": true} {
			t.Run(name+ctxName, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := redistest.StartMemNodes(t, 1)[0]
					var hangs atomic.Bool
					c := lockkit.New(t, flightlock.Options{NodeTimeout: nodeTimeout}, n.Client(t, hanging(&hangs)))
					l := lockkit.Lock(t, c, "k", time.Minute)
					time.Sleep(time.Second)
					n.Stall(true)
					released := make(chan error, 1)
					go func() { released <- l.Release(t.Context()) }()
					synctest.Wait()
					hangs.Store(true)
					var lost sync.WaitGroup
					cut := func() {
						n.Cut()
						n.Stall(false)
					}
					if before {
						cut()
						synctest.Wait()
					} else {
						lost.Go(func() {
							time.Sleep(nodeTimeout / 4)
							cut()
						})
					}
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if ended {
						cancel()
					}
					began := time.Now()
					if err := c.Close(ctx); err != nil {
						t.Error(err)
					}
					if took := time.Since(began); took > nodeTimeout/2 {
						t.Errorf("Close took %v", took)
					}
					if err := <-released; !errors.Is(err, flightlock.ErrUnavailable) {
						t.Errorf("Release: %v", err)
					}
					lost.Wait()
				})
			})
		}
	}
}

// hanging is a client whose dials hang while that is set.
func hanging(hangs *atomic.Bool) func(*redis.Options) {
	return func(ro *redis.Options) {
		dial := ro.Dialer
		ro.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if hangs.Load() {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return dial(ctx, network, addr)
		}
	}
}
