package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// This file compares an uncontended lock with the raw pair of commands in small turns, raw, ours,
// raw, ours: on a machine whose speed changes within a second, two benchmarks one after the other
// compare the machine with itself.

// BenchmarkAgainstRaw reports the medians of both and of their ratio, on a real server of its own.
// One op is one turn of each.
func BenchmarkAgainstRaw(b *testing.B) {
	for _, goroutines := range []int{1, 1000} {
		b.Run(fmt.Sprintf("nodes=1/goroutines=%d", goroutines), func(b *testing.B) { pairs(b, goroutines) })
	}
}

// perTurn is how many locks each goroutine takes in a turn, so that a turn is some milliseconds long.
func perTurn(goroutines int) int { return max(10, 200/goroutines) }

func pairs(b *testing.B, goroutines int) {
	s := redistest.StartServer(b)
	rdb := s.Client(b)
	c, err := flightlock.New(flightlock.Options{NodeTimeout: patientTimeout}, s.Client(b))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close(context.Background())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	release := redis.NewScript(`
if redis.call("GET", KEYS[1]) == ARGV[1] then
	return redis.call("DEL", KEYS[1])
end
return 0`)
	raw := func(key string) error {
		if err := rdb.SetArgs(ctx, key, "owner", redis.SetArgs{Mode: "NX", TTL: benchTTL}).Err(); err != nil {
			return err
		}
		return release.Run(ctx, rdb, []string{key}, "owner").Err()
	}
	ours := func(key string) error {
		l, err := c.SingleFlightLock(ctx, key, benchTTL, nil)
		if err != nil {
			return err
		}
		return l.Release(ctx)
	}

	turn(b, goroutines, "raw", raw) // scripts, connections
	turn(b, goroutines, "ours", ours)
	var raws, ourss, ratios []float64
	b.ResetTimer()
	for range b.N {
		r, o := turn(b, goroutines, "raw", raw), turn(b, goroutines, "ours", ours)
		raws, ourss, ratios = append(raws, r), append(ourss, o), append(ratios, o/r)
	}
	b.ReportMetric(median(raws), "raw-ns/lock")
	b.ReportMetric(median(ourss), "flightlock-ns/lock")
	b.ReportMetric(median(ratios), "x-raw")
}

// turn has every goroutine lock and release a key of its own a few times, and gives the time per lock.
func turn(b *testing.B, goroutines int, prefix string, lock func(key string) error) float64 {
	n := perTurn(goroutines)
	var wg sync.WaitGroup
	start := time.Now()
	for g := range goroutines {
		wg.Go(func() {
			key := fmt.Sprint(prefix, g)
			for range n {
				if err := lock(key); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(time.Since(start)) / float64(n*goroutines)
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}
