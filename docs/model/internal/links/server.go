package links

import "fmt"

// data is what a server has for the one key; it is copied to replicas and to the disk as a whole.
type data struct {
	owner, expires, counter int
	marker                  int  // flightlock:boot, the name of the epoch; 0: missing
	raw                     bool // its encoding: false if it came with a dump
	past                    past // flightlock:past
	offers                  [clients]offer
}

type past struct {
	of    int    // the marker that this is about
	state string // new, lost, or kept, which is established
	since int
	history
}

// history is what INFO replication and INFO server say that does not change while a server keeps its data.
type history struct{ run, promoted int }

// offer is everything that a grant to its contender needs, and the poll that brought it.
type offer struct{ owner, epoch, floor, sent int }

// server is a process that may lead a node: the master, or its replica. Requests are executed in one step
// each.
type server struct {
	w *world
	n int
	data
	history
	name    string
	replica bool
	scripts bool // they are loaded
	dumped  int  // when it got a full copy as a replica; 0: it did not
	disk    data
}

// request is what a client sends, and with the fields below what it receives.
type request struct {
	kind         string
	client, sent int
	owner, epoch int // epoch: ARGV, as the link booted it
	floor        int // of tokens: when the epoch began
	offer        offer
	repair       bool // acquire: of a lease that is held
	next         int  // pass: the contender's client, for all nodes
	top, round   int  // refresh
	name         int  // boot: of an epoch that begins now
	establish    int  // boot: the name of the one that no client ever had votes of
	known        bool // boot: the client saw an established epoch not long ago
	full         bool // check: the history, too

	code    string // the error
	granted bool   // acquire, refresh: the key is the owner's; undo, pass: it was
	token   int
	past    past // boot, check
	marker  int  // check
	raw     bool
	master  bool
}

// execute is one call of a script, or a check. It makes the request its reply.
func (s *server) execute(q *request) {
	if s.owner != 0 && s.w.now >= s.expires {
		s.owner = 0
	}
	switch {
	case q.kind == "check":
		q.marker, q.raw, q.master, q.past.history = s.marker, s.raw, !s.replica, s.history
	case s.replica:
		q.code = "READONLY"
	case q.kind == "boot":
		s.boot(q)
	case !s.scripts:
		q.code = "NOSCRIPT"
	case q.kind == "acquire":
		s.acquire(q)
	case q.kind == "undo":
		s.undo(q)
	case q.kind == "pass":
		s.pass(q)
	case s.owner == q.owner: // refresh
		q.granted = true
		s.expires = max(s.expires, s.w.now+ttl)
		s.count(0, q.top)
	}
}

// boot is boot.lua. The handshake loads the scripts as well.
func (s *server) boot(q *request) {
	s.scripts = true
	p, now := &s.past, s.w.now
	switch {
	case s.marker == 0 || p.of != s.marker:
		*p = past{q.name, "new", now, s.history}
		if q.known {
			p.state = "lost"
		}
		s.marker, s.raw = q.name, true
	case !s.raw || p.history != s.history:
		if p.state != "new" || q.known {
			p.state = "lost"
		}
		*p = past{q.name, p.state, now, s.history}
		s.marker, s.raw = q.name, true
	default:
		if p.state == "new" && q.known {
			p.state = "lost"
		}
		if now-p.since >= quarantine || p.state == "new" && q.establish == p.of {
			p.state = "kept"
		}
	}
	q.past = *p
}

// count reserves tokens above the floor. A counter that is missing starts at the node's clock.
func (s *server) count(block, floor int) int {
	if s.counter == 0 {
		s.counter = s.w.now * perTick
	}
	s.counter = max(s.counter, floor) + block
	return s.counter
}

func (s *server) acquire(q *request) {
	if s.marker != q.epoch && !s.w.without["acquireCompares"] {
		q.code = "EPOCH"
		return
	}
	switch s.owner {
	case 0, q.owner:
		block := 1
		if s.owner != 0 || q.repair {
			block = 0
		} else {
			// Nobody may have given that owner up, and believe that it is nowhere. After a ttl it looks no more.
			if a := s.w.clients[q.client].find(q.owner); a != nil && a.overAt != 0 && s.w.now < a.overAt+ttl &&
				!a.owed[s.n] {
				s.w.wrong(leftKey)
			}
		}
		s.owner, s.expires, q.granted = q.owner, max(s.expires, s.w.now+ttl), true
		if !s.w.without["acquireFloor"] || q.repair {
			q.token = s.count(block, max(q.floor, q.top))
		} else {
			q.token = s.count(block, q.top)
		}
		if !q.repair {
			s.offers[q.client] = offer{}
		}
	case q.offer.owner: // it was granted, and waits no more
	default:
		if q.offer.owner != 0 {
			s.offers[q.client] = q.offer
		}
	}
}

func (s *server) undo(q *request) {
	if o := &s.offers[q.client]; o.owner == q.owner {
		*o = offer{}
	}
	if q.granted = s.owner == q.owner; q.granted {
		s.owner = 0
		if q.offer.owner != 0 && (s.marker == q.epoch || s.w.without["undoCompares"]) {
			s.offers[q.client] = q.offer
		}
	}
}

// pass releases the key to the offer of the next contender, on every node where the key is the sender's or
// free.
func (s *server) pass(q *request) {
	if q.granted = s.owner == q.owner; !q.granted && s.owner != 0 {
		return
	}
	s.owner = 0
	o := s.offers[q.next]
	if o.owner == 0 || s.marker != q.epoch && !s.w.without["passMarker"] ||
		s.marker != o.epoch && !s.w.without["passOffer"] {
		return
	}
	s.offers[q.next] = offer{}
	if s.w.without["offerFloor"] {
		o.floor = 0
	}
	s.owner, s.expires = o.owner, s.w.now+ttl
	m := &request{
		kind: "grant", client: q.next, owner: o.owner, epoch: s.marker, sent: o.sent, granted: true,
		token: s.count(1, o.floor),
	}
	s.w.log("%s grants the key to the offer of client %d, as %d, in epoch %d", s.name, q.next, o.owner, s.marker)
	for _, l := range s.w.clients[q.next].all() { // replicas pass messages on
		if l != nil && l.n == s.n && (l.at == s || l.at.replica) {
			l.replies = append(l.replies, m)
		}
	}
}

// node is an address: a master, its replica, and requests of dead links that are executed later, or never.
type node struct {
	w       *world
	servers [2]*server
	late    []*request
	lost    int // when it may have lost data last
}

func (n *node) master() *server {
	if n.servers[0].replica {
		return n.servers[1]
	}
	return n.servers[0]
}

func (n *node) replicaOf() *server {
	if n.servers[0].replica {
		return n.servers[0]
	}
	return n.servers[1]
}

// sync has the replica follow by commands: a marker that it did not have is written there as here.
func (n *node) sync() bool {
	m, r := n.master(), n.replicaOf()
	next := m.data
	next.raw = r.raw || r.marker != m.marker
	if r.data == next {
		return false
	}
	r.data = next
	n.w.log("%s has all that %s has", r.name, m.name)
	return true
}

// failover promotes the replica, whatever it has, and makes the master its replica: by a full copy unless
// that can continue, because the new one had all its data. A server that got a full copy does not come back
// before a check of its marker was due. x: whether a copy is made all the same, and links are closed.
func (n *node) failover(x int) {
	w, m, r := n.w, n.master(), n.replicaOf()
	if r.dumped > 0 && !w.without["slowSwaps"] {
		w.now = max(w.now, r.dumped+markerAge+1)
	}
	same := m.data
	same.raw = r.raw
	m.replica, r.replica, m.dumped, r.dumped, r.promoted = true, false, 0, 0, w.id()
	if x%2 == 0 || same != r.data {
		m.data, m.raw, m.dumped = r.data, false, w.now
	}
	if x%4 < 2 {
		m.closeAll()
	}
}

// restart is another process, with nothing, a dump, or the commands of an append-only file.
func (s *server) restart(x int) {
	s.history, s.scripts, s.data = history{run: s.w.id()}, false, [...]data{{}, s.disk, s.disk}[x]
	s.raw = s.raw && x == 2
	s.w.log("with %s", [...]string{"nothing", "an old dump", "an old append-only file"}[x])
	s.closeAll()
}

func (s *server) flush() { s.data = data{} }

func (s *server) save() bool {
	s.disk = s.data
	return true
}

func (s *server) flushScripts() bool {
	s.scripts = false
	s.w.log("SCRIPT FLUSH on %s", s.name)
	return true
}

func (s *server) closeAll() {
	for _, c := range s.w.clients {
		if l := c.links[s.n]; l != nil && l.at == s {
			l.close()
		}
	}
}

// mayLose reports whether a node may lose data: no other has within MaxTTL.
func (w *world) mayLose(n int) bool {
	for i, other := range w.nodes {
		if i != n && other.lost > 0 && w.now-other.lost <= ttl {
			return false
		}
	}
	return true
}

// loses does to the master what may lose data. A tick passes, so that no counter is ahead of the clock.
func (n *node) loses(how func(*server), what string) bool {
	n.w.log(what, n.master().name)
	how(n.master())
	n.lost = n.w.now
	n.w.now++
	return true
}

// executeLate executes a request of a dead link, which a proxy or the server had.
func (n *node) executeLate(x int) bool {
	if len(n.late) == 0 {
		return false
	}
	i := x % len(n.late)
	q := n.late[i]
	n.late = append(n.late[:i:i], n.late[i+1:]...)
	n.master().execute(q)
	n.w.log("%s executes late, of a link that client %d had: %s", n.master().name, q.client, q)
	return true
}

// bootstrap establishes nodes that are all new, if those that know better have had the time to say so.
func (w *world) bootstrap(c *client) bool {
	for _, l := range c.links {
		if !l.usable() || l.state != "new" || l.at.marker != l.of || l.at.past.state != "new" {
			return false
		}
	}
	for _, other := range w.clients {
		if !w.without["waitsForKnown"] && w.now-other.seen <= quarantine && other.booted <= w.flushedAll {
			return false
		}
	}
	for _, l := range c.links {
		l.boot(l.of)
	}
	return true
}

func (q *request) String() string {
	switch q.kind {
	case "boot":
		return fmt.Sprintf("boot (epoch %d, %s) %s", q.past.of, q.past.state, q.code)
	case "check":
		return fmt.Sprintf("check (marker %d, raw %t, master %t)", q.marker, q.raw, q.master)
	}
	offer, granted := "", ""
	if q.offer.owner != 0 {
		offer = fmt.Sprintf(", offer %d", q.offer.owner)
	}
	if q.granted {
		granted = ": yes"
	}
	return fmt.Sprintf("%s %d (epoch %d%s)%s %s", q.kind, q.owner, q.epoch, offer, granted, q.code)
}
