package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/semaphore"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const ttl = 5 * time.Second

func newSemaphore(t *testing.T, c *flightlock.Client, permits int) *semaphore.Semaphore {
	t.Helper()
	s, err := semaphore.New(c, "s", permits)
	testkit.Must(t, err)
	return s
}

func acquire(t *testing.T, s *semaphore.Semaphore) *flightlock.Lock {
	t.Helper()
	l, err := s.Acquire(t.Context(), ttl, nil)
	testkit.Must(t, err)
	return l
}

// fleet is some clients with a semaphore each.
func fleet(t *testing.T, n, permits int, nodes []redis.UniversalClient) (all []*semaphore.Semaphore) {
	for range n {
		c := lockkit.New(t, flightlock.Options{}, nodes...)
		all = append(all, newSemaphore(t, c, permits))
	}
	return all
}

// holders are the permits that somebody has. Its methods are safe for concurrent use.
type holders struct {
	mu  sync.Mutex
	all map[*flightlock.Lock]bool
}

// add reports how many permits are valid, by their own Err, with l.
func (h *holders) add(l *flightlock.Lock) (valid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil {
		h.all = map[*flightlock.Lock]bool{}
	}
	h.all[l] = true
	for l := range h.all {
		if l.Err() == nil {
			valid++
		} else {
			delete(h.all, l)
		}
	}
	return valid
}

// With FLIGHTLOCK_LONG=1 for each number of nodes and permits, for ten minutes each.
//
// However many processes, nodes and permits, and while nodes fail, hang and lose keys of permits that their
// holders then have lost, as many permits as there are can be had, and never more. In the end all of them can
// be had, and nothing is left.
func TestNeverMoreThanThePermits(t *testing.T) {
	for _, nodes := range []int{1, 3, 5} {
		for _, permits := range []int{1, 2, 5, 10} {
			if !redistest.Long() && nodes != 3 && permits != 2 {
				continue
			}
			t.Run(fmt.Sprintf("%d permits on %d nodes", permits, nodes), func(t *testing.T) {
				testkit.Bubble(t, nodes, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					storm(t, nodes, clients, permits)
				})
			})
		}
	}
}

func storm(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient, permits int) {
	all := fleet(t, testkit.Full(8, max(4, permits*3/4+1)), permits, clients) // 3 callers for 2 of them
	// They know the number of permits before the outages: to ask for it may take a second of one.
	for _, s := range all {
		lockkit.Release(t, acquire(t, s))
	}
	testkit.Delay(time.Millisecond, nodes...)
	lasts := testkit.Full(10*time.Minute, testkit.Sized(time.Second,
		300*time.Millisecond)/time.Duration(1+permits/5))
	ctx, stop := context.WithTimeout(t.Context(), lasts)
	defer stop()
	var held holders
	var most, got, dropped atomic.Int64
	var wg sync.WaitGroup
	for i, s := range all {
		for range 1 + i%2 {
			wg.Go(func() {
				for ctx.Err() == nil {
					impatient, cancel := context.WithTimeout(ctx, 1+rand.N(3*time.Second))
					var l *flightlock.Lock
					var err error
					if rand.IntN(4) == 0 {
						l, err = s.TryAcquire(impatient, ttl)
					} else {
						l, err = s.Acquire(impatient, ttl, nil)
					}
					cancel()
					if err != nil {
						time.Sleep(10 * time.Millisecond)
						continue
					}
					got.Add(1)
					n := held.add(l)
					if most.Store(max(most.Load(), int64(n))); n > permits {
						t.Errorf("%d hold a permit of %d", n, permits)
					}
					time.Sleep(rand.N(100 * time.Millisecond))
					if rand.IntN(50) == 0 { // it died
						dropped.Add(1)
						time.Sleep(ttl)
					}
					l.Release(ctx)
				}
			})
		}
	}
	for ctx.Err() == nil { // a minority fails, now and then all
		time.Sleep(rand.N(500 * time.Millisecond))
		n := nodes[rand.IntN(len(nodes))]
		fault := []func(bool, ...*redistest.MemNode){testkit.Down, testkit.Stall}[rand.IntN(2)]
		fault(true, n)
		if rand.IntN(5) == 0 {
			fault(true, nodes...)
		}
		time.Sleep(rand.N(500 * time.Millisecond))
		fault(false, nodes...)
	}
	wg.Wait()
	time.Sleep(2 * ttl)
	for range permits {
		acquire(t, all[0])
	}
	if _, err := all[1].TryAcquire(t.Context(), ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
		t.Errorf("one more: %v", err)
	}
	t.Logf("%d permits were had, %d of them for a ttl; at most %d at a time", got.Load(), dropped.Load(),
		most.Load())
}

// Contenders are served alike, whatever their process, and each within a few rounds of the others.
func TestContendersAreServedAlike(t *testing.T) {
	for _, permits := range testkit.Full([]int{1, 2, 5, 10}, []int{2}) {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			testkit.Delay(500*time.Microsecond, nodes...)
			all := fleet(t, 8, permits, clients)
			ctx, stop := context.WithTimeout(t.Context(), testkit.Full(time.Minute, 500*time.Millisecond))
			defer stop()
			counts := make([]float64, len(all))
			var wg sync.WaitGroup
			var longest atomic.Int64
			for i, s := range all {
				wg.Go(func() {
					for began := time.Now(); ; began = time.Now() {
						l, err := s.Acquire(ctx, ttl, nil)
						if err != nil {
							return
						}
						counts[i]++
						longest.Store(max(longest.Load(), int64(time.Since(began))))
						time.Sleep(5 * time.Millisecond)
						l.Release(ctx)
					}
				})
			}
			wg.Wait()
			var sum, squares float64
			for _, n := range counts {
				sum, squares = sum+n, squares+n*n
			}
			jain := sum * sum / (squares * float64(len(counts)))
			t.Logf("%d permits: %v, Jain %.4f, longest wait %v", permits, counts, jain, time.Duration(longest.Load()))
			if jain < 0.97 {
				t.Errorf("Jain's index is %.3f: %v", jain, counts)
			}
		})
	}
}

// A permit whose holder dies is free within its ttl, and so is the gate if the one dies who waits there.
func TestAPermitOfTheDeadIsBackWithinItsTTL(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		all := fleet(t, 3, 2, clients)
		acquire(t, all[0])
		acquire(t, all[0])
		gate := lockkit.New(t, flightlock.Options{}, clients...)
		lockkit.Lock(t, gate, "s:gate", ttl) // of one that waited, and died
		began := time.Now()
		for _, s := range all[1:] {
			acquire(t, s)
		}
		if took := time.Since(began); took > ttl {
			t.Errorf("it took %v", took)
		}
	})
}

// A permit is not nested in another one; TryAcquire finds each free permit; Acquire ends with its ctx or
// strategy, the wait at the gate included.
func TestAcquireAndTryAcquire(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		all := fleet(t, 2, 5, clients)
		ctx := t.Context()
		for i := range 5 {
			l, err := all[i%2].TryAcquire(ctx, time.Minute)
			testkit.Must(t, err)
			ctx = l.Context(ctx)
		}
		if _, err := all[0].TryAcquire(ctx, ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("TryAcquire of a sixth: %v", err)
		}
		go all[1].Acquire(t.Context(), ttl, flightlock.Within(nil, 3*time.Second)) // at the gate for as long
		time.Sleep(time.Second)
		for _, retry := range []flightlock.RetryStrategy{
			flightlock.Within(nil, 4*time.Second), flightlock.LimitedRetry(100*time.Millisecond, 40),
			flightlock.LimitedRetry(time.Millisecond, 4000),
			flightlock.FailFast(flightlock.Limit(flightlock.LimitedRetry(time.Second, 9), 4)), steady{4 * time.Second},
		} {
			began := time.Now()
			_, err := all[0].Acquire(ctx, ttl, retry)
			if took := time.Since(began); !errors.Is(err, flightlock.ErrNotAcquired) || took < 3500*time.Millisecond ||
				took > 4500*time.Millisecond {
				t.Errorf("%T: %v after %v", retry, err, took)
			}
		}
		for _, d := range []time.Duration{0, time.Second} {
			short, cancel := context.WithTimeout(ctx, d)
			began := time.Now()
			if _, err := all[0].Acquire(short, ttl, nil); !errors.Is(err, context.DeadlineExceeded) ||
				time.Since(began) > 2*d {
				t.Errorf("%v after %v", err, time.Since(began))
			}
			cancel()
		}
		if _, err := all[0].Acquire(ctx, ttl, flightlock.NoRetry()); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("NoRetry: %v", err)
		}
		if v := testkit.Recovered(func() { all[0].Acquire(ctx, ttl, steady{-1}) }); v != "on purpose" {
			t.Errorf("recovered %v", v)
		}
	})
}

// steady is a strategy of a user's: it retries each 10ms for so long.
type steady struct{ d time.Duration }

func (s steady) Next(n int) (time.Duration, bool) {
	if s.d < 0 {
		panic("on purpose")
	}
	return 10 * time.Millisecond, time.Duration(n)*10*time.Millisecond <= s.d
}

// Clients that disagree about the number of permits get ErrInvalid, until those with the other number are
// gone for a minute; one node that lost the number, or cannot be reached, makes no difference.
func TestClientsThatDisagreeAreRefused(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		all := fleet(t, 2, 3, clients)
		other := fleet(t, 1, 4, clients)[0]
		refused := func() {
			t.Helper()
			_, err := other.Acquire(t.Context(), ttl, nil)
			lockkit.WantInvalid(t, err, "4", "3", `"s"`)
			_, err = other.TryAcquire(t.Context(), ttl)
			lockkit.WantInvalid(t, err)
		}
		for range 10 {
			for _, s := range all {
				lockkit.Release(t, acquire(t, s))
			}
			refused()
			time.Sleep(30 * time.Second)
		}
		lockkit.Release(t, acquire(t, all[0]))
		testkit.Lose("flightlock:semaphore:lock:s", nodes[0])
		testkit.Down(true, nodes[0])
		refused()
		lockkit.Release(t, acquire(t, all[1]))
		testkit.Down(false, nodes...)
		time.Sleep(10 * time.Second)
		refused() // it has one vote now
		time.Sleep(65 * time.Second)
		lockkit.Release(t, acquire(t, other))
		_, err := all[0].Acquire(t.Context(), ttl, nil)
		lockkit.WantInvalid(t, err, "3", "4")
	})
}

// A permit that is held keeps the number of permits, though nobody acquires; and no longer than it is held.
func TestAPermitKeepsTheNumber(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		l := acquire(t, fleet(t, 1, 3, clients)[0])
		testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
		other := fleet(t, 1, 4, clients)[0]
		for range 10 {
			time.Sleep(59 * time.Second)
			_, err := other.TryAcquire(t.Context(), ttl)
			lockkit.WantInvalid(t, err, "4", "3")
		}
		lockkit.Release(t, l)
		time.Sleep(2 * time.Minute)
		acquire(t, other)
	})
}

// It does so from when it was confirmed last, which may be before the permit was taken: one time in which the
// nodes do not answer is no harm.
func TestAPermitThatIsTakenLateKeepsTheNumber(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		same, other := fleet(t, 2, 3, clients), fleet(t, 1, 4, clients)[0]
		all := []*flightlock.Lock{acquire(t, same[1]), acquire(t, same[1]), acquire(t, same[1])}
		// which confirms it
		if _, err := same[0].TryAcquire(t.Context(), ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Fatal(err)
		}
		time.Sleep(19500 * time.Millisecond)
		for _, l := range all {
			_ = l.Release(t.Context()) // it may be over
		}
		l, err := same[0].Acquire(t.Context(), time.Minute, nil)
		testkit.Must(t, err)
		time.Sleep(19500 * time.Millisecond)
		testkit.Stall(true, nodes...)
		time.Sleep(20 * time.Second)
		testkit.Stall(false, nodes...)
		time.Sleep(1300 * time.Millisecond)
		_, err = other.TryAcquire(t.Context(), ttl)
		lockkit.WantInvalid(t, err, "4", "3")
		lockkit.Release(t, l)
	})
}

// A client that could not ask for the number when it came asks again before it gives a permit away.
func TestNoPermitBeforeTheNumberIsConfirmed(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		s, other := fleet(t, 1, 3, clients)[0], fleet(t, 1, 4, clients)[0]
		lockkit.Release(t, acquire(t, s))
		testkit.Down(true, nodes...)
		go func() {
			time.Sleep(10 * time.Second)
			testkit.Down(false, nodes...)
		}()
		_, err := other.Acquire(t.Context(), time.Minute, nil)
		lockkit.WantInvalid(t, err, "4", "3")
		for _, n := range nodes[:2] { // a list, so that the number cannot be read
			testkit.Lose("flightlock:semaphore:lock:s", n)
			n.Mini.Lpush("flightlock:semaphore:lock:s", "x")
		}
		time.Sleep(20 * time.Second) // s asks again
		if _, err := s.TryAcquire(t.Context(), time.Minute); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("no majority knows the number: %v", err)
		}
		testkit.Lose("flightlock:semaphore:lock:s", nodes...)
		for range 3 { // what it had is back
			_, err := s.TryAcquire(t.Context(), ttl)
			testkit.Must(t, err)
		}
	})
}

// What cannot be is refused before anything is sent. Close ends who waits. Outages are survived.
func TestBadInputOutagesAndClose(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		for _, permits := range []int{0, -1, 1001} {
			_, err := semaphore.New(c, "s", permits)
			lockkit.WantInvalid(t, err, "permits", fmt.Sprint(permits))
		}
		_, err := semaphore.New(c, "", 1)
		lockkit.WantInvalid(t, err, "key")
		_, err = semaphore.New(new(flightlock.Client), "s", 1)
		lockkit.WantInvalid(t, err, "zero")
		s := newSemaphore(t, c, 2)
		_, err = s.Acquire(t.Context(), time.Millisecond, nil)
		lockkit.WantInvalid(t, err, "ttl")
		testkit.Down(true, nodes...)
		if _, err := s.TryAcquire(t.Context(), ttl); !errors.Is(err, flightlock.ErrUnavailable) {
			t.Errorf("without nodes: %v", err)
		}
		if _, err := s.Acquire(t.Context(), ttl, flightlock.FailFast(nil)); !errors.Is(err,
			flightlock.ErrUnavailable) {
			t.Errorf("without nodes: %v", err)
		}
		go func() {
			time.Sleep(10 * time.Second)
			testkit.Down(false, nodes...)
		}()
		acquire(t, s)
		_, err = s.TryAcquire(t.Context(), ttl)
		testkit.Must(t, err)
		ended := make(chan error)
		go func() {
			_, err := s.Acquire(t.Context(), ttl, nil)
			ended <- err
		}()
		time.Sleep(time.Second)
		lockkit.Close(t, c)
		if err := <-ended; !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if _, err := s.Acquire(t.Context(), ttl, nil); !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// A detached permit is in use until it expires, and an attached one until it is released, whichever client
// has it.
func TestADetachedPermitCounts(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		all := fleet(t, 2, 2, clients)
		c := lockkit.New(t, flightlock.Options{}, clients...)
		full := func() {
			t.Helper()
			for _, s := range all {
				if _, err := s.TryAcquire(t.Context(), ttl); !errors.Is(err, flightlock.ErrNotAcquired) {
					t.Errorf("a third permit: %v", err)
				}
			}
		}
		l, err := all[0].Acquire(t.Context(), time.Minute, nil)
		testkit.Must(t, err)
		_, err = all[1].Acquire(t.Context(), time.Minute, nil)
		testkit.Must(t, err)
		full()
		d, err := l.Detach()
		testkit.Must(t, err)
		time.Sleep(time.Second)
		full()
		l, err = c.Attach(t.Context(), d)
		testkit.Must(t, err)
		time.Sleep(time.Second)
		full()
		lockkit.Release(t, l)
		l = acquire(t, all[0])
		_, err = l.Detach()
		testkit.Must(t, err)
		full()
		time.Sleep(ttl)
		acquire(t, all[1])
		full()
	})
}

// A panic of the user's code is the caller's, and its Goexit an error, also while it waits for all slots.
// Neither leaves a permit in use.
func TestAPanicLeavesNoPermit(t *testing.T) {
	for _, exits := range []bool{false, true} {
		testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			var fails atomic.Bool
			c := lockkit.New(t, flightlock.Options{LingerFor: func(key string) time.Duration {
				switch {
				case !fails.Load() || key != "s:1":
				case exits:
					runtime.Goexit()
				default:
					panic("on purpose")
				}
				return 0
			}}, clients...)
			s, other := newSemaphore(t, c, 3), fleet(t, 1, 3, clients)[0]
			for range 10 {
				held := []*flightlock.Lock{acquire(t, other), acquire(t, other), acquire(t, other)}
				fails.Store(true)
				done := make(chan struct{})
				go func() {
					defer close(done)
					var err error
					v := testkit.Recovered(func() { _, err = s.Acquire(t.Context(), time.Minute, nil) })
					if exits && (err == nil || v != nil) || !exits && v != "on purpose" {
						t.Errorf("recovered %v, %v", v, err)
					}
				}()
				<-done
				fails.Store(false)
				for i, l := range held {
					lockkit.Release(t, l)
					held[i] = acquire(t, s)
				}
				for _, l := range held {
					lockkit.Release(t, l)
				}
			}
		})
	}
}
