package flightlock

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

func plainFetcher(t *testing.T) *Fetcher[int] {
	t.Helper()
	c, err := New(Options{Nodes: []redis.UniversalClient{redistest.MiniClient(t, redistest.StartMini(t))}, NodeTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	f, err := NewFetcher(c, Source[int]{
		Lookup: func(context.Context, string) (int, Freshness, error) { return 0, Miss, nil },
		Load:   func(context.Context, string) (int, error) { return 1, nil },
		Store:  func(context.Context, string, int, *Lock) error { return nil },
	}, FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(f.Close(context.Background()), c.Close(context.Background())); err != nil {
			t.Error(err)
		}
	})
	return f
}

// flightWith is a flight with one caller, of which no goroutine runs.
func flightWith(f *Fetcher[int], key string) *fetchFlight[int] {
	fl := &fetchFlight[int]{key: key, callers: 1, flying: new(flying), published: make(chan struct{}), until: time.Now().Add(time.Minute)}
	fl.ctx, fl.cancel = context.WithCancelCause(context.Background())
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flights[key] = fl
	return fl
}

// When the last caller leaves in the instant in which the lock is won, the flight is either
// cancelled and cannot be joined, or goes on and can be; never anything in between.
func TestTheLastCallerLeavesInTheInstantOfTheWin(t *testing.T) {
	f := plainFetcher(t)
	outcomes := map[bool]int{}
	for outcomes[true] == 0 || outcomes[false] == 0 || outcomes[true]+outcomes[false] < 1000 {
		fl := flightWith(f, "k")
		var won bool
		var wg sync.WaitGroup
		wg.Go(func() { f.leave(fl) })
		wg.Go(func() { won = f.commit(fl) })
		wg.Wait()
		f.mu.Lock()
		joinable := f.flights["k"] == fl
		delete(f.flights, "k")
		f.mu.Unlock()
		if cancelled := fl.ctx.Err() != nil; won == cancelled || won != joinable {
			t.Fatalf("won %v, cancelled %v, joinable %v", won, cancelled, joinable)
		}
		outcomes[won]++
	}
	t.Log(outcomes)
}

// A flight that ends removes itself, and never the next flight of its key.
func TestAFlightForgetsOnlyItself(t *testing.T) {
	f := plainFetcher(t)
	first := flightWith(f, "k")
	f.leave(first)
	next := flightWith(f, "k")
	f.publish(first, 1, nil)
	f.fail(first, errors.New("late"))
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.flights["k"] != next {
		t.Error("the next flight was removed")
	}
	delete(f.flights, "k")
}

// A loan that comes in the instant in which the value is found is given back.
func TestALoanThatNobodyNeedsIsGivenBack(t *testing.T) {
	f := plainFetcher(t)
	elsewhere, err := New(Options{Nodes: f.c.opts.Nodes, NodeTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close(t.Context())
	l, err := elsewhere.SingleFlightLock(t.Context(), "k", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	fl := flightWith(f, "k")
	fl.borrows = true
	f.src.Lookup = func(context.Context, string) (int, Freshness, error) {
		f.mu.Lock()
		fl.lent = l.another()
		f.mu.Unlock()
		return 7, Fresh, nil
	}
	if _, found, err := f.contend(fl); !found || err != nil || fl.v != 7 {
		t.Errorf("found %v, %v, %d", found, err, fl.v)
	}
	if n := l.nest.Load().handles.Load(); n != 1 {
		t.Errorf("%d handles", n)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// After the last handle nobody gets another.
func TestNoHandleAfterTheLast(t *testing.T) {
	var n nest
	n.handles.Store(1)
	if !n.addHandle() || n.handles.Load() != 2 {
		t.Error("no handle on a living Hold")
	}
	n.handles.Store(0)
	if n.addHandle() || n.handles.Load() != 0 {
		t.Error("a handle on a Hold that is being released")
	}
}

// However many keys fail, and for however long their errors are held, there are so many records at most,
// of the latest; and those that say nothing any more go.
func TestFailuresAreBounded(t *testing.T) {
	fs, now := failures{hold: time.Hour}, time.Now()
	key := strconv.Itoa
	for i := range maxFailures + 100 {
		fs.failed(key(i), errTest, now)
	}
	fs.failed(key(100), errTest, now) // the oldest, again
	fs.failed("last", errTest, now)
	if n := len(fs.keys); n != maxFailures || fs.order.Len() != n {
		t.Errorf("%d records, %d in order", n, fs.order.Len())
	}
	for k, held := range map[string]bool{key(99): false, key(100): true, key(101): false, key(102): true, "last": true} {
		if err := fs.of(k, now.Add(time.Minute)); (err != nil) != held {
			t.Errorf("%s: %v", k, err)
		}
	}
	later := now.Add(3 * time.Hour)
	for i := range maxFailures {
		fs.failed("later"+key(i), errTest, later)
		fs.succeeded("later" + key(i))
	}
	if n := len(fs.keys); n > 10 {
		t.Errorf("%d records are left", n)
	}
}

var errTest = errors.New("failed")

// Places are given in the order in which they were asked for; one that waits for a place without a lock
// holds up none that needs no such; and nothing is left.
func TestTheGateIsFair(t *testing.T) {
	g := newGate(2, 1)
	a, b, c, d := g.join(unlocked), g.join(unlocked), g.join(locked), g.join(locked)
	want := func(admitted ...*place) {
		t.Helper()
		for i, p := range []*place{a, b, c, d} {
			if p.isAdmitted() != slices.Contains(admitted, p) {
				t.Errorf("place %d: %v", i, p.isAdmitted())
			}
		}
	}
	want(a, c)
	e := g.join(locked)
	g.leave(e) // it gives up
	g.leave(c)
	want(a, c, d)
	g.leave(a)
	want(a, b, c, d)
	g.leave(b)
	g.leave(d)
	g.leave(beside)
	g.leave(nil)
	if g.counts[locked].used != 0 || g.counts[unlocked].used != 0 || g.waiting[locked].Len()+g.waiting[unlocked].Len() != 0 {
		t.Errorf("%+v", g.counts)
	}
}

// A refresh that finds no place either ends, and cannot be joined from then on, or waits for those who
// have joined it.
func TestARefreshWithoutAPlaceEndsOrWaits(t *testing.T) {
	f := plainFetcher(t)
	var taken []*place
	for range f.opts.MaxUnlockedLoads {
		taken = append(taken, f.gate.join(unlocked))
	}
	fl := flightWith(f, "k")
	fl.behind, fl.callers = true, 0
	if p, over := f.enter(fl, unlocked, ErrUnavailable, nil); p != nil || !over || f.flights["k"] != nil {
		t.Errorf("for nobody: over %v, joinable %v", over, f.flights["k"] != nil)
	}
	fl = flightWith(f, "k")
	fl.behind = true
	entered := make(chan *place)
	go func() {
		p, _ := f.enter(fl, unlocked, ErrUnavailable, nil)
		entered <- p
	}()
	redistest.Eventually(t, 10*time.Second, "it waits", func() bool {
		f.gate.mu.Lock()
		defer f.gate.mu.Unlock()
		return f.gate.waiting[unlocked].Len() == 1
	})
	f.gate.leave(taken[0])
	if p := <-entered; p == nil || !p.isAdmitted() {
		t.Error("it has no place")
	}
	f.mu.Lock()
	delete(f.flights, "k")
	f.mu.Unlock()
}
