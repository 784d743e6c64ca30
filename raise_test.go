package flightlock_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// Locks on distant nodes: a round trip is hardly shorter than NodeTimeout, so two do not fit into
// it.
const (
	farTimeout = 200 * time.Millisecond
	farTrip    = 180 * time.Millisecond
)

// farLock holds a lock, with a caller waiting behind it, on nodes whose counters differ: its
// refreshes reserve tokens, and a second round would have to make them safe.
func farLock(
	t *testing.T, n int, ttl time.Duration, f func(t *testing.T, nodes []*redistest.MemNode, l *flightlock.Lock),
) {
	t.Helper()
	bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := newClient(t, flightlock.Options{NodeTimeout: farTimeout}, clients...)
		l := mustLock(t, c, "k", ttl)
		synctest.Wait()
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan struct{})
		go func() {
			defer close(left)
			if behind, err := c.SingleFlightLock(ctx, "k", ttl, nil); err == nil {
				_ = behind.Release(t.Context())
			}
		}()
		synctest.Wait()
		differ(t, nodes)
		for _, m := range nodes {
			m.SetDelay(farTrip / 2)
		}
		f(t, nodes, l)
		for _, m := range nodes {
			m.SetDelay(0)
			m.Stall(false)
		}
		leave()
		<-left
		_ = l.Release(t.Context())
		time.Sleep(10 * time.Second) // what is owed to a node
	})
}

// differ makes the nodes' counters of fencing tokens differ, as other keys of a bucket do. They
// only rise.
func differ(t *testing.T, nodes []*redistest.MemNode) {
	t.Helper()
	for i, m := range nodes {
		for _, k := range m.Mini.Keys() {
			if !strings.Contains(k, "fence") {
				continue
			}
			if _, err := m.Mini.Incr(k, 1000*(i+1)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// What a majority confirmed in time counts, from before the request, although the nodes did not
// agree on the tokens that the refresh was to reserve. A second round to settle that would arrive
// after the old deadline.
func TestARefreshThatIsConfirmedCountsWhateverBecomesOfItsTokens(t *testing.T) {
	const ttl = 2 * time.Second
	for n := 2; n <= 3; n++ {
		t.Run(fmt.Sprint("nodes=", n), func(t *testing.T) {
			farLock(t, n, ttl, func(t *testing.T, _ []*redistest.MemNode, l *flightlock.Lock) {
				time.Sleep(time.Until(l.Until()) - 280*time.Millisecond)
				want := time.Now().Add(ttl - ttl/100 - 2*time.Millisecond)
				if err := l.Refresh(t.Context()); err != nil {
					t.Error(err)
				}
				if got := l.Until(); !got.Equal(want) {
					t.Errorf("until %v, want %v", got, want)
				}
				time.Sleep(time.Second)
				if err := l.Err(); err != nil {
					t.Errorf("a second later: %v", err)
				}
			})
		})
	}
}

// A Refresh ends within NodeTimeout, and within two where another refresh of the lock is in
// progress, whatever the nodes do.
func TestRefreshIsBounded(t *testing.T) {
	for name, tc := range map[string]struct {
		breaks func(nodes []*redistest.MemNode)
		works  bool
	}{
		"counters differ":              {func([]*redistest.MemNode) {}, true},
		"counters differ, one silent":  {func(m []*redistest.MemNode) { m[0].Stall(true) }, true},
		"counters differ, one refuses": {func(m []*redistest.MemNode) { m[0].Down(true) }, true},
		"two silent, then suspended":   {func(m []*redistest.MemNode) { m[0].Stall(true); m[1].Stall(true) }, false},
		"one silent, one refuses":      {func(m []*redistest.MemNode) { m[0].Stall(true); m[1].Down(true) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			farLock(t, 3, time.Minute, func(t *testing.T, m []*redistest.MemNode, l *flightlock.Lock) {
				tc.breaks(m)
				refreshes := func(calls int) {
					t.Helper()
					var ended sync.WaitGroup
					for range calls {
						ended.Go(func() {
							began := time.Now()
							err := l.Refresh(t.Context())
							if took := time.Since(began); took > time.Duration(calls)*(farTimeout+10*time.Millisecond) {
								t.Errorf("%d calls: took %v: %v", calls, took, err)
							}
							if (err == nil) != tc.works || l.Err() != nil {
								t.Errorf("%d calls: %v; the lock: %v", calls, err, l.Err())
							}
						})
						time.Sleep(10 * time.Millisecond)
					}
					ended.Wait()
				}
				refreshes(1)
				time.Sleep(5 * time.Second)
				differ(t, m)
				refreshes(2)
				for _, node := range m {
					node.Down(false)
				}
			})
		})
	}
}
