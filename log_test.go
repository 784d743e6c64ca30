package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A log that hangs delays nothing: the Context of the lost lock that it was about to log ends in
// time, the other locks of that node are refreshed, and a suspended node comes back.
func TestALogThatHangsHoldsNothingUp(t *testing.T) {
	for _, n := range []int{1, 3} {
		testkit.Bubble(t, n, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
			end := make(chan struct{})
			log := testkit.SlowLog(func() { <-end })
			c := lockkit.New(t, flightlock.Options{Logger: log, DisableQuarantine: true}, clients...)
			defer close(end)
			l := lockkit.Lock(t, c, "runs out", time.Second)
			until, ctx := l.Until(), l.Context(t.Context())
			time.Sleep(1500 * time.Millisecond)
			if ctx.Err() == nil || !errors.Is(l.Err(), flightlock.ErrLockLost) {
				t.Errorf("%v after Until its Context is %v, Err %v", time.Since(until), ctx.Err(), l.Err())
			}

			time.Sleep(10 * time.Second) // so that the next loss is logged
			var kept []*flightlock.Lock
			for i := range 20 {
				l := lockkit.Lock(t, c, fmt.Sprint("kept", i), time.Second)
				testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
				kept = append(kept, l)
			}
			taken := lockkit.Lock(t, c, "taken", time.Minute)
			ctx = taken.Context(t.Context())
			for _, n := range nodes {
				n.Mini.Del("lock:taken")
			}
			go taken.Refresh(t.Context())
			time.Sleep(5 * time.Second)
			if ctx.Err() == nil {
				t.Error("a refresh found that the lock was gone, and its Context has not ended")
			}
			for _, l := range kept {
				testkit.Must(t, l.Err())
				lockkit.Release(t, l)
			}

			for _, n := range nodes {
				n.Down(true)
			}
			_, err := c.SingleFlightLock(t.Context(), "k", time.Second, flightlock.LimitedRetry(10*time.Millisecond, 10))
			if !errors.Is(err, flightlock.ErrUnavailable) {
				t.Error(err)
			}
			for _, n := range nodes {
				n.Down(false)
			}
			time.Sleep(10 * time.Second)
			if s := c.Stats(); s.Suspended != 0 {
				t.Errorf("%d nodes are suspended still", s.Suspended)
			}
			lockkit.Release(t, lockkit.Lock(t, c, "k", time.Second))
		})
	}
}

// A lost lock is logged with its key and reason; of many that are lost at once the others are
// logged as a number, and so are those that Close ends: their holders did not release them in time. Locks
// that are released are not logged.
func TestLostLocksAreLogged(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), DisableQuarantine: true},
			clients...)
		lines := func() int { return strings.Count(log.String(), "level=WARN") }

		lockkit.Release(t, lockkit.Lock(t, c, "released", time.Second))
		lockkit.Lock(t, c, "slow", time.Second).Context(t.Context()) // and never released
		time.Sleep(5 * time.Second)
		if text := log.String(); lines() != 1 || !strings.Contains(text, `msg="flightlock: lock lost" key=slow`) ||
			!strings.Contains(text, "validity") {
			t.Errorf("one lock that ran out:\n%s", text)
		}

		for i := range 100 {
			lockkit.Lock(t, c, fmt.Sprint("k", i), time.Second).Context(t.Context())
		}
		time.Sleep(5 * time.Second)
		if text := log.String(); lines() != 3 || !strings.Contains(text, "count=99") {
			t.Errorf("100 locks that ran out together:\n%s", text)
		}

		l := lockkit.Lock(t, c, "taken", 10*time.Second)
		for _, n := range nodes {
			n.Mini.Set("lock:taken", "somebody else")
		}
		if err := l.Refresh(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Error(err)
		}
		synctest.Wait() // for the goroutine that writes
		if text := log.String(); lines() != 4 || !strings.Contains(text, "key=taken") ||
			!strings.Contains(text, "somebody else") {
			t.Errorf("a lock that was taken:\n%s", text)
		}
		time.Sleep(2 * time.Second)
		lockkit.Lock(t, c, "open", 10*time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = c.Close(ctx)
		synctest.Wait()
		if text := log.String(); lines() != 5 ||
			!strings.Contains(text, `msg="flightlock: lock lost" key=open err="flightlock: the Client is closed"`) {
			t.Errorf("ended by Close:\n%s", text)
		}
	})
}

// hang is what a log does that hangs.
func hang() { time.Sleep(750 * time.Millisecond) }

// A lock expires, and the log hangs: the others are refreshed all the same.
func TestALogThatHangsHoldsNoRefreshUp(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, _ []*redistest.MemNode, clients []redis.UniversalClient) {
		c := lockkit.New(t, flightlock.Options{Logger: testkit.SlowLog(hang)}, clients...)
		began := time.Now()
		var all []*flightlock.Lock
		for i := range 400 {
			l := lockkit.Lock(t, c, fmt.Sprint("k", i), time.Second)
			testkit.Must(t, l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{}))
			all = append(all, l)
		}
		for i := range 10 { // they end while the log hangs
			lockkit.Lock(t, c, fmt.Sprint("forgotten", i), time.Duration(500+10*i)*time.Millisecond).Context(t.Context())
		}
		time.Sleep(1200*time.Millisecond - time.Since(began))
		for _, l := range all {
			if l.Until().Sub(began) < 1500*time.Millisecond {
				t.Errorf("%s has not been refreshed since the first time", l.Key())
			}
			lockkit.Release(t, l)
		}
		time.Sleep(3 * time.Second) // until everything has been logged
	})
}

// Of a lock that is shorter than its first refresh, its release is the first to find that it was lost. That is a
// loss like any other: Release and Do report it, and so it is logged and counted.
func TestALossThatTheReleaseFindsIsCountedAndLogged(t *testing.T) {
	testkit.Bubble(t, 3, func(t *testing.T, nodes []*redistest.MemNode, clients []redis.UniversalClient) {
		var log testkit.LogBuffer
		var seen recorder
		c := lockkit.New(t, flightlock.Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), DisableQuarantine: true,
			Observers: []*flightlock.Observer{seen.observer()}}, clients...)
		losses := func(want int, key string) {
			t.Helper()
			synctest.Wait()
			if s := c.Stats(); s.Lost != uint64(want) || s.Expired != 0 || s.Held != 0 ||
				seen.count("lost taken") != want || seen.count("lost ") != want || seen.count("held taken") != want {
				t.Errorf("%+v, %q, want %d losses", s, seen.all(), want)
			}
			if text := log.String(); strings.Count(text, "level=WARN") != want || !strings.Contains(text, "key="+key) {
				t.Errorf("the log: %s", text)
			}
			time.Sleep(2 * time.Second) // the next loss has a line of its own
		}
		l := lockkit.Lock(t, c, "deleted", 10*time.Second)
		for _, n := range nodes {
			n.Mini.Del("lock:deleted")
		}
		if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrNotHeld) {
			t.Error(err)
		}
		losses(1, "deleted")
		err := c.Do(t.Context(), "taken", 10*time.Second, nil, func(context.Context, *flightlock.Lock) error {
			for _, n := range nodes {
				n.Mini.Set("lock:taken", "somebody else")
			}
			return nil
		})
		if !errors.Is(err, flightlock.ErrLockLost) {
			t.Error(err)
		}
		losses(2, "taken")
		l = lockkit.Lock(t, c, "down", 10*time.Second)
		synctest.Wait() // for the last node, too
		for _, n := range nodes[1:] {
			n.Down(true)
		}
		if err := l.Release(t.Context()); !errors.Is(err, flightlock.ErrUnavailable) { // which is no loss
			t.Error(err)
		}
		if s := c.Stats(); s.Lost != 2 {
			t.Errorf("%+v", s)
		}
	})
}
