//go:build unix

package conn

import (
	"io"
	"testing"
	"time"
)

// What waits in the socket may be the end of the connection, or an error that says why, but not if it is a
// push.
func TestQuiet(t *testing.T) {
	for _, tc := range []struct {
		sent  string
		quiet bool
	}{{">3\r\n", true}, {"-ERR max number of clients reached\r\n", false}, {"+OK\r\n", false}, {"", false}} {
		ours, theirs := tcpPair(t)
		c := newConn(ours, time.Second)
		if !c.SeesQuiet() {
			t.Fatal("it shows nothing of what waits in the socket")
		}
		if !c.Quiet() {
			t.Error("nothing was sent, and something waits")
		}
		var err error
		if tc.sent != "" {
			_, err = io.WriteString(theirs, tc.sent)
		} else {
			err = theirs.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		for began := time.Now(); c.Quiet() != tc.quiet || tc.quiet && !c.Unread(); time.Sleep(time.Millisecond) {
			if time.Since(began) > 10*time.Second {
				t.Fatalf("%q: quiet %v, unread %v", tc.sent, c.Quiet(), c.Unread())
			}
		}
	}
}
