package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// envSeed repeats one seed.
const envSeed = "FLIGHTLOCK_CACHE_SEED"

// The promise of Invalidate, Set, Expire, InvalidateTag and Clear, attacked: processes that get, refresh,
// set, expire, invalidate and clear a few keys in virtual time, while requests and replies are delayed,
// connections are cut, entries expire, are evicted and flushed, locks are lost, the servers of locks or of
// values are unreachable, and loads stall. A Get that began after an Invalidate or Set had returned must see
// nothing that was loaded before it.
type history struct {
	*world
	local  time.Duration
	moves  time.Duration // the last kind of change
	caches []*rediscache.Cache[string]
	stale  []time.Duration
	keys   []*historyKey

	gets, loads, changes, outdated atomic.Int64
	stop                           chan struct{}
	wg                             sync.WaitGroup

	mu  sync.Mutex // guards rng
	rng *rand.Rand
}

// historyTags has a value change its tags with every version.
func historyTags(key, v string) []string {
	n, _ := strconv.Atoi(v)
	return []string{fmt.Sprint(key, n%2), "all"}
}

// historyKey is one key, whose writers come one after the other.
type historyKey struct {
	name   string
	writer chan struct{} // has room for one: a mutex would stop the bubble's clock

	mu        sync.Mutex        // guards what follows
	version   int               // of the origin
	announced int               // by a Set or Invalidate that has returned
	by        int               // of which cache
	over      map[int]time.Time // since when later ones are announced
}

func (h *history) between(least, most time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return least + time.Duration(h.rng.Int64N(int64(most-least)+1))
}

func (h *history) chance(percent int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(100) < percent
}

// loop repeats f, with pauses, until the end.
func (h *history) loop(most time.Duration, f func()) {
	h.wg.Go(func() {
		for {
			select {
			case <-time.After(h.between(0, most)):
				f()
			case <-h.stop:
				return
			}
		}
	})
}

func (h *history) load(ctx context.Context, key string) (string, error) {
	h.loads.Add(1)
	k := h.keys[key[0]-'a']
	k.mu.Lock()
	v := k.version
	k.mu.Unlock()
	takes := h.between(0, 30*time.Millisecond)
	if h.chance(10) {
		takes = h.between(0, 3*time.Second) // a process that is paused
	}
	time.Sleep(takes)
	if h.chance(5) {
		return "", rediscache.ErrNotFound
	}
	return fmt.Sprint(v), nil
}

func (h *history) get(i int, k *historyKey) {
	k.mu.Lock()
	floor, by, began := k.announced, k.by, time.Now()
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	value, peeked, err := "", h.chance(10), error(nil)
	if peeked {
		var fresh fetch.Freshness
		if value, fresh, err = h.caches[i].Peek(ctx, k.name); err != nil || fresh == fetch.Miss {
			return // a Peek does without a load
		}
	} else {
		value, err = h.caches[i].Get(ctx, k.name)
	}
	h.gets.Add(1)
	if err != nil {
		if !errors.Is(err, rediscache.ErrNotFound) && !errors.Is(err, context.DeadlineExceeded) {
			h.t.Errorf("Get %s: %v", k.name, err)
		}
		return
	}
	v, _ := strconv.Atoi(value)
	if v >= floor {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if age := began.Sub(k.over[v]); h.local == 0 || peeked || by == i || age > min(h.local, time.Second) {
		h.t.Errorf("a Get of %s in process %d, %v after %d or later was announced, got %d; the last was %d, of "+
			"process %d",
			k.name, i, age, v+1, v, floor, by)
	}
}

func (h *history) change(i int, k *historyKey) {
	k.writer <- struct{}{}
	defer func() { <-k.writer }()
	k.mu.Lock()
	k.version++
	v := k.version
	k.mu.Unlock()
	time.Sleep(h.between(0, 10*time.Millisecond))
	var err error
	switch c, ctx := h.caches[i], context.Background(); h.between(0, h.moves) {
	case 0, 1:
		err = c.Invalidate(ctx, k.name)
	case 2:
		err = c.Set(ctx, k.name, fmt.Sprint(v))
	case 3:
		err = c.SetMany(ctx, map[string]string{k.name: fmt.Sprint(v)})
	case 5:
		err = c.Clear(ctx, nil)
	case 6, 7:
		err = c.InvalidateTag(ctx, historyTags(k.name, "0")[0], historyTags(k.name, "1")[0])
	case 8:
		err = c.InvalidateTag(ctx, "all")
	default:
		err = c.Expire(ctx, k.name)
		time.Sleep(h.stale[i]) // until when the old value may be served
	}
	if err != nil {
		return
	}
	h.changes.Add(1)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.announced, k.by = v, i
	for old := range v {
		if _, known := k.over[old]; !known {
			k.over[old] = time.Now()
		}
	}
}

func (h *history) fault() {
	breaks := func(fail func(on bool), most time.Duration) {
		fail(true)
		time.Sleep(h.between(0, most))
		fail(false)
	}
	switch {
	case h.chance(15):
		h.values.Mini.FlushAll()
	case h.chance(30):
		h.values.Mini.Del("h:" + h.keys[h.between(0, time.Duration(len(h.keys)-1))].name)
	case h.chance(20):
		h.values.Cut()
	case h.chance(15):
		breaks(h.values.Stall, 3*time.Second)
	case h.chance(10):
		breaks(h.values.Down, 2*time.Second)
	case h.chance(20):
		breaks(func(on bool) { h.locks.Down(on) }, 2*time.Second)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		_ = h.locks.Lose(ctx, h.keys[0].name)
		cancel()
	}
}

// runHistory makes one history in a bubble.
func runHistory(t *testing.T, seed uint64, local time.Duration, tags bool) (h *history) {
	bubble(t, func(t *testing.T, w *world) {
		h = &history{world: w, rng: rand.New(rand.NewPCG(seed, 15)), local: local, stop: make(chan struct{})}
		of, name := (func(key, v string) []string)(nil), "h"
		if h.moves = 5; tags {
			h.moves, of = 8, historyTags
		}
		for _, name := range []string{"a", "b"} {
			k := &historyKey{name: name, writer: make(chan struct{}, 1), over: map[int]time.Time{}}
			h.keys = append(h.keys, k)
		}
		for range 3 {
			rdb := h.values.Client(t, func(o *redis.Options) {
				o.ContextTimeoutEnabled, o.MaxRetries = h.chance(80), 2
			})
			h.stale = append(h.stale, h.between(0, time.Second))
			h.caches = append(h.caches, newCache(t, w.client(), rdb, fetch.Each(h.load), options{
				Name: name, Tags: of,
				Fresh: h.between(100*time.Millisecond, 5*time.Second), Stale: h.stale[len(h.stale)-1],
				NotFoundFor: h.between(0, time.Second), Local: local, EarlyRefresh: float64(h.between(0, 2)),
				StaleWait: h.between(0, 50*time.Millisecond), LockTTL: time.Second,
				LookupTimeout: h.between(100*time.Millisecond, time.Second), LoadTimeout: 5 * time.Second,
			}))
		}
		for i := range h.caches {
			for _, k := range h.keys {
				for range 4 {
					h.loop(20*time.Millisecond, func() { h.get(i, k) })
				}
				h.loop(300*time.Millisecond, func() { h.change(i, k) })
				h.loop(time.Second, func() { _ = h.caches[i].Refresh(context.Background(), k.name) })
			}
		}
		h.loop(500*time.Millisecond, h.fault)
		h.loop(100*time.Millisecond, func() { h.values.SetDelay(h.between(0, 5*time.Millisecond)) })
		time.Sleep(20 * time.Second)
		close(h.stop)
		h.wg.Wait()
		h.values.SetDelay(0)
		for _, c := range h.caches {
			h.outdated.Add(int64(c.Stats().Outdated))
			testkit.Must(t, c.Close(t.Context()))
		}
		time.Sleep(10 * time.Second) // for what go-redis has still to dial
	})
	return h
}

// In no history does a Get see what was loaded before a change that was announced before it began.
func TestRandomHistories(t *testing.T) {
	t.Parallel()
	first, n := uint64(0), uint64(2)
	switch one, err := strconv.ParseUint(os.Getenv(envSeed), 10, 64); {
	case err == nil:
		first, n = one, 1
	case redistest.Raced:
		n = 1
	case redistest.Long():
		n = 300
	}
	for seed := first; seed < first+n; seed++ {
		for i, local := range []time.Duration{
			0, 200 * time.Millisecond, time.Duration(seed%2) * 200 * time.Millisecond, time.Hour, time.Minute,
		} {
			tags := i == 2 || i == 4
			h := runHistory(t, seed, local, tags)
			if t.Failed() {
				t.Fatalf("repeat it with %s=%d", envSeed, seed)
			}
			if h.gets.Load() < 1000 || h.changes.Load() < 50 || h.outdated.Load() < 1 {
				t.Errorf("seed %d: too little happened", seed)
			}
			t.Logf("seed %d, local %v, tags %v: %d Gets, %d loads, %d of them outdated, %d changes", seed, local, tags,
				h.gets.Load(), h.loads.Load(), h.outdated.Load(), h.changes.Load())
		}
	}
}
