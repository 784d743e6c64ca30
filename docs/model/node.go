package main

// node is a server, by what its scripts do. Each request is one atomic step.
type node struct {
	w       *world
	id      int
	clock   clock
	owner   int // of the key; 0: nobody; below 0: it is kept for the turn of that contender
	expires float64
	counter int64
	wants   []want
	since   float64 // when it has lost its memory last
}

// want is a contender that waits, and all that a vote for it needs.
type want struct {
	contender, client int
	owner, block      int // the lease that it is to have
	turn              float64
	k                 int // the poll that has brought this
}

func (n *node) time() float64 { return n.clock.at(n.w.now) }

// kept reports whether the node has its memory for so long that whatever it forgot is over.
func (n *node) kept() bool { return n.time()-n.since >= 1.05*ttl+5 }

// bump reserves a block of tokens. A counter that was lost begins at the time in microseconds, by clocks that
// agree: what it costs if they do not is documented, and is not of this protocol.
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
		holder: n.owner, counts: n.kept(),
	}
	switch m.kind {
	case acquire:
		a.granted, a.token = n.acquire(m)
	case refresh:
		if a.granted = n.owner == m.owner; a.granted {
			n.expires = max(n.expires, n.time()+m.ttl)
			if n.w.reraise {
				n.counter = max(n.counter, m.top)
			}
		}
	case release, undo:
		n.drop(m.contender)
		if m.want != nil {
			n.register(*m.want)
		}
		if n.owner == m.owner {
			n.owner = 0
			if m.kind == release {
				n.pass(m)
			}
		}
	}
	a.first = n.firstBut(m.contender)
	if !m.deadLine {
		n.w.send(answers, a)
	}
}

func (n *node) acquire(m message) (granted bool, token int64) {
	switch {
	case n.owner == 0, m.contender != 0 && n.owner == -m.contender:
		n.set(m.owner, m.ttl)
		n.drop(m.contender)
		return true, n.bump(m.block)
	case n.owner == m.owner: // asked again
		n.expires = max(n.expires, n.time()+m.ttl)
		return true, n.counter
	}
	if m.want != nil {
		n.register(*m.want)
	}
	return false, 0
}

// register gives w its place, or the one that its contender has.
func (n *node) register(w want) {
	for i := range n.wants {
		if old := &n.wants[i]; old.contender == w.contender {
			if !n.w.younger || w.k >= old.k {
				*old = w
			}
			return
		}
	}
	n.wants = append(n.wants, w)
}

func (n *node) drop(contender int) {
	for i := range n.wants {
		if n.wants[i].contender == contender {
			n.wants = append(n.wants[:i:i], n.wants[i+1:]...)
			return
		}
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

// pass gives the key, which m has released, to who is next.
func (n *node) pass(m message) {
	if n.w.memory && !n.kept() {
		return
	}
	for range clients {
		var next *want
		for i := range n.wants {
			if w := &n.wants[i]; w.contender == m.next || m.next == 0 || !n.w.named {
				next = w
				break
			}
		}
		if next == nil {
			return
		}
		to := *next
		if n.w.deafTo[to.client][n.id] { // nobody has received it
			n.drop(to.contender)
			continue
		}
		span := to.turn
		if !n.w.turn {
			span = m.turn
		}
		notice := message{kind: turn, client: to.client, node: n.id, contender: to.contender}
		if n.w.grants {
			n.drop(to.contender)
			n.set(to.owner, span)
			notice.kind, notice.owner, notice.k, notice.turn = grant, to.owner, to.k, to.turn
			notice.token, notice.counts = n.bump(to.block), n.kept()
			notice.first = n.firstBut(to.contender)
		} else {
			n.set(-to.contender, span)
		}
		n.w.send(notices, notice)
		return
	}
}
