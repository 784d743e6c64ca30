package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// This file measures the hand-over between processes: from the call of release in one to the return
// of lock in another that has been waiting. The processes share a machine and so its wall clock, by
// which both note the time.

// baton is a worker's half: the one lock that it holds.
type baton struct {
	l   locker
	key string
	h   held
}

// take returns when the lock is held, and says since when. Its ctx has no end, for a lock of
// rueidislock lives by it; the parent does not wait for ever.
func (b *baton) take() (time.Time, error) {
	h, err := b.l.lock(context.Background(), b.key)
	b.h = h
	return time.Now(), err
}

// pass says when the release began.
func (b *baton) pass() (time.Time, error) {
	if b.h == nil {
		return time.Time{}, errors.New("release: nothing is held")
	}
	began := time.Now()
	h := b.h
	b.h = nil
	return began, h.release()
}

// passTheBaton is the parent's half: two workers hand the lock to and fro for a window. The first
// hand-overs, of connections and scripts, do not count.
func passTheBaton(ctx context.Context, workers []*worker, window time.Duration) (*result, error) {
	const warm = 2
	holder, other := workers[0], workers[1]
	waits := newHistogram()
	res := &result{Extra: map[string]float64{}}
	if _, err := holder.call(ctx, request{Op: opTake}); err != nil {
		return nil, err
	}
	began := time.Now()
	for i := 0; i < warm+1 || time.Since(began) < window; i++ {
		d, err := pass(ctx, holder, other)
		if err != nil {
			return nil, err
		}
		if i >= warm {
			recordWait(waits, d)
			res.Locks++
		}
		holder, other = other, holder
	}
	res.Elapsed = time.Since(began)
	if _, err := holder.call(ctx, request{Op: opPass}); err != nil {
		return nil, err
	}
	var err error
	res.Waits, err = encodeWaits(waits)
	return res, err
}

// pass is one hand-over. The other has waited for 10 to 20 ms when the holder lets go.
func pass(ctx context.Context, holder, other *worker) (time.Duration, error) {
	type answer struct {
		reply
		err error
	}
	got := make(chan answer, 1)
	go func() { // ends with the call, which ctx bounds
		r, err := other.call(ctx, request{Op: opTake})
		got <- answer{r, err}
	}()
	time.Sleep(10*time.Millisecond + rand.N(10*time.Millisecond))
	released, err := holder.call(ctx, request{Op: opPass})
	a := <-got
	if err := errors.Join(err, a.err); err != nil {
		return 0, err
	}
	return a.At.Sub(released.At), nil
}
