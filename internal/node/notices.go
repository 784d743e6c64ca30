package node

import (
	"container/list"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/jitter"
)

// Signal says what a watch has to tell.
type Signal uint8

// The signals of a watch.
const (
	Subscribed Signal = iota + 1 // the subscription is confirmed (again): what was published before may have been missed, look again
	Broken                       // notices may be missed from now on, until Subscribed comes
	Notice                       // published; text says what
)

// Listener hears what a watch has to tell. Hear is called by the node's goroutines, with no
// lock held, for one watch one call at a time and in order. It must not block, and may call
// Watch and Stop. i is what Watch was given.
type Listener interface {
	Hear(i int, s Signal, text string)
}

const (
	lingerTime = 5 * time.Second  // how long the subscription of a key outlives its last watch
	idleTime   = 30 * time.Second // how long a connection outlives its last subscription
	barTime    = 30 * time.Second // how long a channel that was refused is left alone
	pulseTime  = time.Second      // how long a link may be silent before it is pinged

	// maxUntold bounds the notices that wait for one watch while a Hear of it is under way.
	// Instead of more it is told to look again.
	maxUntold = 32
)

// notices are the subscriptions of one node: who watches which key, and on what connection.
// The channel of a key has the key's own name, whatever bytes that is.
//
// A topic is the subscription of one key. All watches of the key share it. A feed is the
// subscription connection to one server (one per master, on a Cluster), with the topics that
// live there, and the one goroutine that writes to it. A link is one connection of a feed:
// it never comes back, the feed makes another.
//
//	              master found         asked               confirmed
//	looking -----------------> wanted ------> asked --------------------> confirmed
//	   ^                        ^  ^            | |                          | |
//	   |   the slot has moved   |  +-- a while --- refused                   | |
//	   +------------------------|---------------+-----------------------------+
//	                            +---------------+-- the link broke ----------+ |
//	                            |                                              |
//	                            +-- watched again -- leaving <-- unwatched ----+
//
// A topic that nobody watches any more is forgotten: at once where the server has nothing
// of it (looking, wanted, no link), with the answer if it is leaving, and after a while
// (linger) in the other states, so that a key that is watched now and again does not
// subscribe each time.
//
// No wake-up is lost, if the listener looks at the key after each Subscribed, and not only
// then once it has heard Broken. Subscribed is told when the server's confirmation has been
// read, or to a watch that has just joined a confirmed topic. What is published after that
// look comes down the link, in which case the watch is among those who hear it, or the link
// breaks, and each way to leave the state confirmed with watches tells them Broken. A link
// that has died in silence is found out by ping, in a few seconds.
//
// Signals are put into a watch's queue under mu, which gives them an order, and told by
// whichever goroutine finds nobody else telling. So the goroutine that writes and the one
// that reads can both tell, mu is not held by anybody who calls out, and no Subscribed of
// an old link comes after the Broken that ended it.
//
// The simpler design, a go-redis PubSub with its channel of messages, was rejected: it
// reconnects by itself and does not tell, one channel that the user may not read breaks its
// resubscription for good, and on a Cluster it stays with one master.
type notices struct {
	n      *Node
	home   *server // the only server; nil on a Cluster
	router *router // finds masters; nil if not a Cluster

	// Set before the first watch.
	linger, idle, bar, pulse time.Duration

	// mu guards what follows, and every field of topics, feeds, links and watches that does
	// not say otherwise. It is held for moments, never while anything is called that could
	// wait, and no other lock is taken under it.
	mu       sync.Mutex
	closed   bool
	topics   map[string]*topic
	feeds    map[*server]*feed // those with a goroutine
	homeless list.List         // topics whose master has to be looked up
	settling bool              // the goroutine that does so is running
}

func (ns *notices) init(n *Node) {
	ns.n = n
	ns.linger, ns.idle, ns.bar, ns.pulse = lingerTime, idleTime, barTime, pulseTime
}

// topicState is where the server and we stand with a topic.
type topicState uint8

const (
	looking   topicState = iota // its master is being looked up; no feed
	wanted                      // to be asked for: in feed.wanted
	asked                       // SUBSCRIBE is written, or must be in smaller portions
	confirmed                   // notices come
	refused                     // not now: in feed.refused until again
	leaving                     // UNSUBSCRIBE is written, or next to be
	forgotten                   // no topic any more
)

// topic is the subscription of one key.
type topic struct {
	key     string
	state   topicState
	feed    *feed         // nil while looking
	watches []*Watch      // in no order
	place   *list.Element // in notices.homeless, feed.wanted or feed.refused, as its state says
	rest    *list.Element // in feed.resting while it lingers: nobody watches it
	due     time.Time     // lingering: until when
	again   time.Time     // refused: until when
	to      string        // looking: the address that a redirection named
	hops    int           // redirections since it was last confirmed
}

// Watch is one listener's interest in the notices of one key.
type Watch struct {
	ns *notices
	i  int
	l  Listener

	topic   *topic   // nil: stopped, or the node is closed
	at      int      // topic.watches[at] is this one
	last    Signal   // Subscribed or Broken, whichever was put into untold last; 0 before
	untold  []tiding // signals yet to be told, in order
	telling bool     // a goroutine is at it, and tells what else comes
}

type tiding struct {
	s    Signal
	text string
}

// Watch has l hear what is published on the channel named key, until Stop. It never blocks
// and does no I/O. A new watch counts as Broken until it hears Subscribed, which comes soon if
// the key is watched already, and not at all while the server cannot or will not
// subscribe: then l must poll. Hear is never called by the caller of Watch itself, but may be
// called before Watch returns. Broken is told once, not again before the next Subscribed.
//
// After Close nothing is heard, and Watch is harmless.
func (n *Node) Watch(key string, i int, l Listener) *Watch {
	ns := &n.notices
	w := &Watch{ns: ns, i: i, l: l}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if ns.closed {
		return w
	}
	t := ns.topics[key]
	if t == nil {
		t = ns.newTopicLocked(key)
	}
	w.topic, w.at = t, len(t.watches)
	t.watches = append(t.watches, w)
	t.stayLocked()
	if t.state == confirmed && w.noteLocked(Subscribed, "") {
		t.feed.fresh = append(t.feed.fresh, w)
		t.feed.wake()
	}
	return w
}

// Stop ends the watch. It never blocks. A Hear that is under way on another goroutine, or
// was just about to be called there, may still run after Stop has returned: one at most.
// None begins after that one, and none at all if Hear itself has called Stop. Calls after
// the first do nothing.
func (w *Watch) Stop() {
	w.ns.mu.Lock()
	defer w.ns.mu.Unlock()
	t := w.topic
	if t == nil {
		return
	}
	w.topic, w.untold = nil, nil
	last := len(t.watches) - 1
	t.watches[w.at] = t.watches[last]
	t.watches[w.at].at = w.at
	t.watches[last] = nil
	t.watches = t.watches[:last]
	if last == 0 {
		w.ns.unwatchedLocked(t)
	}
}

func (ns *notices) newTopicLocked(key string) *topic {
	t := &topic{key: key}
	if ns.topics == nil {
		ns.topics = map[string]*topic{}
	}
	ns.topics[key] = t
	if ns.home != nil {
		ns.feedLocked(ns.home).adoptLocked(t)
	} else {
		ns.lookLocked(t, "")
	}
	return t
}

// stayLocked ends t's lingering: somebody watches it.
func (t *topic) stayLocked() {
	if t.rest != nil {
		t.feed.resting.Remove(t.rest)
		t.rest = nil
	}
}

// unwatchedLocked lets t linger, or forgets it: its last watch has stopped.
func (ns *notices) unwatchedLocked(t *topic) {
	switch {
	case t.state == leaving: // forgotten with the answer
	case t.feed == nil, t.feed.link == nil, t.state == wanted:
		ns.forgetLocked(t)
	default:
		t.feed.restLocked(t)
	}
}

// forgetLocked drops t. The server must have nothing of it, or be about to be told.
func (ns *notices) forgetLocked(t *topic) {
	ns.leaveFeedLocked(t)
	t.state = forgotten
	delete(ns.topics, t.key)
	if len(ns.topics) == 0 {
		ns.topics = nil // a map keeps the size that it once had
	}
}

// leaveFeedLocked takes t out of its feed and all lists.
func (ns *notices) leaveFeedLocked(t *topic) {
	t.stayLocked()
	ns.unplaceLocked(t)
	if t.feed != nil {
		t.feed.size--
		t.feed = nil
	}
}

// unplaceLocked takes t out of the list that its state has put it into.
func (ns *notices) unplaceLocked(t *topic) {
	if t.place == nil {
		return
	}
	switch t.state {
	case looking:
		ns.homeless.Remove(t.place)
	case wanted:
		t.feed.wanted.Remove(t.place)
	case refused:
		t.feed.refused.Remove(t.place)
	}
	t.place = nil
}

// close ends all watches. Nothing is told any more, and no goroutine begins.
func (ns *notices) close() {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.closed = true
	for _, t := range ns.topics {
		for _, w := range t.watches {
			w.topic, w.untold = nil, nil
		}
	}
	ns.topics = nil
}

// lookLocked has the master of t's key looked up, on a Cluster. to is the address that a
// redirection named, if one did.
func (ns *notices) lookLocked(t *topic, to string) {
	t.state, t.to = looking, to
	t.place = ns.homeless.PushBack(t)
	if !ns.settling {
		ns.settling = true
		ns.n.wg.Add(1)
		go ns.settle()
	}
}

// settle finds feeds for homeless topics. It ends when there is none left.
func (ns *notices) settle() {
	defer ns.n.wg.Done()
	var pause backoff
	for {
		t, to := ns.takeHomeless()
		if t == nil {
			return
		}
		s, err := ns.router.masterOf(ns.n.life, t.key, to)
		ns.settled(t, s, err)
		if err == nil {
			pause = backoff{}
		} else if !pause.sleep(ns.n.life) {
			return
		}
	}
}

func (ns *notices) takeHomeless() (t *topic, to string) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	first := ns.homeless.Front()
	if first == nil || ns.closed {
		ns.settling = false
		return nil, ""
	}
	t = first.Value.(*topic)
	ns.unplaceLocked(t)
	return t, t.to
}

// settled gives t to the feed of s, or lets it wait for another try.
func (ns *notices) settled(t *topic, s *server, err error) {
	var heard []*Watch
	ns.mu.Lock()
	switch {
	case ns.closed, t.state != looking: // nobody watches it any more
	case err != nil:
		t.to = ""
		t.place = ns.homeless.PushBack(t)
		heard = t.noteLocked(heard, Broken, "")
	default:
		ns.feedLocked(s).adoptLocked(t)
	}
	ns.mu.Unlock()
	tell(heard)
}

// noteLocked puts a signal into the queue of each watch, and appends those to heard that
// the caller must tell when it has let go of mu.
func (t *topic) noteLocked(heard []*Watch, s Signal, text string) []*Watch {
	for _, w := range t.watches {
		if w.noteLocked(s, text) {
			heard = append(heard, w)
		}
	}
	return heard
}

// noteLocked puts a signal into w's queue, and says whether it is for the caller to have it
// told.
func (w *Watch) noteLocked(s Signal, text string) bool {
	switch {
	case s == Broken && w.last == Broken:
		return false
	case s != Notice:
		w.last = s
	case len(w.untold) >= maxUntold:
		if w.last == 0 {
			return false
		}
		w.untold, s, text = w.untold[:0], w.last, ""
	}
	w.untold = append(w.untold, tiding{s, text})
	if w.telling {
		return false
	}
	w.telling = true
	return true
}

// tell calls the listeners. The caller holds no lock.
func tell(heard []*Watch) {
	for _, w := range heard {
		for {
			news, ok := w.next()
			if !ok {
				break
			}
			w.l.Hear(w.i, news.s, news.text)
		}
	}
}

// next takes the signal to be told next. When there is none, the caller has done telling.
func (w *Watch) next() (tiding, bool) {
	w.ns.mu.Lock()
	defer w.ns.mu.Unlock()
	if len(w.untold) == 0 {
		w.telling = false
		return tiding{}, false
	}
	news := w.untold[0]
	w.untold = slices.Delete(w.untold, 0, 1)
	return news, true
}

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = time.Second
)

// backoff is a pause that doubles each time, with jitter: the clients of a server that
// comes back must not all come at once.
type backoff struct{ last time.Duration }

// sleep pauses, and says no if ctx has ended first.
func (b *backoff) sleep(ctx context.Context) bool {
	b.last = min(max(2*b.last, backoffMin), backoffMax)
	timer := time.NewTimer(b.last/2 + jitter.N(b.last/2))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
