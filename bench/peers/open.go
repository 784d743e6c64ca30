package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// drainTime is how long an open load waits at its end for those who have come.
const drainTime = time.Second

// runOpen lets callers come at random times, Rate a second, each on a goroutine of its own, whether
// the earlier ones have got their lock or not. A wait begins when the caller should have come: a
// client that falls behind does not make the load lighter (no coordinated omission). Who is still
// waiting at the end counts with the wait so far.
func runOpen(l locker, t task, at time.Time) (*result, error) {
	r := newRun(l, t)
	defer r.cancel()
	names := []string{t.Prefix + ":hot"}
	if t.Load.Keys > 1 {
		names = keyNames(t.Prefix, t.Load.Keys)
	}
	rng := rand.New(rand.NewPCG(2, uint64(pid())))
	var wg sync.WaitGroup
	var locks atomic.Uint64
	time.Sleep(time.Until(at))
	m := readMeter()
	arrivals(at, at.Add(t.Load.Window), t.Load.Rate, rng, func(i int, due time.Time) {
		key := names[rng.IntN(len(names))]
		wg.Go(func() {
			ctx, cancel := context.WithCancel(r.ctx)
			defer cancel()
			if r.lockAt(ctx, i, key, due) {
				locks.Add(1)
			}
		})
	})
	r.drain(&wg)
	res := m.result()
	res.Elapsed = t.Load.Window // of the arrivals
	r.stopped.Store(true)
	r.cancel()
	wg.Wait()
	res.Locks = locks.Load()
	return res, r.finish(res)
}

// drain waits for the goroutines, drainTime at most.
func (r *run) drain(wg *sync.WaitGroup) {
	stop := time.AfterFunc(drainTime, func() {
		r.stopped.Store(true)
		r.cancel()
	})
	wg.Wait()
	stop.Stop()
}

// arrivals calls come at the times of a Poisson process, from start to end. It sleeps on a thread
// of its own, for an idle Go scheduler sleeps in whole milliseconds.
func arrivals(start, end time.Time, rate float64, rng *rand.Rand, come func(i int, due time.Time)) {
	sleepUntil, done := preciseSleep()
	defer done()
	due := start
	for i := 0; ; i++ {
		due = due.Add(time.Duration(rng.ExpFloat64() / rate * float64(time.Second)))
		if !due.Before(end) {
			return
		}
		sleepUntil(due)
		come(i, due)
	}
}
