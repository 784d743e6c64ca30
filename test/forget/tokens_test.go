package forget

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// rising has a client lock k many times, and fails if a token is not larger than all earlier ones,
// of any client.
func rising(t *testing.T) func(c *flightlock.Client, when string) {
	last := int64(0)
	return func(c *flightlock.Client, when string) {
		t.Helper()
		for range 20 {
			l := lockkit.EventuallyHeld(t, c, "k")
			if l.Fence() <= last {
				t.Fatalf("%s: token %d after %d", when, l.Fence(), last)
			}
			last = l.Fence()
			_ = l.Release(t.Context())
		}
	}
}

// With one or two nodes a node that lost data grants again what it had granted: nobody could vote
// instead. But the token distinguishes the two grants: it is larger than all before, for old
// clients and for new ones, with a lock for each or one that is handed over.
func TestTokensRiseAfterNodesForgot(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 2} {
		for _, a := range amnesias {
			if nodes == 2 && a.name != "stale append-only file" && a.name != "lagging replica" {
				continue
			}
			t.Run(fmt.Sprintf("nodes=%d/%s", nodes, a.name), func(t *testing.T) {
				tr := &lockkit.Trio{T: t}
				for range nodes {
					tr.Servers = append(tr.Servers, redistest.StartServer(t, append(a.args, lockkit.AtOnce...)...))
				}
				tr.Proxy = redistest.StartProxy(t, tr.Servers[0].Addr())
				one, other := tr.Client(flightlock.Options{}), tr.Client(flightlock.Options{})
				rise := rising(t)
				rise(one, "at first")
				rise(other, "at first")
				for range tries(t) {
					forget := a.prepare(tr)
					rise(one, "before it forgets")
					forget()
					tr.Proxy.ResetAll()
					rise(other, "by one who was there")
					rise(tr.Client(flightlock.Options{}), "by one who comes")
					rise(one, "by another who was there")
					if a.name == "lagging replica" {
						break // it is another server now
					}
				}
			})
		}
	}
}

// A single node that refuses to report whether it lost data grants nothing, and the error says why.
func TestOneNodeThatRefusesBoot(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "ACL", "SETUSER", "default", "resetkeys", "~lock:*", "~flightlock:{???}:*")
	c := lockkit.New(t, lockkit.Patient, s.Client(t))
	_, err := c.TryLock(t.Context(), "k", time.Minute)
	text := fmt.Sprint(err)
	if !strings.Contains(text, "did not report whether it lost data") || !strings.Contains(text, "NOPERM") {
		t.Error(text)
	}
	lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "quarantine", flightlock.StatusFail, "NOPERM")
	s.Do(t, "ACL", "SETUSER", "default", "allkeys")
	lockkit.EventuallyLock(t, c, "k")
	lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "quarantine", flightlock.StatusOK, "off")
	s.Do(t, "ACL", "SETUSER", "default", "-info")
	lockkit.WantFinding(t, lockkit.Check(t, c), s.Addr(), "quarantine", flightlock.StatusWarn, "INFO is refused",
		"tokens")
	off := lockkit.New(t, flightlock.Options{NodeTimeout: lockkit.Patience, DisableQuarantine: true},
		s.Client(t))
	s.Do(t, "ACL", "SETUSER", "default", "resetkeys", "~lock:*", "~flightlock:{???}:*")
	lockkit.EventuallyLock(t, off, "k2")
}
