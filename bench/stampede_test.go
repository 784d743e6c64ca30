package main

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// This file measures Fetch in a stampede: the callers of 4 or 64 processes miss a key at once, on one
// redis-server of our own. One op is 40 of them, or 20 where a load takes 500 ms. The goal for the
// slowest hundredth of 250 callers in each process is what nobody can do without, the load and 4
// round trips to Redis, and 2 ms. That a miss is loaded once is a condition.
//
// A Fetch begins with a Lookup on its caller's goroutine, which is the user's. A thousand GETs at
// once, through go-redis' pools of 20 connections, take two processors 11 ms, with a Fetcher or
// without; and the Lookup of whoever has won the lock queues in that pool behind those of the
// callers. So there are two caches: cache=memory is a word of memory that the processes share, and
// leaves the time of the library and of Redis. cache=redis is a key, read with GET; there, between
// the misses, the same callers fetch a key that is cached, and x-hits compares with them.
//
// Between the misses the same callers share loads in two ways that are no lock, which say what so
// many goroutines on so few processors cost by themselves: by a singleflight per process, where
// nothing goes to Redis and each process loads; and by hand (see setNXLoads), with one load for all
// and two trips to Redis.

// BenchmarkStampede reports how long callers wait beyond what the load took (p50-us, p99-us); the
// goal for the p99 (goal-us), and the ratio of the two with the load added to both (x-goal); the
// p99 beyond the load of the other two ways (singleflight-p99-us, byhand-p99-us); the most Redis
// commands that a process sent for one miss (commands); with cache=redis, the p99 of the same
// callers when the value is cached (hits-p99-us) and the ratio to that (x-hits); and a round trip,
// the median of an EVALSHA after a pause as long as the load (evalsha-us). A load is measured,
// because a timer may come late.
func BenchmarkStampede(b *testing.B) {
	for _, load := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 500 * time.Millisecond} {
		name := func(cache string, callers int) string {
			return fmt.Sprintf("load=%v/cache=%s/procs=4/callers=%d", load, cache, callers)
		}
		b.Run(name("memory", 250), func(b *testing.B) { stampedes(b, sharedMemory, load, 4, 250) })
		b.Run(fmt.Sprintf("load=%v/cache=memory/procs=64/callers=1", load), func(b *testing.B) {
			stampedes(b, sharedMemory, load, 64, 1)
		})
		if load < 500*time.Millisecond { // beside which the rest is small
			b.Run(name("memory", 25), func(b *testing.B) { stampedes(b, sharedMemory, load, 4, 25) })
			b.Run(name("redis", 250), func(b *testing.B) { stampedes(b, "", load, 4, 250) })
		}
	}
}

func stampedes(b *testing.B, cacheURL string, load time.Duration, processes, callers int) {
	servers, urls := startServers(b, 1)
	cfg := config{procs: processes, clients: processes, callers: callers}
	cfg.redis, cfg.cacheURL, cfg.open = urls, cacheURL, openClient
	bb, end := startBench(b, cfg)
	defer end()
	rdb := servers[0].Client(b)
	if err := compareAndDelete.Load(b.Context(), rdb).Err(); err != nil {
		b.Fatal(err)
	}
	j := job{Kind: kindFetch, URLs: urls, Goroutines: cfg.callers, Load: load, Parts: 1}
	cached, alone, byHand := j, j, j
	cached.Cached = true
	alone.Kind, byHand.Kind = kindSingleflight, kindByHand
	stampedeOnce(b, bb, j) // connections, scripts
	stampedeOnce(b, bb, byHand)
	misses := 40
	if load >= 500*time.Millisecond {
		misses = 20
	}
	f := figures{}
	for range b.N {
		var beyond, aloneBeyond, byHandBeyond, hits, trips []float64
		var commands uint64
		for range misses {
			miss := stampedeOnce(b, bb, j)
			beyond = addTimes(beyond, miss, miss.Load)
			for _, c := range miss.Clients {
				commands = max(commands, c.Commands)
			}
			shared := stampedeOnce(b, bb, alone)
			aloneBeyond = addTimes(aloneBeyond, shared, shared.Load/time.Duration(shared.Loads))
			shared = stampedeOnce(b, bb, byHand)
			byHandBeyond = addTimes(byHandBeyond, shared, shared.Load)
			if cacheURL != sharedMemory {
				hits = addTimes(hits, stampedeOnce(b, bb, cached), 0)
			}
			trips = append(trips, us(rawDelete(b, rdb, load)))
		}
		trip, p99 := median(trips), quantile(beyond, 0.99)
		goal := 4*trip + us(2*time.Millisecond)
		f.add("p50-us", quantile(beyond, 0.5))
		f.add("p99-us", p99)
		f.add("goal-us", goal)
		f.add("x-goal", (us(load)+p99)/(us(load)+goal))
		f.add("commands", float64(commands))
		f.add("evalsha-us", trip)
		f.add("singleflight-p99-us", quantile(aloneBeyond, 0.99))
		f.add("byhand-p99-us", quantile(byHandBeyond, 0.99))
		if hits != nil {
			hit := quantile(hits, 0.99)
			f.add("hits-p99-us", hit)
			f.add("x-hits", p99/hit)
		}
	}
	verdict(b, "p99 at most the load, 4 round trips and 2 ms", "us", median(f["p99-us"]), median(f["goal-us"]))
	verdict(b, "at most 10 Redis commands per miss and process", "commands", slices.Max(f["commands"]), 10)
	f.report(b)
}

// verdict says whether what was measured is within the goal.
func verdict(b *testing.B, goal, unit string, got, most float64) {
	if got <= most {
		b.Logf("goal: %s: met, with %.0f %s to spare", goal, most-got, unit)
	} else {
		b.Logf("goal: %s: missed by %.0f %s", goal, got-most, unit)
	}
}

// addTimes adds how long callers took beyond the load.
func addTimes(all []float64, out *outcome, load time.Duration) []float64 {
	for _, took := range out.Took {
		all = append(all, us(took-load))
	}
	return all
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// startBench starts the processes of a bench, without its programme.
func startBench(b *testing.B, cfg config) (bb *bench, end func()) {
	n, err := startNodes(b.Context(), cfg.redis)
	if err != nil {
		b.Fatal(err)
	}
	bb = &bench{cfg: cfg, nodes: n}
	if err := bb.startCrews(b.Context()); err != nil {
		b.Fatal(err)
	}
	return bb, func() {
		if err := bb.closeCrews(); err != nil {
			b.Error(err)
		}
		n.close()
	}
}

// stampedeOnce has all callers fetch a key of its own at once, and returns what came of it.
func stampedeOnce(b *testing.B, bb *bench, j job) *outcome {
	out, _, err := bb.do(b.Context(), j, nil)
	if err != nil {
		b.Fatal(err)
	}
	loads := map[bool]uint64{true: 0, false: 1}[j.Cached]
	if len(out.Parts[0].Errors) > 0 || out.Violations > 0 || j.Kind != kindSingleflight && out.Loads != loads {
		b.Fatalf("%d loads, want %d; errors: %v; broken promises: %q", out.Loads, loads, out.Parts[0].Errors,
			out.Messages)
	}
	return out
}
