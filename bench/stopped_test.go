package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// BenchmarkOneNodeStopped shows what a node costs that is there but does not answer (SIGSTOP): five servers of our own,
// all healthy or one stopped before the clock starts. Goroutines lock keys of their own, so every op needs a quorum.
func BenchmarkOneNodeStopped(b *testing.B) {
	s := benchStore{name: "redis", prefix: "flightlock-bench:"}
	var last *redistest.Server
	for range 5 {
		last = redistest.StartServer(b) // skips where there is no redis-server
		s.urls = append(s.urls, "redis://"+last.Addr())
	}
	for _, g := range []int{1, 50} {
		b.Run(fmt.Sprintf("nodes=5/goroutines=%d/state=healthy", g), func(b *testing.B) { s.latencies(b, g, nil) })
		b.Run(fmt.Sprintf("nodes=5/goroutines=%d/state=stopped", g), func(b *testing.B) {
			defer last.Cont()
			s.latencies(b, g, func() { last.Stop() })
		})
	}
}

// latencies reports quantiles of a lock and its release, one goroutine per key. It calls begin when all are warm. The
// NodeTimeout is the default, for it matters here; where a busy machine makes a healthy node miss it, that is counted.
func (s benchStore) latencies(b *testing.B, goroutines int, begin func()) {
	c := s.client(b, 0)
	h := new(histogram)
	var late atomic.Uint64
	drive(b, goroutines, func() {
		h = new(histogram) // without the warm-up
		late.Store(0)
		if begin != nil {
			begin()
		}
	}, func(ctx context.Context, g int) error {
		began := time.Now()
		err := lockAndRelease(ctx, c, keyEach(g))
		h.record(time.Since(began))
		if errors.Is(err, flightlock.ErrUnavailable) {
			late.Add(1)
			return nil
		}
		return err
	})
	b.ReportMetric(float64(late.Load())/float64(b.N), "unavailable/lock")
	b.ReportMetric(float64(h.quantile(0.5)), "p50-ns")
	b.ReportMetric(float64(h.quantile(0.99)), "p99-ns")
}
