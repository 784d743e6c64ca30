package rediscache_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// A random history in real time: four clients, each as in a process of its own, on real servers that
// are stopped, flushed, and whose connections are closed.
func TestRandomHistoryOnARealServer(t *testing.T) {
	t.Parallel()
	values, locks := redistest.StartServer(t), redistest.StartServer(t)
	h := &history{t: t, rng: rand.New(rand.NewPCG(1, 15)), stop: make(chan struct{})}
	for i := range 2 {
		h.keys = append(h.keys, &historyKey{name: string(rune('a' + i)), writer: make(chan struct{}, 1),
			over: map[int]time.Time{}})
	}
	for range 4 {
		c, err := flightlock.Open([]string{"redis://" + locks.Addr()}, flightlock.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close(context.Background())
		rdb := values.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = h.chance(70); o.MaxRetries = 2 })
		cache, err := rediscache.New(c, rdb, h.load, rediscache.Options[string]{
			Fresh: h.between(20*time.Millisecond, time.Second), Stale: h.between(0, time.Second), NotFoundFor: h.between(0,
				time.Second),
			Fetch: flightlock.FetchOptions{TTL: 500 * time.Millisecond, LookupTimeout: time.Second,
				LoadTimeout: 5 * time.Second},
		})
		if err != nil {
			t.Fatal(err)
		}
		h.caches = append(h.caches, cache)
	}
	for i := range h.caches {
		for _, k := range h.keys {
			for range 4 {
				h.loop(2*time.Millisecond, func() { h.get(i, k) })
			}
			h.loop(50*time.Millisecond, func() { h.change(i, k) })
		}
	}
	h.loop(200*time.Millisecond, func() {
		switch {
		case h.chance(30):
			values.Do(t, "FLUSHALL")
		case h.chance(40):
			values.Do(t, "DEL", h.keys[0].name, h.keys[1].name)
		case h.chance(30):
			values.Do(t, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		case h.chance(50):
			locks.Do(t, "FLUSHALL") // locks are lost
		default:
			s := values
			if h.chance(50) {
				s = locks
			}
			if err := errors.Join(s.Stop(), pause(h.between(0, time.Second)), s.Cont()); err != nil {
				t.Error(err)
			}
		}
	})
	takes := 4 * time.Second
	if redistest.Long() {
		takes = 3 * time.Minute
	}
	time.Sleep(takes) // the history lasts as long as it does
	enough := func() bool { return h.gets.Load() >= 100 && h.changes.Load() >= 10 }
	for most := time.Now().Add(time.Minute); !enough() && time.Now().Before(most); { // a busy machine takes longer
		time.Sleep(50 * time.Millisecond)
	}
	close(h.stop)
	h.wg.Wait()
	for _, c := range h.caches {
		h.outdated.Add(int64(c.Stats().Outdated))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	if !enough() {
		t.Error("too little happened")
	}
	t.Logf("%d Gets, %d loads, %d of them outdated, %d changes", h.gets.Load(), h.loads.Load(), h.outdated.Load(),
		h.changes.Load())
}

func pause(d time.Duration) error {
	time.Sleep(d)
	return nil
}
