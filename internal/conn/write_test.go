package conn

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// A process that is stopped between setting the deadline of a write and the write has written nothing when it
// continues: it writes then. A server that takes nothing gets no more time for that, and no more than once.
func TestAWriteOfAStoppedProcessIsWritten(t *testing.T) {
	const timeout = 50 * time.Millisecond
	for _, x := range []struct {
		what    string
		stopped time.Duration // until so long after the deadline
		reads   bool
		takes   time.Duration
	}{
		{"stopped", 40 * time.Millisecond, true, 0},
		{"stopped, and the server takes nothing", 40 * time.Millisecond, false, timeout},
		{"not stopped", 0, false, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			w, _ := newConn(ours, timeout)
			wrote := 0
			w.OnWrite = func() { wrote++ }
			if err := w.SetWriteDeadline(time.Now().Add(-x.stopped)); err != nil {
				t.Fatal(err)
			}
			if x.reads {
				go func() { _, _ = theirs.Read(make([]byte, 1)) }()
			}
			start := time.Now()
			n, err := w.Write([]byte("x"))
			if took := time.Since(start); n == 1 != x.reads || TimedOut(err) == x.reads || took != x.takes || wrote != 1 {
				t.Errorf("%s: %d bytes after %v, %v, reported %d times", x.what, n, took, err, wrote)
			}
			ours.Close()
			theirs.Close()
		})
	}
}
