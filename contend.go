package flightlock

import (
	"context"
	"fmt"
	"time"
)

// errFailedElsewhere is how contend ends when another process, for which it has waited, has let go
// of the key because its work has failed there: see Lock.releaseFailed.
var errFailedElsewhere = fmt.Errorf("flightlock: %w: the load that this process has waited for has failed in another one", ErrNotAcquired)

// contend acquires key for ttl, unless that becomes needless meanwhile. It tries at once, through the
// local tier. While the key is held, in this process or in another, it waits; whenever there is an
// event about the key, or an attempt is due, it calls needless, on the caller's goroutine: true ends
// the wait, with stopped and without a lock; otherwise it tries again. Before a lock that is handed
// over in this process, needless is not called.
//
// It ends with ctx, with the error of SingleFlightLock. Any error that does not mean that the key is
// held is returned at once, ErrUnavailable for one; and so is errFailedElsewhere, which all processes
// that wait for the key get, so that they do the work at the same time and not one after the other. l
// is nil if the lock was not acquired.
func (c *Client) contend(ctx context.Context, key string, ttl time.Duration, needless func(ctx context.Context) bool) (l *Lock, stopped bool, err error) {
	retry := orDefault(nil)
	if err := c.checkArguments(key, ttl, retry); err != nil {
		return nil, false, err
	}
	l = c.newLock()
	stopped, err = c.flights.AcquireUnless(ctx, key, &l.own, ttl.Truncate(time.Millisecond), retry, needless)
	if stopped || err != nil {
		return nil, stopped, err
	}
	return l, false, nil
}
