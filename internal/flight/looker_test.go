package flight

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// looker is a caller of AcquireUnless.
type looker struct {
	caller
	looks   atomic.Int32 // how often it has looked
	stopped bool
	found   atomic.Bool // whether it finds then that it needs the key no more
}

func (w *world) looks(change ...func(*wish)) *looker {
	wish := wish{key: "k", ttl: 10 * time.Second, pace: patient}
	for _, c := range change {
		c(&wish)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	l := &looker{caller: caller{w: w, cancel: cancel, began: time.Now(), done: make(chan struct{})}}
	go func() {
		defer close(l.done)
		defer cancel()
		l.stopped, l.err = w.g.AcquireUnless(ctx, wish.key, &l.h, wish.ttl, wish.pace, func(context.Context) bool {
			l.looks.Add(1)
			return l.found.Load()
		})
		l.took = time.Since(l.began)
	}()
	synctest.Wait()
	return l
}

// looked checks how often it has looked since the last time.
func (l *looker) looked(want int32) {
	l.w.t.Helper()
	synctest.Wait()
	is(l.w.t, "looks", l.looks.Swap(0), want)
}

// heldElsewhere has the attempt that is under way fail because somebody has the key.
func (w *world) heldElsewhere() {
	w.t.Helper()
	w.attempt().fail(quorum.Failure{Err: errTaken, Free: time.Hour, Reason: quorum.Taken, Owned: true})
	synctest.Wait()
}

// fails is the news that the work of the one that had the key has failed.
func (w *world) fails() {
	w.t.Helper()
	w.mu.Lock()
	fw := w.watches[len(w.watches)-1]
	w.mu.Unlock()
	fw.hear(quorum.Failed)
	synctest.Wait()
}

// Every caller that may find the work done looks it up when somebody releases the key, wherever it
// is in the queue: it need not be granted the key for that.
func TestAllLookWhenTheKeyIsLetGo(t *testing.T) {
	for _, n := range []quorum.Event{quorum.OurTurn, quorum.OtherTurn} {
		inBubble(t, func(t *testing.T, w *world) {
			w.byHand()
			front := w.start()
			a, b, c := w.looks(), w.looks(), w.looks()
			w.heldElsewhere()
			a.looked(0)
			b.found.Store(true)
			w.news(n)
			a.looked(1)
			c.looked(1)
			if synctest.Wait(); !b.returned() || !b.stopped {
				t.Error("it has found the work done, and waits")
			}
			front.waits()
			for _, l := range []*caller{&a.caller, &c.caller, front} {
				l.leaves()
			}
			if n == quorum.OurTurn {
				w.attempt().held(0) // cancelled
			}
		})
	}
}

// ... also while an attempt is under way,
func TestAllLookDuringAnAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		a := w.looks()
		w.heldElsewhere()
		w.news(quorum.OurTurn)
		a.looked(1)
		w.news(quorum.OtherTurn)
		a.looked(1)
		w.news(quorum.OurTurn)
		a.looked(1)
		a.leaves()
		front.leaves()
	})
}

// ... and at each poll of one that is not subscribed,
func TestAllLookWithEachPoll(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.down(0)
		front := w.start(pace(never(10 * ms)))
		a, b := w.looks(), w.looks()
		time.Sleep(35 * ms)
		a.looked(3)
		b.looked(3)
		for _, l := range []*caller{&a.caller, &b.caller, front} {
			l.leaves()
		}
	})
}

// ... and at each poll of a subscribed flight: a client that does not notify may have done the work.
func TestAllLookWithEachPollOfASubscribedFlight(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		a, b := w.looks(), w.looks()
		w.heldElsewhere()
		w.news(quorum.Subscribed)
		w.heldElsewhere()
		for range 3 {
			a.looked(1)
			b.looked(1)
			time.Sleep(safetyPoll)
			synctest.Wait()
			w.heldElsewhere()
		}
		for _, l := range []*caller{&a.caller, &b.caller, front} {
			l.leaves()
		}
	})
}

// ... and when one of their own process has done it.
func TestAllLookWhenTheWorkWasDoneHere(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first := w.rich().looks()
		next := w.start()
		a, b := w.looks(), w.looks()
		b.found.Store(true)
		first.releases()
		a.looked(1)
		if synctest.Wait(); !b.returned() || !b.stopped {
			t.Error("it has found the work done, and waits")
		}
		next.releases() // it does no such work
		a.holds().Release()
		a.looked(0)
	})
}

// A failure elsewhere ends the wait of all callers that wait for that work, and of nobody else.
func TestFailureElsewhereEndsAllWhoLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		a := w.looks()
		patient := w.start()
		b := w.looks()
		w.heldElsewhere()
		time.Sleep(ms)
		w.fails()
		a.failed(ms, errElsewhere)
		b.failed(ms, errElsewhere)
		a.looked(0)
		patient.waits()
		w.history()
		w.news(quorum.OurTurn)
		w.wantHistory("acquire as owner-1")
		w.attempt().grant()
		patient.releases()
	})
}

// ... also when an attempt is in progress, which nobody wants any more then.
func TestFailureElsewhereDuringAnAttempt(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		a := w.looks()
		w.heldElsewhere()
		w.news(quorum.Subscribed)
		front.leaves()
		a.waits()
		w.fails()
		a.failed(0, errElsewhere)
		is(t, "cancelled", w.attempt().cancelled, true)
	})
}

// A holder of the key is not notified of failures.
func TestFailureWhileTheKeyIsHeldHere(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.start()
		w.heldElsewhere()
		w.news(quorum.OurTurn)
		w.attempt().grantBlock(10)
		front.holds()
		a := w.looks()
		w.fails()
		a.waits()
		front.releases()
		a.holds().Release()
	})
}

// A Ticket whose work has failed says so to the nodes, unless the lease is handed to a waiter of
// its process.
func TestReleaseFailedSaysSo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, next := w.rich().start(), w.start()
		w.history()
		if err := first.h.ReleaseFailed(); err != nil {
			t.Fatal(err)
		}
		next.holds()
		w.wantHistory()
		next.releases()
		w.wantHistory("release")
		last := w.start()
		if err := last.h.ReleaseFailed(); err != nil {
			t.Fatal(err)
		}
		w.wantHistory("acquire", "failed", "release")
	})
}

// When callers of AcquireUnless have held the lease, its release notifies the others of that, whoever
// has it last; a failure goes before.
func TestTheLastReleaseNotifiesOfWorkThatWasDone(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.rich()
		worker, next := w.looks(), w.start()
		w.history()
		worker.releases()
		next.holds()
		w.wantHistory()
		next.releases()
		w.wantHistory("notify of work", "release")
		next = w.start()
		next.releases() // another lease
		w.wantHistory("acquire", "release")
		worker, next = w.looks(), w.start()
		worker.releases()
		next.holds()
		if err := next.h.ReleaseFailed(); err != nil {
			t.Fatal(err)
		}
		w.wantHistory("acquire", "failed", "release")
		worker, next = w.looks(), w.start()
		if err := worker.h.ReleaseFailed(); err != nil { // it has done no work
			t.Fatal(err)
		}
		next.holds()
		next.releases()
		w.wantHistory("acquire", "release")
	})
}

// While the front waiter looks, the next one makes the attempt, with the front waiter's ttl: so the
// lease needs no renewal before it is given.
func TestTheAttemptIsForTheFrontWaiter(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front := w.looks(ttl(10 * time.Second))
		w.heldElsewhere()
		next := w.start(ttl(time.Second))
		w.news(quorum.OurTurn)
		is(t, "ttl", w.attempt().ttl, 10*time.Second)
		w.attempt().grantBlock(10)
		front.holds()
		is(t, "renewals", w.renewals(), 0)
		front.releases()
		next.holds().Release()
	})
}

// Look has all callers of AcquireUnless that wait for the key look, and no other caller. A key without a
// flight, or whose flight has ended, is no error.
func TestLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.g.Look("k")
		w.byHand()
		front := w.start()
		a, b := w.looks(), w.looks()
		w.heldElsewhere()
		a.looked(0)
		b.looked(0)
		w.g.Look("elsewhere")
		a.looked(0)
		w.g.Look("k")
		a.looked(1)
		b.looked(1)
		b.found.Store(true)
		w.g.Look("k")
		a.looked(1)
		if synctest.Wait(); !b.returned() || !b.stopped {
			t.Error("it needs the key no more, and waits")
		}
		front.waits()
		for _, l := range []*caller{&a.caller, front} {
			l.leaves()
		}
		w.g.Look("k")
	})
}

// A caller that is told to look again and again, because the lookups of others fail and its own do not, makes
// the attempts that are due all the same.
func TestLookLeavesTimeForAttempts(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		at := w.down(0)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			var h Ticket
			_, _ = w.g.AcquireUnless(ctx, "k", &h, 10*time.Second, never(10*ms), func(context.Context) bool {
				time.Sleep(10 * ms)
				return false
			})
		}()
		for range 200 {
			time.Sleep(5 * ms)
			w.g.Look("k")
		}
		synctest.Wait()
		if n := len(*at); n < 10 {
			t.Errorf("%d attempts in a second", n)
		}
		cancel()
		<-done
	})
}
