package node

import (
	"container/list"
	"errors"
	"slices"
	"strings"
	"time"
)

// errSilent is why a link was given up whose server answers nothing.
var errSilent = errors.New("the subscription connection is silent")

// feed is the subscription connection to one server, with the topics that live there. One
// goroutine (run) makes the connection, writes to it and gives it up; it lives as long as
// there are topics, and a while longer. Another one reads (link.listen).
type feed struct {
	ns    *notices
	s     *server
	awake chan struct{} // holds one token when run has something to do

	// All guarded by notices.mu.
	running bool      // run's goroutine exists
	size    int       // topics
	wanted  list.List // topics to ask for, in order
	refused list.List // topics to leave alone, those first that are asked again first
	resting list.List // topics that linger, those first that go first
	fresh   []*Watch  // have joined a confirmed topic, and are to be told so by run
	link    *link     // nil: there is no connection
	barred  time.Time // until then the server subscribes to nothing at all
	empty   time.Time // since when there is no topic; zero if there are
}

// feedLocked is the feed of s. It gets its goroutine with its first topic.
func (ns *notices) feedLocked(s *server) *feed {
	f := ns.feeds[s]
	if f == nil {
		f = &feed{ns: ns, s: s, awake: make(chan struct{}, 1)}
		if ns.feeds == nil {
			ns.feeds = map[*server]*feed{}
		}
		ns.feeds[s] = f
	}
	return f
}

func (f *feed) wake() {
	select {
	case f.awake <- struct{}{}:
	default:
	}
}

// adoptLocked takes in a topic that has no feed.
func (f *feed) adoptLocked(t *topic) {
	t.feed = f
	f.size++
	f.wantLocked(t)
	if !f.running {
		f.running = true
		f.ns.n.wg.Add(1)
		go f.run()
	}
}

// wantLocked has the server asked for t.
func (f *feed) wantLocked(t *topic) {
	if time.Now().Before(f.barred) {
		f.refuseLocked(t, f.barred)
		return
	}
	f.ns.unplaceLocked(t)
	t.state = wanted
	t.place = f.wanted.PushBack(t)
	f.wake()
}

// refuseLocked leaves t alone until then.
func (f *feed) refuseLocked(t *topic, then time.Time) {
	f.ns.unplaceLocked(t)
	t.state, t.again = refused, then
	before := f.refused.Back() // nearly always the right place
	for before != nil && before.Value.(*topic).again.After(then) {
		before = before.Prev()
	}
	if before == nil {
		t.place = f.refused.PushFront(t)
	} else {
		t.place = f.refused.InsertAfter(t, before)
	}
}

// barLocked leaves every topic alone for a while: the server does not subscribe at all.
func (f *feed) barLocked(heard []*Watch) []*Watch {
	f.barred = time.Now().Add(f.ns.bar)
	for _, t := range f.ns.topics {
		if t.feed == f && (t.state == wanted || t.state == asked) {
			f.refuseLocked(t, f.barred)
			heard = t.noteLocked(heard, Broken, "")
		}
	}
	return heard
}

// restLocked lets t linger.
func (f *feed) restLocked(t *topic) {
	t.due = time.Now().Add(f.ns.linger)
	t.rest = f.resting.PushBack(t)
	if f.resting.Len() == 1 {
		f.wake() // it may wait for something later
	}
}

// run keeps a link while there are topics.
func (f *feed) run() {
	defer f.ns.n.wg.Done()
	var pause backoff
	for f.needed() {
		began := time.Now()
		err := f.session()
		if err != nil && f.s.unreachable != nil {
			f.s.unreachable(f.s) // another master may have its slots by now
		}
		if time.Since(began) > backoffMax {
			pause = backoff{}
		}
		if !pause.sleep(f.ns.n.life) {
			return
		}
		f.rehome()
	}
}

// needed says whether there are topics. If not, the feed has ended.
func (f *feed) needed() bool {
	f.ns.mu.Lock()
	defer f.ns.mu.Unlock()
	if f.size > 0 && !f.ns.closed {
		return true
	}
	f.running = false
	delete(f.ns.feeds, f.s)
	return false
}

// session makes one link and serves it until it breaks, or has been of no use for a while.
// A server that is suspended is not troubled.
func (f *feed) session() error {
	var l *link
	err := ErrStalled
	if f.s.suspended.Load() == nil {
		l, err = dialLink(f)
	}
	if err == nil {
		err = f.serve(l)
	}
	f.lost()
	if l != nil {
		l.close()
	}
	return err
}

// lost gives up the link, if there was one. What is still watched will be asked for again.
func (f *feed) lost() {
	f.ns.mu.Lock()
	heard := f.fresh // nobody else tells them
	f.link, f.fresh = nil, nil
	for _, t := range f.residentsLocked() {
		switch {
		case len(t.watches) == 0:
			f.ns.forgetLocked(t)
			continue
		case t.state != refused && t.state != wanted:
			f.wantLocked(t)
		}
		heard = t.noteLocked(heard, Broken, "")
	}
	f.ns.mu.Unlock()
	tell(heard)
}

// rehome moves topics whose slots have another master now, on a Cluster. There is no link.
func (f *feed) rehome() {
	if f.ns.router == nil {
		return
	}
	for _, t := range f.residents() {
		s, err := f.ns.router.masterOf(f.ns.n.life, t.key, "")
		if err != nil {
			return // as long as nobody knows better, they stay
		}
		if s == f.s {
			continue
		}
		f.ns.mu.Lock()
		if t.feed == f && !f.ns.closed {
			f.ns.leaveFeedLocked(t)
			f.ns.feedLocked(s).adoptLocked(t)
		}
		f.ns.mu.Unlock()
	}
}

func (f *feed) residents() []*topic {
	f.ns.mu.Lock()
	defer f.ns.mu.Unlock()
	return f.residentsLocked()
}

// residentsLocked are the feed's topics, in an order that a simulation can repeat.
func (f *feed) residentsLocked() []*topic {
	all := make([]*topic, 0, f.size)
	for _, t := range f.ns.topics {
		if t.feed == f {
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b *topic) int { return strings.Compare(a.key, b.key) })
	return all
}

// serve writes what there is to write until the link breaks, with the reason, or is no
// longer needed.
func (f *feed) serve(l *link) error {
	timer := time.NewTimer(f.ns.pulse)
	defer timer.Stop()
	for {
		do := f.next(l)
		tell(do.fresh)
		if do.over {
			return do.err
		}
		if do.write != nil {
			if err := l.send(do.write); err != nil {
				return err
			}
			continue
		}
		timer.Reset(do.wait)
		select {
		case <-f.awake:
		case <-timer.C:
		case <-l.ended:
			return l.err
		case <-f.ns.n.life.Done():
			return ErrClosed
		}
	}
}

// todo is what run has to do next.
type todo struct {
	fresh []*Watch      // to be told
	over  bool          // then: end the link
	err   error         // over: why
	write *command      // then: write this
	wait  time.Duration // nothing: until then
}

// next decides what to do.
func (f *feed) next(l *link) (do todo) {
	now := time.Now()
	f.ns.mu.Lock()
	defer f.ns.mu.Unlock()
	do.fresh, f.fresh = f.fresh, nil
	if f.ns.closed {
		do.over, do.err = true, ErrClosed
		return do
	}
	f.expireLocked(l, now)
	if do.write = l.composeLocked(now); do.write != nil {
		return do
	}
	wait := l.overdueLocked()
	if !wait.After(now) {
		do.over, do.err = true, errSilent
		return do
	}
	wait = earlier(wait, now.Add(f.ns.pulse)) // nobody says when the answer has come
	if f.size > 0 {
		f.empty = time.Time{}
	} else {
		if f.empty.IsZero() {
			f.empty = now
		}
		end := f.empty.Add(f.ns.idle)
		do.over = !end.After(now)
		wait = earlier(wait, end)
	}
	if first := f.resting.Front(); first != nil {
		wait = earlier(wait, first.Value.(*topic).due)
	}
	if first := f.refused.Front(); first != nil {
		wait = earlier(wait, first.Value.(*topic).again)
	}
	do.wait = wait.Sub(now)
	return do
}

// expireLocked ends what has lingered long enough, and the refusals that are over.
func (f *feed) expireLocked(l *link, now time.Time) {
	for first := f.resting.Front(); first != nil; first = f.resting.Front() {
		t := first.Value.(*topic)
		if t.due.After(now) {
			break
		}
		t.stayLocked()
		switch t.state {
		case confirmed:
			t.state = leaving
			l.drop = append(l.drop, t.key)
		case asked: // what it will become is not known yet
			f.restLocked(t)
		default:
			f.ns.forgetLocked(t)
		}
	}
	for first := f.refused.Front(); first != nil; first = f.refused.Front() {
		t := first.Value.(*topic)
		if t.again.After(now) {
			break
		}
		if len(t.watches) > 0 {
			f.wantLocked(t)
		} else {
			f.ns.forgetLocked(t)
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
