package scale

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// The tests of this file are outages that begin while thousands of calls are in progress. What the docs
// promise of the time that callers wait is tested in virtual time; with real servers it is logged.

// nodeTimeout is the default.
const nodeTimeout = 50 * time.Millisecond

// within fails the test if took is more than the promise, in virtual time.
func within(t *testing.T, what string, took, promised time.Duration) {
	t.Helper()
	if took > promised {
		t.Errorf("%s: %v; promised are %v", what, took, promised)
	}
}

// stopAll stops the servers and returns when the last of them was stopped.
func stopAll(servers []*redistest.Server) time.Time {
	for _, s := range servers {
		s.Stop()
	}
	return time.Now()
}

func lose(nodes []*redistest.MemNode, on bool) {
	for _, n := range nodes {
		n.Lose(on)
	}
}

// nothingIsLeft lets the servers continue and waits until no lock is there, nothing is owed, and no
// more goroutines run than before.
func nothingIsLeft(t *testing.T, servers []*redistest.Server, c *flightlock.Client, goroutines int) {
	t.Helper()
	for _, s := range servers {
		s.Cont()
	}
	redistest.EventuallyNoLocks(t, 40*time.Second, servers...)
	redistest.Eventually(t, 40*time.Second, "nothing is owed and nobody waits", func() bool {
		st := c.Stats()
		return st.Debts == 0 && st.Held == 0 && st.Waiters == 0 && st.Suspended == 0
	})
	const few = 60 // connections, which go-redis keeps
	redistest.Eventually(t, 40*time.Second, "the goroutines have ended", func() bool {
		return runtime.NumGoroutine() < goroutines+few
	})
}

// dialsEnd waits at the end of the test until what go-redis still dials has ended, by the timeout
// of its client. It comes first in a test, so that the Clients are closed by then.
func dialsEnd(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		redistest.Eventually(t, 20*time.Second, "dials have ended",
			func() bool { return runtime.NumGoroutine() <= before })
	})
}

// Thousands of TryLocks on a single node that is stopped end soon, all of them, whether there are
// connections to it or not, and leave nothing.
func TestTryLocksOnStoppedNodesEnd(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, warm := range []bool{false, true} {
			t.Run(fmt.Sprintf("virtual time/nodes=%d/warm=%v", n, warm), func(t *testing.T) {
				bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client) {
					if warm {
						warmUp(t, c)
					}
					testkit.Stall(true, nodes...)
					failed, took, err := tryLocks(t, c, "k", 1000)
					within(t, "the last TryLock is back", took, 2*nodeTimeout+100*time.Millisecond)
					if failed != 1000 || !errors.Is(err, flightlock.ErrUnavailable) {
						t.Errorf("%d of 1000 failed, the first by %v", failed, err)
					}
					testkit.Stall(false, nodes...)
				})
			})
		}
	}
	for _, open := range []bool{false, true} {
		for _, warm := range []bool{false, true} {
			for _, busy := range []int{0, 4} {
				if !redistest.Long() && (open == warm || busy > 0) {
					continue
				}
				t.Run(fmt.Sprintf("%s/warm=%v/busy=%d", madeBy(open), warm, busy), func(t *testing.T) {
					servers, addrs := startServers(t, 1)
					c := clientOn(t, flightlock.Options{}, open, addrs...)
					if warm {
						warmUp(t, c)
					}
					before := runtime.NumGoroutine()
					if busy > 0 {
						t.Cleanup(spin(busy))
					}
					stopAll(servers)
					keys := sized(10_000)
					failed, took, err := tryLocks(t, c, "k", keys)
					t.Logf("the last TryLock was back after %v", took)
					if failed != keys || !errors.Is(err, flightlock.ErrUnavailable) {
						t.Errorf("%d of %d failed, the first by %v", failed, keys, err)
					}
					nothingIsLeft(t, servers, c, before)
				})
			}
		}
	}
}

// All nodes stop while a cold cache is being loaded: the loads begin without a lock soon, all
// callers are served, and when the nodes continue, nothing is left there.
func TestStoppedNodesInMidBurst(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client) {
				s := fetchOn(t, c, fetch.Options{MaxUnlockedLoads: 500})
				w := workload{Prefix: "k", Keys: 1_000_000, Rate: 1000, For: time.Second, Load: 20 * time.Millisecond}
				done := make(chan outcome, 1)
				go func() { done <- s.run(t.Context(), w) }()
				time.Sleep(w.For / 2)
				testkit.Stall(true, nodes...)
				stopped := time.Now()
				r := <-done
				testkit.Stall(false, nodes...)
				within(t, "the first load without a lock", time.Unix(0, s.unlockedAt.Load()).Sub(stopped),
					4*nodeTimeout+100*time.Millisecond)
				if r.Failed > 0 || r.Unlocked == 0 {
					t.Error(r)
				}
			})
		})
	}
	for _, n := range []int{1, 3} {
		for _, open := range []bool{false, true} {
			for _, busy := range []int{0, 4} {
				if !redistest.Long() && (n == 1 == open || busy > 0) {
					continue
				}
				t.Run(fmt.Sprintf("nodes=%d/%s/busy=%d", n, madeBy(open), busy), func(t *testing.T) {
					servers, addrs := startServers(t, n)
					s := mustService(t, serviceConfig{
						Nodes: addrs, Open: open, Busy: busy, NodeTimeout: nodeTimeout, MaxUnlockedLoads: 500,
					})
					before := runtime.NumGoroutine()
					w := workload{Prefix: "k", Keys: 1_000_000, Rate: 4000, For: time.Second, Load: 20 * time.Millisecond}
					if busy > 0 {
						w.Rate = 1000
					}
					done := make(chan outcome, 1)
					go func() { done <- s.run(t.Context(), w) }()
					redistest.Eventually(t, 20*time.Second, "it loads", func() bool { return s.f.Stats().Loads > 100 })
					stopped := stopAll(servers)
					s.unlocked.Store(s.f.Stats().UnlockedLoads)
					s.unlockedAt.Store(0)
					// Some come after that for sure, however late this goroutine runs.
					later := s.run(t.Context(), workload{Prefix: "later", Keys: 100, Load: w.Load})
					r := <-done
					t.Log(r, "; ", later)
					if at := s.unlockedAt.Load(); at == 0 {
						t.Error("no load was without a lock")
					} else {
						t.Logf("the first load without a lock began after %v", time.Unix(0, at).Sub(stopped))
					}
					if r.Failed+later.Failed > 0 {
						t.Error(r, "; ", later)
					}
					nothingIsLeft(t, servers, s.c, before)
				})
			}
		}
	}
}

// A node that falls silent is suspended soon.
func TestSilentNodesAreSuspended(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client) {
				warmUp(t, c)
				ctx, cancel := context.WithCancel(t.Context())
				const pause = 5 * time.Millisecond
				ended := lockAgainAndAgain(ctx, c, pause)
				time.Sleep(nodeTimeout)
				testkit.Stall(true, nodes[:1]...)
				stopped := time.Now()
				for c.Stats().Suspended == 0 {
					time.Sleep(time.Millisecond)
				}
				// Three times NodeTimeout, noticed when an exchange ends: that one may have begun a moment before, behind
				// one that was under way when the node fell silent.
				within(t, "it is suspended", time.Since(stopped), pause+5*nodeTimeout)
				testkit.Stall(false, nodes[:1]...)
				cancel()
				ended()
			})
		})
		for _, open := range []bool{false, true} {
			t.Run(fmt.Sprintf("nodes=%d/%s", n, madeBy(open)), func(t *testing.T) {
				servers, addrs := startServers(t, n)
				c := clientOn(t, flightlock.Options{}, open, addrs...)
				warmUp(t, c)
				ctx, cancel := context.WithCancel(t.Context())
				ended := lockAgainAndAgain(ctx, c, 0)
				before := runtime.NumGoroutine()
				stopped := stopAll(servers[:1])
				redistest.Eventually(t, 40*time.Second, "it is suspended",
					func() bool { return c.Stats().Suspended == 1 })
				t.Logf("suspended after %v", time.Since(stopped))
				cancel()
				ended()
				nothingIsLeft(t, servers, c, before)
			})
		}
	}
}

// lockAgainAndAgain has 20 goroutines try to lock keys of their own until ctx ends. The function that it
// returns waits for them.
func lockAgainAndAgain(ctx context.Context, c *flightlock.Client, pause time.Duration) (ended func()) {
	var wg sync.WaitGroup
	for g := range 20 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if l, err := c.TryLock(ctx, fmt.Sprint(g, "-", i), time.Second); err == nil {
					_ = l.Release(ctx)
				}
				time.Sleep(pause)
			}
		})
	}
	return wg.Wait
}

// Nodes that do not even answer a connect, from the start: the first callers get the error soon,
// and later ones at once.
func TestLostSYNsFromTheStart(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client) {
				lose(nodes, true)
				for _, step := range []struct {
					what     string
					keys     int
					promised time.Duration
				}{{"the last of the first ones is back", 1000, 1600 * time.Millisecond},
					{"of those that come later", 100, 0}} {
					failed, took, err := tryLocks(t, c, "k", step.keys)
					within(t, step.what, took, step.promised)
					if failed != step.keys || !errors.Is(err, flightlock.ErrUnavailable) {
						t.Errorf("%d of %d failed, the first by %v", failed, step.keys, err)
					}
				}
				lose(nodes, false)
			})
		})
		for _, open := range []bool{false, true} {
			if !redistest.Long() && !(open && n == 1) {
				continue
			}
			t.Run(fmt.Sprintf("nodes=%d/%s", n, madeBy(open)), func(t *testing.T) {
				dialsEnd(t)
				var addrs []string
				for range n {
					addrs = append(addrs, redistest.StartLostSYN(t).Addr())
				}
				c := clientOn(t, flightlock.Options{}, open, addrs...)
				before := runtime.NumGoroutine()
				keys := sized(10_000)
				failed, took, err := tryLocks(t, c, "k", keys)
				t.Logf("the last of the first ones was back after %v", took)
				if failed != keys || !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("%d of %d failed, the first by %v", failed, keys, err)
				}
				failed, took, err = tryLocks(t, c, "k", 100)
				t.Logf("the last of a hundred that came later was back after %v", took)
				if failed != 100 || !errors.Is(err, flightlock.ErrUnavailable) {
					t.Errorf("%d of 100 failed, the first by %v", failed, err)
				}
				redistest.Eventually(t, 40*time.Second, "the goroutines have ended", func() bool {
					return runtime.NumGoroutine() < before+60
				})
			})
		}
	}
}

// The same for a Fetcher: its first load without a lock begins soon.
func TestLostSYNsAndAFetcher(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("virtual time/nodes=%d", n), func(t *testing.T) {
			bubble(t, n, time.Millisecond, func(t *testing.T, nodes []*redistest.MemNode, c *flightlock.Client) {
				lose(nodes, true)
				s := fetchOn(t, c, fetch.Options{MaxUnlockedLoads: 500})
				began, load := time.Now(), 20*time.Millisecond
				r := s.run(t.Context(), workload{Prefix: "k", Keys: 500, Load: load})
				within(t, "the first load", time.Unix(0, s.unlockedAt.Load()).Sub(began), 1600*time.Millisecond)
				if r.Failed > 0 || r.Unlocked != 500 {
					t.Error(r)
				}
				r = s.run(t.Context(), workload{Prefix: "later", Keys: 10, Load: load})
				within(t, "those that come later", r.Slowest, load)
				lose(nodes, false)
			})
		})
	}
	for _, open := range []bool{false, true} {
		if !redistest.Long() {
			continue
		}
		t.Run(madeBy(open), func(t *testing.T) {
			dialsEnd(t)
			lost := redistest.StartLostSYN(t).Addr()
			s := mustService(t, serviceConfig{Nodes: []string{lost}, Open: open, Cold: true, MaxUnlockedLoads: 500})
			for _, keys := range []int{500, 10} {
				r := s.run(t.Context(), workload{Prefix: fmt.Sprint(keys, "-"), Keys: keys, Load: 20 * time.Millisecond})
				t.Log(r)
				if r.Failed > 0 || r.Unlocked != uint64(keys) {
					t.Error(r)
				}
			}
		})
	}
}

// Loads that fetch other keys complete, with the nodes stopped and without, however many loads the
// Fetcher may make at once.
func TestNestedLoadsOnStoppedNodesEnd(t *testing.T) {
	for _, stopped := range []bool{true, false} {
		for _, most := range []int{0, 1} {
			for _, n := range []int{16, 100} {
				if !redistest.Long() && (n == 100) != (stopped && most == 0) {
					continue
				}
				t.Run(fmt.Sprintf("stopped=%v/MaxLoads=%d/loads=%d", stopped, most, n), func(t *testing.T) {
					servers, addrs := startServers(t, 3)
					c := clientOn(t, flightlock.Options{}, true, addrs...)
					f, loads := nestedFetcher(t, c, fetch.Options{MaxLoads: most, LoadTimeout: 20 * time.Second})
					warmUp(t, c)
					before := runtime.NumGoroutine()
					if stopped {
						stopAll(servers)
					}
					var wg sync.WaitGroup
					for i := range n {
						wg.Go(func() {
							v, err := f.Get(t.Context(), fmt.Sprint("outer", i))
							if v != "v" || err != nil {
								t.Errorf("got %q, %v", v, err)
							}
						})
					}
					wg.Wait()
					if got, want := loads.Load(), int64(2*n+1); got != want {
						t.Errorf("%d loads for %d keys", got, want)
					}
					nothingIsLeft(t, servers, c, before)
				})
			}
		}
	}
}

// nestedFetcher is a Fetcher over a map. Its loads of "outer*" fetch "inner*", and those "leaf".
func nestedFetcher(
	t *testing.T, c *flightlock.Client, opts fetch.Options,
) (f *fetch.Fetcher[string], loads *atomic.Int64) {
	t.Helper()
	var values sync.Map
	loads = new(atomic.Int64)
	f, err := fetch.New(c, fetch.Plain(
		func(_ context.Context, key string) (string, bool, error) {
			v, ok := values.Load(key)
			s, _ := v.(string)
			return s, ok, nil
		},
		func(_ context.Context, key, v string) error {
			values.Store(key, v)
			return nil
		},
	), fetch.Each(func(ctx context.Context, key string) (string, error) {
		loads.Add(1)
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return "", ctx.Err()
		}
		switch key[0] {
		case 'o':
			return f.Get(ctx, "inner"+key[len("outer"):])
		case 'i':
			return f.Get(ctx, "leaf")
		}
		return "v", nil
	}), opts)
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, f.Close(context.Background())) })
	return f, loads
}
