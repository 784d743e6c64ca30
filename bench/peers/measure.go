package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/redis/go-redis/v9"
)

// record is what one rival did in one bout of one round: a line of the raw figures.
type record struct {
	Bout    string
	Rival   string
	At      time.Time
	Figures map[string]float64 // see figuresOf
	// Waits are the quantiles of the waits that quantiles names, in microseconds.
	Waits []float64 `json:",omitempty"`
	// Error is the first that a call returned.
	Error string `json:",omitempty"`
}

// quantiles are those of the plots.
var quantiles = []float64{0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 1}

// boutTimeout is the longest that a bout may take: a rival that hangs is killed.
const boutTimeout = 25 * time.Second

// cacheTimeout is that of loads of caches, in some of which rivals take long.
const cacheTimeout = time.Minute

// measure has one rival do one bout.
func (s *site) measure(ctx context.Context, b bout, rivalName string) (rec record, err error) {
	timeout := boutTimeout
	if b.ofCaches() {
		timeout = cacheTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout+b.Load.Window)
	defer cancel()
	r, err := rivalNamed(rivalName)
	if err != nil {
		return rec, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %s: %w", b.id(), rivalName, err)
		}
	}()
	if err := s.flush(ctx); err != nil {
		return rec, err
	}
	defer s.delay(b)()
	t := task{Rival: r.name, Load: b.Load, Prefix: "bench", Profile: s.profile,
		Settings: settings{Addrs: s.addrs(b), TTL: b.TTL, Linger: b.Linger, Delay: b.Delay, Fresh: b.Fresh,
			Versions: s.versions.Addr()}}
	if t.Settings.Delay == 0 {
		t.Settings.Delay = bestDelay(r.name, b.Load.Kind)
	}
	workers, err := startWorkers(ctx, b.Procs, t)
	if err != nil {
		return rec, err
	}
	defer stopWorkers(workers)
	return s.runBout(ctx, b, r, workers)
}

// runBout has warm workers do its load, between two looks at the servers.
func (s *site) runBout(ctx context.Context, b bout, r rival, workers []*worker) (rec record, err error) {
	before, err := s.usage(ctx)
	if err != nil {
		return rec, err
	}
	if b.Stopped {
		last := s.servers[b.Nodes-1]
		if err := last.Stop(); err != nil {
			return rec, err
		}
		defer func() { _ = last.Cont() }() // a second time does nothing
	}
	at := time.Now()
	all, err := doLoad(ctx, b, workers)
	if err != nil {
		return rec, err
	}
	if b.Stopped {
		if err := s.servers[b.Nodes-1].Cont(); err != nil {
			return rec, err
		}
	}
	after, err := s.usage(ctx)
	if err != nil {
		return rec, err
	}
	if b.Load.Kind == handover {
		trip, err := s.roundTrip(ctx, b)
		if err != nil {
			return rec, err
		}
		all[0].Extra["round_trip_us"] = micros(trip)
	}
	sum, waits, err := mergeResults(all)
	if err != nil {
		return rec, err
	}
	rec = record{Bout: b.id(), Rival: r.name, At: at, Error: sum.FirstError,
		Figures: figuresOf(b, sum, all, waits)}
	if waits.TotalCount() > 0 {
		for _, q := range quantiles {
			rec.Waits = append(rec.Waits, micros(time.Duration(waits.ValueAtQuantile(100*q))))
		}
	}
	if b.ofCaches() { // per Get, or per cold key; the answer to one INFO is among them
		per := float64(sum.Locks)
		if b.Load.Kind == coldKeys {
			per = float64(b.Load.Keys * b.Episodes)
		}
		rec.Figures["sent"] = after.since(before, "total_net_input_bytes") / per
		rec.Figures["received"] = after.since(before, "total_net_output_bytes") / per
	}
	if !r.local && sum.Locks > 0 && !b.ofCaches() && b.Load.Kind != holding && b.Load.Kind != waiters {
		commands, cpu := after.work(before, r)
		rec.Figures["commands"] = commands / float64(sum.Locks)
		rec.Figures["server_us"] = micros(cpu) / float64(sum.Locks)
	}
	return rec, nil
}

// roundTrip is the median of PINGs to the first node, after pauses as long as those before a hand-over.
func (s *site) roundTrip(ctx context.Context, b bout) (time.Duration, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.addrs(b)[0], PoolSize: 1})
	defer rdb.Close()
	var took []time.Duration
	for range 31 {
		time.Sleep(10*time.Millisecond + rand.N(10*time.Millisecond))
		began := time.Now()
		if err := rdb.Ping(ctx).Err(); err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// startDelay is how far ahead the start is set, so that all processes hear of it in time.
const startDelay = 30 * time.Millisecond

// doLoad has the workers do the load once, or a stampede several times. There is one result per
// process, or per process and episode.
func doLoad(ctx context.Context, b bout, workers []*worker) (all []*result, err error) {
	if b.Load.Kind == handover {
		res, err := passTheBaton(ctx, workers, b.Load.Window)
		return []*result{res}, err
	}
	for episode := range max(b.Episodes, 1) {
		replies, err := callAll(ctx, workers, request{Op: opRun, At: time.Now().Add(startDelay), Episode: episode})
		if err != nil {
			return nil, err
		}
		for _, r := range replies {
			all = append(all, r.Result)
		}
	}
	return all, nil
}

// figuresOf are the figures of a bout. All are per second or per lock; times are microseconds.
func figuresOf(b bout, sum result, all []*result, waits *hdrhistogram.Histogram) map[string]float64 {
	f := map[string]float64{
		"locks":      float64(sum.Locks),
		"locks_s":    float64(sum.Locks) / sum.Elapsed.Seconds(),
		"failures":   float64(sum.Failures),
		"violations": float64(sum.Violations),
	}
	if n := float64(sum.Locks); n > 0 && b.Load.Kind != handover {
		f["client_us"] = micros(sum.CPU) / n
		f["allocs"] = float64(sum.Mallocs) / n
		f["bytes"] = float64(sum.Bytes) / n
	}
	if sum.Sharers > 1 {
		f["jain"] = jain(sum.Sharers, sum.Sum, sum.Squares)
	}
	if b.Procs > 1 && b.Load.Kind == closed {
		var n, total, squares float64
		for _, r := range all {
			locks := float64(r.Locks)
			n, total, squares = n+1, total+locks, squares+locks*locks
		}
		f["jain_procs"] = jain(n, total, squares)
	}
	if waits.TotalCount() > 0 {
		for name, q := range map[string]float64{"p50_us": 50, "p99_us": 99, "p999_us": 99.9, "max_us": 100} {
			f[name] = micros(time.Duration(waits.ValueAtQuantile(q)))
		}
	}
	if n := float64(sum.Locks); n > 0 && sum.Extra["reused"] > 0 {
		f["reused"], f["recalled"] = sum.Extra["reused"]/n, sum.Extra["recalled"]/n
		delete(sum.Extra, "reused")
		delete(sum.Extra, "recalled")
	}
	for k, v := range sum.Extra {
		f[k] = v / float64(max(b.Episodes, 1))
	}
	return f
}

func micros(d time.Duration) float64 { return float64(d) / 1e3 }
