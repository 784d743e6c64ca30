package flight

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
)

// hasty is patient, and gives up when too few nodes can be reached.
type hasty struct{}

func (hasty) Next(int) (time.Duration, bool) { return time.Hour, true }
func (hasty) Traits() Traits                 { return Endless | FailFast | Quick }

func (a *fakeAttempt) away() { a.fail(quorum.Failure{Err: errDown, Away: true}) }

// When too few nodes can be reached, all callers that fail fast get that error, wherever they are
// in the queue, and nobody else.
func TestAwayEndsAllWhoFailFast(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		front, a, looks, middle, b := w.start(), w.start(pace(hasty{})), w.looks(), w.start(), w.start(pace(hasty{}))
		time.Sleep(ms)
		w.attempt().away()
		for _, c := range []*caller{a, &looks.caller, b} {
			c.failed(ms, errDown)
		}
		front.waits()
		middle.waits()
		front.leaves()
		middle.leaves()
	})
}

// One attempt without an answer is not a reason to fail for anybody.
func TestOneAnswerMissingEndsNobodysWait(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		all := []*caller{w.start(pace(hasty{})), &w.looks().caller, w.start()}
		w.attempt().unavailable()
		for _, c := range all {
			c.waits()
		}
		for _, c := range all {
			c.leaves()
		}
	})
}

// A caller that joins while a flight waits for nodes that were down finds out at once whether they
// still are.
func TestWhoComesFindsOutWhetherTheyAreAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = (*fakeAttempt).away
		front := w.start()
		w.start(pace(hasty{})).failed(0, errDown)
		w.looks().failed(0, errDown)
		is(t, "attempts", w.asked(), 3)
		w.now((*fakeAttempt).grant)
		c := w.start(pace(hasty{}))
		front.holds()
		front.releases()
		c.holds().Release()
	})
}

// A caller that waits behind a holder of this process gets the error when its refresh finds the
// nodes down. It is that of an acquire, for the caller has refreshed nothing.
func TestARefreshThatFindsTheNodesAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		holder := w.rich().start()
		a, b, looks := w.start(), w.start(pace(hasty{})), w.looks()
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Op: "refresh", Err: errDown, Away: true}) }
		holder.h.Refresh(time.Second, func(error) {})
		b.failed(0, errDown)
		is(t, "the error", b.err.Error(), "acquire: "+errDown.Error())
		looks.failed(0, errDown)
		a.waits()
		holder.holds()
		holder.releases()
		a.holds().Release()
	})
}

// Recheck makes flights find out for callers that want to know, whatever they are doing.
func TestRecheck(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.byHand()
		patient := w.start()
		w.attempt().taken(time.Hour)
		w.g.Recheck() // nobody wants to know
		is(t, "attempts", w.asked(), 1)

		a := w.start(pace(hasty{})) // the flight pauses
		w.g.Recheck()
		synctest.Wait()
		is(t, "attempts", w.asked(), 2)
		w.g.Recheck() // while an attempt is under way that may have begun before
		w.attempt().unavailable()
		synctest.Wait()
		is(t, "attempts", w.asked(), 3)
		w.g.Recheck() // the attempt finds out itself: none follows
		w.attempt().away()
		a.failed(0, errDown)
		is(t, "attempts", w.asked(), 3)
		patient.waits()
		patient.leaves()

		holder := w.rich().start()
		b := w.start(pace(hasty{}))
		w.refresh = func(r *fakeRefresh) { r.fail(quorum.Failure{Err: errDown, Away: true}) }
		w.g.Recheck()
		b.failed(0, errDown)
		holder.releases()
	})
}

// While too few nodes have a vote, attempts become rarer, unless the strategy gives up some day; after a short outage
// the next one comes as soon as before.
func TestAttemptsWhileNodesAreAway(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.acquire = (*fakeAttempt).away
		c := w.start(pace(never(10 * ms)))
		time.Sleep(40 * ms) // the bubble's time, as all that follow
		if n := w.asked(); n < 4 {
			t.Errorf("%d attempts in the first 40 ms", n)
		}
		time.Sleep(time.Minute)
		if n := w.asked(); n > 200 {
			t.Errorf("%d attempts in a minute", n)
		}
		w.now((*fakeAttempt).grant)
		time.Sleep(maxAwayPause)
		c.holds()
		c.releases()

		w.now((*fakeAttempt).away)
		before := w.asked()
		c = w.start(pace(limited{10 * ms, 100}))
		time.Sleep(time.Second)
		c.failed(time.Second, errDown)
		is(t, "attempts of a strategy that ends", w.asked()-before, 101)
	})
}
