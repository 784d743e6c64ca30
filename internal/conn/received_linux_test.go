package conn

import (
	"net"
	"testing"
)

// inHand is a connection whose reader loses its processor after it has read bytes.
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

// answered reports an answer that was read by a goroutine that has waited for a processor since:
// such an answer no longer waits in the socket, and is not yet counted by read.
func TestAnAnswerInTheReadersHandIsSeen(t *testing.T) {
	ours, theirs := tcpPair(t)
	c := inHand{ours, make(chan struct{}), make(chan struct{})}
	w := newConn(c, MinGrace)
	w.SetStrict(false)
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

	mark := w.Mark()
	if w.ArrivedSince(mark) {
		t.Error("answered before it was")
	}
	done = read()
	send()
	<-c.has
	if w.Unread() || w.read.Load() != 5 {
		t.Fatalf("it waits in the socket, or is counted: %d", w.read.Load())
	}
	if !w.ArrivedSince(mark) {
		t.Error("what is in the reader's hand was not seen")
	}
	c.goOn <- struct{}{}
	<-done
}

// On TCP, read and received count the same bytes, so that mark costs no system call for each batch.
func TestWhatIsReadCountsAsReceived(t *testing.T) {
	ours, theirs := tcpPair(t)
	w := newConn(ours, MinGrace)
	w.SetStrict(false)
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
		if n, ok := w.received(); !ok || n != w.Mark() || w.ArrivedSince(w.Mark()) {
			t.Errorf("received %d (%v), read %d", n, ok, w.Mark())
		}
	}
}
