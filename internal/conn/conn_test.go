package conn

import (
	"net"
	"testing"
	"testing/synctest"
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

// An exact deadline is extended only for a process that was stopped until after it: once, so that an answer that
// has arrived meanwhile is read.
func TestAnExactDeadlineIsExtendedOnceForAStoppedProcess(t *testing.T) {
	const timeout = 50 * time.Millisecond
	for _, x := range []struct {
		what    string
		stopped time.Duration // until so long after the deadline
		answers bool
		takes   time.Duration
	}{
		{"stopped, and the answer is there", 40 * time.Millisecond, true, 0},
		{"stopped, and the server is silent", 40 * time.Millisecond, false, timeout},
		{"not stopped", 0, false, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			w, _ := newConn(ours, timeout)
			w.SetStrict(false)
			w.SetExact(true)
			if err := w.SetReadDeadline(time.Now().Add(-x.stopped)); err != nil {
				t.Fatal(err)
			}
			if x.answers {
				go func() { _, _ = theirs.Write([]byte("x")) }()
			}
			start := time.Now()
			n, err := w.Read(make([]byte, 1))
			if took := time.Since(start); n == 1 != x.answers || TimedOut(err) == x.answers || took != x.takes {
				t.Errorf("%s: %d bytes after %v, %v", x.what, n, took, err)
			}
			ours.Close()
			theirs.Close()
		})
	}
}

// ... and no more than once, if the process is stopped again and again.
func TestAnExactDeadlineIsExtendedNoMoreThanOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		w, _ := newConn(stoppedConn{ours}, 50*time.Millisecond)
		w.SetStrict(false)
		w.SetExact(true)
		start := time.Now()
		if err := w.SetReadDeadline(start.Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		_, err := w.Read(make([]byte, 1))
		if took := time.Since(start); !TimedOut(err) || took != 2*(50+40)*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
		ours.Close()
		theirs.Close()
	})
}
