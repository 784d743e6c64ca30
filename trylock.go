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

// TryLock repeats an attempt that split the votes up to splitTries times, each time after a random
// pause. The pause is at most twice the duration of the attempt, doubled with each repetition, but
// between splitPause and maxSplitPause. So of the contenders that split the votes, the first to
// retry has probably completed its attempt when the second one retries.
const (
	splitTries    = 4
	splitPause    = 5 * time.Millisecond
	maxSplitPause = 500 * time.Millisecond
)

// TryLock is SingleFlightLock with one attempt. If the key is held, queued for or being acquired in
// this process, it fails at once with ErrNotAcquired, without Redis traffic: TryLock never
// overtakes.
//
// If several processes try at the same moment, each may get the votes of some nodes, and none those
// of a majority. Then nobody has the lock, and all of them would give up. So TryLock repeats an
// attempt that split the votes, up to four times, each time after a random pause of at most half a
// second: of the processes that try to start a job at the same moment, one succeeds (G49 in
// docs/guarantees.md). If ctx ends during a pause, the error matches ctx's error and
// ErrNotAcquired.
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
			return nil, flightErrors{c}.GaveUp(key, ctx.Err(), err)
		}
	}
}

// split reports whether err means that the votes were split: by the replies that had arrived when a
// majority was out of reach, several contenders have votes, and none has a majority. If one of them
// gets a majority after all, the next attempt reports that. It is not a split if a node reserves
// the key for a contender whose turn it is: then that one will get the lock.
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
			votes[n.Holder]++ // Holder "": the vote was for this attempt, or the key has no owner's name
			if n.Holder != "" && votes[n.Holder] >= e.Need {
				return false
			}
		}
	}
	return len(votes) > 1
}
