package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A Proxy forwards TCP connections to a target and brings the faults of a network, each
// of which can be switched at any time and concerns connections that are open as well as
// those to come. Faults add up: a held, delayed reply can still be cut.
//
// A connection that has lost bytes to BlackHole or DropReplies stays mute in that
// direction for good, also after the fault is over: with a hole in its stream, a client would
// take one command's reply for another's. New connections work again at once, and
// ResetAll gets rid of the mute ones.
//
// Bytes that wait in the proxy are not bounded.
type Proxy struct {
	port   *port
	fail   func(error) // reports the error of a method that a test may call without looking at its result
	ctx    context.Context
	cancel context.CancelFunc // gives up dials in progress
	wg     sync.WaitGroup     // the accept loop and all connections

	accepted, up, down atomic.Int64

	mu       sync.Mutex // guards what follows
	target   string
	listener net.Listener
	links    map[*link]struct{}
	faults   faults
	closed   bool
}

// faults is what the proxy does wrong at the moment.
type faults struct {
	delay       time.Duration
	blackHole   bool
	dropReplies bool
	holding     bool
	cut         bool // whether a connection is to be cut ...
	cutAfter    int  // ... after so many more bytes of reply
}

// NewProxy starts a proxy to target ("host:port"), which need not be up. The caller must
// Close it. Tests use [StartProxy].
func NewProxy(target string) (*Proxy, error) {
	port, err := reservePort()
	if err != nil {
		return nil, err
	}
	p := &Proxy{target: target, port: port, fail: func(error) {}, links: map[*link]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if err := p.listen(); err != nil {
		p.cancel()
		port.release()
		return nil, err
	}
	return p, nil
}

// StartProxy starts a proxy to target ("host:port"), which need not be up, and ends it in
// the test's cleanup.
func StartProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	p, err := NewProxy(target)
	if err != nil {
		tb.Fatal(err)
	}
	p.fail = func(err error) { tb.Error(err) }
	tb.Cleanup(func() { _ = p.Close() })
	return p
}

// Addr is the "127.0.0.1:port" to connect to. It stays the same across Refuse.
func (p *Proxy) Addr() string { return p.port.addr() }

// Accepted is the number of connections accepted so far.
func (p *Proxy) Accepted() int64 { return p.accepted.Load() }

// BytesUp is the number of request bytes that clients have sent so far, including those
// that were held or swallowed.
func (p *Proxy) BytesUp() int64 { return p.up.Load() }

// BytesDown is the number of reply bytes that the target has sent so far, including those
// that are being delayed, were swallowed or cut off. That a reply was dropped thus
// shows: it is counted here and the client has nothing.
func (p *Proxy) BytesDown() int64 { return p.down.Load() }

// SetDelay delays every reply byte that arrives from now on by d, on its way from the
// target to the client. Replies stay in order and do not queue behind each other: a stream
// of them arrives d later, at the same rate.
func (p *Proxy) SetDelay(d time.Duration) { p.set(func(f *faults) { f.delay = d }) }

// BlackHole begins or ends swallowing everything, in both directions. Connects still
// succeed, and the end of a connection does not get through either.
func (p *Proxy) BlackHole(on bool) { p.set(func(f *faults) { f.blackHole = on }) }

// DropReplies begins or ends swallowing replies while requests still get through: the target does
// what it is asked, and the client never learns of it.
func (p *Proxy) DropReplies(on bool) { p.set(func(f *faults) { f.dropReplies = on }) }

// CutReplies lets n more bytes of reply through, counted over all connections, and then
// resets the connection that carries the next one. That happens once; the next connection
// works. A negative n calls it off. Replies to a client's handshake count as well.
func (p *Proxy) CutReplies(n int) { p.set(func(f *faults) { f.cut, f.cutAfter = n >= 0, n }) }

// HoldRequests keeps requests in the proxy until ReleaseRequests. They will be forwarded
// even if the client has closed its connection by then, as the bytes of a dead connection
// are that sit in a stopped server's socket.
func (p *Proxy) HoldRequests() { p.hold(true) }

// ReleaseRequests forwards what HoldRequests has kept, per connection in order, and ends it.
func (p *Proxy) ReleaseRequests() { p.hold(false) }

func (p *Proxy) hold(on bool) {
	p.set(func(f *faults) {
		f.holding = on
		for k := range p.links {
			k.up.hold(on)
		}
	})
}

// SetTarget sends connections to come to another target, as when a name or a virtual address
// moves to a replica. Those that are open stay where they are; ResetAll ends them.
func (p *Proxy) SetTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// ResetAll resets every connection that is open now. What it held or delayed is lost.
func (p *Proxy) ResetAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.links {
		k.reset()
	}
}

// Refuse closes the listener and returns when connects are refused, or opens it again on the same
// port. Connections that are open live on; ResetAll ends those.
func (p *Proxy) Refuse(on bool) error {
	var err error
	if on {
		p.unlisten()
		err = p.port.awaitRefused()
	} else {
		err = p.listen()
	}
	if err != nil {
		p.fail(err)
	}
	return err
}

// set changes the faults under the lock.
func (p *Proxy) set(change func(*faults)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.faults)
}

// now returns the faults of this moment.
func (p *Proxy) now() faults {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.faults
}

// allow says how many of n reply bytes may pass, and whether their connection is to be cut
// behind them.
func (p *Proxy) allow(n int) (pass int, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := &p.faults
	if !f.cut {
		return n, false
	}
	if n <= f.cutAfter {
		f.cutAfter -= n
		return n, false
	}
	f.cut = false
	return f.cutAfter, true
}

// listen opens the listener unless it is open.
func (p *Proxy) listen() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("redistest: proxy %s is closed", p.Addr())
	}
	if p.listener != nil {
		return nil
	}
	l, err := p.port.listen()
	if err != nil {
		return err
	}
	p.listener = l
	p.wg.Go(func() { p.accept(l) })
	return nil
}

func (p *Proxy) unlisten() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// accept takes in connections until the listener is closed.
func (p *Proxy) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p.accepted.Add(1)
		p.admit(c.(*net.TCPConn))
	}
}

// admit starts forwarding a connection, unless the proxy has been closed meanwhile.
func (p *Proxy) admit(c *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &link{proxy: p, client: c, up: newLine(), down: newLine()}
	if p.closed {
		k.reset()
		return
	}
	k.up.hold(p.faults.holding)
	p.links[k] = struct{}{}
	p.wg.Go(func() {
		k.run(p.faultyDial)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, k)
	})
}

// errSwallowed is the dial error of a connection that comes in during a black hole.
var errSwallowed = errors.New("redistest: swallowed")

// faultyDial connects to the target.
func (p *Proxy) faultyDial() (*net.TCPConn, error) {
	p.mu.Lock()
	swallowed, target := p.faults.blackHole, p.target
	p.mu.Unlock()
	if swallowed {
		return nil, errSwallowed
	}
	c, err := (&net.Dialer{Timeout: startTimeout}).DialContext(p.ctx, "tcp", target)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// Close resets all connections and returns when every goroutine has ended. Calls after
// the first do nothing.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.unlisten()
	p.ResetAll()
	p.wg.Wait()
	p.port.release()
	return nil
}

// errReset is what ends the lines of a connection that was reset.
var errReset error = syscall.ECONNRESET
