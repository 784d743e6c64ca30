package node

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// Sink takes replies. Answer is called at most once per request, by a goroutine of the
// node or by the caller of the request itself, with no lock held; it must not block.
// Which of several nodes answers is told by i.
type Sink interface {
	Answer(i int, rep Reply)
}

// An Entry is what one lease has to do with one node: what was asked of the node in the
// lease's name, and what the node may still hold or still execute of it.
//
//	               Acquire, Repair              Granted, error, lost
//	empty ------------------------> creating ----------------------> present
//	  ^                                | Held, never written            |
//	  +--------------------------------+                                | Release
//	  |                     Deleted, Missing, Held                      v
//	  +------------------------------------------------------------- releasing
//	                                                no answer: a debt, and again
//
// Release is the undo of everything before it. It is sent whenever the node may have
// something of ours, not only when it is known to, and it comes after the acquire by
// its place in the lane. Only what was written to a connection that then died may be
// executed at any later time, even after a release that came on a newer connection: a
// stopped server reads the old socket when it goes on. Such requests are counted in
// doubts, and a release is believed only when it deleted a key that no answered request
// explains, or when it was answered three times, at once, soon and a second later.
type Entry struct {
	n *Node
	t *Target

	mu        sync.Mutex // guards what follows, but i
	create    *request   // acquire or repair without an answer yet
	gone      instant    // when the key will have expired if nothing renews it
	owed      instant    // since when a release is owed; 0: none is
	doubts    int32      // creates that died with their connection
	answers   uint8      // of releases while doubts > 0
	i         uint8      // which of several nodes n is
	present   bool       // the node may hold our key
	releasing bool       // set by Release, for good: nothing may create the key again
	registers bool       // set by Release: an acquire is written all the same
	undoing   bool       // a release is under way or owed
}

// A Place is memory for a request, which lives there from when it is asked until it has settled
// or was dropped. Nobody touches it any more then, so it may serve the next.
type Place struct{ request }

// Init makes e the entry of t on n. i is passed on to sinks.
func (e *Entry) Init(n *Node, t *Target, i int) { e.n, e.t, e.i = n, t, uint8(i) }

// Node is the node that e is about.
func (e *Entry) Node() *Node { return e.n }

// Acquire asks for the node's vote, with a block of tokens. The node has timeout for its answer from when
// the request was written; how long it waits for that is nobody's fault. It is not written any more once the
// attempt has begun longer than ttl ago. inline says that the calling goroutine may block for
// NodeTimeout and does not mind to hear the answer before Acquire returns. place is where the
// request is to live, new, or that of a Release that has come first.
func (e *Entry) Acquire(place *Place, sink Sink, ttl time.Duration, tokens int64, timeout time.Duration, inline bool) {
	r := &place.request
	e.mu.Lock()
	if e.releasing { // whose request lives in place by now
		e.mu.Unlock()
		e.answer(sink, failed(ErrExpired))
		return
	}
	r.e, r.op, r.inline, r.sink, r.ttl, r.n1, r.timeout = e, opAcquire, inline, sink, ttl, tokens, timeout
	e.sendLocked(r, true)
}

// Repair puts the key back on a node that lost it, while the lease is valid, with its
// fence counter at top or above. The reply is no vote, so none is given.
func (e *Entry) Repair(ttl time.Duration, top int64, deadline time.Time) {
	e.mu.Lock()
	e.sendLocked(&request{e: e, op: opRepair, ttl: ttl, n1: top, timeout: e.n.timeout, deadline: e.n.at(deadline)}, true)
}

// Refresh makes the key's ttl full again, raises the fence counter to top and reserves
// more tokens. The node has timeout for its answer from when the request was written, and it is not
// written any more once deadline has passed. If look is not "", the
// reply names the contender, other than look, that waits longest.
func (e *Entry) Refresh(sink Sink, ttl time.Duration, top, more int64, timeout time.Duration, deadline time.Time, look string) {
	e.mu.Lock()
	e.sendLocked(&request{e: e, op: opRefresh, sink: sink, ttl: ttl, n1: top, n2: more, timeout: timeout, deadline: e.n.at(deadline), look: look}, false)
}

// releaseAgain is the request for a release that is owed. Whoever was to be its rival, and
// whatever its contender wanted, is past. It passes the turn on even if it undoes a lost
// attempt: what it finds by now may have been granted long after that was lost, and others
// wait for its holder to tell them.
func (e *Entry) releaseAgain() *request {
	return &request{op: opRelease, e: e, parting: &Parting{}}
}

// Parting is how a key is left to others. The zero value is for a lease that never had to
// wait and was not asked to yield.
type Parting struct {
	Contender string // whom to take out of the wants, or for whom a turn may be kept
	Rival     string // whose turn is next, on all nodes; then Contender goes to the end of the wants
	Failed    bool   // all who listen are told that what the lease was for has failed, see FailedOwner
}

// FailedOwner is the owner of which a notice says that what it had the key for has failed; none for other
// notices, which name a contender. A contender's name ends with a number.
func FailedOwner(notice string) (owner string, failed bool) {
	return strings.CutSuffix(notice, " failed")
}

// wanted reports whether the contender may have a want, or a turn, on the node.
func (p *Parting) wanted() bool { return p != nil && p.Contender != "" }

// Release takes back whatever the node has or may yet get of this lease. sink may be
// nil; it hears the first outcome. The node goes on until the release is confirmed. inline
// is as for Acquire. p says how the turn passes on; nil is for the undo of an attempt that
// was lost, which makes no turn and gives its contender, if there is one, its want back. place is
// where the request is to live: new, or that of the acquire, which may still be there.
func (e *Entry) Release(place *Place, sink Sink, inline bool, p *Parting) {
	e.mu.Lock()
	if e.releasing {
		e.mu.Unlock()
		e.answer(sink, Reply{Kind: Missing})
		return
	}
	e.releasing = true
	// An attempt that was lost by the answers of other nodes is written here too, for it gets
	// its contender a place among those who wait. If it is granted, this release comes next.
	e.registers = p == nil && e.t.contender != ""
	if c := e.create; c != nil && !e.registers && c.drop() {
		e.create = nil
	}
	empty := e.emptyLocked()
	e.undoing = !empty
	r := &place.request
	if e.create == r {
		r = &request{}
	}
	*r = request{e: e, op: opRelease, inline: inline, sink: sink, parting: p}
	e.mu.Unlock()
	if empty && !p.wanted() {
		e.answer(sink, Reply{Kind: Missing})
		return
	}
	e.n.route(r)
}

func (e *Entry) emptyLocked() bool { return e.create == nil && !e.present && e.doubts == 0 }

// sendLocked hands r to the node, and lets go of mu for that. A create is remembered, so
// that Release can take it out of the queue; a create that comes after Release is dropped.
func (e *Entry) sendLocked(r *request, create bool) {
	if e.releasing || create && e.create != nil {
		sink := r.sink
		e.mu.Unlock()
		e.answer(sink, failed(ErrExpired))
		return
	}
	if create {
		e.create = r
	}
	e.mu.Unlock()
	e.n.route(r)
}

// settled moves the entry on: r has ended with rep. It says whether a release is owed
// still, and from when on.
func (e *Entry) settled(r *request, rep Reply, how fate) (due time.Duration, owed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch r.op {
	case opAcquire, opRepair:
		e.createdLocked(r, rep, how)
		owed = e.releasing && !e.undoing && !e.emptyLocked()
		e.undoing = e.undoing || owed
	case opRefresh:
		if how != notSent {
			e.gone = max(e.gone, e.n.now().add(r.ttl))
		}
	case opRelease:
		due, owed = e.releasedLocked(rep, how)
		e.undoing = owed
	}
	return due, owed
}

func (e *Entry) createdLocked(r *request, rep Reply, how fate) {
	if e.create == r {
		e.create = nil
	}
	if how == notSent {
		return
	}
	e.gone = max(e.gone, e.n.now().add(r.ttl))
	switch {
	case how == lost:
		e.doubts++
	case rep.Kind == Held, rep.Kind == Failed && neverRan(rep.Err):
	default: // granted, or an error that does not prove that nothing was written
		e.present = true
	}
}

const (
	debtRetry  = 250 * time.Millisecond // after a release without an answer, at first
	debtSecond = time.Second            // later on, and between the last two answers, which settle a doubt
	debtSoon   = 100 * time.Millisecond // between the first two: a node that goes on reads its old connections at once
	debtAge    = 10 * time.Minute       // how long a node may be away and still be chased
)

func (e *Entry) releasedLocked(rep Reply, how fate) (due time.Duration, owed bool) {
	if e.emptyLocked() { // a create that was under way has left nothing
		return 0, false
	}
	if how != answered || rep.Kind == Failed && !conn.HasCode(rep.Err, "WRONGTYPE") {
		return e.unansweredLocked()
	}
	if rep.Kind == Deleted && e.doubts > 0 && !e.present {
		e.doubts-- // what it deleted can only have been the work of a request in doubt
	}
	e.present = false
	if e.doubts > 0 {
		switch e.answers++; e.answers {
		case 1:
			return debtSoon, true
		case 2:
			return debtSecond, true
		}
		e.doubts = 0
	}
	return 0, false
}

// unansweredLocked says how to go on after a release that got no answer. With no doubt
// the debt ends with the ttl. A request in doubt may begin a ttl of its own whenever the
// old connection is read, so it is given longer.
func (e *Entry) unansweredLocked() (due time.Duration, owed bool) {
	now := e.n.now()
	if e.owed == 0 {
		e.owed = now
	}
	since := time.Duration(now - e.owed)
	if now > e.gone && (e.doubts == 0 || since > debtAge) {
		e.present, e.doubts = false, 0
		return 0, false
	}
	if since < debtSecond {
		return debtRetry, true
	}
	return debtSecond, true
}

// instant is a time on the node's own clock, in nanoseconds since just before it was made,
// so that 0 is none. An entry has many, and a time.Time is three times as large.
type instant int64

func (i instant) add(d time.Duration) instant { return clock.Add(i, instant(d)) }

func (n *Node) now() instant { return instant(clock.Since(n.began)) }

func (n *Node) at(t time.Time) instant { return instant(t.Sub(n.began)) }

type op uint8

const (
	opAcquire op = iota
	opRepair
	opRefresh
	opRelease
	opBatch // of any of these
)

// votes reports whether o asks for a vote.
func (o op) votes() bool { return o == opAcquire || o == opRepair }

func (o op) String() string {
	return [...]string{"acquire", "repair", "refresh", "release", "batch"}[o]
}

// request is one script call on its way to the node and back.
type request struct {
	e        *Entry
	sink     Sink // nil: nobody waits for the answer
	op       op
	inline   bool   // the goroutine that routes it may block
	hops     uint8  // redirections followed so far, on a Cluster
	asking   bool   // the next server must be told that it is asked for once (ASK)
	reach    reach  // which keys can be had in one place
	to       string // the address that the last redirection named
	ttl      time.Duration
	n1, n2   int64         // tokens, or top and more
	timeout  time.Duration // how long the node has for its answer, from when it was written; 0: NodeTimeout
	deadline instant       // of a repair or a refresh: not written after this

	q          atomic.Pointer[queue] // where it waits; nil once it is out. Written under that queue's mu
	next, prev *request              // guarded by the queue's mu

	parting *Parting // of a release; nil: an undo
	look    string   // of a refresh: who asks for rivals; "": nobody does
}

// keys appends the keys of r's script.
func (r *request) keys(to []any) []any {
	t := r.e.t
	to = append(to, &t.key)
	if r.op != opRelease && r.reach < keyBeside {
		to = append(to, &t.bucket)
	}
	if r.reach == allKeys && r.withWants() {
		to = append(to, t.wants())
	}
	return to
}

// withWants reports whether r's script uses the wants, if it can have them.
func (r *request) withWants() bool {
	switch r.op {
	case opRelease:
		return r.parting != nil || r.e.t.contender != ""
	case opRefresh:
		return r.look != ""
	}
	return r.e.t.contender != ""
}

// values appends the other arguments of r's script.
func (r *request) values(to []any) []any {
	t := r.e.t
	ttl := max(1, r.ttl.Milliseconds())
	switch r.op {
	case opAcquire:
		to = append(to, &t.owner, ttl, r.n1)
		if t.contender != "" || r.reach == keyBeside {
			to = append(to, 0, t.contender)
		}
	case opRepair:
		to = append(to, &t.owner, ttl, 0, r.n1)
		if t.contender != "" || r.reach == keyBeside {
			to = append(to, t.contender)
		}
	case opRefresh:
		to = append(to, &t.owner, ttl, &r.n1, r.n2)
		if r.look != "" && r.reach == allKeys {
			to = append(to, r.look)
		}
	case opRelease:
		to = append(to, &t.owner)
		switch p := r.parting; {
		case r.reach != allKeys:
		case p != nil && p.Failed:
			to = append(to, r.e.n.publish, r.e.n.turn, p.Contender, p.Rival, "failed")
		case p != nil:
			to = append(to, r.e.n.publish, r.e.n.turn)
			if p.Contender != "" {
				to = append(to, p.Contender)
			}
			if p.Rival != "" {
				to = append(to, p.Rival)
			}
		case t.contender != "":
			to = append(to, t.contender)
		}
	}
	if r.reach == keyBeside {
		to = append(to, &t.bucket)
	}
	return to
}

// plain reports whether r is a release that undoes nothing, of a lease that neither had to
// wait nor yields.
func (r *request) plain() bool {
	return r.op == opRelease && r.reach == allKeys && r.parting != nil && *r.parting == Parting{}
}

// alike reports whether r's values are those of p, but for the owner.
func (r *request) alike(p *request) bool {
	return p != nil && r.op == p.op && r.ttl == p.ttl && r.n1 == p.n1 && r.n2 == p.n2 &&
		r.parting == p.parting && r.reach == p.reach && r.look == p.look && r.e.t.contender == p.e.t.contender
}

// moot reports whether r need not be written any more, and what to answer then.
func (r *request) moot(now instant) (Reply, bool) {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	switch {
	case r.op == opRelease:
		return Reply{Kind: Missing}, r.e.emptyLocked() && !r.parting.wanted()
	case r.e.n.closing.Load():
		return failed(ErrClosed), true
	}
	if r.op == opAcquire {
		return failed(ErrExpired), r.e.releasing && !r.e.registers || r.e.t.over(r.ttl)
	}
	return failed(ErrExpired), now > r.deadline || r.e.releasing
}

// drop takes r back if it was not written yet, and says whether that was so.
func (r *request) drop() bool {
	for q := r.q.Load(); q != nil; q = r.q.Load() {
		if q.drop(r) {
			return true
		}
	}
	return false
}

// settle ends r: first what it means for the entry, then whoever waits hears of it.
// Once the entry knows, r's place may be another request's.
func (r *request) settle(rep Reply, how fate) {
	e, sink := r.e, r.sink
	due, owed := e.settled(r, rep, how)
	e.answer(sink, rep)
	if owed {
		e.n.debts.owe(e, due)
	}
}

// urgent reports whether r goes before what waits and is not: it is about a lock that somebody has, or may have.
// An acquire of the same entry that was not written yet stays before its refreshes and its release: a refresh would
// not find the key. So does any acquire before the release by which its contender leaves: written after that, it would
// have a place among those who wait.
func (r *request) urgent() bool {
	if r.op.votes() {
		return false
	}
	e := r.e
	e.mu.Lock()
	defer e.mu.Unlock()
	return (r.op == opRefresh || !e.emptyLocked()) && (e.create == nil || e.create.q.Load() == nil)
}

func (e *Entry) answer(sink Sink, rep Reply) {
	if sink != nil {
		sink.Answer(int(e.i), rep)
	}
}
