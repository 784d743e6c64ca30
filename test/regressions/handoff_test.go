package regressions

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// rueidislock's waiters hang for good after an outage of a second: they only listen.
func TestWaitersOutliveAnOutage(t *testing.T) {
	for name, outage := range map[string]func(n *redistest.MemNode, on bool){
		"down": (*redistest.MemNode).Down, "stalled": (*redistest.MemNode).Stall,
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				a, b := lockkit.New(t, flightlock.Options{}, clients...), lockkit.New(t, flightlock.Options{}, clients...)
				c := lockkit.New(t, flightlock.Options{}, clients...)
				lockkit.Lock(t, a, "k", 2*time.Second) // and its holder dies
				start := time.Now()
				var wg sync.WaitGroup
				for range 20 {
					wg.Go(func() { lockkit.Release(t, lockkit.Lock(t, b, "k", 10*time.Second)) })
					wg.Go(func() { lockkit.Release(t, lockkit.Lock(t, c, "k", 10*time.Second)) })
				}
				time.Sleep(500 * time.Millisecond)
				for _, n := range nodes {
					outage(n, true)
				}
				time.Sleep(time.Second)
				for _, n := range nodes {
					outage(n, false)
				}
				wg.Wait()
				if took := time.Since(start); took > 10*time.Second {
					t.Errorf("the waiters took %v", took)
				}
			})
		})
	}
}

// rueidislock: a waiter that is woken and cancels in that instant loses the wake-up for the next.
// gotomicro: up to 5 goroutines of one process contend at once after Forget.
func TestACancelInTheInstantOfHandoffLosesNothing(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		both := map[bool]int{}
		for i := range 500 {
			first := lockkit.Lock(t, c, "k", time.Minute)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			var holders atomic.Int64
			hold := func(l *flightlock.Lock) {
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders", n)
				}
				holders.Add(-1)
				lockkit.Release(t, l)
			}
			var got bool
			wg.Go(func() {
				l, err := c.SingleFlightLock(ctx, "k", time.Minute, nil)
				if got = err == nil; got {
					hold(l)
				} else if !errors.Is(err, context.Canceled) || !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Errorf("the one that gave up got %v", err)
				}
			})
			synctest.Wait()
			for range 2 {
				wg.Go(func() { hold(lockkit.Lock(t, c, "k", time.Minute)) })
			}
			synctest.Wait()
			began := time.Now()
			switch i % 6 { // the waiter finds one when it wakes, or both, in either order
			case 0:
				lockkit.Release(t, first)
				synctest.Wait()
				cancel()
			case 1:
				cancel()
				synctest.Wait()
				lockkit.Release(t, first)
			case 2:
				lockkit.Release(t, first)
				cancel()
			case 3:
				cancel()
				lockkit.Release(t, first)
			default:
				wg.Go(cancel)
				wg.Go(func() { lockkit.Release(t, first) })
			}
			wg.Wait()
			if took := time.Since(began); took != 0 {
				t.Fatalf("the others waited for %v", took)
			}
			both[got]++
		}
		t.Logf("got the lock, or gave up: %v", both)
		if both[true] == 0 || both[false] == 0 {
			t.Error("one of the two did not happen")
		}
		synctest.Wait()
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
		if s := c.Stats(); s.Held != 0 || s.Waiters != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// gotomicro's Forget, after its flight has ended, removes the next flight: up to 5 goroutines of
// one process contend at once. Here it is one, however callers arrive and leave.
func TestOneContenderPerProcess(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		if err := nodes[0].Mini.Set("lock:k", "somebody else"); err != nil {
			t.Fatal(err)
		}
		c := lockkit.New(t, flightlock.Options{DisableNotify: true}, clients...)
		every := flightlock.LimitedRetry(10*time.Millisecond, 1000)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				for range 20 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(20+i)*time.Millisecond)
					if _, err := c.SingleFlightLock(ctx, "k", time.Second, every); !errors.Is(err,
						context.DeadlineExceeded) {
						t.Error(err)
					}
					cancel()
				}
			})
		}
		start := time.Now()
		wg.Wait()
		// A new front waiter may make an attempt at once, so that is 2,000 attempts at the very most. One
		// contender at a time makes one in 10ms, and when the front changes.
		polls := int(time.Since(start) / (10 * time.Millisecond))
		if n := int(c.Stats().Attempts); n < polls/2 || n > 3*polls {
			t.Errorf("%d attempts, and there was time for %d polls", n, polls)
		}
	})
}

// x/sync singleflight fails everyone when the leader's ctx ends.
func TestTheFirstCallersContextIsItsOwn(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		testkit.Delay(10*time.Millisecond, nodes...)
		before := c.Stats().Attempts
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := c.SingleFlightLock(ctx, "k", time.Minute, nil); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the first got %v", err)
			}
		})
		synctest.Wait()
		for range 10 {
			wg.Go(func() { lockkit.Release(t, lockkit.Lock(t, c, "k", time.Minute)) })
		}
		wg.Wait()
		if n := c.Stats().Attempts - before; n != 1 {
			t.Errorf("%d attempts: the one under way was lost", n)
		}
	})
}

// Callers of a hot key whose ctx end at random instants, of attempts and handoffs alike,
// get the lock or ctx's error; nobody waits for what another gave up, and no key is left.
func TestCallersThatComeAndGo(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		cs := []*flightlock.Client{
			lockkit.New(t, flightlock.Options{}, clients...),
			lockkit.New(t, flightlock.Options{}, clients...),
		}
		for i, n := range nodes {
			n.SetDelay(time.Duration(i+1) * 100 * time.Microsecond)
		}
		var wg sync.WaitGroup
		var holders, got, gaveUp atomic.Int64
		for i := range 60 {
			wg.Go(func() {
				for range 30 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(20_000))*time.Microsecond)
					l, err := cs[i%2].SingleFlightLock(ctx, "k", 10*time.Second,
						flightlock.ExponentialBackoff(time.Millisecond, 2*time.Millisecond))
					switch {
					case err == nil:
						if n := holders.Add(1); n != 1 {
							t.Errorf("%d holders", n)
						}
						time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
						holders.Add(-1)
						got.Add(1)
						lockkit.Release(t, l)
					case errors.Is(err, context.DeadlineExceeded):
						gaveUp.Add(1)
					default:
						t.Error(err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		t.Logf("%d got the lock, %d gave up", got.Load(), gaveUp.Load())
		if got.Load() == 0 || gaveUp.Load() == 0 {
			t.Error("one of the two did not happen")
		}
		time.Sleep(time.Second) // a tenth of the ttl
		if keys := lockKeys(nodes); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
		for _, c := range cs {
			if s := c.Stats(); s.Held != 0 || s.Waiters != 0 || s.Debts != 0 {
				t.Errorf("%+v", s)
			}
		}
	})
}
