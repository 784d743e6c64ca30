package main

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// This file is what the long benchmarks have in common: those whose one op is a whole measurement
// of many seconds, for what they show does not fit in an op. (BenchmarkHandover, BenchmarkFairness,
// BenchmarkLongStop, BenchmarkAllStopped.)

// benchTimeEnv is how long a long benchmark measures.
const benchTimeEnv = "FLIGHTLOCK_BENCH_TIME"

func benchTime(b *testing.B) time.Duration {
	s := os.Getenv(benchTimeEnv)
	if s == "" {
		return 10 * time.Second
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < time.Second || d > maxDuration {
		b.Fatalf("%s=%q: want a duration like 60s, from 1s to %v", benchTimeEnv, s, maxDuration)
	}
	return d
}

// startServers starts redis-servers of our own, which end with the benchmark. It skips where there
// is no redis-server.
func startServers(b *testing.B, n int) (servers []*redistest.Server, urls []string) {
	for range n {
		s := redistest.StartServer(b)
		servers, urls = append(servers, s), append(urls, "redis://"+s.Addr())
	}
	return servers, urls
}

// figures are what the ops of a benchmark measured, by unit.
type figures map[string][]float64

func (f figures) add(unit string, v float64) { f[unit] = append(f[unit], v) }

// report gives the median over the ops of each figure, and hides the time per op, which is the
// length of the measurement.
func (f figures) report(b *testing.B) {
	for unit, all := range f {
		b.ReportMetric(median(all), unit)
	}
	b.ReportMetric(0, "ns/op")
}

// quantile is exact, where a histogram's would blur a ratio. It sorts all.
func quantile(all []float64, q float64) float64 {
	slices.Sort(all)
	return all[min(len(all)-1, int(q*float64(len(all))))]
}
