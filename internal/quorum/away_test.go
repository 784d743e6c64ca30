package quorum

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/flightlock/flightlock/internal/node"
)

// A majority is away only by what an immediate retry cannot change: an answer that did not come is not
// enough, however many did not.
func TestAMajorityThatIsAway(t *testing.T) {
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for _, c := range []struct {
		name string
		err  error
		away bool
	}{
		{"refused", refused, true},
		{"late", errors.New("no answer"), false},
		{"stalled", node.ErrStalled, false},
		{"cut", &net.OpError{Op: "read", Err: syscall.ECONNRESET}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := node.Away(c.err); got != c.away {
				t.Errorf("Away(%v) is %v", c.err, got)
			}
		})
	}
}
