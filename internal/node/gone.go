package node

import (
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// A master of a Cluster may be replaced for good: its replica has taken over, or its slots were moved,
// and its address never comes back. Its link would stay, and if it was suspended, a probe and a read of
// the Cluster's slots every lookupPause, more with each change of address. So a server that is not
// among the masters that the Cluster names is dropped:
//
//	named --an exchange or a link of it had no answer, or it was not named--> one strike
//	one strike --not named--> dropped
//	one strike --named--> named
//
// The slots are read soon after a server did not answer, and when one was met: it may have come in the place
// of another, which may never be asked again. Without a failure it takes two reads, because a member that is
// cut off from the others reports old slots, and any of them may be the one that is asked. A Cluster that
// cannot be read names the masters that it named before, so none is dropped for that. A master that the
// Cluster did not name when it was found, because it was to have its first slot, is dropped only if it does
// not answer.
//
// To drop a master that lives is safe, too. A lock is in no server's link, but in its Entry: what
// was in the link is written or fails; what had no answer is indeterminate, and the debt for it
// goes to the server that has the slot then. If a request in the old link is overtaken by one in
// the new, that is as when a slot moves: an acquire that is granted after its release was answered
// is released once more. Nothing that is known of the server is kept, so if it comes back, it is
// met as new. (A Cluster has no epoch that would have to be requested: see SetGuard.)

// maxStrikes is when a server is dropped.
const maxStrikes = 2

var errGone = errors.New("not sent: the Cluster has another master for it by now")

// forget makes every slot of a master that could not be reached be looked up again: a
// replica may have taken its place. Soon it will be known whether it is a master still.
func (ro *router) forget(s *Server) {
	ro.unlearn(s)
	ro.mu.Lock()
	defer ro.mu.Unlock()
	s.strikes = max(s.strikes, maxStrikes-1)
	ro.armLocked()
}

// armLocked has sweepNow called lookupPause after the last time, unless it is due or in progress.
func (ro *router) armLocked() {
	if !ro.sweeping && ro.life.Err() == nil {
		ro.sweeping = true
		ro.sweep = time.AfterFunc(time.Until(ro.swept.Add(lookupPause)), ro.sweepNow)
	}
}

func (ro *router) stopSweeping() {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if ro.sweep != nil {
		ro.sweep.Stop()
	}
}

// sweepNow reads the slots, and drops the servers that are not among the masters. It comes again while one of
// them is about to be.
func (ro *router) sweepNow() {
	if !ro.n.begin() {
		return
	}
	defer ro.n.wg.Done()
	masters, err := ro.masters(ro.n.life)
	ro.mu.Lock()
	defer ro.mu.Unlock()
	again := err == nil && ro.strikeLocked(masters)
	if ro.sweeping, ro.swept = false, time.Now(); again {
		ro.armLocked()
	}
}

// strikeLocked reports whether a server has a strike afterwards.
func (ro *router) strikeLocked(masters []*redis.Client) (any bool) {
	seen := map[*Server]bool{}
	for _, s := range ro.known {
		if seen[s] { // it is known by two names
			continue
		}
		seen[s] = true
		switch {
		case slices.ContainsFunc(masters, s.is):
			s.strikes = 0
		case s.unnamed && s.strikes == 0: // it answers, and may be about to have its first slot
		default:
			if s.strikes++; s.strikes >= maxStrikes {
				ro.dropLocked(s)
			} else {
				any = true
			}
		}
	}
	return any
}

// is reports whether the Cluster's client for a master is for s.
func (s *Server) is(master *redis.Client) bool {
	return s.of == master.Options() ||
		s.unnamed && (master.Options().Addr == s.of.Addr || master.NodeAddress() == s.of.Addr)
}

// dropLocked ends the link of s. No slot leads to it any more.
func (ro *router) dropLocked(s *Server) {
	s.dropped.Store(true)
	ro.unlearn(s)
	for addr, known := range ro.known {
		if known == s {
			delete(ro.known, addr)
		}
	}
	ro.n.dropServer(s)
}
