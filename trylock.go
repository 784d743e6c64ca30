package flightlock

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/node"
)

// How often TryLock asks again after votes that were split, and how long it waits before, at random: up to twice as
// long as the attempt took, and twice as long each time, within these bounds. Of those who have split the votes
// the first to come back then has the key.
const (
	splitTries    = 4
	splitPause    = 5 * time.Millisecond
	maxSplitPause = 500 * time.Millisecond
)

// TryLock is SingleFlightLock with one attempt. A key that is held, queued for or being
// acquired in this process fails at once with ErrNotAcquired, with no Redis traffic:
// TryLock never overtakes.
//
// When several processes try at the same moment, each may get some of the nodes and none a majority. Then nobody has
// the key, and all of them would give up. So an attempt that has split the votes is made again, up to four times, after a
// short random pause, half a second at most: of the processes that try to do a job at its time, one does it.
func (c *Client) TryLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error) {
	for try := 1; ; try++ {
		began := clock.Now()
		l, err := c.acquire(ctx, key, ttl, noRetry{}, flight.Try)
		if err == nil || try > splitTries || !split(err) {
			return l, err
		}
		over := make(chan struct{})
		most := min(max(splitPause, 2*clock.Since(began))<<(try-1), maxSplitPause)
		pause := clock.AfterFunc(jitter.N(most), func() { close(over) })
		select {
		case <-over:
		case <-ctx.Done():
			pause.Stop()
			return nil, c.gaveUp(key, ctx.Err(), err)
		}
	}
}

// split reports whether err says that nobody has the key, because those who want it have split the votes: as far as the
// nodes had answered when a majority was out of reach, no one has a majority. If somebody has one after all, the next
// attempt says so. A node that keeps the key for a contender whose turn it is has no part in that.
func split(err error) bool {
	var e *QuorumError
	if !errors.Is(err, ErrNotAcquired) || !errors.As(err, &e) {
		return false
	}
	votes := map[string]int{}
	for _, n := range e.Nodes {
		switch {
		case strings.HasPrefix(n.Holder, node.TurnOf):
			return false
		case n.Err == nil || errors.Is(n.Err, errNoName):
			votes[n.Holder]++ // without a Holder it was a vote for this attempt, or has a key without a name
			if n.Holder != "" && votes[n.Holder] >= e.Need {
				return false
			}
		}
	}
	return len(votes) > 1
}
