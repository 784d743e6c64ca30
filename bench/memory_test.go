package main

import (
	"context"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// BenchmarkClientMemory measures what a Client has on the heap when it holds no lock: idle after
// one lock, after a load that has used all its connections (1000 goroutines with a key each), and
// with one more for notices, as a key has it that another process holds. It starts servers of its
// own, for embedded ones would be on the same heap. An op is a Client.
//
//	go test -run '^$' -bench ClientMemory -benchtime 10x ./bench
func BenchmarkClientMemory(b *testing.B) {
	for _, nodes := range []int{1, 3, 5} {
		b.Run("nodes="+strconv.Itoa(nodes), func(b *testing.B) {
			var urls []string
			for range nodes {
				urls = append(urls, "redis://"+redistest.StartServer(b).Addr())
			}
			b.Run("after=lock", func(b *testing.B) { memoryOfClients(b, urls, func(*flightlock.Client) {}) })
			b.Run("after=load", func(b *testing.B) {
				memoryOfClients(b, urls, func(c *flightlock.Client) { lockAtOnce(b, c, 1000) })
			})
			b.Run("after=wait", func(b *testing.B) {
				memoryOfClients(b, urls, func(c *flightlock.Client) {
					lockAtOnce(b, c, 1000)
					waitInVain(b, c, urls)
				})
			})
		})
	}
}

// trimmed is how long after its last use a Client has given up what only a busy one needs: NodeTimeout, and
// flights that stay subscribed for a second.
const trimmed = 2 * time.Second

// memoryOfClients opens b.N Clients, has each lock once and then used, and reports the memory that
// each has when it is idle.
func memoryOfClients(b *testing.B, urls []string, use func(*flightlock.Client)) {
	var clients []*flightlock.Client
	before := heapInUse()
	for range b.N {
		c, err := flightlock.Open(flightlock.Options{NodeTimeout: trimmed / 4}, urls...)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close(context.Background())
		if err := lockAndRelease(b.Context(), c, "k"); err != nil {
			b.Fatal(err)
		}
		use(c)
		clients = append(clients, c)
	}
	time.Sleep(trimmed)
	b.ReportMetric(float64(heapInUse()-before)/float64(b.N)/1024, "KiB/client")
	b.ReportMetric(0, "ns/op")
	runtime.KeepAlive(clients)
}

func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// lockAtOnce has goroutines lock a key of their own each, ten times.
func lockAtOnce(b *testing.B, c *flightlock.Client, goroutines int) {
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for range 10 {
				if err := lockAndRelease(b.Context(), c, keyEach(g)); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// waitInVain waits for a key that another Client holds, for as long as it takes to subscribe.
func waitInVain(b *testing.B, c *flightlock.Client, urls []string) {
	other, err := flightlock.Open(flightlock.Options{NodeTimeout: trimmed / 4}, urls...)
	if err != nil {
		b.Fatal(err)
	}
	defer other.Close(context.Background())
	l, err := other.TryLock(b.Context(), "held", benchTTL)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Release(context.Background())
	ctx, cancel := context.WithTimeout(b.Context(), 200*time.Millisecond)
	defer cancel()
	_, _ = c.SingleFlightLock(ctx, "held", benchTTL, nil)
}
