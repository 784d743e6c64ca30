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
	w := newConn(ours, timeout)
	w.until = time.Now().Add(-time.Hour)
	if !w.extend() {
		t.Fatal("not put off")
	}
	if left := time.Until(w.until); left > most {
		t.Errorf("a read has %v left", left)
	}
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
			w := newConn(ours, timeout)
			if err := w.SetWriteDeadline(time.Now().Add(-x.stopped)); err != nil {
				t.Fatal(err)
			}
			if x.reads {
				go func() { _, _ = theirs.Read(make([]byte, 1)) }()
			}
			start := time.Now()
			n, err := w.Write([]byte("x"))
			took := time.Since(start)
			if n == 1 != x.reads || TimedOut(err) == x.reads || took != x.takes {
				t.Errorf("%s: %d bytes after %v, %v", x.what, n, took, err)
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
		w := newConn(own, 50*time.Millisecond)
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
		w := newConn(stoppedConn(ours), 50*time.Millisecond)
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
		w := newConn(stoppedConn(ours), 50*time.Millisecond)
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
		w := newConn(ours, 50*time.Millisecond)
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

// tcpPair are both ends of a connection.
func tcpPair(t *testing.T) (ours *net.TCPConn, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); theirs.Close() })
	return conn.(*net.TCPConn), theirs
}
