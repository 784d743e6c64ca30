package quorum

import (
	"runtime"
	"testing"
	"time"
	"weak"
)

// While too few nodes have a vote, polls are not sent, for minutes maybe, and the subscriptions continue: an offer does
// not keep those attempts either.
func TestAnOfferKeepsNoAttemptThatWasNotSent(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		c.guard(time.Minute)
		c.tryAndRelease(key, ttl)
		offer := c.offerFor(ttl, "w-1", 4)
		for _, m := range r.mem[1:] {
			m.Mini.FlushAll()
		}
		for range 2 {
			c.tryAndRelease(key, ttl)
		}
		time.Sleep(5 * time.Second) // the bubble's time
		if c.q.withoutVotes() == nil {
			t.Fatal("attempts are sent")
		}
		var polled []weak.Pointer[Lease]
		for range maxPolls {
			c.pollFor(span, "w-1", offer)
			c.mu.Lock()
			last := len(c.calls) - 1
			polled = append(polled, weak.Make(c.calls[last].l))
			c.calls[last] = nil // the test itself has kept it
			c.calls = c.calls[:last]
			c.mu.Unlock()
		}
		runtime.GC()
		for i, p := range polled {
			if p.Value() != nil {
				t.Errorf("the attempt of poll %d is still there", i)
			}
		}
		offer.l.Withdraw()
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}
