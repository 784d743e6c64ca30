package node

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// What go-redis' dialer of a Sentinel-managed master says.
var errNoSentinel = errors.New("all sentinels specified in configuration are unreachable")

// Requests go to the master that the Sentinels name, though the one of before continues. Sentinels that
// do not answer change nothing.
func TestTheLinkFollowsTheMasterThatSentinelsName(t *testing.T) {
	for _, dialsAll := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
			var master atomic.Pointer[redistest.MemNode]
			var dials atomic.Int64
			var away atomic.Bool
			master.Store(a)
			c := redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
				dial := o.Dialer
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					if away.Load() {
						return nil, errNoSentinel
					}
					if dialsAll {
						network = "tcp"
					}
					if network != "unix" {
						dials.Add(1)
					}
					return dial(ctx, network, addr)
				}
			})
			n := startNode(t, c, 100*time.Millisecond)
			locks := func(key string, at, elsewhere *redistest.MemNode) {
				t.Helper()
				newAttempt(t, n, key).acquire().want(t, Granted)
				if !at.Mini.Exists(key) || elsewhere.Mini.Exists(key) {
					t.Errorf("%s was granted by the other master", key)
				}
			}
			locks("k1", a, b)
			time.Sleep(followEvery + time.Second/10)
			locks("k2", a, b) // a link that had dialled before the first answer does so again
			before := dials.Load()
			time.Sleep(2 * followEvery)
			locks("k3", a, b)
			if more := dials.Load() - before; more > 0 && !dialsAll {
				t.Errorf("%d connections although the master is the same", more)
			}
			away.Store(true)
			time.Sleep(2 * followEvery)
			locks("k4", a, b)
			away.Store(false)
			master.Store(b)
			time.Sleep(2 * followEvery)
			locks("k5", b, a)
		})
	}
}

// lockOnce locks and releases.
func lockOnce(t *testing.T, n *Node) {
	t.Helper()
	at := newAttempt(t, n, "k")
	at.acquire().want(t, Granted)
	at.release().want(t, Deleted)
}

// wantOnNew checks that the first lock after the Sentinels were asked again is granted by b, and not by a.
func wantOnNew(t *testing.T, n *Node, a, b *redistest.MemNode) {
	t.Helper()
	time.Sleep(2 * followEvery) // the bubble's time
	newAttempt(t, n, "k").acquire().want(t, Granted)
	if a.Mini.Exists("k") || !b.Mini.Exists("k") {
		t.Error("it was granted by the old master, 2 seconds after the Sentinels have named another")
	}
}

// A node that is used now and then follows before it is used again, and not after the next lock.
func TestTheLinkFollowsBetweenLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := startNode(t, redistest.SentinelClient(t, master.Load), 100*time.Millisecond)
		for range 3 {
			lockOnce(t, n)
			time.Sleep(time.Hour) // the bubble's time
		}
		master.Store(b)
		wantOnNew(t, n, a, b)
	})
}

// The first answer may be the successor already: of a failover since the link has dialled, or while no
// Sentinel answered.
func TestTheLinkFollowsTheFirstMasterThatSentinelsName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		c := redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if network == "unix" && master.Load() == a {
					return nil, errNoSentinel
				}
				return dial(ctx, network, addr)
			}
		})
		n := startNode(t, c, 100*time.Millisecond)
		lockOnce(t, n)
		master.Store(b)
		wantOnNew(t, n, a, b)
	})
}

// A dial that is under way when the Sentinels name another master may lead to the one of before. Its
// connection is not used, nor is that of a dial that was given up.
func TestTheLinkFollowsThoughADialLeadsToTheOldMaster(t *testing.T) {
	// the second one is given up
	for _, long := range []time.Duration{1400 * time.Millisecond, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
			var slow atomic.Bool
			var master atomic.Pointer[redistest.MemNode]
			master.Store(a)
			n := startOneOf(t, redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
				dial := o.Dialer
				o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := dial(ctx, network, addr)
					if network != "unix" && slow.Swap(false) {
						time.Sleep(long) // the bubble's time
					}
					return c, err
				}
			}), time.Second, false)
			lockOnce(t, n)
			time.Sleep(2 * followEvery) // the first answer has come
			lockOnce(t, n)
			slow.Store(true)
			a.Cut()
			newAttempt(t, n, "first").acquire() // or nobody needs a connection
			settle()
			if slow.Load() {
				t.Fatal("nothing was dialled")
			}
			master.Store(b)
			for began := time.Now(); time.Since(began) < 2*long; time.Sleep(50 * time.Millisecond) {
				k := newAttempt(t, n, "k")
				if rep := <-k.acquire().heard; rep.Kind == Granted && a.Mini.Exists("k") &&
					time.Since(began) > 2*followEvery {
					t.Fatalf("it was granted by the old master, %v after the Sentinels have named another",
						time.Since(began))
				}
				k.release()
			}
			lockOnce(t, n)
			wantOnNew(t, n, a, b)
		})
	}
}

// A dialer of the user's that leads through a SOCKS proxy does not dial a socket, and says so with another
// word than package net.
func TestTheLinkFollowsThroughASOCKSProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := startNode(t, redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := dial(ctx, network, addr)
				var failed *net.OpError
				if network == "unix" && errors.As(err, &failed) { // as golang.org/x/net/proxy has it
					failed.Op, failed.Err = "socks connect", errors.New("network not implemented")
				}
				return c, err
			}
		}), 100*time.Millisecond)
		lockOnce(t, n)
		time.Sleep(2 * followEvery) // the bubble's time
		master.Store(b)
		wantOnNew(t, n, a, b)
	})
}

// nameless is a connection that does not know where it leads to.
type nameless struct{ net.Conn }

func (nameless) RemoteAddr() net.Addr { return nil }

// A dialer of the user's may dial the master instead, and its connections have no address.
func TestAConnectionWithoutAnAddressNamesNoMaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := startNode(t, redistest.SentinelClient(t, func() *redistest.MemNode {
			return a
		}, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, _, addr string) (net.Conn, error) {
				c, err := dial(ctx, "tcp", addr)
				return nameless{c}, err
			}
		}), 100*time.Millisecond)
		lockOnce(t, n)
		time.Sleep(2 * followEvery) // the bubble's time
		lockOnce(t, n)
	})
}
