package node

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
)

// Messages of a node arrive on the link that its requests use: those of a client's inbox, or on a Cluster
// those of the channel that is named as a key, on the link to the master that the polls for this key are sent
// to.
//
//	         Attend of the home's link           the push that confirms it
//	pending ---------------------------> asked ---------------------------> confirmed
//	   ^                                   |                                    |
//	   +------ refused, for a while -------+                                    |
//	   +------ the session has ended, or the slot has moved --------------------+
//
// A topic is a channel that is watched. Its home is the only server, or the master of its slot, as far as the
// node knows it: which that is, polls find out, since whoever waits and is not subscribed polls. So nothing
// is looked up for topics. One that nobody watches any more is kept for a while, so that a key that is
// watched now and again is not subscribed each time.
//
// No wake-up is lost, provided that the listener checks the key after each Subscribed, and not only then once
// it has received Unsubscribed: what is published after that check arrives on the session, or that ends, and
// then all who watch receive Unsubscribed. A connection that has died in silence is found by the link's
// Pulse.
//
// The events of a topic are delivered by one goroutine at a time and in order: those of a session by whoever
// reads it, and its end by the link's own goroutine, after that. The topic is pending only when all have
// heard so, and no session can bring events before. No mutex is held meanwhile.
//
// The simpler design, connections of their own for subscriptions, was rejected: it costs each server a
// connection of each client, and a message says nothing of the link by which a vote is to count.

const (
	topicIdle = 5 * time.Second // how long a subscription outlives its last watch
	// how long a channel is not asked for that the server cannot subscribe to just now
	topicPause = time.Second
	topicBar   = 30 * time.Second // how long one is not that it refuses
	pulseTime  = time.Second      // between two looks whether the link lives
)

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events.
const (
	// confirmed, maybe again: earlier messages may have been missed, so check the key
	Subscribed   EventKind = iota + 1
	Unsubscribed           // messages may be missed from now on, until Subscribed comes
	Message                // was published; Text is its text
)

// Event is what a Watch reports.
type Event struct {
	Kind EventKind
	Text string // of a Message
}

// Listener receives the events of a Watch. OnEvent is called by goroutines of the node, with no mutex held,
// one call at a time and in order. It must not block, and may call Watch and Stop. i is what Watch was given.
type Listener interface {
	OnEvent(i int, e Event)
}

// A Watch is one listener's interest in a channel.
type Watch struct {
	n    *Node
	name string // of the messages that are for it; "": all
	i    int
	l    Listener

	// Guarded by the node's topics' mu.
	topic *topic // nil: stopped
	at    int    // topic.watches[at] is this one
}

// topics are those of a node.
type topics struct {
	mu      sync.Mutex // guards what follows, every field of a topic, and the topics of the servers
	closed  bool
	all     map[string]*topic
	pending map[*topic]struct{}
	deaf    error // that Unheard was called with last
}

// topic is the subscription of one channel.
type topic struct {
	channel   string
	slot      uint16
	watches   []*Watch          // in no order
	named     map[string]*Watch // those of them that have a name
	on        *link.Session     // where it was asked for; nil: nowhere
	confirmed bool
	leaving   bool      // its end was asked for
	since     time.Time // when it was confirmed last
	again     time.Time // not asked for before that
	idle      time.Time // since when nobody watches
}

// Watch has l receive what is published on a channel, until Stop: messages that begin with name and a space,
// of which no other watch of the channel has the same; or all, if name is "". It does no I/O. If the channel
// is confirmed already, so says it, and a Subscribed counts as received. Otherwise the watch counts as
// Unsubscribed until it receives Subscribed, which does not come while the server cannot or will not
// subscribe: then l must poll. OnEvent is never called by the caller of Watch itself, but may be called
// before Watch returns.
//
// After CloseWatches nothing is received, and Watch is harmless.
func (n *Node) Watch(channel, name string, i int, l Listener) (w *Watch, subscribed bool) {
	w = &Watch{n: n, name: name, i: i, l: l}
	ts := &n.topics
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.closed {
		return w, false
	}
	t := ts.all[channel]
	if t == nil {
		t = &topic{channel: channel, slot: SlotOf(channel), named: map[string]*Watch{}}
		if ts.all == nil {
			ts.all, ts.pending = map[string]*topic{}, map[*topic]struct{}{}
		}
		ts.all[channel] = t
	}
	w.topic, w.at, t.watches = t, len(t.watches), append(t.watches, w)
	if name != "" {
		t.named[name] = w
	}
	if t.on == nil {
		n.pendLocked(t)
	}
	return w, t.confirmed && !t.leaving
}

// Stop ends the watch. It never blocks. An OnEvent that is in progress on another goroutine, or was just
// about to be called there, may still run after Stop has returned: one at most. Calls after the first do
// nothing.
func (w *Watch) Stop() {
	ts := &w.n.topics
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := w.topic
	if t == nil {
		return
	}
	w.topic = nil
	if t.named[w.name] == w {
		delete(t.named, w.name)
	}
	last := len(t.watches) - 1
	t.watches[w.at] = t.watches[last]
	t.watches[w.at].at = w.at
	t.watches[last] = nil
	t.watches = t.watches[:last]
	if last > 0 {
		return
	}
	t.idle = time.Now()
	if _, pending := ts.pending[t]; pending && !t.idle.Before(t.again) { // else attend does so
		ts.removeLocked(t)
	}
}

// CloseWatches ends all watches.
func (n *Node) CloseWatches() {
	ts := &n.topics
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.closed, ts.all, ts.pending = true, nil, nil
	n.each(func(s *Server) { s.topics = nil })
}

func (ts *topics) removeLocked(t *topic) {
	delete(ts.pending, t)
	delete(ts.all, t.channel)
}

// home is the server that has the topics of a slot; nil: it is not known.
func (n *Node) home(slot uint16) *Server {
	if n.router == nil {
		return n.server
	}
	return n.router.owner[slot].Load()
}

// pendLocked has t, which is on no session, asked for by its home, if that is known, or if nobody watches it,
// removed.
func (n *Node) pendLocked(t *topic) {
	ts := &n.topics
	if ts.closed {
		return
	}
	if len(t.watches) == 0 && !time.Now().Before(t.again) {
		ts.removeLocked(t)
		return
	}
	ts.pending[t] = struct{}{}
	if s := n.home(t.slot); s != nil {
		s.wake()
	}
}

// learned is called when a master of a Cluster was found to have a slot.
func (n *Node) learned(s *Server) {
	n.topics.mu.Lock()
	defer n.topics.mu.Unlock()
	if len(n.topics.pending) > 0 {
		s.wake()
	}
}

// wake has attend called soon, on a link that is made if there is none.
func (s *Server) wake() {
	s.start.Do(s.follows)
	s.link.Wake()
}

// verb is the command by which channels are subscribed to, or by which that ends.
func (s *Server) verb(ends bool) string {
	verb := "SUBSCRIBE"
	if ends {
		verb = "UN" + verb
	}
	if s.n.IsCluster() { // the slot of the channel is the key's
		verb = "S" + verb
	}
	return verb
}

// attend asks for the pending topics whose home s is, ends those that nobody watches, and sees that the link
// lives while there are any. It is Attend of the link.
func (s *Server) attend(on *link.Session) (again time.Duration) {
	n, ts, now := s.n, &s.n.topics, time.Now()
	var ask, leave []*topic
	ts.mu.Lock()
	for t := range ts.pending {
		if n.home(t.slot) != s {
			continue
		}
		switch again = pulseTime; {
		case now.Before(t.again), now.Before(s.barred):
		case len(t.watches) == 0:
			ts.removeLocked(t)
		default:
			ask = append(ask, t)
		}
	}
	deaf := on.Pushes()
	if deaf != nil && len(ask) > 0 {
		ask, again = nil, 0
		defer s.unheard(deaf)
	}
	for _, t := range ask {
		delete(ts.pending, t)
		if s.topics == nil {
			s.topics = map[string]*topic{}
		}
		t.on, s.topics[t.channel] = on, t
	}
	for _, t := range s.topics {
		if again = pulseTime; t.confirmed && !t.leaving && len(t.watches) == 0 && now.Sub(t.idle) >= topicIdle {
			t.leaving = true
			leave = append(leave, t)
		}
	}
	ts.mu.Unlock()
	for _, t := range inOrder(ask) {
		on.Listen(s.verb(false), t.channel, func(err error) { s.asked(on, t, err) })
	}
	for _, t := range inOrder(leave) {
		on.Listen(s.verb(true), t.channel, func(error) { s.left(on, t) })
	}
	if again > 0 && now.Sub(s.pulse) >= pulseTime {
		s.pulse = now
		on.Pulse()
	}
	return again
}

// inOrder sorts topics, so that a simulation can repeat what it does.
func inOrder(all []*topic) []*topic {
	slices.SortFunc(all, func(a, b *topic) int { return strings.Compare(a.channel, b.channel) })
	return all
}

// asked is called when the server has confirmed t, or will not: for that reason.
func (s *Server) asked(on *link.Session, t *topic, err error) {
	n, ts := s.n, &s.n.topics
	ts.mu.Lock()
	if ts.closed { // then a confirmation finds no topic, and nobody wants one
		ts.mu.Unlock()
		return
	}
	if err == nil && !t.confirmed && t.on == on {
		err = errNotConfirmed
	}
	deaf := false                                 // the server, and not for this channel alone
	if err != nil && t.on == on && !t.confirmed { // else the session has ended since, and so ended says
		pause, now := topicPause, time.Now()
		switch {
		case n.router != nil && conn.HasCode(err, "MOVED"):
			pause = 0 // until the next poll finds the master
			n.router.owner[t.slot].CompareAndSwap(s, nil)
		case errors.Is(err, link.ErrObsolete), errors.Is(err, link.ErrSuspended):
			pause = 0 // until there is another connection. If one has ended by this, the next is not to, at once
		case conn.IsReply(err) && !conn.Says(err, conn.Passing):
			pause, deaf = topicBar, n.router == nil || isOfAll(err)
			if deaf {
				s.barred = now.Add(topicBar)
			}
		}
		t.again = now.Add(pause)
		s.dropTopicLocked(t)
		n.pendLocked(t)
	}
	ts.mu.Unlock()
	if deaf || err == nil {
		s.unheard(err)
	}
}

// errNotConfirmed stands for the error that a server did not answer with.
var errNotConfirmed = conn.ServerError("the server does not confirm subscriptions")

// isOfAll reports whether err refuses the command, and not a channel.
func isOfAll(err error) bool {
	text := err.Error()
	return strings.Contains(text, "unknown command") || strings.Contains(text, "' command")
}

// left is called when the server has ended t, as was asked for, or will not: then what it still publishes is
// nobody's.
func (s *Server) left(on *link.Session, t *topic) {
	s.n.topics.mu.Lock()
	defer s.n.topics.mu.Unlock()
	if t.on == on {
		s.dropTopicLocked(t)
		s.n.pendLocked(t) // it may be watched again
	}
}

// dropTopicLocked takes t from its session.
func (s *Server) dropTopicLocked(t *topic) {
	t.on, t.confirmed, t.leaving = nil, false, false
	delete(s.topics, t.channel)
}

// ended takes the topics of a session that has ended from it. It is Ended of the link.
func (s *Server) ended(on *link.Session) {
	s.n.topics.mu.Lock()
	all := make([]*topic, 0, len(s.topics))
	for _, t := range s.topics {
		if t.on == on {
			all = append(all, t)
		}
	}
	s.n.topics.mu.Unlock()
	for _, t := range inOrder(all) {
		s.lose(on, t)
	}
}

// lose tells all who watch t that its messages do not come any more on that session.
func (s *Server) lose(on *link.Session, t *topic) {
	ts := &s.n.topics
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t.on != on {
		return
	}
	var watches []*Watch
	if t.confirmed {
		watches = slices.Clone(t.watches)
	}
	if time.Since(t.since) < topicPause { // it may have ended by this
		t.again = time.Now().Add(topicPause)
	}
	s.dropTopicLocked(t)
	ts.mu.Unlock()
	deliver(watches, Event{Kind: Unsubscribed})
	ts.mu.Lock()
	s.n.pendLocked(t)
}

// pushed is Pushed of the link.
func (s *Server) pushed(on *link.Session, items []link.Value) {
	if len(items) < 3 {
		return
	}
	channel := string(items[1].Text)
	switch string(items[0].Text) {
	case "message", "smessage":
		s.message(on, channel, string(items[2].Text))
	case "subscribe", "ssubscribe":
		deliver(s.confirm(on, channel), Event{Kind: Subscribed})
	case "sunsubscribe": // on a Cluster
		if t := s.revoked(on, channel); t != nil {
			s.n.router.owner[t.slot].CompareAndSwap(s, nil)
			s.lose(on, t)
		}
	}
}

// message takes one that was published on a channel. A vote counts only on the open link that has booted
// (S17): pub/sub reaches who has not, and the name of an epoch is known to others.
func (s *Server) message(on *link.Session, channel, text string) {
	n := s.n
	n.topics.mu.Lock()
	var watches []*Watch
	t := s.topics[channel]
	known := t != nil && t.on == on
	if !n.IsCluster() && IsVote(text) {
		n.topics.mu.Unlock()
		booted, open := s.votes.Load() == on, s.link.Session() == on
		switch {
		case !known || n.Vote == nil:
		case !open: // it boots once more
			s.early.keep(on, text)
		case booted:
			n.Vote(text)
		}
		return
	}
	if name, _, _ := strings.Cut(text, " "); known && len(t.named) == 0 {
		watches = slices.Clone(t.watches)
	} else if known && t.named[name] != nil {
		watches = []*Watch{t.named[name]}
	}
	n.topics.mu.Unlock()
	deliver(watches, Event{Message, text})
}

// earlyVotes are those that have come while their link boots once more, as each does now and then
// (recheckApart of package quorum): they count when that has succeeded, as if they came then. Else the grants
// of that moment would be lost, and the key would be nobody's for their span.
type earlyVotes struct {
	mu    sync.Mutex // guards what follows; a leaf
	on    *link.Session
	texts []string
}

// maxEarlyVotes bounds them: anybody may publish.
const maxEarlyVotes = 256

func (e *earlyVotes) keep(on *link.Session, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.on != on {
		e.on, e.texts = on, nil
	}
	if len(e.texts) < maxEarlyVotes {
		e.texts = append(e.texts, text)
	}
}

// take empties e, and returns those that have come on that session.
func (e *earlyVotes) take(on *link.Session) (texts []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.on == on {
		texts = e.texts
	}
	e.on, e.texts = nil, nil
	return texts
}

// confirm notes that the server has confirmed a channel, and returns who is to hear so.
func (s *Server) confirm(on *link.Session, channel string) []*Watch {
	s.n.topics.mu.Lock()
	defer s.n.topics.mu.Unlock()
	t := s.topics[channel]
	if t == nil || t.on != on {
		return nil
	}
	t.confirmed, t.since = true, time.Now()
	if len(t.watches) == 0 {
		t.idle = time.Now()
	}
	return slices.Clone(t.watches)
}

// revoked is the topic of a channel whose subscription the server has ended by itself, because the slot has
// gone to another master. If its end was asked for, this may be the answer.
func (s *Server) revoked(on *link.Session, channel string) *topic {
	s.n.topics.mu.Lock()
	defer s.n.topics.mu.Unlock()
	if t := s.topics[channel]; t != nil && t.on == on && t.confirmed && !t.leaving {
		return t
	}
	return nil
}

func deliver(watches []*Watch, e Event) {
	for _, w := range watches {
		if w.isOpen() {
			w.l.OnEvent(w.i, e)
		}
	}
}

func (w *Watch) isOpen() bool {
	w.n.topics.mu.Lock()
	defer w.n.topics.mu.Unlock()
	return w.topic != nil && !w.n.topics.closed
}

// foundPushes reports whether messages can come to on, as far as its boot shows: the first subscription finds
// out, too, but there may be none.
func (s *Server) foundPushes(on *link.Session) {
	deaf, n := on.Pushes(), s.n
	n.topics.mu.Lock()
	over := deaf == nil && errors.Is(n.topics.deaf, link.ErrNoPushes)
	n.topics.mu.Unlock()
	if !n.Polled && (errors.Is(deaf, link.ErrNoPushes) || over) {
		s.unheard(deaf)
	}
}

// unheard reports that no messages come, for that reason, or with nil that they do, if that is a change.
func (s *Server) unheard(err error) {
	n := s.n
	n.topics.mu.Lock()
	changed := (n.topics.deaf == nil) != (err == nil)
	n.topics.deaf = err
	n.topics.mu.Unlock()
	if changed && n.Unheard != nil {
		n.Unheard(n.name, err)
	}
	if changed {
		n.foundMode()
	}
}
