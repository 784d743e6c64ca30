package setup

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// The program closes its redis clients before the Client, which has connections of its own,
// continues, and can be closed.
func TestRedisClientsThatAreClosedFirst(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		servers, _ := lockkit.StartNodes(t, n)
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, redis.NewClient(&redis.Options{Addr: s.Addr()}))
		}
		c := lockkit.New(t, lockkit.Patient, nodes...)
		l := lockkit.Lock(t, c, "k", time.Minute)
		for _, node := range nodes {
			_ = node.Close()
		}
		lockkit.Release(t, l)
		lockkit.Release(t, lockkit.Lock(t, c, "other", time.Minute))
	}
}

// panickyClients are clients of one server, each with a function that panics while broken is true.
func panickyClients(t *testing.T, addr string, broken *atomic.Bool) map[string]*redis.Client {
	bug := func() {
		if broken.Load() {
			panic("a bug")
		}
	}
	clients := map[string]*redis.Client{}
	for name, change := range map[string]func(*redis.Options){
		"Dialer": func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				bug()
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
		},
		"OnConnect": func(o *redis.Options) {
			o.OnConnect = func(context.Context, *redis.Conn) error {
				bug()
				return nil
			}
		},
		"CredentialsProvider": func(o *redis.Options) {
			o.CredentialsProvider = func() (user, password string) {
				bug()
				return "", ""
			}
		},
		"CredentialsProviderContext": func(o *redis.Options) {
			o.CredentialsProviderContext = func(context.Context) (user, password string, err error) {
				bug()
				return "", "", nil
			}
		},
	} {
		o := &redis.Options{Addr: addr, DialerRetries: 1, MaxRetries: -1}
		change(o)
		clients[name] = redis.NewClient(o)
		t.Cleanup(func() { _ = clients[name].Close() })
	}
	return clients
}

// A panic in what a client calls on its way to a server does not end the process, where a goroutine of this
// package met it: the node cannot be reached, for as long as that lasts, and the reason is named.
func TestFunctionsOfAClientThatPanic(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	var broken atomic.Bool
	broken.Store(true)
	clients := map[string]*flightlock.Client{}
	for name, rdb := range panickyClients(t, server.Addr(), &broken) {
		c := lockkit.New(t, lockkit.Patient, rdb)
		clients[name] = c
		for range 2 { // the second time the node may be suspended
			_, err := c.TryLock(t.Context(), "k", time.Minute)
			if !errors.Is(err, flightlock.ErrUnavailable) || !strings.Contains(err.Error(), "panicked: a bug") {
				t.Errorf("%s: TryLock: %v", name, err)
			}
		}
		r := lockkit.Check(t, c)
		lockkit.WantFinding(t, r, server.Addr(), "reachable", flightlock.StatusFail)
	}
	broken.Store(false)
	for name, c := range clients {
		redistest.Eventually(t, 20*time.Second, name+" works again", func() bool {
			l, err := c.TryLock(t.Context(), "k", time.Minute)
			if err == nil {
				lockkit.Release(t, l)
			}
			return err == nil
		})
	}
}

// dialPanics is a hook that fails as a dial begins.
type dialPanics struct{}

func (dialPanics) DialHook(redis.DialHook) redis.DialHook {
	return func(context.Context, string, string) (net.Conn, error) { panic("a bug") }
}

func (dialPanics) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (dialPanics) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Hooks are called for the connections of notices. One that panics leaves a waiter to poll.
func TestADialHookThatPanics(t *testing.T) {
	t.Parallel()
	server := redistest.StartServer(t)
	rdb := server.Client(t)
	rdb.AddHook(dialPanics{})
	c, other := lockkit.New(t, lockkit.Patient, rdb), lockkit.New(t, lockkit.Patient, server.Client(t))
	l := lockkit.Lock(t, other, "k", 300*time.Millisecond) // it ends by itself
	lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute))
	_ = l.Release(t.Context())
}
