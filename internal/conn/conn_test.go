package conn

import (
	"crypto/tls"
	"io"
	"net"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
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
		w, _ := newConn(stoppedConn(ours), 50*time.Millisecond)
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
			took := time.Since(start)
			if n == 1 != x.reads || TimedOut(err) == x.reads || took != x.takes || wrote != 1 {
				t.Errorf("%s: %d bytes after %v, %v, reported %d times", x.what, n, took, err, wrote)
			}
			ours.Close()
			theirs.Close()
		})
	}
}

// Over TLS nothing can be written any more once a write has timed out.
func TestAWriteOverTLSOfAStoppedProcessIsWritten(t *testing.T) {
	h := httptest.NewTLSServer(nil) // for its certificate
	h.Close()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		defer theirs.Close()
		got := make(chan string, 1)
		go func() {
			b := make([]byte, 1)
			n, _ := io.ReadFull(tls.Server(theirs, &tls.Config{Certificates: h.TLS.Certificates}), b)
			got <- string(b[:n])
		}()
		own := tls.Client(ours, &tls.Config{InsecureSkipVerify: true}) // of a test
		if err := own.Handshake(); err != nil {
			t.Fatal(err)
		}
		w, _ := newConn(own, 50*time.Millisecond)
		if err := w.SetWriteDeadline(time.Now().Add(-40 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, err := w.Write([]byte("x")); n != 1 || err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
		if b := <-got; b != "x" {
			t.Errorf("the server has read %q", b)
		}
	})
}

// What was written in part is not written again: the server would read it twice.
func TestAWriteThatWasWrittenInPartIsNotWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		got := make(chan string, 1)
		go func() {
			b := make([]byte, 1)
			_, _ = io.ReadFull(theirs, b)
			time.Sleep(70 * time.Millisecond) // the bubble's time: the process is stopped then
			rest, _ := io.ReadAll(theirs)
			got <- string(b) + string(rest)
		}()
		w, _ := newConn(stoppedConn(ours), 50*time.Millisecond)
		if err := w.SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		n, err := w.Write([]byte("xy"))
		ours.Close()
		if b := <-got; n != 1 || !TimedOut(err) || b != "x" {
			t.Errorf("%d bytes, %v; the server has read %q", n, err, b)
		}
		theirs.Close()
	})
}

// A write that waits for the server while the process is stopped is tried again, too.
func TestAWriteThatWaitsInAStoppedProcessIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		w, _ := newConn(stoppedConn(ours), 50*time.Millisecond)
		if err := w.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(100*time.Millisecond, func() { _, _ = theirs.Read(make([]byte, 1)) }) // the bubble's time
		if n, err := w.Write([]byte("x")); n != 1 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		ours.Close()
		theirs.Close()
	})
}

// A write without a deadline has none, however long it takes.
func TestAWriteWithoutADeadlineHasNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		w, _ := newConn(ours, 50*time.Millisecond)
		if err := w.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := w.SetDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Hour, func() { _, _ = theirs.Read(make([]byte, 1)) }) // the bubble's time
		if n, err := w.Write([]byte("x")); n != 1 || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		ours.Close()
		theirs.Close()
	})
}

// stoppedConn is a connection in a process that is stopped whenever one of its deadlines is over.
func stoppedConn(c net.Conn) net.Conn {
	stopped := func(n int, err error) (int, error) {
		if TimedOut(err) {
			time.Sleep(40 * time.Millisecond) // the bubble's time
		}
		return n, err
	}
	return (&redistest.Conn{
		Conn:    c,
		OnRead:  func(c net.Conn, p []byte) (int, error) { return stopped(c.Read(p)) },
		OnWrite: func(c net.Conn, p []byte) (int, error) { return stopped(c.Write(p)) },
	}).Open()
}
