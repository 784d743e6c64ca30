// Package link is the connection to one Redis server: calls go in, and each gets its reply, or the reason why
// it has none.
//
// There is one connection at a time. Callers encode into its buffer, and whoever finds nobody writing writes
// for all; one goroutine at a time reads (see read.go), and completes the calls in the order of the server.
// So nothing stops and waits: a call is behind what was sent before it, on the server too, and that is all
// the order there is.
//
//	          the first call                    boot
//	idle ---------------------> dialing ----------------------> open
//	                            ^  |  ^                          |
//	           redialEvery      |  |  +--- lost, silent, dropped +
//	                            |  v
//	                          suspended: calls fail at once
//
// A server without a link is suspended, and the dials are what finds out that it is back. Nothing is sent
// twice: what was written when a connection ended is lost (the server may have executed it, or may do so
// later), and what was certainly not written goes to the next connection.
package link

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
)

const (
	// redialEvery is the time between two dials of a server that does not let anybody in.
	redialEvery = 250 * time.Millisecond

	// dialsPerTimeout is how often a server that does not let anybody in is dialled at most in each Timeout,
	// while somebody is in a hurry: each of these dials may take hurriedDial times Timeout.
	dialsPerTimeout = 4
	hurriedDial     = 2

	// silentAfter times Timeout without an answer ends a connection, but see sent.isIdle.
	silentAfter = 3

	// maxCalls bounds what has no answer or is not sent yet. Each is an attempt, a refresh or a release, for
	// which somebody mostly waits; a server that does not answer ends it all after silentAfter times Timeout.
	maxCalls = 1 << 17
)

// The reasons why calls have no reply besides errors of the network and of dials.
var (
	ErrClosed    = errors.New("client closed")
	ErrFull      = fmt.Errorf("not sent: %d calls wait for the server", maxCalls)
	ErrLate      = errors.New("not sent: connection stalled, the requests before this one have no answer")
	ErrSuspended = errors.New("circuit open: suspended, probing every 250ms")
	ErrObsolete  = errors.New("not sent: it is of no use any more")
	errNoLink    = errors.New("not sent: no connection within")
	errSilent    = silence{}
	errMoved     = errors.New("the server has another address by now")
)

// silence is why a connection was ended on which nothing has arrived for silentAfter times Timeout.
type silence struct{}

func (silence) Error() string { return "no answer to anything for three times NodeTimeout" }

// Timeout makes it a net.Error that is one.
func (silence) Timeout() bool { return true }

// Temporary is for net.Error.
func (silence) Temporary() bool { return true }

// Delivery is what is known of a call that has ended without a reply.
type Delivery uint8

const (
	NotSent Delivery = iota // the server has not seen it, and never will
	// its connection has ended: the server may have executed it, or may do so at any time
	Lost
)

// Call is a request. Its functions must not block. Each is called at most once, but for Encode, and one after
// the other: Encode, Late, and then one of Reply and Fail. No function of the Link's may be called inside
// Encode, but for Queued.
type Call interface {
	// Encode appends the command, as it is to be sent to s: right before it is written, for all that is known.
	// If a connection ends before it was, or the server has not executed it, Encode is called again, for the
	// next one. false: it is of no use any more. Then, and only then, Fail is called with ErrObsolete.
	Encode(b []byte, s *Session) (_ []byte, ok bool)

	// Patient calls are sent although others have had no answer for Timeout (see ErrLate), as far as there is
	// room, many wait, or the link is shut. They wait for Timeout at most while it is not there (see giveUp):
	// then they fail with NotSent, and may be sent again later.
	Patient() bool

	// Urgent calls go before those that wait to be sent and are not. What they are about was encoded before, or
	// is in no call.
	Urgent() bool

	// Replies is how many replies the server has for what Encode has appended. Reply gets the last one.
	Replies() int

	// Late is called when there was no answer within Timeout of when it was written. One may follow.
	Late()

	// Reply is called with the answer. Again has all calls wait until the link has booted once more, and sends
	// this one again then: the server has not executed it, for it knows the scripts no more.
	Reply(s *Session, v *Value) (again bool)

	// Fail is called when there will be no answer, with the reason.
	Fail(how Delivery, err error)
}

// Options say where a Link leads. All but Of, Timeout and Boot may be zero.
type Options struct {
	Of      *redis.Options // of the connections: those of a client
	Timeout time.Duration  // how long the server has for an answer, from when a call was written

	// Boot ends the handshake: nothing else is sent on s before it has returned, and nothing at all if it
	// returns an error. It is called on a goroutine of the Link's, and once more for each time that a Reply says
	// Again, or Reboot is called.
	Boot func(s *Session) error

	// CallersRead says that a call is mostly alone on the link. Then its caller reads the reply, if it waits for
	// it (see Do). So the link is read only while a call has no answer: that the connection has ended is found
	// out by the next call, before that is written. Where one cannot look into the socket, and while there are
	// subscriptions, the link is read always, as without CallersRead.
	CallersRead bool

	// Pushed gets the messages that arrive on s, in their order among the replies. It must not block. See
	// Listen.
	Pushed func(s *Session, items []Value)

	// Attend is called when s has booted, after each Wake, and when the time is over that it has returned, if
	// that is not 0: by a goroutine of the Link's, which makes the connections. It must not block.
	Attend func(s *Session) (again time.Duration)

	// Ended is called by the same goroutine for each session that was attended, when it delivers nothing any
	// more.
	Ended func(s *Session)

	// Changed is called with the reason when the link was suspended, and with nil when it is back; one call
	// after the other.
	Changed func(err error)

	// Failed is called for each connection that cannot be made, and for one that was silent or ended at once.
	Failed func()

	// Unnamed is called with the error of a server that refuses a name for the connection.
	Unnamed func(err error)
}

// Link is the connection to one server. It is safe for concurrent use.
type Link struct {
	o    Options
	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup // of all its goroutines, but for dials that hang
	wake chan struct{}  // has room for one: the goroutine of run has something to do

	// the dials that do, and the hurried ones, which are many, and are to leave the others room
	mayHang, mayHurry hanging

	// suspended is why there is no session, and what comes is refused; nil: there is one, or the first is being
	// made. Written under mu.
	suspended atomic.Pointer[error]

	deaf atomic.Bool // see errDeaf

	mu      sync.Mutex // guards what follows, and what a Session says so of
	started bool
	closed  bool
	session *Session // the connection, also while it boots; nil: there is none
	// wait to be sent, before waiting: those that were encoded once, and then what is Urgent
	urgent  []Call
	waiting []Call        // wait to be sent
	passing int           // answers that are being passed on: their calls may come again
	shut    chan struct{} // see Shut; nil: it was not called
	isIdle  bool          // it is closed

	overdue overdue // of patient calls that wait for the link; not set while it is there. See giveUp

	hurried bool // see Hurry
	needed  bool // a session is, although no call waits: Reboot or Wake was called while there was none
	stale   bool // the dial that is under way leads to where the server was before. See Moved
}

// New makes a Link. Nothing is dialled before the first call.
func New(o Options) *Link {
	l := &Link{o: o, mayHang: newHanging(maxDials), mayHurry: newHanging(hurriedDial * dialsPerTimeout),
		wake: make(chan struct{}, 1)}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// maxDials is how many dials may hang at once: more than hang with a dialer that ignores its ctx, and gives
// up after two minutes, as TCP does.
const maxDials = 100

// Do sends c, or has it fail. Its functions may be called before Do returns. Do does not block for longer
// than it takes to hand some kilobytes to the kernel, unless waits says that the calling goroutine has
// nothing to do until c has ended, or Timeout is over: then it writes c itself, and may read the reply. See
// CallersRead.
func (l *Link) Do(c Call, waits bool) {
	l.mu.Lock()
	s := l.session
	var err error
	switch {
	case l.closed:
		err = ErrClosed
	case l.Err() != nil:
		err = l.Err()
	case l.shut != nil && !c.Patient():
		err = ErrClosed
	case l.queuedLocked() >= maxCalls && !c.Patient() && (len(l.urgent) >= maxCalls || !c.Urgent()):
		err = ErrFull
	case s != nil && s.open && s.late && !c.Patient():
		err = ErrLate
	case s != nil && s.open && s.calls.len() < s.window &&
		(l.queuedLocked() == 0 || len(l.urgent) == 0 && c.Urgent()):
		reads := waits && s.takeRoleLocked()
		if ok := s.sendLocked(c); !ok {
			s.reading = s.reading && !reads
			err = ErrObsolete
			break
		}
		most := few
		if waits {
			most = handful
		}
		s.flushAndUnlock(most)
		if reads {
			s.readFor(c)
		}
		return
	case s != nil && s.open && s.late:
		err = ErrLate
	default:
		l.startLocked()
		if c.Urgent() {
			l.urgent = append(l.urgent, c)
		} else {
			l.waiting = append(l.waiting, c)
		}
		if s == nil {
			l.notify()
		}
		l.awaitLocked()
	}
	l.mu.Unlock()
	if err != nil {
		c.Fail(NotSent, err)
	}
}

// The window is how many calls are without an answer at once. What comes then waits here: a server has
// Timeout for what it was sent, and is not to be blamed for what waits for our own calls. It begins with
// firstWindow, and doubles or halves as the answers take: a call that fills it is to have its answer in an
// eighth to a quarter of Timeout, besides the way there and back.
const (
	minWindow   = 16
	firstWindow = 128
	maxWindow   = 512
)

// queuedLocked is how many calls wait to be sent.
func (l *Link) queuedLocked() int { return len(l.urgent) + len(l.waiting) }

// nextLocked is the call that is to be sent next; nil: none waits.
func (l *Link) nextLocked() (c Call) {
	from := &l.urgent
	if len(*from) == 0 {
		from = &l.waiting
	}
	if len(*from) == 0 {
		return nil
	}
	c, (*from)[0] = (*from)[0], nil
	if *from = (*from)[1:]; len(*from) == 0 {
		*from = nil
	}
	return c
}

// takeLocked takes out of what waits to be sent what is so. It is for refuse.
func (l *Link) takeLocked(is func(Call) bool) (taken []Call) {
	for _, from := range []*[]Call{&l.urgent, &l.waiting} {
		kept := (*from)[:0]
		for _, c := range *from {
			if is(c) {
				taken = append(taken, c)
			} else {
				kept = append(kept, c)
			}
		}
		clear((*from)[len(kept):])
		if *from = kept; len(kept) == 0 {
			*from = nil // with the memory of a burst
		}
	}
	l.passing += len(taken)
	return taken
}

func anyCall(Call) bool { return true }

// refuse ends what takeLocked has taken.
func (l *Link) refuse(calls []Call, why error) {
	for _, c := range calls {
		c.Fail(NotSent, why)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.passing -= len(calls)
	l.idleLocked()
}

// awaitLocked is called when calls have come to wait: for the link, if it is not there.
func (l *Link) awaitLocked() {
	if !l.overdue.isSet() && (l.session == nil || !l.session.open) {
		l.overdue.set(time.Now().Add(l.o.Timeout), l.giveUp)
	}
}

// giveUp ends the patient calls that wait when the link has not been there for Timeout.
func (l *Link) giveUp() {
	l.mu.Lock()
	var calls []Call
	if l.overdue.passed(l.o.Timeout, l.giveUp) {
		calls = l.takeLocked(Call.Patient)
	}
	l.mu.Unlock()
	l.refuse(calls, fmt.Errorf("%w %v", errNoLink, l.o.Timeout))
}

func (l *Link) startLocked() {
	if !l.started {
		l.started = true
		l.wg.Add(1)
		go l.run()
	}
}

// Hurry has a server that is suspended dialled at once, for what cannot wait for the next time: a lock that
// is about to be lost. A dial that hangs is not waited for.
func (l *Link) Hurry() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session == nil && l.started {
		l.hurried = true
		l.notify()
	}
}

// Moved has a connection made anew, also that which is being made: it may lead to a server that had the
// address before. What was sent on it is answered first.
func (l *Link) Moved(why error) {
	l.mu.Lock()
	if l.stale = l.session == nil; !l.stale {
		l.session.moved = fmt.Errorf("%w: %w", errMoved, why)
	}
	l.mu.Unlock()
	l.Reboot() // which ends it
}

// notify has the goroutine of run look whether there is something to do.
func (l *Link) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Err is why the link is suspended, or nil.
func (l *Link) Err() error {
	if why := l.suspended.Load(); why != nil {
		return *why
	}
	return nil
}

// Session is the connection that is open; nil: none is.
func (l *Link) Session() *Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session == nil || !l.session.open {
		return nil
	}
	return l.session
}

// Reboot has the link boot again, as after a Reply that says Again: also if it boots just now.
func (l *Link) Reboot() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.startLocked()
	s := l.session
	if s == nil {
		l.needed = true
		l.notify()
		return
	}
	s.rebootLocked()
	s.bootIfQuietLocked()
}

// Shut refuses what comes but for patient calls. The channel is closed when there is no call left.
func (l *Link) Shut() <-chan struct{} {
	l.mu.Lock()
	if l.shut == nil {
		l.shut = make(chan struct{})
	}
	defer l.mu.Unlock()
	l.idleLocked()
	return l.shut
}

// idleLocked is called when a call has ended.
func (l *Link) idleLocked() {
	if l.shut == nil || l.isIdle || l.queuedLocked() > 0 || l.passing > 0 ||
		l.session != nil && !l.session.idleLocked() {
		return
	}
	l.isIdle = true
	close(l.shut)
}

// Close ends the link: what has no answer yet has none. It returns when all goroutines have ended, but for
// dials that hang.
func (l *Link) Close() {
	l.mu.Lock()
	l.closed = true
	s := l.session
	l.mu.Unlock()
	l.end()
	if s != nil {
		s.Drop(ErrClosed)
	}
	l.wg.Wait()
	l.fail(ErrClosed)
}

// run makes one connection after the other, until the end of l's life.
func (l *Link) run() {
	defer l.wg.Done()
	var reported error
	for l.life.Err() == nil {
		began := time.Now()
		s, err := l.connect()
		if err == nil {
			if reported != nil {
				l.changed(nil)
				reported = nil
			}
			err = l.attend(s)
			if l.o.Ended != nil {
				l.o.Ended(s)
			}
		}
		if l.life.Err() != nil {
			return
		}
		if errors.Is(err, errMoved) {
			continue
		}
		lasted := s != nil && !errors.Is(err, conn.ErrLogin) && (s.useful() || time.Since(began) > redialEvery)
		if lasted && !errors.Is(err, errSilent) {
			l.await() // what waits, waits for one more dial
			continue
		}
		l.fail(fmt.Errorf("%w: %w", ErrSuspended, err))
		if l.o.Failed != nil {
			l.o.Failed()
		}
		if reported == nil || errors.Is(err, conn.ErrLogin) && !errors.Is(reported, conn.ErrLogin) {
			l.changed(err)
			reported = err
		}
		if !lasted {
			l.pause(began)
		}
	}
}

// await waits until something wants to be sent. A server that nobody uses is not dialled.
func (l *Link) await() {
	for {
		l.mu.Lock()
		wanted := l.queuedLocked() > 0 || l.needed
		l.needed = false
		l.mu.Unlock()
		if wanted {
			return
		}
		select {
		case <-l.wake:
		case <-l.life.Done():
			return
		}
	}
}

func (l *Link) changed(err error) {
	if l.o.Changed != nil {
		l.o.Changed(err)
	}
}

// pause waits until the server is to be dialled again, after the dial that began then.
func (l *Link) pause(began time.Time) {
	wake := l.wake
	for now := time.Now(); ; now = time.Now() {
		wait := redialEvery
		if wake == nil { // somebody is in a hurry
			wait = min(wait, time.Until(began.Add(l.o.Timeout/dialsPerTimeout)))
		}
		t := time.NewTimer(wait - time.Since(now))
		select {
		case <-t.C:
			return
		case <-wake:
			wake = nil
		case <-l.life.Done():
			return
		}
		t.Stop()
	}
}

// connect makes a connection, and boots it. l has no error any more when it returns none.
func (l *Link) connect() (*Session, error) {
	l.mu.Lock()
	var c *conn.Conn
	for again := true; again; again = l.stale {
		l.stale = false
		l.mu.Unlock()
		l.drop(c)
		var err error
		if c, err = l.dialAny(); err != nil {
			return nil, err
		}
		l.mu.Lock()
	}
	if l.closed {
		l.mu.Unlock()
		l.drop(c)
		return nil, ErrClosed
	}
	s := newSession(l, c)
	l.session, l.needed = s, false // it is about to boot
	l.mu.Unlock()
	l.wg.Go(s.serve)
	if c.Name != "" {
		s.Post([][]string{{"CLIENT", "SETNAME", c.Name}}, s.named)
	}
	if err := s.boot(); err != nil {
		return nil, s.endFor(err)
	}
	return s, nil
}

// named is called when the server has given the connection its name, or has refused to for err.
func (s *Session) named(err error) {
	switch {
	case conn.RefusesName(err):
		if s.l.o.Unnamed != nil {
			s.l.o.Unnamed(err)
		}
	case conn.IsReply(err):
		s.Drop(conn.LoginRefused(err))
	}
}

// attend boots s again each time that is wanted, has it attended, and returns why it has ended.
func (l *Link) attend(s *Session) error {
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		again.Stop()
		if l.o.Attend != nil {
			if wait := l.o.Attend(s); wait > 0 {
				again.Reset(wait)
			}
		}
		select {
		case <-s.ended:
			return s.endFor(s.why)
		case <-again.C:
		case <-l.wake:
			if !s.quiet() {
				continue
			}
			if err := s.boot(); err != nil {
				s.Drop(err)
			}
		}
	}
}

// fail refuses what comes, and all that waits, for that reason.
func (l *Link) fail(why error) {
	l.mu.Lock()
	l.suspended.Store(&why)
	l.overdue.stop() // nobody waits any more
	waiting := l.takeLocked(anyCall)
	l.mu.Unlock()
	l.refuse(waiting, why)
}
