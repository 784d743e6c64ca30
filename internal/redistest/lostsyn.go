package redistest

import (
	"errors"
	"net"
	"testing"
	"time"
)

// A LostSYN is an address that answers no connect, as a host behind a firewall that drops packets
// or one that is switched off: a listening socket whose queue of connections to accept is full. The
// kernel drops the SYN of every further one, and its client sends that again after a second, after
// three, and so on.
type LostSYN struct {
	listener net.Listener
	full     []net.Conn // what fills the queue
}

// StartLostSYN makes such an address, until the test's cleanup. It skips the test where a full
// queue does not drop SYNs, which is Linux' way.
func StartLostSYN(tb testing.TB) *LostSYN {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s := &LostSYN{listener: l}
	tb.Cleanup(s.close)
	if err := shortenQueue(l.(*net.TCPListener)); err != nil {
		tb.Skipf("no queue that drops SYNs: %v", err)
	}
	for range 8 { // one is enough on Linux
		c, err := net.DialTimeout("tcp", s.Addr(), 200*time.Millisecond)
		if err == nil {
			s.full = append(s.full, c)
			continue
		}
		if late := net.Error(nil); !errors.As(err, &late) || !late.Timeout() {
			tb.Skipf("a full queue refuses connects instead of dropping them: %v", err)
		}
		return s
	}
	tb.Skip("the queue does not become full")
	return nil
}

// Addr is the "127.0.0.1:port" to connect to.
func (s *LostSYN) Addr() string { return s.listener.Addr().String() }

// close refuses connects from then on.
func (s *LostSYN) close() {
	for _, c := range s.full {
		_ = c.Close()
	}
	_ = s.listener.Close()
}
