package rediscache

import (
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// serverClock is what is known of the clock of one server. The zero value knows nothing.
type serverClock struct{ last atomic.Pointer[comparison] }

// comparison is what was learned of the server's clock.
type comparison struct {
	at     time.Time // by our clocks
	server int64     // in microseconds
	least  bool      // it is that or later: the time of a stamp, before any reply said the time
}

// compare learns the server's time from a reply that says it.
func (s *serverClock) compare(sent time.Time, serverTime int64) {
	now := clock.Now()
	s.last.Store(&comparison{at: now.Add(-now.Sub(sent) / 2), server: serverTime})
}

// now is the server's time, in microseconds, when it has sent an entry with that stamp. What has passed since
// the last comparison is counted by both of our clocks, and the one that says more counts: the monotonic one
// stands still while the machine sleeps, and the wall clock may be set back. A process that only has hits
// learns no more of the server's clock than when the stamp was made: if that is later than now, ours is
// behind. It would take old entries for fresh ones for as long otherwise.
func (s *serverClock) now(stamp string) int64 {
	ours, last := clock.Now(), s.last.Load()
	now := ours.UnixMicro()
	if last != nil {
		now = last.server - clock.Left(ours, last.at).Microseconds()
	}
	if made, ok := madeAt(stamp); ok && made > now && (last == nil || last.least) {
		s.last.CompareAndSwap(last, &comparison{ours, made, true})
		return made
	}
	return now
}
