package flightlock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/coalesce"
	"github.com/flightlock/flightlock/internal/flight"
)

// batch is the runs that callers of FetchMany begin together, and the work for them: on one goroutine, with one
// LoadMany, instead of a goroutine and a Load for each.
//
//	a slot at the gate -> one attempt for each lock, all at once
//	    those won:         look up -> load -> store -> release, together
//	    those of others:   look up together, now and then, for a while; then each run waits for its lock, and those
//	                       that get theirs at the same time are a batch again
//	    nodes unreachable: a slot for loads without locks -> the same as those won, or all again when nodes are back
//	    failed elsewhere:  the same, with others that hear that at the same time
//
// It never waits for a lock. So two batches with common keys, in whatever order, do not wait for each
// other: each has what it won, and gives it back before its callers have waited for the rest. An
// attempt that is not won is not repeated here: its run is awaited with others for a while (awaitTogether), and
// continues as any other then (Fetcher.run), up to its load (loadWon).
//
// What is decided together belongs to all its runs: they are committed before the lookup, and use the Worker of the
// first one. Each of them waits for the first in the wait graph, so that a Fetch
// of any key of the batch inside its own LoadMany is refused.
type batch[V any] struct {
	f     *Fetcher[V]
	runs  []*fetchRun[V]
	locks map[string]*Lock // of runs; empty for a load without locks
	slot  *slot
	goOn  []*fetchRun[V] // on whose Workers a LoadMany continues after its time is over
}

// startBatches starts runs, MaxBatch of them together. There may be no LoadMany if there are none.
func (f *Fetcher[V]) startBatches(runs []*fetchRun[V]) {
	for some := range slices.Chunk(runs, f.opts.MaxBatch) {
		if len(some) == 1 {
			f.runs.Start(some[0])
			continue
		}
		go f.runBatch(slices.Clone(some)) // each run counts as a goroutine until it is Done
	}
}

// goAlone has a run of a batch continue by itself: on its goroutine, if that waits for the batch.
func (f *Fetcher[V]) goAlone(r *fetchRun[V]) {
	if r.finished == nil {
		f.runs.Start(r)
		return
	}
	r.goesAlone = true
	close(r.finished)
}

// runBatch is what Fetcher.run is for one run.
func (f *Fetcher[V]) runBatch(runs []*fetchRun[V]) {
	var toLock, unseen []*fetchRun[V]
	for _, r := range runs {
		r.together = true
		if r.why == nil {
			toLock = append(toLock, r)
		} else {
			r.unseen = true // why is the error of a lookup
			unseen = append(unseen, r)
		}
	}
	f.loadUnlocked(unseen, nil)
	if len(toLock) == 0 {
		return
	}
	until := time.Now().Add(f.opts.WaitTimeout)
	for _, r := range toLock {
		r.until = until
	}
	f.lockBatch(toLock)
}

// lockBatch waits for a slot, tries the locks of runs, and loads what it gets.
func (f *Fetcher[V]) lockBatch(runs []*fetchRun[V]) {
	slot, runs := f.enterBatch(runs, locked)
	if slot == nil {
		return
	}
	won, rest, away := f.tryAll(runs)
	f.loadUnlocked(away, won.use(slot))
	if len(rest) > 0 {
		go f.awaitTogether(rest) // each run counts as a goroutine until it is Done
	}
	won.work()
}

// batchTick is how often a batch that waits for a slot looks whether it is still to wait.
const batchTick = 50 * time.Millisecond

// enterBatch waits for a slot for the runs that it returns: among MaxLoads, or to load without locks because of their
// why. Those that have none in time are over, and so are those whose values come meanwhile. Those that can be locked
// after all go on without the others. No lock is held. Refreshes without callers do not wait.
func (f *Fetcher[V]) enterBatch(runs []*fetchRun[V], k kind) (*slot, []*fetchRun[V]) {
	p := f.gate.join(k)
	if p.isAdmitted() {
		return p, runs
	}
	runs = slices.DeleteFunc(runs, f.unwanted)
	tick := time.NewTicker(batchTick)
	defer tick.Stop()
	var back <-chan struct{}
	if k == unlocked {
		back = f.c.recovery.next()
		for _, r := range runs {
			f.extend(r)
		}
	}
	for recheck := time.Now().Add(recheckEvery); ; {
		urgent := false
		runs = slices.DeleteFunc(runs, f.canceled)
		for _, r := range runs {
			urgent = urgent || r.node.hasBeenAwaited()
		}
		if urgent { // a load waits for one of them, and may have the slot that it would get
			f.gate.leave(p)
			return uncounted, runs
		}
		if runs = slices.DeleteFunc(runs, func(r *fetchRun[V]) bool { return f.outOfTime(r, k) }); len(runs) == 0 {
			f.gate.leave(p)
			return nil, nil
		}
		returned := false
		select {
		case <-p.admitted:
			return p, runs
		case <-back:
			back, returned = nil, true
		case <-tick.C:
		}
		if returned || !time.Now().Before(recheck) {
			runs = f.stillWait(runs, p, returned)
			recheck = time.Now().Add(recheckEvery)
		}
	}
}

// outOfTime ends a run whose time to wait for a slot is over.
func (f *Fetcher[V]) outOfTime(r *fetchRun[V], k kind) bool {
	if time.Now().Before(r.until) {
		return false
	}
	var none V
	r.Finish(none, f.full(r.Key(), k, r.why))
	f.finished(r)
	return true
}

// stillWait is stillWaits for runs that wait together, and returns those that do.
func (f *Fetcher[V]) stillWait(runs []*fetchRun[V], p *slot, returned bool) (rest []*fetchRun[V]) {
	var away, others, locks []*fetchRun[V]
	for _, r := range runs {
		if unavailable(r.why) {
			away = append(away, r)
		} else {
			others = append(others, r)
		}
	}
	if returned || len(away) > 0 && !f.c.away() {
		away, locks = nil, away
	}
	if len(others) > 0 {
		others, _ = f.foundMeanwhile(others, others[0].until, p)
	}
	for _, r := range others {
		if p.kind == unlocked && r.why == nil {
			locks = append(locks, r)
		} else {
			rest = append(rest, r)
		}
	}
	f.lockAfterAll(locks)
	return append(rest, away...)
}

// lockAfterAll has runs locked that have waited to be loaded without locks.
func (f *Fetcher[V]) lockAfterAll(runs []*fetchRun[V]) {
	for _, r := range runs {
		r.why, r.unseen = nil, false
	}
	if len(runs) > 0 {
		go f.lockBatch(runs) // each run counts as a goroutine until it is Done
	}
}

// canceled ends a run that its callers have left.
func (f *Fetcher[V]) canceled(r *fetchRun[V]) bool {
	if r.Err() != nil {
		f.finished(r)
		return true
	}
	return false
}

// unwanted ends a refresh that has no callers.
func (f *Fetcher[V]) unwanted(r *fetchRun[V]) bool {
	if r.InBackground() && !r.Wanted() {
		f.finished(r)
		return true
	}
	return false
}

// tryAll makes one attempt for the lock of each run, all at the same time. rest are those whose locks others have;
// away those for which no majority of nodes can be reached, if they may load without a lock. It starts the others.
func (f *Fetcher[V]) tryAll(runs []*fetchRun[V]) (won *batch[V], rest, away []*fetchRun[V]) {
	won = &batch[V]{f: f, locks: map[string]*Lock{}}
	locks, errs := make([]*Lock, len(runs)), make([]error, len(runs))
	steps, begun := make([]*coalesce.Step, len(runs)), make([]*flight.Begun, len(runs))
	for i, r := range runs {
		steps[i] = r.Begin(r.values, noTimeout)
		locks[i], begun[i], errs[i] = f.c.beginTry(steps[i], r.Key(), f.opts.TTL)
	}
	for i := range runs {
		if begun[i] != nil {
			errs[i] = f.c.flights.End(steps[i], begun[i])
		}
		steps[i].End(nil)
	}
	for i, r := range runs {
		switch {
		case errs[i] == nil && r.Commit():
			won.add(r, locks[i])
		case errs[i] == nil: // all its callers have left
			f.giveBack(locks[i])
			f.finished(r)
		case unavailable(errs[i]) && f.mayLoadLocally(r, errs[i]):
			r.why = errs[i]
			away = append(away, r)
		case r.InBackground() && !r.Wanted():
			f.refreshedElsewhere(r, errs[i])
			f.finished(r)
		case isInUse(errs[i]):
			r.lost = errs[i]
			rest = append(rest, r)
		default:
			f.goAlone(r)
		}
	}
	return won, rest, away
}

// isInUse reports whether err says that somebody has the lock, so that it is worth while to wait for what that one
// does. Nobody has it if the votes were split, or it is only retained.
func isInUse(err error) bool {
	var e *QuorumError
	return errors.Is(err, ErrNotAcquired) && !(errors.As(err, &e) && e.undecided)
}

// add adds a run that is committed. It has no use for a loan; those that wait for a lock do.
func (b *batch[V]) add(r *fetchRun[V], l *Lock) {
	b.f.giveBack(r.loan.close())
	if l != nil {
		b.locks[r.Key()] = l
		_ = l.autoRefresh(context.Background(), RefreshPolicy{}, new(autoRefresh)) // as in Fetcher.run
	}
	if len(b.runs) > 0 {
		r.node.await(&b.runs[0].node)
	}
	b.runs = append(b.runs, r)
}

// use gives a batch its slot, or returns it if there is nothing to load.
func (b *batch[V]) use(p *slot) (spare *slot) {
	if len(b.runs) == 0 {
		return p
	}
	b.slot = p
	return nil
}

// loadUnlocked loads runs without locks, on a goroutine of their own: because the nodes of the locks
// cannot be reached, or a lookup has failed. If there is a spare slot among MaxLoads, it is for them. If no slot is
// free, they wait for one together, once more for WaitTimeout.
func (f *Fetcher[V]) loadUnlocked(runs []*fetchRun[V], spare *slot) {
	runs = slices.DeleteFunc(runs, func(r *fetchRun[V]) bool {
		alone := !f.mayLoadLocally(r, r.why)
		if alone {
			f.goAlone(r)
		}
		return alone
	})
	if len(runs) == 0 {
		f.gate.leave(spare)
		return
	}
	if f.gate.unlock(spare) {
		go f.commit(spare, runs).work() // each run counts as a goroutine until it is Done
		return
	}
	f.gate.leave(spare)
	go f.loadWithoutLocks(runs) // as above
}

// loadWithoutLocks waits for a slot, and loads runs because of their why.
func (f *Fetcher[V]) loadWithoutLocks(runs []*fetchRun[V]) {
	if p, runs := f.enterBatch(runs, unlocked); p != nil {
		f.commit(p, runs).work()
	}
}

// commit makes a batch without locks of those runs that are still wanted.
func (f *Fetcher[V]) commit(p *slot, runs []*fetchRun[V]) *batch[V] {
	b := &batch[V]{f: f, slot: p}
	for _, r := range runs {
		if r.Commit() {
			if !errors.Is(r.why, errFailedElsewhere) {
				f.seen.without.began(r.why)
			}
			b.add(r, nil)
		} else {
			f.finished(r)
		}
	}
	return b
}

// The pauses between the lookups of runs that wait together: the first, and how many percent each is longer than
// the one before. So a value is found later than it could be by hardly more than so many percent of the wait.
const (
	firstPause  = 5 * time.Millisecond
	pauseGrowth = 30
)

// awaitTogether waits for runs whose keys are being loaded elsewhere: mostly by few loads, which bring many values at
// the same time. So it looks up all of them together, now and then, which costs far less than to have each wait
// for its own lock. One of them does that, to hear at once when its load is over: then the others are looked up, and
// another one waits; or if there is no value, theirs are tried again. Each run that is left waits by itself when none
// of that has happened for NodeTimeout, or after four of those, and within WaitTimeout in any case.
func (f *Fetcher[V]) awaitTogether(runs []*fetchRun[V]) {
	began, patience := time.Now(), runs[0].until // which all of them have, or hardly more
	until := clock.Earlier(began.Add(f.c.opts.NodeTimeout), patience)
	var lead *leading
	for wait := firstPause; f.src.LookupMany != nil && len(runs) > 1; wait += wait * pauseGrowth / 100 {
		next := time.Now().Add(wait)
		if !next.Before(until) {
			break
		}
		if runs, lead = f.pauseTogether(runs, next, lead); len(runs) == 0 {
			return
		}
		over := lead != nil && lead.isOver() && !lead.left
		failed := over && errors.Is(lead.err, errFailedElsewhere)
		if failed { // it gives back its other locks just now
			pause := runs[0].Begin(context.Background(), firstPause)
			<-pause.Done()
			pause.End(nil)
		}
		var moved bool
		runs, moved = f.foundMeanwhile(runs, patience, nil)
		if over && !lead.found && len(runs) > 0 {
			runs, moved = f.tryAgain(runs, failed), true
		}
		if over {
			lead = nil
		}
		if moved {
			now := time.Now()
			until = clock.Earlier(clock.Earlier(now, began.Add(3*f.c.opts.NodeTimeout)).Add(f.c.opts.NodeTimeout), patience)
		}
	}
	for _, r := range runs {
		f.goAlone(r)
	}
}

// leading is a run that waits for its lock while others are awaited together.
type leading struct {
	over chan struct{} // closed when it waits no more

	// the outcome, written before over is closed
	left  bool  // by its callers
	found bool  // there is nothing to load
	err   error // why it has no lock; nil: it has
}

func (x *leading) isOver() bool {
	select {
	case <-x.over:
		return true
	default:
		return false
	}
}

// tryAgain makes another attempt for each lock, because a load elsewhere has left nothing, and loads what it gets. It
// returns the others. If no slot is free, all wait for one as at first. failed says that the load has failed. Then
// those whose lock somebody else has by now are loaded without, as are those that hear of it: that one may fail, too,
// and so may the next.
func (f *Fetcher[V]) tryAgain(runs []*fetchRun[V], failed bool) (rest []*fetchRun[V]) {
	p := f.gate.join(locked)
	if !p.isAdmitted() {
		f.gate.leave(p)
		go f.lockBatch(runs) // each run counts as a goroutine until it is Done
		return nil
	}
	before := map[*fetchRun[V]]string{}
	for _, r := range runs {
		if failed {
			before[r] = holderOf(r.lost)
		}
	}
	won, others, away := f.tryAll(runs)
	f.loadUnlocked(away, won.use(p))
	var taken []*fetchRun[V]
	for _, r := range others {
		if failed && holderOf(r.lost) != before[r] {
			r.why = errFailedElsewhere
			taken = append(taken, r)
		} else {
			rest = append(rest, r)
		}
	}
	if len(taken) > 0 {
		go f.loadWithoutLocks(taken) // each run counts as a goroutine until it is Done
	}
	go won.work() // as above
	return rest
}

// holderOf is who has a lock, for most of the nodes that have answered an attempt.
func holderOf(err error) (holder string) {
	var e *QuorumError
	if !errors.As(err, &e) {
		return ""
	}
	votes := map[string]int{}
	for _, n := range e.Nodes {
		if votes[n.Holder]++; n.Holder != "" && votes[n.Holder] > votes[holder] {
			holder = n.Holder
		}
	}
	return holder
}

// loadGathered has a run loaded without a lock, because of why: with others that have to be a moment later, as where
// the load of many keys that they have waited for has failed, or Redis. It returns when the run is finished, or to be
// continue by itself.
func (f *Fetcher[V]) loadGathered(r *fetchRun[V], why error) (goesAlone bool) {
	r.finished, r.goesAlone, r.why, r.unseen = make(chan struct{}), false, why, isUnknown(why)
	if f.gathering.unlocked.add(r) {
		time.AfterFunc(firstPause, f.startUnlocked) // each run counts as a goroutine until it is Done
	}
	<-r.finished // as any run: when its callers have left, or all is done
	return r.goesAlone
}

func (f *Fetcher[V]) startUnlocked() {
	for some := range slices.Chunk(f.gathering.unlocked.take(), f.opts.MaxBatch) {
		go f.loadWithoutLocks(slices.Clone(some))
	}
}

// loadWon has a run loaded that has got its lock by itself, with others that get theirs a moment later: where a process
// was killed in a load of many keys, their locks end at the same time. It returns when the run is finished, or to
// continue by itself.
func (f *Fetcher[V]) loadWon(r *fetchRun[V], l *Lock) (goesAlone bool) {
	r.finished, r.goesAlone, r.won = make(chan struct{}), false, l
	if f.gathering.won.add(r) {
		time.AfterFunc(firstPause, f.startWon) // each run counts as a goroutine until it is Done
	}
	<-r.finished
	return r.goesAlone
}

func (f *Fetcher[V]) startWon() {
	for some := range slices.Chunk(f.gathering.won.take(), f.opts.MaxBatch) {
		go f.useWon(slices.Clone(some))
	}
}

// useWon loads runs with the locks that they have won, and one slot. If none is free, the locks go back, for another
// process may have one, and the runs are tried again when they have it.
func (f *Fetcher[V]) useWon(runs []*fetchRun[V]) {
	p := f.gate.join(locked)
	if !p.isAdmitted() {
		f.gate.leave(p)
		var wg sync.WaitGroup
		for _, r := range runs {
			wg.Go(func() { f.giveBack(r.won) })
		}
		wg.Wait()
		f.lockBatch(runs)
		return
	}
	b := &batch[V]{f: f, locks: map[string]*Lock{}, slot: p}
	for _, r := range runs {
		if r.Commit() {
			b.add(r, r.won)
			continue
		}
		go func() { // all its callers have left; it counts as a goroutine until it is Done
			f.giveBack(r.won)
			f.finished(r)
		}()
	}
	b.work()
}

// pauseTogether waits until then, or until lead is over, and returns those runs that are to be looked up, and the lead,
// which it makes of one of them if there is none.
func (f *Fetcher[V]) pauseTogether(runs []*fetchRun[V], then time.Time, lead *leading) ([]*fetchRun[V],
	*leading) {
	for {
		runs = slices.DeleteFunc(runs, f.awaitedNoMore)
		if len(runs) == 0 || !time.Now().Before(then) {
			return runs, lead
		}
		if lead == nil {
			last := len(runs) - 1
			lead = &leading{over: make(chan struct{})}
			runs[last].lead = lead
			f.goAlone(runs[last])
			runs = runs[:last]
			continue
		}
		pause := runs[0].Begin(context.Background(), max(time.Until(then), 0)) // which ends early with the run
		for _, r := range runs {
			if !r.loan.beginContending(pause) {
				pause.End(nil)
			}
		}
		select {
		case <-pause.Done():
		case <-lead.over:
		}
		pause.End(nil)
		if lead.isOver() {
			if !lead.left {
				return runs, lead
			}
			lead = nil
		}
	}
}

// awaitedNoMore ends a run that its callers have left, and starts one that was lent a lock.
func (f *Fetcher[V]) awaitedNoMore(r *fetchRun[V]) bool {
	switch {
	case f.canceled(r):
	case r.loan.isOffered():
		f.goAlone(r)
	default:
		return false
	}
	return true
}

// foundMeanwhile looks up runs, all at once, and returns those whose value is not there yet. Those whose lookup has
// failed it starts: they look up by themselves, and know what to do if that fails, too. If they wait for slot p, they
// continue instead, and the lookup ends when p is admitted; a why that was a lookup's is gone if this one succeeds. It
// is one of the maxWaitingLookups.
func (f *Fetcher[V]) foundMeanwhile(runs []*fetchRun[V], until time.Time, p *slot) (rest []*fetchRun[V], any bool) {
	leader := runs[0]
	step := leader.Begin(leader.values, max(time.Until(until), 0))
	if p != nil {
		f.gate.interrupt(p, step)
	}
	if !f.beginWaitingLookup(step) {
		step.End(nil)
		return runs, false
	}
	limited, cancel := context.WithTimeout(step, f.opts.LookupTimeout)
	keys, scope := keysOf(runs), f.sending()
	found, err := onWorker(leader, limited, "Lookup", func(ctx context.Context) (map[string]Found[V], error) {
		defer func() { <-f.waitingLookups }()
		if f.src.LookupMany == nil {
			return f.lookupEach(ctx, keys, func(key string) (Found[V], error) { return f.lookup(ctx, key) })
		}
		return f.src.LookupMany(ctx, keys)
	})
	cancel()
	step.End(nil)
	left := leader.Err() != nil // all its callers: that says nothing of the cache
	var stale []*fetchRun[V]
	for _, r := range runs {
		x, why := found[r.Key()], errorOf(err, r.Key())
		switch {
		case why != nil && !left && p == nil:
			f.goAlone(r)
		case why == nil && (x.Fresh == Fresh || x.Fresh == Stale && f.least(r) == Stale):
			any = true
			f.deliverFound(r, scope, x)
			if x.Fresh == Stale {
				if again := f.beginRefresh(r.base, r.Key()); again != nil {
					stale = append(stale, again)
				}
			}
			f.finished(r)
		default:
			if why == nil && isUnknown(r.why) {
				r.why = nil
			}
			rest = append(rest, r)
		}
	}
	f.gatherRuns(stale)
	return rest, any
}

func keysOf[V any](runs []*fetchRun[V]) []string {
	keys := make([]string, len(runs))
	for i, r := range runs {
		keys[i] = r.Key()
	}
	return keys
}

// lookupMany calls LookupMany on leader's Worker.
func lookupMany[V any](f *Fetcher[V], leader *fetchRun[V], step *coalesce.Step,
	keys []string) (map[string]Found[V], error) {
	return onWorker(leader, step, "Lookup",
		func(ctx context.Context) (map[string]Found[V], error) { return f.src.LookupMany(ctx, keys) })
}

// onWorker calls a function of the Source on r's Worker, and waits until it has returned or ctx has
// ended: then the error is errNoAnswer.
func onWorker[V, T any](r *fetchRun[V], ctx context.Context, op string,
	call func(ctx context.Context) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	x := new(result)
	r.Worker.Go(func() { x.v, x.err = call(ctx) })
	p, returned := r.Worker.Wait(ctx)
	var none T
	switch {
	case !returned:
		return none, errNoAnswer
	case p != nil:
		return none, &PanicError{Op: op, Value: p.Value, Goexit: p.Goexit, Stack: p.Stack}
	}
	return x.v, x.err
}

func (f *Fetcher[V]) deliverFound(r *fetchRun[V], scope coalesce.Scope, x Found[V]) {
	scope.Stamp = x.Stamp
	r.Limit(scope)
	r.Finish(x.Value, nil)
}

// finished ends a run that was not started, or whose goroutine waits for that.
func (f *Fetcher[V]) finished(r *fetchRun[V]) {
	f.end(r)
	if r.finished != nil {
		close(r.finished)
		return
	}
	f.runs.Done(r)
}

// work looks up, loads, stores and releases.
func (b *batch[V]) work() {
	f, all := b.f, b.runs
	if len(all) == 0 {
		f.gate.leave(b.slot)
		return
	}
	defer func() {
		for _, r := range slices.Backward(all) { // the first one has the Worker
			f.finished(r)
		}
	}()
	b.lookUp()
	if len(b.runs) == 0 {
		f.gate.leave(b.slot)
		return
	}
	leader := all[0]
	values, errs := b.load(leader)
	if len(b.goOn) == 0 {
		f.gate.leave(b.slot)
	}
	goesOn := func(r *fetchRun[V]) bool { return errors.Is(errs[r.Key()], errLoadManyGoesOn) }
	var wg sync.WaitGroup
	for _, r := range b.without(goesOn) { // other processes may load
		wg.Go(func() { f.giveBackFailed(r, b.locks[r.Key()]) })
	}
	wg.Wait()
	failed := b.without(func(r *fetchRun[V]) bool { return errs[r.Key()] != nil })
	b.finish(failed, func(*fetchRun[V]) bool { return true })
	b.store(leader, values)
	if len(b.goOn) > 0 { // in this process the keys stay taken
		for _, r := range b.goOn {
			r.Worker.Wait(context.Background())
		}
		f.gate.leave(b.slot)
	}
}

// without takes runs out of b, those for which done reports true, which must not block.
func (b *batch[V]) without(done func(r *fetchRun[V]) bool) (out []*fetchRun[V]) {
	runs := b.runs
	b.runs = make([]*fetchRun[V], 0, len(runs))
	for _, r := range runs {
		if done(r) {
			out = append(out, r)
		} else {
			b.runs = append(b.runs, r)
		}
	}
	return out
}

// deliver gives r's callers their result. Its key stays taken until finish if it is locked: a new run would find that
// it is. Without a lock the next caller may begin one at once.
func (b *batch[V]) deliver(r *fetchRun[V], v V, err error) {
	if b.locks[r.Key()] == nil {
		r.Finish(v, err)
	} else {
		r.Deliver(v, err)
	}
}

// finish gives back the locks of runs whose callers have their results, all at once.
func (b *batch[V]) finish(runs []*fetchRun[V], failed func(r *fetchRun[V]) bool) {
	var wg sync.WaitGroup
	for _, r := range runs {
		wg.Go(func() {
			var none V
			r.Finish(none, nil)
			if l := b.locks[r.Key()]; failed(r) {
				b.f.giveBackFailed(r, l)
			} else {
				b.f.giveBack(l)
			}
		})
	}
	wg.Wait()
}

// each calls do for all runs at once, and keeps those for which it reports true.
func (b *batch[V]) each(do func(r *fetchRun[V], l *Lock) bool) {
	kept := make([]bool, len(b.runs))
	var wg sync.WaitGroup
	for i, r := range b.runs {
		wg.Go(func() { kept[i] = do(r, b.locks[r.Key()]) })
	}
	wg.Wait()
	runs := b.runs
	b.runs = nil
	for i, r := range runs {
		if kept[i] {
			b.runs = append(b.runs, r)
		}
	}
}

// lookUp is lookUpToLoad for all runs. Those that are left have to be loaded.
func (b *batch[V]) lookUp() {
	f := b.f
	if f.src.LookupMany == nil || len(b.locks) == 0 && (!f.stamped() || b.runs[0].unseen) {
		b.each(func(r *fetchRun[V], l *Lock) bool {
			over := f.lookUpToLoad(r, l)
			if over {
				f.giveBack(l)
			}
			return !over
		})
		return
	}
	leader, scope := b.runs[0], f.sending()
	values := leader.values
	if f.stamped() {
		values = context.WithValue(values, loadFollowsKey{}, true)
	}
	step := leader.Begin(values, f.opts.LookupTimeout)
	found, err := lookupMany(f, leader, step, keysOf(b.runs))
	slow := step.Err() != nil
	step.End(nil)
	over := b.without(func(r *fetchRun[V]) bool {
		x, why := found[r.Key()], errorOf(err, r.Key())
		if why != nil && r.Err() != nil { // the ctx of Close has ended: that says nothing of the cache
			var none V
			b.deliver(r, none, f.errClosed(r.Key()))
			return true
		}
		if r.scope = scope; why == nil {
			r.scope.Stamp = x.Stamp
		} else {
			r.refused = !slow && !ranOut(why)
			why = f.lookupFailed(r.Key(), why)
		}
		switch {
		case why != nil && f.opts.OnUnavailable == FailClosed:
			var none V
			b.deliver(r, none, why)
		case why == nil && x.Fresh == Fresh:
			scope.Stamp = x.Stamp
			r.Limit(scope)
			b.deliver(r, x.Value, nil)
		default:
			return false
		}
		return true
	})
	b.finish(over, func(*fetchRun[V]) bool { return false })
}

// load loads all runs. Those that fail have their error, and are not in values.
func (b *batch[V]) load(leader *fetchRun[V]) (values map[string]V, errs map[string]error) {
	f := b.f
	for _, r := range b.runs {
		r.Limit(r.scope)
	}
	step := leader.Begin(b.carryingLocks(leader.values), f.opts.LoadTimeout)
	defer step.End(nil)
	values, err := b.loadRuns(b.runs, step)
	if isWhole(err) && len(b.runs) > 1 && step.Err() == nil {
		return b.loadHalves(step)
	}
	return b.settle(b.runs, values, err, f.failures.failed)
}

// carryingLocks is ctx with the locks of the batch in it.
func (b *batch[V]) carryingLocks(ctx context.Context) context.Context {
	for _, l := range b.locks {
		ctx = carrying(ctx, l)
	}
	return ctx
}

// loadHalves loads all runs again, in two halves. If one of them fails and the other does not, keys of the
// former are to blame, and not the origin: it is halved again, so that they do not fail the rest, which
// may be wanted by other callers. If both fail at first, it may be the origin: then the errors are held, but not for
// longer each time, because a key may only have been loaded with some that are to blame.
func (b *batch[V]) loadHalves(step *coalesce.Step) (values map[string]V, errs map[string]error) {
	values, errs = map[string]V{}, map[string]error{}
	for runs := b.runs; len(runs) > 0; {
		middle := len(runs) / 2
		halves := [2][]*fetchRun[V]{runs[:middle], runs[middle:]}
		var loaded [2]map[string]V
		var failed [2]error
		for i, half := range halves {
			loaded[i], failed[i] = b.loadRuns(half, step)
		}
		hold := b.f.failures.failedWithOthers
		if len(runs) < len(b.runs) || !isWhole(failed[0]) || !isWhole(failed[1]) {
			hold = nil
		}
		runs = nil
		for i, half := range halves {
			if isWhole(failed[i]) && !isWhole(failed[1-i]) && len(half) > 1 && step.Err() == nil {
				runs = half
				continue
			}
			some, why := b.settle(half, loaded[i], failed[i], hold)
			maps.Copy(values, some)
			maps.Copy(errs, why)
		}
	}
	return values, errs
}

// isWhole reports whether a LoadMany has failed as a whole.
func isWhole(err error) bool {
	var some KeyErrors
	return err != nil && !errors.As(err, &some)
}

// loadRuns calls LoadMany for runs, on the Worker of the first of them. If LoadMany ignores the end of its ctx, it has
// failed, and the batch waits for it later.
func (b *batch[V]) loadRuns(runs []*fetchRun[V], step *coalesce.Step) (map[string]V, error) {
	if err := step.Err(); err != nil { // the first half has taken all the time
		return nil, err
	}
	f, worker := b.f, &runs[0].Worker
	f.counts.loads.Add(1)
	if len(b.locks) == 0 {
		f.counts.unlocked.Add(1)
	}
	type result struct {
		v   map[string]V
		err error
	}
	x := new(result)
	worker.Go(func() { x.v, x.err = f.src.LoadMany(step, keysOf(runs)) })
	p, returned := worker.Wait(step)
	if !returned {
		late, cancel := context.WithTimeout(context.Background(), grace)
		p, returned = worker.Wait(late)
		cancel()
	}
	var got result // and not x, which a LoadMany that continues may still write
	switch {
	case !returned:
		b.goOn = append(b.goOn, runs[0])
		got.err = fmt.Errorf("%w, %v", errLoadManyGoesOn, f.opts.LoadTimeout)
	case p != nil:
		got.err = &PanicError{Op: "LoadMany", Value: p.Value, Goexit: p.Goexit, Stack: p.Stack}
	default:
		got = *x
	}
	return got.v, got.err
}

// settle gives runs whose load has failed their errors, and notes these with hold; nil: they are not held.
func (b *batch[V]) settle(runs []*fetchRun[V], values map[string]V, err error,
	hold func(key, stamp string, err error, now time.Time)) (map[string]V, map[string]error) {
	f := b.f
	goesOn := errors.Is(err, errLoadManyGoesOn)
	loaded, errs := map[string]V{}, map[string]error{}
	for _, r := range runs {
		why := errorOf(err, r.Key())
		v, there := values[r.Key()]
		if why == nil && !there {
			why = ErrNotFound
		}
		if why == nil {
			loaded[r.Key()] = v
			continue
		}
		errs[r.Key()] = why
		f.loadFailed(r.Key(), why)
		why = manyErr(r.Key(), why)
		if goesOn {
			r.Limit(coalesce.Scope{}) // see loadGoesOn
		}
		if hold != nil {
			hold(r.Key(), r.scope.Stamp, why, clock.Now())
		} else {
			f.failures.notStored(r.Key(), clock.Now())
		}
		var none V
		switch {
		case r.Err() != nil:
			r.Deliver(none, f.errClosed(r.Key()))
		case goesOn:
			r.Deliver(none, why)
		default:
			r.Finish(none, why)
		}
	}
	return loaded, errs
}

// store stores what was loaded, gives it to the callers, and releases the locks.
func (b *batch[V]) store(leader *fetchRun[V], values map[string]V) {
	f := b.f
	together := f.src.StoreMany != nil && !f.stamped() || f.src.StoreManyStamped != nil && f.stamped()
	if !together || len(b.runs) < 2 {
		b.each(func(r *fetchRun[V], l *Lock) bool {
			ctx := r.values
			if l != nil {
				ctx = carrying(ctx, l)
			}
			f.store(r, ctx, l, values[r.Key()])
			return true
		})
		return
	}
	unfit := b.without(func(r *fetchRun[V]) bool { // what is lost, or cannot be compared, is served
		switch l := b.locks[r.Key()]; {
		case l != nil && l.Err() != nil:
			f.counts.lost.Add(1)
		case !f.stamped() || r.scope.Stamp != "":
			return false
		}
		f.failures.notStored(r.Key(), clock.Now())
		b.deliver(r, values[r.Key()], nil)
		return true
	})
	b.finish(unfit, func(r *fetchRun[V]) bool { return r.refused })
	if len(b.runs) > 0 {
		b.storeTogether(leader, values)
	}
}

// storeTogether calls StoreMany. The callers have their values when it returns, or after NodeTimeout;
// the locks are given back when it returns, or its time is over.
func (b *batch[V]) storeTogether(leader *fetchRun[V], loaded map[string]V) {
	f := b.f
	values, stamps := make(map[string]V, len(b.runs)), make(map[string]string, len(b.runs))
	for _, r := range b.runs {
		values[r.Key()], stamps[r.Key()] = loaded[r.Key()], r.scope.Stamp
	}
	locks := make(map[string]*Lock, len(b.runs))
	for key, l := range b.locks {
		if _, there := values[key]; there {
			locks[key] = l
		}
	}
	runs := b.runs
	delivery := time.AfterFunc(f.c.opts.NodeTimeout, b.delivery(loaded))
	step := runs[0].Begin(b.carryingLocks(leader.values), f.opts.TTL)
	worker := &runs[0].Worker // the leader's may be busy
	x := new(error)
	worker.Go(func() {
		if f.stamped() {
			*x = f.src.StoreManyStamped(step, values, stamps, locks)
		} else {
			*x = f.src.StoreMany(step, values, locks)
		}
	})
	p, returned := worker.Wait(step)
	step.End(nil)
	delivery.Stop()
	finish := func(err error) {
		for _, r := range runs { // before anything else: hundreds of callers wait for many of them
			b.deliver(r, loaded[r.Key()], nil)
		}
		b.finish(runs, func(r *fetchRun[V]) bool {
			why := errorOf(err, r.Key())
			return why != nil && !ranOut(why) && !errors.Is(why, ErrOutdated)
		})
	}
	if !returned {
		finish(nil)
		p, _ = worker.Wait(context.Background())
	}
	err := *x
	if p != nil {
		err = &PanicError{Op: "StoreMany", Value: p.Value, Goexit: p.Goexit, Stack: p.Stack}
	}
	for _, r := range runs {
		f.stored(r.Key(), b.locks[r.Key()], errorOf(err, r.Key()))
	}
	if returned {
		finish(err)
	}
}

// delivery returns what gives the callers their values before StoreMany has returned. It has a list of the runs of its
// own: the batch replaces b.runs, perhaps while it is called, because Timer.Stop does not wait for that.
func (b *batch[V]) delivery(loaded map[string]V) func() {
	runs := b.runs
	return func() {
		for _, r := range runs {
			r.Deliver(loaded[r.Key()], nil)
		}
	}
}
