package app

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
	"github.com/flightlock/flightlock/internal/redistest"
)

// Requests that were accepted are answered during the shutdown; /healthz fails before the port is closed; and
// no lock is left behind.
func TestShutdownFinishesWhatHasBegun(t *testing.T) {
	w := newWorld(t, 1)
	w.origin.set(func(o *fakeOrigin) { o.takes = 300 * time.Millisecond })
	p := w.start("p1", "-drain", "3s")
	var wg sync.WaitGroup
	var served atomic.Int64
	for i := range 20 {
		wg.Go(func() {
			path := fmt.Sprintf("/item/%d", i)
			if i%2 == 0 {
				path = fmt.Sprintf("/page/%d", i)
			}
			if status, body := p.get(path); status != http.StatusOK {
				t.Errorf("%d %q", status, body)
			}
			served.Add(1)
		})
	}
	redistest.Eventually(t, patience, "load", func() bool { loads := w.origin.counted(); return len(loads) > 0 })
	go p.shutDown()
	redistest.Eventually(t, patience, "unhealthy process", func() bool {
		status, _ := p.get("/healthz")
		return status == http.StatusServiceUnavailable
	})
	if status, body := p.get("/item/99"); status != http.StatusOK {
		t.Errorf("a late request: %d %q", status, body)
	}
	wg.Wait()
	p.shutDown()
	if served.Load() != 20 {
		t.Errorf("%d served", served.Load())
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	locks, err := w.nodes[0].Client(t).Keys(ctx, "lock:*").Result()
	if err != nil || len(locks) != 0 {
		t.Errorf("locks that are left: %v, %v", locks, err)
	}
}

// A process starts without locks while Redis is down.
func TestAProcessStartsWithoutRedis(t *testing.T) {
	w := newWorld(t, 1)
	w.nodes[0].Kill()
	p := w.start("p1", "-ready", "300ms")
	if status, body := p.get("/item/7"); status != http.StatusOK {
		t.Errorf("%d %q", status, body)
	}
}

// Open refuses wrong flags, and names them.
func TestBadConfigurations(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"-with":    func(c *Config) { c.With = "hope" },
		"-fresh":   func(c *Config) { c.Fresh = time.Millisecond },
		"-timeout": func(c *Config) { c.Timeout = 0 },
		"-grace":   func(c *Config) { c.Grace = c.Timeout }, // the last requests would be cut off
		"urls":     func(c *Config) { c.Redis = "localhost" },
		"cache":    func(c *Config) { c.Cache = "localhost" },
		"listen":   func(c *Config) { c.Addr = "127.0.0.1:no" },
	} {
		cfg := Config{
			Addr: "127.0.0.1:0", DB: t.TempDir() + "/bank.db", With: "flightlock",
			Redis: "redis://127.0.0.1:1", Cache: "redis://127.0.0.1:1",
			Fresh: time.Second, Timeout: time.Second, Ready: time.Second, Grace: 2 * time.Second,
		}
		change(&cfg)
		if _, err := Open(t.Context(), cfg, testLog(t, "p1")); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Metrics are those of the service, of the locks and of the caches.
func TestMetrics(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1")
	if status, body := p.get("/item/7"); status != http.StatusOK {
		t.Error(status, body)
	}
	status, body := p.get("/metrics")
	for _, want := range []string{
		`service_request_seconds_count{route="item",status="200"} 1`, "flightlock_", `"items"`, "go_goroutines",
	} {
		if status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%d, without %s", status, want)
		}
	}
}

// A shutdown ends in its time, and without an error, when nothing answers: neither the lock nodes nor the
// cache.
func TestShutdownWhileRedisHangs(t *testing.T) {
	w := newWorld(t, 1)
	p := w.start("p1", "-node-timeout", "0")
	redistest.Eventually(t, patience, "a leader", func() bool { return len(w.leaders(p)) == 1 })
	for _, s := range []*redistest.Server{w.nodes[0], w.cache} {
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Cont() })
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if status, body := p.get(fmt.Sprintf("/item/%d", i)); status != http.StatusOK {
				t.Errorf("%d %q", status, body)
			}
		})
	}
	redistest.Eventually(t, patience, "load", func() bool { loads := w.origin.counted(); return len(loads) > 0 })
	p.shutDown()
	wg.Wait()
}

// never is a Locker that is not ready before ctx ends.
type never struct{ variant.Locker }

func (never) Ready(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// A process that is told to end while it warms up does not become ready. One whose Config.Ready is over does.
func TestAProcessThatShutsDownIsNotReady(t *testing.T) {
	a := &App{cfg: Config{Ready: time.Minute}, log: testLog(t, "p1"), locks: never{}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a.warmUp(ctx)
	if a.ready.Load() {
		t.Error("ready during the shutdown")
	}
	a.cfg.Ready = time.Millisecond
	a.warmUp(t.Context())
	if !a.ready.Load() {
		t.Error("not ready after Config.Ready")
	}
}
