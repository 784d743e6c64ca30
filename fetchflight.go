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
//	contending -> loading -> storing -> over
//	    |            +--> over, or held as an error for ErrorHold
//	    +--> over (found in the cache; cancelled; an error)
//
// These rules keep it right, each decided under Fetcher.mu:
//
//   - Fetcher.flights has the one flight of a key that can be joined. A flight leaves it in the
//     step in which it is cancelled or its result is final, and removes no other's entry.
//     So nobody waits for a flight that is over, or in which nobody works.
//   - A flight is cancelled by its last caller's leaving, but only while it is contending.
//     commit ends that, in one step with looking whether it was cancelled: from there on it
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
	base   context.Context         // what ctx was made of
	ctx    context.Context         // of all work; carries flying
	cancel context.CancelCauseFunc // of ctx; called under mu, so that commit sees it
	flying *flying

	// published is closed when v and err are there, which nobody changes after that.
	published chan struct{}
	v         V
	err       error

	// guarded by Fetcher.mu
	callers   int
	behind    bool // refreshes a stale value: goes on without callers, does not wait. run reads it without mu, for nobody else writes it
	committed bool // loading, or past that
	shown     bool // published is closed
	hold      *time.Timer
	lent      *Lock              // a lock on the key that a caller holds itself; returned by endLoan
	lend      context.CancelFunc // ends the contention, in favour of lent; nil before and after it
	borrows   bool               // lent can still be used
}

var errNoAnswer = errors.New("no answer in time")

var errNobody = errors.New("flightlock: all callers left")

// join has a caller take part in the flight of key, and begins one if there is none. why is
// the error of the caller's Lookup, if it had one; inside is the flight that the caller
// belongs to itself.
func (f *Fetcher[V]) join(ctx context.Context, key string, why error, inside *flying) (*fetchFlight[V], error) {
	values := f.values(ctx)
	// A caller that holds the lock on key itself would wait for itself.
	lent := f.c.reenter(ctx, key)

	f.mu.Lock()
	fl, err := f.findLocked(key, why, values, inside)
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

// values is the ctx that a flight begins with.
func (f *Fetcher[V]) values(ctx context.Context) context.Context {
	if f.opts.Values != nil {
		if values := f.opts.Values(ctx); values != nil {
			return context.WithoutCancel(values)
		}
	}
	return context.Background()
}

// findLocked gives the flight of key, a new one if there is none; not one that waits for
// the flight inside which the caller is.
func (f *Fetcher[V]) findLocked(key string, why error, values context.Context, inside *flying) (*fetchFlight[V], error) {
	if f.closed.Load() {
		return nil, f.errClosed(key)
	}
	fl := f.flights[key]
	if fl == nil {
		fl = f.beginLocked(key, why, values, false)
	}
	if inside != nil && !inside.await(fl.flying) {
		return nil, fmt.Errorf("flightlock: fetch %q: %w: it is called inside a Load that it would wait for", key, ErrInvalid)
	}
	return fl, nil
}

func (f *Fetcher[V]) beginLocked(key string, why error, values context.Context, behind bool) *fetchFlight[V] {
	fl := &fetchFlight[V]{key: key, why: why, base: values, behind: behind,
		flying: new(flying), published: make(chan struct{}), borrows: why == nil}
	fl.ctx, fl.cancel = context.WithCancelCause(context.WithValue(values, flyingKey{}, fl.flying))
	f.flights[key] = fl
	f.running[fl] = struct{}{}
	f.enterLocked()
	go f.run(fl)
	return fl
}

// refresh begins to load a stale value anew, unless something is under way for key.
func (f *Fetcher[V]) refresh(ctx context.Context, key string) {
	if f.c.checkKey(key) != nil {
		return
	}
	values := f.values(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed.Load() && f.flights[key] == nil {
		f.beginLocked(key, nil, values, true)
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
	f.counts.loadFailures.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publishLocked(fl, none, err)
	if f.opts.ErrorHold == 0 || f.closed.Load() {
		f.forgetLocked(fl)
		return
	}
	fl.hold = time.AfterFunc(f.opts.ErrorHold, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.forgetLocked(fl)
	})
}

// run is the flight's goroutine.
func (f *Fetcher[V]) run(fl *fetchFlight[V]) {
	defer f.ran(fl)
	l, slot, ok := f.prepare(fl)
	if ok {
		f.load(fl, l, slot)
	}
}

func (f *Fetcher[V]) ran(fl *fetchFlight[V]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var none V
	f.publishLocked(fl, none, f.errClosed(fl.key)) // if nothing else was: cancelled, by Close if anybody waits
	if fl.hold == nil {
		f.forgetLocked(fl)
	}
	delete(f.running, fl)
	fl.cancel(nil)
	f.leftLocked(1)
}

// prepare gets what a load needs, a lock or a slot, and commits the flight to it. ok is
// false if there is nothing left to do.
func (f *Fetcher[V]) prepare(fl *fetchFlight[V]) (l *Lock, slot, ok bool) {
	var none V
	why := fl.why
	if why == nil {
		if l, why, ok = f.win(fl); !ok {
			return nil, false, false
		}
	}
	if l != nil {
		return l, false, true
	}
	if !f.mayLoadLocally(fl, why) {
		f.publish(fl, none, why)
		return nil, false, false
	}
	if err := f.takeSlot(fl, why); err != nil {
		f.publish(fl, none, err)
		return nil, false, false
	}
	if !f.commit(fl) {
		f.slots.Release(1)
		return nil, false, false
	}
	return nil, true, true
}

// mayLoadLocally says whether the policy has an answer to why there is no lock.
func (f *Fetcher[V]) mayLoadLocally(fl *fetchFlight[V], why error) bool {
	return fl.ctx.Err() == nil && f.opts.OnUnavailable == LoadLocally &&
		!errors.Is(why, ErrClosed) && !errors.Is(why, ErrInvalid) && !errors.Is(why, ErrTooManyWaiters)
}

// takeSlot waits for its turn to load without a lock. A refresh for nobody does not wait.
func (f *Fetcher[V]) takeSlot(fl *fetchFlight[V], why error) error {
	f.mu.Lock()
	wait := !fl.behind || fl.callers > 0
	f.mu.Unlock()
	if f.slots.TryAcquire(1) {
		return nil
	}
	full := fmt.Errorf("%w; and FetchOptions.MaxUnlockedLoads, %d, are running", why, f.opts.MaxUnlockedLoads)
	if !wait {
		return full
	}
	ctx, cancel := context.WithTimeout(fl.ctx, f.opts.WaitTimeout)
	defer cancel()
	if f.slots.Acquire(ctx, 1) != nil {
		return full
	}
	return nil
}

// win contends for the lock. ok with a Lock: the flight is committed and the value is still
// missing; ok with why: there is no lock, for that reason; else the flight is over.
func (f *Fetcher[V]) win(fl *fetchFlight[V]) (l *Lock, why error, ok bool) {
	l, found, err := f.contend(fl)
	switch {
	case found:
		return nil, nil, false
	case err != nil:
		return nil, err, true
	}
	if !f.commit(fl) {
		f.giveBack(l)
		return nil, nil, false
	}
	_ = l.AutoRefresh(RefreshPolicy{MaxHold: -1}) // load bounds it; what it could say is in l.Err
	if found, err := f.lookAgain(fl, fl.ctx); !found && (err == nil || f.opts.OnUnavailable == LoadLocally) {
		return l, nil, true
	} else if err != nil {
		var none V
		f.publish(fl, none, err)
	}
	f.giveBack(l)
	return nil, nil, false
}

// contend tries to get the lock until another process has filled the cache. found says that
// the flight is over. A lock that a caller lends is as good as one won.
func (f *Fetcher[V]) contend(fl *fetchFlight[V]) (l *Lock, found bool, err error) {
	if fl.behind {
		l, err = f.c.TryLock(fl.ctx, fl.key, f.opts.TTL)
		if !errors.Is(err, ErrNotAcquired) {
			f.giveBack(f.endLoan(fl))
			return l, false, err
		}
	}
	if !f.stay(fl) {
		f.giveBack(f.endLoan(fl))
		return nil, true, nil
	}
	for {
		l, found, err = f.waitForTurn(fl)
		if !errors.Is(err, errLent) || !f.lostLoan(fl) {
			break
		}
	}
	lent := f.endLoan(fl)
	if errors.Is(err, errLent) {
		return lent, false, nil
	}
	f.giveBack(lent)
	return l, found, err
}

// errLent says that a caller lends the lock that it holds itself.
var errLent = errors.New("flightlock: lent")

// waitForTurn contends until WaitTimeout.
func (f *Fetcher[V]) waitForTurn(fl *fetchFlight[V]) (l *Lock, found bool, err error) {
	ctx, cancel := context.WithTimeout(fl.ctx, f.opts.WaitTimeout)
	defer cancel()
	if !f.awaitLoan(fl, cancel) {
		return nil, false, errLent
	}
	var failed error
	l, found, err = f.c.contend(ctx, fl.key, f.opts.TTL, func(ctx context.Context) bool {
		var stop bool
		stop, failed = f.lookAgain(fl, ctx)
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
		if last.ctx = nil; last.sentinel == nil { // nothing is known, and nobody gave the lock
			last.sentinel = ErrNotAcquired
		}
		err = &last
	}
	return fmt.Errorf("flightlock: fetch %q: no value within FetchOptions.WaitTimeout, %v: %w", key, f.opts.WaitTimeout, err)
}

// lookAgain looks whether somebody else has filled the cache. If so the callers get the
// value, and the flight is over.
func (f *Fetcher[V]) lookAgain(fl *fetchFlight[V], parent context.Context) (found bool, err error) {
	ctx, cancel := context.WithTimeout(parent, f.opts.LoadTimeout)
	defer cancel()
	looked := f.call("Lookup", func() (V, Freshness, error) { return f.src.Lookup(ctx, fl.key) })
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
	case a.err != nil:
		f.counts.lookupErrors.Add(1)
		return false, fmt.Errorf("flightlock: fetch %q: Lookup: %w", fl.key, a.err)
	case a.fresh == Fresh, a.fresh == Stale && !f.isCommitted(fl):
		f.publish(fl, a.v, nil)
		if a.fresh == Stale {
			f.refresh(fl.base, fl.key)
		}
		return true, nil
	}
	return false, nil
}

func (f *Fetcher[V]) isCommitted(fl *fetchFlight[V]) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fl.committed
}

// grace is how much longer than its LoadTimeout a Load may take to say so itself.
const grace = 100 * time.Millisecond

// load runs Load, and then Store. It has the lock l, or else a slot.
func (f *Fetcher[V]) load(fl *fetchFlight[V], l *Lock, slot bool) {
	ctx := fl.ctx
	if l != nil {
		ctx = carrying(ctx, l)
	}
	ctx, cancel := context.WithTimeout(ctx, f.opts.LoadTimeout)
	defer cancel()
	f.counts.loads.Add(1)
	if slot {
		f.counts.unlocked.Add(1)
	}
	loading := f.call("Load", func() (v V, _ Freshness, err error) {
		v, err = f.src.Load(ctx, fl.key)
		return v, Fresh, err
	})
	a, returned := f.loaded(fl, loading)
	if !returned {
		// The lock is for those who can load; the key stays ours in this process.
		f.giveBack(l)
		<-loading
	}
	if slot {
		f.slots.Release(1)
	}
	switch {
	case !returned:
	case a.err != nil:
		f.fail(fl, a.err)
		f.giveBack(l)
	default:
		f.store(fl, l, a.v)
	}
}

// loaded waits for Load as long as it may take. After that the callers have an error.
func (f *Fetcher[V]) loaded(fl *fetchFlight[V], loading <-chan answer[V]) (a answer[V], returned bool) {
	late := time.NewTimer(clock.Add(f.opts.LoadTimeout, grace))
	defer late.Stop()
	var err error
	select {
	case a = <-loading:
		return a, true
	case <-fl.ctx.Done(): // Close has lost its patience
		err = f.errClosed(fl.key)
	case <-late.C:
		err = fmt.Errorf("flightlock: fetch %q: Load goes on after FetchOptions.LoadTimeout, %v: %w",
			fl.key, f.opts.LoadTimeout, context.DeadlineExceeded)
	}
	f.counts.loadFailures.Add(1)
	f.show(fl, a.v, err)
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
			f.stored(l, a.err)
			return
		case <-long.C:
			f.show(fl, v, nil)
		case <-ctx.Done():
			f.publish(fl, v, nil)
			f.giveBack(l)
			f.stored(l, (<-storing).err)
			return
		}
	}
}

func (f *Fetcher[V]) stored(l *Lock, err error) {
	if err != nil {
		f.counts.storeFailures.Add(1)
	}
	if l != nil && errors.Is(l.Err(), ErrLockLost) {
		f.counts.lost.Add(1)
	}
}
