package flightlock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// FuzzKey tries any bytes as a key, with any bytes as a prefix: it is refused before any traffic,
// or it can be locked by one client at a time and is returned by every method unchanged.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"k", "", "{", "{}", "{a}b", "\x00", "\xff\xfe", "lock:k", "flightlock:{x}",
		"a b\r\nDEL k", strings.Repeat("x", 4097)} {
		f.Add("", key)
		f.Add(flightlock.NoPrefix, key)
		f.Add("flightlock:", key)
	}
	m, err := redistest.LaunchMemNode("10.0.0.1:6379")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(m.Close)
	conn := redis.NewClient(m.Options())
	f.Cleanup(func() { _ = conn.Close() })
	f.Fuzz(func(t *testing.T, prefix, key string) {
		ctx := context.Background()
		opts := flightlock.Options{Nodes: []redis.UniversalClient{conn}, KeyPrefix: prefix, NodeTimeout: 10 * time.Second,
			DisableNotify: true}
		a, err := flightlock.New(opts)
		if err != nil {
			wantInvalid(t, err, "KeyPrefix")
			return
		}
		defer a.Close(ctx)
		b, err := flightlock.New(opts)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close(ctx)
		l, err := a.TryLock(ctx, key, time.Minute)
		if err != nil {
			wantInvalid(t, err, "key")
			return
		}
		if l.Key() != key || l.Fence() == 0 || l.Err() != nil {
			t.Errorf("key %q, token %d, err %v", l.Key(), l.Fence(), l.Err())
		}
		if _, err := b.TryLock(ctx, key, time.Minute); !errors.Is(err, flightlock.ErrNotAcquired) {
			t.Errorf("a second client gets %v", err)
		}
		if err := errors.Join(l.Refresh(ctx), l.Release(ctx)); err != nil {
			t.Error(err)
		}
		next, err := b.TryLock(ctx, key, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if next.Fence() <= l.Fence() {
			t.Errorf("token %d after %d", next.Fence(), l.Fence())
		}
		if err := next.Release(ctx); err != nil {
			t.Error(err)
		}
	})
}

// FuzzOptions tries any values of the options, and of the arguments of a lock and its refreshes:
// they are refused by name, or they work, and the validity is above zero and below the ttl.
func FuzzOptions(f *testing.F) {
	ms := int64(time.Millisecond)
	f.Add(int64(0), int64(0), 0.0, int64(0), 0, 1000*ms, int64(0), int64(0), 0)
	f.Add(ms, 10*ms, 0.49, -ms, 1, 10*ms, ms, ms, 1)
	f.Add(-ms, 10*ms, -0.1, ms, -1, 11*ms, -ms, -ms, -1)
	f.Add(int64(math.MaxInt64), int64(math.MaxInt64), 0.1, int64(math.MaxInt64), math.MaxInt, int64(math.MaxInt64),
		int64(math.MaxInt64), int64(math.MaxInt64), math.MaxInt)
	f.Add(int64(math.MinInt64), int64(math.MaxInt64), math.NaN(), int64(math.MinInt64), math.MinInt, int64(math.MinInt64),
		int64(math.MinInt64), int64(math.MinInt64), math.MinInt)
	f.Add(int64(0), int64(math.MaxInt64), math.SmallestNonzeroFloat64, int64(0), 0, int64(math.MaxInt64), 5*ms, int64(0),
		3)
	m, err := redistest.LaunchMemNode("10.0.0.1:6379")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(m.Close)
	conn := redis.NewClient(m.Options())
	f.Cleanup(func() { _ = conn.Close() })
	f.Fuzz(func(
		t *testing.T, nodeTimeout, maxTTL int64, drift float64, slice int64, waiters int,
		ttl, interval, retry int64, retries int,
	) {
		ctx := context.Background()
		c, err := flightlock.New(flightlock.Options{
			Nodes:       []redis.UniversalClient{conn},
			NodeTimeout: time.Duration(nodeTimeout), MaxTTL: time.Duration(maxTTL), DriftFactor: drift,
			HandoffSlice: time.Duration(slice), MaxWaiters: waiters, DisableNotify: true,
		})
		if err != nil {
			wantInvalid(t, err, "Options.")
			return
		}
		defer c.Close(ctx)
		strategy := flightlock.LimitedRetry(time.Duration(retry), min(retries, 2))
		asked := time.Now()
		l, err := c.SingleFlightLock(ctx, "k", time.Duration(ttl), strategy)
		if err != nil {
			if !errors.Is(err, flightlock.ErrInvalid) && !errors.Is(err, flightlock.ErrUnavailable) &&
				!errors.Is(err, flightlock.ErrNotAcquired) {
				t.Errorf("got %v", err)
			}
			return
		}
		if valid := l.Until().Sub(asked); valid <= 0 || valid-time.Since(asked) > time.Duration(ttl) {
			t.Errorf("valid for %v of a ttl of %v", valid, time.Duration(ttl))
		}
		err = l.AutoRefresh(flightlock.RefreshPolicy{Interval: time.Duration(interval), Timeout: time.Duration(retry),
			MaxRefreshes: retries, MaxHold: time.Duration(slice)})
		if err != nil && !errors.Is(err, flightlock.ErrNotHeld) {
			wantInvalid(t, err, "RefreshPolicy.")
		}
		if err := l.Release(ctx); err != nil && l.Err() == nil {
			t.Errorf("held, but Release says %v", err)
		}
		m.Mini.Del("lock:k")
	})
}
