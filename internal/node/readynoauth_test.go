package node

import (
	"testing"
	"testing/synctest"

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
