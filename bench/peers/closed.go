package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// run is one window of one load in one process.
//
// Its end comes in this order: stopped is set, so that no lock counts any more; the meter is read;
// ctx ends, so that who waits gives up. Calls that Drain lets come back count although stopped is
// set.
type run struct {
	l       locker
	t       task
	stopped atomic.Bool
	ctx     context.Context
	cancel  context.CancelFunc

	failures, violations atomic.Uint64
	firstError           sync.Once
	message              string // written once, read when all goroutines have ended

	busy   atomic.Int32 // who is in the lock, where all want one key
	shards [16]struct { // of the waits: goroutine g records in g % 16
		sync.Mutex
		h *hdrhistogram.Histogram
	}
}

func newRun(l locker, t task) *run {
	r := &run{l: l, t: t}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	for i := range r.shards {
		r.shards[i].h = newHistogram()
	}
	return r
}

// runClosed keeps goroutines busy with lock, work, release from at on. Every goroutine has a
// cancelable ctx of its own, as a request in a service has one.
func runClosed(l locker, t task, at time.Time) (*result, error) {
	r := newRun(l, t)
	defer r.cancel()
	counts := make([]struct {
		n uint64
		_ [56]byte // no two goroutines write to one cache line
	}, t.Load.Goroutines)
	start := make(chan struct{}) // closed at the time
	var wg sync.WaitGroup
	for g := range counts {
		key := r.keys(g)
		wg.Go(func() {
			ctx, cancel := context.WithCancel(r.ctx)
			defer cancel()
			<-start
			for !r.stopped.Load() {
				if r.once(ctx, g, key()) {
					counts[g].n++
				}
				if t.Load.Pause > 0 {
					time.Sleep(t.Load.Pause)
				}
			}
		})
	}
	time.Sleep(time.Until(at))
	reused, recalled := retainedBy(l)
	m := readMeter()
	close(start)
	time.Sleep(t.Load.Window)
	r.stopped.Store(true)
	if t.Load.Drain {
		wg.Wait()
	}
	res := m.result()
	if now, nowRecalled := retainedBy(l); now > reused {
		res.Extra["reused"], res.Extra["recalled"] = float64(now-reused), float64(nowRecalled-recalled)
	}
	r.cancel()
	wg.Wait()
	for g := range counts {
		n := float64(counts[g].n)
		res.Locks += counts[g].n
		res.Sharers, res.Sum, res.Squares = res.Sharers+1, res.Sum+n, res.Squares+n*n
	}
	return res, r.finish(res)
}

// retainedBy is what l has retained so far, nothing if it does not.
func retainedBy(l locker) (reused, recalled uint64) {
	if r, ok := l.(retainer); ok {
		return r.retained()
	}
	return 0, 0
}

// once is one lock, unless the window ends before. It reports whether the lock counts.
func (r *run) once(ctx context.Context, g int, key string) bool {
	if r.t.Load.Bare {
		h, err := r.l.lock(ctx, key)
		if err == nil {
			err = h.release()
		}
		r.failed(ctx, err)
		return err == nil && !r.stopped.Load()
	}
	return r.lockAt(ctx, g, key, time.Now())
}

// lockAt is one lock that was wanted at a certain time. It goes on until it has the lock or the
// window ends.
func (r *run) lockAt(ctx context.Context, g int, key string, wanted time.Time) bool {
	var h held
	for err := error(nil); h == nil; {
		if h, err = r.l.lock(ctx, key); err != nil {
			h = nil
			if ctx.Err() != nil {
				r.record(g, time.Since(wanted)) // it waited so long, and for how much longer nobody knows
				return false
			}
			r.failed(ctx, err)
			time.Sleep(time.Millisecond)
		}
	}
	wait := time.Since(wanted)
	counts := r.t.Load.Drain || !r.stopped.Load()
	if r.t.Load.Keys == 1 && !r.busy.CompareAndSwap(0, 1) {
		r.violations.Add(1)
	}
	work(r.t.Load.Work)
	if r.t.Load.Keys == 1 {
		r.busy.Store(0)
	}
	r.failed(ctx, h.release())
	if counts {
		r.record(g, wait)
	}
	return counts
}

// work spends d as the holder of a lock would: busy if it is short, waiting for something if it is long.
func work(d time.Duration) {
	if d >= time.Millisecond { // a shorter sleep takes as long
		time.Sleep(d)
		return
	}
	if d > 0 {
		for began := time.Now(); time.Since(began) < d; {
		}
	}
}

func (r *run) failed(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	r.failures.Add(1)
	r.firstError.Do(func() { r.message = err.Error() })
}

func (r *run) record(g int, d time.Duration) {
	s := &r.shards[g%len(r.shards)]
	s.Lock()
	recordWait(s.h, d)
	s.Unlock()
}

// burst has all goroutines make a call at the same moment, with the functions that prepare has given them
// before it. The result is about the time from then until the last has returned.
func (r *run) burst(at time.Time, prepare func(g int) func(ctx context.Context) error) *result {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for g := range r.t.Load.Goroutines {
		call := prepare(g)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(r.ctx, 20*time.Second)
			defer cancel()
			<-start
			r.failed(r.ctx, call(ctx))
			r.record(g, time.Since(at))
		})
	}
	time.Sleep(time.Until(at))
	m := readMeter()
	close(start)
	wg.Wait()
	res := m.result()
	res.Locks = uint64(r.t.Load.Goroutines) // callers served
	return res
}

// keys gives goroutine g its keys, one for each lock.
func (r *run) keys(g int) func() string {
	p := r.t.Prefix
	switch n := r.t.Load.Keys; n {
	case 0:
		key := fmt.Sprintf("%s:own:%d:%d", p, pid(), g)
		return func() string { return key }
	case 1:
		key := p + ":hot"
		return func() string { return key }
	default:
		names := keyNames(p, n)
		zipf := rand.NewZipf(rand.New(rand.NewPCG(1, uint64(g))), zipfS, 1, uint64(n-1))
		chance := rand.New(rand.NewPCG(2, uint64(g)))
		return func() string {
			k := int(zipf.Uint64())
			if r.t.Load.Even {
				k = chance.IntN(n)
			}
			if procs := r.t.Procs; procs > 1 && chance.Float64() < r.t.Load.Affinity {
				k = k/procs*procs + r.t.Number // as many are wanted as often, by one process each
			}
			return names[k]
		}
	}
}

// zipfS is how steep the mix of keys is: of 10,000 keys, the first gets some 13% of the locks.
const zipfS = 1.1

// keyNames are the names of n keys, made once per process.
var keyNames = func() func(prefix string, n int) []string {
	var mu sync.Mutex
	var names []string
	var of string
	return func(prefix string, n int) []string {
		mu.Lock()
		defer mu.Unlock()
		if of != prefix || len(names) != n {
			of, names = prefix, make([]string, n)
			for i := range names {
				names[i] = fmt.Sprintf("%s:%d", prefix, i)
			}
		}
		return names
	}
}()

// finish adds what the run itself has noted, when all its goroutines have ended.
func (r *run) finish(res *result) (err error) {
	all := newHistogram()
	for i := range r.shards {
		all.Merge(r.shards[i].h)
	}
	res.Failures, res.Violations, res.FirstError = r.failures.Load(), r.violations.Load(), r.message
	res.Waits, err = encodeWaits(all)
	return err
}

// meter is what the process had used up at one moment.
type meter struct {
	at  time.Time
	cpu time.Duration
	mem runtime.MemStats
}

func readMeter() (m meter) {
	runtime.ReadMemStats(&m.mem)
	m.cpu, m.at = cpuTime(), time.Now()
	return m
}

// result is what the process has used since.
func (m meter) result() *result {
	now := readMeter()
	return &result{
		Elapsed: now.at.Sub(m.at), CPU: now.cpu - m.cpu, Extra: map[string]float64{},
		Mallocs: now.mem.Mallocs - m.mem.Mallocs, Bytes: now.mem.TotalAlloc - m.mem.TotalAlloc,
	}
}
