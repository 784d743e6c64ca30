package link

import (
	"errors"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
)

// Messages arrive among the replies, as the pushes of RESP3, on the connection of the calls: so a message has
// its place in the order of the server, as a reply has, and ends with its connection. There are three dangers
// in that.
//
// What confirms a subscription is a push, too, and a Cluster sends the same one by itself when it ends a
// subscription. So no push is taken for a reply: if one were, every reply behind it would be that of another
// call. A subscription is a command and a PING, and what ends the call is the answer to the PING, which no
// other call has.
//
// A server, or a proxy, may agree on RESP3 and then send no pushes, but messages that look like replies. That
// is found out by what the PING is answered with, and it is the end of the connection, and of subscriptions
// on this link.
//
// And a link that nobody reads while it is at rest (Options.CallersRead) would have messages wait. So it is
// read always while there are subscriptions.

// pong is what the PING behind a subscription is answered with.
const pong = "flightlock:pong"

// errDeaf is why a link has no subscriptions.
var errDeaf = errors.New("the server sends messages in the place of replies")

// ErrNoPushes is why a server has no subscriptions that has refused RESP3.
var ErrNoPushes = errors.New("the server does not speak RESP3, by which messages come")

// Pushes is why there are no subscriptions on s, or nil.
func (s *Session) Pushes() error {
	switch {
	case !s.conn.RESP3:
		return ErrNoPushes
	case s.l.deaf.Load():
		return errDeaf
	}
	return nil
}

// Listen sends verb, such as SUBSCRIBE, for a channel, on s alone. What the server says is for Pushed: a
// confirmation comes before done is called, which gets the error for which there is none. It is as Reply and
// Fail of a Call.
func (s *Session) Listen(verb, channel string, done func(err error)) {
	s.l.Do(&listening{s: s, verb: verb, channel: channel, done: done}, false)
}

// listening is the call that begins or ends a subscription.
type listening struct {
	s             *Session
	verb, channel string
	done          func(error)

	// Guarded by the Link's mu.
	began     bool // it was encoded
	confirmed bool // a push has confirmed it: what comes next is the answer to the PING, but see takeLocked
	refused   error
}

// ends reports whether c ends a subscription.
func (c *listening) ends() bool { return strings.Contains(strings.ToLower(c.verb), "unsub") }

func (c *listening) Encode(b []byte, on *Session) ([]byte, bool) {
	if on != c.s {
		return nil, false
	}
	if !c.ends() && !c.began {
		on.channels++
	}
	c.began = true
	return AppendCommand(AppendCommand(b, c.verb, c.channel), "PING", pong), true
}

// takeLocked takes what is no push. last: it was the answer to the PING, which may be refused: that is an
// answer as well. ok is false if it is no answer to c.
func (c *listening) takeLocked(v *Value) (last, ok bool) {
	switch {
	case v.Kind == String && string(v.Text) == pong:
		return true, true
	case v.Kind != Error:
		return false, false
	case c.confirmed && !(c.ends() && conn.HasCode(v.Err(), "MOVED", "CLUSTERDOWN")), c.refused != nil:
		return true, true
	}
	c.refused = v.Err() // where a Cluster has ended a subscription by itself, that push came before this
	return false, true
}

// confirmLocked takes a push that came while c had no answer yet.
func (c *listening) confirmLocked(v *Value) {
	if len(v.Items) > 1 && strings.EqualFold(string(v.Items[0].Text), c.verb) &&
		string(v.Items[1].Text) == c.channel {
		c.confirmed = true
	}
}

func (c *listening) Patient() bool { return false }

func (c *listening) Urgent() bool { return false }

// Replies are not counted: takeLocked knows which is the last.
func (c *listening) Replies() int { return 1 }

func (c *listening) Late() {}

func (c *listening) Reply(*Session, *Value) bool {
	c.end(c.refused)
	return false
}

func (c *listening) Fail(_ Delivery, err error) { c.end(err) }

func (c *listening) end(err error) {
	s := c.s
	s.l.mu.Lock()
	if c.began && (c.ends() || err != nil) {
		s.channels--
	}
	s.l.mu.Unlock()
	c.done(err)
}

// listeningLocked is the oldest call, if that is one of these.
func (s *Session) listeningLocked() *listening {
	if front := s.calls.front(); front != nil {
		if c, is := front.call.(*listening); is && s.calls.len() > s.unsent {
			return c
		}
	}
	return nil
}

// Pulse asks a server for a sign of life that has answered nothing since it was called last: else nothing
// shows that a connection is dead on which only messages are waited for.
func (s *Session) Pulse() {
	l := s.l
	l.mu.Lock()
	silent := s.open && s.popped == s.pulse && s.calls.len() == 0
	s.pulse = s.popped
	l.mu.Unlock()
	if silent {
		l.Do(&exec{s: s, args: []string{"PING"}, done: func(*Value, error) {}, pulse: true}, false)
	}
}

// isIdle reports whether nobody waits for the call itself, but for messages, or for nothing yet: a Pulse or a
// subscription. Its server may have a hiccup of conn.TransportTimeout, as on a connection of messages alone,
// before the link is suspended for it, which costs more than late messages do.
func (x *sent) isIdle() bool {
	switch c := x.call.(type) {
	case *listening:
		return true
	case *exec:
		return c.pulse
	}
	return false
}

// isOfBoot reports whether the call is a boot's.
func (x *sent) isOfBoot() bool {
	c, is := x.call.(*exec)
	return is && !c.pulse
}

// deadlinesLocked are when the first call is late, and when the session is over if nothing has arrived until
// then. An idle call is not late, and has silentAfter times Timeout as well where others wait until it has
// ended, for a boot. The calls are not empty, and the first one was written.
func (s *Session) deadlinesLocked() (late, silent time.Time) {
	timeout := s.l.o.Timeout
	for i := range s.calls.len() - s.unsent {
		x := s.calls.at(i)
		switch {
		case x.at.IsZero(): // its write has failed
			return silent, silent
		case !x.isIdle() || !s.open:
			end := x.at.Add(silentAfter * timeout)
			if i > 0 {
				end = clock.Earlier(end, silent)
			}
			if x.isOfBoot() { // what follows has its time when this has its answer
				return end, end
			}
			return clock.Earlier(x.at.Add(timeout), end), end
		case i == 0:
			silent = x.at.Add(max(silentAfter*timeout, conn.TransportTimeout))
		}
	}
	return silent, silent
}

// Wake has Attend called soon, and a link made if there is none.
func (l *Link) Wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.startLocked()
	l.needed = l.needed || l.session == nil
	if l.Err() == nil { // else it is dialled now and then, and this is no hurry
		l.notify()
	}
}
