package flightlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
)

// fetchFlight is all callers of this process that miss one key, and the work for them, on a
// goroutine (run) with a ctx of its own.
//
//	contending <-> at the gate -> loading -> storing -> over
//	    |              |             +--> over; the error is held for newcomers (failures)
//	    +--------------+--> over (found in the cache; cancelled; an error)
//
// A flight contends for the lock until a majority of nodes cannot be reached. Then it waits at the gate
// for a place to load without one, and contends again as soon as a node is back; with MaxLoads it
// waits there before it contends, too.
//
// These rules keep it right, each decided under Fetcher.mu:
//
//   - Fetcher.flights has the one flight of a key that can be joined. A flight leaves it in the
//     step in which it is cancelled or its result is final, and removes no other's entry.
//     So nobody waits for a flight that is over, or in which nobody works.
//   - A flight is cancelled by its last caller's leaving, but only until it has what a load
//     needs. commit ends that, in one step with looking whether it was cancelled: from there on it
//     runs to its end, and what it has loaded is stored for those who come.
//   - Lookup, Load and Store run on goroutines of their own, which catch panic and Goexit.
//     The flight waits for them as long as their ctx allows and then goes on without their
//     answer; but a Load that has not returned keeps the flight in its place, so that there
//     is never a second one for the key.
//   - Nothing is stored once the lock has been lost. What was on its way at that moment
//     only the fence can stop.
//
// x/sync/singleflight could not do: its callers share the first one's ctx, cannot leave,
// and hang or die when the function panics or calls Goexit.
type fetchFlight[V any] struct {
	key    string
	why    error                   // the Lookup error it began with: no use in contending
	slow   int                     // Lookups that timed out before it began: 1 if its first caller's did, else 0
	base   context.Context         // what ctx was made of
	ctx    context.Context         // of all work; carries flying
	cancel context.CancelCauseFunc // of ctx; called under mu, so that commit sees it
	flying *flying
	until  time.Time // when it stops waiting, for the lock or for a place; only run's goroutine has it

	// published is closed when v and err are there, which nobody changes after that.
	published chan struct{}
	v         V
	err       error

	// guarded by Fetcher.mu
	callers   int
	behind    bool               // refreshes a stale value: goes on without callers, does not wait. run reads it without mu, for nobody else writes it
	committed bool               // loading, or past that
	shown     bool               // published is closed
	lent      *Lock              // a lock on the key that a caller holds itself; returned by endLoan
	lend      context.CancelFunc // ends the contention, in favour of lent; nil before and after it
	borrows   bool               // lent can still be used
}

// A lookupError is why a flight cannot tell whether there is a value.
type lookupError struct{ error }

func (e *lookupError) Unwrap() error { return e.error }

var errNoAnswer = errors.New("no answer in time")

var errNobody = errors.New("flightlock: all callers left")

// join adds a caller to the flight of key, and begins one if there is none. why is the error of the
// caller's Lookup, if it had one; slow says that this error is a timeout. inside is the flight that
// the caller itself belongs to.
func (f *Fetcher[V]) join(ctx context.Context, key string, why error, slow bool, inside *flying) (*fetchFlight[V], error) {
	values := f.values(ctx)
	// A caller that holds the lock on key itself would wait for itself.
	lent := f.c.reenter(ctx, key)

	f.mu.Lock()
	fl, err := f.findLocked(key, why, slow, values, inside)
	if err != nil {
		f.mu.Unlock()
		f.giveBack(lent)
		return nil, err
	}
	fl.callers++
	lent = f.lendLocked(fl, lent)
	f.mu.Unlock()
	f.giveBack(lent)
	return fl, nil
}

// wait gives a caller the result of its flight. In a stampede a thousand goroutines come
// here at once, many of them with a stack of 2 KB, of which select alone takes a quarter.
// So its frame is small, and it is called close to Fetch: a stack that has to grow costs
// more time than all the rest that a caller does.
func (f *Fetcher[V]) wait(ctx context.Context, fl *fetchFlight[V]) (V, error) {
	select {
	case <-fl.published:
		return fl.v, fl.err
	case <-ctx.Done():
		return f.quit(ctx, fl)
	}
}

// quit is the result for a caller whose ctx has ended.
func (f *Fetcher[V]) quit(ctx context.Context, fl *fetchFlight[V]) (v V, err error) {
	if f.leave(fl) {
		return fl.v, fl.err
	}
	return v, f.gaveUp(fl.key, ctx.Err(), nil)
}

// values is the ctx that a flight begins with. A lock that the caller has is not the flight's: what it
// guards is not known to those who share the load.
func (f *Fetcher[V]) values(ctx context.Context) context.Context {
	if f.opts.Values == nil {
		return context.Background()
	}
	values := f.opts.Values(ctx)
	if values == nil {
		return context.Background()
	}
	values = context.WithoutCancel(values)
	if carriedBy(values) != nil {
		values = context.WithValue(values, carriedKey{}, (*carried)(nil))
	}
	return values
}

// findLocked gives the flight of key, a new one if there is none; not one that waits for
// the flight inside which the caller is.
func (f *Fetcher[V]) findLocked(key string, why error, slow bool, values context.Context, inside *flying) (*fetchFlight[V], error) {
	if f.closed.Load() {
		return nil, f.errClosed(key)
	}
	fl := f.flights[key]
	if fl == nil {
		if err := f.failures.of(key, time.Now()); err != nil {
			return nil, err
		}
		fl = f.beginLocked(key, why, slow, values, false)
	} else {
		f.counts.joined.Add(1)
	}
	if inside != nil && !inside.await(fl.flying) {
		return nil, fmt.Errorf("flightlock: fetch %q: %w: it is called inside a Load that it would wait for", key, ErrInvalid)
	}
	return fl, nil
}

func (f *Fetcher[V]) beginLocked(key string, why error, slow bool, values context.Context, behind bool) *fetchFlight[V] {
	fl := &fetchFlight[V]{key: key, why: why, base: values, behind: behind, flying: new(flying), published: make(chan struct{})}
	if slow {
		fl.why, fl.slow = nil, 1
	}
	fl.borrows = fl.why == nil
	fl.ctx, fl.cancel = context.WithCancelCause(context.WithValue(values, flyingKey{}, fl.flying))
	f.flights[key] = fl
	f.running[fl] = struct{}{}
	f.enterLocked()
	go f.run(fl)
	return fl
}

// refresh begins to load a stale value anew, unless something is under way for key or its last load
// failed not long ago.
func (f *Fetcher[V]) refresh(ctx context.Context, key string) {
	if err := f.c.checkKey(key); err != nil { // it is served, and will never be loaded again
		f.counts.loadFailures.Add(1)
		if f.seen.refused() {
			f.seen.failed(key, "load", err)
		}
		return
	}
	if f.mayRefresh(key) { // else Values has nothing to do
		f.refreshWith(f.values(ctx), key)
	}
}

func (f *Fetcher[V]) mayRefresh(key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mayRefreshLocked(key)
}

func (f *Fetcher[V]) mayRefreshLocked(key string) bool {
	return !f.closed.Load() && f.flights[key] == nil && f.failures.allowRefresh(key, time.Now())
}

// refreshWith is refresh with the ctx that values has made.
func (f *Fetcher[V]) refreshWith(values context.Context, key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mayRefreshLocked(key) {
		f.beginLocked(key, nil, false, values, true)
	}
}

// lendLocked gives a caller's own lock to the flight, and returns it if that has no use for
// it.
func (f *Fetcher[V]) lendLocked(fl *fetchFlight[V], l *Lock) *Lock {
	if l == nil || !fl.borrows || fl.lent != nil {
		return l
	}
	fl.lent = l
	if fl.lend != nil {
		fl.lend()
	}
	return nil
}

func (f *Fetcher[V]) giveBack(l *Lock) {
	if l != nil {
		_ = l.Release(context.Background()) // that it is over already was noticed where it mattered
	}
}

// giveUp releases the lock after a load or Store that failed, and tells the other processes that wait
// for it that it failed, so that they need not wait for one another. It does not tell them if Close
// ended the load: theirs may succeed. It is not called for a Store that timed out: the value was
// loaded, and the cache is busy. If all others then loaded without a lock, their Stores would keep it
// busy.
func (f *Fetcher[V]) giveUp(fl *fetchFlight[V], l *Lock) {
	if l != nil && fl.ctx.Err() == nil {
		_ = l.releaseFailed()
		return
	}
	f.giveBack(l)
}

// leave ends the wait of a caller. With the last one, a flight that is still contending is
// cancelled and cannot be joined any more. shown says that there was a result before; one
// that comes after it is that of being cancelled, and not this caller's.
func (f *Fetcher[V]) leave(fl *fetchFlight[V]) (shown bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.callers--; fl.callers == 0 && !fl.committed && !fl.behind {
		f.forgetLocked(fl)
		fl.cancel(errNobody)
	}
	return fl.shown
}

// commit says that the flight goes on to its end from now on, whoever leaves; or no, if
// everybody has left.
func (f *Fetcher[V]) commit(fl *fetchFlight[V]) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.ctx.Err() == nil {
		fl.committed = true
	}
	return fl.committed
}

func (f *Fetcher[V]) forgetLocked(fl *fetchFlight[V]) {
	if f.flights[fl.key] == fl {
		delete(f.flights, fl.key)
	}
}

func (f *Fetcher[V]) publishLocked(fl *fetchFlight[V], v V, err error) {
	if !fl.shown {
		fl.shown = true
		fl.v, fl.err = v, err
		close(fl.published)
	}
}

// show gives the callers their result; who comes gets it too.
func (f *Fetcher[V]) show(fl *fetchFlight[V], v V, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publishLocked(fl, v, err)
}

// publish gives the callers their result; who comes begins anew.
func (f *Fetcher[V]) publish(fl *fetchFlight[V], v V, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publishLocked(fl, v, err)
	f.forgetLocked(fl)
}

// fail gives the callers the error of a load; who comes within ErrorHold gets it too.
func (f *Fetcher[V]) fail(fl *fetchFlight[V], err error) {
	var none V
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures.failed(fl.key, err, time.Now())
	f.publishLocked(fl, none, err)
	f.forgetLocked(fl)
}

// run is the flight's goroutine.
func (f *Fetcher[V]) run(fl *fetchFlight[V]) {
	defer f.ran(fl)
	if l, p, ok := f.prepare(fl); ok {
		f.load(fl, l, p)
	}
}

func (f *Fetcher[V]) ran(fl *fetchFlight[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var none V
	f.publishLocked(fl, none, f.errClosed(fl.key)) // if nothing else was: cancelled, by Close if anybody waits
	f.forgetLocked(fl)
	delete(f.running, fl)
	fl.cancel(nil)
	f.leftLocked(1)
}

// prepare gets what a load needs, a lock or the reason to do without, and a place at the gate, and
// commits the flight to it. ok is false if there is nothing left to do.
//
// A load without a lock begins only when a majority of nodes cannot be reached, after WaitTimeout, and
// when Lookup fails. Who waits for a place to do so locks as soon as there is something to lock on.
func (f *Fetcher[V]) prepare(fl *fetchFlight[V]) (l *Lock, p *place, ok bool) {
	fl.until = time.Now().Add(f.opts.WaitTimeout)
	placeless := time.Time{} // when WaitTimeout is over for a place without a lock
	for why := fl.why; ; {
		var over bool
		back := f.c.back.next() // from before the attempt that may fail
		if why == nil {
			if l, p, why, over = f.win(fl); over || l != nil {
				return l, p, !over
			}
		}
		if !f.mayLoadLocally(fl, why) {
			var none V
			f.publish(fl, none, why)
			return nil, nil, false
		}
		if placeless.IsZero() {
			placeless = time.Now().Add(f.opts.WaitTimeout)
			fl.until = placeless
		}
		p, over = f.enter(fl, unlocked, why, back)
		switch {
		case over:
			return nil, nil, false
		case p == nil: // lock after all
			why = nil
		case !f.commit(fl):
			f.gate.leave(p)
			return nil, nil, false
		default:
			if !errors.Is(why, errFailedElsewhere) {
				f.seen.without.began(why)
			}
			return nil, p, true
		}
	}
}

// mayLoadLocally says whether the policy has an answer to why there is no lock. A load that failed in
// another process is none of its questions: nobody waits for the next one there, and errors do not cross
// processes, so each finds out by a load of its own, at the same time.
func (f *Fetcher[V]) mayLoadLocally(fl *fetchFlight[V], why error) bool {
	return fl.ctx.Err() == nil && (f.opts.OnUnavailable == LoadLocally || errors.Is(why, errFailedElsewhere)) &&
		!errors.Is(why, ErrClosed) && !errors.Is(why, ErrInvalid) && !errors.Is(why, ErrTooManyWaiters)
}

// recheck is how often who waits for a place looks whether it still needs one.
const recheck = time.Second

// enter waits at the gate. Without a place, the flight is over, or it is to lock after all: for an
// unlocked place only, whose reason was why. back is closed when a node is back. A refresh for nobody
// does not wait.
func (f *Fetcher[V]) enter(fl *fetchFlight[V], k kind, why error, back <-chan struct{}) (_ *place, over bool) {
	p := f.gate.join(k)
	if p.isAdmitted() {
		return p, false
	}
	if !f.stay(fl) {
		f.gate.leave(p)
		return nil, true
	}
	for {
		timer := time.NewTimer(min(recheck, time.Until(fl.until)))
		returned := false
		select {
		case <-p.admitted:
			timer.Stop()
			return p, false
		case <-fl.flying.urgent():
			timer.Stop()
			f.gate.leave(p)
			return beside, false
		case <-back:
			back, returned = nil, true
		case <-timer.C:
		case <-fl.ctx.Done():
		}
		timer.Stop()
		if over, again := f.stillWaits(fl, k, why, returned); !again {
			f.gate.leave(p)
			return nil, over
		}
	}
}

// stillWaits looks whether a flight that waits at the gate still has to. If not, it is over or is to
// lock after all.
func (f *Fetcher[V]) stillWaits(fl *fetchFlight[V], k kind, why error, returned bool) (over, again bool) {
	var none V
	var blind *lookupError
	switch {
	case fl.ctx.Err() != nil:
		return true, false
	case !time.Now().Before(fl.until):
		f.publish(fl, none, f.full(fl.key, k, why))
		return true, false
	case k == unlocked && unavailable(why):
		return false, !returned && f.c.away()
	}
	found, err := f.lookAgain(fl, fl.ctx)
	return found, !found && (k == locked || err != nil || !errors.As(why, &blind))
}

// full is the error for those who waited for a place in vain.
func (f *Fetcher[V]) full(key string, k kind, why error) error {
	if k == unlocked {
		return fmt.Errorf("%w; and FetchOptions.MaxUnlockedLoads, %d, are running", why, f.opts.MaxUnlockedLoads)
	}
	return fmt.Errorf("flightlock: fetch %q: no turn within FetchOptions.WaitTimeout, %v: FetchOptions.MaxLoads, %d, are running: %w",
		key, f.opts.WaitTimeout, f.opts.MaxLoads, ErrNotAcquired)
}

// win contends for the lock. With a Lock the flight is committed and the value is still missing;
// with why there is no lock, for that reason; else the flight is over.
func (f *Fetcher[V]) win(fl *fetchFlight[V]) (l *Lock, p *place, why error, over bool) {
	l, p, over, err := f.obtain(fl)
	if over || err != nil {
		return nil, nil, err, over
	}
	if !f.commit(fl) {
		f.gate.leave(p)
		f.giveBack(l)
		return nil, nil, nil, true
	}
	_ = l.AutoRefresh(RefreshPolicy{MaxHold: -1}) // load bounds it; what it could say is in l.Err
	found, err := f.look(fl, fl.ctx, func() {})
	if !found && (err == nil || f.opts.OnUnavailable == LoadLocally) {
		return l, p, nil, false
	}
	if err != nil {
		var none V
		f.publish(fl, none, err)
	}
	f.gate.leave(p)
	f.giveBack(l)
	return nil, nil, nil, true
}

// obtain gets the lock and a place among MaxLoads, unless another process fills the cache meanwhile.
//
// Where loads are limited, the place comes first, with one attempt. If the key is held elsewhere, the
// place goes back for as long as that lasts, for a hot key of another process must not stop the loads
// of this one. If no place is free when the lock is won, the lock goes back: another process may have
// a place for it.
func (f *Fetcher[V]) obtain(fl *fetchFlight[V]) (l *Lock, p *place, over bool, err error) {
	for once := fl.behind || f.opts.MaxLoads > 0; ; once = true {
		if once {
			l, p, over, err = f.tryOnce(fl)
			if over || !contended(err) {
				f.giveBack(f.endLoan(fl))
				return l, p, over, err
			}
		}
		if !f.stay(fl) {
			f.giveBack(f.endLoan(fl))
			return nil, nil, true, nil
		}
		l, over, err = f.contend(fl)
		lent := errors.Is(err, errLent)
		if l == nil {
			return nil, nil, over, err
		}
		if lent { // its caller keeps the lock anyway
			if p, over = f.enter(fl, locked, nil, nil); p == nil {
				f.giveBack(l)
			}
			return l, p, over, nil
		}
		if p = f.gate.join(locked); p.isAdmitted() {
			return l, p, false, nil
		}
		f.gate.leave(p)
		f.giveBack(l)
	}
}

// tryOnce makes one attempt, once it has a place.
func (f *Fetcher[V]) tryOnce(fl *fetchFlight[V]) (l *Lock, p *place, over bool, err error) {
	if p, over = f.enter(fl, locked, nil, nil); p == nil {
		return nil, nil, over, nil
	}
	if l, err = f.c.TryLock(fl.ctx, fl.key, f.opts.TTL); err != nil {
		f.gate.leave(p)
		return nil, nil, false, err
	}
	return l, p, false, nil
}

// contended reports whether an attempt failed in a way in which the next may not.
func contended(err error) bool {
	return errors.Is(err, ErrNotAcquired) || errors.Is(err, ErrUnavailable) && !unavailable(err)
}

// contend tries to get the lock until another process has filled the cache. over says that
// the flight is. A lock that a caller lends is as good as one won; errLent comes with it.
func (f *Fetcher[V]) contend(fl *fetchFlight[V]) (l *Lock, over bool, err error) {
	for {
		l, over, err = f.waitForTurn(fl)
		if !errors.Is(err, errLent) || !f.lostLoan(fl) {
			break
		}
	}
	lent := f.endLoan(fl)
	if errors.Is(err, errLent) {
		return lent, false, err
	}
	f.giveBack(lent)
	return l, over, err
}

// errLent says that a caller lends the lock that it holds itself.
var errLent = errors.New("flightlock: lent")

// waitForTurn contends until WaitTimeout.
func (f *Fetcher[V]) waitForTurn(fl *fetchFlight[V]) (l *Lock, found bool, err error) {
	ctx, cancel := context.WithDeadline(fl.ctx, fl.until)
	defer cancel()
	if !f.awaitLoan(fl, cancel) {
		return nil, false, errLent
	}
	var failed error
	slow := fl.slow
	l, found, err = f.c.contend(ctx, fl.key, f.opts.TTL, func(ctx context.Context) bool {
		var stop bool
		stop, failed = f.lookAgain(fl, ctx)
		switch {
		case errors.Is(failed, errNoTurn):
			failed = nil
		case !errors.Is(failed, errSlowLookup):
			slow = 0
		default: // a busy cache is no outage, and the lock can be had
			if slow++; slow < maxSlowLookups {
				failed = nil
			}
		}
		return stop || failed != nil
	})
	if failed != nil {
		found, err = false, failed
	}
	switch {
	case err == nil || fl.ctx.Err() != nil:
	case errors.Is(ctx.Err(), context.Canceled):
		err = errLent
	case ctx.Err() != nil:
		err = f.waitedInVain(fl.key, err)
	}
	return l, found, err
}

// stay says that the flight waits while others hold the lock; a refresh only if callers
// have joined it.
func (f *Fetcher[V]) stay(fl *fetchFlight[V]) bool {
	if !fl.behind { // nearly always: the callers of a stampede are at mu now
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.callers == 0 {
		f.forgetLocked(fl)
		return false
	}
	fl.behind = false // from now on it ends with them
	return true
}

// awaitLoan has wake called when a caller lends its lock; false if one has.
func (f *Fetcher[V]) awaitLoan(fl *fetchFlight[V], wake context.CancelFunc) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl.lend = wake
	return fl.lent == nil
}

func (f *Fetcher[V]) endLoan(fl *fetchFlight[V]) *Lock {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := fl.lent
	fl.lent, fl.lend, fl.borrows = nil, nil, false
	return l
}

// lostLoan takes back a loan that is worth nothing, so that another can be made.
func (f *Fetcher[V]) lostLoan(fl *fetchFlight[V]) bool {
	f.mu.Lock()
	l := fl.lent
	lost := l != nil && l.Err() != nil
	if lost {
		fl.lent = nil
	}
	f.mu.Unlock()
	if lost {
		f.giveBack(l)
	}
	return lost
}

// waitedInVain is the outcome after WaitTimeout. It must not look as if the caller's ctx
// had ended.
func (f *Fetcher[V]) waitedInVain(key string, err error) error {
	var q *QuorumError
	if errors.As(err, &q) {
		last := *q
		last.ctx = nil
		if last.sentinel == nil { // it ended before anything was known
			last.sentinel, last.reason = ErrNotAcquired, errors.New("no node has answered yet")
		}
		err = &last
	}
	return fmt.Errorf("flightlock: fetch %q: no value within FetchOptions.WaitTimeout, %v: %w", key, f.opts.WaitTimeout, err)
}

// errSlowLookup says that a Lookup took longer than LookupTimeout. Thousands of them may queue for a cache's
// connections, so a flight that waits tries maxSlowLookups.
var errSlowLookup = errors.New("FetchOptions.LookupTimeout is over")

const maxSlowLookups = 3

// lookAgain is look for a flight that waits. At most maxLooks of them run at a time.
func (f *Fetcher[V]) lookAgain(fl *fetchFlight[V], parent context.Context) (found bool, err error) {
	if !f.mayLook(parent) {
		return false, errNoTurn
	}
	return f.look(fl, parent, func() { <-f.looks })
}

// look makes a Lookup for the flight. If the cache has been filled, the callers get the value, and the
// flight is over. A flight that holds the lock calls look directly and does not wait for mayLook:
// others wait for the lock meanwhile. returned is called when Lookup has returned, however late.
func (f *Fetcher[V]) look(fl *fetchFlight[V], parent context.Context, returned func()) (found bool, err error) {
	ctx, cancel := context.WithTimeout(parent, f.opts.LookupTimeout)
	defer cancel()
	looked := f.call("Lookup", func() (V, Freshness, error) {
		defer returned()
		return f.src.Lookup(ctx, fl.key)
	})
	var a answer[V]
	select {
	case a = <-looked:
	case <-ctx.Done():
		a.err = errNoAnswer
	}
	switch {
	case a.err != nil && fl.ctx.Err() != nil: // cancelled
		return true, nil
	case a.err != nil && parent.Err() != nil: // by a loan or WaitTimeout, which say nothing of the cache
		return false, nil
	case a.err != nil && ctx.Err() != nil:
		return false, fmt.Errorf("%w: %w", f.lookupFailed(fl.key, a.err), errSlowLookup)
	case a.err != nil:
		return false, f.lookupFailed(fl.key, a.err)
	case a.fresh == Fresh, a.fresh == Stale && !f.isCommitted(fl):
		f.publish(fl, a.v, nil)
		if a.fresh == Stale {
			f.refreshWith(fl.base, fl.key)
		}
		return true, nil
	}
	return false, nil
}

// maxLooks is how many Lookups a Fetcher makes at once for flights that wait. Thousands at once would
// wait for connections of the cache's client until LookupTimeout, and the cache would seem to be down.
const maxLooks = 64

// errNoTurn reports that no Lookup was made, because too many are under way. The flight goes on waiting.
var errNoTurn = errors.New("too many Lookups are under way")

// mayLook waits for its turn to look, as long as a Lookup may take.
func (f *Fetcher[V]) mayLook(ctx context.Context) bool {
	select {
	case f.looks <- struct{}{}:
		return true
	default:
	}
	patience := time.NewTimer(f.opts.LookupTimeout)
	defer patience.Stop()
	select {
	case f.looks <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-patience.C:
	}
	return false
}

func (f *Fetcher[V]) isCommitted(fl *fetchFlight[V]) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fl.committed
}

// grace is how much longer than its LoadTimeout a Load may take to say so itself.
const grace = 100 * time.Millisecond

// load runs Load, and then Store. It has the lock l, or none, and a place.
func (f *Fetcher[V]) load(fl *fetchFlight[V], l *Lock, p *place) {
	ctx := fl.ctx
	if l != nil {
		ctx = carrying(ctx, l)
	}
	ctx, cancel := context.WithTimeout(ctx, f.opts.LoadTimeout)
	defer cancel()
	f.counts.loads.Add(1)
	if l == nil {
		f.counts.unlocked.Add(1)
	}
	loading := f.call("Load", func() (v V, _ Freshness, err error) {
		v, err = f.src.Load(ctx, fl.key)
		return v, Fresh, err
	})
	began := f.seen.meter.begins()
	a, returned := f.loaded(fl, loading)
	f.seen.meter.loaded(began, a.err, returned)
	if !returned {
		// The lock is for those who can load; the key stays ours in this process.
		f.giveUp(fl, l)
		<-loading
	}
	f.gate.leave(p)
	switch {
	case !returned:
	case a.err != nil:
		f.loadFailed(fl.key, a.err)
		f.fail(fl, loadErr(fl.key, a.err))
		f.giveUp(fl, l)
	default:
		f.store(fl, l, a.v)
	}
}

// loaded waits for Load as long as it may take. After that the callers have an error.
func (f *Fetcher[V]) loaded(fl *fetchFlight[V], loading <-chan answer[V]) (a answer[V], returned bool) {
	late := time.NewTimer(clock.Add(f.opts.LoadTimeout, grace))
	defer late.Stop()
	select {
	case a = <-loading:
		return a, true
	case <-fl.ctx.Done(): // Close has lost its patience
		f.counts.loadFailures.Add(1)
		f.show(fl, a.v, f.errClosed(fl.key))
		return a, false
	case <-late.C:
	}
	err := fmt.Errorf("flightlock: fetch %q: Load goes on after FetchOptions.LoadTimeout, %v", fl.key, f.opts.LoadTimeout)
	f.loadFailed(fl.key, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures.failed(fl.key, err, time.Now())
	f.publishLocked(fl, a.v, err)
	return a, false
}

// store puts the value into the cache, if the lock is still held or there was none, and
// gives it to the callers: then, or when that takes long.
func (f *Fetcher[V]) store(fl *fetchFlight[V], l *Lock, v V) {
	defer f.giveBack(l)
	defer f.publish(fl, v, nil)
	ctx := fl.ctx
	if l != nil {
		if l.Err() != nil {
			f.counts.lost.Add(1)
			f.remember(fl.key, false)
			return
		}
		ctx = l.Context(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, f.opts.TTL)
	defer cancel()
	storing := f.call("Store", func() (_ V, _ Freshness, err error) {
		return v, Fresh, f.src.Store(ctx, fl.key, v, l)
	})
	long := time.NewTimer(f.c.opts.NodeTimeout)
	defer long.Stop()
	for {
		select {
		case a := <-storing:
			f.stored(fl.key, l, a.err)
			if a.err != nil && !ranOut(a.err) {
				f.publish(fl, v, nil)
				f.giveUp(fl, l)
			}
			return
		case <-long.C:
			f.show(fl, v, nil)
		case <-ctx.Done():
			f.publish(fl, v, nil)
			f.giveBack(l)
			f.stored(fl.key, l, (<-storing).err)
			return
		}
	}
}

func (f *Fetcher[V]) stored(key string, l *Lock, err error) {
	f.remember(key, err == nil)
	if err != nil {
		f.counts.storeFailures.Add(1)
		f.seen.failed(key, "store", err)
	}
	if l != nil && errors.Is(l.Err(), ErrLockLost) {
		f.counts.lost.Add(1)
	}
}

// remember notes whether a value that was loaded is in the cache.
func (f *Fetcher[V]) remember(key string, stored bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if stored {
		f.failures.succeeded(key)
	} else {
		f.failures.notStored(key, time.Now())
	}
}

// loadFailed counts and tells of a load that failed.
func (f *Fetcher[V]) loadFailed(key string, err error) {
	f.counts.loadFailures.Add(1)
	f.seen.failed(key, "load", err)
}

// lookupFailed counts and tells of a Lookup that failed, and gives the error for its callers.
func (f *Fetcher[V]) lookupFailed(key string, err error) error {
	f.counts.lookupErrors.Add(1)
	f.seen.failed(key, "lookup", err)
	return &lookupError{lookupErr(key, err)}
}
