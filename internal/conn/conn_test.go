package conn

import (
	"net"
	"testing"
	"time"
)

// A process that was stopped for an hour does not wait for another hour for an answer that will not
// come: the extension of deadlines is bounded, also in one step.
func TestAfterALongPauseDeadlinesArePutOffForAShortTime(t *testing.T) {
	const timeout, most = 50 * time.Millisecond, MaxGrace * 50 * time.Millisecond
	put := time.Duration(0)
	for late := time.Hour; ; {
		more, ok := Grace(late, put, timeout)
		if !ok {
			break
		}
		if put += more; put > most {
			t.Fatalf("put off by %v in all, after a pause of %v", put, late)
		}
	}
	if put < MinGrace {
		t.Errorf("put off by %v", put)
	}

	ours, theirs := net.Pipe()
	defer theirs.Close()
	defer ours.Close()
	w, _ := newConn(ours, timeout)
	w.until = time.Now().Add(-time.Hour)
	if !w.extend() {
		t.Fatal("not put off")
	}
	if left := time.Until(w.until); left > most {
		t.Errorf("a read has %v left", left)
	}
}
