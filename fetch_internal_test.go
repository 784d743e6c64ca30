package flightlock

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

func plainFetcher(t *testing.T) *Fetcher[int] {
	t.Helper()
	c, err := New(Options{NodeTimeout: 5 * time.Second}, redistest.MiniClient(t, redistest.StartMini(t)))
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

// runWith is a run with one caller, without a goroutine.
func runWith(t *testing.T, f *Fetcher[int], key string) *fetchRun[int] {
	r, first, ok := f.runs.Join(key)
	if !first || !ok {
		t.Fatalf("first %v, ok %v", first, ok)
	}
	r.setUp(context.Background())
	r.until = time.Now().Add(time.Minute)
	return r
}

// A loan that arrives in the instant in which the value is found is returned.
func TestALoanThatNobodyNeedsIsGivenBack(t *testing.T) {
	f := plainFetcher(t)
	elsewhere, err := New(Options{NodeTimeout: 5 * time.Second}, f.c.clients...)
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close(t.Context())
	l, err := elsewhere.SingleFlightLock(t.Context(), "k", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	for tries := 1; ; tries++ {
		r := runWith(t, f, "k")
		f.src.Lookup = func(context.Context, string) (int, Freshness, error) {
			if !r.loan.offer(l.nested()) {
				t.Error("the loan was refused")
			}
			return 7, Fresh, nil
		}
		lock, lent, found, err := f.contend(r)
		if err != nil {
			t.Fatal(err)
		}
		if lent && tries < 100 { // the loan ends the Lookup's ctx, here before the Lookup had returned
			f.giveBack(lock)
			f.runs.Refuse(r, nil)
			continue
		}
		if !found {
			t.Fatal("the value was not found")
		}
		if v, err, left := r.Wait(t.Context()); v != 7 || err != nil || left {
			t.Errorf("%d, %v, left %v", v, err, left)
		}
		f.runs.Refuse(r, nil)
		break
	}
	if n := l.reentry.Load().handles.Load(); n != 1 {
		t.Errorf("%d handles", n)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A loan to a run that does not begin, because the last load of its key has just failed, is
// returned.
func TestALoanToARefusedFlightIsGivenBack(t *testing.T) {
	f := plainFetcher(t)
	l, err := f.c.SingleFlightLock(t.Context(), "k", time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.failures.failed("k", "", errors.New("no"), time.Now().Add(time.Minute))
	f.failures.mu.Lock() // the first caller waits between its joining and what it finds here
	results := make(chan error, 2)
	fetch := func(ctx context.Context) {
		_, err := f.Fetch(ctx, "k")
		results <- err
	}
	go fetch(context.Background())
	for !f.runs.Open("k") {
		runtime.Gosched()
	}
	r, _, _ := f.runs.Join("k")
	go fetch(l.Context(t.Context()))
	for lent := false; !lent; runtime.Gosched() {
		r.loan.mu.Lock()
		lent = r.loan.lock != nil
		r.loan.mu.Unlock()
	}
	f.failures.mu.Unlock()
	for range 2 {
		var held *HeldError
		if err := <-results; !errors.As(err, &held) {
			t.Error(err)
		}
	}
	if n := l.reentry.Load().handles.Load(); n != 1 {
		t.Errorf("%d handles", n)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// After the last handle is released nobody gets another.
func TestNoHandleAfterTheLast(t *testing.T) {
	var n reentry
	n.handles.Store(1)
	if !n.addHandle() || n.handles.Load() != 2 {
		t.Error("no handle on a live Ticket")
	}
	n.handles.Store(0)
	if n.addHandle() || n.handles.Load() != 0 {
		t.Error("a handle on a Ticket that is being released")
	}
}

// However many keys fail, and for however long their errors are held, the number of records is
// bounded; the latest are kept, and those that have expired are removed.
func TestFailuresAreBounded(t *testing.T) {
	fs, now := failures{hold: time.Hour}, time.Now()
	key := strconv.Itoa
	for i := range maxFailures + 100 {
		fs.failed(key(i), "", errTest, now)
	}
	fs.failed(key(100), "", errTest, now) // the oldest, again
	fs.failed("last", "", errTest, now)
	if n := len(fs.keys); n != maxFailures || fs.order.Len() != n {
		t.Errorf("%d records, %d in order", n, fs.order.Len())
	}
	for k, held := range map[string]bool{key(99): false, key(100): true, key(101): false, key(102): true, "last": true} {
		if err, _ := fs.of(k, "", now.Add(time.Minute)); (err != nil) != held {
			t.Errorf("%s: %v", k, err)
		}
	}
	later := now.Add(3 * time.Hour)
	for i := range maxFailures {
		fs.failed("later"+key(i), "", errTest, later)
		fs.succeeded("later" + key(i))
	}
	if n := len(fs.keys); n > 10 {
		t.Errorf("%d records are left", n)
	}
}

var errTest = errors.New("failed")

// Slots are given in the order of the requests; a run that waits for a slot without a lock delays
// none that needs no such slot; and nothing is left.
func TestTheGateIsFair(t *testing.T) {
	g := newGate(2, 1)
	a, b, c, d := g.join(unlocked), g.join(unlocked), g.join(locked), g.join(locked)
	want := func(admitted ...*slot) {
		t.Helper()
		for i, p := range []*slot{a, b, c, d} {
			if p.isAdmitted() != slices.Contains(admitted, p) {
				t.Errorf("slot %d: %v", i, p.isAdmitted())
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
	g.leave(uncounted)
	g.leave(nil)
	a, b = g.join(locked), g.join(locked)
	if !g.unlock(a) || g.unlock(b) || g.unlock(uncounted) || g.unlock(nil) || g.counts[locked].used != 2 ||
		g.counts[unlocked].used != 1 {
		t.Errorf("one of two slots is for a load without a lock now: %+v", g.counts)
	}
	c, d = g.join(unlocked), g.join(locked)
	want(a, b)
	g.leave(b)
	want(a, b, d)
	g.leave(a)
	want(a, b, c, d)
	g.leave(c)
	g.leave(d)
	if g.counts[locked].used != 0 || g.counts[unlocked].used != 0 ||
		g.waiting[locked].Len()+g.waiting[unlocked].Len() != 0 {
		t.Errorf("%+v", g.counts)
	}
}

// A refresh that finds no slot either ends, and cannot be joined from then on, or waits for the
// callers that have joined it.
func TestARefreshWithoutASlotEndsOrWaits(t *testing.T) {
	f := plainFetcher(t)
	var taken []*slot
	for range f.opts.MaxUnlockedLoads {
		taken = append(taken, f.gate.join(unlocked))
	}
	r, ok := f.runs.Background("k")
	if !ok {
		t.Fatal("no flight")
	}
	r.setUp(context.Background())
	r.until = time.Now().Add(time.Minute)
	if p, over := f.enter(r, unlocked, ErrUnavailable, nil); p != nil || !over || f.runs.Open("k") {
		t.Errorf("for nobody: over %v, joinable %v", over, f.runs.Open("k"))
	}
	f.runs.Refuse(r, nil)
	r, _ = f.runs.Background("k")
	r.setUp(context.Background())
	r.until = time.Now().Add(time.Minute)
	if joined, first, ok := f.runs.Join("k"); joined != r || first || !ok {
		t.Error("it cannot be joined")
	}
	entered := make(chan *slot)
	go func() {
		p, _ := f.enter(r, unlocked, ErrUnavailable, nil)
		entered <- p
	}()
	redistest.Eventually(t, 10*time.Second, "it waits", func() bool {
		f.gate.mu.Lock()
		defer f.gate.mu.Unlock()
		return f.gate.waiting[unlocked].Len() == 1
	})
	f.gate.leave(taken[0])
	if p := <-entered; p == nil || !p.isAdmitted() {
		t.Error("it has no slot")
	}
	f.runs.Refuse(r, nil)
}
