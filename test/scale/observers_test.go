package scale

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/prom"
	"github.com/prometheus/client_golang/prometheus"
)

// The tests of this file give a Client slow, blocking or panicking code where it calls its user's
// code: nothing waits for that code except its own purpose.

// patience is how long a test waits for what waits for nobody: far less than a slow sink takes.
const patience = time.Minute

// sink is the user's code of that kind.
type sink struct {
	kind string
	end  chan struct{} // closed when it is as good as others
}

var sinks = []string{"slow", "blocks", "panics"}

// newSink makes one. The function that it returns repairs it, before the Client, which waits for
// its log, is closed.
func newSink(kind string) (s sink, mend func()) {
	s = sink{kind, make(chan struct{})}
	return s, sync.OnceFunc(func() { close(s.end) })
}

func (s sink) use() {
	select {
	case <-s.end:
		return
	default:
	}
	switch s.kind {
	case "slow":
		select {
		case <-time.After(2 * patience):
		case <-s.end:
		}
	case "blocks":
		<-s.end
	case "panics":
		panic("the sink is broken")
	}
}

// A lock is lost, and the log is slow: the holder learns it all the same.
func TestSlowObserverAndALostLock(t *testing.T) {
	for _, kind := range sinks {
		t.Run(kind, func(t *testing.T) {
			servers, addrs := startServers(t, 1)
			log, mend := newSink(kind)
			defer mend()
			c := lockkit.Open(t, flightlock.Options{Logger: testkit.SlowLog(log.use), NodeTimeout: lockkit.Patience},
				"redis://"+addrs[0])
			for i := range 3 { // the log is writing when the last of them is lost
				l := lockkit.Lock(t, c, fmt.Sprint("k", i), 20*time.Second)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: 50 * time.Millisecond}))
				ctx := l.Context(t.Context())
				servers[0].Do(t, "SET", "lock:"+l.Key(), "another")
				select {
				case <-ctx.Done():
				case <-time.After(patience):
					t.Fatal("another client has the key, and Lock.Context has not ended")
				}
				if !errors.Is(context.Cause(ctx), flightlock.ErrLockLost) {
					t.Error(context.Cause(ctx))
				}
				_ = l.Release(t.Context())
			}
		})
	}
}

// A node goes down and comes back, and the log is slow: the node votes again all the same.
func TestSlowObserverAndANodeThatIsBack(t *testing.T) {
	t.Parallel()
	for _, kind := range sinks {
		t.Run(kind, func(t *testing.T) {
			servers, addrs := startServers(t, 1)
			log, mend := newSink(kind)
			defer mend()
			c := lockkit.Open(t, flightlock.Options{Logger: testkit.SlowLog(log.use)}, "redis://"+addrs[0])
			warmUp(t, c)
			for range 2 { // the log is writing when the node goes down again
				servers[0].Stop()
				redistest.Eventually(t, patience, "it is suspended", func() bool {
					_, err := c.TryLock(t.Context(), "k", time.Second)
					return err != nil && c.Stats().Suspended == 1
				})
				servers[0].Cont()
				redistest.Eventually(t, patience, "it votes again", func() bool {
					l, err := c.TryLock(t.Context(), "back", time.Second)
					if err == nil {
						_ = l.Release(t.Context())
					}
					return err == nil && c.Stats().Suspended == 0
				})
			}
		})
	}
}

// An Observer is slow when the Client is closed: Close ends by its ctx.
func TestSlowObserverAndClose(t *testing.T) {
	for _, kind := range sinks {
		t.Run(kind, func(t *testing.T) {
			_, addrs := startServers(t, 1)
			s, mend := newSink(kind)
			defer mend()
			observer := &flightlock.Observer{Opened: func(*flightlock.Client) func() { return s.use }}
			c, err := flightlock.Open(flightlock.Options{Observers: []*flightlock.Observer{observer}},
				"redis://"+addrs[0])
			testkit.Must(t, err)
			warmUp(t, c)
			closed := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
				defer cancel()
				closed <- c.Close(ctx)
			}()
			select {
			case err := <-closed:
				t.Log(err)
			case <-time.After(patience):
				t.Error("Close has not returned, and was called for 200ms")
				go func() { <-closed }()
			}
		})
	}
}

// collectors keeps what is registered.
type collectors struct {
	prometheus.Registerer
	mu  sync.Mutex // guards all
	all []prometheus.Collector
}

func (r *collectors) Register(c prometheus.Collector) error {
	r.mu.Lock()
	r.all = append(r.all, c)
	r.mu.Unlock()
	return r.Registerer.Register(c)
}

// A scrape hangs in the middle: locks continue, and so does Close.
func TestSlowObserverAndScrapes(t *testing.T) {
	_, addrs := startServers(t, 1)
	reg := &collectors{Registerer: prometheus.NewRegistry()}
	observer, err := prom.New(reg)
	testkit.Must(t, err)
	c := lockkit.Open(t, flightlock.Options{Observers: []*flightlock.Observer{observer},
		NodeTimeout: lockkit.Patience},
		"redis://"+addrs[0])
	lockkit.LockAndRelease(t, c)
	var scrapes sync.WaitGroup
	hung := make(chan prometheus.Metric)
	for _, collector := range reg.all {
		scrapes.Go(func() { collector.Collect(hung) })
	}
	<-hung // they are at it
	lockkit.LockAndRelease(t, c)
	testkit.Must(t, c.Close(t.Context()))
	go func() { scrapes.Wait(); close(hung) }()
	for range hung {
	}
}

// slowStrategy is a RetryStrategy of that kind.
type slowStrategy struct {
	sink
	called chan struct{} // has room for one
}

func (s slowStrategy) Next(int) (time.Duration, bool) {
	select {
	case s.called <- struct{}{}:
	default:
	}
	s.use()
	return time.Millisecond, true
}

// A caller's strategy is slow while it waits for a key that another process has: other waiters get
// the key, and callers of other keys notice nothing. The panic of a strategy is its caller's.
func TestSlowObserverOfRetries(t *testing.T) {
	for _, kind := range sinks {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s/nodes=%d", kind, n), func(t *testing.T) {
				_, addrs := sharedServers(t, n)
				elsewhere, c := clientOn(t, lockkit.Patient, true, addrs...), clientOn(t, lockkit.Patient, true, addrs...)
				held := lockkit.Lock(t, elsewhere, "k", time.Minute)

				broken, mend := newSink(kind)
				s := slowStrategy{broken, make(chan struct{}, 1)}
				ctx, leave := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				defer wg.Wait()
				defer leave()
				defer mend()
				panicked := make(chan any, 1)
				wg.Go(func() {
					defer func() { panicked <- recover() }()
					l, err := c.SingleFlightLock(ctx, "k", time.Second, s)
					if err == nil {
						_ = l.Release(ctx)
					}
				})
				<-s.called
				if kind == "panics" {
					if v := <-panicked; v == nil {
						t.Error("the strategy's panic is not its caller's")
					}
				}
				lockkit.EventuallyLock(t, c, "other")
				got := make(chan error, 1)
				wg.Go(func() {
					l, err := c.SingleFlightLock(ctx, "k", time.Second, nil)
					if err == nil {
						_ = l.Release(ctx)
					}
					got <- err
				})
				redistest.Eventually(t, patience, "it waits", func() bool { return c.Stats().Waiters > 0 })
				lockkit.Release(t, held)
				select {
				case err := <-got:
					testkit.Must(t, err)
				case <-time.After(patience):
					t.Error("who waits beside it has no lock")
				}
			})
		}
	}
}
