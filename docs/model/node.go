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
}

// want is a contender that waits.
type want struct {
	contender, client int
	offer             *offer // nil: it can be given a turn only
	missed            bool   // its turn was made, and it has made no request since
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

func (n *node) execute(m message) {
	if n.owner != 0 && n.time() >= n.expires {
		n.owner = 0
	}
	a := message{
		kind: answer, of: m.kind, client: m.client, node: n.id, owner: m.owner, round: m.round,
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
		if holder, marked := n.w.retainers[n.owner]; marked && !n.w.deafTo[holder][n.id] {
			n.w.send(notices, message{kind: recall, client: holder, node: n.id, owner: n.owner, contender: m.contender})
		}
		if declines {
			a.holder, a.left = leftToOthers, 1
		}
	}
}

// register adds m's contender, or keeps its place. An offer may be older than the one that it
// replaces, if m is late: either it was given up, or its vote is valid for less.
func (n *node) register(m message) {
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
	w := want{contender: m.contender, client: m.client}
	if i >= 0 {
		w.offer = n.wants[i].offer
		n.drop(m.contender)
	}
	if m.offer != nil {
		w.offer = m.offer
	}
	n.wants = append(n.wants, w)
	n.owner = 0
}

// release is lua/release.lua.
func (n *node) release(m message) {
	ours, kept := n.owner == m.owner, m.contender != 0 && n.owner == -m.contender
	stays := m.next != 0 && !m.leaves
	switch {
	case stays:
		n.drop(m.contender)
		n.wants = append(n.wants, want{contender: m.contender, client: m.client})
	case !m.unwanted:
		n.drop(m.contender)
	}
	rejoin := func() {
		if m.offer != nil {
			n.wants = append(n.wants, want{contender: m.contender, client: m.client, offer: m.offer})
		}
	}
	votes := m.grants && (n.kept() || !n.w.memory)
	if n.owner == 0 && m.next != 0 && !stays {
		if i := n.find(m.next); i >= 0 && votes && n.w.anywhere && n.wants[i].offer != nil && n.grant(i, m) {
			rejoin()
		}
		return
	}
	if !ours && !kept {
		if n.owner != 0 {
			rejoin()
		}
		return
	}
	if len(n.wants) > 0 {
		rejoin()
	}
	n.owner = 0
	n.wants = slices.DeleteFunc(n.wants, func(w want) bool { return w.missed })
	next := max(n.find(m.next), 0)
	for ; votes && len(n.wants) > 0 && n.wants[next].offer != nil; next = 0 {
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
	if !n.w.deafTo[w.client][n.id] {
		n.w.send(notices, message{kind: turn, client: w.client, node: n.id, contender: w.contender})
	}
}

// grant gives the key, which m has released, to the offer of the i-th want; not if nobody receives
// the message.
func (n *node) grant(i int, m message) bool {
	w := n.wants[i]
	n.drop(w.contender)
	if n.w.deafTo[w.client][n.id] {
		return false
	}
	span := w.offer.span
	if !n.w.span {
		span = m.span
	}
	n.set(w.offer.owner, span)
	n.w.send(notices, message{
		kind: grant, client: w.client, node: n.id, contender: w.contender, owner: w.offer.owner, k: w.offer.k,
		span: w.offer.span, token: n.bump(w.offer.block), counts: n.kept(), first: n.firstBut(w.contender),
	})
	return true
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
