package prom

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"github.com/flightlock/flightlock"
	"github.com/prometheus/client_golang/prometheus"
)

// clients are the open Clients, whose Stats are read at each scrape, and what remains of the closed ones.
type clients struct {
	m *metrics

	mu   sync.Mutex // guards what follows; no Stats are read under it
	open map[*flightlock.Client]struct{}
	past sums // of those that were closed: a counter must not go back
}

// sums are the Stats of several Clients.
type sums struct {
	flightlock.Stats
	nodes map[string]flightlock.NodeStats
}

func (s *sums) add(o flightlock.Stats, nodes []flightlock.NodeStats) {
	for _, f := range ofClients {
		f.add(&s.Stats, &o)
	}
	s.OldestDo = max(s.OldestDo, o.OldestDo)
	for _, o := range nodes {
		n := s.nodes[o.Name]
		n.Suspended = n.Suspended || o.Suspended
		n.Quarantined = n.Quarantined || o.Quarantined
		n.Unverified = n.Unverified || o.Unverified
		n.Unguarded = n.Unguarded || o.Unguarded
		n.Mode = cmp.Or(o.Mode, n.Mode)
		n.Debts += o.Debts
		n.Commands += o.Commands
		s.nodes[o.Name] = n
	}
}

func (c *clients) init(m *metrics) {
	c.m, c.open = m, map[*flightlock.Client]struct{}{}
	c.past.nodes = map[string]flightlock.NodeStats{}
}

func (c *clients) opened(client *flightlock.Client) (closed func()) {
	for _, n := range client.NodeStats() {
		c.m.trip.WithLabelValues(n.Name)
		c.m.failures.WithLabelValues(n.Name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[client] = struct{}{}
	return func() { c.closed(client) }
}

// closed keeps the counters of a Client.
func (c *clients) closed(client *flightlock.Client) {
	last, nodes := client.Stats(), client.NodeStats()
	for _, f := range ofClients {
		f.pass(&last)
	}
	last.OldestDo = 0
	for i, n := range nodes {
		nodes[i] = flightlock.NodeStats{Name: n.Name, Commands: n.Commands}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, there := c.open[client]; there { // once, if it has two Observers of one Registerer
		delete(c.open, client)
		c.past.add(last, nodes)
	}
}

// read gives the sums; ok is false if no Client is open.
func (c *clients) read() (s sums, ok bool) {
	c.mu.Lock()
	open := slices.Collect(maps.Keys(c.open)) // what is closed from here on is still counted as open
	s = sums{c.past.Stats, maps.Clone(c.past.nodes)}
	c.mu.Unlock()
	used := map[string]bool{}
	for _, client := range open {
		nodes := client.NodeStats()
		s.add(client.Stats(), nodes)
		for _, n := range nodes {
			used[n.Name] = true
		}
	}
	maps.DeleteFunc(s.nodes, func(name string, _ flightlock.NodeStats) bool { return !used[name] })
	return s, len(open) > 0
}

// What is read at each scrape.
var (
	ofClients = []field[flightlock.Stats]{
		level(func(s *flightlock.Stats) *int64 { return &s.Waiters }, "waiters", "Callers waiting for a lock now."),
		level(func(s *flightlock.Stats) *int64 { return &s.Held }, "held_locks", "Locks held now."),
		level(func(s *flightlock.Stats) *int64 { return &s.Retained }, "retained_leases",
			"Leases that nobody holds, kept for the next caller of the process."),
		total(func(s *flightlock.Stats) *uint64 { return &s.Acquired }, "acquired_total",
			"Locks given to callers, handoffs included."),
		total(func(s *flightlock.Stats) *uint64 { return &s.Grants }, "grants_total",
			"Leases that the release of another process has granted, without an attempt that won."),
		total(func(s *flightlock.Stats) *uint64 { return &s.Handoffs }, "handoffs_total",
			"Locks handed over within the process, without Redis."),
		total(func(s *flightlock.Stats) *uint64 {
			return &s.Reused
		}, "reused_total", "Handoffs of retained leases."),
		total(func(s *flightlock.Stats) *uint64 { return &s.Recalled }, "recalled_total",
			"Retained leases that were released because the key was wanted elsewhere."),
		total(func(s *flightlock.Stats) *uint64 {
			return &s.Attempts
		}, "attempts_total", "Remote attempts started."),
		total(func(s *flightlock.Stats) *uint64 { return &s.Expired }, "expired_locks_total",
			"Locks that ended by their ttl, never refreshed and without a Context."),
	}
	descOldestDo = desc("oldest_do_lock_seconds",
		"How long the oldest lock that Do, AutoRefresh or a Fetcher refreshes has been held; 0 if there is none.")
	flags = []struct {
		desc *prometheus.Desc
		of   func(n flightlock.NodeStats) bool
	}{
		{desc("node_suspended",
			"1 while the node is suspended: it did not answer, or refused the login, and is only probed.", "node"),
			func(n flightlock.NodeStats) bool { return n.Suspended }},
		{desc("node_quarantined",
			"1 while the node's votes do not count, because it lost its data less than MaxTTL ago.", "node"),
			func(n flightlock.NodeStats) bool { return n.Quarantined }},
		{desc("node_unverified",
			"1 while the node has no vote, because it does not report whether it lost its data.", "node"),
			func(n flightlock.NodeStats) bool { return n.Unverified }},
		{desc("node_unguarded", "1 while scripts on the node may not access keys of two hash slots, because it is "+
			"one of several servers: with such a node there is no quarantine.", "node"),
			func(n flightlock.NodeStats) bool { return n.Unguarded }},
	}
	descMode = desc("node_mode",
		"1, with how the node is used as label mode: its version, how scripts are sent, how "+
			"a key passes to those who wait, and whether there is a quarantine.", "node", "mode")
	descDebts = desc("node_debts",
		"Unacknowledged releases: sent or to be sent to the node, and not confirmed by it yet.", "node")
	descCommands = desc("node_commands_total",
		"Acquires, refreshes and releases written to the node; a batch counts each of them.", "node")
)

func (c *clients) describe(ch chan<- *prometheus.Desc) {
	for _, f := range ofClients {
		ch <- f.desc
	}
	ch <- descOldestDo
	for _, f := range flags {
		ch <- f.desc
	}
	ch <- descMode
	ch <- descDebts
	ch <- descCommands
}

// collect reports false, and nothing else, if no Client is open.
func (c *clients) collect(ch chan<- prometheus.Metric) bool {
	s, ok := c.read()
	if !ok {
		return false
	}
	for _, f := range ofClients {
		f.collect(ch, &s.Stats)
	}
	gauge(ch, descOldestDo, s.OldestDo.Seconds())
	for name, n := range s.nodes {
		for _, f := range flags {
			on := 0.0
			if f.of(n) {
				on = 1
			}
			gauge(ch, f.desc, on, name)
		}
		if n.Mode != "" {
			gauge(ch, descMode, 1, name, n.Mode)
		}
		gauge(ch, descDebts, float64(n.Debts), name)
		count(ch, descCommands, n.Commands, name)
	}
	return true
}
