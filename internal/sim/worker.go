package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/flight"
)

// A worker is a goroutine of a program: it takes a lock, keeps it for a while, lets it go,
// and again. The loop decides what it does and when; the goroutine only makes the calls.
type worker struct {
	c     *client
	id    int
	calls chan func()
	dead  bool

	busy   bool               // an operation is in progress, from the acquire until its lock is over
	began  time.Duration      // when
	op     operation          // which
	cancel context.CancelFunc // of its ctx
	hold   *hold              // its lock
	parcel *parcel            // what it attaches
}

// operation is one use of a lock.
type operation struct {
	key     string
	ttl     time.Duration
	how     string // which method
	retry   flightlock.RetryStrategy
	endless bool          // it waits until it is served
	keep    time.Duration // how long it holds the lock
	auto    bool          // AutoRefresh
	again   int           // refreshes by hand
	changed int           // what is fetched was invalidated at this version, before
}

func newWorker(c *client, id int) *worker {
	k := &worker{c: c, id: id, calls: make(chan func(), 1)}
	go func() {
		for call := range k.calls {
			call()
		}
	}()
	return k
}

func (k *worker) String() string { return fmt.Sprintf("%v.%d", k.c, k.id) }

// do makes a call on the worker's goroutine, and then after on the loop.
func (k *worker) do(call, after func()) {
	if k.dead {
		return
	}
	k.calls <- func() {
		call()
		k.c.w.report(action{client: k.c.id, server: -1, text: k.String(), do: func() {
			if !k.dead {
				after()
			}
		}})
	}
}

// later continues in a while.
func (k *worker) later(do func()) {
	k.wait(between(k.c.w.app, time.Microsecond, 20*time.Millisecond), do)
}

func (k *worker) wait(d time.Duration, do func()) {
	k.c.w.after(d, func() {
		if !k.dead {
			k.c.unlessPaused(do)
		}
	})
}

// die ends the goroutine.
func (k *worker) die() {
	if k.cancel != nil {
		k.cancel()
	}
	k.dead = true
	close(k.calls)
}

// next begins an operation, unless the time for that is over.
func (k *worker) next() {
	w := k.c.w
	k.busy = false
	if w.healed || k.c.closing {
		return
	}
	k.busy, k.began = true, w.now()
	k.op = w.newOperation()
	k.receives(&k.op)
	received := k.parcel
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = func() { k.c.as(cancel) }
	op := k.op
	switch w.app.IntN(6) {
	case 0:
		after := between(w.app, time.Millisecond, w.plan.chaos)
		ctx = timed{ctx, time.Now().Add(after)}
		k.cancelAfter(after)
	case 1:
		k.cancelAfter(between(w.app, 10*time.Microsecond, w.plan.chaos))
	}
	w.logf("%v %s %q ttl=%v keep=%v endless=%v auto=%v", k, op.how, op.key, op.ttl, op.keep, k.op.endless,
		op.auto)
	k.op.changed = w.cache.changed[op.key]
	var l *flightlock.Lock
	var value int
	var err error
	k.do(func() {
		switch op.how {
		case "fetch":
			value, err = k.c.fetcher.Get(ctx, op.key)
		case "attach":
			l, err = k.c.lib.Attach(ctx, received.d)
		case "try":
			l, err = k.c.lib.TryLock(ctx, op.key, op.ttl)
		case "read":
			l, err = k.c.lib.RLock(ctx, op.key, op.ttl, op.retry)
		default:
			l, err = k.c.lib.SingleFlightLock(ctx, op.key, op.ttl, op.retry)
		}
	}, func() {
		if op.how == "fetch" {
			k.fetched(value, err)
		}
		if received != nil {
			k.attached(err)
		}
		k.answered(l, err, received)
	})
}

// cancelAfter ends the operation's ctx after that time, or when the process continues.
func (k *worker) cancelAfter(d time.Duration) {
	cancel := k.cancel
	k.op.endless = false
	k.c.w.after(d, func() { k.c.unlessPaused(cancel) })
}

// timed is a ctx whose deadline the loop keeps.
type timed struct {
	context.Context
	deadline time.Time
}

func (t timed) Deadline() (time.Time, bool) { return t.deadline, true }

func (t timed) Err() error {
	if t.Context.Err() == nil {
		return nil
	}
	return context.DeadlineExceeded
}

func (w *world) newOperation() operation {
	r := w.app
	op := operation{
		key: fmt.Sprintf("k%d", r.IntN(w.plan.keys)),
		ttl: max(between(r, 10*time.Millisecond, w.plan.maxTTL), 10*time.Millisecond),
		how: pick(r, "flight", "flight", "flight", "flight", "flight", "try"),
	}
	op.keep = between(r, 10*time.Microsecond, min(2*op.ttl, w.plan.chaos/4))
	if w.plan.eager && r.IntN(16) != 0 {
		op.key, op.how, op.keep = "k0", "flight", between(r, 10*time.Microsecond, 2*w.plan.latency)
	}
	if w.plan.long {
		op.ttl, op.keep = w.plan.maxTTL, w.plan.chaos/8+op.keep/2
	}
	op.auto = r.IntN(2) == 0
	if !op.auto {
		op.again = pick(r, 0, 0, 1, 3)
	}
	switch r.IntN(4) {
	case 0:
		op.retry = flightlock.LimitedRetry(between(r, time.Millisecond, 50*time.Millisecond), r.IntN(20))
	case 1:
		op.endless = op.how != "try"
	default:
		op.retry = pace{seed: r.Uint64(), low: 2 * time.Millisecond,
			high: between(r, 4*time.Millisecond, 250*time.Millisecond)}
		op.endless = op.how != "try"
	}
	if w.plan.eager && op.how == "flight" && r.IntN(4) != 0 { // the default strategy
		op.retry, op.endless = nil, true
	}
	if w.plan.fetches && r.IntN(2) == 0 {
		op.how, op.endless = "fetch", true
	}
	if w.plan.reads && op.how == "flight" && w.readers.IntN(3) != 0 {
		op.how = "read"
	}
	return op
}

// pace is a strategy without an end, whose jitter the seed knows.
type pace struct {
	seed      uint64
	low, high time.Duration
}

func (p pace) Next(attempt int) (time.Duration, bool) {
	r := rand.New(rand.NewPCG(p.seed, uint64(attempt)))
	return p.low + time.Duration(r.Int64N(int64(p.high-p.low))), true
}

// Traits says that the strategy never gives up.
func (p pace) Traits() flight.Traits { return flight.Endless | flight.Quick }

// answered continues when the call that wants the lock has returned.
func (k *worker) answered(l *flightlock.Lock, err error, received *parcel) {
	w := k.c.w
	if l == nil { // none, or the operation was a fetch
		w.logf("%v ends without %q: %v", k, k.op.key, err)
		k.cancel()
		k.later(k.next)
		return
	}
	k.hold = w.checker.granted(k, l, received)
	again := k.op.again
	if k.op.auto {
		k.c.as(func() {
			retry := pace{seed: w.app.Uint64(), low: time.Millisecond, high: 10 * time.Millisecond}
			err = l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{Retry: retry})
		})
		if err != nil && !errors.Is(err, flightlock.ErrNotHeld) {
			w.checker.violation("%v: AutoRefresh: %v", k, err)
		}
	}
	k.hold.end = w.now() + k.op.keep
	k.work(again)
}

// work refreshes so many times, and then releases.
func (k *worker) work(again int) {
	w := k.c.w
	left := max(0, k.hold.end-w.now())
	if again == 0 || left == 0 || w.healed {
		k.wait(left, k.release)
		return
	}
	k.wait(left/2, func() {
		var err error
		k.do(func() { err = k.hold.lock.Refresh(context.Background()) }, func() {
			w.logf("%v refreshes %q: %v", k, k.op.key, err)
			k.work(again - 1)
		})
	})
}

func (k *worker) release() {
	h, w := k.hold, k.c.w
	if w.detaches(h) {
		k.detach()
		return
	}
	w.checker.letsGo(h)
	var err error
	// draws nothing: a seed that has found something is to find it again
	async := w.now()/time.Microsecond%4 == 0
	k.do(func() {
		if async {
			h.lock.ReleaseAsync()
		} else {
			err = h.lock.Release(context.Background())
		}
	}, func() {
		if async {
			w.logf("%v releases %q, and does not wait", k, h.key)
		} else {
			w.checker.released(h, err)
		}
		k.hold = nil
		k.cancel()
		if w.plan.eager && w.app.IntN(16) != 0 {
			k.wait(between(w.app, time.Microsecond, w.plan.latency), k.next)
			return
		}
		k.later(k.next)
	})
}
