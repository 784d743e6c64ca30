// Package links is a model of the protocol that internal/link is made for: not built yet. Connections boot in
// their handshake, epochs are arguments, and a vote counts by what was learned on the connection that brought
// it. Random walks try it: at each step one of the things happens that can happen.
package links

import (
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
)

// A tick is 20 ms.
const (
	nodes, majority, clients = 3, 2, 3

	markerAge  = 5   // how old a check of the marker may be
	historyAge = 50  // and one of the server's history
	ttl        = 150 // of every key; MaxTTL
	limit      = 50  // an attempt is decided by then
	quarantine = ttl + 1
	perTick    = 1000 // tokens, at most
	start      = 1000 // all nodes are established then, and no client knows that
	length     = 70   // of a walk
)

// world is three nodes with a replica each, and three clients that want one key.
type world struct {
	without       map[string]bool // rules that are taken out
	now, ids      int
	nodes         [nodes]*node
	clients       [clients]*client
	flushedAll    int
	given, leases int // given: the last token
	found         string
	out           io.Writer
}

func newWorld(without string, out io.Writer) *world {
	w := &world{without: map[string]bool{}, now: start, out: out, flushedAll: -1}
	for _, rule := range strings.Fields(without) {
		w.without[rule] = true
	}
	for n := range w.nodes {
		a := &server{w: w, n: n, name: fmt.Sprint(n, "A"), scripts: true, history: history{run: w.id()}}
		a.data = data{marker: w.id(), raw: true, past: past{w.ids, "kept", 0, a.history},
			counter: (start - 1) * perTick}
		a.disk = a.data
		b := *a
		b.name, b.replica, b.run = fmt.Sprint(n, "B"), true, w.id()
		w.nodes[n] = &node{w: w, servers: [2]*server{a, &b}}
	}
	for i := range w.clients {
		w.clients[i] = &client{w: w, id: i, seen: -quarantine - 1}
		for n := range w.nodes {
			w.clients[i].dial(n, 1)
		}
		w.clients[i].pump()
	}
	return w
}

func (w *world) id() int { w.ids++; return w.ids }

func (w *world) log(format string, args ...any) {
	if w.out != nil && (w.ids > 3*nodes+clients*nodes || w.found != "") { // not the first boots
		fmt.Fprintf(w.out, "    %5d ms  %s\n", (w.now-start)*20, fmt.Sprintf(format, args...))
	}
}

// What a walk must not find.
const (
	twoHolders = "two valid leases"
	lowToken   = "a token that does not rise"
	leftKey    = "a key that its client believes released"
)

func (w *world) wrong(what string) {
	if w.found == "" {
		w.found = what
		w.log("*** %s", what)
	}
}

// look ends leases that are over, and looks for two that are valid.
func (w *world) look() {
	holders := 0
	for _, c := range w.clients {
		if c.lease != nil && w.now >= c.until {
			c.end(c.lease)
		} else if c.held {
			holders++
		}
	}
	if holders > 1 {
		w.wrong(twoHolders)
	}
}

// A step is one thing that happens, if it can: chosen before, so that a walk is a list that can be made
// shorter.
type step struct {
	op, client, node, x int
	quick               bool // afterwards all that is under way for the client arrives
}

// at is what a step is about.
type at struct {
	w    *world
	c    *client
	l    *link // of the client to the node; nil: none is open
	node *node
	n, x int
}

// ops are all kinds of steps, and how often they happen, relative to others. From save on, each happens in
// some walks only. One that cannot happen returns false.
var ops = []struct {
	name  string
	often int
	do    func(at) bool
}{
	{"pump", 14, func(a at) bool { return a.c.pump() }},
	{"execute", 6, func(a at) bool { return a.l.execute() }},
	{"receive", 6, func(a at) bool {
		if len(a.c.dead) > 0 && a.x%2 == 0 {
			a.l = a.c.dead[a.x/2%len(a.c.dead)]
		}
		return a.l.receive()
	}},
	{"dial", 16, func(a at) bool { return a.l == nil && a.c.dial(a.n, a.x) }},
	{"boot", 2, func(a at) bool { return a.l.usable() && a.l.boot(0) }},
	{"ask", 20, func(a at) bool { return a.c.lease == nil && a.c.ask() }},
	{"askoffer", 2, func(a at) bool {
		return a.l.usable() && a.c.offer != nil && a.c.offer.votes[a.n] == nil &&
			a.c.acquire(a.l, a.c.offer, request{})
	}},
	{"giveup", 3, func(a at) bool { return a.c.end(a.c.poll) && (a.x%3 > 0 || a.c.end(a.c.offer)) }},
	{"release", 10, func(a at) bool { return a.c.held && a.c.release(a.x%clients) }},
	{"refresh", 6, func(a at) bool { return a.c.lease != nil && a.c.refresh() }},
	{"repair", 4, func(a at) bool {
		return a.c.held && a.l.usable() && a.c.lease.votes[a.n] == nil &&
			a.c.acquire(a.l, a.c.lease, request{repair: true, top: a.c.token})
	}},
	{"check", 1, func(a at) bool { return a.l.usable() && a.l.check(a.x%2 == 0) }},
	{"pay", 2, func(a at) bool { return a.l.usable() && a.c.pay(a.l) }},
	{"tick", 9, func(a at) bool {
		a.w.now += [...]int{1, 1, 1, markerAge + 1, limit * 4 / 5, historyAge + 1, ttl * 3 / 4,
			quarantine + 1}[a.x%8]
		return true
	}},
	{"late", 3, func(a at) bool { return a.node.executeLate(a.x) }},
	{"close", 3, func(a at) bool { return a.l.close() }},
	{"bootstrap", 3, func(a at) bool { return a.w.bootstrap(a.c) }},
	{"save", 3, func(a at) bool { return a.node.master().save() }},
	{"flush", 2, func(a at) bool { return a.w.mayLose(a.n) && a.node.loses((*server).flush, "FLUSHALL on %s") }},
	{"flushall", 1, func(a at) bool {
		may := a.w.mayLose(0) && a.w.mayLose(1) && a.w.mayLose(2)
		for n := 0; may && n < nodes; n++ {
			a.w.nodes[n].loses((*server).flush, "FLUSHALL on %s")
			a.w.flushedAll = a.w.now
		}
		return may
	}},
	{"restart", 3, func(a at) bool {
		return a.w.mayLose(a.n) && a.node.loses(func(m *server) { m.restart(a.x % 3) }, "%s restarts")
	}},
	{"failover", 3, func(a at) bool {
		return a.w.mayLose(a.n) && a.node.loses(func(*server) { a.node.failover(a.x) }, "%s becomes a replica")
	}},
	{"sync", 3, func(a at) bool { return a.node.sync() }},
	{"swap", 3, func(a at) bool { return a.l.swap() }},
	{"scripts", 2, func(a at) bool { return a.node.master().flushScripts() }},
	{"fresh", 1, func(a at) bool { return a.c.restart() }},
}

// index is the place of a kind of step.
func index(name string) int {
	for i := range ops {
		if ops[i].name == name {
			return i
		}
	}
	panic(name)
}

func (w *world) do(s step) bool {
	c := w.clients[s.client]
	did := ops[s.op].do(at{w, c, c.links[s.node], w.nodes[s.node], s.node, s.x})
	if did && s.quick {
		c.pump()
	}
	w.look()
	return did
}

// parse reads a plot: a step is its name, and up to three figures for client, node and x; with ! it is quick.
func parse(plot string) (steps []step) {
	for _, word := range strings.Fields(plot) {
		name := strings.TrimRight(word, "0123456789!")
		figures := strings.TrimSuffix(word[len(name):], "!") + "000"
		figure := func(i int) int { return int(figures[i] - '0') }
		steps = append(steps, step{index(name), figure(0), figure(1), figure(2), strings.HasSuffix(word, "!")})
	}
	return steps
}

// randomWalk makes a walk of things that happen, in w. Which faults there are, and who is concerned, is
// chosen for each walk, so that some have much of a few. Often each client lacks another node, so that all
// need the one that has the faults: else the walks would find little. A plot is made of steps that the walk
// makes, with others in between: there, client 0 lacks node 1, and client 1 node 2.
func (w *world) randomWalk(seed int, plot []step) (walk []step) {
	r := rand.New(rand.NewPCG(uint64(seed), 2))
	odds, sum, faults := make([]int, len(ops)), 0, index("save")
	for op := range ops {
		k := r.IntN(6)
		if odds[op] = ops[op].often; op >= faults && k < 4 || op >= index("late") && k < 3 || k == 0 {
			odds[op] = 0
		} else if k == 5 {
			odds[op] *= 4
		}
		sum += odds[op]
	}
	alive, faulty, apart, quick, noise := 2+r.IntN(clients-1), r.IntN(nodes), r.IntN(4) > 0, 2+r.IntN(6),
		r.IntN(4)
	if plot != nil {
		alive, faulty, apart = clients, 0, true
	}
	lacks := func(c, n int) bool { return apart && c < 2 && n == (faulty+1+c)%nodes }
	for i := range clients * nodes {
		if s := (step{op: index("close"), client: i / nodes, node: i % nodes}); lacks(s.client, s.node) && w.do(s) {
			walk = append(walk, s)
		}
	}
	for range 4 * length {
		s := step{0, r.IntN(alive), r.IntN(nodes), r.IntN(256), r.IntN(8) < quick}
		for k := r.IntN(max(sum, 1)); sum > 0 && k >= odds[s.op]; s.op++ {
			k -= odds[s.op]
		}
		if (s.op >= faults || s.op == index("late")) && r.IntN(8) > 0 {
			s.node = faulty
		}
		if len(plot) > 0 && r.IntN(12) >= noise {
			s, plot = plot[0], plot[1:]
		} else if s.op == index("dial") && r.IntN(12) > 0 && lacks(s.client, s.node) {
			continue
		}
		if w.do(s) {
			walk = append(walk, s)
		}
		if w.found != "" || len(walk) >= length {
			break
		}
	}
	return walk
}

// run makes the steps of a walk, and returns what is wrong then.
func (w *world) run(walk []step) string {
	for i := 0; i < len(walk) && w.found == ""; i++ {
		w.do(walk[i])
	}
	return w.found
}

// shortest takes out of a walk what is not needed to find the same.
func shortest(without string, walk []step, what string) []step {
	for size := len(walk) / 2; size > 0; size /= 2 {
		for i := 0; i+size <= len(walk); {
			less := append(append([]step{}, walk[:i]...), walk[i+size:]...)
			if newWorld(without, nil).run(less) == what {
				walk = less
			} else {
				i++
			}
		}
	}
	return walk
}
