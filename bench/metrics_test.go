package main

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
)

// BenchmarkMetrics compares a client with metrics and one without, in small turns as
// BenchmarkAgainstRaw does: on a hot key, where nearly every lock is handed over, and on keys of
// the goroutines' own, where each asks Redis. One op is one turn of each.
func BenchmarkMetrics(b *testing.B) {
	for _, load := range []struct {
		name       string
		goroutines int
		key        func(own string) string
	}{
		{"hot", 1000, func(string) string { return "hot" }},
		{"distinct", 1000, func(own string) string { return own }},
		{"distinct", 1, func(own string) string { return own }},
	} {
		b.Run(fmt.Sprintf("keys=%s/goroutines=%d", load.name, load.goroutines), func(b *testing.B) {
			watched(b, load.goroutines, load.key)
		})
	}
}

func watched(b *testing.B, goroutines int, key func(own string) string) {
	s := redistest.StartServer(b)
	locker := func(observers ...*flightlock.Observer) func(own string) error {
		c, err := flightlock.New(flightlock.Options{
			NodeTimeout: patientTimeout, Observers: observers,
		}, s.Client(b))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close(context.Background()) })
		ctx, cancel := context.WithCancel(context.Background())
		b.Cleanup(cancel)
		return func(own string) error {
			l, err := c.SingleFlightLock(ctx, key(own), 10*time.Second, nil)
			if err != nil {
				return err
			}
			return l.Release(ctx)
		}
	}
	metrics, err := prom.New(prometheus.NewRegistry())
	if err != nil {
		b.Fatal(err)
	}
	without, with := locker(), locker(metrics)
	perLock := float64(perTurn(goroutines) * goroutines)
	counted := func(prefix string, lock func(string) error) (ns, allocs float64) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		ns = turn(b, goroutines, prefix, lock)
		runtime.ReadMemStats(&after)
		return ns, float64(after.Mallocs-before.Mallocs) / perLock
	}
	counted("off", without) // scripts, connections
	counted("on", with)
	var off, on, more, moreAllocs []float64
	b.ResetTimer()
	for range b.N {
		t0, a0 := counted("off", without)
		t1, a1 := counted("on", with)
		off, on, more, moreAllocs = append(off, t0), append(on, t1), append(more, t1-t0), append(moreAllocs, a1-a0)
	}
	b.ReportMetric(median(off), "off-ns/lock")
	b.ReportMetric(median(on), "on-ns/lock")
	b.ReportMetric(median(more), "more-ns/lock")
	b.ReportMetric(median(moreAllocs), "more-allocs/lock")
}
