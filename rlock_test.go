package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// rlock is a read lock, which the test needs to go on.
func rlock(t testing.TB, c *flightlock.Client, key string, ttl time.Duration) *flightlock.Lock {
	t.Helper()
	l, err := c.RLock(t.Context(), key, ttl, nil)
	if err != nil {
		t.Fatal("RLock:", err)
	}
	return l
}

// Readers of one process and of several have the key together, and nobody else; a writer has it when the last
// of them has released it, and its token is above theirs, which are above that of the writer before.
func TestReadersShareTheKeyAndExcludeWriters(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("nodes=%d", n), func(t *testing.T) {
			servers, nodes := lockkit.StartNodes(t, n)
			a, b := lockkit.New(t, flightlock.Options{}, nodes...), lockkit.New(t, flightlock.Options{}, nodes...)
			first := lockkit.Lock(t, a, "k", 10*time.Second)
			lockkit.Release(t, first)

			readers := []*flightlock.Lock{rlock(t, a, "k", 10*time.Second), rlock(t, a, "k", 10*time.Second),
				rlock(t, b, "k", 10*time.Second)}
			if readers[0].Owner() != readers[1].Owner() || readers[0].Fence() != readers[1].Fence() {
				t.Error("the readers of a process have two leases")
			}
			for i, l := range readers {
				if l.Fence() <= first.Fence() || l.Err() != nil || l.Key() != "k" {
					t.Errorf("reader %d: fence %d after %d, %v", i, l.Fence(), first.Fence(), l.Err())
				}
				for _, c := range []*flightlock.Client{a, b} {
					if _, err := c.TryLock(t.Context(), "k", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
						t.Errorf("a writer beside %d readers: %v", len(readers)-i, err)
					}
				}
				lockkit.Release(t, l)
			}
			last := lockkit.Lock(t, b, "k", 10*time.Second)
			for _, l := range readers {
				if l.Fence() >= last.Fence() {
					t.Errorf("a reader has the token %d, and the writer after it %d", l.Fence(), last.Fence())
				}
			}
			_, err := a.RLock(t.Context(), "k", time.Second, flightlock.NoRetry())
			if !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Error("a reader beside a writer:", err)
			}
			lockkit.Release(t, last)
			lockkit.WantFree(t, "lock:k", servers...)
		})
	}
}

// On a Cluster, where no recall comes, a writer that waits is seen by the refreshes of the readers.
func TestReadersOnACluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 3)
	var clients []*flightlock.Client
	for range 2 {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
		t.Cleanup(func() { rdb.Close() })
		clients = append(clients, lockkit.New(t, flightlock.Options{}, rdb))
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, end := context.WithCancel(t.Context())
	defer end()
	var writing, reads atomic.Int64
	for i := range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				l, err := clients[i%2].RLock(ctx, "k", 10*time.Second, nil)
				if err != nil {
					continue
				}
				if writing.Load() != 0 {
					t.Error("a reader beside a writer")
				}
				reads.Add(1)
				time.Sleep(5 * time.Millisecond)
				testkit.Must(t, l.Release(t.Context()))
			}
		})
	}
	for range 3 {
		began := time.Now()
		for was := reads.Load(); reads.Load() < was+8; {
			if time.Sleep(time.Millisecond); time.Since(began) > time.Minute {
				t.Fatal("nobody reads")
			}
		}
		l := lockkit.Lock(t, clients[0], "k", 10*time.Second)
		writing.Add(1)
		time.Sleep(5 * time.Millisecond)
		writing.Add(-1)
		lockkit.Release(t, l)
	}
}

// Whoever finds the read lease of its process sends nothing.
func TestAReaderThatFindsTheLeaseSendsNothing(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := rlock(t, c, "k", 10*time.Second)
		synctest.Wait()
		before := c.Stats().Commands
		for range 100 {
			lockkit.Release(t, rlock(t, c, "k", 5*time.Second))
		}
		synctest.Wait()
		if after := c.Stats().Commands; after != before {
			t.Errorf("%d commands for 100 readers that found the lease", after-before)
		}
		lockkit.Release(t, l)
	})
}

// A stream of readers, of which always one has the key, ends when a writer waits; and goes on after it.
func TestAWriterThatWaitsStopsNewReaders(t *testing.T) {
	for name, opts := range map[string]flightlock.Options{"notices": {}, "none": {DisableNotify: true}} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				a, b := lockkit.New(t, opts, clients...), lockkit.New(t, opts, clients...)
				ctx, end := context.WithCancel(t.Context())
				var readers sync.WaitGroup
				var reads atomic.Int64
				var writing atomic.Bool
				for i := range 4 {
					c := []*flightlock.Client{a, b}[i%2]
					readers.Go(func() {
						for ctx.Err() == nil {
							l, err := c.RLock(ctx, "k", 10*time.Second, nil)
							if err != nil {
								continue
							}
							if writing.Load() {
								t.Error("a reader beside a writer")
							}
							reads.Add(1)
							time.Sleep(time.Duration(10+i) * time.Millisecond)
							if writing.Load() {
								t.Error("a writer beside a reader")
							}
							lockkit.Release(t, l)
						}
					})
				}
				for range 3 {
					time.Sleep(500 * time.Millisecond)
					before := reads.Load()
					began := time.Now()
					l := lockkit.Lock(t, a, "k", 10*time.Second)
					if waited := time.Since(began); waited > 2*time.Second {
						t.Errorf("a writer has waited for %v, and %d readers", waited, reads.Load()-before)
					}
					writing.Store(true)
					time.Sleep(5 * time.Millisecond)
					writing.Store(false)
					before = reads.Load()
					lockkit.Release(t, l)
					time.Sleep(500 * time.Millisecond)
					if reads.Load() == before {
						t.Error("no reader after the writer")
					}
				}
				end()
				readers.Wait()
			})
		})
	}
}

// Readers of a process that wait when the key comes to it read in that turn, however short the reads are,
// although a writer waits behind them.
func TestReadersThatWaitReadBeforeTheWriterBehindThem(t *testing.T) {
	for name, opts := range map[string]flightlock.Options{"notices": {}, "none": {DisableNotify: true}} {
		for _, read := range []time.Duration{100 * time.Microsecond, 20 * time.Millisecond} {
			t.Run(fmt.Sprint(name, read), func(t *testing.T) {
				testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					a, b := lockkit.New(t, opts, clients...), lockkit.New(t, opts, clients...)
					writer := lockkit.Lock(t, b, "k", 10*time.Second)
					testkit.Delay(time.Millisecond, nodes...)
					const readers = 20
					var reads atomic.Int64
					var all sync.WaitGroup
					for range readers {
						all.Go(func() {
							l := rlock(t, a, "k", 10*time.Second)
							time.Sleep(read)
							testkit.Must(t, l.Err())
							reads.Add(1)
							lockkit.Release(t, l)
						})
					}
					time.Sleep(time.Second)
					all.Go(func() {
						l := lockkit.Lock(t, lockkit.New(t, opts, clients...), "k", 10*time.Second)
						if n := reads.Load(); n != readers {
							t.Errorf("the writer comes after %d of %d reads", n, readers)
						}
						lockkit.Release(t, l)
					})
					time.Sleep(time.Second)
					lockkit.Release(t, writer)
					all.Wait()
				})
			})
		}
	}
}

// The share of a process that is gone ends with its ttl, and not with that of the readers that were there
// with it.
func TestTheShareOfAKilledReaderEndsWithItsTTL(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		killed := rlock(t, a, "k", time.Second) // and never released
		long := rlock(t, b, "k", 30*time.Second)
		lockkit.Release(t, long)
		began := time.Now()
		l := lockkit.Lock(t, b, "k", time.Second)
		if waited := time.Since(began); waited > 1500*time.Millisecond {
			t.Errorf("the writer has waited for %v", waited)
		}
		if killed.Err() == nil {
			t.Error("the reader's lock is not over")
		}
		lockkit.Release(t, l)
	})
}

// Readers that come again and again extend the lease that they share: each has three quarters of its validity
// left.
func TestAReaderThatJoinsHasMostOfItsTTL(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, c, "k", time.Second)
		for range 100 {
			time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
			l := rlock(t, c, "k", time.Second)
			if left := time.Until(l.Until()); left < 730*time.Millisecond { // 0.75 of 0.988
				t.Errorf("a reader has %v left of a second", left)
			}
			if l.Owner() != first.Owner() {
				t.Fatal("the lease is another one")
			}
			lockkit.Release(t, l)
		}
		lockkit.Release(t, first)
	})
}

// readOften has three readers of c come again and again until the test ends: each has a Lock for a moment, or
// waits a little if there is a writer. It counts how many have read.
func readOften(ctx context.Context, t *testing.T, c *flightlock.Client,
	ttl time.Duration) (reads *atomic.Int64) {
	reads = new(atomic.Int64)
	var wg sync.WaitGroup
	ctx, end := context.WithCancel(ctx)
	for i := range 3 {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 30 * time.Millisecond)
			for ctx.Err() == nil {
				waited, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
				if l, err := c.RLock(waited, "k", ttl, nil); err == nil {
					reads.Add(1)
					time.Sleep(100 * time.Millisecond)
					lockkit.Release(t, l)
				}
				cancel()
			}
		})
	}
	t.Cleanup(func() { end(); wg.Wait() })
	return reads
}

// A reader that hangs keeps the key from a writer that waits for a ttl at most, however many readers come
// meanwhile.
func TestReadersThatAreRefusedDoNotExtendTheLease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		hung := rlock(t, a, "k", time.Second)
		reads := readOften(t.Context(), t, a, time.Second)
		time.Sleep(5 * time.Second)
		testkit.Must(t, hung.Err())
		before, began := reads.Load(), time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		l, err := b.SingleFlightLock(ctx, "k", time.Second, nil)
		if waited := time.Since(began); err != nil || waited > 1100*time.Millisecond || before < 100 {
			t.Fatalf("%v: after %d reads, the writer has waited for %v", err, before, waited)
		}
		lockkit.Release(t, l)
		time.Sleep(time.Second)
		if reads.Load() == before {
			t.Error("no reader after the writer")
		}
	})
}

// Readers that wait because a writer does join the lease when that one has given up, as the next refresh of
// the lease finds, whoever makes it.
func TestReadersJoinWhenTheWriterHasGivenUp(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, a, "k", time.Second)
		testkit.Must(t, first.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		writer := make(chan error)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := b.SingleFlightLock(ctx, "k", time.Second, nil)
			writer <- err
		}()
		time.Sleep(500 * time.Millisecond)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		l, err := a.RLock(ctx, "k", time.Second, nil)
		if waited := time.Since(began); err != nil || waited < 500*time.Millisecond || waited > time.Second {
			t.Fatalf("%v: the reader has waited for %v, and the writer for 500ms more", err, waited)
		}
		if err := <-writer; !errors.Is(err, context.DeadlineExceeded) {
			t.Error("the writer:", err)
		}
		lockkit.Release(t, first)
		lockkit.Release(t, l)
	})
}

// So do they when nobody refreshes the lease, whoever has closed it: the process asks. It sends nothing for
// readers that are gone.
func TestReadersJoinALeaseThatNobodyRefreshes(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, a, "k", time.Minute)
		giveUp := func(c *flightlock.Client) {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := c.SingleFlightLock(ctx, "k", time.Second, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Error("the writer:", err)
			}
		}
		for _, c := range []*flightlock.Client{a, b} {
			giveUp(c)
			before := a.Stats().Commands
			time.Sleep(5 * time.Second)
			if sent := a.Stats().Commands - before; sent > 3 {
				t.Errorf("%d commands although no reader waits", sent)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			l, err := a.RLock(ctx, "k", time.Second, nil)
			testkit.Must(t, err)
			if l.Owner() != first.Owner() {
				t.Error("the lease is another one")
			}
			lockkit.Release(t, l)
		}
		giveUp(b)
		_, _ = a.RLock(t.Context(), "k", time.Second, flightlock.NoRetry()) // which finds the lease closed
		time.Sleep(2 * time.Second)
		l, err := a.RLock(t.Context(), "k", time.Second, flightlock.NoRetry())
		testkit.Must(t, err)
		lockkit.Release(t, l)
		lockkit.Release(t, first)
	})
}

// A reader that asks for a longer ttl than the lease has does not wait for its end: the lease has that ttl
// from now on.
func TestALongerTTLIsThatOfTheLease(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, a, "k", time.Second)
		readOften(t.Context(), t, a, time.Second)
		time.Sleep(time.Second)
		began := time.Now()
		l, err := a.RLock(t.Context(), "k", 10*time.Second, flightlock.NoRetry())
		testkit.Must(t, err)
		if left := time.Until(l.Until()); left < 9*time.Second || l.Owner() != first.Owner() {
			t.Errorf("a reader for 10s has %v left, of a lease of %s", left, l.Owner())
		}
		lockkit.Release(t, first)
		go func() {
			time.Sleep(5 * time.Second)
			testkit.Must(t, l.Err())
			lockkit.Release(t, l)
		}()
		lockkit.Release(t, lockkit.Lock(t, b, "k", time.Second))
		if waited := time.Since(began); waited < 5*time.Second || waited > 5500*time.Millisecond {
			t.Errorf("the writer has waited for %v", waited)
		}
	})
}

// A single attempt joins a lease also when that has to be refreshed before, and at once when a reader has
// just done so.
func TestASingleAttemptJoinsAnOldLease(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, c, "k", 10*time.Second)
		for range 3 {
			time.Sleep(2 * time.Second)
			l, err := c.RLock(t.Context(), "k", time.Second, flightlock.NoRetry())
			testkit.Must(t, err)
			lockkit.Release(t, l)
		}
		time.Sleep(2 * time.Second)
		testkit.Must(t, first.Refresh(t.Context()))
		before := c.Stats().Commands
		l, err := c.RLock(t.Context(), "k", time.Second, flightlock.NoRetry())
		testkit.Must(t, err)
		if sent := c.Stats().Commands - before; sent != 0 {
			t.Errorf("%d commands after a refresh", sent)
		}
		lockkit.Release(t, l)
		lockkit.Release(t, first)
	})
}

// Readers that wait because the nodes did not answer a refresh join when they answer again, although nobody
// else comes.
func TestReadersWaitForNodesThatAnswerAgain(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, c, "k", 30*time.Second)
		time.Sleep(2 * time.Second)
		nodes[0].Stall(true)
		go func() {
			time.Sleep(time.Second)
			nodes[0].Stall(false)
		}()
		began := time.Now()
		l := rlock(t, c, "k", time.Second)
		if waited := time.Since(began); waited > 5*time.Second {
			t.Errorf("the reader has waited for %v", waited)
		}
		lockkit.Release(t, l)
		lockkit.Release(t, first)
	})
}

// A want of a reader that is gone hides no writer from the readers' refreshes.
func TestAWriterBehindAReaderThatIsGoneStopsNewReaders(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		opts := flightlock.Options{DisableNotify: true}
		a, b := lockkit.New(t, opts, clients...), lockkit.New(t, opts, clients...)
		readOften(t.Context(), t, a, time.Second)
		time.Sleep(500 * time.Millisecond)
		wants := node.KeysOf("lock:k")[2]
		testkit.Must(t, clients[0].ZAdd(t.Context(), wants, redis.Z{Score: 1, Member: "x#dead-1S"}).Err())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		l, err := b.SingleFlightLock(ctx, "k", time.Second, nil)
		testkit.Must(t, err)
		lockkit.Release(t, l)
	})
}

// The want of a writer that is gone keeps readers out for as long as it lives, ten seconds, and not for as
// long as readers ask: neither those of the process that has the read lease, nor those of another.
func TestReadersJoinWhenTheWriterIsGone(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
		first := rlock(t, a, "k", time.Second)
		testkit.Must(t, first.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		wants := node.KeysOf("lock:k")[2]
		testkit.Must(t, clients[0].ZAdd(t.Context(), wants, redis.Z{Score: 1, Member: "x#dead-1"}).Err())
		testkit.Must(t, clients[0].PExpire(t.Context(), wants, 10*time.Second).Err())
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var readers sync.WaitGroup
		for name, c := range map[string]*flightlock.Client{"here": a, "elsewhere": b} {
			readers.Go(func() {
				l, err := c.RLock(ctx, "k", time.Second, nil)
				if err != nil {
					t.Errorf("a reader %s: %v", name, err)
					return
				}
				lockkit.Release(t, l)
			})
		}
		readers.Wait()
		lockkit.Release(t, first)
	})
}

// A revocation that reaches the readers' inbox is no writer that waits.
func TestARevocationIsNoWriterThatWaits(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := rlock(t, c, "k", time.Second)
		synctest.Wait()
		inbox, text := node.Revocation(node.Readers, "lock:k")
		if n := clients[0].Publish(t.Context(), inbox, text).Val(); n != 1 {
			t.Fatalf("%d clients have received it", n)
		}
		synctest.Wait()
		again, err := c.RLock(t.Context(), "k", time.Second, flightlock.NoRetry())
		testkit.Must(t, err)
		lockkit.Release(t, again)
		lockkit.Release(t, l)
	})
}

// Inspect counts readers that wait.
func TestReadersThatWaitAreCounted(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		w := lockkit.Lock(t, c, "k", time.Second)
		done := make(chan struct{})
		go func() {
			defer close(done)
			l, err := c.RLock(t.Context(), "k", time.Second, nil)
			testkit.Must(t, err)
			lockkit.Release(t, l)
		}()
		synctest.Wait()
		in, err := c.Inspect(t.Context(), "k")
		testkit.Must(t, err)
		if in.WaitingHere != 1 {
			t.Errorf("%d callers wait here, want the reader", in.WaitingHere)
		}
		lockkit.Release(t, w)
		<-done
	})
}

// A lock to write is refused in the ctx of a reader; one to read is nested in either.
func TestUpgradesAreRefused(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		l := rlock(t, c, "k", time.Second)
		ctx := l.Context(t.Context())
		_, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
		lockkit.WantInvalid(t, err, `read lock of "k"`)
		err = c.Do(ctx, "k", time.Second, nil, func(context.Context, *flightlock.Lock) error { return nil })
		lockkit.WantInvalid(t, err, `read lock of "k"`)
		again, err := c.RLock(ctx, "k", time.Second, nil)
		testkit.Must(t, err)
		lockkit.Release(t, l)
		if again.Err() != nil {
			t.Error("the nested read lock is over with the one around it:", again.Err())
		}
		lockkit.Release(t, again)
		w := lockkit.Lock(t, c, "k", time.Second)
		r, err := c.RLock(w.Context(t.Context()), "k", time.Second, nil)
		testkit.Must(t, err)
		if r.Owner() != w.Owner() {
			t.Error("a reader in the ctx of a writer is not nested")
		}
		lockkit.Release(t, r)
		lockkit.Release(t, w)
		_, err = c.RLock(t.Context(), "", time.Second, nil)
		lockkit.WantInvalid(t, err)
		_, err = c.RLock(t.Context(), "k", time.Hour, nil)
		lockkit.WantInvalid(t, err, "ttl")
		_, err = new(flightlock.Client).RLock(t.Context(), "k", time.Second, nil)
		lockkit.WantInvalid(t, err)
	})
}

// Readers of several processes and writers, at random, on real servers: never a writer beside anybody.
func TestReadersAndWritersAtRandom(t *testing.T) {
	_, nodes := lockkit.StartNodes(t, 3)
	var state atomic.Int64 // readers, or -1
	var reads, writes atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(2 * time.Second)
	for range 3 {
		c := lockkit.New(t, flightlock.Options{}, nodes...)
		for i := range 4 {
			wg.Go(func() {
				for time.Now().Before(end) {
					if i == 0 && rand.IntN(2) == 0 {
						l, err := c.SingleFlightLock(t.Context(), "k", 10*time.Second, nil)
						testkit.Must(t, err)
						if !state.CompareAndSwap(0, -1) {
							t.Error("a writer beside", state.Load())
						}
						writes.Add(1)
						time.Sleep(time.Millisecond)
						state.Store(0)
						testkit.Must(t, l.Release(t.Context()))
						continue
					}
					l, err := c.RLock(t.Context(), "k", 10*time.Second, nil)
					testkit.Must(t, err)
					if state.Add(1) <= 0 {
						t.Error("a reader beside a writer")
					}
					reads.Add(1)
					time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
					state.Add(-1)
					testkit.Must(t, l.Release(t.Context()))
				}
			})
		}
	}
	wg.Wait()
	t.Logf("%d reads, %d writes", reads.Load(), writes.Load())
	if reads.Load() == 0 || writes.Load() == 0 {
		t.Error("nobody has read, or nobody has written")
	}
}
