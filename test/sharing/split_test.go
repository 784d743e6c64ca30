package sharing

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/jitter"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// If several clients TryLock a free key at the same moment, as the processes of a service do for a
// job once per tick, one of them gets the lock, even if the votes are split at first.
func TestOfTryLocksAtOnceOneSucceeds(t *testing.T) {
	t.Parallel()
	const clients = 4
	rounds := testkit.Sized(400, 100)
	servers, _ := lockkit.StartNodes(t, 3)
	var all []*flightlock.Client
	for range clients {
		var nodes []redis.UniversalClient
		for _, s := range servers {
			nodes = append(nodes, s.Client(t))
		}
		c := lockkit.New(t, lockkit.Patient, nodes...)
		if err := c.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	var nobody []int
	for round := range rounds {
		var wins atomic.Int64
		var tried, done sync.WaitGroup
		start := make(chan struct{})
		tried.Add(clients)
		for _, c := range all {
			done.Go(func() {
				<-start
				l, err := c.TryLock(t.Context(), fmt.Sprint("tick", round), 10*time.Second)
				tried.Done()
				if err == nil {
					wins.Add(1)
					tried.Wait() // hold it until all have tried
					lockkit.Release(t, l)
				} else if !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Error(err)
				}
			})
		}
		close(start)
		done.Wait()
		switch n := wins.Load(); {
		case n == 0:
			nobody = append(nobody, round)
		case n > 1:
			t.Errorf("round %d: %d have the lock", round, n)
		}
	}
	if len(nobody) != 0 {
		t.Errorf("in %d of %d rounds nobody got the lock", len(nobody), rounds)
	}
}

// ways to make one attempt. work runs under the lock.
var oneAttempt = map[string]func(ctx context.Context, c *flightlock.Client, key string, work func()) error{
	"TryLock": func(ctx context.Context, c *flightlock.Client, key string, work func()) error {
		return underLock(ctx, work)(c.TryLock(ctx, key, time.Minute))
	},
	"SingleFlightLock": func(ctx context.Context, c *flightlock.Client, key string, work func()) error {
		return underLock(ctx, work)(c.SingleFlightLock(ctx, key, time.Minute, flightlock.NoRetry()))
	},
	"the last of a limit": func(ctx context.Context, c *flightlock.Client, key string, work func()) error {
		return underLock(ctx, work)(c.SingleFlightLock(ctx, key, time.Minute, flightlock.Limit(nil, 0)))
	},
	"Do": func(ctx context.Context, c *flightlock.Client, key string, work func()) error {
		return c.Do(ctx, key, time.Minute, flightlock.NoRetry(), func(context.Context, *flightlock.Lock) error {
			work()
			return nil
		})
	},
}

// underLock works and releases, if there is a lock.
func underLock(ctx context.Context, work func()) func(*flightlock.Lock, error) error {
	return func(l *flightlock.Lock, err error) error {
		if err != nil {
			return err
		}
		work()
		return l.Release(ctx)
	}
}

// tick has all clients make one attempt each, up to spread apart, and returns how many had the key.
func tick(t *testing.T, clients []*flightlock.Client, key string, spread, work time.Duration,
	attempt func(context.Context, *flightlock.Client, string, func()) error) int {
	t.Helper()
	var ran atomic.Int64
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			time.Sleep(jitter.N(spread + 1))
			err := attempt(t.Context(), c, key, func() {
				ran.Add(1)
				time.Sleep(work)
			})
			if err != nil && !errors.Is(err, flightlock.ErrNotAcquired) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	return int(ran.Load())
}

// Processes that try at the same moment, each of them closest to another node, split the votes. One
// of them gets the lock nevertheless.
func TestOneOfThoseWhoSplitTheVotesHasTheKey(t *testing.T) {
	t.Parallel()
	for name, attempt := range oneAttempt {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
			var clients []*flightlock.Client
			for i := range nodes {
				var near []redis.UniversalClient
				for j, n := range nodes {
					var way time.Duration
					if i != j {
						way = 5 * time.Millisecond
					}
					near = append(near, n.Client(t, redistest.Late(way)))
				}
				c := lockkit.New(t, flightlock.Options{}, near...)
				testkit.Must(t, c.Ready(t.Context()))
				lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("warm", i), time.Second))
				clients = append(clients, c)
			}
			for i := range testkit.Sized(5, 2) {
				if n := tick(t, clients, fmt.Sprint("job", i), 0, time.Second, attempt); n != 1 {
					t.Errorf("%s: %d have the key", name, n)
				}
			}
		})
	}
}

// Of processes that try to start a job at the same moment, one does, and no other: those that split the
// votes know who has the key after some round trips, long before a job of a few milliseconds is done.
func TestOneProcessStartsAShortJob(t *testing.T) {
	t.Parallel()
	const trip, job = 200 * time.Microsecond, 5 * time.Millisecond
	for _, nodes := range []int{3, 5} {
		testkit.Bubble(t, nodes, func(t *testing.T, nodes []*redistest.MemNode, _ []redis.UniversalClient) {
			var clients []*flightlock.Client
			for i := range 16 {
				var all []redis.UniversalClient
				for _, n := range nodes {
					all = append(all, n.Client(t))
				}
				c := lockkit.New(t, flightlock.Options{}, all...)
				testkit.Must(t, c.Ready(t.Context()))
				lockkit.Release(t, lockkit.Lock(t, c, fmt.Sprint("warm", i), time.Second))
				clients = append(clients, c)
			}
			for _, n := range nodes {
				n.SetDelays(func() time.Duration { return trip*2/5 + jitter.N(trip/5) })
			}
			none := 0
			for name, attempt := range oneAttempt {
				for _, n := range []int{3, 16} {
					for i := range testkit.Sized(4, 1) {
						key := fmt.Sprint(name, n, "-", i)
						switch ran := tick(t, clients[:n], key, trip/10, job, attempt); {
						case ran == 0:
							none++
							t.Logf("%d nodes, %s: none of %d processes has started the job", len(nodes), name, n)
						case ran > 1:
							t.Errorf("%d nodes, %s: %d of %d processes have started the job", len(nodes), name, ran, n)
						}
					}
				}
			}
			if none > 1 { // eight attempts are no certainty: one tick of some ten thousand has nobody
				t.Errorf("%d nodes: in %d ticks nobody has started the job", len(nodes), none)
			}
		})
	}
}

// If ctx ends during a pause, the error matches ctx's, and the outcome of the last attempt. If votes stay
// split, because those who have them are gone, a call fails after some round trips.
func TestTryLockEndsWithItsCtxAfterASplit(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		const way = time.Millisecond
		c := lockkit.New(t, flightlock.Options{}, clients...)
		testkit.Must(t, c.Ready(t.Context()))
		for i, n := range nodes {
			testkit.Must(t, n.Mini.Set("lock:job", fmt.Sprint("other", i)))
			n.Mini.SetTTL("lock:job", time.Minute)
			n.SetDelay(way)
		}
		lockkit.Release(t, lockkit.Lock(t, c, "warm", time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), 2*way+way/2)
		defer cancel()
		_, err := c.TryLock(ctx, "job", time.Second)
		if !errors.Is(err, flightlock.ErrNotAcquired) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		began := time.Now()
		if _, err := c.TryLock(t.Context(), "job", time.Second); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Error(err)
		}
		if trips := time.Since(began) / (2 * way); trips < 1+8*3/2 || trips > 1+8*2 {
			t.Errorf("it took %d round trips", trips)
		}
	})
}
