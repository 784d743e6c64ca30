// Package readers models read leases: what nodes keep of readers beside a writer (lua/readers.lua), and what
// a majority of them proves. It is small on purpose: tokens, waiting, and nodes that lose data are those of
// any lease.
//
// Time passes in ticks. A request may be executed at any time after it was sent, or never, and its answer may
// be lost. A lease is valid for a ttl from when its request was sent, and a key or a share lives for a ttl
// from when that was executed. Every step is one of a few actions, chosen by chance or, with one node, all of
// them in turn. The invariant: no writer's lease is valid beside anybody else's.
package readers

import "fmt"

const (
	processes = 3 // the last one writes
	writer    = processes - 1
	attempts  = 2 // owners of a process that are in use at a time
	owners    = processes * attempts
	maxNodes  = 3
)

// ttls are those of the processes, in ticks.
var ttls = [processes]int8{4, 2, 4}

func ttlOf(owner int) int8 { return ttls[owner/attempts] }

// Rules are what makes it safe. A test removes one after the other.
type Rules struct {
	LastOut   bool // a reader releases the key only if no share is left
	OwnShare  bool // a refresh extends the reader's own share, and nothing if it has none
	Longest   bool // the key lives as long as the longest share
	Majority  bool // more than half of the nodes decide
	Exclusive bool // a writer is granted no key that readers share
}

// All are the rules as they are built.
var All = Rules{true, true, true, true, true}

// holder of a key: nobody, readers, or an owner from first on.
const (
	nobody uint8 = iota
	shared
	first
)

// node is what one node has: who holds the key and for how long, and the shares.
type node struct {
	holder uint8
	left   int8
	share  [owners]int8
}

// The kinds of requests.
const (
	acquire = iota
	refresh
	leave
	kinds
)

// process is one contender. Its owner is that of its current attempt.
type process struct {
	attempt           uint8
	trying, held      bool
	votes, renewed    uint8 // bit i: node i has granted, has renewed
	valid, validAfter int8  // ticks that are left; what a refresh in progress will make of it
}

// State is all there is.
type State struct {
	nodes  [maxNodes]node
	procs  [processes]process
	flying [owners][maxNodes]uint8 // bit k: a request of that kind may still be executed
}

// Model is rules on a number of nodes.
type Model struct {
	Rules
	Nodes int
}

func (m *Model) need() int {
	if m.Majority {
		return m.Nodes/2 + 1
	}
	return (m.Nodes + 1) / 2
}

func count(mask uint8) (n int) {
	for ; mask != 0; mask &= mask - 1 {
		n++
	}
	return n
}

func ownerOf(p int, s *State) int { return p*attempts + int(s.procs[p].attempt) }

// open shares the key, which only that owner has from now on.
func (n *node) open(owner int) {
	n.holder, n.share = shared, [owners]int8{}
	n.keep(owner, true)
}

// keep gives the owner a share with a full ttl.
func (n *node) keep(owner int, longest bool) {
	n.share[owner] = max(n.share[owner], ttlOf(owner))
	if n.left = ttlOf(owner); longest {
		n.left = n.longest()
	}
}

func (n *node) longest() (left int8) {
	for _, share := range n.share {
		left = max(left, share)
	}
	return left
}

// execute is a request at a node. It reports whether the node grants, or renews.
func (m *Model) execute(n *node, owner, kind int) bool {
	own := first + uint8(owner)
	if owner/attempts == writer {
		switch {
		case kind == acquire && (n.holder == nobody || n.holder == shared && !m.Exclusive),
			kind != leave && n.holder == own:
			n.holder, n.left = own, ttlOf(owner)
			return true
		case kind == leave && n.holder == own:
			n.holder, n.left = nobody, 0
		}
		return false
	}
	switch {
	case kind == acquire && n.holder == nobody:
		n.open(owner)
		return true
	case n.holder != shared:
		return false
	case kind == acquire, kind == refresh && n.share[owner] > 0:
		n.keep(owner, m.Longest)
		return true
	case kind == refresh:
		return !m.OwnShare
	case n.share[owner] > 0:
		n.share[owner] = 0
		if n.left = n.longest(); n.left == 0 || !m.LastOut {
			n.holder, n.left = nobody, 0
		}
	}
	return false
}

// tick lets time pass.
func (s *State) tick() {
	for i := range s.nodes {
		n := &s.nodes[i]
		for o := range n.share {
			n.share[o] = max(0, n.share[o]-1)
		}
		if n.left = max(0, n.left-1); n.left == 0 {
			n.holder = nobody
		}
	}
	for i := range s.procs {
		p := &s.procs[i]
		p.valid, p.validAfter = max(0, p.valid-1), max(0, p.validAfter-1)
		p.held = p.held && p.valid > 0
	}
}

// send puts a request to all nodes on its way.
func (m *Model) send(s *State, owner, kind int) {
	for i := range m.Nodes {
		s.flying[owner][i] |= 1 << kind
	}
}

// act is what process p does next by itself: it begins, refreshes, gives up or releases.
func (m *Model) act(s *State, i int, gives bool) bool {
	p := &s.procs[i]
	switch {
	case gives && (p.trying || p.held):
		m.send(s, ownerOf(i, s), leave)
		p.trying, p.held = false, false
	case gives:
		return false
	case p.held:
		p.renewed, p.validAfter = 0, ttls[i]
		m.send(s, ownerOf(i, s), refresh)
	case p.trying:
		return false
	default: // what is left of the owner that is used again never arrives
		*p = process{attempt: (p.attempt + 1) % attempts, trying: true, valid: ttls[i]}
		o := ownerOf(i, s)
		s.flying[o] = [maxNodes]uint8{}
		for j := range s.nodes {
			if s.nodes[j].share[o] > 0 || s.nodes[j].holder == first+uint8(o) {
				return false // it is not over everywhere: an owner is of one attempt
			}
		}
		m.send(s, o, acquire)
	}
	return true
}

// arrive executes a request that is on its way, and delivers its answer, unless that is lost.
func (m *Model) arrive(s *State, owner, at, kind int, answered bool) bool {
	if s.flying[owner][at]&(1<<kind) == 0 {
		return false
	}
	s.flying[owner][at] &^= 1 << kind
	yes := m.execute(&s.nodes[at], owner, kind)
	i := owner / attempts
	p := &s.procs[i]
	if !yes || !answered || ownerOf(i, s) != owner {
		return true
	}
	switch {
	case kind == acquire && p.trying:
		if p.votes |= 1 << at; count(p.votes) >= m.need() {
			p.trying, p.held = false, p.valid > 0
		}
	case kind == refresh && p.held:
		if p.renewed |= 1 << at; count(p.renewed) >= m.need() {
			p.valid = max(p.valid, p.validAfter)
		}
	}
	return true
}

// actions is how many a state has, some of which may not be possible.
func (m *Model) actions() int { return 1 + 2*processes + 2*owners*m.Nodes*kinds }

// step takes action a, and reports whether it was possible.
func (m *Model) step(s *State, a int) bool {
	if a == 0 {
		s.tick()
		return true
	}
	if a--; a < 2*processes {
		return m.act(s, a/2, a%2 == 1)
	}
	a -= 2 * processes
	answered := a%2 == 0
	a /= 2
	return m.arrive(s, a/kinds/m.Nodes, a/kinds%m.Nodes, a%kinds, answered)
}

// violation names what is wrong with s, if anything is.
func (s *State) violation() error {
	if !s.procs[writer].held {
		return nil
	}
	for i, p := range s.procs[:writer] {
		if p.held {
			return fmt.Errorf("the writer is valid for %d ticks, beside reader %d for %d", s.procs[writer].valid, i,
				p.valid)
		}
	}
	return nil
}
