package flight

import (
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/quorum"
)

// How a flight waits for other processes, and lets them have their turn.

// contention is a flight's state about its rivals: the flights of other processes that
// want the same key. A flight has none until it finds the first rival, or expects one.
//
// While no other process wants the key, the lease passes from waiter to waiter at no cost. Once per
// slice the flight checks, with the refresh that it makes anyway, whether anybody waits elsewhere. If
// so, the release that ends the slice makes the next turn the rival's that waits longest, and this
// flight goes to the end of those who wait. If the rival has made an offer (see offered), the release
// makes the key the rival's lease in the same step. Otherwise a turn is the key itself, kept on the
// nodes for a moment in the rival's name: nobody else can take it, the rival is notified, and it finds
// its turn too if the notice is lost. So P flights share the key in turns, each slice long, in the
// order in which they came, and each has the time to serve its queue. A rival that has died costs the
// others nothing, once the nodes have closed its connections; one that is paused costs them one turn,
// or the span of its offer.
//
// A release names one rival for all nodes: the one that a check has found, or who was next when the lease was
// granted or acquired. If each node named its own, they would disagree, and nobody would have a majority.
// Only the release of a lock whose acquire met nobody leaves it to the nodes. docs/dropped.md has simpler
// ways that failed.
//
// Waiting is push and poll. The flight subscribes to notices after its first lost attempt, until
// it dies, and is registered by the second, which brings an offer. If others wait when nobody in this process
// wants the key any more, it stays subscribed for a moment (see linger.go), and the first attempt of
// the next caller registers it: one attempt less for a key that many processes want. It tries again when its
// turn has come, when the nodes have confirmed the subscription (what was published before that was
// missed), when the holder's ttl or the turn of another runs out, and once per safetyPoll, more
// often while it has an offer, or less often where many keys are waited for, or for minutes. As long
// as it is not subscribed, for whatever reason, it polls as its strategy says. A lost notice costs
// time, never liveness. A release that makes a turn notifies two: the one whose turn it is, and the
// one after it, which tries when that turn has passed. So a hand-over wakes two processes, however
// many wait. All are notified when the last turn was not taken, and when what the lease was for may
// be done, or has failed.
//
// Guarded by the flight's mu.
type contention struct {
	contender  string        // what others know this flight by: the owner of its first attempt or lease
	since      clock.Instant // when it began to wait
	won        clock.Instant // when the flight had the key first since then; 0: it has not had it yet
	stop       func()        // ends the subscription; nil before it has begun
	waits      bool          // the flight has no lease, and is among the Group's contending
	subscribed bool          // a majority of nodes has confirmed it
	registered bool          // the nodes may know of a want
	leaving    bool          // that is about to be taken back: no other may be registered before
	othersWait bool          // others wait too: it received a notice of another's turn
	offer      *offered      // what others may grant; nil: nothing
	// pendingGrant is the offer whose lease was granted and is not the flight's yet: an attempt is in progress,
	// which is canceled first, or no caller has come back so far. Else it is nil.
	pendingGrant *offered
	// span is how long the nodes keep the key of a lease that another's release granted; 0: as long as
	// requested.
	span      time.Duration
	completes clock.Instant // when such a lease is refreshed; 0: it need not be
	poll      time.Duration // how often the flight polls while there is an offer

	rival   string  // waits longest, by the last check; "": nobody does
	returns returns // how reliably callers come back soon
}

// waited is how long the flight has waited for its last lease.
func (c *contention) waited() clock.Instant {
	if c.won == 0 {
		return 0
	}
	return c.won - c.since
}

// waitsAgainLocked begins another wait of the flight.
func (f *flight) waitsAgainLocked(now clock.Instant) {
	c := f.contention
	c.since, c.won = now, 0
	f.waitsLocked(true)
}

// waitsLocked counts the flight among those that wait among rivals, or no longer.
func (f *flight) waitsLocked(waits bool) {
	c := f.contention
	if c.waits == waits {
		return
	}
	c.waits = waits
	if waits {
		f.g.contending.Add(1)
	} else {
		f.g.contending.Add(-1)
	}
}

const (
	// safetyPoll is how long a flight that is subscribed waits for an event before it polls. After a minute it
	// grows with the wait, since tens of processes may wait for the same thousands of keys, for hours: to the
	// time waited by safetyPolls, and to longestPoll, half of the time for which a poll registers a contender
	// (acquire.lua).
	safetyPoll, longestPoll = time.Second, 5 * time.Second
	safetyPolls             = 60

	// pollShare is the least time between polls, for each key that is waited for: a process that waits for very
	// many at once, such as after a deploy, makes 500 polls per second for all of them, as long as longestPoll
	// allows.
	pollShare = 2 * time.Millisecond

	// maxPoll is how long one that is not subscribed waits at most, whatever its strategy
	// says: else its turn would have run out before it came. It is also how long a flight waits while
	// the driver asks its strategy.
	maxPoll = 50 * time.Millisecond
)

// safetyPollAfter is how long a flight that has waited for that long waits for an event before it polls, if
// it is not to poll more often.
func (g *Group) safetyPollAfter(waited time.Duration) time.Duration {
	return min(max(safetyPoll, waited/safetyPolls, g.pollShares()), longestPoll)
}

// pollShares is how long a flight waits between polls at least.
func (g *Group) pollShares() time.Duration {
	return min(time.Duration(g.contending.Load())*pollShare, longestPoll)
}

// spread is the time until the next poll. Where it is long, thousands of keys may be waited for since the
// same moment: their polls are not to come together.
func spread(poll time.Duration) time.Duration {
	if poll <= safetyPoll {
		return poll
	}
	return poll - jitter.N(poll/4)
}

// contendLocked has the flight wait among its rivals, if its last attempt has failed because of
// one.
func (f *flight) contendLocked() {
	if f.contention == nil && f.lastLocked().Reason == quorum.Taken {
		f.subscribeLocked(f.backoff.owner)
	}
}

// subscribeLocked has the flight wait among its rivals, as contender.
func (f *flight) subscribeLocked(contender string) {
	c := &contention{contender: contender, since: clock.InstantNow(f.g.epoch)}
	f.contention = c
	f.waitsLocked(f.lease == nil)
	f.g.unsubscribing.Add(1)
	f.deferLocked(func() {
		defer f.g.unsubscribing.Done()
		stop := f.g.cfg.Nodes.Watch(f.key, c.contender, func(e quorum.Event) { f.onEvent(c, e) })
		f.mu.Lock()
		ended := f.contention != c
		if !ended {
			c.stop = stop
		}
		f.mu.Unlock()
		if ended && stop != nil {
			stop()
		}
	})
}

// onEvent takes an event of the subscription of c.
func (f *flight) onEvent(c *contention, e quorum.Event) {
	f.mu.Lock()
	defer f.unlock()
	if f.contention != c { // it is late
		return
	}
	// somebody has released the key, and may have done the work
	if e == quorum.OurTurn || e == quorum.OtherTurn {
		if e == quorum.OtherTurn || f.phase != idle { // else tryLocked does that, below
			f.wakeLookersLocked(all)
		}
	}
	switch e {
	case quorum.Failed:
		f.failedElsewhereLocked()
		return
	case quorum.OtherTurn:
		c.othersWait = true
		f.otherTurnLocked()
		return
	case quorum.Subscribed:
		c.subscribed = true
	case quorum.Unsubscribed:
		c.subscribed = false
	}
	switch f.phase {
	case acquiring, releasing:
		f.retry = true // the attempt may have come before this
	case lingering:
		if e == quorum.OurTurn && c.offer != nil { // another node may have granted the key
			f.nobodyCameLocked()
		} else {
			f.retry = true // the next caller is to look at once: a message may have been missed
		}
	case idle:
		f.tryLocked()
	}
}

// otherTurnLocked has the next attempt made when another contender's turn has ended, at the latest: by then
// that one has taken the key, or has not come for it.
func (f *flight) otherTurnLocked() {
	if f.lease != nil {
		return
	}
	now := clock.Now()
	f.ensureBackoffLocked().freeAt = now.Add(f.g.cfg.Turn + minDelay)
	f.paceLocked()
}

// failedElsewhereLocked ends the wait of all callers of AcquireUnless: what they have waited for
// has failed. They are to do it themselves, at once and all together, not one after the other.
//
// A message may be late: then somebody else has the key by now, and callers that came since have not waited
// for that failure. Such a mistake costs work that is done twice, and never a lock.
func (f *flight) failedElsewhereLocked() {
	if f.lease != nil {
		return
	}
	f.turnAwayAllLocked(f.g.cfg.Errors.FailedElsewhere(),
		func(t *Ticket) bool { return t.waiter.needless != nil })
}

// endContentionLocked ends what the flight has begun to wait for other processes.
func (f *flight) endContentionLocked() {
	c := f.contention
	if c == nil {
		return
	}
	f.g.unsubscribing.Add(1)
	f.deferLocked(func() {
		defer f.g.unsubscribing.Done()
		if c.stop != nil { // written before this, or never
			c.stop()
		}
	})
	f.waitNoMoreLocked()
	f.contention = nil
}

// waitNoMoreLocked takes back what the flight wants from other processes.
func (f *flight) waitNoMoreLocked() {
	f.waitsLocked(false)
	c := f.contention
	o, registered := c.offer, c.registered
	c.offer, c.registered = nil, false
	f.g.unsubscribing.Add(1)
	f.deferLocked(func() {
		defer f.g.unsubscribing.Done()
		if (o == nil || !o.lease.Withdraw()) && registered {
			f.g.cfg.Nodes.Leave(f.key, c.contender)
		}
	})
}

// Slices.

// sliceLocked begins a slice.
func (f *flight) sliceLocked(now time.Time) {
	f.sliceEnds, f.checked = f.g.at(now.Add(f.g.cfg.Slice)), false
}

// mayCheckLocked reports whether it is time to check for rivals while handoffs continue: late
// enough in the slice to be true still when it ends, early enough for the answer to be there.
func (f *flight) mayCheckLocked(now time.Time) bool { return !f.checked && f.checksLocked(now) }

// checksLocked reports whether a refresh that begins now is a check for waiters elsewhere as well.
// A lone holder, behind whom nobody waits or has waited, need not check: its release leaves the key to
// others.
func (f *flight) checksLocked(now time.Time) bool {
	return f.g.cfg.Slice > 0 && (f.n > 0 || f.served > 1) &&
		f.g.at(now) >= f.sliceEnds-clock.Instant(f.g.cfg.Slice/2)
}

// handoffDecision is what a release does about rivals.
type handoffDecision uint8

const (
	handOff handoffDecision = iota // hand over
	check                          // ask the nodes first who waits
	yield                          // let the rival have its turn
)

// decideLocked decides about a lease that could be handed over.
func (f *flight) decideLocked(now time.Time) handoffDecision {
	switch {
	case f.g.cfg.Slice <= 0 || f.g.at(now) < f.sliceEnds:
		return handOff
	case f.contention != nil && f.contention.rival != "":
		return yield
	case f.checked && f.refreshing: // the check may still be in progress
		return handOff
	case !f.checked || f.g.at(now) > clock.Add(f.sliceEnds, clock.Instant(f.g.cfg.Slice)):
		return check // not checked in this slice, or callers hold the lease for so long that the check is old
	}
	f.sliceLocked(now) // nobody waits
	return handOff
}

// waitersSeenLocked takes the outcome of a check, which says nothing if it failed.
func (f *flight) waitersSeenLocked(rival string, failed bool) {
	if rival != "" && f.contention == nil {
		f.subscribeLocked(f.lease.Owner()) // to receive the notice of the next turn before it comes
	}
	if f.contention != nil && !failed {
		f.contention.rival = rival
	}
	if now := clock.Now(); f.g.at(now) >= f.sliceEnds && (f.contention == nil || f.contention.rival == "") {
		f.sliceLocked(now)
	}
}

// yieldLocked gives the lease to the rival that was seen, and has the flight wait.
func (f *flight) yieldLocked() {
	rival := f.contention.rival
	f.contention.rival, f.contention.registered = "", true
	f.waitsAgainLocked(clock.InstantNow(f.g.epoch))
	f.releaseToLocked(rival)
}
