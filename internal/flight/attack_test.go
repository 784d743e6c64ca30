package flight

import (
	"testing"
	"time"
)

// A renewal that the flight makes while a Ticket is held, for waiters, does not move its Until
// beyond its own ttl: the lease is longer, and a holder that hangs loses it all the same.
func TestARenewalForWaitersKeepsNoHolder(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		first, hung, next := w.rich().start(), w.start(ttl(time.Second)), w.start()
		n := w.renewals()
		time.Sleep(2 * time.Second)
		first.releases()
		is(t, "refreshes", w.renewals(), n+1)
		until := time.Now().Add(validity(time.Second))
		is(t, "until", hung.holds().Until(), until)
		time.Sleep(validity(time.Second) + time.Millisecond)
		next.holds()
		if hung.h.Err() == nil {
			t.Error("the one that hangs holds still")
		}
		next.releases()
	})
}
