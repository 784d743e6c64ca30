package rediscache

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
)

// A model of the stamps: processes, one key, and a server that executes requests late, twice, or after
// their sender has gone on. Each actor is a coroutine that yields wherever another one may act; the
// scheduler picks the next one at random, so a seed is an interleaving and can be repeated.
//
// What it checks is the promise of Invalidate and Set: a Get that begins after one of them has
// returned sees nothing that was loaded before it. Besides, a load never overwrites what was loaded
// later, and loads are stored at all.

// rules are what the promise needs. Each one can be switched off.
type rules struct {
	compare       bool // a store compares the stamp
	present       bool // a store needs the entry to be there still
	stamped       bool // a load without a stamp is not stored
	joinByStamp   bool // callers that came after the flight's lookup need its stamp
	shareEarlier  bool // a lookup is for callers that came before it was sent
	invalidateNew bool // Invalidate makes a new stamp
	setNew        bool // Set makes a new stamp
	setCompares   bool // Set is a lookup and a compare-and-set; if that fails, a tombstone
	storeNew      bool // a store makes a new stamp
	wait          bool // Invalidate returns when it was executed
	master        bool // reads go to the master
	tombstone     bool // a lookup before a load makes a tombstone where there is nothing
	heldByStamp   bool // a held "not found" is for callers that have its stamp
	tierClear     bool // Invalidate and Set clear the tier of their own process
	tierGuard     bool // what was looked up before that does not enter the tier after it
	tierAge       bool // the age of a value in the tier begins with its lookup
}

func allRules() rules {
	return rules{true, true, true, true, true, true, true, true, true, true, true, true, true, true, true, true}
}

type modelEntry struct {
	stamp   int // 0: there is no entry
	version int // 0: a tombstone
}

type modelWorld struct {
	rules
	rng     *rand.Rand
	tier    int // for how many steps; 0: off
	now     int
	entry   modelEntry
	replica modelEntry
	stamps  int
	lock    int // lease that has it; 0: free
	leases  int
	truth   int // what the origin has
	floor   int // of the last Set or Invalidate that has returned
	over    map[int]int
	actors  []*modelActor
	procs   []*modelProc
	wrong   string
	stored  int
	gets    int
}

type modelProc struct {
	seq      int // lookups sent
	flight   *modelFlight
	held     modelHeld
	local    modelEntry
	localAt  int
	cleared  int // how many times the tier was cleared
	ownFloor int
}

type modelHeld struct{ stamp, version, until int }

// modelFlight is one run and its result.
type modelFlight struct {
	done      bool
	version   int
	before    int // the result is for callers that came before this lookup,
	stamp     int // or have this stamp
	forCaller bool
}

type modelActor struct {
	next func() (struct{}, bool)
	stop func()
}

func (w *modelWorld) spawn(f func(yield func())) {
	next, stop := iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil && r != errStopped {
				panic(r)
			}
		}()
		f(func() {
			if !yield(struct{}{}) {
				panic(errStopped)
			}
		})
	})
	w.actors = append(w.actors, &modelActor{next, stop})
}

var errStopped = fmt.Errorf("the run is over")

func (w *modelWorld) newStamp() int { w.stamps++; return w.stamps }

func (w *modelWorld) chance(percent int) bool { return w.rng.IntN(100) < percent }

// linger lets others act for a while.
func (w *modelWorld) linger(yield func()) {
	for range w.rng.IntN(12) {
		yield()
	}
}

func (w *modelWorld) read() modelEntry {
	if !w.master && w.chance(30) {
		return w.replica
	}
	return w.entry
}

// lookUpToLoad is the lookup before a load.
func (w *modelWorld) lookUpToLoad() modelEntry {
	if w.entry.stamp == 0 && w.tombstone {
		w.entry = modelEntry{stamp: w.newStamp()}
	}
	return w.entry
}

// store is the compare-and-set of a load. A duplicate of it may be executed much later.
func (w *modelWorld) store(stamp, version int) {
	switch {
	case stamp == 0 && w.stamped:
		return
	case stamp == 0:
	case w.entry.stamp == 0 && w.present:
		return
	case w.entry.stamp != 0 && stamp != w.entry.stamp && w.compare:
		return
	}
	if w.entry.version > version {
		w.wrong = fmt.Sprintf("a load of %d overwrites %d", version, w.entry.version)
	}
	w.entry = modelEntry{stamp, version}
	if w.storeNew || stamp == 0 {
		w.entry.stamp = w.newStamp()
	}
	w.stored++
}

// again executes f once more, later: a request that was sent again, and was not lost.
func (w *modelWorld) again(f func()) {
	if w.chance(25) {
		w.spawn(func(yield func()) {
			for range w.rng.IntN(60) {
				yield()
			}
			f()
		})
	}
}

func (w *modelWorld) get(p *modelProc, yield func()) {
	floor, own, came, began := w.floor, p.ownFloor, p.seq, w.now
	w.gets++
	check := func(version int, how string, fromTier bool) {
		switch {
		case version >= floor:
		case !fromTier, version < own, began-w.over[version] > w.tier:
			w.wrong = fmt.Sprintf("a Get that began after %d was announced got %d, %s", floor, version, how)
		}
	}
	if p.local.version != 0 && w.now-p.localAt <= w.tier {
		check(p.local.version, "from its tier", true)
		return
	}
	for {
		cleared, sent := p.cleared, w.now
		w.linger(yield)
		e, failed := w.read(), w.chance(5)
		w.linger(yield)
		if failed {
			e = modelEntry{}
		}
		if e.version != 0 {
			w.keep(p, e, cleared, sent)
			check(e.version, "by its lookup", false)
			return
		}
		f := p.flight
		if f == nil {
			if h := p.held; w.now < h.until && (h.stamp == e.stamp && e.stamp != 0 || !w.heldByStamp) {
				check(h.version, "from a held error", false)
				return
			}
			f = &modelFlight{}
			p.flight = f
			w.spawn(func(yield func()) { w.fly(p, f, yield) })
		}
		for !f.done {
			yield()
		}
		if came < f.before || f.stamp == e.stamp && e.stamp != 0 || f.rule(w) {
			check(f.version, "from a flight", false)
			return
		}
	}
}

// rule reports whether a rule was switched off that would refuse the result to a caller.
func (f *modelFlight) rule(w *modelWorld) bool {
	if f.forCaller {
		return !w.joinByStamp
	}
	return !w.shareEarlier
}

func (w *modelWorld) keep(p *modelProc, e modelEntry, cleared, sent int) {
	if w.tier == 0 || cleared != p.cleared && w.tierGuard {
		return
	}
	p.local, p.localAt = e, sent
	if !w.tierAge {
		p.localAt = w.now
	}
}

// fly is the run of a process: it takes the lock or continues without, looks up, loads and stores.
func (w *modelWorld) fly(p *modelProc, f *modelFlight, yield func()) {
	deliver := func(version, before, stamp int, loaded bool) {
		f.version, f.before, f.stamp, f.forCaller, f.done = version, before, stamp, loaded, true
		if p.flight == f {
			p.flight = nil
		}
	}
	lease := 0
	for {
		if w.lock == 0 {
			w.leases++
			lease = w.leases
			w.lock = lease
			break
		}
		p.seq++
		sent := p.seq
		w.linger(yield)
		e := w.read()
		w.linger(yield)
		if e.version != 0 {
			deliver(e.version, sent, e.stamp, false)
			return
		}
		if w.chance(20) { // the nodes of the lock cannot be reached, or WaitTimeout is over
			break
		}
	}
	release := func() {
		if w.lock == lease {
			w.lock = 0
		}
	}
	p.seq++
	before, stamp := p.seq, 0
	if !w.chance(10) { // else the cache does not answer
		w.linger(yield)
		e := w.lookUpToLoad()
		w.again(func() { w.lookUpToLoad() })
		w.linger(yield)
		if e.version != 0 {
			deliver(e.version, before, e.stamp, false)
			release()
			return
		}
		stamp = e.stamp
	}
	version := w.truth
	w.linger(yield)
	if w.chance(20) { // a paused process
		for range 40 {
			yield()
		}
	}
	if w.chance(10) { // "not found": nothing is stored, and newcomers get it for a while
		p.held = modelHeld{stamp, version, w.now + 40}
		deliver(version, before, stamp, true)
		release()
		return
	}
	early := w.chance(30)
	if early {
		deliver(version, before, stamp, true)
	}
	w.linger(yield)
	if w.lock == lease || w.chance(50) { // else the loss was noticed
		w.store(stamp, version)
		w.again(func() { w.store(stamp, version) })
		w.linger(yield)
	}
	if !early {
		deliver(version, before, stamp, true)
	}
	release()
}

// write changes the origin, and updates the cache. Writers act one after the other.
func (w *modelWorld) write(yield func()) {
	for {
		w.linger(yield)
		w.linger(yield)
		p := w.procs[w.rng.IntN(len(w.procs))]
		w.truth++
		version := w.truth
		w.linger(yield)
		clearTier := func() {
			if w.tierClear {
				p.local, p.cleared = modelEntry{}, p.cleared+1
			}
		}
		invalidate := func() {
			stamp := w.entry.stamp
			if w.invalidateNew || stamp == 0 {
				stamp = w.newStamp()
			}
			w.entry = modelEntry{stamp: stamp}
		}
		set := func(stamp int) bool {
			if w.setCompares && w.entry.stamp != stamp {
				return false
			}
			w.entry = modelEntry{w.entry.stamp, version}
			if w.setNew {
				w.entry.stamp = w.newStamp()
			}
			return true
		}
		announced := func() {
			for v := range version {
				if _, known := w.over[v]; !known {
					w.over[v] = w.now
				}
			}
			w.floor = version
			p.ownFloor = version
		}
		if !w.wait {
			clearTier()
			announced()
		}
		w.linger(yield)
		if w.chance(50) {
			invalidate()
			w.again(invalidate)
		} else {
			stamp := w.lookUpToLoad().stamp
			w.linger(yield)
			if !set(stamp) {
				w.linger(yield)
				invalidate()
			} else {
				w.again(func() { set(stamp) })
			}
		}
		w.linger(yield)
		if w.wait {
			clearTier()
			announced()
		}
	}
}

// disturb is everything else that happens: expiry, eviction and flush are one thing, and locks are
// lost.
func (w *modelWorld) disturb(yield func()) {
	for {
		w.linger(yield)
		w.linger(yield)
		switch {
		case w.chance(40):
			w.entry = modelEntry{}
		case w.chance(40):
			w.lock = 0
		case w.chance(50):
			w.replica = w.entry
		}
	}
}

// modelRun is one interleaving. It returns what was wrong.
func modelRun(seed uint64, r rules, tier int) (wrong string, stored, gets int) {
	w := &modelWorld{rules: r, rng: rand.New(rand.NewPCG(seed, 19)), tier: tier, truth: 1, over: map[int]int{}}
	for range 2 + w.rng.IntN(2) {
		w.procs = append(w.procs, &modelProc{})
	}
	for _, p := range w.procs {
		for range 3 {
			w.spawn(func(yield func()) {
				for {
					w.linger(yield)
					w.get(p, yield)
				}
			})
		}
	}
	w.spawn(w.write)
	w.spawn(w.disturb)
	for w.now = 0; w.now < 1500 && w.wrong == ""; w.now++ {
		i := w.rng.IntN(len(w.actors))
		if _, goesOn := w.actors[i].next(); !goesOn {
			w.actors[i] = w.actors[len(w.actors)-1]
			w.actors = w.actors[:len(w.actors)-1]
		}
	}
	for _, a := range w.actors {
		a.stop()
	}
	return w.wrong, w.stored, w.gets
}

// modelRuns runs n interleavings, and returns the first that went wrong.
func modelRuns(n int, r rules, tier int) (wrong string, seed uint64, stored, gets int) {
	for seed := range uint64(n) {
		wrong, s, g := modelRun(seed, r, tier)
		if stored, gets = stored+s, gets+g; wrong != "" {
			return wrong, seed, stored, gets
		}
	}
	return "", 0, stored, gets
}

// With all rules nothing is wrong, in any interleaving, and loads are stored.
func TestModelOfStamps(t *testing.T) {
	t.Parallel()
	n := 4000
	switch {
	case redistest.Raced: // the model has one goroutine
		n = 400
	case redistest.Long():
		n = 1_000_000
	}
	for _, tier := range []int{0, 60} {
		wrong, seed, stored, gets := modelRuns(n, allRules(), tier)
		if wrong != "" {
			t.Errorf("tier %d, seed %d: %s", tier, seed, wrong)
		}
		if stored < n/2 || gets < 10*n {
			t.Errorf("tier %d: only %d of %d runs' loads were stored, for %d Gets", tier, stored, n, gets)
		}
		t.Logf("tier %d: %d interleavings, %d Gets, %d loads stored", tier, n, gets, stored)
	}
}

// Without any one of the rules something goes wrong.
func TestModelNeedsEachRule(t *testing.T) {
	t.Parallel()
	if redistest.Raced { // the model has one goroutine: make test runs this without the detector
		return
	}
	const n = 4000
	for tier, all := range map[int]map[string]func(*rules){
		0: {
			"a store compares the stamp":                 func(r *rules) { r.compare = false },
			"a store needs the entry to be there":        func(r *rules) { r.present = false },
			"a load without a stamp is not stored":       func(r *rules) { r.stamped = false },
			"later callers join by the stamp":            func(r *rules) { r.joinByStamp = false },
			"a lookup is shared with earlier callers":    func(r *rules) { r.shareEarlier = false },
			"Invalidate makes a new stamp":               func(r *rules) { r.invalidateNew = false },
			"Set makes a new stamp":                      func(r *rules) { r.setNew = false },
			"Set is a compare-and-set":                   func(r *rules) { r.setCompares = false },
			"a store makes a new stamp":                  func(r *rules) { r.storeNew = false },
			"Invalidate returns when it was executed":    func(r *rules) { r.wait = false },
			"reads go to the master":                     func(r *rules) { r.master = false },
			"a held error is for callers with its stamp": func(r *rules) { r.heldByStamp = false },
		},
		60: {
			"Invalidate clears the tier of its process":              func(r *rules) { r.tierClear = false },
			"what was looked up before that does not enter the tier": func(r *rules) { r.tierGuard = false },
			"the age of a value in the tier begins with its lookup":  func(r *rules) { r.tierAge = false },
		},
	} {
		for name, without := range all {
			t.Run(name, func(t *testing.T) {
				r := allRules()
				without(&r)
				wrong, seed, _, _ := modelRuns(n, r, tier)
				if wrong == "" {
					t.Error("nothing went wrong")
				}
				t.Logf("seed %d: %s", seed, wrong)
			})
		}
	}
	t.Run("a lookup before a load makes a tombstone", func(t *testing.T) {
		r := allRules()
		r.tombstone = false
		if _, _, stored, _ := modelRuns(n, r, 0); stored > n/4 {
			t.Errorf("%d loads were stored", stored)
		}
	})
}
