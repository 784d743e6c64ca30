package node

import (
	"errors"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/lua"
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
	opUndo   // the script of some releases
	opDone   // the one of releases by which nobody has to be told anything, as far as is known
	opAttach // the one of acquires for a Target that replaces others

	opShared // added to each of these but the last, and not to r.op: the script of a read lease
)

// votes reports whether o asks for a vote.
func (o op) votes() bool { return o == opAcquire || o == opRepair || o == opAttach }

func (o op) String() string {
	return [...]string{"acquire", "repair", "refresh", "release", "undo", "done", "attach"}[o]
}

// request is one script call on its way to the node and back: a call of a link.
type request struct {
	e            *Entry
	sink         Sink // nil: nobody waits for the answer
	op           op
	inline       bool   // the goroutine that sends it may block for NodeTimeout
	hops         uint8  // redirections followed so far, on a Cluster
	tries        uint8  // how often the server did not know the script
	asText       bool   // it is sent as a text, which also makes the name of its script known where its key is
	remapped     bool   // the map of the Cluster was read again for it, or is to be
	asking       bool   // the next server must get ASKING first, for this once (ASK)
	awaited      bool   // of a release: the node has said that somebody waits
	repeats      bool   // of a release: another one may have been executed before it
	encoded      bool   // of an acquire or a repair: it was, at least once. Guarded by e's mu
	reach        reach  // which keys can be had in one place
	to           string // the address that the last redirection named
	ttl          time.Duration
	tokens, more int64         // tokens, or top and more
	deadline     clock.Instant // of a repair or a refresh: not written after this

	turnPass *TurnPass // of a release; nil: an undo
	rivalsOf string    // of a refresh: the contender whose rival the reply is to name; "": it names none

	// How it was encoded last.
	s        *Server
	epoch    *Epoch        // in which it asks
	by       op            // by whose script
	byText   bool          // which was sent as a text
	strict   bool          // its script makes the strict check
	unloaded bool          // the server may have refused to load the scripts
	verified *verification // the last one at that time
	asked    time.Time     // when that was
	useless  error         // why there was nothing to encode; nil, of a release: nothing is left to release

	// Where a server did not know the name of a script last, and whose that was; nil: nowhere.
	unknownOn *link.Session
	unknownBy op
}

// script is the script that r runs: a release that passes no turn on, or that cannot because the wants
// are out of reach, is an undo; and one that knows of nobody asks whether anybody waits.
func (r *request) script() op {
	switch {
	case r.op == opAcquire && r.e.t.replaced != nil:
		return opAttach
	case r.op != opRelease:
		return r.op
	case r.turnPass == nil || r.reach != allKeys:
		return opUndo
	case r.turnPass.Contender == "" && r.turnPass.Rival == "" && r.turnPass.News != NewsFailed && !r.awaited:
		return opDone
	}
	return opRelease
}

// scriptOf is where r's script is among those of an epoch, which is by for a lease that is not shared.
func (r *request) scriptOf(by op) op {
	if r.e.t.shared {
		return opShared + by
	}
	return by
}

// args are arguments of a command, encoded.
type args struct {
	b []byte
	n int
}

func (a *args) text(s string) { a.b, a.n = link.AppendArg(a.b, s), a.n+1 }

func (a *args) number(n int64) { a.b, a.n = link.AppendInt(a.b, n), a.n+1 }

func (a *args) bucket(t *Target) { a.b, a.n = link.AppendArg(a.b, t.bucket[:]), a.n+1 }

// beside is the name of what a node keeps for t's key besides, wants or offers.
func (a *args) beside(t *Target, part string) { a.b, a.n = t.appendName(a.b, part), a.n+1 }

// keys adds the keys of r's script, which is by. A script finds each of them at its own place, and what it
// does not need there is the lock key.
func (r *request) keys(a *args, by op) {
	t := r.e.t
	a.text(t.key)
	if t.shared {
		a.beside(t, readersPart)
		a.beside(t, wantsPart)
	}
	waited := r.reach == allKeys && r.withWants()
	switch by {
	case opDone:
		a.beside(t, wantsPart)
		return
	case opRefresh:
		if r.reach < keyBeside {
			a.bucket(t)
		}
		if waited {
			a.beside(t, wantsPart)
		}
		return
	case opUndo:
		if !waited {
			return
		}
		a.text(t.key)
		a.text(t.key)
	default:
		if r.reach >= keyBeside {
			return
		}
		if r.e.n.IsCluster() && by == opRelease { // which may be moving the slot
			a.text(t.key)
		} else {
			a.bucket(t)
		}
		if r.epoch.marked {
			a.text(lua.Marker)
		} else {
			a.text(t.key)
		}
		if by != opRelease && !waited {
			return
		}
	}
	a.beside(t, wantsPart)
	if r.e.n.TakesOffers() {
		a.beside(t, offersPart)
	}
}

// offer is the offer that r makes; nil: none.
func (r *request) offer() *carried {
	if r.reach != allKeys || !r.e.n.TakesOffers() ||
		r.op != opAcquire && (r.op != opRelease || r.turnPass != nil) {
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

// values adds the other arguments of r's script, which is by, but for the node's epoch.
func (r *request) values(a *args, by op) {
	t := r.e.t
	ttl := max(1, r.ttl.Milliseconds())
	switch r.op {
	case opAcquire:
		a.text(t.owner)
		a.number(ttl)
		if t.replaced != nil {
			a.number(t.replaced.Top)
			for _, owner := range t.replaced.Owners {
				a.text(owner)
			}
			return
		}
		a.number(r.tokens)
		if t.Contender() != "" || r.reach == keyBeside {
			a.number(0)
			a.text(t.Contender())
		}
		if c := r.offer(); c != nil {
			a.text(c.text(r.e.i, r.e.n.epochName()))
			if c.waits {
				a.text("waits")
			}
		}
	case opRepair:
		a.text(t.owner)
		a.number(ttl)
		a.number(0)
		a.number(r.tokens)
		if t.Contender() != "" || r.reach == keyBeside {
			a.text(t.Contender())
		}
	case opRefresh:
		a.text(t.owner)
		a.number(ttl)
		a.number(r.tokens)
		a.number(r.more)
		if r.rivalsOf != "" && r.reach == allKeys {
			a.text(r.rivalsOf)
		}
	case opRelease:
		a.text(t.owner)
		switch p := r.turnPass; {
		case r.reach != allKeys || by == opDone:
		case p != nil:
			if r.tries > 0 {
				p = p.behind()
			}
			publish := "PUBLISH"
			if r.e.n.IsCluster() { // the slot of the channel is the key's; PUBLISH would go to every master
				publish = "SPUBLISH"
			}
			a.text(publish)
			a.number(TurnTime(r.e.n.timeout).Milliseconds())
			rest := p.values()
			if p.rejoins != nil && r.e.n.TakesOffers() {
				rest[len(rest)-1] = p.rejoins.text(r.e.i, r.e.n.epochName())
			}
			last := len(rest)
			for last > 0 && rest[last-1] == "" {
				last--
			}
			for _, v := range rest[:last] {
				a.text(v)
			}
		case r.tries > 0: // its contender may have left since, or have made another offer
		case t.prepared() && r.e.n.TakesOffers():
			a.text(t.Contender())
			a.text("")
		case t.Contender() != "":
			a.text(t.Contender())
			if c := r.offer(); c != nil {
				a.text(c.text(r.e.i, r.e.n.epochName()))
			}
		}
	}
	if r.reach == keyBeside {
		a.bucket(t)
	}
}

// maxRegistering bounds what waits for a server because of attempts that are lost already, and are written
// only to get their contender a place there (see Entry.Release).
const maxRegistering = 512

// obsolete reports whether r need not be written any more: see completeUseless. queued is how many others
// wait for its server.
func (r *request) obsolete(now clock.Instant, queued int) bool {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if r.op == opRelease {
		return r.e.emptyLocked() && !r.turnPass.wanted()
	}
	over := now > r.deadline || r.e.released
	if r.op == opAcquire {
		over = r.e.released && (!r.e.registers || r.tries > 0 || queued > maxRegistering) || r.e.t.over(r.ttl)
	}
	switch {
	case r.e.n.life.Err() != nil:
		r.useless = ErrClosed
	case over:
		r.useless = ErrExpired
	default:
		return false
	}
	return true
}

// completeUseless ends r, which was not worth being written.
func (r *request) completeUseless() {
	rep := failed(r.useless)
	if r.useless == nil {
		rep = Reply{Kind: Missing}
	}
	r.complete(rep, notSent)
}

// complete ends r: first what it means for the entry, then the sink receives it.
// Once the entry knows, r's buf may be another request's.
//
// A release that was lost with its connection is repeated at once, and the sink gets the outcome of that. If
// it finds no key of the entry's, that is as good as its own work, if there was one: it was the first one's,
// as far as anybody can tell.
func (r *request) complete(rep Reply, how delivery) {
	e, sink := r.e, r.sink
	if r.op == opRelease && how == lost && !r.repeats {
		*r = request{op: opRelease, e: e, sink: sink, turnPass: e.passAgain(), awaited: r.awaited, repeats: true}
		e.n.route(r)
		return
	}
	repeats := r.repeats
	due, owed := e.completed(r, rep, how)
	if repeats && (rep.Kind == Missing || rep.Kind == Held) {
		rep = Reply{Kind: Deleted, Presumed: true}
	}
	e.answer(sink, rep)
	if owed {
		e.n.debts.owe(e, due)
		if due > debtSecond && !e.n.Suspended() { // it is back since, and may have sent the debts of before
			e.n.debts.hurry()
		}
	}
}

// delivery is what is known of a request that has ended.
type delivery uint8

const (
	notSent  delivery = iota // the server never saw it and never will
	answered                 // the server has executed or refused it
	lost                     // its connection died first: the server may still execute it
)

// Patient has releases sent if they can be: else they are owed.
func (r *request) Patient() bool { return r.op == opRelease }

// Urgent reports whether r is about a lock that somebody has, or may have: then it is written before what is
// not. It must not overtake two kinds of acquires that wait here. One is that of the same entry: a refresh
// before it would not find the key. The others are those of the same contender, before the release by which
// that leaves: written after it, they would give it a place among those who wait. There are such acquires
// only if the lease was granted by others; of one that was acquired, all of them were written before.
func (r *request) Urgent() bool {
	e := r.e
	if r.op.votes() || r.op == opRelease && r.turnPass.wanted() && e.t.prepared() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return (r.op == opRefresh || !e.emptyLocked()) && (e.create == nil || e.create.encoded)
}

// Replies are those of r, and of an ASKING before it.
func (r *request) Replies() int {
	if r.asking {
		return 2
	}
	return 1
}

// Encode is called when r is about to be written, with what is known then.
func (r *request) Encode(b []byte, on *link.Session) ([]byte, bool) {
	s, now := r.s, clock.Now()
	n, in := r.e.n, on.Data.(*booted)
	if r.obsolete(n.at(now), on.Queued()) {
		return nil, false
	}
	if in.err != nil && r.op.votes() {
		r.useless = in.err
		return nil, false
	}
	if r.op == opAcquire {
		r.e.t.begin(clock.Now())
	}
	r.epoch, r.asked, r.verified, r.unloaded = in.epoch, now, s.verified.Load(), in.err != nil
	r.by, r.byText = r.script(), r.asText || s.sendsTexts(now) && (r.op.votes() || s.refusesTexts(now) == nil)
	by, script, known := r.by, in.epoch.scripts[r.scriptOf(r.by)], in.epoch.usual
	// Any process executes a text.
	if r.strict = !r.verified.counts(in.epoch, now) || r.byText && in.epoch.process != ""; r.strict {
		known = in.epoch.strict
	}
	if in.err != nil && by == opRelease { // which is to grant nothing
		script, known = anyEpoch.scripts[r.scriptOf(by)], grantNothing
	}
	a := args{b: in.encoded[:0]}
	r.keys(&a, by)
	keys := a.n
	if by.votes() || by == opRelease {
		a.b, a.n = append(a.b, known...), a.n+3
	}
	r.values(&a, by)
	in.encoded = a.b
	if r.asking {
		b = link.AppendCommand(b, "ASKING")
	}
	b = link.AppendArray(b, 3+a.n)
	if r.byText {
		b = link.AppendArg(link.AppendArg(b, "EVAL"), anyEpoch.scripts[r.scriptOf(by)].Source)
	} else {
		b = link.AppendArg(link.AppendArg(b, "EVALSHA"), script.SHA)
	}
	b = append(link.AppendInt(b, int64(keys)), a.b...)
	if r.op.votes() {
		r.e.mu.Lock()
		r.encoded = true
		r.e.mu.Unlock()
	}
	n.commands.Add(1)
	return b, true
}

// Late reports r as late to whoever waits for it. It stays asked: a late answer is that of a request that
// nobody waits for any more, and what it has granted is released (see Entry).
func (r *request) Late() {
	err := r.e.n.noAnswer()
	sink := r.sink
	r.sink = nil
	r.e.answer(sink, failed(err))
}

// maxTries is how often a request is sent to a server that does not know its script.
const maxTries = 3

// Reply ends r by its answer, or has it sent once more.
func (r *request) Reply(on *link.Session, v *link.Value) (again bool) {
	s, n := r.s, r.e.n
	now := clock.Now()
	err := v.Err()
	s.answered(now.Sub(r.asked), refusal(err))
	if r.op == opRelease && v.Kind == link.Int && v.N == -1 { // somebody waits
		r.awaited = true
		n.route(r)
		return false
	}
	op := r.op
	if r.by == opAttach {
		op = opAttach
	}
	rep := parse(op, v)
	rep.Err = s.judge(s.judgeText(r.byText, rep.Err))
	if rep.Kind == Granted && r.tooOld(now) {
		rep = failed(errOld)
	}
	if r.epoch != anyEpoch && n.guard.Changed != nil &&
		(r.op.votes() || rep.Kind == Renewed && !r.e.unforgotten()) {
		rep.Epoch = r.epoch
	}
	switch {
	case invalidates(err):
		s.invalidate()
	case r.strict && (r.op.votes() && rep.Kind != Failed || rep.Verified):
		s.recordVerified(r.verified, r.epoch, r.asked)
	}
	noName := isUnknown(err)
	if noName {
		switch again := r.unknownOn == on && r.unknownBy == r.by; { // although it was loaded since
		case r.epoch.Apart != nil && conn.HasCode(err, "NOSCRIPT"):
			r.asText = true
		case again:
			s.sendTexts(err)
		}
		r.unknownOn, r.unknownBy = on, r.by
		if !r.asText {
			s.miss(r.scriptOf(r.by))
		}
		if why := s.refusesTexts(now); why != nil && !r.op.votes() {
			noName, rep.Err = false, s.judge(why)
		}
	}
	unknown := noName || conn.HasCode(err, "EPOCH") || s.refusesMarker(r, err)
	byName := r.byText && !r.op.votes() && conn.RefusesCommand(err, "eval") // is how to send it, then
	if (unknown || byName) && r.tries < maxTries {
		r.tries++
		return true
	}
	if why := elsewhere(err, unknown && !r.unloaded); why != nil { // before anybody asks again
		on.Drop(why)
	}
	switch {
	case n.router != nil && conn.IsReply(err) && n.router.redirect(s, r, err):
	case n.router != nil && conn.HasCode(err, "TRYAGAIN") && r.narrow():
		n.route(r)
	case r.op == opRelease && r.reach == allKeys && r.epoch.marked && conn.HasCode(err, "NOPERM"):
		r.reach = noWants // maybe the marker is refused: the key alone can be deleted without it, as an undo does
		n.route(r)
	default:
		r.complete(rep, answered)
	}
	return false
}

// tooOld reports whether a grant does not count, because its answer has taken more than nine times
// NodeTimeout (one, and the conn.MaxGrace by which it may be put off) and its script made no strict check.
// See errOld.
func (r *request) tooOld(now time.Time) bool {
	return r.epoch != anyEpoch && !r.strict && -clock.Left(now, r.asked) > (1+conn.MaxGrace)*r.e.n.timeout
}

// errOld is the error of a grant that is not counted as a vote, because its answer was handled too late:
// since the last strict check another server may have replaced this one for a while, see epoch.go. That takes
// a process that was stopped or had no processor. The key is set on the server, and is released as after any
// failure.
var errOld = errors.New("granted so long after it was asked for that the server may have been replaced " +
	"meanwhile")

// Fail ends r, which has no answer.
func (r *request) Fail(how link.Delivery, err error) {
	switch {
	case how == link.Lost:
		r.s.unanswered(clock.Since(r.asked), err)
		if r.op.votes() { // so that its undo, which comes next, is not sent back behind another acquire
			r.s.missing.Or(uint32(opUndo.bit()))
		}
		r.complete(Reply{Kind: Failed, Err: err, Lost: true}, lost)
	case errors.Is(err, link.ErrObsolete):
		r.completeUseless()
	case r.s.dropped.Load():
		r.complete(failed(errGone), notSent)
	default:
		r.complete(failed(r.s.judge(err)), notSent)
	}
}
