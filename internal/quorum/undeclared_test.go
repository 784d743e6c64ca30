package quorum

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/lua"
)

// While a node says that scripts may access only the keys that they declare, every vote counts, also that of a node
// that has lost its data. It is asked again, and then nodes that lost data have no vote: the one and the others. No
// other answer turns the quarantine off.
func TestTheQuarantineIsOffWhileANodeRefusesUndeclaredKeys(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, r *rig) {
		var says atomic.Pointer[string]
		answer := func(text string) { says.Store(&text) }
		answer("NOPERM this user has no permissions to access one of the keys used as arguments")
		r.mem[0].Mini.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
			if text := *says.Load(); text != "" && strings.EqualFold(cmd, "EVALSHA") && args[0] == lua.Undeclared.SHA {
				c.WriteBulk(text)
				return true
			}
			return false
		})
		c := r.client("x")
		c.guard(time.Minute)
		var reports []bool
		c.q.OnUndeclared = func(i int, why error) { reports = append(reports, i == 0 && why != nil) }
		wantVotes := func(when string, counts bool) {
			t.Helper()
			for i := 1; i < 3; i++ { // it takes one of them
				r.mem[i].Mini.FlushAll()
			}
			l, _, f := c.try(key, ttl, 1)
			if counts != (f == nil) {
				t.Fatalf("%s: %s", when, describe(f))
			}
			if f == nil {
				c.release(l)
			}
		}
		warm := func() {
			l, _ := c.must(key, time.Minute, 1)
			c.release(l)
		}
		warm()
		wantVotes("refused for another reason", false)

		answer("ERR script tried accessing undeclared key, key: flightlock:{boot}")
		time.Sleep(2 * time.Minute) // all votes count again, whatever was found
		r.mem[0].Mini.FlushAll()    // so that it is asked
		c.tryAndRelease(key, time.Minute)
		r.settle()
		wantVotes("refused", true)
		if c.q.Nodes[0].Undeclared() == nil || c.q.Quarantined(1) || c.q.Quarantined(2) {
			t.Errorf("%v, %v, %v", c.q.Nodes[0].Undeclared(), c.q.Quarantined(1), c.q.Quarantined(2))
		}
		answer("")
		time.Sleep(recheckUndeclared + time.Second)
		r.settle()
		if err := c.q.Nodes[0].Undeclared(); err != nil {
			t.Errorf("asked again: %v", err)
		}
		time.Sleep(2 * time.Minute)
		warm()
		wantVotes("not refused any more", false)
		if len(reports) != 2 || !reports[0] || reports[1] {
			t.Errorf("reports: %v", reports)
		}
		var q *Quarantined
		if err := c.q.quarantinedUntil(1); !errors.As(err, &q) {
			t.Errorf("node 1: %v", err)
		}
	})
}
