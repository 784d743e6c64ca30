package link

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// A Session is one connection of a Link, from when it was dialled until it has ended. A session that has
// ended delivers no reply and no message, even if it has read one.
//
// Who blames a server for its silence must know that it is the server's. Every deadline counts from when a
// call was written; if the timer comes late itself, this process was stopped, or had no processor, and the
// deadline is put off by as much; and if bytes wait in the socket, or have arrived meanwhile, the answer
// waits for us.
type Session struct {
	// Data is what Boot has found out. Boot alone writes it, and nobody else uses the session meanwhile.
	Data any

	l     *Link
	conn  *conn.Conn
	ended chan struct{} // closed when it is over
	why   error         // why it is. Written before ended is closed

	// held while an answer is passed on: what is to be sent again has its place when that is over
	replying sync.Mutex

	mark atomic.Uint64 // conn.Mark when all that had been read was passed on

	rests bool // it is read only while a call has no answer, and maybe by that call's caller. See read.go

	// For the goroutine that has the reading role.
	in     []byte // what was read
	used   int    // how much of it was passed on
	parser parser

	// guarded by l.mu
	reading  bool   // a goroutine has the reading role
	popped   uint64 // how many calls have been answered
	readsFor uint64 // popped when a caller took the role
	// popped when what waits was sent last, as far as there was room: urgent calls may leave no more
	filled   uint64
	wanted   sync.Cond // signalled when the session's own goroutine may have to read, or to end
	open     bool      // calls are written to it
	over     bool      // it has ended
	answered bool      // more than what was sent before it was open
	channels int       // that are subscribed to, or may be
	pulse    uint64    // popped when Pulse was called last
	rebooted bool      // it is to boot again, once there is no call without an answer
	moved    error     // why it is to end instead. See Moved
	out      []byte    // what is encoded, and is not written yet: the last unsent ones of calls
	spare    []byte    // the memory of what was written before
	unsent   int
	writing  bool          // somebody writes
	calls    queue         // without an answer, in the order in which they were encoded
	window   int           // how many of these there may be, but for what a boot sends
	way      time.Duration // the least time that a call has taken which found no other on its way
	lately   time.Duration // and what the last one of these has taken
	// calls that the server has not executed: that many of the Link's urgent ones, the first
	again   int
	telling chan struct{} // calls are being told that they are late, until it is closed; nil: none is
	lost    []sent        // and these were lost meanwhile
	late    bool          // the oldest call was told that it is late, and nothing has arrived since
	put     time.Duration // by how much deadlines were put off since the last answer
	timer   *time.Timer
	due     time.Time // when the timer comes; zero: it does not
}

// sent is a call without an answer.
type sent struct {
	call    Call
	at      time.Time // when it was about to be written; zero: it was not
	replies int       // that are to come
	told    bool      // that it is late
	first   bool      // it was written when no other was without an answer
}

func newSession(l *Link, c *conn.Conn) *Session {
	s := &Session{l: l, conn: c, ended: make(chan struct{}), window: firstWindow}
	s.wanted.L, s.rests = &l.mu, l.o.CallersRead && c.SeesQuiet()
	s.mark.Store(c.Mark())
	s.timer = clock.AfterFunc(time.Hour, s.look)
	s.timer.Stop()
	return s
}

// sendLocked encodes c. It reports whether c is of use.
func (s *Session) sendLocked(c Call) bool {
	out, ok := c.Encode(s.out, s)
	if !ok {
		return false
	}
	s.out = out
	s.unsent++
	s.calls.push(sent{call: c, replies: c.Replies()})
	s.haveReadLocked()
	return true
}

// Queued is how many calls wait to be sent, besides one that is being encoded. It is for its Encode.
func (s *Session) Queued() int { return s.l.queuedLocked() }

// handful is how many calls may be without an answer for a caller to write by itself: then what it writes is
// sure to fit into the socket, and does not block it. They are few for one that has something else to do,
// such as to write to other servers: a goroutine has more to write by the time that it runs. (On three
// servers that is a third more locks a second of 10 or 30 callers; one server that each caller waits for
// would make a tenth less.)
const handful, few = 64, 2

// flushAndUnlock has written what is encoded: by this goroutine if no more than that many calls are without
// an answer, or by one that ends with it.
func (s *Session) flushAndUnlock(most int) {
	if s.writing || s.unsent == 0 || s.over {
		s.l.mu.Unlock()
		return
	}
	s.writing = true
	idle := s.calls.len() == s.unsent
	switch {
	case s.calls.len() > most || len(s.out) > 16<<10:
		s.l.wg.Add(1)
		s.l.mu.Unlock()
		go s.writeLater(false)
		return
	case idle:
		s.l.wg.Add(1) // under mu: Close waits for what was begun before it
		s.l.mu.Unlock()
		if !s.conn.Quiet() {
			go s.writeLater(true)
			return
		}
		s.l.wg.Done()
		s.l.mu.Lock()
	}
	s.writeAndUnlock(most)
}

// writeLater writes on a goroutine of its own. A connection on which no answer was expected, and something
// has arrived, it leaves to the goroutine that reads, for Timeout at most: what has arrived may be its end,
// and then nothing is lost by it.
func (s *Session) writeLater(idle bool) {
	defer s.l.wg.Done()
	for began := time.Now(); idle && time.Since(began) < s.l.o.Timeout && !s.conn.Quiet(); {
		select {
		case <-s.ended:
			idle = false
		case <-time.After(time.Millisecond / 4):
		}
	}
	s.l.mu.Lock()
	s.writeAndUnlock(math.MaxInt)
}

// writeAndUnlock writes until nothing is left, or has the rest written if more than that many calls have no
// answer.
func (s *Session) writeAndUnlock(most int) {
	for first := true; ; first = false {
		if s.unsent == 0 || s.over {
			s.writing = false
			s.l.mu.Unlock()
			return
		}
		if !first && s.calls.len() > most { // a caller is not to write for others, who come and come
			s.writing = false
			s.flushAndUnlock(most)
			return
		}
		out, now := s.out, time.Now()
		s.out, s.spare = s.spare[:0], nil
		s.calls.sent(s.unsent, now)
		s.calls.at(s.calls.len() - s.unsent).first = s.calls.len() == s.unsent
		n := s.unsent
		s.unsent = 0
		s.dueLocked(now.Add(s.l.o.Timeout))
		s.l.mu.Unlock()
		wrote, err := s.conn.Write(out)
		s.l.mu.Lock()
		s.spare = out
		if err == nil {
			continue
		}
		if wrote == 0 && !s.over {
			s.calls.unsend(s.unsent, n)
			s.unsent += n
		}
		s.l.mu.Unlock() // writing stays true: nothing may follow what was written in part, or not at all
		s.Drop(err)
		return
	}
}

// arrived passes on what was read for c. It reports whether that goes on.
func (s *Session) arrived(v *Value, c Call) bool {
	l := s.l
	s.replying.Lock()
	defer s.replying.Unlock()
	l.mu.Lock()
	if s.over {
		l.mu.Unlock()
		return false
	}
	subscribing := s.listeningLocked()
	if v.Kind == Push {
		if subscribing != nil {
			subscribing.confirmLocked(v)
		}
		l.mu.Unlock()
		if l.o.Pushed != nil {
			l.o.Pushed(s, v.Items)
		}
		return s.readsOn(c)
	}
	if s.calls.len() <= s.unsent {
		l.mu.Unlock()
		if v.Kind == Error { // what a server says before it closes the connection
			s.Drop(v.Err())
		} else {
			s.Drop(&protocolError{"an answer to nothing"})
		}
		return false
	}
	s.late, s.put = false, 0
	if subscribing != nil {
		last, ok := subscribing.takeLocked(v)
		if !ok {
			l.deaf.Store(true)
			l.mu.Unlock()
			s.Drop(errDeaf)
			return false
		}
		if !last {
			l.mu.Unlock()
			return true
		}
	}
	if front := s.calls.front(); front.replies > 1 {
		front.replies--
		l.mu.Unlock()
		return true
	}
	x := s.calls.pop()
	if x.isOfBoot() {
		s.calls.restart(s.calls.len()-s.unsent, time.Now())
	}
	s.popped++
	s.answered = s.answered || !x.isOfBoot()
	if x.first {
		if s.lately = time.Since(x.at); s.way == 0 || s.lately < s.way {
			s.way = s.lately
		}
	}
	l.passing++
	told := s.telling
	l.mu.Unlock()
	if told != nil {
		<-told
	}
	again := x.call.Reply(s, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.passing--
	if again { // it was not executed. If the session is over, it goes to the next one
		s.rebootLocked()
		l.urgent = slices.Insert(l.urgent, min(s.again, len(l.urgent)), x.call)
		s.again++
		l.awaitLocked()
	}
	s.bootIfQuietLocked()
	if l.queuedLocked() > 0 && s.open && s.roomyLocked() {
		s.adaptLocked(time.Since(x.at))
		s.refillLocked()
	}
	l.idleLocked()
	return s.readsOnLocked(c)
}

// look is called when something may be due.
func (s *Session) look() {
	l, now := s.l, time.Now()
	l.mu.Lock()
	if s.telling != nil { // one call of look at a time: what is due meanwhile is looked at soon
		s.due = time.Time{}
		s.dueLocked(now.Add(conn.MinGrace))
		l.mu.Unlock()
		return
	}
	oldest := s.calls.front()
	if s.over || oldest == nil || oldest.at.IsZero() {
		s.due = time.Time{}
		l.mu.Unlock()
		return
	}
	asked := s.due
	s.due = time.Time{}
	due, end := s.deadlinesLocked()
	due, end = due.Add(s.put), end.Add(s.put)
	if now.Before(due) {
		s.dueLocked(due)
		l.mu.Unlock()
		return
	}
	defer s.kick()
	more, ok := conn.Grace(now.Sub(asked), s.put, l.o.Timeout)
	if !ok && s.put <= conn.MaxGrace*l.o.Timeout && s.conn.ArrivedSince(s.mark.Load()) || s.conn.Unread() {
		more, ok = conn.MinGrace, true
	}
	if ok {
		s.put += more
		s.dueLocked(now.Add(more))
		l.mu.Unlock()
		return
	}
	s.late = true
	var refused []Call
	if s.open { // as in Do: what waits for a boot does so for longer
		refused = l.takeLocked(anyCall)
	}
	tell, next := s.calls.late(now.Add(-l.o.Timeout - s.put))
	silent := !now.Before(end)
	if !next.IsZero() {
		end = clock.Earlier(end, next.Add(l.o.Timeout+s.put))
	}
	s.dueLocked(end)
	told := make(chan struct{})
	s.telling = told
	l.mu.Unlock()
	for _, c := range tell {
		c.Late()
	}
	l.refuse(refused, ErrLate)
	l.mu.Lock()
	s.telling = nil
	lost := s.lost
	s.lost = nil
	l.mu.Unlock()
	close(told)
	s.fail(lost)
	if silent {
		s.Drop(errSilent)
	}
}

// dueLocked has look called at t, or before.
func (s *Session) dueLocked(t time.Time) {
	if s.due.IsZero() || t.Before(s.due) {
		s.due = t
		s.timer.Reset(time.Until(t))
	}
}

// Drop ends the session: its calls are lost, but for those that were not written, which go to the next one.
func (s *Session) Drop(why error) {
	l := s.l
	l.mu.Lock()
	if s.over {
		l.mu.Unlock()
		return
	}
	s.over, s.open, s.why = true, false, why
	s.timer.Stop()
	s.wanted.Signal()
	if l.session == s {
		l.session = nil
	}
	all := s.calls.all()
	sentOnes := len(all) - s.unsent
	lost, rest := all[:sentOnes:sentOnes], []Call(nil) // while calls wait to be sent again, there is no other
	for _, x := range all[sentOnes:] {
		if _, is := x.call.(*exec); is { // which is of use to this session only
			lost = append(lost, x)
		} else {
			rest = append(rest, x.call)
		}
	}
	l.urgent = append(rest, l.urgent...)
	s.unsent = 0
	if l.queuedLocked() > 0 {
		l.awaitLocked()
	}
	if s.telling != nil { // some of them are being told that they are late
		s.lost, lost = lost, nil
	}
	l.mu.Unlock()
	_ = s.conn.Close()
	close(s.ended)
	s.fail(lost)
}

// endFor drops the session, and returns why when all that goes to the next one has its place.
func (s *Session) endFor(why error) error {
	s.Drop(why)
	s.replying.Lock()
	defer s.replying.Unlock()
	return why
}

// fail ends calls that are lost.
func (s *Session) fail(lost []sent) {
	for _, x := range lost {
		x.call.Fail(Lost, s.why)
	}
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	s.l.idleLocked()
}

// idleLocked reports whether no call is left that somebody waits for.
func (s *Session) idleLocked() bool {
	for i := range s.calls.len() {
		if !s.calls.at(i).isIdle() {
			return false
		}
	}
	return true
}

// rebootLocked has what is not written yet wait until the session has booted again.
func (s *Session) rebootLocked() {
	if s.over {
		return
	}
	s.rebooted = true
	if !s.open {
		return
	}
	s.open = false
	if s.calls.len() > s.unsent { // an idle one has no more time than others now
		s.dueLocked(time.Now())
	}
	var back []Call
	for _, x := range s.calls.takeBack(s.unsent) {
		back = append(back, x.call)
	}
	s.l.urgent = append(back, s.l.urgent...)
	s.unsent, s.out = 0, s.out[:0]
	if s.l.queuedLocked() > 0 {
		s.l.awaitLocked()
	}
}

// useful reports whether it has answered anything but its boot.
func (s *Session) useful() bool {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.answered
}

// quiet reports whether the session is to boot again, and has no call under way.
func (s *Session) quiet() bool {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.quietLocked()
}

func (s *Session) quietLocked() bool { return s.rebooted && s.calls.len() == 0 }

// bootIfQuietLocked has the session boot again if it is time for that.
func (s *Session) bootIfQuietLocked() {
	if s.quietLocked() {
		s.l.notify()
	}
}

// boot has the session boot, and then sends what has waited for that.
func (s *Session) boot() error {
	l := s.l
	l.mu.Lock()
	for done := false; !done; done = !s.rebooted {
		if s.moved != nil {
			l.mu.Unlock()
			return s.moved
		}
		s.rebooted = false
		l.mu.Unlock()
		if err := conn.Guard(func() error { return l.o.Boot(s) }); err != nil {
			return err
		}
		l.mu.Lock()
		if s.over {
			l.mu.Unlock()
			return s.why
		}
	}
	s.open = true
	l.overdue.stop()
	l.suspended.Store(nil)
	s.answered = false
	s.again = 0
	s.refillLocked()
	l.idleLocked()
	l.mu.Unlock()
	return nil
}

// roomyLocked reports whether what waits is to be sent: a quarter of the window is free, or was answered
// since the last time, and urgent calls have left some of it.
func (s *Session) roomyLocked() bool {
	n := s.calls.len()
	return n <= s.window/4*3 || n < s.window && s.popped-s.filled >= uint64(s.window/4)
}

// adaptLocked is called when a full window has got an answer, after that time. What a call takes that finds
// no other on its way is the way there and back, which a smaller window does not make shorter, only slower:
// so the window is halved when the others take a share of Timeout more than the last one of these, and
// doubled when they take less than half of that more than the fastest one, which has met nobody else's calls
// either.
func (s *Session) adaptLocked(took time.Duration) {
	timeout := s.l.o.Timeout
	lately := min(s.lately, timeout/8*7) // the window is to shrink before any call is late
	switch {
	case took-lately > windowShare(timeout, lately):
		s.window = max(s.window/2, minWindow)
	case took-s.way < windowShare(timeout, s.way)/2:
		s.window = min(s.window*2, maxWindow)
	}
}

// windowShare is how much of a Timeout the calls of a window may take besides that way.
func windowShare(timeout, way time.Duration) time.Duration { return min(timeout/4, (timeout-way)/2) }

// refillLocked sends what waits, as far as there is room for it. It unlocks and locks again.
func (s *Session) refillLocked() {
	l := s.l
	var obsolete []Call
	for s.open && s.calls.len() < s.window {
		s.filled = s.popped
		c := l.nextLocked()
		if c == nil {
			break
		}
		if !s.sendLocked(c) {
			obsolete = append(obsolete, c)
		}
	}
	l.passing += len(obsolete)
	s.flushAndUnlock(handful)
	for _, c := range obsolete {
		c.Fail(NotSent, ErrObsolete)
	}
	l.mu.Lock()
	l.passing -= len(obsolete)
}
