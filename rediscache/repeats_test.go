package rediscache_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// Of a server that is known to be down, nobody asks for one batch of keys after the other, neither the caller
// nor what repeats its invalidation: the keys are reported, and repeated until the server is back. What is
// not known yet takes two failures and a probe.
func TestManyKeysOfAServerThatIsDown(t *testing.T) {
	t.Parallel()
	bubbles(t, []bool{false, true}, func(t *testing.T, w *world, known bool) {
		w.origin.takes = 0
		var sent atomic.Int64 // pipelines of invalidations
		w.rdb.AddHook(before(func(cmds []redis.Cmder) {
			if len(cmds) > 10 {
				sent.Add(1)
			}
		}))
		c := w.cache(options{Fresh: time.Hour})
		keys := someKeys(3000)
		w.want(keys[2999], keys[2999]+"@0", c)
		w.values.Stall(true)
		most := time.Second + 260*time.Millisecond // a write, the probe that ends the next one, and its grace
		if known {
			for c.Stats().Down == 0 {
				_, _ = c.Get(t.Context(), "k")
			}
			most = 0
		}
		w.origin.version.Add(1)
		w.within(most, func() {
			err := c.Invalidate(t.Context(), keys...)
			wantText(t, err, "invalidate \"k0\" and 2999 more: it is invalidated in the background: ")
		})
		if n := sent.Load(); n > 2 {
			t.Errorf("%d batches were sent", n)
		}
		wantRepeating(t, 3000, c)
		w.within(0, func() { wantText(t, c.Set(t.Context(), "set", "v"), "probed") })
		before := sent.Load()
		time.Sleep(10 * time.Second) // the bubble's time
		if n := sent.Load() - before; n > 0 {
			t.Errorf("%d batches were sent in 10 s to a server that is down", n)
		}
		w.values.Stall(false)
		time.Sleep(5 * time.Second)
		wantRepeating(t, 0, c)
		w.want(keys[2999], keys[2999]+"@1", c)
	})
}

// failingly begins an invalidation that fails, and is repeated in 100 ms.
func failingly(t *testing.T, c *rediscache.Cache[string], keys ...string) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := c.Invalidate(ctx, keys...)
	if err == nil {
		t.Error("no error")
	}
	return err
}

// When a failed Invalidate has been repeated, its own process serves no old value. So it is after a Set whose
// Codec panics: the origin has changed.
func TestRepeatedInvalidationForgets(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(options{Local: time.Second, Codec: textCodec(func(v string) error {
			if v == "bad" {
				panic("a bad value")
			}
			return nil
		})})
		w.want("a", "a@0", c)
		w.origin.version.Add(1)
		_ = failingly(t, c, "a")
		w.want("a", "a@0", c) // allowed: it has failed
		time.Sleep(200 * time.Millisecond)
		w.want("a", "a@1", c)
		w.origin.version.Add(1)
		wantText(t, c.Set(t.Context(), "a", "bad"), "a bad value")
		time.Sleep(200 * time.Millisecond)
		w.want("a", "a@2", c)
	})
}

// Close waits for invalidations that are being repeated, as long as its own ctx lasts, and reports those that
// are left. It ends when another one has given up.
func TestCloseWaitsForInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a, b := w.cache(options{}), w.cache(options{})
		w.values.Down(true)
		for _, c := range []*rediscache.Cache[string]{a, b} {
			wantText(t, c.Invalidate(t.Context(), "k"), "background")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		done := make(chan error)
		go func() { done <- a.Close(t.Context()) }()
		wantText(t, a.Close(ctx), "not invalidated: 1: ")
		wantText(t, <-done, "not invalidated: 1: ")
		go func() { done <- b.Close(t.Context()) }()
		time.Sleep(time.Second)
		w.values.Down(false)
		testkit.Must(t, <-done)
		time.Sleep(2 * time.Second) // go-redis dials once per second until it is answered
	})
}

// An invalidation that fails while an earlier one of the key is being repeated is repeated, too: the server
// may have executed that one before the origin was changed again.
func TestAnInvalidationThatFailsDuringItsRepeat(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		_ = failingly(t, c, "k")
		w.values.SetDelay(100 * time.Millisecond)
		for !w.values.Mini.Exists("k") {
			time.Sleep(10 * time.Millisecond) // the bubble's time
		}
		_ = failingly(t, c, "k") // the tombstone is there, and its reply is not
		w.values.Mini.Del("k")
		time.Sleep(101 * time.Millisecond) // the bubble's time
		wantRepeating(t, 1, c)
		time.Sleep(5 * time.Second) // the bubble's time
		if !w.values.Mini.Exists("k") || c.Stats().Repeating != 0 {
			t.Error("it was not repeated")
		}
	})
}

// An Invalidate that fails while the Cache is closed is not repeated, and does not say that it is.
func TestAnInvalidateThatMeetsCloseSaysWhatFollows(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		w.values.Stall(true)
		done := make(chan error)
		go func() { done <- c.Invalidate(t.Context(), "k") }()
		time.Sleep(100 * time.Millisecond)
		testkit.Must(t, c.Close(t.Context()))
		wantText(t, <-done, "not all are invalidated")
		w.values.Stall(false)
	})
}

// So it is where too many are being repeated. Close waits for none of them if its ctx has ended.
func TestAnInvalidateThatIsDroppedSaysSo(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		w.values.Stall(true)
		_ = failingly(t, c, someKeys(10_000)...)
		wantText(t, failingly(t, c, "k0"), "invalidated in the background") // as before
		wantText(t, failingly(t, c, "another"), "not all are invalidated")
		if n := c.Stats().Dropped; n != 1 {
			t.Errorf("%d are dropped", n)
		}
		time.Sleep(time.Second) // the repeats have begun
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := c.Close(ctx)
		wantText(t, err, "not invalidated: 10000: ")
		if !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "\n") {
			t.Error(err)
		}
		w.values.Stall(false)
	})
}
