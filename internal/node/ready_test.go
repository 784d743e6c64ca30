package node

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A server that refuses a command because nobody is logged in will refuse all else: a client without the
// password that it needs is not ready.
func TestNobodyIsReadyWhoIsNotLoggedIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.RequireAuth("secret")
		n := newNode(t, m.Client(t))
		if err := n.Ready(t.Context()); !conn.NotLoggedIn(err) {
			t.Errorf("ready: %v", err)
		}
		if !n.Suspended() {
			t.Error("the node is not suspended")
		}
	})
}

// Ready, and the requests that arrive meanwhile, wait for a server without an answer no longer than any other
// request.
func TestReadyOfASilentServerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 50 * time.Millisecond
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		gate := make(chan struct{})
		m.Mini.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			if cmd == "SCRIPT" || cmd == "EVALSHA" {
				<-gate
			}
			return false
		})
		n := startNode(t, m.Client(t), timeout)
		defer close(gate)
		start := time.Now()
		if err := n.Ready(t.Context()); err == nil || time.Since(start) > conn.TransportTimeout-timeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}
