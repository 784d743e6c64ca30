package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
)

// One attempt, and no waiting.
func ExampleNoRetry() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, nil)
	defer lock.Release(ctx)

	_, err := c.SingleFlightLock(ctx, "k", time.Minute, flightlock.NoRetry())
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}

// Five retries, 10ms apart. A caller in the queue of its process waits for just as long.
func ExampleLimitedRetry() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, nil)
	defer lock.Release(ctx)

	began := time.Now()
	_, err := c.SingleFlightLock(ctx, "k", time.Minute, flightlock.LimitedRetry(10*time.Millisecond, 5))
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired), time.Since(began) >= 50*time.Millisecond)
	// Output: true true
}

// Delays grow with each failure: random, below 1ms, 2ms, 4ms, and so on.
func ExampleExponentialBackoff() {
	s := flightlock.ExponentialBackoff(time.Millisecond, 8*time.Millisecond)
	for attempt, bound := range []time.Duration{1, 2, 4, 8, 8} {
		delay, again := s.Next(attempt + 1)
		fmt.Println(delay <= bound*time.Millisecond, again)
	}
	// Output:
	// true true
	// true true
	// true true
	// true true
	// true true
}

func ExampleLimit() {
	s := flightlock.Limit(flightlock.ExponentialBackoff(time.Millisecond, time.Second), 2)
	for attempt := 1; attempt <= 3; attempt++ {
		_, again := s.Next(attempt)
		fmt.Println(attempt, again)
	}
	// Output:
	// 1 true
	// 2 true
	// 3 false
}

// It waits while others hold the lock, and fails at once when Redis cannot be reached.
func ExampleFailFast() {
	c, err := flightlock.Open(flightlock.Options{}, "redis://127.0.0.1:1") // no server there
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	defer c.Close(ctx)

	_, err = c.SingleFlightLock(ctx, "k", time.Minute, flightlock.FailFast(nil))
	fmt.Println(errors.Is(err, flightlock.ErrUnavailable))
	// Output: true
}

// It waits for the lock for half a second, and does not bound the work as a deadline of ctx would.
func ExampleWithin() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, _ := c.SingleFlightLock(ctx, "report:7", time.Minute, nil)
	defer lock.Release(ctx)

	err := c.Do(ctx, "report:7", time.Minute, flightlock.Within(nil, time.Second/2),
		func(context.Context, *flightlock.Lock) error { return nil })
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}

// office waits longer each time, and finally gives up.
type office struct{ closes int }

func (o office) Next(attempt int) (time.Duration, bool) {
	return time.Duration(attempt) * time.Millisecond, attempt <= o.closes
}

// A custom strategy is an immutable value.
func ExampleRetryStrategy() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	var retry flightlock.RetryStrategy = office{closes: 3}
	lock, _ := c.SingleFlightLock(ctx, "k", time.Minute, retry)
	defer lock.Release(ctx)

	_, err := c.SingleFlightLock(ctx, "k", time.Minute, retry)
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}
