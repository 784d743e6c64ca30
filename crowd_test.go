package flightlock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// lockAll has c take that many keys, from a few goroutines.
func lockAll(t *testing.T, c *flightlock.Client, keys int) []*flightlock.Lock {
	t.Helper()
	locks := make([]*flightlock.Lock, keys)
	fromMany(16, func(g int) {
		for i := g; i < keys; i += 16 {
			l, err := c.SingleFlightLock(t.Context(), fmt.Sprint("k", i), time.Minute, nil)
			if err != nil {
				t.Error(err)
				return
			}
			locks[i] = l
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return locks
}

func fromMany(n int, f func(g int)) {
	var wg sync.WaitGroup
	for g := range n {
		wg.Go(func() { f(g) })
	}
	wg.Wait()
}

// subscriptions is how many channels are subscribed to.
func subscriptions(t *testing.T, s *redistest.Server) int {
	t.Helper()
	return len(s.Do(t, "PUBSUB", "CHANNELS").([]any))
}

// eventuallyUnsubscribed waits until nothing is left of the waiters: a subscription lingers.
func eventuallyUnsubscribed(t *testing.T, s *redistest.Server) {
	t.Helper()
	redistest.Eventually(t, 40*time.Second, "no channel is subscribed to and nobody is known to wait", func() bool {
		return subscriptions(t, s) == 0 && !anyWants(t, s)
	})
}

func anyWants(t *testing.T, s *redistest.Server) bool {
	t.Helper()
	for _, key := range s.Keys(t) {
		if strings.Contains(key, ":wants:") {
			return true
		}
	}
	return false
}

// One client waits for ten thousand keys at once, by notices: it gets each of them, and
// nothing of that is left.
func TestTenThousandKeysAreWaitedFor(t *testing.T) {
	s := redistest.StartServer(t)
	patient := flightlock.Options{NodeTimeout: 10 * time.Second}
	holder, c := newClient(t, patient, s.Client(t)), newClient(t, patient, s.Client(t))
	const keys = 10_000
	held := lockAll(t, holder, keys)
	var wg sync.WaitGroup
	for i, before := range held {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			l, err := c.SingleFlightLock(ctx, fmt.Sprint("k", i), 20*time.Second, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if l.Fence() <= before.Fence() {
				t.Errorf("fence %d after %d", l.Fence(), before.Fence())
			}
			if err := l.Release(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	redistest.Eventually(t, time.Minute, "all wait and are subscribed", func() bool {
		return c.Stats().Waiters == keys && subscriptions(t, s) == keys
	})
	fromMany(16, func(g int) {
		for i := g; i < keys; i += 16 {
			if err := held[i].Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	if st := c.Stats(); st.Waiters != 0 || st.Held != 0 || st.Lost != 0 || st.Acquired != keys {
		t.Errorf("%+v", st)
	}
	eventuallyUnsubscribed(t, s)
	if left := s.Do(t, "EXISTS", "lock:k0", "lock:k9999"); left != int64(0) {
		t.Errorf("%v of two keys are left", left)
	}
}

// Waiters that come every millisecond and give up soon let nothing grow: no memory, no
// goroutines, no subscriptions. FLIGHTLOCK_LONG=1 has them come for 30 seconds.
func TestWaitersThatComeAndGo(t *testing.T) {
	length := 3 * time.Second
	if os.Getenv("FLIGHTLOCK_LONG") == "1" {
		length = 30 * time.Second
	}
	s := redistest.StartServer(t)
	patient := flightlock.Options{NodeTimeout: 10 * time.Second}
	holder, c := newClient(t, patient, s.Client(t)), newClient(t, patient, s.Client(t))
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
	t.Logf("%d waiters came in %v; in use after a third of that: %+v, at its end: %+v", came, length, before, after)
	if after.channels > keys || after.clients > before.clients {
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
	eventuallyUnsubscribed(t, s)
	for _, l := range held {
		mustRelease(t, l)
	}
}

// usage is what waiters could let grow.
type usage struct {
	channels, clients, goroutines int
	heap                          int64
}

func use(t *testing.T, s *redistest.Server) usage {
	t.Helper()
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	clients := strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "normal").(string), "\n") + strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "pubsub").(string), "\n")
	return usage{subscriptions(t, s), clients, runtime.NumGoroutine(), int64(m.HeapAlloc)}
}
