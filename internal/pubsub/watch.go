package pubsub

import "slices"

// Kind is the kind of an Event.
type Kind uint8

// The kinds of events.
const (
	Subscribed   Kind = iota + 1 // confirmed, maybe again: earlier messages may have been missed, so check the key
	Unsubscribed                 // messages may be missed from now on, until Subscribed comes
	Message                      // was published; Text is its text
)

// Event is what a watch reports.
type Event struct {
	Kind Kind
	Text string // of a Message
}

// Listener receives the events of a watch. OnEvent is called by goroutines of the subscriptions,
// with no lock held, for one watch one call at a time and in order. It must not block, and may call
// Watch and Stop. i is what Watch was given.
type Listener interface {
	OnEvent(i int, e Event)
}

// maxEvents bounds the events that wait for one watch during a call of OnEvent. Instead of more it
// receives its last Subscribed or Unsubscribed again.
const maxEvents = 32

// Watch is one listener's interest in a channel.
type Watch struct {
	subs *Subscriptions
	name string // of the messages that are for it; "": all
	i    int
	l    Listener

	// Guarded by Subscriptions.mu.
	topic      *topic  // nil: stopped, or the subscriptions are closed
	at         int     // topic.watches[at] is this one
	last       Kind    // Subscribed or Unsubscribed, whichever was appended to events last; 0 before
	events     []Event // to be delivered, in order
	delivering bool    // a goroutine does so, and continues until events is empty
}

// Watch has l receive what is published on a channel, until Stop: messages that begin with name and a
// space, of which no other watch of the channel has the same; or all, if name is "". It never blocks and
// does no I/O. If the channel is confirmed already, so says it, and a Subscribed counts as received.
// Otherwise the watch counts as Unsubscribed until it receives Subscribed, which does not come while the
// server cannot or will not subscribe: then l must poll. OnEvent is never called by the caller of Watch
// itself, but may be called before Watch returns. Unsubscribed comes once, not again before the next
// Subscribed.
//
// After Close nothing is received, and Watch is harmless.
func (subs *Subscriptions) Watch(channel, name string, i int, l Listener) (w *Watch, subscribed bool) {
	w = &Watch{subs: subs, name: name, i: i, l: l}
	subs.mu.Lock()
	defer subs.mu.Unlock()
	if subs.closed {
		return w, false
	}
	t := subs.topics[channel]
	if t == nil {
		t = subs.addTopicLocked(channel)
	}
	w.topic, w.at = t, len(t.watches)
	t.watches = append(t.watches, w)
	if name != "" {
		if t.named == nil {
			t.named = map[string]*Watch{}
		}
		t.named[name] = w
	}
	t.endIdleLocked()
	if t.state != confirmed {
		return w, false
	}
	w.last = Subscribed
	return w, true
}

// Stop ends the watch. It never blocks. An OnEvent that is in progress on another goroutine, or was
// just about to be called there, may still run after Stop has returned: one at most. None begins
// after that one, and none at all if OnEvent itself has called Stop. Calls after the first do
// nothing.
func (w *Watch) Stop() {
	w.subs.mu.Lock()
	defer w.subs.mu.Unlock()
	t := w.topic
	if t == nil {
		return
	}
	w.topic, w.events = nil, nil
	delete(t.named, w.name)
	last := len(t.watches) - 1
	t.watches[w.at] = t.watches[last]
	t.watches[w.at].at = w.at
	t.watches[last] = nil
	t.watches = t.watches[:last]
	if last == 0 {
		w.subs.unwatchedLocked(t)
	}
}

// notifyLocked appends an event to w's list, and reports whether the caller has to have it
// delivered.
func (w *Watch) notifyLocked(e Event) bool {
	switch {
	case e.Kind == Unsubscribed && w.last == Unsubscribed:
		return false
	case e.Kind != Message:
		w.last = e.Kind
	case len(w.events) >= maxEvents:
		if w.last == 0 {
			return false
		}
		w.events, e = w.events[:0], Event{Kind: w.last}
	}
	w.events = append(w.events, e)
	if w.delivering {
		return false
	}
	w.delivering = true
	return true
}

// deliver calls the listeners. The caller holds no lock.
func deliver(due []*Watch) {
	for _, w := range due {
		for {
			e, ok := w.next()
			if !ok {
				break
			}
			w.l.OnEvent(w.i, e)
		}
	}
}

// next takes the event to be delivered next. When there is none, the caller has finished.
func (w *Watch) next() (Event, bool) {
	w.subs.mu.Lock()
	defer w.subs.mu.Unlock()
	if len(w.events) == 0 {
		w.delivering = false
		return Event{}, false
	}
	e := w.events[0]
	w.events = slices.Delete(w.events, 0, 1)
	return e, true
}
