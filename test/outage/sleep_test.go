package outage

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// A sleep of the machine that outlasts a lock ends its Context, the function that runs under it,
// and the wait of those behind it, soon after the machine resumes: with a refresh still to come,
// and without a call of Err. The docs promise a second, and a busy machine gets more; without a
// check of the wall clock it would take what was left of the ttl.
func TestASleepOfTheMachineIsNoticedByAll(t *testing.T) {
	const ttl, patience = time.Minute, 20 * time.Second
	var nodes []redis.UniversalClient
	for range 3 {
		nodes = append(nodes, redistest.MiniClient(t, redistest.StartMini(t)))
	}
	c := lockkit.New(t, flightlock.Options{DisableQuarantine: true}, nodes...)
	defer testkit.Clocks.Reset()
	l := lockkit.Lock(t, c, "k", ttl)
	ctx := l.Context(t.Context())
	if err := l.AutoRefresh(t.Context(), flightlock.RefreshPolicy{Interval: ttl / 2}); err != nil {
		t.Fatal(err)
	}
	next, done, began := make(chan error, 1), make(chan error, 1), make(chan struct{})
	go func() {
		next <- c.Do(t.Context(), "k", ttl, nil, func(context.Context, *flightlock.Lock) error { return nil })
	}()
	go func() {
		done <- c.Do(t.Context(), "other", ttl, nil, func(ctx context.Context, l *flightlock.Lock) error {
			close(began)
			<-ctx.Done()
			return context.Cause(ctx)
		})
	}()
	<-began
	redistest.Eventually(t, patience, "somebody waits", func() bool { return c.Stats().Waiters == 1 })
	testkit.Clocks.Sleep(ttl)
	slept := time.Now()
	late := time.After(patience)
	select {
	case <-ctx.Done():
		if why := context.Cause(ctx); !errors.Is(why, flightlock.ErrLockLost) ||
			!errors.Is(l.Err(), flightlock.ErrLockLost) {
			t.Errorf("the cause is %v; Err: %v", why, l.Err())
		}
	case <-late:
		t.Fatal("Lock.Context has not ended")
	}
	for what, told := range map[string]chan error{"the waiter": next, "the function": done} {
		select {
		case err := <-told:
			if what == "the waiter" && err != nil || what == "the function" &&
				!errors.Is(err, flightlock.ErrLockLost) {
				t.Errorf("%s: %v", what, err)
			}
		case <-late:
			t.Fatalf("%s has not ended", what)
		}
	}
	t.Logf("noticed after %v", time.Since(slept))
	if n := c.Stats().Refreshes; n != 0 {
		t.Errorf("%d refreshes", n)
	}
}

// All that Err says of a loss is the cause of the lock's ctx, also what it says before a timer has noticed:
// so Do, whose function returns it, says it once.
func TestWhatErrSaysOfASleepIsTheCause(t *testing.T) {
	once := flightlock.RefreshPolicy{Interval: 5 * time.Millisecond, MaxRefreshes: 1}
	c := lockkit.New(t, flightlock.Options{Refresh: once}, redistest.MiniClient(t, redistest.StartMini(t)))
	defer testkit.Clocks.Reset()
	// Nothing shows that the policy has heard of the answer. If it had not, there is another lock, and more
	// time.
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		before := c.Stats().Refreshes
		err := c.Do(t.Context(), "k", time.Minute, nil, func(ctx context.Context, l *flightlock.Lock) error {
			redistest.Eventually(t, 20*time.Second, "it is refreshed",
				func() bool { return c.Stats().Refreshes > before })
			time.Sleep(pause) // for the policy to hear of the answer
			testkit.Clocks.Sleep(time.Minute)
			err := l.Err()
			<-ctx.Done()
			if !errors.Is(err, context.Cause(ctx)) {
				t.Errorf("Err: %v, which is not the cause: %v", err, context.Cause(ctx))
			}
			return err
		})
		unheard := err != nil && strings.Count(err.Error(), "the last refresh failed") == 1
		if unheard && pause < 10*time.Second {
			continue
		}
		if err == nil || strings.Count(err.Error(), "MaxRefreshes") != 1 {
			t.Errorf("Do: %v", err)
		}
		return
	}
}

// An error of a load is not served any more after a sleep of the machine that outlasts
// fetch.Options.ErrorHold: by then HeldError.Until has passed.
func TestASleepEndsAHeldError(t *testing.T) {
	c := lockkit.New(t, flightlock.Options{}, redistest.MiniClient(t, redistest.StartMini(t)))
	down := true
	f, err := fetch.New(c, fetch.Plain(
		func(context.Context, string) (int, bool, error) { return 0, false, nil },
		func(context.Context, string, int) error { return nil },
	), fetch.Each(func(context.Context, string) (int, error) {
		if down {
			return 0, errors.New("the origin is down")
		}
		return 1, nil
	}), fetch.Options{ErrorHold: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close(t.Context()) }()
	defer testkit.Clocks.Reset()
	if _, err := f.Get(t.Context(), "k"); err == nil {
		t.Fatal("the load did not fail")
	}
	down = false
	var held *fetch.HeldError
	if _, err := f.Get(t.Context(), "k"); !errors.As(err, &held) {
		t.Fatalf("the error is not held: %v", err)
	}
	testkit.Clocks.Sleep(time.Minute)
	if v, err := f.Get(t.Context(), "k"); v != 1 || err != nil {
		t.Errorf("after the sleep: %d, %v", v, err)
	}
}
