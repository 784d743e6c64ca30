// Package pubsub keeps the subscriptions of one node: which channels are watched, on which
// connection, and what arrives on them.
package pubsub

import (
	"container/list"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/wait"
	"github.com/redis/go-redis/v9"
)

const (
	topicIdleTime = 5 * time.Second  // how long the subscription of a key outlives its last watch
	connIdleTime  = 30 * time.Second // how long a connection outlives its last subscription
	barTime       = 30 * time.Second // how long a channel that was refused is not requested again
	pulseTime     = time.Second      // how long a connection may be silent before it is pinged
)

// Subscriptions are those of one node: the watches of each channel, and the connections that they use.
//
// A topic is the subscription of one channel: the inbox of a client, or, on a Cluster, the channel
// of a key, which has the key's own name, whatever bytes that is. All watches of the channel share
// it. A subscriber serves the topics of one server (one per master, on a Cluster), and has the one
// goroutine that writes to it. A subConn is one connection of a subscriber; when it breaks, the
// subscriber makes another.
//
//	            master found         written            confirmed
//	resolving -------------> queued --------> requested -----------------> confirmed
//	    ^                     ^  ^             |    |                       |  |  |
//	    |  the slot has moved |  +-- a while - | - refused                  |  |  |
//	    +---------------------|----------------+----------------------------+  |  |
//	                          +----------------+-- the connection broke -------+  |
//	                          |                                                   |
//	                          +-- watched again -- unsubscribing <-- not watched -+
//
// A topic without watches is removed: at once where the server has no subscription (resolving,
// queued, no connection), with the server's answer if it is unsubscribing, and in the other states
// after it has been idle for a while, so that a key that is watched now and again is not subscribed
// each time.
//
// No wake-up is lost, provided that the listener checks the key after each Subscribed, and not only
// then once it has received Unsubscribed. Subscribed is delivered when the server's confirmation
// was read, and Watch says it of a topic that is confirmed. What is published after that
// check arrives on the connection, and the watch receives it, or the connection breaks, and each
// way to leave the state confirmed with watches sends them Unsubscribed. A connection that has died
// in silence is found by a ping, in a few seconds.
//
// Events are appended to a watch's list under mu, which gives them an order, and are delivered by
// whichever goroutine finds that no other one does so. So the goroutine that writes and the one
// that reads may both deliver, mu is not held during a callback, and no Subscribed of an old
// connection comes after the Unsubscribed that ended it.
//
// The simpler design, a go-redis PubSub with its channel of messages, was rejected: it reconnects
// without reporting it, one channel that the user may not read breaks its resubscription for good,
// and on a Cluster it stays with one master.
type Subscriptions struct {
	node   *node.Node
	onVote func(text string) // receives the messages to an inbox that are votes; see New
	life   context.Context   // ends with Close
	end    context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the subscriptions. Added to under mu, unless closed, or by one of them

	// Set before the first watch, or under mu.
	topicIdle, connIdle, bar, pulse time.Duration

	// mu guards what follows, and every field of topics, subscribers, connections and watches that
	// does not say otherwise. It is held for moments, never during a call that could block, and no
	// other lock is taken under it.
	mu          sync.Mutex
	closed      bool
	topics      map[string]*topic
	subscribers map[*node.Server]*subscriber // those with a goroutine
	unresolved  list.List                    // topics whose master has to be looked up
	resolving   bool                         // the goroutine that does so is running
}

// New makes the subscriptions of n. It starts nothing. onVote gets the votes that n publishes to the
// client's inbox (node.IsVote), on the goroutine that reads, with no lock held, one call at a time. It must
// not block. Votes come whether there is a watch for them or not, as long as the inbox is subscribed.
func New(n *node.Node, onVote func(text string)) *Subscriptions {
	subs := &Subscriptions{node: n, onVote: onVote, topicIdle: topicIdleTime, connIdle: connIdleTime, bar: barTime,
		pulse: pulseTime}
	subs.life, subs.end = context.WithCancel(context.Background())
	return subs
}

// Close ends all watches and waits for every goroutine, until ctx ends. One that waits on a stalled
// server ends within node.CloseTime.
func (subs *Subscriptions) Close(ctx context.Context) error {
	subs.mu.Lock()
	subs.closed = true
	for _, t := range subs.topics {
		for _, w := range t.watches {
			w.topic, w.events = nil, nil
		}
	}
	subs.topics = nil
	subs.mu.Unlock()
	subs.end()
	if err := wait.For(ctx, subs.wg.Wait); err != nil {
		return fmt.Errorf("subscriptions of node %s: %w", subs.node.Name(), err)
	}
	return nil
}

// topicState is how far a topic's subscription has come.
type topicState uint8

const (
	resolving     topicState = iota // its master is being looked up; no subscriber
	queued                          // to be requested: in subscriber.queued
	requested                       // SUBSCRIBE is written, or must be in smaller portions
	confirmed                       // messages arrive
	refused                         // not now: in subscriber.refused until again
	unsubscribing                   // UNSUBSCRIBE is written, or next to be
	removed                         // no topic any more
)

// topic is the subscription of one key.
type topic struct {
	key     string
	state   topicState
	home    *subscriber       // nil while resolving
	watches []*Watch          // in no order
	named   map[string]*Watch // those of them that have a name; nil if there never was one
	place   *list.Element     // in Subscriptions.unresolved, subscriber.queued or subscriber.refused, as its state says
	idle    *list.Element     // in subscriber.idle while it has no watch
	ends    time.Time         // idle: removed then
	again   time.Time         // refused: not requested until then
	to      string            // resolving: the address that a redirection named
	hops    int               // redirections since it was last confirmed
}

func (subs *Subscriptions) addTopicLocked(key string) *topic {
	t := &topic{key: key}
	if subs.topics == nil {
		subs.topics = map[string]*topic{}
	}
	subs.topics[key] = t
	if s := subs.node.Server(); s != nil {
		subs.subscriberLocked(s).addLocked(t)
	} else {
		subs.resolveLocked(t, "")
	}
	return t
}

// endIdleLocked ends t's idle time: it has a watch.
func (t *topic) endIdleLocked() {
	if t.idle != nil {
		t.home.idle.Remove(t.idle)
		t.idle = nil
	}
}

// unwatchedLocked keeps t for a while, or removes it: its last watch has stopped.
func (subs *Subscriptions) unwatchedLocked(t *topic) {
	switch {
	case t.state == unsubscribing: // removed with the answer
	case t.home == nil, t.home.conn == nil, t.state == queued:
		subs.removeLocked(t)
	default:
		t.home.beginIdleLocked(t)
	}
}

// removeLocked removes t. The server must have no subscription of it, or be about to end it.
func (subs *Subscriptions) removeLocked(t *topic) {
	subs.leaveLocked(t)
	t.state = removed
	delete(subs.topics, t.key)
	if len(subs.topics) == 0 {
		subs.topics = nil // a map keeps the size that it once had
	}
}

// leaveLocked takes t from its subscriber and from all lists.
func (subs *Subscriptions) leaveLocked(t *topic) {
	t.endIdleLocked()
	subs.unlistLocked(t)
	if t.home != nil {
		t.home.size--
		t.home = nil
	}
}

// unlistLocked takes t from the list that its state has put it into.
func (subs *Subscriptions) unlistLocked(t *topic) {
	if t.place == nil {
		return
	}
	switch t.state {
	case resolving:
		subs.unresolved.Remove(t.place)
	case queued:
		t.home.queued.Remove(t.place)
	case refused:
		t.home.refused.Remove(t.place)
	}
	t.place = nil
}

// resolveLocked has the master of t's key looked up, on a Cluster. to is the address that a
// redirection named, if one did.
func (subs *Subscriptions) resolveLocked(t *topic, to string) {
	t.state, t.to = resolving, to
	t.place = subs.unresolved.PushBack(t)
	if !subs.resolving {
		subs.resolving = true
		subs.wg.Go(subs.resolve)
	}
}

// resolve finds subscribers for unresolved topics. It ends when there is none left.
func (subs *Subscriptions) resolve() {
	var pause backoff
	for {
		t, to := subs.nextUnresolved()
		if t == nil {
			return
		}
		s, err := subs.node.ServerOf(subs.life, t.key, to)
		subs.resolved(t, s, err)
		if err == nil {
			pause = backoff{}
		} else if !pause.sleep(subs.life) {
			return
		}
	}
}

func (subs *Subscriptions) nextUnresolved() (t *topic, to string) {
	subs.mu.Lock()
	defer subs.mu.Unlock()
	first := subs.unresolved.Front()
	if first == nil || subs.closed {
		subs.resolving = false
		return nil, ""
	}
	t = first.Value.(*topic)
	subs.unlistLocked(t)
	return t, t.to
}

// resolved gives t to the subscriber of s, or lets it wait for another try.
func (subs *Subscriptions) resolved(t *topic, s *node.Server, err error) {
	var due []*Watch
	subs.mu.Lock()
	switch {
	case subs.closed, t.state != resolving: // nobody watches it any more
	case err != nil:
		t.to = ""
		t.place = subs.unresolved.PushBack(t)
		due = t.notifyLocked(due, Event{Kind: Unsubscribed})
	default:
		subs.subscriberLocked(s).addLocked(t)
	}
	subs.mu.Unlock()
	deliver(due)
}

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = time.Second
)

// backoff is a pause that doubles each time, with jitter: the clients of a server that comes back
// must not all come at once.
type backoff struct{ last time.Duration }

// sleep pauses. It returns false if ctx has ended first.
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

// notifyLocked appends an event to the list of each watch, and appends those watches to due whose
// events the caller must deliver once it has unlocked mu.
func (t *topic) notifyLocked(due []*Watch, e Event) []*Watch {
	for _, w := range t.watches {
		if w.notifyLocked(e) {
			due = append(due, w)
		}
	}
	return due
}

// isVote reports whether m is a vote, which no watch gets. On a Cluster there are none.
func (subs *Subscriptions) isVote(m *redis.Message) bool {
	return !subs.node.IsCluster() && node.IsVote(m.Payload)
}

// messageLocked is notifyLocked for a message, which is for all watches, or for the one that it names.
func (t *topic) messageLocked(due []*Watch, text string) []*Watch {
	e := Event{Message, text}
	if len(t.named) == 0 {
		return t.notifyLocked(due, e)
	}
	name, _, _ := strings.Cut(text, " ")
	if w := t.named[name]; w != nil && w.notifyLocked(e) {
		due = append(due, w)
	}
	return due
}
