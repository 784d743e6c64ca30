package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/procs"
)

// This file measures a cold cache: thousands of distinct keys are missed at once, in each of
// several processes, by Fetchers on Clients with default options. The goal for the slowest caller
// is 1.5 times what the locks alone take, asked for by all processes, at the rate at which this
// machine locks keys of their own (BenchmarkDistinctKeys, goroutines=1000, measured beside each
// burst), and 3 loads. That no load is without a lock is a condition.
//
// The cache is a file with a byte per key that the processes share: the time is the library's and Redis'.

const coldLoad = 20 * time.Millisecond

// BenchmarkColdKeys reports the slowest caller of all processes (slowest-ms), the goal (goal-ms),
// the ratio (x-goal), the rate of locks that the goal is made of (locks/s), and loads without a
// lock (unlocked). One op is one burst, of keys that are new.
func BenchmarkColdKeys(b *testing.B) {
	for _, n := range []int{1, 3} {
		for _, workers := range []int{1, 4} {
			for _, keys := range []int{5000, 20_000} {
				b.Run(fmt.Sprintf("nodes=%d/procs=%d/keys=%d", n, workers, keys), func(b *testing.B) {
					coldKeys(b, n, workers, keys)
				})
			}
		}
	}
}

func coldKeys(b *testing.B, n, workers, keys int) {
	_, urls := startServers(b, n)
	values := filepath.Join(b.TempDir(), "values")
	if err := os.WriteFile(values, nil, 0o600); err != nil {
		b.Fatal(err)
	}
	var ps []*procs.Child
	for range workers {
		ps = append(ps, startColdProcess(b, values, urls))
	}
	s := benchStore{name: "redis", urls: urls, prefix: "flightlock-bench:"}
	c := s.client(b, patientTimeout)
	coldBurst(b, ps, 0, workers) // connections, scripts
	f := figures{}
	for i := range b.N {
		r := coldBurst(b, ps, (i+1)*keys, keys)
		load := startKeyLoad(b, c, 1000)
		load.measure(200 * time.Millisecond) // connections
		rate := load.measure(time.Second).perSecond()
		load.stop()
		goal := 1.5*float64(workers*keys)/rate + 3*coldLoad.Seconds()
		f.add("slowest-ms", r.Slowest.Seconds()*1000)
		f.add("goal-ms", goal*1000)
		f.add("x-goal", r.Slowest.Seconds()/goal)
		f.add("locks/s", rate)
		f.add("unlocked", float64(r.Unlocked))
		if r.Failed > 0 || r.Unlocked > 0 {
			b.Logf("%d callers with an error, %d loads without a lock", r.Failed, r.Unlocked)
		}
	}
	f.report(b)
}

// coldRequest asks for a burst: at this time, of so many keys.
type coldRequest struct {
	At         time.Time
	From, Keys int
}

// coldResult is the result of a burst.
type coldResult struct {
	Slowest          time.Duration
	Unlocked, Failed int
}

// coldBurst has all processes miss the same keys at once.
func coldBurst(b *testing.B, ps []*procs.Child, from, keys int) (sum coldResult) {
	r := coldRequest{time.Now().Add(50 * time.Millisecond), from, keys}
	for _, p := range ps {
		if err := p.Send(r); err != nil {
			b.Fatal(err)
		}
	}
	for _, p := range ps {
		var r coldResult
		if err := p.Receive(&r); err != nil {
			b.Fatal(err)
		}
		sum.Slowest = max(sum.Slowest, r.Slowest)
		sum.Unlocked += r.Unlocked
		sum.Failed += r.Failed
	}
	return sum
}

// coldEnv makes the test binary a process of BenchmarkColdKeys, with the file and the nodes that it names.
const coldEnv = "FLIGHTLOCK_BENCH_COLD"

// startColdProcess starts one, which ends with the benchmark.
func startColdProcess(b *testing.B, values string, urls []string) *procs.Child {
	return startProcess(b, coldEnv, slices.Insert(slices.Clone(urls), 0, values))
}

// coldMain answers each coldRequest by a coldResult.
func coldMain(in io.Reader, out io.Writer, values string, urls []string) int {
	cache, err := os.OpenFile(values, os.O_RDWR, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	c, err := flightlock.Open(flightlock.Options{}, urls...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	f, err := fetch.New(c, coldStore(cache), fetch.Each(coldValue), fetch.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	err = procs.Serve(in, out, time.Second, func(_ context.Context, r coldRequest) coldResult {
		time.Sleep(time.Until(r.At))
		before := f.Stats()
		res := fetchAll(f, r.From, r.Keys)
		res.Unlocked = int(f.Stats().UnlockedLoads - before.UnlockedLoads)
		return res
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	return exitOK
}

func fetchAll(f *fetch.Fetcher[bool], from, keys int) (r coldResult) {
	var mu sync.Mutex // guards r
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			began := time.Now()
			_, err := f.Get(context.Background(), strconv.Itoa(from+i))
			took := time.Since(began)
			mu.Lock()
			defer mu.Unlock()
			r.Slowest = max(r.Slowest, took)
			if err != nil {
				r.Failed++
			}
		})
	}
	wg.Wait()
	return r
}

func coldStore(cache *os.File) fetch.Store[bool] {
	return fetch.Plain(
		func(_ context.Context, key string) (v, ok bool, err error) {
			at, value := coldOffset(key), make([]byte, 1)
			if n, err := cache.ReadAt(value, at); n == 0 && errors.Is(err, io.EOF) || n == 1 && value[0] == 0 {
				return false, false, nil
			} else if n == 0 {
				return false, false, err
			}
			return true, true, nil
		},
		func(_ context.Context, key string, _ bool) error {
			_, err := cache.WriteAt([]byte{1}, coldOffset(key))
			return err
		})
}

func coldValue(ctx context.Context, _ string) (bool, error) { return true, sleep(ctx, coldLoad) }

func coldOffset(key string) int64 {
	at, err := strconv.ParseInt(key, 10, 64)
	if err != nil {
		panic(err) // fetchAll makes the keys
	}
	return at
}
