package fetch_test

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/fetchkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// heard is what OnError was called with, a line for each call.
type heard struct{ testkit.LogBuffer }

func (h *heard) report(key, op string, err error) { fmt.Fprintln(h, key, op, err) }

// OnError is called for everything that fails, also where no caller waits; a caller that leaves is no
// failure.
func TestOnError(t *testing.T) {
	failing := func(name string) func(context.Context, []string) error {
		return func(ctx context.Context, keys []string) error {
			if keys[0] == "left" {
				<-ctx.Done()
				return ctx.Err()
			}
			if strings.HasPrefix(keys[0], name) {
				return errMine
			}
			return nil
		}
	}
	cache := &fetchkit.Cache{OnGet: failing("lookup"), OnReserve: failing("reserve"), OnLoad: failing("load"),
		OnPut: failing("store")}
	var h heard
	inFleet(t, 1, cache, fetch.Options{OnError: h.report}, func(t *testing.T, x *fleet) {
		long := []string{strings.Repeat("k", 5000), strings.Repeat("k", 5001)}
		cache.Set(old, "load behind", long[0], long[1])
		for _, key := range []string{"lookup", "reserve", "load", "load behind", "store", "good"} {
			_, _ = x.fs[0].Get(t.Context(), key)
		}
		for i := range 10 { // of those that cannot be locked, one is reported each second
			getting(t.Context(), x.fs[0], long[i%2], 1).want(t, "old")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		getting(ctx, x.fs[0], "left", 3).fail(t, context.DeadlineExceeded)
		synctest.Wait()
		for prefix, want := range map[string]int{"lookup lookup mine": 1, "reserve lookup mine": 1,
			"load load mine": 1, "load behind load mine": 1, "store store mine": 1, "kkk": 1, "": 6} {
			if n := h.Count(prefix); n != want {
				t.Errorf("OnError was called for %q %d times, want %d: %.500s", prefix, n, want, &h)
			}
		}
		if s := x.fs[0].Stats(); s.LoadFailures != 12 || s.LookupErrors != 2 || s.StoreFailures != 1 ||
			s.Unstored != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// An OnError that blocks, panics or ends its goroutine delays nothing, and the log counts what was lost.
func TestOnErrorMisbehaves(t *testing.T) {
	for how, says := range map[string]string{"block": "too slow", "panic": "OnError of a Fetcher panicked",
		"goexit": ""} {
		testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
			var log testkit.LogBuffer
			var calls atomic.Int64
			unblock := make(chan struct{})
			c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
			cache := &fetchkit.Cache{OnLoad: func(context.Context, []string) error { return errMine }}
			f := fetchkit.New(t, c, cache, fetch.Options{Name: "users", OnError: func(string, string, error) {
				calls.Add(1)
				_ = misbehave(how, unblock)
			}})
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			for _, key := range fetchkit.Keys(0, 200) {
				getting(ctx, f, key, 1).fail(t, errMine)
			}
			cancel()
			close(unblock)
			synctest.Wait()
			if n := calls.Load(); (how == "block") == (n == 200) ||
				log.Count(says, "fetcher=users") == 0 && says != "" {
				t.Errorf("%s: %d calls, log:\n%.2000s", how, n, &log)
			}
		})
	}
}

// The log says when loads without locks begin and when they have ended, once each, whatever their number,
// which is that of Stats.
func TestTheLogOfLoadsWithoutLocks(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}, clients...)
		f, node := fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{Name: "users"}), nodes[0]
		want := func(began, ended int) {
			t.Helper()
			synctest.Wait()
			b, e := log.Count("loading without locks"), log.Count("no loads without locks any more")
			if b != began || e != ended {
				t.Errorf("began %d, ended %d, want %d and %d:\n%s", b, e, began, ended, &log)
			}
		}
		_, _ = f.Get(t.Context(), "a")
		want(0, 0)
		node.Down(true)
		for i := range 20 {
			_, _ = f.GetMany(t.Context(), fetchkit.Keys(10*i, 10))
		}
		want(1, 0)
		node.Down(false)
		time.Sleep(15 * time.Second)
		want(1, 1)
		n := f.Stats().UnlockedLoads // the first attempts may find different states of the node
		if log.Count(fmt.Sprint("loads=", n), "fetcher=users") != 1 || n < 20 || n > 25 {
			t.Errorf("%+v\n%s", f.Stats(), &log)
		}
		node.Down(true)
		_, _ = f.Get(t.Context(), "last")
		testkit.Must(t, f.Close(t.Context()))
		want(2, 2)
	})
}

// An Observer that ends the goroutine of a load takes no slot with it, and no lock.
func TestAnObserverExits(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var once sync.Once
		c := lockkit.New(t, flightlock.Options{Observers: []*flightlock.Observer{{
			Of: flightlock.EventLoad,
			Started: func(ctx context.Context, _ flightlock.Event) context.Context {
				once.Do(func() {
					time.Sleep(time.Millisecond) // all wait for this load
					runtime.Goexit()
				})
				return ctx
			},
		}}}, clients...)
		f := fetchkit.New(t, c, &fetchkit.Cache{}, fetch.Options{MaxLoads: 1})
		began := time.Now()
		getting(t.Context(), f, "k", 3).fail(t, flightlock.ErrClosed)
		synctest.Wait()
		getting(t.Context(), f, "k", 3).want(t, "k@0")
		within(t, began, 0, time.Second)
	})
}
