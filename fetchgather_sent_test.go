package flightlock_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A lookup that is made for several callers is for those that came before it was sent: a later one may know of a
// change.
func TestALookupThatWasSentIsNotForLaterCallers(t *testing.T) {
	var lookups atomic.Int64
	manyTest(t, 1, patientLookups, slowLookups(&lookups),
		func(t *testing.T, s *manyOrigin, fs []*flightlock.Fetcher[string], _ *redistest.MemNode) {
			keys := keysFrom(0, 2)
			wantMany(t, fs[0], keys, "v0")
			var wg sync.WaitGroup
			for _, pause := range []time.Duration{500, 250, 500} {
				wg.Go(func() { wantMany(t, fs[0], keys, "v0") })
				time.Sleep(pause * time.Millisecond)
			}
			// After a second the first one's lookup was over, and the third one's was sent: it has found the old values.
			s.change("k0")
			s.change("k1")
			wantMany(t, fs[0], keys, "v2")
			wg.Wait()
		})
}
