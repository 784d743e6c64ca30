//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/clocktest"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A cell is what one scenario runs on: redis-servers as nodes, one more for the values that the
// locks protect, client processes, and a proxy between each process and each node, so that a
// network can be broken for one pair alone.
type cell struct {
	ttl     time.Duration // of most locks, and Options.MaxTTL
	setup   setup         // of all processes
	servers []*redistest.Server
	cluster *redistest.Cluster // servers are its masters, and it is the only node. nil: there is none
	args    []string
	kind    redistest.Kind                            // of server, as the processes see it
	fronts  map[*redistest.Server]*redistest.Endpoint // what makes the servers look so
	proxies [][]*redistest.Proxy                      // by process, by node
	nodes   []*redis.Client                           // to each server itself
	store   *redistest.Server
	procs   []*process
	closers []func() error

	mu      sync.Mutex // guards what follows
	history history
	fatal   error
}

// process is a child, as the harness sees it.
type process struct {
	*procs.Child
	drained chan struct{} // closed when its output has ended

	clocks *clocktest.Clocks // that it reads, if its machine may sleep

	// guarded by cell.mu
	ready, working bool             // by its own word
	begun          map[int64]access // the writes that it has begun, and not ended, by number
	killed         bool             // on purpose
}

// newCell starts everything, and returns when all processes are at work.
func newCell(ctx context.Context, s setup, procs, nodes int, args ...string) (*cell, error) {
	return newCellOn(ctx, s, procs, args, func(c *cell) error {
		for range nodes {
			server, err := c.launch(args...)
			if err != nil {
				return err
			}
			c.servers = append(c.servers, server)
			c.nodes = append(c.nodes, c.clientOf(server))
		}
		return nil
	})
}

// newEndpointCell starts a cell whose one node is several servers behind one address: a Cluster of two
// masters that looks like the kind of the setup.
func newEndpointCell(ctx context.Context, s setup, procs int, args ...string) (*cell, error) {
	return newCellOn(ctx, s, procs, args, func(c *cell) error {
		cluster, err := redistest.LaunchGrowingCluster(2, 0, args...)
		if err != nil {
			return err
		}
		c.closers = append(c.closers, cluster.Close)
		front, err := redistest.NewEndpoint(c.kind, cluster.Addrs()...)
		if err != nil {
			return err
		}
		c.closers = append(c.closers, front.Close)
		node := redis.NewClient(&redis.Options{Addr: front.Addr(), DialerRetries: 1})
		c.closers = append(c.closers, node.Close)
		first := cluster.Servers()[0] // stands for the node
		c.fronts[first] = front
		c.servers, c.nodes = append(c.servers, first), append(c.nodes, node)
		return nil
	})
}

// newClusterCell starts a cell whose one node is a Cluster of so many masters with slots, and more
// without. Its masters are the cell's servers. There are no proxies in between, since masters
// redirect clients to each other.
func newClusterCell(ctx context.Context, s setup, procs, masters, empty int, args ...string) (*cell, error) {
	return newCellOn(ctx, s, procs, args, func(c *cell) error {
		cluster, err := redistest.LaunchGrowingCluster(masters, empty, args...)
		if err != nil {
			return err
		}
		c.closers = append(c.closers, cluster.Close)
		c.servers, c.cluster = cluster.Servers(), cluster
		for _, server := range c.servers {
			c.nodes = append(c.nodes, c.clientOf(server))
		}
		return nil
	})
}

func newCellOn(ctx context.Context, s setup, procs int, args []string,
	launch func(*cell) error) (c *cell, err error) {
	c = &cell{ttl: s.TTL, setup: s, args: args, fronts: map[*redistest.Server]*redistest.Endpoint{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if c.kind, err = redistest.KindNamed(cmp.Or(s.Kind, redistest.Plain.Name)); err != nil {
		return c, err
	}
	if c.store, err = c.launch(); err != nil {
		return c, err
	}
	if err := launch(c); err != nil {
		return c, err
	}
	if err := c.fit(ctx); err != nil {
		return c, err
	}
	for i := range procs {
		if err := c.startProcess(s, i); err != nil {
			return c, err
		}
	}
	return c, c.await(ctx, "all processes are at work", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, p := range c.procs {
			if !p.ready {
				return false
			}
		}
		return true
	})
}

// fit is why no lock can be had on servers of the cell's kind.
func (c *cell) fit(ctx context.Context) error {
	if c.kind.Name == redistest.Plain.Name {
		return nil
	}
	var urls []string
	for _, server := range c.servers {
		addr, err := c.front(server)
		if err != nil {
			return err
		}
		url := "redis://" + addr
		if c.kind.IsCluster() {
			url += "?addr=" + addr
		}
		urls = append(urls, url)
	}
	client, err := flightlock.Open(flightlock.Options{MaxTTL: c.ttl, NodeTimeout: patience}, urls...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err = client.Ready(ctx); err != nil {
		err = fmt.Errorf("no lock can be had on %s: %w", c.kind.Name, err)
	}
	return errors.Join(err, client.Close(ctx))
}

func (c *cell) launch(args ...string) (*redistest.Server, error) {
	s, err := redistest.Launch(args...)
	if err == nil {
		c.closers = append(c.closers, s.Close)
	}
	return s, err
}

// clientOf is a client of a server that only the server's own faults affect.
func (c *cell) clientOf(s *redistest.Server) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr(), DialerRetries: 1})
	c.closers = append(c.closers, rdb.Close)
	return rdb
}

// proxy starts a proxy in front of addr.
func (c *cell) proxy(addr string) (*redistest.Proxy, error) {
	p, err := redistest.NewProxy(addr)
	if err == nil {
		c.closers = append(c.closers, p.Close)
	}
	return p, err
}

// front is the address at which the processes, and their proxies, find a server: it looks like the kind
// there.
func (c *cell) front(s *redistest.Server) (string, error) {
	if c.kind.Name == redistest.Plain.Name {
		return s.Addr(), nil
	}
	if c.fronts[s] == nil {
		e, err := redistest.NewEndpoint(c.kind, s.Addr())
		if err != nil {
			return "", err
		}
		c.closers = append(c.closers, e.Close)
		c.fronts[s] = e
	}
	return c.fronts[s].Addr(), nil
}

func (c *cell) startProcess(s setup, number int) error {
	s.Proc, s.Register = number, c.store.Addr()
	var err error
	if s.Nodes, err = c.urls(); err != nil {
		return err
	}
	cmd, err := procs.Self(childEnv + "=1")
	if err != nil {
		return err
	}
	p := &process{drained: make(chan struct{}), begun: map[int64]access{}}
	if s.Sleeps {
		clocks, file, err := newClocks()
		if err != nil {
			return err
		}
		defer file.Close()
		p.clocks, cmd.ExtraFiles = clocks, []*os.File{file}
	}
	if p.Child, err = procs.StartChild(cmd); err != nil {
		return err
	}
	c.procs = append(c.procs, p)
	go c.listen(p)
	return p.Send(s)
}

// urls are those of the nodes for one process: of new proxies in front of the servers, or of the
// Cluster.
func (c *cell) urls() (urls []string, err error) {
	if c.cluster != nil {
		return []string{"redis://" + c.servers[0].Addr() + "?dial_timeout=1s&addr=" + c.servers[1].Addr()}, nil
	}
	var proxies []*redistest.Proxy
	for _, server := range c.servers {
		addr, err := c.front(server)
		if err != nil {
			return nil, err
		}
		if c.kind.IsCluster() { // its map leads around a proxy
			urls = append(urls, "redis://"+addr+"?dial_timeout=1s&addr="+addr)
			continue
		}
		p, err := c.proxy(addr)
		if err != nil {
			return nil, err
		}
		proxies = append(proxies, p)
		urls = append(urls, "redis://"+p.Addr()+"?dial_timeout=1s")
	}
	c.proxies = append(c.proxies, proxies)
	return urls, nil
}

// listen records what a process reports, until it ends.
func (c *cell) listen(p *process) {
	defer close(p.drained)
	for {
		var e event
		err := p.Receive(&e)
		if errors.Is(err, io.EOF) {
			return
		}
		c.mu.Lock()
		switch {
		case err != nil && p.killed: // in the middle of a line
		case err != nil:
			c.fatal = errors.Join(c.fatal, fmt.Errorf("a process is not understood: %w", err))
		case e.Fatal != "":
			c.fatal = errors.Join(c.fatal, fmt.Errorf("a process ended: %s", e.Fatal))
		}
		p.ready = p.ready || e.Ready
		p.working = e.Working || p.working && e.Append == nil
		switch {
		case e.Begun != nil:
			p.begun[e.Begun.Write] = *e.Begun
		case e.Access != nil:
			delete(p.begun, e.Access.Write)
		}
		c.history.add(e)
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (h *history) add(e event) {
	switch {
	case e.Hold != nil:
		h.holds = append(h.holds, *e.Hold)
	case e.Access != nil:
		h.accesses = append(h.accesses, *e.Access)
	case e.Append != nil:
		h.appends = append(h.appends, *e.Append)
	}
}

// patience is how long the harness waits for what should take moments.
const patience = 30 * time.Second

// await waits until cond holds.
func (c *cell) await(ctx context.Context, what string, cond func() bool) error {
	for end := time.Now().Add(patience); ; pause(ctx, 2*time.Millisecond) {
		ok := cond()
		c.mu.Lock()
		err := c.fatal
		c.mu.Unlock()
		switch {
		case err != nil:
			return err
		case ok:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(end):
			return fmt.Errorf("timed out after %v, waiting until %s", patience, what)
		}
	}
}

// eachProxy does something to every process's proxy to a node.
func (c *cell) eachProxy(node int, do func(*redistest.Proxy)) {
	for _, proxies := range c.proxies {
		do(proxies[node])
	}
}

// cut stops or restores all traffic to a node.
func (c *cell) cut(node int, on bool) {
	c.eachProxy(node, func(p *redistest.Proxy) {
		p.BlackHole(on)
		if !on {
			p.ResetAll() // those connections would stay silent
		}
	})
}

// move makes s take a node's place in the network.
func (c *cell) move(node int, s *redistest.Server) error {
	addr, err := c.front(s)
	if err != nil {
		return err
	}
	c.eachProxy(node, func(p *redistest.Proxy) {
		p.SetTarget(addr)
		p.ResetAll()
	})
	return nil
}

// votes waits until a node takes part again: until the key that every process wants is seen on it.
func (c *cell) votes(ctx context.Context, node int) error {
	return c.await(ctx, fmt.Sprintf("node %d votes again", node), func() bool {
		n, err := c.nodes[node].Exists(ctx, "lock:"+hotKey).Result()
		return err == nil && n == 1
	})
}

// holder finds the process that holds key, by the owner on the first node, which begins with
// host:pid. It is nil if there is none, or the key is kept for the next contender's turn.
func (c *cell) holder(ctx context.Context, key string) *process {
	label, _, _ := strings.Cut(c.nodes[0].Get(ctx, "lock:"+key).Val(), "#")
	host, _ := os.Hostname()
	for _, p := range c.procs {
		if label == fmt.Sprintf("%s:%d", host, p.PID()) {
			return p
		}
	}
	return nil
}

// stopOne stops the process that find returns for so long, if find still returns it when it has
// stopped. Before it continues, wake is called with the time for which it was stopped, at least.
func (c *cell) stopOne(ctx context.Context, d time.Duration, find func() *process,
	wake func(p *process, stood time.Duration)) error {
	return c.await(ctx, "the right process is stopped", func() bool {
		p := find()
		if p == nil || p.Stop() != nil {
			return false
		}
		defer func() { _ = p.Cont() }()
		pause(ctx, 10*time.Millisecond) // what it reported before it stopped is recorded
		stopped := time.Now()
		defer func() { wake(p, time.Since(stopped)) }()
		if find() != p {
			return false
		}
		pause(ctx, d)
		return true
	})
}

// killOne kills the process that find returns, as kill -9 does, and starts another in its place. A
// write that it had begun may have been executed.
func (c *cell) killOne(ctx context.Context, find func() *process) error {
	var victim *process
	err := c.await(ctx, "the right process is stopped", func() bool {
		p := find()
		if p == nil || p.Stop() != nil {
			return false
		}
		if find() != p {
			_ = p.Cont()
			return false
		}
		victim = p
		return true
	})
	if err != nil {
		return err
	}
	c.mu.Lock()
	victim.killed = true
	c.mu.Unlock()
	victim.Kill()
	<-victim.drained
	c.mu.Lock()
	for _, a := range victim.begun {
		a.Unknown = true
		c.history.accesses = append(c.history.accesses, a)
	}
	c.mu.Unlock()
	return c.startProcess(c.setup, len(c.procs))
}

// working is the process that has reported that it has read what its lock protects, and not yet
// that it has written. nil if there is none.
func (c *cell) working() *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.procs {
		if p.working {
			return p
		}
	}
	return nil
}

// finish lets all processes end in order and returns their events. Those that do not end are
// killed, which is an error.
func (c *cell) finish() (*history, error) {
	for _, p := range c.procs {
		_ = p.CloseInput()
	}
	var errs []error
	for i, p := range c.procs {
		kill := time.AfterFunc(patience, p.Kill)
		<-p.drained
		kill.Stop()
		if err := p.End(patience); err != nil && !p.killed {
			errs = append(errs, fmt.Errorf("process %d: %w", i, err))
		}
	}
	c.procs = nil
	c.mu.Lock()
	defer c.mu.Unlock()
	return &c.history, errors.Join(append(errs, c.fatal)...)
}

// close ends whatever still runs.
func (c *cell) close() error {
	for _, p := range c.procs {
		p.Kill()
		<-p.drained
		_ = p.End(patience)
	}
	var errs []error
	for _, f := range c.closers {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}
