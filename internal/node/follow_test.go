package node

import (
	"context"
	"errors"
	"fmt"
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
func TestLanesFollowTheMasterThatSentinelsName(t *testing.T) {
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
			n := newAlone(t, c, 100*time.Millisecond)
			locks := func(key string, at, elsewhere *redistest.MemNode) {
				t.Helper()
				newAttempt(t, n, key).acquire().want(t, Granted)
				if !at.Mini.Exists(key) || elsewhere.Mini.Exists(key) {
					t.Errorf("%s was granted by the other master", key)
				}
			}
			locks("k1", a, b)
			time.Sleep(followEvery + time.Second/10)
			for i := range 16 { // keys of all lanes: one that had dialled before the first answer does so again
				locks(fmt.Sprint("k2-", i), a, b)
			}
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
			e := newEar()
			at := newAttempt(t, n, "k6")
			at.Acquire(&at.buf, e, longTTL, 1, 0, true)
			e.want(t, Granted)
			if !b.Mini.Exists("k6") {
				t.Error("a caller's own exchange does not follow")
			}
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
func TestLanesFollowBetweenLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := newAlone(t, redistest.SentinelClient(t, master.Load), 100*time.Millisecond)
		for range 3 {
			lockOnce(t, n)
			time.Sleep(time.Hour) // the bubble's time
		}
		master.Store(b)
		wantOnNew(t, n, a, b)
	})
}

// The first answer may be the successor already: of a failover since the lanes have dialled, or while no Sentinel
// answered.
func TestLanesFollowTheFirstMasterThatSentinelsName(t *testing.T) {
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
		n := newAlone(t, c, 100*time.Millisecond)
		lockOnce(t, n)
		master.Store(b)
		wantOnNew(t, n, a, b)
	})
}

// A dial that was given up may have left, or may yet leave, a second connection to the master of before. It is not used
// afterwards.
func TestLanesFollowThoughAnAbandonedDialLeadsToTheOldMaster(t *testing.T) {
	for _, late := range []bool{false, true} {
		tries := 1
		for ; !lanesFollowAfterAnAbandonedDial(t, late); tries++ { // once in some hundreds of times
			if tries == 10 {
				t.Fatal("a dial that is given up leaves no second connection")
			}
		}
	}
}

// lanesFollowAfterAnAbandonedDial reports false, and has tested nothing, if no second connection was left.
func lanesFollowAfterAnAbandonedDial(t *testing.T, late bool) (abandoned bool) {
	abandoned = true
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var slow atomic.Bool
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := newAlone(t, redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := dial(ctx, network, addr)
				if network != "unix" && slow.Swap(false) {
					time.Sleep(1400 * time.Millisecond) // the bubble's time
				}
				return c, err
			}
		}), 100*time.Millisecond)
		locks := func(at *redistest.MemNode, acquire func(*attempt) *ear) *lane {
			t.Helper()
			k := newAttempt(t, n, "k")
			acquire(k).want(t, Granted)
			if !at.Mini.Exists("k") {
				t.Errorf("late: %v: it was granted by the other master", late)
			}
			k.release().want(t, Deleted)
			return k.lane()
		}
		locks(a, (*attempt).acquire)
		time.Sleep(2 * followEvery) // the first answer has come
		l := locks(a, (*attempt).acquire)
		l.disconnect(t.Context())
		n.servers[0].fast.Store(true)
		slow.Store(true)
		locks(a, (*attempt).acquireHere) // it gives its dial up, and the lane makes another
		if !late {
			time.Sleep(2 * followEvery)
			if l.client.PoolStats().IdleConns != 2 {
				abandoned = false
				return
			}
			locks(a, (*attempt).acquire) // so that the Sentinels are asked
		}
		master.Store(b)
		if late {
			time.Sleep(followEvery + followEvery/10)
			locks(b, (*attempt).acquire) // the slow dial has not ended
		}
		time.Sleep(2 * followEvery)
		locks(b, (*attempt).acquire)
	})
	return abandoned
}

// A dialer of the user's that leads through a SOCKS proxy does not dial a socket, and says so with another word than
// package net.
func TestLanesFollowThroughASOCKSProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := newAlone(t, redistest.SentinelClient(t, master.Load, func(o *redis.Options) {
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
		n := newAlone(t, redistest.SentinelClient(t, func() *redistest.MemNode { return a }, func(o *redis.Options) {
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
