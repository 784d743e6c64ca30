package main

import (
	"cmp"
	"math"
	"slices"
)

// client is a process with one caller, who wants the key again and again.
type client struct {
	w           *world
	id          int
	clock       clock
	pausedUntil float64
	unread      []message

	state     state
	until     float64 // resting: until then; holding: how long the lease is good
	waits     float64 // since when, in the world's time
	leaves    float64
	contender int
	turn      float64

	sent   map[int]float64 // waiting: when each poll was sent
	polls  int
	pollAt float64
	next   *attempt // what others may grant: its owner is in the want, and in no acquire until one has
	poll   *attempt // the acquire under way; nil: none is

	lease     *attempt
	top       int64 // of its tokens
	releaseAt float64
	round     int
	began     float64
	confirmed [nodes]bool
	refreshes bool // one is under way
	follower  int  // the contender that waits longest, as far as is known

	debts []*debt
}

type state uint8

const (
	resting state = iota
	waiting
	raising
	holding
)

// attempt is one owner, and what it has got.
type attempt struct {
	owner, block int
	votes        []vote
	first        float64        // when the first of them came
	began        float64        // when it was made
	sentAt       [nodes]float64 // of the acquires, if there are any
	refused      [nodes]bool
	asked        bool // all nodes that have not voted
}

// vote is one node's: a token, and for how long the key is there. It is replaced as a whole.
type vote struct {
	node  int
	token int64
	start float64
	span  float64
}

func (v vote) until() float64 { return v.start + valid(v.span) }

// debt is a release that was not answered.
type debt struct {
	m  message
	at float64
}

func (c *client) time() float64 { return c.clock.at(c.w.now) }

func (c *client) rest() {
	c.state, c.lease, c.next, c.poll, c.contender = resting, nil, nil, nil, 0
	c.until = c.time() + float64(c.w.rand.IntN(40))
}

func (c *client) newAttempt() *attempt {
	c.w.owners++
	return &attempt{owner: c.w.owners, block: 1 + c.w.rand.IntN(3), began: c.time()}
}

// live is a moment of c's: it reads what has come, and does what is due.
func (c *client) live() {
	if c.w.now < c.pausedUntil {
		return
	}
	if c.w.oneIn(400, c.w.pauses) {
		c.pausedUntil = c.w.now + float64(c.w.rand.IntN(400))
		return
	}
	if c.state == holding && c.time() >= c.until { // before it learns of more
		c.act()
	}
	unread := c.unread
	c.unread = nil
	if c.w.rand.IntN(2) == 0 { // notices come by another connection
		slices.SortStableFunc(unread, func(a, b message) int {
			return cmp.Compare(min(b.kind, answer+1), min(a.kind, answer+1)) // all notices before all answers
		})
	}
	for _, m := range unread {
		c.hear(m)
	}
	c.act()
}

// What c does.

func (c *client) act() {
	now := c.time()
	for _, d := range c.debts {
		if now >= d.at {
			d.at = now + 60
			c.send(d.m)
		}
	}
	switch c.state {
	case resting:
		if now >= c.until {
			c.arrive()
		}
	case waiting:
		c.wait(now)
	case raising:
		if now >= c.until {
			a := c.lease
			c.state, c.lease, c.pollAt = waiting, nil, now
			c.giveUp(a)
		}
	case holding:
		switch {
		case now >= c.until || now >= c.releaseAt:
			c.leave()
		case now > c.began+ttl/3:
			c.refresh()
		}
	}
}

func (c *client) arrive() {
	c.w.owners++
	c.state, c.waits, c.contender, c.follower = waiting, c.w.now, c.w.owners, 0
	c.leaves = math.Inf(1)
	if c.w.oneIn(4, c.w.leaving) {
		c.leaves = c.time() + float64(c.w.rand.IntN(300))
	}
	c.sent, c.polls, c.next = map[int]float64{}, 0, c.newAttempt()
	c.ask()
}

func (c *client) wait(now float64) {
	if since := c.w.now - max(c.waits, trouble); since > patience {
		c.w.wrong(starved, "client %d", c.id)
	}
	if now >= c.leaves {
		c.leave()
		return
	}
	if p := c.poll; p != nil && (c.hopeless(p) || now > p.began+60) {
		c.giveUp(p)
	}
	if n := c.next; len(n.votes) > 0 && c.poll == nil {
		switch {
		case !n.asked && now > n.first+10: // messages may be lost; or the other nodes have none to grant it to
			n.asked = true
			for i := range nodes {
				if !n.has(i) {
					c.acquire(i, n, nil)
				}
			}
		case n.asked && (c.hopeless(n) || now > n.first+60):
			c.giveUp(n)
		}
		return
	}
	if now >= c.pollAt && c.poll == nil {
		c.ask()
	}
}

// ask is a poll: an attempt, which brings the contender its place, and the owner that it may be granted as.
func (c *client) ask() {
	c.polls++
	c.sent[c.polls] = c.time()
	if !c.w.block {
		c.next.block = 1 + c.w.rand.IntN(3)
	}
	c.poll = c.newAttempt()
	for i := range nodes {
		c.acquire(i, c.poll, c.want())
	}
	c.pollAt = c.time() + pollTime + float64(c.w.rand.IntN(10))
}

// want is how c is registered.
func (c *client) want() *want {
	return &want{contender: c.contender, client: c.id, owner: c.next.owner, block: c.next.block, turn: c.turn, k: c.polls}
}

func (c *client) acquire(node int, a *attempt, w *want) {
	a.sentAt[node] = c.time()
	c.send(message{
		kind: acquire, node: node, owner: a.owner, block: a.block, ttl: ttl,
		want: w, contender: c.contender,
	})
}

func (c *client) send(m message) {
	m.client = c.id
	c.w.count.commands++
	c.w.send(requests, m)
}

// giveUp ends an attempt that others may have granted, and waits on as another owner, in the same place.
func (c *client) giveUp(a *attempt) {
	if a != c.next { // it was a poll
		c.undo(a, nil)
		c.poll = nil
		return
	}
	if c.w.over {
		c.next = c.newAttempt()
	} else {
		c.next = &attempt{owner: a.owner, block: a.block, began: c.time()}
	}
	c.polls++ // younger than what may be under way
	c.sent[c.polls] = c.time()
	c.undo(a, c.want())
}

// undo takes back on all nodes whatever a may have got, and may yet get.
func (c *client) undo(a *attempt, w *want) {
	for i := range nodes {
		c.owe(message{kind: undo, node: i, owner: a.owner, want: w})
	}
}

// owe sends a release or an undo, until it is answered.
func (c *client) owe(m message) {
	m.turn = c.turn
	c.send(m)
	m.want = nil // if it comes late, a younger one may be there
	c.debts = append(c.debts, &debt{m, c.time() + 60})
}

// leave releases what c holds or may be granted. The next contender has it.
func (c *client) leave() {
	if c.poll != nil {
		c.undo(c.poll, nil)
	}
	switch {
	case c.state == holding:
		c.release(c.lease.owner)
	case !c.w.grants:
		c.release(-c.contender) // a turn that is kept for it
	case c.w.withdraw:
		c.release(c.next.owner)
	}
	c.rest()
}

func (c *client) release(owner int) {
	for i := range nodes {
		c.owe(message{kind: release, node: i, owner: owner, contender: c.contender, next: c.follower})
	}
}

func (c *client) refresh() {
	c.round++
	c.began, c.confirmed, c.refreshes = c.time(), [nodes]bool{}, true
	for i := range nodes {
		c.send(message{
			kind: refresh, node: i, owner: c.lease.owner, ttl: ttl, top: c.top,
			round: c.round, contender: c.contender,
		})
	}
}

// What c hears.

func (c *client) hear(m message) {
	if m.first != 0 && c.state != resting {
		c.follower = m.first
	}
	switch {
	case m.kind == grant:
		c.hearGrant(m)
	case m.kind == turn:
		if c.state == waiting && m.contender == c.contender && c.poll == nil {
			c.pollAt = c.time()
		}
	case m.of == acquire:
		c.hearAcquire(m)
	case m.of == refresh:
		c.hearRefresh(m)
	default:
		for i, d := range c.debts {
			if d.m.owner == m.owner && d.m.node == m.node {
				c.debts = append(c.debts[:i:i], c.debts[i+1:]...)
				break
			}
		}
	}
}

func (c *client) hearAcquire(m message) {
	if c.state != waiting {
		return
	}
	a := c.poll
	if a == nil || a.owner != m.owner {
		if a = c.next; a.owner != m.owner {
			return // it is over: it was undone
		}
	}
	a.refused[m.node] = !m.granted
	if m.granted {
		if m.counts || !c.w.memory {
			c.take(a, vote{m.node, m.token, a.sentAt[m.node], ttl})
		}
	} else if c.w.grants && m.holder == c.next.owner && !c.next.has(m.node) { // the message is late, or lost
		c.acquire(m.node, c.next, nil)
	}
}

// hearGrant takes a vote that a release has made.
func (c *client) hearGrant(m message) {
	switch {
	case c.next != nil && m.owner == c.next.owner && c.state == waiting:
		v := vote{m.node, m.token, c.sent[m.k], m.turn}
		if !c.w.causal {
			v.start = c.time()
		}
		if m.counts || !c.w.memory {
			c.take(c.next, v)
		}
	case c.next != nil && m.owner == c.next.owner, c.lease != nil && m.owner == c.lease.owner:
		// No vote any more; what ends the attempt, or the lease, ends this.
	case c.w.withdraw:
		c.owe(message{kind: release, node: m.node, owner: m.owner, next: m.first})
	}
}

func (c *client) hearRefresh(m message) {
	if c.lease == nil || m.owner != c.lease.owner || m.round != c.round || !c.refreshes {
		return
	}
	c.confirmed[m.node] = c.confirmed[m.node] || m.granted
	n := 0
	for _, yes := range c.confirmed {
		if yes {
			n++
		}
	}
	if n < majority || c.time() >= c.until {
		return
	}
	c.refreshes = false
	if c.state == raising {
		c.won(c.lease, c.until)
	} else {
		c.until = max(c.until, c.began+valid(ttl))
	}
}

// Votes.

func (a *attempt) has(node int) bool {
	for _, v := range a.votes {
		if v.node == node {
			return true
		}
	}
	return false
}

// hopeless reports whether so many nodes have refused that a can get no majority.
func (c *client) hopeless(a *attempt) bool {
	n := 0
	for i, no := range a.refused {
		if no && !a.has(i) {
			n++
		}
	}
	return n > nodes-majority
}

// take counts a vote. A later one of that node replaces it, as a whole.
func (c *client) take(a *attempt, v vote) {
	if len(a.votes) == 0 {
		a.first = c.time()
	}
	replaced := false
	for i := range a.votes {
		old := &a.votes[i]
		if c.w.once && old.node == v.node {
			replaced = true
			if v.token > old.token || v.token == old.token && v.until() > old.until() {
				*old = v
			}
		}
	}
	if !replaced {
		a.votes = append(a.votes, v)
	}
	c.decide(a)
}

// decide takes the lease if there is a majority of votes: two that agree on the token, or else two that
// have to be raised to the larger.
func (c *client) decide(a *attempt) {
	now, best, agreed, top := c.time(), 0.0, false, int64(0)
	for i, v := range a.votes {
		for _, u := range a.votes[:i] {
			until := min(u.until(), v.until())
			if !c.w.minimum {
				until = max(u.until(), v.until())
			}
			agree := u.token == v.token
			if now < until && (agree && !agreed || agree == agreed && until > best) {
				best, agreed, top = until, agree, max(u.token, v.token)
			}
		}
	}
	if best == 0 {
		return
	}
	c.lease, c.until, c.top = a, best, top
	if agreed || !c.w.raise {
		c.won(a, best)
		return
	}
	c.state = raising
	c.refresh()
}

// won has c hold the lease.
func (c *client) won(a *attempt, until float64) {
	c.state, c.until = holding, until
	if first := c.top - int64(a.block) + 1; first <= c.w.maxTop {
		c.w.wrong(lowToken, "client %d as %d: %d after %d", c.id, a.owner, first, c.w.maxTop)
	}
	c.w.maxTop = max(c.w.maxTop, c.top)
	if !c.w.troubled() {
		c.w.longest = max(c.w.longest, c.w.now-max(c.waits, trouble))
	}
	c.w.count.leases++
	c.w.logf("client %d holds the key as %d until %.0f, it is %.0f; token %d", c.id, a.owner, until, c.time(), c.top)
	if a == c.next {
		c.w.count.byGrant++
		if c.poll != nil {
			c.undo(c.poll, nil)
		}
	} else if c.w.grants && c.w.withdraw {
		c.release(c.next.owner)
	}
	c.next, c.poll = nil, nil
	c.releaseAt = c.time() + float64(2+c.w.rand.IntN(40))
	if c.w.rand.IntN(6) == 0 {
		c.releaseAt = c.time() + 2*ttl
	}
	c.refresh() // what was granted for a turn is to last for a ttl
}
