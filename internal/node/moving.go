package node

// reach is which of a script's keys a request asks with. While a Cluster moves a slot, its keys are
// on two masters: the source, whose slot it still is, and the target. A script runs on one of them only
// if all its keys are there; a key that does not exist is on neither. Else the answer is TRYAGAIN, for as
// long as the slot takes to move. So a request that got it asks again with fewer keys, as far as it can do
// without them:
//
//	release  without the wants, whose turn is not passed on then: who waits polls
//	refresh  without the wants, so that nobody is named; then without the counter, whose
//	         place in the reply is 0. The ttl is renewed, and tokens are confirmed by no such answer
//	acquire  without the wants, so that it has no place among them; then without the counter,
//	         which reports whether the key is held, and grants nothing
//	attach   not at all: its caller tries again
//
// A key that is free is on neither, so that alone would have every acquire wait for the end of the move:
// the source creates no keys any more. It sends requests for them to the target (ASK), which creates them
// for a request that was sent. There an acquire may ask with the key alone and find the counter beside it.
// That is safe, although the counter is not declared as a key:
//
//   - Where the key is, is decided by the masters for this one key: the source answers ASK only if it does
//     not have it, and cannot get it any more. So a grant is never decided on one that lacks a key which the
//     other has.
//   - The counter is not made: if it is not on the target the answer is TRYAGAIN as before. And the source
//     does not have it any more: it has answered ASK, not TRYAGAIN, when it was asked for both. (Redis before
//     7.0 answers ASK also if it has one of the two. There a counter could be on both masters, the older one
//     on the target, if MIGRATE had failed half-way.)
//
// A read lease cannot do without its readers, and waits for the end of the move.
//
// What is not done is to ask one master for the key and the other for the counter, and to
// put together what they say: between the two the key may expire, and another have it.
type reach uint8

const (
	allKeys   reach = iota
	noWants         // the key and its counter; of a release, the key
	keyBeside       // of an acquire: the key, and the counter if it is beside it
	keyOnly         // the key
)

// narrow has r, which was answered with TRYAGAIN, ask with fewer keys next, from the beginning, and reports
// whether it can do with fewer.
func (r *request) narrow() bool {
	switch {
	case r.e.t.shared:
		return false
	case r.reach == allKeys && r.withWants():
		r.reach = noWants
	case r.op == opRelease || r.by == opAttach || r.reach >= keyBeside:
		return false
	case r.op != opRefresh && r.asking:
		r.reach = keyBeside
	default:
		r.reach = keyOnly
	}
	r.hops, r.asking, r.to = 0, false, ""
	return true
}
