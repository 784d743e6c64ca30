package rediscache_test

import (
	"context"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A ClusterClient asks a master for its commands before its first request, for longer than a lookup may take, and all
// of its requests wait for that. A Get does not.
func TestAMasterThatHangsAtTheFirstGetDoesNotHoldItUp(t *testing.T) {
	t.Parallel()
	c, err := flightlock.New(flightlock.Options{
		Nodes: []redis.UniversalClient{redistest.MiniClient(t, redistest.StartMini(t))},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	over := make(chan struct{})
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		ContextTimeoutEnabled: true, DialerRetries: 1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: "10.1.0.2:6379"}}}}, nil
		},
		Dialer: func(context.Context, string, string) (net.Conn, error) { return &hangingConn{over: over}, nil },
	})
	defer func() { _ = rdb.Close() }()
	load := func(context.Context, string) (string, error) { return "v", nil }
	users, err := rediscache.New(c, rdb, load, rediscache.Options[string]{
		Name: "user", Fresh: time.Minute, Fetch: flightlock.FetchOptions{LookupTimeout: 100 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close(context.Background())
	defer close(over) // first: what still waits for the master ends
	got := make(chan error, 1)
	go func() {
		_, err := users.Get(context.Background(), "42")
		got <- err
	}()
	select {
	case err := <-got:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the Get waits for the master")
	}
}

// hangingConn is a connection to a server that takes requests and never answers. Deadlines of more than a second
// never come, as if each second was an hour.
type hangingConn struct {
	net.Conn
	over <-chan struct{} // closed when it is to fail

	mu       sync.Mutex // guards deadline
	deadline time.Time
}

func (c *hangingConn) Read([]byte) (int, error) {
	c.mu.Lock()
	deadline := c.deadline
	c.mu.Unlock()
	var due <-chan time.Time
	if !deadline.IsZero() && time.Until(deadline) < time.Second {
		due = time.After(time.Until(deadline))
	}
	select {
	case <-due:
		return 0, os.ErrDeadlineExceeded
	case <-c.over:
		return 0, net.ErrClosed
	}
}

func (c *hangingConn) Write(b []byte) (int, error)      { return len(b), nil }
func (c *hangingConn) Close() error                     { return nil }
func (c *hangingConn) SetWriteDeadline(time.Time) error { return nil }
func (c *hangingConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *hangingConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *hangingConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

func (c *hangingConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return nil
}
