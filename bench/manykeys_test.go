package main

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// BenchmarkManyKeys has 8 Clients want the same 1,000 keys and hold each that they get, as the processes of
// a service do that has one leader for each tenant. It reports the attempts per second of all Clients, and
// how much of a processor the server uses, in percent: from the start on (start-), and after
// FLIGHTLOCK_BENCH_TIME (then-), 10 s each. One op is both.
func BenchmarkManyKeys(b *testing.B) {
	const clients, keys, window = 8, 1000, 10 * time.Second
	f := figures{}
	for range b.N {
		servers, urls := startServers(b, 1)
		ctx, cancel := context.WithCancel(b.Context())
		var all []*flightlock.Client
		for range clients {
			c, err := flightlock.Open(flightlock.Options{}, urls...)
			if err != nil {
				b.Fatal(err)
			}
			all = append(all, c)
		}
		measure := watch(b, servers[0], all)
		var wg sync.WaitGroup
		for _, c := range all {
			for i := range keys {
				wg.Go(func() { lead(ctx, b, c, fmt.Sprint("tenant ", i)) })
			}
		}
		time.Sleep(window) // what is measured
		measure(f, "start-", window)
		time.Sleep(benchTime(b)) // they poll less after that
		measure = watch(b, servers[0], all)
		time.Sleep(window) // what is measured
		measure(f, "then-", window)
		cancel()
		wg.Wait()
		for _, c := range all {
			if err := c.Close(context.Background()); err != nil {
				b.Error(err)
			}
		}
	}
	f.report(b)
}

// lead waits for key, and keeps it until ctx ends.
func lead(ctx context.Context, b *testing.B, c *flightlock.Client, key string) {
	for ctx.Err() == nil {
		l, err := c.SingleFlightLock(ctx, key, 10*time.Second, nil)
		if err != nil {
			if ctx.Err() == nil {
				b.Logf("%s: %v", key, err)
			}
			continue
		}
		if err := l.AutoRefresh(context.Background(), flightlock.RefreshPolicy{}); err != nil {
			b.Error(err)
		}
		<-l.Context(ctx).Done()
		_ = l.Release(context.WithoutCancel(ctx))
	}
}

// watch begins to measure what the Clients ask of the server.
func watch(
	b *testing.B, s *redistest.Server, all []*flightlock.Client,
) func(f figures, name string, took time.Duration) {
	attempts := func() (sum uint64) {
		for _, c := range all {
			sum += c.Stats().Attempts
		}
		return sum
	}
	began, cpu := attempts(), s.CPU(b)
	return func(f figures, name string, took time.Duration) {
		f.add(name+"attempts/s", float64(attempts()-began)/took.Seconds())
		f.add(name+"server-%", 100*(s.CPU(b)-cpu).Seconds()/took.Seconds())
	}
}
