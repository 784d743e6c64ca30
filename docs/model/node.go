package main

import "slices"

// node is a server, reduced to its scripts. Each request is one atomic step.
type node struct {
	w       *world
	id      int
	clock   clock
	owner   int // of the key; 0: none; below 0: it is kept for the turn of that contender
	expires float64
	counter int64
	wants   []want  // in the order in which they are served
	since   float64 // when it last lost its data
	copy    *node   // what its replica has, on a Cluster
}

// want is a contender that waits.
type want struct {
	contender, client int
	offer             *offer // nil: it polls, and can be granted nothing
	missed            bool   // the key was left to it, or kept for its turn, and it has made no request since
}

// offer is everything that a vote for its contender needs.
type offer struct {
	owner, block int // the lease that it is to have
	span         float64
	k            int // the poll that has brought this
}

func (n *node) time() float64 { return n.clock.at(n.w.now) }

// kept reports whether the node has kept its data for so long that whatever it lost before has
// expired.
func (n *node) kept() bool { return n.time()-n.since >= 1.05*ttl+5 }

// bump reserves a block of tokens. A counter that was lost restarts at the time in microseconds, by
// clocks that agree: the consequence if they do not is documented, and is not part of this
// protocol.
func (n *node) bump(block int) int64 {
	n.counter += int64(block)
	if n.counter <= int64(block) {
		n.counter = int64((n.w.now+1000)*1000) + int64(block)
	}
	return n.counter
}

func (n *node) set(owner int, span float64) { n.owner, n.expires = owner, n.time()+span }

// serves reports whether n executes requests: it is the master, or was that and does not know better.
func (n *node) serves() bool { return n == n.w.nodes[n.id] || n == n.w.before }

// hears reports whether a message to client c would be received: it has a link to this very server.
func (n *node) hears(c int) bool {
	l := n.w.clients[c].links[n.id]
	return l != nil && l.at == n
}

func (n *node) execute(m message) {
	if n.w.failovers && (n.copy == nil || n.w.rand.IntN(20) == 0) {
		replica := *n
		replica.wants = slices.Clone(n.wants)
		n.copy = &replica
	}
	if n.owner != 0 && n.time() >= n.expires {
		n.owner = 0
	}
	a := message{
		kind: answer, of: m.kind, client: m.client, node: n.id, on: m.on, owner: m.owner, round: m.round,
		holder: n.owner, left: n.expires - n.time(), counts: n.kept(),
	}
	switch m.kind {
	case acquire:
		n.acquire(m, &a)
	case refresh:
		if a.granted = n.owner == m.owner; a.granted {
			n.expires = max(n.expires, n.time()+m.ttl)
			if n.w.reraise {
				n.counter = max(n.counter, m.top)
			}
		}
	case done:
		if a.granted = n.owner == m.owner; a.granted && (len(n.wants) == 0 || n.w.frees) {
			n.owner = 0
		}
	case pass:
		a.granted = n.owner == m.owner
		n.pass(m)
	case release:
		a.granted = n.owner == m.owner
		n.release(m)
	case undo:
		a.granted = n.owner == m.owner
		n.undo(m)
	}
	a.first = n.firstBut(m.contender)
	if !m.deadLine {
		n.w.send(answers, a)
	}
}

// acquire is lua/acquire.lua.
func (n *node) acquire(m message, a *message) {
	declines := n.owner == 0 && m.waits && len(n.wants) > 0 && n.wants[0].contender != m.contender
	switch {
	case n.owner == 0 && !declines, n.owner == -m.contender:
		n.set(m.owner, m.ttl)
		n.drop(m.contender)
		a.granted, a.token = true, n.bump(m.block)
		n.counter = max(n.counter, m.top)
	case n.owner == m.owner: // asked again
		n.expires = max(n.expires, n.time()+m.ttl)
		n.counter = max(n.counter, m.top)
		a.granted, a.token = true, n.counter
	case m.block == 0: // a repair
	case m.offer != nil && m.offer.owner == n.owner: // it was granted, and waits no more
	default:
		n.register(m)
		if holder, marked := n.w.retainers[n.owner]; marked {
			n.tell(holder, message{kind: recall, owner: n.owner, contender: m.contender})
		}
		if declines {
			a.holder, a.left = leftToOthers, 1
		}
	}
}

// register adds m's contender, or keeps its place. An offer may be older than the one that it
// replaces, if m is late: either it was given up, or its vote is valid for less.
func (n *node) register(m message) {
	if m.contender == 0 {
		return
	}
	delete(n.w.met, [2]int{m.contender, n.id}) // its last request may be executed after its end
	i := n.find(m.contender)
	if i >= 0 && n.wants[i].missed { // it starts again
		w := n.wants[i]
		w.missed = false
		n.drop(m.contender)
		i = len(n.wants)
		n.wants = append(n.wants, w)
	}
	if i < 0 {
		n.wants, i = append(n.wants, want{contender: m.contender, client: m.client}), len(n.wants)
	}
	if m.offer != nil {
		n.wants[i].offer = m.offer
	}
}

// undo is lua/undo.lua: the contender waits on, and gets its want back, which the grant removed.
func (n *node) undo(m message) {
	i := n.find(m.contender)
	if i >= 0 && m.forgets {
		n.wants[i].offer = nil
	}
	if n.owner != m.owner {
		return
	}
	n.owner = 0
	if m.contender == 0 {
		return
	}
	w := want{contender: m.contender, client: m.client}
	if i >= 0 {
		w.offer = n.wants[i].offer
		n.drop(m.contender)
	}
	if m.offer != nil {
		w.offer = m.offer
	}
	n.wants = append(n.wants, w)
}

// pass is what lua/release.lua does: the key goes to the contender that m names, for all nodes; or where that
// has made no offer, to the first one.
func (n *node) pass(m message) {
	if !m.unwanted {
		n.drop(m.contender)
	}
	ours := n.owner == m.owner || m.contender != 0 && n.owner == -m.contender
	free := n.owner == 0 && m.next != 0
	// it wants the key again, unless nobody else does
	if m.offer != nil && n.owner != 0 && (!ours || len(n.wants) > 0) {
		n.wants = append(n.wants, want{contender: m.contender, client: m.client, offer: m.offer})
	}
	next := n.find(m.next)
	switch {
	case ours:
		n.owner = 0
	case !free || next < 0 || !n.w.anywhere:
		return
	}
	if next < 0 && n.w.others {
		next = 0
	}
	for votes := n.kept() || !n.w.memory; votes && next >= 0 && next < len(n.wants); next = 0 {
		if w := n.wants[next]; w.offer != nil && n.grant(next, m) {
			return
		} else if w.offer == nil { // a contender that polls, to which polls of others leave the key; but only once
			if w.missed && n.w.spends {
				n.drop(w.contender)
				continue
			}
			n.spend(w.contender)
			w.missed = true
			n.drop(w.contender)
			n.wants = slices.Insert(n.wants, 0, w)
			return
		}
		if !n.w.received {
			return
		}
	}
}

// spend is called when n has a turn for contender, which need not be there any more.
func (n *node) spend(contender int) {
	turn := [2]int{contender, n.id}
	if n.w.dead[contender] && n.w.met[turn] && n.w.steady {
		n.w.wrong(again, "of contender %d, on node %d", contender, n.id)
	}
	n.w.met[turn] = n.w.dead[contender]
}

// release is the release of clients of before. It makes a turn of the key for a contender without an offer:
// keeps the key in its name.
func (n *node) release(m message) {
	if !m.unwanted {
		n.drop(m.contender)
	}
	if n.owner != m.owner && (m.contender == 0 || n.owner != -m.contender) {
		return
	}
	n.owner = 0
	n.wants = slices.DeleteFunc(n.wants, func(w want) bool { return w.missed })
	next := max(n.find(m.next), 0)
	for ; n.kept() && len(n.wants) > 0 && n.wants[next].offer != nil; next = 0 {
		if n.grant(next, m) {
			return
		}
	}
	if len(n.wants) == 0 {
		return
	}
	w := n.wants[next]
	n.set(-w.contender, turnTime)
	n.drop(w.contender)
	w.missed = true
	n.wants = slices.Insert(n.wants, 0, w)
	n.tell(w.client, message{kind: turn, contender: w.contender})
}

// grant gives the key, which m has released, to the offer of the i-th want; not if nobody receives
// the message.
func (n *node) grant(i int, m message) bool {
	w := n.wants[i]
	n.drop(w.contender)
	if n.w.received && !n.hears(w.client) {
		return false
	}
	span := w.offer.span
	if !n.w.span {
		span = m.span
	}
	n.set(w.offer.owner, span)
	n.tell(w.client, message{
		kind: grant, contender: w.contender, owner: w.offer.owner, k: w.offer.k,
		span: w.offer.span, token: n.bump(w.offer.block), counts: n.kept(), first: n.firstBut(w.contender),
	})
	return true
}

// tell sends a message to client c, if that has a link to n.
func (n *node) tell(c int, m message) {
	if n.hears(c) {
		m.client, m.node, m.on = c, n.id, n.w.clients[c].links[n.id]
		n.w.send(notices, m)
	}
}

func (n *node) find(contender int) int {
	return slices.IndexFunc(n.wants, func(w want) bool { return w.contender == contender })
}

func (n *node) drop(contender int) {
	if i := n.find(contender); i >= 0 {
		n.wants = slices.Delete(n.wants, i, i+1)
	}
}

func (n *node) firstBut(contender int) int {
	for _, w := range n.wants {
		if w.contender != contender {
			return w.contender
		}
	}
	return 0
}
