package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// The reading role: one goroutine at a time reads from a connection. It is the session's own, by serve. But
// where calls are mostly alone (Options.CallersRead), the caller that waits for such a call reads: else the
// system wakes the session's goroutine for the reply, and that wakes the caller, maybe on another processor,
// which costs more than everything else that a call costs in this process.
//
//	          sends a call, waits for it, and there is no other
//	nobody ------------------------------------------------------> the caller
//	 |  ^ ^                                                         |  |
//	 |  | +---------- its call has ended, or has had Timeout -------+  | then, if others have no answer yet
//	 |  |                                                              v
//	 |  +------------ no call is without an answer --------- the session's goroutine
//	 +--------------- any other call is sent ----------------------^
//
// A caller reads for nobody else, and nobody waits for a caller that reads: what others send meanwhile is
// behind its call on the server, too. After Timeout a caller that reads is woken by a read deadline in the
// past (kick), which whoever reads next removes: a caller has been promised that it takes no longer, also
// where the server is not to blame yet. What was read and not passed on belongs to the session, and so to
// whoever reads next.

// serve is the session's own goroutine. It reads while there is something to read for and nobody else does,
// until the session has ended.
func (s *Session) serve() {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	for !s.over {
		if s.reading || s.restsLocked() {
			s.wanted.Wait()
			continue
		}
		s.reading = true
		s.l.mu.Unlock()
		s.read(nil)
		s.l.mu.Lock()
		s.reading = false
	}
}

// restsLocked reports whether nobody need read. It is for the goroutine that has the role, or if none has.
func (s *Session) restsLocked() bool {
	return s.rests && s.channels == 0 && s.calls.len() == 0 && s.used == len(s.in)
}

// haveReadLocked has the session's own goroutine read, unless another one does, which then sees to that.
func (s *Session) haveReadLocked() {
	if !s.reading {
		s.wanted.Signal()
	}
}

// takeRoleLocked gives the role to a caller that is about to send a call, if there is no other.
func (s *Session) takeRoleLocked() bool {
	if s.reading || s.writing || !s.restsLocked() {
		return false
	}
	s.reading, s.readsFor = true, s.popped
	return true
}

// readFor reads on the goroutine of c's caller, which has taken the role and sent c, until c has ended or has
// had Timeout. If c was not written, because something has arrived before it, the session's goroutine reads.
func (s *Session) readFor(c Call) {
	defer func() { // also if the user's connection panics, on its caller's goroutine
		s.l.mu.Lock()
		defer s.l.mu.Unlock()
		s.reading = false
		if s.over || !s.restsLocked() {
			s.wanted.Signal()
		}
	}()
	if s.readsOn(c) {
		s.read(c)
	}
}

// read reads and passes on until c has ended or has had Timeout; if c is nil, until the session rests. It
// returns sooner if the session has ended.
func (s *Session) read(c Call) {
	for goesOn := true; goesOn; {
		v, size, err := s.parser.next(s.in[s.used:])
		switch {
		case err == nil:
			s.used += size
			goesOn = s.arrived(&v, c)
			if s.used == len(s.in) {
				s.mark.Store(s.conn.Mark())
			}
			continue
		case errors.Is(err, errShort):
			err = s.fill()
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded): // by kick, maybe for one that has read before
			if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
				s.Drop(err)
			}
			goesOn = s.readsOn(c)
		default:
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("it closed the connection: %w", err)
			}
			s.Drop(err)
			return
		}
	}
}

// keptBuffer is how large a buffer is kept for what was read.
const keptBuffer = 64 << 10

// fill reads what there is, behind what was not passed on.
func (s *Session) fill() error {
	s.mark.Store(s.conn.Mark())
	b := s.in[:copy(s.in, s.in[s.used:])]
	switch {
	case cap(b) == 0, len(b) == 0 && cap(b) > keptBuffer:
		b = make([]byte, 0, 4<<10)
	case len(b) == cap(b):
		b = append(b, 0)[:len(b)]
	}
	n, err := s.conn.Read(b[len(b):cap(b)])
	s.in, s.used = b[:len(b)+n], 0
	if n > 0 {
		return nil // an error comes again
	}
	return err
}

// readsOn reports whether the goroutine that reads for c goes on. See read.
func (s *Session) readsOn(c Call) bool {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.readsOnLocked(c)
}

func (s *Session) readsOnLocked(c Call) bool {
	if s.over {
		return false
	}
	if c == nil {
		return !s.restsLocked()
	}
	front := s.calls.front() // which may be c once more, sent by its Reply
	return front != nil && front.call == c && s.popped == s.readsFor &&
		time.Since(front.at) < s.l.o.Timeout // not so if it was not written
}

// kick has a caller that reads find out that its time is up.
func (s *Session) kick() {
	if s.rests {
		s.conn.GiveUp()
	}
}
