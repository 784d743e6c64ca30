package main

import (
	"cmp"
	"math"
	"slices"
)

// client is a process with one caller that wants the key again and again; or with more, so that it
// continues to wait when it has released the key.
type client struct {
	w           *world
	id          int
	clock       clock
	pausedUntil float64
	unread      []message
	links       [nodes]*link
	dialAt      [nodes]float64 // of the next one, if there is none
	polls       bool           // it makes no offers
	old         bool           // it is of before: its releases make turns

	state     state
	until     float64 // resting: until then; holding: how long the lease is good
	waits     float64 // since when, in the world's time
	leaves    float64
	contender int

	poll   *attempt // the acquire in progress; nil: none
	pollAt float64
	quiet  bool // the next poll is the first
	// poll at once when the one in progress has ended: its turn has come meanwhile, or a link is back
	again    bool
	declined bool     // the last poll has left the key to others
	next     *attempt // the offer; nil: there is none until the next poll

	lease     *attempt
	top       int64 // of its tokens
	releaseAt float64
	round     int
	began     float64
	confirmed [nodes]bool
	refreshes bool // one is in progress
	refreshAt float64
	rival     int // the contender that waits longest, by the last refresh

	// of a client that retains leases
	token    int64 // of the last holder
	met      bool  // another has had the key since this one began to wait
	recalled int   // the owner that was recalled last
	used     float64
	lingers  float64 // until then; the lease is retained

	over    map[int]*attempt // offers that have ended, by owner: a message about them may still arrive
	debts   []*debt
	parting *parting // nil: no short release is in progress
}

// parting is a short release. Where somebody waits it has changed nothing, and when enough nodes have
// answered, the key is passed to the contender that most of them name.
type parting struct {
	lease     *attempt
	contender int
	first     [nodes]int
	pending   int
	at        float64 // no answer is waited for any longer
}

type state uint8

const (
	resting state = iota
	waiting
	raising
	holding
	retaining // a lease that nobody uses
)

// attempt is one owner, and its result so far.
type attempt struct {
	owner, block int
	votes        []vote
	replies      [nodes]reply
	began        float64 // when the first acquire was sent

	// of a poll
	carries *offer // the offer that it brings to the nodes; nil: none
	waits   bool   // it leaves a free key to those that wait longer
	quiet   bool   // its contender is not registered: nobody was known to have the key
	left    int    // how many nodes have done that
	holders [nodes]int
	freeIn  [nodes]float64

	// of an offer
	offered  bool
	polls    []carrier // the last ones that have brought it
	askAt    float64   // 0: no node has granted it, as far as is known
	asked    bool
	follower int // the contender that was next after it, when it was decided

	granted  [nodes]int  // how many messages of the node have arrived, minus the deletions
	released bool        // when it ended: what a node has granted since is to be released
	pending  [nodes]bool // that is in progress
	unwanted [nodes]bool // the node has granted it, and so has no want of the contender any more
}

// reply is what a node has answered.
type reply uint8

const (
	none reply = iota
	yes
	no      // it is another's
	nothing // none: it will not arrive, or does not count
)

// carrier is a poll that has brought an offer.
type carrier struct {
	k           int
	began, span float64
	on          [nodes]*link
}

// maxPolls is how many of these are kept.
const maxPolls = 8

// vote is one node's: a token, and until when the key certainly exists.
type vote struct {
	node  int
	token int64
	until float64
	first int // the contender that is next
}

// debt is a release that was not answered.
type debt struct {
	m  message
	at float64
}

func (c *client) time() float64 { return c.clock.at(c.w.now) }

// start makes c a process that has just begun.
func (c *client) start() {
	*c = client{
		w: c.w, id: c.id, clock: c.clock, over: map[int]*attempt{},
		old: c.w.oldOnes && c.id == 0, polls: c.w.pollers && c.id == 1,
	}
	for _, i := range c.w.each() {
		c.links[i] = &link{at: c.w.nodes[i]}
	}
	c.rest()
}

// kill ends the process. Its links end with it; a new one begins some time later.
func (c *client) kill() {
	c.w.logf("client %d is killed", c.id)
	if c.contender != 0 {
		c.w.dead[c.contender] = true
	}
	for _, i := range c.w.each() {
		c.loseLink(i)
	}
	c.start()
	for _, i := range c.w.each() {
		c.links[i], c.dialAt[i] = nil, c.time()+300
	}
	c.until = c.time() + 300
}

// mayGo reports whether c only waits, and no node has granted it the key.
func (c *client) mayGo() bool {
	if c.state != waiting || len(c.debts) > 0 || c.poll != nil && len(c.poll.votes) > 0 ||
		c.next != nil && c.next.askAt > 0 {
		return false
	}
	for _, n := range c.w.nodes {
		if c.next != nil && n.owner == c.next.owner || c.poll != nil && n.owner == c.poll.owner {
			return false
		}
	}
	return true
}

// loseLink ends a link. What was sent on it may be executed later, or never.
func (c *client) loseLink(i int) {
	l := c.links[i]
	if l == nil {
		return
	}
	l.closed, c.links[i], c.dialAt[i] = true, nil, c.time()+float64(c.w.rand.IntN(40))
	for _, m := range c.w.flying {
		if m.on == l && m.kind < answer {
			m.deadLine = true
			m.at += float64(c.w.rand.IntN(600))
		}
	}
}

// dial makes the links that are missing. Who waits polls then, since its wants may have been dropped.
func (c *client) dial() {
	for _, i := range c.w.each() {
		if c.links[i] == nil && c.time() >= c.dialAt[i] {
			c.links[i] = &link{at: c.w.nodes[i]}
			c.again, c.pollAt = c.poll != nil, min(c.pollAt, c.time())
		}
	}
}

func (c *client) rest() {
	c.state, c.lease, c.next, c.poll, c.contender = resting, nil, nil, nil, 0
	c.until = c.time() + float64(c.w.rand.IntN(40))
	if c.w.rules.retains && c.w.rand.IntN(2) == 0 { // it does not want the key for a while
		c.until += float64(c.w.rand.IntN(1000))
	}
}

func (c *client) newAttempt() *attempt {
	c.w.owners++
	return &attempt{owner: c.w.owners, block: 1 + c.w.rand.IntN(3)}
}

// newPoll is an attempt whose lease may be retained: it has tokens for many callers.
func (c *client) newPoll() *attempt {
	a := c.newAttempt()
	if c.w.rules.retains {
		a.block = 1000
		c.w.retainers[a.owner] = c.id
	}
	return a
}

// live is one step of c: it processes what has arrived, and does what is due.
func (c *client) live() {
	if c.w.now < c.pausedUntil {
		return
	}
	if c.w.oneIn(400, c.w.pauses) {
		c.pausedUntil = c.w.now + float64(c.w.rand.IntN(400))
		return
	}
	if (c.state == holding || c.state == retaining) && c.time() >= c.until { // before it learns of more
		c.act()
	}
	unread := c.unread
	c.unread = nil
	if c.w.rand.IntN(2) == 0 { // notices arrive on another connection
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
	c.dial()
	if p := c.parting; p != nil && now >= p.at {
		c.part(p)
	}
	for _, d := range c.debts {
		if now >= d.at {
			d.at = now + timeout
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
		if now >= c.until || now > c.began+timeout {
			a := c.lease
			c.state, c.lease, c.pollAt = waiting, nil, now
			c.end(a, true)
		}
	case holding:
		switch {
		case now < c.until && now >= c.releaseAt && c.mayRetain(now):
			c.retain(now)
		case now >= c.until || now >= c.releaseAt:
			c.finish()
		case now > c.refreshAt:
			c.refresh()
		}
	case retaining:
		c.linger(now)
	}
}

// Retained leases.

// spare is what a retained lease must have left.
const spare = ttl / 2

func (c *client) mayRetain(now float64) bool {
	return c.w.rules.retains && !c.lease.offered && !c.met && (c.rival == 0 || !c.w.checks) &&
		c.recalled != c.lease.owner && c.until-now >= spare
}

func (c *client) retain(now float64) {
	c.state, c.used, c.lingers = retaining, now, now+float64(c.w.rand.IntN(3*ttl))
}

// linger is a moment in which nobody uses the lease: a caller may come, or it is time to release it.
func (c *client) linger(now float64) {
	if c.until > c.used+valid(ttl) {
		c.w.wrong(outlives, "client %d, as %d", c.id, c.lease.owner)
	}
	comes := c.w.rand.IntN(8) == 0 && c.token < c.top
	switch {
	case comes && !c.w.ends:
		c.until = now + valid(ttl)
		c.reuse(now)
	case now >= c.until, now >= c.lingers, c.w.ends && c.until-now < spare:
		c.finish()
	case comes:
		c.reuse(now)
	case !c.w.idle && now > c.refreshAt:
		c.refresh()
	}
}

// reuse gives the retained lease to a caller of this process, with the next token.
func (c *client) reuse(now float64) {
	c.state, c.releaseAt = holding, now+float64(2+c.w.rand.IntN(20))
	c.giveToken(c.token + 1)
	c.w.count.reused++
	if c.until-now < ttl*3/4 {
		c.refreshAt = now
	}
}

// giveToken gives a holder its token.
func (c *client) giveToken(token int64) {
	if c.token = token; token <= c.w.given && c.w.now > c.w.excused {
		c.w.wrong(lowToken, "client %d: %d after %d", c.id, token, c.w.given)
	}
	c.w.given = max(c.w.given, token)
}

// hearRecall releases the lease, if nobody uses it; otherwise it is not retained afterwards.
func (c *client) hearRecall(m message) {
	if !c.w.recalls {
		return
	}
	c.recalled = m.owner // it may arrive before the answers that make the lease
	if c.state != retaining || m.owner != c.lease.owner {
		return
	}
	if c.w.refuses {
		c.finish()
		return
	}
	for _, i := range c.w.each() {
		c.owe(c.lease, message{kind: c.releases(), node: i, contender: c.contender})
	}
}

// releases is the kind of c's releases.
func (c *client) releases() kind {
	if c.old {
		return release
	}
	return pass
}

func (c *client) arrive() {
	c.w.owners++
	c.contender = c.w.owners
	c.leaves = math.Inf(1)
	if c.w.oneIn(4, c.w.leaving) {
		c.leaves = c.time() + float64(c.w.rand.IntN(300))
	}
	c.waitOn(c.time())
	c.quiet = c.w.rand.IntN(2) == 0
}

func (c *client) waitOn(pollAt float64) {
	c.state, c.waits, c.pollAt = waiting, c.w.now, pollAt
	c.lease, c.next, c.poll, c.declined, c.again, c.rival, c.met = nil, nil, nil, false, false, 0, false
}

func (c *client) wait(now float64) {
	if since := c.w.now - max(c.waits, trouble); since > patience {
		c.w.wrong(starved, "client %d", c.id)
	}
	if now >= c.leaves {
		c.leave()
		return
	}
	if p := c.poll; p != nil && (c.hopeless(p) || now > p.began+timeout) {
		c.pollFailed(p, now)
	}
	if n := c.next; n != nil && n.askAt > 0 && now >= n.askAt {
		switch {
		case !n.asked: // messages may be lost; or the other nodes have no offer to grant it to
			n.asked = true
			n.askAt += timeout // and then that is over
			n.began = now
			for _, i := range c.w.each() {
				if c.w.asks && n.replies[i] == none {
					c.acquire(i, n, &offer{owner: n.owner, block: n.block, span: ttl})
				}
			}
		default:
			c.end(n, false)
		}
	}
	if n := c.next; n != nil && c.hopeless(n) {
		c.end(n, false)
	}
	if now >= c.pollAt && c.poll == nil {
		c.ask()
	}
}

// span is how long a release is to grant the key: the longer, the longer c has waited.
func (c *client) span() float64 {
	s := min(max((c.w.now-c.waits)/2, minSpan), maxSpan)
	if !c.w.bounded {
		s = ttl
	}
	if !c.w.rules.span {
		s *= float64(1+c.id) / 2
	}
	return s
}

// ask is a poll: an attempt, which registers the contender, and brings its offer.
func (c *client) ask() {
	p := c.newPoll()
	p.began = c.time()
	if c.quiet {
		c.quiet = false
		p.quiet = true
	} else if !c.polls {
		if c.next == nil {
			c.next = c.newAttempt()
			c.next.offered = true
		}
		n := c.next
		if !c.w.block {
			n.block = 1 + c.w.rand.IntN(3)
		}
		k := carrier{1, p.began, c.span(), c.links}
		if len(n.polls) > 0 {
			k.k = n.polls[len(n.polls)-1].k + 1
		}
		n.polls = append(n.polls[max(0, len(n.polls)-maxPolls+1):], k)
		p.carries = &offer{owner: n.owner, block: n.block, span: k.span, k: k.k}
	}
	p.waits = c.w.rules.waits && !c.declined && p.carries != nil
	c.poll, c.again = p, false
	for _, i := range c.w.each() {
		c.acquire(i, p, p.carries)
	}
}

func (c *client) acquire(node int, a *attempt, o *offer) {
	m := message{
		kind: acquire, node: node, owner: a.owner, block: a.block, ttl: ttl,
		offer: o, waits: a.waits, contender: c.contender,
	}
	if a.quiet {
		m.contender = 0
	}
	c.send(m)
}

func (c *client) send(m message) {
	if m.client, m.on = c.id, c.links[m.node]; m.on != nil {
		c.w.count.commands++
		c.w.send(requests, m)
	}
}

// pollFailed undoes a poll where it may be granted, and sets the time of the next one.
func (c *client) pollFailed(p *attempt, now float64) {
	c.poll, c.met = nil, true
	c.end(p, false)
	c.declined = p.left > 0 && p.left+len(p.votes) >= c.w.majority
	c.pollAt = now + 10 + float64(c.w.rand.IntN(10))
	var free []float64
	for _, i := range c.w.each() {
		for j := range i {
			if !c.polls && p.holders[i] > 0 && p.holders[i] == p.holders[j] {
				c.pollAt = now + c.span()*pollsPerSpan
			}
		}
		if p.replies[i] == no {
			free = append(free, p.freeIn[i])
		}
	}
	slices.Sort(free)
	if n := max(c.w.majority-len(p.votes), 1); n <= len(free) {
		c.pollAt = min(c.pollAt, now+free[n-1]+1)
	}
	if c.again {
		c.pollAt = now
	}
}

// end undoes a, whatever it may have on the nodes, or may still get. passes reports whether it had
// a majority, or was given up by c: then others wait because of it, and the key is passed on.
func (c *client) end(a *attempt, passes bool) {
	if a == c.next {
		c.next = nil
		if !c.w.rules.over { // it continues as the same owner
			c.next = &attempt{owner: a.owner, block: a.block, offered: true, polls: a.polls}
		}
	}
	c.overWith(a)
	contender := c.contender
	if a.quiet {
		contender = 0
	}
	for _, i := range c.w.each() {
		switch {
		case passes:
			c.owe(a, message{kind: c.releases(), node: i, contender: c.contender, unwanted: a.unwanted[i]})
		case a.offered || a.replies[i] != no:
			c.owe(a, message{kind: undo, node: i, contender: contender, offer: a.carries, forgets: a.offered})
		}
	}
}

// overWith makes messages about a have no recipient.
func (c *client) overWith(a *attempt) {
	a.released = true
	if a.offered {
		c.over[a.owner] = a
	}
}

// owe sends a release or an undo, until it is answered.
func (c *client) owe(a *attempt, m message) {
	m.owner, m.span = a.owner, c.span()
	c.send(m)
	// The registration of a contender, and the next one's name, are outdated when they arrive late.
	c.debts = append(c.debts, &debt{message{
		kind: c.releases(), node: m.node, owner: m.owner, span: m.span,
	}, c.time() + timeout})
}

// finish ends a lease: c does not need it any more, or lets others go first and waits again, behind them.
func (c *client) finish() {
	a := c.lease
	yields := c.state == holding && c.rival != 0 && c.time() < c.until && c.w.rand.IntN(3) == 0
	m := message{kind: c.releases(), contender: c.contender}
	switch {
	case yields:
		m.next = c.rival
	case c.w.named:
		m.next = a.follower
	}
	c.overWith(a)
	if a.quiet && m.next == 0 && !c.old {
		c.finishShort(a)
		return
	}
	var next *attempt
	if !c.polls && !c.old && (yields || c.w.rejoins && c.w.rand.IntN(3) != 0) {
		next = c.newAttempt()
		k := carrier{1, c.time(), c.span(), c.links}
		next.offered, next.polls = true, []carrier{k}
		m.offer = &offer{owner: next.owner, block: next.block, span: k.span, k: k.k}
	}
	for _, i := range c.w.each() {
		m.node, m.unwanted = i, a.unwanted[i]
		c.owe(a, m)
	}
	switch {
	case next != nil:
		c.waitOn(c.time() + next.polls[0].span*pollsPerSpan)
		c.next = next
		if !yields {
			c.leaves = math.Inf(1)
			if c.w.rand.IntN(4) == 0 { // no caller comes back
				c.leaves = c.time() + float64(c.w.rand.IntN(20))
			}
		}
	case yields:
		c.waitOn(c.time() + awaitTime)
	default:
		c.rest()
	}
}

// finishShort ends a lease that never had to wait, and so knows of nobody who does.
func (c *client) finishShort(a *attempt) {
	if c.parting != nil {
		c.part(c.parting)
	}
	c.parting = &parting{lease: a, contender: c.contender, pending: c.w.masters, at: c.time() + timeout}
	for _, i := range c.w.each() {
		if c.w.masters == 1 { // one node needs no name
			c.owe(a, message{kind: pass, node: i, contender: c.contender})
		} else {
			c.owe(a, message{kind: done, node: i})
		}
	}
	if c.w.masters == 1 {
		c.parting = nil
	}
	c.rest()
}

// hearDone takes a node's answer to the short release.
func (c *client) hearDone(m message) {
	p := c.parting
	if p == nil || p.lease.owner != m.owner {
		return
	}
	p.first[m.node] = m.first
	p.pending--
	same := 0
	for _, first := range p.first {
		if first == m.first {
			same++
		}
	}
	if p.pending == 0 || m.first != 0 && same >= c.w.majority {
		c.part(p)
	}
}

// part passes the key to the contender that most nodes name, on all of them: where the key was deleted, it is
// free. Where the short release has had no answer, it is the debt that remains.
func (c *client) part(p *parting) {
	c.parting = nil
	next, most := 0, 0
	for _, first := range p.first {
		n := 0
		for _, other := range p.first {
			if other == first {
				n++
			}
		}
		if first != 0 && n > most {
			next, most = first, n
		}
	}
	if next == 0 {
		return
	}
	if !c.w.named || !c.w.asksWho {
		next = 0
	}
	for _, i := range c.w.each() {
		c.debts = slices.DeleteFunc(c.debts, func(d *debt) bool {
			return d.m.owner == p.lease.owner && d.m.node == i
		})
		c.owe(p.lease, message{kind: pass, node: i, contender: p.contender, next: next})
	}
}

// leave ends the wait of a caller that does not want the key any more.
func (c *client) leave() {
	if c.poll != nil {
		c.end(c.poll, true)
	}
	switch {
	case c.next != nil && c.w.withdraw:
		c.end(c.next, true)
	case c.next == nil: // only the want has to be removed
		c.end(&attempt{owner: -c.contender}, true)
	}
	c.rest()
}

func (c *client) refresh() {
	c.round++
	c.began, c.confirmed, c.refreshes = c.time(), [nodes]bool{}, true
	c.refreshAt = c.began + timeout
	for _, i := range c.w.each() {
		c.send(message{
			kind: refresh, node: i, owner: c.lease.owner, ttl: ttl, top: c.top,
			round: c.round, contender: c.contender,
		})
	}
}

// What c receives.

func (c *client) hear(m message) {
	switch {
	case m.kind == grant:
		c.hearGrant(m)
	case m.kind == recall:
		c.hearRecall(m)
	case m.kind == turn: // of a client of before
		if c.old && c.state == waiting && m.contender == c.contender {
			c.again, c.pollAt = true, c.time()
		}
	case m.of == acquire:
		c.hearAcquire(m)
	case m.of == refresh:
		c.hearRefresh(m)
	case m.of == done && m.granted && m.first != 0 && !c.w.frees: // it has changed nothing
		c.hearDone(m)
	default:
		c.hearReleased(m)
		if m.of == done {
			c.hearDone(m)
		}
	}
}

func (c *client) hearReleased(m message) {
	i := slices.IndexFunc(c.debts, func(d *debt) bool { return d.m.owner == m.owner && d.m.node == m.node })
	if i < 0 {
		return
	}
	c.debts = slices.Delete(c.debts, i, i+1)
	if a := c.over[m.owner]; a != nil && c.w.withdraw {
		a.pending[m.node] = false
		switch {
		case m.granted:
			a.granted[m.node]--
		case a.granted[m.node] > 0: // it was granted after that
			a.granted[m.node] = 0
			c.releaseAgain(m.owner, m.node, a)
		}
	}
}

// releaseAgain returns what a node has granted to an owner that is over. a is nil if that was never
// requested.
func (c *client) releaseAgain(owner, node int, a *attempt) {
	if a == nil {
		a = &attempt{owner: owner, offered: true}
	} else {
		a.pending[node] = true
	}
	c.owe(a, message{kind: c.releases(), node: node})
}

func (c *client) hearAcquire(m message) {
	if c.state != waiting {
		return
	}
	a := c.poll
	if a == nil || a.owner != m.owner {
		if a = c.next; a == nil || a.owner != m.owner {
			return // it is over: it was undone
		}
	}
	if a.replies[m.node] != none { // its message has arrived meanwhile
		return
	}
	switch {
	case m.granted && (m.counts || !c.w.memory):
		a.unwanted[m.node] = true
		c.take(a, vote{m.node, m.token, a.began + valid(ttl), 0})
	case m.granted:
		a.replies[m.node], a.unwanted[m.node] = nothing, true
	default:
		a.replies[m.node], a.holders[m.node], a.freeIn[m.node] = no, m.holder, m.left
		if m.holder == leftToOthers {
			a.left++
		}
		if n := c.next; n != nil && m.holder == n.owner { // the message is late, or lost
			n.awaitOthers(c.time())
		}
	}
}

// awaitOthers runs when a node has granted a: others will have done so too.
func (a *attempt) awaitOthers(now float64) {
	if a.askAt == 0 {
		a.askAt = now + awaitTime
	}
}

// hearGrant takes a vote that a release has made.
func (c *client) hearGrant(m message) {
	a := c.next
	switch {
	case a != nil && a.owner == m.owner:
	case c.lease != nil && c.lease.owner == m.owner:
		a = c.lease
	default:
		if a = c.over[m.owner]; a == nil { // it was forgotten
			if c.w.withdraw {
				c.releaseAgain(m.owner, m.node, nil)
			}
			return
		}
	}
	i := m.node
	a.granted[i]++
	a.unwanted[i] = true
	if a.released && !a.pending[i] && a.granted[i] > 0 && c.w.withdraw {
		a.granted[i] = 0
		c.releaseAgain(a.owner, i, a)
	}
	if a != c.next || c.state != waiting || c.w.once && a.replies[i] != none {
		return // What ends the lease ends this.
	}
	a.awaitOthers(c.time())
	v := vote{i, m.token, c.grantedUntil(a, m), m.first}
	if c.time() < v.until && (m.counts || !c.w.memory) {
		c.take(a, v)
	}
}

// grantedUntil is until when a grant by m is valid: counted from the poll that the node had then.
func (c *client) grantedUntil(a *attempt, m message) float64 {
	for i := len(a.polls) - 1; i >= 0; i-- {
		if k := a.polls[i]; k.k == m.k || !c.w.echoed {
			if c.w.cluster && c.w.linked && (m.on.closed || k.on[m.node] != m.on) {
				return 0
			}
			if !c.w.causal {
				k.began = c.time()
			}
			return k.began + valid(min(m.span, k.span))
		}
	}
	return 0
}

func (c *client) hearRefresh(m message) {
	if c.lease == nil || m.owner != c.lease.owner || m.round != c.round {
		return
	}
	if m.first != 0 {
		c.rival = m.first
	}
	if !c.refreshes {
		if !m.granted && m.holder == 0 {
			c.repair(m.node)
		}
		return
	}
	c.confirmed[m.node] = c.confirmed[m.node] || m.granted
	n := 0
	for _, yes := range c.confirmed {
		if yes {
			n++
		}
	}
	if n < c.w.majority || c.time() >= c.until {
		return
	}
	c.refreshes = false
	if c.state == raising {
		c.won(c.lease)
	} else {
		c.until = max(c.until, c.began+valid(ttl))
		c.refreshAt = c.began + ttl/3
	}
}

// repair puts the key back on a node. It is not a vote.
func (c *client) repair(node int) {
	if left := c.until - c.time(); c.state == holding && left >= 1 {
		c.send(message{kind: acquire, node: node, owner: c.lease.owner, ttl: left, top: c.top,
			contender: c.contender})
	}
}

// Votes.

// hopeless reports whether so many nodes have refused that a cannot get a majority.
func (c *client) hopeless(a *attempt) bool {
	n := 0
	for _, i := range c.w.each() {
		if r := a.replies[i]; r == no || r == nothing {
			n++
		}
	}
	return n > c.w.masters-c.w.majority
}

// take counts a vote. With a majority, a is decided: it has the lease if they agree on the token,
// otherwise when it has been raised to the larger.
func (c *client) take(a *attempt, v vote) {
	a.replies[v.node] = yes
	a.votes = append(a.votes, v)
	if len(a.votes) < c.w.majority {
		return
	}
	c.lease, c.until, c.top = a, v.until, v.token
	agree := true
	for _, u := range a.votes {
		c.until, c.top = min(c.until, u.until), max(c.top, u.token)
		agree = agree && u.token == v.token
		if u.first != 0 {
			a.follower = u.first
		}
	}
	if !c.w.minimum {
		for _, u := range a.votes {
			c.until = max(c.until, u.until)
		}
	}
	switch {
	case c.time() >= c.until: // too late
		c.lease = nil
		if a == c.poll {
			c.poll, c.pollAt = nil, c.time()
		}
		c.end(a, true)
	case agree || !c.w.raise:
		c.won(a)
	default:
		c.state = raising
		if a == c.poll {
			c.poll = nil
		}
		c.refresh()
	}
}

// won makes c hold the lease.
func (c *client) won(a *attempt) {
	c.state = holding
	if first := c.top - int64(a.block) + 1; first <= c.w.maxTop && c.w.now > c.w.excused {
		c.w.wrong(lowToken, "client %d as %d: %d after %d", c.id, a.owner, first, c.w.maxTop)
	}
	c.w.maxTop = max(c.w.maxTop, c.top)
	c.giveToken(c.top - int64(a.block) + 1)
	if !c.w.troubled() {
		c.w.longest = max(c.w.longest, c.w.now-max(c.waits, trouble))
	}
	c.w.count.leases++
	if c.w.troubled() {
		c.w.count.of[c.id]++
	}
	c.w.logf("client %d holds the key as %d until %.0f, it is %.0f; token %d", c.id, a.owner, c.until, c.time(),
		c.top)
	c.refreshAt = c.began + ttl/3
	if a.offered {
		c.w.count.byGrant++
		c.refreshAt = c.time() + (c.until-c.time())/4
	} else {
		c.refreshAt = c.time() + ttl/3
	}
	if p := c.poll; p != nil && p != a {
		c.end(p, true)
	}
	if n := c.next; n != nil && n != a && n.askAt > 0 && c.w.withdraw { // else it is forgotten
		c.end(n, true)
	}
	c.next, c.poll, c.rival = nil, nil, 0
	c.releaseAt = c.time() + float64(2+c.w.rand.IntN(40))
	if c.w.rand.IntN(6) == 0 {
		c.releaseAt = c.time() + 2*ttl
	}
}
