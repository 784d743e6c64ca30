package flightlock_test

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
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// heard are the failures that OnError was called with.
type heard struct {
	mu  sync.Mutex
	all []string
}

func (h *heard) tell(key, op string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, fmt.Sprint(key, " ", op, " ", err))
}

func (h *heard) count(prefix string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.all {
		if strings.HasPrefix(x, prefix) {
			n++
		}
	}
	return n
}

// OnError is called for every function of the Source that fails, also where no caller waits.
func TestFetchOnError(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		var h heard
		o := &lockkit.Origin{}
		o.Lookup = func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
			if key == "lookup" {
				return "", flightlock.Miss, errMine
			}
			return o.PlainLookup(ctx, key)
		}
		o.Load = func(ctx context.Context, key string) (string, error) {
			if strings.HasPrefix(key, "load") {
				return "", errMine
			}
			return "v", nil
		}
		o.Store = func(_ context.Context, key, _ string, _ *flightlock.Lock) error {
			if key == "store" {
				return errMine
			}
			return nil
		}
		f := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...), o,
			flightlock.FetchOptions{OnError: h.tell})
		o.Set("load behind", "old", true)
		o.Set(strings.Repeat("k", 5000), "old", true)
		for _, key := range []string{"lookup", "load", "load behind", "store", "good"} {
			_, _ = f.Fetch(t.Context(), key)
		}
		for range 10 {
			wantAll(t, fetching(t.Context(), f, strings.Repeat("k", 5000), 1), 1, "old") // served, and never loaded
		}
		synctest.Wait()
		for prefix, want := range map[string]int{"lookup lookup mine": 1, "load load mine": 1, "load behind load mine": 1,
			"store store mine": 1, "kkk": 1, "": 5} {
			if n := h.count(prefix); n != want {
				t.Errorf("OnError was called for %q %d times, want %d: %.500q", prefix, n, want, h.all)
			}
		}
		if s := f.Stats(); s.LoadFailures != 12 {
			t.Errorf("%+v", s)
		}
		// A caller that leaves is not a failure of Lookup.
		ctx, cancel := context.WithCancel(t.Context())
		o.Lookup = nil
		cancel()
		g := lockkit.NewFetcher(t, lockkit.New(t, flightlock.Options{}, clients...),
			&lockkit.Origin{Lookup: func(ctx context.Context, key string) (string, flightlock.Freshness, error) {
				return "", flightlock.Miss, ctx.Err()
			}}, flightlock.FetchOptions{OnError: h.tell})
		wantErrors(t, fetching(ctx, g, "left", 3), 3, context.Canceled)
		synctest.Wait()
		if n := h.count("left"); n != 0 || g.Stats().LookupErrors != 0 {
			t.Errorf("OnError was called %d times, %+v", n, g.Stats())
		}
	})
}

// An OnError that blocks, panics or ends its goroutine delays nothing, and the log counts what was
// lost.
func TestFetchOnErrorMisbehaves(t *testing.T) {
	for _, how := range []string{"block", "panic", "goexit"} {
		t.Run(how, func(t *testing.T) {
			testkit.Bubble(t, 1, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
				unblock := make(chan struct{})
				var told atomic.Int64
				var lines lockedLines
				c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&lines, nil))}, clients...)
				o := &lockkit.Origin{Load: func(context.Context, string) (string, error) { return "", errMine }}
				f := lockkit.NewFetcher(t, c, o, flightlock.FetchOptions{Name: "users", OnError: func(string, string, error) {
					told.Add(1)
					switch how {
					case "block":
						<-unblock
					case "panic":
						panic("ouch\nouch")
					default:
						runtime.Goexit()
					}
				}})
				began := time.Now()
				for i := range 300 {
					wantErrors(t, fetching(t.Context(), f, fmt.Sprint("k", i), 1), 1, errMine)
				}
				if took := time.Since(began); took > time.Second {
					t.Errorf("it took %v", took)
				}
				close(unblock)
				synctest.Wait()
				switch text := lines.String(); {
				case how == "block" && (told.Load() > 200 || !strings.Contains(text, "too slow") ||
					!strings.Contains(text, "fetcher=users")),
					how == "panic" && (told.Load() != 300 || !strings.Contains(text, "OnError panicked")),
					how == "goexit" && told.Load() != 300:
					t.Errorf("%d calls, log:\n%.2000s", told.Load(), text)
				}
			})
		})
	}
}

// lockedLines is a log.
type lockedLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The log says when loads without locks begin and when they have ended, once each, whatever their
// number.
func TestFetchLogsLoadsWithoutLocks(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var lines lockedLines
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&lines, nil))}, clients...)
		f := lockkit.NewFetcher(t, c, &lockkit.Origin{Takes: time.Second}, flightlock.FetchOptions{Name: "users"})
		wantTold := func(began, ended int) {
			t.Helper()
			synctest.Wait()
			text := lines.String()
			if b, e := strings.Count(text, "loading without locks"),
				strings.Count(text, "no loads without locks any more"); b != began || e != ended {
				t.Errorf("began %d, ended %d, want %d and %d:\n%s", b, e, began, ended, text)
			}
		}
		wantAll(t, fetching(t.Context(), f, "a", 1), 1, "a=1")
		wantTold(0, 0)
		all(nodes, true)
		for i := range 20 {
			_, _ = f.Fetch(t.Context(), fmt.Sprint("k", i))
		}
		wantTold(1, 0)
		all(nodes, false)
		time.Sleep(15 * time.Second)
		wantTold(1, 1)
		if !strings.Contains(lines.String(), "loads=20") || !strings.Contains(lines.String(), "fetcher=users") {
			t.Error(lines.String())
		}
		all(nodes, true)
		_, _ = f.Fetch(t.Context(), "last")
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantTold(2, 2)
	})
}

// The number of loads in the log is that of the metrics: a call of LoadMany is one load, and a key that has a value
// when it could be loaded is none.
func TestTheLogCountsLoadsWithoutLocksAsTheMetricsDo(t *testing.T) {
	testkit.Bubble(t, 1, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var lines lockedLines
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&lines, nil))}, clients...)
		f, err := flightlock.NewFetcher(c, flightlock.Source[string]{
			Lookup: func(context.Context, string) (string, flightlock.Freshness, error) { return "", flightlock.Miss, nil },
			Load:   func(context.Context, string) (string, error) { return "v", nil },
			LoadMany: func(_ context.Context, keys []string) (map[string]string, error) {
				values := map[string]string{}
				for _, key := range keys {
					values[key] = "v"
				}
				return values, nil
			},
			Store: func(context.Context, string, string, *flightlock.Lock) error { return nil },
		}, flightlock.FetchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		all(nodes, true)
		var keys []string
		for i := range 10 {
			keys = append(keys, fmt.Sprint("k", i))
		}
		if _, err := f.FetchMany(t.Context(), keys); err != nil {
			t.Error(err)
		}
		if err := f.Close(t.Context()); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		n := f.Stats().UnlockedLoads
		if want := fmt.Sprint("loads=", n, "\n"); n == 0 || n >= 10 || !strings.Contains(lines.String(), want) {
			t.Errorf("%d loads:\n%s", n, lines.String())
		}
	})
}
