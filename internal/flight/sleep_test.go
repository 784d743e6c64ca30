package flight

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// When the machine resumes after a sleep that outlasted a lock, its holder and the waiters behind
// it are notified, although no timer is due. A lock that the sleep did not outlast continues, and
// ends by the wall clock.
func TestASleepEndsWhatItOutlasted(t *testing.T) {
	defer clocks.Reset()
	w := newWorld(t).rich()
	short := w.heldFor(t, "short", 40*time.Second)
	next, answered := w.waitsFor(t, "short", 10*time.Minute)
	long := w.heldFor(t, "long", 10*time.Minute)
	if short.state != holding || long.state != holding {
		t.Fatal("not held")
	}
	ended, longEnded := short.told(), long.told()
	clocks.Sleep(40 * time.Second)
	toldSoon(t, "the holder", ended, errExpired)
	select {
	case <-answered:
	case <-time.After(soon):
		t.Fatal("the waiter waits")
	}
	if err := next.Err(); err != nil {
		t.Error("the waiter's lock:", err)
	}
	if err := long.Err(); err != nil {
		t.Error("the long lock:", err)
	}
	clocks.Sleep(10 * time.Minute)
	toldSoon(t, "the holder of the long lock", longEnded, errExpired)
	w.emptySoon()
}

// A sleep that a refresh has made up for ends nothing, and the next one counts from there.
func TestASleepBeforeARefreshIsPast(t *testing.T) {
	defer clocks.Reset()
	w := newWorld(t)
	h := w.heldFor(t, "k", time.Minute)
	ended, answered := h.told(), make(chan error, 1)
	clocks.Sleep(40 * time.Second)
	h.Refresh(time.Second, func(err error) { answered <- err })
	toldSoon(t, "the holder that refreshed", answered, nil)
	clocks.Sleep(40 * time.Second)
	other := w.heldFor(t, "other", time.Second) // and one that ends by the monotonic clock, in order
	toldSoon(t, "the other holder", other.told(), errExpired)
	select {
	case err := <-ended:
		t.Errorf("ended: %v", err)
	default:
	}
	if err := h.Release(); err != nil {
		t.Error(err)
	}
	w.emptySoon()
}

// A wall clock that is set back takes nothing away, and when it is set forward again, locks made
// meanwhile end.
func TestTheWallClockIsSetBackAndForward(t *testing.T) {
	defer clocks.Reset()
	w := newWorld(t)
	clocks.Sleep(-time.Hour)
	looked := w.heldFor(t, "looked", 10*time.Minute)
	compared := func() bool {
		w.g.watch.mu.Lock()
		defer w.g.watch.mu.Unlock()
		return w.g.watch.ahead < -time.Minute
	}
	for end := time.Now().Add(soon); !compared(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody compares the clocks")
		}
	}
	ended := looked.told()
	clocks.Sleep(time.Hour)
	toldSoon(t, "the holder", ended, errExpired)
	w.emptySoon()
}

// ticking says whether any timer is set: to compare the clocks, or of a shard.
func (g *Group) ticking() (compares, alarms bool) {
	for i := range g.shards {
		sh := &g.shards[i]
		sh.mu.Lock()
		alarms = alarms || sh.alarms.fires != 0
		sh.mu.Unlock()
	}
	g.watch.mu.Lock()
	defer g.watch.mu.Unlock()
	return g.watch.on, alarms
}

// The clocks are compared while something is held, and no timer is left soon after that.
func TestNoTimerIsSetWhileNothingIsHeld(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		for range 3 {
			a, b := w.start(key("a")), w.start(key("b"), mode(Unqueued))
			for range 10 {
				time.Sleep(compareEvery)
				synctest.Wait()
				compares, alarms := w.g.ticking()
				is(t, "compared", compares, true)
				is(t, "alarms", alarms, true)
			}
			a.releases()
			b.releases()
			time.Sleep(compareEvery)
			synctest.Wait()
			compares, alarms := w.g.ticking()
			is(t, "compared", compares, false)
			is(t, "alarms", alarms, false)
		}
	})
}

// Close stops the comparing, whatever is under way.
func TestCloseEndsTheComparing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.start()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		w.g.Close(ctx)
		w.g.watch.add(&w.g.shards[0]) // as one might that is busy meanwhile
		compares, _ := w.g.ticking()
		is(t, "compared", compares, false)
	})
}

// A flight that is to be called because of a sleep is, although its timer is set again before that.
func TestANewAlarmDoesNotPutOffTheCallAfterASleep(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		c := w.start()
		f := c.holds().f
		sh := f.shard()
		sh.mu.Lock()
		sh.alarms.all()
		now := sh.alarms.now()
		sh.mu.Unlock()
		sh.arm(f, now+clock.Instant(time.Second))
		sh.mu.Lock()
		is(t, "to be called", sh.alarms.heap[0].at, now)
		sh.mu.Unlock()
		c.releases()
	})
}
