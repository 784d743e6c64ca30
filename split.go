package flightlock

import (
	"context"
	"errors"
	"time"
)

// The bounds of the random pauses after split votes: from the first, doubled each time, to the last.
const (
	splitPause    = 2 * time.Millisecond
	maxSplitPause = 32 * time.Millisecond
)

// split reports whether an attempt failed though nobody has the key: its nodes have voted for different
// clients, and for none of them did a majority. The answers may not be complete, for an attempt is over when a majority is out
// of reach; if one of the others has the key after all, the next attempt says so.
func split(err error) bool {
	var q *QuorumError
	if !errors.As(err, &q) || !errors.Is(err, ErrNotAcquired) || q.ctx != nil {
		return false
	}
	votes := map[string]int{}
	for _, n := range q.Nodes {
		if n.Err != nil {
			continue
		}
		votes[n.Holder]++ // without a Holder it is a vote for this client
		if n.Holder != "" && votes[n.Holder] >= q.Need {
			return false
		}
	}
	return len(votes) > 1
}

// sleep reports whether ctx lasted for d.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
