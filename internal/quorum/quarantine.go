package quorum

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// A quarantine excludes the votes of nodes that may have lost locks: a new grant of such a node is
// written, so that the lease is on the node, but does not count. Its other answers count, for the keys that
// it has were written after the loss; but it confirms refreshes only from confirmAfter on.
//
//	new or lost --Limit after the loss--> kept        by boot.lua, at the next read
//	all nodes new --a bootstrap, two reads--> kept    a new deployment
//	any --data lost--> new or lost                  see internal/node/epoch.go
//
// Why waiting suffices: a lease that was granted by an epoch that is lost ends within its ttl, at
// most MaxTTL later, unless a majority has confirmed a refresh; and a node that has confirmed one
// had the key at that time, so after the loss.
//
// Why confirmations do not count at first: an attempt of somebody else may have a vote of the node from
// before the loss. If the key of a lease is put back on the node, and a refresh of it is confirmed by this
// node and another, the attempt may have its majority by this node's vote and a third one's, where the lease
// has ended meanwhile: two leases are valid that share no node that remembers both. (docs/model/grants.pml
// has found that.) So an attempt must be decided within attemptLimit of when its first request was made, and
// what is written to the node later than that after the loss is confirmed when all such attempts are over:
// the lease was valid until then without the node's confirmation, so they could not have won. A client knows
// in which epoch its lease's key was put on the node: see node.Reply. What was put there before the loss, and
// is there still, was there all the time, so that no attempt has a vote of the node: it is confirmed at once.
// That a confirmation counts again before the quarantine is over lets nodes be restarted one after the other
// while locks are held.
//
// Why a bootstrap is safe: it reads all nodes, and when all have answered, reads all again. If all
// are new in both reads, knownTime apart, and each has the same epoch, then there is an instant in between at
// which none of them was established. So none had ever had a vote, and no lock depends on them: a
// majority would have to have lost its data since the grant. The bootstrap then establishes each
// node by the name of that epoch. All grants after that instant are in it; and a node that has
// lost it has another name, by which the request is refused. One read would not suffice: in it, a
// node may be new because it restarted after another client had established all, and the others
// because they were read before that. A node that the request has not reached is established by
// the next bootstrap, by the same name, for the same reason.
//
// All nodes are new, too, if they were restarted empty, or flushed, within a moment. A client that has seen a
// node established, or lost, knows that it is not new, and boot.lua writes there that it is lost: so no
// bootstrap finds all of them new, whoever makes it. What cannot be noticed is that all nodes forgot before
// any client that knew them has met one of them again, or that no such client is left.
//
// While the scripts of a node may not access keys of two hash slots (node.Epoch.Apart), there is no
// quarantine, as with a Cluster: the node is several servers, and what one of them has lost cannot be
// noticed. Every vote counts. All nodes are asked for their epoch again every recheckApart, because that may
// have been the answer of a moment.
//
// During a bootstrap, votes that do not count are undecided: rounds that need them wait for its
// end, since a new deployment must not refuse its first locks.
type quarantine struct {
	q    *Quorum
	wake chan struct{} // has an entry if a bootstrap is needed. Buffered

	bootstrapping atomic.Bool // a bootstrap is under way or about to begin. Written under mu
	off           atomic.Bool // a node's scripts may not access keys of two hash slots. Written under mu
	wasOff        atomic.Bool // votes have counted in epochs that were not established. Written under mu

	// established is what the last bootstrap that found all nodes new has read; nil if there was none. Only
	// run's goroutine uses it.
	established []*node.Epoch

	mu           sync.Mutex     // guards what follows; nothing that blocks is called under it
	running      bool           // run has not ended
	changedSince bool           // an epoch has changed since the bootstrap began, and may not be in it
	suspected    bool           // the next bootstrap reads all nodes: see suspect
	rounds       map[*round]int // that wait for the end of the bootstrap, numbered in order of arrival
	quarantined  uint64         // bit i: OnQuarantine was called for node i, which is in quarantine
}

// verdict is the outcome of the reads of a bootstrap.
type verdict uint8

const (
	leave     verdict = iota // as they are: some have a vote; the others wait for the end of their quarantine
	retry                    // another client may be establishing the nodes
	establish                // all are new, and were so in the read before
)

// judge compares the epochs of all nodes, nil for those that have not answered, with those of the
// read before.
func judge(before, now []*node.Epoch, need int) verdict {
	fresh, kept, same := 0, 0, len(before) == len(now)
	for i, e := range now {
		switch {
		case e == nil:
			return leave
		case e.State == node.EpochNew:
			fresh++
		case e.State == node.EpochKept:
			kept++
		}
		same = same && before[i] != nil && before[i].Name == e.Name && before[i].State == e.State
	}
	switch {
	case fresh == len(now) && same:
		return establish
	case fresh == len(now), fresh > 0 && kept > 0 && kept < need:
		return retry
	}
	return leave
}

// stillNew reports whether any node is new in the epoch that it had before.
func stillNew(before, now []*node.Epoch) bool {
	for i, e := range now {
		if e != nil && e.State == node.EpochNew && e.Name == before[i].Name {
			return true
		}
	}
	return false
}

// newQuarantine makes the quarantine of q and guards all its nodes.
func newQuarantine(q *Quorum) *quarantine {
	if q.Quarantine <= 0 { // a sum that overflowed: no node would ever be in quarantine
		panic(fmt.Sprintf("quorum: a quarantine of %v", q.Quarantine))
	}
	k := &quarantine{q: q, wake: make(chan struct{}, 1), rounds: map[*round]int{}}
	for i, n := range q.Nodes {
		n.SetGuard(node.Guard{
			Limit: q.Quarantine, Name: q.EpochName, Relied: k.wasOff.Load,
			Changed: func(e node.Epoch, store func()) { k.changed(i, e, store) },
		})
	}
	return k
}

// Quarantined reports whether node i is in quarantine, as far as is known.
func (q *Quorum) Quarantined(i int) bool {
	k := q.quarantine
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.quarantined&(1<<i) != 0
}

// quarantinedUntil is why node i has no vote: it is in quarantine, as far as is known. nil: it is not, or the
// bootstrap that is under way is the first that finds it without one, and decides. Later ones, which try
// again for as long as the quarantine lasts, change nothing until they are over.
func (q *Quorum) quarantinedUntil(i int) error {
	if q.quarantine == nil || q.quarantine.isOff() {
		return nil
	}
	e := q.Nodes[i].Epoch()
	if e == nil || e.State == node.EpochKept || q.quarantine.underWay() && !q.Quarantined(i) {
		return nil
	}
	return &Quarantined{*e, e.Began.Add(q.Quarantine)}
}

// changed is called with node i's new epoch before any vote in it. store, which stores it in the
// node, runs under mu: so the bootstrap that is under way ends after that or is followed by
// another. One that ended in between would have read the old epoch, and the node would not be
// read again.
func (k *quarantine) changed(i int, e node.Epoch, store func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer store()
	if (e.Apart == nil) != (k.q.Nodes[i].Apart() == nil) && k.q.OnApart != nil {
		k.q.OnApart(i, e.Apart)
	}
	off := e.Apart != nil
	for j, n := range k.q.Nodes {
		off = off || j != i && n.Apart() != nil
	}
	turned := k.off.Swap(off) != off
	if off {
		k.wasOff.Store(true)
	}
	if e.State == node.EpochKept && !k.running && !turned {
		return
	}
	k.startLocked()
}

// suspect has all nodes asked for their epoch, because a majority does not have a lease: a refresh that finds
// its key missing does not look at the marker, and a client that only refreshes would say to nobody what it
// knows.
func (k *quarantine) suspect() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.suspected = true
	k.startLocked()
}

// startLocked has a bootstrap begin, if none is under way, or else another follow.
func (k *quarantine) startLocked() {
	k.changedSince = true
	k.bootstrapping.Store(true)
	if !k.running {
		k.running = k.q.tasks.Go(k.run)
		k.bootstrapping.Store(k.running)
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// knownTime is how long a bootstrap waits between the two reads that find all nodes new. A client that knows
// better has that long to say so.
const knownTime = 750 * time.Millisecond

// maxReads limits how often a bootstrap reads nodes that another client seems to be establishing.
const maxReads = 8

// run makes bootstraps for as long as a node is in quarantine.
func (k *quarantine) run() {
	for k.q.ctx.Err() == nil {
		k.mu.Lock()
		changed, all := k.changedSince, k.suspected
		k.changedSince, k.suspected = false, false
		select { // this bootstrap includes what it was woken for
		case <-k.wake:
		default:
		}
		k.mu.Unlock()
		k.bootstrap(changed, all || k.q.withoutVotes() != nil)
		wait, ended := k.endBootstrap()
		if ended {
			return
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-k.wake:
		case <-k.q.ctx.Done():
		}
		timer.Stop()
		k.beginBootstrap()
	}
	k.endBootstrap()
}

// beginBootstrap has rounds that need an undecided vote wait again.
func (k *quarantine) beginBootstrap() {
	k.mu.Lock()
	k.bootstrapping.Store(true)
	k.mu.Unlock()
}

// bootstrap reads the nodes, and establishes them if all are new: see quarantine. With all, it reads those as
// well that are known to be established. So it does while so many have no vote that no attempt is sent, since
// nothing else notices then what becomes of them.
//
// Without changed, only the time for it has come: what it finds half done is so for as long as the quarantine
// lasts, and is not read again at once. If another client is about it, a node that it has established is a
// change.
func (k *quarantine) bootstrap(changed, all bool) {
	if k.off.Load() {
		if !changed {
			k.read(nil, true)
		}
		return
	}
	before := k.read(k.established, all)
	if v := judge(before, before, k.q.need); !slices.Contains(before, nil) &&
		(v == leave || v == retry && !changed) {
		return // not all are new
	}
	for reads := range maxReads {
		if judge(before, before, k.q.need) == establish && !k.pause(knownTime) {
			return
		}
		now := k.read(nil, false)
		switch judge(before, now, k.q.need) {
		case leave:
			return
		case establish:
			k.established = now
			// A node without run_id is established some seconds after its process has begun, as boot.lua says.
			for range maxReads {
				if !stillNew(now, k.read(now, false)) || !k.pause(knownTime) {
					return
				}
			}
			return
		}
		before = now
		if !changed || reads > 0 && !k.pause(time.Millisecond<<reads) {
			return
		}
	}
}

func (k *quarantine) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-k.q.ctx.Done():
		return false
	}
}

// read returns the epochs of all nodes, nil for those that do not answer. Nodes that are known to
// be established (their epoch is kept) are asked only if keptToo is set. With establish, it establishes the
// others by these epochs.
func (k *quarantine) read(establish []*node.Epoch, keptToo bool) []*node.Epoch {
	type answer struct {
		i   int
		e   node.Epoch
		err error
	}
	all := make([]*node.Epoch, len(k.q.Nodes))
	answers := make(chan answer, len(all))
	asked := 0
	for i, n := range k.q.Nodes {
		if e := n.Epoch(); e != nil && e.State == node.EpochKept && !keptToo {
			all[i] = e
			continue
		}
		name := ""
		if establish != nil {
			name = establish[i].Name
		}
		asked++
		n.Boot(name, func(e node.Epoch, err error) { answers <- answer{i, e, err} })
	}
	// Each step has its own deadline, except code of the client's owner, such as a hook.
	timer := time.NewTimer(node.CloseTime(k.q.NodeTimeout))
	defer timer.Stop()
	for range asked {
		select {
		case a := <-answers:
			if a.err == nil {
				all[a.i] = &a.e
			}
		case <-timer.C:
			return all
		case <-k.q.ctx.Done():
			return all
		}
	}
	return all
}

// retryRead is when a node is read again that has not answered at the end of its quarantine, or
// that is new: another node may have answered too late for all to be established together. While no attempt
// is sent, all are read that often, for nothing else notices that they lose data (again).
const retryRead = time.Second

// recheckApart is how often nodes are asked for their epoch while there is no quarantine because of one
// of them.
const recheckApart = 10 * time.Second

// endBootstrap ends a bootstrap, unless another must follow at once: it reconsiders the rounds that
// have waited, and calls OnQuarantine for nodes that have changed. It returns how long to wait for
// the next bootstrap, or that none is needed: then run has ended.
func (k *quarantine) endBootstrap() (wait time.Duration, ended bool) {
	type change struct {
		i int
		s Quarantined
	}
	var changes []change
	k.mu.Lock()
	if k.changedSince && k.q.ctx.Err() == nil {
		k.mu.Unlock()
		return 0, false
	}
	k.bootstrapping.Store(false)
	off := k.off.Load()
	unasked := k.q.withoutVotes() != nil // no bootstrap is under way, so that this does not lock mu
	wait = -1
	for i, n := range k.q.Nodes {
		e := n.Epoch()
		if e == nil {
			continue
		}
		s := Quarantined{Epoch: *e}
		out := e.State != node.EpochKept && !off
		if out {
			s.Until = e.Began.Add(k.q.Quarantine)
			left := s.Until.Sub(clock.Now()) + time.Millisecond
			if left <= 0 || (e.State == node.EpochNew || unasked) && left > retryRead {
				left = retryRead
			}
			if wait < 0 || left < wait {
				wait = left
			}
		}
		if out != (k.quarantined&(1<<i) != 0) {
			k.quarantined ^= 1 << i
			changes = append(changes, change{i, s})
		}
	}
	if off {
		wait = recheckApart
	}
	k.running = wait >= 0 && k.q.ctx.Err() == nil
	rounds := k.rounds
	k.rounds = map[*round]int{}
	k.mu.Unlock()
	for _, r := range slices.SortedFunc(maps.Keys(rounds),
		func(a, b *round) int { return rounds[a] - rounds[b] }) {
		r.reconsider()
	}
	for _, c := range changes {
		if k.q.OnQuarantine != nil {
			k.q.OnQuarantine(c.i, c.s)
		}
	}
	return wait, wait < 0
}

// awaitBootstrap has r reconsidered at the end of the bootstrap. It reports false if none is under
// way.
func (k *quarantine) awaitBootstrap(r *round) bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.bootstrapping.Load() {
		return false
	}
	if _, joined := k.rounds[r]; !joined {
		k.rounds[r] = len(k.rounds)
	}
	return true
}

// isOff reports whether every vote counts, because of a node whose scripts may not access keys of two hash
// slots.
func (k *quarantine) isOff() bool { return k != nil && k.off.Load() }

// underWay reports whether a bootstrap is under way.
func (k *quarantine) underWay() bool { return k != nil && k.bootstrapping.Load() }
