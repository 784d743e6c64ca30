package links

// link is a connection of a client to a server, in order both ways. What it has booted is all that votes on
// it rely on.
type link struct {
	c        *client
	n        int
	at       *server
	requests []*request // not executed
	replies  []*request // and pushes, not received
	closed   bool

	booted    bool // the reply is there, and nothing since says that it may not hold
	past           // what it said
	stalled   bool // NOSCRIPT came: nothing is written until all replies are there
	resend    []*request
	markerAt  int // when the last check was sent that found the marker as booted
	historyAt int // and the history
	pending   []pendingVote
}

// pendingVote is a vote that waits for a check behind it.
type pendingVote struct {
	*request
	received int
	full     bool // the check is to find the history unchanged
}

// attempt is one owner: a poll's, or an offer's.
type attempt struct {
	owner, overAt int // overAt: 0 while it counts
	sent          [nodes]bool
	votes         [nodes]*request
	owed          [nodes]bool // an undo: sent again until it is confirmed
	doubt         [nodes]bool // an acquire of it, from a link that died, may still be executed
	undone        [nodes]bool // an undo was sent
}

type client struct {
	w     *world
	id    int
	links [nodes]*link
	dead  []*link // with replies that arrive all the same, if that rule is out

	memory [nodes]*link // the last link that booted, if one boot is enough for all
	names  [nodes]int   // of boots without a reply, if they are sent again under their name
	seen   int          // when an epoch was established, as far as it knows
	booted int

	attempts    []*attempt
	poll, offer *attempt
	lease       *attempt
	held        bool // else its counters are being raised
	until       int
	token       int
	round       int
	roundAt     int
	confirmed   [nodes]bool
}

func (c *client) all() []*link { return append(c.links[:], c.dead...) }

// restart is a new process of that client, which knows nothing.
func (c *client) restart() bool {
	c.w.log("client %d is another process", c.id)
	for _, l := range c.links {
		l.close()
	}
	*c = client{w: c.w, id: c.id, seen: -quarantine - 1}
	return true
}

func (l *link) usable() bool { return l != nil && l.booted && !l.stalled }

func (l *link) send(q request) {
	q.client, q.sent = l.c.id, l.c.w.now
	l.requests = append(l.requests, &q)
}

func (l *link) boot(establish int) bool {
	c := l.c
	name := c.names[l.n]
	if !c.w.without["freshNames"] || name == 0 {
		name = c.w.id()
	}
	c.names[l.n] = name
	known := !c.w.without["known"] && c.w.now-c.seen <= quarantine
	l.send(request{kind: "boot", name: name, establish: establish, known: known})
	return true
}

func (c *client) dial(n, x int) bool {
	node := c.w.nodes[n]
	l := &link{c: c, n: n, at: node.master()}
	if x%8 == 0 {
		l.at = node.replicaOf()
	}
	c.links[n] = l
	c.w.log("client %d connects to %s", c.id, l.at.name)
	if m := c.memory[n]; c.w.without["bootEach"] && m != nil {
		l.booted, l.past, l.markerAt, l.historyAt = true, m.past, m.markerAt, m.historyAt
		return true
	}
	if c.w.without["undoAfterBoot"] {
		c.pay(l)
	}
	return l.boot(0)
}

// close ends a link. What it had sent may be executed later, and what the server had answered is not
// delivered.
func (l *link) close() bool {
	if l == nil || l.closed {
		return false
	}
	l.c.w.log("the link of client %d to %s is lost", l.c.id, l.at.name)
	l.closed, l.c.links[l.n] = true, nil
	node := l.c.w.nodes[l.n]
	node.late = append(node.late, l.requests...)
	for _, q := range append(append(l.requests, l.replies...), l.resend...) {
		if a := l.c.find(q.owner); q.kind == "acquire" && a != nil {
			a.doubt[l.n] = q.code != "NOSCRIPT" || a.doubt[l.n]
			if a == l.c.poll || a.overAt != 0 { // goes on without this node
				a.owed[l.n] = true
			}
		}
	}
	if l.c.w.without["closedIsSilent"] {
		l.c.dead = append(l.c.dead, l)
	}
	l.requests = nil
	return true
}

func (c *client) newAttempt() *attempt {
	a := &attempt{owner: c.w.id()}
	c.attempts = append(c.attempts, a)
	return a
}

// find is the attempt of an owner, nil if that is none of this process.
func (c *client) find(owner int) *attempt {
	for _, a := range c.attempts {
		if a.owner == owner {
			return a
		}
	}
	return nil
}

// ask is a poll, which brings an offer.
func (c *client) ask() bool {
	if !c.links[0].usable() && !c.links[1].usable() && !c.links[2].usable() {
		return false
	}
	c.end(c.poll)
	if c.offer == nil {
		c.offer = c.newAttempt()
	}
	c.poll = c.newAttempt()
	c.w.log("client %d polls as %d, and offers %d", c.id, c.poll.owner, c.offer.owner)
	for n, l := range c.links {
		if l.usable() {
			c.offer.sent[n] = true
			c.acquire(l, c.poll, request{offer: c.offerOn(l)})
		}
	}
	return true
}

func (c *client) offerOn(l *link) offer {
	if c.offer == nil || !c.offer.sent[l.n] {
		return offer{}
	}
	return offer{c.offer.owner, l.of, l.since * perTick, c.w.now}
}

func (c *client) acquire(l *link, a *attempt, q request) bool {
	q.kind, q.owner, q.epoch, q.floor = "acquire", a.owner, l.of, l.since*perTick
	a.sent[l.n] = true
	l.send(q)
	return true
}

// end gives an attempt up: it is undone wherever it may be.
func (c *client) end(a *attempt) bool {
	if a == nil || a.overAt != 0 {
		return false
	}
	c.w.log("client %d gives %d up", c.id, a.owner)
	a.overAt, a.owed = c.w.now, a.sent
	if a == c.offer {
		c.offer = nil
	}
	if a == c.poll {
		c.poll = nil
	}
	if a == c.lease {
		c.lease, c.held = nil, false
	}
	for _, l := range c.links {
		if l.usable() {
			c.pay(l)
		}
	}
	return true
}

// pay sends the undos that are owed.
func (c *client) pay(l *link) bool {
	for _, a := range c.attempts {
		if !a.owed[l.n] || l.stalled {
			continue
		}
		if a.overAt != 0 && c.w.now >= a.overAt+ttl {
			a.owed[l.n] = false
			continue
		}
		a.undone[l.n] = true
		l.send(request{kind: "undo", owner: a.owner, epoch: l.of, offer: c.offerOn(l)})
	}
	return true
}

func (c *client) release(next int) bool {
	a := c.lease
	a.overAt, a.owed = c.w.now, a.sent
	c.lease, c.held = nil, false
	c.w.log("client %d releases, for client %d", c.id, next)
	for n, l := range c.links {
		if l.usable() {
			a.owed[n], a.undone[n] = true, true
			l.send(request{kind: "pass", owner: a.owner, epoch: l.of, next: next})
		}
	}
	return true
}

func (c *client) refresh() bool {
	c.round++
	c.roundAt, c.confirmed = c.w.now, [nodes]bool{}
	for _, l := range c.links {
		if l.usable() {
			l.send(request{kind: "refresh", owner: c.lease.owner, epoch: l.of, top: c.token, round: c.round})
		}
	}
	return true
}

// execute has the server execute the next request.
func (l *link) execute() bool {
	if l == nil || len(l.requests) == 0 {
		return false
	}
	q := l.requests[0]
	l.at.execute(q)
	l.requests, l.replies = l.requests[1:], append(l.replies, q)
	if l.c.w.out != nil {
		l.c.w.log("%s executes of client %d: %s", l.at.name, l.c.id, q)
	}
	return true
}

// swap is what a proxy does that keeps a connection when the master has changed. It takes longer than a check
// is good.
func (l *link) swap() bool {
	if l == nil || !l.at.replica {
		return false
	}
	if !l.c.w.without["slowSwaps"] {
		l.c.w.now += historyAge + 1
	}
	l.at = l.c.w.nodes[l.n].master()
	l.c.w.log("a proxy leads the link of client %d to %s", l.c.id, l.at.name)
	return true
}

// pump delivers all that is under way on the links of a client.
func (c *client) pump() (did bool) {
	for range 4 {
		for _, l := range c.links {
			for l.execute() || l.receive() {
				did = true
			}
		}
	}
	return did
}

// receive is the next reply or push of a link.
func (l *link) receive() bool {
	if l == nil || len(l.replies) == 0 {
		return false
	}
	q := l.replies[0]
	l.replies = l.replies[1:]
	c, a := l.c, l.c.find(q.owner)
	if c.w.out != nil {
		c.w.log("client %d receives from %s: %s", c.id, l.at.name, q)
	}
	switch {
	case q.code == "READONLY":
		l.close()
		if a != nil && q.kind != "acquire" {
			a.owed[l.n] = true
		}
	case q.code == "NOSCRIPT":
		l.resend, l.stalled = append(l.resend, q), !l.closed
	case q.kind == "boot":
		l.hasBooted(q)
	case q.kind == "check":
		l.checked(q)
	case q.code == "EPOCH":
		if l.booted {
			l.booted = false
			l.boot(0)
		}
	case q.kind == "refresh":
		l.refreshed(q)
	case q.kind == "undo" || q.kind == "pass":
		if a != nil && (!a.doubt[l.n] || c.w.without["doubts"]) {
			a.owed[l.n] = false
		}
	case q.granted:
		if a != nil && a.overAt != 0 {
			a.owed[l.n] = true // a grant to an offer that was given up
		}
		l.vote(q)
	case a != nil && a == c.poll:
		a.sent[l.n] = false // nothing is there
	}
	if l.stalled && len(l.requests)+len(l.replies) == 0 && !l.closed {
		l.load()
	}
	return true
}

// load loads the scripts again, and boots in place.
func (l *link) load() {
	if !l.c.w.without["bootAgain"] {
		l.boot(0)
		return
	}
	l.at.scripts, l.stalled = true, false
	l.sendAgain()
}

// sendAgain sends what NOSCRIPT sent back, if it is still wanted.
func (l *link) sendAgain() {
	resend := l.resend
	l.resend = nil
	for _, q := range resend {
		a := l.c.find(q.owner)
		if q.kind == "refresh" || a == nil ||
			q.kind == "acquire" && !l.c.w.without["wanted"] && (a.undone[l.n] || a.overAt != 0) {
			continue
		}
		q.code, q.epoch, q.floor, q.offer.epoch, q.offer.floor = "", l.of, l.since*perTick, l.of, l.since*perTick
		l.send(*q)
	}
}

func (l *link) hasBooted(q *request) {
	c := l.c
	if l.closed {
		return
	}
	if l.of != q.past.of {
		l.pending = nil
	}
	c.names[l.n], c.memory[l.n], c.booted = 0, l, c.w.now
	l.booted, l.stalled, l.past, l.markerAt, l.historyAt = true, false, q.past, q.sent, q.sent
	if l.state == "kept" {
		c.seen = c.w.now
	}
	c.pay(l)
	l.sendAgain()
}

// vote counts a reply or a message that grants, or waits for a check behind it.
func (l *link) vote(q *request) {
	w := l.c.w
	named, established := q.epoch == l.of, l.state == "kept" || w.without["established"]
	if q.kind == "grant" {
		named, established = named || w.without["messageNames"], established || w.without["messageEstablished"]
	}
	if !l.booted || l.stalled || !named || !established {
		return
	}
	behind := q.kind == "grant" && !w.without["messageBehind"] // a server that was demoted passes messages on
	full := behind && !w.without["historyBehind"] || !l.fresh(l.historyAt, historyAge, w.now)
	if q.kind == "grant" && w.without["messageChecked"] ||
		!behind && !full && l.fresh(l.markerAt, markerAge, w.now) {
		l.c.count(l.n, q)
		return
	}
	l.pending = append(l.pending, pendingVote{q, w.now, full})
	l.check(full)
}

func (l *link) check(full bool) bool {
	if !l.closed {
		l.send(request{kind: "check", epoch: l.of, full: full})
	}
	return true
}

// fresh reports whether a check that was sent then is no older than that at a time; never, if each vote has
// its own.
func (l *link) fresh(sent, age, at int) bool { return at-sent <= age && !l.c.w.without["ages"] }

func (l *link) checked(q *request) {
	w := l.c.w
	good := q.epoch == l.of && (q.marker == l.of || w.without["checkNames"]) && (q.raw || w.without["checkRaw"])
	good = good && (q.master || w.without["checkHistory"] || !q.full && !w.without["historyBehind"])
	good = good && (q.past.history == l.history || w.without["checkHistory"] || !q.full)
	if !good || l.closed {
		l.pending = nil
		l.close()
		return
	}
	at := q.sent
	if w.without["agesFromSending"] {
		at = w.now
	}
	l.markerAt, l.c.seen = at, max(l.c.seen, q.sent)
	if q.full {
		l.historyAt = at
	}
	waiting := l.pending
	l.pending = nil
	for _, p := range waiting {
		if p.received <= q.sent && (q.full || !p.full) {
			l.c.count(l.n, p.request)
		} else {
			l.pending = append(l.pending, p)
		}
	}
}

// count counts a vote, and decides the attempt.
func (c *client) count(n int, q *request) {
	a := c.find(q.owner)
	if a == nil || a.overAt != 0 || a != c.poll && a != c.offer || c.lease != nil {
		return
	}
	a.votes[n], c.seen = q, c.w.now
	began, token, equal, votes := c.w.now, 0, 0, 0
	for _, v := range a.votes {
		if v == nil || c.w.now-v.sent > limit {
			continue
		}
		votes++
		began = min(began, v.sent)
		if v.token > token {
			token, equal = v.token, 0
		}
		if v.token == token {
			equal++
		}
	}
	if votes < majority {
		return
	}
	c.lease, c.token, c.until = a, token, began+ttl
	poll, offer := c.poll, c.offer
	c.poll, c.offer = nil, nil
	for _, other := range []*attempt{poll, offer} {
		if other != a {
			c.end(other)
		}
	}
	if equal >= majority {
		c.holds()
	} else {
		c.refresh()
	}
}

func (c *client) holds() {
	c.held = true
	c.w.log("client %d holds the key as %d, token %d, until %d ms", c.id, c.lease.owner, c.token,
		(c.until-start)*20)
	c.w.look()
	if c.token <= c.w.given {
		c.w.wrong(lowToken)
	}
	c.w.given = c.token
	c.w.leases++
}

func (l *link) refreshed(q *request) {
	c := l.c
	if c.lease == nil || !q.granted || q.round != c.round || c.w.now >= c.until || l.closed || q.epoch != l.of ||
		l.state != "kept" && !c.w.without["confirmsLater"] && c.roundAt < l.since+limit+1 {
		return
	}
	c.confirmed[l.n] = true
	n := 0
	for _, is := range c.confirmed {
		if is {
			n++
		}
	}
	if n < majority {
		return
	}
	c.until, c.seen = max(c.until, c.roundAt+ttl), c.w.now
	if !c.held {
		c.holds()
	}
}
