package node

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// An answer to a handshake is passed on at once: there is no connection to give up.
func TestARefusedHandshakeWithoutLoginIsNotDialledTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.RequireAuth("secret")
		var dials atomic.Int64
		c := m.Client(t, func(o *redis.Options) {
			o.DB = 1 // SELECT is refused, so the connection is not used
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if dials.Add(1) > 1 { // the network is lost
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return dial(ctx, network, addr)
			}
		})
		n := newImpatientNode(t, c)
		began := time.Now()
		rep := newAttempt(t, n, "k").acquire().want(t, Failed)
		if took := time.Since(began); took > n.timeout || !strings.Contains(rep.Err.Error(), "NOAUTH") {
			t.Errorf("%v after %v", rep.Err, took)
		}
	})
}

// A connection whose server learns the scripts just after it has said NOSCRIPT, from somebody else, is
// kept: there may be no other, while logins are refused.
func TestAConnectionIsKeptWhenOthersLoadTheScripts(t *testing.T) {
	t.Parallel()
	var forgot atomic.Bool
	f := redistest.StartFake(t, func(cmd []string) string {
		if ends(cmd) && forgot.CompareAndSwap(true, false) {
			return "-NOSCRIPT No matching script. Please use EVAL.\r\n" // another process is about to load it
		}
		return ":1\r\n"
	})
	var out atomic.Bool
	n := startNode(t, f.Client(t, lockedOut(&out)), patience)
	held, a := newAttempt(t, n, "k"), newAttempt(t, n, "k")
	held.acquire().want(t, Granted)
	a.acquire().want(t, Granted)
	out.Store(true)
	forgot.Store(true)
	a.release().want(t, Deleted)
	if forgot.Load() {
		t.Fatal("it was not asked")
	}
	held.refresh().want(t, Renewed)
}

// lockedOut makes a client that cannot have another connection once out is true.
func lockedOut(out *atomic.Bool) func(*redis.Options) {
	return func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if out.Load() {
				return nil, net.ErrClosed
			}
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	}
}

// A connection is kept if its server refuses to load the scripts, so that it does not know them afterwards,
// either.
func TestAConnectionWhoseServerLoadsNoScriptsIsKept(t *testing.T) {
	t.Parallel()
	var forgot atomic.Bool
	f := redistest.StartFake(t, func(cmd []string) string {
		switch {
		case !forgot.Load():
			return ":1\r\n"
		case strings.EqualFold(cmd[0], "SCRIPT"):
			return "-NOPERM this user has no permissions to run the 'script|load' command\r\n"
		case strings.EqualFold(cmd[0], "EVAL"):
			return "-NOPERM this user has no permissions to run the 'eval' command\r\n"
		}
		return "-NOSCRIPT No matching script. Please use EVAL.\r\n"
	})
	var out atomic.Bool
	n := startNode(t, f.Client(t, lockedOut(&out)), patience)
	held, a := newAttempt(t, n, "k"), newAttempt(t, n, "k")
	held.acquire().want(t, Granted)
	a.acquire().want(t, Granted)
	out.Store(true)
	forgot.Store(true)
	a.release().want(t, Failed)
	forgot.Store(false)
	held.refresh().want(t, Renewed)
}

// A server that had the node's address before, and cannot reach its own master, refuses all with MASTERDOWN,
// also where that was the first reply: the next request goes where the address leads now.
func TestAConnectionToAReplicaWithoutItsMasterIsGivenUp(t *testing.T) {
	t.Parallel()
	old, now := redistest.StartServer(t), redistest.StartServer(t)
	var moved atomic.Bool
	n := newNode(t, old.Client(t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
			to := old.Addr()
			if moved.Load() {
				to = now.Addr()
			}
			return (&net.Dialer{}).DialContext(ctx, network, to)
		}
	}))
	a := newAttempt(t, n, "k")
	a.acquire().want(t, Granted)
	a.release().want(t, Deleted)
	moved.Store(true)
	old.Do(t, "CONFIG", "SET", "replica-serve-stale-data", "no")
	_, port, _ := net.SplitHostPort(redistest.RefusedAddr(t))
	old.Do(t, "REPLICAOF", "127.0.0.1", port)
	if rep := newAttempt(t, n, "k").acquire().want(t, Failed); !conn.HasCode(rep.Err, "MASTERDOWN") {
		t.Error(rep.Err)
	}
	eventuallyGranted(t, n, "k")
	newAttempt(t, n, "k").acquire().want(t, Granted)
	if !exists(t, now, "k") {
		t.Error("the connection is still used")
	}
}
