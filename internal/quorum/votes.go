package quorum

import (
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// Which grants and confirmations are votes, where nodes may be in quarantine: see quarantine.

// Quarantined is the error of a node that may have lost locks.
type Quarantined struct {
	Epoch node.Epoch
	Until time.Time
}

func (e *Quarantined) Error() string {
	why := "it was restarted, flushed or failed over, and may have lost locks"
	if e.Epoch.State == node.EpochNew {
		why = "it has no data of any lock, and not all nodes are new: it was restarted, or flushed, or added"
	}
	return fmt.Sprintf("quarantined until %s (for %v): %s; then it votes again",
		e.Until.Format("15:04:05.000"), max(e.Until.Sub(clock.Now()), 0).Round(time.Millisecond), why)
}

const (
	// attemptLimit is how long after its first request an attempt may be decided, where nodes are in quarantine
	// if they lose their data. It is the same in all clients, whatever their options.
	attemptLimit = 10 * time.Second

	// confirmAfter is how long a node whose data was lost confirms no refresh: attemptLimit, and as much as
	// clocks may differ by meanwhile.
	confirmAfter = attemptLimit + time.Second
)

// errSlowAttempt is why an attempt fails that is decided after attemptLimit.
var errSlowAttempt = fmt.Errorf("a majority was reached, but more than %v after the first request: "+
	"a vote is not valid for longer, for its node may have lost its data", attemptLimit)

// confirms reports whether the confirmation of a refresh is a vote: the round began at that time, its request
// was written in epoch e as far as was known, and the node's epoch as last known is now.
func confirms(e, now *node.Epoch, began time.Time) bool {
	if now == nil || now.Name != e.Name {
		return false
	}
	return e.State == node.EpochKept || !began.Before(e.Began.Add(confirmAfter))
}

// unconfirmed is the error of a node whose confirmation of a refresh is no vote. e is its epoch as last
// known.
func unconfirmed(e *node.Epoch, quarantine time.Duration) error {
	if e == nil {
		return errUnknownEpoch
	}
	from, when := e.Began.Add(min(confirmAfter, quarantine)), "from the next refresh on"
	if left := from.Sub(clock.Now()); e.State == node.EpochKept {
		return fmt.Errorf("refreshed, which counts %s: the node had lost data", when)
	} else if left > 0 {
		when = fmt.Sprintf("from %s on (in %v)", from.Format("15:04:05.000"), left.Round(time.Millisecond))
	}
	return fmt.Errorf("refreshed, which counts %s: %w", when, &Quarantined{*e, e.Began.Add(quarantine)})
}

var errUnknownEpoch = errors.New("refreshed, which does not count: it is not known whether the node has " +
	"lost data")

// isVote reports whether a new grant is a vote: it was made in epoch e, and the node's epoch as
// last known is now.
func isVote(e, now *node.Epoch) bool {
	return e.State == node.EpochKept || now != nil && now.Name == e.Name && now.State == node.EpochKept
}
