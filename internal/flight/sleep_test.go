package flight

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

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
			a, b := w.start(key("a")), w.start(key("b"))
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

// slept makes a time look as if the machine had slept for d since: its wall clock reading
// is d earlier, its monotonic one stays. (A Time with a monotonic reading has the wall
// clock's seconds above 30 bits of nanoseconds. There is no such reading in a bubble.)
func slept(t *testing.T, at time.Time, d time.Duration) time.Time {
	before := at
	*(*uint64)(unsafe.Pointer(&before)) -= uint64(d/time.Second) << 30
	if !before.Equal(at) || at.Round(0).Sub(before.Round(0)) != d {
		t.Fatalf("a Time is not what it was: %v became %v", at, before)
	}
	return before
}

// sleepy is a lease of 50s whose machine has slept for d since, with its waiters.
func sleepy(t *testing.T, d time.Duration) (w *world, next *Ticket, answered <-chan struct{}) {
	w = newWorld(t).rich()
	w.refresh = nil
	first := w.heldFor(t, "k", 50*time.Second)
	next, answered = w.waitsFor(t, "k", 20*time.Second)
	f := first.f
	f.mu.Lock()
	f.until = slept(t, f.until, d)
	f.mu.Unlock()
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	return w, next, answered
}

// A lease whose machine has slept since it was granted has less left than the monotonic clock says.
// The next holder must not rely on more, by either clock.
func TestAHandoffAfterSleepEndsWithTheLease(t *testing.T) {
	w, next, answered := sleepy(t, 35*time.Second) // about 14s are left, of 49
	<-answered
	if w.renewals() != 0 || next.kind != Handed {
		t.Fatal("not handed over")
	}
	if over := next.Until().Round(0).Sub(next.f.until.Round(0)); over > 0 {
		t.Errorf("held for %v longer than the lease", over)
	}
	if err := next.Release(); err != nil {
		t.Error(err)
	}
	w.emptyNow()
}

// A lease that has too little left by the wall clock alone is renewed before it is handed over.
func TestAShortLeaseByTheWallClockIsRenewed(t *testing.T) {
	w, next, answered := sleepy(t, 45*time.Second) // about 4s are left
	select {
	case <-answered:
		t.Error("not renewed")
	default:
	}
	w.renewal(1).confirm()
	<-answered
	if err := next.Release(); err != nil {
		t.Error(err)
	}
	w.emptyNow()
}

// soon is for what the docs promise within a second. A busy machine gets more; what does not look
// at the wall clock takes twice as long.
const soon = 20 * time.Second

// heldFor joins a caller that is given the lock, or waits for it.
func (w *world) heldFor(t *testing.T, key string, ttl time.Duration) *Ticket {
	t.Helper()
	h := &Ticket{}
	if _, err := w.enter(key, h, ttl); err != nil {
		t.Fatal(err)
	}
	return h
}

// waitsFor is heldFor, of a caller that has to wait, on a goroutine of its own; answered is closed
// when it has its answer.
func (w *world) waitsFor(t *testing.T, key string, ttl time.Duration) (h *Ticket, answered <-chan struct{}) {
	t.Helper()
	h, done := &Ticket{}, make(chan struct{})
	go func() {
		defer close(done)
		if err := w.g.Acquire(context.Background(), key, h, ttl, patient); err != nil {
			t.Error(err)
		}
	}()
	for w.g.Counts(Counts{}).Waiters == 0 {
		runtime.Gosched()
	}
	return h, done
}

// told returns why h is over, once it is.
func (h *Ticket) told() <-chan error {
	told := make(chan error, 1)
	if _, why, over := h.OnEnd(func(why error) { told <- why }); over {
		told <- why
	}
	return told
}

func toldSoon(t *testing.T, who string, told <-chan error, want error) {
	t.Helper()
	select {
	case err := <-told:
		if !errors.Is(err, want) {
			t.Errorf("%s got %v", who, err)
		}
	case <-time.After(soon):
		t.Fatalf("%s was not notified for %v", who, soon)
	}
}

// A lock of which Err has said that it is lost stays lost, when the wall clock was set ahead and is
// set back, and when a refresh is confirmed after that.
func TestALostLockStaysLost(t *testing.T) {
	for name, refreshing := range map[string]bool{"held": false, "a refresh is under way": true} {
		t.Run(name, func(t *testing.T) {
			defer clocks.Reset()
			w := newWorld(t)
			w.refresh = nil
			h := w.heldFor(t, "k", time.Minute)
			ended, answered := h.told(), make(chan error, 1)
			if refreshing {
				h.Refresh(time.Second, func(err error) { answered <- err })
			}
			until := h.Until()
			clocks.Sleep(time.Hour)
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("after an hour: %v", err)
			}
			if moved := h.Until(); moved.Round(0).After(until.Round(0)) || moved.After(until) {
				t.Errorf("Until moved from %v to %v", until, moved)
			}
			clocks.Reset()
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("after the wall clock was set back: %v", err)
			}
			if refreshing {
				w.renewal(1).confirm()
				toldSoon(t, "the holder that refreshed", answered, errEnded)
			}
			toldSoon(t, "the holder", ended, errExpired)
			if err := h.Err(); !errors.Is(err, errExpired) {
				t.Errorf("in the end: %v", err)
			}
			w.emptySoon()
		})
	}
}
