package redistest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
)

// A MemNode is a miniredis that is reached over in-memory connections only, with a gate in
// front of it that can fail as networks and machines do. It needs no socket, so it lives
// inside a testing/synctest bubble, where TTLs run in the bubble's virtual time.
//
// What differs from a Redis on a socket: a client cannot see that an idle connection was
// reset until it uses it (see SocketOptions); there is no SPUBLISH; scripts take
// no real time.
type MemNode struct {
	// Mini is the server behind the gate, for a look at its keys or for SetError. Do not
	// close or restart it; use Down and Restart.
	Mini *miniredis.Miniredis

	addr    string
	scripts scriptLoads
	pushes  pushes
	tracks  tracking

	mu      sync.Mutex         // guards what follows
	pipes   map[*pipe]struct{} // that the server still works on, whether their client lives or not
	down    bool
	stalled bool
	losing  bool
	delay   func() time.Duration // nil: none
	closed  bool
}

// LaunchMemNode makes an in-memory node. Inside a bubble it must be called there, and
// addr must have an IP address ("10.0.0.1:6379"): clients look a host name up, which
// a bubble cannot wait for. The caller must Close it. Tests use [StartMemNode].
func LaunchMemNode(addr string) (*MemNode, error) {
	n := &MemNode{Mini: miniredis.NewMiniRedis(), addr: addr, pipes: map[*pipe]struct{}{}}
	n.Mini.ClockTTL(true)
	// A miniredis without a listener comes to life with the first Dial.
	c, err := n.Mini.Dial()
	if err != nil {
		return nil, err
	}
	n.scripts = scriptLoads{server: n.Mini.Server(), loaded: map[string]string{}}
	n.pushes.server, n.tracks.mini = n.Mini.Server(), n.Mini
	n.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
		return AnswerInfo(c, cmd, args...) || n.tracks.answer(c, cmd, args...) ||
			n.pushes.answer(c, cmd, args...) || n.scripts.answer(c, cmd, args...)
	})
	return n, c.Close()
}

// RequireAuth makes the node refuse what comes on connections that have not logged in with that password.
func (n *MemNode) RequireAuth(password string) {
	n.scripts.off.Store(true) // they are answered before anybody asks who has logged in
	n.Mini.RequireAuth(password)
}

// StartMemNode makes an in-memory node and ends it in the test's cleanup. For addr see
// [LaunchMemNode].
func StartMemNode(tb testing.TB, addr string) *MemNode {
	tb.Helper()
	n, err := LaunchMemNode(addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(n.Close)
	return n
}

// StartMemNodes makes n in-memory nodes at 10.0.0.1:6379, 10.0.0.2:6379 and so on, and
// ends them in the test's cleanup. They are no new deployment (see Deploy): a FlushAll makes them one.
func StartMemNodes(tb testing.TB, n int) []*MemNode {
	tb.Helper()
	nodes := make([]*MemNode, n)
	for i := range nodes {
		nodes[i] = StartMemNode(tb, fmt.Sprintf("10.0.%d.%d:6379", i/250, i%250+1))
		Deploy(tb, nodes[i].Client(tb))
	}
	return nodes
}

// NewBubble makes n in-memory nodes and a client of each, to be called inside a
// testing/synctest bubble. Everything is closed in the cleanup, which the bubble still runs.
// Tests that want to make a node fail take [StartMemNodes] and [MemNode.Client] instead.
func NewBubble(tb testing.TB, n int) ([]*miniredis.Miniredis, []redis.UniversalClient) {
	tb.Helper()
	var minis []*miniredis.Miniredis
	var clients []redis.UniversalClient
	for _, node := range StartMemNodes(tb, n) {
		minis = append(minis, node.Mini)
		clients = append(clients, node.Client(tb))
	}
	return minis, clients
}

// Addr is the address that the node was given.
func (n *MemNode) Addr() string { return n.addr }

// Options returns options for a go-redis client of the node. They turn retries off (one
// command is one request), and announcements, so that Mini.CommandCount counts only what a
// test sent.
//
// The pool is large on purpose: a go-redis client that waits for a free connection takes a
// timer from a pool that all clients of the process share, and the runtime ends the process
// when a timer of one bubble is used in another.
func (n *MemNode) Options() *redis.Options {
	o := &redis.Options{Addr: n.addr, Dialer: n.Dial, PoolSize: 1000}
	plain(o)
	return o
}

// SocketOptions is Options for a client that sees before it uses an idle connection that it was reset, as
// clients do on a socket.
func (n *MemNode) SocketOptions() *redis.Options {
	o := n.Options()
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := n.Dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return socketEnd{c.(*pipeEnd)}, nil
	}
	return o
}

// Client returns a go-redis client of the node with Options, changed by the given functions
// in turn. It is closed in the test's cleanup.
func (n *MemNode) Client(tb testing.TB, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return newClient(tb, n.Options(), change)
}

// SentinelClient returns a client of the master that Sentinels name, as go-redis makes it: its dialer leads
// to what master returns, and names it if it is to dial a socket.
func SentinelClient(tb testing.TB, master func() *MemNode, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	return master().Client(tb, append([]func(*redis.Options){func(o *redis.Options) {
		o.Addr = "FailoverClient"
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			m := master()
			if network == "unix" {
				return nil, &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: m.addr, Net: "unix"}}
			}
			return m.Dial(ctx, network, addr)
		}
	}}, change...)...)
}

// Dial opens a connection to the node, whatever address it is given. It fits the Dialer of
// redis.Options.
func (n *MemNode) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if n.isLosing() {
		<-ctx.Done()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: pipeAddr(n.addr), Err: ctx.Err()}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down || n.closed {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: pipeAddr(n.addr), Err: syscall.ECONNREFUSED}
	}
	p := newPipe(n.addr, n.currentDelay)
	p.hold(n.stalled)
	n.sweepLocked()
	n.pipes[p] = struct{}{}
	n.Mini.Server().ServeConn(p.server)
	return p.client, nil
}

// sweepLocked forgets the connections that the server is done with.
func (n *MemNode) sweepLocked() {
	for p := range n.pipes {
		select {
		case <-p.served:
			delete(n.pipes, p)
		default:
		}
	}
}

func (n *MemNode) currentDelay() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.delay == nil {
		return 0
	}
	return n.delay()
}

// SetDelay makes everything written from now on travel for d, in either direction, so
// a round trip takes 2*d.
func (n *MemNode) SetDelay(d time.Duration) { n.SetDelays(func() time.Duration { return d }) }

// SetDelays is SetDelay with a time of its own for each write, in order. delay must be safe for concurrent
// use.
func (n *MemNode) SetDelays(delay func() time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.delay = delay
}

// Cut resets every connection that is open now. Requests that the node has not begun to
// read are lost. New connections work.
func (n *MemNode) Cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for p := range n.pipes {
		p.cut()
	}
}

// Stall stops the node, as SIGSTOP does, or lets it continue: connects and requests are still
// accepted but nothing is answered. Afterwards the node executes what came in meanwhile, also for
// clients that have given up.
func (n *MemNode) Stall(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stalled = on
	for p := range n.pipes {
		p.hold(on)
	}
}

// Lose loses all packets, or stops losing them. Connections that were open remain mute for good, and a dial
// that began meanwhile ends with its context only: the network sends a packet again so much later that nobody
// waits for it.
func (n *MemNode) Lose(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.losing = on
	for p := range n.pipes {
		p.hold(true)
	}
}

func (n *MemNode) isLosing() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.losing
}

// Down cuts the node off, with all connections reset and connects refused, or lets it be
// reached again. It keeps its keys and scripts. When Down(true) returns, the node works on
// nothing any more.
func (n *MemNode) Down(on bool) {
	n.mu.Lock()
	n.down = on
	pipes := maps.Clone(n.pipes)
	n.mu.Unlock()
	if !on {
		return
	}
	for p := range pipes {
		p.cut()
		<-p.served
	}
}

// IsDown reports whether the node is cut off.
func (n *MemNode) IsDown() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.down
}

// Restart resets all connections and forgets all keys and scripts, as a Redis without
// persistence does when it crashes and comes back. It ends Down and Stall.
func (n *MemNode) Restart() error {
	n.Down(true)
	n.Mini.FlushAll()
	if err := n.flushScripts(); err != nil {
		return err
	}
	n.Stall(false)
	n.Down(false)
	return nil
}

// flushScripts goes past the gate, which is shut.
func (n *MemNode) flushScripts() error {
	c, err := n.Mini.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.WriteString(c, "*2\r\n$6\r\nSCRIPT\r\n$5\r\nFLUSH\r\n"); err != nil {
		return err
	}
	reply := make([]byte, len("+OK\r\n"))
	if _, err := io.ReadFull(c, reply); err != nil {
		return err
	}
	if string(reply) != "+OK\r\n" {
		return fmt.Errorf("redistest: SCRIPT FLUSH: %q", reply)
	}
	return nil
}

// Close ends the node and all connections, and returns when its goroutines have ended.
// Calls after the first do nothing.
func (n *MemNode) Close() {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	n.mu.Unlock()
	if !closed {
		n.Cut()
		n.Mini.Close()
	}
}
