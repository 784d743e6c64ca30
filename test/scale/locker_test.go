package scale

import (
	"context"
	"errors"
	"time"

	"github.com/flightlock/flightlock"
)

// The requests that a locker can be sent.
const (
	doLock    = "lock"    // take the key
	doInspect = "inspect" // look what has become of the lock, by all means
	doRefresh = "refresh"
	doRelease = "release"
	doRetain  = "retain" // take and release the key until its lease is retained
)

// locker is a process that takes one lock at a time.
type locker struct {
	c    *flightlock.Client
	l    *flightlock.Lock
	over context.Context // of l
}

func (m *locker) run(e errand) (r told) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	switch e.Do {
	case doLock:
		if m.l, err = m.c.SingleFlightLock(ctx, e.Key, e.TTL, nil); err == nil {
			m.over = m.l.Context(context.Background())
			r.Fence, r.Owner = m.l.Fence(), m.l.Owner()
		}
		if err == nil && e.Refreshed {
			err = m.l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{})
		}
	case doInspect:
		return m.inspect(ctx)
	case doRetain:
		for m.c.Stats().Retained == 0 && err == nil {
			if m.l, err = m.c.SingleFlightLock(ctx, e.Key, e.TTL, nil); err == nil {
				r.Fence, r.Owner = m.l.Fence(), m.l.Owner()
				err = m.l.Release(ctx)
			}
		}
	case doRefresh:
		err = errors.Join(m.l.Err(), m.l.Refresh(ctx))
	case doRelease:
		err = m.l.Release(ctx)
	}
	if err != nil {
		r.Errors = []string{err.Error()}
	}
	return r
}

// inspect reports which of the ways to learn that the lock is lost do report it.
func (m *locker) inspect(ctx context.Context) (r told) {
	for _, way := range []struct {
		name string
		look func() error
		want error
	}{
		{"Err", m.l.Err, flightlock.ErrLockLost},
		{"Refresh", func() error { return m.l.Refresh(ctx) }, flightlock.ErrNotHeld},
		{"Release", func() error { return m.l.Release(ctx) }, flightlock.ErrNotHeld},
		{"Context", func() error {
			select {
			case <-m.over.Done():
			case <-ctx.Done():
			}
			return context.Cause(m.over)
		}, flightlock.ErrLockLost},
	} {
		if err := way.look(); errors.Is(err, way.want) {
			r.Ended = append(r.Ended, way.name)
		} else {
			r.Errors = append(r.Errors, way.name+": "+errText(err))
		}
	}
	return r
}

func errText(err error) string {
	if err == nil {
		return "no error"
	}
	return err.Error()
}
