package node

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// maxChannels bounds a command: while the server works on it, nobody else is served.
	maxChannels = 256

	// maxChannelBytes bounds a command of long keys.
	maxChannelBytes = 1 << 16

	// maxOpen bounds the channels that were asked for and not answered yet. The server
	// buffers its answers, and ends a connection whose buffer grows too large.
	maxOpen = 1024
)

// link is one subscription connection, from its dial to its end.
//
// A server answers in order, and says of an error neither which command nor which channel
// it is about. So what was written is kept until it is answered: a command of k channels by
// k confirmations or one error. A confirmation that does not fit ends the link: a
// new one is the one sure way to know again what the server has.
//
// go-redis' PubSub writes and reads for us. It would also dial again whenever it meets an
// error, even in the middle of a receive, and subscribe to everything that it remembers.
// That must not happen behind our back, so once it is connected it is given a context
// that has ended and a network that no dialer knows, and it does not ask to be told where to
// move to when the server is maintained: the connection will be closed, which is enough.
type link struct {
	f     *feed
	ps    *redis.PubSub
	ended chan struct{} // closed when nobody reads any more
	err   error         // why; written before ended is closed

	// Guarded by notices.mu.
	heard time.Time  // when anything was read last
	asked []*command // written and not wholly answered, in order
	open  int        // channels in asked
	drop  []string   // channels to unsubscribe from, before anything else
	split [][]string // channels to ask for in these portions, because one among them was refused

	told []*Watch // scratch of listen
}

// verb is what a command asks for.
type verb uint8

const (
	ping verb = iota
	subscribe
	unsubscribe
)

type command struct {
	verb verb
	text []string  // the keys, as they are written; does not change any more, and needs no lock, when that begins
	keys []string  // without those that were answered, which may seem to come before it is written: see revokedLocked
	size int       // bytes of keys, as it was written
	sent time.Time // when it was about to be written
}

func (c *command) add(key string) {
	c.text = append(c.text, key)
	c.keys = c.text
	c.size += len(key)
}

// spent is the context of everything that must not dial. go-redis looks at its deadline
// only, of which it has none.
var spent = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nowhere is a network that no dialer knows. Not all of them look at their context.
const nowhere = "flightlock-none"

// maxDials bounds the dials of one server's links that hang at once. One that hangs for ever does not
// end its notices.
const maxDials = 4

// dialLink connects and makes l the feed's link.
func dialLink(f *feed) (*link, error) {
	n := f.ns.n
	client := conn.WithTimeout(f.s.from, n.transportTime()) // this link's own, whose options may change
	client.Options().MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	ctx, cancel := context.WithTimeout(n.life, n.exchangeTime())
	defer cancel()
	now := time.Now()
	ps, err := conn.Await(ctx, f.s.dialling, func() (*redis.PubSub, error) {
		ps := client.Subscribe(ctx)
		err := ps.Ping(ctx) // which dials
		if err != nil {
			_ = ps.Close()
		}
		return ps, err
	}, func(ps *redis.PubSub) { _ = ps.Close() })
	if err != nil {
		return nil, err
	}
	client.Options().Network = nowhere
	l := &link{f: f, ps: ps, ended: make(chan struct{}), heard: now, asked: []*command{{verb: ping, sent: now}}}
	f.ns.mu.Lock()
	f.link = l
	f.ns.mu.Unlock()
	n.wg.Add(1)
	go l.listen()
	return l, nil
}

// close ends the connection, and returns when nobody reads any more. It is not the feed's
// link by then.
func (l *link) close() {
	_ = l.ps.Close()
	<-l.ended
}

// send writes a command, which is in asked already: the answer may be read first.
func (l *link) send(c *command) error {
	sharded := l.f.ns.router != nil
	switch {
	case c.verb == ping:
		return l.ps.Ping(spent)
	case c.verb == subscribe && sharded:
		return l.ps.SSubscribe(spent, c.text...)
	case c.verb == subscribe:
		return l.ps.Subscribe(spent, c.text...)
	case sharded:
		return l.ps.SUnsubscribe(spent, c.text...)
	}
	return l.ps.Unsubscribe(spent, c.text...)
}

// composeLocked is the command to be written next, nil if there is none. Channels to be
// dropped come first: one of them may be wanted again.
func (l *link) composeLocked(now time.Time) *command {
	c := &command{sent: now}
	switch {
	case len(l.asked) == 0 && now.Sub(l.heard) >= l.f.ns.pulse:
		c.verb = ping
	case l.open >= maxOpen:
		return nil
	case len(l.drop) > 0:
		c.verb = unsubscribe
		for len(l.drop) > 0 && l.fits(c, l.drop[0]) {
			c.add(l.drop[0])
			l.drop = l.drop[1:]
		}
	case len(l.split) > 0:
		c.verb, c.text, c.keys = subscribe, l.split[0], l.split[0]
		l.split = l.split[1:]
	case l.f.wanted.Len() > 0:
		c.verb = subscribe
		for first := l.f.wanted.Front(); first != nil; first = l.f.wanted.Front() {
			t := first.Value.(*topic)
			if !l.fits(c, t.key) {
				break
			}
			l.f.ns.unplaceLocked(t)
			t.state = asked
			c.add(t.key)
		}
	default:
		return nil
	}
	l.asked = append(l.asked, c)
	l.open += len(c.keys)
	return c
}

// fits says whether c may have that channel too. On a Cluster all channels of a command
// must be in one slot.
func (l *link) fits(c *command, key string) bool {
	if len(c.keys) == 0 {
		return true
	}
	if len(c.keys) >= maxChannels || c.size+len(key) > maxChannelBytes {
		return false
	}
	return l.f.ns.router == nil || slotOf(key) == slotOf(c.keys[0])
}

// overdueLocked is when the link is to be given up, if an answer is due, or pinged.
func (l *link) overdueLocked() time.Time {
	if len(l.asked) == 0 {
		return l.heard.Add(l.f.ns.pulse)
	}
	since := l.asked[0].sent
	if l.heard.After(since) {
		since = l.heard
	}
	return since.Add(l.f.ns.n.transportTime())
}

// listen reads until the connection ends.
func (l *link) listen() {
	defer l.f.ns.n.wg.Done()
	defer close(l.ended)
	for {
		msg, err := l.ps.ReceiveTimeout(spent, 0)
		heard, ok := l.take(msg, err)
		tell(heard)
		clear(heard)
		if !ok {
			return
		}
	}
}

// take makes of one message what it means, and says who has to be told, and whether to go on.
func (l *link) take(msg any, err error) (heard []*Watch, ok bool) {
	ns := l.f.ns
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if l.f.link != l { // the feed has given it up
		return nil, false
	}
	l.heard = time.Now()
	heard = l.told[:0]
	switch m := msg.(type) {
	case *redis.Message:
		if t := ns.topics[m.Channel]; t != nil && t.feed == l.f {
			heard = t.noteLocked(heard, Notice, m.Payload)
		}
	case *redis.Subscription:
		heard, err = l.subscriptionLocked(heard, m)
	case *redis.Pong:
		err = l.answeredLocked(ping, "")
	default:
		if conn.IsReply(err) {
			heard, err = l.errorLocked(heard, err)
		}
	}
	l.told, l.err = heard, err
	if len(l.drop)+len(l.split)+l.f.wanted.Len() > 0 {
		l.f.wake()
	}
	return heard, err == nil
}

// answeredLocked takes an answer off what was asked, or says that it does not fit.
func (l *link) answeredLocked(v verb, key string) error {
	if !l.expectsLocked(v, key) {
		return fmt.Errorf("an answer to what was not asked: %d %q", v, key)
	}
	c := l.asked[0]
	if v != ping {
		c.keys = c.keys[1:]
		l.open--
	}
	if len(c.keys) == 0 {
		l.popLocked()
	}
	return nil
}

// expectsLocked says whether that is the next answer due.
func (l *link) expectsLocked(v verb, key string) bool {
	if len(l.asked) == 0 || l.asked[0].verb != v {
		return false
	}
	return v == ping || l.asked[0].keys[0] == key
}

func (l *link) popLocked() *command {
	c := l.asked[0]
	l.asked[0] = nil
	l.asked = l.asked[1:]
	l.open -= len(c.keys)
	return c
}

// subscriptionLocked takes a confirmation, or the news that a channel was taken away from us.
func (l *link) subscriptionLocked(heard []*Watch, m *redis.Subscription) ([]*Watch, error) {
	if strings.HasSuffix(m.Kind, "unsubscribe") {
		if l.expectsLocked(unsubscribe, m.Channel) {
			l.leftLocked(m.Channel)
			return heard, l.answeredLocked(unsubscribe, m.Channel)
		}
		return l.revokedLocked(heard, m.Channel), nil
	}
	if t := l.topicLocked(m.Channel, asked); t != nil {
		t.state, t.hops = confirmed, 0
		heard = t.noteLocked(heard, Subscribed, "")
	} else if l.topicLocked(m.Channel, confirmed) == nil { // given up meanwhile
		l.drop = append(l.drop, m.Channel)
	}
	return heard, l.answeredLocked(subscribe, m.Channel)
}

// topicLocked is the topic of key if it lives here and is in that state.
func (l *link) topicLocked(key string, state topicState) *topic {
	if t := l.f.ns.topics[key]; t != nil && t.feed == l.f && t.state == state {
		return t
	}
	return nil
}

// leftLocked notes that the server has nothing of key any more, as we wanted.
func (l *link) leftLocked(key string) {
	t := l.topicLocked(key, leaving)
	switch {
	case t == nil:
	case len(t.watches) > 0: // watched again meanwhile
		l.f.wantLocked(t)
	default:
		l.f.ns.forgetLocked(t)
	}
}

// revokedLocked notes that the server has dropped a subscription by itself: the slot has
// gone to another master. If the topic is not confirmed, then we have asked for
// something else meanwhile, and the answer to that counts. (If we were about to unsubscribe
// from it, this was taken for the answer, and it is the answer that counts for nothing.)
func (l *link) revokedLocked(heard []*Watch, key string) []*Watch {
	t := l.topicLocked(key, confirmed)
	if t == nil {
		return heard
	}
	if ro := l.f.ns.router; ro != nil {
		ro.owner[slotOf(key)].CompareAndSwap(l.f.s, nil)
	}
	return l.movedLocked(heard, t, "")
}

// movedLocked sends t to another master, at address to if that is known.
func (l *link) movedLocked(heard []*Watch, t *topic, to string) []*Watch {
	l.drop = append(l.drop, t.key) // for PubSub to forget it
	heard = t.noteLocked(heard, Broken, "")
	t.hops++
	switch ns := l.f.ns; {
	case len(t.watches) == 0:
		ns.forgetLocked(t)
	case ns.router == nil:
		l.f.wantLocked(t)
	case t.hops > maxHops: // the masters do not agree: in a while they will
		t.hops = 0
		l.f.refuseLocked(t, time.Now().Add(backoffMax))
	default:
		ns.leaveFeedLocked(t)
		ns.lookLocked(t, to)
	}
	return heard
}

// errorLocked takes the error that a command was answered with. It gives the error back if
// the link is to end for it.
func (l *link) errorLocked(heard []*Watch, err error) ([]*Watch, error) {
	if len(l.asked) == 0 {
		return heard, err
	}
	c := l.popLocked()
	switch {
	case c.verb == ping: // any answer will do
	case passing(err):
		return heard, err
	case c.verb == unsubscribe: // the slot has moved, or it is forbidden
		for _, key := range c.keys {
			l.leftLocked(key)
		}
	case conn.HasCode(err, "MOVED"):
		to := l.f.s.redirection(err)
		for _, key := range c.keys {
			if t := l.topicLocked(key, asked); t != nil {
				heard = l.movedLocked(heard, t, to)
			}
		}
	default:
		heard = l.refusedLocked(heard, c.keys, err)
	}
	return heard, nil
}

// passing reports whether a server refuses everything, and will not for long.
func passing(err error) bool {
	return conn.HasCode(err, "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "NOAUTH")
}

// refusedLocked notes that the server does not subscribe to one of these channels, or to
// none at all. In Redis one channel that the user may not read fails the whole command.
func (l *link) refusedLocked(heard []*Watch, keys []string, err error) []*Watch {
	text := err.Error()
	switch whole := strings.Contains(text, "unknown command") || strings.Contains(text, "' command"); {
	case whole:
		l.drop = append(l.drop, keys...) // for PubSub to forget them
		for _, part := range l.split {
			l.drop = append(l.drop, part...)
		}
		l.split = nil
		return l.f.barLocked(heard)
	case len(keys) > 1:
		half := len(keys) / 2
		l.split = append(l.split, keys[:half], keys[half:])
	default:
		l.drop = append(l.drop, keys...) // for PubSub to forget it
		if t := l.topicLocked(keys[0], asked); t != nil {
			l.f.refuseLocked(t, time.Now().Add(l.f.ns.bar))
			heard = t.noteLocked(heard, Broken, "")
		}
	}
	return heard
}
