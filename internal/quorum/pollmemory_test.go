package quorum

import (
	"runtime"
	"testing"
	"time"
	"weak"
)

// A contender polls several times in a second, and tens of thousands of keys may be waited for: an offer remembers
// when its polls were sent, and not the attempts that they were.
func TestAnOfferKeepsNoAttemptButTheLast(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		h, held, c, offer := r.offers(4)
		c.pollsAreForgotten(offer, maxPolls-1)
		offer.l.Withdraw()
		h.release(held)
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}

// While too few nodes have a vote, polls are not sent, for minutes maybe, and the subscriptions continue: an offer does
// not keep those attempts either.
func TestAnOfferKeepsNoAttemptThatWasNotSent(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		c := r.client("c")
		c.guard(time.Minute)
		c.tryAndRelease(key, ttl)
		offer := c.offerFor(ttl, "w-1", 4)
		r.mostForget(c)
		if c.q.withoutVotes() == nil {
			t.Fatal("attempts are sent")
		}
		c.pollsAreForgotten(offer, maxPolls)
		offer.l.Withdraw()
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}

// pollsAreForgotten polls for the offer maxPolls times, and checks that nobody keeps the first attempts.
func (c *client) pollsAreForgotten(offer *call, first int) {
	c.t.Helper()
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
	for i, p := range polled[:first] {
		if p.Value() != nil {
			c.t.Errorf("the attempt of poll %d is still there", i)
		}
	}
	runtime.KeepAlive(offer)
}
