package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// How a flight waits for other processes, and lets them have their turn.

// contest is what a flight knows of its rivals: the flights of other processes, and the Lock
// calls, that want the same key. A flight has none until it meets the first.
//
// While nobody else wants the key, its lease goes from waiter to waiter for nothing. Once
// per slice the flight looks, with the refresh that it makes anyway, whether anybody waits
// elsewhere. If so, the release that ends the slice makes the next turn the rival's that
// waits longest, and this flight goes to the end of those who wait. A turn is the key
// itself, kept on the nodes for a moment in the rival's name: nobody else can take it, the
// rival is told by a notice, and it finds its turn too if the notice is lost. So P flights
// share the key in turns, each slice long, in the order in which they came, and each has
// the time to serve its queue. A rival that has died costs the others one turn.
//
// What failed, by model or on real processes:
//
//   - Release and let all contend: the process that released is the nearest to the key and
//     wins again; one of four got all of it for a second.
//   - The same, and stay out for a while: whoever wins does so by chance. Over ten seconds
//     and sixteen processes, chance alone moves a share by 17%.
//   - One flag per key, "somebody waits": two that yield clear each other's flag and wait
//     for one another; a flag of a dead process idles the key.
//   - Each node names its own next: they disagree, nobody has a majority, and the turns run
//     out. So the one who yields names one rival for all nodes; only a release without a
//     look leaves it to the nodes, whose orders are nearly always the same.
//
// Waiting is push and poll. The flight listens for notices from its first lost attempt on,
// until it dies. It tries again when it is told that its turn has come, when the nodes have
// confirmed that it listens (what was said before that it did not hear), when the holder's
// ttl or somebody else's turn runs out, and once per safety. As long as it does not hear,
// for whatever reason, it polls. A lost notice costs time, never liveness.
//
// Guarded by the flight's mu.
type contest struct {
	contender string // what others know this flight by: the owner of its first attempt or lease
	stop      func() // ends the listening; nil before it has begun
	hears     bool   // a majority of nodes has confirmed it
	wanting   bool   // the nodes may know of a want
	polls     uint8  // without news, so far
	rival     string // waits longest, by the last look; "": nobody does
}

// News is what is heard of a key.
type News uint8

// The kinds of news.
const (
	Hears  News = iota + 1 // notices are heard from now on; those before may have been missed
	Deaf                   // notices may be missed from now on
	Ours                   // the turn is this contender's
	Theirs                 // the turn is another's
	Failed                 // what the owner that is named had the key for has failed; it has let go of the key
)

const (
	// safety is how long a waiter that hears notices goes without a look of its own.
	safety = time.Second

	// blind is how long one that does not hear them goes at most, whatever its strategy
	// says: else its turn would have run out before it came.
	blind = 50 * time.Millisecond
)

// contendLocked has the flight wait among its rivals, as contender.
func (f *flight) contendLocked(contender string) {
	if f.contest != nil {
		return
	}
	c := &contest{contender: contender}
	f.contest = c
	watch := f.g.cfg.Watch
	if watch == nil {
		return
	}
	f.g.leaving.Add(1)
	f.laterLocked(func() {
		defer f.g.leaving.Done()
		stop := watch(f.key, c.contender, f.heard)
		f.mu.Lock()
		dead := f.dead
		if !dead {
			c.stop = stop
		}
		f.mu.Unlock()
		if dead {
			stop()
		}
	})
}

// heard takes news of the key. owner is who had it, if that is what the news is about.
func (f *flight) heard(n News, owner string) {
	f.mu.Lock()
	defer f.unlock()
	if f.dead {
		return
	}
	if n == Ours || n == Theirs { // somebody has let go of the key, and may have done the work
		if n == Theirs || !f.pausingLocked() { // else with the attempt that follows
			f.tellLocked()
		}
		if f.pause != nil {
			f.holder = ""
		}
	}
	switch n {
	case Failed:
		f.failedElsewhereLocked(owner)
		return
	case Hears:
		f.contest.hears = true
	case Deaf:
		f.contest.hears = false
	case Theirs: // it has its turn, or has not come for it
		if f.lease != nil {
			return
		}
		f.pauseOfLocked().free = clock.Now().Add(f.g.cfg.Turn + minDelay)
		if f.pausingLocked() {
			f.restLocked()
		}
		return
	}
	switch {
	case f.asking || f.parting:
		f.again = true // the attempt may have come before this
	case !f.pausingLocked():
	case n == Ours:
		f.sendLocked()
	default:
		f.tryLocked()
	}
}

// failedElsewhereLocked ends the wait of all who look: what they have waited for has failed, in owner's hands. They
// are to do it themselves, at once and all together, not one after the other.
//
// A message may be late, from a node that was slow: then somebody else has the key by now, and who came
// since has not waited for that failure. So it is for those alone who have not seen another
// holder since. To be wrong about it costs work that is done twice, and never a lock.
func (f *flight) failedElsewhereLocked(owner string) {
	if f.lease != nil || f.pause == nil || f.holder != "" && f.holder != owner {
		return
	}
	f.turnAwayAllLocked(f.g.cfg.Failed, (*Hold).lookerLocked)
}

// leaveLocked takes the flight out of the contest, as it dies.
func (f *flight) leaveLocked() {
	c := f.contest
	if c == nil {
		return
	}
	f.g.leaving.Add(1)
	f.laterLocked(func() {
		defer f.g.leaving.Done()
		if c.stop != nil { // written before the flight died, or never
			c.stop()
		}
		if c.wanting {
			f.g.cfg.Leave(f.key, c.contender)
		}
	})
}

// nextLocked is when the next attempt is due, after one that failed: as the front waiter's
// strategy says, but no later than when the key could be free. When the key is known to be
// another's and the flight hears when it is let go, the strategy's delays send nothing. With
// an even number of nodes that is hardly ever known, because half of them decide.
func (f *flight) nextLocked() time.Time {
	next := f.head.due
	if c := f.contest; c != nil && f.taken {
		switch {
		case !c.hears:
			next = earlier(next, f.tried.Add(blind))
		case f.owned:
			next = f.tried.Add(safety)
		}
	}
	if !f.free.IsZero() {
		next = earlier(next, f.free)
	}
	return next
}

// restLocked sets the timer for the next attempt, or for the next moment in which the front
// waiter's strategy could give up.
func (f *flight) restLocked() {
	f.paused = f.nextLocked()
	next := f.paused
	if !f.head.isEndless() {
		next = earlier(next, f.head.due)
	}
	f.armLocked(next)
}

// countLocked counts the attempts that the front waiter would have made by now if it did
// not hear when the key is let go. The one at which it would give up is made: whoever had
// the key may be a client that tells nobody.
func (f *flight) countLocked(now time.Time) {
	h := f.head
	h.takeOver(now)
	for !h.isEndless() && !now.Before(h.due) {
		if h.unknown != nil {
			h.metLocked(now, false)
			break
		}
		if _, ok := h.pace.Next(more(h.failures, 1)); !ok {
			f.askLocked(h)
			return
		}
		h.failed(now)
	}
	f.restLocked()
}

// Slices.

// sliceLocked begins a slice.
func (f *flight) sliceLocked(now time.Time) {
	f.slice, f.looked = f.g.at(now.Add(f.g.cfg.Slice)), false
}

// mayLookLocked reports whether it is time to look for rivals while handoffs go on: late
// enough in the slice to be news when it ends, early enough for the answer to be there.
func (f *flight) mayLookLocked(now time.Time) bool { return !f.looked && f.looksLocked(now) }

// looksLocked reports whether a refresh that begins now is a look as well. A holder that
// nobody waits behind is not to yield: its release will.
func (f *flight) looksLocked(now time.Time) bool {
	return f.g.cfg.Slice > 0 && (f.n > 0 || f.holds > 1) && f.g.at(now) >= f.slice-instant(f.g.cfg.Slice/2)
}

// endOfSlice is what a release does about rivals.
type endOfSlice uint8

const (
	goOn  endOfSlice = iota // hand over
	look                    // ask the nodes first
	yield                   // let the rival have its turn
)

// turnLocked decides about a lease that could be handed over.
func (f *flight) turnLocked(now time.Time) endOfSlice {
	switch {
	case f.g.cfg.Slice <= 0 || f.g.at(now) < f.slice:
		return goOn
	case f.contest != nil && f.contest.rival != "":
		return yield
	case f.looked && f.refreshing: // the look may still be under way
		return goOn
	case !f.looked || f.g.at(now) > clock.Add(f.slice, instant(f.g.cfg.Slice)): // the Holds are so long that it is old
		return look
	}
	f.sliceLocked(now) // nobody waits
	return goOn
}

// sawLocked takes the outcome of a look, which brought no news if it failed.
func (f *flight) sawLocked(rival string, failed bool) {
	if rival != "" && f.contest == nil {
		f.contendLocked(f.lease.Owner()) // to hear of the next turn before it comes
	}
	if f.contest != nil && !failed {
		f.contest.rival = rival
	}
	if now := clock.Now(); f.g.at(now) >= f.slice && (f.contest == nil || f.contest.rival == "") {
		f.sliceLocked(now)
	}
}

// yieldLocked gives the lease to the rival that was seen, and has the flight wait.
func (f *flight) yieldLocked() {
	rival := f.contest.rival
	f.contest.rival, f.contest.wanting = "", true
	f.partLocked(rival)
}
