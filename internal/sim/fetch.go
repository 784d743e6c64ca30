package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/fetch"
)

// A cache is what the Fetchers of all processes share, and the origin behind it. The loop does what they ask
// of it, after a while.
type cache struct {
	w       *world
	version int // of the origin, which each load has as its value; from 1
	stamps  int // the last one that was given
	entries map[string]*entry
	changed map[string]int // the version of a key's last invalidation
	loads   int
}

type entry struct {
	value int // 0: none
	stamp string
}

var errOrigin = errors.New("the origin fails")

// newFetcher makes c's Fetcher. It loads under locks only.
func (c *client) newFetcher() *fetch.Fetcher[int] {
	maxTTL := c.w.plan.maxTTL
	f, err := fetch.New(c.lib, fetch.Store[int](cached{c}), c.load, fetch.Options{
		TTL: maxTTL / 4, LoadTimeout: maxTTL, LookupTimeout: maxTTL / 2, WaitTimeout: 30 * time.Second,
		ErrorHold: -1, FailClosed: true,
	})
	if err != nil {
		panic(err) // the options are ours
	}
	return f
}

// cached is the cache, as a process reaches it.
type cached struct{ c *client }

func (s cached) Get(ctx context.Context, key string) (fetch.Entry[int], error) {
	found, err := s.lookUp(ctx, "lookup", []string{key}, false)
	return found[key], err
}

func (s cached) GetMany(ctx context.Context, keys []string) (map[string]fetch.Entry[int], error) {
	return s.lookUp(ctx, "lookup", keys, false)
}

func (s cached) Reserve(ctx context.Context, keys []string) (map[string]fetch.Entry[int], error) {
	return s.lookUp(ctx, "reserve", keys, true)
}

func (s cached) lookUp(ctx context.Context, op string, keys []string, reserve bool) (
	map[string]fetch.Entry[int], error) {
	found := map[string]fetch.Entry[int]{}
	err := s.c.onLoop(ctx, fmt.Sprint(op, " ", keys), s.c.w.plan.latency, func() {
		for _, key := range keys {
			e := s.c.w.cache.entries[key]
			if e == nil && reserve {
				e = s.c.w.cache.put(key, 0)
			}
			if e != nil {
				found[key] = fetch.Entry[int]{Value: e.value, Stamp: e.stamp}
			}
			if e != nil && e.value != 0 {
				found[key] = fetch.Entry[int]{Value: e.value, Fresh: fetch.Fresh, Stamp: e.stamp}
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Put stores what still has its stamp, and the loop evicts it after a while.
func (s cached) Put(ctx context.Context, items map[string]fetch.Entry[int]) (outdated []string, err error) {
	var late []string
	err = s.c.onLoop(ctx, "put", s.c.w.plan.latency, func() {
		in := &s.c.w.cache
		for key, x := range items { // one, mostly
			if e := in.entries[key]; e == nil || e.stamp != x.Stamp {
				late = append(late, key)
				continue
			}
			e := in.put(key, x.Value)
			s.c.w.after(between(s.c.w.app, time.Millisecond, s.c.w.plan.chaos/8), func() {
				if in.entries[key] == e {
					delete(in.entries, key)
				}
			})
		}
	})
	if err != nil {
		return nil, err
	}
	return late, nil
}

// put replaces the entry of key.
func (in *cache) put(key string, value int) *entry {
	if in.entries == nil {
		in.entries, in.changed = map[string]*entry{}, map[string]int{}
	}
	in.stamps++
	in.entries[key] = &entry{value, fmt.Sprint(in.stamps)}
	return in.entries[key]
}

// change changes the origin, and invalidates key.
func (in *cache) change(key string) {
	in.version++
	in.put(key, 0)
	in.changed[key] = in.version
	in.w.logf("%q changes: %d", key, in.version)
}

// load is the origin, which fails now and then.
func (c *client) load(ctx context.Context, keys []string) (map[string]int, error) {
	in := &c.w.cache
	values := map[string]int{}
	err := c.onLoop(ctx, fmt.Sprint("load ", keys), 20*time.Microsecond, func() {
		in.loads++
		for _, key := range keys {
			values[key] = in.version + 1
		}
	})
	if err != nil {
		return nil, err
	}
	var failed error
	err = c.onLoop(ctx, fmt.Sprint("loaded ", keys), c.w.plan.chaos/8, func() {
		if c.w.app.IntN(4) == 0 && !c.w.healed {
			failed = errOrigin
		}
		c.w.logf("%v loads %v, %v", c, values, failed)
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	return values, nil
}

// fetched ends a worker's Get. What began after an invalidation has no older value.
func (k *worker) fetched(value int, err error) {
	in := &k.c.w.cache
	if err == nil && value <= k.op.changed {
		k.c.w.checker.violation("%v: %q is %d, and was invalidated before that, at %d", k, k.op.key, value,
			k.op.changed)
	}
	if k.c.w.app.IntN(3) == 0 {
		in.change(k.op.key)
	}
}

// onLoop has the loop do something for the process, within that time if it does not pause, and waits for it.
// When ctx ends it returns its error, and what it was to do may still come.
func (c *client) onLoop(ctx context.Context, text string, within time.Duration, do func()) error {
	done := make(chan struct{})
	c.w.report(action{client: c.id, server: -1, text: text, do: func() {
		c.w.after(between(c.w.app, time.Microsecond, within), func() {
			c.unlessPaused(func() {
				do()
				close(done)
			})
		})
	}})
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
