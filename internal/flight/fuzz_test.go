package flight

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/quorum"
	"github.com/flightlock/flightlock/internal/redistest"
)

// FuzzFlight turns bytes into operations on two keys, and checks after each one what must
// always be true. Callers of the key "k" share a flight; those of "a" are alone.
func FuzzFlight(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for n := range 40 {
		f.Add(randomOps(rnd, 20+10*n))
	}
	f.Fuzz(func(t *testing.T, ops []byte) { simulate(t, ops[:min(len(ops), 600)]) })
}

// The same with many more sequences; a failure names the seed.
func TestRandomOperations(t *testing.T) {
	runs := 500
	if testing.Short() || redistest.Raced {
		runs = 100
	}
	for seed := range runs {
		ok := t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			simulate(t, randomOps(rand.New(rand.NewPCG(uint64(seed), 0)), 300))
		})
		if !ok {
			return
		}
	}
}

// randomOps has whole sequences prefer some operations, so that different states are met.
func randomOps(rnd *rand.Rand, n int) []byte {
	var weights [operations]int
	sum := 0
	for i := range weights {
		weights[i] = 1 + rnd.IntN(8)
		sum += weights[i]
	}
	ops := make([]byte, 0, 2*n)
	for range n {
		at := rnd.IntN(sum)
		op := 0
		for at >= weights[op] {
			at -= weights[op]
			op++
		}
		ops = append(ops, byte(op), byte(rnd.IntN(256)))
	}
	return ops
}

// operations is how many kinds there are.
const operations = 21

// sim is one run. The fake quorum keeps to the protocol: it grants only what is free, and confirms
// a refresh only before the deadline. Events arrive at random, true or not.
type sim struct {
	*world
	callers  []*actor
	closing  chan bool
	before   Counts
	releases int   // calls of Release under way; guarded by w.mu
	asksOpen int   // calls of Refresh not answered yet; guarded by w.mu
	step     int64 // how many there were; guarded by w.mu
	last     map[string]int64
	timers   map[*time.Timer]bool // those of waiters that were seen
}

type actor struct {
	*caller
	key     string
	ttl     time.Duration
	slow    bool      // its strategy may be: then others go first
	asked   int64     // the step in which its strategy was asked last; guarded by w.mu
	seen    bool      // that it has returned
	over    bool      // its Err was not nil
	promise time.Time // how far its Until may be
}

func simulate(t *testing.T, ops []byte) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) {
			if len(ops) > 3 {
				c.Slice = []time.Duration{-1, 1, 5 * ms, 20 * ms, time.Hour}[ops[1]%5]
				if ops[3]%5 == 0 {
					c.Nodes.(*fakeNodes).watch = nil
				}
			}
			if len(ops) > 7 {
				switch ops[5] % 4 {
				case 0:
					offering(c)
				case 2:
					rejoining(c)
				}
				c.MaxRetained = int(ops[7] % 3)
			}
			c.MaxWaiters = 20
		})
		w.exclusive = true
		s := &sim{world: w, last: map[string]int64{}, timers: map[*time.Timer]bool{}}
		w.acquire, w.refresh, w.release, w.cancel = nil, nil, nil, nil
		w.nodes.prepare = func(key string, ttl time.Duration, tokens int64, contender string) Lease {
			s.mayAsk(key)
			return w.prepare(key, ttl, tokens, contender)
		}
		w.got = s.got
		w.g.InboxConfirmed(true)
		for len(ops) >= 2 && !t.Failed() {
			s.mu.Lock()
			s.step++
			s.mu.Unlock()
			s.do(ops[0], int(ops[1]))
			synctest.Wait()
			s.callersComeBack()
			s.check()
			ops = ops[2:]
		}
		s.drain()
	})
}

// callersComeBack has releases bring offers, where the nodes take them.
func (s *sim) callersComeBack() {
	for _, f := range s.g.all() {
		if f.mu.Lock(); f.key == "k" && f.contention != nil {
			f.contention.returns = rejoinAfter
		}
		f.mu.Unlock()
	}
}

// mayAsk checks that this process's own entry is on its way out when it asks for "k" again.
func (s *sim) mayAsk(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attempts = slices.DeleteFunc(s.attempts, func(a *fakeAttempt) bool { return a.decided })
	if key != "k" {
		return
	}
	for _, l := range s.leases {
		if l.key == key && l.releases == 0 {
			s.t.Error("an attempt began before the release of", l.owner)
		}
	}
	for _, a := range s.attempts {
		if a.key == key {
			s.t.Error("two attempts at once")
		}
	}
}

// got notes the order of Tickets.
func (s *sim) got(c *caller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := c.h.Key()
	// its strategy took so long that the lock was over when it came back
	if c.h.Fence() <= s.last[k] && c.h.Err() != nil {
		return
	}
	if c.h.Fence() <= s.last[k] {
		s.t.Errorf("fence %d after %d", c.h.Fence(), s.last[k])
	}
	s.last[k] = c.h.Fence()
}

var (
	someTTLs  = []time.Duration{10 * ms, 30 * ms, 100 * ms, time.Second, 10 * time.Second}
	someTimes = []time.Duration{1, ms, 3 * ms, 10 * ms, 50 * ms, 200 * ms, time.Second, 8 * time.Second}
	somePaces = []Pace{
		never(5 * ms), never(time.Second), limited{}, limited{10 * ms, 5}, limited{time.Second, 2},
		limited{ms, 3000}, custom(func(int) (time.Duration, bool) { return -1, true }),
		custom(func(n int) (time.Duration, bool) { return time.Duration(n%3) * ms, n < 9 }),
		slow(func(n int) (time.Duration, bool) { return 2 * ms, n < 30 }, 7*ms),
		slow(func(int) (time.Duration, bool) { return 5 * ms, true }, 300*ms),
	}
)

// slow is p, but blocks for a while on every fortieth failure.
func slow(p custom, took time.Duration) custom {
	return func(n int) (time.Duration, bool) {
		if n%40 == 3 {
			time.Sleep(took)
		}
		return p(n)
	}
}

func (s *sim) do(op byte, arg int) {
	switch op % operations {
	case 0, 1, 2, 3:
		s.arrive(arg)
	case 4:
		if c := pick(s.callers, arg); c != nil {
			c.cancel()
		}
	case 5: // in one instant: the front waiter leaves, and the holder releases
		if c := s.front(); c != nil {
			c.cancel()
		}
		s.goRelease(pick(s.winners(), arg))
	case 6, 7:
		s.goRelease(pick(s.winners(), arg))
	case 8:
		s.goRefresh(pick(s.winners(), arg))
	case 9, 10:
		time.Sleep(someTimes[arg%len(someTimes)])
	case 11, 12:
		if a := pick(s.pendingAttempts(), arg/8); a != nil {
			s.decide(a, arg%8)
		}
	case 13:
		if r := pick(s.pendingRefreshes(), arg/8); r != nil {
			s.answer(r, arg%8)
		}
	case 14:
		if l := pick(s.pendingReleases(), arg/2); l != nil {
			s.confirmRelease(l, arg%2 == 0)
		}
	case 15:
		s.habits(arg)
	case 16:
		s.rivals([]string{"", "x", "y"}[arg%3])
	case 17:
		if fw := pick(s.listening(), arg/4); fw != nil {
			fw.hear(quorum.Subscribed + quorum.Event(arg%5))
		}
	case 18:
		if o := pick(s.pendingOffers(), arg/16); o != nil {
			s.decideOffer(o, arg%16)
		} else if fw := pick(s.listening(), arg); fw != nil {
			fw.hear(quorum.Subscribed)
		}
	case 19:
		if owner := pick(s.owners(), arg/2); owner != nil {
			s.g.Recall("k", *owner, []string{"", "x"}[arg%2])
		}
	case 20:
		s.g.confirmed(arg%8 != 0)
	}
}

// listening is every watch that was not stopped, and the last one that was.
func (s *sim) listening() []*fakeWatch {
	s.mu.Lock()
	defer s.mu.Unlock()
	stopped := -1
	for i, fw := range s.watches {
		if fw.stops > 0 {
			stopped = i
		}
	}
	var all []*fakeWatch
	for i, fw := range s.watches {
		if fw.stops == 0 || i == stopped {
			all = append(all, fw)
		}
	}
	return all
}

// habits changes what the quorum does at once, and rarely closes the group.
func (s *sim) habits(arg int) {
	s.acquire, s.refresh, s.release, s.cancel = nil, nil, nil, nil
	s.nodes.alone = arg%5 == 0
	if arg&1 != 0 {
		s.acquire = func(a *fakeAttempt) { s.decide(a, arg/16) }
	}
	if arg&2 != 0 {
		s.refresh = func(r *fakeRefresh) { s.answer(r, arg/16) }
	}
	if arg&4 != 0 {
		s.release = func(l *fakeLease) { s.confirmRelease(l, true) }
	}
	if arg&8 != 0 {
		s.cancel = func(a *fakeAttempt) { s.decide(a, arg/16) }
	}
	if arg == 255 && s.closing == nil {
		s.closing, _ = s.closes(time.Duration(len(s.callers)) * ms)
	}
}

func (s *sim) arrive(arg int) {
	a := &actor{key: "k", ttl: someTTLs[arg%len(someTTLs)]}
	n := arg / 8 % len(somePaces)
	p := somePaces[n]
	a.slow = n >= len(somePaces)-2
	switch arg / 64 {
	case 0:
		if arg&1 != 0 {
			a.key = "a"
		}
	case 1:
		if arg&3 == 0 {
			p = limited{}
		}
	}
	if inner := p; TraitsOf(inner)&Quick == 0 {
		p = custom(func(n int) (time.Duration, bool) {
			s.mu.Lock()
			a.asked = s.step
			s.mu.Unlock()
			return inner.Next(n)
		})
	}
	stay := []time.Duration{time.Second, 20 * ms, time.Second, 0}[arg%4]
	a.caller = s.launch(key(a.key), ttl(a.ttl), pace(p), linger(stay))
	s.callers = append(s.callers, a)
}

func (s *sim) goRelease(a *actor) {
	if a == nil {
		return
	}
	s.mu.Lock()
	s.releases++
	s.mu.Unlock()
	valid := a.h.Err() == nil
	go func() {
		err := a.h.Release()
		if !valid && err == nil {
			s.t.Error("a Ticket that was over could be released")
		}
		s.mu.Lock()
		s.releases--
		s.mu.Unlock()
	}()
}

func (s *sim) goRefresh(a *actor) {
	if a == nil {
		return
	}
	s.mu.Lock()
	s.asksOpen++
	s.mu.Unlock()
	a.h.Refresh(50*ms, func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asksOpen--
		if err == nil {
			a.promise = time.Now().Add(validity(a.ttl))
		}
	})
}

// decide ends an attempt as the quorum may.
func (s *sim) decide(a *fakeAttempt, how int) {
	switch how {
	case 0, 1, 2, 3:
		if time.Now().Before(a.began.Add(validity(a.ttl))) {
			a.grantBlock(a.tokens + int64(how))
		} else {
			a.split(3 * ms)
		}
	case 4:
		a.taken(time.Duration(a.tokens%2) * 40 * ms)
	case 5:
		a.fail(quorum.Failure{
			Err: errTaken, Free: 20 * ms, Reason: quorum.Taken, Queued: a.tokens%2 == 0, Got: int(a.tokens/2) % 2,
			Declined: a.tokens%3 == 0,
		})
	case 6:
		a.unavailable()
	default:
		a.final()
	}
}

// decideOffer ends an offer as releases elsewhere and the quorum may.
func (s *sim) decideOffer(o *fakeAttempt, how int) {
	s.mu.Lock()
	taken := s.takenLocked(o.key)
	s.mu.Unlock()
	if taken || how == 0 {
		o.split(3 * ms)
		return
	}
	span := min(500*ms, o.ttl)
	o.grantFor(span, span/15*time.Duration(how))
}

func (s *sim) pendingOffers() []*fakeAttempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.offers), func(o *fakeAttempt) bool { return o.decided })
}

// owners are those of the last leases and attempts.
func (s *sim) owners() (all []*string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.leases[max(0, len(s.leases)-2):] {
		all = append(all, &l.owner)
	}
	for _, a := range s.attempts {
		all = append(all, &a.owner)
	}
	return all
}

// answer ends a refresh as the quorum may.
func (s *sim) answer(r *fakeRefresh, how int) {
	s.mu.Lock()
	over := r.l.releases > 0 || !time.Now().Before(r.l.until)
	s.mu.Unlock()
	switch {
	case over || how == 7:
		r.fail(quorum.Failure{Err: errTaken, Reason: quorum.NotHeld})
	case how < 4:
		r.confirm()
	case how == 4:
		r.confirmBlock(0)
	case how == 5:
		r.reserve()
	default:
		r.fail(quorum.Failure{Err: errDown})
	}
}

func (s *sim) confirmRelease(l *fakeLease, good bool) {
	s.mu.Lock()
	gave := l.gave
	l.gave = nil
	s.mu.Unlock()
	if good {
		gave(nil)
	} else {
		gave(errDown)
	}
}

func pick[T any](all []*T, arg int) *T {
	if len(all) == 0 {
		return nil
	}
	return all[arg%len(all)]
}

// front is the front waiter of the shared flight.
func (s *sim) front() *actor {
	for _, a := range s.callers {
		if a.key == "k" && !a.returned() {
			return a
		}
	}
	return nil
}

// winners are the callers that got the lock, still holding it or not; the last ones first.
func (s *sim) winners() (all []*actor) {
	for _, a := range slices.Backward(s.callers) {
		if a.returned() && a.err == nil {
			all = append(all, a)
		}
	}
	return all[:min(len(all), 3)]
}

func (s *sim) pendingAttempts() []*fakeAttempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.attempts), func(a *fakeAttempt) bool { return a.decided })
}

func (s *sim) pendingRefreshes() []*fakeRefresh {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.refreshes), func(r *fakeRefresh) bool { return r.decided })
}

func (s *sim) pendingReleases() []*fakeLease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.leases), func(l *fakeLease) bool { return l.gave == nil })
}

// check is what must be true after every step.
func (s *sim) check() {
	waiting, busy, valid := int64(0), int64(0), map[string]int64{}
	for i, a := range s.callers {
		if !a.returned() {
			waiting++
			if a.slow { // before it queues, or after its wait has ended
				busy++
			}
			continue
		}
		if !a.seen {
			a.seen = true
			s.checkReturned(i, a)
		}
		if a.err == nil && s.checkHold(a) {
			valid[a.key]++
		}
	}
	if valid["k"] > 1 || valid["a"] > 1 {
		s.t.Errorf("at once: %v hold", valid)
	}
	c := s.g.Counts(Counts{})
	if c.Waiters > waiting || c.Waiters < waiting-busy || c.Held < valid["k"]+valid["a"] {
		s.t.Errorf("counts %+v, but %d wait and %v hold", c, waiting, valid)
	}
	b := s.before
	if c.Acquired < b.Acquired || c.Handoffs < b.Handoffs || c.Attempts < b.Attempts ||
		c.Refreshes < b.Refreshes || c.Lost < b.Lost {
		s.t.Errorf("counters fell: %+v, %+v", b, c)
	}
	s.before = c
	for _, f := range s.g.all() {
		s.checkFlight(f)
	}
	s.checkWatches()
}

// checkReturned is about a call of Acquire that has just returned.
func (s *sim) checkReturned(i int, a *actor) {
	if a.err != nil {
		for _, known := range []error{errBusy, errCrowded, errClosed, errTaken, errDown, errFinal, passedOn.Err,
			context.Canceled} {
			if errors.Is(a.err, known) {
				return
			}
		}
		s.t.Error("unknown error", a.err)
		return
	}
	a.promise = time.Now().Add(validity(a.ttl)) // it was given the lease in this step
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, earlier := range s.callers[:i] {
		asked := earlier.slow || earlier.asked == s.step // while its strategy is, others go first
		if a.key == "k" && earlier.key == "k" && !earlier.returned() && !asked {
			s.t.Errorf("caller %d overtook caller %d", i, slices.Index(s.callers, earlier))
		}
	}
}

// checkHold says whether a holds, after checking that it may.
func (s *sim) checkHold(a *actor) bool {
	if a.h.Err() != nil {
		a.over = true
		return false
	}
	if a.over {
		s.t.Error("a Ticket came back")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.leases, func(l *fakeLease) bool { return l.owner == a.h.Owner() })
	l := s.leases[i]
	if l.releases > 0 {
		s.t.Error("somebody holds a lease that was given back")
	}
	if until := a.h.Until(); until.After(l.until) || until.After(a.promise) {
		s.t.Errorf("until %v, but the lease's is %v, and its own may be %v", until, l.until, a.promise)
	}
	return true
}

// checkFlight is about liveness: whatever a flight waits for must be under way.
func (s *sim) checkFlight(f *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for h := f.head(); h != nil; h = f.queue.Next(h) {
		if h.waiter.giveUpTimer != nil {
			s.timers[h.waiter.giveUpTimer] = true
		}
	}
	now := time.Now()
	armed := func(t time.Time) bool { return f.armed != 0 && f.armed <= f.g.at(t) && f.hasAlarm() }
	ok, state := false, ""
	switch {
	case f.phase == dead:
		state = "dead"
	case f.phase == releasing:
		state = "releasing"
	case f.phase == acquiring:
		ok, state = slices.ContainsFunc(s.pendingAttempts(), func(a *fakeAttempt) bool {
			return a.key == f.key
		}), "acquiring"
	case f.phase == lingering:
		c := f.contention
		ok, state = f.armed != 0 && f.armed <= f.lingersUntil && f.hasAlarm() && f.n == 0, "lingering"
		if f.lease != nil {
			ok = ok && now.Before(f.until)
		} else {
			ok = ok && (c.offer == nil || c.pendingGrant == nil)
		}
	case f.cur != nil:
		ok, state = armed(f.cur.until) && now.Before(f.cur.until) && !f.cur.until.After(f.until), "held"
	case f.lease != nil:
		ok, state = f.refreshing, "renewing"
	default:
		switch {
		case f.driverLocked() == nil: // whoever comes back first
			ok = f.n > 0
		case f.driverLocked().waiter.repeats > 0:
			ok = armed(f.nextAttempt) && now.Before(f.nextAttempt)
		default:
			ok = armed(f.nextAttempt) && now.Before(f.nextAttempt) && s.checkPause(f)
		}
		state = "idle"
	}
	if f.refreshing {
		ok = ok && slices.ContainsFunc(s.pendingRefreshes(), func(r *fakeRefresh) bool {
			return r.l == f.lease.(*fakeAttempt).lease
		})
	}
	if !ok {
		s.t.Errorf("a flight that is %s waits for nothing, with %d waiters", state, f.n)
	}
}

// checkPause says whether a flight that waits for the next attempt does not wait too long.
func (s *sim) checkPause(f *flight) bool {
	atMost := func(t time.Time) bool { return t.IsZero() || !f.nextAttempt.After(t) }
	next, last := f.driverLocked().waiter.plan.nextTry, f.lastLocked()
	switch c := f.contention; {
	case last.Reason == quorum.Taken && c == nil: // that is what a contention is for
		return false
	case last.Reason == quorum.Taken && c.subscribed && c.offer != nil && (last.Owned || last.Queued):
		return atMost(f.backoff.failedAt.Add(c.poll)) && atMost(f.backoff.freeAt)
	case last.Owned && c.subscribed:
		return atMost(f.backoff.failedAt.Add(safetyPoll)) && atMost(f.backoff.freeAt)
	case last.Reason == quorum.Taken && !c.subscribed:
		return atMost(f.backoff.failedAt.Add(maxPoll)) && atMost(f.backoff.freeAt) && atMost(next)
	}
	return atMost(f.backoff.freeAt) && atMost(next)
}

// checkWatches is about listening: every flight in a contention does, and nobody else.
func (s *sim) checkWatches() {
	s.mu.Lock()
	listen := map[string]bool{}
	for _, fw := range s.watches {
		if fw.stops == 0 {
			listen[fw.contender] = true
		}
	}
	s.mu.Unlock()
	for _, f := range s.g.all() {
		f.mu.Lock()
		if c := f.contention; c != nil {
			if s.nodes.watch != nil && !listen[c.contender] {
				s.t.Error("a flight does not listen as", c.contender)
			}
			delete(listen, c.contender)
		}
		f.mu.Unlock()
	}
	for c := range listen {
		s.t.Error("nobody needs to listen any more as", c)
	}
}

// drain lets everything come to its end, and checks that nothing remains.
func (s *sim) drain() {
	s.acquire = func(a *fakeAttempt) { s.decide(a, 0) }
	s.refresh = func(r *fakeRefresh) { s.answer(r, 0) }
	s.release = func(l *fakeLease) { s.confirmRelease(l, true) }
	s.cancel = func(a *fakeAttempt) { s.decide(a, 4) }
	for round := 0; !s.drained(); round++ {
		if round > len(s.callers)+100 {
			s.t.Error("somebody waits for ever")
			return
		}
		for _, a := range s.pendingAttempts() {
			s.decide(a, 0)
		}
		for _, r := range s.pendingRefreshes() {
			s.answer(r, 0)
		}
		for _, l := range s.pendingReleases() {
			s.confirmRelease(l, true)
		}
		for _, a := range s.callers {
			if a.returned() && a.err == nil && a.h.Err() == nil {
				s.goRelease(a)
			}
		}
		time.Sleep(100 * ms)
		synctest.Wait()
		s.check()
	}
	time.Sleep(time.Minute)
	s.empty()
	for _, a := range s.callers {
		if want := map[bool]int{true: 1}[a.onEnd]; a.ends != want {
			s.t.Errorf("OnEnd was called %d times, want %d", a.ends, want)
		}
		if a.h.waiter != nil {
			s.t.Error("one that does not wait has what it takes to wait")
		}
		if a.h.f != nil && a.h.f.hasAlarm() {
			s.t.Error("a dead flight has an alarm")
		}
	}
	for timer := range s.timers {
		if timer.Stop() {
			s.t.Error("a timer runs")
		}
	}
	if s.closing != nil && len(s.closing) != 1 {
		s.t.Error("Close hangs")
	}
}

func (s *sim) drained() bool {
	for _, a := range s.callers {
		if !a.returned() {
			return false
		}
	}
	if len(s.pendingReleases()) > 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.releases+s.asksOpen == 0 && !s.g.any()
}
