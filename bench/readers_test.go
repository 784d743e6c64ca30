package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// This file measures read locks: one that its process shares, and how long a writer waits for many readers.
// The servers are its own.

// BenchmarkSharedRead has goroutines take and release a read lock that their process has, again and again.
func BenchmarkSharedRead(b *testing.B) {
	_, urls := startServers(b, 1)
	for _, g := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("goroutines=%d", g), func(b *testing.B) {
			c := lingers(b, urls, 0)
			l, err := c.RLock(b.Context(), "shared", benchTTL, nil)
			if err != nil {
				b.Fatal(err)
			}
			var before flightlock.Stats
			drive(b, g, func() { before = c.Stats() }, func(ctx context.Context, _ int) error {
				l, err := c.RLock(ctx, "shared", benchTTL, nil)
				if err != nil {
					return err
				}
				return l.Release(ctx)
			})
			b.ReportMetric(float64(c.Stats().Commands-before.Commands)/float64(b.N), "commands/lock")
			if err := l.Release(b.Context()); err != nil {
				b.Error(err)
			}
		})
	}
}

// BenchmarkWriterAmongReaders has 10,000 readers in 4 Clients, each of which keeps the key for 10 ms at a
// time, and a writer that comes after each second. It reports how long that one waits, and for how long a
// reader has kept the key at most, as the busy processors have it. An op is one writer.
func BenchmarkWriterAmongReaders(b *testing.B) {
	const clients, readers, keeps = 4, 2500, 10 * time.Millisecond
	for _, n := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) {
			_, urls := startServers(b, n)
			writer := lingers(b, urls, 0)
			ctx, end := context.WithCancel(b.Context())
			var wg sync.WaitGroup
			var reads, longest atomic.Int64
			for range clients {
				c := lingers(b, urls, 0)
				for range readers {
					wg.Go(func() {
						for ctx.Err() == nil {
							l, err := c.RLock(ctx, "many", benchTTL, nil)
							if err != nil {
								continue
							}
							began := time.Now()
							time.Sleep(keeps)
							_ = l.Release(ctx)
							reads.Add(1)
							for took := int64(time.Since(began)); ; {
								if before := longest.Load(); took <= before || longest.CompareAndSwap(before, took) {
									break
								}
							}
							time.Sleep(10 * keeps)
						}
					})
				}
			}
			var waits []float64
			time.Sleep(time.Second)
			began, before := time.Now(), reads.Load()
			for b.Loop() {
				time.Sleep(time.Second)
				asked := time.Now()
				l, err := writer.SingleFlightLock(ctx, "many", benchTTL, nil)
				if err != nil {
					b.Fatal(err)
				}
				waits = append(waits, float64(time.Since(asked)))
				_ = l.Release(ctx)
			}
			perSecond := float64(reads.Load()-before) / time.Since(began).Seconds()
			end()
			wg.Wait()
			b.ReportMetric(quantile(waits, 0.5)/1e6, "wait-p50-ms")
			b.ReportMetric(slices.Max(waits)/1e6, "wait-max-ms")
			b.ReportMetric(float64(longest.Load())/1e6, "longest-reader-ms")
			b.ReportMetric(perSecond, "reads/s")
		})
	}
}
