package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// This file measures Options.Linger: the cost of a lock that is used again, the time that a rival
// waits for a key whose lease is retained, and the cost of keys that are mostly used by one process
// each. The servers are its own.

const benchLinger = 100 * time.Millisecond

// lingers opens a Client that retains leases for that time, and waits for the confirmation of its
// inbox.
func lingers(b *testing.B, urls []string, linger time.Duration) *flightlock.Client {
	b.Helper()
	c, err := flightlock.Open(flightlock.Options{NodeTimeout: patientTimeout, Linger: linger}, urls...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			b.Errorf("closing the client: %v", err)
		}
	})
	own := fmt.Sprintf("first:%p", c)
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if err := lockAndRelease(b.Context(), c, own); err != nil {
			b.Fatal(err)
		}
		if linger == 0 || c.Stats().Retained > 0 {
			return c
		}
		if time.Since(began) > 10*time.Second {
			b.Fatal("nothing is retained")
		}
	}
}

// BenchmarkLinger has each goroutine lock and release a key of its own, again and again.
func BenchmarkLinger(b *testing.B) {
	for _, n := range []int{1, 3, 5} {
		_, urls := startServers(b, n)
		for _, g := range []int{1, 1000} {
			for _, linger := range []time.Duration{0, benchLinger} {
				b.Run(fmt.Sprintf("nodes=%d/goroutines=%d/linger=%v", n, g, linger), func(b *testing.B) {
					c := lingers(b, urls, linger)
					keys := make([]string, g)
					for i := range keys {
						keys[i] = keyEach(i)
					}
					var before flightlock.Stats
					drive(b, g, func() { before = c.Stats() }, func(ctx context.Context, i int) error {
						return lockAndRelease(ctx, c, keys[i])
					})
					b.ReportMetric(float64(c.Stats().Commands-before.Commands)/float64(b.N), "commands/lock")
				})
			}
		}
	}
}

// BenchmarkRecall reports how long a rival waits for a key that another Client retains, and beside
// it for one that is free, and how long a TryLock takes. An op is one of each.
func BenchmarkRecall(b *testing.B) {
	for _, n := range []int{1, 3, 5} {
		b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) {
			_, urls := startServers(b, n)
			holder, rival := lingers(b, urls, benchLinger), lingers(b, urls, benchLinger)
			wait := func(key string, retained bool, lock func(string) (*flightlock.Lock, error)) float64 {
				if retained {
					if err := lockAndRelease(b.Context(), holder, key); err != nil {
						b.Fatal(err)
					}
				}
				began := time.Now()
				l, err := lock(key)
				took := time.Since(began)
				if err == nil {
					err = l.Release(b.Context())
				}
				if err != nil {
					b.Error(err)
				}
				return float64(took)
			}
			queue := func(key string) (*flightlock.Lock, error) {
				return rival.SingleFlightLock(b.Context(), key, benchTTL, nil)
			}
			try := func(key string) (*flightlock.Lock, error) { return rival.TryLock(b.Context(), key, benchTTL) }
			var free, recalled, tried []float64
			for i := range b.N {
				free = append(free, wait("free:"+strconv.Itoa(i), false, queue))
				recalled = append(recalled, wait("retained:"+strconv.Itoa(i), true, queue))
				tried = append(tried, wait("tried:"+strconv.Itoa(i), true, try))
			}
			f := figures{}
			for name, of := range map[string][]float64{"free": free, "recall": recalled, "try": tried} {
				f.add(name+"-p50-ns", quantile(of, 0.5))
				f.add(name+"-p99-ns", quantile(of, 0.99))
			}
			f.report(b)
		})
	}
}

// BenchmarkAffinity has 1,000 goroutines of 4 Clients lock 10,000 keys by Zipf's law; nine times of
// ten a key of their own Client.
func BenchmarkAffinity(b *testing.B) {
	for _, n := range []int{1, 3} {
		_, urls := startServers(b, n)
		for _, linger := range []time.Duration{0, benchLinger} {
			b.Run(fmt.Sprintf("nodes=%d/linger=%v", n, linger), func(b *testing.B) {
				const keys, goroutines = 10_000, 1000
				var clients [4]*flightlock.Client
				for i := range clients {
					clients[i] = lingers(b, urls, linger)
				}
				var seed atomic.Uint64
				laws := make([]*rand.Zipf, goroutines)
				for i := range laws {
					laws[i] = rand.NewZipf(rand.New(rand.NewPCG(seed.Add(1), 18)), 1.1, 1, keys-1)
				}
				drive(b, goroutines, nil, func(ctx context.Context, g int) error {
					own := g % len(clients)
					key := int(laws[g].Uint64())
					if rand.IntN(10) > 0 {
						key = key/len(clients)*len(clients) + own
					}
					return lockAndRelease(ctx, clients[own], keyEach(key))
				})
				var reused, recalled uint64
				for _, c := range clients {
					s := c.Stats()
					reused, recalled = reused+s.Reused, recalled+s.Recalled
				}
				b.ReportMetric(float64(reused)/float64(b.N), "reused/lock")
				b.ReportMetric(float64(recalled)/float64(b.N), "recalled/lock")
			})
		}
	}
}
