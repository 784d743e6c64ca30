package node

import (
	"net"
	"testing"
)

// inHand is a connection whose reader loses its processor with the bytes in hand.
type inHand struct {
	*net.TCPConn
	has, goOn chan struct{}
}

func (c inHand) NetConn() net.Conn { return c.TCPConn } // as below TLS

func (c inHand) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	c.has <- struct{}{}
	<-c.goOn
	return n, err
}

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

// An answer that was read by a goroutine that waits for a processor since is seen: it neither waits in the socket, nor
// is it counted.
func TestAnAnswerInTheReadersHandIsSeen(t *testing.T) {
	ours, theirs := tcpPair(t)
	c := inHand{ours, make(chan struct{}), make(chan struct{})}
	w, _ := newWire(c, minGrace)
	w.strict.Store(false)
	read := func() (done chan struct{}) {
		done = make(chan struct{})
		go func() {
			defer close(done)
			if _, err := w.Read(make([]byte, 10)); err != nil {
				t.Error(err)
			}
		}()
		return done
	}
	send := func() {
		if _, err := theirs.Write([]byte("+OK\r\n")); err != nil {
			t.Error(err)
		}
	}
	done := read() // the greeting
	send()
	<-c.has
	c.goOn <- struct{}{}
	<-done

	mark := w.mark()
	if w.answered(mark) {
		t.Error("answered before it was")
	}
	done = read()
	send()
	<-c.has
	if w.answerWaits() || w.read.Load() != 5 {
		t.Fatalf("it waits in the socket, or is counted: %d", w.read.Load())
	}
	if !w.answered(mark) {
		t.Error("what is in the reader's hand was not seen")
	}
	c.goOn <- struct{}{}
	<-done
}

// What was read and what came are the same bytes, so that a batch costs no system call for that.
func TestWhatIsReadCountsAsReceived(t *testing.T) {
	ours, theirs := tcpPair(t)
	w, _ := newWire(ours, minGrace)
	w.strict.Store(false)
	for range 3 {
		if _, err := theirs.Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		for got := 0; got < 1000; {
			n, err := w.Read(make([]byte, 300))
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
		if n, ok := w.received(); !ok || n != w.mark() || w.answered(w.mark()) {
			t.Errorf("received %d (%v), read %d", n, ok, w.mark())
		}
	}
}
