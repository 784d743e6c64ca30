package quorum

import (
	"math"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/node"
)

// An offer is what makes a Lease one that others may acquire: whoever releases the key may grant it to the
// next contender's offer, in the same atomic step, so that a hand-over between processes is one message. The
// offer goes to the nodes with the polls of its contender, attempts with owners of their own, which are
// undone as ever if they fail; its own owner is in no acquire until a node has granted it.
//
//	offered --first vote--> gathering --q votes--> (raising -->) held
//	   |                        | \--no message, or none to come--> other nodes are asked: acquires
//	   +-- Cancel --------------+-- unwinnable, too late ---> over, undone
//
// A release that grants is a delete followed by an acquire of the offer's owner, made by somebody else. So
// the argument of Lease holds for it, and these are its own parts:
//
//   - A vote is of one owner and one node: by the number that the offer had for it. A message that comes from
//     another node is none: pub/sub crosses databases and replicas, and a server may be configured twice.
//     Nor is one that does not know the number that the poll had at this node alone: anybody may have
//     published it.
//   - It counts if the node's epoch, which the releasing script has verified and named, is the one that this
//     client knows as kept.
//   - Its validity begins when the poll was about to be sent that brought the offer which the node has
//     granted: the grant came causally after that. No clock of a node takes part. It is as long as that offer
//     said, and not as the releaser thinks. A vote whose validity is over is none.
//   - A lease has the least validity of its q votes, as of the decision, and no vote is added to another of
//     the same node.
//   - The block is as large on all nodes, for it is the owner's. Unequal counters are raised as ever.
//   - A lease that is over counts no vote any more, whatever comes later. A grant to nobody is released when
//     its message comes, and passes the key on.
//
// A node whose message does not come is asked by an acquire of the offer's owner, which may come at any
// moment before the offer is over: when that is done is a matter of time only (ask.go). So is a node whose
// message came too late to be a vote. Its answer, that it has granted that owner already, is one. Of any
// other node it is none: the message was lost, for messages and answers come in the order of the server, or
// the node is a second name of another one. An offer that has too few votes for that is undone, which costs a
// moment.
type offer struct {
	node.Offer

	// guarded by the Lease's mu
	polls     []poll        // the last ones, in order
	votes     []voteTime    // of each node
	late      uint64        // nodes whose messages came too late to be votes
	voted     bool          // a node has granted it
	timer     *time.Timer   // see awaitOthersLocked
	forgotten bool          // see Forget
	span      time.Duration // how long the nodes keep the key of the lease that was won; 0: for the full ttl
	rejoined  bool          // see Rejoined
}

// voteTime is how long a vote that came by message counts. It is zero for a node that was asked.
type voteTime struct {
	until time.Time
	span  time.Duration // how long the node keeps the key
}

// poll is an attempt that carries an offer, or the release that does.
type poll struct {
	number uint32
	target *node.Target // of the attempt; nil once that has begun and is not the last any more
	begun  time.Time    // of the release: before it was sent; or of an attempt that is not the last any more
	span   time.Duration
}

// begunAt is when the poll was about to be sent, or earlier; zero before that.
func (p *poll) begunAt() time.Time {
	if p.target == nil {
		return p.begun
	}
	return p.target.Begun()
}

// maxPolls is how many polls are remembered: a vote for an older one would hardly be valid.
const maxPolls = 8

// offers are the leases that others may acquire, by owner, and the last of those that are over: messages
// about grants of these may still come.
type offers struct {
	mu     sync.Mutex // guards what follows
	open   map[string]*Lease
	over   [32]*Lease
	oldest int // of over
}

func (o *offers) add(l *Lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open == nil {
		o.open = map[string]*Lease{}
	}
	o.open[l.Owner()] = l
}

func (o *offers) remove(l *Lease) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.open, l.Owner())
}

// ended is called when l was released, or undone.
func (o *offers) ended(l *Lease) {
	l.mu.Lock()
	l.offer.polls = nil
	l.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if old := o.over[o.oldest]; old != nil {
		delete(o.open, old.Owner())
	}
	o.over[o.oldest] = l
	o.oldest = (o.oldest + 1) % len(o.over)
}

func (o *offers) find(owner string) *Lease {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.open[owner]
}

// GrantsNothing reports whether offers are of no use here, because too few of the nodes take any.
func (q *Quorum) GrantsNothing() bool {
	n := 0
	for _, node := range q.Nodes {
		if node.TakesOffers() {
			n++
		}
	}
	return n < q.need
}

// Offer makes l a lease that releases elsewhere may grant to contender, and calls by.Acquired once, as
// Acquire does: when q nodes have granted it, or when it was canceled, or could not be won although a node
// has granted it. After Forget it may never call it. It sends nothing: see Carry.
func (q *Quorum) Offer(l *Lease, key string, ttl time.Duration, tokens int64, contender string, by Acquirer) {
	q.Prepare(l, key, ttl, tokens, contender)
	l.offer = &offer{Offer: node.Offer{Target: &l.target, Tokens: tokens, First: make([]uint32, len(q.Nodes))},
		votes: make([]voteTime, len(q.Nodes))}
	for i := range l.offer.First {
		l.offer.First[i] = firstPoll()
	}
	l.target.Carry(&l.offer.Offer, 0, ttl, false)
	l.scratch.onAcquired = by
	l.newRound("acquire", node.Granted, 0, func(r *round) { r.l.acquired(r) })
	q.offers.add(l)
}

// firstPoll is what the numbers of an offer's polls begin with at a node.
var firstPoll = func() uint32 { return uint32(jitter.N(1 << 32)) }

// Carry has the attempt l bring o to the nodes, with its contender: a node that grants o keeps the key for
// span. It is called before l.Acquire. With waits, l does not take what is free on a node where others wait
// longer: see Failure.Declined.
func (l *Lease) Carry(o *Lease, span time.Duration, waits bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.pollLocked(poll{target: &l.target, span: span})
	l.target.Carry(&o.offer.Offer, p.number, p.span, waits)
	l.scratch.carries = o
}

// spanRTTs is how many round trips a node keeps the key at least. One passes until the next poll is answered,
// up to two until the one after that is there, since a request waits for the answer to the one before it, and
// half of one more with the vote; then the lease may have to be refreshed, which takes up to two. If the time
// were up before that, grants of nodes that are far away would be of no use to anybody.
const spanRTTs = 8

// pollLocked numbers p, the next poll of the offer o, and remembers it. Its span is no longer than the ttl.
func (o *Lease) pollLocked(p poll) poll {
	p.span = max(p.span, spanRTTs*2*o.q.halfRTT())
	p.number, p.span = 1, min(p.span, o.scratch.ttl).Truncate(time.Millisecond)
	for i := range o.offer.polls {
		last := &o.offer.polls[i]
		p.number = last.number + 1
		if begun := last.begunAt(); !begun.IsZero() { // the target would keep the whole attempt
			last.target, last.begun = nil, begun
		}
	}
	if len(o.offer.polls) == maxPolls {
		o.offer.polls = append(o.offer.polls[:0], o.offer.polls[1:]...)
	}
	o.offer.polls = append(o.offer.polls, p)
	return p
}

// unsent takes back the poll that t was to bring: no node will know of it. The offer would keep its attempt,
// and forget an older poll for it.
func (o *Lease) unsent(t *node.Target) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if last := len(o.offer.polls) - 1; last >= 0 && o.offer.polls[last].target == t {
		o.offer.polls[last] = poll{}
		o.offer.polls = o.offer.polls[:last]
	}
}

// Rejoin is Release for a contender that wants the key again at once: the release brings o, an offer of that
// contender, to the nodes, and puts it at the end of those who wait. Where nobody else does, it is only a
// release. A node that grants o keeps the key for span.
func (l *Lease) Rejoin(o *Lease, span time.Duration, inline bool, by Releaser) {
	o.mu.Lock()
	p := o.pollLocked(poll{begun: clock.Now(), span: span})
	o.mu.Unlock()
	l.release(inline, "", node.NoNews, &rejoin{o, p}, by)
}

// rejoin is what the release of a contender that waits again brings to the nodes.
type rejoin struct {
	offer *Lease
	poll  poll
}

// Rejoined reports whether the release that has brought the offer l was confirmed by a majority of nodes on
// which its contender waits now.
func (l *Lease) Rejoined() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.offer.rejoined
}

// vote takes the message text of node i about a grant.
func (q *Quorum) vote(i int, text string) {
	v, ok := node.ParseVote(text)
	if !ok {
		return
	}
	if v.Node != i {
		q.reportDuplicate(i)
		return
	}
	if l := q.offers.find(v.Owner); l != nil {
		l.vote(i, v)
	} else {
		q.returnGrant(i, v)
	}
}

// returnGrant releases what node i has granted to nobody: it is for the next one.
func (q *Quorum) returnGrant(i int, v node.Vote) {
	t, e := new(node.Target), new(node.Entry)
	t.Init(v.Key, v.Owner, "")
	e.Init(q.Nodes[i], t, i)
	e.Granted(v.Span)
	e.Release(new(node.RequestBuf), nil, false, &node.TurnPass{Contender: node.Nobody})
}

// vote takes a vote of node i. If it does not count any more, the release of the lease, which may have been
// sent before, includes it; an offer that was forgotten has none.
func (l *Lease) vote(i int, v node.Vote) {
	rep := node.Reply{Kind: node.Granted, Counter: v.Token, Rival: v.Follower,
		Epoch: l.q.Nodes[i].EpochOf(v.Epoch)}
	now := clock.Now()
	l.entries[i].Granted(v.Span)
	l.mu.Lock()
	r := l.attempt
	forgotten := l.offer.forgotten
	if !forgotten { // the node is no second name of another one
		l.duplicateMask &^= 1 << i
	}
	if l.phase != acquiring || r == nil || r.decided || r.want != node.Granted ||
		r.replies[i].Kind == node.Granted {
		l.mu.Unlock()
		if forgotten {
			l.q.returnGrant(i, v)
		}
		return
	}
	l.offer.voted = true
	until, ours := l.validUntilLocked(v, now)
	ends := false
	switch {
	case !ours: // anybody may have published it
	case clock.Passed(now, until), rep.Epoch != nil && !isVote(rep.Epoch, l.q.Nodes[i].Epoch()):
		l.offer.late |= 1 << i
	default:
		l.everHeld |= 1 << i
		if r.replies[i].Kind == node.Pending { // else it was asked before the grant
			r.pending--
		}
		r.replies[i], l.offer.votes[i] = rep, voteTime{until, v.Span}
		ends = r.decideLocked(false)
	}
	if !ends {
		l.awaitOthersLocked()
	}
	l.mu.Unlock()
	if ends {
		r.end()
	}
}

// validUntilLocked is until when v, whose message has come now, is valid: the zero time, which is over, if it
// may be too old to count. ours says that it names one of the last polls.
func (l *Lease) validUntilLocked(v node.Vote, now time.Time) (until time.Time, ours bool) {
	for _, p := range l.offer.polls {
		begun := p.begunAt()
		if l.offer.NumberAt(v.Node, p.number) != v.Poll || begun.IsZero() {
			continue
		}
		if clock.Passed(now, begun.Add(MaxVoteAge)) {
			return time.Time{}, true
		}
		return begun.Add(l.q.Validity(min(v.Span, p.span))), true
	}
	return time.Time{}, false
}

// MaxVoteAge is how long after its poll a vote that comes by message may count, however long it is valid. A
// server that was replaced by another, which made promises, and has come back may have granted it before, and
// nothing in the message shows that (see node.Epoch).
const MaxVoteAge = time.Second

// decidedLocked is called when r, the round of an offer, is decided: the lease is valid for as long as each
// of its votes, of which those of nodes that were asked are valid until then. Which of them ends first the
// two clocks may not agree on: a machine may have slept between their polls.
func (o *offer) decidedLocked(r *round, asked time.Time) (until time.Time) {
	now, least := clock.Now(), time.Duration(math.MaxInt64)
	for i := range r.replies {
		if r.replies[i].Kind != r.want || !r.isVoteLocked(i) {
			continue
		}
		v := o.votes[i]
		if v.until.IsZero() {
			v.until = asked
		} else if o.span == 0 || v.span < o.span {
			o.span = v.span
		}
		least = min(least, clock.Left(now, v.until))
		until = now.Add(least)
	}
	return until
}

// endLocked ends what the offer has begun.
func (o *offer) endLocked() {
	if o != nil && o.timer != nil {
		o.timer.Stop()
	}
}

// Withdraw ends an offer, and takes it back from the nodes, with what its contender wanted; a grant passes
// on. It reports false if the offer has ended by itself: then what the contender wanted may be there still.
func (l *Lease) Withdraw() bool {
	l.mu.Lock()
	withdrawn := l.phase == acquiring && l.attempt != nil && !l.attempt.decided
	l.mu.Unlock()
	l.Cancel()
	return withdrawn
}

// Forget ends an offer that its contender needs no more, because it has the key by an attempt. What the nodes
// know of it, the release of that attempt's lease takes back; and if a node grants it before, that is
// returned.
func (l *Lease) Forget() {
	l.mu.Lock()
	if l.phase == acquiring && l.offer.voted {
		l.mu.Unlock()
		l.Cancel()
		return
	}
	if l.phase == acquiring {
		l.phase, l.attempt.decided, l.attempt, l.offer.forgotten = over, true, nil, true
	}
	l.mu.Unlock()
	l.q.offers.remove(l)
}
