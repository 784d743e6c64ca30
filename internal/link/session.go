package link

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// A Session is one connection of a Link, from when it was dialled until it has ended. A session that has ended
// delivers no reply and no message, even if it has read one.
//
// Who blames a server for its silence must know that it is the server's. Every deadline counts from when a call was
// written; if the timer comes late itself, this process was stopped, or had no processor, and the deadline is put off
// by as much; and if bytes wait in the socket, or have arrived meanwhile, the answer waits for us.
type Session struct {
	// Data is what Boot has found out. Boot alone writes it, and nobody else uses the session meanwhile.
	Data any

	l     *Link
	conn  *conn.Conn
	ended chan struct{} // closed when it is over
	why   error         // why it is. Written before ended is closed

	replying sync.Mutex // held while an answer is passed on: what is to be sent again has its place when that is over

	mark atomic.Uint64 // conn.Mark when all that had been read was passed on

	// guarded by l.mu
	open     bool   // calls are written to it
	over     bool   // it has ended
	answered bool   // more than what was sent before it was open
	rebooted bool   // it is to boot again, once there is no call without an answer
	moved    error  // why it is to end instead. See Moved
	out      []byte // what is encoded, and is not written yet: the last unsent ones of calls
	spare    []byte // the memory of what was written before
	unsent   int
	writing  bool          // somebody writes
	calls    queue         // without an answer, in the order in which they were encoded
	again    []Call        // calls that the server has not executed: the first ones after the next boot
	waiting  int           // how many of these wait for the next session
	telling  chan struct{} // calls are being told that they are late, until it is closed; nil: none is
	lost     []sent        // and these were lost meanwhile
	late     bool          // the oldest call was told that it is late, and nothing has arrived since
	put      time.Duration // by how much deadlines were put off since the last answer
	timer    *time.Timer
	due      time.Time // when the timer comes; zero: it does not
}

// sent is a call without an answer.
type sent struct {
	call    Call
	at      time.Time // when it was about to be written; zero: it was not
	replies int       // that are to come
	told    bool      // that it is late
}

func newSession(l *Link, c *conn.Conn) *Session {
	s := &Session{l: l, conn: c, ended: make(chan struct{})}
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
	return true
}

// handful is how many calls may be without an answer for a caller to write by itself: then what it writes is sure to
// fit into the socket, and does not block it.
const handful = 64

// flushAndUnlock has written what is encoded: by this goroutine if that does not block it, or by one that ends with it.
func (s *Session) flushAndUnlock() {
	if s.writing || s.unsent == 0 || s.over {
		s.l.mu.Unlock()
		return
	}
	s.writing = true
	idle := s.calls.len() == s.unsent
	switch {
	case s.calls.len() > handful || len(s.out) > 16<<10:
		s.l.wg.Add(1)
		s.l.mu.Unlock()
		go s.writeLater(0)
		return
	case idle:
		s.l.mu.Unlock()
		if !s.conn.Quiet() {
			s.l.wg.Add(1)
			go s.writeLater(patience)
			return
		}
		s.l.mu.Lock()
	}
	s.writeAndUnlock()
}

// patience is how long a connection on which no answer is expected, and something has arrived, is left to the goroutine
// that reads: what has arrived may be its end, and then nothing is lost by it.
const patience = 5 * time.Millisecond

func (s *Session) writeLater(most time.Duration) {
	defer s.l.wg.Done()
	for began := time.Now(); most > 0 && time.Since(began) < most && !s.conn.Quiet(); {
		select {
		case <-s.ended:
			most = 0
		case <-time.After(most / 20):
		}
	}
	s.l.mu.Lock()
	s.writeAndUnlock()
}

// writeAndUnlock writes until nothing is left.
func (s *Session) writeAndUnlock() {
	for first := true; ; first = false {
		if s.unsent == 0 || s.over {
			s.writing = false
			s.l.mu.Unlock()
			return
		}
		if !first && s.calls.len() > handful { // a caller is not to write for others, who come and come
			s.writing = false
			s.flushAndUnlock()
			return
		}
		out, now := s.out, time.Now()
		s.out, s.spare = s.spare[:0], nil
		s.calls.sent(s.unsent, now)
		n := s.unsent
		s.unsent = 0
		s.dueLocked(now.Add(s.l.o.Timeout))
		s.l.mu.Unlock()
		wrote, err := s.conn.Write(out)
		s.l.mu.Lock()
		if cap(out) <= keptBuffer {
			s.spare = out
		}
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

// keptBuffer is the largest buffer that is kept.
const keptBuffer = 16 << 10

// read completes calls, until the connection ends.
func (s *Session) read() {
	var p parser
	b := make([]byte, 0, 4<<10)
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := s.conn.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		used := 0
		for used < len(b) {
			v, size, bad := p.next(b[used:])
			if errors.Is(bad, errShort) {
				break
			}
			if bad != nil {
				s.Drop(bad)
				return
			}
			used += size
			if !s.arrived(&v) {
				return
			}
		}
		b = b[:copy(b, b[used:])]
		s.mark.Store(s.conn.Mark())
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("it closed the connection: %w", err)
			}
			s.Drop(err)
			return
		}
		if len(b) == 0 && cap(b) > keptBuffer {
			b = make([]byte, 0, 4<<10)
		}
	}
}

// arrived passes on what was read. It reports whether the session goes on.
func (s *Session) arrived(v *Value) bool {
	l := s.l
	s.replying.Lock()
	defer s.replying.Unlock()
	l.mu.Lock()
	if s.over {
		l.mu.Unlock()
		return false
	}
	if front := s.calls.front(); v.Kind == Push && !(front != nil && subscribed(front, v)) {
		l.mu.Unlock()
		if l.o.Pushed != nil {
			l.o.Pushed(s, v.Items)
		}
		return true
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
	if front := s.calls.front(); front.replies > 1 {
		front.replies--
		l.mu.Unlock()
		return true
	}
	x := s.calls.pop()
	s.answered = true
	told := s.telling
	l.mu.Unlock()
	if told != nil {
		<-told
	}
	again := x.call.Reply(s, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	if again && s.over { // it was not executed, and goes to the next session
		l.waiting = slices.Insert(l.waiting, min(s.waiting, len(l.waiting)), x.call)
	} else if again {
		s.again = append(s.again, x.call)
		s.rebootLocked()
	}
	s.bootIfQuietLocked()
	l.idleLocked()
	return true
}

// look is called when something may be due.
func (s *Session) look() {
	l, now := s.l, time.Now()
	l.mu.Lock()
	oldest := s.calls.front()
	if s.over || oldest == nil || oldest.at.IsZero() {
		s.due = time.Time{}
		l.mu.Unlock()
		return
	}
	asked := s.due
	s.due = time.Time{}
	due := oldest.at.Add(l.o.Timeout + s.put)
	if now.Before(due) {
		s.dueLocked(due)
		l.mu.Unlock()
		return
	}
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
	tell, next := s.calls.late(now.Add(-l.o.Timeout - s.put))
	end := oldest.at.Add(silentAfter*l.o.Timeout + s.put)
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
	if l.session == s {
		l.session = nil
	}
	all := s.calls.all()
	sentOnes := len(all) - s.unsent
	lost, rest := all[:sentOnes:sentOnes], s.again
	for _, x := range all[sentOnes:] {
		if _, is := x.call.(*exec); is { // which is of use to this session only
			lost = append(lost, x)
		} else {
			rest = append(rest, x.call)
		}
	}
	l.waiting = append(rest, l.waiting...)
	s.waiting, s.again, s.unsent = len(s.again), nil, 0
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

// idleLocked reports whether no call is left.
func (s *Session) idleLocked() bool { return s.calls.len() == 0 && len(s.again) == 0 }

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
	var back []Call
	for _, x := range s.calls.takeBack(s.unsent) {
		back = append(back, x.call)
	}
	s.l.waiting = append(back, s.l.waiting...)
	s.unsent, s.out = 0, s.out[:0]
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
	l.suspended.Store(nil)
	s.answered = false
	var obsolete []Call
	for _, waiting := range [][]Call{s.again, l.waiting} {
		for _, c := range waiting {
			if !s.sendLocked(c) {
				obsolete = append(obsolete, c)
			}
		}
	}
	s.again, l.waiting = nil, nil
	s.flushAndUnlock()
	for _, c := range obsolete {
		c.Fail(NotSent, ErrObsolete)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idleLocked()
	return nil
}
