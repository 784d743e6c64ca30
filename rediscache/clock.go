package rediscache

import (
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// serverClock is what is known of the clock of one server: of each master, on a Cluster. The zero value knows nothing.
type serverClock struct {
	compared atomic.Pointer[comparison] // the last one; nil: there was none
	ahead    atomic.Int64               // before that: by how many microseconds it is ahead of ours at least
}

// comparison is what a reply has said of the server's clock.
type comparison struct {
	at     time.Time // by our clocks
	server int64     // in microseconds
}

// compare learns the server's time from a reply that says it.
func (s *serverClock) compare(sent time.Time, serverTime int64) {
	now := clock.Now()
	s.compared.Store(&comparison{now.Add(-now.Sub(sent) / 2), serverTime})
}

// now is the server's time, in microseconds, when it has sent an entry with that stamp. What has passed since the last
// comparison is counted by both of our clocks, and the one that says more counts: the monotonic one stands still while
// the machine sleeps, and the wall clock may be set back. A process that only has hits learns no more of the server's
// clock than when the stamp was made: if that is later than now, ours is behind. It would take old entries for fresh
// ones for as long otherwise.
func (s *serverClock) now(stamp string) int64 {
	if c := s.compared.Load(); c != nil {
		return c.server - clock.Left(clock.Now(), c.at).Microseconds()
	}
	ours := time.Now().UnixMicro()
	now := ours + s.ahead.Load()
	made, ok := madeAt(stamp)
	if !ok || made <= now {
		return now
	}
	for ahead := made - ours; ; {
		if old := s.ahead.Load(); old >= ahead || s.ahead.CompareAndSwap(old, ahead) {
			return made
		}
	}
}
