package pubsub

import (
	"container/list"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/node"
)

// errSilent is why a connection was closed whose server answers nothing.
var errSilent = errors.New("the subscription connection is silent")

// errMoved is why a connection was closed whose server may not be the master any more: what the new one publishes does
// not reach it.
var errMoved = errors.New("the Sentinels name another master")

// subscriber serves the topics of one server. One goroutine (run) makes the connection, writes to
// it and closes it; it lives as long as there are topics, and a while longer. Another one reads
// (subConn.listen).
type subscriber struct {
	subs   *Subscriptions
	server *node.Server
	awake  chan struct{} // holds one token when run has something to do

	// All guarded by Subscriptions.mu.
	running bool      // run's goroutine exists
	size    int       // topics
	queued  list.List // topics to be requested, in order
	refused list.List // topics that are not requested for a while, ordered by until when
	idle    list.List // topics without watches, ordered by until when they stay
	conn    *subConn  // nil: there is no connection
	barred  time.Time // until then the server subscribes to nothing at all
	empty   time.Time // since when there is no topic; zero if there are
}

// subscriberLocked is the subscriber of s. It gets its goroutine with its first topic.
func (subs *Subscriptions) subscriberLocked(s *node.Server) *subscriber {
	sub := subs.subscribers[s]
	if sub == nil {
		sub = &subscriber{subs: subs, server: s, awake: make(chan struct{}, 1)}
		if subs.subscribers == nil {
			subs.subscribers = map[*node.Server]*subscriber{}
		}
		subs.subscribers[s] = sub
	}
	return sub
}

func (sub *subscriber) wake() {
	select {
	case sub.awake <- struct{}{}:
	default:
	}
}

// addLocked takes in a topic that has no subscriber.
func (sub *subscriber) addLocked(t *topic) {
	t.home = sub
	sub.size++
	sub.queueLocked(t)
	if !sub.running {
		sub.running = true
		sub.subs.wg.Go(sub.run)
	}
}

// queueLocked has t requested.
func (sub *subscriber) queueLocked(t *topic) {
	if time.Now().Before(sub.barred) {
		sub.refuseLocked(t, sub.barred)
		return
	}
	sub.subs.unlistLocked(t)
	t.state = queued
	t.place = sub.queued.PushBack(t)
	sub.wake()
}

// refuseLocked has t not requested until then.
func (sub *subscriber) refuseLocked(t *topic, then time.Time) {
	sub.subs.unlistLocked(t)
	t.state, t.again = refused, then
	before := sub.refused.Back() // nearly always the right place
	for before != nil && before.Value.(*topic).again.After(then) {
		before = before.Prev()
	}
	if before == nil {
		t.place = sub.refused.PushFront(t)
	} else {
		t.place = sub.refused.InsertAfter(t, before)
	}
}

// barLocked has no topic requested for a while: the server does not subscribe at all.
func (sub *subscriber) barLocked(due []*Watch) []*Watch {
	sub.barred = time.Now().Add(sub.subs.bar)
	for _, t := range sub.subs.topics {
		if t.home == sub && (t.state == queued || t.state == requested) {
			sub.refuseLocked(t, sub.barred)
			due = t.notifyLocked(due, Event{Kind: Unsubscribed})
		}
	}
	return due
}

// beginIdleLocked keeps t for its idle time.
func (sub *subscriber) beginIdleLocked(t *topic) {
	t.ends = time.Now().Add(sub.subs.topicIdle)
	t.idle = sub.idle.PushBack(t)
	if sub.idle.Len() == 1 {
		sub.wake() // it may wait for something later
	}
}

// run keeps a connection while there are topics.
func (sub *subscriber) run() {
	var pause backoff
	for sub.needed() {
		began := time.Now()
		err := sub.session()
		if err != nil {
			sub.server.Unreachable() // another master may have its slots by now
		}
		if time.Since(began) > backoffMax {
			pause = backoff{}
		}
		if !pause.sleep(sub.subs.life) {
			return
		}
		sub.reassign()
	}
}

// needed reports whether there are topics. If not, the subscriber has ended.
func (sub *subscriber) needed() bool {
	sub.subs.mu.Lock()
	defer sub.subs.mu.Unlock()
	if sub.size > 0 && !sub.subs.closed {
		return true
	}
	sub.running = false
	delete(sub.subs.subscribers, sub.server)
	return false
}

// session makes one connection and serves it until it breaks, or has been of no use for a while. A
// suspended server is not dialed.
func (sub *subscriber) session() error {
	var sc *subConn
	err := node.ErrStalled
	if !sub.server.Suspended() {
		sc, err = dialSubConn(sub)
	}
	if err == nil {
		err = sub.serve(sc)
	}
	sub.connLost()
	if sc != nil {
		sc.close()
	}
	return err
}

// connLost forgets the connection, if there was one. What is still watched will be requested again.
func (sub *subscriber) connLost() {
	sub.subs.mu.Lock()
	var due []*Watch
	sub.conn = nil
	for _, t := range sub.topicsHereLocked() {
		switch {
		case len(t.watches) == 0:
			sub.subs.removeLocked(t)
			continue
		case t.state != refused && t.state != queued:
			sub.queueLocked(t)
		}
		due = t.notifyLocked(due, Event{Kind: Unsubscribed})
	}
	sub.subs.mu.Unlock()
	deliver(due)
}

// reassign moves topics whose slots have another master now, on a Cluster. There is no connection.
func (sub *subscriber) reassign() {
	if !sub.subs.node.IsCluster() {
		return
	}
	for _, t := range sub.topicsHere() {
		s, err := sub.subs.node.ServerOf(sub.subs.life, t.key, "")
		if err != nil {
			return // until it is known, they stay
		}
		if s == sub.server {
			continue
		}
		sub.subs.mu.Lock()
		if t.home == sub && !sub.subs.closed {
			sub.subs.leaveLocked(t)
			sub.subs.subscriberLocked(s).addLocked(t)
		}
		sub.subs.mu.Unlock()
	}
}

func (sub *subscriber) topicsHere() []*topic {
	sub.subs.mu.Lock()
	defer sub.subs.mu.Unlock()
	return sub.topicsHereLocked()
}

// topicsHereLocked are the subscriber's topics, in an order that a simulation can repeat.
func (sub *subscriber) topicsHereLocked() []*topic {
	all := make([]*topic, 0, sub.size)
	for _, t := range sub.subs.topics {
		if t.home == sub {
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b *topic) int { return strings.Compare(a.key, b.key) })
	return all
}

// serve writes what there is to write until the connection breaks, with the reason, or is no longer
// needed.
func (sub *subscriber) serve(sc *subConn) error {
	timer := time.NewTimer(sub.subs.pulse)
	defer timer.Stop()
	for {
		do := sub.next(sc)
		if do.end {
			return do.err
		}
		if do.write != nil {
			if err := sc.send(do.write); err != nil {
				return err
			}
			continue
		}
		timer.Reset(do.wait)
		select {
		case <-sub.awake:
		case <-timer.C:
		case <-sc.ended:
			return sc.err
		case <-sub.subs.life.Done():
			return node.ErrClosed
		}
	}
}

// action is what run has to do next.
type action struct {
	end   bool          // then: close the connection
	err   error         // end: why
	write *command      // then: write this
	wait  time.Duration // nothing: wait so long
}

// next decides what to do.
func (sub *subscriber) next(sc *subConn) (do action) {
	now := time.Now()
	sub.subs.mu.Lock()
	defer sub.subs.mu.Unlock()
	if sub.subs.closed {
		do.end, do.err = true, node.ErrClosed
		return do
	}
	if sc.moves != sub.server.Moves() { // asked once per pulse
		do.end, do.err = true, errMoved
		return do
	}
	sub.expireLocked(sc, now)
	if do.write = sc.composeLocked(now); do.write != nil {
		return do
	}
	wait := sc.overdueLocked()
	if !wait.After(now) {
		do.end, do.err = true, errSilent
		return do
	}
	wait = clock.Earlier(wait, now.Add(sub.subs.pulse)) // nothing reports when the answer has come
	if sub.size > 0 {
		sub.empty = time.Time{}
	} else {
		if sub.empty.IsZero() {
			sub.empty = now
		}
		end := sub.empty.Add(sub.subs.connIdle)
		do.end = !end.After(now)
		wait = clock.Earlier(wait, end)
	}
	if first := sub.idle.Front(); first != nil {
		wait = clock.Earlier(wait, first.Value.(*topic).ends)
	}
	if first := sub.refused.Front(); first != nil {
		wait = clock.Earlier(wait, first.Value.(*topic).again)
	}
	do.wait = wait.Sub(now)
	return do
}

// expireLocked ends topics whose idle time is over, and refusals that are over.
func (sub *subscriber) expireLocked(sc *subConn, now time.Time) {
	for first := sub.idle.Front(); first != nil; first = sub.idle.Front() {
		t := first.Value.(*topic)
		if t.ends.After(now) {
			break
		}
		t.endIdleLocked()
		switch t.state {
		case confirmed:
			t.state = unsubscribing
			sc.drop = append(sc.drop, t.key)
		case requested: // what it will become is not known yet
			sub.beginIdleLocked(t)
		default:
			sub.subs.removeLocked(t)
		}
	}
	for first := sub.refused.Front(); first != nil; first = sub.refused.Front() {
		t := first.Value.(*topic)
		if t.again.After(now) {
			break
		}
		if len(t.watches) > 0 {
			sub.queueLocked(t)
		} else {
			sub.subs.removeLocked(t)
		}
	}
}
