package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/flightlock/flightlock/semaphore"
	"github.com/redis/go-redis/v9"
)

// This file is -permits: 8 clients, with 2 goroutines each, contend for the permits of a semaphore, and keep
// each for a millisecond. Beside package semaphore stands what is found for the purpose: a counter on each
// node, and who is counted on a majority of them has a permit. It is a model, made here, and no library. It
// admits too many: each pair of three nodes can have room for another pair of holders. Nothing fails
// meanwhile.
const (
	permitClients, permitGoroutines = 8, 2
	permitKept                      = time.Millisecond
)

// acquirer gets a permit, and gives it back by release. It is tried again until ctx ends.
type acquirer func(ctx context.Context) (release func(), err error)

// permitRivals open a client of a semaphore.
var permitRivals = []struct {
	name string
	open func(addrs []string, name string, permits int) (acquire acquirer, closed func(), err error)
}{
	{nameOurs, openPermits},
	{"quorum counter (a model)", openCounter},
}

func openPermits(addrs []string, name string, permits int) (acquirer, func(), error) {
	l, err := openFlightlock(settings{Addrs: addrs, NodeTimeout: 5 * time.Second, TTL: ttl})
	if err != nil {
		return nil, nil, err
	}
	s, err := semaphore.New(l.(*flightClient).c, name, permits)
	if err != nil {
		l.close()
		return nil, nil, err
	}
	return func(ctx context.Context) (func(), error) {
		p, err := s.Acquire(ctx, ttl, nil)
		if err != nil {
			return nil, err
		}
		return func() { _ = p.Release(context.Background()) }, nil
	}, l.close, nil
}

// count is executed on each node: who is not counted yet is, if there is room.
var count = redis.NewScript(`
if redis.call("SCARD", KEYS[1]) < tonumber(ARGV[2]) then
	return redis.call("SADD", KEYS[1], ARGV[1])
end
return 0`)

func openCounter(addrs []string, name string, permits int) (acquirer, func(), error) {
	var nodes []*redis.Client
	for _, addr := range addrs {
		nodes = append(nodes, goredis(addr, nil))
	}
	everywhere := func(f func(node *redis.Client) bool) int {
		var n atomic.Int32
		var wg sync.WaitGroup
		for _, node := range nodes {
			wg.Go(func() {
				if f(node) {
					n.Add(1)
				}
			})
		}
		wg.Wait()
		return int(n.Load())
	}
	var last atomic.Int64
	acquire := func(ctx context.Context) (func(), error) {
		for ctx.Err() == nil {
			me := fmt.Sprintf("%p %d", nodes, last.Add(1))
			release := func() {
				everywhere(func(node *redis.Client) bool {
					return node.SRem(context.Background(), name, me).Err() == nil
				})
			}
			if everywhere(func(node *redis.Client) bool {
				counted, _ := count.Run(context.Background(), node, []string{name}, me, permits).Int()
				return counted == 1
			}) > len(nodes)/2 {
				return release, nil
			}
			release()
			time.Sleep(rand.N(3 * time.Millisecond))
		}
		return nil, ctx.Err()
	}
	return acquire, func() {
		for _, node := range nodes {
			_ = node.Close()
		}
	}, nil
}

// permitResult is what was counted while a semaphore was contended for.
type permitResult struct {
	// permits that were had; of them, beside too many others; and how many there were at a time
	got, over, most int64
}

// contend measures one rival for a window.
func contend(ctx context.Context, window time.Duration, permits int,
	all []acquirer) (r permitResult, err error) {
	ctx, end := context.WithTimeout(ctx, window)
	defer end()
	var mu sync.Mutex // guards what follows
	var now int64
	var wg sync.WaitGroup
	for i := range len(all) * permitGoroutines {
		wg.Go(func() {
			for {
				release, failed := all[i%len(all)](ctx)
				if failed != nil {
					mu.Lock()
					if ctx.Err() == nil {
						err = errors.Join(err, failed)
					}
					mu.Unlock()
					return
				}
				mu.Lock()
				now++
				r.got++
				r.most = max(r.most, now)
				if now > int64(permits) {
					r.over++
				}
				mu.Unlock()
				time.Sleep(permitKept)
				mu.Lock()
				now--
				mu.Unlock()
				release()
			}
		})
	}
	wg.Wait()
	return r, err
}

// runPermits prints a table of all rivals.
func runPermits(ctx context.Context, window time.Duration, stdout io.Writer) (err error) {
	load := loadAverage()
	servers, err := openSite(5)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.close()) }()
	fmt.Fprintf(stdout, "%d clients x %d goroutines, each permit kept for %v, %v each; load average %s\n\n",
		permitClients, permitGoroutines, permitKept, window, load)
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "nodes\tpermits\tof\tpermits/s\tmost at a time\tover the limit")
	for _, n := range []int{1, 3, 5} {
		for _, permits := range []int{1, 2, 5, 10} {
			for _, rival := range permitRivals {
				r, err := contendFor(ctx, window, servers.addrs(bout{Nodes: n}), permits, rival.open)
				if err != nil {
					return fmt.Errorf("%s: %w", rival.name, err)
				}
				fmt.Fprintf(w, "%d\t%d\t%s\t%.0f\t%d\t%d of %d\n", n, permits, rival.name,
					float64(r.got)/window.Seconds(), r.most, r.over, r.got)
			}
		}
	}
	return w.Flush()
}

func contendFor(ctx context.Context, window time.Duration, addrs []string, permits int,
	open func(addrs []string, name string, permits int) (acquirer, func(), error)) (permitResult, error) {
	var all []acquirer
	for range permitClients {
		acquire, closed, err := open(addrs, fmt.Sprintf("permits:%d:%d", len(addrs), permits), permits)
		if err != nil {
			return permitResult{}, err
		}
		defer closed()
		all = append(all, acquire)
	}
	return contend(ctx, window, permits, all)
}
