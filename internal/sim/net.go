package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// A link is the network between one client and one server. It holds everything back while
// it is cut, as TCP does that sends again until it comes through.
type link struct {
	up, down bool     // cut in that direction
	held     []func() // what arrives when the link works again
}

func (w *world) link(client, server int) *link {
	at := [2]int{client, server}
	if w.links[at] == nil {
		w.links[at] = &link{}
	}
	return w.links[at]
}

// calm is the latency without faults: a lock with a short ttl can be acquired then.
const calm = 200 * time.Microsecond

// delay is how long something is in progress on a connection.
func (k *conn) delay() time.Duration {
	p := k.w.plan
	if k.w.healed {
		return calm/2 + time.Duration(k.chance.Int64N(int64(calm)))
	}
	d := p.latency/2 + time.Duration(k.chance.Int64N(int64(p.latency)))
	if chance(k.chance, p.spikes) {
		d += between(k.chance, p.latency, p.spike)
	}
	return d
}

// A conn is a connection: the client's end, which go-redis reads and writes as a net.Conn,
// and what the loop knows of the rest. Each direction keeps its order; connections overtake
// each other.
type conn struct {
	w      *world
	client *client
	server *server
	born   time.Duration
	last   string     // the last write
	chance *rand.Rand // of its delays

	// The loop's own.
	up, down []func()        // in progress, in order
	open     bool            // the server reads what arrives
	late     bool            // the client's end is closed; what is in progress still arrives
	input    []byte          // arrived at the server and not executed yet
	ended    bool            // and nothing comes after that
	channels map[string]bool // subscribed to
	pushes   bool            // it speaks RESP3

	mu       sync.Mutex // guards what follows
	arrived  []byte
	err      error // the error of a read when nothing has arrived
	deadline time.Time
	wake     chan struct{}
}

var errReset = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}

// dial is the Dialer of a client's connections to a server.
func (c *client) dial(s *server) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := &dialing{result: make(chan error, 1)}
		c.w.report(action{client: c.id, server: s.id, do: func() { c.dialled(s, d) }})
		select {
		case err := <-d.result:
			if err != nil {
				return nil, err
			}
			return d.conn, nil
		case <-ctx.Done():
			c.w.report(action{client: c.id, server: s.id, do: func() { d.given = true }})
			return nil, ctx.Err()
		}
	}
}

// dialing is a connection to be.
type dialing struct {
	conn   *conn // written before result gets its value
	result chan error
	given  bool // up: nobody waits any more
}

func (c *client) dialled(s *server, d *dialing) {
	w := c.w
	switch {
	case c.crashed:
		d.result <- errors.New("this client is dead")
		return
	case c.paused:
		c.unsent = append(c.unsent, func() { c.dialled(s, d) })
		return
	}
	k := &conn{w: w, client: c, server: s, born: w.now(), wake: make(chan struct{}, 1), open: true}
	k.chance = rand.New(rand.NewPCG(w.plan.seed, uint64(k.born)<<16|uint64(c.id)<<8|uint64(s.id)))
	w.passUp(k, k.delay(), func() {
		up := s.up
		w.passDown(k, k.delay(), func() {
			switch {
			case d.given || c.crashed:
			case !up:
				d.result <- &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
			default:
				s.conns = append(s.conns, k)
				c.conns = append(c.conns, k)
				d.conn = k
				d.result <- nil
			}
		})
	})
}

// passUp has something arrive at the server's machine, in order.
func (w *world) passUp(k *conn, delay time.Duration, arrive func()) {
	k.up = append(k.up, arrive)
	w.at(w.now()+delay, func() { w.arriveUp(k) })
}

func (w *world) arriveUp(k *conn) {
	if l := w.link(k.client.id, k.server.id); l.up {
		l.held = append(l.held, func() { w.arriveUp(k) })
		return
	}
	first := k.up[0]
	k.up = k.up[1:]
	first()
}

// passDown has something arrive at the client, in order.
func (w *world) passDown(k *conn, delay time.Duration, arrive func()) {
	k.down = append(k.down, arrive)
	w.at(w.now()+delay, func() { w.arriveDown(k) })
}

func (w *world) arriveDown(k *conn) {
	l := w.link(k.client.id, k.server.id)
	switch {
	case l.down:
		l.held = append(l.held, func() { w.arriveDown(k) })
	case k.client.paused:
		k.client.held = append(k.client.held, func() { w.arriveDown(k) })
	default:
		first := k.down[0]
		k.down = k.down[1:]
		first()
	}
}

// deliverHeld delivers what was held back, in order.
func (w *world) deliverHeld(held []func()) {
	for i, arrive := range held {
		w.after(w.plan.latency/8+time.Duration(i)*time.Microsecond, arrive)
	}
}

// cut stops a link, or lets it continue.
func (w *world) cut(l *link, up, down bool) {
	l.up, l.down = up, down
	held := l.held
	l.held = nil
	w.deliverHeld(held)
}

// Write sends b, unless the connection is known to be dead.
func (k *conn) Write(b []byte) (int, error) {
	k.mu.Lock()
	err := k.err
	k.mu.Unlock()
	if err != nil {
		return 0, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
	}
	k.w.report(action{client: k.client.id, server: k.server.id, text: string(b), on: k})
	return len(b), nil
}

// written sends data on its way, maybe in two pieces.
func (k *conn) written(data []byte) {
	w := k.w
	switch {
	case k.client.crashed:
		return
	case k.client.paused:
		k.client.unsent = append(k.client.unsent, func() { k.written(data) })
		return
	}
	whole := data
	k.last = string(data)
	if !w.healed && chance(k.chance, w.plan.splits) && len(data) > 1 {
		at := 1 + k.chance.IntN(len(data)-1)
		first := data[:at]
		data = data[at:]
		w.passUp(k, k.delay(), func() { k.server.receive(k, first) })
	}
	w.passUp(k, k.delay(), func() { k.server.receive(k, data) })
	if !w.healed && chance(k.chance, w.plan.copies) {
		w.after(k.delay()+between(k.chance, w.plan.latency, w.plan.spike), func() { k.server.takeCopy(k, whole) })
	}
}

// deliver makes data readable.
func (k *conn) deliver(data []byte) {
	k.mu.Lock()
	k.arrived = append(k.arrived, data...)
	k.mu.Unlock()
	k.changed()
}

// fail closes the client's end with err. What has arrived can still be read.
func (k *conn) fail(err error) {
	k.mu.Lock()
	if k.err == nil {
		k.err = err
	}
	k.mu.Unlock()
	k.changed()
}

// broken reports whether the client's end is closed.
func (k *conn) broken() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err != nil
}

func (k *conn) changed() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Read waits for data.
func (k *conn) Read(b []byte) (int, error) {
	for {
		k.mu.Lock()
		n := copy(b, k.arrived)
		k.arrived = k.arrived[n:]
		err, deadline := k.err, k.deadline
		k.mu.Unlock()
		switch {
		case n > 0:
			return n, nil
		case err != nil:
			return 0, err
		case deadline.IsZero():
			<-k.wake
		case !time.Now().Before(deadline):
			return 0, &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
		default:
			timer := time.NewTimer(time.Until(deadline))
			select {
			case <-k.wake:
			case <-timer.C:
			}
			timer.Stop()
		}
	}
}

// Close closes the client's end. Earlier writes still arrive.
func (k *conn) Close() error {
	k.fail(net.ErrClosed)
	k.w.report(action{client: k.client.id, server: k.server.id, text: "close", do: k.closed})
	return nil
}

func (k *conn) closed() {
	switch {
	case k.client.paused:
		k.client.unsent = append(k.client.unsent, k.closed)
	case !k.late:
		k.late = true
		k.gone()
		k.w.passUp(k, k.delay(), func() { k.server.end(k) })
	}
}

// gone removes k from the client's connections.
func (k *conn) gone() {
	k.client.conns = slices.DeleteFunc(k.client.conns, func(c *conn) bool { return c == k })
}

// reset closes the connection at both ends. If late, the server executes what is in progress before
// it learns of that.
func (k *conn) reset(late bool) {
	k.w.logf("reset  %v late=%v", k, late)
	k.gone()
	k.fail(errReset)
	if k.late = late; late {
		k.w.passUp(k, k.delay(), func() { k.server.end(k) })
	} else {
		k.server.drop(k)
	}
}

// SetDeadline sets the read deadline: a write never waits.
func (k *conn) SetDeadline(t time.Time) error { return k.SetReadDeadline(t) }

// SetReadDeadline has reads fail from t on, or a little later: a timer of the system under
// test for the same time comes first.
func (k *conn) SetReadDeadline(t time.Time) error {
	if !t.IsZero() {
		t = t.Add(time.Microsecond + k.born%997)
	}
	k.mu.Lock()
	k.deadline = t
	k.mu.Unlock()
	k.changed()
	return nil
}

// SetWriteDeadline does nothing: a write never waits.
func (k *conn) SetWriteDeadline(time.Time) error { return nil }

// LocalAddr is empty.
func (k *conn) LocalAddr() net.Addr { return addr("client") }

// RemoteAddr is the server's.
func (k *conn) RemoteAddr() net.Addr { return addr(k.server.addr) }

type addr string

func (addr) Network() string  { return "tcp" }
func (a addr) String() string { return string(a) }

var _ io.ReadWriteCloser = (*conn)(nil)

func (k *conn) String() string { return fmt.Sprintf("%v>%v", k.client, k.server) }
