package quorum

import (
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

// All nodes that lose all their data in quick succession are a new deployment, which works at once: also if no attempt
// is sent any more when the last one does, since the others are known to have no vote.
func TestNodesThatForgetAreNoticedThoughNothingIsSent(t *testing.T) {
	t.Parallel()
	const ttl, patience = time.Minute, 20 * time.Second
	for name, flushed := range map[string]bool{"flushed one by one": true, "with old data first": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers, conns := threeServers(t)
			c := newPatientClient(t, "c", conns, patience)
			c.guard(10 * time.Minute)
			c.tryAndRelease(key, ttl)
			for _, s := range servers[1:] {
				if flushed {
					s.Do(t, "FLUSHALL")
				} else {
					restartWithOldData(t, s)
				}
			}
			redistest.Eventually(t, patience, "two losses are noticed", func() bool {
				c.tryAndRelease(key, ttl)
				return c.q.Quarantined(1) && c.q.Quarantined(2)
			})
			for i, s := range servers {
				if i == 0 || !flushed {
					s.Do(t, "FLUSHALL")
				}
			}
			redistest.Eventually(t, patience, "the new deployment works", func() bool {
				l, _, f := c.try(key, ttl, 1)
				if f == nil {
					c.release(l)
				}
				return f == nil
			})
		})
	}
}

// restartWithOldData makes s look like a process that has read the marker from a file.
func restartWithOldData(t *testing.T, s *redistest.Server) {
	t.Helper()
	past := strings.Fields(s.Do(t, "GET", lua.Past).(string))
	past[3] = strings.Repeat("0", 40) // the run_id
	s.Do(t, "SET", lua.Past, strings.Join(past, " "))
	s.Do(t, "SCRIPT", "FLUSH")
}
