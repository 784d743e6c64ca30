package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
)

// A Loader that panics or calls Goexit is a PanicError for all its callers; the Fetcher continues.
func TestALoadPanics(t *testing.T) {
	for _, how := range []string{"panic", "goexit"} {
		cache := &fetchkit.Cache{}
		cache.OnLoad = func(context.Context, []string) error {
			time.Sleep(time.Second)
			if cache.Loads.Load() > 1 {
				return nil
			}
			return misbehave(how, nil)
		}
		inFleet(t, 1, cache, fetch.Options{ErrorHold: -1}, func(t *testing.T, x *fleet) {
			results := getting(t.Context(), x.fs[0], "k", 10)
			for range 10 {
				var p *flightlock.PanicError
				err := (<-results).err
				if !errors.As(err, &p) || p.Op != "Load" || p.Goexit != (how == "goexit") ||
					!strings.Contains(string(p.Stack), "misbehave") || strings.Contains(p.Error(), "\n") ||
					how == "panic" && !errors.Is(err, errMine) {
					t.Fatalf("%v, %+v", err, p)
				}
			}
			getting(t.Context(), x.fs[0], "k", 10).want(t, "k@0")
		})
	}
}

// A Loader that ignores its ctx: its callers get an error after LoadTimeout, and so do others until it
// returns, also when the error is not held any more; its locks are free, so other processes load; there is no
// second load in this one, and its slot stays taken.
func TestALoadThatIgnoresItsCtx(t *testing.T) {
	for _, keys := range oneAndMany {
		var unblock chan struct{}
		var blocks atomic.Bool
		cache := &fetchkit.Cache{OnLoad: func(context.Context, []string) error {
			if blocks.CompareAndSwap(true, false) {
				<-unblock
				return errMine
			}
			return nil
		}}
		opts := fetch.Options{LoadTimeout: time.Second, ErrorHold: -1, MaxLoads: 1, WaitTimeout: 2 * time.Second}
		inFleet(t, 2, cache, opts, func(t *testing.T, x *fleet) {
			unblock = make(chan struct{})
			blocks.Store(true)
			for i := range 2 {
				began := time.Now()
				for _, err := range failMany(t, x.fs[0], keys, nil) {
					if !strings.Contains(err.Error(), "LoadTimeout") || errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
				}
				within(t, began, time.Duration(1-i)*time.Second, time.Duration(1-i)*1200*time.Millisecond)
				synctest.Wait()
				if locks := x.locks(); len(locks) > 0 {
					t.Errorf("it has %v", locks)
				}
			}
			x.wantMany(t, x.fs[1], keys)
			getting(t.Context(), x.fs[0], "other", 1).fail(t, flightlock.ErrNotAcquired)
			close(unblock)
			synctest.Wait()
			x.wantMany(t, x.fs[0], append(keys, "other"))
			equal(t, "loads", cache.LoadsOf("k0"), 2)
		})
	}
}

// With failing loads in several processes there is one in each: the first alone, the others, which waited for
// it, at the same time. A process whose own load does not fail has no error.
func TestFailingLoadsOfManyProcesses(t *testing.T) {
	for how, fail := range map[string]func(ctx context.Context) error{
		"error":   func(ctx context.Context) error { return errors.Join(errMine, wait(ctx, 300*time.Millisecond)) },
		"timeout": func(ctx context.Context) error { <-ctx.Done(); return errMine },
	} {
		for i, keys := range [][]string{{"k0"}, fetchkit.Keys(0, 20), {"k0"}, fetchkit.Keys(0, 20)} {
			t.Run(fmt.Sprintf("%s/FailClosed=%v/keys=%d", how, i > 1, len(keys)), func(t *testing.T) {
				cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, _ []string) error { return fail(ctx) }}
				opts := fetch.Options{FailClosed: i > 1, LoadTimeout: 300 * time.Millisecond, WaitTimeout: time.Minute}
				inFleet(t, 5, cache, opts, func(t *testing.T, x *fleet) {
					began := time.Now()
					x.all(time.Millisecond, func(f *fetch.Fetcher[string]) { failMany(t, f, keys, errMine) })
					within(t, began, 600*time.Millisecond, 700*time.Millisecond)
					if most, _ := cache.Most(); most != 4 || cache.LoadsOf("k0") != 5 {
						t.Errorf("%d loads of a key, %d at once", cache.LoadsOf("k0"), most)
					}
				})
			})
		}
	}
}

// One of the processes fails: only its own callers see errors, and the others do not wait for one another.
func TestErrorsDoNotCrossProcesses(t *testing.T) {
	shared := &fetchkit.Cache{Takes: 300 * time.Millisecond}
	inFleet(t, 5, shared, fetch.Options{}, func(t *testing.T, x *fleet) {
		bad, err := fetch.New(x.clients[0], shared.Store(),
			func(context.Context, []string) (map[string]string, error) { return nil, errMine }, fetch.Options{})
		testkit.Must(t, err)
		for _, key := range fetchkit.Keys(0, 5) {
			began := time.Now()
			failing := getting(t.Context(), bad, key, 5)
			synctest.Wait()
			x.all(0, func(f *fetch.Fetcher[string]) { getting(t.Context(), f, key, 5).want(t, key+"@0") })
			within(t, began, 0, 650*time.Millisecond)
			for range cap(failing) {
				if err := (<-failing).err; err != nil && !errors.Is(err, errMine) {
					t.Error(err)
				}
			}
		}
	})
}

// The deadline of a load, and one of its own, are no caller's, also where its error is held.
func TestWhoseDeadlineItWas(t *testing.T) {
	mine := fmt.Errorf("%w: %w", errMine, context.DeadlineExceeded)
	cache := &fetchkit.Cache{OnLoad: func(ctx context.Context, keys []string) error {
		switch keys[0] {
		case "own":
			return mine
		case "panics":
			panic(mine)
		}
		<-ctx.Done()
		return ctx.Err()
	}}
	inFleet(t, 1, cache, fetch.Options{LoadTimeout: time.Second}, func(t *testing.T, x *fleet) {
		for _, key := range []string{"own", "own", "LoadTimeout", "LoadTimeout", "panics", "panics"} {
			_, err := x.fs[0].Get(t.Context(), key)
			if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "deadline") ||
				key != "LoadTimeout" && !errors.Is(err, errMine) {
				t.Errorf("%s: %v", key, err)
			}
		}
	})
}

// A key that the origin does not have is no failed load: nobody is told, nothing is held, and it is stored as
// absent.
func TestAKeyThatDoesNotExist(t *testing.T) {
	var h heard
	var there atomic.Bool
	cache := &fetchkit.Cache{Takes: time.Second} // all of a burst come before the load has ended
	cache.NotThere = func(key string) bool { return key == "none" && !there.Load() }
	inFleet(t, 1, cache, fetch.Options{OnError: h.report, ErrorHold: time.Hour}, func(t *testing.T, x *fleet) {
		f := x.fs[0]
		getting(t.Context(), f, "none", 3).fail(t, fetch.ErrNotFound)
		values, err := f.GetMany(t.Context(), []string{"none", "k"})
		if e := cache.Entry("none"); len(values) != 1 || err != nil || !e.Absent {
			t.Errorf("%v, %v, %+v", values, err, e)
		}
		there.Store(true)
		cache.Change("none")
		synctest.Wait() // the lock is released
		getting(t.Context(), f, "none", 3).want(t, "none@1")
		synctest.Wait()
		if s := f.Stats(); s.LoadFailures > 0 || h.Count("") > 0 || s.NotFound != 1 || s.Loads != 3 {
			t.Errorf("%+v, %v", s, &h)
		}
	})
}

// A Put that fails in any way is counted, and the callers have their values; one that blocks delays them by
// no more than NodeTimeout, and the next ones not at all; after TTL the locks are free. That it has failed is
// counted when it returns.
func TestAPutMisbehaves(t *testing.T) {
	for _, how := range []string{"error", "panic", "goexit", "block"} {
		for _, keys := range oneAndMany {
			t.Run(fmt.Sprintf("%s/keys=%d", how, len(keys)), func(t *testing.T) {
				var unblock chan struct{}
				var h heard
				cache := &fetchkit.Cache{Takes: time.Second}
				cache.OnPut = func(context.Context, []string) error {
					return errors.Join(misbehave(how, unblock), errMine)
				}
				inFleet(t, 1, cache, fetch.Options{TTL: 2 * time.Second, OnError: h.report},
					func(t *testing.T, x *fleet) {
						unblock = make(chan struct{})
						get := func(takes time.Duration) {
							t.Helper()
							began := time.Now()
							x.wantMany(t, x.fs[0], keys)
							within(t, began, takes, takes+100*time.Millisecond)
						}
						get(time.Second)
						want := len(keys)
						if how == "block" {
							get(0)
							time.Sleep(2 * time.Second)
							if locks := x.locks(); len(locks) > 0 || x.fs[0].Stats().StoreFailures > 0 {
								t.Errorf("%v, %+v", locks, x.fs[0].Stats())
							}
							get(time.Second) // nobody waits for that Put any more
							want *= 2
						}
						close(unblock)
						time.Sleep(3 * time.Second)
						if s := x.fs[0].Stats(); s.StoreFailures != uint64(want) || h.Count("k0 store ") != want/len(keys) {
							t.Errorf("%+v, %v", s, &h)
						}
					})
			})
		}
	}
}

// A Reserve that fails in any way counts as a lookup that has failed: the keys are loaded, and not stored,
// which is counted; with FailClosed the callers have its error. One that hangs costs LookupTimeout.
func TestAReserveMisbehaves(t *testing.T) {
	for _, how := range []string{"error", "panic", "goexit", "block"} {
		for i, keys := range [][]string{fetchkit.Keys(0, 3), {"k0"}} {
			t.Run(fmt.Sprintf("%s/FailClosed=%v", how, i == 1), func(t *testing.T) {
				var unblock chan struct{}
				cache := &fetchkit.Cache{}
				cache.OnReserve = func(context.Context, []string) error { return misbehave(how, unblock) }
				opts := fetch.Options{FailClosed: i == 1, LookupTimeout: 3 * time.Second}
				inFleet(t, 1, cache, opts, func(t *testing.T, x *fleet) {
					unblock = make(chan struct{})
					defer close(unblock)
					began := time.Now()
					want := fetch.Stats{Misses: 3, LookupErrors: 3, Loads: 1, Unstored: 3}
					if i == 0 {
						x.wantMany(t, x.fs[0], keys)
					} else {
						want = fetch.Stats{Misses: 1, LookupErrors: 1}
						err := failMany(t, x.fs[0], keys, nil)["k0"]
						if !strings.Contains(err.Error(), "lookup: ") || errors.Is(err, context.DeadlineExceeded) {
							t.Error(err)
						}
					}
					if how == "block" {
						within(t, began, 3*time.Second, 3200*time.Millisecond)
					}
					time.Sleep(time.Second)
					if s := x.fs[0].Stats(); s != want || cache.Stored.Load() > 0 {
						t.Errorf("%+v, %d stored", s, cache.Stored.Load())
					}
				})
			})
		}
	}
}

// Values that are there when the locks are won are served to those who came before; nothing is loaded, and
// slots and locks are given back. For those who come after an invalidation they are not.
func TestValuesThatAreThereUnderTheLock(t *testing.T) {
	for _, keys := range oneAndMany {
		cache := &fetchkit.Cache{}
		var once sync.Once
		cache.OnReserve = func(context.Context, []string) error {
			once.Do(func() {
				for _, key := range keys {
					cache.Set(fetch.Entry[string]{Value: key + "@0", Fresh: fetch.Fresh}, key)
				}
			})
			return nil
		}
		inFleet(t, 1, cache, fetch.Options{MaxLoads: 1}, func(t *testing.T, x *fleet) {
			x.delay(20 * time.Millisecond)
			x.wantMany(t, x.fs[0], keys)
			synctest.Wait()
			if s := x.fs[0].Stats(); s.Loads != 0 || s.Running != 0 { // the releases are on their way
				t.Errorf("%+v", s)
			}
			cache.Change(keys...)
			x.wantMany(t, x.fs[0], keys)
		})
	}
}

// What a lookup before a load finds is for callers that came before it was sent: its reply may be under way
// while the entry is invalidated.
func TestALookupIsForThoseWhoCameBefore(t *testing.T) {
	cache := &fetchkit.Cache{OnFound: func(context.Context, []string) { time.Sleep(500 * time.Millisecond) }}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		x.delay(10 * time.Millisecond)
		early := getting(t.Context(), x.fs[0], "k", 1)
		time.Sleep(5 * time.Millisecond)
		cache.Set(fetch.Entry[string]{Value: "found", Fresh: fetch.Fresh}, "k") // by another process
		time.Sleep(200 * time.Millisecond)
		cache.Change("k")
		late := getting(t.Context(), x.fs[0], "k", 1)
		early.want(t, "found")
		late.want(t, "k@1")
	})
}

// The lock is lost while the load runs: the value is served and not stored. The others of the batch are
// stored.
func TestALockIsLostDuringALoad(t *testing.T) {
	for _, keys := range oneAndMany {
		inFleet(t, 1, &fetchkit.Cache{Takes: 10 * time.Second}, fetch.Options{TTL: time.Second},
			func(t *testing.T, x *fleet) {
				time.AfterFunc(2*time.Second, func() {
					testkit.Lose(lockName("k0"), x.nodes...)
				})
				x.wantMany(t, x.fs[0], keys)
				if s := x.fs[0].Stats(); s.Lost != 1 || x.cache.Stored.Load() != int64(len(keys)-1) ||
					x.cache.Entry("k0").Fresh != fetch.Miss {
					t.Errorf("%+v, %d stored", s, x.cache.Stored.Load())
				}
				synctest.Wait() // the lock is released
				x.wantMany(t, x.fs[0], keys)
				equal(t, "loads", x.cache.LoadsOf("k0"), 2)
			})
	}
}

// A load that spans an invalidation is for the callers that came before it. It is not stored, and later
// callers get a load that began later: with a lock and without, and also where the entry is gone after that,
// and its stamp with it.
func TestALoadThroughAnInvalidation(t *testing.T) {
	for i := range 3 {
		down, gone := i == 1, i == 2
		inFleet(t, 1, &fetchkit.Cache{Takes: time.Second}, fetch.Options{}, func(t *testing.T, x *fleet) {
			x.down(down)
			before := getting(t.Context(), x.fs[0], "k", 1)
			synctest.Wait() // else a lookup may be made just before the one that leaves the stamp, and sent after it
			joined := getting(t.Context(), x.fs[0], "k", 2)
			time.Sleep(x.cache.Takes / 4)
			during := getting(t.Context(), x.fs[0], "k", 3) // nothing has changed
			time.Sleep(x.cache.Takes / 4)
			x.cache.Change("k")
			if gone {
				x.cache.Drop("k")
			}
			after := getting(t.Context(), x.fs[0], "k", 3)
			before.want(t, "k@0")
			joined.want(t, "k@0")
			during.want(t, "k@0")
			after.want(t, "k@1")
			getting(t.Context(), x.fs[0], "k", 3).want(t, "k@1")
			if s := x.fs[0].Stats(); s.Outdated != 1 || s.StoreFailures+s.Unstored > 0 || s.Misses != 9 ||
				s.Joined != 8 || s.Hits != 3 || s.Loads != 2 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Callers that cannot look up do not know what has changed: they get no load that began before they came.
func TestCallersWithoutAStampGetALaterLoad(t *testing.T) {
	var fails atomic.Bool
	cache := &fetchkit.Cache{Takes: time.Second, OnGet: when(&fails), OnReserve: when(&fails)}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		fails.Store(true)
		early := getting(t.Context(), x.fs[0], "k", 1)
		time.Sleep(cache.Takes / 2)
		cache.Change("k")
		late := getting(t.Context(), x.fs[0], "k", 5)
		early.want(t, "k@0")
		fails.Store(false)
		late.want(t, "k@1")
		if s := x.fs[0].Stats(); s.Loads != 2 || s.Unstored == 0 || s.StoreFailures > 0 {
			t.Errorf("%+v", s)
		}
	})
}

// Values that are not stored because they were invalidated, or because the store was slow, were loaded all
// the same: the processes that wait for them lock, and do not load all at once. Where the store refuses
// writes, they do not queue.
func TestWhatTheOthersDoAfterALoadThatWasNotStored(t *testing.T) {
	for _, why := range []string{"invalidated", "slow Reserve", "slow Put", "Reserve refused", "Put refused"} {
		for _, keys := range oneAndMany {
			t.Run(fmt.Sprintf("%s/keys=%d", why, len(keys)), func(t *testing.T) {
				cache := &fetchkit.Cache{Takes: time.Second}
				var once atomic.Bool
				fail := func(op string) func(context.Context, []string) error {
					return func(context.Context, []string) error {
						switch {
						case why == op+" refused":
							return errMine
						case why == "slow "+op && once.CompareAndSwap(false, true):
							return context.DeadlineExceeded
						}
						return nil
					}
				}
				cache.OnReserve, cache.OnPut = fail("Reserve"), fail("Put")
				inFleet(t, 4, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
					began, refused, want := time.Now(), strings.HasSuffix(why, "refused"), 2
					if why == "invalidated" {
						time.AfterFunc(cache.Takes/2, func() { cache.Change(keys...) })
					}
					x.all(10*time.Millisecond, func(f *fetch.Fetcher[string]) {
						values, err := f.GetMany(t.Context(), keys)
						if s := f.Stats(); len(values) != len(keys) || err != nil || s.UnlockedLoads > 0 && !refused {
							t.Errorf("%v, %v, %+v", values, err, s)
						}
					})
					within(t, began, cache.Takes, 5*cache.Takes/2)
					if refused {
						want = len(x.fs)
					}
					equal(t, "loads", cache.LoadsOf("k0"), want)
				})
			})
		}
	}
}

// Of a batch, each key has its own error; the values of the others are stored.
func TestSomeKeysFail(t *testing.T) {
	cache := &fetchkit.Cache{NotThere: func(key string) bool { return key == "none" }}
	inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
		f, err := fetch.New(x.clients[0], cache.Store(),
			func(ctx context.Context, keys []string) (map[string]string, error) {
				values, _ := cache.Load(ctx, keys)
				delete(values, "bad")
				return values, fmt.Errorf("some failed: %w", fetch.KeyErrors{"bad": errMine})
			}, fetch.Options{ErrorHold: time.Minute})
		testkit.Must(t, err)
		keys := append(fetchkit.Keys(0, 5), "none", "bad", strings.Repeat("x", 5000))
		for round := range 2 {
			values, err := f.GetMany(t.Context(), keys)
			var many *fetch.ManyError
			if !errors.As(err, &many) || len(many.Errors) != 2 || len(values) != 5 ||
				strings.Contains(err.Error(), "\n") || !errors.Is(err, errMine) ||
				!errors.Is(err, flightlock.ErrInvalid) || !errors.Is(many.Errors["bad"], errMine) {
				t.Fatalf("%v, %v", values, err)
			}
			var held *fetch.HeldError
			if errors.As(many.Errors["bad"], &held) != (round == 1) {
				t.Errorf("round %d: %v", round, many.Errors["bad"])
			}
		}
		if n := cache.Loads.Load(); n != 1 || cache.Stored.Load() != 6 {
			t.Errorf("%d loads, %d stored", n, cache.Stored.Load())
		}
	})
}

// Only what is missing is loaded, in calls of MaxBatch keys at most, all at the same time.
func TestBatchesHaveALimit(t *testing.T) {
	cache := &fetchkit.Cache{Takes: time.Second}
	limit := func(_ context.Context, keys []string) error {
		if len(keys) > 30 || len(slices.Compact(slices.Sorted(slices.Values(keys)))) < len(keys) {
			t.Errorf("%d keys", len(keys))
		}
		return nil
	}
	cache.OnGet, cache.OnReserve, cache.OnLoad = limit, limit, limit
	inFleet(t, 1, cache, fetch.Options{MaxBatch: 30}, func(t *testing.T, x *fleet) {
		cache.Set(fetch.Entry[string]{Value: "k0@0", Fresh: fetch.Fresh}, "k0")
		began := time.Now()
		x.wantMany(t, x.fs[0], fetchkit.Keys(0, 100))
		within(t, began, time.Second, 1020*time.Millisecond)
		if n := cache.Loads.Load(); n != 4 || cache.Loaded.Load() != 99 || cache.Puts.Load() != 4 ||
			cache.Gets.Load() != 4 {
			t.Errorf("%d loads of %d keys, %d puts, %d lookups", n, cache.Loaded.Load(), cache.Puts.Load(),
				cache.Gets.Load())
		}
	})
}

// A load of other keys that failed inside a load, or was panicked with, is the error of all keys of the load:
// none of them does not exist because of it. Neither do those of a load that says so of none in particular,
// but for a load of one key.
func TestAnErrorOfOtherKeysIsEverybodys(t *testing.T) {
	other := fetch.KeyErrors{"other": errMine}
	for _, err := range []error{fmt.Errorf("prices: %w", other), other, fetch.ErrNotFound} {
		for _, keys := range oneAndMany {
			cache := &fetchkit.Cache{OnLoad: func(context.Context, []string) error {
				if _, itself := err.(fetch.KeyErrors); itself { //nolint:errorlint // itself
					panic(err)
				}
				return err
			}}
			inFleet(t, 1, cache, fetch.Options{}, func(t *testing.T, x *fleet) {
				_, got := x.fs[0].GetMany(t.Context(), keys)
				var many *fetch.ManyError
				absent := len(keys) == 1 && errors.Is(err, fetch.ErrNotFound)
				if absent != (got == nil) || !absent && (!errors.As(got, &many) || len(many.Errors) != len(keys)) ||
					absent != (cache.Stored.Load() > 0) {
					t.Errorf("%v: got %v, %d stored", err, got, cache.Stored.Load())
				}
			})
		}
	}
}
