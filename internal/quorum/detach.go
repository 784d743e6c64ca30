package quorum

import (
	"math"

	"github.com/flightlock/flightlock/internal/node"
)

// A lease is detached by its holder, and attached by a client that knows its owner, key and tokens: on each
// node, in one step, the key becomes an owner's of that client, if it is the detached owner's
// (lua/attach.lua).
//
// Safety. To attach is to acquire, where "the key is free" is replaced by "the key is the detached owner's":
// nobody holds a lock as that owner any more. So the argument of Lease holds: a vote is a new grant, counts
// only where grants do (epochs, quarantine), and is valid from before it was sent. Of several that attach the
// same, each node has one vote. Not all of the argument for the token does: between detaching and attaching
// the key may have run out at some nodes, been another's, and been made the detached owner's again by a
// request of the detached lease that was executed late. Its token is used again only if no node of the
// majority has had a counter above the highest that the detached lease has reserved: any holder in between
// shares a node with them, and has left a larger counter there. Otherwise the attached lease has a new token,
// as any that is acquired.
//
// An attempt whose outcome is not known is not undone, for that would free a key which was handed over. It
// leaves the key as it is, in the name of the detached owner or its own, and the next attempt of the same
// client accepts both. What it may still have under way makes a key that owner's, at most once per node, and
// never takes it from a later attempt, whose owner it does not know.

// Abandon ends a lease that is held without a release: nothing that is sent or answered from now on changes
// what the nodes have. It reports false if the lease was lost. top is the highest token that it has reserved,
// 0 if the nodes may have reserved more.
func (l *Lease) Abandon() (top int64, ok bool) {
	l.mu.Lock()
	if ok = l.phase == held; ok {
		l.phase = over
	}
	if l.reserved == 0 {
		top = l.top
	}
	l.mu.Unlock()
	if !ok {
		return 0, false
	}
	if l.offer != nil {
		l.q.offers.ended(l)
	}
	l.abandonEntries()
	return top, true
}

func (l *Lease) abandonEntries() {
	for i := range l.entries {
		l.entries[i].Abandon()
	}
}

// Attach has the attempt of l, which was prepared without a contender and for one token, attach what was
// detached. Its failure has the reason NotHeld if nobody can attach that any more. With Unreachable the
// outcome is unknown.
func (l *Lease) Attach(by *node.Replaced) { l.target.Replace(by) }

// verb is what an attempt is called.
func (l *Lease) verb() string {
	if l.target.Replaced() != nil {
		return "attach"
	}
	return "acquire"
}

// isUnsettled reports whether the attempt, which has failed for f, may be made again with another owner.
func (l *Lease) isUnsettled(f *Failure) bool {
	return l.target.Replaced() != nil && f.Reason != NotHeld
}

// Revoke deletes key from the nodes that have it in this owner's name, and passes it on, as the owner's
// release would; by gets the outcome of that.
func (q *Quorum) Revoke(key, owner string, by Releaser) {
	l := new(Lease)
	q.Prepare(l, key, 0, 0, "")
	l.target.Init(key, owner, "")
	l.phase, l.everHeld = held, math.MaxUint64 // any of the nodes may have the key
	l.Release(false, Others, node.NoNews, by)
}
