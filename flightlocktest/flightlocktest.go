// Package flightlocktest is for tests of code that locks: a client over nodes in memory,
// with no server to install and no socket, which can lose a lock on demand.
//
// It works inside a testing/synctest bubble, where ttls and retries run in virtual time,
// and outside. Inside, call Start and Close in the bubble.
//
//	nodes := flightlocktest.Start(3)
//	defer nodes.Close()
//	c, err := nodes.Client(flightlock.Options{})
//
// The nodes are miniredis: they answer as Redis does, but they are no measure of its speed.
package flightlocktest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/hook"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Nodes are independent nodes in memory, and the clients on them. Its methods are safe for
// concurrent use.
type Nodes struct {
	mem   []*redistest.MemNode
	redis []redis.UniversalClient

	mu      sync.Mutex // guards what follows
	clients []client
	closed  bool
}

type client struct {
	*flightlock.Client
	prefix string
}

// Start makes n nodes, 1 to 64. Close ends them.
func Start(n int) *Nodes {
	ns := &Nodes{}
	for i := range n {
		m, err := redistest.LaunchMemNode(fmt.Sprintf("10.0.0.%d:6379", i+1))
		if err != nil {
			panic("flightlocktest: " + err.Error()) // it takes no more than memory
		}
		ns.mem = append(ns.mem, m)
		ns.redis = append(ns.redis, redis.NewClient(m.Options()))
	}
	return ns
}

// Client makes a client on the nodes, as another process would have it; Close closes it.
// opts.Nodes must be empty. NodeTimeout is 5s unless opts says otherwise, so that a busy
// machine makes no test fail, and there is no quarantine, for these nodes forget nothing.
func (n *Nodes) Client(opts flightlock.Options) (*flightlock.Client, error) {
	if len(opts.Nodes) != 0 {
		return nil, fmt.Errorf("flightlocktest: %w: Options.Nodes has %d nodes, but Nodes has its own", flightlock.ErrInvalid, len(opts.Nodes))
	}
	opts.Nodes = n.redis
	opts.DisableQuarantine = true
	if opts.NodeTimeout == 0 {
		opts.NodeTimeout = 5 * time.Second
	}
	c, err := flightlock.New(opts)
	if err != nil {
		return nil, err
	}
	prefix := opts.KeyPrefix
	switch prefix {
	case "":
		prefix = "lock:"
	case flightlock.NoPrefix:
		prefix = ""
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clients = append(n.clients, client{c, prefix})
	return c, nil
}

// Lose takes key from whoever holds it on one of the clients, as if its nodes had forgotten
// it: that Lock's Err is ErrLockLost and its Context has ended when Lose returns. If nobody
// holds key, Lose waits for that until ctx ends. The key is free then: callers that wait for
// it contend for it.
func (n *Nodes) Lose(ctx context.Context, key string) error {
	for {
		if n.lose(key) {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("flightlocktest: lose %q: nobody holds it: %w", key, ctx.Err())
		}
	}
}

// lose says whether a Lock was lost.
func (n *Nodes) lose(key string) (lost bool) {
	n.mu.Lock()
	clients := append([]client(nil), n.clients...)
	n.mu.Unlock()
	for _, c := range clients {
		holders := hook.Holders(c.Client, key)
		if len(holders) == 0 {
			continue
		}
		for _, m := range n.mem {
			m.Mini.Del(c.prefix + key)
		}
		for _, refresh := range holders {
			// One that was released meanwhile was not lost; then the next is.
			lost = errors.Is(refresh(), flightlock.ErrLockLost) || lost
		}
	}
	return lost
}

// Down cuts all nodes off, so that locking is ErrUnavailable, or lets them be reached
// again. They forget nothing meanwhile, but for what expires.
func (n *Nodes) Down(on bool) {
	for _, m := range n.mem {
		m.Down(on)
	}
}

// Close closes the clients and ends the nodes. Locks that are still held are lost, after a
// second. Calls after the first do nothing.
func (n *Nodes) Close() {
	n.mu.Lock()
	clients, closed := n.clients, n.closed
	n.closed = true
	n.mu.Unlock()
	if closed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() { _ = c.Close(ctx) }) // what it could not release ends with the nodes
	}
	wg.Wait()
	for i := range n.mem {
		_ = n.redis[i].Close()
		n.mem[i].Close()
	}
}
