package conn

import (
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

// Conn is a connection to a server with read deadlines of our own.
//
// While it is strict, each answer must arrive within step: during the handshake (HELLO, AUTH, SELECT
// and everything else that the client sends on a new connection). After that a link measures how long
// the server takes.
//
// A read whose deadline has passed is tried once more: in a process whose processors are all busy,
// the bytes may have arrived long before. A write has its time once more if this process was stopped before
// it.
type Conn struct {
	net.Conn
	step   time.Duration
	strict atomic.Bool   // each answer must arrive within step
	read   atomic.Uint64 // bytes that Read has returned
	RESP3  bool          // what the handshake has agreed on. Set by who dialled it, when that is over
	Name   string        // as that of a Once. Set as this

	greeted atomic.Bool // the handshake is over

	// refused is the last reply to the handshake, if that was an error, and "" if not. nil: something has
	// arrived since it was over. See refusal.
	refused atomic.Pointer[string]

	// For the goroutine that reads.
	until    time.Time     // the deadline; zero if there is none
	extended time.Duration // by how much it was extended

	writeUntil time.Time // for the goroutine that writes: the deadline; zero if there is none
}

func newConn(c net.Conn, step time.Duration) *Conn {
	own := &Conn{Conn: c, step: step}
	own.strict.Store(true)
	own.refused.Store(new(string))
	return own
}

// SetStrict sets whether the connection is strict.
func (c *Conn) SetStrict(on bool) { c.strict.Store(on) }

// Mark returns how many bytes have arrived on the connection, for ArrivedSince. It must be called
// only while no answer is expected: all that has arrived was read then, so the bytes that were read
// are enough, and save a system call, unless they are counted above TLS.
func (c *Conn) Mark() uint64 {
	if c.counts() {
		return c.read.Load()
	}
	if n, ok := c.received(); ok {
		return n
	}
	return c.read.Load()
}

// ArrivedSince reports whether anything has arrived since mark, as far as can be determined. A
// goroutine may have read bytes and not counted them yet: after the system call it may have to wait
// for a processor. So the kernel's count of received bytes is used where there is one.
func (c *Conn) ArrivedSince(mark uint64) bool {
	if n, ok := c.received(); ok {
		return n > mark
	}
	// in this order: unread bytes may be read, and counted, in between
	return c.Unread() || c.read.Load() != mark
}

// Unread reports whether the socket has unread bytes, as far as can be determined.
func (c *Conn) Unread() bool {
	sys, ok := c.under().(syscall.Conn)
	return ok && unread(sys)
}

// push is what a push of RESP3 begins with.
const push = '>'

// inMemory is a connection without a socket that knows what Quiet reports.
type inMemory interface{ Quiet() bool }

// SeesQuiet reports whether Quiet can determine that: it cannot on some systems, and of connections that have
// neither a socket nor a Quiet of their own.
func (c *Conn) SeesQuiet() bool {
	if _, ok := c.under().(inMemory); ok {
		return true
	}
	sys, ok := c.under().(syscall.Conn)
	return ok && canPeek(sys)
}

// Quiet reports whether nothing waits in the socket that may be the end of the connection: neither that nor
// an error before it, as far as can be determined. A push is none: a lease is won by the messages of a
// majority, so when its holder releases it the one of another server has often just arrived, and the release
// is not to wait until that was read. (With TLS no byte says what it is, and any counts.)
func (c *Conn) Quiet() bool {
	if m, ok := c.under().(inMemory); ok {
		return m.Quiet()
	}
	sys, ok := c.under().(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sys.SyscallConn()
	return err == nil && quiet(raw)
}

// received returns how many bytes have arrived on the TCP connection, read or not. ok is false if
// that cannot be determined.
func (c *Conn) received() (n uint64, ok bool) {
	if tcp, isTCP := c.under().(*net.TCPConn); isTCP {
		return received(tcp)
	}
	return 0, false
}

// counts reports whether read and received count the same bytes. With TLS they do not: read counts
// what was decrypted.
func (c *Conn) counts() bool {
	_, is := c.Conn.(*net.TCPConn)
	return is
}

// under returns the connection below TLS, or the connection itself without TLS.
func (c *Conn) under() net.Conn {
	if t, ok := c.Conn.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return c.Conn
}

// SetReadDeadline sets the deadline of reads, or an earlier one while the connection is strict.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if most := time.Now().Add(c.step); c.strict.Load() && (t.IsZero() || most.Before(t)) {
		t = most
	}
	c.until, c.extended = t, 0
	return c.Conn.SetReadDeadline(t)
}

// GiveUp has the read in progress, or the next one, end as if its deadline had passed. Any goroutine may call
// it.
func (c *Conn) GiveUp() { _ = c.Conn.SetReadDeadline(time.Now()) }

// SetDeadline sets the deadline of reads and writes.
func (c *Conn) SetDeadline(t time.Time) error {
	c.until, c.extended, c.writeUntil = t, 0, t
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline sets the deadline of writes.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.writeUntil = t
	return c.Conn.SetWriteDeadline(t)
}

func (c *Conn) Write(p []byte) (int, error) {
	c.extendWrite() // now: nothing can be written over TLS any more once a write has timed out
	n, err := c.Conn.Write(p)
	if n == 0 && err != nil && TimedOut(err) && c.extendWrite() {
		n, err = c.Conn.Write(p)
	}
	if err != nil && !TimedOut(err) && !c.greeted.Load() { // else somebody reads
		err = c.readRefusal(err)
	}
	return n, err
}

// extendWrite gives a write that has written nothing step once more if its deadline is long over, because
// this process was stopped. It reports whether it did.
func (c *Conn) extendWrite() bool {
	if c.writeUntil.IsZero() || time.Since(c.writeUntil) < MinGrace {
		return false
	}
	return c.SetWriteDeadline(time.Now().Add(c.step)) == nil
}

func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for n == 0 && err != nil && TimedOut(err) && c.extend() {
		n, err = c.Conn.Read(p)
	}
	if n > 0 {
		c.read.Add(uint64(n))
		c.noteRefusal(p[:n])
	}
	return n, c.withRefusal(err)
}

// extend extends the deadline by the delay with which its end was noticed, and reports whether it
// did.
func (c *Conn) extend() bool {
	if c.until.IsZero() {
		return false
	}
	more, ok := Grace(time.Since(c.until), c.extended, c.step)
	if !ok {
		return false
	}
	c.extended += more
	c.until = time.Now().Add(more)
	return c.Conn.SetReadDeadline(c.until) == nil
}

// Limits of Grace: it adds at least MinGrace to a deadline, and MaxGrace times the timeout in all.
const (
	MinGrace = 10 * time.Millisecond
	MaxGrace = 8
)

// Grace returns by how much to extend a deadline whose end was noticed that late, and that was
// extended by before already. ok is false if the deadline must not be extended further: a process
// that was stopped for an hour does not give the server another hour.
func Grace(late, before, timeout time.Duration) (more time.Duration, ok bool) {
	left := max(MaxGrace*timeout, MinGrace) - before
	if before > 0 && late < MinGrace || left <= 0 {
		return 0, false
	}
	return min(max(late, MinGrace), left), true
}
