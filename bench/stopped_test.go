package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/histogram"
	"github.com/flightlock/flightlock/internal/redistest"
)

// This file shows what nodes cost that are there but do not answer (SIGSTOP), on servers of our own.

// BenchmarkOneNodeStopped compares three or five servers that are all healthy with the same when
// one of them is stopped before the clock starts, or was never there: it answers no connect.
// Goroutines lock keys of their own, so every op needs a quorum. To compare two commits, run it on
// both, in turns: a change may make it cost 1.05 times as much (benchstat).
func BenchmarkOneNodeStopped(b *testing.B) {
	for _, n := range []int{3, 5} {
		servers, urls := startServers(b, n)
		last := servers[n-1]
		hole := slices.Clone(urls)
		hole[n-1] = "redis://" + redistest.StartLostSYN(b).Addr()
		for _, g := range []int{1, 50} {
			s := benchStore{name: "redis", prefix: "flightlock-bench:", urls: urls}
			name := fmt.Sprintf("nodes=%d/goroutines=%d/state=", n, g)
			b.Run(name+"healthy", func(b *testing.B) { s.latencies(b, g, nil) })
			b.Run(name+"stopped", func(b *testing.B) {
				defer last.Cont()
				s.latencies(b, g, func() { last.Stop() })
			})
			b.Run(name+"lost", func(b *testing.B) {
				s.urls = hole
				s.latencies(b, g, nil)
			})
		}
	}
}

// latencies reports quantiles of a lock and its release, one goroutine per key. It calls begin when
// all are warm. The NodeTimeout is the default, for it matters here; where a busy machine makes a
// healthy node miss it, that is counted.
func (s benchStore) latencies(b *testing.B, goroutines int, begin func()) {
	c := s.client(b, 0)
	h := new(histogram.Histogram)
	var late atomic.Uint64
	drive(b, goroutines, func() {
		h = new(histogram.Histogram) // without the warm-up
		late.Store(0)
		if begin != nil {
			begin()
		}
	}, func(ctx context.Context, g int) error {
		began := time.Now()
		err := lockAndRelease(ctx, c, keyEach(g))
		h.Record(time.Since(began))
		if errors.Is(err, flightlock.ErrUnavailable) {
			late.Add(1)
			return nil
		}
		return err
	})
	b.ReportMetric(float64(late.Load())/float64(b.N), "unavailable/lock")
	b.ReportMetric(float64(h.Quantile(0.5)), "p50-ns")
	b.ReportMetric(float64(h.Quantile(0.99)), "p99-ns")
}

// longStopTimeout is the NodeTimeout where a thousand goroutines keep five servers busy: on a small
// machine a healthy node may need more than the default.
const longStopTimeout = 250 * time.Millisecond

// BenchmarkLongStop has 1,000 goroutines lock keys of their own on five nodes, stops one of them
// for FLIGHTLOCK_BENCH_TIME, and lets it come back. It reports, of the time after the first second
// that the node was stopped: throughput and p99 by those of the healthy nodes before (x-throughput,
// x-p99), and by how much goroutines and live heap grew in the last five sixths; and when the
// node's vote was back after it could answer again (back-ms).
func BenchmarkLongStop(b *testing.B) {
	servers, urls := startServers(b, 5)
	last := servers[4]
	s := benchStore{name: "redis", prefix: "flightlock-bench:", urls: urls}
	f := figures{}
	for range b.N {
		c := s.client(b, longStopTimeout)
		load := startKeyLoad(b, c, 1000)
		load.measure(time.Second) // connections, scripts
		stopped := benchTime(b)
		healthy := load.measure(max(2*time.Second, stopped/6))
		last.Stop()
		first := load.measure(min(time.Second, stopped/2))
		watch := watchGrowth(c, (stopped-first.length)/60)
		rest := load.measure(stopped - first.length)
		watch.end()
		last.Cont()
		f.add("back-ms", s.untilVoteIsBack(b, c, last).Seconds()*1000)
		load.stop()
		f.add("healthy-locks/s", healthy.perSecond())
		f.add("x-throughput", rest.perSecond()/healthy.perSecond())
		f.add("healthy-p99-ms", healthy.took.Quantile(0.99).Seconds()*1000)
		f.add("x-p99", float64(rest.took.Quantile(0.99))/float64(healthy.took.Quantile(0.99)))
		f.add("first-second-p99-ms", first.took.Quantile(0.99).Seconds()*1000)
		f.add("unavailable/lock", rest.late())
		f.add("healthy-unavailable/lock", healthy.late())
		watch.addTo(f)
	}
	f.report(b)
}

// untilVoteIsBack returns when no node is suspended any more and a lock that was taken after that
// is on the given node.
func (s benchStore) untilVoteIsBack(b *testing.B, c *flightlock.Client,
	node *redistest.Server) time.Duration {
	began := time.Now()
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	rdb := node.Client(b)
	for i := 0; ; i++ {
		if ctx.Err() != nil {
			b.Fatal("the node that came back has no vote after a minute")
		}
		if c.Stats().Suspended > 0 {
			time.Sleep(time.Millisecond)
			continue
		}
		key := "back:" + strconv.Itoa(i)
		l, err := c.SingleFlightLock(ctx, key, benchTTL, nil)
		if err != nil {
			b.Fatal(err)
		}
		back := time.Since(began)
		// The node may be the last of five to be asked, and three suffice for the lock.
		time.Sleep(5 * time.Millisecond)
		n, err := rdb.Exists(ctx, s.prefix+key).Result()
		_ = l.Release(ctx)
		if err == nil && n == 1 {
			return back
		}
	}
}

// growth samples goroutines, live heap and debts from time to time.
type growth struct {
	stop    chan struct{} // closed by end
	stopped chan struct{} // closed when sampling has ended

	goroutines, heap, debts []float64
}

// watchGrowth samples every so often, until end.
func watchGrowth(c *flightlock.Client, every time.Duration) *growth {
	g := &growth{stop: make(chan struct{}), stopped: make(chan struct{})}
	go func() {
		defer close(g.stopped)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				g.look(c)
			case <-g.stop:
				return
			}
		}
	}()
	return g
}

// look reads the heap that the last collection found alive: garbage between collections is not growth.
func (g *growth) look(c *flightlock.Client) {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	g.heap = append(g.heap, float64(live[0].Value.Uint64()))
	g.goroutines = append(g.goroutines, float64(runtime.NumGoroutine()))
	g.debts = append(g.debts, float64(c.Stats().Debts))
}

func (g *growth) end() {
	close(g.stop)
	<-g.stopped
}

// addTo compares the last third of what was seen with the third after the first sixth.
func (g *growth) addTo(f figures) {
	ends := func(all []float64) (early, late float64) {
		n := len(all)
		return median(all[n/6 : n/2]), median(all[n-n/3:])
	}
	early, late := ends(g.goroutines)
	f.add("goroutines", late)
	f.add("goroutines-growth", late-early)
	early, late = ends(g.heap)
	f.add("live-heap-MB", late/1e6)
	f.add("live-heap-growth-%", 100*(late-early)/early)
	early, late = ends(g.debts)
	f.add("debts", late)
	f.add("debts-growth", late-early)
}

// BenchmarkAllStopped has goroutines of two clients want one key, and as many want a key of their
// own each, on three nodes that are all stopped for FLIGHTLOCK_BENCH_TIME. It reports how long
// after the return the locks came that were wanted at that moment (shared-key, own-keys), how many
// calls failed though their ctx allows them to wait (lost), and how many had no answer 10 seconds
// later (hanging); and for callers whose ctx ended meanwhile, how much later they had their answer.
func BenchmarkAllStopped(b *testing.B) {
	const perClient = 100 // and kind
	servers, urls := startServers(b, 3)
	s := benchStore{name: "redis", prefix: "flightlock-bench:", urls: urls}
	f := figures{}
	for range b.N {
		o := new(outage)
		o.ctx, o.cancel = context.WithCancel(context.Background())
		for range 2 {
			c := s.client(b, 0)
			for g := range perClient {
				o.start(c, "shared", &o.shared)
				o.start(c, fmt.Sprintf("%p:%d", c, g), &o.own)
			}
		}
		time.Sleep(time.Second)
		each(servers, func(s *redistest.Server) { s.Stop() })
		o.impatient(s.client(b, 0), benchTime(b))
		each(servers, func(s *redistest.Server) { s.Cont() })
		now := time.Now()
		o.back.Store(&now)
		hanging := o.wait(10 * time.Second)
		f.add("shared-key-p50-ms", o.shared.Quantile(0.5).Seconds()*1000)
		f.add("shared-key-max-ms", o.shared.Max().Seconds()*1000)
		f.add("own-keys-p50-ms", o.own.Quantile(0.5).Seconds()*1000)
		f.add("own-keys-max-ms", o.own.Max().Seconds()*1000)
		f.add("waiters", float64(o.shared.Count()+o.own.Count()))
		f.add("lost", float64(o.lost.Load()))
		f.add("hanging", float64(hanging))
		f.add("late-answer-max-ms", o.overdue.Max().Seconds()*1000)
	}
	f.report(b)
}

func each(servers []*redistest.Server, f func(*redistest.Server)) {
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() { f(s) })
	}
	wg.Wait()
}

// outage is a time without nodes, as its goroutines see it.
type outage struct {
	ctx    context.Context // ends when nobody need go on
	cancel context.CancelFunc

	back    atomic.Pointer[time.Time] // when the nodes returned; nil: not yet
	running atomic.Int64              // goroutines that had no lock after the return yet
	lost    atomic.Uint64
	done    sync.WaitGroup

	shared, own histogram.Histogram // from the return to the lock, of calls that began before it
	overdue     histogram.Histogram // from the end of a ctx to the answer
}

// outageTTL is short enough that nobody holds a lock through the outage.
const outageTTL = 2 * time.Second

// start has a goroutine lock and release the key again and again, until it got it after the return;
// h says how soon.
func (o *outage) start(c *flightlock.Client, key string, h *histogram.Histogram) {
	o.running.Add(1)
	o.done.Go(func() {
		defer o.running.Add(-1)
		ctx, cancel := context.WithCancel(o.ctx)
		defer cancel()
		for !o.once(ctx, c, key, h) && ctx.Err() == nil {
		}
	})
}

// once reports whether it got the lock after the return.
func (o *outage) once(ctx context.Context, c *flightlock.Client, key string, h *histogram.Histogram) bool {
	began := time.Now()
	l, err := c.SingleFlightLock(ctx, key, outageTTL, nil)
	now := time.Now()
	if err != nil {
		if ctx.Err() == nil {
			o.lost.Add(1)
			time.Sleep(time.Millisecond)
		}
		return false
	}
	_ = l.Release(ctx) // fails while the nodes are stopped, as it must
	back := o.back.Load()
	if back == nil || now.Before(*back) {
		return false
	}
	if began.Before(*back) {
		h.Record(now.Sub(*back))
	}
	return true
}

// impatient spends d with callers that wait for a tenth of it only.
func (o *outage) impatient(c *flightlock.Client, d time.Duration) {
	end := time.Now().Add(d)
	for i := 0; time.Until(end) > d/10; i++ {
		due := time.Now().Add(d / 10)
		ctx, cancel := context.WithDeadline(context.Background(), due)
		if l, err := c.SingleFlightLock(ctx, fmt.Sprint("impatient", i), outageTTL, nil); err == nil {
			_ = l.Release(ctx) // nobody stopped: the figures will show it
		}
		o.overdue.Record(time.Since(due))
		cancel()
	}
	time.Sleep(time.Until(end))
}

// wait lets all finish, and returns how many did not within d.
func (o *outage) wait(d time.Duration) (hanging int64) {
	for end := time.Now().Add(d); o.running.Load() > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	hanging = o.running.Load()
	o.cancel()
	o.done.Wait()
	return hanging
}
