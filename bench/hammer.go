package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/flightlock/flightlock"
)

// This file is the load of (b) and (c): goroutines that lock and release as fast as they can, until
// the time is over.

// hammerTTL is short enough that a lock lost with a process is free again within the run.
const hammerTTL = 2 * time.Second

// ttl lasts for the job's work also where a lock was handed over late in its life, with half of its
// ttl left.
func (j job) ttl() time.Duration { return max(hammerTTL, 4*j.Work) }

// lingerEvery is how often a holder lets others run before it leaves, so that a second holder has
// the time to show. (Two processes that hold for longer are seen without: their fences interleave.)
const lingerEvery = 64

// window is the measured time: parts of equal length. What happens outside of it is checked but not
// counted; the zero window counts nothing.
type window struct {
	start time.Time
	part  time.Duration
	parts int
}

// at returns the part that contains now, or -1.
func (w window) at(now time.Time) int {
	since := now.Sub(w.start)
	if w.parts == 0 || since < 0 || since >= w.part*time.Duration(w.parts) {
		return -1
	}
	return int(since / w.part)
}

// hammer runs the job's load on all clients for d.
func (c *localCrew) hammer(ctx context.Context, win window, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var wg sync.WaitGroup
	for i, cl := range c.clients {
		for g := range c.job.Goroutines + c.job.OwnKeys {
			w := &worker{id: holderID(c.Proc, i, g), client: cl, key: c.job.Key, ttl: c.job.ttl(), work: c.job.Work,
				reg: c.reg, tally: c.tallies[i], win: win}
			if g >= c.job.Goroutines {
				w.reg, w.work, w.key = nil, 0, fmt.Sprintf("own:%d:%d:%d", c.Proc, i, g)
			}
			wg.Go(func() { w.run(ctx) })
		}
	}
	wg.Wait()
}

// worker is one goroutine of the load.
type worker struct {
	id     holder
	client locker
	key    string
	ttl    time.Duration
	work   time.Duration
	reg    *register // nil for a key of its own
	fence  int64     // last fence of a key of its own
	visits int       // how often it was in the register
	tally  *tally
	win    window
}

// run works until ctx ends, with a cancelable ctx of its own, as a request in a service has one.
func (w *worker) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for ctx.Err() == nil {
		w.once(ctx)
	}
}

// once takes the lock, goes through the check, and releases.
func (w *worker) once(ctx context.Context) {
	began := time.Now()
	l, err := w.client.lock(ctx, w.key, w.ttl)
	now := time.Now()
	part := w.win.at(now)
	if err != nil {
		w.notGranted(ctx, part, now.Sub(began), err)
		return
	}
	w.use(ctx, l, now, part)
	done := time.Now()
	if err := l.Release(ctx); errors.Is(err, flightlock.ErrNotHeld) {
		w.tally.lost.Add(1)
	} else if err != nil {
		w.tally.failed(w.win.at(time.Now()), "release", err)
	}
	if w.reg == nil {
		w.tally.grantedOwn(part, now.Sub(began))
		return
	}
	w.tally.granted(part, now.Sub(began))
	w.tally.held(part, done.Sub(now))
	if part < 0 {
		w.cutShort(now.Sub(began))
	}
}

// notGranted counts an error, unless it is only the end of the run.
func (w *worker) notGranted(ctx context.Context, part int, wait time.Duration, err error) {
	if ctx.Err() == nil {
		w.tally.failed(part, "lock", err)
		time.Sleep(time.Millisecond) // who fails at once should not do so a million times per second
		return
	}
	w.cutShort(wait)
}

// cutShort notes a wait that the end of the run ended, or that lasted beyond it: it may raise the
// maximum, so that somebody who starved until the end is seen.
func (w *worker) cutShort(wait time.Duration) {
	if w.win.parts > 0 && w.reg != nil {
		w.tally.parts[w.win.parts-1].waits.AtLeast(wait)
	}
}

// use does the work, inside the register; for a key of its own, there is none and only the fence
// needs a check.
func (w *worker) use(ctx context.Context, l heldLock, now time.Time, part int) {
	if w.reg != nil {
		w.tally.checked(w.reg.enter(w.id, l, now, part))
		work(ctx, w.work)
		if w.visits++; w.visits%lingerEvery == 0 {
			runtime.Gosched()
		}
		w.reg.leave(w.id)
		return
	}
	if f := l.Fence(); f <= w.fence {
		w.tally.violated(fmt.Errorf("the fence did not rise: %s got fence %d after fence %d of its own key",
			w.id, f, w.fence))
	} else {
		w.fence = f
	}
}

// work spends d as the holder of a lock would: busy if it is short, waiting for something if it is long.
func work(ctx context.Context, d time.Duration) {
	if d >= spinBelow {
		_ = sleep(ctx, d) // if ctx ends, so does the run
		return
	}
	for began := time.Now(); time.Since(began) < d; {
	}
}
