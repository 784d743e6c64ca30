package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
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

// result is what a Fetch returned.
type result struct {
	v   string
	err error
}

// fetching calls Fetch on n goroutines, and returns their results.
func fetching(ctx context.Context, f *flightlock.Fetcher[string], key string, n int) <-chan result {
	results := make(chan result, n)
	for range n {
		go func() {
			v, err := f.Fetch(ctx, key)
			results <- result{v, err}
		}()
	}
	return results
}

func wantAll(t *testing.T, results <-chan result, n int, v string) {
	t.Helper()
	for range n {
		if r := <-results; r.v != v || r.err != nil {
			t.Errorf("got %q, %v; want %q", r.v, r.err, v)
		}
	}
}

func wantErrors(t *testing.T, results <-chan result, n int, want error) {
	t.Helper()
	for range n {
		if r := <-results; r.v != "" || !errors.Is(r.err, want) {
			t.Errorf("got %q, %v; want %v", r.v, r.err, want)
		}
	}
}

// Four processes with 250 callers each miss the same key: there is one load, and all get its value,
// whether it takes less than the ttl or three times as long.
func TestFetchLoadsOnce(t *testing.T) {
	for _, takes := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 30 * time.Second} {
		testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			o := &lockkit.Origin{Takes: takes}
			var fs []*flightlock.Fetcher[string]
			for range 4 {
				fs = append(fs, lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
					flightlock.FetchOptions{TTL: 10 * time.Second, LoadTimeout: time.Minute}))
			}
			misses := 10
			if takes > time.Second {
				misses = 1 // they poll for so long
			}
			for miss := 1; miss <= misses; miss++ {
				began := time.Now()
				var all []<-chan result
				for _, f := range fs {
					all = append(all, fetching(t.Context(), f, "k", 250))
				}
				for _, results := range all {
					wantAll(t, results, 250, fmt.Sprintf("k=%d", miss))
				}
				if took := time.Since(began); took > takes+100*time.Millisecond {
					t.Errorf("it took %v", took)
				}
				o.Drop("k")
			}
			if n := o.Loads.Load(); n != int64(misses) {
				t.Errorf("%d loads for %d misses", n, misses)
			}
		})
	}
}

// A hit is Lookup's value, and nothing else happens.
func TestFetchHit(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c, o := lockkit.New(t, flightlock.Options{}, clients...), &lockkit.Origin{}
		o.Set("k", "v", false)
		f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{})
		wantAll(t, fetching(t.Context(), f, "k", 100), 100, "v")
		if s := f.Stats(); s != (flightlock.FetchStats{Hits: 100}) {
			t.Errorf("%+v", s)
		}
		if n := c.Stats().Commands; n != 0 {
			t.Errorf("%d commands", n)
		}
	})
}

// The first caller's ctx ends before the lock is won, or while Load runs: no other caller notices.
func TestFetchFirstCallerLeaves(t *testing.T) {
	for name, held := range map[string]bool{"contending": true, "loading": false} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{Takes: time.Second}
				other := lockkit.New(t, flightlock.Options{}, clients...)
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
				var l *flightlock.Lock
				if held {
					l = lockkit.Lock(t, other, "k", 10*time.Second)
				}
				first, cancel := context.WithCancel(t.Context())
				leaver := fetching(first, f, "k", 1)
				synctest.Wait()
				rest := fetching(t.Context(), f, "k", 10)
				time.Sleep(100 * time.Millisecond)
				cancel()
				wantErrors(t, leaver, 1, context.Canceled)
				if held {
					lockkit.Release(t, l)
				}
				wantAll(t, rest, 10, "k=1")
			})
		})
	}
}

// All callers leave before the lock is won: the run is canceled, nothing is loaded, no key stays; a
// caller that arrives in that instant gets a run of its own.
func TestFetchAllLeaveBeforeTheLockIsWon(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		other := lockkit.New(t, flightlock.Options{}, clients...)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		l := lockkit.Lock(t, other, "k", 10*time.Second)
		for range 20 {
			ctx, cancel := context.WithCancel(t.Context())
			leavers := fetching(ctx, f, "k", 5)
			time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
			newcomers := make(chan result, 1)
			go cancel()
			late, cancelLate := context.WithTimeout(t.Context(), 3*time.Millisecond)
			go func() {
				v, err := f.Fetch(late, "k")
				newcomers <- result{v, err}
			}()
			wantErrors(t, leavers, 5, context.Canceled)
			wantErrors(t, newcomers, 1, context.DeadlineExceeded)
			cancelLate()
		}
		time.Sleep(100 * time.Millisecond)
		if s := f.Stats(); s.Running != 0 || s.Loads != 0 {
			t.Errorf("%+v", s)
		}
		late := fetching(t.Context(), f, "k", 3)
		synctest.Wait()
		lockkit.Release(t, l)
		wantAll(t, late, 3, "k=1")
		time.Sleep(time.Second)
		if nodes[0].Mini.Exists("lock:k") {
			t.Error("the lock has stayed")
		}
	})
}

// Callers whose deadline is shorter than the load arrive one after the other: it completes once,
// and the cache is filled.
func TestFetchCallersWithShortDeadlines(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		for range 15 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if v, err := f.Fetch(ctx, "k"); err == nil && v != "k=1" || err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %q, %v", v, err)
			}
			cancel()
		}
		if v, err := f.Fetch(t.Context(), "k"); v != "k=1" || err != nil || o.Loads.Load() != 1 || f.Stats().Hits == 0 {
			t.Errorf("got %q, %v after %d loads", v, err, o.Loads.Load())
		}
	})
}

// The error of a caller that gives up while another process has the lock names that process, and matches only the
// error of its ctx.
func TestFetchSaysWhoHasTheLock(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), &lockkit.Origin{},
			flightlock.FetchOptions{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.Fetch(ctx, "k")
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, flightlock.ErrNotAcquired) ||
			!strings.Contains(err.Error(), `fetch "k": context deadline exceeded: waiting for its lock: acquire "k"`) ||
			!strings.Contains(err.Error(), fmt.Sprintf("held by %q for ", l.Owner())) {
			t.Error(err)
		}
		lockkit.Release(t, l)
	})
}

var errMine = errors.New("mine")

// Load's error reaches all callers of the run unchanged, and without ErrorHold no others; the next
// caller loads again.
func TestFetchLoadFails(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{}
		o.Load = func(context.Context, string) (string, error) {
			o.Loads.Add(1)
			time.Sleep(time.Second)
			return "not to be seen", errMine
		}
		c := lockkit.New(t, flightlock.Options{}, clients...)
		f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{ErrorHold: -1})
		results := fetching(t.Context(), f, "k", 100)
		for range 100 {
			if r := <-results; r.v != "" || r.err != errMine {
				t.Errorf("got %q, %v; want the error itself", r.v, r.err)
			}
		}
		if n := o.Loads.Load(); n != 1 {
			t.Errorf("%d loads in a row", n)
		}
		_, _ = f.Fetch(t.Context(), "k")
		if s := f.Stats(); s.Loads != 2 || s.LoadFailures != 2 {
			t.Errorf("%+v", s)
		}
		synctest.Wait()
		if n := c.Stats().Held; n != 0 {
			t.Errorf("%d locks held", n)
		}
	})
}

// With failing loads in several processes there is one in each: the first alone, the others, which
// waited for it, at the same time.
func TestFetchFailingLoadsOfManyProcesses(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		o.Load = func(ctx context.Context, key string) (string, error) {
			_, _ = o.PlainLoad(ctx, key)
			return "", errMine
		}
		var all []<-chan result
		for range 4 {
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
			all = append(all, fetching(t.Context(), f, "k", 100))
		}
		for _, results := range all {
			wantErrors(t, results, 100, errMine)
		}
		if n := o.Loads.Load(); n != 4 || o.MostAtOnce() != 3 {
			t.Errorf("%d loads, %d at once; want one per process, three of them at once", n, o.MostAtOnce())
		}
	})
}

// ErrorHold serves the error to newcomers for so long, instead of a load: longer with each failure,
// and not at all after a success.
func TestFetchErrorHold(t *testing.T) {
	for _, opts := range []flightlock.FetchOptions{{}, {ErrorHold: time.Second}, {ErrorHold: time.Minute},
		{ErrorHold: math.MaxInt64}} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			o := &lockkit.Origin{}
			var fails atomic.Bool
			fails.Store(true)
			o.Load = func(context.Context, string) (string, error) {
				o.Loads.Add(1)
				if fails.Load() {
					return "", errMine
				}
				return "v", nil
			}
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
			hold := max(time.Second, opts.ErrorHold)
			for n := int64(1); n <= 8; n++ {
				results := fetching(t.Context(), f, "k", 3)
				for range 3 { // in one run, or just after it
					if r := <-results; !errors.Is(r.err, errMine) {
						t.Errorf("got %v", r.err)
					}
				}
				_, err := f.Fetch(t.Context(), "k")
				var held *flightlock.HeldError
				if !errors.As(err, &held) || held.Err != errMine || strings.Contains(err.Error(), "\n") {
					t.Fatalf("got %v", err)
				}
				if left := time.Until(held.Until); left > hold || left < hold-100*time.Millisecond {
					t.Errorf("after %d failures it is held for %v, want %v", n, left, hold)
				}
				if o.Loads.Load() != n {
					t.Errorf("%d loads, want %d", o.Loads.Load(), n)
				}
				if opts.ErrorHold == math.MaxInt64 {
					return // held when the Fetcher is closed
				}
				time.Sleep(time.Until(held.Until))
				hold = max(min(2*hold, 30*time.Second), opts.ErrorHold)
			}
			fails.Store(false)
			wantAll(t, fetching(t.Context(), f, "k", 3), 3, "v")
			fails.Store(true)
			o.Drop("k")
			_, _ = f.Fetch(t.Context(), "k")
			var held *flightlock.HeldError
			if _, err := f.Fetch(t.Context(), "k"); !errors.As(err, &held) ||
				time.Until(held.Until) > max(time.Second, opts.ErrorHold) {
				t.Errorf("after a success: %v", err)
			}
		})
	}
}

// outcomes of a function of the Source that misbehaves.
func misbehave(how string, unblock <-chan struct{}) error {
	switch how {
	case "error":
		return errMine
	case "panic":
		panic(errMine)
	case "goexit":
		runtime.Goexit()
	case "block":
		<-unblock
	}
	return nil
}

// A Load that panics or calls Goexit is a PanicError for all its callers, with the value and the
// stack; the Fetcher continues.
func TestFetchLoadPanics(t *testing.T) {
	for _, how := range []string{"panic", "goexit"} {
		t.Run(how, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{}
				o.Load = func(ctx context.Context, key string) (string, error) {
					time.Sleep(time.Second)
					if o.Loads.Add(1) == 1 {
						return "", misbehave(how, nil)
					}
					return "good", nil
				}
				c := lockkit.New(t, flightlock.Options{}, clients...)
				f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{ErrorHold: -1})
				results := fetching(t.Context(), f, "k", 10)
				for range 10 {
					r := <-results
					var p *flightlock.PanicError
					if !errors.As(r.err, &p) || r.v != "" {
						t.Fatalf("got %q, %v", r.v, r.err)
					}
					if p.Op != "Load" || p.Goexit != (how == "goexit") || !strings.Contains(string(p.Stack), "misbehave") ||
						!strings.Contains(p.Error(), "Load") || strings.Contains(p.Error(), "\n") {
						t.Errorf("%+v\n%s", p, p.Stack)
					}
					if how == "panic" && (p.Value != errMine || !errors.Is(r.err, errMine)) {
						t.Errorf("value %v", p.Value)
					}
				}
				synctest.Wait()
				if n := c.Stats().Held; n != 0 {
					t.Errorf("%d locks held", n)
				}
				wantAll(t, fetching(t.Context(), f, "k", 10), 10, "good")
			})
		})
	}
}

// wantLoadTimeout expects errors that name LoadTimeout, and not the end of a caller's ctx.
func wantLoadTimeout(t *testing.T, results <-chan result, n int) {
	t.Helper()
	for range n {
		if r := <-results; r.err == nil || !strings.Contains(r.err.Error(), "LoadTimeout") ||
			errors.Is(r.err, context.DeadlineExceeded) {
			t.Errorf("got %q, %v", r.v, r.err)
		}
	}
}

// A Load that ignores its ctx: its callers get an error after LoadTimeout, and so do others until
// it returns; the lock is free, so other processes load; there is no second Load in this one.
func TestFetchLoadBlocks(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		unblock := make(chan struct{})
		o := &lockkit.Origin{Takes: time.Millisecond}
		blocked := &lockkit.Origin{Load: func(context.Context, string) (string, error) {
			o.Loads.Add(1)
			return "late", misbehave("block", unblock)
		}, Lookup: o.PlainLookup, Store: o.PlainStore}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), blocked,
			flightlock.FetchOptions{LoadTimeout: time.Second})
		began := time.Now()
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 10), 10)
		if took := time.Since(began); took < time.Second || took > 1200*time.Millisecond {
			t.Errorf("the callers got it after %v", took)
		}
		wantLoadTimeout(t, fetching(t.Context(), f, "k", 10), 10)
		if n := o.Loads.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
		g := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		began = time.Now()
		wantAll(t, fetching(t.Context(), g, "k", 10), 10, "k=2")
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("another process waited %v", took)
		}
		close(unblock)
		synctest.Wait()
		wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=2") // not the late one
		if s := f.Stats(); s.Running != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A Store that fails in any way is counted, and the callers have their value; one that blocks
// delays them by no more than NodeTimeout, and the next ones not at all.
func TestFetchStoreMisbehaves(t *testing.T) {
	for _, how := range []string{"error", "panic", "goexit", "block"} {
		t.Run(how, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				unblock := make(chan struct{})
				o := &lockkit.Origin{Takes: time.Second}
				o.Store = func(ctx context.Context, key, v string, l *flightlock.Lock) error {
					o.Stores.Add(1)
					return misbehave(how, unblock)
				}
				c := lockkit.New(t, flightlock.Options{NodeTimeout: 50 * time.Millisecond}, clients...)
				f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{TTL: 10 * time.Second})
				began := time.Now()
				wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=1")
				if took := time.Since(began); took > 1100*time.Millisecond {
					t.Errorf("the callers waited %v", took)
				}
				if how == "block" {
					began := time.Now()
					wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=1")
					if took := time.Since(began); took != 0 {
						t.Errorf("while Store runs callers waited %v", took)
					}
					time.Sleep(11 * time.Second) // past TTL nobody waits for this Store any more
					wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=2")
				}
				close(unblock)
				synctest.Wait()
				s := f.Stats()
				if how != "block" && s.StoreFailures != 1 {
					t.Errorf("%+v", s)
				}
				time.Sleep(time.Second)
				if n := c.Stats().Held; n != 0 || f.Stats().Running != 0 {
					t.Errorf("%d locks held, %+v", n, f.Stats())
				}
			})
		})
	}
}

// A Lookup that fails is not a miss: with LoadLocally one load follows, without a lock, and
// with FailClosed its error. A panic of a caller's own Lookup is the caller's.
func TestFetchLookupMisbehaves(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			o := &lockkit.Origin{Takes: time.Second}
			o.Lookup = func(context.Context, string) (string, flightlock.Freshness, error) {
				return "ignored", flightlock.Fresh, errMine
			}
			o.Store = func(_ context.Context, _, _ string, l *flightlock.Lock) error {
				if o.Stores.Add(1); l != nil {
					t.Error("Store got a lock")
				}
				return nil
			}
			c := lockkit.New(t, flightlock.Options{}, clients...)
			f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{OnUnavailable: policy})
			results := fetching(t.Context(), f, "k", 10)
			if policy == flightlock.FailClosed {
				wantErrors(t, results, 10, errMine)
				return
			}
			wantAll(t, results, 10, "k=1")
			s := f.Stats()
			if s.Loads != 1 || s.UnlockedLoads != 1 || s.LookupErrors != 10 || o.Stores.Load() != 1 || c.Stats().Commands != 0 {
				t.Errorf("%+v, %d stores, %d commands", s, o.Stores.Load(), c.Stats().Commands)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := f.Fetch(ctx, "k"); !errors.Is(err, context.Canceled) || !errors.Is(err, errMine) {
				t.Errorf("with an ended ctx: %v", err)
			}
		})
	}
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { panic(errMine) }}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		defer func() {
			if r := recover(); r != errMine {
				t.Errorf("recovered %v", r)
			}
		}()
		_, _ = f.Fetch(t.Context(), "k")
	})
}

// A Lookup that panics or exits on the run's own goroutine, before the lock is won or after, never
// ends the process: it counts as a Lookup that fails.
func TestFetchLookupMisbehavesInTheFlight(t *testing.T) {
	for _, how := range []string{"error", "panic", "goexit", "block"} {
		for _, held := range []bool{false, true} {
			for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
				t.Run(fmt.Sprintf("%s/held=%v/policy=%d", how, held, policy), func(t *testing.T) {
					testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
						unblock := make(chan struct{})
						defer close(unblock)
						o := &lockkit.Origin{Takes: time.Second}
						var first atomic.Bool
						o.Lookup = func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
							if !first.Swap(true) {
								return "", flightlock.Miss, nil
							}
							return "", flightlock.Fresh, misbehave(how, unblock)
						}
						c := lockkit.New(t, flightlock.Options{}, clients...)
						f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{OnUnavailable: policy, LoadTimeout: 2 * time.Second,
							WaitTimeout: time.Minute})
						if held {
							other := lockkit.New(t, flightlock.Options{}, clients...)
							l := lockkit.Lock(t, other, "k", time.Minute)
							defer lockkit.Release(t, l)
						}
						results := fetching(t.Context(), f, "k", 1)
						r := <-results
						switch {
						case policy == flightlock.LoadLocally && (r.v != "k=1" || r.err != nil),
							policy == flightlock.FailClosed && (r.err == nil || !strings.Contains(r.err.Error(), "Lookup")):
							t.Errorf("got %q, %v", r.v, r.err)
						}
						if errors.Is(r.err, context.DeadlineExceeded) {
							t.Errorf("%v looks as if the caller's ctx had ended", r.err)
						}
						wantUnlocked := held && policy == flightlock.LoadLocally
						looks := uint64(1)
						if held && how == "block" { // it may be busy
							looks = 3
						}
						if s := f.Stats(); (s.UnlockedLoads == 1) != wantUnlocked || s.LookupErrors != looks {
							t.Errorf("%+v", s)
						}
					})
				})
			}
		}
	}
}

// The lock is lost while Load runs: the value is served and not stored.
func TestFetchLockLostDuringLoad(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: 10 * time.Second}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{TTL: time.Second})
		results := fetching(t.Context(), f, "k", 10)
		time.Sleep(time.Second)
		for _, n := range nodes {
			n.Mini.Del("lock:k")
		}
		wantAll(t, results, 10, "k=1")
		if s := f.Stats(); o.Stores.Load() != 0 || s.Lost != 1 {
			t.Errorf("%d stores, %+v", o.Stores.Load(), s)
		}
		wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=2")
		if o.Stores.Load() != 1 {
			t.Errorf("%d stores", o.Stores.Load())
		}
	})
}

// The value is deleted while Load runs: callers get what was loaded, and it is stored.
func TestFetchValueDeletedDuringLoad(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		o.Set("k", "old", true)
		if v, err := f.Fetch(t.Context(), "k"); v != "old" || err != nil {
			t.Errorf("got %q, %v", v, err)
		}
		synctest.Wait()
		o.Drop("k")
		wantAll(t, fetching(t.Context(), f, "k", 10), 10, "k=1") // they join the refresh
		if v, err := f.Fetch(t.Context(), "k"); v != "k=1" || err != nil || o.Loads.Load() != 1 {
			t.Errorf("got %q, %v, %d loads", v, err, o.Loads.Load())
		}
	})
}

// A stale value is returned at once, and one refresh for all processes runs in the background, also
// when the caller's ctx ends.
func TestFetchStale(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		o.Set("k", "old", true)
		var fs []*flightlock.Fetcher[string]
		for range 4 {
			fs = append(fs, lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
				flightlock.FetchOptions{}))
		}
		began := time.Now()
		for range 3 {
			for _, f := range fs {
				ctx, cancel := context.WithCancel(t.Context())
				wantAll(t, fetching(ctx, f, "k", 20), 20, "old")
				cancel()
			}
		}
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("they waited %v", took)
		}
		time.Sleep(2 * time.Second)
		for _, f := range fs {
			wantAll(t, fetching(t.Context(), f, "k", 1), 1, "k=1")
			if s := f.Stats(); s.Stale != 60 || s.Hits != 1 || s.Misses != 0 || s.Running != 0 {
				t.Errorf("%+v", s)
			}
		}
		if n := o.Loads.Load(); n != 1 {
			t.Errorf("%d loads", n)
		}
	})
}

// Callers that miss while a refresh cannot get the lock join it, and then it waits for the lock on
// their behalf.
func TestFetchMissJoinsARefresh(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		o.Set("k", "old", true)
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", 10*time.Second)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		wantAll(t, fetching(t.Context(), f, "warm", 1), 1, "warm=1")
		nodes[0].SetDelay(5 * time.Millisecond) // the attempt is under way
		wantAll(t, fetching(t.Context(), f, "k", 1), 1, "old")
		o.Drop("k")
		results := fetching(t.Context(), f, "k", 10)
		time.Sleep(5 * time.Second)
		lockkit.Release(t, l)
		wantAll(t, results, 10, "k=2")
		if s := f.Stats(); s.Loads != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// Another process stores a stale value while callers wait for the lock: they get it.
func TestFetchFindsAStaleValueWhileItWaits(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		results := fetching(t.Context(), f, "k", 10)
		time.Sleep(time.Second)
		o.Set("k", "stale", true)
		wantAll(t, results, 10, "stale")
		lockkit.Release(t, l)
		synctest.Wait()
		if n := o.Loads.Load(); n > 1 {
			t.Errorf("%d loads", n)
		}
	})
}

// The nodes are down: by default there is one load per key at a time and MaxUnlockedLoads in all,
// and callers get values; with FailClosed they get ErrUnavailable.
func TestFetchWithoutRedis(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
		testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			for _, n := range nodes {
				n.Down(true)
			}
			var running, most atomic.Int64
			o := &lockkit.Origin{Takes: 100 * time.Millisecond}
			o.Load = func(ctx context.Context, key string) (string, error) {
				n := running.Add(1)
				defer running.Add(-1)
				for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
				_, err := o.PlainLoad(ctx, key)
				return "v", err
			}
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
				flightlock.FetchOptions{OnUnavailable: policy, MaxUnlockedLoads: 4})
			var all []<-chan result
			for i := range 40 {
				all = append(all, fetching(t.Context(), f, fmt.Sprint("k", i), 5))
			}
			for _, results := range all {
				if policy == flightlock.LoadLocally {
					wantAll(t, results, 5, "v")
				} else {
					wantErrors(t, results, 5, flightlock.ErrUnavailable)
				}
			}
			if policy == flightlock.FailClosed {
				return
			}
			if o.MostAtOnce() != 1 || most.Load() != 4 || o.Loads.Load() != 40 || o.Stores.Load() != 40 {
				t.Errorf("%d loads of a key at once, %d in all, %d loads, %d stores", o.MostAtOnce(), most.Load(), o.Loads.Load(),
					o.Stores.Load())
			}
			// A refresh in the background does not queue for a slot that nobody waits for.
			o.Set("k0", "old", true)
			wantAll(t, fetching(t.Context(), f, "k0", 1), 1, "old")
			time.Sleep(time.Second)
			wantAll(t, fetching(t.Context(), f, "k0", 1), 1, "v")
		})
	}
}

// Loads without a lock that never end keep their slots; others get an error after WaitTimeout and
// do not wait forever.
func TestFetchWithoutRedisAndWithoutSlots(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		nodes[0].Down(true)
		unblock := make(chan struct{})
		defer close(unblock)
		o := &lockkit.Origin{Load: func(context.Context, string) (string, error) { return "", misbehave("block", unblock) }}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{MaxUnlockedLoads: 1, LoadTimeout: time.Minute, WaitTimeout: time.Second})
		first := fetching(t.Context(), f, "a", 1)
		synctest.Wait()
		wantErrors(t, fetching(t.Context(), f, "b", 3), 3, flightlock.ErrUnavailable)
		wantLoadTimeout(t, first, 1)
	})
}

// A Lookup that WaitTimeout cuts short has not failed: the callers waited for the lock.
func TestFetchWaitTimeoutDuringLookup(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var looks atomic.Int64
		o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
			if looks.Add(1) > 1 {
				<-ctx.Done()
			}
			return "", flightlock.Miss, ctx.Err()
		}}
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
		defer lockkit.Release(t, l)
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{OnUnavailable: flightlock.FailClosed, WaitTimeout: 20 * time.Second,
				LookupTimeout: 30 * time.Second})
		wantErrors(t, fetching(t.Context(), f, "k", 1), 1, flightlock.ErrNotAcquired)
		if n, failed := looks.Load(), f.Stats().LookupErrors; n != 2 || failed != 0 {
			t.Errorf("%d lookups, %d of them failed", n, failed)
		}
	})
}

// Another process holds the lock and does not load: after WaitTimeout, and not before, the
// policy applies. The error does not look as if the caller's ctx had ended.
func TestFetchWaitTimeout(t *testing.T) {
	for _, policy := range []flightlock.Policy{flightlock.LoadLocally, flightlock.FailClosed} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			o := &lockkit.Origin{Takes: time.Second}
			l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "k", time.Minute)
			defer lockkit.Release(t, l)
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
				flightlock.FetchOptions{OnUnavailable: policy, WaitTimeout: 30 * time.Second})
			began := time.Now()
			results := fetching(t.Context(), f, "k", 10)
			if policy == flightlock.LoadLocally {
				wantAll(t, results, 10, "k=1")
			} else {
				for range 10 {
					r := <-results
					if !errors.Is(r.err, flightlock.ErrNotAcquired) || errors.Is(r.err, context.DeadlineExceeded) ||
						!strings.Contains(r.err.Error(), "WaitTimeout") {
						t.Errorf("got %v", r.err)
					}
				}
			}
			if took := time.Since(began); took < 30*time.Second || took > 32*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// Fetch inside Load: for another key it works; for the same key, or in a circle, it is an error at
// once, and not a deadlock.
func TestFetchInsideLoad(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		var f, g *flightlock.Fetcher[string]
		o := &lockkit.Origin{}
		o.Load = func(ctx context.Context, key string) (string, error) {
			time.Sleep(time.Second)
			switch key {
			case "self":
				return f.Fetch(ctx, "self")
			case "other":
				v, err := f.Fetch(ctx, "leaf")
				return "other of " + v, err
			case "a":
				return f.Fetch(ctx, "b")
			case "b":
				return g.Fetch(ctx, "c")
			case "c":
				return f.Fetch(ctx, "a")
			}
			return key, nil
		}
		f, g = lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{}), lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{})
		began := time.Now()
		if v, err := f.Fetch(t.Context(), "self"); !errors.Is(err, flightlock.ErrInvalid) ||
			!strings.Contains(err.Error(), "inside a Load") {
			t.Errorf("same key: %q, %v", v, err)
		}
		if v, err := f.Fetch(t.Context(), "other"); v != "other of leaf" || err != nil {
			t.Errorf("another key: %q, %v", v, err)
		}
		// All of the circle at once: the caller that closes it gets the error.
		a, b, cc := fetching(t.Context(), f, "a", 1), fetching(t.Context(), f, "b", 1), fetching(t.Context(), g, "c", 1)
		for _, results := range []<-chan result{a, b, cc} {
			wantErrors(t, results, 1, flightlock.ErrInvalid)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// Load may lock its own key: its ctx carries the lock. And a caller that holds the lock on
// the key itself does not wait for itself, whether it comes first or joins.
func TestFetchAndLocksOnTheSameKey(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		o := &lockkit.Origin{}
		o.Load = func(ctx context.Context, key string) (v string, err error) {
			o.Loads.Add(1)
			err = c.Do(ctx, key, time.Second, nil, func(_ context.Context, l *flightlock.Lock) error {
				if l.Fence() != flightlock.FromContext(ctx).Fence() {
					t.Error("not the lock of the load")
				}
				v = "v"
				return nil
			})
			return v, err
		}
		f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{})
		began := time.Now()
		wantAll(t, fetching(t.Context(), f, "k", 3), 3, "v")
		for _, others := range []int{0, 5} {
			for range 10 {
				o.Drop("k")
				if err := c.Do(t.Context(), "k", 10*time.Second, nil, func(ctx context.Context, l *flightlock.Lock) error {
					results := fetching(t.Context(), f, "k", others)
					if others > 0 {
						time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
					}
					wantAll(t, fetching(ctx, f, "k", 2), 2, "v")
					wantAll(t, results, others, "v")
					return l.Err()
				}); err != nil {
					t.Error(err)
				}
			}
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		// A caller that leaves takes its loan with it.
		o.Drop("k")
		l := lockkit.Lock(t, c, "k", 10*time.Second)
		ctx, cancel := context.WithCancel(l.Context(t.Context()))
		cancel()
		_, _ = f.Fetch(ctx, "k")
		lockkit.Release(t, l)
		synctest.Wait()
		if nodes[0].Mini.Exists("lock:k") {
			t.Error("the lock was not given back")
		}
	})
}

// No value of a caller's ctx reaches the run, unless Values passes it on; no deadline ever.
func TestFetchValues(t *testing.T) {
	type key struct{}
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		for _, values := range []func(context.Context) context.Context{
			nil,
			func(caller context.Context) context.Context { return caller },
			func(context.Context) context.Context { return nil },
		} {
			var got []any
			o := &lockkit.Origin{Load: func(ctx context.Context, _ string) (string, error) {
				if deadline, _ := ctx.Deadline(); time.Until(deadline) != 30*time.Second {
					t.Errorf("Load has %v", time.Until(deadline))
				}
				got = append(got, ctx.Value(key{}))
				return "v", ctx.Err()
			}}
			f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
				flightlock.FetchOptions{Values: values})
			ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, 7), time.Second)
			wantAll(t, fetching(ctx, f, "k", 1), 1, "v")
			cancel()
			want := any(nil)
			if values != nil && values(ctx) != nil {
				want = 7
			}
			if len(got) != 1 || got[0] != want {
				t.Errorf("got %v, want %v", got, want)
			}
		}
	})
}

// Close refuses new callers and those that wait for a load that has not begun; it waits for loads
// that have.
func TestFetcherClose(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		o := &lockkit.Origin{Takes: time.Second}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, flightlock.FetchOptions{})
		l := lockkit.Lock(t, lockkit.New(t, flightlock.Options{}, clients...), "held", 10*time.Second)
		defer lockkit.Release(t, l)
		waiting, loading := fetching(t.Context(), f, "held", 10), fetching(t.Context(), f, "k", 10)
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- f.Close(t.Context()) }()
		wantErrors(t, waiting, 10, flightlock.ErrClosed)
		if _, err := f.Fetch(t.Context(), "new"); !errors.Is(err, flightlock.ErrClosed) {
			t.Errorf("a newcomer: %v", err)
		}
		wantAll(t, loading, 10, "k=1")
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if s := f.Stats(); s.Running != 0 || o.Stores.Load() != 1 {
			t.Errorf("%+v, %d stores", s, o.Stores.Load())
		}
		if err := f.Close(t.Context()); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// When its ctx ends, Close ends the ctx of running loads; their callers get ErrClosed. A
// Load that ignores its ctx is an error of Close, which can be called again.
func TestFetcherCloseWithoutPatience(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			unblock := make(chan struct{})
			o := &lockkit.Origin{Takes: time.Hour}
			if ignores {
				o.Load = func(context.Context, string) (string, error) { return "", misbehave("block", unblock) }
			}
			c := lockkit.New(t, flightlock.Options{}, clients...)
			f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{LoadTimeout: 2 * time.Hour})
			results := fetching(t.Context(), f, "k", 10)
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			err := f.Close(ctx)
			wantErrors(t, results, 10, flightlock.ErrClosed)
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
			if ignores != errors.Is(err, context.DeadlineExceeded) || !ignores && err != nil {
				t.Errorf("got %v", err)
			}
			if n := c.Stats().Held; n != 0 {
				t.Errorf("%d locks held", n)
			}
			close(unblock)
			if err := f.Close(t.Context()); err != nil {
				t.Errorf("second Close: %v", err)
			}
		})
	}
}

// Close with an ended ctx while the run looks up again, with the lock: its callers get ErrClosed,
// whether Lookup honors its ctx or not.
func TestFetcherCloseDuringLookup(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			unblock := make(chan struct{})
			type callers struct{} // no value of a caller's ctx reaches the run
			o := &lockkit.Origin{Lookup: func(ctx context.Context, _ string) (string, flightlock.Freshness, error) {
				if ctx.Value(callers{}) != nil {
					return "", flightlock.Miss, nil
				}
				if ignores {
					<-unblock
				}
				<-ctx.Done()
				return "", flightlock.Miss, ctx.Err()
			}}
			c := lockkit.New(t, flightlock.Options{}, clients...)
			f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{})
			results := fetching(context.WithValue(t.Context(), callers{}, 1), f, "k", 3)
			synctest.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := f.Close(ctx); ignores != errors.Is(err, context.Canceled) {
				t.Errorf("Close: %v", err)
			}
			wantErrors(t, results, 3, flightlock.ErrClosed)
			close(unblock)
			if err := f.Close(t.Context()); err != nil || o.Loads.Load() != 0 {
				t.Errorf("second Close: %v, %d loads", err, o.Loads.Load())
			}
			if n := c.Stats().Held; n != 0 {
				t.Errorf("%d locks held", n)
			}
		})
	}
}

// A Client that was closed before its Fetcher: ErrClosed, whatever the policy.
func TestFetchOverAClosedClient(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		f := lockkit.NewFetcher(t, c, &lockkit.Origin{}, flightlock.FetchOptions{})
		lockkit.Close(t, c)
		wantErrors(t, fetching(t.Context(), f, "k", 3), 3, flightlock.ErrClosed)
	})
}

func TestFetcherBadInput(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{}, clients...)
		for field, opts := range map[string]flightlock.FetchOptions{
			"TTL":              {TTL: time.Hour},
			"LoadTimeout":      {LoadTimeout: -1},
			"WaitTimeout":      {WaitTimeout: -1},
			"OnUnavailable":    {OnUnavailable: 2},
			"MaxUnlockedLoads": {MaxUnlockedLoads: -1},
			"MaxLoads":         {MaxLoads: -1},
			"LookupTimeout":    {LookupTimeout: -1},
			"Name":             {Name: "\xff"},
		} {
			if _, err := flightlock.NewFetcher(c, (&lockkit.Origin{}).Source(), opts); !errors.Is(err, flightlock.ErrInvalid) ||
				!strings.Contains(err.Error(), field) {
				t.Errorf("%s: %v", field, err)
			}
		}
		full := (&lockkit.Origin{}).Source()
		for field, src := range map[string]flightlock.Source[string]{
			"Lookup": {Load: full.Load, Store: full.Store}, "Load": {Lookup: full.Lookup,
				Store: full.Store}, "Store": {Lookup: full.Lookup, Load: full.Load},
		} {
			if _, err := flightlock.NewFetcher(c, src, flightlock.FetchOptions{}); !errors.Is(err, flightlock.ErrInvalid) ||
				!strings.Contains(err.Error(), field) {
				t.Errorf("%s: %v", field, err)
			}
		}
		if _, err := flightlock.NewFetcher(nil, full, flightlock.FetchOptions{}); !errors.Is(err, flightlock.ErrInvalid) {
			t.Errorf("no client: %v", err)
		}
		small := lockkit.New(t, flightlock.Options{MaxTTL: time.Second}, clients...)
		lockkit.NewFetcher(t, small, &lockkit.Origin{}, flightlock.FetchOptions{}) // the default TTL adapts
		f := lockkit.NewFetcher(t, c, &lockkit.Origin{}, flightlock.FetchOptions{})
		for _, key := range []string{"", strings.Repeat("k", 5000)} {
			if _, err := f.Fetch(t.Context(), key); !errors.Is(err, flightlock.ErrInvalid) {
				t.Errorf("key of %d bytes: %v", len(key), err)
			}
		}
	})
}

// Under random callers that arrive and leave, in several processes, a key never has two loads at
// once, nobody hangs, and nothing stays; where loads fail, there is at most one in each process.
func TestFetchUnderFire(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint("fails=", fails), func(t *testing.T) { fetchUnderFire(t, fails) })
	}
}

func fetchUnderFire(t *testing.T, fails bool) {
	m := redistest.StartMini(t)
	m.ClockTTL(true)
	o := &lockkit.Origin{}
	o.Load = func(ctx context.Context, key string) (string, error) {
		o.TakesRandom(ctx, key)
		switch n := rand.IntN(10); {
		case !fails:
		case n == 0:
			return "", errMine
		case n == 1:
			panic(errMine)
		case n == 2:
			runtime.Goexit()
		}
		return "v", nil
	}
	var fs []*flightlock.Fetcher[string]
	for range 3 {
		c := lockkit.New(t, flightlock.Options{NodeTimeout: 5 * time.Second}, redistest.MiniClient(t, m))
		fs = append(fs, lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{LoadTimeout: time.Minute, ErrorHold: -1}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	var got, failed, left atomic.Int64
	for i := range 60 {
		wg.Go(func() {
			for ctx.Err() == nil {
				caller, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(8000))*time.Microsecond)
				v, err := fs[i%3].Fetch(caller, fmt.Sprint("k", rand.IntN(2)))
				cancel()
				var p *flightlock.PanicError
				switch {
				case err == nil && v == "v":
					got.Add(1)
				case errors.Is(err, errMine), errors.As(err, &p) && p.Goexit:
					failed.Add(1)
				case errors.Is(err, context.DeadlineExceeded) && v == "":
					left.Add(1)
				default:
					t.Errorf("got %q, %v", v, err)
				}
				if rand.IntN(20) == 0 {
					o.Drop(fmt.Sprint("k", rand.IntN(2)))
				}
			}
		})
	}
	wg.Wait()
	if most := o.MostAtOnce(); most > 3 || most > 1 && !fails {
		t.Errorf("%d loads of one key at once", o.MostAtOnce())
	}
	t.Logf("%d values, %d failures, %d left, %d loads", got.Load(), failed.Load(), left.Load(), o.Loads.Load())
	redistest.Eventually(t, 10*time.Second, "all flights are over", func() bool {
		return fs[0].Stats().Running+fs[1].Stats().Running+fs[2].Stats().Running == 0 && !m.Exists("lock:k0") &&
			!m.Exists("lock:k1")
	})
}

// A hit costs no allocation beyond Lookup's.
func TestFetchHitAllocatesNothing(t *testing.T) {
	c := lockkit.New(t, flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
	f, err := flightlock.NewFetcher(c, flightlock.Source[int]{
		Lookup: func(context.Context, string) (int, flightlock.Freshness, error) { return 7, flightlock.Fresh, nil },
		Load:   func(context.Context, string) (int, error) { return 0, errMine },
		Store:  func(context.Context, string, int, *flightlock.Lock) error { return nil },
	}, flightlock.FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if n := testing.AllocsPerRun(1000, func() {
		if v, err := f.Fetch(ctx, "k"); v != 7 || err != nil {
			t.Fatal(v, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per hit", n)
	}
	if err := f.Close(ctx); err != nil {
		t.Error(err)
	}
}

// BenchmarkFetchHit shows what Fetch adds to Lookup.
func BenchmarkFetchHit(b *testing.B) {
	c := lockkit.New(b, flightlock.Options{}, redistest.MiniClient(b, redistest.StartMini(b)))
	lookup := func(context.Context, string) (int, flightlock.Freshness, error) { return 7, flightlock.Fresh, nil }
	f, err := flightlock.NewFetcher(c, flightlock.Source[int]{
		Lookup: lookup,
		Load:   func(context.Context, string) (int, error) { return 0, errMine },
		Store:  func(context.Context, string, int, *flightlock.Lock) error { return nil },
	}, flightlock.FetchOptions{})
	if err != nil {
		b.Fatal(err)
	}
	for name, get := range map[string]func(context.Context, string) (int, error){
		"with=Fetch":  f.Fetch,
		"with=Lookup": func(ctx context.Context, key string) (int, error) { v, _, err := lookup(ctx, key); return v, err },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				ctx := context.Background()
				for pb.Next() {
					if v, err := get(ctx, "k"); v != 7 || err != nil {
						b.Error(v, err)
					}
				}
			})
		})
	}
}

// Every time and count may be the largest possible: no sum of them overflows.
func TestFetchWithoutLimits(t *testing.T) {
	for name, opts := range map[string]flightlock.FetchOptions{
		"LoadTimeout":                 {LoadTimeout: math.MaxInt64},
		"WaitTimeout set":             {LoadTimeout: math.MaxInt64, WaitTimeout: time.Minute},
		"LookupTimeout":               {LoadTimeout: math.MaxInt64, LookupTimeout: math.MaxInt64, MaxLoads: math.MaxInt},
		"LoadTimeout and WaitTimeout": {LoadTimeout: math.MaxInt64, WaitTimeout: math.MaxInt64},
		"just below":                  {LoadTimeout: math.MaxInt64 - 200*time.Millisecond, WaitTimeout: math.MaxInt64 - 1},
		"all": {TTL: time.Minute, LoadTimeout: math.MaxInt64, WaitTimeout: math.MaxInt64,
			MaxUnlockedLoads: math.MaxInt, ErrorHold: math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
				o := &lockkit.Origin{Takes: 2 * time.Second}
				f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
				other := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o, opts)
				mine, theirs := fetching(t.Context(), f, "k", 3), fetching(t.Context(), other, "k", 3)
				wantAll(t, mine, 3, "k=1")
				wantAll(t, theirs, 3, "k=1")
				for _, n := range nodes { // without a lock
					n.Down(true)
				}
				if v, err := f.Fetch(t.Context(), "l"); err != nil || v != "l=2" {
					t.Errorf("without nodes: %q, %v", v, err)
				}
				for _, n := range nodes {
					n.Down(false)
				}
			})
		})
	}
}
