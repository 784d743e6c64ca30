package scale

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// A key that nobody wants any more leaves nothing behind.
func TestKeysLeaveNothingBehind(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprintf("nodes=%d", nodes), func(t *testing.T) {
			_, addrs := sharedServers(t, nodes)
			c := clientOn(t, lockkit.Patient, false, addrs...)
			batch := func(from, to int) {
				var wg sync.WaitGroup
				for g := range 16 {
					wg.Go(func() {
						for i := from + g; i < to; i += 16 {
							l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("key-", i), 20*time.Second, nil)
							if err != nil {
								t.Error(err)
								return
							}
							if i%10 == 0 {
								l.Context(t.Context())
								_ = l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{})
							}
							if err := l.Release(t.Context()); err != nil {
								t.Error(err)
							}
						}
					})
				}
				wg.Wait()
			}
			keys := 2000 + sized(18_000)/nodes
			batch(0, 2000)
			before := redistest.Heap()
			batch(2000, keys)
			redistest.Eventually(t, 40*time.Second, "what has ended is gone, and the heap as small as before",
				func() bool {
					return redistest.Heap()-before <= 384<<10
				})
			redistest.Eventually(t, 40*time.Second, "all nodes have acknowledged all releases", func() bool {
				s := c.Stats()
				return s.Held == 0 && s.Waiters == 0 && s.Debts == 0
			})
			if err := c.Close(t.Context()); err != nil { // waits for flights, if there are any
				t.Error(err)
			}
		})
	}
}

// A goroutine that waits costs no more than 1 KiB beyond its stack.
func TestMemoryOfAWaiter(t *testing.T) {
	_, addrs := sharedServers(t, 1)
	c := clientOn(t, lockkit.Patient, false, addrs...)
	holder := lockkit.Lock(t, c, "k", time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	const waiters = 10_000
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for range waiters { // the goroutines themselves, which the runtime keeps for the next
		wg.Go(func() { <-gate })
	}
	close(gate)
	wg.Wait()
	before := redistest.Heap()
	for range waiters {
		wg.Go(func() { _, _ = c.SingleFlightLock(ctx, "k", time.Minute, nil) })
	}
	redistest.Eventually(t, time.Minute, "all wait", func() bool { return c.Stats().Waiters == waiters })
	each := (redistest.Heap() - before) / waiters
	t.Logf("%d bytes of heap per waiter", each)
	if each > 1<<10 {
		t.Errorf("%d bytes of heap per waiter", each)
	}
	cancel()
	wg.Wait()
	lockkit.Release(t, holder)
}

// The cost of a Client from Open that has used all its connections, nearly all of it their buffers:
// and it has no more connections than docs/operations.md says.
func TestMemoryOfAClient(t *testing.T) {
	var servers []*redistest.Server
	var urls []string
	for range 3 {
		s := redistest.StartServer(t)
		servers, urls = append(servers, s), append(urls, "redis://"+s.Addr())
	}
	load := func() *flightlock.Client {
		c, err := flightlock.Open(flightlock.Options{NodeTimeout: lockkit.Patience}, urls...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		var wg sync.WaitGroup
		for g := range 100 {
			wg.Go(func() {
				for range 3 {
					l, err := c.SingleFlightLock(t.Context(), "k"+strconv.Itoa(g), time.Minute, nil)
					if err == nil {
						err = l.Release(t.Context())
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		return c
	}
	all := []*flightlock.Client{load()} // and all that is made once
	before := redistest.Heap()
	const clients = 6
	for range clients {
		all = append(all, load())
	}
	each := (redistest.Heap() - before) / clients
	t.Logf("%d KiB of heap per Client", each>>10)
	if each > 1<<20 {
		t.Errorf("%d KiB of heap per Client", each>>10)
	}
	for _, s := range servers { // which notice late that one was closed
		redistest.Eventually(t, 40*time.Second, "each Client has two connections at most", func() bool {
			return strings.Count(s.Do(t, "CLIENT", "LIST").(string), "name=flightlock") <= 2*len(all)
		})
	}
	runtime.KeepAlive(all)
}

// The cost of a lock that is held and refreshes itself.
func TestMemoryOfAHeldLock(t *testing.T) {
	rdb := redistest.StartServer(t).Client(t)
	c, err := flightlock.New(flightlock.Options{NodeTimeout: lockkit.Patience}, rdb)
	if err != nil {
		t.Fatal(err)
	}
	const locks = 25_000 // in every run: fewer do not outweigh what is made once
	all := make([]*flightlock.Lock, locks)
	take := func(i int) {
		l, err := c.SingleFlightLock(t.Context(), "k"+strconv.Itoa(i), time.Minute, nil)
		if err == nil {
			err = l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{})
		}
		if err != nil {
			t.Error(err)
		}
		all[i] = l
	}
	take(0) // and all that is made once
	before := redistest.Heap()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			for i := next.Add(1); i < int64(locks); i = next.Add(1) {
				take(int(i))
			}
		})
	}
	wg.Wait()
	each := (redistest.Heap() - before) / int64(locks)
	t.Logf("%d bytes of heap per lock", each)
	if each > 1344 {
		t.Errorf("%d bytes of heap per lock", each)
	}
	runtime.KeepAlive(all)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_ = c.Close(over) // which releases them, as fast as can be
}

// The cost of a lease that is retained: memory, and no goroutine. Close releases all of them, in
// batches. FLIGHTLOCK_LONG=1 has 100,000 of them.
func TestMemoryOfARetainedLease(t *testing.T) {
	const leases = 10_000 // as many as a Client retains
	s := redistest.StartServer(t)
	c, err := flightlock.New(flightlock.Options{
		NodeTimeout: lockkit.Patience,
		Linger:      time.Minute,
	}, s.Client(t))
	if err != nil {
		t.Fatal(err)
	}
	use := func(i int) {
		l, err := c.SingleFlightLock(t.Context(), "k"+strconv.Itoa(i), time.Minute, nil)
		if err == nil {
			err = l.Release(t.Context())
		}
		if err != nil {
			t.Error(err)
		}
	}
	redistest.Eventually(t, 10*time.Second, "one is retained", func() bool {
		use(0)
		return c.Stats().Retained == 1
	})
	before, goroutines := redistest.Heap(), runtime.NumGoroutine()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			for i := next.Add(1); i < leases; i = next.Add(1) {
				use(int(i))
			}
		})
	}
	wg.Wait()
	if n := c.Stats().Retained; n != leases {
		t.Errorf("%d are retained, want %d", n, leases)
	}
	each := (redistest.Heap() - before) / leases
	t.Logf("%d bytes of heap per lease", each)
	if each > 1<<10 {
		t.Errorf("%d bytes of heap per lease", each)
	}
	if n := runtime.NumGoroutine() - goroutines; n > 10 {
		t.Errorf("%d goroutines more", n)
	}
	began := time.Now()
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	t.Logf("%d leases were returned in %v", leases, time.Since(began))
	redistest.EventuallyNoLocks(t, 40*time.Second, s)
}

// Waiters that arrive every millisecond and give up soon let nothing grow: no memory, no
// goroutines, no subscriptions. FLIGHTLOCK_LONG=1 runs for 30 seconds.
func TestWaitersThatComeAndGo(t *testing.T) {
	length := 3 * time.Second
	if redistest.Long() {
		length = 30 * time.Second
	}
	s := redistest.StartServer(t)
	holder, c := lockkit.New(t, lockkit.Patient, s.Client(t)), lockkit.New(t, lockkit.Patient, s.Client(t))
	const keys = 200
	held := lockAll(t, holder, keys)

	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var wg sync.WaitGroup
	come := func() {
		limit, key := time.Duration(1+rand.IntN(50))*time.Millisecond, fmt.Sprint("k", rand.IntN(keys))
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			if l, err := c.SingleFlightLock(ctx, key, time.Minute, nil); err == nil {
				t.Errorf("got %s, which is held", l.Key())
			}
		})
	}
	var before, after usage
	came := 0
	every := time.NewTicker(time.Millisecond)
	defer every.Stop()
	for began := time.Now(); ctx.Err() == nil; came++ {
		come()
		if before == (usage{}) && time.Since(began) > length/3 {
			before = use(t, s)
		}
		<-every.C
	}
	after = use(t, s)
	wg.Wait()
	t.Logf("%d waiters came in %v; in use after a third of that: %+v, at its end: %+v", came, length, before,
		after)
	if after.channels > 1 || after.clients > before.clients {
		t.Errorf("%+v in the end, %+v before", after, before)
	}
	if grown := after.goroutines - before.goroutines; grown > 200 { // up to 50 of them wait
		t.Errorf("%d goroutines more", grown)
	}
	if grown := after.heap - before.heap; grown > 2<<20 {
		t.Errorf("%d bytes more", grown)
	}
	if st := c.Stats(); st.Waiters != 0 || st.Debts != 0 {
		t.Errorf("%+v", st)
	}
	for _, l := range held {
		lockkit.Release(t, l)
	}
	t.Parallel() // from here on nothing is measured
	eventuallyUnsubscribed(t, s)
}

// usage is what waiters could let grow.
type usage struct {
	channels, clients, goroutines int
	heap                          int64
}

func use(t *testing.T, s *redistest.Server) usage {
	t.Helper()
	clients := strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "normal").(string), "\n") +
		strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "pubsub").(string), "\n")
	return usage{subscriptions(t, s), clients, runtime.NumGoroutine(), redistest.Heap()}
}
