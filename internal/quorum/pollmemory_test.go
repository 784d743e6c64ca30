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
		var polled []weak.Pointer[Lease]
		for range maxPolls {
			c.pollFor(span, "w-1", offer)
			c.mu.Lock()
			polled = append(polled, weak.Make(c.calls[len(c.calls)-1].l))
			c.calls = c.calls[:1] // the offer's; the test itself has kept the attempt's
			clear(c.calls[1:cap(c.calls)])
			c.mu.Unlock()
		}
		runtime.GC()
		for i, p := range polled[:len(polled)-1] {
			if p.Value() != nil {
				t.Errorf("the attempt of poll %d is still there", i)
			}
		}
		runtime.KeepAlive(offer)
		offer.l.Withdraw()
		h.release(held)
		time.Sleep(ms(50)) // until all is answered, in the bubble's time
	})
}
