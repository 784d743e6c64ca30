package node

import (
	"errors"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
)

// Sink takes replies. Answer is called at most once per request, by a goroutine of the
// node or by the caller of the request itself, with no lock held; it must not block.
// i says which of several nodes answers.
type Sink interface {
	Answer(i int, rep Reply)
}

// An Entry is the state of one lease on one node: what was requested from the node in the lease's name,
// and what the node may still hold or still execute of it.
//
//	               Acquire, Repair              Granted, error, lost
//	empty ------------------------> creating ----------------------> present
//	  ^                                | Held, never written            |
//	  +--------------------------------+                                | Release
//	  |                     Deleted, Missing, Held                      v
//	  +------------------------------------------------------------- releasing
//	                                                no answer: a debt, and again
//
// Release is the undo of everything before it. It is sent whenever the node may have something of
// ours, not only when it is known to, and it comes after the acquire by its place in the link. Only
// what was written to a connection that then died may be executed at any later time, even after a
// release that came on a newer connection: a stopped server reads the old socket when it continues.
// Such requests are counted in indeterminate, and a release is believed only when it deleted a key
// that no answered request and no grant to an offer explains, or when it was answered three times, at
// once, soon and a second later.
//
// The entry of an offer's lease becomes present without a request of its own, when the node's message
// about the grant has come (see Offer).
type Entry struct {
	n *Node
	t *Target

	mu             sync.Mutex    // guards what follows, except i
	create         *request      // acquire or repair without an answer yet
	gone           clock.Instant // when the key will have expired if nothing renews it
	owed           clock.Instant // since when a release is owed; 0: none is
	indeterminate  int32         // creates that died with their connection
	answers        uint8         // of releases while indeterminate > 0
	i              uint8         // which of several nodes n is
	present        bool          // the node may hold our key
	released       bool          // set by Release, for good: nothing may create the key again
	registers      bool          // set by Release: an acquire is written all the same
	releasePending bool          // a release is in progress or owed
	kept           bool          // the only request that may have made the key e's did so in a kept epoch
}

// Init makes e the entry of t on n. i is passed on to sinks.
func (e *Entry) Init(n *Node, t *Target, i int) { e.n, e.t, e.i = n, t, uint8(i) }

// Acquire asks for the node's vote, with a block of tokens. The node has NodeTimeout for its answer from
// when the request was written; the time that it waits for that does not count. It is not written any
// more if the attempt began longer than ttl ago. sink may have the answer before Acquire returns. buf is
// memory for the request. If a Release has come first, it is in use by that, and the acquire is not sent.
// inline says that the calling goroutine has nothing to do until the answer, and may block for NodeTimeout.
func (e *Entry) Acquire(buf *RequestBuf, sink Sink, ttl time.Duration, tokens int64, inline bool) {
	r := &buf.request
	e.mu.Lock()
	if e.released { // whose request is in buf by now
		e.mu.Unlock()
		e.answer(sink, failed(ErrExpired))
		return
	}
	r.e, r.op, r.inline, r.sink, r.ttl, r.tokens = e, opAcquire, inline, sink, ttl, tokens
	e.sendAndUnlock(r, true)
}

// Repair puts the key back on a node that lost it, while the lease is valid, with its
// fence counter at top or above. The reply is no vote, so none is given.
func (e *Entry) Repair(ttl time.Duration, top int64, deadline time.Time) {
	e.mu.Lock()
	e.sendAndUnlock(&request{
		e: e, op: opRepair, ttl: ttl, tokens: top, deadline: e.n.at(deadline),
	}, true)
}

// Refresh makes the key's ttl full again, raises the fence counter to top and reserves
// more tokens. The node has NodeTimeout for its answer from when the request was written, and it is not
// written any more once deadline has passed. If rivalsOf is not "", the reply names the contender,
// other than rivalsOf, that waits longest.
func (e *Entry) Refresh(sink Sink, ttl time.Duration, top, more int64,
	deadline time.Time, rivalsOf string) {
	e.mu.Lock()
	e.gone = max(e.gone, e.n.now().Add(ttl)) // it may be executed any time from now on
	e.sendAndUnlock(&request{
		e: e, op: opRefresh, sink: sink, ttl: ttl, tokens: top, more: more,
		deadline: e.n.at(deadline), rivalsOf: rivalsOf,
	}, false)
}

// releaseAgain is the request for a release that is owed.
func (e *Entry) releaseAgain() *request {
	return &request{op: opRelease, e: e, turnPass: e.passAgain(), repeats: true}
}

// passAgain is the turnPass of a release that is sent again. It names no rival and no contender: the first
// release did, and that no longer applies. It passes the turn on even if it undoes a lost attempt: the
// acquire may have been executed long after that attempt was lost, and by now others wait for the holder of
// the key, which is this entry, to publish its release.
func (e *Entry) passAgain() *TurnPass {
	p := &TurnPass{}
	if e.t.prepared() {
		p.Contender = Nobody // the next one may be granted it
	}
	return p
}

// TurnPass is how a key is left to others. The zero value is for a lease that never had to
// wait and was not asked to yield.
type TurnPass struct {
	Contender string // whom to take out of the wants, or for whom a turn may be kept
	Rival     string // whose turn is next, on all nodes; then Contender goes to the end of the wants
	Leaves    bool   // but it does not, with a Rival
	News      News   // what all who wait are notified of besides

	rejoins *offerTerms // of the Contender's next offer, with which it waits again; nil: none
}

// Rejoin has the release of p bring o, as its contender's poll of that number: the contender, which leaves,
// waits again, if others do (see lua/release.lua). p keeps nothing else of o: a release may be owed for long,
// and each lease would keep all that come after it.
func (p *TurnPass) Rejoin(o *Offer, poll uint32, span time.Duration) {
	p.Leaves, p.rejoins = true, o.terms(poll, span)
}

// behind is p for a release that is sent again, behind what its contender has sent since: that may have left.
func (p *TurnPass) behind() *TurnPass {
	q := *p
	q.Leaves, q.rejoins = true, nil
	return &q
}

// Nobody is the Contender of a release that names none, but knows that others wait: unlike one without a
// Contender it does not ask whether anybody does.
const Nobody = "-"

// values are ARGV[4] to [8] of lua/release.lua: those at the end that are "" may be left out. The last, an
// offer, is not the same for all nodes, and so left to the request.
func (p *TurnPass) values() (v [5]string) {
	v[0], v[1] = p.Contender, p.Rival
	switch {
	case p.News == NewsFailed:
		v[2] = "failed"
	case p.News == NewsLook:
		v[2] = "look"
	}
	if p.Leaves {
		v[3] = "leaves"
	}
	return v
}

// wanted reports whether the contender may have a want, or a turn, on the node.
func (p *TurnPass) wanted() bool { return p != nil && p.Contender != "" }

// Release takes back whatever the node has or may yet get of this lease. sink may be nil; it
// receives the first outcome. The node continues until the release is confirmed, or the key must have
// expired (see unansweredLocked). p says how the turn passes on; nil is for the undo of an attempt that was
// lost, which makes no turn and gives its contender, if there is one, its want back. buf is where the request
// is to live: new, or that of the acquire, which may still be there. inline is as for Acquire.
func (e *Entry) Release(buf *RequestBuf, sink Sink, inline bool, p *TurnPass) {
	e.mu.Lock()
	if e.released {
		e.mu.Unlock()
		e.answer(sink, Reply{Kind: Missing})
		return
	}
	e.released = true
	// An attempt that was lost by the answers of other nodes is written here too, for it gets
	// its contender a place among those who wait. If it is granted, this release comes next. But not
	// where many wait to be written: the contender's next attempt comes when the others have answered,
	// not when this node has, and all of them would pile up here (maxRegistering).
	e.registers = p == nil && e.t.Contender() != "" && !e.t.prepared()
	empty := e.emptyLocked()
	e.releasePending = !empty || p.wanted()
	r := &buf.request
	if e.create == r {
		r = &request{}
	}
	*r = request{e: e, op: opRelease, inline: inline, sink: sink, turnPass: p}
	e.mu.Unlock()
	if empty && !p.wanted() {
		e.answer(sink, Reply{Kind: Missing})
		return
	}
	e.n.route(r)
}

// Abandon ends the entry without a release, for good: what was not written yet is not written any more, and
// what the node has, or executes later, stays for somebody else, or until its ttl has passed.
func (e *Entry) Abandon() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.released, e.releasePending = true, true // as if one were in progress that never ends: so nothing is owed
}

func (e *Entry) emptyLocked() bool { return e.create == nil && !e.present && e.indeterminate == 0 }

// sendAndUnlock hands r to the node, and releases mu for that. A create is remembered, so that
// Release can take it out of the queue; a create that comes after Release is dropped.
func (e *Entry) sendAndUnlock(r *request, create bool) {
	if e.released || create && e.create != nil {
		sink := r.sink
		e.mu.Unlock()
		e.answer(sink, failed(ErrExpired))
		return
	}
	if create {
		e.create, e.kept = r, false
	}
	e.mu.Unlock()
	e.n.route(r)
}

// completed updates the entry: r has ended with rep. It reports whether a release is still due,
// and from when on.
func (e *Entry) completed(r *request, rep Reply, how delivery) (due time.Duration, owed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch r.op {
	case opRelease:
		due, owed = e.releasedLocked(rep, how)
		e.releasePending = owed
		return due, owed
	case opRefresh:
		if how != notSent {
			e.gone = max(e.gone, e.n.now().Add(r.ttl))
		}
		// It has prolonged, or may yet prolong, a grant whose message was lost, too.
		if e.t.prepared() && how != notSent && rep.Kind != Missing && rep.Kind != Held {
			e.present = true
		}
	default:
		e.createdLocked(r, rep, how)
	}
	owed = e.released && !e.releasePending && !e.emptyLocked()
	e.releasePending = e.releasePending || owed
	return due, owed
}

func (e *Entry) createdLocked(r *request, rep Reply, how delivery) {
	if e.create == r {
		e.create = nil
	}
	if how == notSent {
		return
	}
	e.gone = max(e.gone, e.n.now().Add(r.ttl))
	switch {
	case how == lost:
		e.indeterminate++
		e.kept = false
	case rep.Kind == Held, rep.Kind == Missing, rep.Kind == Failed && neverRan(rep.Err):
	default: // granted, or an error that does not prove that nothing was written
		e.present = true
		e.kept = (rep.Kind == Granted || rep.Kind == Replayed) && rep.Epoch != nil && rep.Epoch.State == EpochKept
	}
}

// unforgotten reports whether the key, if the node says that it is e's, was put there in an epoch that was
// kept, and has been there ever since, whatever else the node has lost: only e's own requests make it e's,
// and the end of its ttl does not come back with old data. Not so for an offer's lease, which others'
// releases make e's as well.
func (e *Entry) unforgotten() bool {
	if e.t.prepared() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.kept
}

const (
	debtRetry = 250 * time.Millisecond // after a release without an answer, at first
	// later on, and between the last two answers, which decide an indeterminate one
	debtSecond = time.Second
	// between the first two: a node that continues reads its old connections at once
	debtSoon = 100 * time.Millisecond
	debtAway = 5 * time.Second  // while the server is suspended: all debts are sent when it is back
	debtAge  = 10 * time.Minute // how long an indeterminate release without an answer is sent again
)

func (e *Entry) releasedLocked(rep Reply, how delivery) (due time.Duration, owed bool) {
	if e.emptyLocked() { // a create that was in progress has left nothing
		return 0, false
	}
	if how != answered || rep.Kind == Failed && !conn.HasCode(rep.Err, "WRONGTYPE") {
		return e.unansweredLocked(rep.Err)
	}
	if rep.Kind == Deleted && e.indeterminate > 0 && !e.present && !e.t.prepared() {
		e.indeterminate-- // what it deleted can only have been the work of an indeterminate request, and no grant's
	}
	e.present = false
	if e.indeterminate > 0 {
		switch e.answers++; e.answers {
		case 1:
			return debtSoon, true
		case 2:
			return debtSecond, true
		}
		e.indeterminate = 0
	}
	return 0, false
}

// unansweredLocked says how to continue after a release that got no answer. Without an indeterminate
// request the debt ends with the ttl. Such a request may begin a ttl of its own whenever the old
// connection is read, so it is given longer.
//
// A suspended server gets nothing until its probe is answered, and then all debts at once: to try each of
// tens of thousands every second before that would keep a processor busy. (On a Cluster another master may
// have the key's slot by then, and only a try finds out.)
func (e *Entry) unansweredLocked(err error) (due time.Duration, owed bool) {
	now := e.n.now()
	if e.owed == 0 {
		e.owed = now
	}
	since := time.Duration(now - e.owed)
	if now > e.gone && (e.indeterminate == 0 || since > debtAge) {
		e.present, e.indeterminate = false, 0
		return 0, false
	}
	due = debtSecond
	switch {
	case errors.Is(err, link.ErrSuspended) && !e.n.IsCluster():
		due = debtAway
		if e.indeterminate == 0 {
			due = min(due, max(debtRetry, time.Duration(e.gone-now)+time.Millisecond))
		}
	case since < debtSecond:
		due = debtRetry
	}
	return due, true
}

func (n *Node) now() clock.Instant { return clock.InstantNow(n.began) }

func (n *Node) at(t time.Time) clock.Instant { return clock.InstantOf(n.began, t) }

func (e *Entry) answer(sink Sink, rep Reply) {
	if sink != nil {
		sink.Answer(int(e.i), rep)
	}
}
