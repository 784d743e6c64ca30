package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// When a Fetcher loads without a lock, and when it does not.

// An attempt that is once not answered is repeated: nobody loads without a lock because of it, and
// no FailClosed caller gets an error.
func TestFetchTriesAgainAfterOneUnansweredAttempt(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
		testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			o := &lockkit.Origin{Takes: 10 * time.Millisecond}
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...), o,
				flightlock.FetchOptions{OnUnavailable: policy})
			wantAll(t, fetching(t.Context(), f, "warm", 1), 1, "warm=1")
			nodes[0].Stall(true)
			results := fetching(t.Context(), f, "k", 5)
			time.Sleep(80 * time.Millisecond)
			nodes[0].Stall(false)
			wantAll(t, results, 5, "k=2")
			if s := f.Stats(); s.UnlockedLoads != 0 || s.Loads != 2 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A refresh of a stale value whose attempt is once not answered ends: the next caller begins
// another.
func TestFetchRefreshesNothingAfterOneUnansweredAttempt(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: 10 * time.Millisecond}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...), o,
			flightlock.FetchOptions{})
		wantAll(t, fetching(t.Context(), f, "warm", 1), 1, "warm=1")
		o.Set("k", "old", true)
		nodes[0].Stall(true)
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "old")
		time.Sleep(80 * time.Millisecond)
		if s := f.Stats(); s.Loads != 1 || s.Running != 0 {
			t.Errorf("%+v", s)
		}
		nodes[0].Stall(false)
		time.Sleep(time.Second)
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "old")
		time.Sleep(time.Second)
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "k=2")
	})
}

// Callers that wait for a slot lock again as soon as the nodes answer, whether the nodes or the
// cache had been down.
func TestFetchGoesBackToLocking(t *testing.T) {
	for _, cacheToo := range []bool{false, true} {
		t.Run(fmt.Sprint("cacheToo=", cacheToo), func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{Takes: 10 * time.Second}
				var down atomic.Bool
				o.Lookup = func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
					if cacheToo && down.Load() {
						return "", flightlock.Miss, errMine
					}
					return o.PlainLookup(ctx, key)
				}
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
					flightlock.FetchOptions{MaxUnlockedLoads: 1})
				all(nodes, true)
				down.Store(true)
				began := time.Now()
				results := make(chan result, 20)
				for i := range 20 {
					go func() {
						v, err := f.Fetch(t.Context(), fmt.Sprint("k", i))
						results <- result{v, err}
					}()
				}
				time.Sleep(3 * time.Second)
				all(nodes, false)
				down.Store(false)
				for range 20 {
					if r := <-results; r.err != nil {
						t.Error(r.err)
					}
				}
				if s := f.Stats(); s.UnlockedLoads != 1 || s.Loads != 20 {
					t.Errorf("%+v", s)
				}
				if took := time.Since(began); took > 15*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

func all(nodes []*redistest.MemNode, down bool) {
	for _, n := range nodes {
		n.Down(down)
	}
}

// A Fetch that waits behind a lock of its own process does not wait for nodes that are down,
// whatever the strategy of the callers ahead of it.
func TestFetchBehindOthersNoticesThatTheNodesAreGone(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Millisecond}
		c := lockkit.New(t, flightlock.Options{}, clients...)
		f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{})
		l := lockkit.Lock(t, c, "k", time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		before := make(chan error, 1)
		go func() {
			_, err := c.SingleFlightLock(ctx, "k", time.Second, flightlock.LimitedRetry(100*time.Millisecond, 1000))
			before <- err
		}()
		synctest.Wait()
		results := fetching(t.Context(), f, "k", 3)
		synctest.Wait()
		nodes[0].Down(true)
		time.Sleep(2 * time.Second)
		_ = l.Release(t.Context())
		began := time.Now()
		wantAll(t, results, 3, "k=1")
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %v", took)
		}
		cancel()
		if err := <-before; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// nested makes loads of "outer*" fetch "inner*" of the same Fetcher, and those "leaf".
func nested(o *lockkit.Origin, f **flightlock.Fetcher[string]) {
	o.Load = func(ctx context.Context, key string) (string, error) {
		o.Loads.Add(1)
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return "", ctx.Err()
		}
		switch key[0] {
		case 'o':
			return (*f).Fetch(ctx, "inner"+key[len("outer"):])
		case 'i':
			return (*f).Fetch(ctx, "leaf")
		}
		return "v", nil
	}
}

// Loads that fetch other keys do not wait for the slots that they hold themselves.
func TestFetchLoadsInsideLoadsNeedNoPlace(t *testing.T) {
	for name, opts := range map[string]flightlock.FetchOptions{
		"without locks":            {},
		"one without a lock":       {MaxUnlockedLoads: 1},
		"MaxLoads=1":               {MaxLoads: 1},
		"MaxLoads=1 without locks": {MaxLoads: 1},
		"MaxLoads=16":              {MaxLoads: 16},
	} {
		for _, n := range []int{16, 100} {
			t.Run(fmt.Sprintf("%s/loads=%d", name, n), func(t *testing.T) {
				testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
					o := &lockkit.Origin{}
					var f *flightlock.Fetcher[string]
					nested(o, &f)
					f = lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
					if name != "MaxLoads=1" && name != "MaxLoads=16" {
						nodes[0].Down(true)
					}
					began := time.Now()
					results := make(chan result, 2*n)
					for i := range n {
						for _, kind := range []string{"outer", "inner"} { // so some join runs that wait for a slot
							go func() {
								v, err := f.Fetch(t.Context(), fmt.Sprint(kind, i))
								results <- result{v, err}
							}()
						}
					}
					for range 2 * n {
						if r := <-results; r.v != "v" || r.err != nil {
							t.Errorf("got %q, %v", r.v, r.err)
						}
					}
					if took := time.Since(began); took > 20*time.Second {
						t.Errorf("it took %v", took)
					}
				})
			})
		}
	}
}

// MaxLoads is the number of concurrent loads, with locks and without; a run that waits for a slot
// holds no lock, so another process that has a slot loads.
func TestFetchMaxLoads(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprint("down=", down), func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{}
				var running, most atomic.Int64
				o.Load = func(ctx context.Context, key string) (string, error) {
					n := running.Add(1)
					defer running.Add(-1)
					for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
					}
					time.Sleep(time.Second)
					return "v", nil
				}
				if down {
					all(nodes, true)
				}
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
					flightlock.FetchOptions{MaxLoads: 3})
				began := time.Now()
				results := make(chan result, 30)
				fetch := func(f *flightlock.Fetcher[string], i int) {
					v, err := f.Fetch(t.Context(), fmt.Sprint("k", i))
					results <- result{v, err}
				}
				for i := range 30 {
					go fetch(f, i)
				}
				if !down { // another process has a slot for each, and waits for no lock
					synctest.Wait()
					o2 := &lockkit.Origin{Takes: time.Second, Lookup: o.PlainLookup, Store: o.PlainStore}
					g := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o2, flightlock.FetchOptions{})
					took := time.Now()
					if _, err := g.Fetch(t.Context(), "k29"); err != nil {
						t.Error(err)
					}
					if took := time.Since(took); took > 1500*time.Millisecond {
						t.Errorf("another process waited %v", took)
					}
				}
				for range 30 {
					if r := <-results; r.err != nil {
						t.Error(r.err)
					}
				}
				if most.Load() != 3 || time.Since(began) > 12*time.Second {
					t.Errorf("%d loads at once; it took %v", most.Load(), time.Since(began))
				}
			})
		})
	}
}

// A run that waits for a slot looks now and then whether another process has filled the cache. That does not keep
// it from a slot that becomes free meanwhile: else slots would be idle for as long as a busy cache takes, and longer
// where thousands of runs wait for their turn to look.
func TestFetchSlotsAreNotIdleBehindSlowLookups(t *testing.T) {
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprint("down=", down), func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				const keys = 2 * 64
				var slow atomic.Bool
				o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
					if slow.Load() {
						<-ctx.Done()
					}
					return "", flightlock.Miss, ctx.Err()
				}}
				o.Load = func(_ context.Context, key string) (string, error) {
					if key == "k0" {
						time.Sleep(2500 * time.Millisecond) // the bubble's time
						slow.Store(false)
					}
					time.Sleep(10 * time.Millisecond)
					return "v", nil
				}
				opts := flightlock.FetchOptions{MaxLoads: 1, LookupTimeout: 20 * time.Second, WaitTimeout: 10 * time.Second}
				if down { // of the cache: then loads need no locks, and no lookups
					opts.MaxLoads, opts.MaxUnlockedLoads = 0, 1
					o.Lookup = func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
						if slow.Load() {
							<-ctx.Done()
						}
						return "", flightlock.Miss, errMine
					}
				}
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
				results := make(chan result, keys)
				began := time.Now()
				for i := range keys {
					go func() {
						v, err := f.Fetch(t.Context(), fmt.Sprint("k", i))
						results <- result{v, err}
					}()
					synctest.Wait()
				}
				slow.Store(true)
				wantAll(t, results, keys, "v")
				if took := time.Since(began); took > 6*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// A run waits for a slot no longer than WaitTimeout, whatever its lookups take meanwhile.
func TestFetchWaitTimeoutEndsTheLookupOfARunThatWaitsForASlot(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var slow atomic.Bool
		o := &lockkit.Origin{Takes: 20 * time.Second}
		o.Lookup = func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
			if slow.Load() {
				<-ctx.Done()
			}
			return "", flightlock.Miss, ctx.Err()
		}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{MaxLoads: 1, LookupTimeout: 10 * time.Second, WaitTimeout: 2 * time.Second})
		first := fetching(t.Context(), f, "a", 1)
		synctest.Wait()
		second := fetching(t.Context(), f, "b", 1)
		synctest.Wait()
		slow.Store(true)
		began := time.Now()
		wantErrors(t, second, 1, flightlock.ErrNotAcquired)
		if took := time.Since(began); took > 2100*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		slow.Store(false)
		wantAll(t, first, 1, "a=1")
		if s := f.Stats(); s.LookupErrors != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// An origin that fails while a stale value is served is called once a second at first, and then
// less and less often; the value is still served. The same goes for an origin whose values cannot
// be stored.
func TestFetchFailingOriginBehindAStaleValue(t *testing.T) {
	for _, opts := range []flightlock.FetchOptions{{}, {ErrorHold: -1}, {ErrorHold: 100 * time.Millisecond}} {
		for _, op := range []string{"load", "store"} {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{}
				var last time.Time
				o.Load = func(context.Context, string) (string, error) {
					o.Loads.Add(1)
					if time.Since(last) < time.Second {
						t.Errorf("%v after the last load", time.Since(last))
					}
					last = time.Now()
					if op == "load" {
						return "", errMine
					}
					return "v", nil
				}
				o.Store = func(context.Context, string, string, *flightlock.Lock) error { return errMine }
				o.Set("k", "old", true)
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
				for range 60_000 / 5 {
					if v, err := f.Fetch(t.Context(), "k"); v != "old" || err != nil {
						t.Fatalf("got %q, %v", v, err)
					}
					time.Sleep(5 * time.Millisecond)
				}
				if n := o.Loads.Load(); n < 3 || n > 7 {
					t.Errorf("%d loads in a minute", n)
				}
			})
		}
	}
}

// Errors that are held are records, and no goroutines or runs.
func TestFetchHeldErrorsAreRecords(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Load: func(context.Context, string) (string, error) { return "", errMine }}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{ErrorHold: time.Hour})
		wantErrors(t, fetching(t.Context(), f, "warm", 1), 1, errMine)
		synctest.Wait()
		before := runtime.NumGoroutine()
		const keys = 500
		for i := range keys {
			_, _ = f.Fetch(t.Context(), fmt.Sprint("k", i))
		}
		synctest.Wait()
		if n := runtime.NumGoroutine(); n > before+keys/2 || f.Stats().Running != 0 { // some may be of other tests
			t.Errorf("%d goroutines, %d before; %+v", n, before, f.Stats())
		}
	})
}

// A Lookup of the run that hangs costs LookupTimeout, not LoadTimeout; with the lock and without.
func TestFetchLookupTimeout(t *testing.T) {
	for _, opts := range []flightlock.FetchOptions{{}, {LookupTimeout: 3 * time.Second},
		{LookupTimeout: time.Hour, LoadTimeout: 2 * time.Second}} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			var looks atomic.Int64
			o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
				if looks.Add(1) > 1 {
					<-ctx.Done()
				}
				return "", flightlock.Miss, ctx.Err()
			}}
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
			want := time.Second
			if opts.LookupTimeout > 0 {
				want = min(3*time.Second, opts.LookupTimeout)
			}
			if opts.LoadTimeout > 0 {
				want = opts.LoadTimeout
			}
			began := time.Now()
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "k=1")
			if took := time.Since(began); took < want || took > want+200*time.Millisecond {
				t.Errorf("it took %v, want %v", took, want)
			}
		})
	}
}

// A Lookup of a run that waits is no reason to load without a lock either if it has timed out by the cache's own
// timeout, before LookupTimeout: three in a row are.
func TestFetchWaitsOnAfterSlowLookups(t *testing.T) {
	for slow, unlocked := range map[int64]uint64{1: 0, 2: 0, 3: 1} {
		t.Run(fmt.Sprint(slow), func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				var looks atomic.Int64
				o := &lockkit.Origin{Lookup: func(context.Context, string) (string, flightlock.Freshness, error) {
					if n := looks.Add(1); n > 1 && n <= 1+slow {
						return "", flightlock.Miss, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
					}
					return "", flightlock.Miss, nil
				}}
				c := lockkit.New(t, flightlock.Options{}, clients...)
				held := lockkit.Lock(t, c, "k", time.Minute)
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
				results := fetching(t.Context(), f, "k", 1)
				time.Sleep(10 * time.Second)
				lockkit.Release(t, held)
				wantAll(t, results, 1, "k=1")
				if s := f.Stats(); s.UnlockedLoads != unlocked || looks.Load() < 1+slow {
					t.Errorf("%d Lookups, %+v", looks.Load(), s)
				}
			})
		})
	}
}

// A caller's Lookup that timed out in the cache's client is no reason to load without a lock: the
// processors or the cache may be busy. A Lookup that was refused is one.
func TestFetchLocksAfterACallersSlowLookup(t *testing.T) {
	for name, tc := range map[string]struct {
		err      error
		down     bool
		unlocked uint64
	}{
		"its ctx":             {context.DeadlineExceeded, false, 0},
		"its socket":          {&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, false, 0},
		"its pool":            {fmt.Errorf("cache: %w", redis.ErrPoolTimeout), false, 0},
		"refused":             {syscall.ECONNREFUSED, false, 1},
		"and the nodes' away": {context.DeadlineExceeded, true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				var looks atomic.Int64
				o := &lockkit.Origin{Lookup: func(context.Context, string) (string, flightlock.Freshness, error) {
					if looks.Add(1) > 1 {
						return "", flightlock.Miss, nil
					}
					return "", flightlock.Miss, tc.err
				}}
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
				nodes[0].Down(tc.down)
				wantAll(t, fetching(t.Context(), f, "k", 1), 1, "k=1")
				if s := f.Stats(); s.UnlockedLoads != tc.unlocked || s.LookupErrors != 1 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// A Lookup that takes too long, in a run that waits for another process, is no reason to load
// without a lock: the cache is busy, and the lock is available.
func TestFetchWaitsOnBehindASlowLookup(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		var looks atomic.Int64
		o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
			if looks.Add(1) > 1 {
				<-ctx.Done()
			}
			return "", flightlock.Miss, ctx.Err()
		}}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		results := fetching(t.Context(), f, "k", 1)
		time.Sleep(500 * time.Millisecond) // it looks meanwhile
		if s := f.Stats(); s.Loads != 0 {
			t.Errorf("%+v", s)
		}
		lockkit.Release(t, l)
		wantAll(t, results, 1, "k=1")
		if s := f.Stats(); s.UnlockedLoads != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A Lookup that ends with its caller's ctx reports that once, and matches it.
func TestFetchSaysOnceThatItsCtxHasEnded(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
			<-ctx.Done()
			return "", flightlock.Miss, ctx.Err()
		}}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.Fetch(ctx, "k")
		if want := `flightlock: fetch "k": Lookup: context deadline exceeded`; !errors.Is(err, context.DeadlineExceeded) ||
			err.Error() != want {
			t.Errorf("%v, want %v", err, want)
		}
	})
}

// Values is called on its callers' goroutines, once for each, and never with a ctx of a run.
func TestFetchValuesRunsOnItsCallersGoroutine(t *testing.T) {
	type callers struct{}
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var calls atomic.Int64
		values := func(ctx context.Context) context.Context {
			calls.Add(1)
			_ = ctx.Value(callers{}).(int) // panics if it is not a caller's
			return context.Background()
		}
		o := &lockkit.Origin{Takes: time.Second}
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{Values: values})
		ctx := context.WithValue(t.Context(), callers{}, 1)
		results := fetching(ctx, f, "k", 3)
		time.Sleep(100 * time.Millisecond)
		o.Set("k", "stale", true) // found by the run, which has it loaded again
		lockkit.Release(t, l)
		wantAll(t, results, 3, "stale")
		want := int64(3)
		for v := "stale"; v == "stale" && want < 6; {
			time.Sleep(5 * time.Second) // virtual: until the refresh has ended
			// It makes one attempt, which the end of the run's own attempt may delay.
			if v, _ = f.Fetch(ctx, "k"); v == "stale" {
				want++
			}
		}
		wantAll(t, fetching(ctx, f, "k", 1), 1, "k=1")
		if n := calls.Load(); n != want {
			t.Errorf("%d calls for %d callers that did not find a fresh value", n, want)
		}
		defer func() {
			if recover() == nil {
				t.Error("the caller's own goroutine does not panic")
			}
			o.Drop("k")
			wantAll(t, fetching(ctx, f, "k", 3), 3, "k=2") // and nothing is left of that
		}()
		o.Drop("k")
		_, _ = f.Fetch(t.Context(), "k")
	})
}

// The ctx of Lookup, Load and Store carries the lock of the run or none, whatever lock the caller
// has.
func TestFetchCarriesNoLockOfTheCaller(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		o := &lockkit.Origin{}
		var looks atomic.Int64
		want := func(ctx context.Context, key string) {
			if l := flightlock.FromContext(ctx); l != nil && l.Key() != key {
				t.Errorf("a lock of %q while %q is loaded", l.Key(), key)
			}
		}
		o.Lookup = func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
			if looks.Add(1)%2 == 0 { // the run's
				want(ctx, key)
			}
			return "", flightlock.Miss, nil
		}
		o.Load = func(ctx context.Context, key string) (string, error) {
			want(ctx, key)
			return "v", nil
		}
		o.Store = func(ctx context.Context, key, _ string, _ *flightlock.Lock) error {
			want(ctx, key)
			return nil
		}
		f := lockkit.NewFetcher(t, c, o,
			flightlock.FetchOptions{Values: func(ctx context.Context) context.Context { return ctx }})
		l := lockkit.Lock(t, c, "another", time.Minute)
		defer func() { _ = l.Release(t.Context()) }()
		wantAll(t, fetching(l.Context(t.Context()), f, "locked", 1), 1, "v")
		all(nodes, true)
		wantAll(t, fetching(l.Context(t.Context()), f, "unlocked", 1), 1, "v")
		all(nodes, false)
		if f.Stats().UnlockedLoads != 1 {
			t.Errorf("%+v", f.Stats())
		}
	})
}

// A Load's own deadline is distinguished from its callers', and so is that of a Lookup of the run.
func TestFetchTellsWhoseDeadlineItWas(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		mine := fmt.Errorf("%w: %w", errMine, context.DeadlineExceeded)
		o := &lockkit.Origin{}
		o.Load = func(ctx context.Context, key string) (string, error) {
			if key == "own" {
				return "", mine
			}
			<-ctx.Done()
			return "", ctx.Err()
		}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{LoadTimeout: time.Second})
		for _, key := range []string{"own", "LoadTimeout"} {
			for range 2 { // the second time it is held
				_, err := f.Fetch(t.Context(), key)
				if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Load") ||
					!strings.Contains(err.Error(), "deadline") {
					t.Errorf("%s: %v", key, err)
				}
				if key == "own" && !errors.Is(err, errMine) {
					t.Errorf("%v is not Load's error any more", err)
				}
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := f.Fetch(ctx, "mine"); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		var p *flightlock.PanicError
		g := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...),
			&lockkit.Origin{Load: func(context.Context, string) (string, error) { panic(mine) }}, flightlock.FetchOptions{})
		if _, err := g.Fetch(t.Context(), "k"); !errors.As(err, &p) || errors.Is(err, context.DeadlineExceeded) ||
			!errors.Is(err, errMine) {
			t.Error(err)
		}
	})
}

// A load, or a Store, that fails after 300 ms in eight processes: they do not wait for one after
// the other.
func TestFetchFailuresOfManyProcessesAtOnce(t *testing.T) {
	for op, policies := range map[string][]flightlock.Policy{
		"load": {flightlock.LoadLocally,
			flightlock.FailClosed}, "store": {flightlock.LoadLocally}, "timeout": {flightlock.LoadLocally},
	} {
		for _, policy := range policies {
			t.Run(fmt.Sprintf("%s/policy=%d", op, policy), func(t *testing.T) {
				testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
					var results []<-chan result
					began := time.Now()
					for range 8 {
						o := &lockkit.Origin{Takes: 300 * time.Millisecond}
						o.Load = func(ctx context.Context, key string) (string, error) {
							if op == "timeout" {
								<-ctx.Done()
								return "", ctx.Err()
							}
							_, _ = o.PlainLoad(ctx, key)
							if op == "load" {
								return "", errMine
							}
							return "v", nil
						}
						o.Store = func(context.Context, string, string, *flightlock.Lock) error { return errMine }
						f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
							flightlock.FetchOptions{OnUnavailable: policy, LoadTimeout: 300 * time.Millisecond, WaitTimeout: time.Minute})
						results = append(results, fetching(t.Context(), f, "k", 5))
					}
					for _, r := range results {
						for range 5 {
							if r := <-r; (r.err == nil) != (op == "store") {
								t.Errorf("got %q, %v", r.v, r.err)
							}
						}
					}
					if took := time.Since(began); took > 650*time.Millisecond {
						t.Errorf("it took %v", took)
					}
				})
			})
		}
	}
}

// One of eight processes fails at once: only its own callers see errors.
func TestFetchErrorsDoNotCrossProcesses(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		shared := &lockkit.Origin{Takes: 300 * time.Millisecond}
		var fs []*flightlock.Fetcher[string]
		for i := range 8 {
			o := &lockkit.Origin{Takes: shared.Takes, Lookup: shared.PlainLookup, Store: shared.PlainStore}
			if i == 0 {
				o.Load = func(context.Context, string) (string, error) { return "", errMine }
			}
			fs = append(fs, lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
				flightlock.FetchOptions{}))
		}
		for round := range 10 {
			key := fmt.Sprint("k", round)
			began := time.Now()
			bad := fetching(t.Context(), fs[0], key, 5)
			synctest.Wait()
			var results []<-chan result
			for _, f := range fs[1:] {
				results = append(results, fetching(t.Context(), f, key, 5))
			}
			for _, r := range results {
				for range 5 {
					if r := <-r; r.err != nil {
						t.Error(r.err)
					}
				}
			}
			if took := time.Since(began); took > 650*time.Millisecond {
				t.Errorf("it took %v", took)
			}
			for range 5 {
				if r := <-bad; r.err != nil && !errors.Is(r.err, errMine) {
					t.Error(r.err)
				}
			}
		}
	})
}

// A caller that misses while a refresh finds no slot joins it and waits, or begins a new run; it
// never gets the error of a refresh without callers.
func TestFetchJoinsARefreshThatFindsNoPlace(t *testing.T) {
	m := redistest.StartMini(t)
	c := lockkit.New(t, flightlock.Options{}, redistest.MiniClient(t, m))
	m.Close()
	unblock := make(chan struct{})
	o := &lockkit.Origin{}
	o.Load = func(_ context.Context, key string) (string, error) {
		if key == "first" {
			<-unblock
		}
		return "v", nil
	}
	f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{MaxUnlockedLoads: 1})
	first := fetching(t.Context(), f, "first", 1)
	redistest.Eventually(t, 10*time.Second, "the place is taken", func() bool { return f.Stats().UnlockedLoads == 1 })
	results := make(chan result, 300)
	for i := range 300 {
		key := fmt.Sprint("k", i)
		o.Set(key, "old", true)
		if v, err := f.Fetch(t.Context(), key); v != "old" || err != nil {
			t.Fatal(v, err)
		}
		o.Drop(key)
		go func() {
			v, err := f.Fetch(t.Context(), key)
			results <- result{v, err}
		}()
	}
	select {
	case r := <-results:
		t.Errorf("while the only place is taken: %q, %v", r.v, r.err)
	case <-time.After(100 * time.Millisecond):
	}
	close(unblock)
	wantAll(t, first, 1, "v")
	for range 300 {
		if r := <-results; r.err != nil {
			t.Fatal(r.err)
		}
	}
}

// A run whose key another process loads lets others have its slot meanwhile. When it needs one after all, it has its
// place in the queue again: it does not wait behind those that came later.
func TestFetchKeepsItsPlaceInTheQueueForASlot(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "first", time.Minute)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{MaxLoads: 1, WaitTimeout: 10 * time.Second})
		first := fetching(t.Context(), f, "first", 1)
		synctest.Wait()
		time.Sleep(50 * time.Millisecond) // the bubble's time
		var others []<-chan result
		for i := range 8 {
			others = append(others, fetching(t.Context(), f, fmt.Sprint("k", i), 1))
			synctest.Wait()
		}
		time.Sleep(500 * time.Millisecond) // the bubble's time: some of the others have loaded
		lockkit.Release(t, l)
		began := time.Now()
		if r := <-first; r.err != nil {
			t.Error(r.err)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("it took %v: others that came later were loaded before", took)
		}
		for _, results := range others {
			if r := <-results; r.err != nil {
				t.Error(r.err)
			}
		}
	})
}
