package flightlock

import (
	"context"
	"fmt"
	"time"
)

// errFailedElsewhere is how contend ends when another process, for which it has waited, has let go
// of the key because its work has failed there: see Lock.releaseFailed.
var errFailedElsewhere = fmt.Errorf("flightlock: %w: the load that this process has waited for has failed in another one", ErrNotAcquired)

// contend makes key the caller's for ttl unless that becomes needless meanwhile. It tries
// at once, through the local tier. While the key is held elsewhere, in this process or in
// another, it waits; whenever there is news of the key, or an attempt is due, it calls look,
// on the caller's goroutine: true ends it, with stopped and without a lock; else it tries
// again. A lock that is handed over by this process comes without a look.
//
// It ends with ctx, with the error of SingleFlightLock. ErrUnavailable, and whatever else is not
// "held", is returned at once; so is errFailedElsewhere, which all processes get that wait for the
// key, so that they do the work at the same time and not one after the other. Without a lock, l is
// nil.
func (c *Client) contend(ctx context.Context, key string, ttl time.Duration, look func(ctx context.Context) (stop bool)) (l *Lock, stopped bool, err error) {
	retry := orDefault(nil)
	if err := c.checked(key, ttl, retry); err != nil {
		return nil, false, err
	}
	l = c.newLock()
	stopped, err = c.flights.AcquireUnless(ctx, key, &l.own, ttl.Truncate(time.Millisecond), retry, look)
	if stopped || err != nil {
		return nil, stopped, err
	}
	return l, false, nil
}
