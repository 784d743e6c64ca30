package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/progress"
	"github.com/flightlock/flightlock/internal/redistest"
)

// This file measures how processes share one key, by the load of (b): 20 us of work under the lock,
// real processes and redis-servers of our own. One op is one run of FLIGHTLOCK_BENCH_TIME.

const fairnessWork = 20 * time.Microsecond

// BenchmarkFairness reports the shares of the holding time, in percent of all of it, Jain's index
// of them, the longest wait of any goroutine, and throughput. x-alone is throughput by that of one
// process with as many goroutines. server-commands/lock is what the servers count, subscriptions
// and connects included and the warm-up too; commands/lock is what the clients count.
func BenchmarkFairness(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d/procs=4/goroutines=100", nodes), func(b *testing.B) { againstAlone(b, nodes) })
	}
	b.Run("nodes=1/procs=16/goroutines=50", func(b *testing.B) {
		fairness(b, config{procs: 16, clients: 16, goroutines: 50})
	})
	b.Run("nodes=1/procs=4/goroutines=100/polling=1", func(b *testing.B) {
		fairness(b, config{procs: 4, clients: 4, goroutines: 100, polling: 1})
	})
}

func fairness(b *testing.B, cfg config) {
	servers, urls := startServers(b, 1)
	f := figures{}
	for range b.N {
		before := callsOf(b, servers)
		h := hotKeyRun(b, urls, cfg, benchTime(b))
		f.addShares(h)
		f.add("server-commands/lock", ratio(callsOf(b, servers)-before, h.Locks))
	}
	f.report(b)
}

// againstAlone runs the one process before and after the four, half as long each, for the machine's
// speed drifts.
func againstAlone(b *testing.B, nodes int) {
	_, urls := startServers(b, nodes)
	four, one := config{procs: 4, clients: 4, goroutines: 100}, config{procs: 1, clients: 1, goroutines: 400}
	f := figures{}
	for range b.N {
		before := hotKeyRun(b, urls, one, benchTime(b)/2)
		h := hotKeyRun(b, urls, four, benchTime(b))
		after := hotKeyRun(b, urls, one, benchTime(b)/2)
		f.addShares(h)
		f.add("x-alone", 2*h.LocksPerSecond/(before.LocksPerSecond+after.LocksPerSecond))
	}
	f.report(b)
}

// callsOf adds up the commands that clients of the library send. Servers also count those that
// scripts call.
func callsOf(b *testing.B, servers []*redistest.Server) (n uint64) {
	for _, s := range servers {
		for name, calls := range s.CommandCalls(b) {
			command, _, _ := strings.Cut(name, "|")
			switch command {
			case "evalsha", "eval", "script", "subscribe", "unsubscribe", "ssubscribe", "sunsubscribe",
				"hello", "client", "ping":
				n += uint64(calls)
			}
		}
	}
	return n
}

// hotKeyRun runs (b) alone.
func hotKeyRun(b *testing.B, urls []string, cfg config, d time.Duration) *hotKeyFigures {
	cfg.redis, cfg.duration, cfg.work, cfg.only = urls, d, fairnessWork, "b"
	cfg.warmup, cfg.open = 500*time.Millisecond, openClient
	rep, err := runBench(b.Context(), cfg, progress.New(io.Discard))
	if err != nil {
		b.Fatal(err)
	}
	if rep.ViolationCount > 0 {
		b.Errorf("%d broken promises: %q", rep.ViolationCount, rep.Violations)
	}
	for kind, e := range rep.HotKey.Errors {
		b.Logf("%d x %s, first: %s", e.Count, kind, e.Sample)
	}
	return rep.HotKey
}

func (f figures) addShares(h *hotKeyFigures) {
	least := func(a, b shareFigures) int { return int(a.Held - b.Held) }
	f.add("least-share-%", 100*slices.MinFunc(h.Shares, least).ShareOfHolding)
	f.add("most-share-%", 100*slices.MaxFunc(h.Shares, least).ShareOfHolding)
	f.add("jain", h.Jain)
	f.add("longest-wait-ms", h.Wait.Max.Seconds()*1000)
	f.add("locks/s", h.LocksPerSecond)
	f.add("commands/lock", h.CommandsPerLock)
	for _, s := range h.Shares {
		if s.Polling > 0 {
			f.add("polling-share-%", 100*s.ShareOfHolding)
		}
	}
}
