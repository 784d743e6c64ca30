package node

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/redistest"
)

// A server that refuses PING because nobody is logged in will refuse all else: a client without the password that it
// needs is not ready.
func TestNobodyIsReadyWhoIsNotLoggedIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.Mini.RequireAuth("secret")
		n := newNode(t, m.Client(t))
		if err := n.Ready(t.Context()); !conn.NotLoggedIn(err) {
			t.Errorf("ready: %v", err)
		}
		if !n.Suspended() {
			t.Error("the node is not suspended")
		}
	})
}

// Requests that arrive while Ready waits for an answer wait no longer than behind any other
// request.
func TestWhoComesBehindReadyWaitsNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 50 * time.Millisecond
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		gate := make(chan struct{})
		m.Mini.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool {
			if cmd == "PING" {
				<-gate
			}
			return false
		})
		n := startNode(t, m.Client(t), timeout, false)
		defer close(gate)
		start := time.Now()
		if err := n.Ready(t.Context()); err == nil || time.Since(start) > conn.TransportTimeout-timeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}
