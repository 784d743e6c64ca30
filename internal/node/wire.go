package node

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// connectTime is what a dial may take: a packet that is lost is sent again after a second.
const connectTime = 1500 * time.Millisecond

// Sizes of the buffers of each connection. A batch of 128 locks takes some 22 KiB there and 3 KiB back; one
// of long keys goes in several writes.
const (
	ReadBuffer  = 8 << 10
	WriteBuffer = 32 << 10
)

// A wire is a connection to a server, and has its steps keep to their times. To be greeted (HELLO, AUTH, SELECT
// and whatever else the client does on a new connection), and to load scripts, is a step for each answer, of
// NodeTimeout. After that the watchdog looks how long the server takes, and the connection itself waits long,
// so that late answers come back on it.
//
// A read whose deadline has passed is tried once more: in a process whose processors are all busy the bytes
// may be there for long.
type wire struct {
	net.Conn
	step   time.Duration
	strict atomic.Bool   // each answer must come within step
	exact  atomic.Bool   // no deadline is put off
	read   atomic.Uint64 // bytes that Read has returned
	wrote  func()        // called after each Write; may be nil. Set before the first

	// For the goroutine that reads.
	until time.Time     // the deadline; zero if there is none
	put   time.Duration // by how much it was put off
}

func newWire(c net.Conn, step time.Duration) (*wire, net.Conn) {
	w := &wire{Conn: c, step: step}
	w.strict.Store(true)
	if sys, ok := c.(syscall.Conn); ok { // by which go-redis finds out whether it was closed
		return w, sysWire{w, sys}
	}
	return w, w
}

type sysWire struct {
	*wire
	sys syscall.Conn
}

// SyscallConn is that of the connection.
func (w sysWire) SyscallConn() (syscall.RawConn, error) { return w.sys.SyscallConn() }

// mark returns how many bytes have arrived on the connection, for answered. It must be called only
// while no answer is expected: all that has arrived was read then, so the bytes that were read are
// enough, and save a system call, unless they are counted above TLS.
func (w *wire) mark() uint64 {
	if w.counts() {
		return w.read.Load()
	}
	if n, ok := w.received(); ok {
		return n
	}
	return w.read.Load()
}

// answered reports whether anything has arrived since mark, as far as can be found out. A goroutine may
// have read bytes and not counted them yet: when it returns from the system call, it may have to wait
// for a processor. So the kernel is asked how much has arrived, if it can tell.
func (w *wire) answered(mark uint64) bool {
	if n, ok := w.received(); ok {
		return n > mark
	}
	return w.answerWaits() || w.read.Load() != mark // in this order: bytes that wait in the socket may be read, and counted, in between
}

// answerWaits reports whether bytes wait in the socket to be read, as far as can be found out.
func (w *wire) answerWaits() bool {
	sys, ok := w.under().(syscall.Conn)
	return ok && waits(sys)
}

// received returns how many bytes have arrived on the TCP connection, read or not. ok is false if that
// cannot be found out.
func (w *wire) received() (n uint64, ok bool) {
	if tcp, isTCP := w.under().(*net.TCPConn); isTCP {
		return received(tcp)
	}
	return 0, false
}

// counts reports whether read and received count the same bytes. With TLS they do not: read counts
// what was decrypted.
func (w *wire) counts() bool {
	_, is := w.Conn.(*net.TCPConn)
	return is
}

// under returns the connection below TLS, or the connection itself if there is no TLS.
func (w *wire) under() net.Conn {
	if t, ok := w.Conn.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return w.Conn
}

func (w *wire) SetReadDeadline(t time.Time) error {
	if most := time.Now().Add(w.step); w.strict.Load() && (t.IsZero() || most.Before(t)) {
		t = most
	}
	w.until, w.put = t, 0
	return w.Conn.SetReadDeadline(t)
}

func (w *wire) SetDeadline(t time.Time) error {
	w.until, w.put = t, 0
	return w.Conn.SetDeadline(t)
}

func (w *wire) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	if w.wrote != nil {
		w.wrote()
	}
	return n, err
}

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	for n == 0 && err != nil && timedOut(err) && w.putOff() {
		n, err = w.Conn.Read(p)
	}
	if n > 0 {
		w.read.Add(uint64(n))
	}
	return n, err
}

// putOff puts the deadline off by how late its end was noticed, and says whether it has.
func (w *wire) putOff() bool {
	if w.until.IsZero() || w.exact.Load() {
		return false
	}
	more, ok := grace(time.Since(w.until), w.put, w.step)
	if !ok {
		return false
	}
	w.put += more
	w.until = time.Now().Add(more)
	return w.Conn.SetReadDeadline(w.until) == nil
}

// wired are the options of c for connections of our own, each of which is a wire, dialled once, and told of to
// dialled. greeted hears when one can be used. Hooks of c are not called.
func wired(c *redis.Client, step time.Duration, dials hangable, dialled func(*wire), greeted func()) *redis.Options {
	o := bareOptions(c)
	limit := connectTime
	if o.TLSConfig != nil {
		limit += step
	}
	dial, greet := o.Dialer, o.OnConnect
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		conn, err := await(ctx, dials, func() (net.Conn, error) { return dial(ctx, network, addr) }, func(late net.Conn) { _ = late.Close() })
		if err != nil && ctx.Err() != nil {
			return nil, fmt.Errorf("no connection within %v: %w", limit, ctx.Err())
		} else if err != nil {
			return nil, err
		}
		w, conn := newWire(conn, step)
		dialled(w)
		return conn, nil
	}
	o.OnConnect = func(ctx context.Context, conn *redis.Conn) error {
		if greet != nil {
			if err := greet(ctx, conn); err != nil {
				return err
			}
		}
		greeted()
		return nil
	}
	o.DialTimeout = limit
	o.MaxRetries, o.DialerRetries = -1, 1
	// After as many failed dials as PoolSize, go-redis would have a goroutine dial by itself, which ends a second
	// after the pool.
	o.PoolSize, o.MaxConcurrentDials, o.MinIdleConns, o.PipelinePoolSize = 16, 16, 0, -1
	o.MaxIdleConns, o.MaxActiveConns, o.ConnMaxIdleTime = 0, 0, -1
	o.PoolFIFO = false // a dial that nobody waits for any more leaves a second connection: the last one is used, and known to dialled
	o.ReadBufferSize, o.WriteBufferSize = ReadBuffer, WriteBuffer
	o.ContextTimeoutEnabled = true
	o.Limiter = nil // a circuit breaker of what else the client does is none of a lock that is to be refreshed or released
	return o
}
