package main

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/semaphore"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

// This file compares a permit of a semaphore, and ten locks of LockAll, with one lock, in small turns that
// alternate: see paired_test.go. The servers are its own.

// compare reports the medians of both, and of how many times as long an op takes as a lock, in a turn of each
// per op.
func compare(b *testing.B, perTurn int, name string, lock,
	other func(ctx context.Context) (time.Duration, error)) {
	turn := func(op func(ctx context.Context) (time.Duration, error)) float64 {
		var all time.Duration
		for range perTurn {
			took, err := op(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			all += took
		}
		return float64(all) / float64(perTurn)
	}
	turn(lock)
	turn(other) // scripts, connections
	all := figures{}
	for b.Loop() {
		one, more := turn(lock), turn(other)
		all.add("lock-ns", one)
		all.add(name+"-ns", more)
		all.add("x-lock", more/one)
	}
	all.report(b)
}

// whole is the time of an acquire and its release.
func whole(
	acquire func(ctx context.Context) (*flightlock.Lock, error),
) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) {
		began := time.Now()
		l, err := acquire(ctx)
		if err == nil {
			err = l.Release(ctx)
		}
		return time.Since(began), err
	}
}

// BenchmarkPermit has one goroutine acquire and release a permit, and a lock, that nobody else wants.
func BenchmarkPermit(b *testing.B) {
	for _, n := range []int{1, 3, 5} {
		for _, permits := range []int{1, 10} {
			b.Run(fmt.Sprintf("nodes=%d/permits=%d", n, permits), func(b *testing.B) {
				_, urls := startServers(b, n)
				c := lingers(b, urls, 0)
				s, err := semaphore.New(c, "permit", permits)
				if err != nil {
					b.Fatal(err)
				}
				compare(b, 100, "permit",
					whole(func(ctx context.Context) (*flightlock.Lock, error) {
						return c.SingleFlightLock(ctx, "lock", benchTTL, nil)
					}),
					whole(func(ctx context.Context) (*flightlock.Lock, error) { return s.Acquire(ctx, benchTTL, nil) }))
			})
		}
	}
}

// BenchmarkPermitsContended has 8 Clients, with 2 goroutines each, contend for permits, and for as many locks
// as there are permits: each goroutine keeps what it has for a millisecond. It reports how many of both there
// are per second, their ratio, and Jain's index over the Clients' shares of the permits. An op is a second of
// each.
func BenchmarkPermitsContended(b *testing.B) {
	const clients, goroutines, keeps = 8, 2, time.Millisecond
	for _, n := range []int{1, 3} {
		for _, permits := range []int{1, 2, 5, 10} {
			b.Run(fmt.Sprintf("nodes=%d/permits=%d", n, permits), func(b *testing.B) {
				_, urls := startServers(b, n)
				var cs []*flightlock.Client
				var ss []*semaphore.Semaphore
				for range clients {
					c := lingers(b, urls, 0)
					s, err := semaphore.New(c, "permits", permits)
					if err != nil {
						b.Fatal(err)
					}
					cs, ss = append(cs, c), append(ss, s)
				}
				second := func(
					acquire func(ctx context.Context, i int) (*flightlock.Lock, error),
				) (perSecond, jain float64) {
					ctx, end := context.WithTimeout(b.Context(), time.Second)
					defer end()
					var counts [clients]float64
					var mu sync.Mutex
					var wg sync.WaitGroup
					for i := range clients * goroutines {
						wg.Go(func() {
							for {
								l, err := acquire(ctx, i)
								if err != nil {
									return
								}
								mu.Lock()
								counts[i%clients]++
								mu.Unlock()
								time.Sleep(keeps)
								_ = l.Release(ctx)
							}
						})
					}
					wg.Wait()
					var sum, squares float64
					for _, x := range counts {
						sum, squares = sum+x, squares+x*x
					}
					return sum, sum * sum / (squares * clients)
				}
				lock := func(ctx context.Context, i int) (*flightlock.Lock, error) {
					return cs[i%clients].SingleFlightLock(ctx, fmt.Sprint("lock", i%permits), benchTTL, nil)
				}
				permit := func(ctx context.Context, i int) (*flightlock.Lock, error) {
					return ss[i%clients].Acquire(ctx, benchTTL, nil)
				}
				all := figures{}
				for b.Loop() {
					locks, _ := second(lock)
					got, jain := second(permit)
					all.add("locks/s", locks)
					all.add("permits/s", got)
					all.add("x-locks", got/locks)
					all.add("jain", jain)
				}
				all.report(b)
			})
		}
	}
}

// BenchmarkLockAll has one goroutine acquire ten free keys at once, and one key, beside each other: without
// their release, and on servers that answer at once, or a millisecond later.
func BenchmarkLockAll(b *testing.B) {
	for _, n := range []int{1, 3} {
		for _, delay := range []time.Duration{0, time.Millisecond / 2} {
			b.Run(fmt.Sprintf("nodes=%d/keys=10/rtt=%v", n, 2*delay), func(b *testing.B) {
				servers, urls := startServers(b, n)
				for i, s := range servers {
					if delay > 0 {
						p := redistest.StartProxy(b, s.Addr())
						p.SetDelay(delay)
						urls[i] = "redis://" + p.Addr()
					}
				}
				c := lingers(b, urls, 0)
				keys := make([]string, 10)
				for i := range keys {
					keys[i] = fmt.Sprint("key", i)
				}
				compare(b, 30, "ten",
					func(ctx context.Context) (time.Duration, error) {
						began := time.Now()
						l, err := c.SingleFlightLock(ctx, "one", benchTTL, nil)
						took := time.Since(began)
						if err == nil {
							err = l.Release(ctx)
						}
						return took, err
					},
					func(ctx context.Context) (time.Duration, error) {
						began := time.Now()
						s, err := c.LockAll(ctx, keys, benchTTL, nil)
						took := time.Since(began)
						if err == nil {
							err = s.Release(ctx)
						}
						return took, err
					})
			})
		}
	}
}

// BenchmarkTenScripts is what BenchmarkLockAll can hope for at least: a script of two commands, sent to all
// nodes at once, and ten of it in one pipeline, for ten keys.
func BenchmarkTenScripts(b *testing.B) {
	script := redis.NewScript(
		`return redis.call('SET', KEYS[1], ARGV[1], 'PX', 30000, 'NX') and redis.call('INCRBY', KEYS[2], 64)`)
	for _, n := range []int{1, 3} {
		b.Run(fmt.Sprintf("nodes=%d/keys=10", n), func(b *testing.B) {
			servers, _ := startServers(b, n)
			clients := make([]*redis.Client, n)
			for i, s := range servers {
				clients[i] = s.Client(b)
				if err := script.Load(b.Context(), clients[i]).Err(); err != nil {
					b.Fatal(err)
				}
			}
			keys := make([]string, 10)
			for i := range keys {
				keys[i] = fmt.Sprint("key", i)
			}
			all := func(ctx context.Context, send func(p redis.Pipeliner)) error {
				var g errgroup.Group
				for _, c := range clients {
					g.Go(func() error {
						_, err := c.Pipelined(ctx, func(p redis.Pipeliner) error { send(p); return nil })
						return err
					})
				}
				return g.Wait()
			}
			of := func(keys []string) func(ctx context.Context) (time.Duration, error) {
				return func(ctx context.Context) (time.Duration, error) {
					began := time.Now()
					err := all(ctx, func(p redis.Pipeliner) {
						for _, key := range keys {
							p.EvalSha(ctx, script.Hash(), []string{key, "fence:" + key}, "owner")
						}
					})
					took := time.Since(began)
					if err == nil {
						err = all(ctx, func(p redis.Pipeliner) { p.Del(ctx, keys...) })
					}
					return took, err
				}
			}
			compare(b, 30, "ten", of(keys[:1]), of(keys))
		})
	}
}
