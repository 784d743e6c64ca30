package node

import (
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/list"
)

// A RequestBuf is memory for a request, which is there from when it is asked until it is complete
// or was dropped. Nobody touches it any more then, so it may serve the next.
type RequestBuf struct{ request }

type op uint8

const (
	opAcquire op = iota
	opRepair
	opRefresh
	opRelease
	opUndo  // the script of some releases
	opBatch // of any of these
)

// votes reports whether o asks for a vote.
func (o op) votes() bool { return o == opAcquire || o == opRepair }

func (o op) String() string {
	return [...]string{"acquire", "repair", "refresh", "release", "undo", "batch"}[o]
}

// request is one script call on its way to the node and back.
type request struct {
	e            *Entry
	sink         Sink // nil: nobody waits for the answer
	op           op
	inline       bool   // the goroutine that routes it may block
	hops         uint8  // redirections followed so far, on a Cluster
	asking       bool   // the next server must get ASKING first, for this once (ASK)
	reach        reach  // which keys can be had in one place
	to           string // the address that the last redirection named
	ttl          time.Duration
	tokens, more int64         // tokens, or top and more
	timeout      time.Duration // how long the node has for its answer, from when it was written; 0: NodeTimeout
	deadline     clock.Instant // of a repair or a refresh: not written after this

	q     atomic.Pointer[queue] // where it waits; nil once it is out. Written under that queue's mu
	links list.Links[request]   // in the queue: guarded by its mu

	turnPass *TurnPass // of a release; nil: an undo
	rivalsOf string    // of a refresh: the contender whose rival the reply is to name; "": it names none
}

// ListLinks are the links of r in the queue in which it waits.
func (r *request) ListLinks() *list.Links[request] { return &r.links }

// script is the script that r runs: a release that passes no turn on, or that cannot because the wants
// are out of reach, is an undo.
func (r *request) script() op {
	if r.op == opRelease && (r.turnPass == nil || r.reach != allKeys) {
		return opUndo
	}
	return r.op
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
	if r.grants() {
		to = append(to, &t.bucket)
	}
	return to
}

// grants reports whether r is a release that grants the key to the next contender, if that has made an offer.
func (r *request) grants() bool {
	return r.op == opRelease && r.reach == allKeys && r.turnPass.wanted() && r.turnPass.News == NoNews &&
		r.e.n.TakesOffers()
}

// offer is the offer that r makes; nil: none.
func (r *request) offer() *carried {
	if r.reach != allKeys || !r.e.n.TakesOffers() || r.op != opAcquire && (r.op != opRelease || r.turnPass != nil) {
		return nil
	}
	if c := r.e.t.contention; c != nil && !r.e.t.prepared() {
		return c.carried
	}
	return nil
}

// withWants reports whether r's script uses the wants, if it can have them.
func (r *request) withWants() bool {
	switch r.op {
	case opRelease:
		return r.turnPass != nil || r.e.t.Contender() != ""
	case opRefresh:
		return r.rivalsOf != ""
	}
	return r.e.t.Contender() != ""
}

// values appends the other arguments of r's script.
func (r *request) values(to []any) []any {
	t := r.e.t
	ttl := max(1, r.ttl.Milliseconds())
	switch r.op {
	case opAcquire:
		to = append(to, &t.owner, ttl, r.tokens)
		if t.Contender() != "" || r.reach == keyBeside {
			to = append(to, 0, t.Contender())
		}
		if c := r.offer(); c != nil {
			to = append(to, c.text(r.e.i, r.e.n.epochName()))
			if c.waits {
				to = append(to, "waits")
			}
		}
	case opRepair:
		to = append(to, &t.owner, ttl, 0, r.tokens)
		if t.Contender() != "" || r.reach == keyBeside {
			to = append(to, t.Contender())
		}
	case opRefresh:
		to = append(to, &t.owner, ttl, &r.tokens, r.more)
		if r.rivalsOf != "" && r.reach == allKeys {
			to = append(to, r.rivalsOf)
		}
	case opRelease:
		to = append(to, &t.owner)
		switch p := r.turnPass; {
		case r.reach != allKeys:
		case p != nil:
			to = append(to, r.e.n.publish, r.e.n.turn)
			rest := p.values()
			if p.rejoins != nil && r.e.n.TakesOffers() {
				rest[len(rest)-1] = p.rejoins.text(r.e.i, r.e.n.epochName())
			}
			last := len(rest)
			for last > 0 && rest[last-1] == "" {
				last--
			}
			for _, v := range rest[:last] {
				to = append(to, v)
			}
		case t.prepared() && r.e.n.TakesOffers():
			to = append(to, t.Contender(), "")
		case t.Contender() != "":
			to = append(to, t.Contender())
			if c := r.offer(); c != nil {
				to = append(to, c.text(r.e.i, r.e.n.epochName()))
			}
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
	return r.op == opRelease && r.reach == allKeys && r.turnPass != nil && *r.turnPass == TurnPass{}
}

// sameArgs reports whether r's values are those of p, but for the owner.
func (r *request) sameArgs(p *request) bool {
	return p != nil && r.op == p.op && r.ttl == p.ttl && r.tokens == p.tokens && r.more == p.more &&
		r.turnPass == p.turnPass && r.reach == p.reach && r.rivalsOf == p.rivalsOf &&
		r.e.t.Contender() == p.e.t.Contender() && r.e.t.prepared() == p.e.t.prepared() &&
		r.offer() == nil && p.offer() == nil
}

// obsolete reports whether r need not be written any more, and what to answer then.
func (r *request) obsolete(now clock.Instant) (Reply, bool) {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	switch {
	case r.op == opRelease:
		return Reply{Kind: Missing}, r.e.emptyLocked() && !r.turnPass.wanted()
	case r.e.n.closing.Load():
		return failed(ErrClosed), true
	}
	if r.op == opAcquire {
		return failed(ErrExpired), r.e.released && !r.e.registers || r.e.t.over(r.ttl)
	}
	return failed(ErrExpired), now > r.deadline || r.e.released
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

// crowded reports whether r, which may be nil, waits to be written among more than maxRegistering.
func (r *request) crowded() bool {
	if r == nil {
		return false
	}
	q := r.q.Load()
	return q != nil && q.len() > maxRegistering
}

// complete ends r: first what it means for the entry, then the sink receives it.
// Once the entry knows, r's buf may be another request's.
func (r *request) complete(rep Reply, how delivery) {
	e, sink := r.e, r.sink
	due, owed := e.completed(r, rep, how)
	e.answer(sink, rep)
	if owed {
		e.n.debts.owe(e, due)
		// It may be back since, and have sent the debts of before, or be about to.
		if due > debtSecond && !e.n.Suspended() && !e.n.debts.more.Load() {
			e.n.debts.hurry()
		}
	}
}

// urgent reports whether r goes before what waits and is not: it is about a lock that somebody has,
// or may have. An acquire of the same entry that was not written yet stays before its refreshes and
// its release: a refresh would not find the key. So does any acquire before the release by which
// its contender leaves: written after that, it would have a place among those who wait.
func (r *request) urgent() bool {
	if r.op.votes() {
		return false
	}
	e := r.e
	e.mu.Lock()
	defer e.mu.Unlock()
	return (r.op == opRefresh || !e.emptyLocked()) && (e.create == nil || e.create.q.Load() == nil)
}

// completeBut completes those of batch that are not to be sent, and gives the rest: those that pass.
func completeBut(pass func(*request) bool, batch []*request, rep Reply) []*request {
	rest := batch[:0]
	for _, r := range batch {
		if pass(r) {
			rest = append(rest, r)
		} else {
			r.complete(rep, notSent)
		}
	}
	return rest
}

// delivery is what is known of a request that has ended.
type delivery uint8

const (
	notSent  delivery = iota // the server never saw it and never will
	answered                 // the server has executed or refused it
	lost                     // its connection died first: the server may still execute it
)

// sentHow is the delivery of a request that ended with err, in a batch that was sent or not.
func sentHow(sent bool, err error) delivery {
	switch {
	case !sent:
		return notSent
	case err == nil || conn.IsReply(err):
		return answered
	}
	return lost
}

// completeAll completes what is not to be sent.
func completeAll(batch []*request, rep Reply) {
	for _, r := range batch {
		r.complete(rep, notSent)
	}
}

// unwritten sorts out of a batch that is not empty what need not be written any more, and
// returns the rest.
func unwritten(batch []*request) []*request {
	keep := batch[:0]
	now := batch[0].e.n.now()
	for _, r := range batch {
		if rep, obsolete := r.obsolete(now); obsolete {
			r.complete(rep, notSent)
		} else {
			keep = append(keep, r)
		}
	}
	return keep
}
