package quorum

import (
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// Between two votes the machine sleeps, or the wall clock is set forward. The lease has the least validity of its
// votes by either clock: also if that of a later poll, with a shorter span, ends first by the monotonic one.
func TestAGrantIsValidForTheLeastOfItsVotesByEitherClock(t *testing.T) {
	for slept, want := range map[time.Duration]time.Duration{40 * time.Second: 0, 15 * time.Second: 5 * time.Second} {
		t.Run(slept.String(), func(t *testing.T) {
			r := slowRig(t, 3)
			c := newPatientClient(t, "x", r.conns(), time.Minute)
			defer clocks.Reset()
			offer := c.offerFor(time.Hour, "w-1", 1)
			c.q.rtt.Store(int64(time.Hour)) // nobody is asked
			polled := func(span time.Duration) {
				offer.l.mu.Lock()
				defer offer.l.mu.Unlock()
				offer.l.pollLocked(poll{begun: clock.Now(), span: span})
			}
			polled(20 * time.Second)
			c.voteFor(20*time.Second, 0, offer, 1, 1<<40)
			clocks.Sleep(slept)
			polled(10 * time.Second)
			c.voteFor(10*time.Second, 1, offer, 2, 1<<40)
			switch g, f := offer.wait(); {
			case f == nil && clock.Left(clock.Now(), g.Until) > want:
				t.Errorf("valid for %v, but a vote is for %v at most", clock.Left(clock.Now(), g.Until), want)
			case f == nil:
				c.release(offer.l)
			case want > 0:
				t.Error(describe(f))
			}
		})
	}
}
