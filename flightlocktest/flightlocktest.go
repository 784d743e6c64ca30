// Package flightlocktest helps to test code that locks. It provides clients over in-memory nodes,
// without a server to install and without sockets, and can lose a lock on demand.
//
// It works inside a testing/synctest bubble, where ttls and retries run in virtual time, and
// outside. Inside, call Start and Close in the bubble.
//
//	nodes := flightlocktest.Start(3)
//	defer nodes.Close()
//	c, err := nodes.Client(flightlock.Options{})
//
// The nodes are miniredis servers: they answer as Redis does, but their speed does not show that of
// Redis.
package flightlocktest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/seam"
	"github.com/redis/go-redis/v9"
)

// Nodes are independent in-memory nodes, and the clients on them. Its methods are safe for
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

// Start starts n nodes, 1 to 64: with another number, Client returns ErrInvalid. Close ends them.
func Start(n int) *Nodes {
	ns := &Nodes{}
	for i := range n {
		m, err := redistest.LaunchMemNode(fmt.Sprintf("10.0.0.%d:6379", i+1))
		if err != nil {
			panic("flightlocktest: " + err.Error()) // it takes no more than memory
		}
		ns.mem = append(ns.mem, m)
		ns.redis = append(ns.redis, redis.NewClient(m.SocketOptions()))
	}
	return ns
}

// Client makes a client on the nodes, like one in another process; Close closes it. NodeTimeout is 5s
// unless opts sets it, so that tests do not fail on a busy machine. There is no quarantine, because
// these nodes lose no data. A bad option is a flightlock.ErrInvalid; after Close it is a
// flightlock.ErrClosed.
func (n *Nodes) Client(opts flightlock.Options) (*flightlock.Client, error) {
	opts.DisableQuarantine = true
	if opts.NodeTimeout == 0 {
		opts.NodeTimeout = 5 * time.Second
	}
	c, err := flightlock.New(opts, n.redis...)
	if err != nil {
		return nil, err
	}
	prefix := opts.KeyPrefix
	if prefix == "" && !opts.NoPrefix {
		prefix = "lock:"
	}
	n.mu.Lock()
	closed := n.closed
	if !closed {
		n.clients = append(n.clients, client{c, prefix})
	}
	n.mu.Unlock()
	if closed { // nobody would close it
		_ = c.Close(context.Background()) // it holds nothing
		return nil, fmt.Errorf("flightlocktest: the Nodes are %w", flightlock.ErrClosed)
	}
	return c, nil
}

// Lose takes key away from its holder on one of the clients, as if the nodes had lost it: when Lose
// returns, that Lock's Err is ErrLockLost and its Context has ended. If no client holds key, Lose
// waits for a holder until ctx ends, and then returns an error that matches ctx's; so it does, and takes
// nothing away, while a majority of nodes is down, or too slow for the holder (see Delay). Nobody gets the
// key before its holder has lost it. The key is free afterwards, and callers that wait for it contend for it.
func (n *Nodes) Lose(ctx context.Context, key string) error {
	for {
		why := "a majority of nodes is down"
		if n.majorityIsUp() {
			var lost bool
			if lost, why = n.lose(ctx, key); lost {
				return nil
			}
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("flightlocktest: lose %q: %s: %w", key, why, err)
		}
	}
}

// pause waits for a millisecond, or returns ctx's error.
func pause(ctx context.Context) error {
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (n *Nodes) majorityIsUp() bool {
	up := 0
	for _, m := range n.mem {
		if !m.IsDown() {
			up++
		}
	}
	return up > len(n.mem)/2
}

// lose reports whether a Lock was lost, and if not, why. Until its holder knows, the key has another value,
// so that no other client gets it.
func (n *Nodes) lose(ctx context.Context, key string) (lost bool, why string) {
	n.mu.Lock()
	clients := append([]client(nil), n.clients...)
	n.mu.Unlock()
	for _, c := range clients {
		if len(seam.Of(c.Client).Holders(key)) == 0 {
			continue
		}
		putBack, nobody := n.take(c.prefix+key), 0
		for {
			var held bool
			if lost, held = refreshAll(clients, c.prefix, key); held {
				nobody = 0
			} else {
				nobody++ // one that had the votes before the take may only now learn of them
			}
			if lost || nobody > 10 {
				break
			}
			if pause(ctx) != nil && held {
				putBack()
				return false, "a majority of nodes is down, or too slow for the holder"
			}
		}
		for _, m := range n.mem {
			m.Mini.Del(c.prefix + key)
		}
		if lost {
			return true, ""
		}
	}
	return false, "nobody holds it"
}

// refreshAll refreshes what clients of that prefix hold of key, and reports whether a Lock was lost by that,
// and whether one is held. One that was released meanwhile was not lost; then the next is.
func refreshAll(clients []client, prefix, key string) (lost, held bool) {
	for _, c := range clients {
		if c.prefix != prefix {
			continue
		}
		for _, refresh := range seam.Of(c.Client).Holders(key) {
			err := refresh()
			lost = errors.Is(err, flightlock.ErrLockLost) || lost
			held = err == nil || held
		}
	}
	return lost, held
}

// take gives key a value that is no client's. putBack restores what was there.
func (n *Nodes) take(key string) (putBack func()) {
	var undo []func()
	for _, m := range n.mem {
		owner, err := m.Mini.Get(key)
		ttl, began := m.Mini.TTL(key), time.Now()
		_ = m.Mini.Set(key, "flightlocktest.Lose") // it fails if another type is there: then nobody has that node
		undo = append(undo, func() {
			m.Mini.Del(key)
			if left := ttl - time.Since(began); err == nil && left > 0 {
				_ = m.Mini.Set(key, owner)
				m.Mini.SetTTL(key, left)
			}
		})
	}
	return func() {
		for _, f := range undo {
			f()
		}
	}
}

// Redis returns a client of node i, counted from 0, for what the tested code stores besides its
// locks: the Store of a Fetcher, a package fenced value. It is one client for all
// callers, and Close closes it. Down and Delay apply to it, too. It panics if there is no node i.
func (n *Nodes) Redis(i int) *redis.Client { return n.redis[n.index(i)].(*redis.Client) }

// Down makes nodes unreachable, or reachable again: those that which names, counted from 0, or all.
// It panics if there is no such node. While fewer than half of the nodes are down, locking
// continues; otherwise it fails with [flightlock.ErrUnavailable]. Nodes that are down keep their
// data, except for keys that expire.
//
// A client suspends a node that is down, and uses it again when a probe has been answered: up to
// 250ms after Down(false).
func (n *Nodes) Down(on bool, which ...int) {
	for _, m := range n.chosen(which) {
		m.Down(on)
	}
}

// Delay makes all that is sent to nodes, and all that they answer, arrive d later, until it is
// called again: a round trip takes 2*d. which is as in Down. It panics if d is negative. Clients
// whose NodeTimeout is less than 2*d treat the nodes as unreachable.
func (n *Nodes) Delay(d time.Duration, which ...int) {
	if d < 0 {
		panic(fmt.Sprintf("flightlocktest: a delay of %v: it must not be below 0", d))
	}
	for _, m := range n.chosen(which) {
		m.SetDelay(d)
	}
}

// chosen are the nodes that which names, or all.
func (n *Nodes) chosen(which []int) []*redistest.MemNode {
	if len(which) == 0 {
		return n.mem
	}
	var mem []*redistest.MemNode
	for _, i := range which {
		mem = append(mem, n.mem[n.index(i)])
	}
	return mem
}

func (n *Nodes) index(i int) int {
	if i < 0 || i >= len(n.mem) {
		panic(fmt.Sprintf("flightlocktest: node %d: there are nodes 0 to %d", i, len(n.mem)-1))
	}
	return i
}

// Close closes the clients, as Client.Close does with a ctx of one second, and ends the nodes: locks
// that are still held after that second end with flightlock.ErrClosed. Calls after the first do
// nothing.
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
