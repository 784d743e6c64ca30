package quorum

import (
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/lua"
)

// All nodes that lose all their data, together or one after the other, are no new deployment to a client that knew
// them, and it says so to one that did not.
func TestNodesThatAllForgetAreKnown(t *testing.T) {
	t.Parallel()
	const ttl, patience = time.Minute, 20 * time.Second
	flush := func(t *testing.T, s *redistest.Server) { s.Do(t, "FLUSHALL") }
	for _, way := range []struct {
		name   string
		first  int // so many lose their data before the others do
		forget func(*testing.T, *redistest.Server)
	}{{"together", 3, flush}, {"one by one", 2, flush}, {"with old data first", 2, restartWithOldData}} {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			servers, conns := threeServers(t)
			c := newPatientClient(t, "c", conns, patience)
			c.guard(10 * time.Minute)
			c.tryAndRelease(key, ttl)
			for _, s := range servers[:way.first] {
				way.forget(t, s)
			}
			redistest.Eventually(t, patience, "the losses are noticed", func() bool {
				if c.tryAndRelease(key, ttl); way.first == 3 && !c.q.Quarantined(2) {
					return false
				}
				return c.q.Quarantined(0) && c.q.Quarantined(1)
			})
			for _, s := range servers[way.first:] {
				s.Do(t, "FLUSHALL")
			}
			late := newPatientClient(t, "late", conns, patience)
			late.guard(10 * time.Minute)
			for range 2 {
				for _, c := range []*client{late, c} {
					if _, _, f := c.try(key, ttl, 1); f == nil {
						t.Error("it is taken for a new deployment")
					}
				}
			}
		})
	}
}

// A client that holds locks, and only refreshes them, notices that all nodes lost their data, and says so.
func TestARefreshNoticesThatAllNodesForgot(t *testing.T) {
	t.Parallel()
	const ttl, patience = time.Minute, 20 * time.Second
	servers, conns := threeServers(t)
	c := newPatientClient(t, "c", conns, patience)
	c.guard(10 * time.Minute)
	a, _ := c.must("a", ttl, 1)
	b, _ := c.must("b", ttl, 1)
	for _, s := range servers {
		s.Do(t, "FLUSHALL")
	}
	if _, f := c.refresh(a, ttl, 1); f == nil || f.Reason != NotHeld {
		t.Fatalf("a refresh of what is gone: %v", describe(f))
	}
	redistest.Eventually(t, patience, "all nodes are in quarantine", func() bool {
		return c.q.Quarantined(0) && c.q.Quarantined(1) && c.q.Quarantined(2)
	})
	late := newPatientClient(t, "late", conns, patience)
	late.guard(10 * time.Minute)
	if _, _, f := late.try("b", ttl, 1); f == nil {
		t.Errorf("another client has b, which is valid until %v", b.until)
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
