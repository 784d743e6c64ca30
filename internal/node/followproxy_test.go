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
