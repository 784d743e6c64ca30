package flight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/quorum"
)

var (
	errBusy      = errors.New("busy here")
	errCrowded   = errors.New("crowded")
	errEnded     = errors.New("ended")
	errClosed    = errors.New("closed")
	errNotHeld   = errors.New("not held")
	errExpired   = errors.New("expired")
	errRevoked   = errors.New("revoked")
	errLost      = errors.New("lost")
	errTaken     = errors.New("held by another")
	errDown      = errors.New("unavailable")
	errFinal     = errors.New("no use trying")
	errElsewhere = errors.New("failed elsewhere")
)

// world is a fake quorum, with a Group over it. An attempt, a refresh or a release waits
// in the world until a test decides it, unless the field of that name decides it at once,
// from inside the call.
type world struct {
	t     *testing.T
	g     *Group
	nodes *fakeNodes

	acquire   func(*fakeAttempt)
	refresh   func(*fakeRefresh)
	release   func(*fakeLease)
	cancel    func(*fakeAttempt)
	exclusive bool          // grants nothing that is taken
	got       func(*caller) // hears of each success, from the caller's goroutine

	mu        sync.Mutex // guards what follows
	counter   int64      // the last fencing token given
	attempts  []*fakeAttempt
	leases    []*fakeLease
	refreshes []*fakeRefresh
	log       []string
	prepared  int
	underWay  int    // attempts, of all keys
	most      int    // of them at once
	rival     string // whom a look finds
	watches   []*fakeWatch
	offers    []*fakeAttempt
	wants     map[string]bool // contenders that the nodes may know of
}

// newWorld makes a world that grants and confirms every request at once.
func newWorld(t *testing.T, change ...func(*Config)) *world {
	w := &world{t: t, acquire: (*fakeAttempt).grant, refresh: (*fakeRefresh).confirm, wants: map[string]bool{}}
	w.release = func(l *fakeLease) { l.released(nil) }
	w.cancel = func(a *fakeAttempt) { a.fail(quorum.Failure{Err: errTaken}) }
	w.nodes = &fakeNodes{w: w, prepare: w.prepare, watch: w.watch, leave: w.leave, validity: validity}
	cfg := Config{
		Nodes: w.nodes, Errors: fakeErrors{}, Turn: turn, NodeTimeout: 50 * time.Millisecond,

		Slice: time.Hour, // looks for rivals are tests of their own
	}
	for _, c := range change {
		c(&cfg)
	}
	w.g = NewGroup(cfg)
	return w
}

// fakeNodes are Nodes of which a test may replace each function; a nil watch is none.
type fakeNodes struct {
	w        *world
	prepare  func(key string, ttl time.Duration, tokens int64, contender string) Lease
	watch    func(key, contender string, hear func(quorum.Event)) (stop func())
	leave    func(key, contender string)
	offer    func(key string, ttl time.Duration, tokens int64, contender string, by quorum.Acquirer) Lease
	carry    func(attempt, offer Lease, span time.Duration, waits bool)
	rejoin   func(span time.Duration)
	alone    bool // nobody waits besides, so a release that brings an offer is only a release
	validity func(ttl time.Duration) time.Duration
}

func (n *fakeNodes) Prepare(key string, ttl time.Duration, tokens int64, contender string) Lease {
	return n.prepare(key, ttl, tokens, contender)
}

func (n *fakeNodes) Watch(key, contender string, onEvent func(quorum.Event)) (stop func()) {
	if n.watch == nil {
		return nil
	}
	return n.watch(key, contender, onEvent)
}

func (n *fakeNodes) Offer(key string, ttl time.Duration, tokens int64, contender string,
	by quorum.Acquirer) Lease {
	if n.offer == nil {
		return nil
	}
	return n.offer(key, ttl, tokens, contender, by)
}

func (n *fakeNodes) Carry(attempt, offer Lease, span time.Duration, waits bool) {
	n.carry(attempt, offer, span, waits)
}

// Rejoin is a release alone, unless the test has a rejoin.
func (n *fakeNodes) Rejoin(lease, offer Lease, span time.Duration, inline bool, by quorum.Releaser) {
	if n.rejoin != nil {
		n.rejoin(span)
	}
	lease.Release(inline, "", quorum.NoNews, by)
	if n.rejoin != nil && !n.alone {
		n.w.mu.Lock()
		defer n.w.mu.Unlock()
		n.w.wants[offer.(*fakeAttempt).contender] = true
	}
}

func (n *fakeNodes) Leave(key, contender string) { n.leave(key, contender) }

func (n *fakeNodes) Validity(ttl time.Duration) time.Duration { return n.validity(ttl) }

// fakeErrors has a sentinel for each error.
type fakeErrors struct{}

func (fakeErrors) Failed(_ string, f *quorum.Failure, ctxErr error) error {
	if f == nil {
		return ctxErr
	}
	err := f.Err
	switch {
	case f == waitedFor || strings.HasPrefix(err.Error(), "this process holds it"):
		err = errBusy
	case f.Op != "":
		err = fmt.Errorf("%s: %w", f.Op, err)
	}
	if ctxErr != nil {
		err = fmt.Errorf("%w: %w", ctxErr, err)
	}
	return err
}
func (fakeErrors) TooManyWaiters(string) error     { return errCrowded }
func (fakeErrors) FailedElsewhere() error          { return errElsewhere }
func (fakeErrors) Closed() error                   { return errClosed }
func (fakeErrors) Ended(_ string, why error) error { return fmt.Errorf("%w: %w", errEnded, why) }
func (fakeErrors) Released() error                 { return errNotHeld }
func (fakeErrors) Revoked(string) error            { return errRevoked }
func (fakeErrors) Lost(_ string, f *quorum.Failure) error {
	return fmt.Errorf("%w: %w", errLost, f.Err)
}
func (fakeErrors) Expired(string, error, error) error { return errExpired }

func validity(ttl time.Duration) time.Duration { return ttl - ttl/100 - 2*time.Millisecond }

// byHand leaves attempts to the test.
func (w *world) byHand() *world { w.acquire = nil; return w }

// rich grants more tokens than requested, so that no handoff needs a renewal for them.
func (w *world) rich() *world {
	w.acquire = func(a *fakeAttempt) { a.grantBlock(1000) }
	return w
}

// poor grants one token, whatever is requested, so that the first handoff needs a renewal.
func (w *world) poor() *world {
	w.acquire = func(a *fakeAttempt) { a.grantBlock(1) }
	return w
}

// now has the attempts that a timer begins decided at once, by decide.
func (w *world) now(decide func(*fakeAttempt)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acquire = decide
}

func (w *world) note(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

const turn = 100 * time.Millisecond

// fakeWatch is one subscription, whose nodes are the test.
type fakeWatch struct {
	w         *world
	contender string
	hear      func(quorum.Event)
	stops     int // guarded by w.mu
}

func (w *world) watch(_, contender string, hear func(quorum.Event)) (stop func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note("watch %s", contender)
	fw := &fakeWatch{w: w, contender: contender, hear: hear}
	w.watches = append(w.watches, fw)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.note("stop %s", contender)
		if fw.stops++; fw.stops > 1 {
			w.t.Errorf("the watch of %s was stopped %d times", contender, fw.stops)
		}
	}
}

// news delivers an event to the latest watch.
func (w *world) news(n quorum.Event) {
	w.t.Helper()
	w.newsNow(n)
	synctest.Wait()
}

// newsNow is news whose consequences are yet to come.
func (w *world) newsNow(n quorum.Event) {
	w.t.Helper()
	synctest.Wait() // for whoever is about to subscribe
	w.mu.Lock()
	if len(w.watches) == 0 {
		w.t.Fatal("nobody listens")
	}
	fw := w.watches[len(w.watches)-1]
	w.mu.Unlock()
	fw.hear(n)
}

// rivals makes checks find a rival from now on, "" for none.
func (w *world) rivals(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rival = name
}

func (w *world) leave(_, contender string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note("leave %s", contender)
	if !w.wants[contender] {
		w.t.Errorf("%s left, and no node can know that it wanted anything", contender)
	}
	delete(w.wants, contender)
}

// history is the requests to the world since the last call.
func (w *world) history() (log []string) {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	log, w.log = w.log, nil
	return log
}

func (w *world) prepare(key string, ttl time.Duration, tokens int64, contender string) Lease {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.prepared++
	owner := fmt.Sprint("owner-", w.prepared)
	if contender == quorum.Marked {
		owner, contender = owner+"R", ""
	}
	return &fakeAttempt{w: w, owner: owner, contender: contender, key: key, ttl: ttl, tokens: tokens}
}

// asked is how many attempts there have been.
func (w *world) asked() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.attempts)
}

// attempt is the latest attempt. A flight that is about to make one makes it first.
func (w *world) attempt() *fakeAttempt {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.attempts) == 0 {
		w.t.Fatal("no attempt was made")
	}
	return w.attempts[len(w.attempts)-1]
}

// renewal is the latest refresh, which must be the n-th.
func (w *world) renewal(n int) *fakeRefresh {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.refreshes) != n {
		w.t.Fatalf("%d refreshes, want %d", len(w.refreshes), n)
	}
	return w.refreshes[n-1]
}

func (w *world) renewals() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.refreshes)
}

type fakeAttempt struct {
	w      *world
	owner  string
	key    string
	ttl    time.Duration
	tokens int64
	began  time.Time
	by     quorum.Acquirer
	lease  *fakeLease // when it was granted

	contender string // who asks, if it has lost before

	inline                      bool // how it was started
	started, decided, cancelled bool // guarded by w.mu
	peek                        error
	isOffer                     bool
	beforeRelease               func() // is called before the release is sent; nil: nothing is. Guarded by w.mu
}

func (a *fakeAttempt) Acquire(inline bool, by quorum.Acquirer) {
	w := a.w
	a.by = by
	w.mu.Lock()
	a.began, a.started, a.inline = clock.Now(), true, inline
	w.attempts = append(w.attempts, a)
	if a.contender == "" {
		w.note("acquire")
	} else {
		w.note("acquire as %s", a.contender)
		w.wants[a.contender] = true
	}
	w.underWay++
	w.most = max(w.most, w.underWay)
	decide := w.acquire
	if a.cancelled && w.cancel != nil {
		decide = w.cancel
	}
	w.mu.Unlock()
	if decide != nil {
		decide(a)
	}
}

func (a *fakeAttempt) Owner() string { return a.owner }

func (a *fakeAttempt) Cancel() {
	a.w.mu.Lock()
	a.cancelled = true
	started := a.started
	a.w.mu.Unlock()
	if started && a.w.cancel != nil {
		a.w.cancel(a)
	}
}

func (a *fakeAttempt) Peek() *quorum.Failure {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return failure(a.peek)
}

func (a *fakeAttempt) Settle() {}

func (a *fakeAttempt) Abandon() (top int64, ok bool) { return 0, true }

func (a *fakeAttempt) Rejoined() bool { return a.w.nodes.rejoin != nil && !a.w.nodes.alone }

func (a *fakeAttempt) Refresh(
	ttl time.Duration, more int64, timeout time.Duration, look bool,
	done func(quorum.Grant, *quorum.Failure),
) {
	a.lease.Refresh(ttl, more, timeout, look, done)
}

func (a *fakeAttempt) Release(_ bool, rival string, news quorum.News, by quorum.Releaser) {
	a.w.mu.Lock()
	before := a.beforeRelease
	a.w.mu.Unlock()
	if before != nil {
		before()
	}
	a.lease.Release(rival, news, func(err error) { by.Released(failure(err)) })
}

// failure is a failure with that error, nil for nil.
func failure(err error) *quorum.Failure {
	if err == nil {
		return nil
	}
	return &quorum.Failure{Err: err}
}

// decide says no when the attempt was decided before.
func (a *fakeAttempt) decide() bool {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if a.decided {
		return false
	}
	a.decided = true
	if !a.isOffer {
		a.w.underWay--
	}
	return true
}

func (a *fakeAttempt) fail(o quorum.Failure) {
	if a.decide() {
		a.by.Acquired(quorum.Grant{}, &o)
	}
}

func (a *fakeAttempt) held(free time.Duration) { a.fail(quorum.Failure{Err: errTaken, Free: free}) }

// taken is a failure because one other has the key, and split one because several have
// votes.
func (a *fakeAttempt) taken(free time.Duration) {
	a.fail(quorum.Failure{Err: errTaken, Free: free, Reason: quorum.Taken, Owned: true})
}

// Withdraw is for offers.
func (a *fakeAttempt) Withdraw() bool {
	a.w.mu.Lock()
	a.w.note("withdraw")
	ended := a.decided
	if !ended {
		delete(a.w.wants, a.contender)
	}
	a.w.mu.Unlock()
	a.fail(quorum.Failure{Err: errTaken})
	return !ended
}

// Forget is for offers.
func (a *fakeAttempt) Forget() {
	if !a.isOffer {
		a.w.t.Error("an attempt was forgotten")
	}
	a.w.mu.Lock()
	a.w.note("forget")
	a.w.mu.Unlock()
	a.decide()
}

func (a *fakeAttempt) split(free time.Duration) {
	a.fail(quorum.Failure{Err: errTaken, Free: free, Reason: quorum.Taken})
}

// undecided fails the attempt, which has taken trip, as said: Split, Foremost or Retained.
func (a *fakeAttempt) undecided(said quorum.Failure) {
	said.Err, said.Reason, said.Took = errTaken, quorum.Taken, trip
	a.fail(said)
}

const trip = 8 * time.Millisecond

func (a *fakeAttempt) unavailable() { a.fail(quorum.Failure{Err: errDown}) }
func (a *fakeAttempt) final()       { a.fail(quorum.Failure{Err: errFinal, Final: true}) }

// grant lets the attempt win. Its validity counts from its begin.
func (a *fakeAttempt) grant() { a.grantBlock(a.tokens) }

func (a *fakeAttempt) grantBlock(tokens int64) {
	if !a.decide() {
		return
	}
	w := a.w
	w.mu.Lock()
	if w.exclusive && w.takenLocked(a.key) {
		w.mu.Unlock()
		a.by.Acquired(quorum.Grant{}, &quorum.Failure{
			Err: errTaken, Free: 3 * time.Millisecond, Reason: quorum.Taken, Owned: tokens%2 == 0,
		})
		return
	}
	l := &fakeLease{w: w, key: a.key, until: a.began.Add(validity(a.ttl))}
	w.leases = append(w.leases, l)
	a.lease = l
	l.owner, l.contender = a.owner, a.contender
	g := quorum.Grant{Until: l.until, First: w.counter + 1, Last: w.counter + tokens}
	w.counter += tokens
	w.mu.Unlock()
	a.by.Acquired(g, nil)
}

// takenLocked reports whether a lease of key is neither released nor expired.
func (w *world) takenLocked(key string) bool {
	now := clock.Now()
	return slices.ContainsFunc(w.leases, func(l *fakeLease) bool {
		return l.key == key && l.releases == 0 && l.until.After(now)
	})
}

type fakeLease struct {
	w         *world
	owner     string
	contender string
	key       string

	// guarded by w.mu
	until    time.Time
	reserved bool
	releases int
	gave     func(error) // done of the release
}

func (l *fakeLease) Release(rival string, news quorum.News, done func(error)) {
	l.w.mu.Lock()
	switch news {
	case quorum.NewsFailed:
		l.w.note("failed")
	case quorum.NewsLook:
		l.w.note("notify of work")
	}
	switch {
	case rival == "":
		l.w.note("release")
		delete(l.w.wants, l.contender)
	case rival == quorum.Others:
		l.w.note("release to others")
		delete(l.w.wants, l.contender)
	case l.contender == "":
		l.w.note("release to %s", rival)
		l.w.wants[l.owner] = true
	default:
		l.w.note("release to %s", rival)
		l.w.wants[l.contender] = true
	}
	if l.releases++; l.releases > 1 {
		l.w.t.Errorf("%s was released %d times", l.owner, l.releases)
	}
	l.gave = done
	l.w.mu.Unlock()
	if l.w.release != nil {
		l.w.release(l)
	}
}

func (l *fakeLease) released(err error) {
	l.w.mu.Lock()
	gave := l.gave
	l.w.mu.Unlock()
	gave(err)
}

func (l *fakeLease) Refresh(
	ttl time.Duration, more int64, timeout time.Duration, look bool,
	done func(quorum.Grant, *quorum.Failure),
) {
	r := &fakeRefresh{l: l, ttl: ttl, more: more, look: look, timeout: timeout, began: clock.Now(), done: done}
	l.w.mu.Lock()
	for _, earlier := range l.w.refreshes {
		if earlier.l == l && !earlier.decided {
			l.w.t.Error("two refreshes of a lease at once")
		}
	}
	l.w.refreshes = append(l.w.refreshes, r)
	if look {
		l.w.note("look")
	} else {
		l.w.note("refresh")
	}
	l.w.mu.Unlock()
	if l.w.refresh != nil {
		l.w.refresh(r)
	}
}

type fakeRefresh struct {
	l       *fakeLease
	ttl     time.Duration
	more    int64
	look    bool
	timeout time.Duration
	began   time.Time
	done    func(quorum.Grant, *quorum.Failure)
	decided bool // guarded by w.mu
}

func (r *fakeRefresh) decide() bool {
	r.l.w.mu.Lock()
	defer r.l.w.mu.Unlock()
	old := r.decided
	r.decided = true
	return !old
}

func (r *fakeRefresh) confirm() { r.confirmBlock(r.more) }

// reserve is the outcome when the nodes do not agree on the block. A refresh that follows one with
// that outcome has another: it requests what was reserved.
func (r *fakeRefresh) reserve() {
	r.l.w.mu.Lock()
	again := r.l.reserved
	r.l.w.mu.Unlock()
	if again {
		r.confirm()
		return
	}
	r.end(0, true)
}

func (r *fakeRefresh) confirmBlock(tokens int64) { r.end(tokens, false) }

func (r *fakeRefresh) end(tokens int64, reserved bool) {
	if !r.decide() {
		return
	}
	w := r.l.w
	w.mu.Lock()
	g := quorum.Grant{
		Until: r.began.Add(validity(r.ttl)), First: w.counter + 1, Last: w.counter + tokens, Reserved: reserved,
	}
	w.counter += tokens
	if r.look {
		g.Rival = w.rival
	}
	r.l.until, r.l.reserved = clock.Later(r.l.until, g.Until), reserved
	w.mu.Unlock()
	r.done(g, nil)
}

func (r *fakeRefresh) fail(o quorum.Failure) {
	if r.decide() {
		r.done(quorum.Grant{}, &o)
	}
}

// Paces.

type limited struct {
	interval time.Duration
	max      int
}

func (limited) Traits() Traits { return Quick }

func (p limited) Next(n int) (time.Duration, bool) { return p.interval, n <= p.max }

// never gives up, every interval; it says so.
type never time.Duration

func (p never) Next(int) (time.Duration, bool) { return time.Duration(p), true }
func (p never) Traits() Traits                 { return Endless | Quick }

// custom is a strategy that does not describe itself.
type custom func(n int) (time.Duration, bool)

func (p custom) Next(n int) (time.Duration, bool) { return p(n) }

// patient waits for good, and polls rarely.
const patient = never(time.Hour)

// caller is one call of Acquire, in a goroutine of its own.
type caller struct {
	w      *world
	h      Ticket
	cancel context.CancelFunc
	began  time.Time
	took   time.Duration
	err    error
	done   chan struct{} // closed when Acquire has returned
	onEnd  bool          // the lock was got, and OnEnd took a function
	ends   int           // how often it was called; guarded by w.mu
}

// enter has h, new and patient, join the flight of key and do what it has to do first, as Acquire
// would.
func (w *world) enter(key string, h *Ticket, ttl time.Duration) (*flight, error) {
	h.ttl, h.waiter = ttl, w.g.newWaiter(context.Background(), patient, nil)
	f, next, err := w.g.join(key, h)
	if next == attempt {
		f.runAttempt(h, false)
	}
	return f, err
}

type wish struct {
	key    string
	ttl    time.Duration
	pace   Pace
	linger time.Duration
	alone  bool // nobody listens for the end of its lock
}

// start makes a caller, "k" for 10s, patient unless changed, and lets it get as far as it can.
func (w *world) start(change ...func(*wish)) *caller {
	c := w.launch(change...)
	synctest.Wait()
	return c
}

func (w *world) launch(change ...func(*wish)) *caller {
	wish := wish{key: "k", ttl: 10 * time.Second, pace: patient}
	for _, c := range change {
		c(&wish)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	c := &caller{w: w, cancel: cancel, began: time.Now(), done: make(chan struct{})}
	c.h.SetLinger(wish.linger)
	go func() {
		defer close(c.done)
		defer cancel()
		c.err = w.g.Acquire(ctx, wish.key, &c.h, wish.ttl, wish.pace)
		c.took = time.Since(c.began)
		if c.err == nil && !wish.alone {
			_, _, over := c.h.OnEnd(func(error) {
				w.mu.Lock()
				c.ends++
				w.mu.Unlock()
			})
			c.onEnd = !over
			if w.got != nil {
				w.got(c)
			}
		}
	}()
	return c
}

func ttl(d time.Duration) func(*wish) { return func(w *wish) { w.ttl = d } }
func pace(p Pace) func(*wish)         { return func(w *wish) { w.pace = p } }
func key(k string) func(*wish)        { return func(w *wish) { w.key = k } }
func alone(w *wish)                   { w.alone = true }

func (c *caller) returned() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// waits checks that c is still in the queue.
func (c *caller) waits() {
	c.w.t.Helper()
	if synctest.Wait(); c.returned() {
		c.w.t.Fatalf("it returned (%v), and should wait", c.err)
	}
}

// holds checks that c got the lock and has it.
func (c *caller) holds() *Ticket {
	c.w.t.Helper()
	if synctest.Wait(); !c.returned() {
		c.w.t.Fatal("it waits, and should hold the lock")
	}
	if c.err != nil {
		c.w.t.Fatalf("it failed: %v", c.err)
	}
	if err := c.h.Err(); err != nil {
		c.w.t.Fatalf("it holds no longer: %v", err)
	}
	return &c.h
}

// failed checks that c was refused with all of these errors, after took.
func (c *caller) failed(took time.Duration, all ...error) {
	c.w.t.Helper()
	if synctest.Wait(); !c.returned() {
		c.w.t.Fatal("it waits, and should have failed")
	}
	for _, err := range all {
		if !errors.Is(c.err, err) {
			c.w.t.Fatalf("got %v, want %v", c.err, err)
		}
	}
	if c.took != took {
		c.w.t.Fatalf("it failed after %v, want %v", c.took, took)
	}
}

func (c *caller) releases() {
	c.w.t.Helper()
	if err := c.h.Release(); err != nil {
		c.w.t.Fatalf("release: %v", err)
	}
	synctest.Wait()
}

// leaves ends c's ctx.
func (c *caller) leaves() {
	c.cancel()
	synctest.Wait()
}

// desertedLocked checks that nobody is subscribed and nobody is registered as waiting. The caller
// holds w.mu.
func (w *world) desertedLocked() {
	for _, fw := range w.watches {
		if fw.stops != 1 {
			w.t.Errorf("the watch of %s was stopped %d times", fw.contender, fw.stops)
		}
	}
	for c := range w.wants {
		w.t.Errorf("the nodes may still think that %s waits", c)
	}
}

// wantNoFlight checks that no flight is left, nor counted.
func (w *world) wantNoFlight() {
	w.t.Helper()
	if w.g.any() {
		w.t.Error("a flight is left behind")
	}
	if n := w.g.contending.Load(); n != 0 {
		w.t.Errorf("%d flights wait among rivals, and there are none", n)
	}
}

// empty checks that the group has nothing left, and has released every lease.
func (w *world) empty() {
	w.t.Helper()
	synctest.Wait()
	if w.staysSubscribed() {
		pass(time.Duration(subscribedFor))
	}
	w.wantNoFlight()
	if c := w.g.Counts(Counts{}); c.Held != 0 || c.Waiters != 0 {
		w.t.Errorf("gauges are not 0: %+v", c)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.underWay > 0 {
		w.t.Errorf("%d attempts are under way", w.underWay)
	}
	w.desertedLocked()
	for _, l := range w.leases {
		if l.releases != 1 {
			w.t.Errorf("%s was released %d times", l.owner, l.releases)
		}
	}
}

// staysSubscribed reports whether a flight has nothing but its subscription.
func (w *world) staysSubscribed() (any bool) {
	for _, f := range w.g.all() {
		f.mu.Lock()
		any = any || f.phase == lingering && f.lease == nil && f.contention.offer == nil
		f.mu.Unlock()
	}
	return any
}

// is checks a number.
func is[N comparable](t *testing.T, what string, got, want N) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// inBubble runs a test in virtual time, with a world that must be empty at the end.
func inBubble(t *testing.T, test func(t *testing.T, w *world), change ...func(*Config)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, change...)
		test(t, w)
		w.empty()
	})
}

// emptyNow is empty for tests outside a bubble, whose goroutines have ended.
func (w *world) emptyNow() {
	w.t.Helper()
	w.wantNoFlight()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.leases {
		if l.releases != 1 {
			w.t.Errorf("%s was released %d times", l.owner, l.releases)
		}
	}
}

// emptySoon is emptyNow for tests whose fakes answer from goroutines of their own.
func (w *world) emptySoon() {
	w.t.Helper()
	w.g.closed.Store(true) // has flights tell of their end
	for w.g.any() {
		select {
		case <-w.g.died:
		case <-w.t.Context().Done():
		}
	}
	w.emptyNow()
}
