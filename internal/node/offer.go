package node

import (
	"strconv"
	"strings"
	"time"
)

// An Offer allows others to grant the key to a contender: a release may make the key the offer's, with
// that block of tokens, in the same atomic step, so that the contender has a node's vote without a
// request of its own at that time. It goes to the nodes with the contender's acquires, each time with
// the number of the poll, and comes back with the vote (see lua/release.lua).
//
// The owner of an offer is that of a lease of its own, which is released as any other. A node may grant an
// offer at any time after the request with it was sent, even when the lease has been released: the message
// about that grant then gets another release. So a grant to nobody costs others a moment, or the span of the
// offer if the message is lost.
type Offer struct {
	Target *Target // of the lease: its owner is the offer's
	Tokens int64   // the block that each vote reserves

	// First is, for each node, what the numbers of polls begin with there, by chance: so whoever may publish to
	// the inbox, and may not read what is on that node, cannot say that it has granted the offer. nil: 0.
	First []uint32
}

// NumberAt is the number that a poll has at node i.
func (o *Offer) NumberAt(i int, poll uint32) uint32 {
	if i < len(o.First) {
		poll += o.First[i]
	}
	return poll
}

// carried is the offer that a request carries.
type carried struct {
	*Offer
	poll uint32        // its number
	span time.Duration // how long the key is kept for the offer's owner

	waits bool // a free key is left to those who wait longer
}

// text is the offer as node i has it, which is in that epoch as far as this client knows.
func (c *carried) text(i uint8, epoch string) string {
	return c.terms(c.poll, c.span).text(i, epoch)
}

// offerTerms is what a node knows of an offer.
type offerTerms struct {
	offer Offer // but for Target, which would keep the attempt
	poll  uint32
	span  time.Duration
	owner string
}

func (o *Offer) terms(poll uint32, span time.Duration) *offerTerms {
	return &offerTerms{Offer{nil, o.Tokens, o.First}, poll, span, o.Target.owner}
}

// text is the offer as node i has it, which is in that epoch as far as this client knows.
func (t *offerTerms) text(i uint8, epoch string) string {
	b := make([]byte, 0, 32+len(epoch)+len(t.owner))
	b = strconv.AppendUint(b, uint64(t.offer.NumberAt(int(i), t.poll)), 10)
	b = strconv.AppendUint(append(b, ' '), uint64(i), 10)
	b = strconv.AppendInt(append(b, ' '), max(1, t.span.Milliseconds()), 10)
	b = strconv.AppendInt(append(b, ' '), t.offer.Tokens, 10)
	b = append(append(b, ' '), epoch...)
	return string(append(append(b, ' '), t.owner...))
}

// Carry has the acquires of t's attempt make o, as its poll of that number, and with it the undo of those
// that are granted. It is called before the first of them. An offer's own target carries it too: what is
// undone for that is the offer. t has a contender. With waits, the acquires leave a free key to those who
// wait longer.
func (t *Target) Carry(o *Offer, poll uint32, span time.Duration, waits bool) {
	t.contention.carried = &carried{o, poll, span, waits}
}

// prepared reports whether t is the target of an offer's own lease, which the nodes may have granted without
// a request of its own.
func (t *Target) prepared() bool {
	return t.contention != nil && t.contention.carried != nil && t.contention.carried.Target == t
}

// Granted is called when the node has made the key e's for span, by a release of somebody else. If e has been
// released before, the node is to release the key again; but not if a release is on its way, which comes
// after the grant, for messages and answers come in the order of the server.
func (e *Entry) Granted(span time.Duration) {
	e.mu.Lock()
	e.gone = max(e.gone, e.n.now().Add(span))
	e.present = true
	again := e.released && !e.releasePending
	e.releasePending = e.releasePending || again
	e.mu.Unlock()
	if again {
		e.n.route(e.releaseAgain())
	}
}

// A Vote is what a release has granted to an offer, as the node's message says.
type Vote struct {
	Owner, Key string
	Follower   string // the contender that was next after this one; "": none
	Epoch      string // of the node, "" if that does not matter
	Token      int64  // the counter: the block ends there
	Poll       uint32
	Node       int           // as the offer had it
	Span       time.Duration // how long the key is kept
}

// IsVote reports whether a message to an inbox is about a grant.
func IsVote(text string) bool {
	_, rest, _ := strings.Cut(text, " ")
	return strings.HasPrefix(rest, voteWord)
}

const voteWord = "grant "

// ParseVote reads a message that IsVote has recognized; lua/release.lua documents it. ok is false if it is
// malformed.
func ParseVote(text string) (v Vote, ok bool) {
	_, rest, _ := strings.Cut(text, " ")
	rest = strings.TrimPrefix(rest, voteWord)
	var fields [9]string
	for i := range fields {
		if fields[i], rest, ok = strings.Cut(rest, " "); !ok {
			return Vote{}, false
		}
	}
	var numbers [9]int64
	for i, field := range fields {
		if i == 1 {
			continue
		}
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil || n < 0 {
			return Vote{}, false
		}
		numbers[i] = n
	}
	follower, owner := numbers[3], numbers[4]
	if follower > int64(len(rest)) || owner > int64(len(rest))-follower || numbers[5] > 1<<32-1 ||
		numbers[6] > 1<<8 {
		return Vote{}, false
	}
	v = Vote{
		Token: numbers[0], Follower: rest[:follower], Owner: rest[follower : follower+owner],
		Key:  rest[follower+owner:],
		Poll: uint32(numbers[5]), Node: int(numbers[6]), Span: time.Duration(numbers[7]) * time.Millisecond,
	}
	if fields[1] != "-" {
		v.Epoch = fields[1]
	}
	return v, v.Owner != "" && v.Key != "" && numbers[7] < 1<<32
}

// epochName is the name of the epoch in which n is as far as this client knows, for an offer: n grants that
// in no other. "-" if the epoch does not matter, or is not known.
func (n *Node) epochName() string {
	if n.guard != nil && n.guard.Changed != nil {
		if e := n.Epoch(); e != nil {
			return e.Name
		}
	}
	return "-"
}

// EpochOf is the epoch of that name, for a vote of a node: nil if the node's votes count in any. It counts if
// the node's own last report has the same name, and says that it is kept.
func (n *Node) EpochOf(name string) *Epoch {
	if n.guard == nil || n.guard.Changed == nil {
		return nil
	}
	return &Epoch{Name: name, State: EpochLost}
}
