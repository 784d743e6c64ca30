package sim

import (
	"context"
	"errors"
	"time"

	"github.com/flightlock/flightlock"
)

// A cache is what the Fetchers of all processes share, and the origin behind it. The loop does what they ask
// of it, after a while.
type cache struct {
	w       *world
	values  map[string]int // those that were loaded and stored, until they are evicted
	loading map[string]int // loads in progress
	loads   int
}

var errOrigin = errors.New("the origin fails")

// newFetcher makes c's Fetcher. It loads under locks only.
func (c *client) newFetcher() *flightlock.Fetcher[int] {
	maxTTL := c.w.plan.maxTTL
	f, err := flightlock.NewFetcher(c.lib, flightlock.Source[int]{Lookup: c.lookup, Load: c.load, Store: c.store},
		flightlock.FetchOptions{
			TTL: maxTTL / 4, LoadTimeout: maxTTL, LookupTimeout: maxTTL / 2, WaitTimeout: 30 * time.Second,
			ErrorHold: -1, OnUnavailable: flightlock.FailClosed,
		})
	if err != nil {
		panic(err) // the options are ours
	}
	return f
}

func (c *client) lookup(ctx context.Context, key string) (int, flightlock.Freshness, error) {
	var value int
	if err := c.onLoop(ctx, "lookup "+key, c.w.plan.latency, func() { value = c.w.cache.values[key] }); err != nil {
		return 0, flightlock.Miss, err
	}
	if value == 0 {
		return 0, flightlock.Miss, nil
	}
	return value, flightlock.Fresh, nil
}

// load is the origin, which fails now and then.
func (c *client) load(ctx context.Context, key string) (int, error) {
	in := &c.w.cache
	if err := c.onLoop(ctx, "load "+key, 20*time.Microsecond, func() { in.begin(key) }); err != nil {
		return 0, err
	}
	var value int
	var failed error
	err := c.onLoop(ctx, "loaded "+key, c.w.plan.chaos/8, func() {
		in.loads++
		value = in.loads
		if c.w.app.IntN(4) == 0 && !c.w.healed {
			failed = errOrigin
		}
		c.w.logf("%v loads %q: %d, %v", c, key, value, failed)
	})
	if err != nil {
		return 0, err
	}
	return value, failed
}

// begin notes that a load has begun, for the time that it can take at most.
func (in *cache) begin(key string) {
	if in.loading == nil {
		in.loading = map[string]int{}
	}
	in.loading[key]++
	in.w.after(in.w.plan.chaos/8, func() { in.loading[key]-- })
}

// store holds the lock as a worker does: nobody else may have it until it has stored or l is lost. What has failed
// elsewhere was loaded without a lock, and is not stored.
func (c *client) store(ctx context.Context, key string, value int, l *flightlock.Lock) error {
	if l == nil {
		return nil
	}
	in := &c.w.cache
	var h *hold
	err := c.onLoop(ctx, "begins to store "+key, time.Microsecond, func() {
		if l.Err() == nil && ctx.Err() == nil {
			h = c.w.checker.granted(&worker{c: c, id: -1, op: operation{key: key}}, l)
		}
	})
	if err != nil || h == nil {
		return errors.Join(err, l.Err())
	}
	return c.onLoop(ctx, "stores "+key, c.w.plan.latency, func() {
		c.w.checker.letsGo(h)
		if h.lost {
			return
		}
		if in.values == nil {
			in.values = map[string]int{}
		}
		in.values[key] = value
		c.w.after(between(c.w.app, time.Millisecond, c.w.plan.chaos/8), func() { delete(in.values, key) })
	})
}

// onLoop has the loop do something for the process, within that time if it does not pause, and waits for it. When
// ctx ends it returns its error, and what it was to do may still come.
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
