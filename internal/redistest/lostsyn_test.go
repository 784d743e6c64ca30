package redistest

import (
	"errors"
	"net"
	"testing"
	"time"
)

// A connect is neither accepted nor refused.
func TestALostSYNIsNotAnswered(t *testing.T) {
	s := StartLostSYN(t)
	for range 3 {
		c, err := net.DialTimeout("tcp", s.Addr(), 100*time.Millisecond)
		if err == nil {
			c.Close()
		}
		var timeout net.Error
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("got %v", err)
		}
	}
}
