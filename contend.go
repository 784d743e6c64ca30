package flightlock

import (
	"context"
	"errors"
	"time"
)

// How often contend looks and tries while others hold the key.
const (
	minContend = 5 * time.Millisecond
	maxContend = 50 * time.Millisecond
)

// contend makes key the caller's for ttl unless that becomes needless meanwhile. It tries
// at once, through the local tier. While the key is held elsewhere, in this process or in
// another, it waits; whenever there may be news about the key it calls look, on the
// caller's goroutine: true ends it, with stopped and without a lock; else it tries again.
//
// It ends with ctx, with the error of SingleFlightLock. ErrUnavailable, and whatever else
// is not "held", is returned at once. Without a lock, l is nil.
//
// So far news means a poll: nobody tells of a release.
func (c *Client) contend(ctx context.Context, key string, ttl time.Duration, look func(ctx context.Context) (stop bool)) (l *Lock, stopped bool, err error) {
	for pause := minContend; ; pause = min(2*pause, maxContend) {
		l, err := c.TryLock(ctx, key, ttl)
		if err == nil {
			return l, false, nil
		}
		if !errors.Is(err, ErrNotAcquired) || ctx.Err() != nil {
			return nil, false, err
		}
		news := time.NewTimer(pause)
		select {
		case <-news.C:
		case <-ctx.Done():
			news.Stop()
			return nil, false, c.gaveUp(c.opts.KeyPrefix+key, ctx.Err(), err)
		}
		if look(ctx) {
			return nil, true, nil
		}
	}
}
