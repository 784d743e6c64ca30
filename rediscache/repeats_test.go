package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/rediscache"
	"github.com/redis/go-redis/v9"
)

// Of a server that is known to be down, nobody asks for one batch of keys after the other, neither the caller nor
// what repeats its invalidation: the keys are reported, and repeated until the server is back. What is not known yet
// takes two failures and a probe.
func TestManyKeysOfAServerThatIsDown(t *testing.T) {
	t.Parallel()
	for _, known := range []bool{false, true} {
		t.Run(fmt.Sprintf("known=%v", known), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
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
				began := time.Now()
				err := c.Invalidate(t.Context(), keys...)
				if took := time.Since(began); took > most {
					t.Errorf("it took %v, more than %v", took, most)
				}
				text := "invalidate \"k0\" and 2999 more: it is invalidated in the background: "
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("it ended with %v", err)
				}
				if n := sent.Load(); n > 2 {
					t.Errorf("%d batches were sent", n)
				}
				if n := c.Stats().Repeating; n != 3000 {
					t.Errorf("%d invalidations are repeated", n)
				}
				began = time.Now()
				if err := c.Set(t.Context(), "set", "v"); err == nil || time.Since(began) > 0 {
					t.Errorf("Set returned %v after %v", err, time.Since(began))
				}
				before := sent.Load()
				time.Sleep(10 * time.Second) // the bubble's time
				if n := sent.Load() - before; n > 0 {
					t.Errorf("%d batches were sent in 10 s to a server that is down", n)
				}
				w.values.Stall(false)
				time.Sleep(5 * time.Second)
				if n := c.Stats().Repeating; n != 0 {
					t.Errorf("%d invalidations are still repeated", n)
				}
				w.want(keys[2999], keys[2999]+"@1", c)
			})
		})
	}
}

// When a failed Invalidate has been repeated, its own process serves no old value.
func TestRepeatedInvalidationForgets(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.origin.takes = 0
		c := w.cache(options{Local: time.Second})
		w.want("a", "a@0", c)
		w.origin.version.Add(1)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, "a"); err == nil {
			t.Fatal("want an error")
		}
		w.want("a", "a@0", c) // allowed: it has failed
		for c.Stats().Repeating > 0 {
			time.Sleep(time.Millisecond)
		}
		w.want("a", "a@1", c)
	})
}

// A Set whose Codec panics leaves the old value for moments only: the origin has changed.
func TestASetThatPanics(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		codec := rediscache.Text()
		codec.Encode = func(v string) ([]byte, error) {
			if v == "bad" {
				panic("a bad value")
			}
			return []byte(v), nil
		}
		c := w.cache(options{Codec: codec})
		w.want("k", "k@0", c)
		w.origin.version.Add(1)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic is not the caller's")
				}
			}()
			_ = c.Set(t.Context(), "k", "bad")
		}()
		time.Sleep(time.Second) // until it is repeated
		w.want("k", "k@1", c)
	})
}

// Close waits for invalidations that are being repeated, as long as its own ctx lasts, and reports those that are left.
// It ends when another one has given up.
func TestCloseWaitsForInvalidations(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a, b := w.cache(options{}), w.cache(options{})
		w.values.Down(true)
		for _, c := range []*rediscache.Cache[string]{a, b} {
			if err := c.Invalidate(t.Context(), "k"); err == nil {
				t.Error("no error")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		done := make(chan error)
		go func() { done <- a.Close(t.Context()) }()
		for _, err := range []error{a.Close(ctx), <-done} {
			if err == nil || !strings.Contains(err.Error(), "not invalidated: 1: ") {
				t.Error(err)
			}
		}
		go func() { done <- b.Close(t.Context()) }()
		time.Sleep(time.Second)
		w.values.Down(false)
		if err := <-done; err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Second) // go-redis dials once per second until it is answered
	})
}

// An invalidation that fails while an earlier one of the key is being repeated is repeated, too: the server may have
// executed that one before the origin was changed again.
func TestAnInvalidationThatFailsDuringItsRepeat(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Invalidate(ctx, "k"); err == nil {
			t.Error("no error")
		}
		w.values.SetDelay(100 * time.Millisecond)
		for !w.values.Mini.Exists("k") {
			time.Sleep(10 * time.Millisecond) // the bubble's time
		}
		if err := c.Invalidate(ctx, "k"); err == nil { // the tombstone is there, and its reply is not
			t.Error("no error")
		}
		w.values.Mini.Del("k")
		time.Sleep(101 * time.Millisecond) // the bubble's time
		if n := c.Stats().Repeating; n != 1 {
			t.Errorf("%d are being repeated", n)
		}
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
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-done; strings.Contains(err.Error(), "invalidated in the background") {
			t.Errorf("%v; repeating %d", err, c.Stats().Repeating)
		}
		w.values.Stall(false)
	})
}

// So it is where too many are being repeated. Close waits for none of them if its ctx has ended.
func TestAnInvalidateThatIsDroppedSaysSo(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		c := w.cache(options{})
		w.values.Stall(true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = c.Invalidate(ctx, someKeys(10_000)...)
		if err := c.Invalidate(ctx, "k0"); !strings.Contains(err.Error(), "invalidated in the background") {
			t.Errorf("%v, though it is being repeated already", err)
		}
		err := c.Invalidate(ctx, "another")
		if c.Stats().Dropped != 1 || strings.Contains(err.Error(), "invalidated in the background") {
			t.Errorf("%v; %+v", err, c.Stats())
		}
		time.Sleep(time.Second) // the repeats have begun
		if err := c.Close(ctx); !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "\n") ||
			!strings.Contains(err.Error(), "not invalidated: 10000: ") {
			t.Error(err)
		}
		w.values.Stall(false)
	})
}
