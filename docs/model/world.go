package main

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
)

// All times are in milliseconds of virtual time.
const (
	nodes, majority, clients = 3, 2, 3

	ttl      = 200.0
	drift    = 0.01 // the clock drift that a validity allows for; clocks are within half of it
	slack    = 2.0
	minSpan  = 100.0 // of a grant
	maxSpan  = 120.0
	turnTime = 40.0 // how long a client of before keeps the key for a contender that has made no offer
	timeout  = 60.0 // a node has to answer
	trouble  = 2500 // until then there are faults
	end      = 6500
	patience = 3500 // how long a waiter has to get the key when there are none

	pollsPerSpan = .4       // so a grant has more than half of its span left
	awaitTime    = 6        // half a round trip or more: the time between messages of different nodes
	leftToOthers = -1 << 62 // a holder: the key is free, and was left to another

	// How long the key may be nobody's while others wait and one of them is killed, or stopped. The latter is
	// the span of its grant, and the time until the next poll.
	killedGap, stoppedGap = 50, maxSpan + 50

	// With a contender that polls it takes more polls, since those of others leave the key to it first.
	pollGap = 150
)

// valid is how much of a span a client may rely on.
func valid(span float64) float64 { return span - span*drift - slack }

// clock is a node's or client's clock, relative to the world's time.
type clock struct{ rate, offset float64 }

func (c clock) at(now float64) float64 { return now*c.rate + c.offset }

// A world is the whole state, and the one place where time passes.
type world struct {
	rules
	faults
	now      float64
	rand     *rand.Rand
	nodes    [nodes]*node
	clients  [clients]*client
	flying   []*message
	landed   []*message         // memory for the next flying
	lastAt   map[[3]int]float64 // of messages sent on a connection, which stay in order
	masters  int                // of nodes: all, or one, which is a Cluster
	majority int
	before   *node // on a Cluster: the master that was demoted, but does not know that yet
	demotion float64
	owners   int // so far
	lost     float64
	// two leases may be valid until then, because a Cluster has lost what its replica did not have
	excused   float64
	maxTop    int64       // the largest token that any client has reserved
	given     int64       // the last token that a holder has got
	retainers map[int]int // the client of each owner whose lease may be retained

	found    string // what is wrong; "": nothing so far
	count    counts
	longest  float64         // how long that one has waited without faults
	gapSince float64         // since when somebody waits and nobody has the key; 0: not so
	dead     map[int]bool    // contenders of processes that were killed
	stopped  float64         // until when a waiter is stopped
	met      map[[2]int]bool // such a contender, and a node that has had a turn for it
	log      io.Writer
}

// counts are the events so far.
type counts struct {
	leases, byGrant, reused, commands int
	idle                              int          // milliseconds in which somebody waits and nobody has the key
	of                                [clients]int // leases of each client, in the first part
}

// kind of a message.
type kind uint8

const (
	acquire kind = iota
	refresh
	done    // the short release: deletes the key if nobody waits, else names the first that does
	pass    // the release that grants the key
	release // that of clients of before, which makes turns
	undo
	answer // to any of these
	grant  // the key is yours
	turn   // the key is kept for you
	recall // the key that you may have retained is wanted
)

// link is a connection of a client to a server.
type link struct {
	at     *node
	closed bool
}

// message is one request, answer or notice.
type message struct {
	at           float64
	kind, of     kind // of: what an answer is to
	client, node int
	on           *link
	owner        int
	contender    int // on whose behalf
	ttl          float64
	block        int     // acquire: 0 is a repair
	offer        *offer  // acquire, undo, release: what is to be registered
	waits        bool    // acquire: a free key is left to the one that waits longest
	forgets      bool    // undo: the contender has no offer any more
	next         int     // pass: the contender that is to be next; 0: each node's first
	unwanted     bool    // pass: the contender is not among the wants, as its client knows
	span         float64 // grant: for how long, as its offer has it; pass: as the one that releases has it
	top          int64   // refresh: the counter is to have reached it
	round        int     // of a refresh

	token    int64
	granted  bool    // answer: acquired, renewed, deleted
	holder   int     // answer: who has the key
	left     float64 // answer: for how long
	first    int     // answer, grant: the contender that waits longest, but this one
	counts   bool    // the node has kept its data for long enough
	k        int     // grant: the poll that the node had
	deadLine bool    // the connection has broken: executed on its own, and not answered
}

func newWorld(r rules, f faults, seed uint64, log io.Writer) *world {
	w := &world{
		rules: r, faults: f, rand: rand.New(rand.NewPCG(seed, 1)),
		lastAt: map[[3]int]float64{}, retainers: map[int]int{}, lost: math.Inf(-1), log: log,
		masters: nodes, majority: majority, dead: map[int]bool{}, met: map[[2]int]bool{},
	}
	if r.cluster {
		w.masters, w.majority = 1, 1
	}
	skewed := func() clock {
		return clock{1 + (w.rand.Float64()-.5)*drift*.8, float64(1000 + w.rand.IntN(5000))}
	}
	for i := range w.nodes {
		w.nodes[i] = &node{w: w, id: i, clock: skewed(), since: math.Inf(-1)}
	}
	for i := range w.clients {
		w.clients[i] = &client{w: w, id: i, clock: skewed()}
		w.clients[i].start()
	}
	return w
}

func (w *world) logf(format string, args ...any) {
	if w.log != nil {
		fmt.Fprintf(w.log, "%6.0f  %s\n", w.now, fmt.Sprintf(format, args...))
	}
}

func (w *world) wrong(what, format string, args ...any) {
	if w.found == "" {
		w.found = what
		w.logf("%s: %s", what, fmt.Sprintf(format, args...))
	}
}

// each is the numbers of the nodes that there are.
func (w *world) each() []int { return []int{0, 1, 2}[:w.masters] }

func (w *world) troubled() bool { return w.now < trouble }

// oneIn is true once in n, if such faults happen now.
func (w *world) oneIn(n int, fault bool) bool { return fault && w.troubled() && w.rand.IntN(n) == 0 }

// The connections of a client to a node.
const (
	requests = iota
	answers
	notices
)

// send makes m arrive, after earlier messages of that connection, if that lives so long.
func (w *world) send(conn int, m message) {
	if w.oneIn(60, w.loss) {
		return
	}
	if conn == requests && w.oneIn(60, w.faults.late) {
		m.at, m.deadLine = w.now+20+float64(w.rand.IntN(600)), true
		w.flying = append(w.flying, &m)
		return
	}
	d := 1 + float64(w.rand.IntN(4))
	if !w.steady && w.rand.IntN(12) == 0 {
		d += float64(w.rand.IntN(60))
	}
	if conn == notices && w.oneIn(10, w.loss) {
		d += float64(w.rand.IntN(200))
	}
	line := [3]int{conn, m.client, m.node}
	m.at = max(w.lastAt[line], w.now+d)
	w.lastAt[line] = m.at
	w.flying = append(w.flying, &m)
	if conn == notices && w.oneIn(10, w.twice) {
		again := m
		again.at += float64(w.rand.IntN(20))
		w.flying = append(w.flying, &again)
	}
}

// run lets time pass until the end, or until something is wrong.
func (w *world) run() *world {
	for ; w.now < end && w.found == ""; w.now++ {
		w.disturb()
		flying := w.flying
		w.flying = w.landed[:0]
		for _, m := range flying {
			switch {
			case m.at > w.now:
				w.flying = append(w.flying, m)
			case m.kind >= answer:
				if !m.on.closed || !w.silent {
					w.clients[m.client].unread = append(w.clients[m.client].unread, *m)
				}
			case m.on.at.serves():
				m.on.at.execute(*m)
			default: // MOVED
				w.redirect(m)
			}
		}
		w.landed = flying
		for _, i := range w.rand.Perm(clients) {
			w.clients[i].live()
		}
		w.checkHolders()
	}
	return w
}

// disturb makes faults happen that are not those of a message.
func (w *world) disturb() {
	n := w.nodes[w.rand.IntN(w.masters)]
	if w.oneIn(150, w.steps) { // also what happens when a slot moves to another server
		d := float64(w.rand.IntN(3000) - 1500)
		n.clock.offset += d
		n.expires += d // what a step of the clock does to a ttl is as old as Redlock, and not for a protocol to fix
		n.since += d
		if n.copy != nil {
			n.copy.expires += d
		}
		w.logf("node %d: its clock steps by %.0f", n.id, d)
	}
	if w.now-w.lost > 1.1*ttl+60 && w.oneIn(200, w.restarts) {
		w.lost = w.now
		n.owner, n.wants, n.counter, n.since = 0, nil, 0, n.time()
		w.logf("node %d: restarts empty", n.id)
	}
	if w.oneIn(100, w.breaks) {
		w.clients[w.rand.IntN(clients)].loseLink(n.id)
	}
	if c := w.clients[w.rand.IntN(clients)]; w.oneIn(400, w.kills) && (!w.steady || c.mayGo()) {
		c.kill()
	}
	if c := w.clients[w.rand.IntN(clients)]; w.oneIn(400, w.stops) && w.now > w.stopped && c.mayGo() {
		w.stopped = w.now + 1000
		c.pausedUntil = w.stopped
		w.logf("client %d is stopped", c.id)
	}
	switch {
	case w.before != nil && w.now >= w.demotion:
		// how tokens go on after a failover is not the matter
		w.nodes[0].counter = max(w.nodes[0].counter, w.before.counter)
		w.before = nil
	case w.before != nil:
	case w.oneIn(200, w.moves):
		w.move(0, 0)
	case w.now > w.excused && w.oneIn(200, w.failovers):
		w.move(30, 80)
	}
}

// move has the key, and what belongs to it, on another master: because its slot was moved; or because a
// replica was made the master, which lacks what has happened in the last moments. The one of before does not
// know that at once. Until all leases of then are over, two may be valid: that is not for a lock to prevent.
func (w *world) move(lacks, late int) {
	old := w.nodes[0]
	now := *old
	if lacks > 0 && old.copy != nil {
		now.owner, now.expires, now.wants = old.copy.owner, old.copy.expires, old.copy.wants
		w.demotion = w.now + float64(w.rand.IntN(late))
		w.before, w.excused = old, w.demotion+1.05*ttl+5
	}
	now.copy, now.wants = nil, slices.Clone(now.wants)
	w.nodes[0] = &now
	w.logf("the key is on another master; it lacks something: %t", w.before != nil)
}

// redirect has a client send m to the master that has the key now.
func (w *world) redirect(m *message) {
	c := w.clients[m.client]
	switch {
	case m.deadLine || m.on.closed:
		return
	case c.links[m.node] == m.on:
		c.links[m.node] = &link{at: w.nodes[m.node]}
	case c.links[m.node] == nil:
		return
	}
	again := *m
	again.on = c.links[m.node]
	w.send(requests, again)
}

// checkHolders checks whether two clients hold a lease that they may rely on.
func (w *world) checkHolders() {
	var holder *client
	waits := false
	for _, c := range w.clients {
		waits = waits || c.state == waiting && w.now > c.waits+20 && w.now >= c.pausedUntil
		if c.state != holding || c.time() >= c.until {
			continue
		}
		if holder != nil && w.now > w.excused {
			w.wrong(twoHolders, "client %d as %d, client %d as %d", holder.id, holder.lease.owner, c.id, c.lease.owner)
		}
		holder = c
	}
	if holder != nil || !waits {
		w.gapSince = 0
		return
	}
	if w.count.idle++; w.gapSince == 0 {
		w.gapSince = w.now
	}
	most := float64(killedGap)
	switch {
	case w.stops:
		most = stoppedGap
	case w.pollers:
		most = pollGap
	}
	if gap := w.now - w.gapSince; w.steady && w.troubled() && gap > most {
		w.wrong(idles, "for %.0f", gap)
	}
}
