package pubsub

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// maxChannels bounds a command: while the server works on it, it serves nobody else.
	maxChannels = 256

	// maxChannelBytes bounds a command of long keys.
	maxChannelBytes = 1 << 16

	// maxOpen bounds the channels that were requested and not answered yet. The server buffers its
	// answers, and closes a connection whose buffer grows too large.
	maxOpen = 1024
)

// subConn is one subscription connection, from its dial to its end.
//
// A server answers in order, and its errors name neither the command nor the channel. So what was
// written is kept until it is answered: a command of k channels by k confirmations or one error. A
// confirmation that does not fit closes the connection: a new one is the one sure way to know again
// what the server has.
//
// go-redis's PubSub writes and reads for us. It would also dial again whenever it meets an error,
// even in the middle of a receive, and subscribe to everything that it remembers. That must not
// happen without our knowledge, so once it is connected it is given a context that has ended and a
// network that no dialer knows, and it does not request maintenance notifications: the connection
// will be closed, which is enough.
type subConn struct {
	sub   *subscriber
	ps    *redis.PubSub
	moves uint64        // of the server, before the dial
	ended chan struct{} // closed when listen has ended
	err   error         // why; written before ended is closed

	// Guarded by Subscriptions.mu.
	lastRead time.Time  // when anything was read last
	sent     []*command // written and not wholly answered, in order
	open     int        // channels in sent
	drop     []string   // channels to unsubscribe from, before anything else
	split    [][]string // channels to request in these portions, because one among them was refused

	due []*Watch // scratch of listen
}

// verb is what a command requests.
type verb uint8

const (
	ping verb = iota
	subscribe
	unsubscribe
)

type command struct {
	verb verb
	text []string  // the keys as they are written; it does not change, and needs no lock, once that begins
	keys []string  // without those that were answered, which may seem to come before it is written: see revokedLocked
	size int       // bytes of keys, as it was written
	sent time.Time // when it was about to be written
}

func (c *command) add(key string) {
	c.text = append(c.text, key)
	c.keys = c.text
	c.size += len(key)
}

// spent is the context of everything that must not dial. go-redis reads its deadline only, and it
// has none.
var spent = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nowhere is a network that no dialer knows. Not all of them check their context.
const nowhere = "flightlock-none"

// dialSubConn connects and makes the connection the subscriber's.
func dialSubConn(sub *subscriber) (*subConn, error) {
	subs := sub.subs
	moves := sub.server.Moves()
	// The client is this connection's own, so its options may be changed.
	client := conn.WithTimeout(sub.server.Client(), subs.node.TransportTime())
	client.Options().MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	ctx, cancel := context.WithTimeout(subs.life, subs.node.ExchangeTime())
	defer cancel()
	ps, err := conn.Await(ctx, sub.server.SubscriptionDials(), func() (*redis.PubSub, error) {
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
	now := time.Now() // the dial may have taken longer than an answer may
	sc := &subConn{sub: sub, ps: ps, moves: moves, ended: make(chan struct{}), lastRead: now,
		sent: []*command{{verb: ping, sent: now}}}
	subs.mu.Lock()
	sub.conn = sc
	subs.mu.Unlock()
	subs.wg.Go(sc.listen)
	return sc, nil
}

// close closes the connection, and returns when listen has ended. It is not the subscriber's any
// more by then.
func (sc *subConn) close() {
	_ = sc.ps.Close()
	<-sc.ended
}

// send writes a command, which is in sent already: the answer may be read first.
func (sc *subConn) send(c *command) error {
	sharded := sc.sub.subs.node.IsCluster()
	switch {
	case c.verb == ping:
		return sc.ps.Ping(spent)
	case c.verb == subscribe && sharded:
		return sc.ps.SSubscribe(spent, c.text...)
	case c.verb == subscribe:
		return sc.ps.Subscribe(spent, c.text...)
	case sharded:
		return sc.ps.SUnsubscribe(spent, c.text...)
	}
	return sc.ps.Unsubscribe(spent, c.text...)
}

// composeLocked is the command to be written next, nil if there is none. Channels to be dropped
// come first: one of them may be queued again.
func (sc *subConn) composeLocked(now time.Time) *command {
	c := &command{sent: now}
	switch {
	case len(sc.sent) == 0 && now.Sub(sc.lastRead) >= sc.sub.subs.pulse:
		c.verb = ping
	case sc.open >= maxOpen:
		return nil
	case len(sc.drop) > 0:
		c.verb = unsubscribe
		for len(sc.drop) > 0 && sc.fits(c, sc.drop[0]) {
			c.add(sc.drop[0])
			sc.drop = sc.drop[1:]
		}
	case len(sc.split) > 0:
		c.verb, c.text, c.keys = subscribe, sc.split[0], sc.split[0]
		sc.split = sc.split[1:]
	case sc.sub.queued.Len() > 0:
		c.verb = subscribe
		for first := sc.sub.queued.Front(); first != nil; first = sc.sub.queued.Front() {
			t := first.Value.(*topic)
			if !sc.fits(c, t.key) {
				break
			}
			sc.sub.subs.unlistLocked(t)
			t.state = requested
			c.add(t.key)
		}
	default:
		return nil
	}
	sc.sent = append(sc.sent, c)
	sc.open += len(c.keys)
	return c
}

// fits reports whether c may have that channel too. On a Cluster all channels of a command
// must be in one slot.
func (sc *subConn) fits(c *command, key string) bool {
	if len(c.keys) == 0 {
		return true
	}
	if len(c.keys) >= maxChannels || c.size+len(key) > maxChannelBytes {
		return false
	}
	return !sc.sub.subs.node.IsCluster() || node.SlotOf(key) == node.SlotOf(c.keys[0])
}

// overdueLocked is when the connection is to be closed, if an answer is due, or pinged.
func (sc *subConn) overdueLocked() time.Time {
	if len(sc.sent) == 0 {
		return sc.lastRead.Add(sc.sub.subs.pulse)
	}
	since := sc.sent[0].sent
	if sc.lastRead.After(since) {
		since = sc.lastRead
	}
	return since.Add(sc.sub.subs.node.TransportTime())
}

// listen reads until the connection ends.
func (sc *subConn) listen() {
	defer close(sc.ended)
	for {
		msg, err := sc.ps.ReceiveTimeout(spent, 0)
		due, ok := sc.take(msg, err)
		deliver(due)
		clear(due)
		if !ok {
			return
		}
		if m, ok := msg.(*redis.Message); ok && sc.sub.subs.isVote(m) {
			sc.sub.subs.onVote(m.Payload)
		}
	}
}

// take handles one message, and returns the watches whose events are due, and whether to continue.
func (sc *subConn) take(msg any, err error) (due []*Watch, ok bool) {
	subs := sc.sub.subs
	subs.mu.Lock()
	defer subs.mu.Unlock()
	if sc.sub.conn != sc { // the subscriber has dropped it
		return nil, false
	}
	sc.lastRead = time.Now()
	due = sc.due[:0]
	switch m := msg.(type) {
	case *redis.Message:
		if t := subs.topics[m.Channel]; t != nil && t.home == sc.sub && !subs.isVote(m) {
			due = t.messageLocked(due, m.Payload)
		}
	case *redis.Subscription:
		due, err = sc.subscriptionLocked(due, m)
	case *redis.Pong:
		err = sc.answeredLocked(ping, "")
	default:
		if conn.IsReply(err) {
			due, err = sc.errorLocked(due, err)
		}
	}
	sc.due, sc.err = due, err
	if len(sc.drop)+len(sc.split)+sc.sub.queued.Len() > 0 {
		sc.sub.wake()
	}
	return due, err == nil
}

// answeredLocked takes an answer off what was sent; an error reports that it does not fit.
func (sc *subConn) answeredLocked(v verb, key string) error {
	if !sc.expectsLocked(v, key) {
		return fmt.Errorf("unexpected answer: %d %q", v, key)
	}
	c := sc.sent[0]
	if v != ping {
		c.keys = c.keys[1:]
		sc.open--
	}
	if len(c.keys) == 0 {
		sc.popLocked()
	}
	return nil
}

// expectsLocked reports whether that is the next answer due.
func (sc *subConn) expectsLocked(v verb, key string) bool {
	if len(sc.sent) == 0 || sc.sent[0].verb != v {
		return false
	}
	return v == ping || sc.sent[0].keys[0] == key
}

func (sc *subConn) popLocked() *command {
	c := sc.sent[0]
	sc.sent[0] = nil
	sc.sent = sc.sent[1:]
	sc.open -= len(c.keys)
	return c
}

// subscriptionLocked handles a confirmation, or the notice that the server has ended a
// subscription.
func (sc *subConn) subscriptionLocked(due []*Watch, m *redis.Subscription) ([]*Watch, error) {
	if strings.HasSuffix(m.Kind, "unsubscribe") {
		if sc.expectsLocked(unsubscribe, m.Channel) {
			sc.endedLocked(m.Channel)
			return due, sc.answeredLocked(unsubscribe, m.Channel)
		}
		return sc.revokedLocked(due, m.Channel), nil
	}
	if t := sc.topicLocked(m.Channel, requested); t != nil {
		t.state, t.hops = confirmed, 0
		due = t.notifyLocked(due, Event{Kind: Subscribed})
	} else if sc.topicLocked(m.Channel, confirmed) == nil { // dropped meanwhile
		sc.drop = append(sc.drop, m.Channel)
	}
	return due, sc.answeredLocked(subscribe, m.Channel)
}

// topicLocked is the topic of key if it lives here and is in that state.
func (sc *subConn) topicLocked(key string, state topicState) *topic {
	if t := sc.sub.subs.topics[key]; t != nil && t.home == sc.sub && t.state == state {
		return t
	}
	return nil
}

// endedLocked notes that the server has ended the subscription of key, as requested.
func (sc *subConn) endedLocked(key string) {
	t := sc.topicLocked(key, unsubscribing)
	switch {
	case t == nil:
	case len(t.watches) > 0: // watched again meanwhile
		sc.sub.queueLocked(t)
	default:
		sc.sub.subs.removeLocked(t)
	}
}

// revokedLocked notes that the server has ended a subscription by itself: the slot has gone to
// another master. If the topic is not confirmed, something else was requested meanwhile, and the
// answer to that counts. (If we were about to unsubscribe from it, this was taken for the answer,
// and the answer itself counts for nothing.)
func (sc *subConn) revokedLocked(due []*Watch, key string) []*Watch {
	t := sc.topicLocked(key, confirmed)
	if t == nil {
		return due
	}
	sc.sub.subs.node.ForgetSlot(key, sc.sub.server)
	return sc.movedLocked(due, t, "")
}

// movedLocked sends t to another master, at address to if that is known.
func (sc *subConn) movedLocked(due []*Watch, t *topic, to string) []*Watch {
	sc.drop = append(sc.drop, t.key) // for PubSub to forget it
	due = t.notifyLocked(due, Event{Kind: Unsubscribed})
	t.hops++
	switch subs := sc.sub.subs; {
	case len(t.watches) == 0:
		subs.removeLocked(t)
	case !subs.node.IsCluster():
		sc.sub.queueLocked(t)
	case t.hops > node.MaxHops: // the masters do not agree: in a while they will
		t.hops = 0
		sc.sub.refuseLocked(t, time.Now().Add(backoffMax))
	default:
		subs.leaveLocked(t)
		subs.resolveLocked(t, to)
	}
	return due
}

// errorLocked handles the error that a command was answered with. It returns the error if the
// connection is to be closed for it.
func (sc *subConn) errorLocked(due []*Watch, err error) ([]*Watch, error) {
	if len(sc.sent) == 0 {
		return due, err
	}
	c := sc.popLocked()
	switch {
	case c.verb == ping: // any answer will do
	case isTransient(err):
		return due, err
	case c.verb == unsubscribe: // the slot has moved or nobody has it, or it is forbidden
		for _, key := range c.keys {
			sc.endedLocked(key)
		}
	case conn.HasCode(err, "MOVED"):
		to := sc.sub.server.Redirection(err)
		for _, key := range c.keys {
			if t := sc.topicLocked(key, requested); t != nil {
				due = sc.movedLocked(due, t, to)
			}
		}
	case isUnserved(err):
		due = sc.laterLocked(due, c.keys, backoffMax)
	default:
		due = sc.refusedLocked(due, c.keys, err)
	}
	return due, nil
}

// isUnserved reports whether a master of a Cluster refuses a command because no master has its slot. It
// serves its own slots all the same, unless the Cluster requires that all slots have a master.
func isUnserved(err error) bool {
	return conn.HasCode(err, "CLUSTERDOWN") && strings.Contains(err.Error(), "Hash slot not served")
}

// isTransient reports whether a server refuses everything, but not for long.
func isTransient(err error) bool {
	return !isUnserved(err) &&
		conn.HasCode(err, "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "NOAUTH")
}

// refusedLocked notes that the server does not subscribe to one of these channels, or to any. In
// Redis one channel that the user may not read fails the whole command.
func (sc *subConn) refusedLocked(due []*Watch, keys []string, err error) []*Watch {
	text := err.Error()
	switch whole := strings.Contains(text, "unknown command") || strings.Contains(text, "' command"); {
	case whole:
		sc.drop = append(sc.drop, keys...) // for PubSub to forget them
		for _, part := range sc.split {
			sc.drop = append(sc.drop, part...)
		}
		sc.split = nil
		return sc.sub.barLocked(due)
	case len(keys) > 1:
		half := len(keys) / 2
		sc.split = append(sc.split, keys[:half], keys[half:])
	default:
		due = sc.laterLocked(due, keys, sc.sub.subs.bar)
	}
	return due
}

// laterLocked has these channels, which were refused, not requested for a while.
func (sc *subConn) laterLocked(due []*Watch, keys []string, wait time.Duration) []*Watch {
	sc.drop = append(sc.drop, keys...) // for PubSub to forget them
	for _, key := range keys {
		if t := sc.topicLocked(key, requested); t != nil {
			sc.sub.refuseLocked(t, time.Now().Add(wait))
			due = t.notifyLocked(due, Event{Kind: Unsubscribed})
		}
	}
	return due
}
