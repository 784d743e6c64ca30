package link

import (
	"errors"
	"fmt"
	"io"
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

	mark atomic.Uint64 // conn.Mark when all that had been read was passed on

	// guarded by l.mu
	open     bool   // calls are written to it
	over     bool   // it has ended
	rebooted bool   // it is to boot again, once there is no call without an answer
	out      []byte // what is encoded, and is not written yet: the last unsent ones of calls
	spare    []byte // the memory of what was written before
	unsent   int
	writing  bool          // somebody writes
	calls    queue         // without an answer, in the order in which they were encoded
	again    []Call        // calls that the server has not executed: the first ones after the next boot
	late     bool          // the oldest call was told that it is late, and nothing has arrived since
	put      time.Duration // by how much deadlines were put off since the last answer
	timer    *time.Timer
	due      time.Time // when the timer comes; zero: it does not
}

// sent is a call without an answer.
type sent struct {
	call Call
	at   time.Time // when it was about to be written; zero: it was not
	told bool      // that it is late
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
	s.calls.push(sent{call: c})
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
	if s.calls.len() > handful || len(s.out) > 16<<10 {
		s.l.wg.Add(1)
		s.l.mu.Unlock()
		go func() {
			defer s.l.wg.Done()
			s.l.mu.Lock()
			s.writeAndUnlock()
		}()
		return
	}
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
		s.writing = false
		s.l.mu.Unlock()
		s.Drop(err)
		return
	}
}

// keptBuffer is the largest buffer that is kept.
const keptBuffer = 64 << 10

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
	x := s.calls.pop()
	s.late, s.put = false, 0
	l.mu.Unlock()
	again := x.call.Reply(s, v)
	l.mu.Lock()
	if again {
		s.again = append(s.again, x.call)
		s.rebootLocked()
	}
	if s.rebooted && s.calls.len() == 0 {
		l.notify()
	}
	l.mu.Unlock()
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
	l.mu.Unlock()
	for _, c := range tell {
		c.Late()
	}
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
	s.again, s.unsent = nil, 0
	l.mu.Unlock()
	_ = s.conn.Close()
	close(s.ended)
	for _, x := range lost {
		x.call.Fail(Lost, why)
	}
}

// Reboot has the session boot again, as after a Reply that says Again.
func (s *Session) Reboot() {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	s.rebootLocked()
	if s.calls.len() == 0 {
		s.l.notify()
	}
}

// rebootLocked has what is not written yet wait until the session has booted again.
func (s *Session) rebootLocked() {
	if s.over || !s.open {
		return
	}
	s.rebooted, s.open = true, false
	var back []Call
	for _, x := range s.calls.takeBack(s.unsent) {
		back = append(back, x.call)
	}
	s.l.waiting = append(back, s.l.waiting...)
	s.unsent, s.out = 0, s.out[:0]
}

// quiet reports whether the session is to boot again, and has no call under way.
func (s *Session) quiet() bool {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.rebooted && s.calls.len() == 0
}

// boot has the session boot, and then sends what has waited for that.
func (s *Session) boot() error {
	l := s.l
	l.mu.Lock()
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
	l.why, s.open = nil, true
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
	return nil
}
